"""Nothing that is planted in a loop is recorded as something else, and no plain loop is refused."""

from __future__ import annotations

import pytest

from tests.torture.loop.search import search


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about what is planted
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_planted_is_recorded_truly_or_refused(seed: int) -> None:
    said: list[str] = []
    planted, plain = search(seed, 60, said.append)
    assert not planted["wrong"], said
    assert not plain["wrong"], said
    assert 20 * plain["refused"] <= plain.total(), said  # one number, under a scale of 1000, that is not clipped once
    assert planted["refused"] > planted["recorded"] > 0
