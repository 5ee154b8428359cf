"""A seal sees every damage, and whatever was written for another place."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json, being_sealed, read_sealed, sealed_for, sealed_text
from ntkexp.records.data import Trajectory
from ntkexp.records.folder import RunFolder
from tests.torture.damage import HARMS

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
    assert folder.whole
    folder.write("kernels.zarr/c/0", harmed(seed, bytes(range(100)), b"other"))
    folder.check("config.json")
    assert folder.broken("config.json", "kernels.zarr") == ["kernels.zarr/c/0"]
    assert not folder.whole
    with pytest.raises(Mistake, match=r"^[^\n]*kernels\.zarr/c/0 not as it was written[^\n]*$"):
        folder.check("kernels.zarr")


def test_what_is_judged_is_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be replaced at any time: it is read once."""
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
    """JSON reads the last of them."""
    path = tmp_path / "told.json"
    path.write_text(sealed_text({"steps": 3}, "told").replace("{", '{\n  "steps": 3,', 1), encoding="utf-8")
    with pytest.raises(Mistake, match="not as it was written"):
        read_sealed(path, "told")


def test_what_nobody_vouches_for_is_broken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write("config.json", "{}")
    assert folder.broken("config.json") == ["BEGUN.json"]
    folder.begin(["config.json"])
    assert folder.broken("config.json", "data.npz") == ["data.npz"]


def test_a_large_file_is_measured_until_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkexp.records.folder.SMALL", 10)
    folder = RunFolder(tmp_path)
    folder.write("large", bytes(11))
    folder.finish(["large"])
    folder.write("large", bytes(10) + b"1")
    assert folder.done
    assert not folder.whole
    folder.write("large", bytes(12))
    assert not folder.done


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_a_trajectory(tmp_path: Path, seed: int) -> None:
    """A row is read as it was written, or not at all: not where another was, and not of another run."""
    rows = [Trajectory(tmp_path / of, 5, 3, "float64", of) for of in ("one", "other")]
    numbers = np.random.default_rng(seed).normal(size=(5, 3))
    for each in rows:
        each.take_room()
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
