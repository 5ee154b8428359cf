"""What is checked of a function before it is read: that its gradients are the derivatives of its values, that examples
do not depend on each other, and which example owns what. Each answer is remembered, for every structure and for the
values on tapes that decide it.

With `detach`, a straight-through estimator or an autograd.Function of its own a module may train by something else
than its derivative. Difference rules see values alone, so one random vector-Jacobian product is taken both ways: by the
rules on a segment of length zero, and by autograd through the module as it is.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.features.assemble import assemble_uses, pull_back
from ntkexp.kernel.read.program_cache import Answers
from ntkexp.kernel.record.independence import refuse_dependence
from ntkexp.kernel.record.tape import Tape, digest, is_whole
from ntkexp.kernel.record.taping import columns, is_out_of_memory, plain_kernels, record, unfused
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.ownership import Owners, Routes, have_owners, hold_at, owners, routes
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.uses import Trained, Use, plain_uses
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Weights
from ntkexp.stream import stream

UNFAITHFUL = (
    "the module's gradients are not the derivatives of its values (look for detach, a straight-through estimator or an "
    "autograd.Function), so what a secant explains is not what trains it"
)


@dataclass(frozen=True)
class Findings:
    """What is known of a function, by the structure of tapes and by the values on them that decide it."""

    routes: Answers[Routes] = field(default_factory=Answers)
    owners: Answers[Owners] = field(default_factory=Answers)
    independent: Answers[bool] = field(
        default_factory=Answers
    )  # operations that were seen to couple no examples
    structures: Answers[Owners] = field(
        default_factory=Answers
    )  # the latest owners, of any routing
    graphs: Answers[bool] = field(default_factory=Answers)
    faithful: Answers[Owners | None] = field(default_factory=Answers)
    sizes: Answers[float] = field(default_factory=Answers)
    fits: Answers[bool] = field(default_factory=Answers)  # Jacobians, assembled


@dataclass(frozen=True)
class Checks:
    """The checks of a function of weights; `fixed` says that the constants of its tapes stay as they are."""

    function: Function
    trained: frozenset[str]
    findings: Findings
    fixed: bool

    def owners(self, tape: Tape) -> Owners:
        """Which example owns what, found once for every structure and routing."""
        question = self.question(tape)
        known = self.findings.owners.kept
        if question in known:
            return self.findings.owners.keep(question, known[question])
        self.refuse_dependence(tape)
        found = owners(tape, self.trained)
        # The same object as for another routing, where the owners are the same
        found = next((other for other in known.values() if other.digest == found.digest), found)
        return self.findings.owners.keep(question, self.findings.structures.keep(tape.form, found))

    def faithful_owners(self, tape: Tape) -> Owners:
        """The same, of a module that autograd differentiates as its values say; for every mask as well."""

        def owners_if_faithful() -> Owners | None:
            owned = self.owners(tape)
            return owned if is_faithful(self.function, tape, self.trained, owned) else None

        found = self.findings.faithful.to(self.question(tape, masks=True), owners_if_faithful)
        if found is None:
            raise NoRule(UNFAITHFUL)
        return found

    def plain_uses(self, tape: Tape) -> tuple[Owners, list[Use] | None]:
        """Which example owns what at a point, and its uses if autograd can follow them all on the tape as it ran. Of a
        routing that is new, what is known of another, if the numbers of this point say the same.
        """
        differentiable = tape[tape.output].requires_grad and not tape.overwrites
        owned: Owners | None = None
        uses: list[Use] | None = None
        if differentiable and self.question(tape) not in self.findings.owners.kept:
            owned = self.findings.structures.kept.get(tape.form)
            uses = (
                None if owned is None else plain_uses(Trained(tape, self.trained, owned.constants))
            )
            if (
                owned is None
                or uses is None
                or not hold_at(tape[tape.output], uses, owned, tape.eps)
            ):
                owned = None
            else:
                self.refuse_dependence(tape)
        if owned is None:
            owned = self.owners(tape)
            uses = (
                plain_uses(Trained(tape, self.trained, owned.constants)) if differentiable else None
            )
        if uses is None:
            return owned, None
        return owned, uses if self.runs_so(tape, uses, owned) else None

    def runs_so(self, tape: Tape, uses: list[Use], owned: Owners) -> bool:
        """Whether autograd's graph on the tape is the module's own: every element has an owner, and what the uses give
        adds up to the module's gradients. A write under no_grad, once rewritten, has another graph."""

        def runs_so() -> bool:
            if not have_owners(uses, owned):
                return False
            cotangent = random_cotangent(tape)
            leaves = {
                name: tape[slot] for slot, name in tape.weights.items() if name in self.trained
            }
            found = gradients_at(uses, tape[tape.output], cotangent, owned, leaves)
            return agree(found, by_autograd(self.function, tape, self.trained, cotangent), tape)

        return self.findings.graphs.to(self.question(tape, masks=True), runs_so)

    def refuse_dependence(self, tape: Tape) -> None:
        """Refuse examples that depend on each other; of the same operations with other numbers less is checked."""
        known = tape.operations in self.findings.independent.kept
        refuse_dependence(self.function, tape, known=known)
        if len(tape.outputs) > 1:
            self.findings.independent.keep(tape.operations, True)

    def routes(self, tape: Tape) -> Routes:
        return self.findings.routes.to(tape.form, lambda: routes(tape))

    def question(self, tape: Tape, *, masks: bool = False) -> tuple[bytes, bytes]:
        """A structure, and what routes values: any input, where these choose what Python does. Or what routes them and
        masks them. Constants as well, where they may change."""
        known = self.routes(tape)
        beside = known.masks if masks else tape.inputs if tape.chooses else ()
        constants = () if self.fixed else tape.constants
        return tape.form, digest(tape[slot] for slot in (*known.steering, *beside, *constants))


# --- Faithfulness: one random product, by the difference rules and by autograd.


def is_faithful(function: Function, tape: Tape, trained: frozenset[str], owned: Owners) -> bool:
    """Rules and autograd agree, up to what rounding could do.

    In single precision a value within rounding of a kink may lie on its other side when the module runs again, and many
    units have some: what disagrees there is compared again in double precision.
    """
    weights = {name: tape[slot].detach() for slot, name in tape.weights.items()}
    agreed = agree_both_ways(function, tape, trained, owned)
    if agreed or all(weight.dtype == torch.float64 for weight in weights.values()):
        return agreed

    def doubled(value: Any) -> Any:
        if not isinstance(value, Tensor) or is_whole(value):
            return value
        return value.to(torch.complex128 if value.is_complex() else torch.float64)

    try:
        both = tree_map(doubled, (weights, tape.given))
        differentiable = tape[tape.output].requires_grad
        longer = record(
            function, *both, differentiable=differentiable, known=bool(tape.drawn), whole=tape.whole
        )
    except (RuntimeError, Mistake) as error:  # of buffers that stay short, for one
        if is_out_of_memory(error):
            raise
        return False
    alike = [entry.op for entry in longer.entries] == [
        entry.op for entry in tape.entries
    ]  # in longer numbers
    return alike and agree_both_ways(function, longer, trained, owned)


def agree_both_ways(function: Function, tape: Tape, trained: frozenset[str], owned: Owners) -> bool:
    """One random product, by the replay on a segment of length zero and by the module as it is."""
    if (
        tape.outputs.isnan().any()
    ):  # which have no differences; said is which operation made the first
        known = [not is_whole(value) and bool(value.isnan().any()) for value in tape.values]
        made = (entry.op for entry in tape.entries if any(known[slot] for slot in entry.results))
        raise NoRule(
            f"outputs of the module are not numbers, from {next(made, 'its inputs or weights')} on"
        )
    cotangent = random_cotangent(tape)
    gradients = by_autograd(function, tape, trained, cotangent)
    if any(gradient.isnan().any() for gradient in gradients.values()):
        raise NoRule(
            f"autograd's gradients are not numbers{where_spoiled(function, tape, trained, cotangent)}"
        )
    replay = Replay(tape, tape, trained, owned.constants)
    values = gradients_at(replay.uses, replay.delta, cotangent, owned, replay.leaves)
    if any(value.isnan().any() for value in values.values()):
        raise NoRule("the difference rules give no numbers, where something infinite cancels")
    return agree(values, gradients, tape)


def gradients_at(
    uses: Sequence[Use],
    output: Tensor,
    cotangent: Float[Tensor, "example out"],
    owned: Owners,
    leaves: Weights,
) -> Weights:
    """Gradients, put together from those at the uses."""
    found = assemble_uses(pull_back(output, uses, owned, leaves, cotangent[None]))
    return found.total({name: leaf.detach() for name, leaf in leaves.items()})


def random_cotangent(tape: Tape) -> Float[Tensor, "example out"]:
    noise = torch.randn(tape.outputs.shape, generator=stream("faithfulness"), dtype=torch.float64)
    return noise.to(tape.outputs)


def agree(values: Weights, gradients: Weights, tape: Tape) -> bool:
    """Whether two ways to the same gradients differ by rounding alone."""
    # √eps is far more than another order of summation changes, and far less than a gradient that is left out
    sizes = [float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()]
    largest = max(sizes, default=0.0)
    return all(
        bool(((values[name] - gradients[name]).abs() <= tape.eps**0.5 * largest).all())
        for name in gradients
    )


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


def by_autograd(
    function: Function, tape: Tape, trained: frozenset[str], cotangent: Float[Tensor, "example out"]
) -> Weights:
    """Gradients by the module as it is."""
    weights = {
        name: tape[slot].detach().requires_grad_(name in trained)
        for slot, name in tape.weights.items()
    }
    leaves = {name: weight for name, weight in weights.items() if name in trained}
    with (
        torch.enable_grad(),
        plain_kernels(),
        unfused(),
    ):  # cuDNN has no way back through a layer in evaluation
        output = columns(function, weights, tape.given)
    if not output.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(output, list(leaves.values()), cotangent, materialize_grads=True)
    return dict(zip(leaves, map(dense, found), strict=True))


def dense(gradient: Tensor) -> Tensor:
    """The same numbers, also of a table that gives those of some rows alone."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
