"""Tensors in lists, tuples and dicts as bytes, and back, without running any code on reading.

    length of the head (8 bytes)   head: JSON, with the kind, shape and place of each tensor   the tensors' bytes

>>> found = read(b"".join(written({"x": torch.ones(2), "more": (1, None, "text")})))
>>> found["x"].tolist(), found["more"]
([1.0, 1.0], (1, None, 'text'))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ntkexp.mistake import Mistake

LENGTH, ALIGNED = 8, 16
SMALL = 1 << 14  # bytes, which are copied sooner than written by themselves
PLAIN = (bool, int, float, str, type(None))


@dataclass
class Tensors:
    """The bytes of tensors one behind another; those of large ones where they are, and not copied."""

    parts: list[bytes | memoryview] = field(default_factory=list)
    size: int = 0

    def put(self, tensor: Tensor) -> int:
        """Put a tensor behind the others; its place."""
        place, flat = self.size, tensor.detach().cpu().reshape(-1).contiguous()
        if flat.numel():
            found = flat.view(torch.uint8).numpy().data
            self.parts += [found if len(found) > SMALL else bytes(found), b"\0" * (-len(found) % ALIGNED)]
            self.size += len(found) + len(self.parts[-1])
        return place


def written(content: object) -> list[bytes | memoryview]:
    """The bytes of some content, in parts; those of large tensors are their own, until they are written to."""
    tensors = Tensors()
    head = json.dumps(described(content, tensors)).encode()
    head += b" " * (-(LENGTH + len(head)) % ALIGNED)
    parts = [len(head).to_bytes(LENGTH, "little"), head, *tensors.parts]
    runs = groupby(parts, lambda part: len(part) > SMALL)
    return [part for large, run in runs for part in (run if large else [b"".join(run)])]


def described(content: object, tensors: Tensors) -> object:
    """The content with every tensor put among the tensors, and its place in its stead."""
    if type(content) in PLAIN:  # most of it is, at every step of somebody's training
        return content
    if isinstance(content, Tensor):
        place = tensors.put(content)
        return {"tensor": [str(content.dtype).removeprefix("torch."), list(content.shape), place]}
    if isinstance(content, Mapping):
        return {"dict": [[described(key, tensors), described(value, tensors)] for key, value in content.items()]}
    if isinstance(content, list | tuple):
        return {type(content).__name__: [described(part, tensors) for part in content]}
    if not isinstance(content, PLAIN):
        raise Mistake(f"a {type(content).__name__} cannot be kept in a file; follow without to=")
    return content


def read(content: bytes | memoryview) -> Any:
    """The content that these are the bytes of; its tensors lie in those bytes, and are not to be written to."""
    view = memoryview(content)
    view = memoryview(bytearray(view)) if view.readonly else view  # torch wants to be able to write
    length = int.from_bytes(view[:LENGTH], "little")
    return restored(json.loads(bytes(view[LENGTH : LENGTH + length])), view[LENGTH + length :])


def restored(head: Any, tensors: memoryview) -> Any:
    """The content that a head describes."""
    if not isinstance(head, dict):
        return head
    ((kind, parts),) = head.items()
    if kind == "tensor":
        return tensor(str(parts[0]), list(parts[1]), int(parts[2]), tensors)
    if kind == "dict":
        return {restored(key, tensors): restored(value, tensors) for key, value in parts}
    found = [restored(part, tensors) for part in parts]
    return tuple(found) if kind == "tuple" else found


def tensor(kind: str, shape: list[int], place: int, tensors: memoryview) -> Tensor:
    """A tensor of the bytes at this place."""
    dtype = getattr(torch, kind)
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(tensors, dtype=dtype, count=count, offset=place).reshape(shape)
