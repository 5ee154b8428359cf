"""An unfinished run of which a file is damaged ends in the bytes of one left alone, from its beginning if need be."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch

import ntkexp.run.execute
from ntkexp.cli.main import run
from ntkexp.run.folder_listener import FolderListener
from ntkexp.run.state import RunState
from tests.run.commands import TINY, only_run, promised
from tests.torture.damage import damage
from tests.torture.kind.kills import no_pictures

ADAM = (*TINY, "steps=4", "path.error_samples=0", "optimizer=adam", "optimizer.step_size=0.05")  # it goes both ways
RELIED_ON = ("checkpoint.pt", "trajectory.bin")
AND_ON = ("kernels.zarr/tangent/c/0/0/0/0/0", "metrics.csv", "data.npz", "config.json")


def train(out: Path, *words: str) -> int:
    with mock.patch.object(ntkexp.run.execute, "painter", no_pictures):
        return run(("train", *ADAM, *words, f"--out={out}"))


def broken_off(out: Path, *words: str) -> None:
    """A run that is interrupted on its way back."""
    told, calls = FolderListener.on_step_back, count(1)

    def interrupted(listener: FolderListener, state: RunState, done: int, whole: int) -> None:
        told(listener, state, done, whole)
        if next(calls) == 3:
            raise KeyboardInterrupt

    with mock.patch.object(FolderListener, "on_step_back", interrupted):
        assert train(out, *words) == 130


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run left alone, and the same broken off."""
    place = tmp_path_factory.mktemp("places")
    assert train(place / "whole") == 0
    broken_off(place / "begun")
    return place


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run, broken off."""
    out = tmp_path_factory.mktemp("twin")
    broken_off(out, "seed=1")
    return only_run(out)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*RELIED_ON, *(pytest.param(name, marks=pytest.mark.slow) for name in AND_ON)])
def test_a_bit_is_seen_and_said(places: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = only_run(Path(shutil.copytree(places / "begun", tmp_path / "out")))
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 3] ^= 1
    (folder / name).write_bytes(content)
    with mock.patch("torch.load", side_effect=AssertionError if name == "checkpoint.pt" else torch.load):
        assert train(tmp_path / "out") == 0  # nothing of a garbled checkpoint reaches torch
    said = [line for line in capfd.readouterr().err.splitlines() if "is damaged" in line]
    assert len(said) == 1
    assert said[0].endswith("; the run begins anew")
    assert str(folder) in said[0]
    assert promised(folder) == promised(only_run(places / "whole"))


def test_a_run_that_cannot_say_what_it_was_is_not_resumed(
    places: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Circumstances are no part of its identity, and move its bits."""
    folder = only_run(Path(shutil.copytree(places / "begun", tmp_path / "out")))
    told = (folder / "config.json").read_text("utf-8")
    (folder / "config.json").write_text(told.replace('"threads": 1', '"threads": 2'), encoding="utf-8")
    assert run(("resume", str(folder))) == 2
    assert "config.json not as it was written; the command that began it" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_damage(places: Path, twin: Path, tmp_path: Path, seed: int) -> None:
    shutil.copytree(places / "begun", tmp_path / "out")
    folder = only_run(tmp_path / "out")
    done = damage(Random(seed), folder, twin)
    resuming = ("resume", str(folder), "--quiet")
    with mock.patch.object(ntkexp.run.execute, "painter", no_pictures):
        status = run(resuming) if seed % 3 == 0 else train(tmp_path / "out")
    assert status in {0, 2}, done
    if status == 0:
        assert promised(folder) == promised(only_run(places / "whole")), done
