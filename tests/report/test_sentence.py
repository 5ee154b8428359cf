"""The sentence says what the numbers say, in every case."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntkexp.records.results import Result
from ntkexp.report.sentence import Likeness, likeness, sentence


def results(**errors: float | None) -> list[Result]:
    return [Result("probe", name, relative_error=error, floor=1e-13, max_error=error) for name, error in errors.items()]


def on(split: str, errors: Mapping[str, float | None], floor: float = 1e-13, note: str = "") -> list[Result]:
    return [Result(split, name, "", error, floor, error, note=note) for name, error in errors.items()]


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [
        (
            results(secant=4e-15, left=0.12, frozen_start=0.3),
            "The secant kernel machine reproduces the trained network to rounding (4e-15); "
            "the textbook sum misses by 12 %, the frozen kernel by 30 %.",
        ),
        (
            results(secant=4e-15),
            "The secant kernel machine reproduces the trained network to rounding (4e-15).",
        ),
        (
            results(left=0.12, frozen_start=0.3),
            "The textbook sum misses the trained network by 12 %, the frozen kernel by 30 %.",
        ),
        (
            results(secant=2e-9, left=0.12),
            "The secant kernel machine misses the trained network by 2e-9, the textbook sum by 12 %; "
            "rounding explains no more than 1e-12 of the secant's miss.",
        ),
        (
            results(secant=4e-15, left=3e-14, frozen_start=40.0),
            "The secant kernel machine and the textbook sum reproduce the trained network to rounding (4e-15, 3e-14); "
            "the frozen kernel misses by 40 times what was learned.",
        ),
        (
            results(secant=4e-15, left=math.inf, frozen_start=None),
            "The secant kernel machine reproduces the trained network to rounding (4e-15); "
            "the textbook sum is not finite.",
        ),
        (
            results(secant=math.nan, left=math.nan),
            "The secant kernel machine and the textbook sum are not finite.",
        ),
        (
            on("probe", {"secant": math.nan, "left": math.nan}, floor=math.nan),
            "The trained network is not finite, so no kernel machine can be compared with it.",
        ),
        (
            [Result("probe", "secant", max_error=0.0)],
            "Training moved the network by no more than rounding, so there is nothing to reproduce.",
        ),
        (
            on("probe", {"secant": 0.2}, floor=3.0),  # rounding explains whatever is measured
            "Training moved the network by no more than rounding, so there is nothing to reproduce.",
        ),
        (
            [Result("probe", "left", note="path.rule lists no rule")],
            "No kernel machine was compared with the trained network: path.rule lists no rule.",
        ),
        ([], "No kernel machine was compared with the trained network."),
    ],
)
def test_what_the_ladder_means(ladder: list[Result], expected: str) -> None:
    assert sentence(ladder) == expected


def test_single_precision_is_judged_by_its_own_floor() -> None:
    ladder = [Result("probe", "secant", relative_error=3e-6, floor=2e-5), Result("probe", "left", relative_error=0.12)]
    assert sentence(ladder).startswith("The secant kernel machine reproduces the trained network to rounding (3e-6);")


GOOD = {"secant": 4e-15, "left": 0.1}


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [
        (
            on("train", GOOD) + on("test", {"secant": 5e-15, "left": 0.05}),
            "On both splits the secant kernel machine reproduces the trained network to rounding (5e-15); "
            "the textbook sum misses by up to 10 %.",
        ),
        (
            on("train", GOOD) + on("probe", GOOD | {"secant": math.nan}) + on("test", GOOD),
            "On train and test the secant kernel machine reproduces the trained network to rounding (4e-15); "
            "on all 3 splits the textbook sum misses by up to 10 %; the secant kernel machine is not finite on probe.",
        ),
        (
            on("train", GOOD) + on("test", {"left": 0.2}),  # the secant's rung is missing on one split
            "On train the secant kernel machine reproduces the trained network to rounding (4e-15); "
            "on both splits the textbook sum misses by up to 20 %.",
        ),
        (
            on("train", {"secant": 1e-3}, floor=1e-2) + on("test", {"secant": 1e-9}, floor=1e-13),
            "On both splits the secant kernel machine misses the trained network by up to 0.1 %; "
            "rounding explains no more than 1e-12 of the secant's miss on test (1e-9).",
        ),
        (
            on("train", GOOD, note="at 22 of 128 points") + on("test", GOOD | {"frozen_start": 0.3}),
            "On both splits, on 1 of them at 22 of 128 points, the secant kernel machine reproduces the trained "
            "network to rounding (4e-15); the textbook sum misses by up to 10 %; on test the frozen kernel misses by "
            "30 %.",
        ),
        (
            on("probe", {"secant": 4e-15}, note="at 22 of 128 points") + on("probe", {"frozen_start": 0.3}),
            "At 22 of 128 points the secant kernel machine reproduces the trained network to rounding (4e-15); "
            "at all points the frozen kernel misses by 30 %.",
        ),
        (
            on("train", GOOD) + on("test", dict.fromkeys(GOOD, math.nan), floor=math.nan),
            "On train the secant kernel machine reproduces the trained network to rounding (4e-15); "
            "the textbook sum misses by 10 %; the trained network is not finite on test.",
        ),
        (
            on("train", {"secant": None}) + on("test", {"secant": 4e-15, "rbf_identity": 1e-15}),
            "On test the secant kernel machine reproduces the trained network to rounding (4e-15).",
        ),
    ],
)
def test_every_split_is_spoken_of(ladder: list[Result], expected: str) -> None:
    assert sentence(ladder) == expected


ROWS = st.builds(
    Result,
    st.sampled_from(["train", "probe", "test"]),
    st.sampled_from(["secant", "left", "rbf_identity"]),
    relative_error=st.sampled_from([None, 0.0, 4e-15, 3e-4, 0.3, math.inf, math.nan]),
    floor=st.sampled_from([1e-13, 1e-3, 5.0, math.nan]),
    max_error=st.sampled_from([0.0, math.nan]),
)


@given(st.lists(ROWS, max_size=9, unique_by=lambda row: (row.split, row.machine)))
def test_whatever_is_in_the_table_is_in_the_sentence(ladder: list[Result]) -> None:
    """No machine is said to be the network on every split if any of its rows says otherwise."""
    said, splits = sentence(ladder), {row.split for row in ladder}
    rows = {row.split: likeness(row) for row in ladder if row.machine == "secant"}
    all_exact = bool(rows) and set(rows.values()) == {Likeness.EXACT} and rows.keys() == splits
    everywhere = {1: "The", 2: "On both splits the", 3: "On all 3 splits the"}.get(len(splits), "nowhere")
    claim = re.match(f"{everywhere} secant kernel machine( and the textbook sum)? reproduces? the trained", said)
    assert bool(claim) == all_exact
    assert Likeness.BROKEN not in rows.values() or "not finite" in said
