"""The kernel of features that are read for some outputs at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from warnings import warn

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.features.gathered import in_few_uses
from ntkexp.kernel.features.gram import gram, trace
from ntkexp.kernel.read.batches import Batches
from ntkexp.kernel.read.outputs import Outputs, chunks, wanted
from ntkexp.kernel.read.threads import Work, threads_for, work
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.library.large import refuse_large

MANY = 10**8  # numbers, of which it is asked how long they are


@dataclass(frozen=True)
class KernelSide:
    """One side of a kernel: how the features of some outputs are read, and how much there is of it."""

    read: Callable[[Sequence[int]], Features]
    examples: int
    outputs: int
    work: Work
    record: Callable[[], Tape]  # some of the examples


def side(batches: Batches) -> KernelSide:
    """A point."""
    tape = batches.tape
    return KernelSide(
        lambda chosen: tangent(batches, chosen), batches.examples, tape.outputs.shape[1], work(tape), lambda: tape
    )


def tangent(batches: Batches, chosen: Sequence[int]) -> Features:
    """The features of a point; where no rules lead through the module, it is said why, and Jacobians are taken."""
    try:
        return batches.read(batches.reader.factored, chosen)
    except NoRule as error:
        warn(error.remark, stacklevel=6)
        return batches.read(lambda tape, chosen, _: batches.reader.dense(tape, chosen), chosen)


def kernel(left: KernelSide, right: KernelSide, outputs: Outputs) -> Float[Tensor, "probe out train out_"]:
    """The kernel of features that are read for some outputs at a time."""
    chosen = wanted(outputs, left.outputs)
    with threads_for(left.work.of_kernel((left.examples, right.examples), len(chosen))):
        if outputs != "trace":
            return between(left, right, chosen, gram)
        some = chunks(left.record(), max(left.examples, right.examples), left.outputs, left.read)
        return reduce(torch.add, (between(left, right, chunk, trace) for chunk in some))


def refuse_pairs(left: KernelSide, right: KernelSide, outputs: Outputs) -> None:
    """Refuse blocks of so many outputs that the machine has no memory for them."""
    if outputs == "trace":
        return
    count = len(wanted(outputs, left.outputs))
    numbers = left.examples * right.examples * count**2
    if numbers > MANY:
        choice, needed = "outputs=[0], their sum by outputs='trace'", numbers * left.record().outputs.element_size()
        refuse_large("kernel", left.examples, right.examples, outputs=count, needed=needed, choice=choice)


def between(
    left: KernelSide, right: KernelSide, chosen: Sequence[int], inner: Callable[[Features, Features], Tensor]
) -> Tensor:
    """The kernel of some outputs; features of the same side are read once."""
    ones = in_few_uses(left.read(chosen))
    return inner(ones, ones if left is right else in_few_uses(right.read(chosen)))
