"""Recurrent layers on packed sequences, in the transforms of `torch.func`.

A packed sequence holds the rows of all sequences at time 0, then those at time 1, and
so on. Its batch sizes are the numbers of rows at each time. torch reads the batch sizes
from the memory of a tensor. But in `torch.func.grad` and `vjp`, every tensor is a
wrapper without memory. So `PackedInPython` converts batch sizes to Python numbers, and
computes the layers by torch's decompositions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.overrides import TorchFunctionMode

from ntkexp.kernel.record.tape import is_integer

LAYERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: decompositions.lstm_data_impl,
    torch.gru: decompositions.gru_impl_data,
    torch.rnn_tanh: decompositions.rnn_tanh_data,
    torch.rnn_relu: decompositions.rnn_relu_data,
}
"""Recurrent layers, and their decompositions for packed sequences."""


def in_transform() -> bool:
    """Return True inside a transform of `torch.func`.

    >>> torch.func.grad(lambda x: x * in_transform())(torch.tensor(1.0)), in_transform()
    (tensor(1.), False)
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


class PackedInPython(TorchFunctionMode):
    """A mode in which functions of packed sequences do not read the memory of wrappers.

    >>> from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
    >>> def total(rows):
    ...     with PackedInPython():
    ...         packed = pack_padded_sequence(rows, torch.tensor([2, 1]), batch_first=True)
    ...         return pad_packed_sequence(packed)[0].sum()
    >>> torch.func.grad(total)(torch.ones(2, 2, 1)).flatten().tolist()
    [1.0, 1.0, 1.0, 0.0]
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch._pack_padded_sequence:
            return packed(*args)
        if func is torch._pad_packed_sequence:
            data, batch_sizes, *rest = args
            return padded(data, batch_sizes.tolist(), *rest)
        if func in LAYERS and isinstance(args[1], Tensor) and is_integer(args[1]):
            data, batch_sizes, *rest = args
            return LAYERS[func](data, batch_sizes.tolist(), *rest)
        return func(*args, **(kwargs or {}))


def packed(
    sequences: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows of padded sequences in the order of time, and the batch sizes.

    >>> packed(torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]]), torch.tensor([2, 1]), True)[0].flatten()
    tensor([1., 3., 2.])
    """
    axes = sequences.shape[:2]
    count = torch.arange(axes.numel(), device=sequences.device).view(axes)
    rows, batch_sizes = torch._pack_padded_sequence(count, lengths, batch_first)
    return sequences.flatten(0, 1)[rows], batch_sizes


def padded(
    data: Tensor,
    batch_sizes: Sequence[int],
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Return padded sequences and their lengths.
    `total_length` is −1 for the longest length.

    >>> padded(torch.tensor([[1.0], [2.0], [3.0]]), [2, 1], True, 0.0, -1)[0].squeeze(2)
    tensor([[1., 3.],
            [2., 0.]])
    """
    sizes = torch.tensor(batch_sizes)
    sequences = torch.arange(batch_sizes[0])
    begins = sizes.cumsum(0) - sizes  # the first row of each time
    has_row = sequences < sizes[:, None]
    # the row of each time and sequence; the row after the last one is padding
    rows = torch.where(has_row, begins[:, None] + sequences, len(data))
    if total_length > len(rows):
        rest = torch.full((total_length - len(rows), len(sequences)), len(data))
        rows = torch.cat([rows, rest])
    padding = torch.full_like(data[:1], padding_value)
    result = torch.cat([data, padding])[rows.to(data.device)]
    return result.transpose(0, 1) if batch_first else result, has_row.sum(0)
