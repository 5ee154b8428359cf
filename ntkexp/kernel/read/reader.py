"""Read the Jacobian of a function from its tapes: the tangent Jacobian at one point in
weight space, or the secant Jacobian along a segment between two points.

There are three ways to read a Jacobian. The reader uses the first one that is valid:

1. For a tangent Jacobian, autograd differentiates the recorded operations. This works if the
   network combines weights with inputs only in products, norms and sums.
2. The difference rules are applied to the tapes (a replay). On a segment of length zero, this
   gives the tangent Jacobian too, and the tests compare both ways.
3. A tangent Jacobian is computed example by example, if an operation has no rule, or if the
   gradients of the module are not the derivatives of its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.assemble import (
    NO_BUFFERS,
    PulledBack,
    assemble,
    assemble_uses,
    pull_back,
)
from ntkexp.kernel.features.blocks import Factored, Key, Rows
from ntkexp.kernel.features.gram import Sizes, exclusive_keys
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.checks import (
    CheckCache,
    Checks,
    Unfaithful,
    dense,
    differentiable_weights,
)
from ntkexp.kernel.read.plan import Mixtures
from ntkexp.kernel.read.program_cache import ProgramCache, Request
from ntkexp.kernel.record.independence import Trial
from ntkexp.kernel.record.tape import Tape, part
from ntkexp.kernel.record.taping import columns, record
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.ownership import Owners
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.segment import Closure, closure
from ntkexp.kernel.secant.uses import View
from ntkexp.mistake import NO_DEPENDENCE, Mistake
from ntkexp.shapes import Function, Inputs, Weights


@dataclass(frozen=True)
class Reading:
    """The secant Jacobian J̄ of a segment, and the change J̄Δθ from the forward pass of
    the difference rules. At a point, J̄Δθ is zero."""

    jacobian: Jacobian
    jvp: Float[Tensor, "example out"]


@dataclass(frozen=True)
class Reader:
    """A reader of the Jacobian of a function with respect to the weights named
    in `trained`.

    Set `repeats_random` if the function draws the same random numbers every time it
    runs on a batch. Set `whole_batch` if the function runs only on its whole batch. Set
    `of_values` to allow secants of functions whose gradients are not the derivatives of
    their values."""

    function: Function
    trained: frozenset[str]
    check_cache: CheckCache = field(default_factory=CheckCache, repr=False)
    programs: ProgramCache | None = field(default=None, repr=False)
    repeats_random: bool = False
    whole_batch: bool = False
    of_values: bool = False

    @cached_property
    def checks(self) -> Checks:
        """The checks of the function. With programs, assume that the constants on its
        tapes never change."""
        return Checks(
            self.function,
            self.trained,
            self.check_cache,
            fixed=self.programs is not None,
        )

    def record(self, weights: Weights, inputs: Inputs) -> Tape:
        """Run the function once and return its tape,
        which can be read any number of times."""
        # compiled programs draw no random numbers
        if self.programs is not None and not self.repeats_random:
            return self.programs.record(
                self.function, weights, inputs, whole_batch=self.whole_batch
            )
        tape = record(
            self.function,
            weights,
            inputs,
            differentiable=self.programs is None,
            repeats_random=self.repeats_random,
            whole_batch=self.whole_batch,
        )
        return tape if self.programs is None else tape.pruned()

    def tangent(self, tape: Tape, chosen: Sequence[int] | None = None) -> Jacobian:
        """Return J(θ; x) of all outputs or the chosen ones."""
        try:
            return self.assembled(tape, chosen)
        except NoRule:
            return self.one_by_one(tape, chosen)

    def assembled(
        self,
        tape: Tape,
        chosen: Sequence[int] | None = None,
        buffers: Weights = NO_BUFFERS,
    ) -> Jacobian:
        """Return J(θ; x) with one block for each parameter, from the operations on the
        tape. Raise NoRule if that is impossible.

        `buffers` may hold buffers for the gradients (see `assemble`).
        """
        mixtures = Mixtures.of(tape, chosen)
        if self.programs is not None:
            return self.by_program(tape, tape, mixtures)
        return assemble(self.pulled_back(tape, mixtures), buffers)

    def use_by_use(self, tape: Tape, chosen: Sequence[int] | None = None) -> Jacobian:
        """Return J(θ; x) with one block for each use of a weight. This saves memory if
        examples read only a few rows of a large embedding table."""
        return assemble_uses(self.pulled_back(tape, Mixtures.of(tape, chosen)))

    def one_by_one(self, tape: Tape, chosen: Sequence[int] | None = None) -> Jacobian:
        """Return J(θ; x) by one back-propagation for every example and output. This
        works for all operations."""
        return self.mixed_one_by_one(tape, Mixtures.of(tape, chosen).columns)

    def mixed_one_by_one(
        self, tape: Tape, mixtures: Float[Tensor, "mixture example out"]
    ) -> Jacobian:
        """Return the tangent Jacobian of weighted sums of outputs (mixtures), by one
        backward pass for each example and mixture. This works for any module, and is
        slow.

        Run every example alone. If its outputs alone and in the batch differ, the
        module couples examples: raise Mistake. If the module needs its whole batch, run
        all examples each time instead.
        """
        weights, leaves = differentiable_weights(tape, self.trained)
        rows: dict[str, list[Tensor]] = {name: [] for name in leaves}
        together = tape.outputs
        alone = Trial(self.function, tape, tape.recorded_weights, together)
        for k in range(len(together)):
            this = slice(k, k + 1)
            with torch.enable_grad():
                outputs = columns(
                    self.function,
                    weights,
                    tape.given if tape.needs_whole_batch else part(tape.given, this),
                )
            output = outputs[this] if tape.needs_whole_batch else outputs
            alone.refuse_coupling(output.detach(), together[this], tape.given, together)
            if not output.requires_grad:
                raise Mistake(NO_DEPENDENCE)
            for mixture in mixtures[:, this]:
                gradients = torch.autograd.grad(
                    output,
                    list(leaves.values()),
                    mixture,
                    retain_graph=True,
                    materialize_grads=True,
                )
                for name, gradient in zip(leaves, gradients, strict=True):
                    rows[name].append(dense(gradient).flatten())
        shape = (len(together), len(mixtures), -1)
        blocks = tuple(
            Rows(torch.stack(gradients_of).view(shape), name)
            for name, gradients_of in rows.items()
        )
        return Jacobian(blocks, len(together), len(mixtures))

    def weighted(
        self,
        tape: Tape,
        output_gradient: Float[Tensor, "example out"],
        *,
        as_copies: bool = False,
    ) -> Jacobian:
        """Return the gradient J(θ; x)ᵀℓ′ (ℓ′: `output_gradient`) of every example, by
        one back-propagation. The result is a Jacobian with one output.

        With `as_copies`, the blocks of lookup tables may be `Copies` (see
        `assemble`)."""
        mixture = Mixtures(output_gradient, None)
        try:
            if self.programs is not None:
                return self.by_program(tape, tape, mixture, as_copies=as_copies)
            return assemble(self.pulled_back(tape, mixture), as_copies=as_copies)
        except NoRule as error:
            # record again without programs, because autograd cannot differentiate a
            # tape from a program
            if isinstance(error, Unfaithful) and self.programs is not None:
                plain = replace(self, programs=None)
                plain_tape = plain.record(tape.recorded_weights, tape.given)
                return plain.weighted(plain_tape, output_gradient)
            return self.mixed_one_by_one(tape, mixture.columns)

    def applied(self, tape: Tape, weights: Weights) -> Float[Tensor, "example out"]:
        """Return J(θ; x)v for a vector v in the shape of the weights, by one forward
        pass of the difference rules."""
        try:
            constants = self.checks.faithful_owners(tape).constants
            return Replay(
                tape, tape, self.trained, constants, direction=weights
            ).delta.detach()
        except NoRule:
            return self.one_by_one(tape).applied(weights)

    def obstacle(self, tape: Tape) -> str | None:
        """Return the reason why the Jacobian at a point must be read example by
        example, or None if there is no reason."""
        try:
            replace(self, programs=None).assembled(tape, (0,))
        except NoRule as error:
            return error.remark
        return None

    def pulled_back(self, tape: Tape, mixtures: Mixtures) -> PulledBack:
        """Return ∂f/∂tap at every use of a weight. Use autograd on the tape if
        possible, else the difference rules."""
        owned, uses = self.checks.plain_uses(tape)
        if uses is not None:
            weights = {name: tape[slot] for slot, name in tape.weights.items()}
            return pull_back(tape[tape.output], uses, owned, weights, mixtures.columns)
        return self.replayed(tape, tape, mixtures)[0]

    def along(
        self,
        start: Tape,
        end: Tape,
        chosen: Sequence[int] | None = None,
        *,
        as_copies: bool = False,
    ) -> Jacobian:
        """Return J̄(x) of a segment. Run a compiled program if compilation is enabled.

        With `as_copies`, the blocks of lookup tables may be `Copies` (see `assemble`).
        This requires that compilation is enabled, and that the network is too large for
        a program (see `program_cache.is_large`)."""
        if self.programs is None:
            return self.secant(start, end, chosen).jacobian
        return self.by_program(
            start, end, Mixtures.of(start, chosen), as_copies=as_copies
        )

    def secant(
        self, start: Tape, end: Tape, chosen: Sequence[int] | None = None
    ) -> Reading:
        """Return J̄(x) of a segment and the change J̄Δθ, by the difference rules."""
        pulled, jvp = self.replayed(start, end, Mixtures.of(start, chosen))
        return Reading(assemble(pulled), jvp)

    def replayed(
        self, start: Tape, end: Tape, mixtures: Mixtures
    ) -> tuple[PulledBack, Float[Tensor, "example out"]]:
        """Return ∂f/∂tap and J̄Δθ of a segment, by the difference rules."""
        replay = Replay(start, end, self.trained, self.checks.owners(start).constants)
        owned = self.owners(start)
        pulled = pull_back(
            replay.delta, replay.uses, owned, replay.leaves, mixtures.columns
        )
        return pulled, replay.delta.detach()

    def owners(self, tape: Tape) -> Owners:
        """Return the owners: for each element of a tap, the example that it belongs to.
        Raise Unfaithful if the gradients of the module are not the derivatives of its
        values, unless `of_values` is set."""
        try:
            return self.checks.faithful_owners(tape)
        except Unfaithful:
            if not self.of_values:
                raise
            return self.checks.owners(tape)

    @property
    def is_unfaithful(self) -> bool:
        """True if a check has found that the module's gradients are not the derivatives
        of its values."""
        return None in self.check_cache.faithful.entries.values()

    def by_program(
        self, start: Tape, end: Tape, mixtures: Mixtures, *, as_copies: bool = False
    ) -> Jacobian:
        assert self.programs is not None
        request = Request(
            start, end, self.trained, self.owners(start), mixtures, as_copies
        )
        return self.programs.read(
            request, routed=bool(self.checks.routes(start).routing)
        )

    def closures(
        self,
        reading: Reading,
        start: Tape,
        end: Tape,
        chosen: Sequence[int] | None = None,
    ) -> list[Closure]:
        """Compare J̄Δθ with f(θ₁) − f(θ₀), once or twice. First use J̄Δθ from the forward
        pass of the difference rules. If only trained weights change, also multiply the
        assembled Jacobian with Δθ."""
        step = {
            name: end[slot].detach() - start[slot].detach()
            for slot, name in start.weights.items()
        }
        closures = [closure(reading.jvp, start, end)]
        if reading.jacobian.blocks and not any(
            delta.any() for name, delta in step.items() if name not in self.trained
        ):
            outputs = range(start.outputs.shape[1]) if chosen is None else chosen
            closures.append(
                closure(reading.jacobian.applied(step), start, end, outputs)
            )
        return closures


# The functions below estimate the cost of a kernel of many examples from `some`, the
# Jacobian of a few examples with one block for each use.


# assemble Jacobians up to this many bytes, since assembled ones are faster
MAX_ASSEMBLED_BYTES = 2e9
# number of copies of gradient rows in memory, while they are computed from factors,
# transposed and added
ROW_COPIES = 3


def kernel_bytes(some: Jacobian, query: int, train: int) -> float:
    """Return the memory in bytes for a kernel of examples like those in `some`. It
    includes the Jacobians and their products."""
    bytes_each = some.blocks[0].numbers.element_size() if some.blocks else 0
    factors, _, length = factored_sizes(some, query, train)
    rows = length * (query + train) * some.outputs
    made = max((size.numbers for size in factors.values()), default=0)
    held = some.nbytes / some.examples * (query + train)
    return held + (ROW_COPIES * rows + made) * bytes_each


def factored_sizes(
    some: Jacobian, query: int, train: int
) -> tuple[dict[Key, Sizes], set[str], int]:
    """Return the sizes of the weights whose gradients may stay in factored form, the
    names of these weights, and the number of elements of all other parameters."""
    sizes_of = exclusive_keys(some, some)
    factors = {
        key: replace(size, query=query, train=train)
        for key, size in sizes_of.items()
        if size is not None
    }
    factored = {view.name for key in factors for view in key if isinstance(view, View)}
    others = [size for name, size in some.extents.items() if name not in factored]
    return factors, factored, sum(others)


def kernel_operations(some: Jacobian, query: int, train: int) -> float:
    """Return the number of multiplications of the exact kernel. If `train` is 0, the
    kernel is between `query` examples and themselves, and
    only half of it is computed."""
    other = train or query
    factors, factored, length = factored_sizes(some, query, other)
    products = length * some.outputs**2 * query * other
    made = sum(
        row_operations(block)
        for block in some.blocks
        if isinstance(block, Factored) and factored.isdisjoint(block.extents)
    )
    total = (
        sum(size.operations for size in factors.values())
        + products
        + made * (query + other)
    )
    if train:
        return total
    return total / 2


def row_operations(block: Factored) -> int:
    """Return the number of multiplications that compute the gradients of one example
    from their factors."""
    return block.outputs[0].numel() * block.rows
