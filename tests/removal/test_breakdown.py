"""The breakdown of a removal closes for every optimizer, and only removed examples have shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, cycle
from math import factorial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import GUARD
from ntkexp.progress import Silent
from ntkexp.records.contributions import LeaveOut, LeftOut, read_leave_out, write_leave_out
from ntkexp.removal.between import Clipped, Pair
from ntkexp.removal.rerun import Rerun, RerunAt, breakdown_between, rerun_of, trained
from ntkexp.removal.retraining import AbstractRetraining, RetrainingCheck, agreement, changes, groups
from ntkexp.report.leave_out import Agreement, agreement_of
from ntkexp.run.setting import prepare
from ntkexp.shapes import Inputs, Weights
from tests.config.components import OWN, asked_for, networks
from tests.removal.problems import CASES, GROUP, rerun, split
from tests.run.small import ran, small

EPS = torch.finfo(torch.float64).eps
CLOSES = 1e-11  # ten steps of some hundred roundings each, and by Adam quotients of small numbers


def at(training: Rerun, points: Tensor, weight: Tensor) -> Tensor:
    """The outputs after training with these weights of the examples, [run, chosen]."""
    ends = trained(training, weight)
    return torch.stack([training.outputs(end, points).flatten() for end in ends])


@pytest.mark.sample(2)
@pytest.mark.parametrize(("case", "activation"), [*zip(CASES, cycle(("relu", "tanh")))])
def test_shares_add_up_to_what_retraining_changed(case: str, activation: str) -> None:
    training, points = rerun(case, activation)
    weights = torch.stack([training.unit_weights, training.without(GROUP)])
    found = split(training, points, *weights)
    before, after = at(training, points, weights)
    size = float((after - before).norm())
    assert size > 1e-3
    assert found.rounding <= CLOSES * size  # so that the laws below say something
    for split_up in (found.actual, found.shares.sum(1), found.by_step.sum(1)):
        assert float((split_up - (after - before)).norm()) <= found.rounding
    untouched = [k for k in range(training.examples) if k not in GROUP]
    assert not found.shares[:, untouched].any()
    drawn = {k for step in range(training.length) for k in training.batch(step).rows.tolist()}
    assert [k for k in GROUP if found.shares[:, k].any()] == [k for k in GROUP if k in drawn] != []


def test_steps_without_examples_are_counted() -> None:
    training, points = rerun("sgd", "tanh")
    rows = [set(training.batch(step).rows.tolist()) for step in range(training.length)]
    for group in (sorted(rows[0]), sorted(rows[0] | rows[1])[1:]):
        found = split(training, points, training.unit_weights, training.without(group))
        assert found.emptied == sum(batch <= set(group) for batch in rows) > 0


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.5), (2.0, 2.0), (0.5, 0.8), (2.0, 3.0), (0.5, 2.0), (2.0, 0.5)])
@pytest.mark.parametrize("turned", [False, True])
def test_clipping_between_two_gradients_is_exact(first: float, second: float, turned: bool) -> None:
    """γ·(c′g′ − cg) = (pulled back γ)·(g′ − g). Between equal gradients, it is the derivative."""
    direction = torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)
    gradient = Pair(first * direction, second * (direction.flip(0) if turned else direction))
    factor = Pair(*(gradient.first.new_tensor(clip_factor(each)) for each in (gradient.first, gradient.second)))
    gamma = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    clipped = Clipped(gradient, factor, bound=1.0)
    found = clipped.pull_back(gamma)
    expected = gamma @ clipped.clipped.change
    assert torch.allclose(found @ gradient.change, expected, rtol=0, atol=100 * EPS)
    if not gradient.differs:
        jacobian = jacrev(lambda g: g * (1 / (g.norm() + GUARD)).clamp(max=1))(gradient.first)
        assert torch.allclose(found, gamma @ jacobian, rtol=0, atol=100 * EPS)


def clip_factor(gradient: Tensor) -> float:
    return min(1.0, 1 / (float(gradient.norm()) + GUARD))


def test_examples_that_were_never_drawn_change_nothing() -> None:
    """The rounding error of the change is then proportional to |f| + |f| + ‖J‖·‖θ‖."""
    training, points = rerun("one by one", "tanh")
    drawn = {k for step in range(training.length) for k in training.batch(step).rows.tolist()}
    absent = [k for k in range(training.examples) if k not in drawn]
    found = split(training, points, training.unit_weights, training.without(absent))
    assert not found.shares.any()
    assert found.closure_error <= found.rounding
    end = trained(training, training.unit_weights[None])[0]
    jacobian = jacrev(lambda weights: training.outputs(weights, points).flatten())(end)
    expected = 2 * found.before.abs() + jacobian.norm(dim=1) * end.norm()
    assert torch.allclose(found.magnitude, expected, rtol=0.1)  # J is a secant between ends that differ by rounding


@pytest.mark.slow
@pytest.mark.parametrize("model", networks())
def test_shares_add_up_in_every_architecture(model: str) -> None:
    words = ("model.width=8", "steps=3", "data.train=6", "data.query=2", "data.test=2", "optimizer=sgd")
    experiment = small(*asked_for("model", model), *words, "optimizer.batch=3", trust=[str(OWN)])
    setting = prepare(experiment)
    training = rerun_of(experiment, setting.problem, setting.descent.step_size, experiment.steps)
    points = setting.problem.inputs[6:8]
    with TemporaryDirectory() as folder:
        weight = Pair(training.unit_weights, training.without([0, 1, 2]))
        found = breakdown_between(training, weight, points, torch.tensor([[0, 0], [1, 0]]), Path(folder), Silent())
    assert found.actual.any()
    assert found.closure < CLOSES


def test_the_least_error_beyond_rounding_is_refused() -> None:
    """By shares that are off by 1e-9 of themselves. A module that decides by numbers changes none."""
    training, points = rerun("gd", "relu")

    def deciding(weights: Weights, inputs: Inputs) -> Tensor:
        found = training.function(weights, inputs)
        return found if float(next(iter(weights.values())).sum()) < 1e9 else -found

    few, weights = replace(training, length=3), (training.unit_weights, training.without(GROUP))
    sound, decided = split(few, points, *weights).checked(), split(replace(few, function=deciding), points, *weights)
    assert torch.allclose(decided.shares, sound.shares, rtol=1e-9, atol=1e-14)
    assert 0 < sound.closure_error < sound.rounding < 1e-11 * float(sound.actual.norm())
    with pytest.raises(Mistake, match="exceeds the rounding error"):
        replace(sound, shares=(1 + 1e-9) * sound.shares).checked()


def test_swapping_both_trainings_flips_every_sign() -> None:
    training, points = rerun("adam", "relu")
    there = split(training, points, training.unit_weights, training.without(GROUP))
    back = split(training, points, training.without(GROUP), training.unit_weights)
    rounding = EPS * (there.magnitude + back.magnitude)  # products are cut into sums in another order
    assert (rounding <= 10 * CLOSES * there.actual.abs().max()).all()
    assert ((there.actual + back.actual).abs() <= rounding).all()
    assert ((there.shares + back.shares).abs() <= rounding[:, None]).all()


@pytest.mark.parametrize("case", ["gd", pytest.param("adam", marks=pytest.mark.slow)])
def test_copies_get_the_same_share(case: str) -> None:
    drawn, points = rerun(case, "relu", "optimizer.batch=null") if case == "adam" else rerun(case, "relu")
    copies = torch.tensor([3, 5, 7])
    inputs, targets = drawn.inputs.clone(), drawn.targets.clone()
    inputs[copies], targets[copies] = drawn.inputs[3], drawn.targets[3]
    training = replace(drawn, inputs=inputs, targets=targets)
    found = split(training, points, training.unit_weights, training.without([0, 3, 5, 7])).shares
    assert torch.allclose(found[:, copies], found[:, [3, 3, 3]], rtol=1e-9, atol=0)  # sums in another order
    assert not torch.allclose(found[:, 0], found[:, 3], rtol=1e-3)


@pytest.mark.parametrize(
    "case", [pytest.param("clipped", marks=pytest.mark.slow), pytest.param("adam", marks=pytest.mark.slow), "amsgrad"]
)
def test_between_trainings_that_hardly_differ_shares_are_derivatives(case: str) -> None:
    """The difference quotient of the breakdown at distance h, and of training at ±h: both are off by h²."""
    training, points = rerun(case, "tanh", "optimizer.eps=1e-4") if case != "clipped" else rerun(case, "tanh")
    h = 1e-4
    less, more = training.unit_weights.clone(), training.unit_weights.clone()
    less[3], more[3] = 1 - h, 1 + h
    shares = split(training, points, less, more).shares
    above, below = at(training, points, torch.stack([more, less]))
    assert torch.allclose(shares[:, 3], above - below, rtol=1e-9, atol=1e-13)
    half = split(training, points, 1 + (less - 1) / 2, 1 + (more - 1) / 2).shares
    assert torch.allclose(2 * half, shares, rtol=1e-5, atol=0)


def test_a_run_is_trained_again_to_the_same_weights() -> None:
    found = ran(*CASES["clipped"], "data=digits", "data.classes=[0,1,2]", "loss=cross_entropy", "steps=6")
    setting = found.setting
    training = rerun_of(setting.experiment, setting.problem, setting.descent.step_size, found.outcome.steps)
    start, end = training.flat.vector(training.start), training.flat.vector(found.outcome.weights)
    assert float((trained(training, training.unit_weights[None])[0] - end).norm()) <= 1e-13 * float(
        (end - start).norm()
    )


def test_trainings_are_those_of_pytorch_on_what_is_left() -> None:
    """Full batches: leaving examples out is training on fewer, which needs nothing of ours but the network."""
    training, points = rerun("momentum", "tanh", "optimizer.batch=null", "optimizer.dampening=0.0")
    left = [k for k in range(training.examples) if k not in GROUP]
    parameters = {name: weight.clone().requires_grad_() for name, weight in training.start.items()}
    sgd = torch.optim.SGD(parameters.values(), lr=training.step_size, momentum=0.9, weight_decay=0.05)
    for _ in range(training.length):
        sgd.zero_grad()
        outputs = training.function(parameters, training.inputs[left])
        torch.nn.functional.cross_entropy(outputs, training.targets[left]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.2)
        sgd.step()
    (end,) = trained(training, training.without(GROUP)[None])
    expected = training.function({name: weight.detach() for name, weight in parameters.items()}, points)
    assert torch.allclose(training.outputs(end, points), expected, rtol=1e-12, atol=1e-13)


def test_a_training_that_diverges_without_examples_is_refused() -> None:
    training, points = rerun("gd", "relu")
    wild = replace(training, step_size=1e200, start={n: w.clone() for n, w in training.start.items()})
    with pytest.raises(Mistake, match=r"training as it was diverges"):
        split(wild, points, wild.unit_weights, wild.without(GROUP))


def shapley(training: Rerun, points: Tensor, group: list[int]) -> Tensor:
    """Return the mean change by each example over all orders of leaving out the group, [chosen, member]."""
    subsets = [set(s) for size in range(len(group) + 1) for s in combinations(group, size)]
    values = at(training, points, torch.stack([training.without(sorted(subset)) for subset in subsets]))
    value = {frozenset(subset): row for subset, row in zip(subsets, values, strict=True)}
    n = len(group)
    found = []
    for member in group:
        shares = torch.zeros_like(values[0])
        for subset, before in value.items():
            if member not in subset:
                weight = factorial(len(subset)) * factorial(n - len(subset) - 1) / factorial(n)
                shares += weight * (value[subset | {member}] - before)
        found.append(shares)
    return torch.stack(found, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sgd", "adam"])
def test_shares_are_those_of_shapley_to_a_few_percent(case: str) -> None:
    """A straight way between both trainings, where Shapley takes all orders: on smooth networks 0.4 to 4 % apart.

    The changes by leaving out each alone miss even the sum.
    """
    group = [0, 3, 5, 7, 11, 20]
    training, points = rerun(case, "tanh", "steps=15", "data.train=60", "optimizer.batch=15")
    exact = shapley(training, points, group)
    found = split(training, points, training.unit_weights, training.without(group)).shares[:, group]
    assert torch.allclose(found.sum(1), exact.sum(1), rtol=1e-9, atol=1e-12)
    alone = at(training, points, torch.stack([training.unit_weights, *(training.without([k]) for k in group)]))
    assert float((found - exact).norm()) <= 0.05 * float(exact.norm())
    assert not torch.allclose((alone[1:] - alone[0]).sum(0), exact.sum(1), rtol=1e-3)


class Polynomial(AbstractRetraining):
    """A training whose outputs are f = Σᵢ (1 − tᵢ) a + (Σᵢ (1 − tᵢ))² b, with the weights t of its examples."""

    def __init__(self, linear: Tensor, square: Tensor) -> None:
        self.linear = linear
        self.square = square

    @property
    def unit_weights(self) -> Tensor:
        return torch.ones(5, dtype=torch.float64)

    @property
    def seed(self) -> int:
        return 0

    @property
    def original_outputs(self) -> Tensor:
        return torch.zeros(2, 1, dtype=torch.float64)

    def final_weights(self, weights: Tensor) -> Iterator[Tensor]:
        yield from (1 - weights).sum(1)

    def outputs_at(self, end: Tensor) -> Tensor:
        return (end * self.linear + end**2 * self.square)[:, None]

    def refuse_other_end(self, repeated: Tensor, changes: Tensor) -> None:
        raise NotImplementedError


def test_halves_of_a_removal_agree_by_the_cosine_of_their_changes() -> None:
    """Without one of five examples, the halves change the outputs by a/2 + b/4 and by a/2 + 3b/4."""
    a, b = torch.tensor([[1.0, 2.0], [3.0, -8.0]], dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(a / 2 + b / 4, a / 2 + 3 * b / 4, dim=0)
    assert abs(agreement(Polynomial(a, b)) - float(cosine)) <= 10 * EPS
    assert abs(agreement(Polynomial(a, 0 * b)) - 1) <= 10 * EPS


# Effects are compared with trainings that leave examples out, and are believed only where they predicted them.


def derivative(training: Rerun, points: Tensor) -> Tensor:
    """The effect of every example by central differences, [point, out, train]."""
    h, eye = 1e-4, torch.eye(training.examples, dtype=torch.float64)
    ends = trained(training, torch.cat([1 + h * eye, 1 - h * eye]))
    more, less = torch.stack([training.outputs(end, points) for end in ends]).chunk(2)
    return ((less - more) / (2 * h)).permute(1, 2, 0)


def test_effects_of_a_smooth_network_are_believed_and_those_of_others_are_not() -> None:
    training, points = rerun("sgd", "tanh", "data.train=48", "steps=6")
    effect = derivative(training, points)
    check = RetrainingCheck(training=RerunAt(training, points), query=range(3))
    right = agreement_of(check.compare(effect), growth=1.0)
    assert right.correlation > 0.9
    assert right.believed
    assert "correlate 0.9" in right.sentence
    assert right.removals == 8  # 1, 2 and 10 of 48 by influence; 1, 2, 2, 10 and 10 by chance
    wrong = agreement_of(check.compare(effect.flip(1)), growth=1.0)
    assert not wrong.believed
    assert "cannot be predicted" in wrong.sentence
    assert not replace(right, growth=1e4).believed


@pytest.mark.slow
def test_where_it_is_cheap_everyone_is_left_out_alone() -> None:
    training, points = rerun("sgd", "tanh")
    check = RetrainingCheck(training=RerunAt(training, points), query=range(3), singles=True)
    found = check.compare(derivative(training, points))
    alone = found.alone(training.examples)
    assert alone is not None
    assert found.alone(training.examples + 1) is None
    assert np.allclose(alone[..., 7], changes(RerunAt(training, points), [[7]])[0][0].numpy(), rtol=1e-9, atol=1e-13)
    assert agreement_of(found, 1.0).believed


def test_the_most_influential_are_left_out_and_others_by_chance() -> None:
    found = groups(torch.arange(200.0), seed=0)
    assert [(each.influential, len(each.examples)) for each in found] == [
        *((True, 1), (True, 10)),
        *((False, 1), (False, 10), (False, 10)),
    ]
    assert found[1].examples == tuple(range(199, 189, -1))
    assert groups(torch.arange(200.0), seed=0) == found
    assert groups(torch.arange(200.0), seed=1)[2:] != found[2:]


def synthetic(removals: int = 4, seed: int = 0) -> LeaveOut:
    """Changes that were predicted with some noise, of sizes that differ a thousandfold."""
    generator = np.random.default_rng(seed)
    sizes = np.logspace(0, 3, removals)[:, None, None]
    actual = sizes * generator.standard_normal((removals, 5, 2))
    predicted = 0.8 * actual + 0.1 * sizes * generator.standard_normal(actual.shape)
    who = tuple(LeftOut(influential=k == 0, examples=tuple(range(k + 1))) for k in range(removals))
    return LeaveOut(removals=who, query=tuple(range(5)), predicted=predicted, actual=actual)


@pytest.mark.parametrize("turned", range(4))
def test_the_line_speaks_of_every_removal(turned: int) -> None:
    found = synthetic()
    predicted = found.predicted.copy()
    predicted[turned] *= -1
    right, wrong = (agreement_of(replace(found, predicted=p), 1.0) for p in (found.predicted, predicted))
    assert right.correlation == pytest.approx(0.98, abs=0.01)
    assert right.size == pytest.approx(0.8, rel=0.05)
    assert wrong.correlation < 0.7  # however small the changes of the one that was turned
    assert right.sentence.startswith("4 retrainings: predicted changes correlate 0.98 with actual ones, and are 2")


def test_the_line_speaks_of_known_and_finite_changes_alone(tmp_path: Path) -> None:
    found = synthetic()
    pad = ((0, 0), (0, 2), (0, 0))  # two points whose effects are not known
    wider = replace(
        found, predicted=np.pad(found.predicted, pad, constant_values=np.nan), actual=np.pad(found.actual, pad)
    )
    assert agreement_of(wider, 1.0) == agreement_of(found, 1.0)
    none = agreement_of(replace(found, actual=0 * found.actual, predicted=0 * found.predicted), 1.0)
    assert none.sentence.endswith("cannot be compared with actual ones, which do not vary or are not finite")
    assert not Agreement(1, 0.9, 1.0, float("nan")).believed
    write_leave_out(tmp_path / "leave_out.zarr", found)
    again = read_leave_out(tmp_path / "leave_out.zarr")
    assert (again.removals, again.query) == (found.removals, found.query)
    assert np.array_equal(again.predicted, found.predicted)
    assert np.array_equal(again.actual, found.actual)
    for value in (np.inf, -np.inf):  # a training that diverged
        again.actual[1, 0, 0] = value
        assert not agreement_of(again, 1.0).believed
        assert "cannot be compared with actual ones" in agreement_of(again, 1.0).sentence


@pytest.mark.slow
def test_several_removals_at_once_are_those_one_by_one() -> None:
    training, points = rerun("adam", "relu")
    together, _ = changes(RerunAt(training, points), [GROUP, [1]])
    for group, change in zip([GROUP, [1]], together, strict=True):
        assert torch.allclose(changes(RerunAt(training, points), [group])[0][0], change, rtol=1e-9, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sgd", "adam"])
def test_a_mean_over_the_whole_batch_shrinks_steps_instead(case: str) -> None:
    """Halving all weights halves every gradient. A renormalised mean does not change."""
    assert case in CASES
    drawn, points = rerun(case, "tanh")
    training = replace(drawn, renormalises=False)
    half = training.unit_weights / 2
    assert torch.allclose(trained(drawn, half[None]), trained(drawn, drawn.unit_weights[None]), rtol=1e-12)
    if case == "sgd":
        halved = replace(drawn, loss=drawn.loss, scale=drawn.scale / 2)
        assert torch.allclose(trained(training, half[None]), trained(halved, drawn.unit_weights[None]), rtol=1e-12)
    found = split(training, points, training.unit_weights, training.without(GROUP))
    assert found.closure < 1e-11
