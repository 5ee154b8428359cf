"""Find the owner of each element of each tap: the example that the element belongs to.
(A tap is the result of combining a weight with the inputs; see `uses`.)

An element belongs to example n if it affects only the outputs of n. To find n, draw a
random cotangent u (one number for each output of each example). Let u′ be u with the row
of each example n multiplied by n. Back-propagate both to the taps, which gives the
gradients β̄(u) and β̄(u′). An element of example n has

    β̄(u′)/β̄(u) = n

If a ratio is not an integer, the module couples the examples of a batch. All
coefficients of the difference rules are random numbers here (see `call`), so that even
elements behind a dead unit or a zero weight have a nonzero gradient.

A constant with a row for every example, such as the initial state of an LSTM, counts as
an input. Its products with weights are then uses of these weights.

Owners are valid for every tape with the same operations, shapes, and routing values
(values that decide which rows of data an operation reads or writes)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.record.casts import Uncast
from ntkexp.kernel.record.independence import COUPLED
from ntkexp.kernel.record.tape import Entry, Slot, Tape, digest, is_integer
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.uses import Element, Trained, Use, rows_of
from ntkexp.mistake import Mistake
from ntkexp.stream import normal, stream

# relative tolerance for a ratio of two sums of positive terms to be an integer
INTEGER_TOLERANCE = 1e-6
# rounding error of sums in the backward pass, in eps of the largest element of a row
ROW_SUM_EPS = 1000
LOOKUPS = ("embedding", "_embedding_bag")
BY_FREQUENCY = "scale_grad_by_freq"
# rounding error after cancellation in the norms of many layers, in eps of the largest
# element
CANCELLATION_EPS = 10**6
# number of elements whose owners are computed together, in the cache of a core
BLOCK_ELEMENTS = 2**16


@dataclass(frozen=True, eq=False)
class Owners:
    """The owner (the index of an example) of each element of each tap. The tap of a
    product has one owner for each row."""

    of_uses: tuple[Int[Tensor, "..."], ...]
    # constants with a row for every example, which count as inputs
    constants: frozenset[Slot] = frozenset()

    @cached_property
    def digest(self) -> bytes:
        """A digest of all owners, their layout and their device."""
        layout = [(owner.shape, owner.stride(), owner.device) for owner in self.of_uses]
        return digest(
            map(drop_expanded_axes, self.of_uses),
            repr((layout, sorted(self.constants))),
        )


def owners(tape: Tape, trained: frozenset[str]) -> Owners:
    """Return the owners of a tape, in the order of its uses.

    A constant that is multiplied with weights may have a row for every example. First
    assume that all these constants do. If this fails, assume that none does."""
    refuse_frequency_scaling(tape, trained)
    weights = Trained(tape, trained).slots
    products = (
        entry.args[-2:] for entry in tape.entries if entry.name in ("mm", "addmm")
    )
    constants = (
        frozenset(left for left, right in products if right in weights)
        - tape.from_weights
        - tape.from_inputs
    )
    if constants:
        with suppress(Mistake):
            return owners_with_constants(tape, trained, constants)
    return owners_with_constants(tape, trained, constants=frozenset())


def refuse_frequency_scaling(tape: Tape, trained: frozenset[str]) -> None:
    """Raise Mistake for embeddings with scale_grad_by_freq.

    This option divides the gradient of a row by the number of times that the batch
    contains the row, so the gradient of an example depends on the other examples. The
    search for owners does not detect this in a batch without repeated rows."""
    tables = {
        name: tape.reached([slot])
        for slot, name in tape.weights.items()
        if name in trained
    }
    for entry in filter(divides_by_frequency, tape.entries):
        for name, made in tables.items():
            if entry.args[0] in made:
                raise Mistake(
                    f"the gradient of '{name}' is divided by the frequency of each row "
                    "in the batch (scale_grad_by_freq=True), so the gradient of an "
                    "example depends on the other examples, and is not a derivative; "
                    "build its layer without this option"
                )


def divides_by_frequency(entry: Entry) -> bool:
    """Return True if an operation is an embedding with scale_grad_by_freq=True."""
    if entry.name not in LOOKUPS:
        return False
    arguments = [argument.name for argument in entry.op._schema.arguments]
    index = arguments.index(BY_FREQUENCY)
    return any(entry.args[index : index + 1])


def owners_with_constants(
    tape: Tape, trained: frozenset[str], constants: frozenset[Slot]
) -> Owners:
    """Return the owners of a tape, assuming that row n of each constant in `constants`
    belongs to example n."""
    with Uncast(torch.float64):
        replay = Replay(
            tape, tape, trained, constants, coefficient_noise=stream("ownership")
        )
    if not replay.uses:
        return Owners((), constants)
    examples = replay.delta.shape[0]
    u = replay.state.random_like(replay.delta)
    count = torch.arange(1.0, examples + 1, dtype=u.dtype, device=u.device)
    weighted_u = u * count.view(-1, *[1] * (u.dim() - 1))  # u′
    betas = replay.pullback(u, retain_graph=True)
    weighted_betas = replay.pullback(weighted_u)
    of_uses = []
    for use, beta, weighted in zip(replay.uses, betas, weighted_betas, strict=True):
        gradients = (tap_rows(use, weighted), tap_rows(use, beta))
        if isinstance(use, Element):
            of_uses.append(expand_equal_axes(owner(*gradients)))
        else:  # a product has one owner for each row
            of_uses.append(owner_of_rows(*gradients))
    return Owners(tuple(of_uses), constants)


def tap_rows(use: Use, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return values at the tap of a use. For a product, flatten them to rows."""
    return values if isinstance(use, Element) else rows_of(values, batch=0)


def expand_equal_axes(owner: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Store owners only once along each axis on which all are equal (stride 0)."""
    stored = owner
    for axis in range(owner.dim()):
        first = stored.narrow(axis, 0, min(1, stored.shape[axis]))
        if torch.equal(first.expand_as(stored), stored):
            stored = first
    return stored.clone().expand_as(owner)


def match_uses(uses: Sequence[Use], owned: Owners) -> bool:
    """Return True if `owned` has the right shape for these uses: an owner for each row
    of a `Product` or `Grouped`, and for each element of an `Element`."""
    counts = [
        use.tap.numel() if isinstance(use, Element) else len(tap_rows(use, use.tap))
        for use in uses
    ]
    return counts == [owner.numel() for owner in owned.of_uses]


def owners_hold(
    output: Float[Tensor, "example out"], uses: Sequence[Use], owned: Owners, eps: float
) -> bool:
    """Return True if the owners are right for the values on this tape: every element
    of a tap affects only the outputs of its owner.

    Elements behind a dead unit or a zero weight are not tested. Their gradients on this
    tape are zero, so it does not matter which owner they have."""
    examples = len(output)
    taps = [use.tap for use in uses]
    if not taps or not match_uses(uses, owned):
        return False
    draw = normal(stream("ownership"), *output.shape).to(output)
    count = torch.arange(1.0, examples + 1, dtype=draw.dtype, device=draw.device)[
        :, None
    ]
    betas, weighted_betas = (
        torch.autograd.grad(
            output, taps, cotangent, retain_graph=True, materialize_grads=True
        )
        for cotangent in (draw, count * draw)
    )
    for use, beta, weighted, owner in zip(
        uses, betas, weighted_betas, owned.of_uses, strict=True
    ):
        n = owner + 1 if isinstance(use, Element) else owner[:, None] + 1
        one = tap_rows(use, beta)
        other = tap_rows(use, weighted)
        # |β̄(u′) − n β̄(u)|
        missed = torch.addcmul(other, one, n.to(one), value=-1).abs_()
        largest = other.abs()
        # compare row by row, because rows may differ in size by orders of magnitude
        if one.dim() and one.numel():
            missed = missed.amax(-1)
            largest = largest.amax(-1)
        # nan also fails this comparison
        if not bool((missed <= ROW_SUM_EPS * eps * largest).all()):
            return False
    return True


def owner(
    weighted: Float[Tensor, "..."], beta: Float[Tensor, "..."]
) -> Int[Tensor, "..."]:
    """Return the owner of each element, β̄(u′)/β̄(u) − 1, or −1 if the element affects
    no output. The ratio counts examples from 1. `weighted` is β̄(u′), and `beta` is
    β̄(u)."""
    numbers = torch.empty(weighted.shape, dtype=torch.long, device=weighted.device)
    rounding = rounding_of(weighted, beta)
    ratios = numbers.view(-1)
    weighted = weighted.reshape(-1)
    beta = beta.reshape(-1)
    for start in range(0, len(ratios), BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        ratios[block] = integer_ratio(weighted[block], beta[block], rounding)
    return numbers.sub_(1)


def owner_of_rows(
    weighted: Float[Tensor, "row out"], beta: Float[Tensor, "row out"]
) -> Int[Tensor, " row"]:
    """Return the owner of each row. Raise NoRule if the elements
    of a row have different owners."""
    numbers = weighted.new_empty(len(weighted))
    rounding = rounding_of(weighted, beta)
    count = max(1, BLOCK_ELEMENTS // max(1, weighted.shape[1]))
    for start in range(0, len(weighted), count):
        rows = slice(start, start + count)
        ratios = integer_ratio(weighted[rows], beta[rows], rounding)
        numbers[rows] = ratios.amax(1)
        if ((ratios != numbers[rows, None]) & (ratios > 0)).any():
            raise NoRule("a row of a matrix product belongs to several examples")
    return numbers.long() - 1


def rounding_of(weighted: Float[Tensor, "..."], beta: Float[Tensor, "..."]) -> float:
    """Return a bound on the absolute rounding error of β̄(u′), which is `weighted`.
    Raise NoRule if a gradient overflows."""
    largest = [
        max(map(abs, map(float, gradient.aminmax()))) if gradient.numel() else 0.0
        for gradient in (weighted, beta)
    ]
    if not all(map(isfinite, largest)):
        raise NoRule("numbers overflow in the search for the example of each element")
    return CANCELLATION_EPS * torch.finfo(weighted.dtype).eps * largest[0]


def integer_ratio(
    weighted: Float[Tensor, "..."], beta: Float[Tensor, "..."], rounding: float
) -> Float[Tensor, "..."]:
    """Return β̄(u′)/β̄(u), or 0 for an element that affects no output. Raise Mistake if
    a ratio is not an integer."""
    ratio = (weighted / beta).round_().nan_to_num_(0.0, posinf=0.0, neginf=0.0)
    missed = torch.addcmul(weighted, ratio, beta, value=-1).abs_()
    size = ratio.clamp(min=1).mul_(beta).abs_()
    if (missed > size.mul_(INTEGER_TOLERANCE).add_(rounding)).any():
        raise Mistake(COUPLED)
    return ratio


def drop_expanded_axes(owner: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Cut expanded axes (stride 0) to length 1, so that
    each number in memory occurs once."""
    return owner[
        tuple(slice(0, 1) if step == 0 else slice(None) for step in owner.stride())
    ]


# Routing values: values that decide which rows of data an operation reads or writes.
#
# Examples are indices, masks for selecting or scattering, permutations from sorting, and
# the expert indices of a mixture of experts. If routing values differ between two tapes
# of the same structure, the owners may differ too. Two kinds of operations have no
# routing values: elementwise operations, which keep every element at its index, and
# operations that read rows of weights. For example, the tokens of an embedding are no
# routing values.


ROW_READS = ("embedding", "gather", "index", "index_select", "take")
# operations that also return integers, such as pivots. The difference rules do not use
# these integers.
UNUSED_INTEGERS = frozenset(
    [
        "_linalg_det",
        "_linalg_slogdet",
        "_linalg_solve_ex",
        "linalg_cholesky_ex",
        "linalg_inv_ex",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "max",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "min",
    ]
)


@dataclass(frozen=True)
class Routes:
    """The slots of a tape that hold routing values, and the slots that hold masks."""

    routing: tuple[Slot, ...]
    masks: tuple[Slot, ...]  # masks that depend on inputs and not on weights


def routes(tape: Tape) -> Routes:
    read = {tape.output}
    for entry in tape.entries:
        read.update(entry.slots)
    routing: set[Slot] = set()
    for entry in tape.entries:
        routing.update(routing_slots(tape, entry, read))
    inputs_only = tape.from_inputs - tape.from_weights
    masks = [slot for slot in inputs_only if tape[slot].dtype == torch.bool]
    return Routes(tuple(sorted(routing)), tuple(sorted(masks)))


def routing_slots(tape: Tape, entry: Entry, read: set[Slot]) -> Iterator[Slot]:
    """Yield the slots of an operation's routing values. Routing values are integer or
    mask arguments that select rows, and integer results, such as the order of a
    sort."""
    # h[h < 0] = 0 keeps every element at its index, so its mask is no routing value
    if entry.name == "index_put":
        _, (*before, last), value, *_ = entry.args
        is_number = tape[value].dim() == 0 and value not in tape.from_weights
        keeps_places = (
            is_number
            and before == [None] * len(before)
            and tape[last].dtype == torch.bool
        )
    else:
        keeps_places = (
            torch.Tag.pointwise in entry.op.tags or entry.name == "masked_fill"
        )
    # integer arguments
    moved = [slot for slot in entry.slots if not is_integer(tape[slot])]
    only_reads_rows = entry.name in ROW_READS and tape.from_inputs.isdisjoint(moved)
    if moved and not (keeps_places or only_reads_rows):
        yield from (slot for slot in entry.slots if is_integer(tape[slot]))
    # integer results, if another result is a used value
    is_used = any(slot in read and not is_integer(tape[slot]) for slot in entry.results)
    if is_used and entry.name not in UNUSED_INTEGERS:
        yield from (slot for slot in entry.results if is_integer(tape[slot]))
