"""Small data files in all formats, and the source of every YAML file."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from omegaconf import OmegaConf

from ntkexp.config.build import Builder
from ntkexp.data import images
from ntkexp.data.base import AbstractSource
from ntkexp.mistake import Mistake

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def idx_bytes(array: np.ndarray) -> bytes:
    """Return an array of bytes in the format IDX."""
    return bytes([0, 0, 8, array.ndim]) + pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def pictures(count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return random pictures, and labels that cycle through ten classes."""
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8), np.arange(count) % 10


@pytest.fixture(scope="session")
def idx_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 600 pictures as gzipped IDX files."""
    folder = tmp_path_factory.mktemp("idx")
    images, labels = pictures(600, (28, 28))
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images), 1))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels), 1))
    return folder


@pytest.fixture(autouse=True)
def _debian(idx_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the same files with and without Debian's package."""
    monkeypatch.setattr(images, "DEBIAN_FOLDER", idx_folder)


@pytest.fixture(scope="session")
def small_cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 600 pictures as a batch of the binary version."""
    folder = tmp_path_factory.mktemp("cifar")
    images, labels = pictures(600, (3072,))
    (folder / "data_batch_1.bin").write_bytes(np.column_stack([labels.astype(np.uint8), images]).tobytes())
    return folder


@pytest.fixture(autouse=True)
def _cifar(small_cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the same files whatever the variable CIFAR10 names."""
    monkeypatch.setenv("CIFAR10", str(small_cifar))


@pytest.fixture
def cifar_folder(tmp_path: Path) -> Path:
    """Write two batches of the python version."""
    images, labels = pictures(60, (3072,))
    for number, part in enumerate((slice(30), slice(30, 60)), start=1):
        batch = {b"data": images[part], b"labels": labels[part].tolist(), b"batch_label": b"training"}
        (tmp_path / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=3))
    return tmp_path


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str, name: str = "table.csv") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
        return tmp_path / name

    return write


@pytest.fixture
def refusal() -> Callable[[AbstractSource], str]:
    def refuse(source: AbstractSource) -> str:
        with pytest.raises(Mistake) as caught:
            source.split()
        line = str(caught.value)
        assert line
        assert "\n" not in line
        assert "\r" not in line
        return line

    return refuse


def written_down(name: str) -> dict[str, object]:
    """Return the fields of a YAML file."""
    fields = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert isinstance(fields, dict)
    return {str(key): value for key, value in fields.items()}


def source_of(name: str, **changes: object) -> AbstractSource:
    """Return the source that a YAML file names, with some fields changed."""
    source = Builder().component(written_down(name) | changes, (AbstractSource,), "data")
    assert isinstance(source, AbstractSource)
    return source


GIVEN = {"integers"}
"""Sources without random examples, which tests/model/test_scalar.py tests."""

READY = sorted({path.stem for path in CONFIGS.glob("*.yaml") if "???" not in written_down(path.stem).values()} - GIVEN)


@pytest.fixture(params=READY)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of each source that needs no path."""
    return str(request.param)


@pytest.fixture
def source(name: str) -> AbstractSource:
    """Return a small version of the source."""
    return source_of(name, train=40, query=20, test=30)


@pytest.fixture
def configured() -> Callable[..., AbstractSource]:
    """Return the function that builds the source of a YAML file, with some fields changed."""
    return source_of
