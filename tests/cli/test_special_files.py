"""What is read is a file: a pipe that nobody writes to, or a device without an end, is refused before it is opened."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.cli.conftest import Command

READ = (  # every option and key that reads a file, with the name that it has to have
    ("t.csv", "config", "data=table", "data.target=y", "data.path={file}", "--cost"),
    ("t.csv", "train", "--out={place}/o", "data=table", "data.target=y", "data.path={file}"),
    ("t.parquet", "train", "--out={place}/o", "data=table", "data.target=y", "data.path={file}"),
    ("t.txt", "train", "--out={place}/o", "model=transformer", "model.causal=true", "data=text", "data.path={file}"),
    ("train-images-idx3-ubyte", "train", "--out={place}/o", "data=mnist", "data.path={place}"),
    ("data_batch_1", "train", "--out={place}/o", "data=cifar10", "data.path={place}"),
    ("n.py", "train", "--out={place}/o", "--trust={file}"),
    ("n.py", "train", "--out={place}/o", "model=module", "model.path={file}"),
    ("config.yaml", "config", "--config-dir={place}"),
    ("model/m.yaml", "config", "--config-dir={place}", "model=m"),
    ("sweep/m.yaml", "sweep", "m", "--out={place}/o", "--config-dir={place}"),
    ("claim/m.yaml", "claims", "m", "--out={place}/o", "--config-dir={place}"),
    ("study/m.yaml", "kernel", "study", "m", "--out={place}/o", "--config-dir={place}"),
    ("s.json", "sweep", "width", "--out={place}/o", "--engine=dask:{file}"),
    ("k.zarr", "kernel", "predict", "{file}"),
    ("r", "explain", "{file}"),
    ("r", "resume", "{file}"),
    ("r", "report", "{file}"),
    ("r", "compare", "{file}", "{file}"),
    ("r", "kernel", "tangent", "--run={file}"),
    ("r/config.json", "resume", "{place}/r"),
    ("r/DONE.json", "explain", "{place}/r"),
    ("r", "attribute", "{file}", "--model={file}:f"),
)


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    """Whoever opens a pipe here would wait for ever."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for what never comes")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.sample(10)
@pytest.mark.parametrize("words", READ, ids=" ".join)
def test_a_pipe_that_nobody_writes_to(words: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    file = tmp_path / words[0]
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)
    (tmp_path / "other.yaml").write_text("a: 1\n")
    status, _, err = command(*(word.format(file=file, place=tmp_path) for word in words[1:]))
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith("ntkexp: ")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/tty", "/proc/kmsg"])
def test_a_device_without_an_end(device: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "t.csv").symlink_to(device)
    given = f"data.path={tmp_path}/t.csv"
    status, _, err = command("train", f"--out={tmp_path}", "data=table", "data.target=y", given)
    assert (status, err.count("\n")) == (2, 1), err
    assert "t.csv" in err
