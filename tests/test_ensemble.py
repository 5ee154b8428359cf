"""Networks trained side by side are networks trained alone, and where the theory is exact they follow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isnan
from typing import ClassVar
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

from ntkexp.cli.ensemble import DEFAULT_OVERRIDES
from ntkexp.config.compose import compose
from ntkexp.ensemble import (
    REJECTION_LEVEL,
    EnsembleTraining,
    Process,
    Reference,
    StackedNetworks,
    TrainedNetworks,
    comparison,
    comparisons,
    ensemble,
    problem,
)
from ntkexp.experiment.problem import draw_network
from ntkexp.loss import AbstractLoss, Squared
from ntkexp.mistake import Mistake
from ntkexp.optimizer.descent import GD
from tests.run.small import Twice

CIRCLE = ("data=circle", "data.seed=0", "data.train=5", "data.query=0", "data.test=20", "model.width=16", "steps=30")


def alone(overrides: tuple[str, ...], seed: int, size: float, steps: int, *, readout: bool) -> Tensor:
    """One network by torch's own gradient descent."""
    experiment = compose([*overrides, f"seed={seed}"])
    given = problem(experiment)
    module = draw_network(experiment, experiment.data.split(), 1)
    weights = dict(module.named_parameters())
    layer = list(weights)[-1].rpartition(".")[0]  # the last
    moving = [weight for name, weight in weights.items() if not readout or name.rpartition(".")[0] == layer]
    optimizer = torch.optim.SGD(moving, lr=size)
    for _ in range(steps):
        optimizer.zero_grad()
        missed = module(given.inputs[: given.train]) - given.targets[: given.train]
        (missed.square().mean() / 2).backward()
        optimizer.step()
    outputs: Tensor = module(given.inputs)
    return outputs.detach()


@pytest.mark.parametrize("readout", [False, True], ids=["all layers", "readout"])
def test_networks_side_by_side_are_networks_alone(readout: bool) -> None:
    """Two of these networks fit into one group."""
    wide = (*CIRCLE, "model.width=1200")
    experiment = compose(wide)
    given, data = problem(experiment), experiment.data.split()
    modules = [draw_network(experiment.model_copy(update={"seed": seed}), data, 1) for seed in range(3)]
    training = EnsembleTraining(
        given.inputs, given.targets[: given.train], 0.3, 3, divisor=given.train, readout=readout
    )
    found = training.outputs(modules)
    for seed in range(3):
        expected = alone(wide, seed, 0.3, 3, readout=readout)
        torch.testing.assert_close(found[seed], expected, rtol=1e-12, atol=1e-13)


class Watched(EnsembleTraining):
    """It counts how many states of its networks are alive at once."""

    alive: ClassVar[list[int]] = []

    def course(self, networks: StackedNetworks) -> Iterator[StackedNetworks]:
        seen: list[ReferenceType[StackedNetworks]] = []
        for state in super().course(networks):
            seen.append(ref(state))
            self.alive.append(sum(state() is not None for state in seen))
            yield state


def test_states_of_earlier_steps_are_let_go() -> None:
    # They would take 16 GB for 500 steps of `ntkexp kernel ensemble`.
    experiment = compose(CIRCLE)
    given = problem(experiment)
    training = Watched(given.inputs, given.targets[: given.train], 0.3, 20, divisor=given.train, readout=False)
    training.outputs([draw_network(experiment, experiment.data.split(), 1)])
    # The start, which the caller holds, the state before the step and the one after it.
    assert len(training.alive) == 21
    assert max(training.alive) <= 3


@pytest.mark.sample(2)
@pytest.mark.parametrize(("loss", "size"), [(Squared(reduction="sum"), 0.06), (Twice(), 0.15)], ids=["sum", "twice"])
@pytest.mark.parametrize("given_size", [True, False], ids=["size", "stable"])
def test_steeper_losses_are_the_same_by_shorter_steps(loss: AbstractLoss, size: float, given_size: bool) -> None:
    """η c/M is all that training knows of step size, curvature and number of examples: here M = 5."""

    def trained(loss: AbstractLoss, size: float) -> list[TrainedNetworks]:
        chosen = GD(step_size=size) if given_size else GD(stable_fraction=0.5)
        experiment = compose([*CIRCLE, "steps=5"]).model_copy(update={"loss": loss, "optimizer": chosen})
        return ensemble(experiment, problem(experiment), 2, lambda name, done: None)

    for found, expected in zip(trained(loss, size), trained(Squared(), 0.3), strict=True):
        torch.testing.assert_close(found.outputs, expected.outputs, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found.theory.mean, expected.theory.mean, rtol=1e-12, atol=1e-13)


def test_linear_models_are_gaussian_processes() -> None:
    """Without hidden layers both kernels are the linear one, at every width: the theory is exact."""
    experiment = compose([*CIRCLE, "model.depth=0", "init.b_std=1", "steps=3"])
    count = 400
    found = ensemble(experiment, problem(experiment), count, lambda name, done: None)
    for each in found:
        spread = each.theory.deviation
        errors = (each.observed.mean - each.theory.mean) * count**0.5 / spread
        assert errors.abs().max() < 5  # standard errors
        assert ((each.observed.deviation / spread - 1).abs() < 5 / (2 * count) ** 0.5).all()
    for row in comparisons(found, 5):
        assert row.chance > 1e-3  # draws of the process, by both its mean and its covariance
        assert row.mean < 3
        assert row.deviation == pytest.approx(1, abs=5 / (2 * count) ** 0.5)


POINTS = 12
PLACES = torch.linspace(0, 3, POINTS, dtype=torch.float64)
NEAR = torch.exp(-((PLACES[:, None] - PLACES) ** 2)) + 1e-9 * torch.eye(POINTS)
LIVELY = Process(PLACES.sin(), NEAR, torch.ones(POINTS, dtype=torch.float64))


def drawn(process: Process, count: int, seed: int, *, mean: float = 0.0, spread: float = 1.0) -> TrainedNetworks:
    """Draws of a process, about another mean or spread farther."""
    normal = torch.randn(count, POINTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    around = process.mean + mean * process.deviation
    outputs = around + spread * normal @ torch.linalg.cholesky(process.covariance).mT
    return TrainedNetworks("all layers", "ntk", outputs, process, 0.1)


def chances(count: int, ensembles: int, **other: float) -> Tensor:
    """How often draws of the process would be so far off as these ensembles, about another mean or spread farther."""
    reference = Reference(drawn(LIVELY, count, 0), 0, count)
    each = (drawn(LIVELY, count, 1 + seed, **other) for seed in range(ensembles))
    return torch.tensor([comparison(networks, reference).chance for networks in each])


def test_draws_of_a_process_are_refused_as_seldom_as_is_said() -> None:
    """At most 5 % of 200 ensembles: by the binomial distribution up to 20, more once in 1,000 times."""
    found = chances(10, 200)
    assert 1 <= int((found < REJECTION_LEVEL).sum()) <= 20
    assert int((found < 0.5).sum()) > 40


@pytest.mark.parametrize("other", [{"mean": 1.0}, {"spread": 1.5}, {"spread": 0.5}], ids=str)
def test_another_mean_or_another_covariance_is_noticed(other: dict[str, float]) -> None:
    assert (chances(100, 10, **other) < REJECTION_LEVEL).all()


def test_networks_beside_points_that_are_pinned_are_compared_elsewhere() -> None:
    """If the variance of a process is nearly zero, a finite width changes the mean by many deviations."""
    near = NEAR.clone()
    near[:3] *= 1e-3
    near[:, :3] *= 1e-3
    pinned = Process(PLACES.sin(), near, LIVELY.before)
    networks = drawn(LIVELY, 20, 0)
    (found,) = comparisons([replace(networks, theory=pinned)], 2)
    (expected,) = comparisons([networks], 3)
    assert (found.points, found.among) == (POINTS - 3, POINTS - 2)
    assert replace(found, among=POINTS - 3) == expected
    errors = (networks.outputs.mean(0) - PLACES.sin())[3:] * 20**0.5
    assert expected.mean == pytest.approx(float(errors.square().mean().sqrt()))
    assert expected.worst == pytest.approx(float(errors.abs().max()))


@pytest.mark.parametrize("where", ["network", "process", "spread"])
def test_what_is_no_number_is_compared_with_nothing(where: str) -> None:
    networks = drawn(LIVELY, 5, 0)
    outputs, near, before = networks.outputs.clone(), NEAR.clone(), LIVELY.before
    if where == "network":
        outputs[0, 4] = float("nan")
    elif where == "process":
        near[4, 4] = float("nan")
    else:
        before = 1e3 * before
    (found,) = comparisons([replace(networks, outputs=outputs, theory=Process(PLACES.sin(), near, before))], 1)
    assert isnan(found.mean)
    assert isnan(found.chance)
    assert not found.follows


@pytest.mark.slow
def test_wide_networks_follow_their_own_process_and_not_the_other() -> None:
    """As `ntkexp kernel ensemble` shows it, by fewer networks."""
    experiment = compose(DEFAULT_OVERRIDES)
    given = problem(experiment)
    found = comparisons(ensemble(experiment, given, 24, lambda name, done: None), given.train)
    follows = {(row.networks, row.process): row.follows for row in found}
    assert follows == {
        ("all layers", "ntk"): True,
        ("all layers", "nngp"): False,
        ("readout", "ntk"): False,
        ("readout", "nngp"): True,
    }


def test_places_are_sorted_angles() -> None:
    given = problem(compose(CIRCLE))
    assert given.axis == "angle"
    assert (given.places[given.train :].diff() > 0).all()
    torch.testing.assert_close(given.inputs[:, 0], given.places.cos(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (("data=digits",), "the data has inputs of 64 numbers; choose data=circle"),
        (("data=digits", "data.classes=all"), "one output, and the data has 10"),
        (("loss=logistic", "data=digits"), "loss=squared and optimizer=gd"),
        (("optimizer=adam",), "loss=squared and optimizer=gd"),
        (("optimizer.weight_decay=0.1",), "leave out weight decay, clipping and step sizes of layers"),
        (("optimizer.clip_norm=1",), "leave out weight decay, clipping and step sizes of layers"),
        (("schedule=cosine",), "equal steps; leave out"),
        (("schedule.warm_up=3",), "equal steps; leave out"),
        (("stop_at_loss=0.1",), "equal steps; leave out"),
        (("data=sequence",), "leave out data=sequence"),
        (("init=standard",), "choose init=ntk"),
        (("init.antisymmetric=true",), "neither antisymmetric nor centred"),
    ],
    ids=str,
)
def test_what_has_no_process_is_refused(settings: tuple[str, ...], advice: str) -> None:
    with pytest.raises(Mistake, match=advice):
        problem(compose([*CIRCLE, *settings]))


def test_steps_that_diverge_are_refused_before_training() -> None:
    experiment = compose(CIRCLE)
    sizes = [networks.step_size for networks in ensemble(experiment, problem(experiment), 2, lambda name, done: None)]
    too_large = experiment.model_copy(update={"optimizer": GD(step_size=2.01 * sizes[0])})  # half of the largest stable
    with pytest.raises(Mistake, match="diverge with the NTK kernel; take steps below"):
        ensemble(too_large, problem(too_large), 2, lambda name, done: pytest.fail(name))
