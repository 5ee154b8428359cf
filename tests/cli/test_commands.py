"""Commands print results on stdout and everything else on stderr, and end with the right status."""

from __future__ import annotations

import ast
import csv
import errno
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

import ntkexp
from ntkexp.cli.main import app, failure
from ntkexp.cli.options import ADVICE, CommonOptions, options, with_advice
from ntkexp.cli.sweep import compose_plan
from ntkexp.cli.train import print_results
from ntkexp.mistake import Mistake, Untrusted, WrongArgument
from ntkexp.records.folder import RunFolder
from ntkexp.report.loaded_run import load_run
from ntkexp.report.page.picture import command_of
from ntkexp.report.progress import Bar, ProgressLines, Quiet, progress_listener
from ntkexp.run.execute import begun_by
from tests.cli.conftest import Command, Ended, check
from tests.docs.pages import known_keys
from tests.report.stand_ins import stand_in
from tests.report.synthetic import digits, write_run


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Mistake("data.train=9: there are 8"), ("data.train=9: there are 8", 2)),
        (OSError(errno.ENOSPC, "", "kernels.zarr"), ("kernels.zarr: ", 1)),
        (OSError(errno.EIO, "", "kernels.zarr"), ("kernels.zarr: ", 1)),
        (OSError(errno.EDQUOT, "", "kernels.zarr"), ("kernels.zarr: ", 1)),
        (OSError(errno.EFBIG, "", "kernels.zarr"), ("kernels.zarr: ", 1)),
        (RuntimeError("can't start new thread"), ("no more threads can be started; ", 1)),
        (RuntimeError("Could not determine home directory."), ("there is no home folder for ~; ", 2)),
        (ZeroDivisionError(), None),  # a bug keeps its traceback
    ],
    ids=repr,
)
def test_mistakes_and_faults_of_the_machine_are_one_line(error: Exception, expected: tuple[str, int] | None) -> None:
    found = failure(error)
    if expected is None or found is None:
        assert found is expected is None
    else:
        assert found[0].startswith(expected[0])
        assert found[1] == expected[1]


def test_threads_are_set_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    CommonOptions().compose(["threads=3"])
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("3", "3")


def test_a_finished_run_is_shown(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_results(finished, quiet=False, as_json=False, verbose=False)
    shown = capsys.readouterr().out
    verdict, table, *_ = shown.strip().split("\n\n")
    assert "the secant kernel machine reproduces the trained network to rounding" in verdict
    assert table.startswith("kernel machine ")
    assert max(map(len, table.splitlines())) <= 80
    assert shown.endswith(f"\n{finished}\n")
    print_results(finished, quiet=False, as_json=False, verbose=True)
    assert "not known for this model" in capsys.readouterr().out
    print_results(finished, quiet=False, as_json=True, verbose=False)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["folder"], printed["outcome"], printed["diverged"]) == (str(finished), "finished", False)
    assert {"split", "machine", "relative_error", "floor"} <= set(printed["results"][0])
    print_results(finished, quiet=True, as_json=False, verbose=False)
    assert capsys.readouterr() == ("", "")


def test_a_diverged_run_is_announced_even_if_quiet(
    command: Command, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs" / "mlp-w512-s1-000000000000", digits(stable_fraction=3.0))
    print_results(run, quiet=True, as_json=False, verbose=False)
    assert capfd.readouterr() == ("", f"ntkexp: {run} diverged at step 3\n")
    print_results(run, quiet=False, as_json=True, verbose=False)
    assert json.loads(capfd.readouterr().out)["diverged"] is True
    assert "diverged" in command("runs", f"--out={tmp_path}").out


def test_config_shows_what_would_run(command: Command) -> None:
    ended = command("config", "model.width=64", "path.rule=[left]")
    assert (ended.status, ended.err) == (0, "")
    assert "- model: mlp" in ended.out
    assert "  width: 64" in ended.out
    assert "  rule: [left]" in ended.out


def test_a_report_in_every_format(command: Command, finished: Path, tmp_path: Path) -> None:
    for form in ("text", "md"):
        assert finished.name in command("report", f"--format={form}", str(finished)).out
    rows = list(csv.DictReader(command("report", "--format=csv", str(finished)).out.splitlines()))
    table = json.loads(command("report", "--format=json", str(finished)).out)
    assert [row["run"] for row in rows] == [row["run"] for row in table] == [finished.name]
    assert float(rows[0]["left"]) == table[0]["left"]
    written = command("report", str(finished), "--format=csv", "--out", str(tmp_path / "table.csv"))
    assert written == (0, "", "")
    assert (tmp_path / "table.csv").read_text().startswith("run,")


def test_a_report_is_a_page(command: Command, finished: Path, tmp_path: Path) -> None:
    ended = command("report", str(finished), "--out", str(tmp_path))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == str(tmp_path / "report" / "index.html")
    assert finished.name in (tmp_path / "report" / "index.html").read_text()
    (tmp_path / "file").touch()
    check(command("report", str(finished), "--out", str(tmp_path / "file")), "file")
    check(command("report", str(finished), "--format=csv", f"--out={tmp_path}/no/table.csv"), "no")


def test_unreadable_folders_are_named_in_one_line(command: Command, finished: Path, tmp_path: Path) -> None:
    ended = command("report", "--format=text", str(tmp_path), str(finished), "nowhere")
    assert (ended.status, ended.err.count("\n")) == (0, 1)
    assert str(tmp_path) in ended.err
    assert "nowhere" in ended.err
    assert finished.name in ended.out


def test_progress_suits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = progress_listener(True)
    assert isinstance(quiet, Quiet)
    quiet.say("a remark")
    quiet.warn("the run starts again")  # lost work
    assert capsys.readouterr() == ("", "the run starts again\n")
    assert isinstance(progress_listener(False), ProgressLines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(progress_listener(False), Bar)


def test_a_bar_shows_the_numbers_of_a_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    bar = Bar()
    bar.say("before")
    bar.start("training", 4, 1)
    bar.step(2, "loss 0.5  kernel change 0.25")
    bar.say("[a] remark")
    bar.stop()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "before\n" in shown.err
    assert "[a] remark" in shown.err
    assert "2/4" in shown.err
    assert "loss 0.5  kernel change 0.25" in shown.err


def test_plain_lines_come_for_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(sys.stdout)
    lines.start("training", 1000, 500)
    for step in range(501, 1001):
        lines.step(step)
    lines.stop()
    assert len(capsys.readouterr().out.splitlines()) == 1 + 5


# Only the command line names options. Elsewhere a mistake has a kind, which selects the advice.


PACKAGE = Path(ntkexp.__file__).parent
LIBRARY = ("kernel", "library", "limit", "closed_form.py")


def commands(command: object) -> Iterator[object]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


def named_options() -> set[str]:
    found = {word for each in commands(typer.main.get_command(app)) for given in getattr(each, "params", ())
             for word in given.opts}  # fmt: skip
    return {word for word in found if word.startswith("--")}


def texts(place: Path, pattern: str = "") -> Iterator[tuple[Path, str]]:
    """Yield every string in the code of a file or folder. Leave out files without the pattern."""
    for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
        code = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(code)) if re.search(pattern, code) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file, node.value


def test_no_option_is_named_outside_the_command_line() -> None:
    known = named_options()
    assert {"--out", "--force", "--memory-gb", "--retry-failed"} <= known
    option = r"--[a-z][a-z-]*"
    elsewhere = [found for found in texts(PACKAGE, option) if PACKAGE / "cli" not in found[0].parents]
    named = [(file.name, word) for file, text in elsewhere for word in re.findall(option, text)
             if word in known]  # fmt: skip
    assert elsewhere
    assert not named


@pytest.mark.parametrize("place", LIBRARY)
def test_the_library_knows_no_configuration(place: str) -> None:
    known = {key for key in known_keys() if "." in key}
    assert {"model.width", "path.substeps", "data.train"} <= known
    found = list(texts(PACKAGE / place))
    named = [(file.name, word) for file, text in found for word in re.findall(r"\b[a-z]+\.[a-z_]+\b", text)
             if word in known]  # fmt: skip
    assert found
    assert not named


@pytest.mark.parametrize("kind", ADVICE, ids=lambda kind: kind.__name__)
def test_advice_names_an_option_that_there_is(kind: type[Mistake]) -> None:
    made = kind("what is wrong", "my_net.py") if kind is Untrusted else kind("what is wrong")
    said = with_advice(made).removeprefix("what is wrong")
    named = re.findall(r"--[a-z][a-z-]*", said)
    assert named
    assert set(named) <= named_options()
    assert str(made) == "what is wrong"


def test_arguments_are_spelled_as_options() -> None:
    mistake = WrongArgument("steps=3 goes with step_size=…: so many steps of one size", "steps", "step_size")
    assert with_advice(mistake) == "--steps=3 goes with --step-size=…: so many steps of one size"
    assert (
        with_advice(WrongArgument("of 2 outputs; write outputs=all", "outputs")) == "of 2 outputs; write --outputs=all"
    )
    assert with_advice(Mistake("steps=3: a key")) == "steps=3: a key"


# One run is interrupted, resumed and repeated by the command that its results print. The name of
# its module's folder contains a blank, and its data come from a folder of choices.


NET = """
from torch import nn

def build(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, outputs))

def interrupt(outputs):
    raise KeyboardInterrupt
"""
FEW = "_target_: ntkexp.data.Digits\nclasses: [3, 8]\ntrain: 8\nquery: 4\ntest: 4\n"
FILE = "my nets/small_for_repeating.py"
SIZES = ("steps=2", "threads=1", "path.error_samples=0", "checkpoint_seconds=0")
WORDS = ("data=few", "model=module", f"model.path={FILE}:build", *SIZES)
OPTIONS = ("--trust", FILE, "--config-dir=mine", "--out", "my outputs")


class Resumed(NamedTuple):
    """An interrupted and resumed run, with the output of both commands."""

    home: Path
    run: Path
    interrupted: Ended
    resumed: Ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module and choices."""
    made = tmp_path_factory.mktemp("home")
    (made / "my nets").mkdir()
    (made / FILE).write_text(NET)
    (made / "mine" / "data").mkdir(parents=True)
    (made / "mine" / "data" / "few.yaml").write_text(FEW)
    return made


@pytest.fixture
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def resumed(home: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Resumed:
    service = stand_in(monkeypatch, "wandb")
    service.fails_at, service.failure = 1, KeyboardInterrupt()
    interrupted = command("train", *WORDS, *OPTIONS, "--log=wandb")
    service.fails_at = None
    (run,) = (home / "my outputs" / "runs").iterdir()
    return Resumed(home, run, interrupted, command("resume", str(run), "--trust", FILE, "--log=wandb"))


def test_an_interrupted_run_is_resumed_and_its_printed_command_finds_it(resumed: Resumed, command: Command) -> None:
    run = Path("my outputs") / "runs" / resumed.run.name
    (*_, advice) = resumed.interrupted.err.splitlines(keepends=True)
    check((resumed.interrupted.status, resumed.interrupted.out, advice), f"ntkexp resume '{run}' --trust", status=130)
    ended = resumed.resumed
    assert (ended.status, "secant" in ended.out, ended.out.endswith(f"\n{resumed.run}\n")) == (0, True, True)
    assert f"{run.name}: step 2 of 2  loss " in ended.err
    assert "\x1b" not in ended.out + ended.err

    printed = command_of(load_run(resumed.run))
    provenance = json.loads((resumed.run / "provenance.json").read_text())
    assert (provenance["command"], provenance["folder"]) == (printed, str(resumed.home))
    again = command(*shlex.split(printed)[1:])
    assert (again.status, again.err.rpartition("/runs/")[2].split()[:3]) == (0, [run.name, "is", "finished;"])
    assert list(resumed.run.parent.iterdir()) == [resumed.run]


def test_an_interrupt_before_the_first_step_leaves_nothing_to_resume(command: Command, home: Path) -> None:
    words = ("data=few", "model=module", f"model.path={FILE}:interrupt", *SIZES)
    ended = command("train", *words, *OPTIONS[:-1], "interrupted")
    assert ended == (130, "", "ntkexp: interrupted before the first step\n")


def test_a_resumed_run_keeps_the_command_that_began_it(tmp_path: Path) -> None:
    begun = RunFolder(tmp_path / "run")
    begun.path.mkdir()
    assert not begun_by(begun)
    begun.begin([], "an identity")
    begun.write_sealed("provenance.json", {"command": "ntkexp train seed=3 --trust=net.py"})
    assert begun_by(begun) == "ntkexp train seed=3 --trust=net.py"
    begun.write("provenance.json", "{")
    assert not begun_by(begun)


@pytest.mark.usefixtures("home")
def test_the_command_of_a_sweep_plans_the_same_runs() -> None:
    def plans(words: list[str], given: dict[str, str]) -> list[str]:
        plan = compose_plan(words, Path(given["--out"]), [given["--trust"]], Path(given["--config-dir"]))
        return [plan.sweep.command, str(plan.out), *(run.name for run in plan.distinct)]

    def parsed(words: list[str]) -> dict[str, str]:
        return dict(word.split("=", 1) for word in words)

    first = plans([*WORDS, "seed=0,1"], parsed(options(Path("my outputs"), [FILE], Path("mine"))))
    words = shlex.split(first[0])[2:]
    split = next(k for k, word in enumerate(words) if word.startswith("--"))
    assert plans(words[:split], parsed(words[split:])) == first
    assert len(first) == 4
