"""The values of an axis, as they can be written, and what cannot be meant."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkexp.mistake import Mistake
from ntkexp.sweep.definition import Value, split_at_commas, values


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("64,128", (64, 128)),
        ("0..4", (0, 1, 2, 3, 4)),
        ("0..2,7", (0, 1, 2, 7)),
        ("0..1.0:3", (0.0, 0.5, 1.0)),
        ("0..8:3", (0, 4, 8)),
        ("32..1024:6:log", (32, 64, 128, 256, 512, 1024)),
        ("0.01..1:3:log", (0.01, 0.1, 1.0)),
        ("1e-3,null,true,relu", (0.001, None, True, "relu")),
        ("[secant],[left,secant]", (["secant"], ["left", "secant"])),
        ("../a.csv", ("../a.csv",)),
        ("5", (5,)),
    ],
)
def test_on_the_command_line(text: str, meant: tuple[Value, ...]) -> None:
    assert values("key", text) == meant


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        ("", "a value is missing"),
        ("1,,2", "a value is missing"),
        ("4..0", "is empty; write it as 0..4"),
        ("0..1.5", "there must be a count; write k=0..1.5:5"),
        ("1..8:4:lgo", "did you mean 'log'"),
        ("0..8:3:log", "equal ratios cannot start from 0"),
        ("1..4:9", "no 9 different whole numbers"),
        ("1..4:1", "1 values cannot reach from 1 to 4"),
        ("1..4:0", "0 values cannot reach"),
        ("64,64", "64 is given twice"),
        ([], "is given no values"),
        ({"from": 1, "to": 2}, "'count' is null"),
        ({"from": 1, "to": "b", "count": 2}, "'to' is b; it takes a number"),
        ({"from": 1, "to": 2, "cuont": 2}, "did you mean 'count'"),
        ({"from": 9, "to": 2, "count": 2}, "is empty"),
    ],
    ids=repr,
)
def test_what_cannot_be_meant_is_one_line(written: object, advice: str) -> None:
    with pytest.raises(Mistake, match=r"^k") as caught:
        values("k", written)
    assert advice in str(caught.value)


ENDS = st.floats(0.001, 1000)


@given(ENDS, ENDS, st.integers(2, 9), st.sampled_from(["linear", "log"]))
def test_a_range_holds_its_ends_and_rises_evenly(one: float, other: float, count: int, scale: str) -> None:
    start, stop = sorted((one, other))
    if stop < 1.01 * start:
        return
    found = values("k", {"from": start, "to": stop, "count": count, "scale": scale})
    assert len(found) == count
    assert (found[0], found[-1]) == pytest.approx((start, stop), rel=1e-11)  # values keep 12 digits
    measure = math.log if scale == "log" else float
    gaps = [measure(b) - measure(a) for a, b in pairwise(found)]
    assert gaps == pytest.approx([(measure(stop) - measure(start)) / (count - 1)] * (count - 1), rel=1e-6)


@given(st.lists(st.sampled_from(["a", "[b,c]", "'d,e'", "f(1,2)"]), min_size=1))
def test_commas_within_brackets_and_quotes_part_nothing(pieces: list[str]) -> None:
    assert list(split_at_commas(",".join(pieces))) == pieces
