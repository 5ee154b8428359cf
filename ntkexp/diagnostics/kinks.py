"""Kinks of a network: operations on its way from weights to outputs whose slope jumps."""

from __future__ import annotations

from ntkexp.kernel.record.tape import Tape

KINKED = {
    "relu": "relu",
    "leaky_relu": "leaky_relu",
    "_prelu_kernel": "prelu",
    "hardtanh": "hardtanh",
    "hardsigmoid": "hardsigmoid",
    "threshold": "threshold",
    "abs": "abs",
    "clamp": "clamp",
    "clamp_min": "clamp",
    "clamp_max": "clamp",
    "maximum": "maximum",
    "minimum": "minimum",
    "max": "max",
    "max_pool2d_with_indices": "max pooling",
    "max_pool3d_with_indices": "max pooling",
    "adaptive_max_pool2d": "max pooling",
}
"""The operations, each by the name that people know."""


def kinks(tape: Tape) -> list[str]:
    """Name the operations with kinks among whose arguments are some that weights move, each once."""
    moved = tape.from_weights
    found = [KINKED[entry.name] for entry in tape.entries if entry.name in KINKED and not moved.isdisjoint(entry.slots)]
    return list(dict.fromkeys(found))
