"""Positions: contributions told apart by the places of a text whose losses made them.

    contribution(x, xᵢ) = Σ_t by_position(x, xᵢ, t)

Outputs of a call are [example, position, class]. An example's gradient is a sum over its positions, and contributions
are linear in it:

    Jᵢᵀ ℓ′ᵢ = Σ_t J_itᵀ ∂L/∂f_it

so each position takes one back-propagation of the call with ∂L/∂f of that position alone. Where ∂L/∂f is zero, as at
padding and at targets that are ignored, by_position is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.mistake import Mistake
from ntkexp.text import counted

if TYPE_CHECKING:
    from ntkexp.kernel.read.reader import Reader
    from ntkexp.kernel.record.tape import Tape

AXES = 3


def refuse_no_positions(shape: Sequence[int]) -> None:
    """Refuse outputs without an axis of positions.

    >>> refuse_no_positions([6, 10])
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: positions=True: the loop's calls give outputs of shape [6, 10]; their axes have to be \
[example, position, class]
    """
    if len(shape) != AXES:
        raise Mistake(
            f"positions=True: the loop's calls give outputs of shape {list(shape)}; their axes have to be [example, "
            "position, class]"
        )


@dataclass
class PositionGradients(Sequence[Jacobian]):
    """J_itᵀ ∂L/∂f_it of the examples of a call, one position after another, made when it is asked for; what fits into
    the memory is made once. Positions at which no example has a loss are left out."""

    reader: Reader
    tape: Tape
    came: Float[Tensor, "example out"]
    positions: int  # of the call
    room: float = 0.0  # bytes
    made: dict[int, Jacobian] = field(default_factory=dict)
    held: int = 0

    def __post_init__(self) -> None:
        self.split = self.came.reshape(len(self.came), self.positions, -1)
        self.present: list[int] = self.split.ne(0).any(2).any(0).nonzero().flatten().tolist()

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, place: Any) -> Any:
        if place in self.made:
            return self.made[place]
        here = torch.zeros_like(self.split)
        here[:, self.present[place]] = self.split[:, self.present[place]]
        found = self.reader.weighted(self.tape, here.flatten(1), as_copies=True)
        if self.held + found.nbytes <= self.room:
            self.made[place], self.held = found, self.held + found.nbytes
        return found


@dataclass
class LoopPositions:
    """What each position of each example added so far. Calls may have different numbers of positions: there are as many
    as the longest call has, and the sum grows with it, within `room_gb`."""

    parts: Float[Tensor, "probe out example position"]
    room_gb: float
    memory_gb: float

    def add(
        self,
        calls: Sequence[tuple[PositionGradients, Int[Tensor, " _"]]],
        kernel: Float[Tensor, "probe out row"],
    ) -> None:
        """Add the calls of a step, each with the places of its examples."""
        self.grow(max((gradients.positions for gradients, _ in calls), default=0))
        begun = 0
        for gradients, rows in calls:
            for position in gradients.present:
                self.parts[..., position].index_add_(2, rows, -kernel[:, :, begun : begun + len(rows)])
                begun += len(rows)

    def grow(self, positions: int) -> None:
        """Make room for so many positions."""
        *shape, known = self.parts.shape
        if positions <= known:
            return
        needed = 2 * prod(shape) * positions * self.parts.element_size() / 1e9  # the sum, and where it is copied to
        if needed > self.room_gb:
            raise Mistake(
                f"memory_gb={self.memory_gb:g}: what {counted(positions, 'position')} of {shape[2]} examples add to "
                f"{shape[0] * shape[1]} outputs of the queries takes {needed:.2g} GB; ask at fewer queries, or "
                f"attribute(memory_gb={1.1 * (self.memory_gb - self.room_gb + needed):.2g})"
            )
        self.parts = functional.pad(self.parts, (0, positions - known))
