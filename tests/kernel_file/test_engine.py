"""Workers of an engine fill a file to the bytes that threads of one process do, whoever of them is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ntkexp.engine.base import Unfinished
from ntkexp.kernel_file import fill as conduct
from ntkexp.kernel_file.fill import EngineCrew, ThreadCrew, TileJob, fill
from ntkexp.kernel_file.filler import AbstractRecipe, LimitRecipe, StartRecipe
from ntkexp.kernel_file.tile import Subject, estimate
from ntkexp.progress import Silent
from ntkexp.records.kernel_file import KernelMatrix, open_matrix
from tests.kernel_file.here import Here
from tests.kernel_file.subjects import Products, ProductsRecipe, filled, subject
from tests.kernel_file.test_fill import contents

TILES = 12  # of 145 points with 70


def conducted(path: Path, engine: Here, *, told: Subject | None = None, seconds: float = 0.0) -> KernelMatrix:
    """The file of products, filled by the workers of an engine, who may be told of another experiment."""
    whole = subject()
    job = TileJob(str(path), (told or whole).experiment.fields(), (), ProductsRecipe())
    crew = EngineCrew(engine, job, seconds)
    return fill(path, whole, Products(), crew, force=False, progress=Silent())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(filled(tmp_path_factory.mktemp("whole") / "k.zarr", subject(), Products()).path)


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 3), (100, 1)])
def test_any_number_of_workers_write_the_same_bytes(
    tmp_path: Path, whole: dict[str, bytes], workers: int, threads: int
) -> None:
    engine = Here(workers, threads)
    assert contents(conducted(tmp_path / "k.zarr", engine).path) == whole
    assert engine.tasks == min(workers, TILES)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        (LimitRecipe(), ["model=mlp"]),
        pytest.param(StartRecipe((0, 3), "all"), ["model.width=8"], marks=pytest.mark.slow),
        (StartRecipe((1,), "trace"), ["model.width=8", "data.classes=[1,3,8]"]),
    ],
)
def test_a_recipe_makes_the_same_kernel_for_every_worker(
    tmp_path: Path, recipe: AbstractRecipe, overrides: Sequence[str]
) -> None:
    experiment = subject(*overrides).experiment
    job = TileJob(str(tmp_path / "k.zarr"), experiment.fields(), (), recipe)
    crew = job.crew(1)
    filled(tmp_path / "alone.zarr", crew.subject, crew.filler, workers=2)
    engines = EngineCrew(Here(3), job, 0.0)
    fill(tmp_path / "k.zarr", crew.subject, crew.filler, engines, force=False, progress=Silent())
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "alone.zarr")


def test_what_lost_workers_left_is_done_by_others(tmp_path: Path, whole: dict[str, bytes]) -> None:
    engine = Here(3, loses=lambda task, tile: task < 4 and tile == task % 2)  # before a tile, or after one
    assert contents(conducted(tmp_path / "k.zarr", engine).path) == whole


def test_workers_that_never_get_further_end_the_command(tmp_path: Path, whole: dict[str, bytes]) -> None:
    path = tmp_path / "k.zarr"
    with pytest.raises(
        Unfinished, match=r"k\.zarr: no worker finished a tile: its process was killed; the same command goes on$"
    ):
        conducted(path, Here(3, loses=lambda task, tile: task > 2 or tile == 2))
    assert len(open_matrix(path).missing()) == TILES - 4  # two tiles each, by the first two
    assert contents(conducted(path, Here(2)).path) == whole


def test_a_worker_with_other_data_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "k.zarr"
    with pytest.raises(
        Unfinished, match=r"k\.zarr is of something else there: that worker has other data or another version$"
    ):
        conducted(path, Here(2), told=subject("data.seed=1"))
    assert len(open_matrix(path).missing()) == TILES


def test_a_file_that_a_worker_does_not_see_is_one_line(tmp_path: Path) -> None:
    job = TileJob(str(tmp_path / "elsewhere.zarr"), subject().experiment.fields(), (), ProductsRecipe())
    with pytest.raises(Unfinished, match=r"a worker does not see .*elsewhere\.zarr; choose a place on a file system"):
        fill(tmp_path / "k.zarr", subject(), Products(), EngineCrew(Here(2), job, 0.0), force=False, progress=Silent())


def test_work_that_is_done_and_not_to_be_seen_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "LATE", 0.0)
    monkeypatch.setattr(TileJob, "carry_out", lambda *asked: "done")
    with pytest.raises(Unfinished, match=r"what they wrote is not to be seen here; the same command goes on$"):
        conducted(tmp_path / "k.zarr", Here(2))


def test_marks_that_show_late_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([[(0, 0), (1, 0)], [(1, 0)], []])
    monkeypatch.setattr(conduct, "PAUSE", 0.0)
    monkeypatch.setattr(KernelMatrix, "unmarked", lambda self, tiles: next(looks))
    assert conduct.left_of(KernelMatrix(tmp_path), [(0, 0), (1, 0)], 60.0) == []


@pytest.mark.parametrize("threads", [None, 2])
def test_a_tile_has_as_many_threads_as_the_experiment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    """Whatever the worker has: they move bits."""
    seen: set[int] = set()
    monkeypatch.setattr(Products, "concurrent", property(lambda self: seen.add(torch.get_num_threads())))
    before, told = torch.get_num_threads(), subject() if threads is None else subject(f"threads={threads}")
    conducted(tmp_path / "k.zarr", Here(2, threads=3), told=told)
    torch.set_num_threads(before)
    assert seen == {threads or 1}


def test_a_fault_of_the_program_says_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Products, "among", lambda self, points: 1 / 0)
    with pytest.raises(
        Unfinished, match=r"ZeroDivisionError: .*; computed by a single worker on this machine, it says"
    ):
        conducted(tmp_path / "k.zarr", Here(2))


def test_a_job_that_is_done_again_computes_only_what_is_missing(tmp_path: Path) -> None:
    path = conducted(tmp_path / "k.zarr", Here(1)).path
    job = TileJob(
        str(path), subject().experiment.fields(), (), ProductsRecipe(), tuple(open_matrix(path).layout.tiling.todo)
    )
    heard: list[object] = []
    assert job.carry_out("again", 1, heard.append) == "found"
    assert heard == []


def test_no_mark_is_lost_among_many_who_write(tmp_path: Path, whole: dict[str, bytes]) -> None:
    path, of = tmp_path / "k.zarr", subject()
    with pytest.raises(KeyboardInterrupt):
        filled(path, of, Products(fails_after=0))
    tiles = open_matrix(path).layout.tiling.todo

    def write(share: int) -> list[int]:
        crew = ThreadCrew(of, Products(), 1)
        return list(crew.complete(open_matrix(path), tiles[share::6], Silent()))

    with ThreadPoolExecutor(6) as others:
        assert list(others.map(write, range(6))) == [[1, 2]] * 6
    assert open_matrix(path).missing() == []
    assert contents(path) == whole


def test_work_that_is_long_is_cut_into_more_tasks(tmp_path: Path) -> None:
    engine = Here(2)
    conducted(tmp_path / "k.zarr", engine, seconds=150.0)
    assert engine.tasks == TILES // 2


def test_an_estimate_is_of_what_is_left(tmp_path: Path) -> None:
    path, of = tmp_path / "k.zarr", subject()
    new = estimate(path, of, Products(each=1e-9), force=False)
    assert (new.tiles, new.seconds) == (TILES, new.pairs * 1e-9)
    with pytest.raises(KeyboardInterrupt):
        filled(path, of, Products(fails_after=2))
    begun = estimate(path, of, Products(each=1e-9), force=False)
    assert begun.tiles == len(open_matrix(path).missing()) < TILES
    assert estimate(path, of, Products(each=1e-9), force=True) == new
    assert estimate(path, subject("data.seed=1"), Products(each=1e-9), force=False) == new


def test_the_pairs_of_an_estimate_are_those_that_are_computed(tmp_path: Path) -> None:
    path, counted = tmp_path / "k.zarr", Counted()
    expected = estimate(path, subject(), counted, force=False).pairs
    filled(path, subject(), counted)
    assert counted.met == expected


@dataclass
class Counted(Products):
    """Counts the pairs of points that it meets, of points among themselves each once."""

    met: int = 0

    def between(self, left: Tensor, right: Tensor) -> Mapping[str, Tensor]:
        self.met += len(left) * len(right)
        return super().between(left, right)

    def among(self, points: Tensor) -> Mapping[str, Tensor]:
        self.met -= len(points) * (len(points) - 1) // 2
        return super().among(points)


def test_a_file_keeps_the_tiles_with_which_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, of = tmp_path / "k.zarr", subject()
    with monkeypatch.context() as larger:
        larger.setattr("ntkexp.kernel_file.tile.side_for", lambda train, seconds: 64)
        with pytest.raises(KeyboardInterrupt):
            filled(path, of, Products(fails_after=1))
    assert estimate(path, of, Products(each=1e-9), force=False).tiles == len(open_matrix(path).missing()) == 4
    assert conducted(path, Here(2)).missing() == []


def test_what_takes_long_is_timed_and_takes_no_less_than_shapes_say(tmp_path: Path) -> None:
    brief, endless = Products(each=1e-5), Products(each=1e3)
    for filler in (brief, endless):
        assert estimate(tmp_path / "k.zarr", subject(), filler, force=False).seconds > 0
    assert brief.seen == []
    assert endless.seen[:2] == [2, 2]
    found = estimate(tmp_path / "k.zarr", subject(), endless, force=False)
    assert found.seconds == 1e3 * found.pairs
    assert not (tmp_path / "k.zarr").exists()
