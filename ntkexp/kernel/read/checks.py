"""Check a function before its Jacobian is read.

There are three checks: the gradients of the function are the derivatives of its values
(it is *faithful*); its examples are independent; and every element of a tap belongs to
one example (its *owner*). A tap is the result of combining a weight with the inputs (see
`secant.uses`).

The result of each check is cached. The cache key consists of the structure of the tape
(operations and shapes) and a digest of the values on which the result depends.

A module with `detach`, a straight-through estimator or a custom autograd.Function may be
trained by gradients that are not the derivatives of its values. Difference rules use
only the values, so they give the true derivatives. To test if a function is faithful,
compute one random vector-Jacobian product twice: by the difference rules, and by
autograd through the module."""

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
from ntkexp.kernel.read.program_cache import LRUCache
from ntkexp.kernel.record.independence import refuse_dependence
from ntkexp.kernel.record.tape import Tape, digest, is_integer
from ntkexp.kernel.record.taping import (
    columns,
    is_out_of_memory,
    plain_kernels,
    record,
    unfused,
)
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.ownership import (
    Owners,
    Routes,
    match_uses,
    owners,
    owners_hold,
    routes,
)
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.uses import Trained, Use, plain_uses
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Weights
from ntkexp.stream import normal, stream

UNFAITHFUL = (
    "the module's gradients are not the derivatives of its values (look for detach, a "
    "straight-through estimator or an autograd.Function), so secants do not explain its training"
)


class Unfaithful(NoRule):
    """Raised if a module's gradients are not the derivatives of its values."""

    def __init__(self) -> None:
        super().__init__(UNFAITHFUL)


@dataclass(frozen=True)
class CheckCache:
    """Cached results of the checks of one function. `Checks.cache_key` computes
    most of the keys."""

    routes: LRUCache[Routes] = field(default_factory=LRUCache)
    owners: LRUCache[Owners] = field(default_factory=LRUCache)
    # by the operations of the tape: True if its examples are independent
    independent: LRUCache[bool] = field(default_factory=LRUCache)
    # the latest owners, by the structure of the tape. They are tried first if routing
    # values (indices and masks that select rows) have changed.
    structures: LRUCache[Owners] = field(default_factory=LRUCache)
    # True if `gradients_agree`
    graphs: LRUCache[bool] = field(default_factory=LRUCache)
    faithful: LRUCache[Owners | None] = field(default_factory=LRUCache)
    # by `input_signature`: bytes on the tape for each example
    sizes: LRUCache[float] = field(default_factory=LRUCache)
    # True if assembled Jacobians fit into memory
    fits: LRUCache[bool] = field(default_factory=LRUCache)


@dataclass(frozen=True)
class Checks:
    """The checks of one function. `fixed` is True if the caller promises that the
    constants on its tapes never change."""

    function: Function
    trained: frozenset[str]
    check_cache: CheckCache
    fixed: bool

    def owners(self, tape: Tape) -> Owners:
        """Return the owners: for each element of a tap, the example that it belongs to.
        Compute them once for all tapes with equal operations, shapes and routing values
        (indices and masks that select rows)."""
        cache_key = self.cache_key(tape)
        known = self.check_cache.owners.entries
        if cache_key in known:
            return self.check_cache.owners.put(cache_key, known[cache_key])
        self.refuse_dependence(tape)
        owned = owners(tape, self.trained)
        # if other routing values gave the same owners, share one object
        for other in known.values():
            if other.digest == owned.digest:
                owned = other
                break
        self.check_cache.structures.put(tape.structure_digest, owned)
        return self.check_cache.owners.put(cache_key, owned)

    def faithful_owners(self, tape: Tape) -> Owners:
        """Return the owners. Raise Unfaithful if autograd's gradients are not the
        derivatives of the module's values."""

        def owners_if_faithful() -> Owners | None:
            owned = self.owners(tape)
            if self.is_faithful(tape, owned):
                return owned
            return None

        owned = self.check_cache.faithful.get(
            self.cache_key(tape, masks=True), owners_if_faithful
        )
        if owned is None:
            raise Unfaithful
        return owned

    def plain_uses(self, tape: Tape) -> tuple[Owners, list[Use] | None]:
        """Return the owners, and the plain uses of weights (uses that autograd can
        differentiate on the tape). The uses are None if any use is not plain.

        If routing values have changed, first try the owners of an earlier tape.
        These owners are valid if `owners_hold` is True."""
        if not tape[tape.output].requires_grad or tape.overwrites:
            return self.owners(tape), None

        def uses_with(owned: Owners) -> list[Use] | None:
            return plain_uses(Trained(tape, self.trained, owned.constants))

        owned: Owners | None = None
        if self.cache_key(tape) not in self.check_cache.owners.entries:
            owned = self.check_cache.structures.entries.get(tape.structure_digest)
        uses = None if owned is None else uses_with(owned)
        output = tape[tape.output]
        if owned and uses and owners_hold(output, uses, owned, tape.eps):
            self.refuse_dependence(tape)
        else:
            owned = self.owners(tape)
            uses = uses_with(owned)
        if uses is None or not self.gradients_agree(tape, uses, owned):
            return owned, None
        return owned, uses

    def gradients_agree(self, tape: Tape, uses: list[Use], owned: Owners) -> bool:
        """Return True if autograd on the tape computes the same gradients as autograd
        through the module.

        Every element must have an owner, and the gradients at the uses must add up to
        the module's gradients. The sums differ, for example, if the module writes in
        place under no_grad, because the recorder replaces this write by a
        differentiable operation."""

        def compare() -> bool:
            if not match_uses(uses, owned):
                return False
            cotangent = random_cotangent(tape)
            leaves = {
                name: tape[slot]
                for slot, name in tape.weights.items()
                if name in self.trained
            }
            gradients = gradients_at(uses, tape[tape.output], cotangent, owned, leaves)
            expected = self.by_autograd(tape, cotangent)
            return agree(gradients, expected, tape)

        return self.check_cache.graphs.get(self.cache_key(tape, masks=True), compare)

    def is_faithful(self, tape: Tape, owned: Owners) -> bool:
        """Return True if difference rules and autograd agree up to rounding.

        In single precision, a value near a kink may fall on the other side of the kink
        when the module runs again. Large modules have many such values. So if rules and
        autograd disagree, repeat the test in double precision."""
        agreed = self.rules_match_autograd(tape, owned)
        kinds = {weight.dtype for weight in tape.recorded_weights.values()}
        if agreed or kinds <= {torch.float64}:
            return agreed
        double_tape = self.in_double_precision(tape)
        return double_tape is not None and self.rules_match_autograd(double_tape, owned)

    def in_double_precision(self, tape: Tape) -> Tape | None:
        """Record the function in double precision. Return None if it then fails, for
        example because a buffer stays in single precision, or if it runs other
        operations."""

        def doubled(value: Any) -> Any:
            if not isinstance(value, Tensor) or is_integer(value):
                return value
            return value.to(torch.complex128 if value.is_complex() else torch.float64)

        try:
            recorded = record(
                self.function,
                *tree_map(doubled, (tape.recorded_weights, tape.given)),
                differentiable=tape[tape.output].requires_grad,
                repeats_random=bool(tape.drawn),
                whole_batch=tape.whole_batch,
            )
        except (RuntimeError, Mistake) as error:
            if is_out_of_memory(error):
                raise
            return None
        # the tape of a compiled program lacks the operations that no output needs
        double_tape = recorded.pruned()
        operations = [entry.op for entry in tape.pruned().entries]
        if [entry.op for entry in double_tape.entries] != operations:
            return None
        return double_tape

    def rules_match_autograd(self, tape: Tape, owned: Owners) -> bool:
        """Return True if a random vector-Jacobian product by the difference rules
        agrees with the same product by autograd. Raise NoRule if a value is nan."""
        # name the operation that made the first nan
        if tape.outputs.isnan().any():
            has_nan = [
                not is_integer(value) and bool(value.isnan().any())
                for value in tape.values
            ]
            made = (
                entry.op
                for entry in tape.entries
                if any(has_nan[slot] for slot in entry.results)
            )
            raise NoRule(
                f"outputs of the module are nan, from {next(made, 'its inputs or weights')} on"
            )
        cotangent = random_cotangent(tape)
        gradients = self.by_autograd(tape, cotangent)
        if any(gradient.isnan().any() for gradient in gradients.values()):
            raise NoRule(
                f"autograd's gradients are nan{self.nan_origin(tape, cotangent)}"
            )
        replay = Replay(tape, tape, self.trained, owned.constants)
        values = gradients_at(
            replay.uses, replay.delta, cotangent, owned, replay.leaves
        )
        if any(value.isnan().any() for value in values.values()):
            raise NoRule(
                "the difference rules give nan, because infinite values cancel"
            )
        return agree(values, gradients, tape)

    def nan_origin(self, tape: Tape, cotangent: Float[Tensor, "example out"]) -> str:
        """Return text that names the operation where autograd's gradients become
        nan, or an empty string."""
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                torch.autograd.detect_anomaly(),
            ):
                self.by_autograd(tape, cotangent)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            operation = re.search(
                r"Function '(\w+?)(?:Backward\d*)?' returned nan", str(error)
            )
            if operation:
                return f", from {operation[1]} on"
        return ""

    def by_autograd(
        self, tape: Tape, cotangent: Float[Tensor, "example out"]
    ) -> Weights:
        """Return the gradients by autograd through the module itself."""
        weights, leaves = differentiable_weights(tape, self.trained)
        # run RNNs unfused, because cuDNN cannot differentiate an RNN in evaluation mode
        with (
            torch.enable_grad(),
            plain_kernels(),
            unfused(),
        ):
            output = columns(self.function, weights, tape.given)
        if not output.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        gradients = torch.autograd.grad(
            output, list(leaves.values()), cotangent, materialize_grads=True
        )
        return dict(zip(leaves, map(dense, gradients), strict=True))

    def refuse_dependence(self, tape: Tape) -> None:
        """Raise if examples depend on one another. Run fewer tests if a tape with the
        same operations has already passed."""
        known = tape.operations in self.check_cache.independent.entries
        refuse_dependence(self.function, tape, known=known)
        if len(tape.outputs) > 1:
            self.check_cache.independent.put(tape.operations, True)

    def routes(self, tape: Tape) -> Routes:
        return self.check_cache.routes.get(tape.structure_digest, lambda: routes(tape))

    def cache_key(self, tape: Tape, *, masks: bool = False) -> tuple[bytes, bytes]:
        """Return a cache key: the structure of a tape, and a digest of some of its values.

        The digest covers routing values (values that choose rows of data), and
        constants unless they are `fixed`. With `masks`, it also covers masks. Without
        `masks`, it covers all inputs if Python may have branched on them."""
        known = self.routes(tape)
        slots = [*known.routing]
        if masks:
            slots += known.masks
        elif tape.chooses:
            slots += tape.inputs
        if not self.fixed:
            slots += tape.constants
        return tape.structure_digest, digest(tape[slot] for slot in slots)


def gradients_at(
    uses: Sequence[Use],
    output: Tensor,
    cotangent: Float[Tensor, "example out"],
    owned: Owners,
    leaves: Weights,
) -> Weights:
    """Return the gradients of the parameters, from the gradients at their uses."""
    jacobian = assemble_uses(pull_back(output, uses, owned, leaves, cotangent[None]))
    return jacobian.total({name: leaf.detach() for name, leaf in leaves.items()})


def random_cotangent(tape: Tape) -> Float[Tensor, "example out"]:
    return normal(stream("faithfulness"), *tape.outputs.shape).to(tape.outputs)


def agree(values: Weights, gradients: Weights, tape: Tape) -> bool:
    """Return True if two computations of the same gradients differ
    by no more than rounding."""
    # √eps is far above the effect of another order of summation, and far below the
    # effect of a missing gradient
    sizes = [
        float(gradient.abs().max())
        for gradient in gradients.values()
        if gradient.numel()
    ]
    largest = max(sizes, default=0.0)
    return all(
        bool(((values[name] - gradients[name]).abs() <= tape.eps**0.5 * largest).all())
        for name in gradients
    )


def differentiable_weights(
    tape: Tape, trained: frozenset[str]
) -> tuple[Weights, Weights]:
    """Return the recorded weights of a tape, and the trained ones. Only the trained
    ones require gradients."""
    weights = tape.recorded_weights
    leaves = {
        name: weights[name].requires_grad_() for name in weights if name in trained
    }
    return weights, leaves


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor. An embedding may give a sparse one."""
    if gradient.layout is torch.strided:
        return gradient
    return gradient.to_dense()
