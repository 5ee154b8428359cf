"""A group of examples is left out: both trainings are filmed, and the difference is split over the group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.mean import MEANS
from ntkexp.effects.sweep_plan import IN_CACHE
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.removal.between import TrainingPair
from ntkexp.removal.film import WEIGHTS, Film, bytes_of, film_for
from ntkexp.removal.filmed_training import FilmedTraining, film_parts
from ntkexp.removal.ledger import Ledger, joined
from ntkexp.removal.pair import Pair
from ntkexp.removal.rerun import Rerun
from ntkexp.removal.train import retrain


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
