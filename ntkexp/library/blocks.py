"""The kernel of features that are read for some outputs at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from warnings import warn

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.features.gram import gram, trace
from ntkexp.kernel.read.batches import Batches
from ntkexp.kernel.read.outputs import Outputs, chunks, wanted
from ntkexp.kernel.read.threads import operations, threads_for
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.rules.base import NoRule


def tangent(batches: Batches, chosen: Sequence[int]) -> Features:
    """The features of a point; where no rules lead through the module, it is said why, and Jacobians are taken."""
    try:
        return batches.read(batches.reader.factored, chosen)
    except NoRule as error:
        warn(error.remark, stacklevel=6)
        return batches.read(batches.reader.dense, chosen)


def kernel(
    left: Callable[[Sequence[int]], Features],
    right: Callable[[Sequence[int]], Features],
    tape: Tape,
    counts: tuple[int, int],
    outputs: Outputs,
) -> Float[Tensor, "probe out train out_"]:
    """The kernel of features that are read for some outputs at a time; of so many examples, as on the tape."""
    count = tape.outputs.shape[1]
    chosen = wanted(outputs, count)
    with threads_for(operations(tape, counts, len(chosen))):
        if outputs != "trace":
            return between(left, right, chosen, gram)
        some = chunks(tape, max(counts), count, left)
        return reduce(torch.add, (between(left, right, chunk, trace) for chunk in some))


def between(
    left: Callable[[Sequence[int]], Features],
    right: Callable[[Sequence[int]], Features],
    chosen: Sequence[int],
    inner: Callable[[Features, Features], Tensor],
) -> Tensor:
    """The kernel of some outputs; features of the same tape are read once."""
    ones = left(chosen)
    return inner(ones, ones if left is right else right(chosen))
