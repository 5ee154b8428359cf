"""A chord: a step between two tapes of one program, with the differences that are known so far.

Where nothing is asked but what reaches what, all its coefficients are random (`scramble`), in double precision.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.record.entry import Slot
from ntkexp.kernel.record.tape import Tape, is_whole
from ntkexp.kernel.secant.rules.base import Ends
from ntkexp.kernel.secant.uses import Trained, Use


@dataclass(frozen=True)
class Chord:
    """Both tapes, the difference of every slot that has one, and the uses of weights that were met."""

    start: Tape
    end: Tape
    trained: Trained
    scramble: torch.Generator | None = None
    is_still: bool = False  # whether every difference is zero, and what it reaches is all that is asked
    deltas: dict[Slot, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)  # the trained Δθ
    uses: list[Use] = field(default_factory=list)
    pieces: dict[tuple[Slot, int], tuple[Tensor, ...]] = field(default_factory=dict)  # of differences, along an axis

    @property
    def is_point(self) -> bool:
        """Whether both ends are one."""
        return self.start is self.end

    @cached_property
    def taken(self) -> dict[tuple[Slot, int], set[int]]:
        """The places along an axis that are selected one by one."""
        found: dict[tuple[Slot, int], set[int]] = defaultdict(set)
        for entry in self.start.entries:
            if entry.name == "select":
                slot, dim, place = entry.args
                shape = self.start[slot].shape
                found[slot, dim % len(shape)].add(place % shape[dim])
        return found

    def ends(self, slot: Any) -> Any:
        """The value of a slot at both ends; what is no slot is left as it is."""
        if not isinstance(slot, Slot):
            return slot
        v0, v1 = self.start[slot].detach(), self.end[slot].detach()
        return Ends(v0, v1, self.deltas.get(slot), slot in self.trained.slots, slot in self.trained.from_inputs)

    def random_like(self, value: Tensor) -> Tensor:
        """A coefficient in [1, 2], when the replay only asks what reaches what; so is each part of a complex one."""
        noise = torch.rand(value.shape, generator=self.scramble, dtype=torch.float64)
        coefficient = 1 + noise.to(value.device, torch.float64)
        return torch.complex(coefficient, self.random_like(value.real)) if value.is_complex() else coefficient

    def widen(self, value: Tensor) -> Tensor:
        """The value in double precision, when the replay only asks what reaches what: sums that cancel stay whole."""
        if self.scramble is None or is_whole(value):
            return value
        return value.to(torch.complex128 if value.is_complex() else torch.float64)
