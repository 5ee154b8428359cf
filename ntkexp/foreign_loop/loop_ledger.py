"""A followed loop is carried out again without some examples, and what that changed is split over them, exactly.

The first training is the one that was followed, from its folder; the second is followed and proved as that was, and its
steps are kept beside it until the change is split. Module and loss are those that the loop itself gives to `follow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.plan import IN_CACHE
from ntkexp.effects.sweep import MEANS, MeanName
from ntkexp.foreign_loop.again import Again, LoopAgain, Weighing, trained_again
from ntkexp.foreign_loop.effects import loss_of
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.trace import Trace, example_names_in, load_trace
from ntkexp.kernel.record.tape import part
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import FOLDER, Removal
from ntkexp.removal.between import Ledger, Pair, TrainingPair, joined
from ntkexp.shapes import Function, Inputs

AT_ONCE = 2**28 // 12
"""How many numbers of adjoints are gone back with at once; each has a dozen beside it on its way."""


def loop_without(
    files: TraceFolder,
    again: Again,
    mean: MeanName,
    group: Sequence[int],
    points: Sequence[int],
    progress: AbstractProgress,
) -> Removal:
    """What leaving out the examples at these places changes at some queries, and how that splits."""
    place = files.folder.path / FOLDER
    place.mkdir(exist_ok=True)
    try:
        with TemporaryDirectory(dir=place, prefix="again-") as folder:
            progress.say(f"carrying the loop out again without {len(group)} of its examples")
            pair, first = trained_twice(files, again, Weighing(mean=mean), group, Path(folder) / "trace")
            found = split(pair, first, points, progress).closed()
    finally:
        progress.stop()
    return removal(found, pair, group, points)


def trained_twice(
    files: TraceFolder, again: Again, weighing: Weighing, group: Sequence[int], place: Path
) -> tuple[TrainingPair, Trace]:
    """The training that was followed, and the one without the examples, of which the module comes."""
    names = example_names_in(files)
    without = replace(weighing, weights={names[k]: 0.0 for k in group})
    second = trained_again(again, without, place)
    first = load_trace(files, deepcopy(second.module))
    first.refuse_outside()
    LoopAgain(again, first, weighing.mean).refuse_other(second)
    loss, numbered = loss_of(second), first.examples
    trainings = [
        FollowedTraining(steps=each.steps, called=each.called, loss=loss, names=numbered, weighing=weighed)
        for each, weighed in ((first, weighing), (second, without))
    ]
    pair = TrainingPair(
        first=trainings[0],
        second=trainings[1],
        weights=Pair(*(each.weighing.left(names).to(trainings[0].end) for each in trainings)),
        mean=MEANS[weighing.mean],
        together=max(1, IN_CACHE // trainings[0].flat.size),
    )
    return pair, first


@dataclass(frozen=True)
class OutputsAt:
    """The outputs at some queries, one after another, as a function of the weights."""

    pair: TrainingPair
    function: Function
    queries: Sequence[Inputs]

    def __call__(self, weights: Float[Tensor, " weight"]) -> tuple[Tensor, Tensor]:
        """Values, and gradients, a row each."""
        with plain_kernels():
            found = [self.one(weights, query) for query in self.queries]
        values, slopes = zip(*found, strict=True)
        return torch.cat(values), torch.cat(slopes)

    def one(self, weights: Float[Tensor, " weight"], query: Inputs) -> tuple[Tensor, Tensor]:
        """Find both at one query."""

        def outputs(vector: Tensor) -> Tensor:
            return self.function(self.pair.first.flat.weights(vector), query).reshape(-1)

        return outputs(weights).detach(), jacrev(outputs)(weights)


def split(pair: TrainingPair, first: Trace, points: Sequence[int], progress: AbstractProgress) -> Ledger:
    """Split the change at the queries, so many at a time as there is memory for."""
    queries = [part(first.queries, slice(k, k + 1)) for k in points]
    one = OutputsAt(pair, first.function, queries[:1])
    outs = len(one(pair.first.end)[0])
    chunk = max(1, AT_ONCE // (outs * pair.first.flat.size))
    parts = []
    for begun in range(0, len(queries), chunk):
        progress.start("back", pair.first.length, 0)
        outputs = OutputsAt(pair, first.function, queries[begun : begun + chunk])
        parts.append(pair.ledger(outputs, lambda behind: progress.step(behind, None, None)))
    return joined(parts)


def removal(found: Ledger, pair: TrainingPair, group: Sequence[int], points: Sequence[int]) -> Removal:
    """The same, as it is kept."""
    outs = len(found.actual) // len(points)
    shape = (len(points), outs)
    return Removal(
        probe=tuple(points),
        out=tuple(range(outs)),
        example=tuple(group),
        actual=found.actual.view(shape).double().cpu().numpy(),
        shares=found.shares[:, list(group)].view(*shape, -1).double().cpu().numpy(),
        by_step=found.by_step.view(*shape, -1).double().cpu().numpy(),
        growth=found.growth,
        repeated=0.0,  # the training as it was is the one that was followed
        emptied=pair.emptied,
    )
