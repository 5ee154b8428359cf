"""Workers of an engine fill a file to the same bytes as threads of one process, if any workers are lost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ntkexp.engine.base import Ended, ReportEvent, Task, Unfinished, ignore
from ntkexp.kernel_file import fill as conduct
from ntkexp.kernel_file.fill import TileJob, estimate, fill, fill_tiles, unmarked_tiles
from ntkexp.kernel_file.kernel import AbstractKernel, EmpiricalKernel, InfiniteKernel
from ntkexp.kernel_file.predict import Entries
from ntkexp.mistake import Mistake
from ntkexp.records.kernel_file import KernelMatrix, open_matrix
from tests.kernel_file.subjects import Here, HereWorkers, Products, filled
from tests.kernel_file.test_fill import contents
from tests.torture.damage import damage

TILES = 12  # of 145 points with 70


def conducted(path: Path, engine: Here, *overrides: str, seconds: float = 0.0) -> KernelMatrix:
    """The file of products, filled by the workers of an engine."""
    return fill(Products.of(*overrides), path, engine, seconds=seconds)


def job_of(path: Path, tiles: Sequence[tuple[int, int]] = ()) -> TileJob:
    """Some tiles of the file of products."""
    kernel = Products.of()
    return TileJob(str(path), kernel.experiment.fields(), (), Products, kernel.options, tuple(tiles))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return contents(filled(tmp_path_factory.mktemp("whole") / "k.zarr", Products.of()).path)


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 3), (100, 1)])
def test_any_number_of_workers_write_the_same_bytes(
    tmp_path: Path, whole: dict[str, bytes], workers: int, threads: int
) -> None:
    engine = Here(workers, threads)
    assert contents(conducted(tmp_path / "k.zarr", engine).path) == whole
    assert engine.tasks == min(workers, TILES)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "options", "overrides"),
    [
        (InfiniteKernel, {}, ["model=mlp"]),
        pytest.param(EmpiricalKernel, {"seeds": (0, 3)}, ["model.width=8"], marks=pytest.mark.slow),
        (EmpiricalKernel, {"seeds": (1,), "chosen_outputs": "trace"}, ["model.width=8", "data.classes=[1,3,8]"]),
    ],
)
def test_every_worker_makes_the_same_kernel(
    tmp_path: Path, kind: type[AbstractKernel], options: dict[str, Any], overrides: Sequence[str]
) -> None:
    some = Products.of(*overrides)
    kernel = TileJob("", some.experiment.fields(), (), kind, options).kernel(2)
    filled(tmp_path / "alone.zarr", kernel)
    fill(kernel, tmp_path / "k.zarr", Here(3))
    assert contents(tmp_path / "k.zarr") == contents(tmp_path / "alone.zarr")


def test_what_lost_workers_left_is_done_by_others(tmp_path: Path, whole: dict[str, bytes]) -> None:
    engine = Here(3, loses=lambda task, tile: task < 4 and tile == task % 2)  # before a tile, or after one
    assert contents(conducted(tmp_path / "k.zarr", engine).path) == whole


def test_workers_that_never_get_further_end_the_command(tmp_path: Path, whole: dict[str, bytes]) -> None:
    path = tmp_path / "k.zarr"
    with pytest.raises(
        Unfinished, match=r"k\.zarr: no worker finished a tile: its process was killed; the same command continues$"
    ):
        conducted(path, Here(3, loses=lambda task, tile: task > 2 or tile == 2))
    assert len(open_matrix(path).missing()) == TILES - 4  # two tiles each, by the first two
    assert contents(conducted(path, Here(2)).path) == whole


@dataclass(frozen=True, eq=False)
class Elsewhere(Products):
    """Products of other data where a worker rebuilds them."""

    @property
    def options(self) -> dict[str, Any]:
        return {"each": self.each + 1}

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "products", "each": self.each}


@dataclass(frozen=True, eq=False)
class Faulty(Products):
    """Products with a fault."""

    def blocks(self, left: Tensor, right: Tensor | None = None) -> Mapping[str, Tensor]:
        if right is None:
            raise ZeroDivisionError("division by zero")
        return super().blocks(left, right)


@dataclass(frozen=True, eq=False)
class Counted(Products):
    """Products that count threads and pairs of points. Each symmetric pair counts once."""

    met: ClassVar[list[int]] = []
    threads_seen: ClassVar[set[int]] = set()

    @property
    def concurrent(self) -> bool:
        return False  # tiles of a concurrent kernel have one thread each

    def blocks(self, left: Tensor, right: Tensor | None = None) -> Mapping[str, Tensor]:
        self.threads_seen.add(torch.get_num_threads())
        self.met.append(len(left) * (len(left) + 1) // 2 if right is None else len(left) * len(right))
        return super().blocks(left, right)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            Elsewhere,
            r"holds another kernel than this worker computes: .* other data or another version$",
        ),
        (Faulty, r"ZeroDivisionError: .*; compute the file with a single worker on this machine"),
    ],
)
def test_a_worker_that_cannot_go_on_says_why_and_writes_nothing(
    tmp_path: Path, kind: type[Products], told: str
) -> None:
    with pytest.raises(Unfinished, match=told):
        fill(kind.of(), tmp_path / "k.zarr", Here(2))
    assert len(open_matrix(tmp_path / "k.zarr").missing()) >= TILES - (kind is Faulty) * 10


def test_a_file_that_a_worker_does_not_see_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"a worker does not see .*elsewhere\.zarr; choose a place on a file system"):
        job_of(tmp_path / "elsewhere.zarr").carry_out("here", 1, ignore)


class IdleWorkers(HereWorkers):
    """Workers that say that they are done, and write nothing."""

    def submit(self, task: Task) -> Future[Ended]:
        future = Future[Ended]()
        future.set_result(Ended(task.name, "done"))
        return future


class IdleEngine(Here):
    def open(self, report_event: ReportEvent) -> IdleWorkers:
        return IdleWorkers(self)


def test_finished_work_that_does_not_show_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = count(0, 3600)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(hours)))
    with pytest.raises(Unfinished, match=r"files that they wrote are not visible here; the same command continues$"):
        conducted(tmp_path / "k.zarr", IdleEngine(2))


def test_marks_that_show_late_are_waited_for_and_the_others_are_no_end() -> None:
    looks = iter([[(0, 0), (1, 0)], [(1, 0)], [], [(1, 0)]])
    slow: Any = SimpleNamespace(unmarked=lambda tiles: next(looks))
    assert unmarked_tiles(slow, [(0, 0), (1, 0)], 60.0) == []
    assert unmarked_tiles(slow, [(1, 0)], 0.0) == [(1, 0)]


@pytest.mark.parametrize("threads", [None, 2])
def test_a_tile_has_as_many_threads_as_the_experiment_says(tmp_path: Path, threads: int | None) -> None:
    """However many the worker has: they move bits."""
    Counted.threads_seen.clear()
    before = torch.get_num_threads()
    overrides = [] if threads is None else [f"threads={threads}"]
    fill(Counted.of(*overrides), tmp_path / "k.zarr", Here(2, threads=3))
    torch.set_num_threads(before)
    assert Counted.threads_seen == {threads or 1}


def test_a_job_that_is_done_again_computes_only_what_is_missing(tmp_path: Path) -> None:
    path = conducted(tmp_path / "k.zarr", Here(1)).path
    heard: list[object] = []
    assert job_of(path, open_matrix(path).layout.tiling.todo).carry_out("again", 1, heard.append) == "found"
    assert heard == []


def test_no_mark_is_lost_among_many_who_write(tmp_path: Path, whole: dict[str, bytes]) -> None:
    path, kernel = tmp_path / "k.zarr", Products.of()
    with pytest.raises(KeyboardInterrupt):
        filled(path, Products.of(fails_after=0))
    tiles = open_matrix(path).layout.tiling.todo

    def write(share: int) -> list[int]:
        return list(fill_tiles(kernel, open_matrix(path), tiles[share::6]))

    with ThreadPoolExecutor(6) as others:
        assert list(others.map(write, range(6))) == [[1, 2]] * 6
    assert open_matrix(path).missing() == []
    assert contents(path) == whole


def test_work_that_is_long_is_cut_into_more_tasks(tmp_path: Path) -> None:
    engine = Here(2)
    conducted(tmp_path / "k.zarr", engine, seconds=150.0)
    assert engine.tasks == TILES // 2


def test_an_estimate_is_of_what_is_left(tmp_path: Path) -> None:
    path, kernel = tmp_path / "k.zarr", Products.of(each=1e-9)
    new = estimate(kernel, path)
    assert (new.tiles, new.seconds) == (TILES, new.pairs * 1e-9)
    with pytest.raises(KeyboardInterrupt):
        filled(path, Products.of(fails_after=2))
    begun = estimate(kernel, path)
    assert begun.tiles == len(open_matrix(path).missing()) < TILES
    assert estimate(kernel, path, force=True) == new
    assert estimate(Products.of("data.seed=1", each=1e-9), path) == new


def test_the_pairs_of_an_estimate_are_those_that_are_computed(tmp_path: Path) -> None:
    path, counted = tmp_path / "k.zarr", Counted.of()
    expected = estimate(counted, path).pairs
    Counted.met.clear()
    filled(path, counted)
    assert sum(Counted.met) == expected


def test_a_file_keeps_the_tiles_with_which_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "k.zarr"
    with monkeypatch.context() as larger:
        larger.setattr(conduct, "side_for", lambda train, seconds: 64)
        with pytest.raises(KeyboardInterrupt):
            filled(path, Products.of(fails_after=1))
    assert estimate(Products.of(each=1e-9), path).tiles == len(open_matrix(path).missing()) == 4
    assert conducted(path, Here(2)).missing() == []


def test_what_takes_long_is_timed_and_takes_no_less_than_shapes_say(tmp_path: Path) -> None:
    brief, endless = Products.of(each=1e-5), Products.of(each=1e3)
    for kernel in (brief, endless):
        assert estimate(kernel, tmp_path / "k.zarr").seconds > 0
    assert brief.seen == []
    assert endless.seen[:2] == [2, 2]
    found = estimate(endless, tmp_path / "k.zarr")
    assert found.seconds == 1e3 * found.pairs
    assert not (tmp_path / "k.zarr").exists()


# A damaged kernel file is filled to the bytes of an undamaged one, or refused, and so are its entries.


SEEDS = range(4)  # tests/run/test_killed.py plays more


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
    with pytest.raises(Mistake, match=r"zarr\.json; compute it again$"):
        open_matrix(path)


@pytest.mark.parametrize("name", ["zarr.json", "done/zarr.json", "ntk_self/zarr.json"])
def test_force_takes_what_is_left_of_a_file(places: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(places / "begun", tmp_path / "k.zarr"))
    (path / name).unlink()
    with pytest.raises(Mistake, match=r"compute it again$"):
        open_matrix(path)
    filled(path, Products.of(), force=True)
    assert contents(path) == contents(places / "whole")


def test_marks_that_nobody_made_are_taken_away(places: Path, tmp_path: Path) -> None:
    """Marks of a missing tile, and of a tile that mirrors another one."""
    path = Path(shutil.copytree(places / "begun", tmp_path / "k.zarr"))
    matrix = open_matrix(path)
    missing = matrix.missing()
    for number, tile in enumerate(missing):
        matrix.marker(*tile).parent.mkdir(exist_ok=True)
        matrix.marker(*tile).write_bytes(number.to_bytes(8, "little"))
    assert matrix.unmarked(matrix.layout.tiling.todo) == []
    assert matrix.missing() == missing
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
        assert found.train_matrix(kernel).equal(right.train_matrix(kernel)), done
    assert found.targets.equal(right.targets), done
