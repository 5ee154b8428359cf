"""Recurrent layers that a GPU runs as one operation are taped as the operations they are composed of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ntkexp.kernel.record.taping import composed, record, unfused
from ntkexp.model.functional import function_of, weights_of


class Last(nn.Module):
    """Two layers in two directions, read at the last step."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(x)[0][:, -1]
        return outputs


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_torch_composes_has_no_cell_left_and_the_same_values(kind: Callable[..., nn.Module]) -> None:
    """torch's compositions are the same for every device; its cells are what a GPU would run instead."""
    module, x = Last(kind).double(), torch.randn(5, 3, 3, dtype=torch.float64)
    with unfused(), composed():
        tape = record(function_of(module), weights_of(module), x)
    assert not [entry.name for entry in tape.entries if "rnn" in entry.name or "cell" in entry.name]
    torch.testing.assert_close(tape.outputs, module(x).detach(), rtol=1e-14, atol=1e-14)
