"""Checkpoints of activations: a module that computes parts of itself again on its way back computes them once.

That saves memory and changes no value. Computed again, a part would take the weights that the module holds by then, and
not those that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint


class Forgetful:
    """Takes the place of torch's function that forgets at once."""

    @staticmethod
    def apply(part: Callable[..., Any], _: bool, *args: Any) -> Any:
        """Compute the part, as if nobody had asked to forget it."""
        return part(*args)


def nothing(*_: Any, **__: Any) -> Iterator[None]:
    """Do nothing before and after a part."""
    yield


INSTEAD = {"CheckpointFunction": Forgetful, "_checkpoint_without_reentrant_generator": nothing}
"""What is asked instead of torch's two ways to forget what is in a part."""


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Everything is computed once.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> with without_checkpoints():
    ...     y = checkpoint.checkpoint(torch.sin, x, use_reentrant=True)
    >>> type(y.grad_fn).__name__
    'SinBackward0'
    """
    before = {name: getattr(checkpoint, name) for name in INSTEAD}
    for name, other in INSTEAD.items():
        setattr(checkpoint, name, other)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(checkpoint, name, own)
