"""Tensors in lists, tuples and dicts as bytes, and back, without running any code on reading.

    length of the head (8 bytes)   head: JSON, with the kind, shape and place of each tensor   the tensors' bytes

>>> found = read(written({"x": torch.ones(2), "more": (1, None, "text")}))
>>> found["x"].tolist(), found["more"]
([1.0, 1.0], (1, None, 'text'))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ntkexp.mistake import Mistake

LENGTH, ALIGNED = 8, 16
PLAIN = bool | int | float | str | None


def written(content: object) -> bytes:
    """The bytes of some content."""
    tensors: list[bytes] = []
    head = json.dumps(described(content, tensors)).encode()
    head += b" " * (-(LENGTH + len(head)) % ALIGNED)
    return b"".join((len(head).to_bytes(LENGTH, "little"), head, *tensors))


def described(content: object, tensors: list[bytes]) -> object:
    """The content with every tensor put among the tensors, and its place in its stead."""
    if isinstance(content, Tensor):
        flat = content.detach().cpu().reshape(-1).contiguous()
        room = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        tensors += [room, b"\0" * (-len(room) % ALIGNED)]
        place = sum(map(len, tensors[:-2]))
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
