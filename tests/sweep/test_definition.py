"""Sweeps as files and as command lines: their runs, their names, and their contradictions."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.compose import compose, composer
from ntkexp.engine.base import Began, Ended, Event, Stepped
from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Fit
from ntkexp.sweep.definition import Definition, Value, define, from_yaml, read_values, split_at_commas
from ntkexp.sweep.jobs import RemainingTime
from ntkexp.sweep.plan import Estimator, RunCost, by_decreasing_duration, plan

CHOICES = Choices(config_folders(None))
SHIPPED = CHOICES.options("sweep")


def swept(*words: str) -> Definition:
    return define(words, CHOICES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_file_composes_to_different_runs(name: str, tmp_path: Path) -> None:
    made = plan(swept(name), composer(), tmp_path)
    assert made.sweep.name == name
    assert len(made.distinct) == len(made.runs) == len(made.sweep.points) > 1


def test_no_worker_is_left_alone_with_a_long_run_at_the_end(tmp_path: Path) -> None:
    """The longest are begun first, and runs that are as long in the order of their points."""
    runs = plan(swept("steps=10,30,20", "seed=0..1"), composer(), tmp_path).runs
    begun = by_decreasing_duration(runs, [float(run.experiment.steps) for run in runs])
    assert [(run.experiment.steps, run.point.seed) for run in begun] == [
        (30, 0),
        (30, 1),
        (20, 0),
        (20, 1),
        (10, 0),
        (10, 1),
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_fit_is_against_numbers(name: str) -> None:
    made = swept(name)
    assert all(isinstance(value, int | float) and value > 0 for fit in made.fits for value in made.axes[fit.axis])


def test_the_issues_sweeps_are_there() -> None:
    wanted = "width depth init_scale alpha alpha_width step_size rule architecture activation optimizer data_size"
    assert {*wanted.split(), "label_noise", "seed"} <= set(SHIPPED)


def test_the_last_axis_varies_faster_and_seeds_fastest() -> None:
    made = swept("model.width=8,9", "init.alpha=1,2", "seed=0..1", "steps=5")
    found = [(point.values["model.width"], point.values["init.alpha"], point.seed) for point in made.points]
    assert found == sorted(found)
    assert made.overrides(made.points[1]) == ("steps=5", "model.width=8", "init.alpha=1", "seed=1")
    assert made.name.startswith("model.width-init.alpha-seed-")


def test_what_is_said_replaces_what_the_file_says() -> None:
    made = swept("width", "model.width=64,128", "seed=7", "steps=5", "init.W_std=1,2")
    assert dict(made.axes) == {"model.width": (64, 128), "init.W_std": (1, 2)}
    assert (made.seeds, made.base) == ((7,), ("data.seed=0", "steps=5"))
    assert swept("width", "data.seed=3", "steps=5").base == ("data.seed=3", "steps=5")
    assert made.fits == swept("width").fits
    assert not swept("width", "model.width=64").fits


def test_a_sweep_is_called_after_its_file_as_long_as_the_results_are_the_same() -> None:
    assert swept("width", "threads=1", "memory_gb=9").name == "width"
    other = swept("width", "steps=5").name
    assert other.startswith("width-")
    assert other != swept("width", "steps=6").name
    assert swept("model.width=8,9").name == swept("model.width=8..9", "device=cpu").name


FILE = {"axes": {"model.width": [8, 9]}, "seeds": 2, "base": ["steps=3"], "fits": []}


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"axis": {}}, "did you mean 'axes'"),
        ({"axes": [1]}, "KEY: VALUES lines"),
        ({"axes": {"model.width": []}}, "no values"),
        ({"seeds": 0}, "no values"),
        ({"seeds": [1, 1]}, "twice"),
        ({"seeds": [-1]}, "whole numbers ≥ 0"),
        ({"seeds": "a"}, "whole numbers ≥ 0"),
        ({"base": "steps=3"}, "it takes a list"),
        ({"base": ["model.width=3"]}, "give it in one place"),
        ({"base": ["seed=3"]}, "write 'seeds: 5'"),
        ({"axes": {"seed": [1, 2]}}, "write 'seeds: 5'"),
        ({"fits": [{"quantity": "kernel_change", "axis": "model.widht"}]}, "did you mean 'model.width'"),
        ({"fits": [{"quantity": "kernel_change"}]}, "fits.axis is missing"),
        ({"fits": [{"quantity": "kernel_change", "axis": "model.width", "slope": 1}]}, "fits.slope"),
        ({"fits": ["kernel_change"]}, "fits."),
        ({"fits": [{"quantity": "kernel_change", "axis": "model.width", "exponent": 1, "margin": 0}]}, "fits.margin=0"),
        (
            {"fits": [{"quantity": "kernel_change", "axis": "model.width", "exponent": 1, "bound": True}]},
            "fits.bound=true",
        ),
        (
            {"fits": [{"quantity": "kernel_change", "axis": "model.width", "bound": "upper"}]},
            "give the exponent that bounds",
        ),
    ],
    ids=repr,
)
def test_what_contradicts_itself_is_one_line(change: dict[str, object], advice: str) -> None:
    with pytest.raises(Mistake) as caught:
        from_yaml("mine", FILE | change)
    assert advice in str(caught.value)


def test_a_fit_may_name_no_exponent() -> None:
    fits = [{"quantity": "kernel_change", "axis": "model.width"}]
    assert from_yaml("mine", FILE | {"fits": fits}).fits == (Fit(quantity="kernel_change", axis="model.width"),)


def test_two_points_may_be_the_same_run(tmp_path: Path) -> None:
    made = plan(swept("threads=1,2", "model.width=8"), composer(), tmp_path)
    assert (len(made.runs), len(made.distinct)) == (2, 1)


def test_a_users_sweep_is_found(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "mine.yaml").write_text("axes: {model.width: 8..9}\n")
    assert define(["mine"], Choices(config_folders(tmp_path))).seeds == (0,)


# The values of an axis, as they can be written, and what cannot be meant.


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
    assert read_values("key", text) == meant


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
        ([], "has no values"),
        ({"from": 1, "to": 2}, "'count' is null"),
        ({"from": 1, "to": "b", "count": 2}, "'to' is b; it takes a number"),
        ({"from": 1, "to": 2, "cuont": 2}, "did you mean 'count'"),
        ({"from": 9, "to": 2, "count": 2}, "is empty"),
    ],
    ids=repr,
)
def test_what_cannot_be_meant_is_one_line(written: object, advice: str) -> None:
    with pytest.raises(Mistake, match=r"^k") as caught:
        read_values("k", written)
    assert advice in str(caught.value)


ENDS = st.floats(0.001, 1000)


@given(ENDS, ENDS, st.integers(2, 9), st.sampled_from(["linear", "log"]))
def test_a_range_holds_its_ends_and_rises_evenly(one: float, other: float, count: int, scale: str) -> None:
    start, stop = sorted((one, other))
    if stop < 1.01 * start:
        return
    found = read_values("k", {"from": start, "to": stop, "count": count, "scale": scale})
    assert len(found) == count
    assert (found[0], found[-1]) == pytest.approx((start, stop), rel=1e-11)  # values keep 12 digits
    measure = math.log if scale == "log" else float
    gaps = [measure(b) - measure(a) for a, b in pairwise(found)]
    assert gaps == pytest.approx([(measure(stop) - measure(start)) / (count - 1)] * (count - 1), rel=1e-6)


@given(st.lists(st.sampled_from(["a", "[b,c]", "'d,e'", "f(1,2)"]), min_size=1))
def test_commas_within_brackets_and_quotes_part_nothing(pieces: list[str]) -> None:
    assert list(split_at_commas(",".join(pieces))) == pieces


# Estimates follow from shapes alone, grow with them, and name impossible runs.


SMALL = ("data.train=24", "data.query=12", "data.test=12", "model.width=16", "steps=20")


def cost(*words: str) -> RunCost:
    return Estimator()(compose([*SMALL, *words]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("more", ["model.width=64", "model.depth=4", "data.train=100", "optimizer=adam", "model=cnn"])
def test_more_work_costs_more(more: str) -> None:
    assert cost(more).seconds > cost().seconds


@pytest.mark.parametrize("more", ["model.width=256", "data.train=100", "model=cnn"])
def test_larger_shapes_need_more_memory(more: str) -> None:
    assert cost(more).bytes > cost().bytes


def test_steps_cost_alike_and_many_need_no_more_memory() -> None:
    few, more, many = (cost(f"steps={steps}") for steps in (100_000, 200_000, 300_000))
    assert many.seconds - more.seconds == pytest.approx(more.seconds - few.seconds)
    assert many.bytes == few.bytes  # since the changes by single steps are joined to stretches


def test_what_is_estimated_once_is_not_looked_at_again() -> None:
    estimate = Estimator()
    for words in ((), ("seed=1",), ("init.alpha=2",), ("optimizer.step_size=0.1",)):
        estimate(compose([*SMALL, *words]))
    assert len(estimate.known) == 1


def test_a_run_that_cannot_be_says_why() -> None:
    assert "100000 of them training examples" in cost("data.train=100000").mistake
    assert "memory_gb=0.1 is less than" in cost("memory_gb=0.1").mistake


# The remaining time, after events at known times.


Happened = tuple[float, Event]  # the time of an event in seconds
ALIKE: dict[str, Any] = {"prior_seconds": 0.0}
ESTIMATES: dict[str, tuple[dict[str, float], int, dict[str, Any], list[Happened], Any]] = {
    "nothing has begun": (dict.fromkeys("abcd", 100.0), 2, {}, [], 200),
    "half of two is done": (
        dict.fromkeys("abcd", 100.0),
        2,
        {},
        [(0, Began("a")), (0, Began("b")), (50, Stepped("a", 5, 10)), (50, Stepped("b", 5, 10))],
        pytest.approx(150, rel=0.15),  # a tenth of a run follows its last step
    ),
    "two are done in the estimated time": (
        dict.fromkeys("abcd", 100.0),
        2,
        {},
        [(0, Began("a")), (0, Began("b")), (100, Ended("a", "done")), (100, Ended("b", "done"))],
        pytest.approx(100),
    ),
    "ten times slower than estimated": (
        dict.fromkeys("ab", 100.0),
        1,
        {},
        [(0, Began("a")), (1000, Ended("a", "done"))],
        pytest.approx(1000),
    ),
    "earlier runs were four times slower": (dict.fromkeys("ab", 100.0), 1, {"earlier_speed": 0.25}, [], 800),
    "the machine is less busy than it was for earlier runs": (
        dict.fromkeys("ab", 100.0),
        1,
        {"earlier_speed": 0.25},
        [(0, Began("a")), (200, Ended("a", "done"))],
        pytest.approx(200),
    ),
    "a run that fails at once says nothing about the speed": (
        dict.fromkeys("abc", 100.0),
        1,
        {},
        [(0, Began("a")), (1, Ended("a", "failed")), (1, Began("b")), (501, Ended("b", "done"))],
        pytest.approx(500),
    ),
    "unknown unit, none has begun": (dict.fromkeys("abc", 1.0), 1, ALIKE, [], None),
    "unknown unit, none has ended": (
        dict.fromkeys("abc", 1.0),
        1,
        ALIKE,
        [(0, Began("a")), (7, Stepped("a", 0, 10))],
        None,
    ),
    "unknown unit, one has ended": (
        dict.fromkeys("abc", 1.0),
        1,
        ALIKE,
        [(0, Began("a")), (7, Ended("a", "done"))],
        pytest.approx(14),
    ),
    "another process held it": ({"a": 100.0}, 1, {}, [(0, Began("a")), (0, Ended("a", "held"))], 100),
}


@pytest.mark.parametrize("case", ESTIMATES)
def test_the_remaining_time_follows_from_costs_and_events(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs, workers, options, events, ahead = ESTIMATES[case]
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = RemainingTime(costs, workers, **options)
    for seconds, event in events:
        now = seconds
        clock.update(event)
    assert clock.seconds_left == ahead
