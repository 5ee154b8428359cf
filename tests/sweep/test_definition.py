"""Sweeps as files and as command lines: what they expand to, what they are called, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ntkexp.config.choices import Choices, folders
from ntkexp.config.compose import composer
from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Fit
from ntkexp.sweep.definition import Definition, define, from_yaml
from ntkexp.sweep.plan import longest_first, plan

CHOICES = Choices(folders(None))
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
    begun = longest_first(runs, [float(run.experiment.steps) for run in runs])
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
        ({"fits": [{"quantity": "drift", "axis": "model.widht"}]}, "did you mean 'model.width'"),
        ({"fits": [{"quantity": "drift"}]}, "fits.axis is missing"),
        ({"fits": [{"quantity": "drift", "axis": "model.width", "slope": 1}]}, "fits.slope"),
        ({"fits": ["drift"]}, "fits."),
        ({"fits": [{"quantity": "drift", "axis": "model.width", "exponent": 1, "margin": 0}]}, "fits.margin=0"),
        ({"fits": [{"quantity": "drift", "axis": "model.width", "exponent": 1, "bound": True}]}, "fits.bound=true"),
        ({"fits": [{"quantity": "drift", "axis": "model.width", "bound": "upper"}]}, "give the exponent that bounds"),
    ],
    ids=repr,
)
def test_what_contradicts_itself_is_one_line(change: dict[str, object], advice: str) -> None:
    with pytest.raises(Mistake) as caught:
        from_yaml("mine", FILE | change)
    assert advice in str(caught.value)


def test_a_fit_may_name_no_exponent() -> None:
    fits = [{"quantity": "drift", "axis": "model.width"}]
    assert from_yaml("mine", FILE | {"fits": fits}).fits == (Fit(quantity="drift", axis="model.width"),)


def test_two_points_may_be_the_same_run(tmp_path: Path) -> None:
    made = plan(swept("threads=1,2", "model.width=8"), composer(), tmp_path)
    assert (len(made.runs), len(made.distinct)) == (2, 1)


def test_a_users_sweep_is_found(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "mine.yaml").write_text("axes: {model.width: 8..9}\n")
    assert define(["mine"], Choices(folders(tmp_path))).seeds == (0,)
