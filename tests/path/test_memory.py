"""Peak memory stays under `memory_gb`, whatever the size of the run: measured on whole commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURED = """
import sys
from pathlib import Path
from ntkexp.cli.main import run
status = run(sys.argv[1:])
told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
sys.stderr.write(told["VmHWM"].split()[0])  # ru_maxrss would count what the tests held when they forked
raise SystemExit(status)
"""
WIDE = ("data=teacher", "data.train=256", "data.probe=256", "data.test=128", "model.width=4096")
SEVERAL = ("data=digits", "data.classes=all", "data.train=192", "data.probe=128", "data.test=128", "model.width=1536")


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


@pytest.mark.slow
def test_a_wide_network(tmp_path: Path) -> None:
    """The gradients of 640 points by 17 million weights would fill 86 GB."""
    assert peak(tmp_path, *WIDE, "memory_gb=3") < 3.0


@pytest.mark.slow
def test_many_pieces(tmp_path: Path) -> None:
    cut = ("data=teacher", "data.train=320", "data.probe=640", "data.test=640", "path.pieces=32", "path.rule=[secant]")
    assert peak(tmp_path, *cut, "memory_gb=1.2") < 1.2


@pytest.mark.slow
def test_several_outputs(tmp_path: Path) -> None:
    """The gradients of 448 points by 10 outputs and 2.5 million weights would fill 88 GB."""
    assert peak(tmp_path, *SEVERAL, "memory_gb=2") < 2.0


@pytest.mark.slow
def test_brackets_of_several_outputs_in_chunks(tmp_path: Path) -> None:
    """Each of twelve points has brackets of 10 outputs by 2 rules over 1.1 million weights: 180 MB."""
    chosen = ("data.classes=all", "data.train=64", "data.probe=16", "data.test=16", "model.width=1024")
    adam = ("optimizer=adam", "path.attributed=12")
    assert peak(tmp_path, *chosen, *adam, "memory_gb=2") < 2.0


@pytest.mark.slow
def test_contributions_that_are_larger_than_the_memory(tmp_path: Path) -> None:
    """Ten times as many as `test_several_outputs` has: 26 million, and as many for their error, are 0.4 GB beside a
    program of 0.7. In memory they would be copied several times; here they lie on disk, a checkpoint among them.
    """
    sums = ("data=modular_addition", "data.encoding=one_hot", "data.modulus=41", "data.train=800", "data.probe=800")
    chosen = ("data.test=0", "model.width=64", "path.kernels=none", "path.probes=[probe]", "path.rule=[secant]")
    assert peak(tmp_path, *sums, *chosen, "memory_gb=1", "checkpoint_seconds=0", "threads=1") < 1.0
