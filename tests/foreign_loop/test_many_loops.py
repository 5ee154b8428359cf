"""Loops as users write them: the parts add up to the change, in both precisions."""

from __future__ import annotations

import re

import pytest
import torch

from tests.foreign_loop.many_loops import CASES, DTYPES, PAGE, LoopCase, measured, miss_of


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loop", CASES, ids=lambda loop: loop.name)
def test_the_parts_add_up(loop: LoopCase, dtype: torch.dtype) -> None:
    found = measured(loop, dtype)
    assert miss_of(found) <= float(found.attrs["sum_tolerance"])


def test_the_page_lists_these_loops() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \| \d", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(loop.name, loop.optimizer) for loop in CASES]
    assert len(rows) >= 60
