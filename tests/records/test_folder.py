"""Laws of a run folder: one writer at a time, and done only when whole."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.atomic import sealed
from ntkexp.records.folder import RunFolder, is_run_folder
from ntkexp.records.kernels import create_store
from ntkexp.records.results import MetricsWriter, Result, format_cell, read_results, write_results

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
    return folder.state  # a function, because a type checker assumes that a property does not change


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
    assert is_run_folder(folder.path)
    with folder.claim(), pytest.raises(FileNotFoundError, match=r"metrics\.csv"):
        folder.finish(["metrics.csv"])  # a missing file cannot be finished
    assert state(folder) == "dead"
    finish(folder)
    assert state(folder) == "done"
    done = folder.read_json("DONE.json")
    assert (done["outcome"], done["diverged"]) == ("fine", False)
    assert done["sizes"] == {"config.json": len('{\n  "seed": 0\n}\n'), "kernels.zarr": 8}


@pytest.mark.parametrize(
    ("name", "content", "state_after"),
    [
        ("retraced.csv", b"of another run", "damaged"),  # only some runs write it
        ("notes.txt", b"of the user", "done"),
        ("DONE.json", b"{", "damaged"),
        ("config.json", b"{", "damaged"),
        ("kernels.zarr/c/0", b"{", "damaged"),
        ("DONE.json", None, "dead"),
        ("config.json", None, "damaged"),
        ("kernels.zarr/c/0", None, "damaged"),
    ],
)
def test_a_finished_folder_with_a_changed_file_is_not_done(
    folder: RunFolder, name: str, content: bytes | None, state_after: str
) -> None:
    finish(folder)
    if content is None:
        (folder.path / name).unlink()
    else:
        (folder.path / name).write_bytes(content)
    assert state(folder) == state_after


@pytest.mark.parametrize("left", ["checkpoint.pt", "trace/steps.log"])
def test_a_run_that_can_go_on_is_interrupted_and_not_dead(folder: RunFolder, left: str) -> None:
    assert not is_run_folder(folder.path)
    folder.write(left, b"")
    assert state(folder) == "interrupted"


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


def test_a_claim_is_freed_by_an_error_and_needs_a_folder(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError, match="from inside"), folder.claim():
        raise BlockingIOError("from inside")
    with folder.claim():
        pass
    (tmp_path / "file").touch()
    with pytest.raises(NoPlace, match=r"^[^\n]*cannot be written[^\n]*choose another place$"):
        RunFolder(tmp_path / "file").claim().__enter__()


@pytest.mark.parametrize("lost", ["", "config.json"])
def test_clearing_leaves_the_lock_alone(folder: RunFolder, lost: str) -> None:
    finish(folder)
    if lost:
        (folder.path / lost).unlink()
    with folder.claim():
        folder.clear()
        assert [entry.name for entry in folder.path.iterdir()] == [".lock"]
        folder.clear()


MINE = (
    *("thesis.tex", "plots/thesis.tex", "plots/figure_1.svg", "plots/figure_1.csv", "removal/mine.json"),
    *("kernels.zarr/thesis.tex", "mine.zarr/zarr.json", "mine.zarr/c/0", "sums-mine", "sums-of-2026.bin"),
    *("trace/notes.log", "trace/weights/best.bin", "trace/rank-0/mine.bin", "draft.partial", ".draft.partial"),
    "tensorboard/events.out.tfevents.1700000000.host.17.0",
)


@pytest.mark.parametrize("name", MINE)
@pytest.mark.parametrize("finished", [True, False])
def test_nothing_is_removed_that_no_run_wrote(folder: RunFolder, name: str, *, finished: bool) -> None:
    """Not for a new beginning, not for a checkpoint, and not in a folder without a run."""
    if finished:
        finish(folder)
    with folder.claim():
        folder.write(name, "years of work")
        for removing in (folder.clear, lambda: folder.forget([])):
            with pytest.raises(Mistake, match=r"^[^\n]*no run wrote[^\n]*$"):
                removing()
    assert (folder.path / name).read_text() == "years of work"


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("edited", [True, False])
def test_a_picture_is_removed_with_its_run_unless_it_was_edited(
    folder: RunFolder, *, finished: bool, edited: bool
) -> None:
    """In a finished run, and in one whose process was killed while it drew."""
    with folder.claim():
        folder.write_json("config.json", {"seed": 0})
        folder.begin(["config.json"])
        places = folder.write_pictures({"ladder.svg": "<svg/>"})
        if finished:
            folder.finish(["config.json", *places], outcome="fine", diverged=False)
            (folder.path / "BEGUN.json").unlink()
        if edited:
            (folder.path / "plots" / "ladder.svg").write_text("<svg>an evening's work</svg>")
            before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
            for removing in (folder.clear, lambda: folder.forget([]), folder.reopen):
                with pytest.raises(NoPlace, match=r"^[^\n]*no run wrote \(plots/ladder\.svg\)[^\n]*$"):
                    removing()
            assert {path: path.read_bytes() for path in before} == before
        else:
            folder.clear()
            assert [entry.name for entry in folder.path.iterdir()] == [".lock"]


def test_nothing_is_written_over_other_files_or_through_a_link(folder: RunFolder, tmp_path: Path) -> None:
    store, kept = tmp_path / "contributions.zarr", tmp_path / "kept"
    create_store(store)
    (store / "NOTES.txt").write_text("mine")
    with pytest.raises(NoPlace, match=r"no run wrote \(NOTES\.txt\)"):
        create_store(store)
    kept.mkdir()
    (kept / "file").write_text("years of work")
    folder.path.mkdir()
    (folder.path / ".config.json.partial").symlink_to(kept / "file")
    folder.write("config.json", "{}")
    assert (folder.path / "config.json").read_text() == "{}"
    finish(folder)
    (folder.path / "plots").symlink_to(kept)
    with folder.claim(), pytest.raises(NoPlace, match=r"no run wrote \([^)]*plots\)"):
        folder.clear()
    assert ((store / "NOTES.txt").read_text(), (kept / "file").read_text()) == ("mine", "years of work")


@pytest.mark.parametrize(("name", "fits"), [
    ("mlp-w64-s0-0123456789ab", True), ("mlp-w64-s0-0123456789ac", False), ("the-best", True), ("a-0123456789ac", True),
])  # fmt: skip
def test_a_run_may_have_any_name_but_that_of_another_run(tmp_path: Path, name: str, *, fits: bool) -> None:
    folder = RunFolder(tmp_path / name)
    with folder.claim():
        folder.write("config.json", "{}")
        folder.finish(["config.json"], identity="0123456789ab" + "c" * 52)
    assert folder.is_intact == fits
    assert ("another run" in (folder.defect or "")) != fits


def test_each_sealed_file_has_its_own_name_and_run(folder: RunFolder, tmp_path: Path) -> None:
    """No file passes for another one, or for the file of another run."""
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
        assert folder.damaged_files("config.json") == [name]
    assert folder.defect is not None


# Laws of results.csv.


NUMBER = st.none() | st.floats(allow_nan=False)
WORD = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=12)  # csv reads \r as \n
RESULTS = st.lists(
    st.builds(Result, WORD, WORD, WORD, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, WORD, st.booleans()), max_size=4
)


@given(results=RESULTS)
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, results: list[Result]) -> None:
    path = tmp_path_factory.mktemp("results") / "results.csv"
    write_results(path, results)
    assert list(read_results(path)) == results


def test_the_columns_are_a_promise(tmp_path: Path) -> None:
    write_results(tmp_path / "r.csv", [Result("query", "left", "", 0.1, 1e-13, 0.2, None, 0.9)])
    assert (tmp_path / "r.csv").read_text() == (
        "split,machine,detail,relative_error,floor,max_error,agreement,r2,note,control\n"
        "query,left,,0.1,1e-13,0.2,,0.9,,False\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "floor", "exact"),
    [(1e-13, None, True), (1e-11, 1e-13, False), (1e-6, 1e-5, True), (None, 1.0, False), (float("nan"), 1.0, False)],
)
def test_exact_means_no_worse_than_rounding(error: float | None, floor: float | None, exact: bool) -> None:
    assert Result("test", "secant", relative_error=error, floor=floor).exact is exact


# Laws of metrics.csv: numbers survive, and a resumed file is the undisturbed one.


LOGGED = ("step", "loss", "kernel_change")


def rows(start: int, end: int) -> list[dict[str, float | int | None]]:
    return [{"step": s, "loss": 1 / (s + 3), "kernel_change": 0.1 if s == 2 else None} for s in range(start, end)]


def append(path: Path, start: int, end: int, keep_bytes: int | None) -> int:
    with MetricsWriter(path, LOGGED, keep_bytes) as metrics:
        for row in rows(start, end):
            metrics.write(row)
        return metrics.size_and_digest[0]


@given(st.floats())
def test_a_float_survives(number: float) -> None:
    read = float(format_cell(number))
    assert read == number or (math.isnan(read) and math.isnan(number))


def test_numpy_numbers_are_plain_numbers() -> None:
    assert [format_cell(np.float64(0.5)), format_cell(int(np.int64(3)))] == ["0.5", "3"]


def test_a_resumed_file_is_the_undisturbed_one(tmp_path: Path) -> None:
    append(tmp_path / "whole.csv", 0, 9, None)
    position = append(tmp_path / "resumed.csv", 0, 4, None)
    append(tmp_path / "resumed.csv", 4, 6, position)
    with (tmp_path / "resumed.csv").open("a") as file:
        file.write("6,0.1")  # a line cut short by a kill
    append(tmp_path / "resumed.csv", 4, 9, position)
    assert (tmp_path / "resumed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_the_seal_is_that_of_the_lines_however_often_the_file_was_resumed(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    append(path, 4, 9, append(path, 0, 4, None))
    with MetricsWriter(path, LOGGED, path.stat().st_size) as metrics:
        assert sealed(tmp_path, ["m.csv"]) == {"m.csv": metrics.size_and_digest}


def test_a_line_is_in_the_file_once_it_is_written_and_has_known_columns(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.csv", LOGGED) as metrics:
        metrics.write({"step": 7, "loss": 1 / 3})
        line = ",".join(["7", "0.3333333333333333", *[""] * (len(LOGGED) - 2)])
        assert (tmp_path / "m.csv").read_text() == f"{','.join(LOGGED)}\n{line}\n"
        with pytest.raises(ValueError, match="accuracy"):
            metrics.write({"accuracy": 1.0})
