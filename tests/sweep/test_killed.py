"""A sweep that is killed again and again ends as one that nobody disturbed, and does no run twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ntkexp.records.atomic import read_sealed, to_text
from tests.run.commands import promised
from tests.sweep.commands import TINY, begun, children, journal, states, swept, workers

pytestmark = pytest.mark.slow

RUNS = 30
SWEEP = ("model.width=8,12,16", "seed=0..9", *TINY)
KILLS = 20


def kill_tree(process: subprocess.Popen[str], luck: random.Random) -> None:
    """The command, its server and all workers, in any order."""
    family = [process.pid, *children(process.pid), *workers(process.pid)]
    for pid in luck.sample(family, len(family)):
        strike(pid)


def kill_worker(process: subprocess.Popen[str], luck: random.Random) -> None:
    """One worker, if one is at work."""
    if found := workers(process.pid):
        strike(luck.choice(found))


def kill_client(process: subprocess.Popen[str], luck: random.Random) -> None:
    """The command alone."""
    strike(process.pid)


def strike(pid: int) -> None:
    """Kill a process, unless it ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


WAYS: tuple[Callable[[subprocess.Popen[str], random.Random], None], ...] = (kill_tree, kill_worker, kill_client)


def moment(process: subprocess.Popen[str], out: Path, kill: int, luck: random.Random) -> None:
    """Wait: a few seconds, which may fall into the start; or for the kill's share of the work, and a little more."""
    share = 0 if kill % 4 == 0 else RUNS * kill // (KILLS + 2)
    while process.poll() is None and len(journal(out, "done")) < share:
        time.sleep(0.02)
    time.sleep(luck.uniform(0, 8.0 if kill % 4 == 0 else 1.0))


def results(out: Path) -> dict[str, bytes]:
    """The record and the tables of the sweep, wherever its command puts them, and what every run promises."""
    files = [file for file in (out / "sweeps").iterdir() if file.name != "journal.jsonl"]
    texts = {
        file.name: to_text(read_sealed(file, file.name)) if file.suffix == ".json" else file.read_text()
        for file in files
    }
    tables = {name: text.replace(str(out), "out").encode() for name, text in texts.items()}
    runs = {
        f"{run.name}/{name}": content
        for run in sorted((out / "runs").iterdir())
        for name, content in promised(run).items()
    }
    return tables | runs


def test_twenty_kills(tmp_path: Path) -> None:
    assert swept(tmp_path / "undisturbed", *SWEEP).status == 0
    out, luck = tmp_path / "killed", random.Random(0)
    process = begun(out, *SWEEP)
    for kill in range(KILLS):
        moment(process, out, kill, luck)
        WAYS[kill % len(WAYS)](process, luck)
        if process.poll() is None and WAYS[kill % len(WAYS)] is kill_worker:
            continue  # the command goes on without it
        process.communicate()
        process = begun(out, *SWEEP)
    process.communicate()
    assert swept(out, *SWEEP).status == 0
    assert states(out) == ["done"] * RUNS
    assert len(set(journal(out, "done"))) == len(journal(out, "done"))
    assert results(out) == results(tmp_path / "undisturbed")
