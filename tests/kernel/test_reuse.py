"""A program writes over what it made itself and needs no more, and over nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ntkexp.kernel.record.program import trace
from tests.kernel.test_simplify import heard, x

CONSTANT = x() - 1


def written_in_place(v: Tensor) -> Tensor:
    """A view that is looked at after its base was written to, where functionalize has no part in it."""
    made = v * 3
    rows = made.view(12)
    made.add_(1)
    return (made * 2).view(12) * rows


ACTS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
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


@pytest.mark.parametrize("name", ACTS)
def test_a_program_writes_over_what_it_may(name: str) -> None:
    act, expected = ACTS[name]
    fed = x()
    program = trace(lambda: [act(fed)], [fed])
    assert heard(program, [fed]) == expected


@pytest.mark.parametrize("act", [act for act, _ in ACTS.values()] + [written_in_place])
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
