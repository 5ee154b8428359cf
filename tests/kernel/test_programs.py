"""A program runs what its results need, once, and gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from ntkexp.kernel.features import gram as chapter
from ntkexp.kernel.features.gram import Sizes
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read import checks, reader, sketched
from ntkexp.kernel.read.program_cache import TRIALS, ProgramCache
from ntkexp.kernel.record.program import OP_FUNCTIONS, OP_METHODS, Program, trace
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.ownership import Owners, owners
from ntkexp.library import tangent as library
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel.oracle import agree, tangent
from tests.kernel.problems import KINDS, known

aten = torch.ops.aten


class Heard(DispatchMode):
    """The operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.names.append(func._schema.name.removeprefix("aten::") + (" over" if "out" in kwargs else ""))
        return func(*args, **kwargs)


def heard(program: Program, fed: Sequence[Tensor]) -> list[str]:
    mode = Heard()
    with mode:
        program.run(fed)
    return mode.names


def x(rows: int = 4) -> Tensor:
    """A matrix without anything particular."""
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


ACTS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "the same twice": (lambda v: torch.tanh(v) * torch.tanh(v), ["tanh", "mul"]),
    "a number and a value of that number": (
        lambda v: v * 2 + v * torch.full_like(v, 2.0),
        ["mul", "full_like", "mul", "add"],
    ),
    "a view of a view": (lambda v: v.view(2, 6).view(12).relu(), ["view", "relu"]),
    "a view of the same shape": (lambda v: v.view(4, 3).expand(4, 3).relu(), ["relu"]),
    "a transposed square is another": (lambda v: v[:3].t() + v[:3], ["slice", "t", "add"]),
    "what nobody asks for": (lambda v: (v.exp(), v.relu())[1], ["relu"]),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_program_says_nothing_twice(name: str) -> None:
    act, expected = ACTS[name]
    fed = x()
    program = trace(lambda: [act(fed)], [fed])
    assert [name.removesuffix("_") for name in heard(program, [fed])] == expected
    other = 1 - x()
    assert torch.equal(program.run([other])[0], act(other))


def test_what_a_tape_knows_is_not_worked_out_again() -> None:
    tape = known("tanh").tape
    fed = [tape[slot] for slot in (*tape.weights, *tape.inputs, *tape.made)]
    (entry,) = [entry for entry in tape.entries if entry.name == "tanh"][:1]
    argument, result = tape[entry.slots[0]].detach(), tape[entry.results[0]]
    program = trace(lambda: [torch.tanh(tape[entry.slots[0]]) * 1.5], fed, [tape])
    assert heard(program, fed) == ["mul"]
    assert torch.equal(program.run(fed)[0], result * 1.5)
    assert torch.equal(result, argument.tanh())


def test_selected_parts_are_put_together_once() -> None:
    """Queries, keys and values, whose gradients would else be written into zeros one by one."""
    network = known("encoder, norm before")
    reader = replace(network.reader, programs=ProgramCache())
    tape = reader.record(network.given.start, network.given.x)
    for _ in range(TRIALS + 2):
        reader.tangent(tape)
    with Heard() as mode:
        reader.tangent(tape)
    assert "stack" in mode.names
    assert not {"index_copy", "select_backward", "select_scatter"} & set(mode.names)


v, w, square = x(), x() + 1, x(3)
image, kernel, index = v.view(1, 1, 4, 3), square[None, None], torch.tensor([2, 0])
SAMPLES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add", "div", "maximum", "minimum", "mul", "sub", "equal"), (v, w)),
    **dict.fromkeys(("eq", "gt", "le", "lt", "pow", "rsub", "clamp_min"), (v, 2)),
    **dict.fromkeys(("cat", "stack"), ([v, w],)),
    **dict.fromkeys(("mm",), (v, square)),
    **dict.fromkeys(("select",), (v, 0, 1)),
    **dict.fromkeys(("mean", "sum"), (v, [1], True)),
    **dict.fromkeys(("view", "_unsafe_view"), (v, [3, 4])),
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
"""Arguments; all other operations take one tensor."""


@pytest.mark.parametrize("op", [*OP_FUNCTIONS, *OP_METHODS], ids=str)
def test_a_binding_runs_its_operation_and_no_other(op: OpOverload) -> None:
    args = SAMPLES.get(op._schema.name.removeprefix("aten::"), (w.abs(),))
    with Heard() as mode:
        found = getattr(args[0], OP_METHODS[op])(*args[1:]) if op in OP_METHODS else OP_FUNCTIONS[op](*args)
    assert mode.names == [op._schema.name.removeprefix("aten::").replace("_unsafe_view", "view")]
    expected = op(*args)
    pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True)
    assert all(torch.equal(one, other) if isinstance(one, Tensor) else one == other for one, other in pairs)


# The kernel by chunks of parameters is the kernel, however few examples and elements are taken at a time.


EPS = torch.finfo(torch.float64).eps


@pytest.fixture
def nothing_fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Jacobian never fit, strips have some elements; how many kernels were made so is counted."""
    made: list[int] = []

    def counted(left: Jacobian, right: Jacobian) -> torch.Tensor:
        made.append(left.examples)
        return chapter.gram(left, right)

    monkeypatch.setattr(reader, "FITS", -1.0)
    monkeypatch.setattr(library, "FITS", -1.0)
    monkeypatch.setattr(chapter, "MAX_ROWS_BYTES", 0)
    monkeypatch.setattr(chapter, "PIECE_BYTES", 500)
    monkeypatch.setattr(chapter, "PIECE_ELEMENTS", 1)
    monkeypatch.setattr(sketched, "gram", counted)
    return made


FEW = ("tied embedding", "tied and transposed", "overlapping slices")


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name not in FEW)]
)
def test_every_kind_of_use_has_its_share(name: str, nothing_fits: list[int]) -> None:
    network = known(name)
    agree(tangent_kernel(network.given.module, network.given.x, network.other), network.kernel[:, :, 5:], 1000 * EPS)
    assert nothing_fits == [5]


@pytest.mark.parametrize("factors", ["double sum", "multiplied out"])
@pytest.mark.parametrize("name", ["relu", "convolution"])
def test_factors_are_kept_or_multiplied_out(
    name: str, factors: str, nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = known(name)
    monkeypatch.setattr(Sizes, "way", factors)
    agree(tangent_kernel(network.given.module, network.given.x), network.kernel[:, :, :5], 1000 * EPS)


@pytest.mark.parametrize("held", [1.0, 1e9], ids=["groups of one or two", "all held"])
@pytest.mark.parametrize("name", ["relu", "tied embedding"])
def test_examples_a_few_at_a_time(
    name: str, held: float, nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = known(name)
    monkeypatch.setattr(sketched, "READ_BYTES", 1.0)
    monkeypatch.setattr(sketched, "MAX_JACOBIAN_BYTES", held)
    agree(tangent_kernel(network.given.module, network.given.x), network.kernel[:, :, :5], 1000 * EPS)
    agree(tangent_kernel(network.given.module, network.given.x, network.other), network.kernel[:, :, 5:], 1000 * EPS)
    assert nothing_fits == ([5, 5] if held > 1 else [*[1] * 3, *[2] * 3, *[1] * 2, *[2] * 4])


def test_some_outputs_are_those_blocks(nothing_fits: list[int]) -> None:
    network = known("two heads")
    some = tangent_kernel(network.given.module, network.given.x, outputs=[2, 0])
    agree(some, network.kernel[:, [2, 0]][:, :, :5][..., [2, 0]], 1000 * EPS)
    assert nothing_fits == [5]


class Text(nn.Module):
    """The mean log-likelihood of a text's next words, of one table that is read at both ends and one of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.mix = nn.Embedding(7, 3), nn.Embedding(6, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.words(x) + self.places(torch.arange(x.shape[1]))))
        scores = (hidden[:, :-1] @ self.words.weight.t()).log_softmax(2)
        return scores.gather(2, x[:, 1:, None]).mean((1, 2))


def test_texts_are_asked_once_whose_positions_are(nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The words steer what is gathered, and are others in every batch; rows of positions are a use like any other."""
    torch.manual_seed(0)
    module, x = Text().double(), torch.randint(7, (6, 5))
    asked: list[int] = []

    def counted(tape: Tape, trained: frozenset[str]) -> Owners:
        asked.append(len(tape.outputs))
        return owners(tape, trained)

    monkeypatch.setattr(checks, "owners", counted)
    monkeypatch.setattr(sketched, "READ_BYTES", 1.0)
    agree(tangent_kernel(module, x), tangent(module, x, x), 1000 * EPS)
    assert nothing_fits == [6]
    assert asked == [2]


class Sorted(nn.Module):
    """A layer whose rows are those of other examples wherever the inputs are not in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)[x[:, 0].argsort()]
        return result


@pytest.mark.parametrize("order", [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
def test_a_batch_that_is_sorted_is_refused_even_if_it_came_in_order(order: list[float]) -> None:
    with pytest.raises(Mistake, match="couples the examples"):
        tangent_kernel(Sorted().double(), torch.tensor(order).double()[:, None])


class Dealt(nn.Module):
    """A layer that meets its rows in the order of their first numbers, and gives each back, times the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        result: Tensor = self.layer(x[order, :1])[order.argsort()] * x[:, 1:]
        return result


def test_small_rows_have_owners_too() -> None:
    """Each belongs to the example whose output it reaches, also where another batch comes in another order."""
    module, in_order = Dealt().double(), torch.tensor([[1.0, 1.0], [2.0, 1e-9], [3.0, 1e-9]]).double()
    tangent_kernel(module, in_order)
    others = in_order[[0, 2, 1]]
    gradients = torch.cat([others[:, :1], torch.ones_like(others[:, 1:])], 1) * others[:, 1:]
    found = tangent_kernel(module, others)[:, 0, :, 0]
    torch.testing.assert_close(found, gradients @ gradients.t(), rtol=1e-12, atol=0)


class Many(nn.Module):
    """A weight that counts, and many others of which each adds less to the kernel than that is rounded by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(4096))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + (x * self.others).sum(1, keepdim=True) * 1.5e-4


def test_small_chunks_are_not_lost_beside_a_large_sum(nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """K(1, 1) = 1 + 4096 · 2.25e-8, of which float32 would keep 1."""
    monkeypatch.setattr(chapter, "PIECE_BYTES", 1)
    monkeypatch.setattr(chapter, "PIECE_ELEMENTS", 1)
    found = tangent_kernel(Many(), torch.ones(2, 1))
    torch.testing.assert_close(found, torch.full_like(found, 1 + 4096 * 1.5e-4**2), rtol=1e-6, atol=0)
    assert nothing_fits == [2]


# A program writes over what it made itself and needs no more, and over nothing else.


CONSTANT = x() - 1


def written_in_place(v: Tensor) -> Tensor:
    """A view that is looked at after its base was written to, where functionalize has no part in it."""
    made = v * 3
    rows = made.view(12)
    made.add_(1)
    return (made * 2).view(12) * rows


IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "its own": (lambda v: (v + 1) * 2, ["add", "mul_"]),
    "what is fed": (lambda v: v * 2, ["mul"]),
    "a constant": (lambda v: CONSTANT * v, ["mul"]),
    "the second of two": (lambda v: v * (v + 1), ["add", "mul_"]),
    "the second of a difference": (lambda v: v - (v + 1), ["add", "sub over"]),
    "a mean": (lambda v: torch.lerp(v + 1, v, 0.5), ["add", "lerp_"]),
    "what is looked at again": (lambda v: (v + 1) * 2 * (v + 1), ["add", "mul", "mul_"]),
    "what a view looks at again": (
        lambda v: ((v + 1) * 2).view(12) / (v + 1).view(12),
        ["add", "mul", "view", "view", "div_"],
    ),
    "itself, transposed": (lambda v: (v[:3] + 1) * (v[:3] + 1).t(), ["slice", "add", "t", "mul"]),
    "a copy along an axis": (lambda v: v.sum(0).expand(4, 3) * 2, ["sum", "expand", "mul"]),
    "part of its memory": (lambda v: (v + 1)[:2] * 2, ["add", "slice", "mul"]),
    "what is smaller than the result": (lambda v: (v[:1] + 1) * v, ["slice", "add", "mul"]),
    "with a factor": (lambda v: torch.add(v, v.exp(), alpha=2), ["exp", "add over"]),
    "another kind": (lambda v: (v > 0).long() * v, ["gt", "_to_copy", "mul"]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_program_writes_over_what_it_may(name: str) -> None:
    act, expected = IN_PLACE[name]
    fed = x()
    program = trace(lambda: [act(fed)], [fed])
    assert heard(program, [fed]) == expected


@pytest.mark.parametrize("act", [act for act, _ in IN_PLACE.values()] + [written_in_place])
def test_what_is_fed_and_what_is_found_stay(act: Callable[[Tensor], Tensor]) -> None:
    fed, constant = x(), CONSTANT.clone()
    program = trace(lambda: [act(fed), fed + 1], [fed])
    other = 1 - x()
    before = other.clone()
    first, later = (program.run([other]) for _ in range(2))
    for found in (first, later):
        assert torch.equal(found[0], act(before))
        assert torch.equal(found[1], before + 1)
    assert torch.equal(other, before)
    assert torch.equal(constant, CONSTANT)
