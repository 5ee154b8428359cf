"""Tests check the shapes in signatures, and use one thread per process, because pytest-xdist uses all cores.

No test depends on the speed of the machine.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# set before torch is imported, here and in processes that tests start; `python -m tests.processors` may set two threads
os.environ["OMP_NUM_THREADS"] = os.environ.get("NTKEXP_TEST_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads do not occupy a core

from tests.shapes import check_shapes

check_shapes()

collect_ignore = ["sweep/undrawn.py"]  # a worker of a sweep loads this file, which changes the process

settings.register_profile("untimed", deadline=None)  # the machine may have other work
settings.load_profile("untimed")


@pytest.fixture
def all_operations() -> Generator[None, None, None]:
    """Permit operations without a deterministic form, which another test may have forbidden."""
    import torch  # noqa: PLC0415  after the number of threads is set

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


def sampled(items: list[pytest.Item]) -> None:
    """Mark the cases of a test with `sample(n)` as slow, except n evenly spaced cases."""
    cases_of_test: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases_of_test[item.path, item.name.partition("[")[0]].append(item)
    for cases in cases_of_test.values():
        mark = cases[0].get_closest_marker("sample")
        assert mark is not None
        (fast,) = mark.args
        for number, item in enumerate(cases):
            # divide the cases into `fast` stretches; the first case of each stretch is fast
            if number and number * fast // len(cases) == (number - 1) * fast // len(cases):
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Begin with the longest tests, so that no core waits for another at the end.

    A slow test that is alone in its file takes longest, because it runs a whole command. Among fast tests, files with
    many tests take longest.
    """
    sampled(items)
    yield  # pytest deselects tests
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path] * (1 if item.get_closest_marker("slow") else -1))


def pytest_collection_finish() -> None:
    """Exclude the collected tests, which stay until the end, from garbage collection."""
    gc.freeze()
