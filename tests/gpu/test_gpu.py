"""On a GPU kernels are those of the processor, secants close, and runs repeat bit for bit, with CUDA graphs as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkexp
from ntkexp.kernel.read.found import Found
from ntkexp.kernel.read.program_cache import ProgramCache, Programs
from ntkexp.kernel.record.launched import LaunchedProgram, Launching
from ntkexp.kernel.record.program import Program
from ntkexp.library import reader_of
from tests.bench.architectures import NETWORKS
from tests.kernel.test_program_cache import same_bits
from tests.run.small import ran

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICE = "cuda"


class States(nn.Module):
    """A recurrent layer in two directions, read at its last step."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer, self.readout = kind(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.readout(self.layer(x)[0][:, -1])
        return outputs


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (partial(make, 2), shape) for name, (make, shape) in NETWORKS.items()},
    "GRU": (partial(States, nn.GRU), (3, 3)),
    "RNN": (partial(States, nn.RNN), (3, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_the_kernel_is_that_of_the_processor(name: str, dtype: torch.dtype) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make().to(dtype).eval(), torch.randn(6, *shape, dtype=dtype)
    expected = ntkexp.tangent_kernel(module, x)
    found = ntkexp.tangent_kernel(module.to(DEVICE), x.to(DEVICE)).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=200 * torch.finfo(dtype).eps * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODULES)
def test_secants_close(name: str) -> None:
    """`secant_kernel` warns of one that does not, and warnings are errors here."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make().double().eval().to(DEVICE), torch.randn(6, *shape, dtype=torch.float64, device=DEVICE)
    start = dict(module.named_parameters())
    end = {key: weight + 0.1 * torch.randn_like(weight) for key, weight in start.items()}
    assert ntkexp.secant_kernel(module, start, end, x, x).isfinite().all()


@pytest.mark.parametrize("words", [("model=mlp",), ("model=cnn",), ("model=transformer", "optimizer=adam")])
def test_a_run_is_exact_and_repeats_its_bits(words: tuple[str, ...]) -> None:
    first, second = (ran(*words, f"device={DEVICE}", "ladder.machine=[secant]") for _ in range(2))
    for row in first.rows("secant"):
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.relative_error <= max(1e-12, row.floor)
    assert torch.equal(first.contributions("secant"), second.contributions("secant"))


@pytest.mark.parametrize("name", MODULES)
def test_programs_that_are_launched_as_graphs_have_the_bits_of_those_that_are_not(name: str) -> None:
    """Their graphs are replayed until the last step, unless they read numbers."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make().double().eval().to(DEVICE), torch.randn(6, *shape, dtype=torch.float64, device=DEVICE)
    start = {key: weight.detach() for key, weight in module.named_parameters()}
    path = [{key: weight + 0.1 * torch.randn_like(weight) for key, weight in start.items()} for _ in range(7)]
    plain, told = replace(reader_of(module)[0], found=Found(), programs=ProgramCache()), list[str]()
    graphs = Launching(torch.device(DEVICE), 1e9, told.append)
    launched = replace(plain, programs=ProgramCache(Programs(launching=graphs), Programs(launching=graphs)))
    tapes, expected = ([reader.record(weights, x) for weights in path] for reader in (launched, plain))
    for (start_tape, end), (plain_start, plain_end) in zip(pairwise(tapes), pairwise(expected), strict=True):
        same_bits(end, plain_end)
        same_bits(launched.along(start_tape, end), plain.along(plain_start, plain_end))
        same_bits(launched.tangent(end), plain.tangent(plain_end))
    assert told == []
    assert graphs.programs
    assert all(each.graph is not None and each.trials == 0 for each in graphs.programs)


def test_a_program_whose_capture_fails_goes_on_without_a_graph() -> None:
    """It reads a number while it is captured, which torch refuses; afterwards the device is as it was."""
    told: list[str] = []

    def reading(x: Tensor) -> tuple[list[Tensor], list[Any]]:
        return [x * (x.sum().item() if torch.cuda.is_current_stream_capturing() else 2.0)], []

    x = torch.randn(5, device=DEVICE)
    program = LaunchedProgram(Program(reading, (), [], [x.shape]), Launching(torch.device(DEVICE), 1e9, told.append))
    stream = torch.cuda.current_stream()
    for _ in range(4):
        assert torch.equal(program.run([x])[0], 2 * x)
    assert program.graph is None
    assert len(told) == 1
    assert torch.cuda.current_stream() == stream


def test_a_run_with_cuda_graphs_has_the_bits_of_one_without() -> None:
    first, second = (ran("model=mlp", f"device={DEVICE}", f"cuda_graphs={word}") for word in ("false", "true"))
    assert torch.equal(first.contributions("secant"), second.contributions("secant"))


def test_the_kernel_of_infinite_width_is_that_of_the_processor() -> None:
    spec: list[dict[str, Any]] = [
        {"layer": "Conv", "features": 1},
        {"layer": "ReLU"},
        {"layer": "Flatten"},
        {"layer": "Dense", "features": 1},
    ]
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ours, expected in zip(ntkexp.infinite_kernel(spec, x.to(DEVICE)), ntkexp.infinite_kernel(spec, x), strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-12, atol=1e-12)
