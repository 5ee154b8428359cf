"""The picture of a claim that says nothing of its picture."""

from __future__ import annotations

import math

import pandas as pd

from ntkexp.claim.expectation import Order
from ntkexp.claim.picture.judged_rows import drawable


def test_an_order_of_which_one_side_has_no_numbers_is_not_drawn() -> None:
    table = pd.DataFrame({"alpha": [1, 2, 1, 2], "seed": [0, 0, 1, 1], "value": [1.0, math.nan, 2.0, math.nan]})
    order = Order(along="alpha", above=2, below=1, margin=0.1)
    assert order.judge(table).verdict == "undecided"
    assert drawable(order, table) is None
    assert drawable(order, table.fillna(5.0)) is not None
