"""The tangent kernel of a module whose features would not fit, by strips of its parameters."""

from __future__ import annotations

from functools import partial

from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.use_by_use import UseByUse
from ntkexp.kernel.read.by_strips import FITS, fits, kernel_by_strips
from ntkexp.kernel.read.in_turns import InTurns
from ntkexp.kernel.read.outputs import Outputs, wanted
from ntkexp.kernel.read.program_cache import outline
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.inputs import as_inputs, part
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.library.blocks import KernelSide
from ntkexp.shapes import Inputs, Weights


def tangent_by_strips(
    subject: tuple[Reader, Weights],
    x1: Inputs,
    x2: Inputs | None,
    left: KernelSide,
    right: KernelSide,
    outputs: Outputs,
) -> Float[Tensor, "probe out train out_"] | None:
    """The kernel, or None where features fit at once, or no rules lead through the module."""
    (reader, weights), chosen = subject, wanted(outputs, left.outputs)
    trained = sum(weight.nbytes for name, weight in weights.items() if name in reader.trained)
    if trained * len(chosen) * (left.examples + right.examples) <= FITS:
        return None

    def read(tape: Tape) -> UseByUse:
        return reader.use_by_use(tape, chosen)

    record = partial(reader.record, weights)
    one = InTurns(record, read, as_inputs(x1))
    question = outline(part(one.inputs, slice(0, 1))), left.examples, right.examples, len(chosen), trained
    if reader.found.fits.to(question, lambda: looks_small(one, right.examples)):
        return None
    return kernel_by_strips(one, one if x2 is None else InTurns(record, read, as_inputs(x2)))


def looks_small(side: InTurns, train: int) -> bool:
    """Whether features fit, by the first examples; where no rules lead through the module, nothing else is known."""
    few = slice(0, min(2, side.examples))
    try:
        some = side.jacobian(side.places[0] if len(side.places) > 1 else few)
    except NoRule:
        return True
    return fits(some, side.examples, train)
