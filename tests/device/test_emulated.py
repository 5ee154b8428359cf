"""The emulated device does what a GPU does, and so what passes on it says something of a GPU."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.device.emulated import DEVICE, IS_EMULATED, NAME, EmulatedModule, counted_reads

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_EMULATED, reason="there is a GPU")]

MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "two devices": lambda x: x + x.to(f"{NAME}:0"),
    "a matrix of the processor": lambda x: x @ torch.ones(3, 3),
    "a list": lambda x: torch.cat([x, torch.ones(3, 3)]),
    "an index of the device for the processor": lambda x: torch.ones(3)[x.argmax(1)],
    "a convolution": lambda x: functional.conv1d(x[None], torch.ones(3, 3, 1)),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_devices_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"tensors on|same device|indices on"):
        MIXED[name](torch.ones(3, 3, device=DEVICE))


def test_a_number_and_an_index_may_lie_on_the_processor() -> None:
    x = torch.arange(3.0, device=DEVICE)
    assert (x * torch.tensor(2.0))[torch.tensor([2, 0])].tolist() == [4.0, 0.0]


def test_reads_are_counted() -> None:
    x = torch.ones(3, device=DEVICE)
    with counted_reads() as reads:
        y = (x * 2).sum()
    assert reads == {}
    with counted_reads() as reads:
        assert (float(y), x.cpu().tolist(), x[x > 0].tolist()) == (6.0, [1.0] * 3, [1.0] * 3)
    assert reads["item"] == 1
    assert reads["copy"] == 2


def test_the_device_has_generators_of_its_own() -> None:
    torch.manual_seed(0)
    before, state = torch.get_rng_state(), EmulatedModule.get_rng_state(DEVICE)
    first = functional.dropout(torch.ones(100, device=DEVICE), 0.5)
    assert torch.equal(before, torch.get_rng_state())
    EmulatedModule.set_rng_state(state, DEVICE)
    assert torch.equal(first, functional.dropout(torch.ones(100, device=DEVICE), 0.5))
    generator = torch.Generator(DEVICE).manual_seed(1)
    again = torch.Generator(DEVICE).manual_seed(1)
    drawn = torch.randn(5, device=DEVICE, generator=generator)
    assert torch.equal(drawn, torch.randn(5, device=DEVICE, generator=again))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_are_those_of_the_processor(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = kind(3, 4).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64) if "Cell" not in kind.__name__ else torch.randn(2, 3).double()
    there = deepcopy(layer).to(DEVICE)
    for one, place in ((layer, "cpu"), (there, DEVICE)):
        outputs = one(x.to(place))
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        outputs.square().sum().backward()
    for ours, expected in zip(there.parameters(), layer.parameters(), strict=True):
        assert ours.grad is not None
        assert expected.grad is not None
        assert ours.grad.device == torch.device(DEVICE)
        torch.testing.assert_close(ours.grad.cpu(), expected.grad, rtol=1e-12, atol=1e-12)


def test_tensors_are_copied_and_saved() -> None:
    x, file = torch.arange(6.0, device=DEVICE).view(2, 3), io.BytesIO()
    copied = deepcopy(x.t())
    copied[0, 0] = 7.0
    assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), x)


def test_autocast_forms_products_in_shorter_numbers() -> None:
    x = torch.randn(3, 3, device=DEVICE)
    with torch.autocast(NAME, torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).exp().dtype == torch.float32
