"""What may not be read or written is the user's to put right: one line and status 2, by every command."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command
from tests.report.synthetic import digits, write_run

COMMANDS = (
    ("train", "--quiet", "--out={place}"),
    ("train", "--quiet", "--config-dir={place}"),
    ("train", "--quiet", "data=table", "data.target=y", "data.path={place}/x.csv"),
    ("sweep", "model.width=8,9", "--quiet", "--out={place}"),
    ("config", "--config-dir={place}"),
    ("resume", "{place}"),
    ("report", "--out={place}"),
    ("report", "{place}"),
    ("explain", "{place}"),
    ("compare", "{place}", "{place}"),
    ("runs", "--out={place}"),
    ("kernel", "limit", "--quiet", "--out={place}/k.zarr", "data.train=4", "data.probe=2", "data.test=2"),
    ("kernel", "tangent", "--quiet", "--run={place}"),
    ("kernel", "predict", "--quiet", "{place}/k.zarr"),
    ("kernel", "ensemble", "--quiet", "--out={place}"),
    ("kernel", "study", "tables", "--quiet", "--out={place}"),
)


@pytest.fixture
def denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may not be entered, also by whoever may do everything."""
    place = tmp_path / "denied"

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path).is_relative_to(place):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *arguments, **options)

        return act

    for module, name in ((os, "stat"), (os, "scandir"), (os, "listdir"), (os, "mkdir"), (os, "open"), (io, "open")):
        monkeypatch.setattr(module, name, guarded(getattr(module, name)))
    return place


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    return write_run(tmp_path_factory.mktemp("runs") / "one", digits(counts=(8, 4, 4), steps=2))


@pytest.mark.sample(8)
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_one_rule(words: tuple[str, ...], denied: Path, command: Command) -> None:
    status, out, err = command(*(word.format(place=denied) for word in words))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("ntkexp: ")
    assert str(denied) in err
    assert "ermission denied" in err or "cannot be" in err, err


NOWHERE = ("/proc/x", "/proc/x/y", "/proc", "/dev/null/x", "a" * 300, "d/" * 2000 + "x")
"""Places in which nobody may make a file, whatever the rights; in /proc the system says that no such file exists."""

FAST = ("/proc/x", "d/" * 2000 + "x")

WRITING = (
    ("train", "--quiet", "--out={place}"),
    ("sweep", "--quiet", "model.width=8,9", "--out={place}"),
    ("report", "{run}", "--out={place}"),
    ("report", "{run}", "--format=csv", "--out={place}/a.csv"),
    ("explain", "{run}", "--picture={place}/x.svg"),
    ("kernel", "limit", "--quiet", "--out={place}/k.zarr", "data.train=4", "data.probe=2", "data.test=2"),
    ("kernel", "tangent", "--quiet", "--run={run}", "--out={place}/k.zarr"),
)


@pytest.mark.sample(6)
@pytest.mark.parametrize("words", WRITING, ids=" ".join)
@pytest.mark.parametrize(
    "place", [pytest.param(place, id=place[:10], marks=() if place in FAST else pytest.mark.slow) for place in NOWHERE]
)
def test_a_place_where_no_file_can_be(
    words: tuple[str, ...], place: str, written: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = command(*(word.format(place=place, run=written) for word in words))
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith("ntkexp: ")


@pytest.mark.parametrize("place", ["", "/", "."])
def test_a_kernel_file_is_no_folder_that_is_there(
    place: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = command("kernel", "limit", "--quiet", f"--out={place}", "data.train=4", "data.probe=2")
    assert (status, err.count("\n")) == (2, 1), err
    assert "choose another place with --out" in err
