"""What is logged, against its definition written out once more, at the weights that a run passed through."""

from __future__ import annotations

from functools import cache
from math import exp, inf, log

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from ntkexp.layer.pointwise import Pointwise
from ntkexp.library import tangent_kernel
from ntkexp.run.metrics import Row
from tests.run.small import Ran, ran

CASES = (
    ("loss=squared", "data.classes=[3,8]"),
    ("loss=cross_entropy", "data.classes=all", "optimizer=sgd", "optimizer.batch=10"),
    ("loss=logistic", "data.classes=[3,8]", "init.centred=true", "init.alpha=3"),
    ("loss=squared", "data=teacher", "data.train=24", "data.probe=12", "data.test=12", "loss.reduction=sum"),
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
        for suffix, place in (("", slice(0, 24)), ("_probe", slice(24, 36))):
            values = loss.value(said[place], setting.problem.targets[place])
            whole = values.mean() if loss.reduction == "mean" else values.sum()
            assert number(row, f"loss{suffix}") == pytest.approx(float(whole) * setting.descent.scale, rel=CLOSE)
            if setting.problem.data.classes:
                truth = (setting.problem.data.train if place.start == 0 else setting.problem.data.probe).target
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
