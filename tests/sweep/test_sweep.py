"""Sweeps on this machine: each run once, whatever happens to whom."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from ntkexp.cli.main import run
from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.compose import composer
from ntkexp.records.results import total_seconds
from ntkexp.report.progress import ProgressLines, Quiet
from ntkexp.sweep.definition import define
from ntkexp.sweep.jobs import Conductor
from ntkexp.sweep.plan import JOURNAL, Estimator, EventLog, finished_speed, plan
from tests.kernel_file.subjects import Here
from tests.report.stand_ins import stand_in
from tests.run.commands import promised
from tests.sweep.commands import TINY, begun, children, ended, journal, record, states, swept, until_stepping, workers
from tests.torture.damage import HARMS

THREE = ("model.width=8..10", *TINY)
LONG = ("model.width=8..9", *TINY, "steps=100000", "checkpoint_seconds=1000")


@pytest.mark.slow
def test_a_sweep_runs_what_is_not_finished_and_a_second_call_nothing(tmp_path: Path) -> None:
    run(["train", *TINY, "model.width=9", f"--out={tmp_path}", "--quiet"])
    first = swept(tmp_path, *THREE)
    assert first.status == 0, first.err
    assert "3 runs, 3 done, 2 done just now" in first.out
    assert "1 of them done" in first.err
    runs = record(tmp_path)["runs"]
    assert [run["axes"] for run in runs] == [{"model.width": width} for width in (8, 9, 10)]
    assert sorted(journal(tmp_path, "done")) == sorted(run["folder"] for run in runs if run["axes"]["model.width"] != 9)
    before = (tmp_path / "sweeps" / "journal.jsonl").read_bytes()
    second = swept(tmp_path, *THREE)
    assert (second.status, second.err) == (0, "")
    assert (tmp_path / "sweeps" / "journal.jsonl").read_bytes() == before
    trained = tmp_path / "trained"  # a worker computes what train computes
    run(["train", *TINY, "model.width=8", f"--out={trained}", "--quiet"])
    (alone,) = (trained / "runs").iterdir()
    files = {name: content for name, content in promised(alone).items() if not name.startswith("plots")}
    other = promised(tmp_path / "runs" / alone.name)
    assert {name: other[name] for name in files} == files


def test_a_dry_run_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "nowhere"
    assert run(["sweep", *THREE, f"--out={place}", "--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert "3 of 3 runs to do" in shown
    assert "GB" in shown
    assert "stop_at_loss" not in shown
    assert shown.endswith("without other work on the machine\n")
    assert not place.exists()
    assert run(["sweep", *THREE, "stop_at_loss=0.1", f"--out={place}", "--dry-run"]) == 0
    assert "or less: stop_at_loss" in capfd.readouterr().out


def test_finished_runs_measure_the_speed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("model.width=8,9", *TINY)
    planned = plan(define(words, Choices(config_folders(None))), composer(), tmp_path)
    estimate = Estimator()
    assert finished_speed(planned, estimate) is None
    assert run(["train", *TINY, "model.width=9", "seed=0", f"--out={tmp_path}", "--quiet"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    seconds = total_seconds(folder / "timings.csv").wall
    assert finished_speed(planned, estimate) == pytest.approx(estimate(planned.runs[1].experiment).seconds / seconds)
    assert run(["sweep", *words, f"--out={tmp_path}", "--dry-run"]) == 0
    assert "1 of 2 runs to do, about" in (shown := capfd.readouterr().out)
    assert shown.endswith("as fast as the finished runs\n")
    (folder / "timings.csv").unlink()
    assert finished_speed(planned, estimate) is None


def test_what_a_run_continues_without_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also by a quiet sweep, and in the text that a cluster sends."""
    service = stand_in(monkeypatch, "mlflow")
    for number, progress in enumerate((Quiet(), ProgressLines(sys.stderr))):
        service.fails_at = 1
        planned = plan(define(THREE, Choices(config_folders(None))), composer(), tmp_path / str(number))
        conductor = Conductor(planned, Here(1), progress, pictures=False, log="mlflow")
        conductor.conduct([*planned.runs[:1]])
        (said,) = (line for line in capfd.readouterr().err.splitlines() if "log" in line)
        assert said.startswith(f"{planned.runs[0].name}: log=mlflow failed at ")
        assert said.endswith(" (no route to host); the run goes on without it")
        assert [end.how for end in conductor.ended.values()] == ["done"]


@pytest.mark.slow
def test_what_failed_is_told_once_and_not_repeated_unasked(tmp_path: Path) -> None:
    words = ("data.train=12,100000", *TINY[1:], "model.width=8")
    first = swept(tmp_path, *words)
    assert first.status == 1
    assert first.out.startswith("data.train-")
    assert "1 failed; `--retry-failed` runs them again" in first.out
    *_, reason, command = first.err.splitlines()
    assert "100000 of them training examples" in reason
    assert run([*shlex.split(command)[1:], "--quiet"]) == 2
    assert states(tmp_path) == ["done", "failed"]
    second = swept(tmp_path, *words)
    assert (second.status, second.err.splitlines()) == (1, [reason, command])
    assert swept(tmp_path, *words, "--retry-failed").status == 1
    assert len(journal(tmp_path, "failed")) == 2
    assert len(journal(tmp_path, "done")) == 1


@pytest.mark.slow
def test_a_sweep_counts_the_runs_that_diverged(tmp_path: Path) -> None:
    ended = swept(tmp_path, "optimizer.step_size=1e4,0.1", *TINY, "model.width=8")
    assert (ended.status, ended.err.count("Traceback")) == (0, 0)
    assert ": 2 runs, 2 done, 1 diverged, 2 done just now\n" in ended.out
    *_, reason, command = ended.err.splitlines()
    assert "diverged" in reason
    assert shlex.split(command)[:2] == ["ntkexp", "train"]
    assert "optimizer.step_size=10000.0" in command


@pytest.mark.slow
def test_a_killed_worker_costs_one_run(tmp_path: Path) -> None:
    process = begun(tmp_path, *THREE, "steps=100", "--workers=2")
    until_stepping(process, tmp_path, 1)
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    found = ended(process)
    assert found.status == 1
    assert "its process was killed" in found.err
    assert sorted(states(tmp_path)) == ["done", "done", "unfinished"]
    assert swept(tmp_path, *THREE, "steps=100").status == 0
    assert sorted(journal(tmp_path, "done")) == sorted(run["folder"] for run in record(tmp_path)["runs"])


@pytest.mark.slow
def test_an_interrupt_leaves_checkpoints_and_the_same_command_goes_on(tmp_path: Path) -> None:
    process = begun(tmp_path, *LONG, "--workers=2")
    until_stepping(process, tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    found = ended(process)
    assert found.status == 130
    assert found.err.splitlines()[-1] == "ntkexp: interrupted; the same command continues from the last checkpoints"
    assert "Traceback" not in found.err
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 2
    assert states(tmp_path) == ["unfinished", "unfinished"]


def test_ctrl_c_while_the_server_loads_is_left_to_the_command() -> None:
    program = (
        "from multiprocessing import forkserver\n"
        "from ntkexp.engine.local import start_server\n"
        "start_server()\n"
        "print(open(f'/proc/{forkserver._forkserver._forkserver_pid}/status').read())\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    (held_back,) = re.findall(r"SigBlk:\s*([0-9a-f]+)", said)
    assert int(held_back, 16) & 1 << signal.SIGINT - 1


@pytest.mark.slow
def test_workers_die_with_the_command(tmp_path: Path) -> None:
    process = begun(tmp_path, *LONG, "--workers=2")
    until_stepping(process, tmp_path, 2)
    family = [*children(process.pid), *workers(process.pid)]
    process.kill()
    process.communicate()
    end = time.monotonic() + 60
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in family):
        time.sleep(0.01)
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_work(tmp_path: Path) -> None:
    sweeps = [begun(tmp_path, *THREE, "steps=100") for _ in range(2)]
    found = [ended(process) for process in sweeps]
    assert [one.status for one in found] == [0, 0], found
    assert sorted(journal(tmp_path, "done")) == sorted(run["folder"] for run in record(tmp_path)["runs"])


@pytest.mark.slow
def test_the_first_failure_stops_a_sweep_that_is_to_fail_fast(tmp_path: Path) -> None:
    words = ("data.train=100000,12", *TINY[1:], "model.width=8", "steps=100000", "--fail-fast", "--workers=2")
    assert swept(tmp_path, *words).status == 1
    assert states(tmp_path) == ["failed", "unfinished"]


@pytest.mark.slow
def test_a_full_disk_stops_a_sweep_that_goes_on_afterwards(tmp_path: Path) -> None:
    found = swept(tmp_path, *THREE, TESTS_FULL_DISK="results.csv")
    assert found.status == 1
    assert "no space is left on the disk; free some, and the same command continues" in found.err
    assert set(states(tmp_path)) == {"unfinished"}
    assert swept(tmp_path, *THREE).status == 0
    assert states(tmp_path) == ["done"] * 3


# The journal stays readable after any interrupted write.


def test_the_last_event_counts(tmp_path: Path) -> None:
    journal = EventLog(tmp_path / "sweeps" / JOURNAL, "width")
    assert journal.failures() == {}
    for name, event in (("a", "failed"), ("b", "failed"), ("a", "began"), ("c", "done")):
        journal.write(name, event, "too wide" * (event == "failed"))
    assert journal.failures() == {"b": "too wide"}
    assert EventLog(journal.path, "depth").failures() == {"b": "too wide"}
    assert journal.path.read_text().count("\n") == 4


def test_a_line_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    journal = EventLog(tmp_path / JOURNAL, "width")
    journal.write("a", "failed", "é")
    whole = journal.path.read_bytes()
    for length in range(1, len(whole)):
        journal.path.write_bytes(whole + whole[:length])
        journal.write("b", "failed", "too wide")
        assert journal.failures() == {"a": "é", "b": "too wide"}


@pytest.mark.parametrize("seed", range(20))
def test_a_line_that_was_damaged_says_nothing(tmp_path: Path, seed: int) -> None:
    """A damaged log reports only real failures. Runs without a reported failure are tried again."""
    journal, luck = EventLog(tmp_path / JOURNAL, "width"), Random(seed)
    for name in "abc":
        journal.write(name, "failed", f"too wide for {name}")
    content = journal.path.read_bytes()
    journal.path.write_bytes(luck.choice(HARMS)(luck, content, b"[1]\n{}\nnull\n"))
    assert journal.failures().items() <= {run: f"too wide for {run}" for run in "abc"}.items()
