"""The source of a program is what was written down, and lets go of what it needs no more."""

from __future__ import annotations

import gc
import linecache
import traceback
from collections.abc import Callable
from math import inf
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from ntkexp.kernel.record.program import DoesNotHold, Program, trace
from tests.kernel.test_simplify import Heard, x

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
