"""No command runs a Python file of the working folder unless it is trusted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.readme import ROOT
from tests.kernel_file.slurm import install
from tests.run.commands import TINY

NAMES = (
    *("struct", "queue", "selectors", "socket", "pickle", "signal", "threading", "json", "typing", "tempfile"),
    *("torch", "numpy", "zarr", "pandas", "matplotlib", "hydra", "ntkexp", "sitecustomize", "bottleneck", "tqdm"),
)
"""Modules of Python and of packages, and optional modules that libraries try to import."""

POISON = "import os\nopen(os.environ['POISONED'], 'a').write(__name__ + chr(10))\n"

KERNEL = ("data.train=12", "data.query=6", "data.test=0", "model.width=8")

COMMANDS = (
    ("config",),
    ("sweep", "seed=3..4", "--workers=2", *TINY),
    ("train", "seed=2", "--tensorboard", *TINY),
    ("claims", "linear", "--quick", "--workers=2", "--config-dir=mine"),
    ("claims", "list"),
    ("resume", "run"),
    ("report",),
    ("explain", "run", "--query=1"),
    ("explain", "run", "--query=1", "--without=1"),
    ("explain", "run", "--page"),
    ("validate", "run", "--trainings=3", "--workers=2", "--top=0", "--leave-out=2"),
    ("compare", "run", "run"),
    ("runs",),
    ("kernel", "limit", *KERNEL, "--workers=2", "--out=limit.zarr"),
    ("kernel", "tangent", *KERNEL, "--workers=2", "--out=tangent.zarr"),
    ("kernel", "predict", "theta.zarr"),
    ("kernel", "ensemble", "--networks=2"),
)
REFUSED = (  # these runs are too small
    ("claims", "publish", "published"),
    ("claims", "check", "published"),
    ("attribute", "run"),
)
ONE_AFTER_ANOTHER = """
import json, sys
from ntkexp.__main__ import main

if __name__ == "__main__":
    for status, words in json.loads(sys.argv[1]):
        sys.argv[1:] = words
        try:
            main()
        except SystemExit as end:
            assert end.code == status, words
"""
SWEEP = ("sweep", "seed=0..1", *TINY)


class Place(NamedTuple):
    """A working folder with such files, and the file that lists the executed ones."""

    folder: Path
    ran: Path
    start: tuple[str, ...]

    def call(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `ntkexp …` in the folder."""
        around = os.environ | {"POISONED": str(self.ran), "OMP_NUM_THREADS": "1"} | environment
        return subprocess.run(
            [*self.start, *words],
            cwd=self.folder,
            env=around,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,  # if a job cannot start, its command waits
        )

    @property
    def names(self) -> list[str]:
        return sorted(set(self.ran.read_text().split())) if self.ran.is_file() else []


def poisoned(folder: Path) -> Path:
    """Write a file for each name, and a plugin for Hydra."""
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(POISON)
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "plugin.py").write_text(POISON)
    return folder


def prepared(at: Path) -> Place:
    """Return a poisoned folder, and a script like the installed one, whose folder comes first in `sys.path`."""
    script = at / "bin" / "ntkexp"
    script.parent.mkdir()
    script.write_text("from ntkexp.__main__ import main\n\nif __name__ == '__main__':\n    main()\n")
    return Place(poisoned(at / "work"), at / "ran", (sys.executable, str(script)))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return prepared(tmp_path)


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A poisoned folder with a finished run and a kernel."""
    place = prepared(tmp_path_factory.mktemp("furnished"))
    made = place.call("train", *TINY)
    assert made.returncode == 0, made
    (run,) = (place.folder / "outputs" / "runs").iterdir()
    (place.folder / "run").symlink_to(run)
    claim = place.folder / "mine" / "claim"  # with a register
    claim.mkdir(parents=True)
    shutil.copy(ROOT / "configs" / "claim" / "linear.yaml", claim)
    made = place.call("kernel", "limit", *KERNEL, "--workers=1", "--out=theta.zarr")
    assert made.returncode == 0, made
    return place


PROGRAM = """
from job import Nothing
from ntkexp.engine.base import Ended, Task, choose, run_jobs

if __name__ == "__main__":
    ends = list(run_jobs(choose("local", 1), iter([Task("one", Nothing(), ".")])))
    assert ends[-1] == Ended("one", "done"), ends
"""
JOB = """
from dataclasses import dataclass
from ntkexp.engine.base import AbstractJob

@dataclass(frozen=True)
class Nothing(AbstractJob):
    def carry_out(self, name, threads, tell):
        return "done"
"""


def test_workers_of_a_program_run_nothing_of_the_working_folder(place: Place) -> None:
    """A program of the user calls an engine."""
    script = Path(place.start[-1])
    script.write_text(PROGRAM)
    (script.parent / "job.py").write_text(JOB)
    ended = place.call()
    assert (ended.returncode, place.names) == (0, []), ended


@pytest.mark.slow
def test_nor_does_the_package_by_its_name(place: Place) -> None:
    (place.folder / "ntkexp.py").unlink()  # `-m ntkexp` would find it
    place = place._replace(start=(sys.executable, "-m", "ntkexp"))
    ended = place.call("config", PYTHONPATH=str(ROOT))
    assert (ended.returncode, place.names) == (0, []), ended


OPTIONAL = ("cupy", "lz4", "snappy", "gmpy2", "zstandard", "backports", "isal", "pcodec", "flint", "opt_einsum")
"""Optional modules that libraries try to import."""

NET = """
import helper
from torch import nn

def build(outputs):
    from inner import late
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""


def trusting(place: Place) -> tuple[str, ...]:
    """Write a trusted file and other ones. Return words that train with the trusted file."""
    for name in OPTIONAL:
        (place.folder / f"{name}.py").write_text(f"{POISON}raise ImportError\n")
    (place.folder / "net.py").write_text(NET)
    (place.folder / "helper.py").write_text("import inner\n")
    (place.folder / "inner").mkdir()
    (place.folder / "inner" / "__init__.py").write_text("")
    (place.folder / "inner" / "late.py").write_text("")
    return ("model=module", "model.path=net.py:build", "--trust=net.py", *TINY)


def test_a_trusted_file_lets_in_only_what_it_imports(place: Place) -> None:
    ended = place.call("config", *trusting(place))
    assert (ended.returncode, place.names) == (0, []), ended


@pytest.mark.slow
def test_nor_does_a_sweep_with_it(place: Place) -> None:
    ended = place.call("sweep", "seed=1..2", "--workers=2", *trusting(place))
    assert (ended.returncode, place.names) == (0, []), ended


@pytest.mark.slow
def test_nor_does_any_other_command(furnished: Place) -> None:
    """Run all commands in one process, because starting a process takes longer than most commands."""
    Path(furnished.start[-1]).write_text(ONE_AFTER_ANOTHER)
    commands = [*((0, words) for words in COMMANDS), *((2, words) for words in REFUSED)]
    ended = furnished.call(json.dumps(commands))
    assert (ended.returncode, furnished.names) == (0, []), ended


@pytest.mark.slow
def test_nor_do_jobs_of_a_queue(place: Place) -> None:
    queue = install(place.folder.parent / "queue")
    ended = place.call(
        *SWEEP, "--engine=slurm:cluster=slurm,memory_gb=2", PATH=f"{queue}{os.pathsep}{os.environ['PATH']}"
    )
    assert (ended.returncode, place.names) == (0, []), ended


@pytest.mark.slow
def test_nor_does_a_cluster_of_dask(place: Place) -> None:
    """The user starts its scheduler and worker. Jobs run in processes of ntkexp."""
    address = place.folder.parent / "scheduler.json"
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "dask", *words],
            cwd=place.folder,
            env=os.environ | {"POISONED": str(place.ran)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for words in (
            ("scheduler", "--port=0", "--dashboard-address=:0", f"--scheduler-file={address}"),
            ("worker", f"--scheduler-file={address}", "--nthreads=1", "--no-dashboard", "--no-nanny"),
        )
    ]
    try:
        while not address.is_file():
            time.sleep(0.1)
        ended = place.call(*SWEEP, f"--engine=dask:{address},timeout=30")
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert (ended.returncode, place.names) == (0, []), ended
