"""Files under a wrong name, columns that nothing can be learned from, and hundreds of damaged files."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import sqlite3
import zipfile
from collections.abc import Callable
from contextlib import closing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from ntkexp.data.base import AbstractSource
from ntkexp.data.images import CIFAR10, MNIST
from ntkexp.data.sequence import Text
from ntkexp.data.table import Table
from ntkexp.mistake import Mistake
from tests.data.conftest import idx_bytes, pictures

Refusal = Callable[[AbstractSource], str]
CSV = "a,y\n" + "".join(f"{k},{k / 7}\n" for k in range(8))


def table(path: Path) -> Table:
    return Table(path=path, target="y", train=4, query=2)


def bytes_of(write: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def zipped(buffer: io.BytesIO) -> None:
    """Write a table without compression, so that the file contains its text."""
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("t.csv", CSV)


def database() -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("create table t (a)")
        return connection.serialize()


def parquet(columns: dict[str, Any]) -> bytes:
    table = import_module("pyarrow").table(columns)
    return bytes_of(lambda buffer: import_module("pyarrow.parquet").write_table(table, buffer))


WRITERS: dict[str, Callable[[], bytes]] = {
    "a ZIP archive": lambda: bytes_of(zipped),
    "a ZIP archive; of nothing": lambda: bytes_of(lambda buffer: zipfile.ZipFile(buffer, "w").close()),
    "a ZIP archive; of torch": lambda: bytes_of(lambda buffer: torch.save({"a": 1}, buffer)),
    "a ZIP archive; of NumPy": lambda: bytes_of(lambda buffer: np.savez(buffer, a=np.zeros(3))),
    "compressed by gzip": lambda: gzip.compress(CSV.encode()),
    "compressed by bzip2": lambda: bz2.compress(CSV.encode()),
    "compressed by xz": lambda: lzma.compress(CSV.encode()),
    "a Parquet file": lambda: parquet({"a": [1.0], "y": [2.0]}),
    "an Arrow file": lambda: bytes_of(pd.DataFrame({"a": [1.0]}).to_feather),
    "an array of NumPy": lambda: bytes_of(lambda buffer: np.save(buffer, np.zeros(3))),
    **{f"a pickle; of protocol {p}": partial(pickle.dumps, {"a": [1.0]}, protocol=p) for p in range(2, 6)},
    "a database of SQLite": database,
    "an image; PNG": lambda: bytes_of(lambda buffer: Figure().savefig(buffer, format="png")),
    "an image; JPEG": lambda: bytes_of(lambda buffer: Figure().savefig(buffer, format="jpg")),
    "a PDF": lambda: bytes_of(lambda buffer: Figure().savefig(buffer, format="pdf")),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_is_no_table_is_told_by_its_first_bytes(kind: str, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "t.csv").write_bytes(WRITERS[kind]())
    said = refusal(table(tmp_path / "t.csv"))
    assert f"is {kind.partition(';')[0]}" in said


@pytest.mark.parametrize("name", ["PAR1", "BMI", "PK", "BZh", "GIF8", "II", "%PD", "7z"])
def test_a_column_may_be_called_as_a_format_begins(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(CSV.replace("a,y", f"{name},y"))
    assert len(table(tmp_path / "t.csv").split().train.inputs) == 4


def test_a_byte_that_no_text_has_is_refused_with_its_line(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "t.csv").write_text(CSV.replace("3,", "3\0,"))
    assert "line 5: byte 0x00 cannot be in a text" in refusal(table(tmp_path / "t.csv"))


STRANGE: dict[str, list[Any]] = {
    "date32": [date(2024, 1, k) for k in (1, 2)],
    "timestamp": [datetime(2024, 1, k) for k in (1, 2)],
    "time64": [time(k) for k in (1, 2)],
    "duration": [timedelta(k) for k in (1, 2)],
    "list": [[1], [2]],
    "struct": [{"a": 1}, {"a": 2}],
    "binary": [b"a", b"b"],
    "map": [[("a", 1)], [("b", 2)]],
}
LEARNED: dict[str, Any] = {
    "int": [1, 2],
    "float": [1.5, 2.5],
    "bool": [True, False],
    "text": ["a", "b"],
    "decimal": [Decimal("1.5"), Decimal("2.5")],
    "categories": pd.Categorical(["a", "b"]),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_target_of_neither_numbers_nor_texts_is_refused(kind: str, tmp_path: Path, refusal: Refusal) -> None:
    column: Any = STRANGE[kind] * 4
    if kind == "map":
        pyarrow = import_module("pyarrow")
        column = pyarrow.array(column, type=pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    (tmp_path / "t.parquet").write_bytes(parquet({"a": [*range(8)], "y": column}))
    assert f"data.target='y' is a column of type {kind}" in refusal(table(tmp_path / "t.parquet"))


@pytest.mark.parametrize("kind", LEARNED)
def test_a_target_of_numbers_or_texts_is_learned(kind: str, tmp_path: Path) -> None:
    column = pd.concat([pd.Series(LEARNED[kind])] * 4, ignore_index=True)
    (tmp_path / "t.parquet").write_bytes(parquet({"a": [*range(8)], "y": column.astype(column.dtype)}))
    assert len(Table(path=tmp_path / "t.parquet", target="y", train=7, query=1).split().train.target) == 7


@pytest.mark.parametrize("keys", [(b"data", b"labels"), ("data", "labels")])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_batches_that_python_pickles_today_are_read(
    protocol: int, order: Any, keys: tuple[Any, Any], tmp_path: Path
) -> None:
    images, labels = pictures(20, (3072,))
    batch = {keys[0]: np.array(images, order=order), keys[1]: labels.tolist()}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=protocol))
    train = CIFAR10(path=tmp_path, classes="all", train=12, query=4, test=4).split().train
    assert np.array_equal(train.shown.flatten(1).numpy() * 255, images[train.index])
    assert np.array_equal(train.target.numpy(), labels[train.index])


def test_another_codec_is_not_called(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"c_codecs\nencode\n(Vx\nVrot13\ntR.")
    assert "it asks for '_codecs.encode to rot13'" in refusal(CIFAR10(path=tmp_path))


@pytest.mark.parametrize("context", [100, 10**7])
def test_a_context_longer_than_the_text_is_refused(context: int, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "book.txt").write_text("to be or not to be")
    assert "18 bytes, and in them 0 different windows" in refusal(Text(path=tmp_path / "book.txt", context=context))


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """A byte changed, a piece lost, repeated or replaced, or the end cut off."""
    at, length = chance.randrange(len(raw)), chance.randrange(1, 40)
    return chance.choice([
        raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :],
        raw[:at] + raw[at + length :],
        raw[:at] + raw[at : at + length] * 2 + raw[at + length :],
        raw[:at] + chance.randbytes(length) + raw[at + length :],
        raw[:at],
    ])  # fmt: skip


def small_batch() -> bytes:
    """Two images with their labels."""
    images, _ = pictures(2, (3072,))
    return pickle.dumps({b"data": images, b"labels": [0, 1]}, protocol=4)


DAMAGED: dict[str, tuple[str, Callable[[], bytes], Callable[[Path], AbstractSource]]] = {
    "csv": ("t.csv", CSV.encode, lambda folder: table(folder / "t.csv")),
    "parquet": (
        "t.parquet",
        lambda: parquet({"a": [*range(8)], "y": [k / 7 for k in range(8)]}),
        lambda folder: table(folder / "t.parquet"),
    ),
    "pickle": (
        "data_batch_1",
        small_batch,
        lambda folder: CIFAR10(path=folder, classes="all", train=2, query=0, test=0),
    ),
    "idx": (
        "train-images-idx3-ubyte",
        lambda: idx_bytes(np.arange(48).reshape(3, 4, 4)),
        lambda folder: MNIST(path=folder, classes="all", train=2, query=1, test=0),
    ),
    "gzip": (
        "train-images-idx3-ubyte.gz",
        lambda: gzip.compress(idx_bytes(np.arange(48).reshape(3, 4, 4))),
        lambda folder: MNIST(path=folder, classes="all", train=2, query=1, test=0),
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    name, whole, source = DAMAGED[kind]
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(3)))
    chance, raw = random.Random(0), whole()
    for _ in range(100):
        (tmp_path / name).write_bytes(damaged(raw, chance))
        try:
            data = source(tmp_path).split()
        except Mistake:  # in one line, as every Mistake
            continue
        assert data.train.inputs.isfinite().all()
