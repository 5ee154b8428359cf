"""What leaving examples out changes, by training again without them: effects are compared with it or found by it, and
it is split over the examples. Who trains is of no matter: this package (`removal.rerun`), or a loop that was followed
(`foreign_loop.again`).
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
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import RETRAINED, LeaveOut, LeftOut, Removal
from ntkexp.removal.between import Ledger, TrainingPair, joined
from ntkexp.report.leave_out import agreement_of, remarks_on_trainings
from ntkexp.stream import stream


class AbstractRetraining(ABC):
    """A training that can be carried out again, from the same start and in the same order, with other weights of its
    examples; what is asked of it are outputs at some points.
    """

    @property
    @abstractmethod
    def everyone(self) -> Float[Tensor, " example"]:
        """The weights of the examples as it was trained: ones."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """Of the groups that are left out by chance."""

    @property
    @abstractmethod
    def whole(self) -> Float[Tensor, "point out"]:
        """The outputs after training with all examples."""

    @abstractmethod
    def ends(
        self, weights: Float[Tensor, "training example"]
    ) -> Iterator[Float[Tensor, " weight"]]:
        """Where trainings with these weights of the examples lead, one after another, as vectors."""

    @abstractmethod
    def at(self, end: Float[Tensor, " weight"]) -> Float[Tensor, "point out"]:
        """The outputs at the end of a training."""

    def outputs(
        self, weights: Float[Tensor, "training example"]
    ) -> Float[Tensor, "training point out"]:
        """The outputs after trainings with these weights of the examples."""
        return torch.stack([self.at(end) for end in self.ends(weights)])

    @abstractmethod
    def doubts(
        self, repeated: Float[Tensor, "point out"], changes: Float[Tensor, "group point out"]
    ) -> list[str]:
        """Why these changes are not to be believed, if training again with all examples gave other outputs than these,
        `repeated`; or an error.
        """


def changes(
    training: AbstractRetraining, removals: Sequence[Sequence[int]]
) -> tuple[Float[Tensor, "removal point out"], list[str]]:
    """How the outputs change when each of these groups is left out, and what makes one doubt it."""
    weights = training.everyone.repeat(1 + len(removals), 1)
    for weight, group in zip(weights[1:], removals, strict=True):
        weight[list(group)] = 0.0
    outputs = training.outputs(weights)
    found = outputs[1:] - outputs[0]
    return found, training.doubts(outputs[0], found)


# --- Whether half of a removal does half of it: trainings in which a twentieth of the examples weigh ½, and nothing.
#
#     agreement         cos(F(½) − F(1), F(0) − F(½))        F(w): the outputs at the points that are asked about
#     metasmoothness    Σ|Δ₁| sign Δ₁ sign Δ₂ / Σ|Δ₁|,  Δ₁ = θ(½) − θ(1),  Δ₂ = θ(0) − θ(½),  over the weights
#
# Both are near 1 where outputs, or weights, change smoothly with the weights of examples, whatever their derivative is.
# Metasmoothness is of L. Engstrom et al. (2025), arXiv:2503.13751, definition 2.


SHARE = 20  # one example in this many is left out


def halving(training: AbstractRetraining) -> Float[Tensor, "two example"]:
    """The weights of the examples for both trainings, of a group that is drawn from the seed."""
    count = len(training.everyone)
    chosen = torch.randperm(count, generator=stream("half", training.seed))[
        : max(1, count // SHARE)
    ]
    weights = training.everyone.repeat(2, 1)
    weights[0, chosen], weights[1, chosen] = 0.5, 0.0
    return weights


def agreement(training: AbstractRetraining) -> float:
    """The cosine of what either half changes in the outputs."""
    half, none = training.outputs(halving(training))
    first, second = (half - training.whole).flatten(), (none - half).flatten()
    return float(first @ second / (first.norm() * second.norm()))


def metasmoothness(training: AbstractRetraining) -> float:
    """Whether weights move on in the direction in which the first half moved them; NaN if that moved none."""
    (whole,) = training.ends(training.everyone[None])
    half, none = training.ends(halving(training))
    first, second = half - whole, none - half
    return float((first * second.sign()).sum() / first.abs().sum())


# --- The leave-out check: what effects predict is compared with trainings that leave examples out.
#
# Left out are the most influential examples (1, 10, 5 % of them) and as many random ones, some twice. Leaving out
# a group is predicted to change an output by the sum of the effects of its members. Where trainings are cheaper
# than effects, every example is left out by itself as well: then nothing has to be predicted.


def sizes(examples: int) -> list[int]:
    """How many examples are left out at a time: a quarter of them at most.

    >>> sizes(1000), sizes(40), sizes(2)
    ([1, 10, 50], [1, 2, 10], [])
    """
    return [size for size in sorted({1, 10, examples // 20}) if 0 < size <= examples / 4]


def groups(influence: Float[Tensor, " train"], seed: int) -> tuple[LeftOut, ...]:
    """Choose who is left out: by influence, and by chance once or twice."""
    order, count = influence.argsort(descending=True, stable=True).tolist(), len(influence)
    found = [LeftOut(influential=True, examples=tuple(order[:size])) for size in sizes(count)]
    generator = stream("removals", seed)
    for size in sizes(count):
        for _ in range(1 if size == 1 else 2):
            chance = torch.randperm(count, generator=generator)[:size].tolist()
            found.append(LeftOut(influential=False, examples=tuple(chance)))
    return tuple(found)


def groups_for(
    effect: Float[Tensor, "point out example"], training: AbstractRetraining
) -> tuple[LeftOut, ...]:
    """Those for examples of these effects: influence is their size at all points and outputs together."""
    return groups(effect.square().sum((0, 1)).sqrt(), training.seed)


def leave_out(
    training: AbstractRetraining,
    effect: Float[Tensor, "point out example"],
    probe: Sequence[int],
    *,
    everyone: bool = False,
) -> LeaveOut:
    """Compare effects with trainings without groups, and without each example if asked; `probe` names the points."""
    removals = groups_for(effect, training)
    if everyone:
        alone = (LeftOut(influential=False, examples=(k,)) for k in range(effect.shape[2]))
        removals = (*alone, *(each for each in removals if len(each.examples) > 1))
    return beside(training, effect, removals, probe)


def beside(
    training: AbstractRetraining,
    effect: Float[Tensor, "point out example"],
    removals: Sequence[LeftOut],
    probe: Sequence[int],
) -> LeaveOut:
    """What effects predict of each removal, the sum over its examples, beside what comes of it."""
    actual, _ = changes(training, [each.examples for each in removals])
    predicted = [effect[:, :, list(each.examples)].sum(2) for each in removals]
    return LeaveOut(
        removals=tuple(removals),
        probe=tuple(probe),
        predicted=torch.stack(predicted).double().cpu().numpy(),
        actual=actual.double().cpu().numpy(),
    )


# --- What is said of effects: the numbers, what is known of them, and what speaks against them.


EVERYONE = (
    "every example was left out alone, which costs less than effects; `explain` shows the result"
)


@dataclass(frozen=True, kw_only=True)
class EffectsFound:
    """What would change without each example; NaN stands at points where no effect was asked for."""

    values: Float[Tensor, "point out example"]
    facts: Mapping[str, float | str]
    caveats: list[str]
    check: LeaveOut | None  # against trainings without examples


def effects_swept(
    values: Float[Tensor, "point out example"],
    effects: Effects,
    mean: MeanName,
    caveats: Caveats,
    training: AbstractRetraining | None,
    probe: Sequence[int],
    *,
    everyone: bool = False,
    unchecked: str = "",
) -> EffectsFound:
    """Effects that sweeps back have found, compared with trainings; `unchecked` is said where there are none."""
    agrees = None if training is None else agreement(training)
    check = None
    if training is not None and sizes(values.shape[2]):
        check = leave_out(training, values, probe, everyone=everyone)
    sentences = replace(caveats, agreement=agrees).sentences
    if check is not None:
        said = agreement_of(check, caveats.growth).sentence
        sentences.append(said if check.alone(values.shape[2]) is None else f"{said} ({EVERYONE})")
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
    probe: Sequence[int],
    dtype: torch.dtype | None = None,
) -> EffectsFound:
    """Effects that are no estimates: the training is carried out again without each example by itself.

    effect of i = f_T trained without i − f_T,      from the same start, in the same order

    Groups are left out as well: their members' effects add up to what a group changes only where they do not interact.
    """
    count = len(training.everyone)
    alone, doubts = changes(training, [(k,) for k in range(count)])
    values = alone.permute(1, 2, 0).to(dtype or alone.dtype)
    several = [each for each in groups_for(values, training) if len(each.examples) > 1]
    check = beside(training, values, several, probe) if several else None
    return EffectsFound(
        values=values,
        facts={"kind": RETRAINED, "mean": mean},
        caveats=remarks_on_trainings(count, doubts, check),
        check=check,
    )


# --- What leaving a group out changed is split over the group and over the steps (`removal.between`).


@dataclass(frozen=True)
class OutputsAt:
    """The chosen outputs as a function of the weights, of which each of the `parts` gives some."""

    parts: Sequence[Callable[[Float[Tensor, " weight"]], Float[Tensor, " some"]]]
    at_once: int | None = (
        None  # how many outputs are gone back from together, into the weights; None: all of a part
    )

    def __call__(self, weights: Float[Tensor, " weight"]) -> tuple[Tensor, Tensor]:
        """Values, and gradients, a row each."""
        with plain_kernels():
            values = [part(weights).detach() for part in self.parts]
            slopes = [jacrev(part, chunk_size=self.at_once)(weights) for part in self.parts]
        return torch.cat(values), torch.cat(slopes)


def split_change(
    pair: TrainingPair, outputs: Sequence[OutputsAt], progress: AbstractProgress
) -> Ledger:
    """Split the change of the outputs between two trainings, as many outputs at a time as are given together."""
    parts = []
    for some in outputs:
        progress.start("back", pair.first.length, 0)
        parts.append(pair.ledger(some, progress.step))
    return joined(parts)


def removal_of(
    found: Ledger, group: Sequence[int], points: Sequence[int], outs: Sequence[int], repeated: float
) -> Removal:
    """The ledger of leaving a group out, of these outputs at every point, as it is kept."""
    shape = (len(points), len(outs))
    return Removal(
        probe=tuple(points),
        out=tuple(outs),
        example=tuple(group),
        actual=found.actual.view(shape).double().cpu().numpy(),
        shares=found.shares[:, list(group)].view(*shape, -1).double().cpu().numpy(),
        by_step=found.by_step.view(*shape, -1).double().cpu().numpy(),
        growth=found.growth,
        repeated=repeated,
        emptied=found.emptied,
    )
