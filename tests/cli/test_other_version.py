"""A run that another version made is refused in one line, which names that version and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ntkexp import load_run
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json, sealed_text
from ntkexp.records.folder import BEGUN, DONE, PROVENANCE, RunFolder, results_version
from tests.cli.conftest import Command
from tests.report.synthetic import digits, write_run

SAID = "was made by ntkexp 0.0.9 with results_version 4, and this is ntkexp "
ADVICE = "; `ntkexp train model.width=8` runs it anew"


def signed(folder: Path, version: int) -> Path:
    """The run, as if a version had made it."""
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
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert f"{earlier} {SAID}" in ended.err
    assert ADVICE in ended.err


def test_it_is_listed_with_the_reason_and_can_be_deleted(command: Command, earlier: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(earlier, tmp_path / "runs" / earlier.name))
    listed = command("runs", f"--out={tmp_path}")
    assert listed.status == 0
    assert f"{folder} {SAID}" in listed.out
    assert json.loads(command("runs", f"--out={tmp_path}", "--json").out)[0]["config"].keys() == {"state", "run"}
    assert command("runs", f"--out={tmp_path}", "--delete", "--yes").status == 0
    assert not folder.exists()


def test_one_that_was_left_is_not_gone_on_with(command: Command, earlier: Path, tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(earlier, tmp_path / earlier.name)))
    told = json.loads((folder.path / DONE).read_text())
    folder.write(BEGUN, sealed_text({"identity": told["identity"], "seals": told["seals"]}, BEGUN))
    (folder.path / DONE).unlink()
    ended = command("resume", str(folder.path))
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert f"{folder.path} {SAID}" in ended.err


def test_the_library_refuses_it_too(earlier: Path) -> None:
    with pytest.raises(Mistake, match=SAID):
        load_run(earlier)


def test_one_of_this_version_is_read(tmp_path: Path) -> None:
    folder = signed(write_run(tmp_path / "run", digits()), results_version)
    assert load_run(folder).name == "run"
