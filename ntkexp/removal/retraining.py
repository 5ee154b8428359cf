"""Retraining without some examples: it gives exact leave-out effects, and checks
estimated effects.

`removal.rerun` retrains a run of this package.
`foreign_loop.again` retrains a followed loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.plan import Caveats
from ntkexp.effects.sweep import MeanName
from ntkexp.kernel import plain_kernels
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import RETRAINED, LeaveOut, LeftOut, Removal
from ntkexp.removal.between import Breakdown, TrainingPair, concatenated
from ntkexp.report.leave_out import agreement_of, remarks_on_trainings
from ntkexp.stream import stream
from ntkexp.text import short

LARGEST_REPEATED_ERROR = 0.01
"""Maximum difference between the outputs of the original training and its exact
repetition, relative to the change by removals."""


def root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def repeats(
    repetition_change: Float[Tensor, "point out"],
    changes: Float[Tensor, "group point out"],
) -> bool:
    """Return True if the root mean square of `repetition_change` is at most
    `LARGEST_REPEATED_ERROR` times the root mean square of `changes`.

    `repetition_change` is the difference between the outputs of two equal trainings,
    and `changes` are the changes of the outputs if groups are left out."""
    largest = LARGEST_REPEATED_ERROR * root_mean_square(changes)
    return root_mean_square(repetition_change) <= largest


def repetition_remarks(
    repetition_change: Float[Tensor, "point out"],
    changes: Float[Tensor, "group point out"],
) -> list[str]:
    """Return a remark if the training does not repeat itself (see `repeats`)."""
    if repeats(repetition_change, changes):
        return []
    return [
        (
            "an exact repetition of the training changes the outputs by "
            f"{short(root_mean_square(repetition_change))}, and leaving out single examples by "
            f"{short(root_mean_square(changes))}: the steps amplify rounding errors, so do not "
            "trust effects; choose a smaller step size"
        )
    ]


class AbstractRetraining(ABC):
    """A training run that can be repeated with other weights of its examples.

    The initial weights and the order of the examples remain the same. The results are
    the outputs of the trained network at some points."""

    @property
    @abstractmethod
    def unit_weights(self) -> Float[Tensor, " example"]:
        """The weights of the examples in the original training: ones."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The seed from which random groups are drawn."""

    @property
    @abstractmethod
    def original_outputs(self) -> Float[Tensor, "point out"]:
        """The outputs after the original training, with all examples."""

    @abstractmethod
    def final_weights(
        self, weights: Float[Tensor, "training example"]
    ) -> Iterator[Float[Tensor, " weight"]]:
        """Train with each row of example weights.

        Yield the final weights of the network as vectors.
        """

    @abstractmethod
    def outputs_at(self, end: Float[Tensor, " weight"]) -> Float[Tensor, "point out"]:
        """Return the outputs of the network with the weights `end`."""

    def outputs(
        self, weights: Float[Tensor, "training example"]
    ) -> Float[Tensor, "training point out"]:
        """Train with each row of example weights.
        Return the outputs of the trained networks."""
        return torch.stack(
            [self.outputs_at(end) for end in self.final_weights(weights)]
        )

    @abstractmethod
    def refuse_other_end(
        self,
        repeated: Float[Tensor, "point out"],
        changes: Float[Tensor, "group point out"],
    ) -> None:
        """Raise if the repetition ends at other outputs than the original training.

        The arguments are those of `rounding_remarks`."""

    def rounding_remarks(
        self,
        repeated: Float[Tensor, "point out"],
        changes: Float[Tensor, "group point out"],
    ) -> list[str]:
        """Return a remark if rounding errors, which training amplifies, are not small
        relative to the changes.

        Args:
            repeated: outputs after an exact repetition of the original training.
            changes: changes of the outputs by each removal.
        """
        return repetition_remarks(repeated - self.original_outputs, changes)


def changes(
    training: AbstractRetraining, removals: Sequence[Sequence[int]]
) -> tuple[Float[Tensor, "removal point out"], list[str]]:
    """Retrain without each group. Return the changes of the outputs,
    and reasons to doubt them."""
    weights = training.unit_weights.repeat(1 + len(removals), 1)
    for weight, group in zip(weights[1:], removals, strict=True):
        weight[list(group)] = 0.0
    outputs = training.outputs(weights)
    differences = outputs[1:] - outputs[0]
    training.refuse_other_end(outputs[0], differences)
    return differences, training.rounding_remarks(outputs[0], differences)


# --- Linearity: does half of a removal cause half of its change?
#
# A random group, a twentieth of the examples, gets the weight w. Let F(w) be the
# outputs and θ(w) the weights of the network after training.
#
#     agreement         cos(F(½) − F(1), F(0) − F(½))
#     metasmoothness    Σ|Δ₁| sign Δ₁ sign Δ₂ / Σ|Δ₁|,  summed over the weights of the network,
#                       Δ₁ = θ(½) − θ(1),  Δ₂ = θ(0) − θ(½)
#
# Both are near 1 if the outputs, or the weights of the network, change smoothly with w.
# Metasmoothness: L. Engstrom et al. (2025), arXiv:2503.13751, definition 2.


EXAMPLES_PER_REMOVED = 20


def halving(training: AbstractRetraining) -> Float[Tensor, "two example"]:
    """Return two rows of example weights. A random group has weight ½ in the first row
    and 0 in the second. All other weights are 1."""
    count = len(training.unit_weights)
    removed = max(1, count // EXAMPLES_PER_REMOVED)
    chosen = torch.randperm(count, generator=stream("half", training.seed))[:removed]
    weights = training.unit_weights.repeat(2, 1)
    weights[0, chosen] = 0.5
    weights[1, chosen] = 0.0
    return weights


def agreement(training: AbstractRetraining) -> float:
    """Return the cosine of two changes of the outputs: by the first half of a removal,
    and by the second half."""
    outputs_half, outputs_none = training.outputs(halving(training))
    first = (outputs_half - training.original_outputs).flatten()
    second = (outputs_none - outputs_half).flatten()
    return float(first @ second / (first.norm() * second.norm()))


def metasmoothness(training: AbstractRetraining) -> float:
    """Return the metasmoothness of Engstrom et al. (2025), between −1 and 1.

    Return NaN if the first half of the removal does not change the weights of the
    network."""
    (weights_full,) = training.final_weights(training.unit_weights[None])
    weights_half, weights_none = training.final_weights(halving(training))
    first = weights_half - weights_full
    second = weights_none - weights_half
    return float((first * second.sign()).sum() / first.abs().sum())


# --- The leave-out check compares predictions from leave-out effects with retraining.
#
# The left-out groups are the most influential examples (1 example, 10 examples and 5 %
# of all), and random groups of the same sizes. The predicted change of a group is the
# sum of the effects of its examples. If retraining without each single example is
# cheaper than computing effects, each single example is also left out.


def sizes(examples: int) -> list[int]:
    """Return the sizes of the left-out groups,
    which are at most a quarter of the examples.

    >>> sizes(1000), sizes(40), sizes(2)
    ([1, 10, 50], [1, 2, 10], [])
    """
    return [
        size for size in sorted({1, 10, examples // 20}) if 0 < size <= examples / 4
    ]


def groups(influence: Float[Tensor, " train"], seed: int) -> tuple[LeftOut, ...]:
    """Choose groups to leave out: the most influential examples,
    and random examples."""
    count = len(influence)

    # groups of the most influential examples
    order = influence.argsort(descending=True, stable=True).tolist()
    removals = [
        LeftOut(influential=True, examples=tuple(order[:size])) for size in sizes(count)
    ]

    # random groups: one of a single example, and two of each larger size
    generator = stream("removals", seed)
    for size in sizes(count):
        draws = 1 if size == 1 else 2
        for _ in range(draws):
            drawn = torch.randperm(count, generator=generator)[:size].tolist()
            removals.append(LeftOut(influential=False, examples=tuple(drawn)))
    return tuple(removals)


def groups_for(
    effect: Float[Tensor, "point out example"], training: AbstractRetraining
) -> tuple[LeftOut, ...]:
    """Choose groups to leave out. Influence is the norm
    of the effects over points and outputs."""
    influence = effect.square().sum((0, 1)).sqrt()
    return groups(influence, training.seed)


@dataclass(frozen=True, kw_only=True)
class RetrainingCheck:
    """A check of leave-out effects at the queries `query`,
    by retraining without some groups."""

    training: AbstractRetraining
    query: Sequence[int]
    singles: bool = False  # True: also retrain without each single example

    def compare(self, effect: Float[Tensor, "point out example"]) -> LeaveOut:
        """Return the changes that the effects predict,
        with the changes by retraining."""
        removals = groups_for(effect, self.training)
        if self.singles:
            singles = (
                LeftOut(influential=False, examples=(index,))
                for index in range(effect.shape[2])
            )
            several = [removal for removal in removals if len(removal.examples) > 1]
            removals = (*singles, *several)
        return compare_removals(self.training, effect, removals, self.query)


def compare_removals(
    training: AbstractRetraining,
    effect: Float[Tensor, "point out example"],
    removals: Sequence[LeftOut],
    query: Sequence[int],
) -> LeaveOut:
    """Return the predicted change of each removal, together with the actual change by
    retraining.

    The predicted change is the sum of the effects of the left-out examples.
    """
    actual, _ = changes(training, [removal.examples for removal in removals])
    predicted = [effect[:, :, list(removal.examples)].sum(2) for removal in removals]
    return LeaveOut(
        removals=tuple(removals),
        query=tuple(query),
        predicted=torch.stack(predicted).double().cpu().numpy(),
        actual=actual.double().cpu().numpy(),
    )


# --- Leave-out effects, with facts, caveats and their check by retraining.


SINGLES_REMARK = "every example was left out alone, which costs less than effects; `explain` shows the result"


@dataclass(frozen=True, kw_only=True)
class EffectsResult:
    """The leave-out effect of each example, with facts and caveats. `values` is NaN at
    points without effects."""

    values: Float[Tensor, "point out example"]
    facts: Mapping[str, float | str]
    caveats: list[str]
    check: LeaveOut | None  # comparison of these effects with retrainings


def checked_effects(
    values: Float[Tensor, "point out example"],
    facts: Mapping[str, float | str],
    caveats: Caveats,
    check: RetrainingCheck | None,
    unchecked: str = "",
) -> EffectsResult:
    """Return the effects `values` of a backward sweep, with sentences on their
    reliability and a comparison with retrainings.

    The facts are extended by the growth of the adjoint, and by the agreement if there
    is a check. If there is no check, the sentences end with `unchecked`."""
    facts = {**facts, "growth": caveats.growth}
    comparison = None
    if check is not None:
        agrees = agreement(check.training)
        facts["agreement"] = agrees
        caveats = replace(caveats, agreement=agrees)
        if sizes(values.shape[2]):
            comparison = check.compare(values)

    sentences = caveats.sentences
    if comparison is not None:
        sentence = agreement_of(comparison, caveats.growth).sentence
        if comparison.alone(values.shape[2]) is not None:
            sentence = f"{sentence} ({SINGLES_REMARK})"
        sentences.append(sentence)
    elif unchecked:
        sentences.append(unchecked)
    return EffectsResult(
        values=values, facts=facts, caveats=sentences, check=comparison
    )


def effects_retrained(
    training: AbstractRetraining,
    mean: MeanName,
    query: Sequence[int],
    dtype: torch.dtype | None = None,
) -> EffectsResult:
    """Return the exact leave-out effects, by retraining once without each example.

    effect of i = f_T trained without i − f_T,      with equal initial weights and order

    Also retrain without some groups. If the examples do not interact, the change by a
    group is the sum of the effects of its members."""
    count = len(training.unit_weights)
    single_changes, remarks = changes(training, [(k,) for k in range(count)])
    values = single_changes.permute(1, 2, 0).to(dtype or single_changes.dtype)
    removals = [
        removal for removal in groups_for(values, training) if len(removal.examples) > 1
    ]
    check = None
    if removals:
        check = compare_removals(training, values, removals, query)
    return EffectsResult(
        values=values,
        facts={"kind": RETRAINED, "mean": mean},
        caveats=remarks_on_trainings(count, remarks, check),
        check=check,
    )


# --- The breakdown of a removal among the left-out examples and among steps
# (`removal.between`).


@dataclass(frozen=True)
class ChosenOutputs:
    """A function from the weights to the chosen outputs,
    which are concatenated from `parts`."""

    parts: Sequence[Callable[[Float[Tensor, " weight"]], Float[Tensor, " some"]]]
    # number of gradients per backward pass; None means all gradients of a part
    chunk_size: int | None = None

    def __call__(self, weights: Float[Tensor, " weight"]) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the gradient of each output as a row."""
        with plain_kernels():
            values = [part(weights).detach() for part in self.parts]
            slopes = [
                jacrev(part, chunk_size=self.chunk_size)(weights) for part in self.parts
            ]
        return torch.cat(values), torch.cat(slopes)


def split_change(
    pair: TrainingPair, outputs: Sequence[ChosenOutputs], progress: AbstractProgress
) -> Breakdown:
    """Split the change of the outputs between two training runs.

    Each item of `outputs` requires one backward pass.
    """
    parts = []
    for part_outputs in outputs:
        progress.start("back", pair.first.length, 0)
        parts.append(pair.breakdown(part_outputs, progress.step))
    return concatenated(parts)


def removal_of(
    breakdown: Breakdown,
    group: Sequence[int],
    points: Sequence[int],
    outs: Sequence[int],
    repeated: float,
) -> Removal:
    """Return the record of a removal of `group`,
    for the outputs `outs` at the given points."""
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
