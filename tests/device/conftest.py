"""Tests of this folder run in a process that loads the emulated device before it computes its first gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.device.emulated import IS_EMULATED, compiled, load, missing


def begin(library: Path | None) -> None:
    """Prepare the process like pytest and tests/conftest.py."""
    import tests.conftest  # noqa: F401, PLC0415  begins to check shapes

    warnings.simplefilter("error")
    if library is not None:
        load(library)


@pytest.fixture(scope="package")
def process() -> Iterator[ProcessPoolExecutor]:
    """The process with the device."""
    if reason := missing():
        pytest.skip(reason)
    with ProcessPoolExecutor(1, get_context("spawn"), begin, (compiled() if IS_EMULATED else None,)) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _in_process(process: ProcessPoolExecutor, request: pytest.FixtureRequest) -> None:
    """Run the test in the process with the device, instead of this process."""
    test: Callable[..., Any] = request.node.obj

    def run(**arguments: Any) -> None:
        process.submit(test, **arguments).result()

    request.node.obj = run
