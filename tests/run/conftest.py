"""Tests use one thread, because small matrices gain nothing from more, and tests share the cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
