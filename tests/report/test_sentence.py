"""The sentence says what the numbers say, in every case."""

from __future__ import annotations

import math

import pytest

from ntkexp.records.results import Result
from ntkexp.report.sentence import sentence


def results(**errors: float | None) -> list[Result]:
    return [Result("probe", name, relative_error=error, floor=1e-13, max_error=error) for name, error in errors.items()]


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
            "The secant kernel machine reproduces the trained network to rounding (4e-15).",
        ),
        (
            results(secant=math.nan, left=math.nan),
            "The trained network is not finite, so no kernel machine can be compared with it.",
        ),
        (
            [Result("probe", "secant", relative_error=math.nan, max_error=0.0)],
            "Training did not change the network, so there is nothing for a kernel machine to reproduce.",
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


def test_the_worst_split_counts() -> None:
    ladder = [
        *(Result("train", name, relative_error=error) for name, error in {"secant": 1e-15, "left": 0.1}.items()),
        *(Result("test", name, relative_error=error) for name, error in {"secant": 5e-15, "left": 0.05}.items()),
    ]
    assert sentence(ladder).endswith("to rounding (5e-15); the textbook sum misses by up to 10 %.")
    assert "misses the trained network" in sentence([*ladder, Result("probe", "secant", relative_error=1e-3)])
