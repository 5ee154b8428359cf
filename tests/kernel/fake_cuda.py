"""CUDA graphs where there is no GPU: operations are noted with the memory that they read and write, and done again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.kernel.record.tape import storage


class Stream:
    """A stream that waits for no other, as there is one alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        pass


class Noted:
    """A graph: what was done, where."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.replays = 0

    def replay(self) -> None:
        """Do it again; what is new is put where it was."""
        self.replays += 1
        for func, args, kwargs, found in self.operations:
            known = {storage(each) for each in tensors((args, kwargs))}
            for old, new in zip(tensors(found), tensors(func(*args, **kwargs)), strict=True):
                if storage(old) not in known:
                    old.copy_(new)


class Capture(DispatchMode):
    """Notes operations; as nothing is carried out, what they would have made is not there."""

    def __init__(self, graph: Noted, **_: Any) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        self.graph.operations.append((func, args, given, found))
        known = {storage(each) for each in tensors((args, given))}
        for made in tensors(found):
            if storage(made) not in known and made.is_floating_point():
                made.fill_(float("nan"))
        return found


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in something."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs are captured and replayed on the processor."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Noted)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
