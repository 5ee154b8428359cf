"""Arrays of users: which are read, and the words that refuse the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ntkexp.data.arrays import Arrays
from ntkexp.data.base import AbstractSource
from ntkexp.data.images import Digits
from ntkexp.data.table import Table
from ntkexp.mistake import Mistake

Refusal = Callable[[AbstractSource], str]
X = np.random.default_rng(0).normal(size=(30, 4))
LABELS = np.arange(30) % 3


def arrays(path: Path, **fields: object) -> Arrays:
    """Return a source of 20 training examples."""
    return Arrays.model_validate({"path": path, "train": 20, "query": 4} | fields)


def saved(folder: Path, **named: Any) -> Path:
    np.savez(folder / "a.npz", **named)
    return folder / "a.npz"


def test_arrays_and_a_table_of_the_same_numbers_give_the_same_splits(tmp_path: Path) -> None:
    rows = "".join(f"{','.join(map(repr, row))},{label}\n" for row, label in zip(X.tolist(), LABELS, strict=True))
    (tmp_path / "a.csv").write_text(f"a,b,c,d,y\n{rows}")
    table = Table.model_validate({"path": tmp_path / "a.csv", "target": "y", "train": 20, "query": 4}).split()
    found = arrays(saved(tmp_path, x=X, y=LABELS)).split()
    for mine, theirs in ((found.train, table.train), (found.query, table.query), (found.test, table.test)):
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.target, theirs.target)
    assert found.classes == table.classes == ("0", "1", "2")


def test_images_as_bytes_and_as_numbers_give_the_same_networks_inputs(tmp_path: Path) -> None:
    images, labels = Digits().pictures()
    numbers = images.double().numpy()
    as_bytes = arrays(saved(tmp_path, x=images.numpy().astype(np.uint8), y=labels.numpy()), standardise="all").split()
    as_numbers = arrays(saved(tmp_path, x=numbers, y=labels.numpy()), standardise="all").split()
    assert as_bytes.train.inputs.shape == (20, *images.shape[1:])
    # intensities and bytes differ by a factor, which standardising removes up to rounding
    assert torch.allclose(as_bytes.train.inputs, as_numbers.train.inputs, rtol=0, atol=1e-13)
    assert torch.equal(as_bytes.test.target, as_numbers.test.target)


@pytest.mark.parametrize(
    ("targets", "classes", "first"),
    [
        (LABELS * 5 - 5, ("-5", "0", "5"), [0, 1, 2]),
        (LABELS == 1, ("False", "True"), [0, 1, 0]),
        (np.array(["b", "a", "c"])[LABELS], ("a", "b", "c"), [1, 0, 2]),
        (LABELS.astype(np.float32) / 2, (), [[0.0], [0.5], [1.0]]),
        (X[:, :2] + 0.5, (), (X[:3, :2] + 0.5).tolist()),
    ],
    ids=["integers", "truth values", "texts", "real values", "two outputs"],
)
def test_the_dtype_decides_whether_targets_are_classes(
    targets: Any, classes: tuple[str, ...], first: list[Any], tmp_path: Path
) -> None:
    examples = arrays(saved(tmp_path, features=X, label=targets), inputs="features", targets="label").examples(
        torch.Generator()
    )
    assert examples.classes == classes
    assert examples.target[:3].tolist() == first


NAN = np.where(np.arange(30)[:, None] == 7, np.nan, X)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "objects": ({"x": np.array([{}] * 30), "y": LABELS}, "an array of Python objects is never read"),
    "another length": ({"x": X, "y": LABELS[:20]}, "30 inputs 'x' and 20 targets 'y'"),
    "not finite": ({"x": NAN, "y": LABELS}, "the input of example 7"),
    "targets not finite": ({"x": X, "y": NAN[:, 0]}, "the target of example 7"),
    "other names": ({"x": X, "labels": LABELS}, "data.targets=y: data.path="),
    "complex inputs": ({"x": X + 1j, "y": LABELS}, "complex128 and not real numbers"),
    "complex targets": ({"x": X, "y": X[:, 0] + 1j}, "holds complex128 of shape [30]"),
    "one-hot integers": ({"x": X, "y": np.eye(3, dtype=int)[LABELS]}, "of shape [30, 3]"),
    "a vector of inputs": ({"x": X[:, 0], "y": LABELS}, "[example, feature]"),
    "no example": ({"x": X[:0], "y": LABELS[:0]}, "shape [0, 4]"),
    "no feature": ({"x": X[:, :0], "y": LABELS}, "shape [30, 0]"),
    "one class": ({"x": X, "y": LABELS * 0}, "same target"),
    "too many classes": ({"x": np.zeros((2000, 1)), "y": np.arange(2000)}, "2000 different"),
    "too large": ({"x": X * 1e300, "y": LABELS}, "too large or too small"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_arrays_are_refused_in_one_line(kind: str, tmp_path: Path, refusal: Refusal) -> None:
    named, words = BAD[kind]
    assert words in refusal(arrays(saved(tmp_path, **named)))


def test_other_files_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    np.save(tmp_path / "a.npy", X)
    (tmp_path / "a.csv").write_text("a,y\n1,2\n")
    for name in ("a.npy", "a.csv"):
        assert "is not an NPZ file" in refusal(arrays(tmp_path / name))
    assert "there is no such file; did you mean 'a.npy'?" in refusal(arrays(tmp_path / "a.npz"))
    table = Table.model_validate({"path": saved(tmp_path, x=X, y=LABELS), "target": "y"})
    assert "data=arrays reads NPZ files" in refusal(table)


def test_a_damaged_file_is_refused_and_never_read_wrongly(tmp_path: Path) -> None:
    source = arrays(saved(tmp_path, x=X[:6], y=LABELS[:6]))
    whole = source.path.read_bytes()
    right = source.examples(torch.Generator())
    for position in range(len(whole)):
        # one byte changed, or the end cut off
        changed = whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :]
        for damaged in (changed, whole[:position]):
            source.path.write_bytes(damaged)
            words = "refused"
            found = right
            try:
                found = source.examples(torch.Generator())
            except Mistake as mistake:
                words = str(mistake)
            assert len(words.splitlines()) == 1
            # a byte that no reader uses, such as a date, changes nothing
            assert torch.equal(found.inputs, right.inputs)
            assert torch.equal(found.target, right.target)
