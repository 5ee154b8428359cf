"""Laws of the stores: labelled, repeatable to the byte, readable whatever happened to the writer."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json, being_sealed, read_object, read_sealed, sealed_for, sealed_text
from ntkexp.records.contributions import ContributionsByRule, write_contributions
from ntkexp.records.data import Trajectory, read_data, write_data
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import (
    NOT_YET,
    create_kernels,
    finish_kernels,
    get_array,
    open_store,
    read_predictions,
    read_steps,
    write_path_kernel,
    write_predictions,
    write_snapshot,
)
from ntkexp.records.results import COLUMNS, read_results
from ntkexp.records.sweep import Fit, Sweep, SweepRun, read_sweep, write_sweep
from tests.torture.damage import HARMS

WRITE_FOREVER = """
import sys
from itertools import count
from pathlib import Path
import numpy as np
from ntkexp.records.kernels import create_kernels, write_snapshot
path = Path(sys.argv[1])
create_kernels(path, 200, 1, 100, 4000)
print("go", flush=True)
for k in range(4000):
    write_snapshot(path, k, 10 * k, np.full((200, 1, 100, 1), float(k)), np.full((100, 1), float(k)))
"""


def kernel(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=(5, 2, 3, 2))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def write_all(folder: Path) -> None:
    folder.mkdir()
    create_kernels(folder / "kernels.zarr", 5, 2, 3, 3)
    write_snapshot(folder / "kernels.zarr", 0, 0, kernel(0), kernel(0)[0, 0])
    write_snapshot(folder / "kernels.zarr", 1, 1, kernel(1), kernel(1)[0, 0])
    write_path_kernel(folder / "kernels.zarr", "secant", kernel(2), range(5), range(2))
    finish_kernels(folder / "kernels.zarr")
    parts = ContributionsByRule(kernel(3)[..., 0], facts={"error_bar": 0.1})
    write_contributions(folder / "contributions.zarr", {"left": parts, "secant": parts}, [4, 7, 9], [0, 1])
    write_predictions(folder / "predictions.zarr", {"f_0": kernel(4)[..., 0, 0], "secant": kernel(5)[..., 0, 0]})
    write_data(folder / "data.npz", {"train_index": np.arange(3), "classes": np.array(["a", "b"])})


def test_two_times_the_same_bytes(tmp_path: Path) -> None:
    write_all(tmp_path / "one")
    write_all(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_all(tmp_path / "run")
    path = tmp_path / "run" / "kernels.zarr"
    assert read_steps(path).tolist() == [0, 1]
    np.testing.assert_array_equal(get_array(open_store(path), "tangent")[1], kernel(1))
    np.testing.assert_array_equal(get_array(open_store(path), "path_secant")[...], kernel(2))
    assert list(read_predictions(tmp_path / "run" / "predictions.zarr")) == ["f_0", "secant"]
    assert read_data(tmp_path / "run" / "data.npz")["classes"].tolist() == ["a", "b"]


def test_xarray_names_every_axis(tmp_path: Path) -> None:
    write_all(tmp_path / "run")
    kernels = xr.open_zarr(tmp_path / "run" / "kernels.zarr", consolidated=False)
    assert kernels["tangent"].dims == ("snapshot", "query", "out", "train", "out_")
    assert kernels["path_secant"].dims == ("query", "out", "train", "out_")
    assert kernels["step"].dims == ("snapshot",)
    contributions = xr.open_zarr(tmp_path / "run" / "contributions.zarr", consolidated=False)
    assert contributions["contribution"].dims == ("query", "out", "example")
    assert contributions["contribution"].attrs == {"error_bar": 0.1, "rule": "secant"}
    assert contributions["contribution_left"].attrs["rule"] == "left"
    predictions = xr.open_zarr(tmp_path / "run" / "predictions.zarr", consolidated=False)
    assert predictions["prediction"].dims == ("machine", "query", "out")
    assert predictions.attrs["machines"] == ["f_0", "secant"]


def test_nothing_is_kept_of_points_and_outputs_at_which_the_path_is_not_known(tmp_path: Path) -> None:
    create_kernels(tmp_path / "k", 100, 8, 5, 1)
    found = np.full((100, 2, 5, 8), np.nan)
    found[[3, 70, 71]] = np.random.default_rng(0).normal(size=(3, 2, 5, 8))
    for _ in range(2):  # the second after a kill
        write_path_kernel(tmp_path / "k", "secant", found, [3, 70, 71], [1, 6])
    expected = np.full((100, 8, 5, 8), np.nan)
    expected[:, [1, 6]] = found
    np.testing.assert_array_equal(get_array(open_store(tmp_path / "k"), "path_secant")[...], expected)
    written = sum(map(len, contents(tmp_path / "k" / "path_secant" / "c").values()))
    assert written == 2 * 2 * 16 * 5 * 8 * 8  # two places of 16 points, at two outputs


def test_snapshots_that_were_not_reached_are_trimmed(tmp_path: Path) -> None:
    create_kernels(tmp_path / "k", 5, 2, 3, 7)
    write_snapshot(tmp_path / "k", 0, 0, kernel(0), kernel(0)[0, 0])
    assert read_steps(tmp_path / "k").tolist() == [0] + [NOT_YET] * 6
    assert finish_kernels(tmp_path / "k") == 1
    assert read_steps(tmp_path / "k").tolist() == [0]
    np.testing.assert_array_equal(get_array(open_store(tmp_path / "k"), "tangent")[0], kernel(0))


def test_traces_are_kept_as_matrices(tmp_path: Path) -> None:
    create_kernels(tmp_path / "k", 5, 2, 3, 2, traced=True)
    trace = np.arange(15.0).reshape(5, 1, 3, 1)
    write_snapshot(tmp_path / "k", 0, 0, trace, kernel(0)[0, 0])
    finish_kernels(tmp_path / "k")
    np.testing.assert_array_equal(get_array(open_store(tmp_path / "k"), "trace")[0], trace[:, 0, :, 0])
    found = xr.open_zarr(tmp_path / "k", consolidated=False)
    assert found["trace"].dims == ("snapshot", "query", "train")
    assert found["output_gradient"].sizes == {"snapshot": 1, "train": 3, "out_": 2}


def test_a_kernel_of_zeros_and_one_of_nan_are_kept(tmp_path: Path) -> None:
    create_kernels(tmp_path / "k", 5, 2, 3, 2)
    for index, value in enumerate((0.0, np.nan)):
        write_snapshot(tmp_path / "k", index, index, np.full((5, 2, 3, 2), value), np.full((3, 2), value))
        np.testing.assert_array_equal(get_array(open_store(tmp_path / "k"), "tangent")[index], value)


@pytest.mark.parametrize("part", ["kernel", "output_gradient"])
def test_a_snapshot_that_was_broken_off_is_none(tmp_path: Path, part: str) -> None:
    """At any place: a step can be read only if all its arrays can."""
    create_kernels(tmp_path / "k", 5, 2, 3, 2)
    whole: dict[str, Any] = {"kernel": kernel(0), "output_gradient": kernel(0)[0, 0]}
    with pytest.raises(ValueError, match="broken off"):
        write_snapshot(tmp_path / "k", 0, 10, **whole | {part: np.full(whole[part].shape, "broken off")})
    assert read_steps(tmp_path / "k").tolist() == [NOT_YET, NOT_YET]


@pytest.mark.slow
@pytest.mark.parametrize("written", [1, 20])
def test_a_killed_writer_leaves_whole_kernels(tmp_path: Path, written: int) -> None:
    path = tmp_path / "kernels.zarr"
    with subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        while not (path / "step" / "c" / str(written)).exists():
            assert writer.poll() is None
        os.kill(writer.pid, signal.SIGKILL)
    steps = read_steps(path)
    count = int((steps != NOT_YET).sum())
    assert count > written
    np.testing.assert_array_equal(steps[:count], 10 * np.arange(count))  # none is missing before the last
    for k in (0, written, count - 1):
        np.testing.assert_array_equal(get_array(open_store(path), "tangent")[k], k)
    finish_kernels(path)
    assert not list(path.rglob("*.partial"))
    assert set(xr.open_zarr(path, consolidated=False).sizes.values()) == {count, 200, 1, 100}


def npz_of_objects() -> bytes:
    """Arrays whose reading would run code."""
    file = io.BytesIO()
    np.savez(file, a=np.array([{}], dtype=object))
    return file.getvalue()


HEADER = ",".join(COLUMNS)
READERS: dict[str, Callable[[Path], object]] = {
    "data.npz": read_data,
    "results.csv": read_results,
    "config.json": read_object,
    "kernels.zarr": read_steps,
}
DAMAGED = [
    *(("data.npz", content) for content in (b"", b"PK\x03\x04", b"text", npz_of_objects())),
    *(("results.csv", content) for content in (b"", b"a,b\n1,2\n")),
    *(("results.csv", f"{HEADER}\n{row}\n".encode()) for row in ("x,y,,word,,,,,,False", "x,y,,,,,,,,maybe")),
    *(("config.json", content) for content in (b"", b"{", b"[]", b"\xff")),
    ("kernels.zarr", None),  # an empty folder
]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(Mistake, match=rf"^[^\n]*{re.escape(name)}[^\n]*$"):
        READERS[name](path)


# A seal sees every damage, and whatever was written for another place.


SEEDS = range(8)


def harmed(seed: int, content: bytes, other: bytes) -> bytes:
    """Damaged for certain."""
    luck = Random(seed)
    while True:
        found = luck.choice(HARMS)(luck, content, other)
        if found != content:
            return found


def states(folder: Path) -> list[bytes]:
    """The files of two runs, each with its seal behind it."""
    for of in ("one", "other"):
        with being_sealed(folder / of, of) as file:
            file.write(f"a state of {of}".encode() * 9)
    return [(folder / of).read_bytes() for of in ("one", "other")]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sealed_file(tmp_path: Path, seed: int) -> None:
    content, other = states(tmp_path)
    assert sealed_for(tmp_path / "one", "one")
    (tmp_path / "one").write_bytes(harmed(seed, content, other))
    assert not sealed_for(tmp_path / "one", "one")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sealed_object(tmp_path: Path, seed: int) -> None:
    """Blanks between its words may come and go; another sealed object is that other one."""
    told: dict[str, Json] = {"é": [1.5, None], "run": 3}
    path = tmp_path / "o.json"
    path.write_bytes(harmed(seed, sealed_text(told, "o.json").encode(), b"{}"))
    try:
        assert read_sealed(path, "o.json") == told
    except Mistake as mistake:
        assert str(path) in str(mistake)  # noqa: PT017  either end is right


@pytest.mark.parametrize("seed", SEEDS)
def test_the_files_of_a_folder(tmp_path: Path, seed: int) -> None:
    folder = RunFolder(tmp_path)
    folder.write("kernels.zarr/c/0", bytes(range(100)))
    folder.write("config.json", "{}")
    folder.finish(["config.json", "kernels.zarr"])
    folder.check("config.json", "kernels.zarr")
    assert folder.is_intact
    folder.write("kernels.zarr/c/0", harmed(seed, bytes(range(100)), b"other"))
    folder.check("config.json")
    assert folder.damaged_files("config.json", "kernels.zarr") == ["kernels.zarr/c/0"]
    assert not folder.is_intact
    with pytest.raises(Mistake, match=r"^[^\n]*kernels\.zarr/c/0 not as it was written[^\n]*$"):
        folder.check("kernels.zarr")


def test_what_is_judged_is_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be replaced at any time, so it is read only once."""
    path, reads = tmp_path / "told.json", list[Path]()
    path.write_text(sealed_text({"steps": 3}, "told"))
    open_file = io.open

    def counted(file: Path, *rest: Any, **more: Any) -> Any:
        reads.append(file)
        return open_file(file, *rest, **more)

    monkeypatch.setattr(io, "open", counted)
    assert read_sealed(path, "told") == {"steps": 3}
    assert reads == [path]


def test_a_key_that_stands_twice_is_damage(tmp_path: Path) -> None:
    """JSON reads the last one."""
    path = tmp_path / "told.json"
    path.write_text(sealed_text({"steps": 3}, "told").replace("{", '{\n  "steps": 3,', 1), encoding="utf-8")
    with pytest.raises(Mistake, match="not as it was written"):
        read_sealed(path, "told")


def test_what_nobody_vouches_for_is_broken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write("config.json", "{}")
    assert folder.damaged_files("config.json") == ["BEGUN.json"]
    folder.begin(["config.json"])
    assert folder.damaged_files("config.json", "data.npz") == ["data.npz"]


def test_a_large_file_is_measured_until_it_is_read(tmp_path: Path) -> None:
    folder, most = RunFolder(tmp_path), 1 << 20
    folder.write("large", bytes(most + 1))
    folder.finish(["large"])
    folder.write("large", bytes(most) + b"1")
    assert folder.done
    assert not folder.is_intact
    folder.write("large", bytes(most + 2))
    assert not folder.done


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_a_trajectory(tmp_path: Path, seed: int) -> None:
    """A row is read unchanged or refused, also in another place or run."""
    rows = [Trajectory(tmp_path / of, 5, 3, "float64", of) for of in ("one", "other")]
    numbers = np.random.default_rng(seed).normal(size=(5, 3))
    for each in rows:
        each.allocate()
        for row in range(4):
            each.write(row, numbers[row])
    contents = [each.path.read_bytes() for each in rows]
    rows[0].path.write_bytes(harmed(seed, *contents))
    seen = []
    for row in range(5):
        try:
            np.testing.assert_array_equal(rows[0].read(row), numbers[row])
        except Mistake:
            seen.append(row)
    begin = rows[0].row_bytes * np.arange(6)
    found = rows[0].path.read_bytes()
    assert seen == [
        k for k in range(5) if k == 4 or found[begin[k] : begin[k + 1]] != contents[0][begin[k] : begin[k + 1]]
    ]


# The record of a sweep is read unchanged, in any folder.


def small(outputs: Path) -> Sweep:
    runs = [
        SweepRun(folder=outputs / "runs" / f"w{width}-{seed}", axes={"model.width": width, "data": None}, seed=seed,
                 state="failed" if seed else "done", reason="it is too large" * seed)
        for width in (64, 8) for seed in (0, 1)
    ]  # fmt: skip
    return Sweep(
        path=outputs / "sweeps" / "width.json",
        name="width",
        command="ntkexp sweep width",
        axes={"model.width": (64, 8), "data": (None,)},
        seeds=(0, 1),
        base=("steps=3",),
        fits=(
            Fit(quantity="kernel_change", axis="model.width", exponent=-0.5, bound="upper"),
            Fit(quantity="loss", axis="data"),
        ),
        runs=tuple(runs),
    )


def test_a_record_of_another_sweep_is_not_read(tmp_path: Path) -> None:
    write_sweep(small(tmp_path))
    other = Path(shutil.copyfile(tmp_path / "sweeps" / "width.json", tmp_path / "sweeps" / "depth.json"))
    with pytest.raises(Mistake, match="not as it was written for this place"):
        read_sweep(other)


def test_a_record_is_read_as_it_was_written_also_if_it_was_moved_with_its_runs(tmp_path: Path) -> None:
    write_sweep(small(tmp_path / "one"))
    assert read_sweep(tmp_path / "one" / "sweeps" / "width.json") == small(tmp_path / "one")
    shutil.move(tmp_path / "one", tmp_path / "two")
    assert read_sweep(tmp_path / "two" / "sweeps" / "width.json") == small(tmp_path / "two")


def test_a_record_that_says_the_same_is_left_alone(tmp_path: Path) -> None:
    sweep = small(tmp_path)
    write_sweep(sweep)
    before = sweep.path.stat().st_ino
    write_sweep(sweep)
    assert sweep.path.stat().st_ino == before
    write_sweep(replace(sweep, base=()))
    assert sweep.path.stat().st_ino != before
    assert read_sweep(sweep.path).base == ()


def test_a_list_on_an_axis_goes_by_its_text(tmp_path: Path) -> None:
    rules: list[Any] = [["left"], ["secant", "left"]]
    runs = [SweepRun(folder=tmp_path, axes={"path.rule": each}, seed=0, state="unfinished") for each in rules]
    sweep = replace(small(tmp_path), axes={"path.rule": tuple(rules)}, fits=(), runs=tuple(runs))
    write_sweep(sweep)
    assert [run.point for run in read_sweep(sweep.path).runs] == [("['left']",), ("['secant', 'left']",)]
