"""Following between two calls, where somebody else's loop says when training begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from inspect import signature
from typing import Any

import torch
from torch import nn

from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake


class HeldOpen:
    """The options are those of `follow`, and are looked at before anybody trains.

    >>> HeldOpen(queries=torch.eye(2), question=1)
    Traceback (most recent call last):
    TypeError: got an unexpected keyword argument 'question'
    """

    def __init__(self, **options: Any) -> None:  # those of `follow`, which types them
        signature(follow).bind(None, None, **options)
        self.options, self.stack, self.found = options, ExitStack(), None

    found: Trace | None

    def begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Training begins."""
        self.found = self.stack.enter_context(follow(model, optimizers, **self.options))

    def end(self, error: BaseException | None = None) -> None:
        """Training has ended, or was broken off by this."""
        self.stack.__exit__(None if error is None else type(error), error, None)

    @property
    def trace(self) -> Trace:
        """What was seen."""
        if self.found is None:
            raise Mistake("no training has begun; give the callback to the Trainer and train, then ask for .trace")
        return self.found
