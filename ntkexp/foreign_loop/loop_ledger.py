"""A followed loop is carried out again without some examples, and what that changed is split over them, exactly.

The first training is the one that was followed, from its folder; the second is followed and proved as that was, and its
steps are kept beside it until the change is split. Module and loss are those that the loop itself gives to `follow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.plan import CACHED_NUMBERS
from ntkexp.effects.sweep import MEANS, MeanName
from ntkexp.effects.trajectory import FlatWeights
from ntkexp.foreign_loop.again import Again, LoopAgain, trained_again
from ntkexp.foreign_loop.effects import loss_of
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.trace import Trace, example_names_in, load_trace
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.kernel.record.tape import part
from ntkexp.model.functional import copied
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import FOLDER, Removal
from ntkexp.removal.between import Pair, TrainingPair
from ntkexp.removal.retraining import OutputsAt, removal_of, split_change

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
            pair, first = trained_twice(
                files, again, Weighing(mean=mean), group, Path(folder) / "trace"
            )
            # as many queries together as there is memory for what their outputs feel
            flat = pair.first.flat
            each = [partial(outputs_at, first, flat, k) for k in points]
            outs = len(each[0](pair.first.end))
            chunk = max(1, AT_ONCE // (outs * flat.size))
            outputs = [
                OutputsAt(each[begun : begun + chunk]) for begun in range(0, len(each), chunk)
            ]
            found = split_change(pair, outputs, progress).closed()
    finally:
        progress.stop()
    return removal_of(
        found, group, points, range(outs), repeated=0.0
    )  # what was followed is the training as it was


def outputs_at(
    trace: Trace, flat: FlatWeights, place: int, weights: Float[Tensor, " weight"]
) -> Float[Tensor, " out"]:
    """The outputs at a query, one after another; a measure is asked of all queries at once."""
    if trace.measured is not None:
        return trace.function(flat.weights(weights), trace.queries)[place]
    return trace.function(
        flat.weights(weights), part(trace.queries, slice(place, place + 1))
    ).reshape(-1)


def trained_twice(
    files: TraceFolder, again: Again, weighing: Weighing, group: Sequence[int], place: Path
) -> tuple[TrainingPair, Trace]:
    """The training that was followed, and the one without the examples, of which the module comes."""
    names = example_names_in(files)
    without = replace(weighing, weights={names[k]: 0.0 for k in group})
    second = trained_again(again, without, place)
    first = load_trace(
        files, copied(second.module), second.measure, [each.rule for each in second.steps.known]
    )
    first.refuse_outside()
    first.refuse_coupled()
    LoopAgain(again, first, weighing.mean).refuse_other(second)
    loss, numbered = loss_of(second), first.examples
    trainings = [
        FollowedTraining(
            steps=each.steps, called=each.called, loss=loss, names=numbered, weighing=weighed
        )
        for each, weighed in ((first, weighing), (second, without))
    ]
    pair = TrainingPair(
        first=trainings[0],
        second=trainings[1],
        weights=Pair(*(each.weighing.left(names).to(trainings[0].end) for each in trainings)),
        mean=MEANS[weighing.mean],
        together=max(1, CACHED_NUMBERS // trainings[0].flat.size),
    )
    return pair, first
