"""The picture of a claim that says nothing of its picture."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from ntkexp.claim.claim import MAIN
from ntkexp.claim.expectation import Order
from ntkexp.claim.judge import judge_part
from ntkexp.claim.picture import drawable
from tests.claim.subject import changed_claim
from tests.claim.test_pictures import LOOK, judged


def test_an_order_of_which_one_side_has_no_numbers_is_not_drawn() -> None:
    table = pd.DataFrame({"alpha": [1, 2, 1, 2], "seed": [0, 0, 1, 1], "value": [1.0, math.nan, 2.0, math.nan]})
    order = Order(along="alpha", above=2, below=1, margin=0.1)
    assert judge_part(order, table).verdict == "undecided"
    assert drawable(order, table) is None
    assert drawable(order, table.fillna(5.0)) is not None


def test_the_part_that_decides_is_drawn_first_and_colours_are_told() -> None:
    """Of five parts, each a bound of its own, three are drawn, whichever decides."""
    bounds = [
        {"_target_": "ntkexp.claim.expectation.Bound", "limit": n, "side": "upper", "margin": 0} for n in range(5)
    ]
    table = pd.DataFrame({"seed": [0, 1], "value": [1.0, 2.0]})
    found = judged(changed_claim(expectation=bounds, control={"seeds": 3}), table)
    for decides in range(5):
        main = replace(LOOK, expected=found.claim.looks[MAIN].words(decides))
        decided = replace(found, record=replace(found.record, looks={**found.record.looks, MAIN: main}))
        titles = [axes.get_title() for axes in found.claim.picture.figure(decided).axes]
        assert titles[0] == f"≤ {decides} ± 0"
        assert len(titles) == 3
    said = "Here: blue is the claim's own look, orange the second; of 5 parts that are expected, 3 are drawn."
    assert found.claim.picture.caption(found) == said
