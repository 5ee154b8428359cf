"""Hooks on a followed model and its optimizers.

`copy.deepcopy`, `pickle`, `torch.save` and new processes copy a module together with
its hooks. But a copy is not part of the followed loop, and a program without this
package may load the copy. So `FollowHook` works only on the followed object and its
shallow copies:

    the same object, in this process     the hook works
    a shallow copy (`copy.copy`)         the hook works, because parameters are shared
    a replica of DataParallel            the hook detects the replica, and does nothing
    a forked process                     the hook detects the fork, and does nothing
    a deep copy, a pickle, a file        the hook is replaced by a function that does nothing
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

FOLLOWING: WeakSet[FollowHook] = WeakSet()
"""All hooks in this process. A forked process disables them with `silence`."""


class FollowHook:
    """A hook on the module or optimizer `owner`. It calls `react` if torch calls the
    hook on the owner, and does nothing on copies of the owner.

    >>> from copy import deepcopy
    >>> net, events = torch.nn.Linear(1, 1), []
    >>> hook = FollowHook(net, lambda module, inputs: events.append("called"))
    >>> handle = net.register_forward_pre_hook(hook)
    >>> for module in (net, deepcopy(net)):
    ...     _ = module(torch.ones(1, 1))
    >>> events
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
        """Return True for the owner of the hook,
        and for a module that shares the owner's parameters."""
        if owner is self.owner:
            return True
        if not isinstance(owner, nn.Module) or not isinstance(self.owner, nn.Module):
            return False
        return owner._parameters is self.owner._parameters

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        """Replace the hook in copies and pickles by `nullcontext().__exit__`, a
        function that accepts any arguments and does nothing."""
        return getattr, (nullcontext(), "__exit__")


def is_traced() -> bool:
    """Return True during `torch.export` and `torch.jit.trace`. Exported programs must
    not contain hooks."""
    return torch.compiler.is_exporting() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def silence() -> None:
    """Disable all hooks in a forked process. The
    followed loop continues in the parent."""
    for hook in FOLLOWING:
        hook.forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=silence)


# --- Hooks on the gradients of outputs.
#
# Some models compute their loss from an output inside `forward`. Under autocast, a
# library may then cast this output before it is returned. The gradient of the loss then
# reaches the tensor before the cast, but not the returned output. The hook must
# therefore be on the tensor before the cast.


CAST_NODE = "ToCopyBackward0"
"""The name of the node of a cast in the autograd graph."""

Listener: TypeAlias = Callable[[Tensor], Tensor | None]
"""A function that receives a gradient, and returns its replacement or None."""


def listen(output: Tensor, listener: Listener, *, past_casts: bool) -> None:
    """Register a listener for the gradient of an output.

    With `past_casts`, if the output is the result of a cast, listen to the tensor
    before the cast.

    >>> gradients, hidden = [], torch.ones(2, requires_grad=True) * 3
    >>> listen(hidden.double(), gradients.append, past_casts=True)
    >>> hidden.sum().backward()
    >>> gradients
    [tensor([1., 1.])]
    """
    node = output.grad_fn
    if not past_casts or node is None or node.name() != CAST_NODE:
        hook = partial(listener)
        unserializable_hook(hook)  # type: ignore[no-untyped-call]  # torch.save(output) gives no warning
        output.register_hook(hook)  # type: ignore[no-untyped-call]
        return
    index = output.output_nr
    while node is not None and node.name() == CAST_NODE:
        node, index = node.next_functions[0]

    def at_node(
        gradients: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...] | None:
        gradient = gradients[index]
        replacement = None if gradient is None else listener(gradient)
        if replacement is None:
            return None
        return (*gradients[:index], replacement, *gradients[index + 1 :])

    assert node is not None
    node.register_prehook(at_node)
