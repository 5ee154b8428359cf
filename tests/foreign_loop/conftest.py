"""Each test draws the same random numbers, whatever tests ran before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield
