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


def test_clearing_spares_a_folder_that_is_no_run(folder: RunFolder) -> None:
    with folder.claim():
        folder.write("thesis.tex", "years of work")
        with pytest.raises(Mistake, match="no run wrote"):
            folder.clear()
    assert (folder.path / "thesis.tex").read_text() == "years of work"


def test_clearing_follows_no_links(folder: RunFolder, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    finish(folder)
    (folder.path / "link").symlink_to(kept)
    with folder.claim():
        folder.clear()
    assert (kept / "file").exists()


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
