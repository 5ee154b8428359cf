"""Reading: from what a function did at the ends of a segment to the Jacobian of that segment.

On a segment of length zero, a network whose weights meet its inputs in products, norms and sums is differentiated by
autograd as it ran. Everything else is replayed by the difference rules; at length zero these give the tangent again,
and the tests compare one way with the other. A tangent through operations without a rule, or of a module whose
gradients are not the derivatives of its values, is read example by example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.assemble import NOWHERE, PulledBack, assemble, assemble_uses, pull_back
from ntkexp.kernel.features.blocks import Factored, Key, Rows
from ntkexp.kernel.features.gram import Sizes, alone
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.checks import Checks, Findings, dense
from ntkexp.kernel.read.plan import Mixtures
from ntkexp.kernel.read.program_cache import ProgramCache, Request
from ntkexp.kernel.record.independence import Trial
from ntkexp.kernel.record.tape import Tape, part
from ntkexp.kernel.record.taping import columns, record
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.segment import Closure, closure
from ntkexp.kernel.secant.uses import View
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Inputs, Weights


@dataclass(frozen=True)
class Reading:
    """The Jacobian of a segment at some inputs, with J̄Δθ as the replay pushed it (zero on a point)."""

    jacobian: Jacobian
    push: Float[Tensor, "example out"]


@dataclass(frozen=True)
class Reader:
    """Reads a function of weights; `trained` names those whose gradients make the kernel. A function that draws random
    numbers is read where they are `known`: the same whenever it runs on a batch. One of the batch as a `whole` is never
    asked for a part of it."""

    function: Function
    trained: frozenset[str]
    findings: Findings = field(default_factory=Findings, repr=False)
    programs: ProgramCache | None = field(default=None, repr=False)
    known: bool = False
    whole: bool = False

    @cached_property
    def checks(self) -> Checks:
        """What is known of the function. Where programs are kept, constants stay as they are."""
        return Checks(self.function, self.trained, self.findings, fixed=self.programs is not None)

    def record(self, weights: Weights, inputs: Inputs) -> Tape:
        """Run the function once; the tape can be read at length zero any number of times."""
        if self.programs is None:
            return record(
                self.function,
                weights,
                inputs,
                differentiable=True,
                known=self.known,
                whole=self.whole,
            )
        if self.known:  # what is drawn follows from no input
            return record(self.function, weights, inputs, known=True, whole=self.whole).pruned()
        return self.programs.record(self.function, weights, inputs, whole=self.whole)

    # --- The tangent, J(θ; x).

    def tangent(self, tape: Tape, chosen: Sequence[int] | None = None) -> Jacobian:
        """J(θ; x) of a point, of all outputs or the chosen ones, by whatever way there is."""
        try:
            return self.assembled(tape, chosen)
        except NoRule:
            return self.one_by_one(tape, chosen)

    def assembled(
        self, tape: Tape, chosen: Sequence[int] | None = None, room: Weights = NOWHERE
    ) -> Jacobian:
        """J(θ; x) of a point through whose operations differences can be passed; `room` is where rows may go."""
        mixtures = Mixtures.of(tape, chosen)
        if self.programs is not None:
            return self.by_program(tape, tape, mixtures)
        return assemble(self.pulled_back(tape, mixtures), room)

    def use_by_use(self, tape: Tape, chosen: Sequence[int] | None = None) -> Jacobian:
        """The same, each use a block of its own: no row is as long as a table of which little was read."""
        return assemble_uses(self.pulled_back(tape, Mixtures.of(tape, chosen)))

    def one_by_one(self, tape: Tape, chosen: Sequence[int] | None = None) -> Jacobian:
        """The same, by one back-propagation for every example and output, whatever the operations are."""
        return jacobian_one_by_one(
            self.function, tape, self.trained, Mixtures.of(tape, chosen).columns
        )

    def weighted(
        self, tape: Tape, output_gradient: Float[Tensor, "example out"], *, as_copies: bool = False
    ) -> Jacobian:
        """J(θ; x)ᵀℓ′ for every example, as one output: one back-propagation, however many outputs. With `as_copies` a
        large network's tables may keep the places where they were read."""
        mixture = Mixtures(output_gradient, None)
        try:
            if self.programs is not None:
                return self.by_program(tape, tape, mixture, as_copies=as_copies)
            return assemble(self.pulled_back(tape, mixture), as_copies=as_copies)
        except NoRule:
            return jacobian_one_by_one(self.function, tape, self.trained, mixture.columns)

    def applied(self, tape: Tape, weights: Weights) -> Float[Tensor, "example out"]:
        """J(θ; x)v, for a v in the shape of the weights: passed through once, however many outputs."""
        try:
            constants = self.checks.faithful_owners(tape).constants
            return Replay(tape, tape, self.trained, constants, direction=weights).delta.detach()
        except NoRule:
            return self.one_by_one(tape).applied(weights)

    def obstacle(self, tape: Tape) -> str | None:
        """Why a tangent has to be read example by example, if it has to."""
        try:
            replace(self, programs=None).assembled(tape, (0,))
        except NoRule as error:
            return error.remark
        return None

    def pulled_back(self, tape: Tape, mixtures: Mixtures) -> PulledBack:
        """∂f/∂tap at every use: by autograd through the tape as it ran, or through the replay of its differences."""
        owned, uses = self.checks.plain_uses(tape)
        if uses is not None:
            weights = {name: tape[slot] for slot, name in tape.weights.items()}
            return pull_back(tape[tape.output], uses, owned, weights, mixtures.columns)
        return self.replayed(tape, tape, mixtures)[0]

    # --- The secant, J̄(x), between two tapes.

    def along(
        self,
        start: Tape,
        end: Tape,
        chosen: Sequence[int] | None = None,
        *,
        as_copies: bool = False,
    ) -> Jacobian:
        """J̄(x) of a segment, by a program where there are programs. With `as_copies` a large network's tables may keep
        the places where they were read."""
        if self.programs is None:
            return self.secant(start, end, chosen).jacobian
        return self.by_program(start, end, Mixtures.of(start, chosen), as_copies=as_copies)

    def secant(self, start: Tape, end: Tape, chosen: Sequence[int] | None = None) -> Reading:
        """J̄(x) of a segment by the difference rules, and J̄Δθ."""
        pulled, push = self.replayed(start, end, Mixtures.of(start, chosen))
        return Reading(assemble(pulled), push)

    def replayed(
        self, start: Tape, end: Tape, mixtures: Mixtures
    ) -> tuple[PulledBack, Float[Tensor, "example out"]]:
        """What is pulled back through the replay of a segment's differences, and J̄Δθ."""
        replay = Replay(start, end, self.trained, self.checks.owners(start).constants)
        owned = self.checks.faithful_owners(start)
        pulled = pull_back(replay.delta, replay.uses, owned, replay.leaves, mixtures.columns)
        return pulled, replay.delta.detach()

    def by_program(
        self, start: Tape, end: Tape, mixtures: Mixtures, *, as_copies: bool = False
    ) -> Jacobian:
        """The same Jacobian, by a program of that replay."""
        assert self.programs is not None
        request = Request(
            start, end, self.trained, self.checks.faithful_owners(start), mixtures, as_copies
        )
        return self.programs.read(request, routed=bool(self.checks.routes(start).steering))

    def closures(
        self, reading: Reading, start: Tape, end: Tape, chosen: Sequence[int] | None = None
    ) -> list[Closure]:
        """The closures of a secant: as it was pushed and, where no other weights move, as its Jacobian says."""
        step = {
            name: end[slot].detach() - start[slot].detach() for slot, name in start.weights.items()
        }
        found = [closure(reading.push, start, end)]
        if reading.jacobian.blocks and not any(
            delta.any() for name, delta in step.items() if name not in self.trained
        ):
            outputs = range(start.outputs.shape[1]) if chosen is None else chosen
            found.append(closure(reading.jacobian.applied(step), start, end, outputs))
        return found


def jacobian_one_by_one(
    function: Function,
    tape: Tape,
    trained: frozenset[str],
    mixtures: Float[Tensor, "mixture example out"],
) -> Jacobian:
    """The Jacobian of a point, for mixtures of outputs: right for any module, and slow.

    Every example is run by itself, so that no other can enter; outputs that differ from those of the batch show that
    the module couples examples. Of a module that draws random numbers for a batch as a whole, all are run each time.
    """
    weights = {
        name: tape[slot].detach().requires_grad_(name in trained)
        for slot, name in tape.weights.items()
    }
    leaves = {name: weight for name, weight in weights.items() if name in trained}
    rows: dict[str, list[Tensor]] = {name: [] for name in leaves}
    together = tape.outputs
    alone = Trial(
        function, tape, {name: weight.detach() for name, weight in weights.items()}, together
    )
    for k in range(len(together)):
        this = slice(k, k + 1)
        with torch.enable_grad():
            whole = columns(
                function, weights, tape.given if tape.keeps_places else part(tape.given, this)
            )
        output = whole[this] if tape.keeps_places else whole
        alone.refuse_coupling(output.detach(), together[this], tape.given, together)
        if not output.requires_grad:
            raise Mistake(
                "the outputs depend on no parameter that requires gradients, so the tangent kernel is zero"
            )
        for mixture in mixtures[:, this]:
            gradients = torch.autograd.grad(
                output, list(leaves.values()), mixture, retain_graph=True, materialize_grads=True
            )
            for name, gradient in zip(leaves, gradients, strict=True):
                rows[name].append(dense(gradient).flatten())
    shape = (len(together), len(mixtures), -1)
    blocks = tuple(Rows(torch.stack(found).view(shape), name) for name, found in rows.items())
    return Jacobian(blocks, len(together), len(mixtures))


# --- What a kernel is expected to cost: of two ways the cheaper is taken, and what would not fit is read in turns.
#
# A kernel of many examples, judged by the Jacobian of a few that is kept use by use.


FITS = 2e9  # bytes of an assembled Jacobian, which is faster while it fits
TIMES = 3  # that rows are there while they are multiplied out, turned and added up


def fits(some: Jacobian, probe: int, train: int) -> bool:
    """Whether n examples like the given ones have small Jacobians, products included."""
    return kernel_bytes(some, probe, train) <= FITS


def kernel_bytes(some: Jacobian, probe: int, train: int) -> float:
    """The bytes that a kernel of examples like the given ones holds at once, Jacobians and products included."""
    bytes_each = some.blocks[0].numbers.element_size() if some.blocks else 0
    factors, length = kept_factors(some, probe, train)
    rows = length * (probe + train) * some.outputs
    made = max((size.numbers for size in factors.values()), default=0)
    held = some.nbytes / some.examples * (probe + train)
    return held + (TIMES * rows + made) * bytes_each


def kept_factors(some: Jacobian, probe: int, train: int) -> tuple[dict[Key, Sizes], int]:
    """The weights whose factors may be kept, and how large these are for `probe` and `train` examples; and how many
    numbers a gradient has of all other parameters."""
    found = alone(some, some)
    factors = {
        key: replace(size, probe=probe, train=train)
        for key, size in found.items()
        if size is not None
    }
    kept = {view.name for key in factors for view in key if isinstance(view, View)}
    return factors, sum(size for name, size in some.extents.items() if name not in kept)


def kernel_operations(some: Jacobian, probe: int, train: int) -> float:
    """Multiplications of the exact kernel; with themselves, where `train` is none, of half of it."""
    other = train or probe
    factors, length = kept_factors(some, probe, other)
    kept = {view.name for key in factors for view in key if isinstance(view, View)}
    products = length * some.outputs**2 * probe * other
    made = sum(
        row_operations(block)
        for block in some.blocks
        if isinstance(block, Factored) and kept.isdisjoint(block.extents)
    )
    total = sum(size.operations for size in factors.values()) + products + made * (probe + other)
    return total if train else total / 2


def row_operations(block: Factored) -> int:
    """Multiplications of an example's gradients."""
    return block.outputs[0].numel() * block.rows
