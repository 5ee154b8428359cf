"""The gradients Jᵀℓ′ of the examples of a call, at the weights at which it was called.

A call whose examples do not depend on one another is read from a tape. If norms couple its batch, the gradient of an
example is that of its own term through the whole batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ntkexp.foreign_loop.batch_norm import (
    BatchNormMode,
    TermGradients,
    at_constants,
    constants_of,
    differentiated,
    numbers_of,
)
from ntkexp.foreign_loop.call import LayerModes, ModelCall
from ntkexp.foreign_loop.model_function import CalledModule, Replayed
from ntkexp.foreign_loop.positions import PositionGradients, Positions
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape
from ntkexp.shapes import Function, Weights


@dataclass(frozen=True)
class CallReaders:
    """Readers of the calls of a loop, one for the module in each of its modes: what was found out of it stays known."""

    called: CalledModule
    trained: frozenset[str]
    batch_norm: BatchNormMode = "exact"
    room: float = 1e9  # bytes that gradients of examples may take
    positions: Positions | None = None  # whose gradients are read as well
    readers: dict[LayerModes, Reader] = field(default_factory=dict)

    def pulled(self, call: ModelCall, weights: Weights) -> CallGradients:
        """Jᵀℓ′ of every example of a call, at these weights; and the call as it was replayed for that."""
        if call.gradient is None:
            raise ValueError("a call without a gradient")
        function = self.called.at(call)
        if self.called.couples(call):
            return self.pulled_through_batch(call, function, weights)
        beside = {} if call.statistics is None else numbers_of(call.statistics[0])
        reader, tape = self.recorded(call, function, weights | beside)
        came = call.gradient.to(tape.outputs.dtype)
        features = reader.weighted(tape, came, as_copies=True)
        found = CallGradients([features], Replayed(function, weights, call.inputs, tape.outputs))
        if self.positions is None:
            return found
        return replace(
            found,
            by_position=PositionGradients(
                reader, tape, came.reshape(call.shape), self.positions.axis
            ),
        )

    def recorded(
        self, call: ModelCall, function: Function, weights: Weights
    ) -> tuple[Reader, Tape]:
        """A call on a tape, and the reader of it: each of its examples depends on no other."""
        modes = call.how.modes
        if modes not in self.readers:
            self.readers[modes] = Reader(function, self.trained, programs=ProgramCache())
        reader = replace(self.readers[modes], function=function, known=bool(call.how.states))
        return reader, reader.record(weights, call.inputs)

    def pulled_through_batch(
        self, call: ModelCall, function: Function, weights: Weights
    ) -> CallGradients:
        """The same where norms couple the batch: of an example's term through all of it, or at constant statistics,
        which also show whether anything else couples examples."""
        assert call.gradient is not None
        outputs, leaves, graph_bytes = differentiated(function, weights, call.inputs, self.trained)
        came = call.gradient.reshape(outputs.shape).to(outputs.dtype)
        begun, keep = time.monotonic(), self.batch_norm == "exact"
        found = torch.autograd.grad(
            outputs, list(leaves.values()), came, retain_graph=keep, materialize_grads=True
        )
        seconds = time.monotonic() - begun
        whole, rows = dict(zip(leaves, found, strict=True)), outputs.detach()
        features: Sequence[Jacobian] = ()
        if self.batch_norm == "constant" or call.how.modes not in self.readers:
            constants = constants_of(function, weights, call.inputs)
            reader, tape = self.recorded(call, at_constants(function), weights | constants)
            features = [reader.weighted(tape, call.gradient.to(tape.outputs.dtype), as_copies=True)]
        if self.batch_norm == "exact":
            features = TermGradients(outputs, came, leaves, graph_bytes, self.room)
        rows = rows[:, None] if rows.dim() == 1 else rows.flatten(1)
        return CallGradients(
            features, Replayed(function, weights, call.inputs, rows), whole, seconds
        )


@dataclass(frozen=True)
class CallGradients:
    """Jᵀℓ′ of the examples of a call, some at a time, and the call as it was replayed for that. Where norms couple its
    batch, `whole` is the gradient of all, which the examples' may not add up to."""

    features: Sequence[Jacobian]
    replayed: Replayed
    whole: Weights | None = None
    seconds: float = 0.0  # that a pass back took
    by_position: PositionGradients | None = None

    @property
    def can_be_reread(self) -> bool:
        """Whether `features` can be gone through twice without a pass backwards for each example."""
        return not isinstance(self.features, TermGradients) or self.features.fits

    def total(self, weights: Weights) -> Weights:
        """The gradient of the call."""
        if self.whole is not None:
            return {
                name: self.whole.get(name, torch.zeros_like(weight))
                for name, weight in weights.items()
            }
        (features,) = self.features
        return features.total(weights)
