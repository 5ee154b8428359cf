"""Reading: from what a function did at the ends of a segment to the features of that segment.

There are two readings. On a segment of length zero, a network whose weights are only ever multiplied with inputs is
differentiated by autograd as it ran. Everything else is replayed by the difference rules; at length zero these give
the tangent again, and the tests hold one reading against the other. A tangent through operations without a rule is
read example by example from plain Jacobians.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.arrange import arrange
from ntkexp.kernel.company import refuse_company
from ntkexp.kernel.features import Features
from ntkexp.kernel.jacobian import jacobian
from ntkexp.kernel.ownership import owners
from ntkexp.kernel.plan import Plan
from ntkexp.kernel.recorder import record
from ntkexp.kernel.replay import Replay
from ntkexp.kernel.rules.base import NoRule
from ntkexp.kernel.tape import Tape
from ntkexp.kernel.uses import Product, Use, plain_products
from ntkexp.shapes import Function, Weights


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
    plan: Plan | None = field(default=None, repr=False)

    def record(self, weights: Weights, inputs: Float[Tensor, "example *shape"]) -> Tape:
        """Run the function once; the tape can be read at length zero any number of times."""
        if self.plan is None:
            return record(self.function, weights, inputs, differentiable=True)
        return self.plan.tape(weights, inputs, lambda: record(self.function, weights, inputs).pruned())

    def tangent(self, tape: Tape) -> Features:
        """The features J(θ; x) of a point."""
        try:
            return self.factored(tape)
        except NoRule:
            return jacobian(self.function, tape, self.trained)

    def factored(self, tape: Tape) -> Features:
        """The features of a point through whose operations differences can be passed."""
        if self.plan is not None:
            return self.along(tape, tape)
        owned = self.owned(tape)
        uses = None if tape.overwrites else plain_products(tape, self.trained)
        if uses is not None:
            weights = {name: tape[slot] for slot, name in tape.weights.items()}
            return features(tape[tape.output], uses, owned, weights)
        return self.secant(tape, tape).features

    def along(self, start: Tape, end: Tape) -> Features:
        """The features J̄(x) of a segment."""
        if self.plan is None:
            return self.secant(start, end).features
        owned = self.owned(start)

        def usual(at_once: bool) -> Features:
            replay = Replay(start, end, self.trained)
            return features(replay.delta, replay.uses, owned, replay.leaves, at_once=at_once)

        return self.plan.read(start, end, usual)

    def secant(self, start: Tape, end: Tape) -> Reading:
        """The features J̄(x) of a segment, and J̄Δθ."""
        replay = Replay(start, end, self.trained)
        pieces = features(replay.delta, replay.uses, self.owned(start), replay.leaves)
        return Reading(pieces, replay.delta.detach())

    def owned(self, tape: Tape) -> list[Int[Tensor, "..."]]:
        """Which example owns what, asked once for every structure."""
        if tape.structure not in self.ownership:
            refuse_company(self.function, tape)
            self.ownership[tape.structure] = owners(tape, self.trained)
        return self.ownership[tape.structure]


def features(
    output: Float[Tensor, "example out"],
    uses: list[Product] | list[Use],
    owned: list[Int[Tensor, "..."]],
    leaves: Weights,
    *,
    at_once: bool = False,
) -> Features:
    """Differentiate the outputs at every use, one by one or all at once, and arrange the pieces by example."""
    examples, outputs = output.shape
    taps = [use.tap for use in uses]
    pull = pulled_at_once if at_once and outputs > 1 else pulled_one_by_one
    cotangents = pull(output, taps) if taps else []
    return arrange(uses, cotangents, owned, examples, outputs, leaves)


def pulled_one_by_one(output: Float[Tensor, "example out"], taps: list[Tensor]) -> list[Float[Tensor, "out ..."]]:
    """∂f/∂tap, with a back-propagation for every output."""
    pulled = [
        torch.autograd.grad(output, taps, cotangent, retain_graph=True, materialize_grads=True)
        for cotangent in each_output(output)
    ]
    return [torch.stack(columns) for columns in zip(*pulled, strict=True)]


def pulled_at_once(output: Float[Tensor, "example out"], taps: list[Tensor]) -> list[Float[Tensor, "out ..."]]:
    """∂f/∂tap, with a back-propagation in which every operation runs for all outputs."""
    cotangents = each_output(output)
    found = torch.autograd.grad(output, taps, cotangents, retain_graph=True, is_grads_batched=True, allow_unused=True)
    return [
        tap.detach().new_zeros(len(cotangents), *tap.shape) if pulled is None else pulled
        for tap, pulled in zip(taps, found, strict=True)
    ]


def each_output(output: Float[Tensor, "example out"]) -> Float[Tensor, "out example out"]:
    """One for each output in turn, of all examples."""
    each = torch.eye(output.shape[1], dtype=output.dtype, device=output.device)
    return each[:, None].expand(-1, *output.shape)
