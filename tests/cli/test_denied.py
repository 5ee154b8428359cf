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


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_one_rule(words: tuple[str, ...], denied: Path, command: Command) -> None:
    status, out, err = command(*(word.format(place=denied) for word in words))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("ntkexp: ")
    assert str(denied) in err
    assert "ermission denied" in err or "cannot be" in err, err
