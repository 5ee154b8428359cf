"""Killed without warning, at any moment, a kernel file is finished by the same command, to the same bytes."""

from __future__ import annotations

import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.run.commands import FORKS, obey

LIMIT = ("limit", "model.depth=1", "data.train=250", "data.probe=40", "data.test=0")  # most of the time it writes


@dataclass(frozen=True)
class Undisturbed:
    """A file that nobody disturbed, and how long it took."""

    files: dict[str, bytes]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    path = tmp_path_factory.mktemp("undisturbed") / "k.zarr"
    assert not killed(path, None)  # the first child waits for the fork server
    shutil.rmtree(path)
    start = time.monotonic()
    assert not killed(path, None)
    return Undisturbed(contents(path), time.monotonic() - start)


def killed(path: Path, after: float | None, workers: int = 2) -> bool:
    """Start the command and kill it after so many seconds; whether it was still running."""
    said = path.with_name("said.txt")
    process = FORKS.Process(
        target=obey, args=(["kernel", *LIMIT, f"--out={path}", f"--workers={workers}", "--quiet"], said)
    )
    process.start()
    process.join(after)
    process.kill()
    process.join()
    assert process.exitcode in {0, -signal.SIGKILL}, said.read_text("utf-8")
    return process.exitcode != 0


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def hunt(path: Path, undisturbed: Undisturbed, kills: int) -> None:
    """Kill it so many times at moments drawn over its length, starting anew whenever it came to its end."""
    moments = random.Random(kills)
    while kills:
        hit = killed(path, moments.uniform(0, undisturbed.seconds), workers=1 + kills % 2)
        kills -= hit
        if not hit:
            assert contents(path) == undisturbed.files
            shutil.rmtree(path)
    killed(path, None)
    assert contents(path) == undisturbed.files


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path, undisturbed: Undisturbed) -> None:
    hunt(tmp_path / "k.zarr", undisturbed, 20)
