"""Positions: contributions told apart by the places of a text whose losses made them.

    contribution(x, xᵢ) = Σ_t by_position(x, xᵢ, t)

Outputs of a call are [example, position, class], or [example, class, position] as cross_entropy takes them. An
example's gradient is a sum over its positions, and contributions are linear in it:

    Jᵢᵀ ℓ′ᵢ = Σ_t J_itᵀ ∂L/∂f_it

so each position takes one back-propagation of the call with ∂L/∂f of that position alone. Where ∂L/∂f is zero, as at
padding and at targets that are ignored, by_position is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.foreign_loop.call import ModelCall
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.record.tape import tensors
from ntkexp.mistake import Mistake
from ntkexp.text import counted

if TYPE_CHECKING:
    from ntkexp.kernel.read.reader import Reader
    from ntkexp.kernel.record.tape import Tape

AXES = 3
CANCELS, MOST = (
    64,
    0.01,
)  # eps, and at most that share: softmax and its gradient, rounded, over a vocabulary


# --- Which axis of the outputs is that of the positions.
#
# A loss by softmax takes a sum to 1 over classes, so ∂L/∂f sums to zero over that axis, Σ_c ∂L/∂f_tc = 0, and the
# other one is of positions. And positions are as many as those of the texts that go in. Each of these that can tell
# the axes apart has to point to the same one, at every call.


@dataclass(frozen=True)
class Positions:
    """The axis of outputs that is of positions, how many the longest call has, and the most rows, each a position of an
    example, that the calls of a step have."""

    axis: int
    longest: int
    rows: int


def positions_of(
    steps: Iterable[Sequence[ModelCall]], couples: Callable[[ModelCall], bool]
) -> Positions:
    """Those of the calls of all steps, before any of these is explained."""
    found, shape, longest, rows = set[int](), list[int](), {1: 0, 2: 0}, {1: 0, 2: 0}
    for calls in steps:
        for call in calls:
            if couples(call):
                raise Mistake(
                    f"step {call.at}: positions=True: BatchNorm in training mode couples the texts of a batch, and "
                    "positions are not told apart there; leave positions=True out"
                )
            refuse_no_positions(call)
            found |= {axis for axis in (by_loss(call), by_inputs(call)) if axis is not None}
            shape = shape or list(call.shape)
            longest = {axis: max(most, call.shape[axis]) for axis, most in longest.items()}
        rows = {
            axis: max(most, sum(c.shape[0] * c.shape[axis] for c in calls))
            for axis, most in rows.items()
        }
    if len(found) != 1:
        which = (
            "the loss and the lengths of texts disagree"
            if found
            else "neither the loss nor the texts tell"
        )
        raise Mistake(
            f"positions=True: one axis of outputs of shape {shape} is of positions and one of classes, and {which} "
            "which; call the model with texts [example, position], and let the loss take softmax over classes"
        )
    (axis,) = found
    return Positions(axis, longest[axis], rows[axis])


def refuse_no_positions(call: ModelCall) -> None:
    """Refuse outputs without an axis of positions.

    >>> refuse_no_positions(ModelCall(7, torch.ones(6, 2), shape=(6, 10)))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: step 7: positions=True: the loop's calls give outputs of shape [6, 10]; their axes have to \
be [example, position, class] or [example, class, position]
    """
    if not call.shape:
        raise Mistake(
            "positions=True: the trace is an older one, without the shapes of outputs; follow the loop again"
        )
    if len(call.shape) != AXES:
        raise Mistake(
            f"step {call.at}: positions=True: the loop's calls give outputs of shape {list(call.shape)}; their axes "
            "have to be [example, position, class] or [example, class, position]"
        )


def by_loss(call: ModelCall) -> int | None:
    """The axis of positions if ∂L/∂f sums to zero over the other one, and not over both; here of [example, class,
    position].

    >>> f, y = torch.randn(2, 7, 5, requires_grad=True), torch.ones(2, 5, dtype=torch.long)
    >>> torch.nn.functional.cross_entropy(f, y).backward()
    >>> call = ModelCall(0, y, shape=(2, 7, 5), gradient=f.grad.flatten(1))
    >>> by_loss(call), by_inputs(call)
    (2, 2)
    """
    assert call.gradient is not None
    gradient = call.gradient.reshape(call.shape)
    room = min(CANCELS * torch.finfo(gradient.dtype).eps, MOST)
    gradient = gradient if gradient.element_size() >= torch.float32.itemsize else gradient.float()

    def cancels(axis: int) -> bool:
        return float(gradient.sum(axis).norm()) <= room * float(gradient.abs().sum(axis).norm())

    here, there = cancels(2), cancels(1)
    return None if here == there else 1 if here else 2


def by_inputs(call: ModelCall) -> int | None:
    """The axis of positions if it alone is as long as the texts, [example, position], that went in."""
    lengths = {
        each.shape[1]
        for each in tensors(call.inputs)
        if each.dim() == 2 and not each.is_floating_point()
    }
    found = [axis for axis in (1, 2) if call.shape[axis] in lengths]
    return found[0] if len(found) == 1 else None


# --- Their gradients, and what they add.


@dataclass
class PositionGradients(Sequence[Jacobian]):
    """J_itᵀ ∂L/∂f_it of the examples of a call, one position after another, made when it runs for; what fits into
    the memory is made once. Positions at which no example has a loss are left out."""

    reader: Reader
    tape: Tape
    came: Float[Tensor, "example one other"]
    axis: int  # of the positions
    room: float = 0.0  # bytes
    made: dict[int, Jacobian] = field(default_factory=dict)
    held: int = 0

    def __post_init__(self) -> None:
        self.split = self.came.movedim(self.axis, 0)
        self.present: list[int] = self.split.ne(0).flatten(1).any(1).nonzero().flatten().tolist()

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, place: Any) -> Any:
        if place in self.made:
            return self.made[place]
        here = torch.zeros_like(self.came)
        here.movedim(self.axis, 0)[self.present[place]] = self.split[self.present[place]]
        found = self.reader.weighted(self.tape, here.flatten(1), as_copies=True)
        if self.held + found.nbytes <= self.room:
            self.made[place], self.held = found, self.held + found.nbytes
        return found


@dataclass
class LoopPositions:
    """What each position of each example added so far. Calls may have different numbers of positions: there are as many
    as the longest call has."""

    parts: Float[Tensor, "probe out example position"]

    @classmethod
    def at_zero(
        cls,
        positions: Positions,
        parts: Float[Tensor, "probe out example"],
        room_gb: float,
        memory_gb: float,
    ) -> LoopPositions:
        """Nothing added yet; what does not fit beside the other sums is refused."""
        outputs, examples = prod(parts.shape[:2]), parts.shape[2]
        numbers = outputs * (
            examples * positions.longest + positions.rows
        )  # the sum, and a step of it
        needed = numbers * parts.element_size() / 1e9
        if needed > room_gb:
            raise Mistake(
                f"memory_gb={memory_gb:g}: what {counted(positions.longest, 'position')} of {examples} examples add to "
                f"{outputs} outputs of the queries takes {needed:.2g} GB; give fewer queries, or "
                f"attribute(memory_gb={1.1 * (memory_gb - room_gb + needed):.2g})"
            )
        return cls(parts.new_zeros(*parts.shape, positions.longest))

    def add(
        self,
        calls: Sequence[tuple[PositionGradients, Int[Tensor, " _"]]],
        kernel: Float[Tensor, "probe out row"],
    ) -> None:
        """Add the calls of a step, each with the places of its examples."""
        begun = 0
        for gradients, rows in calls:
            for position in gradients.present:
                added = -kernel[:, :, begun : begun + len(rows)].to(self.parts.dtype)
                self.parts[..., position].index_add_(2, rows, added)
                begun += len(rows)
