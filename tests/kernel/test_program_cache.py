"""Programs carry out what the reader would do, bit for bit, and are given up where it would do something else."""

from __future__ import annotations

import gc
import linecache
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read import program_cache as chapter
from ntkexp.kernel.read.checks import Findings
from ntkexp.kernel.read.program_cache import MAX_ANSWERS, TRIALS, ProgramCache, parts
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.program import DoesNotHold, Program, trace
from ntkexp.kernel.record.tape import Tape
from ntkexp.library import reader_of
from ntkexp.shapes import Weights
from tests.kernel.oracle import agree
from tests.kernel.problems import KINDS, Problem, problem
from tests.kernel.routed import ROUTED, batch, routed
from tests.kernel.test_programs import Heard, x

ROUTING = (
    *("sorted rows", "sorted outside torch", "switched experts"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("ragged", "last position", "nested masks")),
)
ROUNDING = 300 * torch.finfo(torch.float64).eps  # all outputs at once are summed in another order


def cached(given: Problem) -> Reader:
    """A reader that keeps programs."""
    reader, _ = reader_of(given.module)
    return replace(reader, findings=Findings(), programs=ProgramCache())


def uncached(reader: Reader) -> Reader:
    """The same without any program yet."""
    return replace(reader, programs=ProgramCache())


def walk(given: Problem, steps: int, size: float = 0.3) -> list[Weights]:
    """Weights along a random path."""
    return [given.start, *(given.end(size) for _ in range(steps))]


def same_bits(found: Tape | Jacobian, expected: Tape | Jacobian) -> None:
    assert len(parts(found)) == len(parts(expected)) > 0
    for one, other in zip(parts(found), parts(expected), strict=True):
        assert torch.equal(one, other)


def same(found: Jacobian, expected: Jacobian) -> None:
    """Block by block, to rounding."""
    assert found.keys == expected.keys
    scale = max(float(part.abs().max()) for part in parts(expected) if part.numel())
    for actual, usual in zip(parts(found), parts(expected), strict=True):
        assert actual.shape == usual.shape
        if usual.numel():  # an expert may have no rows
            agree(actual, usual, ROUNDING, scale)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", KINDS)
def test_every_step_by_a_program_has_the_bits_of_the_step_without(name: str) -> None:
    given = problem(name)
    reader, path = cached(given), walk(given, TRIALS + 2)
    tapes = [reader.record(weights, given.x) for weights in path]
    for start, end in pairwise(tapes):
        found, point = reader.along(start, end), reader.tangent(end)
    bare = uncached(reader)
    last = [bare.record(weights, given.x) for weights in path[-2:-1]] + [uncached(reader).record(path[-1], given.x)]
    same_bits(tapes[-2], last[0])
    same_bits(tapes[-1], last[1])
    same_bits(found, bare.along(start, end))
    same_bits(point, bare.tangent(end))
    same(found, replace(reader, programs=None).along(start, end))
    assert reader.programs is not None
    for programs in (reader.programs.jacobians, reader.programs.tapes):
        assert programs.latest.kept
        assert all(written is not None and written.trials == 0 for written in programs.latest.kept.values())


@pytest.mark.parametrize("name", ["relu", "lstm"])
def test_there_is_one_program_for_each_size_of_block(name: str) -> None:
    given = problem(name)
    reader = cached(given)
    usual = replace(reader, programs=None)
    for inputs in (given.x, given.x[:2], given.inputs(5)):
        plain = usual.record(given.start, inputs)
        same(reader.tangent(reader.record(given.start, inputs)), usual.secant(plain, plain).jacobian)
    assert reader.programs is not None
    assert len(reader.programs.tapes.latest.kept) == 2


class Deciding(nn.Module):
    """A module that reads a number of its weights, and takes one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x)
        return z if self.layer.bias.sum() > 0 else torch.tanh(z)


def deciding() -> Problem:
    """Such a module, with inputs."""
    generator = torch.Generator().manual_seed(0)
    return Problem(Deciding().double(), torch.randn(4, 3, generator=generator, dtype=torch.float64), generator)


def test_another_way_taken_is_seen() -> None:
    given = deciding()
    reader = cached(given)
    usual = replace(reader, programs=None)
    for k in range(2 * TRIALS + 2):
        sign = 1.0 if k <= TRIALS else -1.0
        weights = given.start | {"layer.bias": torch.full((2,), sign * (1 + k), dtype=torch.float64)}
        tape, plain = reader.record(weights, given.x), usual.record(weights, given.x)
        agree(tape.outputs, plain.outputs, ROUNDING)
        same(reader.tangent(tape), usual.secant(plain, plain).jacobian)


@pytest.mark.parametrize("name", ROUTING)
def test_a_program_is_not_believed_of_another_routing(name: str) -> None:
    """Batches of one shape in turn, until there are programs of all of them."""
    given = routed(name)
    reader = cached(given)
    usual = replace(reader, programs=None)
    batches = [given.x, batch(given.generator), batch(given.generator)]
    for k, weights in enumerate(walk(given, 3 * (TRIALS + 1))):
        inputs = batches[k % len(batches)]
        tape, plain = reader.record(weights, inputs), usual.record(weights, inputs)
        agree(tape.outputs, plain.outputs, ROUNDING)
        same(reader.tangent(tape), usual.secant(plain, plain).jacobian)


class Shifted(nn.Module):
    """A module with a constant from outside torch, another one at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 2), 0.0

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x * torch.tensor([1.0, 2.0, 3.0 + self.calls], dtype=x.dtype))
        return outputs


def test_tapes_with_other_constants_are_not_of_one_program() -> None:
    """Their operations and shapes are the same, and what was worked out beforehand is not."""
    given = replace(deciding(), module=Shifted().double())
    reader = cached(given)
    for k in range(6):
        given.module.calls = float(k // 3)  # type: ignore[assignment]  # a plain attribute
        tape = uncached(reader).record(given.start, given.x)
        found = reader.tangent(tape)
        same_bits(found, uncached(reader).tangent(tape))
        agree(parts(found)[0][:, 0, 2] / given.x[:, 2], torch.full((4,), 3.0 + k // 3, dtype=torch.float64), ROUNDING)


def test_a_program_is_known_by_what_it_is_of_and_not_by_where_that_lies() -> None:
    """Tapes that are recorded anew at every step find the program of the last one."""
    given = problem("tanh")
    reader = cached(given)
    for weights in walk(given, TRIALS + 2):
        reader.tangent(uncached(reader).record(weights, given.x))
    assert reader.programs is not None
    assert len(reader.programs.jacobians.latest.kept) == 1
    (written,) = reader.programs.jacobians.latest.kept.values()
    assert written is not None
    assert written.trials == 0


def alive() -> int:
    """The bytes of all tensors there are, each memory counted once."""
    gc.collect()
    homes = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter):
            with suppress(RuntimeError):  # what another test left may be a tensor without a memory of its own
                homes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(homes.values())


def after(steps: int, given: Problem, reader: Reader, batches: list[Tensor]) -> int:
    """What is alive after so many steps of a run, four on each batch in turn: enough for a program, and to run it."""
    for k in range(steps):
        inputs = batches[k // 4 % len(batches)]
        start, end = (reader.record(weights, inputs) for weights in (given.start, given.end(0.01)))
        reader.along(start, end)
        reader.tangent(end)
    return alive()


REGIMES: dict[str, tuple[Callable[[], Problem], int]] = {
    "programs": (lambda: problem("tanh"), 2**28),
    "a tape that is too large": (lambda: problem("tanh"), 0),
    "routing that changes": (lambda: routed("sorted rows"), 2**28),
    "routing outside torch": (lambda: routed("sorted outside torch"), 2**28),
    "routing of a tape that is too large": (lambda: routed("sorted rows"), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIMES)
def test_memory_is_flat(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more routings in turn than are remembered, the second round of steps leaves what the first left."""
    make, largest = REGIMES[name]
    monkeypatch.setattr(chapter, "MAX_PROGRAM_BYTES", largest)
    monkeypatch.setattr("ntkexp.kernel.read.program_cache.MAX_ANSWERS", 4)
    given = make()
    batches = [batch(given.generator) for _ in range(6)] if given.x.dim() == 3 else [given.x]
    reader = cached(given)
    assert after(24, given, reader, batches) >= after(24, given, reader, batches)


@pytest.mark.slow
def test_what_is_kept_holds_none_of_the_values_that_vary() -> None:
    """A program and its template are as large for a thousand examples as for one."""
    given = problem("tanh")
    sizes = []
    for count in (1, 1000):
        reader, x = cached(given), given.inputs(count)
        before = alive()
        for weights in walk(given, TRIALS + 2, 0.01):
            tape = reader.record(weights, x)
            reader.tangent(tape)
        del tape
        for answers in (reader.findings.owners, reader.findings.structures, reader.findings.faithful):
            answers.kept.clear()  # a number for every example
        sizes.append(alive() - before)
    assert sizes[1] <= sizes[0] + 10**4


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
    ids=["Python's", "CUDA's", "torch's"],
)
@pytest.mark.parametrize("place", ["a program of tapes", "a program of features", "all outputs at once"])
def test_a_lack_of_memory_is_never_hidden(place: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way is gone, and so which bits come out, must not hang on it."""
    given = problem("tanh")
    reader = cached(given)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    tapes = [reader.record(weights, given.x) for weights in walk(given, 3 if place != "all outputs at once" else 1)]
    assert reader.programs is not None
    if place == "all outputs at once":
        monkeypatch.setattr(chapter, "pull_back", fail)
    else:
        for tape in tapes:
            reader.tangent(tape)
        programs: Any = reader.programs.tapes if "tapes" in place else reader.programs.jacobians
        for written in programs.latest.kept.values():
            written.program = replace(written.program, function=fail)
    with pytest.raises(type(error)):
        reader.tangent(tapes[-1] if "tapes" not in place else reader.record(given.start, given.x))


@pytest.mark.slow
def test_what_is_known_of_routings_is_bounded() -> None:
    """More batches than are remembered, each with an order of its own."""
    given = routed("sorted rows")
    reader = cached(given)
    known = reader.programs
    assert known is not None
    for _ in range(MAX_ANSWERS + 3):
        reader.tangent(reader.record(given.start, batch(given.generator)))
    sizes = [
        len(kept.kept)
        for kept in (reader.findings.owners, reader.findings.faithful, known.jacobians.latest, known.once)
    ]
    assert max(sizes) <= MAX_ANSWERS
    assert len(reader.findings.routes.kept) == len(known.tapes.latest.kept) == 1


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv1d(3, 4, 1)], ids=["linear", "convolution"])
def test_a_program_for_one_mixture_of_all_examples_serves_another_of_each(layer: nn.Module) -> None:
    """Whether they have one in common shows in memory, which decides how layers are passed."""
    x = torch.randn(5, 3, *(() if isinstance(layer, nn.Linear) else (1,)), dtype=torch.float64)
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    plain, weights = reader_of(module)
    reader = replace(plain, findings=Findings(), programs=ProgramCache())
    common, each = torch.randn(1, 2, dtype=torch.float64).expand(5, 2), torch.randn(5, 2, dtype=torch.float64)
    for mixture in (*[common] * (TRIALS + 2), each):
        found = reader.weighted(reader.record(weights, x), mixture)
    same_bits(found, uncached(reader).weighted(reader.record(weights, x), each))


@pytest.mark.parametrize("name", ["encoder, norm before", "ragged", "sorted rows", "last position"])
def test_a_run_and_the_rest_of_one_have_the_same_bits(name: str) -> None:
    """A resumed run starts with no programs."""
    given = routed(name) if name in ROUTED else problem(name)
    path = walk(given, 5)

    def last(weights: list[Weights]) -> list[Tensor]:
        reader = cached(given)
        tapes = [reader.record(each, given.x) for each in weights]
        read = [reader.along(*pair) for pair in pairwise(tapes)]
        return parts(read[-1])

    for whole, rest in zip(last(path), last(path[-2:]), strict=True):
        assert torch.equal(whole, rest)


# The source of a program is what was written down, and lets go of what it needs no more.


ACTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a kind of numbers": lambda v: [v.to(torch.float32)],
    "no finite number": lambda v: [v.clamp(max=inf), torch.full_like(v, float("nan")).nan_to_num(-inf) + v],
    "lists": lambda v: [torch.cat([v, v * 2]), v.flip([0, 1])],
    "several results": lambda v: [v.sort(1)[0], *torch.tensor_split(v, [1], 1)],
    "one of several results": lambda v: [v.sort(1).indices * v],
    "two operations of one name": lambda v: [torch.eq(v, v), torch.eq(v, 1.0)],
    "what is fed": lambda v: [v, v],
}


@pytest.mark.parametrize("name", ACTS)
def test_a_program_gives_what_was_done(name: str) -> None:
    act, fed, other = ACTS[name], x(), 1 - x()
    program = trace(lambda: act(fed), [fed])
    for one, expected in zip(program.run([other]), act(other), strict=True):
        assert torch.equal(one, expected)


def test_a_number_that_is_another_one_is_seen() -> None:
    fed = x()
    program = trace(lambda: [fed * 2 if torch.equal(fed, fed.abs()) else fed * 3], [fed])
    assert torch.equal(program.run([fed])[0], fed * 3)
    with pytest.raises(DoesNotHold):
        program.run([fed.abs()])


class Counting(Heard):
    """How many results of operations there are at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: WeakSet[Tensor] = WeakSet()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.alive.add(found)
        self.most = max(self.most, len(self.alive))
        return found


def test_values_are_forgotten_after_their_last_use() -> None:
    def act() -> list[Tensor]:
        value = fed
        for _ in range(10):
            value = value.sin()
        return [value]

    fed = x()
    program = trace(act, [fed])
    with Counting() as mode:
        program.run([fed])
    assert len(mode.names) == 10
    assert mode.most == 2  # an argument and its result


def failing() -> Program:
    """A program of a product, for inputs of three columns."""
    fed, weight = x(), x(3)
    return trace(lambda: [(fed.exp() @ weight).relu()], [fed])


def test_a_traceback_shows_the_line_for_as_long_as_there_is_a_program() -> None:
    program = failing()
    with pytest.raises(RuntimeError) as caught:
        program.run([x()[:, :2]])
    assert "= mm(" in "".join(traceback.format_exception(caught.value))
    file = program.function.__code__.co_filename
    assert file in linecache.cache
    del caught, program
    gc.collect()
    assert file not in linecache.cache
