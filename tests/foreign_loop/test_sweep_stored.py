"""A sweep back over a followed loop that was killed goes on where it was kept, to the same bytes."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ntkexp.effects.sweep import AdjointSweep, Effects, MeanName
from ntkexp.foreign_loop import effects as followed_effects
from ntkexp.foreign_loop.effects import loop_effects
from ntkexp.foreign_loop.trace import Trace
from tests.foreign_loop import loops
from tests.foreign_loop.loops import followed, loop
from tests.foreign_loop.test_effects import loss_of

CHUNKS = 6e-5  # GB: enough for one query at a time


def trained(to: Path) -> Trace:
    """A loop on disk, which clips and remembers."""
    given = loop(loops.adam)
    return followed(given, loops.scheduled_and_clipped, loss=loss_of(given), to=to, every=3)


TAKE = AdjointSweep.take


def content(folder: Path) -> str:
    """What was written of the contributions and effects."""
    files = sorted(path for path in (folder / "contributions.zarr").rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def effects(trace: Trace, kind: Effects = True, mean: MeanName = "renormalised", memory_gb: float = 4.0) -> Tensor:
    """The effects, which nobody writes down."""
    return loop_effects(trace, kind, mean, memory_gb, None).values


def stop_once(trace: Trace, monkeypatch: pytest.MonkeyPatch, after: int, memory_gb: float = 4.0) -> list[int]:
    """End a sweep after so many steps back; the steps that later ones will take are counted."""
    monkeypatch.setattr(followed_effects, "SECONDS", 0.0)
    taken: list[int] = []

    def take(sweep: AdjointSweep, index: int) -> None:
        if len(taken) == after:
            raise KeyboardInterrupt
        taken.append(index)
        TAKE(sweep, index)

    monkeypatch.setattr(AdjointSweep, "take", take)
    with pytest.raises(KeyboardInterrupt):
        effects(trace, memory_gb=memory_gb)
    return counted(monkeypatch)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that will be taken back."""
    taken: list[int] = []

    def take(sweep: AdjointSweep, index: int) -> None:
        taken.append(index)
        TAKE(sweep, index)

    monkeypatch.setattr(AdjointSweep, "take", take)
    return taken


@pytest.mark.parametrize(("memory_gb", "after"), [(4.0, 5), pytest.param(CHUNKS, 12, marks=pytest.mark.slow)])
def test_a_sweep_that_was_stopped_goes_on(
    memory_gb: float, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trained(tmp_path / "run")
    taken = stop_once(trace, monkeypatch, after, memory_gb)
    found = effects(trace, memory_gb=memory_gb)
    assert len(taken) == (8 if memory_gb == 4.0 else 24) - after  # nothing was taken twice
    assert torch.equal(found, effects(trained(tmp_path / "other"), memory_gb=memory_gb))


@pytest.mark.parametrize(("kind", "mean"), [(True, "fixed"), ("derivative", "renormalised")])
def test_a_sweep_of_something_else_is_begun_anew(
    kind: Effects, mean: MeanName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trained(tmp_path / "run")
    taken = stop_once(trace, monkeypatch, 5)
    effects(trace, kind, mean)
    assert taken == [7, 6, 5, 4, 3, 2, 1, 0]


KILLED = """
import os, signal, sys
from pathlib import Path
from ntkexp.effects.sweep import Effects, MeanName
from ntkexp.effects.sweep import AdjointSweep
from ntkexp.foreign_loop import effects as followed_effects
from tests.foreign_loop.test_sweep_stored import TAKE, trained

def take(sweep, index):
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    TAKE(sweep, index)

followed_effects.SECONDS = 0.0
AdjointSweep.take = take
trained(Path(sys.argv[1])).attribute(effects=True)
"""


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], check=False, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    taken = counted(monkeypatch)
    trained(tmp_path / "run").attribute(effects=True)
    assert taken == [2, 1, 0]
    assert not (tmp_path / "run" / "trace" / "sweep.bin").exists()
    trained(tmp_path / "other").attribute(effects=True)
    assert content(tmp_path / "run") == content(tmp_path / "other")
