"""Effects are held against trainings that leave examples out, and are believed only where they foretold them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ntkexp.records.contributions import LeaveOut, LeftOut, read_leave_out, write_leave_out
from ntkexp.removal.rerun import Rerun, RerunAt, trained
from ntkexp.removal.retraining import changes, groups, leave_out
from ntkexp.report.leave_out import Agreement, held_against
from tests.removal.problems import CASES, GROUP, rerun, split


def derivative(training: Rerun, points: Tensor) -> Tensor:
    """The effect of every example by central differences, [point, out, train]."""
    h, eye = 1e-4, torch.eye(training.examples, dtype=torch.float64)
    ends = trained(training, torch.cat([1 + h * eye, 1 - h * eye]))
    more, less = torch.stack([training.outputs(end, points) for end in ends]).chunk(2)
    return ((less - more) / (2 * h)).permute(1, 2, 0)


def test_effects_of_a_smooth_network_are_believed_and_those_of_others_are_not() -> None:
    training, points = rerun("sgd", "tanh", "data.train=48", "steps=6")
    effect = derivative(training, points)
    right = held_against(leave_out(RerunAt(training, points), effect, range(3)), growth=1.0)
    assert right.correlation > 0.9
    assert right.believed
    assert "correlate 0.9" in right.sentence
    assert right.removals == 8  # 1, 2 and 10 of 48 by influence; 1, 2, 2, 10 and 10 by chance
    wrong = held_against(leave_out(RerunAt(training, points), effect.flip(1), range(3)), growth=1.0)
    assert not wrong.believed
    assert "not predictable" in wrong.sentence
    assert not replace(right, growth=1e4).believed


@pytest.mark.slow
def test_where_it_is_cheap_everyone_is_left_out_alone() -> None:
    training, points = rerun("sgd", "tanh")
    found = leave_out(RerunAt(training, points), derivative(training, points), range(3), everyone=True)
    alone = found.alone(training.examples)
    assert alone is not None
    assert found.alone(training.examples + 1) is None
    assert np.allclose(alone[..., 7], changes(RerunAt(training, points), [[7]])[0][0].numpy(), rtol=1e-9, atol=1e-13)
    assert held_against(found, 1.0).believed


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
    """Changes that were foretold with some noise, of sizes that differ a thousandfold."""
    generator = np.random.default_rng(seed)
    sizes = np.logspace(0, 3, removals)[:, None, None]
    actual = sizes * generator.standard_normal((removals, 5, 2))
    predicted = 0.8 * actual + 0.1 * sizes * generator.standard_normal(actual.shape)
    who = tuple(LeftOut(influential=k == 0, examples=tuple(range(k + 1))) for k in range(removals))
    return LeaveOut(removals=who, probe=tuple(range(5)), predicted=predicted, actual=actual)


@pytest.mark.parametrize("turned", range(4))
def test_the_line_speaks_of_every_removal(turned: int) -> None:
    found = synthetic()
    predicted = found.predicted.copy()
    predicted[turned] *= -1
    right, wrong = (held_against(replace(found, predicted=p), 1.0) for p in (found.predicted, predicted))
    assert right.correlation == pytest.approx(0.98, abs=0.01)
    assert right.size == pytest.approx(0.8, rel=0.05)
    assert wrong.correlation < 0.7  # however small the changes of the one that was turned
    assert right.sentence.startswith("4 retrainings: predicted changes correlate 0.98 with actual ones, and are 2")


def test_points_whose_effects_are_not_known_say_nothing() -> None:
    found = synthetic()
    wider = [np.concatenate([part, np.full((4, 2, 2), np.nan)], axis=1) for part in (found.predicted, 7 * found.actual)]
    wider[1][:, :5], wider[1][:, 5:] = found.actual, 7.0
    assert held_against(replace(found, predicted=wider[0], actual=wider[1]), 1.0) == held_against(found, 1.0)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_what_diverged_is_not_called_held_against(value: float) -> None:
    found = synthetic()
    found.actual[1, 0, 0] = value
    told = held_against(found, 1.0)
    assert not told.believed
    assert "cannot be held against actual ones" in told.sentence


def test_nobody_moved_anything() -> None:
    found = synthetic()
    none = held_against(replace(found, actual=0 * found.actual, predicted=0 * found.predicted), 1.0)
    assert none.sentence.endswith("cannot be held against actual ones, which are none or not finite")
    assert not Agreement(1, 0.9, 1.0, float("nan")).believed


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = synthetic()
    write_leave_out(tmp_path / "leave_out.zarr", found)
    again = read_leave_out(tmp_path / "leave_out.zarr")
    assert (again.removals, again.probe) == (found.removals, found.probe)
    assert np.array_equal(again.predicted, found.predicted)
    assert np.array_equal(again.actual, found.actual)


@pytest.mark.slow
def test_several_removals_at_once_are_those_one_by_one() -> None:
    training, points = rerun("adam", "relu")
    together, _ = changes(RerunAt(training, points), [GROUP, [1]])
    for group, change in zip([GROUP, [1]], together, strict=True):
        assert torch.allclose(changes(RerunAt(training, points), [group])[0][0], change, rtol=1e-9, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sgd", "adam"])
def test_a_mean_over_the_whole_batch_shrinks_steps_instead(case: str) -> None:
    """Halving all weights halves every gradient, which a mean over what is left does not notice."""
    assert case in CASES
    drawn, points = rerun(case, "tanh")
    training = replace(drawn, renormalises=False)
    half = training.everyone / 2
    assert torch.allclose(trained(drawn, half[None]), trained(drawn, drawn.everyone[None]), rtol=1e-12)
    if case == "sgd":
        halved = replace(drawn, loss=drawn.loss, scale=drawn.scale / 2)
        assert torch.allclose(trained(training, half[None]), trained(halved, drawn.everyone[None]), rtol=1e-12)
    found = split(training, points, training.everyone, training.without(GROUP))
    assert found.closure < 1e-11
