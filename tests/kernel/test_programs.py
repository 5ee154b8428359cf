"""A program gives the bits of the reader, runs each operation once, and is given up where the reader would differ."""

from __future__ import annotations

import gc
import linecache
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.checks import CheckCache
from ntkexp.kernel.read.program_cache import MAX_ANSWERS, TRIALS, ProgramCache, parts
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.program import OP_FUNCTIONS, OP_METHODS, AssumptionFailed, Program, trace
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.kernel.record.tape import Tape
from ntkexp.library import reader_of, tangent_kernel
from ntkexp.shapes import Weights
from tests.kernel.networks import ROUTED, Formula, drawn, routed_batch
from tests.kernel.oracle import EPS, agree, normal, refused
from tests.kernel.problems import KINDS, Problem, known, problem, routed


class Heard(DispatchMode):
    """The operations that run, and the largest number of results that exist together. It can fail at one operation."""

    def __init__(self, fail: tuple[int, Exception] | None = None) -> None:
        super().__init__()
        self.fail = fail
        self.names: list[str] = []
        self.alive: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.most = 0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.fail is not None and len(self.names) == self.fail[0]:
            raise self.fail[1]
        self.names.append(func._schema.name.removeprefix("aten::") + (" over" if "out" in kwargs else ""))
        found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            self.alive[id(found)] = found
            self.most = max(self.most, len(self.alive))
        return found


def heard(program: Program, fed: Sequence[Tensor]) -> list[str]:
    mode = Heard()
    with mode:
        program.run(fed)
    return mode.names


def x(rows: int = 4) -> Tensor:
    """Return a matrix without special entries."""
    return normal(rows, 3, seed=rows)


# A program of one function: its operations, and the values that it overwrites.


CONSTANT = x() - 1
ONCE: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "the same twice": (lambda v: torch.tanh(v) * torch.tanh(v), ["tanh", "mul"]),
    "a number and a value of that number": (
        lambda v: v * 2 + v * torch.full_like(v, 2.0),
        ["mul", "full_like", "mul", "add"],
    ),
    "a view of a view": (lambda v: v.view(2, 6).view(12).relu(), ["view", "relu"]),
    "a view of the same shape": (lambda v: v.view(4, 3).expand(4, 3).relu(), ["relu"]),
    "a transposed square is another": (lambda v: v[:3].t() + v[:3], ["slice", "t", "add"]),
    "a result that nothing uses": (lambda v: (v.exp(), v.relu())[1], ["relu"]),
}
"""Functions and the operations that run, in place or not."""
IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "its own": (lambda v: (v + 1) * 2, ["add", "mul_"]),
    "an argument": (lambda v: v * 2, ["mul"]),
    "a constant": (lambda v: CONSTANT * v, ["mul"]),
    "the second of two": (lambda v: v * (v + 1), ["add", "mul_"]),
    "the second of a difference": (lambda v: v - (v + 1), ["add", "sub over"]),
    "a mean": (lambda v: torch.lerp(v + 1, v, 0.5), ["add", "lerp_"]),
    "a value that is used again": (lambda v: (v + 1) * 2 * (v + 1), ["add", "mul", "mul_"]),
    "a value that a view uses again": (
        lambda v: ((v + 1) * 2).view(12) / (v + 1).view(12),
        ["add", "mul", "view", "view", "div_"],
    ),
    "itself, transposed": (lambda v: (v[:3] + 1) * (v[:3] + 1).t(), ["slice", "add", "t", "mul"]),
    "a copy along an axis": (lambda v: v.sum(0).expand(4, 3) * 2, ["sum", "expand", "mul"]),
    "part of its memory": (lambda v: (v + 1)[:2] * 2, ["add", "slice", "mul"]),
    "a value smaller than the result": (lambda v: (v[:1] + 1) * v, ["slice", "add", "mul"]),
    "with a factor": (lambda v: torch.add(v, v.exp(), alpha=2), ["exp", "add over"]),
    "another kind": (lambda v: (v > 0).long() * v, ["gt", "_to_copy", "mul"]),
}


def written_in_place(v: Tensor) -> Tensor:
    """A view that is used after its base was written to, without functionalize."""
    made = v * 3
    rows = made.view(12)
    made.add_(1)
    return (made * 2).view(12) * rows


@pytest.mark.parametrize("name", [*ONCE, *IN_PLACE])
def test_a_program_runs_each_operation_once_and_writes_over_its_own_results(name: str) -> None:
    act, expected = (ONCE | IN_PLACE)[name]
    fed = x()
    found = heard(trace(lambda: [act(fed)], [fed]), [fed])
    assert ([each.removesuffix("_") for each in found] if name in ONCE else found) == expected


@pytest.mark.parametrize("act", [act for act, _ in (ONCE | IN_PLACE).values()] + [written_in_place])
def test_arguments_constants_and_results_stay(act: Callable[[Tensor], Tensor]) -> None:
    fed, constant = x(), CONSTANT.clone()
    program = trace(lambda: [act(fed), fed + 1], [fed])
    other = 1 - x()
    before = other.clone()
    for found in [program.run([other]) for _ in range(2)]:
        assert torch.equal(found[0], act(before))
        assert torch.equal(found[1], before + 1)
    assert torch.equal(other, before)
    assert torch.equal(constant, CONSTANT)


SEVERAL: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a kind of numbers": lambda v: [v.to(torch.float32)],
    "no finite number": lambda v: [v.clamp(max=inf), torch.full_like(v, float("nan")).nan_to_num(-inf) + v],
    "lists": lambda v: [torch.cat([v, v * 2]), v.flip([0, 1])],
    "several results": lambda v: [v.sort(1)[0], *torch.tensor_split(v, [1], 1)],
    "one of several results": lambda v: [v.sort(1).indices * v],
    "two operations of one name": lambda v: [torch.eq(v, v), torch.eq(v, 1.0)],
    "its argument": lambda v: [v, v],
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_program_gives_the_results_of_the_function(name: str) -> None:
    act, fed, other = SEVERAL[name], x(), 1 - x()
    program = trace(lambda: act(fed), [fed])
    for one, expected in zip(program.run([other]), act(other), strict=True):
        assert torch.equal(one, expected)


def test_a_number_that_differs_is_seen() -> None:
    fed = x()
    program = trace(lambda: [fed * 2 if torch.equal(fed, fed.abs()) else fed * 3], [fed])
    assert torch.equal(program.run([fed])[0], fed * 3)
    with pytest.raises(AssumptionFailed):
        program.run([fed.abs()])


def test_values_are_released_after_their_last_use() -> None:
    def act() -> list[Tensor]:
        value = fed
        for _ in range(10):
            value = value.sin()
        return [value]

    fed = x()
    program = trace(act, [fed])
    with Heard() as mode:
        program.run([fed])
    assert len(mode.names) == 10
    assert mode.most == 2  # an argument and its result


def test_a_traceback_shows_the_line_while_the_program_exists() -> None:
    fed, weight = x(), x(3)
    program = trace(lambda: [(fed.exp() @ weight).relu()], [fed])
    with pytest.raises(RuntimeError) as caught:
        program.run([x()[:, :2]])
    assert "= mm(" in "".join(traceback.format_exception(caught.value))
    file = program.function.__code__.co_filename
    assert file in linecache.cache
    del caught, program
    gc.collect()
    assert file not in linecache.cache


v, w, square = x(), x() + 1, x(3)
image, kernel, index = v.view(1, 1, 4, 3), square[None, None], torch.tensor([2, 0])
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add", "div", "maximum", "minimum", "mul", "sub", "equal"), (v, w)),
    **dict.fromkeys(("eq", "gt", "le", "lt", "pow", "rsub", "clamp_min"), (v, 2)),
    **dict.fromkeys(("cat", "stack"), ([v, w],)),
    **dict.fromkeys(("mean", "sum"), (v, [1], True)),
    **dict.fromkeys(("view", "_unsafe_view"), (v, [3, 4])),
    "mm": (v, square),
    "select": (v, 0, 1),
    "addcmul": (v, v, w),
    "addmm": (v, v, square),
    "bmm": (v[None], square[None]),
    "constant_pad_nd": (v, [1, 0], 1.0),
    "convolution": (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "expand": (v[:1], [4, 3]),
    "index_copy": (v, 0, index, w[:2]),
    "index_select": (v, 0, index),
    "lerp": (v, w, 0.5),
    "native_group_norm": (image, None, None, 1, 1, 12, 1, 1e-5),
    "native_layer_norm": (v, [3], None, None, 1e-5),
    "permute": (v, [1, 0]),
    "squeeze": (v[None], 0),
    "transpose": (v, 0, 1),
    "unsqueeze": (v, 0),
    "where": (v > 0, v, w),
}
"""All other operations take one tensor."""


@pytest.mark.parametrize("op", [*OP_FUNCTIONS, *OP_METHODS], ids=str)
def test_a_binding_runs_its_operation_and_no_other(op: OpOverload) -> None:
    name = op._schema.name.removeprefix("aten::")
    args = ARGUMENTS.get(name, (w.abs(),))
    with Heard() as mode:
        found = getattr(args[0], OP_METHODS[op])(*args[1:]) if op in OP_METHODS else OP_FUNCTIONS[op](*args)
    assert mode.names == [name.replace("_unsafe_view", "view")]
    pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, op(*args))), strict=True)
    assert all(torch.equal(one, other) if isinstance(one, Tensor) else one == other for one, other in pairs)


def test_values_on_a_tape_are_not_computed_again() -> None:
    tape = known("tanh").tape
    fed = [tape[slot] for slot in (*tape.weights, *tape.inputs, *tape.made)]
    (entry,) = [entry for entry in tape.entries if entry.name == "tanh"][:1]
    argument, result = tape[entry.slots[0]].detach(), tape[entry.results[0]]
    program = trace(lambda: [torch.tanh(tape[entry.slots[0]]) * 1.5], fed, [tape])
    assert heard(program, fed) == ["mul"]
    assert torch.equal(program.run(fed)[0], result * 1.5)
    assert torch.equal(result, argument.tanh())


def test_selected_parts_are_put_together_once() -> None:
    """The gradients of queries, keys and values are not written into zeros one by one."""
    network = known("encoder, norm before")
    reader = replace(network.reader, programs=ProgramCache())
    tape = reader.record(network.given.start, network.given.x)
    for _ in range(TRIALS + 2):
        reader.tangent(tape)
    with Heard() as mode:
        reader.tangent(tape)
    assert "stack" in mode.names
    assert not {"index_copy", "select_backward", "select_scatter"} & set(mode.names)


# Programs of tapes and Jacobians, along a path of weights.


ROUNDING = 300 * EPS  # all outputs at once are summed in another order


def cached(given: Problem) -> Reader:
    """Return a reader that keeps programs."""
    return replace(reader_of(given.module)[0], check_cache=CheckCache(), programs=ProgramCache())


def uncached(reader: Reader) -> Reader:
    """Return the same reader without any program yet."""
    return replace(reader, programs=ProgramCache())


def walk(given: Problem, steps: int, size: float = 0.3) -> list[Weights]:
    """Return weights along a random path."""
    return [given.start, *(given.end(size) for _ in range(steps))]


def assert_same_bits(found: Tape | Jacobian, expected: Tape | Jacobian) -> None:
    assert len(parts(found)) == len(parts(expected)) > 0
    assert all(torch.equal(one, other) for one, other in zip(parts(found), parts(expected), strict=True))


def assert_same(found: Jacobian, expected: Jacobian) -> None:
    """The blocks agree to rounding."""
    assert found.keys == expected.keys
    scale = max(float(part.abs().max()) for part in parts(expected) if part.numel())
    for actual, usual in zip(parts(found), parts(expected), strict=True):
        assert actual.shape == usual.shape
        if usual.numel():  # an expert may have no rows
            agree(actual, usual, ROUNDING, scale)


def assert_as_usual(reader: Reader, weights: Weights, inputs: Tensor) -> None:
    """A reader with programs gives the tape and the Jacobian of a reader without programs."""
    usual = replace(reader, programs=None)
    tape, plain = reader.record(weights, inputs), usual.record(weights, inputs)
    agree(tape.outputs, plain.outputs, ROUNDING)
    assert_same(reader.tangent(tape), usual.secant(plain, plain).jacobian)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", KINDS)
def test_every_step_by_a_program_has_the_bits_of_the_step_without(name: str) -> None:
    given = problem(name)
    reader, path = cached(given), walk(given, TRIALS + 2)
    tapes = [reader.record(weights, given.x) for weights in path]
    for start, end in pairwise(tapes):
        found, point = reader.along(start, end), reader.tangent(end)
    bare = uncached(reader)
    last = bare.record(path[-2], given.x), uncached(reader).record(path[-1], given.x)
    assert_same_bits(tapes[-2], last[0])
    assert_same_bits(tapes[-1], last[1])
    assert_same_bits(found, bare.along(*last))
    assert_same_bits(point, bare.tangent(last[1]))
    assert_same(found, replace(reader, programs=None).along(*last))
    assert reader.programs is not None
    for programs in (reader.programs.jacobians, reader.programs.tapes):
        assert programs.latest.entries
        assert all(written is not None and written.trials == 0 for written in programs.latest.entries.values())


@pytest.mark.parametrize("name", ["relu", "lstm"])
def test_there_is_one_program_for_each_size_of_block(name: str) -> None:
    given = problem(name)
    reader = cached(given)
    for inputs in (given.x, given.x[:2], given.inputs(5)):
        assert_as_usual(reader, given.start, inputs)
    assert reader.programs is not None
    assert len(reader.programs.tapes.latest.entries) == 2


def deciding(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A branch that a number of the weights decides."""
    z = x @ w + bias
    return z if bias.sum() > 0 else torch.tanh(z)


def small(function: Callable[..., Tensor]) -> Problem:
    module = drawn(Formula(function, w=(3, 2), bias=(2,)))
    return Problem(module, normal(4, 3, seed=1), torch.Generator().manual_seed(0))


def test_another_branch_is_seen() -> None:
    given = small(deciding)
    reader = cached(given)
    for k in range(2 * TRIALS + 2):
        sign = 1.0 if k <= TRIALS else -1.0
        bias = torch.full((2,), sign * (1 + k), dtype=torch.float64)
        assert_as_usual(reader, given.start | {"bias": bias}, given.x)


def test_lengths_that_torch_itself_reads_are_seen() -> None:
    """The batches of packed sequences have one shape and one number of rows, and other lengths."""
    given = routed("packed sequences")
    reader, batches = cached(given), []
    for lengths in ([3, 3, 2, 1, 1], [2, 2, 3, 2, 1]):
        x = given.x.clone()
        x[..., 0] = x[..., 0].abs() * torch.where(torch.arange(4) < torch.tensor(lengths)[:, None], 1, -1)
        batches.append(x)
    for k, weights in enumerate(walk(given, TRIALS + 3)):
        assert_as_usual(reader, weights, batches[k > TRIALS])


ROUTING = ("sorted rows", "sorted outside torch", "switched experts")
SLOW = ("ragged", "last position", "nested masks")


@pytest.mark.parametrize("name", [*ROUTING, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_program_is_not_used_for_another_routing(name: str) -> None:
    """Batches of one shape take turns, until each has a program."""
    given = routed(name)
    reader = cached(given)
    batches = [given.x, routed_batch(given.generator), routed_batch(given.generator)]
    for k, weights in enumerate(walk(given, 3 * (TRIALS + 1))):
        assert_as_usual(reader, weights, batches[k % len(batches)])


def test_tapes_with_other_constants_do_not_share_a_program() -> None:
    """Their operations and shapes are equal, and the values that were computed beforehand are not."""
    calls = [0.0]
    given = small(lambda x, w, bias: x * torch.tensor([1.0, 2.0, 3.0 + calls[0]], dtype=x.dtype) @ w + bias)
    reader = cached(given)
    for k in range(6):
        calls[0] = float(k // 3)
        tape = uncached(reader).record(given.start, given.x)
        found = reader.tangent(tape)
        assert_same_bits(found, uncached(reader).tangent(tape))
        agree(parts(found)[0][:, 0, 2] / given.x[:, 2], torch.full((4,), 3.0 + calls[0], dtype=torch.float64), ROUNDING)


def test_a_program_is_known_by_its_operations_and_not_by_memory() -> None:
    """Tapes that are recorded at every step find the program of the last one."""
    given = problem("tanh")
    reader = cached(given)
    for weights in walk(given, TRIALS + 2):
        reader.tangent(uncached(reader).record(weights, given.x))
    assert reader.programs is not None
    (written,) = reader.programs.jacobians.latest.entries.values()
    assert written is not None
    assert written.trials == 0


@pytest.mark.parametrize("name", ["encoder, norm before", "ragged", "sorted rows", "last position"])
def test_a_run_and_the_rest_of_one_have_the_same_bits(name: str) -> None:
    """A resumed run starts with no programs."""
    given = routed(name) if name in ROUTED else problem(name)
    path, read = walk(given, 5), []
    for weights in (path, path[-2:]):
        reader = cached(given)
        tapes = [reader.record(each, given.x) for each in weights]
        read.append([reader.along(*pair) for pair in pairwise(tapes)][-1])
    assert_same_bits(*read)


@pytest.mark.parametrize("layer", [nn.Linear(3, 4), nn.Conv1d(3, 4, 1)], ids=["linear", "convolution"])
def test_a_program_for_one_mixture_of_all_examples_serves_another_of_each(layer: nn.Module) -> None:
    """Mixtures in one memory are passed through layers in another way than mixtures of each example."""
    inputs = normal(5, 3, *(() if isinstance(layer, nn.Linear) else (1,)))
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    reader, weights = cached(Problem(module, inputs, torch.Generator())), reader_of(module)[1]
    common, each = normal(1, 2).expand(5, 2), normal(5, 2)
    for mixture in (*[common] * (TRIALS + 2), each):
        found = reader.weighted(reader.record(weights, inputs), mixture)
    assert_same_bits(found, uncached(reader).weighted(reader.record(weights, inputs), each))


# Memory: it stays flat over a run, and a lack of it is never hidden.


ERRORS = {
    "Python's": MemoryError(),
    "CUDA's": torch.cuda.OutOfMemoryError("CUDA out of memory."),
    "torch's": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("steps", [0, TRIALS + 2], ids=["all outputs at once", "a program"])
def test_a_lack_of_memory_is_never_hidden(steps: int, error: Exception) -> None:
    """It must not decide how a Jacobian is computed, and so which bits it has. Any operation may lack memory."""
    given = problem("tanh")
    path, end = walk(given, steps), given.end(0.1)

    def reads() -> list[Callable[[], object]]:
        reader = cached(given)
        for weights in path:
            reader.tangent(reader.record(weights, given.x))
        tape = reader.record(given.start, given.x)
        return [lambda: reader.tangent(tape), lambda: reader.record(end, given.x)]

    for k, read in enumerate(reads()):
        with Heard() as mode:
            read()
        for place in (0, len(mode.names) // 2, len(mode.names) - 1):
            with pytest.raises(type(error)), Heard((place, error)):
                reads()[k]()


def alive() -> int:
    """Return the bytes of all tensors that exist, each memory counted once."""
    gc.collect()
    homes = {}
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter):
            with suppress(RuntimeError):  # another test may have left a tensor without memory
                homes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(homes.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tanh", "sorted outside torch"])
def test_memory_is_flat(name: str) -> None:
    """There are more routings than are remembered; the second round of steps holds no more than the first."""
    given = routed(name) if name in ROUTED else problem(name)
    batches = [routed_batch(given.generator) for _ in range(MAX_ANSWERS + 2)] if name in ROUTED else [given.x]
    reader, left = cached(given), []
    for _ in range(2):
        for inputs in batches:
            for _ in range(4):  # enough for a program, and to run it
                start, end = (reader.record(weights, inputs) for weights in (given.start, given.end(0.01)))
                reader.along(start, end)
                reader.tangent(end)
        left.append(alive())
    assert left[0] >= left[1]
    known = reader.programs
    assert known is not None
    kept = (reader.check_cache.owners, reader.check_cache.faithful, known.jacobians.latest, known.requested_before)
    assert max(len(each.entries) for each in kept) <= MAX_ANSWERS
    assert len(reader.check_cache.routes.entries) == len(known.tapes.latest.entries) == 1


@pytest.mark.slow
def test_programs_keep_none_of_the_values_that_vary() -> None:
    """A program and its template are as large for a thousand examples as for one."""
    given = problem("tanh")
    sizes = []
    for count in (1, 1000):
        reader, inputs = cached(given), given.inputs(count)
        before = alive()
        for weights in walk(given, TRIALS + 2, 0.01):
            tape = reader.record(weights, inputs)
            reader.tangent(tape)
        del tape
        for answers in (reader.check_cache.owners, reader.check_cache.structures, reader.check_cache.faithful):
            answers.entries.clear()  # a number for every example
        sizes.append(alive() - before)
    assert sizes[1] <= sizes[0] + 10**4


# Batches that come in another order than the first.


@pytest.mark.parametrize("order", [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
def test_a_batch_that_is_sorted_is_refused_even_if_it_came_in_order(order: list[float]) -> None:
    net = Formula(lambda x, layer: layer(x)[x[:, 0].argsort()], layer=nn.Linear(1, 1)).double()
    with refused("couples the examples"):
        tangent_kernel(net, torch.tensor(order).double()[:, None])


def dealt(x: Tensor, layer: nn.Module) -> Tensor:
    """Rows in the order of their first numbers go through the layer; each comes back, times its second number."""
    order = x[:, 0].argsort()
    result: Tensor = layer(x[order, :1])[order.argsort()] * x[:, 1:]
    return result


def test_small_rows_have_owners_too() -> None:
    """Each belongs to the example whose output it reaches, also where another batch comes in another order."""
    net, in_order = Formula(dealt, layer=nn.Linear(1, 1)).double(), torch.tensor([[1.0, 1.0], [2.0, 1e-9], [3.0, 1e-9]])
    in_order = in_order.double()
    tangent_kernel(net, in_order)
    others = in_order[[0, 2, 1]]
    gradients = torch.cat([others[:, :1], torch.ones_like(others[:, 1:])], 1) * others[:, 1:]
    found = tangent_kernel(net, others)[:, 0, :, 0]
    torch.testing.assert_close(found, gradients @ gradients.t(), rtol=1e-12, atol=0)
