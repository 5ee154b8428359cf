"""The tangent kernel of any module from sketches of its Jacobian."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from warnings import warn

from ntkexp.kernel.features.use_by_use import UseByUse, of_features
from ntkexp.kernel.read.outputs import Outputs, wanted
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.read.sketched import SketchedKernel, SketchedPoints, sketched_kernel
from ntkexp.kernel.read.worth import remark
from ntkexp.kernel.record.inputs import as_inputs, examples, part
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.library.large import refuse_large
from ntkexp.library.module import finite, refuse_unlike_outputs
from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs, Weights


def sketched_tangent(
    reader: Reader, weights: Weights, x1: Inputs, x2: Inputs | None, outputs: Outputs, size: int, seed: int
) -> SketchedKernel:
    """K̂ of the chosen outputs, by so many dimensions."""
    refuse_size(size)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise Mistake(f"seed={seed!r:.40}: give a whole number")
    if outputs == "trace":
        raise Mistake("sketch, with outputs='trace': a trace is not sketched; give 'all' or a list of outputs")
    some = reader.record(weights, part(as_inputs(x1), slice(0, 2))).outputs
    chosen = wanted(outputs, some.shape[1])
    if x2 is not None:
        refuse_unlike_outputs(some.shape[1], reader.record(weights, part(as_inputs(x2), slice(0, 2))).outputs.shape[1])
    probe, train = (examples(as_inputs(x1 if each is None else each)) for each in (x1, x2))
    needed = some.element_size() * len(chosen) * (probe * train * len(chosen) + (probe + train) * size)
    refuse_large("sketched kernel", probe, train, outputs=len(chosen), needed=needed)
    record, read = partial(reader.record, weights), partial(use_by_use, reader, chosen)
    left = SketchedPoints(record, read, as_inputs(x1))
    right = left if x2 is None else SketchedPoints(record, read, as_inputs(x2))
    if why := remark(left.jacobian(left.places[0]), probe, 0 if x2 is None else train, size):
        warn(why, stacklevel=4)
    trained = {name: weight for name, weight in weights.items() if name in reader.trained}
    found = sketched_kernel(left, right, trained, size, seed)
    return found._replace(kernel=finite(found.kernel))


def use_by_use(reader: Reader, chosen: Sequence[int], tape: Tape) -> UseByUse:
    """The Jacobian of some examples; where no rules lead through the module, it is said why."""
    try:
        return reader.use_by_use(tape, chosen)
    except NoRule as error:
        warn(error.remark, stacklevel=2)
        return of_features(reader.dense(tape, chosen))


def refuse_size(size: int) -> None:
    """Refuse what is no number of dimensions."""
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31:
        raise Mistake(f"sketch={size!r}: give the number of dimensions that gradients are projected to, such as 1024")
