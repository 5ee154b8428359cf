"""Laws of the stores: labelled, repeatable to the byte, readable whatever happened to the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ntkexp.mistake import Mistake
from ntkexp.records.contributions import ContributionsByRule, write_contributions
from ntkexp.records.data import read_data, write_data
from ntkexp.records.kernels import (
    NOT_YET,
    create_kernels,
    finish_kernels,
    get_array,
    open_store,
    read_predictions,
    read_snapshot,
    read_steps,
    write_path_kernel,
    write_predictions,
    write_snapshot,
)

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
    np.testing.assert_array_equal(read_snapshot(path, 1), kernel(1))
    np.testing.assert_array_equal(get_array(open_store(path), "path_secant")[...], kernel(2))
    assert list(read_predictions(tmp_path / "run" / "predictions.zarr")) == ["f_0", "secant"]
    assert read_data(tmp_path / "run" / "data.npz")["classes"].tolist() == ["a", "b"]


def test_xarray_names_every_axis(tmp_path: Path) -> None:
    write_all(tmp_path / "run")
    kernels = xr.open_zarr(tmp_path / "run" / "kernels.zarr", consolidated=False)
    assert kernels["tangent"].dims == ("snapshot", "probe", "out", "train", "out_")
    assert kernels["path_secant"].dims == ("probe", "out", "train", "out_")
    assert kernels["step"].dims == ("snapshot",)
    contributions = xr.open_zarr(tmp_path / "run" / "contributions.zarr", consolidated=False)
    assert contributions["contribution"].dims == ("probe", "out", "example")
    assert contributions["contribution"].attrs == {"error_bar": 0.1, "rule": "secant"}
    assert contributions["contribution_left"].attrs["rule"] == "left"
    predictions = xr.open_zarr(tmp_path / "run" / "predictions.zarr", consolidated=False)
    assert predictions["prediction"].dims == ("machine", "probe", "out")
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
    np.testing.assert_array_equal(read_snapshot(tmp_path / "k", 0), kernel(0))


def test_traces_are_kept_as_matrices_and_read_as_kernels_of_one_output(tmp_path: Path) -> None:
    create_kernels(tmp_path / "k", 5, 2, 3, 2, traced=True)
    trace = np.arange(15.0).reshape(5, 1, 3, 1)
    write_snapshot(tmp_path / "k", 0, 0, trace, kernel(0)[0, 0])
    finish_kernels(tmp_path / "k")
    np.testing.assert_array_equal(read_snapshot(tmp_path / "k", 0), trace)
    found = xr.open_zarr(tmp_path / "k", consolidated=False)
    assert found["trace"].dims == ("snapshot", "probe", "train")
    assert found["output_gradient"].sizes == {"snapshot": 1, "train": 3, "out_": 2}


def test_a_kernel_of_zeros_and_one_of_nan_are_kept(tmp_path: Path) -> None:
    create_kernels(tmp_path / "k", 5, 2, 3, 2)
    for index, value in enumerate((0.0, np.nan)):
        write_snapshot(tmp_path / "k", index, index, np.full((5, 2, 3, 2), value), np.full((3, 2), value))
        np.testing.assert_array_equal(read_snapshot(tmp_path / "k", index), value)


@pytest.mark.parametrize("part", ["kernel", "output_gradient"])
def test_a_snapshot_that_was_broken_off_is_none(tmp_path: Path, part: str) -> None:
    """Wherever that was: a step can be read when all that belongs to it can."""
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
        np.testing.assert_array_equal(read_snapshot(path, k), k)
    finish_kernels(path)
    assert not list(path.rglob("*.partial"))
    assert set(xr.open_zarr(path, consolidated=False).sizes.values()) == {count, 200, 1, 100}


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"text"])
def test_damaged_data_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(Mistake, match=r"^[^\n]*data\.npz[^\n]*$"):
        read_data(tmp_path / "data.npz")


def test_data_that_would_run_code_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", a=np.array([{}], dtype=object))
    with pytest.raises(Mistake, match=r"^[^\n]*data\.npz[^\n]*$"):
        read_data(tmp_path / "data.npz")


def test_a_store_that_is_none_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "kernels.zarr").mkdir()
    with pytest.raises(Mistake, match=r"^[^\n]*kernels\.zarr[^\n]*$"):
        read_steps(tmp_path / "kernels.zarr")
