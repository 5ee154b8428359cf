"""Ownership: which example an element at a use belongs to.

An output of example n may depend only on elements that belong to n. Pull back the cotangents u and n·u, for random u:

    n = (β̄ of n·u)/(β̄ of u)        at an element of example n

A ratio that is not a whole number means that the module couples the examples of a batch. A constant that has a row for
every example, as the state from which an LSTM starts, counts as an input: its products with weights are uses. All
coefficients of the surrogate are random here, so that what a dead unit or a zero weight hides today is found as well;
the answer holds for every tape of the same structure and routing.
"""

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
from ntkexp.kernel.record.tape import Entry, Slot, Tape, digest, is_whole
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.uses import Element, Trained, Use, rows_of
from ntkexp.mistake import Mistake
from ntkexp.stream import stream

WHOLE = 1e-6  # the ratio of two sums of positive terms is whole to rounding, or off by about one
SUMS = 1000  # times eps of a row's largest element: what sums on the way back make of it
LOOKUPS = ("embedding", "_embedding_bag")
BY_FREQUENCY = "scale_grad_by_freq"
ROUNDING = 10**6  # times eps of the largest element: what norms centre cancels, layer after layer
BLOCK = 2**16  # elements whose owners are found at once, in the cache of a core


@dataclass(frozen=True, eq=False)
class Owners:
    """The example that owns each element of the tap, use by use; for products one number a row."""

    of_uses: tuple[Int[Tensor, "..."], ...]
    constants: frozenset[Slot] = (
        frozenset()
    )  # that have a row for every example, and count as inputs

    @cached_property
    def digest(self) -> bytes:
        """Two with one digest give every element to the same example, on the same device."""
        layout = [(each.shape, each.stride(), each.device) for each in self.of_uses]
        return digest(map(shown_once, self.of_uses), repr((layout, sorted(self.constants))))


def owners(tape: Tape, trained: frozenset[str]) -> Owners:
    """Those of a tape, in the order of its uses; rows of constants belong to examples wherever they can."""
    # Refuse tables whose gradients are divided by how often a batch has a row: that of an example depends on the
    # others, and a batch in which every row stands once does not show it
    tables = {name: tape.reached([slot]) for slot, name in tape.weights.items() if name in trained}
    for entry in tape.entries:
        place = (
            [each.name for each in entry.op._schema.arguments].index(BY_FREQUENCY)
            if entry.name in LOOKUPS
            else 0
        )
        if place and any(entry.args[place : place + 1]):
            for name in (name for name, made in tables.items() if entry.args[0] in made):
                raise Mistake(
                    f"the gradient of '{name}' is divided by how often a batch has each row (scale_grad_by_freq=True): "
                    "that of an example depends on the others, and is not a derivative; build its layer without that"
                )
    # Constants of which weights make a product
    weights = Trained(tape, trained).slots
    products = (entry.args[-2:] for entry in tape.entries if entry.name in ("mm", "addmm"))
    constants = (
        frozenset(left for left, right in products if right in weights)
        - tape.from_weights
        - tape.from_inputs
    )
    if constants:
        with suppress(Mistake):
            return owners_beside(tape, trained, constants)
    return owners_beside(tape, trained, constants=frozenset())


def owners_beside(tape: Tape, trained: frozenset[str], constants: frozenset[Slot]) -> Owners:
    """Those of a tape, if these constants have a row for every example."""
    with Uncast(torch.float64):
        replay = Replay(tape, tape, trained, constants, scramble=stream("ownership"))
    if not replay.uses:
        return Owners((), constants)
    examples = replay.delta.shape[0]
    draw = replay.chord.random_like(replay.delta)  # u, and n·u
    count = torch.arange(1.0, examples + 1, dtype=draw.dtype, device=draw.device)
    weighted = draw * count.view(-1, *[1] * (draw.dim() - 1))
    below = replay.pullback(draw, again=True)
    above = replay.pullback(weighted)
    kept = []
    for use, a, b in zip(replay.uses, above, below, strict=True):
        if isinstance(
            use, Element
        ):  # the numbers are kept once along every axis on which they do not change
            each = once = owner(a, b)
            for axis in range(each.dim()):
                first = once.narrow(axis, 0, min(1, once.shape[axis]))
                once = first if torch.equal(first.expand_as(once), once) else once
            kept.append(once.clone().expand_as(each))
        else:  # one for each row of a product
            kept.append(owner_of_rows(rows_of(a, batch=0), rows_of(b, batch=0)))
    return Owners(tuple(kept), constants)


def have_owners(uses: Sequence[Use], owned: Owners) -> bool:
    """Whether each row of every product, and each element of every other use, has an owner."""
    each = [
        use.tap.numel() if isinstance(use, Element) else rows_of(use.tap, batch=0).shape[0]
        for use in uses
    ]
    return each == [owner.numel() for owner in owned.of_uses]


def hold_at(
    output: Float[Tensor, "example out"], uses: Sequence[Use], owned: Owners, eps: float
) -> bool:
    """Whether elements at uses reach the outputs of their owners alone, by the numbers of a point as it runs.

    What a dead unit or a zero weight hides is not seen, and gives nothing to the gradients of this point either.
    """
    examples = len(output)
    taps = [use.tap for use in uses]
    if not taps or not have_owners(uses, owned):
        return False
    draw = torch.randn(output.shape, generator=stream("ownership"), dtype=torch.float64).to(output)
    count = torch.arange(1.0, examples + 1, dtype=draw.dtype, device=draw.device)[:, None]
    below, above = (
        torch.autograd.grad(output, taps, cotangent, retain_graph=True, materialize_grads=True)
        for cotangent in (draw, count * draw)
    )
    for use, one, other, owner in zip(uses, below, above, owned.of_uses, strict=True):
        shown = (
            (one, other)
            if isinstance(use, Element)
            else (rows_of(one, batch=0), rows_of(other, batch=0))
        )
        whose = owner if isinstance(use, Element) else owner[:, None]
        missed = torch.addcmul(shown[1], shown[0], (whose + 1).to(one), value=-1).abs_()
        largest = shown[1].abs()
        if (
            one.dim() and one.numel()
        ):  # a row may be far smaller than others, and another example's for all that
            missed = missed.amax(-1)
            largest = largest.amax(-1)
        if not bool((missed <= SUMS * eps * largest).all()):  # nor where they are not numbers
            return False
    return True


def owner(above: Float[Tensor, "..."], below: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The whole numbers above/below − 1; −1 for an element that reaches no output."""
    found = torch.empty(above.shape, dtype=torch.long, device=above.device)
    rounding = rounding_of(above, below)
    whole = found.view(-1)
    above = above.reshape(-1)
    below = below.reshape(-1)
    for begun in range(0, len(whole), BLOCK):
        block = slice(begun, begun + BLOCK)
        whole[block] = whole_ratio(above[block], below[block], rounding)
    return found.sub_(1)


def owner_of_rows(
    above: Float[Tensor, "row out"], below: Float[Tensor, "row out"]
) -> Int[Tensor, " row"]:
    """The same, one number for each row: that of all its elements that reach an output."""
    found = above.new_empty(len(above))
    rounding = rounding_of(above, below)
    count = max(1, BLOCK // max(1, above.shape[1]))
    for begun in range(0, len(above), count):
        rows = slice(begun, begun + count)
        whole = whole_ratio(above[rows], below[rows], rounding)
        found[rows] = whole.amax(1)
        if ((whole != found[rows, None]) & (whole > 0)).any():
            raise NoRule("a row of a matrix product belongs to several examples")
    return found.long() - 1


def rounding_of(above: Float[Tensor, "..."], below: Float[Tensor, "..."]) -> float:
    """By how much rounding may move an element of the larger sums, which are finite."""
    largest = [
        max(map(abs, map(float, each.aminmax()))) if each.numel() else 0.0
        for each in (above, below)
    ]
    if not all(map(isfinite, largest)):
        raise NoRule("numbers overflow in the check of which example owns which element")
    return ROUNDING * torch.finfo(above.dtype).eps * largest[0]


def whole_ratio(
    above: Float[Tensor, "..."], below: Float[Tensor, "..."], rounding: float
) -> Float[Tensor, "..."]:
    """above/below, which is whole; 0 for an element that reaches no output."""
    whole = (above / below).round_().nan_to_num_(0.0, posinf=0.0, neginf=0.0)
    missed = torch.addcmul(above, whole, below, value=-1).abs_()
    if (missed > whole.clamp(min=1).mul_(below).abs_().mul_(WHOLE).add_(rounding)).any():
        raise Mistake(COUPLED)
    return whole


def shown_once(owner: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The numbers that are kept, of those that an axis repeats."""
    return owner[tuple(slice(0, 1) if step == 0 else slice(None) for step in owner.stride())]


# --- Routing: the values on a tape that decide where other values go.
#
# Indices, masks that pick or scatter, orders, the numbers of experts: two tapes of the same structure on which these
# differ may have other owners of the same rows. An elementwise operation keeps every element at its place, whatever its
# numbers are, and what only picks from weights is a use of them: tokens are no matter of routing.


PICKING = ("embedding", "gather", "index", "index_select", "take")
TOURNAMENTS = (  # whose rules need no order
    *("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "linalg_cholesky_ex", "linalg_inv_ex"),
    *(
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "max",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "min",
    ),
)


@dataclass(frozen=True)
class Routes:
    """The slots of a structure whose values decide something: where rows go, which examples' values count."""

    steering: tuple[Slot, ...]
    masks: tuple[Slot, ...]  # that the inputs decide alone


def routes(tape: Tape) -> Routes:
    read = {slot for entry in tape.entries for slot in entry.slots} | {tape.output}
    alone = tape.from_inputs - tape.from_weights
    return Routes(
        tuple(
            sorted({slot for entry in tape.entries for slot in steering_slots(tape, entry, read)})
        ),
        tuple(sorted(slot for slot in alone if tape[slot].dtype == torch.bool)),
    )


def steering_slots(tape: Tape, entry: Entry, read: set[Slot]) -> Iterator[Slot]:
    """The whole numbers that steer an operation, as its arguments or as an order that it finds."""
    if entry.name == "index_put":  # h[h < 0] = 0 is an elementwise choice
        _, (*before, last), value, *_ = entry.args
        is_number = tape[value].dim() == 0 and value not in tape.from_weights
        keeps_places = (
            is_number and before == [None] * len(before) and tape[last].dtype == torch.bool
        )
    else:
        keeps_places = torch.Tag.pointwise in entry.op.tags or entry.name == "masked_fill"
    moved = [slot for slot in entry.slots if not is_whole(tape[slot])]
    only_picks = entry.name in PICKING and tape.from_inputs.isdisjoint(moved)
    if moved and not (keeps_places or only_picks):
        yield from (slot for slot in entry.slots if is_whole(tape[slot]))
    if entry.name not in TOURNAMENTS and any(
        slot in read and not is_whole(tape[slot]) for slot in entry.results
    ):
        yield from (slot for slot in entry.results if is_whole(tape[slot]))
