"""The breakdown of a removal: run a followed loop again without some examples, and
divide the change of the outputs among all examples.

The first training is the followed loop, which is read from its folder. The second
training runs the loop again without the examples. It is followed and proved too, and
its steps are stored until the breakdown is complete. The model and the loss come from
the second call of `follow`, because the folder of the first call does not store
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.plan import SWEEP_CACHE_NUMBERS
from ntkexp.effects.sweep import MEANS, MeanName
from ntkexp.effects.trajectory import FlatWeights
from ntkexp.foreign_loop.again import Again, LoopAgain, trained_again
from ntkexp.foreign_loop.effects import loss_of
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.trace import Trace, example_names_in, load_trace
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.kernel.record.tape import part
from ntkexp.model.functional import copy_module
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import REMOVAL_FOLDER, Removal
from ntkexp.removal.between import Pair, TrainingPair
from ntkexp.removal.retraining import ChosenOutputs, removal_of, split_change

# The adjoints of one backward sweep have at most this many elements. About 12 arrays of
# this size exist at once.
MAX_ADJOINT_NUMBERS = 2**28 // 12


def loop_without(
    files: TraceFolder,
    again: Again,
    mean: MeanName,
    group: Sequence[int],
    points: Sequence[int],
    progress: AbstractProgress,
) -> Removal:
    """Retrain without some examples. Return the change of the outputs at some queries,
    divided among examples and steps.

    Args:
        files: trace of the followed loop.
        again: function that runs the loop again.
        mean: how a batch mean changes without these examples (`Trace.attribute`).
        group: indices of the examples to leave out.
        points: indices of the queries.
        progress: progress display.
    """
    removals = files.folder.path / REMOVAL_FOLDER
    removals.mkdir(exist_ok=True)
    try:
        with TemporaryDirectory(dir=removals, prefix="again-") as folder:
            progress.say(
                f"carrying the loop out again without {len(group)} of its examples"
            )
            second_place = Path(folder) / "trace"
            pair, first = trained_twice(
                files, again, Weighing(mean=mean), group, second_place
            )

            # split the queries into sweeps that fit into memory
            flat = pair.first.flat
            queries = [partial(outputs_at, first, flat, point) for point in points]
            outs = len(queries[0](pair.first.end))
            chunk = max(1, MAX_ADJOINT_NUMBERS // (outs * flat.size))
            outputs = [
                ChosenOutputs(queries[start : start + chunk])
                for start in range(0, len(queries), chunk)
            ]
            change = split_change(pair, outputs, progress).checked()
    finally:
        progress.stop()
    # `repeated` is the error of repeating the first training. It is 0, because that
    # training is read from its folder.
    return removal_of(change, group, points, range(outs), repeated=0.0)


def outputs_at(
    trace: Trace, flat: FlatWeights, point: int, weights: Float[Tensor, " weight"]
) -> Float[Tensor, " out"]:
    """Return the outputs at query `point`. If there is a measure, evaluate it at all
    queries, because a measure takes all queries at once."""
    if trace.measured is not None:
        return trace.function(flat.weights(weights), trace.queries)[point]
    query = part(trace.queries, slice(point, point + 1))
    return trace.function(flat.weights(weights), query).reshape(-1)


def trained_twice(
    files: TraceFolder,
    again: Again,
    weighing: Weighing,
    group: Sequence[int],
    folder: Path,
) -> tuple[TrainingPair, Trace]:
    """Return the followed training, paired with a training without the examples in
    `group`. Also return the trace of the followed training.

    Both trainings use the model of the second one, whose steps are stored in `folder`.
    """
    names = example_names_in(files)
    without = replace(weighing, weights={names[index]: 0.0 for index in group})
    second = trained_again(again, without, folder)
    rules = [known.rule for known in second.steps.known]
    first = load_trace(files, copy_module(second.module), second.measure, rules)
    first.refuse_outside()
    first.refuse_coupled()
    LoopAgain(again, first, weighing.mean).refuse_other(second)

    loss = loss_of(second)
    first_training = FollowedTraining(
        steps=first.steps,
        called=first.called,
        loss=loss,
        names=first.examples,
        weighing=weighing,
    )
    second_training = FollowedTraining(
        steps=second.steps,
        called=second.called,
        loss=loss,
        names=first.examples,
        weighing=without,
    )
    end = first_training.end
    pair = TrainingPair(
        first=first_training,
        second=second_training,
        weights=Pair(
            weighing.weights_of(names).to(end), without.weights_of(names).to(end)
        ),
        mean=MEANS[weighing.mean],
        vectors_per_pass=max(1, SWEEP_CACHE_NUMBERS // first_training.flat.size),
    )
    return pair, first
