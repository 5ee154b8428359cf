"""Inputs: one tensor, several by position, or several by name. The first axis of every tensor is that of the examples.

>>> import torch
>>> x = torch.ones(5, 2)
>>> part({"tokens": x, "cache": False}, slice(1, 3))["tokens"].shape
torch.Size([2, 2])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs


def as_inputs(inputs: object) -> Inputs:
    """Inputs as tensors without a graph, tuples and dicts; other mappings and lists become those."""
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
    elif isinstance(inputs, list):
        inputs = tuple(inputs)
    if not isinstance(inputs, Tensor | tuple | dict):
        kind = type(inputs).__name__
        raise Mistake(f"the inputs are a {kind}; give a tensor, a tuple of tensors, or a dict of keyword arguments")
    found = map_tensors(Tensor.detach, inputs)
    examples(found)
    return found


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The inputs with a function applied to every tensor."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    result: Inputs = tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
    return result


def part(inputs: Inputs, where: slice) -> Inputs:
    """Some of the examples."""
    return map_tensors(lambda tensor: tensor[where], inputs)


def tensors(inputs: Inputs) -> list[Tensor]:
    """The tensors among the inputs."""
    leaves = [inputs] if isinstance(inputs, Tensor) else tree_flatten(inputs)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def examples(inputs: Inputs) -> int:
    """How many examples there are."""
    counts = {len(tensor) if tensor.dim() else None for tensor in tensors(inputs)}
    if len(counts) != 1 or None in counts:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors(inputs)) or "no tensor at all"
        raise Mistake(f"the inputs have the shapes {shapes}; every first axis must be that of the same examples")
    return int(counts.pop() or 0)
