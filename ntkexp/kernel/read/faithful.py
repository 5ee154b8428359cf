"""Faithfulness: whether a module's gradients are the derivatives of its values.

With `detach`, a straight-through estimator or an autograd.Function of its own a module may train by something else.
Difference rules see values alone, so one random vector-Jacobian product is taken both ways: by the rules on a segment
of length zero, and by autograd through the module as it is.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.features.features import nothing
from ntkexp.kernel.features.use_by_use import keep_uses
from ntkexp.kernel.record.out_of_memory import is_out_of_memory
from ntkexp.kernel.record.tape import Tape, is_whole
from ntkexp.kernel.record.taping import columns, plain_kernels, record, unfused
from ntkexp.kernel.secant.ownership import Owners, have_owners
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.uses import Use
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Weights
from ntkexp.stream import stream

UNFAITHFUL = (
    "the module's gradients are not the derivatives of its values (look for detach, a straight-through estimator or an "
    "autograd.Function), so what a secant explains is not what trains it"
)


def is_faithful(function: Function, tape: Tape, trained: frozenset[str], owned: Owners) -> bool:
    """Rules and autograd agree, up to what rounding could do.

    In single precision a value within rounding of a kink may lie on its other side when the module runs again, and many
    units have some: whoever disagrees there is asked again in double precision.
    """
    if agree_both_ways(function, tape, trained, owned):
        return True
    doubled = in_double(function, tape)
    return doubled is not None and agree_both_ways(function, doubled, trained, owned)


def in_double(function: Function, tape: Tape) -> Tape | None:
    """What the function does in double precision with the same numbers, if that is the same program in longer ones."""
    weights = {name: tape[slot].detach() for slot, name in tape.weights.items()}
    if all(weight.dtype == torch.float64 for weight in weights.values()):
        return None
    try:
        both = tree_map(doubled, (weights, tape.given))
        found = record(function, *both, differentiable=tape[tape.output].requires_grad, known=bool(tape.drawn))
    except (RuntimeError, Mistake) as error:  # of buffers that stay short, for one
        if is_out_of_memory(error):
            raise
        return None
    return found if [entry.op for entry in found.entries] == [entry.op for entry in tape.entries] else None


def doubled(value: Any) -> Any:
    """A tensor of numbers in double precision; anything else as it is."""
    if not isinstance(value, Tensor) or is_whole(value):
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def agree_both_ways(function: Function, tape: Tape, trained: frozenset[str], owned: Owners) -> bool:
    """One random product, by the rules and by autograd."""
    refuse_no_numbers(tape)
    cotangent = random_cotangent(tape)
    gradients = by_autograd(function, tape, trained, cotangent)
    if any(gradient.isnan().any() for gradient in gradients.values()):
        raise NoRule(f"autograd's gradients are no numbers{where_spoiled(function, tape, trained, cotangent)}")
    values = by_rules(tape, trained, owned, cotangent)
    if any(value.isnan().any() for value in values.values()):
        raise NoRule("the difference rules give no numbers, where something infinite cancels")
    return agree(values, gradients, tape)


def is_as_it_runs(function: Function, tape: Tape, trained: frozenset[str], uses: Sequence[Use], owned: Owners) -> bool:
    """What the recorded graph gives at the uses adds up to the module's own gradients, and every element has an owner.

    A write under no_grad, once rewritten, has another graph.
    """
    if not have_owners(uses, owned):
        return False
    cotangent = random_cotangent(tape)
    leaves = {name: tape[slot] for slot, name in tape.weights.items() if name in trained}
    found = gradients_at(uses, tape[tape.output], cotangent, owned, leaves)
    return agree(found, by_autograd(function, tape, trained, cotangent), tape)


def gradients_at(
    uses: Sequence[Use], output: Tensor, cotangent: Float[Tensor, "example out"], owned: Owners, leaves: Weights
) -> Weights:
    """Gradients, put together from those at the uses."""
    taps = [use.tap for use in uses]
    pulled = torch.autograd.grad(output, taps, cotangent, retain_graph=True, materialize_grads=True) if taps else ()
    found = keep_uses(uses, [part[None] for part in pulled], owned.of_uses, len(cotangent), 1, leaves)
    return found.add_to(nothing({name: leaf.detach() for name, leaf in leaves.items()}))


def random_cotangent(tape: Tape) -> Float[Tensor, "example out"]:
    """One for all outputs."""
    noise = torch.randn(tape.outputs.shape, generator=stream("faithfulness"), dtype=torch.float64)
    return noise.to(tape.outputs)


def agree(values: Weights, gradients: Weights, tape: Tape) -> bool:
    """Whether two ways to the same gradients differ by rounding alone."""
    # √eps is far more than another order of summation changes, and far less than a gradient that is left out
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel())
    return all(bool(((values[name] - gradients[name]).abs() <= tape.eps**0.5 * largest).all()) for name in gradients)


def refuse_no_numbers(tape: Tape) -> None:
    """Outputs that are no numbers have no differences; said is which operation made the first."""
    if not tape.outputs.isnan().any():
        return
    known = [not is_whole(value) and bool(value.isnan().any()) for value in tape.values]
    made = (entry.op for entry in tape.entries if any(known[slot] for slot in entry.results))
    raise NoRule(f"outputs of the module are no numbers, from {next(made, 'its inputs or weights')} on")


def where_spoiled(
    function: Function, tape: Tape, trained: frozenset[str], cotangent: Float[Tensor, "example out"]
) -> str:
    """Where autograd's gradients stop being numbers, by its own account."""
    try:
        with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
            by_autograd(function, tape, trained, cotangent)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        found = re.search(r"Function '(\w+?)(?:Backward\d*)?' returned nan", str(error))
        return f", from {found[1]} on" if found else ""
    return ""


def by_rules(tape: Tape, trained: frozenset[str], owned: Owners, cotangent: Float[Tensor, "example out"]) -> Weights:
    """Gradients by the replay on a segment of length zero."""
    replay = Replay(tape, tape, trained, owned.constants)
    return gradients_at(replay.uses, replay.delta, cotangent, owned, replay.leaves)


def by_autograd(
    function: Function, tape: Tape, trained: frozenset[str], cotangent: Float[Tensor, "example out"]
) -> Weights:
    """Gradients by the module as it is."""
    weights = {name: tape[slot].detach().requires_grad_(name in trained) for slot, name in tape.weights.items()}
    leaves = {name: weight for name, weight in weights.items() if name in trained}
    with torch.enable_grad(), plain_kernels(), unfused():  # cuDNN has no way back through a layer in evaluation
        output = columns(function, weights, tape.given)
    if not output.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(output, list(leaves.values()), cotangent, materialize_grads=True)
    return dict(zip(leaves, map(dense, found), strict=True))


def dense(gradient: Tensor) -> Tensor:
    """The same numbers, also of a table that gives those of some rows alone."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
