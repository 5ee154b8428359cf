"""Laws of a run folder: one writer at a time, and done only when whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.folder import RunFolder, looks_like_a_run

HOLD = """
import sys
from pathlib import Path
from ntkexp.records.folder import RunFolder
with RunFolder(Path(sys.argv[1])).claim():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def state(folder: RunFolder) -> str:
    return folder.state  # a function, because a type checker takes a property to stay what it was


def finish(folder: RunFolder) -> None:
    with folder.claim():
        folder.write_json("config.json", {"seed": 0})
        folder.write("kernels.zarr/c/0", b"12345678")
        folder.finish(["config.json", "kernels.zarr"], outcome="fine", diverged=False)


def test_a_folder_is_absent_then_dead_then_done(folder: RunFolder) -> None:
    assert state(folder) == "absent"
    with folder.claim():
        folder.write_json("config.json", {"seed": 0})
    assert state(folder) == "dead"
    finish(folder)
    assert state(folder) == "done"


@pytest.mark.parametrize("name", ["retraced.csv", "notes.txt"])
def test_what_only_some_runs_write_is_damage_in_a_run_that_wrote_none(folder: RunFolder, name: str) -> None:
    finish(folder)
    (folder.path / name).write_text("of another run", encoding="utf-8")
    assert state(folder) == ("damaged" if name == "retraced.csv" else "done")


def test_another_process_makes_it_running_and_its_death_makes_it_dead(folder: RunFolder) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert state(folder) == "running"
        with pytest.raises(Mistake, match=r"^[^\n]*is being written by another process[^\n]*$"), folder.claim():
            pass
        other.kill()
    assert state(folder) == "dead"
    with folder.claim():
        pass


def test_an_error_inside_a_claim_frees_it(folder: RunFolder) -> None:
    with pytest.raises(BlockingIOError, match="from inside"), folder.claim():
        raise BlockingIOError("from inside")
    with folder.claim():
        pass


@pytest.mark.parametrize("harm", ["DONE.json", "config.json", "kernels.zarr/c/0"])
def test_a_folder_that_lost_or_changed_a_file_is_not_done(folder: RunFolder, harm: str) -> None:
    finish(folder)
    (folder.path / harm).write_bytes(b"{")
    assert state(folder) == "damaged"
    (folder.path / harm).unlink()
    assert state(folder) == ("dead" if harm == "DONE.json" else "damaged")


def test_what_is_missing_cannot_be_finished(folder: RunFolder) -> None:
    with folder.claim(), pytest.raises(FileNotFoundError, match=r"metrics\.csv"):
        folder.finish(["metrics.csv"])
    assert state(folder) == "dead"


def test_facts_stand_beside_the_sizes(folder: RunFolder) -> None:
    finish(folder)
    done = folder.read_json("DONE.json")
    assert done["outcome"] == "fine"
    assert done["diverged"] is False
    assert done["sizes"] == {"config.json": len('{\n  "seed": 0\n}\n'), "kernels.zarr": 8}


def test_clearing_leaves_the_lock_alone(folder: RunFolder) -> None:
    finish(folder)
    with folder.claim():
        folder.clear()
        assert [entry.name for entry in folder.path.iterdir()] == [".lock"]
        folder.clear()


def test_a_run_that_lost_its_configuration_is_cleared(folder: RunFolder) -> None:
    finish(folder)
    (folder.path / "config.json").unlink()
    with folder.claim():
        folder.clear()
    assert [entry.name for entry in folder.path.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["thesis.tex", "plots/thesis.tex", "kernels.zarr/thesis.tex", "removal/mine.json"])
@pytest.mark.parametrize("finished", [True, False])
def test_nothing_is_removed_that_no_run_wrote(folder: RunFolder, name: str, *, finished: bool) -> None:
    """Neither to begin anew, nor to go on from a checkpoint, nor in a folder that is no run."""
    if finished:
        finish(folder)
    with folder.claim():
        folder.write(name, "years of work")
        for removing in (folder.clear, lambda: folder.forget([])):
            with pytest.raises(Mistake, match=r"^[^\n]*no run wrote[^\n]*$"):
                removing()
    assert (folder.path / name).read_text() == "years of work"


def test_a_link_is_not_followed(folder: RunFolder, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    finish(folder)
    (folder.path / "plots").symlink_to(kept)
    with folder.claim(), pytest.raises(NoPlace, match=r"\(plots\)"):
        folder.clear()
    assert (kept / "file").exists()


def test_what_is_written_goes_where_no_link_leads(folder: RunFolder, tmp_path: Path) -> None:
    """A link that was laid under the name of a file that is not yet in its place."""
    (tmp_path / "kept").write_text("years of work")
    folder.path.mkdir()
    (folder.path / ".config.json.partial").symlink_to(tmp_path / "kept")
    folder.write("config.json", "{}")
    assert (tmp_path / "kept").read_text() == "years of work"
    assert (folder.path / "config.json").read_text() == "{}"


@pytest.mark.parametrize(("name", "fits"), [
    ("mlp-w64-s0-0123456789ab", True), ("mlp-w64-s0-0123456789ac", False), ("the-best", True), ("a-0123456789ac", True),
])  # fmt: skip
def test_a_run_may_have_any_name_but_that_of_another_run(tmp_path: Path, name: str, *, fits: bool) -> None:
    folder = RunFolder(tmp_path / name)
    with folder.claim():
        folder.write("config.json", "{}")
        folder.finish(["config.json"], identity="0123456789ab" + "c" * 52)
    assert folder.whole == fits
    assert ("another run" in (folder.defect or "")) != fits


def test_each_sealed_file_has_its_own_name_and_run(folder: RunFolder, tmp_path: Path) -> None:
    """None passes for another, and none for that of another run."""
    other = RunFolder(tmp_path / "other")
    for each in (folder, other):
        each.path.mkdir()
        each.begin([], each.path.name)
        each.write_sealed("progress.json", {"step": 3, "seals": {}, "identity": each.path.name})
    assert folder.read_sealed("progress.json")["step"] == 3
    for stolen in (folder.path / "BEGUN.json", other.path / "progress.json"):
        folder.write("progress.json", stolen.read_bytes())
        with pytest.raises(Mistake, match="not as it was written for this place"):
            folder.read_sealed("progress.json")
    for name in ("BEGUN.json", "DONE.json"):
        folder.write(name, (other.path / "progress.json").read_bytes())
        assert folder.broken("config.json") == [name]
    assert folder.defect is not None


@pytest.mark.parametrize("left", ["checkpoint.pt", "trace/steps.log"])
def test_what_can_go_on_is_interrupted_and_not_dead(folder: RunFolder, left: str) -> None:
    folder.write(left, b"")
    assert state(folder) == "interrupted"


def test_a_place_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "file")
    with pytest.raises(NoPlace, match=r"^[^\n]*cannot be written[^\n]*choose another place$"), folder.claim():
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_damaged_json_is_one_line(folder: RunFolder, text: str) -> None:
    folder.write("config.json", text.encode("latin-1"))
    with pytest.raises(Mistake, match=r"^[^\n]*config\.json[^\n]*damaged$"):
        folder.read_json("config.json")


def test_a_folder_looks_like_a_run_from_its_config_on(folder: RunFolder) -> None:
    assert not looks_like_a_run(folder.path)
    finish(folder)
    assert looks_like_a_run(folder.path)
