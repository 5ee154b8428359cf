"""What is said of many runs counts all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import pandas as pd
import pytest

from ntkexp.records.results import Result
from ntkexp.report.material import what_came_out
from ntkexp.report.plots.run_plots import strip
from ntkexp.report.run import Run

Errors: TypeAlias = Mapping[str, float | None]


def run(train: Errors, test: Errors | None = None, floor: float = 1e-13, controls: tuple[str, ...] = ()) -> Run:
    """A run with these errors; on the test split the same, if nothing else is said."""
    both = {"train": train, "test": train if test is None else test}
    ladder = tuple(
        Result(split, name, "", error, floor, error, control=name in controls)
        for split, errors in both.items()
        for name, error in errors.items()
    )
    return Run(Path("run"), {}, pd.DataFrame(), ladder)


EXACT, OFF = {"secant": 4e-15}, {"secant": 0.3}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([run(EXACT)] * 3, "reproduces all 3 trained networks to rounding (4e-15 at worst)."),
        (
            [*[run(EXACT)] * 99, run(EXACT, OFF)],
            "reproduces 99 of 100 trained networks to rounding (4e-15 at worst) and misses 1 by 30 %.",
        ),
        (
            [run({"secant": error}) for error in (0.3, 0.01, 0.02)],
            "misses all 3 trained networks by 2 % at the median and 30 % at worst.",
        ),
        (
            [run(EXACT), run({"left": 0.1})],  # one run has no secant
            "reproduces 1 of 2 trained networks to rounding (4e-15) and was not compared with 1; the textbook sum "
            "misses 1 of 2 trained networks by 10 % and was not compared with 1.",
        ),
        (
            [run(EXACT), run(EXACT, {"secant": math.nan})],
            "reproduces 1 of 2 trained networks to rounding (4e-15) and is not finite beside 1.",
        ),
        (
            [run(EXACT), run({"secant": math.nan}, floor=math.nan)],
            "reproduces 1 of 2 trained networks to rounding (4e-15) and cannot be compared with 1 that is not finite.",
        ),
        (
            [run(EXACT), run({"secant": 0.5}, floor=2.0)],
            "reproduces 1 of 2 trained networks to rounding (4e-15) and cannot be told from 1 that moved by no more "
            "than rounding.",
        ),
        (
            [run(EXACT), run(EXACT, {"secant": None})],
            "reproduces both trained networks to rounding (4e-15 at worst), at some points alone in 1.",
        ),
    ],
)
def test_every_run_is_spoken_of(runs: list[Run], expected: str) -> None:
    assert what_came_out(runs) == f"The secant kernel machine {expected}"


def test_no_run_and_no_machine_are_spoken_of_too() -> None:
    assert what_came_out([run({}), run({})]) == "No kernel machine was compared with any of 2 trained networks."


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([run({"left": 0.1, "linearised": 0.2, "mine": 1e-15}, controls=("mine",))], "Nearest to the network is left"),
        ([run({"secant": 4e-15, "gauss": 5e-15, "left": 0.1})], "Nearest to the network are secant and gauss"),
        (
            [run({"left": 0.1, "linearised": 0.2}), *[run({"left": 0.3, "linearised": 0.2})] * 2],
            "Nearest to the network is linearised in 2 of 3 runs",
        ),
        (
            [run({"left": math.nan, "linearised": 0.2}), run({"left": 0.1})],
            "Nearest to the network are linearised and left in 1 of 2 runs",
        ),
        (
            [run({"left": math.inf, "mine": 0.1}, controls=("mine",))],
            "No machine that knows the network has a finite error",
        ),
    ],
)
def test_the_nearest_machine_is_one_that_knows_the_network(runs: list[Run], expected: str) -> None:
    picture = strip(runs)
    assert picture is not None
    assert picture.figure.get_suptitle().replace("\n", " ").startswith(expected)


def test_what_is_no_number_is_counted_beside_its_row() -> None:
    picture = strip([run({"left": math.nan}), run({"left": 0.1}), run({"left": 0.3})])
    assert picture is not None
    assert "0.2, worst 0.3; 1 not finite" in [text.get_text() for text in picture.figure.axes[0].texts]
    assert strip([run({"left": math.nan})]) is None
