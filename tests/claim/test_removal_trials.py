"""Trials on leaving examples out, against what is known of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.func import jacrev

from ntkexp.claim.papers import AddedRemovals, OtherRuns, RemovalScores
from ntkexp.claim.papers.leaving_out import (
    DAMPING,
    FAMILY,
    Retraining,
    influence,
    recorded,
    retraining,
    trak,
    would_change,
)
from ntkexp.mistake import Mistake

SMALL = ("data=moons", "data.train=16", "data.probe=4", "data.test=0", "path.count=2", "model.width=8")
WORDS = (*SMALL, "path.rule=[left]", "path.error_samples=0", "ladder.machine=[]")


@pytest.fixture(scope="module")
def linear() -> Retraining:
    """One step of a linear model on everybody: its output is linear in what the step takes in."""
    return retraining([*WORDS, "model=linear", "steps=1"], seed=0)


@pytest.mark.parametrize("how", [(), ("optimizer=adam", "optimizer.step_size=0.01", "optimizer.eps=0.1")])
def test_one_step_of_a_linear_model_is_taken_exactly_without_an_example(how: tuple[str, ...]) -> None:
    found = retraining([*WORDS, *how, "model=linear", "steps=1"], seed=0)
    actual = found.changes_without(torch.eye(16, dtype=torch.float64)).t()
    torch.testing.assert_close(would_change(found, one_step=True), actual, rtol=1e-11, atol=1e-14)


def test_an_effect_is_exact_where_the_optimizer_is_linear_too(linear: Retraining) -> None:
    actual = linear.changes_without(torch.eye(16, dtype=torch.float64)).t()
    torch.testing.assert_close(would_change(linear), actual, rtol=1e-11, atol=1e-14)


def test_what_is_recorded_ends_where_training_did(tmp_path: Path) -> None:
    found = retraining([*WORDS, "model=linear", "steps=20", "stop_at_loss=0.3"], seed=0)
    training = recorded(found, tmp_path)
    assert 0 < training.length == found.outcome.steps < 20
    assert torch.equal(training.end, found.rerun.flat.vector(found.outcome.weights))


def test_nobody_left_out_changes_nothing(linear: Retraining) -> None:
    left = torch.zeros(2, 16, dtype=torch.float64)
    left[1, 3] = 1.0
    changes = linear.changes_without(left)
    assert not changes[0].any()
    outputs = linear.outputs_without(torch.stack([1 - left[0], 1 - left[1]]))[:, :, 0]
    torch.testing.assert_close(changes[1], outputs[1] - outputs[0], rtol=0, atol=1e-14)  # outputs of size one


def test_scores_of_the_end_are_those_of_the_weights(linear: Retraining) -> None:
    """A model of three weights, of which a projection to four dimensions loses nothing."""
    end = linear.rerun.flat.vector(linear.outcome.weights)
    problem = linear.setting.problem
    outputs = linear.rerun.outputs(end, problem.inputs)[:, 0]
    features = jacrev(lambda vector: linear.rerun.outputs(vector, problem.inputs)[:, 0])(end)
    known, read, pull = features[:16], features[16:], (outputs - problem.targets[:, 0])[:16]
    curved = known.t() @ known / 16
    damped = curved + DAMPING * curved.trace() / 16 * torch.eye(3, dtype=torch.float64)
    through = torch.linalg.solve(damped, known.t()) / 16
    torch.testing.assert_close(influence(linear), read @ through * pull, rtol=1e-10, atol=1e-12)
    fitted = torch.linalg.lstsq(known, torch.eye(16, dtype=torch.float64)).solution
    torch.testing.assert_close(trak(linear), read @ fitted * pull, rtol=1e-9, atol=1e-11)  # of a random 3 × 4 matrix


@pytest.mark.slow
def test_influence_of_a_loss_that_is_no_parabola_is_refused() -> None:
    with pytest.raises(Mistake, match="choose loss=squared"):
        influence(retraining([*WORDS, "steps=1", "loss=logistic"], seed=0))


@pytest.mark.slow
def test_contributions_add_up_and_effects_rank_removals() -> None:
    table = pd.DataFrame(RemovalScores(base=(*SMALL, "steps=5"), activations=("tanh",), groups=4).rows(0))
    assert table["miss"].dropna().max() < 1e-13
    alone = table[table["left_out"] == "one"].set_index("score")["correlation"]
    assert alone["effect"] > 0.9 > alone["shuffled"]


@pytest.mark.slow
def test_removals_of_one_step_miss_what_the_smaller_mean_says() -> None:
    """Without k of N examples a mean has N/(N − k) times what its sum lacks, and single examples are told N/(N − 1)."""
    base = (*SMALL, "model.depth=0", "steps=1")
    rows = pd.DataFrame(AddedRemovals(base=base, activations=("tanh",), sizes=(1, 4, 8), groups=4).rows(0))
    sums = rows.set_index(["single", "size"])["miss"]
    expected = [1 - (16 - size) / 15 for size in (1, 4, 8)]
    assert sums["retrained"].tolist() == pytest.approx(expected, abs=1e-11)
    assert sums["others"].min() > 0.5


@pytest.mark.slow
def test_other_runs_are_those_of_their_seed_on_the_same_data() -> None:
    words = (*SMALL, "steps=3", "optimizer=sgd", "optimizer.batch=4")
    trial = OtherRuns(base=words, groups=4)
    trained = retraining([*words, "path.rule=[left]"], seed=2)
    runs = trial.runs(trained)
    alone = retraining([*words, "path.rule=[left]", "data.seed=2"], seed=2 + FAMILY)
    everyone = torch.ones(1, 16, dtype=torch.float64)
    ends = {name: replace(trained, rerun=run).outputs_without(everyone) for name, run in runs.items()}
    torch.testing.assert_close(ends["other_run"][0], alone.outcome.evidence.end[16:], rtol=0, atol=1e-13)  # three steps
    torch.testing.assert_close(ends["same"][0], trained.outcome.evidence.end[16:], rtol=0, atol=1e-13)
    assert len({float(end.sum()) for end in ends.values()}) == 4


@pytest.mark.slow
def test_what_does_not_depend_on_its_start_is_the_same_in_other_runs() -> None:
    """The difference of two copies starts at zero, and what is linear knows its start by its output alone."""
    linear = ("model.depth=0", "init.antisymmetric=true", "optimizer=gd", "optimizer.step_size=0.1", "steps=3")
    rows = pd.DataFrame(OtherRuns(base=(*SMALL, *linear), groups=4).rows(0))
    found = rows.pivot_table(index=["left_out", "score"], columns="repeated", values="correlation")
    assert found.loc[:, "other_run"].tolist() == pytest.approx(found.loc[:, "same"].tolist(), abs=1e-9)
    assert found.loc[("one", "retraining"), "other_run"] == pytest.approx(1)
