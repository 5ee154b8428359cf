"""Processes that compute tiles, here and as jobs: killed, interrupted, resumed, to the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ntkexp.records.kernel_file import open_matrix
from tests.kernel_file.slurm import install
from tests.kernel_file.test_fill import contents
from tests.sweep.commands import Ended, children, ended, running, workers

pytestmark = pytest.mark.slow

SOME = ("data.train=250", "data.query=40", "data.test=0")
TANGENT = ("tangent", *SOME, "model.width=512", "model.depth=3")
LIMIT = ("limit", *SOME, "model.depth=2")


def begun(path: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """`ntkexp kernel …`, running."""
    return running("kernel", *words, f"--out={path}", **environment)


def filled(path: Path, *words: str, **environment: str) -> Ended:
    return ended(begun(path, *words, **environment))


def until_marked(process: subprocess.Popen[str], path: Path, tiles: int) -> None:
    """Wait until `tiles` tiles are written."""
    while process.poll() is None and not (path.is_dir() and written(path) >= tiles):
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def written(path: Path) -> int:
    """How many tiles are marked."""
    matrix = open_matrix(path)
    tiles = matrix.layout.tiling.todo
    return len(tiles) - len(matrix.unmarked(tiles))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tangent kernel by one process."""
    path = tmp_path_factory.mktemp("alone") / "k.zarr"
    assert filled(path, *TANGENT, "--workers=1").status == 0
    return contents(path)


@pytest.mark.parametrize(("engine", "said"), [("local", "its process was killed"), ("slurm:cluster=local", "job ")])
def test_a_killed_worker_or_job_costs_a_tile(engine: str, said: str, tmp_path: Path, alone: dict[str, bytes]) -> None:
    path = tmp_path / "k.zarr"
    process = begun(path, *TANGENT, f"--engine={engine}", "--workers=2")
    until_marked(process, path, 2)
    worker = (workers if engine == "local" else children)(process.pid)[0]
    for pid in (*children(worker), worker):
        os.kill(pid, signal.SIGKILL)
    found = ended(process)
    assert found.status == 0, found
    assert f"k.zarr: a worker is lost: {said}" in found.err
    assert contents(path) == alone


def test_an_interrupt_ends_the_workers_and_the_same_command_goes_on(tmp_path: Path, alone: dict[str, bytes]) -> None:
    path = tmp_path / "k.zarr"
    process = begun(path, *TANGENT, "--workers=2")
    until_marked(process, path, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    found = ended(process)
    assert found.status == 130
    assert found.err.splitlines()[-1] == f"ntkexp: interrupted; the same command continues with {path}"
    assert "Traceback" not in found.err
    again = filled(path, *TANGENT, "--workers=1")
    assert again.status == 0, again
    assert "of them done" in again.err
    assert contents(path) == alone


def test_jobs_write_the_same_bytes(tmp_path: Path) -> None:
    slurm = install(tmp_path / "bin")
    assert filled(tmp_path / "here.zarr", *LIMIT).status == 0
    engine = ("--engine=slurm:partition=short,cpus=2", "--workers=2", "--quiet")
    found = filled(tmp_path / "jobs.zarr", *LIMIT, *engine, PATH=f"{slurm}{os.pathsep}{os.environ['PATH']}")
    assert (found.status, found.out, found.err) == (0, "", "")
    assert contents(tmp_path / "jobs.zarr") == contents(tmp_path / "here.zarr")
    scripts = [script.read_text() for script in (slurm / "jobs").iterdir()]
    assert len(scripts) == 2
    assert all("#SBATCH --partition=short\n" in script for script in scripts)
    assert all(f"{tmp_path}/slurm" in script for script in scripts)
