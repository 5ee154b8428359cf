"""A kernel file of which a file is damaged is filled to the bytes of one left alone, or refused; so is what it says."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ntkexp.kernel_file.predict import Entries
from ntkexp.mistake import Mistake
from ntkexp.records.kernel_file import open_matrix
from tests.kernel_file.subjects import Products, filled
from tests.kernel_file.test_fill import contents
from tests.torture.damage import damage

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file left alone, the same broken off, and one of other data."""
    place = tmp_path_factory.mktemp("places")
    filled(place / "whole", Products.of())
    filled(place / "twin", Products.of("data.seed=1"))
    with pytest.raises(KeyboardInterrupt):
        filled(place / "begun", Products.of(fails_after=5))
    return place


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("state", ["begun", "whole"])
def test_it_is_filled_again(places: Path, tmp_path: Path, state: str, seed: int) -> None:
    path = Path(shutil.copytree(places / state, tmp_path / "k.zarr"))
    done = damage(Random(seed), path, places / "twin")
    try:
        filled(path, Products.of())
    except Mistake as mistake:
        assert str(path) in str(mistake)  # noqa: PT017  either end is right
        filled(path, Products.of(), force=True)
    assert contents(path) == contents(places / "whole"), done


@pytest.mark.parametrize("word", ["group", "zarr_format", "identity", "splits"])
def test_every_word_that_a_file_says_of_itself_is_sealed(places: Path, tmp_path: Path, word: str) -> None:
    path = Path(shutil.copytree(places / "whole", tmp_path / "k.zarr"))
    told = (path / "zarr.json").read_text("utf-8")
    (path / "zarr.json").write_text(told.replace(word, word.upper()), encoding="utf-8")
    with pytest.raises(Mistake, match=r"zarr\.json; compute it anew$"):
        open_matrix(path)


@pytest.mark.parametrize("name", ["zarr.json", "done/zarr.json", "ntk_self/zarr.json"])
def test_force_takes_what_is_left_of_a_file(places: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(places / "begun", tmp_path / "k.zarr"))
    (path / name).unlink()
    with pytest.raises(Mistake, match=r"compute it anew$"):
        open_matrix(path)
    filled(path, Products.of(), force=True)
    assert contents(path) == contents(places / "whole")


def test_marks_that_nobody_made_are_taken_away(places: Path, tmp_path: Path) -> None:
    """Of a tile that is missing, and of one that is the mirror image of another."""
    path = Path(shutil.copytree(places / "begun", tmp_path / "k.zarr"))
    for row in range(2):
        marks = np.frombuffer((path / "done" / "c" / str(row) / "0").read_bytes(), "<u8")
        (path / "done" / "c" / str(row) / "0").write_bytes(np.where(marks, marks, 7).tobytes())
    filled(path, Products.of())
    assert contents(path) == contents(places / "whole")


@pytest.mark.parametrize("seed", SEEDS)
def test_what_it_says_is_what_was_written(places: Path, tmp_path: Path, seed: int) -> None:
    path = Path(shutil.copytree(places / "whole", tmp_path / "k.zarr"))
    done, right = damage(Random(seed), path, places / "twin"), Entries(open_matrix(places / "whole"))
    try:
        found = Entries(open_matrix(path))
    except Mistake as mistake:
        assert str(path) in str(mistake)  # noqa: PT017  either end is right
        return
    for kernel in ("nngp", "ntk"):
        assert found.among(kernel).equal(right.among(kernel)), done
    assert found.targets.equal(right.targets), done
