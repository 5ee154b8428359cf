"""A file holds the kernel whole, however often its filling was broken off, and knows what it is of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xarray as xr

from ntkexp.kernel_file.fill.fill import fill
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.records.kernel_file.store import KernelMatrix, open_matrix
from ntkexp.records.lock import acquire
from tests.kernel_file.subjects import Products, subject, whole

TRAIN, POINTS = 70, 145


def filled(path: Path, *overrides: str, workers: int = 1, force: bool = False) -> KernelMatrix:
    return fill(path, subject(*overrides), Products(), workers=workers, force=force, progress=Silent())


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_file_holds_the_kernel(tmp_path: Path, dtype: str) -> None:
    matrix = filled(tmp_path / "k.zarr", f"dtype={dtype}")
    assert matrix.missing() == []
    for name, expected in whole(subject(f"dtype={dtype}")).items():
        found = torch.as_tensor(matrix.array(name))[:, 0, :, 0]
        assert found.dtype == getattr(torch, dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert torch.equal(found[:TRAIN], found[:TRAIN].mH)
    own = Products().among(subject(f"dtype={dtype}").inputs)["ntk"][:, 0, :, 0].diagonal()
    torch.testing.assert_close(torch.as_tensor(matrix.array("ntk_self"))[:, 0, 0], own, rtol=0, atol=0)


def test_the_file_opens_labelled(tmp_path: Path) -> None:
    filled(tmp_path / "k.zarr")
    with xr.open_zarr(tmp_path / "k.zarr", consolidated=False) as store:
        assert store["ntk"].dims == ("probe", "out", "train", "out_")
        assert store["ntk"].shape == (POINTS, 1, TRAIN, 1)
    found = open_matrix(tmp_path / "k.zarr")
    assert {name: place.stop for name, place in found.splits.items()} == {"train": 70, "probe": 100, "test": 145}
    assert found.description["data"] == "digits"


def test_the_same_bytes_whoever_computes_and_however_often_it_is_broken_off(tmp_path: Path) -> None:
    filled(tmp_path / "whole.zarr", workers=1)
    filled(tmp_path / "crowd.zarr", workers=3)
    broken = tmp_path / "broken.zarr"
    for tiles, missing in ((2, 10), (4, 6), (10, 6)):  # the last goes astray among single points
        with pytest.raises(KeyboardInterrupt):
            fill(broken, subject(), Products(fails_after=tiles), workers=1, force=False, progress=Silent())
        assert len(open_matrix(broken).missing()) == missing
    rest = Products()
    fill(broken, subject(), rest, workers=1, force=False, progress=Silent())
    assert contents(broken) == contents(tmp_path / "whole.zarr") == contents(tmp_path / "crowd.zarr")


def test_what_is_finished_is_not_computed_again(tmp_path: Path) -> None:
    path, again = tmp_path / "k.zarr", Products()
    filled(path)
    fill(path, subject(), again, workers=1, force=False, progress=Silent())
    assert again.seen == []
    fill(path, subject(), again, workers=1, force=True, progress=Silent())
    assert again.seen


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (("data.seed=1",), "is of other data"),
        (("data.train=71",), "is of other data"),
        (("data=moons",), "is of other data"),
        (("dtype=float32",), "is of dtype=float64"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, other: tuple[str, ...], reason: str) -> None:
    path = tmp_path / "k.zarr"
    filled(path)
    with pytest.raises(Mistake, match=f"{reason}; choose another place, or compute it anew$"):
        filled(path, *other)
    assert filled(path, *other, force=True).missing() == []


def test_a_folder_that_is_no_kernel_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(Mistake, match="no store of arrays"):
            filled(tmp_path, force=force)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_that_would_take_years_is_not_begun(tmp_path: Path) -> None:
    years = r"data\.train=70, 145 points in all: this would take about 24 years on one core, more than 10 years; lower"
    with pytest.raises(Mistake, match=years):  # 70² / 2 + 75 · 70 pairs
        fill(tmp_path / "k.zarr", subject(), Products(each=1e5), workers=1, force=False, progress=Silent())
    assert not (tmp_path / "k.zarr").exists()


def test_one_process_writes(tmp_path: Path) -> None:
    acquire(tmp_path / ".k.zarr.lock")
    with pytest.raises(Mistake, match="is being written by another process"):
        filled(tmp_path / "k.zarr")


def test_a_disk_that_is_too_small_is_found_out_before_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntkexp.kernel_file.fill.fill.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(Mistake, match=r"the kernel takes .* GB and there are 1e-06 GB free"):
        filled(tmp_path / "k.zarr")
