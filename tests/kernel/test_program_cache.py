"""A plan carries out what the reader would do, step after step, and notices when it would do something else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.read.program_cache import LATEST, TRIALS, Plan, parts
from ntkexp.kernel.read.reader import Reader
from ntkexp.library import reader_of
from ntkexp.shapes import Weights
from tests.kernel.compare import agree
from tests.kernel.problems import READ, Problem, problem
from tests.kernel.routed import ROUTED, batch, routed

ROUTING = (
    *("sorted rows", "sorted outside torch", "switched experts"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("ragged", "last position", "nested masks")),
)
ROUNDING = 300 * torch.finfo(torch.float64).eps  # all outputs at once are summed in another order


def planned(given: Problem) -> tuple[Reader, Reader]:
    """A reader with a plan, and one without."""
    reader, _ = reader_of(given.module)
    return replace(reader, plan=Plan()), reader


def walk(given: Problem, steps: int) -> list[Weights]:
    """Weights along a random path."""
    return [given.start, *(given.end(0.3) for _ in range(steps))]


def same(found: Features, expected: Features) -> None:
    """Block by block."""
    assert found.blocks.keys() == expected.blocks.keys()
    scale = max(float(part.abs().max()) for part in parts(expected) if part.numel())
    for actual, usual in zip(parts(found), parts(expected), strict=True):
        assert actual.shape == usual.shape
        if usual.numel():  # an expert may have no rows
            agree(actual, usual, ROUNDING, scale)


@pytest.mark.parametrize("name", READ)
def test_every_step_of_a_plan_is_what_the_reader_does(name: str) -> None:
    given = problem(name)
    reader, usual = planned(given)
    path = walk(given, TRIALS + 2)
    tapes = [(reader.record(weights, given.x), usual.record(weights, given.x)) for weights in path]
    for (start, slow), (end, slow_end) in pairwise(tapes):
        agree(end.outputs, slow_end.outputs, ROUNDING)
        same(reader.along(start, end), usual.secant(slow, slow_end).features)
        same(reader.tangent(end), usual.secant(slow_end, slow_end).features)
    assert reader.plan is not None
    assert all(way is not None and way.trials == 0 for way in reader.plan.features.kept.values())
    assert all(way is not None and way.trials == 0 for way in reader.plan.tapes.kept.values())


@pytest.mark.parametrize("name", ["relu", "lstm", "encoder, norm before", "max pooling"])
def test_a_plan_has_one_program_for_each_size_of_block(name: str) -> None:
    given = problem(name)
    reader, usual = planned(given)
    for inputs in (given.x, given.x[:2], given.inputs(5)):
        tape = reader.record(given.start, inputs)
        plain = usual.record(given.start, inputs)
        same(reader.tangent(tape), usual.secant(plain, plain).features)
    assert reader.plan is not None
    assert len(reader.plan.tapes.kept) == 2


class Deciding(nn.Module):
    """A module that reads a number of its weights, and takes one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x)
        return z if self.layer.bias.sum() > 0 else torch.tanh(z)


def test_a_plan_sees_another_way_taken() -> None:
    module = Deciding().double()
    usual, own = reader_of(module)
    reader = replace(usual, plan=Plan())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k in range(2 * TRIALS + 2):
        sign = 1.0 if k <= TRIALS else -1.0
        weights = own | {"layer.bias": torch.full((2,), sign * (1 + k), dtype=torch.float64)}
        tape = reader.record(weights, x)
        agree(tape.outputs, usual.record(weights, x).outputs, ROUNDING)
        plain = usual.record(weights, x)
        same(reader.tangent(tape), usual.secant(plain, plain).features)


@pytest.mark.parametrize("name", ROUTING)
def test_a_program_is_not_believed_of_another_routing(name: str) -> None:
    """Batches of one shape in turn, until there are programs of all of them."""
    given = routed(name)
    reader, usual = planned(given)
    batches = [given.x, batch(given.generator), batch(given.generator)]
    for k, weights in enumerate(walk(given, 3 * (TRIALS + 1))):
        inputs = batches[k % len(batches)]
        tape, plain = reader.record(weights, inputs), usual.record(weights, inputs)
        agree(tape.outputs, plain.outputs, ROUNDING)
        same(reader.tangent(tape), usual.secant(plain, plain).features)


@pytest.mark.slow
def test_what_is_known_of_routings_is_bounded() -> None:
    """More batches than are remembered, each with an order of its own."""
    given = routed("sorted rows")
    reader, _ = planned(given)
    plan = reader.plan
    assert plan is not None
    for _ in range(LATEST + 3):
        reader.tangent(reader.record(given.start, batch(given.generator)))
    sizes = [len(found.kept) for found in (reader.found.owners, reader.found.faithful, plan.features, plan.once)]
    assert max(sizes) <= LATEST
    assert len(reader.found.routes.kept) == len(plan.tapes.kept) == 1


@pytest.mark.parametrize("name", ["encoder, norm before", "ragged", "sorted rows", "last position"])
def test_a_run_and_the_rest_of_one_have_the_same_bits(name: str) -> None:
    """A resumed run starts with a plan of its own."""
    given = routed(name) if name in ROUTED else problem(name)
    path = walk(given, 5)

    def last(weights: list[Weights]) -> list[Tensor]:
        reader, _ = planned(given)
        tapes = [reader.record(each, given.x) for each in weights]
        read = [reader.along(*pair) for pair in pairwise(tapes)]
        return parts(read[-1])

    for whole, rest in zip(last(path), last(path[-2:]), strict=True):
        assert torch.equal(whole, rest)
