"""Kernels by engines, as a user asks for them: what is refused, and what a dry run says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ntkexp.engine import base
from ntkexp.kernel_file import fill
from ntkexp.records.kernel_file import open_matrix
from tests.cli.conftest import Command
from tests.cli.test_mistakes import check
from tests.kernel_file.here import Here

SMALL = ("model.width=8", "data.train=40", "data.probe=10", "data.test=10")


@pytest.mark.parametrize("words", [("limit",), ("tangent",), ("study", "images")])
@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        ("dusk", "did you mean 'dask'"),
        ("local:3", "write --engine=local"),
        ("dask:nowhere.json", "there is no such file"),
        ("slurm:partitoin=x", "did you mean 'partition'"),
    ],
)
def test_an_engine_that_cannot_be_had_is_one_line(
    command: Command, words: tuple[str, ...], engine: str, advice: str
) -> None:
    check(command("kernel", *words, f"--engine={engine}"), advice)


@pytest.mark.parametrize("kind", ["limit", "tangent"])
def test_a_dry_run_says_what_it_takes_and_begins_nothing(command: Command, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "k.zarr"
    asked = ("kernel", kind, *SMALL, f"--out={path}", "--workers=3", "--dry-run")
    ended = command(*asked)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(f"{path}: 3 tiles, about ")
    told = json.loads(command(*asked, "--json").out)
    assert (told["file"], told["tiles"], told["workers"]) == (str(path), 3, 3)
    assert told["elapsed"] == max(told["seconds"] / 3, told["seconds"] / told["tiles"])
    assert not path.exists()


def test_a_job_that_has_no_time_for_a_tile_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k.zarr"
    monkeypatch.setattr(fill, "timed", lambda kernel: 10.0)
    monkeypatch.setattr(fill, "LONG", 0.0)
    ended = command("kernel", "limit", *SMALL, f"--out={path}", "--engine=slurm:cluster=local", "--quiet")
    check(ended, "a job ends after time=60 minutes, and nothing is kept before")  # 32 · 32 pairs are 2.8 h
    assert open_matrix(path).done.sum() == 0


def test_a_kernel_that_takes_long_is_said_to(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "timed", lambda kernel: 1.0)
    monkeypatch.setattr(fill, "LONG", 0.0)
    ended = command("kernel", "limit", *SMALL, f"--out={tmp_path / 'k.zarr'}", "--workers=2")
    assert ended.status == 0
    pairs = 32 * 33 // 2 + 28 * 32 + 28 * 29 // 2  # a second each; those on the diagonal once
    said = (
        f"k.zarr: 3 tiles, about {pairs / 60:.1f} min of one core: {pairs / 120:.1f} min with 2 workers of a core each;"
    )
    assert ended.err.splitlines()[0].startswith(said)


@pytest.mark.slow
def test_what_is_timed_is_not_remarked_on(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("kernel", "tangent", *SMALL, "kernel.sketch=500", "--workers=1")
    (remark,) = command(*asked, f"--out={tmp_path / 'k.zarr'}").err.splitlines()[-1:]
    monkeypatch.setattr(fill, "LONG", 0.0)
    ended = command(*asked, f"--out={tmp_path / 'timed.zarr'}")
    assert "core" in ended.err.splitlines()[0]
    assert ended.err.splitlines()[-1] == remark
    assert ", within " in remark


def test_what_a_worker_cannot_do_is_one_line(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "choose", lambda given, workers: Here(2, threads=1000))
    asked = ("kernel", "limit", *SMALL, "model=cnn", f"--out={tmp_path / 'k.zarr'}", "--engine=dask:here")
    ended = command(*asked, "memory_gb=1e-3", "--quiet")  # which a thousand share
    assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert "one pair of these examples needs" in ended.err
    assert command(*asked, "--quiet") == (0, "", "")


@pytest.mark.slow
def test_a_study_is_the_same_by_workers(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "study").mkdir()
    text = "base: [data=wine, data.train=40, data.probe=0]\nkernels: {A: [model=mlp], B: [model=uci_ntk]}\n"
    (tmp_path / "study" / "small.yaml").write_text(text, encoding="utf-8")
    asked = ("kernel", "study", "small", f"--config-dir={tmp_path}", "--quiet")
    assert command(*asked, f"--out={tmp_path / 'here'}").status == 0
    engine = Here(2)
    monkeypatch.setattr(base, "choose", lambda given, workers: engine)
    assert command(*asked, f"--out={tmp_path / 'there'}", "--engine=dask:here") == (0, "", "")
    assert engine.tasks == 4
    here, there = ((tmp_path / where / "small.study.csv").read_text("utf-8") for where in ("here", "there"))
    assert here == there
