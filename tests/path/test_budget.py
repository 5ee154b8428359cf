"""The memory of a run: estimated from sizes alone, spent on blocks, refused in one line when it is too little."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ntkexp.mistake import Mistake
from ntkexp.path.budget import Budget
from ntkexp.run.loop import train_steps
from ntkexp.run.setting import setting_of, survey
from ntkexp.run.state import begin
from tests.run.small import Memory, small

BASE = Budget(
    memory_gb=4.0,
    parameters=300_000,
    points=500,
    read=500,
    train=128,
    outputs=1,
    integrated=1,
    rules=2,
    tangents=3,
    path_kernels=2,
    errors=1,
    tapes=3,
    tape_bytes=2e4,
    number_bytes=8,
    steps=1000,
)
SIZES = (
    "parameters",
    "points",
    "read",
    "train",
    "outputs",
    "integrated",
    "rules",
    "tapes",
    "tape_bytes",
    "number_bytes",
    "steps",
)


@pytest.mark.parametrize("size", SIZES)
@given(times=some.integers(1, 8))
def test_a_larger_run_needs_no_less(size: str, times: int) -> None:
    larger = replace(BASE, memory_gb=1e6, **{size: getattr(BASE, size) * times})
    assert larger.fixed >= BASE.fixed
    assert larger.per_point >= BASE.per_point


@given(some.floats(2, 100), some.floats(1, 10))
def test_more_memory_reads_no_fewer_points_and_keeps_no_fewer_tapes(memory: float, times: float) -> None:
    large = replace(BASE, points=10**6, train=8, memory_gb=memory)
    more = replace(large, memory_gb=memory * times)
    assert large.block <= more.block
    whole = replace(BASE, memory_gb=memory)
    assert replace(whole, memory_gb=memory * times).keep >= whole.keep


@given(some.floats(2, 100))
def test_what_is_planned_fits(memory: float) -> None:
    budget = replace(BASE, points=10**5, train=100, memory_gb=memory)
    kept = 2 * budget.points * budget.tape_bytes if budget.keep else 0.0
    assert budget.fixed + budget.block * budget.per_point + kept <= memory * 1e9


def test_too_little_memory_is_a_mistake_that_says_how_much_is_needed() -> None:
    with pytest.raises(Mistake, match=r"memory_gb=0\.1: this run needs at least 0\.\d; raise memory_gb, or lower"):
        survey(small("memory_gb=0.1"))


def test_what_it_says_is_needed_is_enough() -> None:
    needed = (BASE.fixed + 2 * BASE.per_point) / 1e9
    assert replace(BASE, memory_gb=needed * (1 + 1e-9)).block >= 1
    with pytest.raises(Mistake, match="memory_gb"):
        _ = replace(BASE, memory_gb=needed * (1 - 1e-9)).block


TRAIN = 24  # of a small run
CLASSES, SEQUENCE = "data.classes=[1,3,8]", ("data=sequence", "data.phases=[[0,1,2],[3,4,5]]")


HELD = (
    (CLASSES, "path.outputs=[0,2]"),
    SEQUENCE,
    (CLASSES, "path.kernels=none", "path.error_samples=2", "path.probes=[probe]", "path.rule=[secant]"),
    (CLASSES, "path.kernels=trace", "path.schedule=adaptive"),
)
HELD_TOO = (
    (),
    (CLASSES, "dtype=float32", "path.error_samples=2"),
    (CLASSES, "path.every=snapshots"),
    ("optimizer=flow", "path.rule=[gauss]"),
    ("path.kernels=none",),
    ("path.kernels=none", "dtype=float32", *SEQUENCE),
    ("path.kernels=trace", *SEQUENCE),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "chosen", [*HELD, *(pytest.param(each, marks=pytest.mark.slow) for each in HELD_TOO)], ids=" ".join
)
def test_what_is_counted_is_what_is_held(chosen: tuple[str, ...]) -> None:
    """All that a checkpoint holds of training examples, with tangent kernels as often as there are some at once."""
    experiment, listener = small("steps=2", *chosen), Memory()
    found = survey(experiment)
    setting = setting_of(experiment, found)
    state = begin(setting, listener.trajectory)
    train_steps(state, listener)
    summed = [leaf for leaf in tree_leaves(state.accumulator.state) if isinstance(leaf, Tensor) and is_of_all(leaf)]
    assert summed
    held = sum(leaf.nbytes for leaf in summed) + found.budget.tangents * setting.start.kernel.nbytes
    assert held == found.budget.sums


def is_of_all(numbers: Tensor) -> bool:
    """Whether this has a number for each point and training example."""
    return tuple(numbers.shape[2:3]) == (TRAIN,)
