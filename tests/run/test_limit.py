"""Runs beside their infinite width: the rungs of the ladder, the columns of the log, and how fast K_0 gets there."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from math import exp, inf, log
from typing import cast

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, jacrev

from ntkexp.layer.pointwise import Pointwise
from ntkexp.library import tangent_kernel
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.machine.base import DoesNotApply, LimitKernels, Prediction
from ntkexp.model.base import AbstractLayered
from ntkexp.optimizer.base import Memory
from ntkexp.run.metrics import Row
from ntkexp.run.setting import Setting, prepare
from tests.run.small import Ran, ran, small

RUNGS = "ladder.machine=[frozen_start,frozen_limit,nngp]"


@pytest.mark.parametrize(
    "settings", [(), ("init.alpha=3", "data.classes=[1,2,3]"), ("model=cnn", "init=standard")], ids=str
)
def test_the_limit_of_a_run_is_the_infinite_kernel_of_its_layers(settings: tuple[str, ...]) -> None:
    experiment = small(RUNGS, *settings)
    setting = prepare(experiment)
    assert isinstance(setting.start.limit, LimitKernels)
    assert isinstance(experiment.model, AbstractLayered)
    layers = experiment.model.layers(experiment.init, (1, 8, 8), 1)
    nngp, ntk = infinite_kernel(layers, setting.points.inputs)
    scale = experiment.init.alpha**2
    for found, expected in ((setting.start.limit.start, nngp), (setting.start.limit.tangent, ntk)):
        # other blocks, other orders of summation
        torch.testing.assert_close(found, scale * expected[:, : setting.points.train], rtol=1e-12, atol=1e-12)


def test_a_run_goes_on_where_variances_are_too_large_for_its_limit() -> None:
    setting = prepare(small(RUNGS, "model.activation=tanh", "init.W_std=60"))
    assert isinstance(setting.start.limit, DoesNotApply)
    assert "too steep for Mehler's series" in str(setting.start.limit)


def test_the_log_measures_the_distance() -> None:
    run = ran(RUNGS, "data.classes=[1,2,3]")
    limit = run.setting.start.limit
    assert isinstance(limit, LimitKernels)
    train = run.setting.points.train
    whole = torch.einsum("pt,co->pcto", limit.tangent[:train], torch.eye(3, dtype=torch.float64))
    rows = {int(row["step"] or 0): row for row in run.memory.rows if row.get("drift") is not None}
    assert rows.keys() == run.memory.kernels.keys()
    for step, row in rows.items():
        kernel = run.memory.kernels[step][:train]
        assert row["limit_distance"] == pytest.approx(float((kernel - whole).norm() / whole.norm()), rel=1e-12)
        cosine = float((kernel * whole).sum() / (kernel.norm() * whole.norm()))
        assert row["limit_alignment"] == pytest.approx(cosine, rel=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("model=transformer",), "model=transformer has no known limit of infinite width"),
        (("model=cnn", "model.pooling=max"), "MaxPool has no known limit"),
        (("init=mean_field",), "mean-field parametrisation has no kernel in the limit"),
        (("model=cnn", "model.head=average"), "times the work"),
    ],
    ids=str,
)
def test_without_a_limit_there_is_a_reason(
    settings: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ntkexp.experiment.problem.MAX_LIMIT_WORK", 10**6)
    run = ran(RUNGS, "steps=2", *settings)
    for machine in ("frozen_limit", "nngp"):
        for row in run.rows(machine):
            assert row.relative_error is None
            assert reason in row.note
    assert all(row.get("limit_distance") is None for row in run.memory.rows)


def test_kernels_that_outgrow_the_memory_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkexp.experiment.problem.LIMIT_MEMORY_PARTS", 1e9)
    limit = prepare(small(RUNGS)).start.limit
    assert isinstance(limit, DoesNotApply)
    assert "GB of a run with the kernels at infinite width; raise it" in str(limit)


def test_nothing_is_computed_that_nobody_asks_for() -> None:
    assert isinstance(prepare(small("ladder.machine=[frozen_start]")).start.limit, DoesNotApply)


@pytest.mark.slow
def test_the_wider_the_network_the_nearer_its_first_kernel() -> None:
    """‖K_0 − K_∞‖ ∝ width^−1/2, over twelve seeds."""
    experiment, distances = small(RUNGS, "data.query=0", "data.test=0"), []
    widths = (32, 512)
    for width in widths:
        found, model = [], experiment.model.model_copy(update={"width": width})
        for seed in range(12):
            setting = prepare(experiment.model_copy(update={"model": model, "seed": seed}))
            assert isinstance(setting.start.limit, LimitKernels)
            K, limit = setting.start.kernel[:, 0, :, 0], setting.start.limit.tangent
            found.append(float((K - limit).norm() / limit.norm()))
        distances.append(np.mean(np.log(found)))
    slope = (distances[1] - distances[0]) / np.log(widths[1] / widths[0])
    assert slope == pytest.approx(-0.5, abs=0.2)  # seeds differ by about 40 %, means of twelve by 12 %: 0.06 of a slope


# Rungs that train with a fixed kernel are what they say of the network: oracles that hold the whole Jacobian.


BATCHES = (
    ("optimizer=gd", "optimizer.clip_norm=0.1"),
    ("optimizer=sgd", "optimizer.batch=10"),
    ("optimizer=sgd", "optimizer.batch=40", "optimizer.replacement=true"),
)
REMEMBERING = (
    ("optimizer=momentum", "optimizer.dampening=0.2", "optimizer.weight_decay=0.1"),
    ("optimizer=nesterov", "optimizer.batch=10", "optimizer.weight_decay=0.1"),
)
EACH = list(zip(BATCHES + REMEMBERING, cycle(("squared", "cross_entropy", "logistic"))))  # both enter by themselves
ROUNDING = 1e-12  # 20 steps through a kernel of 24 rows


def jacobian(setting: Setting) -> dict[str, Tensor]:
    """J(θ_0; x) at every point, [point, out, *weight], multiplied out."""

    def network(weights: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = functional_call(setting.problem.module, weights, (setting.points.inputs,))
        return outputs

    found: dict[str, Tensor] = jacrev(network)(setting.problem.weights)
    return found


def trained(clippings: list[float], *overrides: str) -> Float[Tensor, "point out"]:
    """f_0 + J(θ_0)(θ − θ_0) after training θ on it, step by step, with the clipping of the run."""
    setting = prepare(small(*overrides))
    descent, train, dense = setting.descent, setting.points.train, jacobian(setting)
    weights, outputs, memory = setting.problem.weights, setting.start.outputs, cast("Memory", {})
    for step in range(setting.experiment.steps):
        pull = descent.output_gradient(step, outputs[:train]) * clippings[step]
        gradient = {name: torch.tensordot(pull, rows[:train], dims=2) for name, rows in dense.items()}
        sizes = dict.fromkeys(weights, descent.size(step))
        weights, memory = descent.optimizer.update(step, weights, gradient, sizes, memory)
        moved = {name: weights[name] - setting.problem.weights[name] for name in weights}
        changes = [rows.flatten(2) @ moved[name].flatten() for name, rows in dense.items()]
        outputs = setting.start.outputs + torch.stack(changes).sum(0)
    return outputs


def predicted(run: Ran, machine: str) -> Float[Tensor, "point out"]:
    """f̂ of one rung."""
    outcome = next(rung.outcome for rung in run.outcome.rungs if rung.name == machine)
    assert isinstance(outcome, Prediction), str(outcome)
    return outcome.outputs


@pytest.mark.sample(2)
@pytest.mark.parametrize(("batch", "loss"), EACH)
def test_the_linearised_machine_is_the_linear_model_trained_with_the_same_steps(
    batch: tuple[str, ...], loss: str
) -> None:
    chosen = (*batch, f"loss={loss}", "data.classes=all", "path.rule=[left]", "ladder.machine=[linearised]")
    run = ran(*chosen)
    oracle = trained([float(row["clipping"] or 1) for row in run.memory.rows[:-1]], *chosen)
    assert (predicted(run, "linearised") - oracle).norm() < ROUNDING * run.change.norm()


@pytest.mark.parametrize("at", ["start", "end"])
def test_the_frozen_kernel_is_the_closed_form(at: str) -> None:
    run = ran("path.rule=[left]", f"ladder.machine=[frozen_{at}]")
    evidence, train = run.outcome.evidence, run.setting.points.train
    theta = (evidence.kernel_start if at == "start" else evidence.kernel_end)[:, 0, :, 0]
    decay = torch.linalg.matrix_exp(-evidence.training.time / train * theta[:train])
    start, missing = evidence.start, evidence.start[:train] - evidence.targets
    expected = start - theta @ torch.linalg.solve(theta[:train], missing - decay @ missing)
    # solving with the kernel loses its condition number, some thousands
    assert (predicted(run, f"frozen_{at}") - expected).norm() < 1e-10 * run.change.norm()


def test_the_linearised_machine_is_exact_for_a_linear_model() -> None:
    run = ran("model.depth=0", "path.rule=[left,secant]", "ladder.machine=[linearised,left,secant]")
    for row in run.table.values():
        assert row.exact, row


@pytest.mark.parametrize("batch", BATCHES, ids=lambda overrides: overrides[-1])
def test_fixed_coefficients_are_those_of_the_path(batch: tuple[str, ...]) -> None:
    run = ran(*batch, "path.rule=[secant]", "ladder.machine=[fixed_coefficients]")
    pulls, time = torch.zeros(24, 1, dtype=torch.float64), 0.0
    for step in run.setting.descent.walk(run.setting.problem.weights):
        pulls += step.step_size * step.output_gradient
        time += step.step_size
    path = run.outcome.evidence.path.kernel
    expected = run.outcome.evidence.start - torch.einsum("qcnd,nd->qc", path, pulls / time)
    assert (predicted(run, "fixed_coefficients") - expected).norm() < 1e-13 * run.change.norm()


# What is logged, against its definition written out once more, at the weights that a run passed through.


CASES = (
    ("loss=squared", "data.classes=[3,8]"),
    ("loss=cross_entropy", "data.classes=all", "optimizer=sgd", "optimizer.batch=10"),
    ("loss=logistic", "data.classes=[3,8]", "init.centred=true", "init.alpha=3"),
    ("loss=squared", "data=teacher", "data.train=24", "data.query=12", "data.test=12", "loss.reduction=sum"),
)
CURVATURE = {"loss=squared": 1.0, "loss=cross_entropy": 0.5, "loss=logistic": 0.25}
CLOSE = 1e-11  # sums of some thousand numbers in another order; eigenvalues relative to the largest
STEPS = 20

case = pytest.mark.parametrize("case", CASES, ids=lambda overrides: " ".join(overrides[:2]))


@cache
def run(case: tuple[str, ...]) -> Ran:
    return ran(*case, "path.schedule=5", "ladder.machine=[]", "path.rule=[secant,left]")


def weights(found: Ran, step: int) -> dict[str, Tensor]:
    return found.memory.weights[step - 1] if step else found.setting.problem.weights


def outputs(found: Ran, step: int) -> Tensor:
    """f at all points."""
    said: Tensor = functional_call(found.setting.problem.module, weights(found, step), (found.setting.points.inputs,))
    return said.detach()


def kernel(found: Ran, step: int) -> Tensor:
    """K among all points and the training examples."""
    inputs = found.setting.points.inputs
    return tangent_kernel(found.setting.problem.module, inputs, inputs[:24], weights=weights(found, step))


def matrix(found: Ran, step: int) -> Tensor:
    """K among the training examples, two-dimensional."""
    return kernel(found, step)[:24].flatten(2).flatten(0, 1)


def rows_with_kernels(found: Ran) -> list[Row]:
    return [row for row in found.memory.rows if "drift" in row]


def number(row: Row, name: str) -> float:
    value = row[name]
    assert value is not None, name
    return value


@pytest.mark.sample(2)
@case
def test_there_is_a_row_for_every_step_and_one_for_the_end(case: tuple[str, ...]) -> None:
    found = run(case)
    assert [row["step"] for row in found.memory.rows] == list(range(STEPS + 1))
    assert [row["step"] for row in rows_with_kernels(found)] == [0, 5, 10, 15, 20]
    times = [0.0, *np.cumsum([number(row, "step_size") for row in found.memory.rows[:-1]]).tolist()]
    assert [row["time"] for row in found.memory.rows] == pytest.approx(times, rel=1e-14)


@pytest.mark.sample(2)
@case
def test_losses_and_accuracies(case: tuple[str, ...]) -> None:
    found = run(case)
    setting, loss = found.setting, found.setting.experiment.loss
    for row in found.memory.rows:
        said = outputs(found, int(number(row, "step")))
        for suffix, place in (("", slice(0, 24)), ("_query", slice(24, 36))):
            values = loss.value(said[place], setting.problem.targets[place])
            whole = values.mean() if loss.reduction == "mean" else values.sum()
            assert number(row, f"loss{suffix}") == pytest.approx(float(whole) * setting.descent.scale, rel=CLOSE)
            if setting.problem.data.classes:
                truth = (setting.problem.data.train if place.start == 0 else setting.problem.data.query).target
                guess = (said[place, 0] > 0).long() if said.shape[1] == 1 else said[place].argmax(1)
                assert row[f"accuracy{suffix}"] == float((guess == truth).double().mean())
            else:
                assert row[f"accuracy{suffix}"] is None


@case
def test_how_far_the_weights_moved(case: tuple[str, ...]) -> None:
    found = run(case)
    start = weights(found, 0)
    for row in found.memory.rows:
        here = weights(found, int(number(row, "step")))
        moved = {name: float((here[name] - start[name]).norm()) for name in start}
        sizes = {name: float(start[name].norm()) for name in start}
        total = np.linalg.norm(list(moved.values())) / np.linalg.norm(list(sizes.values()))
        assert number(row, "weights_moved") == pytest.approx(total, rel=CLOSE)
        for name in start:
            assert row[f"weights_moved.{name}"] == pytest.approx(moved[name] / sizes[name], rel=CLOSE)
    assert found.memory.rows[0]["weights_moved"] == 0.0


@case
def test_kernels_are_kept_as_they_are_at_those_weights(case: tuple[str, ...]) -> None:
    found = run(case)
    assert list(found.memory.kernels) == [0, 5, 10, 15, 20]
    for step, kept in found.memory.kernels.items():
        expected = kernel(found, step)
        torch.testing.assert_close(kept, expected, rtol=0, atol=CLOSE * float(expected.abs().max()))


@case
def test_drift_alignment_and_trace(case: tuple[str, ...]) -> None:
    found = run(case)
    start, targets = matrix(found, 0), found.setting.problem.targets[:24]
    centring = torch.eye(24) - 1 / 24
    for row in rows_with_kernels(found):
        here = matrix(found, int(number(row, "step")))
        assert number(row, "drift") == pytest.approx(float((here - start).norm() / start.norm()), abs=CLOSE)
        cosine = float((here * start).sum() / here.norm() / start.norm())
        assert number(row, "alignment") == pytest.approx(cosine, rel=CLOSE)
        assert number(row, "trace") == pytest.approx(float(here.trace()), rel=CLOSE)
        averaged = kernel(found, int(number(row, "step")))[:24].diagonal(dim1=1, dim2=3).mean(2)
        left, right = (centring.double() @ gram @ centring.double() for gram in (averaged, targets @ targets.t()))
        cka = float((left * right).sum() / left.norm() / right.norm())
        assert number(row, "label_alignment") == pytest.approx(cka, rel=1e-10)


@case
def test_eigenvalues_and_what_follows_from_them(case: tuple[str, ...]) -> None:
    found = run(case)
    for row in rows_with_kernels(found):
        step = int(number(row, "step"))
        values, modes = np.linalg.eigh(matrix(found, step).numpy())
        values, modes = values[::-1], modes[:, ::-1]
        near = CLOSE * values[0]
        assert number(row, "lambda_max") == pytest.approx(values[0], rel=CLOSE)
        assert [row[f"eigenvalue_{k + 1}"] for k in range(10)] == pytest.approx(values[:10].tolist(), abs=near)
        noise = len(values) * np.finfo(float).eps * values[0]
        condition = values[0] / values[-1] if values[-1] > noise else inf
        assert number(row, "condition") == pytest.approx(condition, rel=1e-14 * values[0] / abs(values[-1]))
        shares = values[values > 0] / values[values > 0].sum()
        entropy = -sum(share * log(share) for share in shares)
        assert number(row, "effective_rank") == pytest.approx(exp(entropy), rel=CLOSE)
        missing = (outputs(found, step) - found.setting.problem.targets)[:24].flatten().numpy()
        for k in (1, 5, 10):
            inside = float(np.square(modes[:, :k].T @ missing).sum() / np.square(missing).sum())
            assert row[f"residual_top_{k}"] == pytest.approx(inside, rel=1e-8)  # gaps between eigenvalues count


@case
def test_stability_is_measured_against_the_edge(case: tuple[str, ...]) -> None:
    found = run(case)
    weight = (1.0 if "loss.reduction=sum" in case else 1 / 24) * (1 / 9 if "init.centred=true" in case else 1.0)
    last = number(found.memory.rows[-2], "step_size")  # the last kernel is measured against the last step
    for row in rows_with_kernels(found):
        edge = 2 / (weight * number(row, "lambda_max") * CURVATURE[case[0]])
        step_size = last if row is found.memory.rows[-1] else number(row, "step_size")
        assert number(row, "stability") == pytest.approx(step_size / edge, rel=CLOSE)
    assert number(found.memory.rows[0], "stability") == pytest.approx(0.5, rel=CLOSE)  # half of the largest stable step


@case
def test_the_share_of_units_that_switched(case: tuple[str, ...]) -> None:
    found = run(case)
    inputs = found.setting.points.inputs[:24].flatten(1)

    def pattern(step: int) -> Tensor:
        """The signs in front of every ReLU."""
        signs: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, given: signs.append(given[0] > 0))
            for layer in found.setting.problem.module.network.modules()
            if isinstance(layer, Pointwise)
        ]
        functional_call(found.setting.problem.module, weights(found, step), (inputs,))
        for hook in hooks:
            hook.remove()
        assert len(signs) == 2
        return torch.cat([sign.flatten() for sign in signs])

    for row in rows_with_kernels(found):
        changed = pattern(int(number(row, "step"))) != pattern(0)
        assert row["pattern_change"] == pytest.approx(float(changed.double().mean()), rel=1e-14)


def test_a_smooth_network_has_no_patterns() -> None:
    found = ran("model.activation=tanh", "ladder.machine=[]", "steps=2")
    assert {row["pattern_change"] for row in rows_with_kernels(found)} == {None}


@case
def test_contributions_of_a_step_close_and_are_weighed(case: tuple[str, ...]) -> None:
    found = run(case)
    path, mass = 0.0, 0.0
    for row in found.memory.rows[:-1]:
        step = int(number(row, "step"))
        change = outputs(found, step + 1) - outputs(found, step)
        assert number(row, "closure") < 1e-12
        assert number(row, "contribution_sum") == pytest.approx(float(change.abs().sum()), rel=1e-9)
        assert number(row, "contribution_mass") >= number(row, "contribution_sum")
        path, mass = path + number(row, "kernel_mass"), mass + number(row, "contribution_mass")
    evidence = found.outcome.evidence
    assert path >= float(evidence.path.kernel.norm()) * (1 - 1e-12)  # the triangle inequality over steps
    assert mass >= float(evidence.path.contributions.abs().sum()) * (1 - 1e-12)
