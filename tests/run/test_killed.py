"""Killed without warning at any moment, a command is finished by the same command, to the same bytes.

`tests.torture` draws the moments and the damages; sums on disk and claims have tests of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import nn

from ntkexp.path.budget import RunMemory
from ntkexp.records.claim import TIMINGS
from ntkexp.run.folder_listener import state_dicts
from tests.claim.subject import CLAIM
from tests.docs.readme import ROOT
from tests.run.commands import TINY, obey, only_run, promised, started
from tests.sweep import commands as sweeps
from tests.torture.kind.kills import no_pictures


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cases"), [("kills", 8), ("damages", 12), ("kernel_files", 6), ("journals", 6)])
def test_any_kill_and_any_damage(kind: str, cases: int) -> None:
    """Runs of every kind, kernels and sweeps end in the bytes of those left alone, or are refused in one line."""
    command = [sys.executable, "-m", "tests.torture", kind, f"--count={cases}", "--seed=2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


SPILLED = (*TINY, "data=sequence", "path.kernels=none", "optimizer=sgd", "optimizer.batch=5", "steps=20")
MOMENTS = (
    ("ntkexp.path.integrals.release_pages", 43),  # a block of a step is added, others are not
    ("ntkexp.run.state.write_rows", 14),  # some sums of a checkpoint are written
    ("ntkexp.run.state.being_sealed", 5),  # every sum, but not the file that names the sums
    ("ntkexp.run.state.drop_sums", 2),  # the sums of the checkpoint before are there as well
)
"""A function that is called at the moment of a kill, and the number of calls before."""


def on_disk(moment: tuple[str, int] | None, arguments: list[str], said: Path) -> None:
    """The command with sums on disk and a checkpoint after every step; killed at a moment."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(RunMemory, "spills", new=True))
        stack.enter_context(mock.patch("ntkexp.run.folder_listener.CHECKPOINT_PAUSE", 0))
        stack.enter_context(mock.patch("ntkexp.run.execute.draw_run", no_pictures))
        if moment is not None:
            stack.enter_context(dying(*moment))
        obey(arguments, said)


@contextmanager
def dying(name: str, before: int) -> Iterator[None]:
    """Kill this process at a call of a function, after some other calls."""
    module, _, attribute = name.rpartition(".")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    calls = count()

    def called(*given: Any) -> Any:
        if next(calls) == before:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given)

    with mock.patch(name, called):
        yield


def exit_code(out: Path, moment: tuple[str, int] | None) -> int | None:
    """How the command ended."""
    process = started(SPILLED, out, out.with_suffix(".txt"), partial(on_disk, moment))
    process.join()
    return process.exitcode


@pytest.mark.slow
def test_sums_on_disk_survive_a_kill_at_any_moment(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert exit_code(whole, None) == 0
    done = [0]
    for moment in MOMENTS:
        assert exit_code(killed, moment) == -signal.SIGKILL, moment
        saved = torch.load(only_run(killed) / "checkpoint.pt")
        done.append(len(saved["run"]["step_sizes"]))
        assert done[-1] > done[-2], moment  # it went on, and did not begin again
    assert exit_code(killed, None) == 0
    assert promised(only_run(killed)) == promised(only_run(whole))
    assert not list(only_run(killed).glob("*sums-*"))


def test_files_do_not_tell_whether_names_came_from_a_checkpoint() -> None:
    """A run that was killed after its last step goes on with nothing to do."""
    start, end = {"layer.weight": torch.ones(2)}, {"layer.weight": torch.zeros(2)}
    read = {"".join(list(name)): weight for name, weight in end.items()}
    assert next(iter(read)) is not next(iter(start))
    one, two = BytesIO(), BytesIO()
    torch.save(state_dicts(nn.Module(), start, dict(zip(start, end.values(), strict=True))), one)
    torch.save(state_dicts(nn.Module(), start, read), two)
    assert one.getvalue() == two.getvalue()


def claims(folder: Path, out: Path) -> subprocess.Popen[str]:
    """The claim in a user's file, begun."""
    return sweeps.running("claims", "mine", "--quick", "--json", f"--config-dir={folder}", f"--out={out}")


def kept(out: Path) -> dict[str, bytes]:
    """Everything in the folders of the claims but their times, and the command with its place."""
    files = [file for file in sorted((out / "claims").glob("mine-*/*")) if file.name not in {TIMINGS, "verdict.json"}]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def told(text: str, out: Path) -> list[dict[str, str]]:
    """The answer, without its place and its times."""
    answer: list[dict[str, str]] = json.loads(text)
    return [one | {"command": one["command"].replace(str(out), "out"), "cpu_minutes": ""} for one in answer]


@pytest.mark.slow
def test_killed_claims_end_with_the_same_verdicts(tmp_path: Path) -> None:
    """The command, its server and all workers are killed, in any order."""
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "mine.yaml").write_text(yaml.safe_dump(CLAIM))
    undisturbed, out, luck = tmp_path / "undisturbed", tmp_path / "killed", Random(0)
    expected = sweeps.ended(claims(tmp_path, undisturbed))
    assert expected.status == 0, expected.err
    process = claims(tmp_path, out)
    while process.poll() is None and not list(out.glob("claims/runs/*")):
        time.sleep(0.02)
    time.sleep(luck.uniform(0, 2))
    family = [process.pid, *sweeps.children(process.pid), *sweeps.workers(process.pid)]
    for pid in luck.sample(family, len(family)):
        sweeps.strike(pid)
    process.communicate()
    found = sweeps.ended(claims(tmp_path, out))
    assert told(found.out, out) == told(expected.out, undisturbed)
    assert kept(out) == kept(undisturbed)
    assert len(list((out / "claims" / "runs").iterdir())) == 12
