"""Contributions by step, by step size and by width, compared with independent computations."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

from ntkexp.claim.papers.account import (
    SECANT,
    FiniteStepTerm,
    PartsAtTheEdge,
    RisingSteps,
    WidthDisagreement,
    finite_step_parts,
    measured_parts,
    measured_steps,
    sharpness,
    step_contributions,
)
from ntkexp.claim.papers.leaving_out import BARE, Retraining, retraining
from ntkexp.claim.quantity import Measured
from ntkexp.config.compose import compose
from ntkexp.report.loaded_run import load_run
from ntkexp.run.setting import prepare
from tests.run.small import execute_in, small

WORDS = ("data=moons", "data.train=6", "data.query=3", "data.test=0", "path.count=2", "model.width=8")
SMOOTH = (*WORDS, "model.activation=tanh")


def trained(*words: str) -> Retraining:
    return retraining([*words, "path.rule=[secant,left]", *BARE], seed=1)


def test_a_linear_model_has_no_term_of_finite_steps() -> None:
    """The kernel xᵢ·xⱼ is constant, so regularisation and ends have closed forms, and cancel."""
    steps = 5
    found = trained(*WORDS, "model=linear", f"steps={steps}", "optimizer.stable_fraction=0.2")
    term, regularisation, ends = finite_step_parts(found)
    assert term.abs().max() < 1e-14
    assert ends.abs().max() > 1e-3
    torch.testing.assert_close(regularisation, -ends, rtol=0, atol=1e-13)

    # R(x, xᵢ) = −(η²/2n²) Σ_s k(x, xᵢ) Σⱼ k(xᵢ, xⱼ) ℓ′ⱼ(s)
    problem = found.setting.problem
    eta, n = found.setting.descent.step_size, problem.train
    kernel = found.outcome.matrices.kernel_end[:, 0, :, 0]
    residual = found.setting.start.outputs[:n, 0] - problem.targets[:n, 0]
    expected = torch.zeros_like(term)
    for _ in range(steps):
        expected -= eta**2 / (2 * n**2) * kernel[n:] * (kernel[:n] @ residual)
        residual = residual - eta / n * kernel[:n] @ residual
    torch.testing.assert_close(regularisation, expected, rtol=0, atol=1e-13)


def test_regularisation_is_the_gradient_of_the_squared_norm() -> None:
    """Summed over examples, one step regularises by −(η²/4) J(x) ∇‖∇L‖²."""
    found = trained(*SMOOTH, "steps=1", "optimizer.stable_fraction=0.5")
    regularisation = finite_step_parts(found).regularisation
    rerun, eta = found.rerun, found.setting.descent.step_size
    vector = rerun.flat.vector(rerun.start).clone().requires_grad_()
    loss = (rerun.outputs(vector, rerun.inputs) - rerun.targets).square().mean() / 2
    (gradient,) = torch.autograd.grad(loss, vector, create_graph=True)
    (direction,) = torch.autograd.grad(gradient.square().sum(), vector)
    for row, output in enumerate(rerun.outputs(vector, found.others)[:, 0]):
        (jacobian,) = torch.autograd.grad(output, vector, retain_graph=True)
        expected = -(eta**2) / 4 * jacobian @ direction
        torch.testing.assert_close(regularisation[row].sum(), expected, rtol=1e-10, atol=0)


def test_both_terms_together_are_the_term_of_small_steps() -> None:
    """Half of the step size leaves half of the error, up to terms of the next order."""
    trial = FiniteStepTerm(base=SMOOTH, fractions=(0.01, 0.005), steps=3)
    rows = pd.DataFrame([*trial.rows(1)])
    assert rows["with_ends"][0] / rows["with_ends"][1] == pytest.approx(2, rel=0.02)
    assert rows["with_ends"].max() < 0.1 < rows["alone"].min()


def test_steps_that_raise_the_loss_are_told_from_others() -> None:
    """The contributions of a step of a linear model are −(η/n) k(x, xᵢ) ℓ′ᵢ."""
    words = ("data=moons", "data.train=12", "data.query=3", "data.test=0", "path.count=2", "model.width=8")
    unstable = (*words, "model.activation=tanh", "optimizer.stable_fraction=1.5", "steps=40", "path.rule=[secant]")
    setting = prepare(compose([*unstable, *BARE, "seed=1", "threads=1"]))
    steps = [*measured_steps(setting, every=1)]
    losses = [
        float((step.view.train_outputs - setting.descent.targets).square().sum())
        for step in setting.descent.steps_from(setting.problem.weights)
    ]
    rises = [after > before for before, after in pairwise(losses)]
    first = rises.index(True)
    assert [step.step for step in steps] == [*range(first, 39)]
    assert [step.rising for step in steps] == rises[first:]
    rows = {row["kind"]: row for row in RisingSteps(base=unstable, every=1, window=100).rows(1)}
    for kind, rising in (("rising", True), ("falling", False)):
        shares = [step.top_share for step in steps if step.rising == rising]
        assert rows[kind]["steps"] == len(shares)
        assert rows[kind]["top_share"] == pytest.approx(np.mean(shares), rel=1e-12)


def test_the_share_of_a_step_is_that_of_its_contributions() -> None:
    """The contributions of a step of a linear model are −(η/n) k(x, xᵢ) ℓ′ᵢ, and diverging steps raise the loss."""
    words = ("model=linear", "optimizer.stable_fraction=3", "steps=2", "path.rule=[secant]")
    setting = prepare(compose([*WORDS[:-1], *words, "data.train=10", *BARE, "seed=1", "threads=1"]))
    (measured,) = measured_steps(setting, every=1)
    n = setting.problem.train
    residual = setting.start.outputs[:n, 0] - setting.problem.targets[:n, 0]
    parts = (setting.start.kernel[n:, 0, :, 0] * residual).abs()
    assert measured.rising
    assert measured.top_share == pytest.approx(float((parts.max(1).values / parts.sum(1)).mean()), rel=1e-12)


def test_the_sharpness_is_the_largest_eigenvalue_of_the_hessian() -> None:
    setting = prepare(compose([*SMOOTH, *BARE, "seed=1", "threads=1"]))
    rerun = trained(*SMOOTH, "steps=1").rerun
    vector = rerun.flat.vector(setting.problem.weights)

    def loss(vector: torch.Tensor) -> torch.Tensor:
        missed = rerun.outputs(vector, rerun.inputs) - rerun.targets
        return missed.square().sum() / (2 * rerun.examples)

    hessian = torch.func.hessian(loss)(vector)
    expected = float(torch.linalg.eigvalsh(hessian)[-1])
    assert sharpness(setting, setting.problem.weights) == pytest.approx(expected, rel=1e-6)


def test_contributions_of_steps_add_up_to_those_of_the_run() -> None:
    words = [*SMOOTH, "steps=4", "path.rule=[secant,left]", *BARE]
    found = retraining(words, seed=1)
    setting = prepare(compose([*words, "seed=1", "threads=1"]))
    total = torch.zeros(3, 6, dtype=torch.float64)
    for step in setting.descent.steps_from(setting.problem.weights):
        parts, change = step_contributions(setting, step, SECANT)
        torch.testing.assert_close(parts.sum(1), change, rtol=0, atol=1e-13)
        total += parts
    expected = found.outcome.matrices.query_contributions("secant")[:, 0]
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-13)


def test_parts_of_a_linear_model_are_exact() -> None:
    """The Jacobian is constant, so all mean Jacobians are equal."""
    setting = prepare(compose([*WORDS, "model=linear", "steps=8", "path.rule=[secant]", *BARE, "seed=1", "threads=1"]))
    for slower in (1, 2):
        steps = [*measured_parts(setting, {0: "before", 4: "after"}, window=2, slower=slower)]
        assert [step.stage for step in steps] == ["before"] * 2 + ["after"] * 2
        assert all(step.wrong < 1e-24 * step.squares for step in steps)
        assert all(step.missed < 1e-24 * step.changed for step in steps)
        # the kernel at the start determines the largest stable step size
        assert steps[0].stability == pytest.approx(0.5 / slower, rel=1e-6)


def test_steps_are_measured_before_and_after_the_sharpness_crosses() -> None:
    base = (*SMOOTH, "data=clothes", "data.train=12", "model.depth=1", "optimizer.stable_fraction=0.9", "steps=60")
    trial = PartsAtTheEdge(base=(*base, "path.rule=[secant]"), every=2, window=1, later=20)
    setting = prepare(compose([*trial.base, *BARE, "seed=1", "threads=1"]))
    stable = [
        step.step_size * sharpness(setting, step.view.weights) / 2
        for step in setting.descent.steps_from(setting.problem.weights)
    ]
    crossing = next(index for index in range(0, 60, 2) if stable[index] > 1)
    assert 0 < crossing <= 40
    before = [index for index in range(0, crossing, 2) if stable[index] > 0.8]
    assert before
    after = [*range(crossing, crossing + 20, 2)]
    assert trial.stages(setting) == dict.fromkeys(before, "before") | dict.fromkeys(after, "after")
    assert [row["steps"] for row in trial.rows(1)] == [len(before), len(after)]
    small = (*trial.base, "optimizer.stable_fraction=0.1")
    rows = pd.DataFrame([*trial.model_copy(update={"base": small}).rows(1)])
    assert rows[["parts", "cancellation", "sum", "stability"]].isna().all(axis=None)


def test_networks_of_neighbouring_widths_are_compared(tmp_path: Path) -> None:
    table = pd.DataFrame({"runs": "sweep", "seed": 0, "model.width": [16, 4, 8, 32], "run": ["c", "a", "b", "lost"]})
    runs = {}
    for name, width in (("a", 4), ("b", 8), ("c", 16)):
        words = ("path.rule=[secant]", "path.count=2", "ladder.machine=[secant]", f"model.width={width}")
        runs[name] = load_run(execute_in(tmp_path / name, small(*words), words))
    rows = WidthDisagreement(split="test").of(Measured(table, runs))
    assert rows["model.width"].tolist() == [4, 8, 16]
    assert np.isnan(rows["value"][2])
    for row, (narrow, wide) in enumerate((("a", "b"), ("b", "c"))):
        first, second = (runs[name].parts("secant").to_numpy()[runs[name].points["test"], 0] for name in (narrow, wide))
        expected = np.mean([spearmanr(one, other).statistic for one, other in zip(first, second, strict=True)])
        assert rows["value"][row] == pytest.approx(1 - expected, abs=1e-12)
    assert 0 < rows["value"][0] < 2
