"""Hooks on a followed model and its optimizers, none of which works on a copy of these.

`copy.deepcopy`, `pickle`, `torch.save` and a new process copy a module together with its hooks. A copy is no part of
the followed loop, and it may live longer than that loop, in a program without this package:

    the same object, in this process     the hook works
    a shallow copy (`copy.copy`)         the hook works: parameters are shared, so gradients come to the followed ones
    a replica, a forked process          the hook sees that it is not the followed object, and does nothing
    a deep copy, a pickle, a file        hold a method of the standard library that does nothing, in place of the hook
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

FOLLOWING: WeakSet[FollowHook] = WeakSet()
"""The hooks of this process."""


class FollowHook:
    """A hook that calls `react` when `owner`, a module or an optimizer, is called or takes a step.

    >>> from copy import deepcopy
    >>> net, seen = torch.nn.Linear(1, 1), []
    >>> hook = net.register_forward_pre_hook(FollowHook(net, lambda module, inputs: seen.append("called")))
    >>> for each in (net, deepcopy(net)):
    ...     _ = each(torch.ones(1, 1))
    >>> seen
    ['called']
    """

    def __init__(self, owner: object, react: Callable[..., object]) -> None:
        self.owner = owner
        self.react = react
        self.forked = False
        FOLLOWING.add(self)

    def __call__(self, owner: object, *event: object) -> Any:
        if self.forked or not self.follows(owner) or is_traced():
            return None
        return self.react(owner, *event)

    def follows(self, owner: object) -> bool:
        """Return whether this is the followed object, or a module that shares its parameters."""
        if owner is self.owner:
            return True
        shared = isinstance(owner, nn.Module) and isinstance(self.owner, nn.Module)
        return shared and owner._parameters is self.owner._parameters  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        """Return what copies and pickles hold: `nullcontext().__exit__` takes any arguments and does nothing."""
        return getattr, (nullcontext(), "__exit__")


def is_traced() -> bool:
    """Return whether a call is traced for another program (`torch.export`, `torch.jit.trace`).

    That program shall hold the operations of the model, and none of the hooks.
    """
    return torch.compiler.is_exporting() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def silence() -> None:
    """Stop the hooks of a forked process: the loop goes on in the process that it was forked from."""
    for hook in FOLLOWING:
        hook.forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, where no process is forked
    os.register_at_fork(after_in_child=silence)
