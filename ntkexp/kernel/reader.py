"""Reading: from what a function did at the ends of a segment to the features of that segment.

There are two readings. On a segment of length zero, a network whose weights are only ever multiplied with inputs is
differentiated by autograd as it ran. Everything else is replayed by the difference rules; at length zero these give
the tangent again, and the tests hold one reading against the other. A tangent through operations without a rule, or of
a module whose gradients are not the derivatives of its values, is read example by example from plain Jacobians.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.arrange import arrange
from ntkexp.kernel.company import refuse_company
from ntkexp.kernel.faithful import UNFAITHFUL, is_faithful
from ntkexp.kernel.features import Features
from ntkexp.kernel.jacobian import jacobian
from ntkexp.kernel.ownership import owners
from ntkexp.kernel.recorder import record
from ntkexp.kernel.replay import Replay
from ntkexp.kernel.rules.base import NoRule
from ntkexp.kernel.tape import Tape
from ntkexp.kernel.uses import Product, Use, plain_products
from ntkexp.shapes import Function, Inputs, Weights


@dataclass(frozen=True)
class Reading:
    """Features of a segment at some inputs, with J̄Δθ as the replay pushed it (zero on a point)."""

    features: Features
    push: Float[Tensor, "example out"]


@dataclass(frozen=True)
class Reader:
    """Reads a function of weights; `trained` names those whose gradients make the kernel."""

    function: Function
    trained: frozenset[str]
    ownership: dict[Any, list[Int[Tensor, "..."]]] = field(default_factory=dict, repr=False)
    faithful: dict[Any, bool] = field(default_factory=dict, repr=False)

    def record(self, weights: Weights, inputs: Inputs) -> Tape:
        """Run the function once; the tape can be read at length zero any number of times."""
        return record(self.function, weights, inputs, differentiable=True)

    def tangent(self, tape: Tape, chosen: Sequence[int] | None = None) -> Features:
        """The features J(θ; x) of a point, of all outputs or the chosen ones."""
        try:
            return self.factored(tape, chosen)
        except NoRule:
            return jacobian(self.function, tape, self.trained, those(tape, chosen))

    def factored(self, tape: Tape, chosen: Sequence[int] | None = None) -> Features:
        """The features of a point through whose operations differences can be passed."""
        owned = self.owned(tape)
        differentiable = tape[tape.output].requires_grad and not tape.overwrites
        uses = plain_products(tape, self.trained) if differentiable else None
        if uses is not None:
            weights = {name: tape[slot] for slot, name in tape.weights.items()}
            return features(tape[tape.output], uses, owned, weights, those(tape, chosen))
        return self.secant(tape, tape, chosen).features

    def secant(self, start: Tape, end: Tape, chosen: Sequence[int] | None = None) -> Reading:
        """The features J̄(x) of a segment."""
        replay, owned = Replay(start, end, self.trained), self.owned(start)
        if not self.is_faithful(start):
            raise NoRule(UNFAITHFUL)
        pieces = features(replay.delta, replay.uses, owned, replay.leaves, those(start, chosen))
        return Reading(pieces, replay.delta.detach())

    def owned(self, tape: Tape) -> list[Int[Tensor, "..."]]:
        """Which example owns what, asked once for every structure."""
        if tape.structure not in self.ownership:
            refuse_company(self.function, tape)
            self.ownership[tape.structure] = owners(tape, self.trained)
        return self.ownership[tape.structure]

    def is_faithful(self, tape: Tape) -> bool:
        """Whether autograd differentiates the values, asked once for every structure."""
        if tape.structure not in self.faithful:
            self.faithful[tape.structure] = is_faithful(self.function, tape, self.trained, self.owned(tape))
        return self.faithful[tape.structure]


def those(tape: Tape, chosen: Sequence[int] | None) -> Sequence[int]:
    """The chosen outputs, or all."""
    return range(tape.outputs.shape[1]) if chosen is None else chosen


def features(
    output: Float[Tensor, "example out"],
    uses: list[Product] | list[Use],
    owned: list[Int[Tensor, "..."]],
    leaves: Weights,
    chosen: Sequence[int],
) -> Features:
    """Differentiate the outputs at every use, and arrange the pieces by example."""
    taps = [use.tap for use in uses]
    pulled = []
    for c in chosen if taps else ():
        with torch.enable_grad():
            column = output[:, c].sum()
        pulled.append(torch.autograd.grad(column, taps, retain_graph=True, materialize_grads=True))
    cotangents = [torch.stack(parts) for parts in zip(*pulled, strict=True)]
    return arrange(uses, cotangents, owned, len(output), len(chosen), leaves)
