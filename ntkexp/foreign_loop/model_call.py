"""Calls of the model whose outputs are differentiated: what went in, and the gradient that came back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.foreign_loop.circumstances import Circumstances
from ntkexp.foreign_loop.seen_call import SeenCall
from ntkexp.kernel.record.inputs import examples, tensors
from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs

Ids: TypeAlias = Callable[[SeenCall], Sequence[object] | Tensor] | str | None
"""The names of the examples of a call: a function of it, or the keyword that holds them."""


@dataclass
class ModelCall:
    """A call at the weights of a step, `at`; `gradient` is ∂L/∂f of each example as autograd had it, once it did, on
    its latest way back, `way`. Examples that were not `called` by names go by what they hold; `signed` is the signature
    of the outputs."""

    at: int
    inputs: Inputs
    called: tuple[str, ...] | None = None
    how: Circumstances = field(default_factory=Circumstances)
    gradient: Float[Tensor, "example out"] | None = None
    way: int = -1
    signed: Float[Tensor, "example row"] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the examples, which take time to find and are not asked for in the loop."""
        return digests(self.inputs) if self.called is None else self.called

    def forget(self) -> None:
        """What came back was thrown away."""
        self.gradient = None

    def receive(self, gradient: Tensor, way: int) -> None:
        """Take in what came back; what comes twice is added up."""
        self.way = way
        rows = gradient.detach().clone()
        rows = rows[:, None] if rows.dim() == 1 else rows.flatten(1)
        self.gradient = rows if self.gradient is None else self.gradient + rows


def digests(inputs: Inputs) -> tuple[str, ...]:
    """Each example by what it holds, so that neither shuffling nor epochs nor duplicates need an index.

    >>> import torch
    >>> one, other, again = digests(torch.tensor([[1.0], [2.0], [1.0]]))
    >>> one == again, one == other
    (True, False)
    """
    columns = [rows_of(tensor) for tensor in tensors(inputs)]
    return tuple(sha256(b"".join(row)).hexdigest()[:16] for row in zip(*columns, strict=True))


def rows_of(tensor: Tensor) -> list[bytes]:
    """The elements of every row."""
    rows = tensor.detach().cpu()[:, None].flatten(1).contiguous()
    return [row.tobytes() for row in rows.view(torch.uint8).numpy()]


def names_of(inputs: Inputs, ids: Ids) -> tuple[str, ...] | None:
    """The names of the examples of a call, if they have some.

    >>> import torch
    >>> names_of({"x": torch.ones(2, 3), "row": torch.tensor([4, 7])}, "row")
    ('4', '7')
    >>> names_of(torch.ones(2, 3), lambda call: call.args[0].sum(1))
    ('3.0', '3.0')
    """
    if ids is None:
        return None
    found = column(inputs, ids) if isinstance(ids, str) else ids(SeenCall.of(inputs))
    if not isinstance(found, Tensor | Sequence):
        raise Mistake(f"ids=: it gives a {type(found).__name__}; give a list with a name for each example of a call")
    names = tuple(map(str, found.tolist() if isinstance(found, Tensor) and found.dim() else found))
    if len(names) != (count := examples(inputs)):
        raise Mistake(f"ids=: it gives {len(names)} names for the {count} examples of a call; give one for each")
    return names


def column(inputs: Inputs, ids: str) -> object:
    """The keyword that holds names."""
    if not isinstance(inputs, Mapping) or ids not in inputs:
        raise Mistake(f"ids={ids!r}: the model is not called with such a keyword")
    return inputs[ids]


def given(args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
    """The inputs of a call, as the library takes them; a tensor without axes is a number that all examples share.

    >>> given((), {"x": torch.ones(2), "items": torch.tensor(3)})
    {'x': tensor([1., 1.]), 'items': 3}
    """
    if args and kwargs:
        raise Mistake("the model is called with inputs by position and by name at once; call it with one kind")
    only = kwargs or (args[0] if len(args) == 1 else args)
    if not isinstance(only, Tensor | tuple | dict):
        raise Mistake(f"the model is called with a {type(only).__name__}; tensors are followed, by position or by name")
    found: Inputs = tree_map(lambda leaf: leaf.item() if isinstance(leaf, Tensor) and not leaf.dim() else leaf, only)
    return found
