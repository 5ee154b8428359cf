"""Precision: how many digits a run kept, which is as many as the shortest numbers have that weights can change."""

from __future__ import annotations

import torch

from ntkexp.kernel.record.tape import Tape


def eps(tape: Tape) -> float:
    """The largest machine epsilon between weights and outputs."""
    kinds = {tape[slot].dtype for slot in tape.from_weights}
    return max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)
