"""What commands print, and how they end, with a run that was written beforehand in place of training."""

from __future__ import annotations

import ast
import csv
import errno
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import typer

import ntkexp
from ntkexp.cli.main import app
from ntkexp.cli.options import ADVICE, options, with_advice
from ntkexp.cli.sweep import compose_plan
from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.compose import compose
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake, Untrusted, WrongArgument
from ntkexp.progress import AbstractProgress
from ntkexp.records.folder import BEGUN, RunFolder
from ntkexp.report.loaded_run import load_run
from ntkexp.report.page.picture import command_of
from ntkexp.report.progress import Bar, ProgressLines, Quiet, progress_listener
from ntkexp.run.execute import begun_by
from tests.cli.conftest import Command
from tests.report.synthetic import digits, write_run
from tests.torture.kind.kills import no_pictures


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mlp-w512-s0-000000000000", digits())


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[AbstractProgress], Path]], None]:
    """Put a function in the place of training; runs go to a folder of the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def replace(act: Callable[[AbstractProgress], Path]) -> None:
        module = ModuleType("ntkexp.run.execute")

        def execute(
            experiment: Experiment,
            overrides: Sequence[str],
            out: Path,
            force: bool,
            progress: AbstractProgress,
            options: Sequence[str],
            log: str | None,
        ) -> Path:
            assert experiment == compose(overrides)
            assert out.is_dir()
            return act(progress)

        def resume(
            folder: Path, progress: AbstractProgress, trusted: Sequence[str], options: Sequence[str], log: str | None
        ) -> Path:
            return act(progress)

        vars(module).update(execute=execute, resume=resume)
        monkeypatch.setitem(sys.modules, "ntkexp.run.execute", module)
        monkeypatch.setattr("ntkexp.run.execute", module, raising=False)

    return replace


Replace = Callable[[Callable[[AbstractProgress], Path]], None]


def test_a_run_ends_with_its_ladder_a_sentence_and_its_folder(
    command: Command, training: Replace, finished: Path
) -> None:
    def act(progress: AbstractProgress) -> Path:
        progress.start("training", 2, 0)
        progress.step(1, "loss 0.5")
        progress.step(2, "loss 0.25  kernel change 0.125")
        progress.stop()
        return finished

    training(act)
    for arguments in (["train", "seed=1", "--out", "here", "model.width=8"], ["resume", str(finished)]):
        ended = command(*arguments)
        assert ended.status == 0
        assert "secant" in ended.out
        assert ended.out.endswith(f".\n{finished}\n")
        assert ended.err.splitlines()[-1] == "training: step 2 of 2  loss 0.25  kernel change 0.125"
        assert "\x1b" not in ended.out + ended.err


def test_quiet_tells_of_work_that_was_lost(command: Command, training: Replace, finished: Path) -> None:
    def act(progress: AbstractProgress) -> Path:
        progress.warn("the run starts again")
        return finished

    training(act)
    assert command("train", "--quiet") == (0, "", "the run starts again\n")


def test_quiet_prints_nothing_else(command: Command, training: Replace, finished: Path) -> None:
    def act(progress: AbstractProgress) -> Path:
        progress.say("a remark")
        return finished

    training(act)
    assert command("train", "--quiet") == (0, "", "")


def test_a_training_that_diverged_says_so_however_quiet(command: Command, training: Replace, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "mlp-w512-s1-000000000000", digits(stable_fraction=3.0))
    training(lambda progress: run)
    assert command("train", "--quiet") == (0, "", f"ntkexp: {run} diverged at step 3\n")
    assert json.loads(command("train", "--json").out)["diverged"] is True
    assert "diverged" in command("runs", f"--out={tmp_path}").out


def test_json_is_one_object(command: Command, training: Replace, finished: Path) -> None:
    training(lambda progress: finished)
    printed = json.loads(command("train", "--json").out)
    assert (printed["folder"], printed["outcome"]) == (str(finished), "finished")
    assert {"split", "machine", "relative_error", "floor"} <= set(printed["results"][0])


def interrupted(progress: AbstractProgress) -> Path:
    raise KeyboardInterrupt


def test_an_interrupt_says_how_to_go_on(command: Command, training: Replace, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / folder_name(compose(["seed=4"]))
    RunFolder(folder).write(BEGUN, "{}")
    training(interrupted)
    ended = command("train", "seed=4", "--out", str(tmp_path))
    assert (ended.status, ended.err.count("\n")) == (130, 1)
    assert f"ntkexp resume {folder}" in ended.err
    assert command("resume", str(folder)).status == 130


def test_an_interrupt_before_the_first_step_leaves_nothing_to_resume(command: Command, training: Replace) -> None:
    training(interrupted)
    ended = command("train", "seed=4")
    assert (ended.status, ended.err) == (130, "ntkexp: interrupted before the first step\n")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
def test_a_fault_of_the_machine_is_one_line(code: int, command: Command, training: Replace) -> None:
    def act(progress: AbstractProgress) -> Path:
        raise OSError(code, os.strerror(code), "kernels.zarr")

    training(act)
    ended = command("train")
    assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err.startswith("ntkexp: kernels.zarr: ")


def test_a_mistake_found_in_training_is_one_line(command: Command, training: Replace) -> None:
    def act(progress: AbstractProgress) -> Path:
        raise Mistake("data.train=9: there are 8")

    training(act)
    assert command("train") == (2, "", "ntkexp: data.train=9: there are 8\n")


def test_a_bug_keeps_its_traceback(command: Command, training: Replace) -> None:
    def act(progress: AbstractProgress) -> Path:
        raise ZeroDivisionError

    training(act)
    with pytest.raises(ZeroDivisionError):
        command("train")


def test_threads_are_known_before_torch_is_imported(command: Command, training: Replace, finished: Path) -> None:
    seen = []

    def act(progress: AbstractProgress) -> Path:
        seen.append(os.environ["OMP_NUM_THREADS"])
        return finished

    training(act)
    assert command("train", "threads=3", "--quiet").status == 0
    assert seen == ["3"]


def test_a_removed_option_names_what_takes_its_place(command: Command) -> None:
    ended = command("config", "--plan", "model=cnn")
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "ntkexp sweep --dry-run" in ended.err


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
    assert command("report", str(finished), "--format=csv", "--out", str(tmp_path / "no" / "table.csv")).status == 2


def test_a_report_is_a_page(command: Command, finished: Path, tmp_path: Path) -> None:
    ended = command("report", str(finished), "--out", str(tmp_path))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == str(tmp_path / "report" / "index.html")
    assert finished.name in (tmp_path / "report" / "index.html").read_text()
    (tmp_path / "file").touch()
    assert command("report", str(finished), "--out", str(tmp_path / "file")).status == 2


def test_unreadable_folders_are_named_in_one_line(command: Command, finished: Path, tmp_path: Path) -> None:
    ended = command("report", "--format=text", str(tmp_path), str(finished), "nowhere")
    assert (ended.status, ended.err.count("\n")) == (0, 1)
    assert str(tmp_path) in ended.err
    assert "nowhere" in ended.err
    assert finished.name in ended.out


def test_whoever_listens_suits_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress_listener(True), Quiet)
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


# Words of the command line stay in the command line: elsewhere a mistake has a kind, from which the advice follows.


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


def keys() -> set[str]:
    """Every key of a configuration that lies in a group, such as `model.width`."""
    choices = Choices(config_folders(None))
    inner = {
        key for group in choices.groups() for option in choices.options(group) for key in choices.keys(group, option)
    }
    return inner | {key for key in choices.common() if "." in key}


def texts(place: Path) -> Iterator[tuple[Path, str]]:
    """Every text in the code of a file or folder."""
    for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file, node.value


def test_no_option_is_named_outside_the_command_line() -> None:
    known = named_options()
    assert {"--out", "--force", "--memory-gb", "--retry-failed"} <= known
    elsewhere = [found for found in texts(PACKAGE) if PACKAGE / "cli" not in found[0].parents]
    named = [(file.name, word) for file, text in elsewhere for word in re.findall(r"--[a-z][a-z-]*", text)
             if word in known]  # fmt: skip
    assert len(elsewhere) > 1000
    assert not named


@pytest.mark.parametrize("place", LIBRARY)
def test_the_library_knows_no_configuration(place: str) -> None:
    known = keys()
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


# The command that stands beside results repeats them: the same experiment, in the same place.


NET = """
from torch import nn

def build(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, outputs))
"""
FEW = "_target_: ntkexp.data.Digits\nclasses: [3, 8]\ntrain: 8\nquery: 4\ntest: 4\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module in a place that a shell would take apart, and with choices of its own."""
    made = tmp_path_factory.mktemp("home")
    (made / "my nets").mkdir()
    (made / "my nets" / "small_for_repeating.py").write_text(NET)
    (made / "mine" / "data").mkdir(parents=True)
    (made / "mine" / "data" / "few.yaml").write_text(FEW)
    return made


@pytest.fixture
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder, to work in; runs draw nothing there."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("ntkexp.run.execute.draw_run", no_pictures)
    return folder


WORDS = (
    "data=few",
    "model=module",
    "model.path=my nets/small_for_repeating.py:build",
    "steps=1",
    "threads=1",
    "path.error_samples=0",
)
OPTIONS = ("--trust", "my nets/small_for_repeating.py", "--config-dir=mine", "--out", "my outputs")


def test_the_printed_command_finds_the_run_again(command: Command, home: Path) -> None:
    assert command("train", *WORDS, *OPTIONS, "--quiet").status == 0
    (folder,) = (home / "my outputs" / "runs").iterdir()
    printed = command_of(load_run(folder))
    said = json.loads((folder / "provenance.json").read_text())
    assert (said["command"], said["folder"]) == (printed, str(home))
    again = command(*shlex.split(printed)[1:])
    assert (again.status, again.err.rpartition("/runs/")[2].split()[:3]) == (0, [folder.name, "is", "finished;"])
    assert list((home / "my outputs" / "runs").iterdir()) == [folder]


def test_a_run_that_goes_on_is_still_repeated_by_what_began_it(home: Path) -> None:
    begun = RunFolder(home / "run")
    begun.path.mkdir()
    assert not begun_by(begun)
    begun.begin([], "an identity")
    begun.write_sealed("provenance.json", {"command": "ntkexp train seed=3 --trust=net.py"})
    assert begun_by(begun) == "ntkexp train seed=3 --trust=net.py"
    begun.write("provenance.json", "{")
    assert not begun_by(begun)


def test_the_command_of_a_sweep_means_the_same_runs(home: Path) -> None:
    def plans(words: list[str], options: list[str]) -> list[str]:
        given = dict(option.split("=", 1) for option in options)
        plan = compose_plan(words, Path(given["--out"]), [given["--trust"]], Path(given["--config-dir"]))
        return [plan.sweep.command, str(plan.out), *(run.name for run in plan.distinct)]

    first = plans([*WORDS, "seed=0,1"], options(Path("my outputs"), ["my nets/small_for_repeating.py"], Path("mine")))
    words = shlex.split(first[0])[2:]
    split = next(k for k, word in enumerate(words) if word.startswith("--"))
    assert plans(words[:split], words[split:]) == first
    assert len(first) == 4
