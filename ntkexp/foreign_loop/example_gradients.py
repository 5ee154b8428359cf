"""Per-example gradients Jᵢᵀℓ′ᵢ of a call, at the weights of the call.

Jᵢ is the Jacobian of example i, and ℓ′ᵢ is ∂L/∂f of this example. If the examples are
independent, one recorded forward pass (a `Tape`) gives all gradients. If BatchNorm
couples the batch, the gradient of an example is the gradient of its term of the loss,
through the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ntkexp.foreign_loop.batch_gradients import (
    CoupledOutputs,
    SplitGradients,
    TermGradients,
    TermProducts,
    at_constants,
    constants_of,
)
from ntkexp.foreign_loop.batch_norm import BatchNormMode, numbers_of
from ntkexp.foreign_loop.call import LayerModes, ModelCall
from ntkexp.foreign_loop.example_losses import part_of_batch
from ntkexp.foreign_loop.fingerprints import Replayed
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.foreign_loop.positions import PositionGradients, Positions
from ntkexp.kernel import Jacobian, ProgramCache, Reader, Tape
from ntkexp.model.functional import Output, as_rows
from ntkexp.path.step_kernel import RightFactor
from ntkexp.shapes import Function, Weights


@dataclass(frozen=True)
class CallReaders:
    """Readers that compute per-example gradients of the recorded calls.

    Calls with the same layer modes and outputs share one `Reader`. So its checks and
    the compilation of its programs run only once."""

    called: CalledModule
    trained: frozenset[str]
    batch_norm: BatchNormMode
    buffer_bytes: float  # memory for gradients of examples
    # number of directions v if only products ⟨v, Jᵢᵀℓ′ᵢ⟩ are needed, None if the
    # gradients themselves are needed
    directions: int | None
    # if given, also compute the gradients by position
    positions: Positions | None
    readers: dict[tuple[LayerModes, Output], Reader] = field(default_factory=dict)
    # ids of the functions of `trace.losses` in which the loss of an example depends on
    # other examples
    coupling: set[int] = field(default_factory=set)
    # by `reader_key`: True if forward-mode derivatives agree with backward passes
    has_products: dict[tuple[LayerModes, Output], bool] = field(default_factory=dict)

    def pulled(self, call: ModelCall, weights: Weights) -> CallGradients:
        """Replay a call at these weights. Return the gradient Jᵢᵀℓ′ᵢ
        of every example, and the outputs."""
        if call.gradient is None:
            raise ValueError("a call without a gradient")
        function = self.called.at(call)
        if self.called.couples(call):
            return self.pulled_through_batch(call, function, weights)
        statistics: Weights = (
            {} if call.statistics is None else numbers_of(call.statistics[0])
        )
        reader, tape = self.recorded(call, function, weights | statistics)
        output_gradient = call.gradient_at(tape.outputs)
        as_copies = reader.programs is not None
        jacobian = reader.weighted(tape, output_gradient, as_copies=as_copies)
        replayed = replayed_call(call, function, weights, tape.outputs)
        by_position = None
        if self.positions is not None:
            by_position = PositionGradients(
                reader, tape, output_gradient.reshape(call.shape), self.positions.axis
            )
        return CallGradients([jacobian], replayed, by_position=by_position)

    def recorded(
        self, call: ModelCall, function: Function, weights: Weights
    ) -> tuple[Reader, Tape]:
        """Record a call whose examples are independent.
        Return its reader and the tape."""
        key = reader_key(call)
        if key not in self.readers:
            self.readers[key] = Reader(function, self.trained, programs=ProgramCache())
        reader = replace(
            self.readers[key],
            function=function,
            repeats_random=bool(call.circumstances.states),
        )
        if reader.is_unfaithful:
            # surrogate gradients need the graph of autograd, which a recorded program
            # lacks
            reader = replace(reader, programs=None)
        return reader, reader.record(weights, call.inputs)

    def pulled_through_batch(
        self, call: ModelCall, function: Function, weights: Weights
    ) -> CallGradients:
        """Return the per-example gradients of a call whose batch is coupled, by
        BatchNorm or in the user's function of `trace.losses`."""
        assert isinstance(call.gradient, Tensor)
        coupled = CoupledOutputs.of(function, weights, call.inputs, self.trained)
        output_gradient = coupled.in_their_shape(call.gradient)

        # the gradient of the whole batch
        is_exact = self.batch_norm == "exact" or call.losses is not None
        totals = coupled.gradients(output_gradient, keep=is_exact)
        whole = dict(zip(coupled.leaves, totals, strict=True))

        # The gradients at constant batch statistics. The reader also checks that nothing
        # else couples the examples.
        features: Sequence[RightFactor] = ()
        is_checked = call.losses is not None or reader_key(call) in self.readers
        if not is_exact or not is_checked:
            constants = constants_of(function, weights, call.inputs)
            reader, tape = self.recorded(
                call, at_constants(function), weights | constants
            )
            features = [
                reader.weighted(
                    tape, call.gradient.to(tape.outputs.dtype), as_copies=True
                )
            ]

        # Otherwise the gradient of each example's term, through the whole batch.
        if is_exact:
            features = (
                self.split_gradients(call, function, weights, coupled)
                or self.term_products(call, function, weights, coupled, whole)
                or TermGradients(coupled, output_gradient, self.buffer_bytes)
            )
        outputs = coupled.outputs.detach()
        replayed = replayed_call(call, function, weights, as_rows(outputs))
        return CallGradients(features, replayed, whole)

    def term_products(
        self,
        call: ModelCall,
        function: Function,
        weights: Weights,
        coupled: CoupledOutputs,
        whole: Weights,
    ) -> TermProducts | None:
        """Return the products ⟨v, gᵢ⟩ of a call with BatchNorm, by forward-mode
        derivatives.

        Return None if backward passes are faster, if the gradients gᵢ themselves are
        needed, if the call is a call of `trace.losses` or draws random numbers, or if
        torch lacks a derivative."""
        if self.directions is None or self.directions >= len(coupled.outputs):
            return None
        if call.losses is not None or call.circumstances.states:
            return None
        assert isinstance(call.gradient, Tensor)
        products = TermProducts(
            function,
            weights,
            call.inputs,
            coupled.in_their_shape(call.gradient),
            whole,
            directions_at_once=coupled.passes_at_once(self.buffer_bytes),
        )
        key = reader_key(call)
        if key not in self.has_products:
            self.has_products[key] = products.agree()
        return products if self.has_products[key] else None

    def split_gradients(
        self,
        call: ModelCall,
        function: Function,
        weights: Weights,
        coupled: CoupledOutputs,
    ) -> SplitGradients | None:
        """Return the gradients of a call of `trace.losses`, each from a few rows of the
        batch.

        Return None for other calls, for calls that draw random numbers, if one group
        holds all examples, or if examples depend on one another."""
        if (
            call.losses is None
            or call.circumstances.states
            or id(call.losses) in self.coupling
        ):
            return None
        assert isinstance(call.gradient, Tensor)

        def losses_of_rows(where: slice) -> Function:
            rows = part_of_batch(call.inputs, len(call.names), where)
            return lambda weights, _: function(weights, rows)

        split = SplitGradients(
            coupled,
            call.gradient.flatten(),
            self.buffer_bytes,
            losses_of_rows=losses_of_rows,
            weights=weights,
        )
        if len(split) == 1:
            return None
        if not split.agree():
            self.coupling.add(id(call.losses))
            return None
        return split


def reader_key(call: ModelCall) -> tuple[LayerModes, Output]:
    """Return the key under which readers are shared: the layer modes, and the names of
    the outputs if several are joined."""
    return call.circumstances.modes, tuple(call.joined)


def replayed_call(
    call: ModelCall, function: Function, weights: Weights, outputs: Tensor
) -> Replayed:
    """Return the outputs of a replayed call,
    to be compared with the recorded fingerprint."""
    joined = tuple(call.joined.values())
    return Replayed(function, weights, call.inputs, outputs, joined=joined)


@dataclass(frozen=True)
class CallGradients:
    """The gradients Jᵢᵀℓ′ᵢ of the examples of a call, and the replayed outputs."""

    features: Sequence[RightFactor]  # the gradients of each group of examples
    replayed: Replayed
    # gradient of a coupled batch, which may differ from the sum of the gradients in
    # `features`
    whole: Weights | None = None
    by_position: PositionGradients | None = None

    @property
    def stored(self) -> Sequence[Jacobian]:
        """The Jacobians in `features`. The list is empty if the gradients do not fit
        into memory, because reading them again would take backward passes."""
        if isinstance(self.features, TermGradients) and not self.features.fits:
            return []
        return [each for each in self.features if isinstance(each, Jacobian)]

    def total(self, weights: Weights) -> Weights:
        """Return the gradient of the call."""
        if self.whole is not None:
            return {
                name: self.whole.get(name, torch.zeros_like(weight))
                for name, weight in weights.items()
            }
        (jacobian,) = self.stored
        return jacobian.total(weights)
