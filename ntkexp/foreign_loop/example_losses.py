"""Losses of single examples that the loop computes by `trace.losses(function, *batch)`.

    ℓ = function(model, *batch)        one loss ℓᵢ for each example
    ∂L/∂θ = Σᵢ ∂L/∂ℓᵢ ∇_θ ℓᵢ(θ; batch)

The function may differentiate the model, call it at other weights, or couple the
examples of the batch. The gradient of example i is term i of this sum, through the
whole batch.

A call of the function is recorded like a call of the model: the batch, the random
states, ∂L/∂ℓ and a fingerprint (random projection) of ℓ. Calls of the model inside the
function are not recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ntkexp.kernel.record.tape import map_tensors, tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import call_with, without_checkpoints
from ntkexp.shapes import Function, Inputs, Weights

LossFunction: TypeAlias = Callable[..., Tensor]
"""A function (model, *batch) that returns the loss of each example."""

Batch: TypeAlias = tuple[object, ...]

PLAIN_TYPES = (bool, int, float, str, type(None))
MODEL = "model"  # name under which `LossModule` holds the model


# --- Record.


def copied_batch(batch: Batch) -> Batch:
    """Copy the tensors of a batch. Raise if the batch holds objects that may change
    after the call.

    >>> copied_batch((torch.ones(1), 2, object()))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: trace.losses: the batch holds a object; give tensors and numbers, also in \
tuples, lists and dicts
    """
    for leaf in leaves_of(batch):
        if not isinstance(leaf, (Tensor, *PLAIN_TYPES)):
            raise Mistake(
                f"trace.losses: the batch holds a {type(leaf).__name__}; give tensors and "
                "numbers, also in tuples, lists and dicts"
            )
        if isinstance(leaf, Tensor) and (
            leaf.is_nested or leaf.layout is not torch.strided
        ):
            raise Mistake(
                "trace.losses: the batch holds a nested or sparse tensor; give plain "
                "tensors, such as the indices and values of its elements"
            )
    return fresh(batch)


def leaves_of(part: object) -> Iterator[object]:
    """Yield the parts of nested tuples, lists and dicts.
    Other containers count as one part.

    >>> list(leaves_of((1, [2, {"three": 3}])))
    [1, 2, 3]
    """
    if type(part) not in (tuple, list, dict):
        yield part
        return
    assert isinstance(part, tuple | list | dict)
    for item in part.values() if isinstance(part, dict) else part:
        yield from leaves_of(item)


def fresh(batch: Inputs) -> Batch:
    """Copy a batch. Each copied tensor is a leaf of the autograd graph, and requires a
    gradient if the original does."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    copy = map_tensors(leaf, batch)
    assert isinstance(copy, tuple)
    return copy


def refuse_other_losses(losses: object, batch: Batch) -> None:
    """Raise unless the losses are a vector, and some tensor of the batch has one row
    for each loss.

    >>> refuse_other_losses(torch.ones(3), (torch.ones(2, 1), 0.5))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: trace.losses: the function returns 3 losses, but no tensor of the batch has 3 rows; return \
a loss for each row, and select losses outside the function
    """
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        kind = f"a {type(losses).__name__}"
        if isinstance(losses, Tensor):
            kind = f"a tensor of shape {list(losses.shape)}"
        raise Mistake(
            f"trace.losses: the function returns {kind}; return one loss for each "
            "example, a tensor [examples], and take the mean outside"
        )
    if not tensors(rows_of_batch(batch, len(losses))):
        raise Mistake(
            f"trace.losses: the function returns {len(losses)} losses, but no tensor of "
            f"the batch has {len(losses)} rows; return a loss for each row, and select "
            "losses outside the function"
        )


def rows_of_batch(batch: Inputs, count: int) -> tuple[Tensor, ...]:
    """Return the tensors with one row for each of `count` examples. All others, such as
    the edges of a graph, belong to the whole batch.

    >>> [rows.shape for rows in rows_of_batch((torch.ones(3, 2), torch.ones(2, 7)), 3)]
    [torch.Size([3, 2])]
    """
    return tuple(each for each in tensors(batch) if each.dim() and len(each) == count)


def part_of_batch(batch: Inputs, count: int, where: slice) -> Inputs:
    """Select some of the `count` examples. Tensors without a row
    for each example stay whole."""

    def part(tensor: Tensor) -> Tensor:
        return tensor[where] if rows_of_batch(tensor, count) else tensor

    return map_tensors(part, batch)


# --- The form in which a call is stored in a folder. The rows of each example are
# stored only once, and the function is stored by its name.


def name_of(function: LossFunction) -> str:
    """Return the name of a function. A later process finds the function by this name.

    >>> name_of(fresh)
    'fresh'
    """
    return str(getattr(function, "__name__", type(function).__name__))


def store_function(functions: dict[str, LossFunction], function: LossFunction) -> None:
    """Add a function to `functions`. Raise if another function there has the same
    name."""
    name = name_of(function)
    if functions.setdefault(name, function) is not function:
        raise Mistake(
            f"trace.losses: two functions have the name '{name}', and a folder stores "
            "functions by name; define each function once, outside the loop, under its "
            "own name"
        )


def stored_batch(batch: Inputs, count: int) -> dict[str, object]:
    """Return the stored form of a batch: everything except the rows of its `count`
    examples, which are stored elsewhere."""

    def is_row(tensor: Tensor) -> bool:
        return bool(rows_of_batch(tensor, count))

    return {
        "batch": map_tensors(
            lambda tensor: tensor[:0] if is_row(tensor) else tensor, batch
        ),
        "rows_of_batch": [is_row(tensor) for tensor in tensors(batch)],
        "needs_gradients": [tensor.requires_grad for tensor in tensors(batch)],
    }


def restored_batch(content: Mapping[str, Any], rows: Sequence[Tensor]) -> Batch:
    """Return a batch from its stored form, and the rows of its examples.

    >>> x, edges = torch.ones(3, 2), torch.ones(2, 7)
    >>> again = restored_batch(stored_batch((x, {"edges": edges}), 3), [x])
    >>> again[0].shape, again[1]["edges"].shape
    (torch.Size([3, 2]), torch.Size([2, 7]))
    """
    next_row = iter(rows)
    is_row = iter(content["rows_of_batch"])
    needs_gradients = iter(content["needs_gradients"])

    def tensor(stored: Tensor) -> Tensor:
        restored = next(next_row) if next(is_row) else stored
        return restored.detach().clone().requires_grad_(next(needs_gradients))

    batch = map_tensors(tensor, content["batch"])
    assert isinstance(batch, tuple)
    return batch


# --- Replay.


class LossModule(nn.Module):
    """A module that applies the user's function to the model and the batch."""

    def __init__(self, model: nn.Module, function: LossFunction) -> None:
        super().__init__()
        self.model = model
        # If the function is a module, nn.Module would register it as a layer. `partial`
        # prevents this.
        self.function = partial(function)

    def forward(self, *batch: object) -> Tensor:
        return self.function(self.model, *batch)


def losses_function(model: nn.Module, function: LossFunction) -> Function:
    """Return the losses as a function of the model's weights and the batch.

    If the given weights lack a weight or buffer, use the one of the model. Gradients
    are always enabled inside the user's function, because it may differentiate the
    model."""
    module = LossModule(model, function)

    def losses(weights: Weights, batch: Inputs) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        values = {
            f"{MODEL}.{name}": value for name, value in (buffers | weights).items()
        }
        with torch.enable_grad(), without_checkpoints():
            result: Tensor = call_with(module, values, fresh(batch))
        return result if torch.is_grad_enabled() else result.detach()

    return losses
