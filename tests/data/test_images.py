"""Images: digits, IDX files and CIFAR-10 files, and the refusal of damaged ones."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from struct import pack

import numpy as np
import pytest
import torch

from ntkexp.data import images
from ntkexp.data.base import AbstractSource
from ntkexp.data.images import CIFAR10, MNIST, Digits, FashionMnist
from ntkexp.mistake import Mistake

from .conftest import idx_bytes, pictures

Refusal = Callable[[AbstractSource], str]
FEW = {"train": 20, "query": 10, "test": 10, "classes": "all"}


def of(kind: type[AbstractSource], **fields: object) -> AbstractSource:
    """A small set of images, all classes unless some are named."""
    return kind.model_validate(FEW | fields)


@pytest.mark.slow
def test_digits_are_the_pictures_they_were() -> None:
    from sklearn.datasets import load_digits  # noqa: PLC0415  slow to import where tests are only collected

    bunch, data = load_digits(), Digits(classes=(8, 3), train=100, query=0).split()
    chosen = np.flatnonzero((bunch.target == 3) | (bunch.target == 8))[data.train.index.numpy()]
    assert np.array_equal(data.train.shown.numpy()[:, 0] * 16, bunch.images[chosen])
    assert np.array_equal(np.array([8, 3])[data.train.target], bunch.target[chosen])
    assert data.classes == ("8", "3")


def test_pixels_go_from_zero_to_one() -> None:
    shown = Digits(classes="all").split().test.shown
    assert shown.shape == (1797 - 256, 1, 8, 8)
    assert (shown.min().item(), shown.max().item()) == (0, 1)


@pytest.mark.parametrize(("classes", "said"), [((3, 11), "no class 11"), ((-1, 2), "no class -1")])
def test_a_class_that_does_not_exist_is_refused(classes: tuple[int, ...], said: str, refusal: Refusal) -> None:
    line = refusal(Digits(classes=classes))
    assert said in line
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in line


@pytest.mark.parametrize("classes", [(), (3,), (3, 3), (3, 8, 3)])
def test_classes_are_at_least_two_and_different(classes: tuple[int, ...], refusal: Refusal) -> None:
    assert f"data.classes={list(classes)}" in refusal(Digits(classes=classes))


def test_class_numbers_come_with_their_names(cifar_folder: Path, refusal: Refusal) -> None:
    assert "3 (cat)" in refusal(of(CIFAR10, path=cifar_folder, classes=(3, 10)))


@pytest.mark.parametrize("kind", [MNIST, FashionMnist])
def test_idx_files_give_the_pictures_in_them(kind: type[AbstractSource], idx_folder: Path) -> None:
    images, labels = pictures(600, (28, 28))
    source = of(kind, path=idx_folder)
    train = source.split().train
    assert np.array_equal(train.shown.numpy()[:, 0] * 255, images[train.index])
    assert np.array_equal(train.target.numpy(), labels[train.index])
    assert [path.name for path in source.files()] == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]


def test_fashion_mnist_is_found_where_debian_puts_it(idx_folder: Path) -> None:
    without, named = of(FashionMnist).split(), of(FashionMnist, path=idx_folder).split()
    assert torch.equal(without.test.shown, named.test.shown)
    assert of(FashionMnist).files()[0].parent == idx_folder


def test_without_debian_s_package_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setattr(images, "DEBIAN_FOLDER", tmp_path / "nowhere")
    line = refusal(of(FashionMnist))
    assert "dataset-fashion-mnist" in line
    assert "train-images-idx3-ubyte" in line
    with pytest.raises(Mistake, match="dataset-fashion-mnist"):
        of(FashionMnist).files()


@pytest.fixture
def plain_idx(idx_folder: Path, tmp_path: Path) -> Path:
    """The IDX files without gzip, to be damaged."""
    for path in idx_folder.iterdir():
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    return tmp_path


def test_idx_files_need_not_be_gzipped(plain_idx: Path, idx_folder: Path) -> None:
    plain, zipped = of(MNIST, path=plain_idx).split(), of(MNIST, path=idx_folder).split()
    assert torch.equal(plain.train.shown, zipped.train.shown)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut short": (lambda raw: raw[:-1], "cut short"),
    "too long": (lambda raw: raw + b"\0", "cut short or damaged"),
    "empty": (lambda raw: b"", "begins with nothing"),
    "a header alone": (lambda raw: raw[:16], "0 found"),
    "no images": (lambda raw: idx_bytes(np.empty((0, 28, 28))), "0 bytes announced"),
    "text": (lambda raw: b"<html>not found, sorry</html>", "not an IDX file"),
    "floats": (lambda raw: raw[:2] + b"\x0d" + raw[3:], "0x0d"),
    "labels": (lambda raw: idx_bytes(np.zeros(600)), "1 axes"),
    "a huge shape": (lambda raw: raw[:4] + b"\xff" * 12 + raw[16:], "announced"),
    "fewer images": (lambda raw: idx_bytes(np.zeros((599, 28, 28))), "599 images"),
    "cut gzip": (lambda raw: gzip.compress(raw)[:-9], "unzipped"),
    "damaged gzip": (lambda raw: gzip.compress(raw)[:20] + b"\xff" * 40, "unzipped"),
    "gzip of another kind": (lambda raw: b"\x1f\x8b\xff" + raw, "unzipped"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_idx_files_are_refused(kind: str, plain_idx: Path, refusal: Refusal) -> None:
    damage, said = DAMAGE[kind]
    path = plain_idx / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    line = refusal(of(MNIST, path=plain_idx))
    assert said in line
    assert "train-images-idx3-ubyte" in line


def test_a_label_beyond_the_classes_is_refused(plain_idx: Path, refusal: Refusal) -> None:
    (plain_idx / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(600) % 11))
    assert "label 10" in refusal(of(MNIST, path=plain_idx))


def test_cifar_pickles_give_the_pictures_in_them(cifar_folder: Path) -> None:
    images, labels = pictures(60, (3072,))
    source = of(CIFAR10, path=cifar_folder)
    train = source.split().train
    assert train.shown.shape == (20, 3, 32, 32)
    assert np.array_equal(train.shown.flatten(1).numpy() * 255, images[train.index])
    assert np.array_equal(train.target.numpy(), labels[train.index])
    assert [path.name for path in source.files()] == ["data_batch_1", "data_batch_2"]


def test_both_versions_of_cifar_are_the_same_data(cifar_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    images, labels = pictures(60, (3072,))
    folder = tmp_path_factory.mktemp("binary")
    (folder / "data_batch_1.bin").write_bytes(np.column_stack([labels.astype(np.uint8), images]).tobytes())
    python, binary = of(CIFAR10, path=cifar_folder).split(), of(CIFAR10, path=folder).split()
    assert torch.equal(python.train.shown, binary.train.shown)
    assert torch.equal(python.train.target, binary.train.target)


def of_python_2(images: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 and the numpy of its day pickled it: the published files are of this kind."""

    def text(raw: bytes) -> bytes:
        return b"T" + pack("<i", len(raw)) + raw

    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"(" + b"".join(b"M" + pack("<H", length) for length in images.shape) + b"t"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    state = b"(K\x01" + shape + kind + b"I00\n" + text(images.tobytes()) + b"tb"
    names = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + state + b"U\x06labels" + names + b"u."


def test_pickles_of_python_2_are_read(cifar_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    images, labels = pictures(60, (3072,))
    folder = tmp_path_factory.mktemp("old")
    (folder / "data_batch_1").write_bytes(of_python_2(images, labels.tolist()))
    # what numpy itself makes of the bytes is the oracle for their being a pickle of that time
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "numpy.core.multiarray", np._core.multiarray)
        assert np.array_equal(pickle.loads(of_python_2(images, labels.tolist()), encoding="bytes")[b"data"], images)
    old, new = of(CIFAR10, path=folder).split(), of(CIFAR10, path=cifar_folder).split()
    assert torch.equal(old.train.shown, new.train.shown)


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: {"labels": [0], "data": evil}])
def test_a_malicious_pickle_is_refused_by_name_and_runs_nothing(
    protocol: int, wrap: Callable[[Evil], object], tmp_path: Path, refusal: Refusal
) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(wrap(Evil(tmp_path / "touched")), protocol))
    assert "system" in refusal(of(CIFAR10, path=tmp_path))
    assert not (tmp_path / "touched").exists()


def test_a_name_with_a_line_break_stays_on_one_line(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04\x8c\x03a\nb\x8c\x01c\x93.")
    assert "a\\nb.c" in refusal(of(CIFAR10, path=tmp_path))


IMAGES = np.zeros((3, 3072), np.uint8)
BATCHES: dict[str, object] = {
    "no data": {b"labels": [1, 2, 3]},
    "no labels": {b"data": IMAGES},
    "fewer labels": {b"data": IMAGES, b"labels": [1]},
    "no images": {b"data": IMAGES[:0], b"labels": []},
    "other images": {b"data": IMAGES[:, 1:], b"labels": [1, 2, 3]},
    "floats": {b"data": IMAGES.astype(float), b"labels": [1, 2, 3]},
    "a list": [1, 2],
    "labels of text": {b"data": IMAGES, b"labels": ["a", "b", "c"]},
    "labels that are no bytes": {b"data": IMAGES, b"labels": [1, 2, 300]},
    "labels below zero": {b"data": IMAGES, b"labels": [1, 2, -1]},
}


@pytest.mark.parametrize("kind", BATCHES)
def test_pickles_of_something_else_are_refused(kind: str, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(BATCHES[kind], protocol=3))
    assert "data_batch_1' is cut short or damaged" in refusal(of(CIFAR10, path=tmp_path))


@pytest.mark.parametrize("length", [0, 1, 3072, 3074])
def test_binary_batches_of_another_length_are_refused(length: int, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(length))
    assert f"{length} bytes are not whole records" in refusal(of(CIFAR10, path=tmp_path))


def test_cifar_is_found_where_the_environment_says(
    small_cifar: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, named = of(CIFAR10).split(), of(CIFAR10, path=small_cifar).split()
    assert torch.equal(without.train.inputs, named.train.inputs)
    monkeypatch.setenv("CIFAR10", "")
    assert "variable CIFAR10 names a folder" in refusal(of(CIFAR10))


@pytest.mark.parametrize("kind", [MNIST, CIFAR10])
def test_a_folder_without_the_files_is_refused(kind: type[AbstractSource], tmp_path: Path, refusal: Refusal) -> None:
    for path in (tmp_path, tmp_path / "missing\nfolder", tmp_path / ("x" * 300)):
        assert "data.path=" in refusal(of(kind, path=path))


def test_a_tilde_is_the_home_folder(idx_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(idx_folder, tmp_path / "images")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert of(MNIST, path="~/images").files()[0].parent == tmp_path / "images"
