"""Data files in every format, with damages or odd contents."""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from random import Random
from struct import pack

import numpy as np

from tests.torture.damage import letters, value
from tests.torture.stage import SMALL, Outcome, Stage

TRAIN = ("train", "--quiet", *SMALL, "steps=1", "ladder.machine=[secant]")


def play(luck: Random, stage: Stage) -> Outcome:
    words = luck.choice((table, table, table, parquet, pictures, batches, text))(luck, stage.folder)
    for file in sorted(file for file in (stage.folder / "data").iterdir() if file.is_file()):
        if luck.random() < 0.8:
            spoil(file, luck)
    return stage.outcome(*TRAIN, *words)


def place(folder: Path, name: str) -> Path:
    """Return the path of a data file."""
    (folder / "data").mkdir(exist_ok=True)
    return folder / "data" / name


def rows(luck: Random) -> list[list[str]]:
    """Draw a table of numbers with a header and some odd cells."""
    header = [luck.choice(("a", "b", "c", "é", "a b", "y", "", "1")) for _ in range(luck.randrange(1, 5))]
    found = [[*header, "y"]]
    count = luck.choice((0, 1, 24, 30, 40))
    found += [[*(f"{luck.gauss(0, 1):.4g}" for _ in header), luck.choice("01")] for _ in range(count)]
    for _ in range(luck.choice((0, 1, 3))):
        row = luck.choice(found)
        row[luck.randrange(len(row))] = luck.choice((value(luck), letters(luck), "", "nan", "1e999", '"'))
    return found


def table(luck: Random, folder: Path) -> list[str]:
    """Write a CSV table."""
    between, end = luck.choice(",,,,;\t "), luck.choice(("\n", "\n", "\r\n", "\r"))
    lines = end.join(between.join(row) for row in rows(luck))
    place(folder, "x.csv").write_bytes(lines.encode(luck.choice(("utf-8", "utf-8", "utf-16", "latin-1")), "replace"))
    target = luck.choice(("y", "y", "y", "a", "nope", "Y"))
    return ["data=table", "data.path=data/x.csv", f"data.target={target}", f"data.missing={luck.choice(MISSING)}"]


MISSING = ("refuse", "drop", "mean")


def parquet(luck: Random, folder: Path) -> list[str]:
    import pyarrow  # type: ignore[import-untyped]  # noqa: PLC0415  an extra
    from pyarrow.parquet import write_table  # type: ignore[import-untyped]  # noqa: PLC0415

    kinds = ("float64", "int64", "bool", "string", "date32", "time64[us]", "timestamp[ns]", "binary", "float16", "null")
    odd = pyarrow.array([None if n % 7 == 0 else n % 3 for n in range(30)])
    kind = luck.choice(kinds)
    try:
        target = odd.cast(kind)
    except pyarrow.ArrowException:
        target = pyarrow.array([[1], [2], None] * 10) if luck.random() < 0.5 else pyarrow.array([{"a": 1}] * 30)
    columns = {"x": pyarrow.array(np.arange(30.0)), luck.choice(("y", "z")): target}
    write_table(pyarrow.table(columns), place(folder, "x.parquet"))
    return ["data=table", "data.path=data/x.parquet", "data.target=y", f"data.missing={luck.choice(MISSING)}"]


def pictures(luck: Random, folder: Path) -> list[str]:
    """Write IDX files."""
    count, numbers = luck.choice((60, 60, 60, 1, 0)), np.random.default_rng(luck.randrange(9))
    for name, array in (
        ("images-idx3", numbers.integers(0, 256, (count, 28, 28), np.uint8)),
        ("labels-idx1", (np.arange(luck.choice((count, count, 5))) % 10).astype(np.uint8)),
    ):
        raw = bytes([0, 0, luck.choice((8, 8, 8, 9, 0)), array.ndim]) + pack(f">{array.ndim}I", *array.shape)
        held = raw + array.tobytes()
        zipped = luck.random() < 0.3
        file = place(folder, f"train-{name}-ubyte{'.gz' * zipped}")
        file.write_bytes(gzip.compress(held, 1) if zipped else held)
    return [f"data={luck.choice(('mnist', 'fashion_mnist'))}", "data.path=data", "data.test=6"]


def batches(luck: Random, folder: Path) -> list[str]:
    """Write files of CIFAR, pickled or plain."""
    numbers = np.random.default_rng(luck.randrange(9)).integers(0, 256, (60, 3072), np.uint8)
    if luck.random() < 0.3:
        rows = np.concatenate([(np.arange(60) % 10)[:, None].astype(np.uint8), numbers], 1)
        place(folder, "data_batch_1.bin").write_bytes(rows.tobytes())
        return ["data=cifar10", "data.path=data", "data.test=6"]
    labels: object = luck.choice(
        ((np.arange(60) % 10).tolist(), np.arange(60) % 10, [0] * 60, [1, 2], "x", None, [11] * 60)
    )
    held = luck.choice((numbers, numbers, numbers[:, :5], numbers.astype(float), numbers.tolist(), None))
    place(folder, "data_batch_1").write_bytes(pickle.dumps({b"data": held, b"labels": labels}, luck.randrange(2, 6)))
    return ["data=cifar10", "data.path=data", "data.test=6"]


def text(luck: Random, folder: Path) -> list[str]:
    held = "".join(luck.choice("abcd é\n") for _ in range(luck.choice((0, 10, 2000))))
    place(folder, "x.txt").write_text(held, "utf-8")
    model = (
        "model=transformer",
        "model.causal=true",
        "loss=cross_entropy",
        f"data.context={luck.choice(('3', '16', '9999'))}",
    )
    return ["data=text", "data.path=data/x.txt", *model]


def emptied(held: bytes, luck: Random) -> bytes:
    """Remove the content."""
    return b""


def cut(held: bytes, luck: Random) -> bytes:
    """Cut the end."""
    return held[: luck.randrange(len(held) + 1)]


def flipped(held: bytes, luck: Random) -> bytes:
    found = bytearray(held)
    for _ in range(luck.choice((1, 1, 3, 20)) if held else 0):
        found[luck.randrange(min(len(found), luck.choice((16, len(found)))))] = luck.randrange(256)
    return bytes(found)


def longer(held: bytes, luck: Random) -> bytes:
    """Append bytes."""
    return held + bytes(luck.choices(range(256), k=luck.choice((1, 100)))) + held[: luck.choice((0, 50))]


def wrapped(held: bytes, luck: Random) -> bytes:
    """Write another format under this name."""
    made = io.BytesIO()
    np.save(made, np.arange(5))
    return luck.choice((gzip.compress(held), made.getvalue(), b"PK\x03\x04" + held, b"\xef\xbb\xbf" + held))


WAYS: tuple[Callable[[bytes, Random], bytes], ...] = (emptied, cut, cut, flipped, flipped, flipped, longer, wrapped)


def spoil(file: Path, luck: Random) -> None:
    """Damage or replace a file."""
    held = file.read_bytes()
    match luck.randrange(12):
        case 0:
            file.unlink()
            luck.choice((file.mkdir, lambda: file.symlink_to(file.name), lambda: None))()
        case 1 | 2 | 3:
            pass  # the content is odd enough
        case _:
            file.write_bytes(luck.choice(WAYS)(held, luck))
