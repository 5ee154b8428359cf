"""Killed without warning, at any moment, a command is finished by the same command, to the same bytes.

Runs, kernel files, sweeps of runs and claims; and Ctrl-C at any moment of a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from ntkexp.path.budget import RunMemory
from ntkexp.records.atomic import read_sealed, to_text
from ntkexp.records.claim import TIMINGS
from ntkexp.report.plots import run_plots
from ntkexp.run.folder_listener import FolderListener, end_weights
from tests.claim.subject import CLAIM
from tests.run.commands import FORKS, TINY, obey, only_run, promised, started
from tests.sweep import commands as sweeps
from tests.torture.kind.kills import no_pictures

TRAIN = ("train", *TINY, "stop_at_loss=0.17")  # somewhere on the way: room for kernels is given back at the end
ADAM = ("optimizer=adam", "optimizer.step_size=0.05")  # walks its path back as well
SNAPSHOTS = ("optimizer=sgd", "optimizer.batch=8", "path.every=snapshots", "path.schedule=adaptive")
LIMIT = ("kernel", "limit", "model.depth=1", "data.train=250", "data.query=40", "data.test=0")  # it writes, mostly
COMMANDS = {"online": TRAIN, "back": (*TRAIN, *ADAM), "snapshots": (*TRAIN, *SNAPSHOTS), "a kernel": LIMIT}
KILLS = {"online": 2, "back": 4, "snapshots": 2, "a kernel": 4}


def hurried(arguments: list[str], said: Path) -> None:
    """The command, drawing one picture in place of all, which take longer than such a run."""
    first = next(iter(run_plots.gallery()))
    with mock.patch.object(run_plots, "gallery", return_value=[first]):
        obey(arguments, said)


def went_to_its_end(name: str, out: Path, after: float | None = None, workers: int = 2) -> bool:
    """Start the command, and kill it after so many seconds if it is still running."""
    said = out.with_suffix(".txt")
    out.mkdir(parents=True, exist_ok=True)
    place = (f"--out={out / 'k.zarr'}", f"--workers={workers}") if name == "a kernel" else (f"--out={out}",)
    process = FORKS.Process(target=hurried, args=([*COMMANDS[name], *place, "--quiet"], said))
    process.start()
    process.join(after)
    process.kill()
    process.join()
    assert process.exitcode in {0, -signal.SIGKILL}, said.read_text("utf-8")
    return process.exitcode == 0


def contents(name: str, out: Path) -> dict[str, bytes]:
    """Every file of a kernel, and of a run those that it promises."""
    if name != "a kernel":
        return promised(only_run(out))
    return {str(file.relative_to(out)): file.read_bytes() for file in (out / "k.zarr").rglob("*") if file.is_file()}


@dataclass(frozen=True)
class Undisturbed:
    """What a command leaves that nobody disturbs, and how long it takes."""

    files: dict[str, bytes]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    """Carries out each command once."""
    process = FORKS.Process(target=int)  # the first child waits until the server has loaded the package
    process.start()
    process.join()

    @cache
    def undisturbed(name: str) -> Undisturbed:
        out, start = tmp_path_factory.mktemp("undisturbed") / "out", time.monotonic()
        assert went_to_its_end(name, out)
        return Undisturbed(contents(name, out), time.monotonic() - start)

    return undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_kills_at_any_moment(tmp_path: Path, name: str, undisturbed_of: Callable[[str], Undisturbed]) -> None:
    """At moments drawn over the length of the command, which begins elsewhere whenever it came to its end."""
    undisturbed, left = undisturbed_of(name), KILLS[name]
    moments, places = random.Random(left), count()
    out = tmp_path / str(next(places))
    while left:
        ended = went_to_its_end(name, out, moments.uniform(0, undisturbed.seconds), workers=1 + left % 2)
        left -= not ended
        if ended:
            assert contents(name, out) == undisturbed.files
            out = tmp_path / str(next(places))
    assert went_to_its_end(name, out)
    assert contents(name, out) == undisturbed.files


SPILLED = (*TINY, "data=sequence", "path.kernels=none", "optimizer=sgd", "optimizer.batch=5", "steps=20")
MOMENTS = (
    ("ntkexp.path.integrals.release_pages", 43),  # a block of a step is added, others are not
    ("ntkexp.run.state.write_rows", 14),  # some sums of a checkpoint are written
    ("ntkexp.run.state.being_sealed", 5),  # all of them, but not what names them
    ("ntkexp.run.state.drop_sums", 2),  # those of the checkpoint before are there as well
)
"""A function that is called at such a moment, and how many calls go before."""


def on_disk(moment: tuple[str, int] | None, arguments: list[str], said: Path) -> None:
    """The command, whose sums lie on disk and are kept after every step; killed at such a moment."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(RunMemory, "spills", new=True))
        stack.enter_context(mock.patch("ntkexp.run.folder_listener.CHECKPOINT_PAUSE", 0))
        if moment is not None:
            stack.enter_context(dying(*moment))
        stack.enter_context(mock.patch("ntkexp.run.execute.draw_run", no_pictures))
        obey(arguments, said)


@contextmanager
def dying(name: str, before: int) -> Iterator[None]:
    """This process is killed at a call of a function after so many others."""
    module, _, attribute = name.rpartition(".")
    told: Callable[..., Any] = getattr(import_module(module), attribute)
    calls = count()

    def called(*about: Any) -> Any:
        if next(calls) == before:
            os.kill(os.getpid(), signal.SIGKILL)
        return told(*about)

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
        assert done[-1] > done[-2], moment  # it went on, and did not begin anew
    assert exit_code(killed, None) == 0
    assert promised(only_run(killed)) == promised(only_run(whole))
    assert not list(only_run(killed).glob("*sums-*"))


def interrupted_in(method: str, call: int, arguments: list[str], said: Path) -> None:
    """The command, to which Ctrl-C is pressed when its listener is told of something for the so manieth time."""
    told: Callable[..., None] = getattr(FolderListener, method)
    calls = count(1)

    def pressed(*about: object) -> None:
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        told(*about)

    with mock.patch.object(FolderListener, method, pressed):
        hurried(arguments, said)


@pytest.mark.slow
@pytest.mark.parametrize(  # each command and each moment once; one that walks back also on its way there
    ("name", "method", "call"),
    [("online", "on_step", 7), ("snapshots", "on_end", 1), ("back", "on_step", 7), ("back", "on_snapshot", 4)],
)
def test_an_interrupt_leaves_a_run_that_goes_on(
    tmp_path: Path, name: str, method: str, call: int, undisturbed_of: Callable[[str], Undisturbed]
) -> None:
    """In the middle, after the last step, and while the run looks back, which keeps no checkpoint."""
    out, words, expected = tmp_path / "out", COMMANDS[name], undisturbed_of(name).files
    settings, said = [*words[1:], "checkpoint_seconds=1000"], tmp_path / "said.txt"
    process = started(settings, out, said, partial(interrupted_in, method, call))
    process.join()
    folder = only_run(out)
    assert (process.exitcode, (folder / "checkpoint.pt").is_file()) == (130, method == "on_step")
    line = said.read_text("utf-8")
    assert line.startswith("ntkexp: interrupted; ")
    assert line.count("\n") == 1
    assert f"ntkexp resume {folder}" in line
    assert went_to_its_end(name, out)
    files = promised(folder)
    assert {file: files[file] for file in files if file != "config.json"} == {
        file: expected[file] for file in files if file != "config.json"
    }  # config.json also holds the circumstances, and the interval of checkpoints is one


def test_files_do_not_tell_whether_names_came_from_a_checkpoint() -> None:
    """As of a run that was killed after its last step: it goes on with nothing to do."""
    start, end = {"layer.weight": torch.ones(2)}, {"layer.weight": torch.zeros(2)}
    read = {"".join(list(name)): weight for name, weight in end.items()}
    assert next(iter(read)) is not next(iter(start))
    one, two = BytesIO(), BytesIO()
    torch.save(end_weights(start, dict(zip(start, end.values(), strict=True))), one)
    torch.save(end_weights(start, read), two)
    assert one.getvalue() == two.getvalue()


RUNS = 6
SWEEP = ("model.width=8,12", "seed=0..2", *sweeps.TINY)


def kill_tree(process: subprocess.Popen[str], luck: random.Random) -> None:
    """The command, its server and all workers, in any order."""
    family = [process.pid, *sweeps.children(process.pid), *sweeps.workers(process.pid)]
    for pid in luck.sample(family, len(family)):
        strike(pid)


def kill_worker(process: subprocess.Popen[str], luck: random.Random) -> None:
    if found := sweeps.workers(process.pid):
        strike(luck.choice(found))


def kill_client(process: subprocess.Popen[str], luck: random.Random) -> None:
    """The command alone."""
    strike(process.pid)


def strike(pid: int) -> None:
    """Kill a process, unless it ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


KILLINGS: tuple[Callable[[subprocess.Popen[str], random.Random], None], ...] = (
    *(kill_tree, kill_client),  # while the command starts, or soon after
    *(kill_worker, kill_client, kill_tree),  # after one run, two and three
)


def moment(process: subprocess.Popen[str], out: Path, kill: int, luck: random.Random) -> None:
    """Wait: a few seconds, which may fall into the start; or until some runs are done, and a little longer."""
    while process.poll() is None and len(sweeps.journal(out, "done")) < kill - 1:
        time.sleep(0.02)
    time.sleep(luck.uniform(0, 5.0 if kill < 2 else 1.0))


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


@pytest.mark.slow
def test_a_sweep_that_is_killed_again_and_again_does_no_run_twice(tmp_path: Path) -> None:
    assert sweeps.swept(tmp_path / "undisturbed", *SWEEP).status == 0
    out, luck = tmp_path / "killed", random.Random(0)
    process = sweeps.begun(out, *SWEEP)
    for kill, strike_at in enumerate(KILLINGS):
        moment(process, out, kill, luck)
        strike_at(process, luck)
        if process.poll() is None and strike_at is kill_worker:
            continue  # the command goes on without it
        process.communicate()
        process = sweeps.begun(out, *SWEEP)
    process.communicate()
    assert sweeps.swept(out, *SWEEP).status == 0
    assert sweeps.states(out) == ["done"] * RUNS
    assert len(set(sweeps.journal(out, "done"))) == len(sweeps.journal(out, "done"))
    assert results(out) == results(tmp_path / "undisturbed")


def claims(folder: Path, out: Path) -> subprocess.Popen[str]:
    """The claim in a file of a user's, begun."""
    return sweeps.running("claims", "mine", "--quick", "--json", f"--config-dir={folder}", f"--out={out}")


def kept(out: Path) -> dict[str, bytes]:
    """Everything in the claims' folders but the time that they took; the command that is kept names its place."""
    files = [file for file in sorted((out / "claims").glob("mine-*/*")) if file.name not in {TIMINGS, "verdict.json"}]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


@pytest.mark.slow
def test_killed_claims_end_with_the_same_verdicts(tmp_path: Path) -> None:
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "mine.yaml").write_text(yaml.safe_dump(CLAIM))
    undisturbed, out, luck = tmp_path / "undisturbed", tmp_path / "killed", random.Random(0)
    expected = sweeps.ended(claims(tmp_path, undisturbed))
    assert expected.status == 0, expected.err
    process = claims(tmp_path, out)
    while process.poll() is None and not list(out.glob("claims/runs/*")):
        time.sleep(0.02)
    time.sleep(luck.uniform(0, 2))
    kill_tree(process, luck)
    process.communicate()
    found = sweeps.ended(claims(tmp_path, out))
    assert [told(one, out) for one in json.loads(found.out)] == [
        told(one, undisturbed) for one in json.loads(expected.out)
    ]
    assert kept(out) == kept(undisturbed)
    assert len(list((out / "claims" / "runs").iterdir())) == 8


def told(claim: dict[str, str], out: Path) -> dict[str, str]:
    """What is told of a claim, wherever it lies, and however long it took."""
    return claim | {"command": claim["command"].replace(str(out), "out"), "cpu_minutes": ""}
