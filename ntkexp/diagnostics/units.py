"""Hidden units in numbers: which are on for which example, where slopes jump, and whether units are tuned to one
task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ntkexp.kernel.record.tape import Tape

# --- Activation patterns: which units of a piecewise linear network are on, for which example.


KINKED = ("relu", "leaky_relu", "abs")


def pattern(tape: Tape) -> Bool[Tensor, " unit"]:
    """The sign at every kink that weights can move, over examples and units."""
    moving = tape.from_inputs & tape.from_weights
    arguments = [entry.slots[0] for entry in tape.entries if entry.name in KINKED]
    signs = [tape[slot].detach().flatten() > 0 for slot in arguments if slot in moving]
    return torch.cat(signs) if signs else torch.zeros(0, dtype=torch.bool)


# --- Kinks of a network: operations on its way from weights to outputs whose slope jumps.


KINKED_OPERATIONS = {
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
    found = [
        KINKED_OPERATIONS[entry.name]
        for entry in tape.entries
        if entry.name in KINKED_OPERATIONS and not moved.isdisjoint(entry.slots)
    ]
    return list(dict.fromkeys(found))


# --- Whether hidden units are tuned to one task, from what they do at the points of each.
#
#     selectivity    Σ_u |r_u(A) − r_u(B)| / Σ_u (r_u(A) + r_u(B))
#
# with r_u(T) the deviation of unit u's activity over the points of task T. It is 0 where all units answer to both
# alike, 1 where each answers to one alone; of more than two tasks, the mean over pairs. Units are what the
# readout takes: the layer with weights that is called last, where others came before it.


def selectivity(answers: Sequence[Float[Tensor, " unit"]]) -> float | None:
    """Compare what units answer to each task; nothing where there is nothing to compare.

    >>> selectivity([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
    1.0
    >>> selectivity([torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])])
    0.0
    """
    found = [(one - other).abs().sum() / (one + other).sum() for one, other in combinations(answers, 2)]
    mean = float(torch.stack(found).mean()) if found else math.nan
    return mean if math.isfinite(mean) else None


def activity(network: nn.Module, call: Callable[[], object]) -> Float[Tensor, "point unit"] | None:
    """What the readout of a network takes during a call of it; nothing where no layer with weights came before."""
    heard: list[Tensor] = []

    def hear(_: nn.Module, given: tuple[object, ...]) -> None:
        heard.extend(value.detach() for value in given[:1] if isinstance(value, Tensor))

    layers = [layer for layer in network.modules() if not list(layer.children()) and list(layer.parameters())]
    handles = [layer.register_forward_pre_hook(hear) for layer in layers]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return heard[-1].flatten(1) if len(heard) > 1 else None
