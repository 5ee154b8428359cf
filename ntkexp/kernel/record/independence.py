"""Independence: whether an example's outputs change when others of its batch are left out.

Ownership sees what examples do to one another after they have met a trained weight. What they do before that, a
batch centred by its own mean say, shows only in the outputs.
"""

from __future__ import annotations

from operator import itemgetter

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.record.inputs import map_tensors, part
from ntkexp.kernel.record.tape import Tape, is_whole
from ntkexp.kernel.record.taping import columns
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Inputs

COUPLED = (
    "the module couples the examples of a batch, so it has no tangent kernel; look for batch statistics, or for "
    "operations along the first axis"
)

CHANGING = (
    "the module gives other outputs when it is run again on the same inputs, so it has no tangent kernel; look for "
    "random numbers from outside torch, or for something that it counts"
)

SUMS = frozenset({"add", "sub", "rsub", "neg", "mul", "div", "view", "_unsafe_view", "expand", "squeeze", "unsqueeze"})
"""Operations whose result rounds at the size of what they are given."""

ROUNDINGS = 100.0
"""How often terms may round before anybody is accused."""


def refuse_dependence(function: Function, tape: Tape) -> None:
    """Run all examples once more, the first by itself, and the others without it."""
    weights = {name: tape[slot].detach() for slot, name in tape.weights.items()}
    for some, reason in ((slice(None), CHANGING), (slice(0, 1), COUPLED), (slice(1, None), COUPLED)):
        if len(tape.outputs[some]):
            with torch.no_grad():
                found = columns(function, weights, apart(tape, some))
            refuse_change(found[some] if tape.drawn else found, tape.outputs[some], tape, reason)


def apart(tape: Tape, some: slice) -> Inputs:
    """The inputs of some examples; where random numbers are drawn for a batch as a whole, none is left out, and the
    first of these stands in the place of each other.
    """
    if not tape.drawn:
        return part(tape.given, some)
    everyone = range(len(tape.outputs))
    kept = everyone[some]
    return map_tensors(itemgetter([k if k in kept else kept[0] for k in everyone]), tape.given)


def refuse_change(apart: Float[Tensor, "part out"], among: Float[Tensor, "part out"], tape: Tape, reason: str) -> None:
    """What examples give apart from the others must be what they give among them."""
    # √eps is far more than what another order of summation changes, and far less than what other examples change; where
    # outputs are differences of larger numbers, as of a network and its start, those are what rounds
    tolerance = tape.eps**0.5 * float(tape.outputs.abs().max()) + ROUNDINGS * tape.eps * size_of_terms(tape)
    if bool(((apart - among).abs() > tolerance).any()):
        raise Mistake(reason)


def size_of_terms(tape: Tape) -> float:
    """The largest of the numbers that outputs are added up from."""
    reached = {tape.output}
    for entry in reversed(tape.entries):
        if entry.name in SUMS and not reached.isdisjoint(entry.results):
            reached.update(entry.slots)
    terms = [tape[slot].detach() for slot in reached]
    return max(float(term.abs().max()) for term in terms if not is_whole(term) and term.numel())
