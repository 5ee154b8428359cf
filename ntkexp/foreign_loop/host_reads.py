"""Transfers from a device to the CPU. Each transfer waits for the device, so small
tensors are concatenated and copied at once.

>>> read_numbers([torch.tensor(1.0), torch.tensor(2)])
[1.0, 2.0]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import hypot

import torch
from torch import Tensor

# Tensors with more elements than this are copied alone, because concatenating them
# would double their memory.
MAX_JOINED_NUMBERS = 2**16


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU. Small tensors of the same device
    and dtype share one transfer.

    >>> [tensor.tolist() for tensor in to_host([torch.ones(2), torch.zeros(1, 2)])]
    [[1.0, 1.0], [[0.0, 0.0]]]
    """
    copies = list(tensors)
    groups = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
    for index, tensor in enumerate(tensors):
        if tensor.is_cpu:
            continue
        if tensor.numel() > MAX_JOINED_NUMBERS:
            copies[index] = tensor.cpu()
        else:
            groups[tensor.device, tensor.dtype].append(index)

    for indices in groups.values():
        flat = [tensors[index].reshape(-1) for index in indices]
        joined = torch.cat(flat).cpu()
        parts = torch.split(joined, [len(part) for part in flat])
        for index, part in zip(indices, parts, strict=True):
            copies[index] = part.view(tensors[index].shape)
    return copies


def read_numbers(numbers: Sequence[Tensor]) -> list[float]:
    """Read tensors with one element each, in one transfer per device and dtype."""
    return [float(number) for number in to_host(numbers)]


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the norm of the concatenated tensors.

    >>> norm_of([torch.tensor([3.0]), torch.tensor([4.0])])
    5.0
    """
    return hypot(*read_numbers([tensor.norm() for tensor in tensors]))
