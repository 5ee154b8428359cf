"""The command that stands beside results repeats them: the same experiment, in the same place."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ntkexp.cli.commands.sweep import compose_plan
from ntkexp.cli.options import options
from ntkexp.records.folder import RunFolder
from ntkexp.report.page.picture import command_of
from ntkexp.report.run import load_run
from ntkexp.run.execute import begun_by
from tests.cli.conftest import Command
from tests.torture.kind.kills import no_pictures

NET = """
from torch import nn

def build(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, outputs))
"""
FEW = "_target_: ntkexp.data.Digits\nclasses: [3, 8]\ntrain: 8\nprobe: 4\ntest: 4\n"


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
    monkeypatch.setattr("ntkexp.run.execute.painter", no_pictures)
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
