"""Retraining without examples: the true leave-out effects, a check of estimated effects, and the
breakdown of a removal.

`removal.rerun` retrains a run of this package; `foreign_loop.again` retrains a followed loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.plan import Caveats
from ntkexp.effects.sweep import Effects, MeanName, kind_of
from ntkexp.kernel import plain_kernels
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import RETRAINED, LeaveOut, LeftOut, Removal
from ntkexp.removal.between import Breakdown, TrainingPair, joined
from ntkexp.report.leave_out import agreement_of, remarks_on_trainings
from ntkexp.stream import stream


class AbstractRetraining(ABC):
    """A training that can be repeated with other weights of its examples, with the same start and
    order.

    Its results are the outputs at some points.
    """

    @property
    @abstractmethod
    def everyone(self) -> Float[Tensor, " example"]:
        """The weights of the examples in the original training: ones."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed of random groups."""

    @property
    @abstractmethod
    def whole(self) -> Float[Tensor, "point out"]:
        """The outputs after training with all examples."""

    @abstractmethod
    def ends(
        self, weights: Float[Tensor, "training example"]
    ) -> Iterator[Float[Tensor, " weight"]]:
        """Yield the network's weights after trainings with these weights of the examples, as
        vectors.
        """

    @abstractmethod
    def at(self, end: Float[Tensor, " weight"]) -> Float[Tensor, "point out"]:
        """Return the outputs of a trained network."""

    def outputs(
        self, weights: Float[Tensor, "training example"]
    ) -> Float[Tensor, "training point out"]:
        """Return the outputs after trainings with these weights of the examples."""
        return torch.stack([self.at(end) for end in self.ends(weights)])

    @abstractmethod
    def doubts(
        self, repeated: Float[Tensor, "point out"], changes: Float[Tensor, "group point out"]
    ) -> list[str]:
        """Return reasons to doubt these changes, given the outputs of a repeated training; or
        raise.
        """


def changes(
    training: AbstractRetraining, removals: Sequence[Sequence[int]]
) -> tuple[Float[Tensor, "removal point out"], list[str]]:
    """Return the changes of the outputs from leaving out each group, with reasons to doubt them."""
    weights = training.everyone.repeat(1 + len(removals), 1)
    for weight, group in zip(weights[1:], removals, strict=True):
        weight[list(group)] = 0.0
    outputs = training.outputs(weights)
    differences = outputs[1:] - outputs[0]
    return differences, training.doubts(outputs[0], differences)


# --- Linearity: does half a removal cause half its change? Trainings with a random twentieth of the
# examples at
# weight ½, and at weight 0, answer this.
#
#     agreement         cos(F(½) − F(1), F(0) − F(½))        F(w): the outputs
#     metasmoothness    Σ|Δ₁| sign Δ₁ sign Δ₂ / Σ|Δ₁|        over the weights, with
#                       Δ₁ = θ(½) − θ(1),  Δ₂ = θ(0) − θ(½)
#
# Both are near 1 if outputs, or weights, change smoothly with the weights of examples, whatever
# their derivative is. Metasmoothness: L. Engstrom et al. (2025), arXiv:2503.13751, definition 2.


EXAMPLES_PER_REMOVED = 20


def halving(training: AbstractRetraining) -> Float[Tensor, "two example"]:
    """Return the weights of the examples for both trainings, with a group drawn from the seed."""
    count = len(training.everyone)
    removed = max(1, count // EXAMPLES_PER_REMOVED)
    chosen = torch.randperm(count, generator=stream("half", training.seed))[:removed]
    weights = training.everyone.repeat(2, 1)
    weights[0, chosen] = 0.5
    weights[1, chosen] = 0.0
    return weights


def agreement(training: AbstractRetraining) -> float:
    """Return the cosine between the changes of the outputs by either half of a removal."""
    half, none = training.outputs(halving(training))
    first = (half - training.whole).flatten()
    second = (none - half).flatten()
    return float(first @ second / (first.norm() * second.norm()))


def metasmoothness(training: AbstractRetraining) -> float:
    """Return how much of the weights' change continues in the second half; NaN if the first half
    changed none.
    """
    (full,) = training.ends(training.everyone[None])
    half, none = training.ends(halving(training))
    first = half - full
    second = none - half
    return float((first * second.sign()).sum() / first.abs().sum())


# --- The leave-out check: predictions from effects, compared with retraining.
#
# The removals are the most influential examples (1, 10, 5 %), and random groups of the same sizes,
# some twice. The predicted change is the sum of the effects of the group. If trainings cost less
# than effects, each example is also left out alone, so that nothing needs a prediction.


def sizes(examples: int) -> list[int]:
    """Return the sizes of removals: at most a quarter of the examples.

    >>> sizes(1000), sizes(40), sizes(2)
    ([1, 10, 50], [1, 2, 10], [])
    """
    return [size for size in sorted({1, 10, examples // 20}) if 0 < size <= examples / 4]


def groups(influence: Float[Tensor, " train"], seed: int) -> tuple[LeftOut, ...]:
    """Choose removals: the most influential examples, and random ones."""
    order = influence.argsort(descending=True, stable=True).tolist()
    count = len(influence)
    removals = [LeftOut(influential=True, examples=tuple(order[:size])) for size in sizes(count)]
    generator = stream("removals", seed)
    for size in sizes(count):
        for _ in range(1 if size == 1 else 2):
            drawn = torch.randperm(count, generator=generator)[:size].tolist()
            removals.append(LeftOut(influential=False, examples=tuple(drawn)))
    return tuple(removals)


def groups_for(
    effect: Float[Tensor, "point out example"], training: AbstractRetraining
) -> tuple[LeftOut, ...]:
    """Choose removals by the norm of each example's effects over all points and outputs."""
    return groups(effect.square().sum((0, 1)).sqrt(), training.seed)


def leave_out(
    training: AbstractRetraining,
    effect: Float[Tensor, "point out example"],
    query: Sequence[int],
    *,
    everyone: bool = False,
) -> LeaveOut:
    """Compare effects at the queries `query` with retraining without groups, and without each
    example if asked.
    """
    removals = groups_for(effect, training)
    if everyone:
        alone = (LeftOut(influential=False, examples=(k,)) for k in range(effect.shape[2]))
        several = (removal for removal in removals if len(removal.examples) > 1)
        removals = (*alone, *several)
    return compare_removals(training, effect, removals, query)


def compare_removals(
    training: AbstractRetraining,
    effect: Float[Tensor, "point out example"],
    removals: Sequence[LeftOut],
    query: Sequence[int],
) -> LeaveOut:
    """Return the predicted change of each removal, the sum of its effects, with the actual
    change.
    """
    actual, _ = changes(training, [removal.examples for removal in removals])
    predicted = [effect[:, :, list(removal.examples)].sum(2) for removal in removals]
    return LeaveOut(
        removals=tuple(removals),
        query=tuple(query),
        predicted=torch.stack(predicted).double().cpu().numpy(),
        actual=actual.double().cpu().numpy(),
    )


# --- Effects with facts, caveats and their check.


EVERYONE = (
    "every example was left out alone, which costs less than effects; `explain` shows the result"
)


@dataclass(frozen=True, kw_only=True)
class EffectsFound:
    """The leave-out effect of each example; NaN at points without effects."""

    values: Float[Tensor, "point out example"]
    facts: Mapping[str, float | str]
    caveats: list[str]
    check: LeaveOut | None  # by retraining


def effects_swept(
    values: Float[Tensor, "point out example"],
    effects: Effects,
    mean: MeanName,
    caveats: Caveats,
    training: AbstractRetraining | None,
    query: Sequence[int],
    *,
    everyone: bool = False,
    unchecked: str = "",
) -> EffectsFound:
    """Return effects from reverse passes, with a check by retraining, or with the remark
    `unchecked`.
    """
    agrees = None
    check = None
    if training is not None:
        agrees = agreement(training)
        if sizes(values.shape[2]):
            check = leave_out(training, values, query, everyone=everyone)
    sentences = replace(caveats, agreement=agrees).sentences
    if check is not None:
        sentence = agreement_of(check, caveats.growth).sentence
        if check.alone(values.shape[2]) is not None:
            sentence = f"{sentence} ({EVERYONE})"
        sentences.append(sentence)
    elif unchecked:
        sentences.append(unchecked)
    facts: dict[str, float | str] = {
        "kind": kind_of(effects),
        "mean": mean,
        "growth": caveats.growth,
    }
    if agrees is not None:
        facts["agreement"] = agrees
    return EffectsFound(values=values, facts=facts, caveats=sentences, check=check)


def effects_retrained(
    training: AbstractRetraining,
    mean: MeanName,
    query: Sequence[int],
    dtype: torch.dtype | None = None,
) -> EffectsFound:
    """Return the exact effects, by one training without each example.

    effect of i = f_T trained without i − f_T,      with the same start and order

    Groups are also left out: their change is the sum of their members' effects only without
    interactions.
    """
    count = len(training.everyone)
    alone, doubts = changes(training, [(k,) for k in range(count)])
    values = alone.permute(1, 2, 0).to(dtype or alone.dtype)
    removals = [removal for removal in groups_for(values, training) if len(removal.examples) > 1]
    check = None
    if removals:
        check = compare_removals(training, values, removals, query)
    return EffectsFound(
        values=values,
        facts={"kind": RETRAINED, "mean": mean},
        caveats=remarks_on_trainings(count, doubts, check),
        check=check,
    )


# --- The breakdown of a removal among the examples of the group and among steps
# (`removal.between`).


@dataclass(frozen=True)
class OutputsAt:
    """The chosen outputs as a function of the weights, concatenated from `parts`."""

    parts: Sequence[Callable[[Float[Tensor, " weight"]], Float[Tensor, " some"]]]
    at_once: int | None = None  # gradients per backward pass; None: all of a part

    def __call__(self, weights: Float[Tensor, " weight"]) -> tuple[Tensor, Tensor]:
        """Return the outputs, and their gradients, one row each."""
        with plain_kernels():
            values = [part(weights).detach() for part in self.parts]
            slopes = [jacrev(part, chunk_size=self.at_once)(weights) for part in self.parts]
        return torch.cat(values), torch.cat(slopes)


def split_change(
    pair: TrainingPair, outputs: Sequence[OutputsAt], progress: AbstractProgress
) -> Breakdown:
    """Split the change of the outputs between two trainings, with one backward pass for each item
    of `outputs`.
    """
    parts = []
    for some in outputs:
        progress.start("back", pair.first.length, 0)
        parts.append(pair.breakdown(some, progress.step))
    return joined(parts)


def removal_of(
    breakdown: Breakdown,
    group: Sequence[int],
    points: Sequence[int],
    outs: Sequence[int],
    repeated: float,
) -> Removal:
    """Return the record of a removal, with the chosen outputs of every point."""
    shape = (len(points), len(outs))
    return Removal(
        query=tuple(points),
        out=tuple(outs),
        example=tuple(group),
        actual=breakdown.actual.view(shape).double().cpu().numpy(),
        shares=breakdown.shares[:, list(group)].view(*shape, -1).double().cpu().numpy(),
        by_step=breakdown.by_step.view(*shape, -1).double().cpu().numpy(),
        growth=breakdown.growth,
        repeated=repeated,
        emptied=breakdown.emptied,
    )
