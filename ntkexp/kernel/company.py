"""Company: whether an example's outputs change when others of its batch are left out.

Ownership sees what examples do to one another after they have met a trained weight. What they do before that, a
batch centred by its own mean say, shows only in the outputs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.recorder import columns
from ntkexp.kernel.tape import Tape
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function

COUPLED = (
    "the module couples the examples of a batch, so it has no tangent kernel; look for batch statistics, or for "
    "operations along the first axis"
)


def refuse_company(function: Function, tape: Tape) -> None:
    """Run the first example by itself, and the others without it."""
    weights = {name: tape[slot].detach() for slot, name in tape.weights.items()}
    inputs = tape[tape.inputs].detach()
    for part in (slice(0, 1), slice(1, None)):
        if len(inputs[part]):
            with torch.no_grad():
                refuse_change(columns(function, weights, inputs[part]), tape.outputs[part], tape.outputs)


def refuse_change(
    apart: Float[Tensor, "part out"], among: Float[Tensor, "part out"], together: Float[Tensor, "example out"]
) -> None:
    """What examples give apart from the others must be what they give among them."""
    # √eps is far more than what another order of summation changes, and far less than what other examples change
    tolerance = torch.finfo(together.dtype).eps ** 0.5 * float(together.abs().max())
    if bool(((apart - among).abs() > tolerance).any()):
        raise Mistake(COUPLED)
