"""What is pulled back to rows of products is grouped by the example that owns it."""

from __future__ import annotations

import pytest
import torch

from ntkexp.kernel.features.places import at_places, in_turn


@pytest.mark.parametrize("owner", [[0, 1, 2, 0, 1, 2], [2, 0, 1, 0, 1, 2], [0, 2, 2, -1, 0, 2]], ids=str)
def test_rows_of_any_order_come_example_by_example(owner: list[int]) -> None:
    whose, rows = torch.tensor(owner), torch.arange(1.0, 25).view(6, 4)
    places = in_turn(whose, 3)
    assert places is not None
    found = at_places(rows, 0, places)
    for example in range(3):
        own = rows[whose == example]
        assert torch.equal(found[example, : len(own)], own)
        assert not found[example, len(own) :].any()
    assert torch.equal(at_places(rows[None], 1, places), found[None])
