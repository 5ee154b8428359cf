"""A file holds the kernel whole, however often its filling was broken off, and knows what it is of."""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch
import xarray as xr

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import acquire
from ntkexp.records.kernel_file import KernelMatrix, open_matrix
from tests.kernel_file.subjects import Products, filled, whole

TRAIN, POINTS = 70, 145


def products(path: Path, *overrides: str, workers: int = 1, force: bool = False) -> KernelMatrix:
    return filled(path, Products.of(*overrides, threads=workers), force=force)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_file_holds_the_kernel(tmp_path: Path, dtype: str) -> None:
    matrix = products(tmp_path / "k.zarr", f"dtype={dtype}")
    assert matrix.missing() == []
    for name, expected in whole(Products.of(f"dtype={dtype}")).items():
        found = torch.as_tensor(matrix.array(name))[:, 0, :, 0]
        assert found.dtype == getattr(torch, dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert torch.equal(found[:TRAIN], found[:TRAIN].mH)
    kernel = Products.of(f"dtype={dtype}")
    own = kernel.among(kernel.inputs)["ntk"][:, 0, :, 0].diagonal()
    torch.testing.assert_close(torch.as_tensor(matrix.array("ntk_self"))[:, 0, 0], own, rtol=0, atol=0)


def test_the_file_opens_labelled(tmp_path: Path) -> None:
    products(tmp_path / "k.zarr")
    with xr.open_zarr(tmp_path / "k.zarr", consolidated=False) as store:
        assert store["ntk"].dims == ("probe", "out", "train", "out_")
        assert store["ntk"].shape == (POINTS, 1, TRAIN, 1)
    found = open_matrix(tmp_path / "k.zarr")
    assert {name: place.stop for name, place in found.splits.items()} == {"train": 70, "probe": 100, "test": 145}
    assert found.description["data"] == "digits"


def test_the_same_bytes_whoever_computes_and_however_often_it_is_broken_off(tmp_path: Path) -> None:
    products(tmp_path / "whole.zarr", workers=1)
    products(tmp_path / "crowd.zarr", workers=3)
    broken = tmp_path / "broken.zarr"
    for tiles, missing in ((2, 10), (4, 6), (10, 6)):  # the last goes astray among single points
        with pytest.raises(KeyboardInterrupt):
            filled(broken, Products.of(fails_after=tiles))
        assert len(open_matrix(broken).missing()) == missing
    filled(broken, Products.of())
    assert contents(broken) == contents(tmp_path / "whole.zarr") == contents(tmp_path / "crowd.zarr")


def test_what_was_computed_is_kept_though_another_tile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two is heard of first."""

    def all_at_once(running: set[Future[object]], return_when: str) -> tuple[list[Future[object]], set[Future[object]]]:
        return sorted(wait(running).done, key=lambda future: future.exception() is None), set()

    monkeypatch.setattr("ntkexp.kernel_file.fill.wait", all_at_once)
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path / "k.zarr", Products.of(fails_after=1))
    assert len(open_matrix(tmp_path / "k.zarr").missing()) == 11


def test_what_is_finished_is_not_computed_again(tmp_path: Path) -> None:
    path, again = tmp_path / "k.zarr", Products.of()
    products(path)
    filled(path, again)
    assert again.seen == []
    filled(path, again, force=True)
    assert again.seen


@pytest.mark.sample(2)
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
    products(path)
    with pytest.raises(Mistake, match=f"{reason}; choose another place, or compute it anew$"):
        products(path, *other)
    assert products(path, *other, force=True).missing() == []


def test_a_folder_that_is_no_kernel_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(Mistake, match="no store of arrays"):
            products(tmp_path, force=force)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_that_would_take_years_is_not_begun(tmp_path: Path) -> None:
    years = r"data\.train=70, 145 points in all: this would take about 24 years on one core, more than 10 years; lower"
    with pytest.raises(Mistake, match=years):  # 70² / 2 + 75 · 70 pairs
        filled(tmp_path / "k.zarr", Products.of(each=1e5))
    assert not (tmp_path / "k.zarr").exists()


def test_one_process_writes(tmp_path: Path) -> None:
    acquire(tmp_path / ".k.zarr.lock")
    with pytest.raises(Mistake, match="is being written by another process"):
        products(tmp_path / "k.zarr")


def test_a_disk_that_is_too_small_is_found_out_before_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntkexp.kernel_file.fill.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(Mistake, match=r"the kernel takes .* GB and there are 1e-06 GB free"):
        products(tmp_path / "k.zarr")
