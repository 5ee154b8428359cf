"""Contributions split by the positions of a text.

    contribution(x, xᵢ) = Σ_t by_position(x, xᵢ, t)

The outputs of a call have the shape [example, position, class], or [example, class,
position] as in `cross_entropy`. The gradient of an example is a sum over its positions
t, and contributions are linear in the gradient:

    Jᵢᵀ ℓ′ᵢ = Σ_t J_itᵀ ∂L/∂f_it

J_it is the Jacobian of f_it, the outputs of example i at position t. For each position,
one backward pass of the call computes this term, with ∂L/∂f set to zero at all other
positions. At padding and ignored targets ∂L/∂f is zero, and so is by_position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.capacity import MemoryBudget
from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.cross_entropy import CrossEntropyGradient
from ntkexp.kernel import Jacobian
from ntkexp.kernel.record.tape import tensors
from ntkexp.mistake import Mistake
from ntkexp.text import counted, several

if TYPE_CHECKING:
    from ntkexp.kernel.read.reader import Reader
    from ntkexp.kernel.record.tape import Tape

OUTPUT_AXES = 3
# The sum Σ_c ∂L/∂f_tc counts as zero if its size, relative to Σ_c |∂L/∂f_tc|, is at most
# the smaller of these two bounds. The second one matters for dtypes with a large eps.
SOFTMAX_SUM_EPS = 64  # in units of eps
MAX_SOFTMAX_SUM = 0.01


# --- Which axis of the outputs counts positions, and which counts classes? Two signs
# show it. They must not disagree:
#
# - For a softmax loss, ∂L/∂f sums to zero over the classes c: Σ_c ∂L/∂f_tc = 0.
# - The axis of positions is as long as the input texts.


@dataclass(frozen=True)
class Positions:
    """The axis of positions in the outputs, and sizes for the plan of the memory."""

    axis: int  # axis number: 1 or 2
    longest: int  # largest number of positions in a call
    rows: int  # largest number of (example, position) pairs in a step


def positions_of(
    steps: Iterable[Sequence[ModelCall]], couples: Callable[[ModelCall], bool]
) -> Positions:
    """Find the axis of positions from the calls of all steps. Raise if the two signs
    (see above) show no axis, or both axes.

    `couples` returns True if BatchNorm couples the examples of a call.
    """
    axes = set[int]()
    first_shape: tuple[int, ...] = ()
    longest = {1: 0, 2: 0}
    rows = {1: 0, 2: 0}
    for calls in steps:
        for call in calls:
            refuse_no_positions(call, coupled=couples(call))
            axes |= {
                axis for axis in (by_loss(call), by_inputs(call)) if axis is not None
            }
            first_shape = first_shape or call.shape
        for axis in (1, 2):
            longest[axis] = max([longest[axis], *(call.shape[axis] for call in calls)])
            pairs = sum(call.shape[0] * call.shape[axis] for call in calls)
            rows[axis] = max(rows[axis], pairs)
    if len(axes) != 1:
        which = "neither the loss nor the lengths of the texts show"
        if axes:
            which = "the loss and the lengths of the texts disagree about"
        raise Mistake(
            f"positions=True: outputs of shape {list(first_shape)} have one axis of "
            f"positions and one of classes, and {which} which is which; call the model "
            "with texts [example, position], and let the loss take softmax over "
            "classes"
        )
    (axis,) = axes
    return Positions(axis, longest[axis], rows[axis])


def refuse_no_positions(call: ModelCall, *, coupled: bool = False) -> None:
    """Raise if the outputs have no axis of positions,
    or if BatchNorm couples the batch.

    >>> refuse_no_positions(ModelCall(7, torch.ones(6, 2), shape=(6, 10)))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: step 7: positions=True: the model returns outputs of shape [6, 10]; their axes must be \
[example, position, class] or [example, class, position]
    """
    if call.losses is not None:
        raise Mistake(
            f"step {call.at}: positions=True: trace.losses returns one loss for each "
            "example, not for each position; leave positions=True out"
        )
    if coupled:
        raise Mistake(
            f"step {call.at}: positions=True: BatchNorm in training mode couples the "
            "texts of a batch, so positions cannot be separated; leave positions=True "
            "out"
        )
    if call.joined:
        raise Mistake(
            f"step {call.at}: positions=True: the loss uses the outputs "
            f"{several(list(call.joined))} together, and they have no common axis of "
            "positions; leave positions=True out"
        )
    if not call.shape:
        raise Mistake(
            "positions=True: the trace is from an earlier version, which did not store "
            "the shapes of outputs; follow the loop again"
        )
    if len(call.shape) != OUTPUT_AXES:
        raise Mistake(
            f"step {call.at}: positions=True: the model returns outputs of shape "
            f"{list(call.shape)}; their axes must be [example, position, class] or "
            "[example, class, position]"
        )


def by_loss(call: ModelCall) -> int | None:
    """Return the axis of positions if the loss shows it, else None.

    If ∂L/∂f sums to zero over exactly one of the axes 1 and 2, this axis counts
    classes, and the other one counts positions. In this example, the outputs are
    [example, class, position].

    >>> f, y = torch.randn(2, 7, 5, requires_grad=True), torch.ones(2, 5, dtype=torch.long)
    >>> torch.nn.functional.cross_entropy(f, y).backward()
    >>> call = ModelCall(0, y, shape=(2, 7, 5), gradient=f.grad.flatten(1))
    >>> by_loss(call), by_inputs(call)
    (2, 2)
    """
    if isinstance(call.gradient, CrossEntropyGradient):
        return 1  # the classes are on the last axis
    assert call.gradient is not None
    gradient = call.gradient.reshape(call.shape)
    tolerance = min(SOFTMAX_SUM_EPS * torch.finfo(gradient.dtype).eps, MAX_SOFTMAX_SUM)
    if gradient.element_size() < torch.float32.itemsize:
        gradient = gradient.float()

    def sums_to_zero(axis: int) -> bool:
        size = float(gradient.abs().sum(axis).norm())
        return float(gradient.sum(axis).norm()) <= tolerance * size

    zero_over_last = sums_to_zero(2)
    if zero_over_last == sums_to_zero(1):
        return None
    return 1 if zero_over_last else 2


def by_inputs(call: ModelCall) -> int | None:
    """Return the axis of the outputs that is as long as axis 1 of the input tokens
    [example, position]. Return None if both axes or neither have this length."""
    lengths = {
        tensor.shape[1]
        for tensor in tensors(call.inputs)
        if tensor.dim() == 2 and not tensor.is_floating_point()
    }
    axes = [axis for axis in (1, 2) if call.shape[axis] in lengths]
    return axes[0] if len(axes) == 1 else None


# --- Gradients of positions, and their contributions.


@dataclass
class PositionGradients(Sequence[Jacobian]):
    """The gradients J_itᵀ ∂L/∂f_it of the examples i of a call,
    as a sequence over positions t.

    Positions without a loss are omitted. An element is computed when it is read, and
    stored if `buffer_bytes` is not used up."""

    reader: Reader
    tape: Tape
    output_gradient: Float[Tensor, "example one other"]
    axis: int  # index of the position axis
    buffer_bytes: float = 0.0
    stored: dict[int, Jacobian] = field(default_factory=dict)
    stored_bytes: int = 0

    def __post_init__(self) -> None:
        self.split = self.output_gradient.movedim(self.axis, 0)
        has_loss = self.split.ne(0).flatten(1).any(1)
        self.present: list[int] = has_loss.nonzero().flatten().tolist()

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, index: Any) -> Any:
        if index in self.stored:
            return self.stored[index]
        position = self.present[index]
        gradient = torch.zeros_like(self.output_gradient)
        gradient.movedim(self.axis, 0)[position] = self.split[position]
        jacobian = self.reader.weighted(self.tape, gradient.flatten(1), as_copies=True)
        if self.stored_bytes + jacobian.nbytes <= self.buffer_bytes:
            self.stored[index] = jacobian
            self.stored_bytes += jacobian.nbytes
        return jacobian


@dataclass
class LoopPositions:
    """The sum of the contributions so far, by position and example. The axis of
    positions has the length of the longest call."""

    parts: Float[Tensor, "query out example position"]

    @classmethod
    def at_zero(
        cls,
        positions: Positions,
        parts: Float[Tensor, "query out example"],
        budget: MemoryBudget,
    ) -> LoopPositions:
        """Return contributions that start at zero.
        Raise if they do not fit into memory."""
        outputs = prod(parts.shape[:2])
        examples = parts.shape[2]
        # `parts` has a number for each example and position, and the terms of one step
        # have a number for each row
        numbers = outputs * (examples * positions.longest + positions.rows)
        budget.require(
            numbers * parts.element_size(),
            f"contributions of {counted(positions.longest, 'position')} of {examples} examples "
            f"to {outputs} outputs of the queries",
            "give fewer queries",
        )
        return cls(parts.new_zeros(*parts.shape, positions.longest))

    def add(
        self,
        calls: Sequence[tuple[PositionGradients, Int[Tensor, " _"]]],
        kernel: Float[Tensor, "query out row"],
    ) -> None:
        """Add the contributions of all positions in one step, which are −`kernel`.

        Args:
            calls: gradients of each call, and the indices of its examples.
            kernel: products ⟨V, J_itᵀ ∂L/∂f_it⟩ with the adjoint V of the step, with a
                row for each (position, example) pair of each call.
        """
        start = 0
        for gradients, rows in calls:
            for position in gradients.present:
                end = start + len(rows)
                added = -kernel[:, :, start:end].to(self.parts.dtype)
                self.parts[..., position].index_add_(2, rows, added)
                start = end
