"""A reading of the path sees steps and nothing of who took them: a descent, a recording, or a loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import pairwise
from math import log
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ntkexp.machine.base import Prediction
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import Memory as Remembered
from ntkexp.optimizer.flow import Flow
from ntkexp.path.forward_sum import AbstractAccumulator
from ntkexp.path.integrals import Integrals
from ntkexp.path.points import NetworkView
from ntkexp.path.recording import Playback
from ntkexp.path.step import Step
from ntkexp.records.data import Trajectory
from ntkexp.run.setting import Setting, prepare
from ntkexp.shapes import Weights
from tests.run.small import Ran, ran, recorded_steps, small

TINY = ("data.train=10", "data.query=5", "data.test=4", "model.width=8", "steps=5", "ladder.machine=[]")
WAYS = (
    ("optimizer=sgd", "optimizer.batch=4", "optimizer.clip_norm=0.2", "optimizer.weight_decay=0.1", "path.rule=[left]"),
    ("optimizer=sgd", "optimizer.layers={network.1: 0.25}", "path.every=snapshots", "path.schedule=2"),
    ("optimizer=adamw", "optimizer.step_size=0.05", "path.attributed=1000"),
)
ROUNDING = 1e-12  # five steps of autograd, which adds up the gradient in another order


def begin(setting: Setting, folder: Path) -> AbstractAccumulator:
    """Begin the sums of this setting."""
    return setting.experiment.integration.begin(
        setting.domain, setting.problem.weights, lambda rows, size: trajectory(folder / "second.bin", rows, size)
    )


def trajectory(path: Path, rows: int, size: int) -> Trajectory:
    made = Trajectory(path, rows, size, "float64")
    made.allocate()
    return made


def recorded(setting: Setting, folder: Path) -> Playback:
    """The steps of the descent, written down and read again."""
    recording, sizes = recorded_steps(setting, folder / "first.bin")
    return Playback(
        recording=recording,
        points=setting.points,
        step_sizes=sizes,
        factors=setting.descent.factors,
        weight_decay=setting.experiment.optimizer.weight_decay,
    )


def integrate(
    steps: Iterable[Step], accumulator: AbstractAccumulator, due: Collection[int] = ()
) -> Mapping[str, Integrals]:
    """The integrals of all steps from the first to the last; at those that are due a snapshot is taken."""
    taken = []
    for step in steps:
        accumulator.add(step, due=step.index in due)
        taken.append(step)
    for _ in accumulator.steps_back(taken[-1].end, [step.step_size for step in taken]):
        continue
    return accumulator.integrals


def same_bits(found: Ran, steps: Playback | list[Step], folder: Path) -> None:
    """Assert that these steps have the integrals of the run."""
    due = set(found.memory.kernels)
    integrals = integrate(steps, begin(found.setting, folder), due)
    assert list(integrals) == list(found.outcome.matrices.paths)
    for rule, path in found.outcome.matrices.paths.items():
        ours = integrals[rule]
        for one, other in ((ours.kernel, path.kernel), (ours.contributions, path.contributions)):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.decay, path.decay, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_a_recording_and_plain_values_give_the_bits_of_the_run(way: tuple[str, ...], tmp_path: Path) -> None:
    """Weights before and after, ℓ′, sizes and the memory say all, whatever else the descent knew."""
    found = ran(*TINY, *way)
    same_bits(found, recorded(found.setting, tmp_path), tmp_path)
    same_bits(
        found, [copied(step) for step in found.setting.descent.steps_from(found.setting.problem.weights)], tmp_path
    )


def copied(step: Step) -> Step:
    """The step as a stranger would tell it."""
    memory: Remembered = {part: {k: w.clone() for k, w in weights.items()} for part, weights in step.memory.items()}
    return Step(
        index=step.index,
        view=NetworkView(step.view.points, {name: weight.clone() for name, weight in step.view.weights.items()}),
        end={name: weight.clone() for name, weight in step.end.items()},
        output_gradient=step.output_gradient.clone(),
        step_size=step.step_size,
        factors=dict(step.factors),
        weight_decay=step.weight_decay,
        memory=memory,
    )


def plain_loop(setting: Setting, size: float) -> Iterator[Step]:
    """The loop that everyone writes: the weights before and after each step, and the gradient at the outputs."""
    module, train = deepcopy(setting.problem.module), setting.problem.train
    inputs, targets = setting.problem.inputs[:train], setting.problem.targets[:train]
    optimizer = torch.optim.SGD(module.parameters(), lr=size)
    for index in range(setting.experiment.steps):
        batch = setting.experiment.optimizer.batch_indices(index, train, setting.experiment.seed)
        chosen = torch.arange(train) if batch is None else batch
        before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        outputs = module(inputs)
        outputs.retain_grad()
        optimizer.zero_grad()
        torch.autograd.backward((outputs - targets)[chosen].square().sum() / (2 * len(chosen)))
        optimizer.step()
        after = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        assert outputs.grad is not None
        view = NetworkView(setting.points, before)
        yield Step(index=index, view=view, end=after, output_gradient=outputs.grad, step_size=size)


def test_a_loop_of_plain_torch_gives_the_bits_of_the_run(tmp_path: Path) -> None:
    """One example a step, one output and one hidden layer leave no sum whose order could differ."""
    alone = ("optimizer=sgd", "optimizer.batch=1", "optimizer.step_size=0.02", "model.depth=1", "init=standard")
    found = ran(*TINY, *alone, "path.rule=[secant,left]")
    assert found.setting.start.outputs.shape[1] == 1
    same_bits(found, list(plain_loop(found.setting, 0.02)), tmp_path)


def test_a_loop_of_plain_torch_is_read_as_the_run_is(tmp_path: Path) -> None:
    """Its path closes to rounding, with the parts of the runner's steps of the same training."""
    found = ran(*TINY, "optimizer.step_size=0.2", "path.rule=[secant,left]")
    setting = found.setting
    steps = list(plain_loop(setting, 0.2))
    integrals = integrate(steps, begin(setting, tmp_path))
    change = NetworkView(setting.points, steps[-1].end).outputs - setting.start.outputs
    assert (integrals["secant"].contributions.sum(2) - change).norm() < ROUNDING * change.norm()
    for rule, path in found.outcome.matrices.paths.items():
        for one, other in ((integrals[rule].kernel, path.kernel), (integrals[rule].contributions, path.contributions)):
            assert (one - other).norm() < ROUNDING * other.norm()


# The weights walk where a plain autograd loop with `torch.optim.SGD` would take them.


SMALL_ROUNDING = 1e-13  # 20 steps, each adding some tens of eps; training below the edge of stability amplifies none
QUICK = ("ladder.machine=[]", "path.rule=[secant]", "path.queries=[query]")


def by_autograd(*overrides: str) -> Iterator[dict[str, Tensor]]:
    """The weights after each step of the plain loop, on the same batches with the same step sizes."""
    setting = prepare(small(*overrides))
    experiment, module, descent = setting.experiment, setting.problem.module, setting.descent
    train, targets, inputs = setting.points.train, descent.targets, setting.points.inputs
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for step in range(experiment.steps):
        batch = experiment.optimizer.batch_indices(step, train, experiment.seed)
        chosen = torch.arange(train) if batch is None else batch
        values = experiment.loss.value(module(inputs[chosen]), targets[chosen])
        objective = values.mean() if experiment.loss.reduction == "mean" else values.sum()
        optimizer.zero_grad()
        torch.autograd.backward(objective * descent.scale)
        optimizer.param_groups[0]["lr"] = descent.step_size * experiment.schedule.factor(step, experiment.steps)
        optimizer.step()
        yield {name: weight.detach().clone() for name, weight in module.named_parameters()}


def farthest(run: Ran, *overrides: str) -> float:
    """The largest distance between the two walks, relative to the weights."""
    pairs = zip(run.memory.weights, by_autograd(*overrides), strict=True)
    return max(distance(ours, theirs) for ours, theirs in pairs)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest over the parameters that are trained."""
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)


SEVENS = ("optimizer=sgd", "optimizer.batch=7")
WALKS = (
    ("loss=squared", "data.classes=all"),
    ("loss=cross_entropy", "data.classes=all", "optimizer=sgd", "optimizer.batch=10"),
    ("loss=logistic", "data.classes=all", "optimizer=sgd", "optimizer.batch=40", "optimizer.replacement=true"),
    ("loss=hinge", "data.classes=all"),
    ("schedule=constant", "schedule.warm_up=3"),
    ("schedule=cosine", "schedule.last=0.1"),
    ("schedule=step", "schedule.every=4", "schedule.decay=0.5"),
    ("schedule=list", "schedule.factors=[1,0.2,0.7]"),
    ("init.antisymmetric=true", "loss.reduction=mean", *SEVENS),
    ("init.centred=true", "loss.reduction=sum", *SEVENS),
    ("init.alpha=7", "loss.reduction=mean", *SEVENS),
    ("init.alpha=7", "loss.reduction=sum", *SEVENS),
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("words", WALKS, ids=" ".join)
def test_the_walk_is_that_of_autograd(words: tuple[str, ...]) -> None:
    run = ran(*QUICK, *words)
    assert farthest(run, *QUICK, *words) < SMALL_ROUNDING
    assert (len({row["step_size"] for row in run.memory.rows[:-1]}) > 1) == words[0].startswith("schedule")


# Gradient flow: closed forms, the limit of gradient descent, and the error that it claims.


FLOW = ("optimizer=flow", "optimizer.step_size=0.2", "model.activation=tanh", "ladder.machine=[gauss]")
LINEAR = (*FLOW, "model.depth=0")
TOLERANCES = (1e-4, pytest.param(1e-6, marks=pytest.mark.slow), 1e-8)


def predicted(found: Ran, machine: str) -> torch.Tensor:
    """f̂ of one rung."""
    (outcome,) = (rung.outcome for rung in found.outcome.machines if rung.name == machine)
    assert isinstance(outcome, Prediction), str(outcome)
    return outcome.outputs


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_a_linear_network_follows_the_closed_form(tolerance: float) -> None:
    found = ran(*LINEAR, f"optimizer.tolerance={tolerance}", "ladder.machine=[frozen_start,linearised]")
    missed = predicted(found, "frozen_start") - found.outcome.matrices.end
    assert missed.norm() < 20 * tolerance * found.change.norm()  # twenty arcs add up, each within the tolerance
    assert (predicted(found, "linearised") - found.outcome.matrices.end).norm() < 20 * tolerance * found.change.norm()


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_an_arc_is_as_near_as_it_claims(tolerance: float) -> None:
    weights: Weights = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    rates, sizes = torch.tensor([1.0, 30.0], dtype=torch.float64), {"w": 0.7}

    def field(here: Weights) -> Weights:
        return {"w": rates * here["w"]}

    move = Flow(tolerance=tolerance).move(0, weights, field(weights), field, sizes, {})
    assert (move.weights["w"] - torch.exp(-0.7 * rates) * weights["w"]).norm() < 20 * tolerance * 3
    assert len(move.arcs) <= 40 * (1e-4 / tolerance) ** 0.2  # of order five: no more arcs than the accuracy needs
    begun = 0.0
    for arc in move.arcs:
        for u in (0.0, 0.3, 0.5, 1.0):
            expected = torch.exp(-0.7 * (begun + u * arc.length) * rates) * weights["w"]
            assert (arc.at(u)["w"] - expected).norm() < 30 * tolerance * 3  # dense output is of one order less
        begun += arc.length
    assert begun == pytest.approx(1.0, rel=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [pytest.param("squared", marks=pytest.mark.slow), "cross_entropy"])
def test_gradient_descent_tends_to_it_at_first_order(loss: str) -> None:
    shared = ("model.activation=tanh", f"loss={loss}", "data.classes=all", "path.rule=[left]", "ladder.machine=[]")
    end = ran(*shared, "optimizer=flow", "optimizer.step_size=2.0", "steps=2", "path.error_samples=0").outcome
    errors = []
    for steps in (16, 32):
        descended = ran(*shared, f"optimizer.step_size={4 / steps}", f"steps={steps}").outcome
        errors.append(float((descended.matrices.end - end.matrices.end).norm()))
    slopes = [log(coarse / fine) / log(2) for coarse, fine in pairwise(errors)]
    assert slopes == pytest.approx([1], abs=0.15)  # the next order still shows


def test_more_nodes_are_nearer_and_the_estimate_says_by_how_much() -> None:
    chosen = (*FLOW, "optimizer.step_size=1", "steps=6", "path.queries=[query]", "optimizer.tolerance=1e-4")
    one, four = (ran(*chosen, f"path.quadrature_points={n}", "path.error_samples=6") for n in (1, 4))
    true = (one.contributions("gauss") - four.contributions("gauss")).norm() / four.contributions("gauss").norm()
    said = one.outcome.matrices.paths["gauss"].facts["error_bar"]
    assert float(true) / 2 < said < 2 * float(true)


def test_rules_for_steps_say_that_there_are_none() -> None:
    found = ran(*LINEAR, "ladder.machine=[secant,left,gauss,fixed_coefficients,kernel_regression]")
    notes = {row.machine: row.note for row in found.table.values()}
    assert notes["secant"] == notes["left"] == "a flow has no finite steps; its path is integrated over time, by gauss"
    for machine in ("gauss", "fixed_coefficients", "kernel_regression"):
        assert all(row.relative_error is not None for row in found.rows(machine))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (("optimizer.clip_norm=1",), r"optimizer\.clip_norm=1: a flow has no steps"),
        (("path.every=snapshots",), r"path\.every=snapshots: a flow is integrated over time"),
    ],
)
def test_what_has_no_meaning_is_refused(chosen: tuple[str, ...], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        small("optimizer=flow", *chosen)


def test_a_field_that_is_not_finite_is_one_line_with_advice() -> None:
    weights: Weights = {"w": torch.ones(1)}

    def broken(here: Weights) -> Weights:
        return {"w": here["w"] / 0}

    with pytest.raises(Mistake, match=r"at step 7 the flow would need arcs shorter .* raise optimizer\.tolerance"):
        Flow().move(7, weights, {"w": torch.ones(1)}, broken, {"w": 1.0}, {})
