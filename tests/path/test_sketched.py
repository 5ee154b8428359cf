"""Runs whose kernels are sketches: sums stay exact, errors are said, and what has a memory is refused."""

from __future__ import annotations

import pytest

from ntkexp.experiment.identity import identity
from ntkexp.mistake import Mistake
from ntkexp.run.setting import prepare
from tests.run.small import ran, small

SHORT = ("steps=4", "path.rule=[secant,left]")
WAYS = (
    ("optimizer=gd", "path.error_samples=2"),
    ("optimizer=sgd", "optimizer.weight_decay=0.1", "optimizer.clip_norm=0.5"),
    ("optimizer=gd", "optimizer.layers={network.1: 0.25}"),
    ("optimizer=gd", "data.classes=[1,3,8]", "loss=cross_entropy"),
)
EXACT = 1e-12  # the bound of the project for secants


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_the_secant_closes_however_small_the_sketch(way: tuple[str, ...]) -> None:
    run = ran(*SHORT, *way, "kernel.sketch=5")
    for split in ("train", "probe", "test"):
        error = run.table["secant", split].relative_error
        assert error is not None
        assert error < EXACT
    known = run.outcome.evidence.paths["secant"].facts
    assert set(known) <= {"decay_share"}  # nothing is told of parts that no sketch knows


def test_every_kernel_that_is_kept_lies_within_its_bar_and_the_run_says_so() -> None:
    sketched, exact = ran(*SHORT, "kernel.sketch=300"), ran(*SHORT)
    start = exact.setting.start.kernel[: exact.setting.points.train]
    first = sketched.setting.start.kernel[: sketched.setting.points.train]
    bar = sketched.memory.rows[0]["sketch_error"]
    assert isinstance(bar, float)
    assert float((first - start).norm() / first.norm()) <= bar < 0.5
    assert f"the first within {bar:.1%} of its norm" in sketched.outcome.sentence
    assert "sketch_error" not in exact.memory.rows[0]


def test_a_sketch_changes_how_training_is_read_but_not_what_is_trained() -> None:
    """The step size is chosen by the largest eigenvalue, that of the kernel, which Lanczos finds to 1e-7 of itself."""
    sketched, exact = (ran(*SHORT, *way) for way in (("kernel.sketch=5",), ()))
    assert sketched.setting.descent.step_size == pytest.approx(exact.setting.descent.step_size, rel=1e-5)
    moved = exact.outcome.evidence.end - exact.outcome.evidence.start
    assert float((sketched.outcome.evidence.end - exact.outcome.evidence.end).norm()) < 1e-4 * float(moved.norm())


def test_a_sketch_that_is_larger_than_what_it_projects_is_said_to_be_of_no_use() -> None:
    weights = sum(weight.numel() for weight in ran("steps=1").outcome.weights.values())
    said = (prepare(small(f"kernel.sketch={size}")).remarks for size in (weights - 1, weights))
    assert [f"no less than the {weights:,} weights" in " ".join(remarks) for remarks in said] == [False, True]


def test_a_larger_sketch_comes_closer_to_the_parts() -> None:
    exact = ran(*SHORT).outcome.evidence.paths["secant"].contributions
    few, many = (ran(*SHORT, f"kernel.sketch={k}").outcome.evidence.paths["secant"].contributions for k in (30, 3000))
    assert float((many - exact).norm()) < 0.3 * float((few - exact).norm())  # a tenth, but for chance


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "flow"])
def test_what_no_sketch_of_a_step_keeps_is_refused_in_one_line(optimizer: str) -> None:
    with pytest.raises(Mistake, match=r"kernel\.sketch=5: optimizer=") as caught:
        small(f"optimizer={optimizer}", "kernel.sketch=5")
    assert "\n" not in str(caught.value)


def test_exact_runs_are_those_of_before_there_was_a_choice() -> None:
    assert identity(small("kernel.sketch=null")) == identity(small())
    assert len({identity(small(f"kernel.sketch={k}")) for k in ("null", "5", "6")}) == 3
