"""Every optimizer: which examples each step takes, and how the weights move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.optimizer.gd import GradientDescent
from ntkexp.optimizer.sgd import SGD
from tests.layer.components import choices, configured

OPTIMIZERS = choices("optimizer")
counts = st.integers(1, 40)
seeds = st.integers(0, 2**39)


def optimizer(name: str, **changes: object) -> AbstractOptimizer:
    made = configured("optimizer", name, **changes)
    assert isinstance(made, AbstractOptimizer)
    return made


def drawn(chosen: SGD, step: int, examples: int, seed: int) -> Tensor:
    """The batch of a step."""
    batch = chosen.batch_indices(step, examples, seed)
    assert batch is not None
    return batch


@given(counts, counts, seeds, st.integers(0, 3))
@settings(deadline=None)
def test_an_epoch_is_a_partition_into_batches(examples: int, batch: int, seed: int, epoch: int) -> None:
    chosen = SGD(batch=batch)
    turns = -(-examples // batch)
    batches = [drawn(chosen, epoch * turns + turn, examples, seed) for turn in range(turns)]
    assert torch.equal(torch.cat(batches).sort().values, torch.arange(examples))
    assert all(len(part) == min(batch, examples) for part in batches[:-1])


@given(counts, counts, seeds, st.integers(0, 100), st.booleans())
@settings(deadline=None)
def test_a_batch_is_a_function_of_seed_and_step(
    examples: int, batch: int, seed: int, step: int, replacement: bool
) -> None:
    chosen = SGD(batch=batch, replacement=replacement)
    torch.manual_seed(1)
    first = drawn(chosen, step, examples, seed)
    before = torch.get_rng_state()
    drawn(chosen, step + 1, examples, seed)
    torch.manual_seed(2)
    torch.rand(3)
    assert torch.equal(drawn(chosen, step, examples, seed), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("replacement", [True, False])
def test_epochs_and_seeds_differ(replacement: bool) -> None:
    """Two orders of forty examples are the same with a probability of 1/40!, or 40⁻⁴⁰."""
    chosen = SGD(batch=40, replacement=replacement)
    orders = [drawn(chosen, step, 40, seed) for step in range(3) for seed in range(3)]
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


def test_draws_with_replacement_reach_every_example_equally() -> None:
    """Each of ten is drawn 1000 times in 10000, give or take √900; six of those happen once in 5e8."""
    batches = torch.cat([drawn(SGD(batch=100, replacement=True), step, 10, 0) for step in range(100)])
    assert (torch.bincount(batches, minlength=10) - 1000).abs().max() < 6 * 30


def test_gradient_descent_takes_every_example() -> None:
    assert GradientDescent().batch_indices(3, 10, 0) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_without_a_gradient_stays(name: str) -> None:
    weights = {"w": torch.arange(3.0), "b": torch.ones(())}
    after = optimizer(name).update(weights, {key: torch.zeros_like(weight) for key, weight in weights.items()}, 0.5)
    assert all(torch.equal(after[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_leaves_its_arguments_alone_and_goes_downhill(name: str) -> None:
    weights = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    gradient = {"w": torch.tensor([0.5, 0.25], dtype=torch.float64)}
    kept = weights["w"].clone()
    after = optimizer(name).update(weights, gradient, 0.1)
    assert torch.equal(weights["w"], kept)
    assert float(((after["w"] - kept) * gradient["w"]).sum()) < 0


@pytest.mark.parametrize("chosen", [GradientDescent(), SGD(batch=2)])
def test_descent_is_weights_minus_step_times_gradient(chosen: AbstractOptimizer) -> None:
    weights, gradient = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([0.5, 4.0])}
    assert torch.equal(chosen.update(weights, gradient, 0.25)["w"], torch.tensor([0.875, -3.0]))
