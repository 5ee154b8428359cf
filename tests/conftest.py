"""While tests run, shapes in signatures are checked, and a process takes one thread: tests run on all cores at once.

No test fails because a machine is slow.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported here, and in every process that a test starts; `python -m tests.processors` asks for two.
os.environ["OMP_NUM_THREADS"] = os.environ.get("NTKEXP_TEST_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where two are asked for, one that waits leaves its core to others

from tests.shapes import check_shapes

check_shapes()

collect_ignore = ["sweep/undrawn.py"]  # it changes the process that loads it, which is to be a worker of a sweep

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on who else uses the machine
settings.load_profile("untimed")


@pytest.fixture
def all_operations() -> Generator[None, None, None]:
    """Some operations have no deterministic form in torch, which another test may have required."""
    import torch  # noqa: PLC0415  after the numbers of threads are set

    asked = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(asked)


def sampled(items: list[pytest.Item]) -> None:
    """Mark all cases of a test as slow but the evenly spaced few that its mark `sample` leaves."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases[item.path, item.name.partition("[")[0]].append(item)
    for each in cases.values():
        mark = each[0].get_closest_marker("sample")
        assert mark is not None
        (fast,) = mark.args
        for number, item in enumerate(each):
            # one of each stretch of len(each) / fast cases, the first among them
            if number and number * fast // len(each) == (number - 1) * fast // len(each):
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Begin with what takes longest, so that no core waits for another at the end.

    A file of many tests takes longer than one of few, but of slow tests those that are alone do: a whole command each.
    """
    sampled(items)
    yield  # pytest leaves out what is not to be run
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path] * (1 if item.get_closest_marker("slow") else -1))


def pytest_collection_finish() -> None:
    """Spare the thousands of tests that stay until the end whenever garbage is looked for."""
    gc.freeze()
