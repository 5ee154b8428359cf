"""Reads of a device by the host: a program waits for each of them, so many small tensors are copied with one.

>>> read_numbers([torch.tensor(1.0), torch.tensor(2)])
[1.0, 2.0]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

SMALL = 2**16
"""Numbers of a tensor that is copied together with others; a larger one would take its memory twice."""


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the processor; small ones of one kind come with one transfer.

    >>> [tensor.tolist() for tensor in to_host([torch.ones(2), torch.zeros(1, 2)])]
    [[1.0, 1.0], [[0.0, 0.0]]]
    """
    copies = list(tensors)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            continue
        if tensor.numel() > SMALL:
            copies[place] = tensor.cpu()
        else:
            together[tensor.device, tensor.dtype].append(place)

    for places in together.values():
        joined = torch.cat([tensors[place].reshape(-1) for place in places]).cpu()
        parts = torch.split(joined, [tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            copies[place] = part.view(tensors[place].shape)
    return copies


def read_numbers(numbers: Sequence[Tensor]) -> list[float]:
    """Return numbers, each a tensor of one element."""
    return [float(number) for number in to_host(numbers)]
