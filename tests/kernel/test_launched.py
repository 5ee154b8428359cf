"""A program that is launched as a CUDA graph gives what it gives by itself, or is not launched as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ntkexp.kernel.read.found import Found
from ntkexp.kernel.read.program_cache import ProgramCache, Programs
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.launched import SEGMENTS, SMALL, TRIALS, LaunchedProgram, Launching
from ntkexp.kernel.record.program import Program
from ntkexp.kernel.record.tape import storage
from ntkexp.library import reader_of
from tests.kernel.fake_cuda import Capture, Noted, fake_cuda
from tests.kernel.problems import KINDS, problem
from tests.kernel.test_program_cache import same_bits, walk

__all__ = ["fake_cuda"]
pytestmark = pytest.mark.usefixtures("fake_cuda")

SLOW = [name for name in KINDS if name not in ("relu", "lstm")]
READING = {"lstm": 1, "encoder, norm before": 1, "tied embedding": 1, "max pooling": 2, "branching": 2}
"""How many of three programs read no number, where not all do."""
EVERY = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in KINDS]
CPU = torch.device("cpu")


def launching(told: list[str], room: float = 1e9) -> Launching:
    """Graphs on the processor."""
    return Launching(CPU, room, told.append)


def launched(reader: Reader, told: list[str]) -> Reader:
    """A reader that launches its programs."""
    graphs = launching(told)
    return replace(reader, programs=ProgramCache(Programs(launching=graphs), Programs(launching=graphs)))


def replays(reader: Reader) -> list[int]:
    """How often each graph of a reader was replayed."""
    assert reader.programs is not None
    kept = [*reader.programs.tapes.latest.kept.values(), *reader.programs.features.latest.kept.values()]
    graphs = [written.launched.graph for written in kept if written is not None and written.launched is not None]
    return [graph.graph.replays for graph in graphs if graph is not None]  # type: ignore[attr-defined]  # Noted


@pytest.mark.parametrize("name", EVERY)
def test_every_step_has_the_bits_of_the_step_without(name: str) -> None:
    given, told = problem(name), list[str]()
    plain = replace(reader_of(given.module)[0], found=Found(), programs=ProgramCache())
    found = launched(plain, told)
    path = walk(given, TRIALS + 5)
    tapes, expected = ([reader.record(weights, given.x) for weights in path] for reader in (found, plain))
    for (start, end), (plain_start, plain_end) in zip(pairwise(tapes), pairwise(expected), strict=True):
        same_bits(end, plain_end)
        same_bits(found.along(start, end), plain.along(plain_start, plain_end))
        same_bits(found.tangent(end), plain.tangent(plain_end))
    assert told == []
    assert len(replays(found)) == READING.get(name, 3)
    assert min(replays(found)) > TRIALS


def doubled(x: Tensor, weights: Tensor) -> list[Tensor]:
    """A result of its own, a view of it, and a view of what was fed."""
    product = x @ weights.t()
    return [product, product[:, 1:].t(), weights.t(), (2 * x)[:, None].expand(3, 5, 2)]


def program_of(function: Callable[..., list[Tensor]], *fed: Tensor) -> Program:
    """A program that was not recorded."""
    shapes = [result.shape for result in function(*fed)]
    return Program(lambda *values: (function(*values), []), (), [], shapes)


def values(seed: int) -> list[Tensor]:
    """What is fed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (4, 2))]


def proved(function: Callable[..., list[Tensor]], told: list[str]) -> LaunchedProgram:
    """A program that has gone through its trials."""
    made = LaunchedProgram(program_of(function, *values(0)), launching(told))
    for seed in range(1 + TRIALS):
        made.run(values(seed))
    return made


def test_results_are_nobody_elses_and_lie_as_they_would() -> None:
    made, fed = proved(doubled, []), values(7)
    assert made.graph is not None
    found = made.run(fed)
    kept = [result.clone() for result in found]
    assert made.graph.graph.replays == TRIALS + 1  # type: ignore[attr-defined]  # Noted
    expected = doubled(*fed)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    assert storage(found[0]) == storage(found[1]) != storage(found[3])
    assert storage(found[2]) == storage(fed[1])
    made.run(values(8))
    for result, copy, right in zip(found, kept, expected, strict=True):
        assert torch.equal(result, copy)
        assert torch.equal(result, right)


def test_values_that_lie_otherwise_go_the_usual_way() -> None:
    told: list[str] = []
    made = proved(doubled, told)
    assert made.graph is not None
    x, weights = values(7)
    other = [x.t().contiguous().t(), weights]
    assert torch.equal(made.run(other)[0], doubled(*other)[0])
    assert made.graph.graph.replays == TRIALS  # type: ignore[attr-defined]  # Noted
    assert told == []


class Changing:
    """A function that multiplies by a number from outside torch, which a graph keeps as it was."""

    factor = 1.0

    def __call__(self, x: Tensor, weights: Tensor) -> list[Tensor]:
        return [self.factor * x @ weights.t()]


@pytest.mark.parametrize("trial", range(TRIALS))
def test_other_numbers_give_a_graph_up(trial: int) -> None:
    function, told = Changing(), list[str]()
    made = LaunchedProgram(program_of(function, *values(0)), launching(told))
    for seed in range(TRIALS + 2):
        function.factor = 1.0 if seed <= trial else 2.0
        assert torch.equal(made.run(values(seed))[0], function(*values(seed))[0])
    assert made.graph is None
    assert told == ["cuda_graphs=true: a program is launched operation by operation: its graph gave other numbers"]


def test_numbers_that_are_none_are_the_same() -> None:
    told: list[str] = []
    made = proved(lambda x, weights: [torch.log(-x.abs()) @ weights.t()], told)
    assert made.graph is not None
    assert told == []


def failing(x: Tensor, weights: Tensor) -> list[Tensor]:
    """A function that cannot be captured."""
    if any(isinstance(mode, Capture) for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()):
        raise RuntimeError("operation not permitted when stream is capturing\nwhich is told at length")
    return [x @ weights.t()]


def test_what_cannot_be_captured_is_not_and_is_told_of_once() -> None:
    told: list[str] = []
    graphs = launching(told)
    for made in [LaunchedProgram(program_of(failing, *values(0)), graphs) for _ in range(2)]:
        for seed in range(TRIALS + 2):
            assert torch.equal(made.run(values(seed))[0], failing(*values(seed))[0])
        assert made.graph is None
    assert [line.rpartition(": ")[2] for line in told] == ["operation not permitted when stream is capturing"]
    assert graphs.free == graphs.room


def test_a_replay_that_fails_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    made = proved(doubled, told)

    def refuse(graph: Noted) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Noted, "replay", refuse)
    for seed in range(2):
        assert torch.equal(made.run(values(seed))[0], doubled(*values(seed))[0])
    assert len(told) == 1
    assert made.launching.free == made.launching.room


def test_graphs_take_no_more_room_than_there_is_and_leave_it() -> None:
    told: list[str] = []
    graphs = launching(told, 1.5 * SEGMENTS)
    first, second, third = (LaunchedProgram(program_of(doubled, *values(0)), graphs) for _ in range(3))
    for each in (first, second):
        each.run(values(0))
    assert first.graph is not None
    assert second.graph is None
    assert told == [
        "cuda_graphs=true: a program is launched operation by operation: memory_gb leaves no more room for graphs"
    ]
    del first, each
    third.run(values(0))
    assert third.graph is not None


def heavy(x: Tensor, weights: Tensor) -> list[Tensor]:
    """Operations that take longer than it takes to launch them, by their shapes."""
    return [x[:1, :1].expand(SMALL, 1).sum(0)]


def test_large_operations_have_no_graph() -> None:
    told: list[str] = []
    assert proved(heavy, told).graph is None
    assert told == []


def test_a_program_that_reads_numbers_has_no_graph() -> None:
    told: list[str] = []
    assert proved(lambda x, weights: [x * float(weights.sum())], told).graph is None
    assert told == []


def test_a_program_of_two_devices_has_no_graph() -> None:
    made = LaunchedProgram(program_of(doubled, *values(0)), Launching(torch.device("cuda"), 1e9, list[str]().append))
    made.run(values(0))
    assert made.graph is None
