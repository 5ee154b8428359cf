"""Reading: from what a function did at the ends of a segment to the features of that segment, once its gradients are
known to be faithful.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.features.arrange import NOWHERE, Jacobian, arrange, differentiate
from ntkexp.kernel.features.blocks import Block, Features, Key, Rows, nothing
from ntkexp.kernel.features.use_by_use import UseByUse, keep_uses
from ntkexp.kernel.read.outputs import Answers, Mixtures
from ntkexp.kernel.read.program_cache import ProgramCache, outline
from ntkexp.kernel.record.tape import Slot, Tape, digest, is_whole, part
from ntkexp.kernel.record.taping import (
    Routes,
    Trial,
    columns,
    is_out_of_memory,
    plain_kernels,
    record,
    refuse_dependence,
    routes,
    unfused,
)
from ntkexp.kernel.secant.ownership import Owners, have_owners, hold_at, owners
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.segment import Closure, closure
from ntkexp.kernel.secant.uses import Trained, Use, plain_uses
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import stream

# --- What was found out of a function that is read again and again, so that nothing is asked twice.


@dataclass(frozen=True)
class Found:
    """What was found out of a function, by the structure of tapes and by the values on them that decide it."""

    routes: Answers[Routes] = field(default_factory=Answers)
    owners: Answers[Owners] = field(default_factory=Answers)
    independent: Answers[bool] = field(default_factory=Answers)  # operations that were found to couple no examples
    structures: Answers[Owners] = field(default_factory=Answers)  # the latest owners, of any routing
    graphs: Answers[bool] = field(default_factory=Answers)
    faithful: Answers[Owners | None] = field(default_factory=Answers)
    sizes: Answers[float] = field(default_factory=Answers)
    fits: Answers[bool] = field(default_factory=Answers)  # features, at once


# --- Plain Jacobians, one back-propagation for every example and output: right for any module, and slow.
#
# For the tangent of a module with an operation that no difference rule knows, or whose gradients are its own.


def jacobian(
    function: Function, tape: Tape, trained: frozenset[str], mixtures: Float[Tensor, "mixture example out"]
) -> Features:
    """The features of a point, each parameter's gradients as they are, of mixtures of outputs.

    Every example is run by itself, so that no other can enter; outputs that differ from those of the batch show that
    the module couples examples. Of a module that draws random numbers for a batch as a whole, all are run each time.
    """
    weights = {name: tape[slot].detach().requires_grad_(name in trained) for slot, name in tape.weights.items()}
    leaves = {name: weight for name, weight in weights.items() if name in trained}
    rows: dict[str, list[Tensor]] = {name: [] for name in leaves}
    together = tape.outputs
    alone = Trial(function, tape, {name: weight.detach() for name, weight in weights.items()}, together)
    for k in range(len(together)):
        this = slice(k, k + 1)
        with torch.enable_grad():
            whole = columns(function, weights, tape.given if tape.drawn else part(tape.given, this))
        output = whole[this] if tape.drawn else whole
        alone.refuse_coupling(output.detach(), together[this], tape.given, together)
        if not output.requires_grad:
            raise Mistake("the outputs depend on no parameter that requires gradients, so the tangent kernel is zero")
        for mixture in mixtures[:, this]:
            gradients = torch.autograd.grad(
                output, list(leaves.values()), mixture, retain_graph=True, materialize_grads=True
            )
            for name, gradient in zip(leaves, gradients, strict=True):
                rows[name].append(dense(gradient).flatten())
    shape = (len(together), len(mixtures), -1)
    blocks: dict[Key, Block] = {
        (name, None): Rows(torch.stack(found).view(shape), name) for name, found in rows.items()
    }
    return Features(blocks, len(together), len(mixtures))


# --- Faithfulness: whether a module's gradients are the derivatives of its values.
#
# With `detach`, a straight-through estimator or an autograd.Function of its own a module may train by something
# else. Difference rules see values alone, so one random vector-Jacobian product is taken both ways: by the rules
# on a segment of length zero, and by autograd through the module as it is.


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


# --- Reading: from what a function did at the ends of a segment to the features of that segment.
#
# There are two readings. On a segment of length zero, a network whose weights meet its inputs in products, norms
# and sums is differentiated by autograd as it ran. Everything else is replayed by the difference rules; at length
# zero these give the tangent again, and the tests hold one reading against the other. A tangent through
# operations without a rule, or of a module whose gradients are not the derivatives of its values, is read example
# by example from plain Jacobians.


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
