"""A trace belongs to one training: to its start weights, and to the identity that is drawn when it begins."""

from __future__ import annotations

import json
import logging
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.store.files import TraceFolder
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from ntkexp.records.folder import RunFolder
from tests.foreign_loop import loops
from tests.foreign_loop.loops import Loop, followed, loop
from tests.foreign_loop.test_store import same_parts, trained


def other_loop() -> Loop:
    """The same configuration and data, from other weights."""
    given = loop(loops.momentum)
    with torch.no_grad():
        for weight in given.model.parameters():
            weight.mul_(1.25)
    return given


def loaded(folder: Path) -> Trace:
    return load_trace(find_trace(folder), loop(loops.momentum).model)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of two trainings with the same configuration."""
    place = tmp_path_factory.mktemp("two")
    followed(loop(loops.momentum), loops.plain, to=place / "one", every=3)
    followed(other_loop(), loops.plain, to=place / "other", every=3)
    return place / "one", place / "other"


FILES = ("start.bin", "rows.log", "steps.log", "weights", "ended.bin", "asked.bin", "")


@pytest.mark.parametrize("name", FILES)
def test_files_of_another_training_are_refused(two: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """One by one, and all of them together below the configuration of the first."""
    folder, other = shutil.copytree(two[0], tmp_path / "run"), two[1]
    theirs, ours = other / "trace" / name, folder / "trace" / name
    if ours.is_dir():
        shutil.rmtree(ours)
        shutil.copytree(theirs, ours)
    else:
        shutil.copy(theirs, ours)
    with pytest.raises(Mistake, match=r"not as it was written|is damaged"):
        loaded(folder).attribute()


def test_the_configurations_differ_in_nothing_that_a_reader_sees(two: tuple[Path, Path]) -> None:
    one, other = (json.loads((folder / "config.json").read_text()) for folder in two)
    assert one["follow"] == other["follow"]
    assert one["trace_identity"] != other["trace_identity"]
    assert one["start_weights"] != other["start_weights"]


def test_the_same_training_twice_has_two_identities(two: tuple[Path, Path], tmp_path: Path) -> None:
    followed(loop(loops.momentum), loops.plain, to=tmp_path / "run", every=3)
    first, second = (json.loads((each / "config.json").read_text()) for each in (two[0], tmp_path / "run"))
    assert first["start_weights"] == second["start_weights"]
    assert first["trace_identity"] != second["trace_identity"]


def test_other_start_weights_are_refused_however_they_are_sealed(two: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(two[0], tmp_path / "run")
    files, theirs = TraceFolder(RunFolder(folder)), TraceFolder(RunFolder(two[1]))
    files.write(files.weights_at(0), theirs.read(theirs.weights_at(0)))
    with pytest.raises(Mistake, match=r"00000000\.bin holds other weights than those with which the trace began"):
        loaded(folder)


def test_a_loop_that_is_resumed_keeps_its_identity_and_adds_the_same_parts(tmp_path: Path) -> None:
    """Its trace has other bytes than one without an interruption; the contributions are the same."""
    given = loop(loops.adamw)
    with follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "run", every=2):
        trained(given, loops.plain, 0, 3)
        kept = deepcopy((given.model.state_dict(), given.optimizers[0].state_dict()))
        trained(given, loops.plain, 3, 5)
    before = (tmp_path / "run" / "config.json").read_bytes()
    resumed = loop(loops.adamw)
    resumed.model.load_state_dict(kept[0])
    resumed.optimizers[0].load_state_dict(kept[1])
    with follow(resumed.model, resumed.optimizers, queries=resumed.queries, to=tmp_path / "run", every=2) as trace:
        trained(resumed, loops.plain, 3, loops.STEPS)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert len(trace.steps) == loops.STEPS
    read_back = load_trace(find_trace(tmp_path / "run"), loop(loops.adamw).model)
    same_parts(followed(loop(loops.adamw), loops.plain), read_back)


# A log that was cut at an entry


def cut(folder: Path, entries: int) -> TraceFolder:
    """The trace without its later steps, and without what says that it ended."""
    files = TraceFolder(RunFolder(folder))
    log = folder / "trace" / "steps.log"
    log.write_bytes(log.read_bytes()[: files.log.ends[entries - 1]])
    files.ended.unlink()
    return files


def test_a_log_that_is_shorter_than_its_weights_is_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(two[0], tmp_path / "run")
    cut(folder, 4)
    with pytest.raises(Mistake, match=r"steps\.log is damaged: .* weights of a later place, 8"):
        loaded(folder).attribute()


def test_a_loop_without_an_end_is_said_to_have_none(
    two: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(two[0], tmp_path / "run")
    files = cut(folder, 4)
    for event in files.checkpoints:
        if event > 4:
            files.weights_at(event).unlink()
    with caplog.at_level(logging.WARNING, "ntkexp.follow"):
        assert len(loaded(folder).steps) == 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has 4 steps and no end" in line


def test_one_with_an_end_is_not(two: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ntkexp.follow"):
        assert len(loaded(two[0]).steps) == loops.STEPS
    assert not caplog.records
