"""Processes that train together, as they do it: what they leave is one trace, or says what was wrong."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from tests.foreign_loop import processes
from tests.foreign_loop.processes import WORLD, network

pytestmark = pytest.mark.slow
EXACT = 1e-12  # relative to the change that training made


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes leave."""
    folder = tmp_path_factory.mktemp("played")
    spawn(processes.play, (folder,), nprocs=WORLD)  # type: ignore[no-untyped-call]  # torch's own
    return folder


def trace_of(folder: Path) -> Trace:
    """As another process finds it; no page is made."""
    return replace(load_trace(find_trace(folder), network()), folder=None)


@pytest.mark.parametrize("name", ["accumulated", "plain"])
def test_parts_add_up_to_what_all_of_them_did(name: str, played: Path) -> None:
    found, change = trace_of(played / name).attribute(), torch.load(played / f"{name}.pt").numpy()
    assert abs(found["contribution"].sum("example") + found["decay"] - change).max() <= EXACT * abs(change).max()
    assert found.sizes["step"] == 6
    assert found.sizes["example"] == processes.EXAMPLES
    if name == "plain":
        assert found["gradient_factor"].to_numpy() == pytest.approx(1 / WORLD, rel=1e-10)  # rounding of sums


def test_a_process_that_joins_early_is_refused(played: Path) -> None:
    with pytest.raises(Mistake, match=r"step 4: rank 1 took no part in it, .* without join\(\)"):
        trace_of(played / "joined").attribute()


def test_gradients_that_were_compressed_are_refused(played: Path) -> None:
    with pytest.raises(Mistake, match=r"step 0: the gradient that was consumed is not that of the 14 examples seen"):
        trace_of(played / "compressed").attribute()


@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [
        ("absent", 0, "rank 1 of 2 does not follow into"),
        ("cut_apart", 1, r"the model is a FSDPSequential, whose weights are cut apart .*\(FSDP\)"),
        ("cut_memory", 1, "ZeroRedundancyOptimizer cuts its memory apart"),
    ],
)
def test_and_others_are_refused_in_the_loop(name: str, rank: int, said: str, played: Path) -> None:
    with pytest.raises(Mistake, match=said):
        raise Mistake((played / f"{name}-{rank}.txt").read_text(encoding="utf-8"))


def test_a_killed_process_leaves_the_steps_that_all_have_written(tmp_path: Path) -> None:
    context = spawn(processes.die, (tmp_path,), nprocs=WORLD, join=False)  # type: ignore[no-untyped-call]  # torch's own
    assert context is not None
    for process in context.processes:
        process.join()
    assert context.processes[1].exitcode == -signal.SIGKILL
    found = trace_of(tmp_path / "killed").attribute()
    assert found.sizes["step"] == 4
    missed = found["contribution"].sum("example") + found["decay"] - found["change"]
    assert float(abs(missed).max()) <= EXACT * float(abs(found["change"]).max())
