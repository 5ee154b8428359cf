"""A group of examples is left out, and the difference is split over the group; what effects predict is held against
such trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.plan import IN_CACHE
from ntkexp.effects.sweep import MEANS
from ntkexp.effects.trajectory import AbstractTrajectory, FlatWeights, TakenBatch, TrainedStep
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import Memory
from ntkexp.path.recording import update_of
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import LeaveOut, LeftOut
from ntkexp.removal.between import Ledger, Pair, TrainingPair, joined
from ntkexp.removal.rerun import WEIGHTS, Film, Rerun, bytes_of, film_for, retrain, trained
from ntkexp.stream import stream

# --- One of the trainings on a film, as a training that can be gone back over.


@dataclass(frozen=True, kw_only=True)
class FilmedTraining(AbstractTrajectory):
    """The run of this number, in which the examples had these weights."""

    rerun: Rerun
    film: Film
    run: int
    weight: Float[Tensor, " train"]

    @property
    def length(self) -> int:
        return self.rerun.length

    @property
    def examples(self) -> int:
        return self.rerun.examples

    @property
    def flat(self) -> FlatWeights:
        return self.rerun.flat

    @property
    def end(self) -> Float[Tensor, " weight"]:
        return self.film.read(self.length, WEIGHTS, self.run)

    def step(self, index: int) -> TrainedStep:
        rerun, after, before = self.rerun, self.memory(index), self.memory(index - 1)
        return TrainedStep(
            index=index,
            weights=self.film.read(index, WEIGHTS, self.run),
            batches=(self.batch(index),),
            updates=(update_of(rerun.optimizer, rerun.start, index, rerun.sizes(index), after, before),),
            clip_norm=rerun.optimizer.clip_norm,
        )

    def memory(self, index: int) -> Memory:
        """What the optimizer remembered after a step; nothing before the first."""
        parts = [part for part in self.film.parts if part != WEIGHTS and index >= 0]
        return {part: self.flat.weights(self.film.read(index, part, self.run)) for part in parts}

    def batch(self, index: int) -> TakenBatch:
        """What the step was taken on, each example once, however often it was drawn."""
        drawn = self.rerun.batch(index)
        left = drawn.left(self.weight)
        divided = self.rerun.divided(drawn, left)
        return TakenBatch(
            examples=drawn.rows,
            shares=left * divided,
            losses=self.losses(drawn.rows),
            is_mean=self.rerun.loss.reduction == "mean",
            per_weight=drawn.times * divided,
        )

    def losses(self, rows: Int[Tensor, " row"]) -> Callable[[Float[Tensor, " weight"]], Float[Tensor, " row"]]:
        """ℓ of these examples; what scales the loss is in their shares."""
        return partial(losses, self.rerun, self.rerun.inputs[rows], self.rerun.targets[rows])


def losses(rerun: Rerun, inputs: Tensor, targets: Tensor, weights: Float[Tensor, " weight"]) -> Float[Tensor, " row"]:
    """The losses of some examples."""
    return rerun.loss.value(rerun.outputs(weights, inputs), targets)


def film_parts(rerun: Rerun) -> tuple[str, ...]:
    """What a film of the training has to hold, or why none would do."""
    optimizer = rerun.optimizer
    if optimizer.records and optimizer.spread_at(0) is None:
        raise Mistake(
            f"optimizer={optimizer.option} scales gradients by what it remembers of them, and differences of its steps "
            "are known for no optimizer of that kind but Adam and AdamW"
        )
    return (WEIGHTS, *dict.fromkeys((*optimizer.records, *optimizer.differentiated)))


# --- A group of examples is left out: both trainings are filmed, and the difference is split over the group.


def filmed(rerun: Rerun, weight: Pair, folder: Path, progress: AbstractProgress) -> Film:
    """Train with both weights of the examples, and keep every step in a file of this folder."""
    parts = film_parts(rerun)
    start = rerun.flat.vector(rerun.start)
    room = bytes_of(parts, rerun.length + 1, start)
    progress.say(f"training twice, with {room / 1e9:.2g} GB of both on the disk until the change is split")
    film = film_for(parts, rerun.length + 1, start, folder)
    film.write(0, {WEIGHTS: start.expand(2, -1)})
    progress.start("again", rerun.length, 0)
    for taken in retrain(rerun, torch.stack(tuple(weight))):
        film.write(taken.step, taken.found)
        film.write(taken.step + 1, {WEIGHTS: taken.weights})
        progress.step(taken.step + 1, None, None)
    return film


@dataclass(frozen=True)
class ChosenOutputs:
    """Pairs of a point and an output, as a function of the weights."""

    rerun: Rerun
    inputs: Float[Tensor, "point *shape"]
    chosen: Int[Tensor, "chosen 2"]

    def __call__(self, weights: Float[Tensor, " weight"]) -> tuple[Tensor, Tensor]:
        """Values, and gradients, a row each."""
        with plain_kernels():
            return self.outputs(weights).detach(), jacrev(self.outputs, chunk_size=AT_ONCE)(weights)

    def outputs(self, weights: Float[Tensor, " weight"]) -> Float[Tensor, " chosen"]:
        """The values."""
        return self.rerun.outputs(weights, self.inputs)[self.chosen[:, 0], self.chosen[:, 1]]


AT_ONCE = 16
"""How many outputs are gone back from together, into the weights at the end."""


def pair_of(rerun: Rerun, film: Film, weight: Pair) -> TrainingPair:
    """Both trainings on the film."""
    first, second = (FilmedTraining(rerun=rerun, film=film, run=k, weight=each) for k, each in enumerate(weight))
    for which, training in (("as it was", first), ("without these examples", second)):
        if not training.end.isfinite().all():
            raise Mistake(f"training {which} diverges, so there is no change to split; choose a smaller step size")
    lefts = ((step, rerun.batch(step).left(torch.stack(tuple(weight)))) for step in range(rerun.length))
    begun = next((step for step, (one, other) in lefts if not torch.equal(one, other)), rerun.length)
    return TrainingPair(
        first=first,
        second=second,
        weights=weight,
        mean=MEANS["renormalised" if rerun.renormalises else "fixed"],
        together=max(1, IN_CACHE // rerun.flat.size),
        begun=begun,
    )


def ledger_between(
    rerun: Rerun,
    weight: Pair,
    inputs: Float[Tensor, "point *shape"],
    chosen: Int[Tensor, "chosen 2"],
    folder: Path,
    progress: AbstractProgress,
) -> Ledger:
    """Train with both weights of the examples, and split what differs at chosen outputs."""
    try:
        pair = pair_of(rerun, filmed(rerun, weight, folder, progress), weight)
        parts = []
        for some in torch.split(chosen, rerun.directions):
            progress.start("back", rerun.length, 0)
            outputs = ChosenOutputs(rerun, inputs, some)
            parts.append(pair.ledger(outputs, lambda behind: progress.step(behind, None, None)))
        return joined(parts)
    finally:
        progress.stop()


# --- Whether half of a removal does half of it: trainings in which a twentieth of the examples weigh ½, and nothing.
#
#     agreement = cos(F(½) − F(1), F(0) − F(½))        F(w): the outputs at the points that are asked about
#
# It is near 1 where the outputs change smoothly with the weights of examples, whatever their derivative is.


SHARE = 20  # one of so many examples is left out


def agreement(
    rerun: Rerun, end: Float[Tensor, " weight"], inputs: Float[Tensor, "point *shape"], outputs: tuple[int, ...]
) -> float:
    """The cosine, for a group drawn from the seed; `end` is where training led with all examples."""
    chosen = twentieth(rerun.examples, rerun.seed)
    half, none = rerun.everyone.clone(), rerun.everyone.clone()
    half[chosen], none[chosen] = 0.5, 0.0
    ends = (end, *trained(rerun, torch.stack([half, none])))
    with torch.no_grad():
        at_all, at_half, at_none = (rerun.outputs(each, inputs)[:, list(outputs)].flatten() for each in ends)
    return cosine(at_all, at_half, at_none)


def twentieth(examples: int, seed: int) -> Int[Tensor, " chosen"]:
    """The group of examples, drawn from the seed."""
    return torch.randperm(examples, generator=stream("half", seed))[: max(1, examples // SHARE)]


def cosine(at_all: Tensor, at_half: Tensor, at_none: Tensor) -> float:
    """The cosine, given the outputs of the three trainings one after another.

    >>> cosine(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0]))
    1.0
    """
    first, second = at_half - at_all, at_none - at_half
    return float(first @ second / (first.norm() * second.norm()))


# --- The leave-out check: what effects predict is held against trainings that leave examples out.
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


def changes(
    rerun: Rerun, removals: Sequence[Sequence[int]], inputs: Float[Tensor, "point *shape"]
) -> Float[Tensor, "removal point out"]:
    """How the outputs change when each of these groups is left out."""
    outputs = outputs_without(rerun, removals, inputs)
    return outputs[1:] - outputs[0]


def outputs_without(
    rerun: Rerun, removals: Sequence[Sequence[int]], inputs: Float[Tensor, "point *shape"]
) -> Float[Tensor, "training point out"]:
    """The outputs of everyone's training, and of those without each of these groups: all are trained at once."""
    weight = torch.stack([rerun.everyone, *(rerun.without(list(group)) for group in removals)])
    ends = (end for some in torch.split(weight, rerun.directions) for end in trained(rerun, some))
    with torch.no_grad(), plain_kernels():
        return torch.stack([rerun.outputs(end, inputs) for end in ends])


def leave_out(
    rerun: Rerun,
    effect: Float[Tensor, "point some train"],
    inputs: Float[Tensor, "point *shape"],
    probe: Sequence[int],
    outs: Sequence[int],
    *,
    everyone: bool,
) -> LeaveOut:
    """Hold effects on these outputs against trainings; `probe` names the points."""
    removals = groups(sizes_of(effect), rerun.seed)
    if everyone:
        alone = (LeftOut(influential=False, examples=(k,)) for k in range(rerun.examples))
        removals = (*alone, *(each for each in removals if len(each.examples) > 1))
    actual = changes(rerun, [each.examples for each in removals], inputs)[:, :, list(outs)]
    return beside(effect, removals, actual, probe)


def groups_left_out(
    effect: Float[Tensor, "point some train"],
    seed: int,
    changes: Callable[[Sequence[Sequence[int]]], Float[Tensor, "removal point some"]],
    probe: Sequence[int],
) -> LeaveOut | None:
    """Hold sums of effects against trainings without groups, if there are enough examples: each by itself is true."""
    several = [each for each in groups(sizes_of(effect), seed) if len(each.examples) > 1]
    return beside(effect, several, changes([each.examples for each in several]), probe) if several else None


def sizes_of(effect: Float[Tensor, "point some train"]) -> Float[Tensor, " train"]:
    """How large the effects of each example are, at all points and outputs together."""
    return effect.square().sum((0, 1)).sqrt()


def beside(
    effect: Float[Tensor, "point out train"],
    removals: Sequence[LeftOut],
    actual: Float[Tensor, "removal point out"],
    probe: Sequence[int],
) -> LeaveOut:
    """Put what effects foretell of each removal beside what came of it."""
    predicted = [effect[:, :, list(each.examples)].sum(2) for each in removals]
    return LeaveOut(
        removals=tuple(removals),
        probe=tuple(probe),
        predicted=torch.stack(predicted).double().cpu().numpy(),
        actual=actual.double().cpu().numpy(),
    )
