"""Whether anything else than the optimizers moved the weights.

PyTorch counts the writes to a tensor, and the count is asked at every call. It does not know of writes to
`weight.data`, so before every step the weights themselves are held against those that are kept here, to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights

LIBRARY, SIZE = ctypes.CDLL(None), ctypes.c_size_t


@dataclass
class Untouched:
    """`weights` are those that the optimizers left, `counts` the writes to them until then. `spare` is memory that
    nobody looks at any more: to fill fresh memory takes several times as long."""

    weights: Weights = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    spare: Weights = field(default_factory=dict)

    def keep(self, weights: Mapping[str, Tensor]) -> None:
        """Keep some weights as they are now."""
        places, found = list[Tensor](), list[Tensor]()
        for name, weight in weights.items():
            place, now = self.spare.pop(name, None), weight.detach()
            self.weights[name] = place if place is not None and alike(place, now) else torch.empty_like(now)
            self.counts[name] = weight._version
            places.append(self.weights[name])
            found.append(now)
        torch._foreach_copy_(places, found)  # with one call for all

    def forget(self, before: Weights) -> None:
        """Nobody looks any more at weights that were kept before the latest."""
        self.spare |= {name: weight for name, weight in before.items() if weight is not self.weights[name]}

    def refuse_writes(self, step: int, members: Iterable[tuple[str, Tensor]], *, closely: bool = False) -> None:
        """Refuse weights that were written to, and are not what they were; or those that are not, by whatever way."""
        for name, weight in members:
            if name not in self.weights:
                raise Mistake(f"step {step}: '{name}' was given to the optimizer during training")
            if weight._version == self.counts[name] and not closely:
                continue
            if not same_bits(weight.detach(), self.weights[name]):
                raise Mistake(
                    f"step {step}: '{name}' was changed by something else than the optimizer since the last step (a "
                    "clamp, an average that was copied back, a load, the ascent of SAM?), which is not followed"
                )
            self.counts[name] = weight._version


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether one tensor holds what another can."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit, seen in numbers of eight bytes where the system cannot compare them.

    >>> same_bits(torch.zeros(2), -torch.zeros(2)), same_bits(torch.ones(3), torch.ones(3))
    (False, True)
    """
    if not alike(one, other):
        return False
    if one.device.type == "cpu" and one.is_contiguous() and other.is_contiguous():
        return not LIBRARY.memcmp(*(ctypes.c_void_p(each.data_ptr()) for each in (one, other)), SIZE(one.nbytes))
    ours, theirs = one.reshape(-1), other.reshape(-1)
    kind = torch.int64 if one.nbytes % 8 == 0 else torch.uint8
    return torch.equal(ours.view(kind), theirs.view(kind))
