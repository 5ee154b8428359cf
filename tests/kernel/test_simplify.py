"""A program runs what its results need, once, and gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from ntkexp.kernel.read.program_cache import TRIALS, ProgramCache
from ntkexp.kernel.record.program import FUNCTIONS, METHODS, Program, trace
from ntkexp.kernel.record.recorder import DispatchMode
from tests.kernel.known import known

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


@pytest.mark.parametrize("op", [*FUNCTIONS, *METHODS], ids=str)
def test_a_binding_runs_its_operation_and_no_other(op: OpOverload) -> None:
    args = SAMPLES.get(op._schema.name.removeprefix("aten::"), (w.abs(),))
    with Heard() as mode:
        found = getattr(args[0], METHODS[op])(*args[1:]) if op in METHODS else FUNCTIONS[op](*args)
    assert mode.names == [op._schema.name.removeprefix("aten::").replace("_unsafe_view", "view")]
    expected = op(*args)
    pairs = zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True)
    assert all(torch.equal(one, other) if isinstance(one, Tensor) else one == other for one, other in pairs)
