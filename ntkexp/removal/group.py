"""A group of examples is left out: both trainings are filmed, and the difference is split over the group."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.removal.film import GRADIENT, WEIGHTS, Film, bytes_of, film_for
from ntkexp.removal.ledger import Ledger, LedgerSweep
from ntkexp.removal.pair import Pair
from ntkexp.removal.rerun import Rerun
from ntkexp.removal.rule.choose import difference_rule
from ntkexp.removal.train import retrain


def filmed(rerun: Rerun, weight: Pair, folder: Path, progress: AbstractProgress) -> Film:
    """Train with both weights of the examples, and keep every step in a file of this folder."""
    parts = (WEIGHTS, GRADIENT, *difference_rule(rerun).records)
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
        film = filmed(rerun, weight, folder, progress)
        for which, end in zip(("as it was", "without these examples"), film.read(rerun.length, WEIGHTS), strict=True):
            if not end.isfinite().all():
                raise Mistake(f"training {which} diverges, so there is no change to split; choose a smaller step size")
        progress.start("back", rerun.length, 0)
        sweep = LedgerSweep(rerun=rerun, film=film, weight=weight)
        return sweep.ledger(inputs, chosen, lambda behind: progress.step(behind, None, None))
    finally:
        progress.stop()
