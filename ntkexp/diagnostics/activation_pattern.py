"""Activation patterns: which units of a piecewise linear network are on, for which example."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from ntkexp.kernel.record.tape import Tape

KINKED = ("relu", "leaky_relu", "abs")


def pattern(tape: Tape) -> Bool[Tensor, " unit"]:
    """The sign at every kink that weights can move, over examples and units."""
    moving = tape.from_inputs & tape.from_weights
    arguments = [entry.slots[0] for entry in tape.entries if entry.name in KINKED]
    signs = [tape[slot].detach().flatten() > 0 for slot in arguments if slot in moving]
    return torch.cat(signs) if signs else torch.zeros(0, dtype=torch.bool)
