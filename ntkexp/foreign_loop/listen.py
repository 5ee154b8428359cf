"""Listening to what comes back to an output, which it may be replaced by.

Under autocast libraries cast outputs once more, after a loss was formed of them inside the model: nothing comes back to
what they hand out, and all of it to what they cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

Listener: TypeAlias = Callable[[Tensor], Tensor | None]


def listen(output: Tensor, heard: Listener, *, past_casts: bool) -> None:
    """Let a listener hear what comes back to the output, or to what it was cast from.

    >>> import torch
    >>> found, hidden = [], torch.ones(2, requires_grad=True) * 3
    >>> listen(hidden.double(), found.append, past_casts=True)
    >>> hidden.sum().backward()
    >>> found
    [tensor([1., 1.])]
    """
    node, place = output.grad_fn, output.output_nr
    if not past_casts or node is None or node.name() != CAST:
        output.register_hook(heard)  # type: ignore[no-untyped-call]  # torch's own
        return
    while node is not None and node.name() == CAST:
        node, place = node.next_functions[0]

    def at_node(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        came = gradients[place]
        instead = None if came is None else heard(came)
        return None if instead is None else (*gradients[:place], instead, *gradients[place + 1 :])

    assert node is not None
    node.register_prehook(at_node)


CAST = "ToCopyBackward0"
"""What torch calls the way back through a cast."""
