"""Runs and their infinite width: the rungs of the ladder, the columns of the log, and the convergence of K_0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import cycle
from math import exp, inf, log
from typing import Any, cast

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
from ntkexp.run.loop import run
from ntkexp.run.metrics import Row
from ntkexp.run.setting import Setting, prepare
from tests.run.small import Memory as Listener, Ran, Twice, ran, small

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
    rows = {int(row["step"] or 0): row for row in run.memory.rows if row.get("kernel_change") is not None}
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
    ],
    ids=str,
)
def test_without_a_limit_there_is_a_reason(settings: tuple[str, ...], reason: str) -> None:
    run = ran(RUNGS, "steps=2", *settings)
    for machine in ("frozen_limit", "nngp"):
        for row in run.rows(machine):
            assert row.relative_error is None
            assert reason in row.note
    assert all(row.get("limit_distance") is None for row in run.memory.rows)


LARGE = ("ladder.machine=[nngp]", "path.rule=[left]", "path.kernels=none", "optimizer.step_size=1")
WORK = 64**2 * 6 * (600 * 601 / 2 + 24 * 600)  # pairs of pixels, layers, and pairs of examples


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("ladder.machine=[frozen_start]",), "it is not asked for"),
        pytest.param(
            (*LARGE, "model=cnn", "model.head=average", "data.classes=all", "data.train=600"),
            f"{WORK / 2e9:.1f} times the work",
            marks=pytest.mark.slow,
        ),
        ((*LARGE, "data=teacher", "data.train=4000", "memory_gb=2"), "GB of a run with the kernels at infinite width"),
    ],
)
def test_kernels_that_are_too_large_or_not_asked_for_are_not_made(settings: tuple[str, ...], reason: str) -> None:
    assert reason in str(prepare(small(*settings)).start.limit)


# Rungs that train with a fixed kernel, against oracles that hold the whole Jacobian.


BATCHES = (
    ("optimizer=gd", "optimizer.clip_norm=0.1"),
    ("optimizer=sgd", "optimizer.batch=10"),
    ("optimizer=sgd", "optimizer.batch=40", "optimizer.replacement=true"),
)
REMEMBERING = (
    ("optimizer=momentum", "optimizer.dampening=0.2", "optimizer.weight_decay=0.1"),
    ("optimizer=nesterov", "optimizer.batch=10", "optimizer.weight_decay=0.1"),
)
EACH = list(
    zip(BATCHES + REMEMBERING, cycle(("squared", "cross_entropy", "logistic")))
)  # batch and loss enter independently
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
        sizes = dict.fromkeys(weights, descent.step_size_at(step))
        weights, memory = descent.optimizer.update(step, weights, gradient, sizes, memory)
        moved = {name: weights[name] - setting.problem.weights[name] for name in weights}
        changes = [rows.flatten(2) @ moved[name].flatten() for name, rows in dense.items()]
        outputs = setting.start.outputs + torch.stack(changes).sum(0)
    return outputs


def predicted(run: Ran, machine: str) -> Float[Tensor, "point out"]:
    """f̂ of one rung."""
    outcome = next(rung.outcome for rung in run.outcome.machines if rung.name == machine)
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


def test_the_linearised_machine_is_exact_for_a_linear_model() -> None:
    run = ran("model.depth=0", "path.rule=[left,secant]", "ladder.machine=[linearised,left,secant]")
    for row in run.table.values():
        assert row.exact, row


@pytest.mark.parametrize("replacement", ["false", "true"])
def test_a_frozen_kernel_sums_over_the_batches_of_the_run(replacement: str) -> None:
    """A sum over 5 of 24 examples moves a linear model less than one over all, so no flow to the same time is it."""
    batches = ("optimizer=sgd", "optimizer.batch=5", f"optimizer.replacement={replacement}", "loss.reduction=sum")
    run = ran(*batches, "model.depth=0", "path.rule=[left]", "ladder.machine=[frozen_start,frozen_end]")
    for row in run.table.values():
        assert row.exact, row


def test_a_frozen_kernel_flows_as_far_as_the_curvature_takes_it() -> None:
    """Twice the loss with half the step is the same training."""
    words = ("path.rule=[left]", "ladder.machine=[frozen_start]", "optimizer.step_size=0.1", "steps=5")
    once = ran(*words)
    setting = prepare(small(*words, "optimizer.step_size=0.05").model_copy(update={"loss": Twice()}))
    (rung,) = run(setting, Listener()).machines
    assert isinstance(rung.outcome, Prediction)
    difference = rung.outcome.outputs - predicted(once, "frozen_start")
    assert difference.norm() < ROUNDING * once.change.norm()


@pytest.mark.parametrize("batch", BATCHES, ids=lambda overrides: overrides[-1])
def test_fixed_coefficients_are_those_of_the_path(batch: tuple[str, ...]) -> None:
    run = ran(*batch, "path.rule=[secant]", "ladder.machine=[fixed_coefficients]")
    pulls, time = torch.zeros(24, 1, dtype=torch.float64), 0.0
    for step in run.setting.descent.steps_from(run.setting.problem.weights):
        pulls += step.step_size * step.output_gradient
        time += step.step_size
    path = run.outcome.matrices.path.kernel
    expected = run.outcome.matrices.start - torch.einsum("qcnd,nd->qc", path, pulls / time)
    assert (predicted(run, "fixed_coefficients") - expected).norm() < 1e-13 * run.change.norm()


# The log, against the definition of each column written out once more, at the weights that a run passed through.


CASES = (
    ("loss=squared", "data.classes=[3,8]"),
    ("loss=cross_entropy", "data.classes=all", "optimizer=sgd", "optimizer.batch=10"),
    ("loss=logistic", "data.classes=[3,8]", "init.centred=true", "init.alpha=3"),
    ("loss=squared", "data=teacher", "data.train=24", "data.query=12", "data.test=12", "loss.reduction=sum"),
)
CURVATURE = {"loss=squared": 1.0, "loss=cross_entropy": 0.5, "loss=logistic": 0.25}
CLOSE = 1e-11  # sums of some thousand numbers in another order; eigenvalues relative to the largest
STEPS = 20


def number(row: Row, name: str) -> float:
    value = row[name]
    assert value is not None, name
    return value


@dataclass(frozen=True)
class Logged:
    """A run with its log, its weights, outputs and kernels."""

    words: tuple[str, ...]
    run: Ran

    def weights(self, step: int) -> dict[str, Tensor]:
        return self.run.memory.weights[step - 1] if step else self.run.setting.problem.weights

    def outputs(self, step: int) -> Tensor:
        """Return f at all points."""
        inputs = (self.run.setting.points.inputs,)
        outputs: Tensor = functional_call(self.run.setting.problem.module, self.weights(step), inputs)
        return outputs.detach()

    def kernel(self, step: int) -> Tensor:
        """Return K between all points and the training examples."""
        inputs = self.run.setting.points.inputs
        return tangent_kernel(self.run.setting.problem.module, inputs, inputs[:24], weights=self.weights(step))

    def matrix(self, step: int) -> Tensor:
        """Return K between the training examples, two-dimensional."""
        return self.kernel(step)[:24].flatten(2).flatten(0, 1)

    def pattern(self, step: int) -> Tensor:
        """Return the signs in front of every ReLU."""
        signs: list[Tensor] = []
        layers = [layer for layer in self.run.setting.problem.module.network.modules() if isinstance(layer, Pointwise)]
        hooks = [layer.register_forward_pre_hook(lambda _, given: signs.append(given[0] > 0)) for layer in layers]
        self.outputs(step)
        for hook in hooks:
            hook.remove()
        assert len(signs) == 2
        return torch.cat([sign[:24].flatten() for sign in signs])


@cache
def logged(words: tuple[str, ...]) -> Logged:
    return Logged(words, ran(*words, "path.schedule=5", "ladder.machine=[]", "path.rule=[secant,left]"))


def of_outputs(found: Logged, step: int) -> dict[str, Any]:
    """Losses and accuracies."""
    setting, loss, outputs = found.run.setting, found.run.setting.experiment.loss, found.outputs(step)
    columns: dict[str, Any] = {}
    data, targets = setting.problem.data, setting.problem.targets
    for suffix, place, part in (("", slice(0, 24), data.train), ("_query", slice(24, 36), data.query)):
        values = loss.value(outputs[place], targets[place])
        whole = values.mean() if loss.reduction == "mean" else values.sum()
        columns[f"loss{suffix}"] = pytest.approx(float(whole) * setting.descent.scale, rel=CLOSE)
        guess = (outputs[place, 0] > 0).long() if outputs.shape[1] == 1 else outputs[place].argmax(1)
        right = float((guess == part.target).double().mean()) if data.classes else None
        columns[f"accuracy{suffix}"] = right
    return columns


def of_weights(found: Logged, step: int) -> dict[str, Any]:
    """How far the weights moved, in all and by parameter."""
    start, here = found.weights(0), found.weights(step)
    moved = {name: float((here[name] - start[name]).norm()) for name in start}
    sizes = {name: float(start[name].norm()) for name in start}
    total = np.linalg.norm(list(moved.values())) / np.linalg.norm(list(sizes.values()))
    columns = {f"weights_moved.{name}": pytest.approx(moved[name] / sizes[name], rel=CLOSE) for name in start}
    return columns | {"weights_moved": pytest.approx(total, rel=CLOSE)}


def of_kernel(found: Logged, step: int) -> dict[str, Any]:
    """Distances and alignments of the kernel, its trace, and the units that switched."""
    here, start, targets = found.matrix(step), found.matrix(0), found.run.setting.problem.targets[:24]
    centring = torch.eye(24).double() - 1 / 24
    averaged = found.kernel(step)[:24].diagonal(dim1=1, dim2=3).mean(2)
    left, right = (centring @ gram @ centring for gram in (averaged, targets @ targets.t()))
    changed = found.pattern(step) != found.pattern(0)
    return {
        "kernel_change": pytest.approx(float((here - start).norm() / start.norm()), abs=CLOSE),
        "alignment": pytest.approx(float((here * start).sum() / here.norm() / start.norm()), rel=CLOSE),
        "trace": pytest.approx(float(here.trace()), rel=CLOSE),
        "label_alignment": pytest.approx(float((left * right).sum() / left.norm() / right.norm()), rel=1e-10),
        "pattern_change": pytest.approx(float(changed.double().mean()), rel=1e-14),
    }


def of_eigenvalues(found: Logged, step: int) -> dict[str, Any]:
    """The spectrum of the kernel, and the stability of the step against its edge."""
    values, modes = np.linalg.eigh(found.matrix(step).numpy())
    values, modes = values[::-1], modes[:, ::-1]
    noise = len(values) * np.finfo(float).eps * values[0]
    condition = values[0] / values[-1] if values[-1] > noise else inf
    shares = values[values > 0] / values[values > 0].sum()
    missing = (found.outputs(step) - found.run.setting.problem.targets)[:24].flatten().numpy()
    inside = {k: float(np.square(modes[:, :k].T @ missing).sum() / np.square(missing).sum()) for k in (1, 5, 10)}
    weight = (1.0 if "loss.reduction=sum" in found.words else 1 / 24) * (
        1 / 9 if "init.alpha=3" in found.words else 1.0
    )
    size = number(found.run.memory.rows[min(step, STEPS - 1)], "step_size")  # the last kernel has the last step
    edge = 2 / (weight * values[0] * CURVATURE[found.words[0]])
    return {
        "lambda_max": pytest.approx(values[0], rel=CLOSE),
        **{f"eigenvalue_{k + 1}": pytest.approx(values[k], abs=CLOSE * values[0]) for k in range(10)},
        "condition": pytest.approx(condition, rel=1e-14 * values[0] / abs(values[-1])),
        "effective_rank": pytest.approx(exp(-sum(share * log(share) for share in shares)), rel=CLOSE),
        **{f"residual_top_{k}": pytest.approx(inside[k], rel=1e-8) for k in inside},  # gaps between eigenvalues count
        "stability": pytest.approx(size / edge, rel=CLOSE),
    }


@pytest.mark.parametrize("words", CASES, ids=lambda overrides: " ".join(overrides[:2]))
def test_every_column_is_its_definition(words: tuple[str, ...]) -> None:
    found = logged(words)
    rows, with_kernels = found.run.memory.rows, [0, 5, 10, 15, 20]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["step"] for row in rows if "kernel_change" in row] == list(found.run.memory.kernels) == with_kernels
    times = [0.0, *np.cumsum([number(row, "step_size") for row in rows[:-1]]).tolist()]
    assert [row["time"] for row in rows] == pytest.approx(times, rel=1e-14)
    assert rows[0]["weights_moved"] == 0.0
    assert number(rows[0], "stability") == pytest.approx(0.5, rel=CLOSE)  # half of the largest stable step
    for step, row in enumerate(rows):
        columns = of_outputs(found, step) | of_weights(found, step)
        if step in with_kernels:
            columns |= of_kernel(found, step) | of_eigenvalues(found, step)
            expected = found.kernel(step)
            bound = CLOSE * float(expected.abs().max())
            torch.testing.assert_close(found.run.memory.kernels[step], expected, rtol=0, atol=bound)
        for name, value in columns.items():
            assert row[name] == value, (step, name)


def test_a_smooth_network_has_no_patterns() -> None:
    rows = ran("model.activation=tanh", "ladder.machine=[]", "steps=2").memory.rows
    assert {row["pattern_change"] for row in rows if "kernel_change" in row} == {None}


@pytest.mark.parametrize("words", CASES, ids=lambda overrides: " ".join(overrides[:2]))
def test_contributions_of_a_step_close_and_are_weighed(words: tuple[str, ...]) -> None:
    found = logged(words)
    path, mass = 0.0, 0.0
    for step, row in enumerate(found.run.memory.rows[:-1]):
        change = found.outputs(step + 1) - found.outputs(step)
        assert number(row, "closure") < 1e-12
        assert number(row, "contribution_sum") == pytest.approx(float(change.abs().sum()), rel=1e-9)
        assert number(row, "contribution_mass") >= number(row, "contribution_sum")
        path, mass = path + number(row, "kernel_mass"), mass + number(row, "contribution_mass")
    integrals = found.run.outcome.matrices.path
    assert path >= float(integrals.kernel.norm()) * (1 - 1e-12)  # the triangle inequality over steps
    assert mass >= float(integrals.contributions.abs().sum()) * (1 - 1e-12)
