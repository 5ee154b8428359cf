"""Reading: from what a function did at the ends of a segment to the features of that segment.

There are two readings. On a segment of length zero, a network whose weights meet its inputs in products, norms and sums
is differentiated by autograd as it ran. Everything else is replayed by the difference rules; at length zero these give
the tangent again, and the tests hold one reading against the other. A tangent through operations without a rule, or of
a module whose gradients are not the derivatives of its values, is read example by example from plain Jacobians.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.arrange import NOWHERE, arrange
from ntkexp.kernel.features.differentiate import Jacobian, differentiate
from ntkexp.kernel.features.features import Features
from ntkexp.kernel.features.use_by_use import UseByUse, keep_uses
from ntkexp.kernel.read.faithful import UNFAITHFUL, is_as_it_runs, is_faithful
from ntkexp.kernel.read.found import Found
from ntkexp.kernel.read.jacobian import jacobian
from ntkexp.kernel.read.outputs import Mixtures
from ntkexp.kernel.read.program_cache import ProgramCache, outline
from ntkexp.kernel.record.digest import digest
from ntkexp.kernel.record.entry import Slot
from ntkexp.kernel.record.independence import refuse_dependence
from ntkexp.kernel.record.routing import Routes, routes
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.record.taping import record
from ntkexp.kernel.secant.closure import Closure, closure
from ntkexp.kernel.secant.ownership import Owners, hold_at, owners
from ntkexp.kernel.secant.plain_uses import plain_uses
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.uses import Trained, Use
from ntkexp.shapes import Function, Inputs, Weights


@dataclass(frozen=True)
class Reading:
    """Features of a segment at some inputs, with J̄Δθ as the replay pushed it (zero on a point)."""

    features: Features
    push: Float[Tensor, "example out"]


@dataclass(frozen=True)
class Reader:
    """Reads a function of weights; `trained` names those whose gradients make the kernel. A function that draws random
    numbers is read where they are `known`: the same whenever it runs on a batch."""

    function: Function
    trained: frozenset[str]
    found: Found = field(default_factory=Found, repr=False)
    programs: ProgramCache | None = field(default=None, repr=False)
    known: bool = False

    def record(self, weights: Weights, inputs: Inputs) -> Tape:
        """Run the function once; the tape can be read at length zero any number of times."""
        if self.programs is None:
            return record(self.function, weights, inputs, differentiable=True, known=self.known)
        if self.known:  # what is drawn follows from no input
            return record(self.function, weights, inputs, known=True).pruned()
        return self.programs.tape(weights, inputs, lambda: record(self.function, weights, inputs).pruned())

    def bytes_per_example(self, one: Inputs, record: Callable[[], Tape]) -> float:
        """The memory that an example like this one takes on a tape."""
        return self.found.sizes.to(outline(one), lambda: record().bytes_per_example)

    def tangent(self, tape: Tape, chosen: Sequence[int] | None = None) -> Features:
        """The features J(θ; x) of a point, of all outputs or the chosen ones."""
        try:
            return self.factored(tape, chosen)
        except NoRule:
            return self.dense(tape, chosen)

    def dense(self, tape: Tape, chosen: Sequence[int] | None = None) -> Features:
        """The same from plain Jacobians, whatever the operations are."""
        return jacobian(self.function, tape, self.trained, Mixtures.of(tape, chosen).columns)

    def weighted(self, tape: Tape, output_gradient: Float[Tensor, "example out"]) -> Features:
        """J(θ; x)ᵀℓ′ for every example, as features of one output: one back-propagation, however many outputs."""
        mixture = Mixtures(output_gradient, None)
        try:
            if self.programs is None:
                return self.differentiated(arrange, tape, mixture)
            return self.planned(tape, tape, mixture)
        except NoRule:
            return jacobian(self.function, tape, self.trained, mixture.columns)

    def applied(self, tape: Tape, weights: Weights) -> Float[Tensor, "example out"]:
        """J(θ; x)v, for a v in the shape of the weights: passed through once, however many outputs."""
        try:
            constants = self.owned_faithfully(tape).constants
            return Replay(tape, tape, self.trained, constants, direction=weights).delta.detach()
        except NoRule:
            return self.dense(tape).applied(weights)

    def obstacle(self, tape: Tape) -> str | None:
        """Why a tangent has to be read from plain Jacobians, if it has to."""
        try:
            replace(self, programs=None).factored(tape, (0,))
        except NoRule as error:
            return error.remark
        return None

    def factored(self, tape: Tape, chosen: Sequence[int] | None = None, room: Weights = NOWHERE) -> Features:
        """The features of a point through whose operations differences can be passed; `room` is where rows may go."""
        if self.programs is not None:
            return self.along(tape, tape, chosen)
        return self.differentiated(partial(arrange, room=room), tape, Mixtures.of(tape, chosen))

    def use_by_use(self, tape: Tape, chosen: Sequence[int] | None = None) -> UseByUse:
        """The Jacobian of a point through whose operations differences can be passed, use by use."""
        return self.differentiated(keep_uses, tape, Mixtures.of(tape, chosen))

    def differentiated(self, arranged: Callable[..., Jacobian], tape: Tape, mixtures: Mixtures) -> Jacobian:
        """The Jacobian of a point, from its own graph or by the difference rules."""
        owned, uses = self.owned_at_point(tape)
        if uses is not None and self.is_as_it_runs(tape, uses, owned):
            weights = {name: tape[slot] for slot, name in tape.weights.items()}
            return differentiate(arranged, tape[tape.output], uses, owned, weights, mixtures.columns)
        return self.replayed(arranged, tape, tape, mixtures)[0]

    def along(self, start: Tape, end: Tape, chosen: Sequence[int] | None = None) -> Features:
        """The features J̄(x) of a segment."""
        if self.programs is None:
            return self.secant(start, end, chosen).features
        return self.planned(start, end, Mixtures.of(start, chosen))

    def planned(self, start: Tape, end: Tape, mixtures: Mixtures) -> Features:
        """The features of a segment, by a program."""
        assert self.programs is not None
        owned = self.owned_faithfully(start)

        def reading(columns: Tensor, at_once: bool) -> Features:
            replay = Replay(start, end, self.trained, owned.constants, still=True)
            return differentiate(arrange, replay.delta, replay.uses, owned, replay.leaves, columns, at_once=at_once)

        return self.programs.read(start, end, mixtures, owned, bool(self.routes(start).steering), reading)

    def secant(self, start: Tape, end: Tape, chosen: Sequence[int] | None = None) -> Reading:
        """The features J̄(x) of a segment, and J̄Δθ."""
        return Reading(*self.replayed(arrange, start, end, Mixtures.of(start, chosen)))

    def replayed(
        self,
        arranged: Callable[..., Jacobian],
        start: Tape,
        end: Tape,
        mixtures: Mixtures,
    ) -> tuple[Jacobian, Float[Tensor, "example out"]]:
        """The Jacobian of a segment by the difference rules, and J̄Δθ."""
        replay = Replay(start, end, self.trained, self.owned(start).constants)
        owned = self.owned_faithfully(start)
        found = differentiate(arranged, replay.delta, replay.uses, owned, replay.leaves, mixtures.columns)
        return found, replay.delta.detach()

    def closures(self, reading: Reading, start: Tape, end: Tape, chosen: Sequence[int] | None = None) -> list[Closure]:
        """The closures of a secant: as it was pushed and, where no other weights move, as its features say."""
        step = {name: end[slot].detach() - start[slot].detach() for slot, name in start.weights.items()}
        found = [closure(reading.push, start, end)]
        if reading.features.blocks and not any(delta.any() for name, delta in step.items() if name not in self.trained):
            places = range(start.outputs.shape[1]) if chosen is None else chosen
            found.append(closure(reading.features.applied(step), start, end, places))
        return found

    def owned_at_point(self, tape: Tape) -> tuple[Owners, list[Use] | None]:
        """Which example owns what at a point, and its uses if autograd can follow them all; of a routing that was not
        asked for, what is known of another, if the numbers of this point say the same.
        """
        differentiable = tape[tape.output].requires_grad and not tape.overwrites
        known = self.of_another_routing(tape) if differentiable else None
        uses = None if known is None else plain_uses(Trained(tape, self.trained, known.constants))
        if known is not None and uses is not None and hold_at(tape[tape.output], uses, known, tape.eps):
            self.refuse_dependence(tape)
            return known, uses
        owned = self.owned(tape)
        return owned, plain_uses(Trained(tape, self.trained, owned.constants)) if differentiable else None

    def of_another_routing(self, tape: Tape) -> Owners | None:
        """The owners of this structure, where this routing of it is new."""
        asked = self.question(tape, self.routing(tape)) in self.found.owners.kept
        return None if asked else self.found.structures.kept.get(tape.form)

    def refuse_dependence(self, tape: Tape) -> None:
        """Refuse examples that depend on each other; of the same operations with other numbers less is asked."""
        known = tape.operations in self.found.independent.kept
        refuse_dependence(self.function, tape, known=known)
        if len(tape.outputs) > 1:
            self.found.independent.keep(tape.operations, True)

    def owned(self, tape: Tape) -> Owners:
        """Which example owns what, asked once for every structure and routing."""
        return self.found.owners.to(self.question(tape, self.routing(tape)), lambda: self.owners(tape))

    def owners(self, tape: Tape) -> Owners:
        """Which example owns what; the same object as for another routing, where the owners are the same."""
        self.refuse_dependence(tape)
        found = owners(tape, self.trained)
        known = next((known for known in self.found.owners.kept.values() if known.digest == found.digest), found)
        return self.found.structures.keep(tape.form, known)

    def owned_faithfully(self, tape: Tape) -> Owners:
        """Which example owns what, of a module that autograd differentiates as its values say; asked once for every
        structure, routing and mask."""
        found = self.found.faithful.to(self.question(tape, self.deciding(tape)), partial(self.faithful_owners, tape))
        if found is None:
            raise NoRule(UNFAITHFUL)
        return found

    def is_as_it_runs(self, tape: Tape, uses: Sequence[Use], owned: Owners) -> bool:
        """Whether autograd's graph on the tape is the module's own, asked as often."""
        ask = partial(is_as_it_runs, self.function, tape, self.trained, uses, owned)
        return self.found.graphs.to(self.question(tape, self.deciding(tape)), ask)

    def faithful_owners(self, tape: Tape) -> Owners | None:
        """Which example owns what, if autograd differentiates the values."""
        owned = self.owned(tape)
        return owned if is_faithful(self.function, tape, self.trained, owned) else None

    def routing(self, tape: Tape) -> tuple[Slot, ...]:
        """What routes values; where inputs choose what Python does, any of them may."""
        steering = self.routes(tape).steering
        return (*steering, *tape.inputs) if tape.chooses else steering

    def deciding(self, tape: Tape) -> tuple[Slot, ...]:
        """What routes values, and masks."""
        known = self.routes(tape)
        return (*known.steering, *known.masks)

    def routes(self, tape: Tape) -> Routes:
        """The values of a tape that decide something."""
        return self.found.routes.to(tape.form, lambda: routes(tape))

    def question(self, tape: Tape, slots: tuple[Slot, ...]) -> tuple[bytes, bytes]:
        """A structure, and what is in these slots. Where programs are kept, constants stay as they are."""
        constants = () if self.programs is not None else tape.constants
        return tape.form, digest(tape[slot] for slot in (*slots, *constants))
