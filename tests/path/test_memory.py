"""Peak memory stays under `memory_gb`, whatever the size of the run: measured on whole commands."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as some
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ntkexp.capacity import MemoryBudget, require_disk
from ntkexp.mistake import Mistake, NoPlace
from ntkexp.on_disk import ROW_BLOCK_BYTES, blocks, release_pages, summed, zeros_on_disk
from ntkexp.path.budget import RunMemory
from ntkexp.run.loop import train_steps
from ntkexp.run.setting import setting_of, survey
from ntkexp.run.state import begin
from tests.run.small import Memory, small

MEASURED = """
import sys
from pathlib import Path
from ntkexp.cli.main import run
status = run(sys.argv[1:])
told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
sys.stderr.write(told["VmHWM"].split()[0])  # ru_maxrss would count what the tests held when they forked
raise SystemExit(status)
"""
WIDE = ("data=teacher", "data.train=96", "data.query=96", "data.test=64", "model.width=2048")
SEVERAL = ("data=digits", "data.classes=all", "data.train=48", "data.query=24", "data.test=24", "model.width=1536")


def peak(out: Path, *overrides: str) -> float:
    """Gigabytes that a run of one step used at most."""
    shared = ("steps=1", "threads=2", "path.count=2", "path.error_samples=1", "--quiet", f"--out={out}")
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED, "train", *shared, *overrides],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return int(ended.stderr.splitlines()[-1]) * 1024 / 1e9


POINTS = ("data=teacher", "data.train=320", "data.query=640", "data.test=640")
CLASSES = ("data.classes=all", "data.train=64", "data.query=16", "data.test=16", "model.width=1024")
SUMS = ("data=modular_addition", "data.encoding=one_hot", "data.modulus=41", "data.train=800", "data.query=800")
ON_DISK = ("data.test=0", "model.width=64", "path.kernels=none", "path.queries=[query]", "path.rule=[secant]")
MEASURED_RUNS = {
    "gradients of 256 points by 4 million weights, 8 GB": (1.5, WIDE),
    "many substeps": (1.2, (*POINTS, "path.substeps=32", "path.rule=[secant]")),
    "gradients of 96 points by 10 outputs and 2.5 million weights, 19 GB": (2.0, SEVERAL),
    "brackets of 10 outputs by 2 rules over 1.1 million weights, 180 MB for each point": (
        2.0,
        (*CLASSES, "optimizer=adam", "path.attributed=12"),
    ),
    "52 million contributions and their errors, copied several times in memory, on disk with a checkpoint": (
        1.0,
        (*SUMS, *ON_DISK, "checkpoint_seconds=0", "threads=1"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("gigabytes", "words"), MEASURED_RUNS.values(), ids=MEASURED_RUNS)
def test_a_run_takes_no_more_than_its_memory(gigabytes: float, words: tuple[str, ...], tmp_path: Path) -> None:
    assert peak(tmp_path, *words, f"memory_gb={gigabytes}") < gigabytes


# Arrays on disk, of contributions that do not fit into the memory. tests/run/test_resumed.py has runs with them.


def resident() -> int:
    """Return the bytes of files that are in this process's memory now."""
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(told["RssFile"].split()[0]) * 1024


def test_an_array_on_disk_takes_the_memory_of_a_block_and_loses_nothing(tmp_path: Path) -> None:
    numbers, before, most = zeros_on_disk(tmp_path, (50, 2, 100_000), torch.float64), resident(), 0
    numbers[:] = torch.arange(50.0)[:, None, None]
    assert resident() - before >= numbers.nbytes
    release_pages(numbers[3:5])
    assert resident() - before < numbers.nbytes / 4
    for block in blocks(numbers):
        block.add_(1)
        most = max(most, resident() - before)
    assert most < 2 * ROW_BLOCK_BYTES
    expected = 100_000 * torch.arange(1, 51, dtype=torch.float64)
    assert torch.equal(summed(numbers), expected[:, None].expand(50, 2))
    assert resident() - before < 2 * ROW_BLOCK_BYTES


def test_a_disk_that_is_too_small_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoPlace, match=r"contributions take 9\.2e\+09 GB of disk and .* GB free; lower data.train, or"):
        require_disk(tmp_path, 2**63, "contributions", "lower data.train")


# The memory of a run: estimated from sizes alone, spent on blocks, refused in one line when it is too little.


COUNTS: dict[str, Any] = {
    "parameters": 300_000,
    "points": 500,
    "summed_points": 500,
    "train": 128,
    "outputs": 1,
    "integrated": 1,
    "rules": 2,
}
COUNTS |= {"tapes": 3, "number_bytes": 8, "steps": 1000}
BASE = RunMemory(**COUNTS, budget=MemoryBudget.of_gb(4), tangents=3, path_kernels=2, errors=1, tape_bytes=2e4)


@pytest.mark.parametrize("size", [*COUNTS, "tape_bytes"])
@given(times=some.integers(1, 8))
def test_a_larger_run_needs_no_less(size: str, times: int) -> None:
    larger = replace(BASE, budget=MemoryBudget.of_gb(1e6), **{size: getattr(BASE, size) * times})
    assert larger.fixed >= BASE.fixed
    assert larger.per_point >= BASE.per_point


@given(some.floats(2, 100), some.floats(1, 10))
def test_more_memory_reads_no_fewer_points_and_keeps_no_fewer_tapes(memory: float, times: float) -> None:
    large = replace(BASE, points=10**6, train=8, budget=MemoryBudget.of_gb(memory))
    more = replace(large, budget=MemoryBudget.of_gb(memory * times))
    assert large.block <= more.block
    whole = replace(BASE, budget=MemoryBudget.of_gb(memory))
    assert replace(whole, budget=MemoryBudget.of_gb(memory * times)).keeps_tapes >= whole.keeps_tapes


@given(some.floats(2, 100))
def test_what_is_planned_fits(memory: float) -> None:
    plan = replace(BASE, points=10**5, train=100, budget=MemoryBudget.of_gb(memory))
    kept = 2 * plan.points * plan.tape_bytes if plan.keeps_tapes else 0.0
    assert plan.fixed + plan.block * plan.per_point + kept == plan.peak <= memory * 1e9


def test_too_little_memory_is_a_mistake_that_says_how_much_is_needed() -> None:
    with pytest.raises(
        Mistake, match=r"memory_gb=0\.1 is less than the 0\.\d+ GB of this run of .*; raise it, or lower"
    ):
        survey(small("memory_gb=0.1"))


def test_the_backward_sum_leaves_memory_for_the_tapes_of_a_step() -> None:
    """There are two for each training example. Products of an adjoint with all examples take as much again."""
    large = replace(BASE, tape_bytes=1e7)
    tapes, products = 2 * large.train * large.tape_bytes, (1 + large.doubled) * 2 * large.train * large.tape_bytes
    with pytest.raises(Mistake, match="memory_gb"):
        replace(large, budget=MemoryBudget.of_gb((large.fixed + tapes + products) / 1e9)).chunk(1)
    assert replace(large, budget=MemoryBudget.of_gb((large.fixed + 2 * tapes + products) / 1e9)).chunk(1) == 1


def test_what_it_says_is_needed_is_enough() -> None:
    needed = (BASE.fixed + 2 * BASE.per_point) / 1e9
    assert replace(BASE, budget=MemoryBudget.of_gb(needed * (1 + 1e-9))).block >= 1
    with pytest.raises(Mistake, match="memory_gb"):
        _ = replace(BASE, budget=MemoryBudget.of_gb(needed * (1 - 1e-9))).block


TRAIN = 24  # of a small run
THREE_CLASSES, TWO_PHASES = "data.classes=[1,3,8]", ("data=sequence", "data.phases=[[0,1,2],[3,4,5]]")


HELD = (
    (THREE_CLASSES, "path.outputs=[0,2]"),
    TWO_PHASES,
    (THREE_CLASSES, "path.kernels=none", "path.error_samples=2", "path.queries=[query]", "path.rule=[secant]"),
    (THREE_CLASSES, "path.kernels=trace", "path.schedule=adaptive"),
)
HELD_TOO = (
    (),
    (THREE_CLASSES, "dtype=float32", "path.error_samples=2"),
    (THREE_CLASSES, "path.every=snapshots"),
    ("optimizer=flow", "path.rule=[gauss]"),
    ("path.kernels=none",),
    ("path.kernels=none", "dtype=float32", *TWO_PHASES),
    ("path.kernels=trace", *TWO_PHASES),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "chosen", [*HELD, *(pytest.param(each, marks=pytest.mark.slow) for each in HELD_TOO)], ids=" ".join
)
def test_what_is_counted_is_what_is_held(chosen: tuple[str, ...]) -> None:
    """All that a checkpoint holds of training examples, with tangent kernels as often as there are some at once."""
    experiment, listener = small("steps=2", *chosen), Memory()
    found = survey(experiment)
    setting = setting_of(found)
    state = begin(setting, listener.trajectory)
    train_steps(state, listener)
    summed = [leaf for leaf in tree_leaves(state.accumulator.state) if isinstance(leaf, Tensor) and is_of_all(leaf)]
    assert summed
    held = sum(leaf.nbytes for leaf in summed) + found.memory.tangents * setting.start.kernel.nbytes
    assert held == found.memory.sums


def is_of_all(numbers: Tensor) -> bool:
    """Return whether there is a number for each point and training example."""
    return tuple(numbers.shape[2:3]) == (TRAIN,)
