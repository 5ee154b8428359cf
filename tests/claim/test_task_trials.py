"""Trials on tasks in sequence, late generalization and leaving out, compared with known results."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.func import jacrev

from ntkexp.claim.papers.later_tasks import LaterTask, share_of_tenth
from ntkexp.claim.papers.lazy_and_rich import (
    FollowedMode,
    LateGeneralising,
    LearningStep,
    ScaledDescent,
    ScaledFunction,
    top_mode,
)
from ntkexp.claim.papers.leaving_out import (
    INFLUENCE_DAMPING,
    OTHER_SEED_OFFSET,
    AddedRemovals,
    ExactnessOfScores,
    OtherRuns,
    RemovalScores,
    Retraining,
    influence,
    leave_out_effects,
    recorded,
    retraining,
    trak,
)
from ntkexp.claim.quantity import Measured
from ntkexp.data import ModularAddition
from ntkexp.init import NTK
from ntkexp.layer import Polynomial
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model import MLP
from ntkexp.model.functional import function_of, weights_of
from ntkexp.report.forgetting import predicted_change
from ntkexp.report.loaded_run import load_run
from ntkexp.report.run import Run
from ntkexp.shapes import Inputs, Weights
from ntkexp.stream import stream
from tests.claim.test_trials import number
from tests.run.small import execute_in, ran, small
from tests.run.test_sequence import HAND

ROUNDING = 1e-12  # sums over 20 steps of numbers near 1
TASKS = ("data=sequence", "ladder.machine=[]", "path.rule=[secant]", "path.count=2")
FACTS = ("closure", "forgetting", "top_share", "switch", "shuffled", "selectivity", "gained")


def cued(**fields: float) -> str:
    """Return the words of two tasks in sequence."""
    told = "".join(f",{name}:{value}" for name, value in fields.items())
    tasks = ",".join(f"{{_target_:ntkexp.data.Cued,task:{task}{told}}}" for task in (1, 2))
    return f"data.phases=[{tasks}]"


def finished(place: Path, *words: str) -> Run:
    asked = (*TASKS, *words)
    return load_run(execute_in(place, small(*asked), asked))


def facts(run: Run, *names: str) -> dict[str, float]:
    table = pd.DataFrame({"runs": ["runs"], "run": [run.name], "seed": [0]})
    found = LaterTask.model_validate({"facts": names}).of(Measured(table, {run.name: run}))
    return dict(zip(found["quantity"], found["value"], strict=True))


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A linear model, with a constant kernel."""
    return finished(tmp_path_factory.mktemp("linear"), "model=linear", "init.alpha=3", "init.centred=true")


def test_the_kernel_of_a_linear_model_predicts_its_change(linear: Run) -> None:
    found = facts(linear, *FACTS[:-1])
    assert 0 < found["closure"] < ROUNDING
    assert found["shuffled"] < found["switch"] == 1.0
    told, change = predicted_change(linear, 2), linear.contributions["change"].sel(phase=2).to_numpy()
    assert told is not None
    assert np.abs(told - change).max() < ROUNDING < 1e-3 * np.abs(change).max()
    assert np.isnan(found["selectivity"])  # it has no hidden units


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("optimizer", {"_target_": "ntkexp.optimizer.SGD"}),
        ("optimizer", {"weight_decay": 0.1}),
        ("optimizer", {"layers": {"network.1": 2.0}}),
        ("loss", {"_target_": "ntkexp.loss.Logistic"}),
    ],
)
def test_training_that_no_kernel_predicts_is_refused(part: str, told: dict[str, object], linear: Run) -> None:
    other = replace(linear, config=linear.config | {part: linear.config[part] | told})
    with pytest.raises(Mistake, match="stores no kernel from which a change could be predicted; use optimizer=gd"):
        facts(other, "switch")


def test_forgetting_is_the_rise_of_the_loss(tmp_path: Path) -> None:
    """Targets are −1 and 1, so the mean ½‖y‖² is ½."""
    run = finished(tmp_path)
    loss = run.metrics["loss_query_1"]
    rise = loss.iloc[-1] - loss[run.metrics["phase"] == 2].iloc[0]
    assert rise > 0.01
    found = facts(run, *FACTS)
    assert found["forgetting"] == pytest.approx(2 * rise, rel=ROUNDING)
    assert found["selectivity"] - found["gained"] == pytest.approx(run.metrics["selectivity"][0], rel=ROUNDING)


def test_the_worst_tenth_of_the_later_examples() -> None:
    """The worst of three examples has a half of ⅞."""
    assert share_of_tenth(HAND) == 0.5 / 0.875


def test_a_run_without_the_tasks_is_refused(linear: Run) -> None:
    for quantity, advice in ((LaterTask(during=3), "learns 2 tasks"), (LaterTask(task=2), "choose an earlier task")):
        with pytest.raises(Mistake, match=advice):
            quantity.measure(linear)
    whole = replace(linear)
    vars(whole)["contributions"] = linear.contributions.drop_vars("by_phase")
    with pytest.raises(Mistake, match="has no tasks with query points; use data=sequence"):
        LaterTask().measure(whole)


def test_units_without_a_cue_are_tuned_to_no_task() -> None:
    rows = ran(*TASKS, cued(cue=0), "data.standardise=none", "model.depth=1").memory.rows
    assert {row["selectivity"] for row in rows if "selectivity" in row} == {0.0}


def test_units_keep_their_tuning_at_large_scale() -> None:
    def moved(alpha: float) -> float:
        words = ("data.standardise=none", "model.depth=1", "init.centred=true", f"init.alpha={alpha}")
        first, *_, last = (
            row["selectivity"] for row in ran(*TASKS, cued(), *words).memory.rows if "selectivity" in row
        )
        assert first is not None
        assert last is not None
        return abs(last - first)

    assert moved(1000.0) < 1e-4 < moved(0.1)


def test_selectivity_is_of_the_units_before_the_readout() -> None:
    found = ran(*TASKS, "model.depth=2", "init.antisymmetric=true")
    problem, weights = found.setting.problem, dict(found.outcome.weights)
    network = problem.module.network
    assert isinstance(network, torch.nn.Sequential)
    before = network[:-1]
    known = {name: weights[f"network.{name}"] for name, _ in before.named_parameters()}
    parts = [problem.inputs[place] for place in problem.phases["query"]]
    one, other = (torch.func.functional_call(before, known, (part,)).std(0) for part in parts)
    expected = float((one - other).abs().sum() / (one + other).sum())
    assert found.memory.rows[-1]["selectivity"] == pytest.approx(expected, rel=ROUNDING)


# Classifiers that fit before they generalize.


INIT = NTK(W_std=1, b_std=0)
SQUARES = MLP(width=12, depth=1, activation=Polynomial(powers=(0, 0, 1)))
SUMS = ModularAddition(modulus=5, train=16, query=0, encoding="one_hot")


def learning(model: MLP, alpha: float) -> ScaledDescent:
    """Return the descent of a network that learns sums."""
    data = SUMS.split(0)
    module = model.module(INIT, (2, 5), 5, stream("weights", 0)).eval()
    targets = torch.nn.functional.one_hot(data.train.target, 5).double()
    scaled = ScaledFunction(function_of(module), weights_of(module), alpha)
    followed = FollowedMode(scaled.function, data.train.inputs, targets)
    return ScaledDescent(scaled, data.train.inputs, targets, followed.largest, fraction=0.4)


def path(descent: ScaledDescent, steps: int) -> list[LearningStep]:
    return list(descent.path(descent.scaled.start, steps))


def test_powers_find_the_largest_eigenvalue_of_the_kernel() -> None:
    data, module = SUMS.split(0), SQUARES.module(INIT, (2, 5), 5, stream("weights", 0)).eval()
    begun = torch.randn(16, 5, generator=stream("examples", 0), dtype=torch.float64)
    found = top_mode(function_of(module), weights_of(module), data.train.inputs, begun, powers=100)[1]
    kernel = tangent_kernel(module, data.train.inputs).flatten(2).flatten(0, 1)
    # other modes decay as (λ₂/λ₁)²⁰⁰
    assert found == pytest.approx(float(torch.linalg.eigvalsh(kernel)[-1]), rel=1e-4)


def test_many_outputs_and_one_descend_alike() -> None:
    """One output, and two copies divided by √2, have the same loss and kernel, so the same path."""
    module = MLP(width=6, depth=1).module(INIT, (3,), 1, stream("weights", 0)).eval()
    x = torch.randn(4, 3, generator=stream("examples", 0), dtype=torch.float64)
    y, one = x[:, :1], ScaledFunction(function_of(module), weights_of(module), 0.5)

    def twice(weights: Weights, given: Inputs) -> torch.Tensor:
        return one.function(weights, given).expand(-1, 2) / 2**0.5

    both = ScaledFunction(twice, one.start, one.alpha)
    pairs = (one, y), (both, y.expand(-1, 2) / 2**0.5)
    first, second = (path(ScaledDescent(scaled, x, given, lambda _: 10.0, 0.4), 9)[-1] for scaled, given in pairs)
    assert first.loss == pytest.approx(second.loss, rel=1e-13)
    for name, weight in first.after.items():
        torch.testing.assert_close(weight, second.after[name], rtol=1e-12, atol=1e-13)


def test_outputs_of_a_linear_model_do_not_depend_on_the_scale() -> None:
    """Its kernel is constant, and the scale cancels in every step."""
    rich, lazy = (path(learning(MLP(depth=0), alpha), 20) for alpha in (0.01, 100.0))
    assert [step.size for step in rich] == pytest.approx([step.size for step in lazy], rel=1e-12)
    torch.testing.assert_close(rich[-1].outputs, lazy[-1].outputs, rtol=1e-10, atol=1e-10)  # differences of large ones


def test_a_step_follows_the_kernel_where_training_is_lazy() -> None:
    lazy = learning(SQUARES, alpha=1e6)
    before, after = path(lazy, 2)
    kernel = tangent_kernel(SQUARES.module(INIT, (2, 5), 5, stream("weights", 0)).eval(), lazy.inputs)
    moved = torch.einsum("xcyd,yd->xc", kernel, lazy.targets) * before.size / len(lazy.targets)
    # weights and kernel move by a millionth; outputs are differences of numbers a million times larger
    torch.testing.assert_close(after.outputs, moved, rtol=1e-4, atol=1e-6)


def test_the_lazier_the_less_the_kernel_has_moved_when_examples_are_fitted() -> None:
    trial = LateGeneralising(model=SQUARES, init=INIT, data=SUMS, alphas=(0.05, 1.0, 1e4), steps=100, points=8)
    drifts = [number(row, "kernel_change") for row in trial.rows(0) if row["station"] == "fitted"]
    assert drifts[0] > drifts[1] > drifts[2] > 0
    assert drifts[2] < 1e-3  # proportional to 1/α


def test_a_station_that_is_not_reached_has_no_time() -> None:
    trial = LateGeneralising(model=SQUARES, init=INIT, data=SUMS, alphas=(1.0, 2.0), steps=1, points=4)
    fitted, generalised, end = [*trial.rows(0)][:3]
    assert all(
        math.isnan(number(row, name)) for row in (fitted, generalised) for name in ("time", "wait", "kernel_change")
    )
    assert end["time"] == end["kernel_change"] == 0
    assert math.isnan(number(end, "accuracy"))


# Trials on leaving examples out.


SMALL = ("data=moons", "data.train=16", "data.query=4", "data.test=0", "path.count=2", "model.width=8")
WORDS = (*SMALL, "path.rule=[left]", "path.error_samples=0", "ladder.machine=[]")


@pytest.fixture(scope="module")
def linear_step() -> Retraining:
    """One step of a linear model on all examples. Its output is linear in the step."""
    return retraining([*WORDS, "model=linear", "steps=1"], seed=0)


@pytest.mark.parametrize("how", [(), ("optimizer=adam", "optimizer.step_size=0.01", "optimizer.eps=0.1")])
def test_one_step_of_a_linear_model_is_taken_exactly_without_an_example(how: tuple[str, ...]) -> None:
    found = retraining([*WORDS, *how, "model=linear", "steps=1"], seed=0)
    actual = found.changes_without(torch.eye(16, dtype=torch.float64)).t()
    torch.testing.assert_close(leave_out_effects(found, one_step=True), actual, rtol=1e-11, atol=1e-14)


def test_an_effect_is_exact_where_the_optimizer_is_linear_too(linear_step: Retraining) -> None:
    actual = linear_step.changes_without(torch.eye(16, dtype=torch.float64)).t()
    torch.testing.assert_close(leave_out_effects(linear_step), actual, rtol=1e-11, atol=1e-14)


def test_the_recording_ends_with_the_training(tmp_path: Path) -> None:
    found = retraining([*WORDS, "model=linear", "steps=20", "stop_at_loss=0.3"], seed=0)
    training = recorded(found, tmp_path)
    assert 0 < training.length == found.outcome.steps < 20
    assert torch.equal(training.end, found.rerun.flat.vector(found.outcome.weights))


def test_an_empty_removal_changes_nothing(linear_step: Retraining) -> None:
    left = torch.zeros(2, 16, dtype=torch.float64)
    left[1, 3] = 1.0
    changes = linear_step.changes_without(left)
    assert not changes[0].any()
    outputs = linear_step.outputs_with(torch.stack([1 - left[0], 1 - left[1]]))[:, :, 0]
    torch.testing.assert_close(changes[1], outputs[1] - outputs[0], rtol=0, atol=1e-14)  # outputs of size one


def test_scores_of_the_end_are_those_of_the_weights(linear_step: Retraining) -> None:
    """The model has three weights, so a projection to four dimensions is exact."""
    end = linear_step.rerun.flat.vector(linear_step.outcome.weights)
    problem = linear_step.setting.problem
    outputs = linear_step.rerun.outputs(end, problem.inputs)[:, 0]
    features = jacrev(lambda vector: linear_step.rerun.outputs(vector, problem.inputs)[:, 0])(end)
    known, read, pull = features[:16], features[16:], (outputs - problem.targets[:, 0])[:16]
    curved = known.t() @ known / 16
    damped = curved + INFLUENCE_DAMPING * curved.trace() / 16 * torch.eye(3, dtype=torch.float64)
    through = torch.linalg.solve(damped, known.t()) / 16
    torch.testing.assert_close(influence(linear_step), read @ through * pull, rtol=1e-10, atol=1e-12)
    fitted = torch.linalg.lstsq(known, torch.eye(16, dtype=torch.float64)).solution
    torch.testing.assert_close(trak(linear_step), read @ fitted * pull, rtol=1e-9, atol=1e-11)  # a 3 × 4 projection


@pytest.mark.slow
def test_influence_of_a_loss_that_is_no_parabola_is_refused() -> None:
    with pytest.raises(Mistake, match="choose loss=squared"):
        influence(retraining([*WORDS, "steps=1", "loss=logistic"], seed=0))


@pytest.mark.slow
def test_contributions_add_up_and_effects_rank_removals() -> None:
    table = pd.DataFrame([*RemovalScores(base=(*SMALL, "steps=5"), activations=("tanh",), groups=4).rows(0)])
    assert table["miss"].dropna().max() < 1e-13
    alone = table[table["left_out"] == "one"].set_index("score")["correlation"]
    assert alone["effect"] > 0.9 > alone["shuffled"]


@pytest.mark.slow
def test_exactness_gains_nothing_where_the_kernel_is_constant() -> None:
    """Contributions agree with TracIn for a linear model, up to rounding, but not for a network."""
    linear, network = (
        pd.DataFrame([*ExactnessOfScores(base=SMALL, trainings=(how,), activations=("tanh",), groups=4).rows(0)])
        for how in ("model.depth=0 steps=3", "steps=1 optimizer.stable_fraction=16")
    )
    assert linear["gain"].dropna().abs().tolist() == pytest.approx([0, 0, 0, 0], abs=1e-9)
    assert network["gain"].abs().max() > 0.01
    assert network["training"].unique().tolist() == ["steps=1 optimizer.stable_fraction=16"]


@pytest.mark.slow
def test_sums_of_effects_miss_the_factor_of_the_mean() -> None:
    """A mean over N − k examples has the factor N/(N − k), and effects of single examples have N/(N − 1)."""
    base = (*SMALL, "model.depth=0", "steps=1")
    rows = pd.DataFrame([*AddedRemovals(base=base, activations=("tanh",), sizes=(1, 4, 8), groups=4).rows(0)])
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
    alone = retraining([*words, "path.rule=[left]", "data.seed=2"], seed=2 + OTHER_SEED_OFFSET)
    everyone = torch.ones(1, 16, dtype=torch.float64)
    ends = {name: replace(trained, rerun=run).outputs_with(everyone) for name, run in runs.items()}
    torch.testing.assert_close(ends["other_run"][0], alone.outcome.matrices.end[16:], rtol=0, atol=1e-13)  # three steps
    torch.testing.assert_close(ends["same"][0], trained.outcome.matrices.end[16:], rtol=0, atol=1e-13)
    assert len({float(end.sum()) for end in ends.values()}) == 4


@pytest.mark.slow
def test_effects_without_dependence_on_the_start_are_the_same_in_other_runs() -> None:
    """An antisymmetric linear model starts at zero, and depends on its start only by its output."""
    linear = ("model.depth=0", "init.antisymmetric=true", "optimizer=gd", "optimizer.step_size=0.1", "steps=3")
    rows = pd.DataFrame([*OtherRuns(base=(*SMALL, *linear), groups=4).rows(0)])
    found = rows.pivot_table(index=["left_out", "score"], columns="repeated", values="correlation")
    assert found.loc[:, "other_run"].tolist() == pytest.approx(found.loc[:, "same"].tolist(), abs=1e-9)
    assert found.loc[("one", "retraining"), "other_run"] == pytest.approx(1)
