"""Faithfulness: whether a module's gradients are the derivatives of its values.

With `detach`, a straight-through estimator or an autograd.Function of its own a module may train by something else.
Difference rules see values alone, so one random vector-Jacobian product is taken both ways: by the rules on a segment
of length zero, and by autograd through the module as it is.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.arrange import arrange
from ntkexp.kernel.ownership import Owners
from ntkexp.kernel.precision import eps
from ntkexp.kernel.recorder import columns, plain_kernels
from ntkexp.kernel.replay import Replay
from ntkexp.kernel.tape import Tape
from ntkexp.shapes import Function, Weights
from ntkexp.stream import stream

UNFAITHFUL = (
    "the module's gradients are not the derivatives of its values (look for detach, a straight-through estimator or an "
    "autograd.Function), so what a secant explains is not what trains it"
)


def is_faithful(function: Function, tape: Tape, trained: frozenset[str], owned: Owners) -> bool:
    """Both ways agree, up to what rounding could do."""
    noise = torch.randn(tape.outputs.shape, generator=stream("faithfulness"), dtype=torch.float64)
    cotangent = noise.to(tape.outputs)
    values, gradients = by_rules(tape, trained, owned, cotangent), by_autograd(function, tape, trained, cotangent)
    # √eps is far more than another order of summation changes, and far less than a gradient that is left out
    tolerance = eps(tape) ** 0.5 * max(float(gradient.abs().max()) for gradient in gradients.values())
    return all(bool(((values[name] - gradients[name]).abs() <= tolerance).all()) for name in gradients)


def by_rules(tape: Tape, trained: frozenset[str], owned: Owners, cotangent: Float[Tensor, "example out"]) -> Weights:
    """Through the replay on a segment of length zero."""
    replay = Replay(tape, tape, trained)
    taps = [use.tap for use in replay.uses]
    pulled = torch.autograd.grad(replay.delta, taps, cotangent, retain_graph=True, materialize_grads=True)
    found = arrange(replay.uses, [part[None] for part in pulled], owned, len(cotangent), 1, replay.leaves)
    return found.total({name: leaf.detach() for name, leaf in replay.leaves.items()})


def by_autograd(
    function: Function, tape: Tape, trained: frozenset[str], cotangent: Float[Tensor, "example out"]
) -> Weights:
    """Through the module as it is."""
    weights = {name: tape[slot].detach().requires_grad_(name in trained) for slot, name in tape.weights.items()}
    leaves = {name: weight for name, weight in weights.items() if name in trained}
    with torch.enable_grad(), plain_kernels():
        output = columns(function, weights, tape.given)
    if not output.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(output, list(leaves.values()), cotangent, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
