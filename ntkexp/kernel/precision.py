"""Precision: how many digits a run kept, which is as many as the shortest numbers on its tape have."""

from __future__ import annotations

import torch

from ntkexp.kernel.tape import Tape


def eps(tape: Tape) -> float:
    """The largest machine epsilon among the numbers that the outputs were computed with."""
    kinds = {value.dtype for value in tape.values if value.is_floating_point()}
    return max(torch.finfo(kind).eps for kind in kinds)
