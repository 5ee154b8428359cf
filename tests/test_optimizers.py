"""Every optimizer: which examples each step takes, and how the weights move."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractOptimizer, Memory
from ntkexp.optimizer.descent import GD, SGD, Adam, AdamW, Momentum, Nesterov, Rmsprop
from ntkexp.schedule import AbstractSchedule, Cosine, List, Step
from ntkexp.shapes import Weights
from tests.config.components import choices, configured

OPTIMIZERS = choices("optimizer")
counts = st.integers(1, 40)
seeds = st.integers(0, 2**39)


def optimizer(name: str, **changes: object) -> AbstractOptimizer:
    made = configured("optimizer", name, **changes)
    assert isinstance(made, AbstractOptimizer)
    return made


def drawn(chosen: SGD, step: int, examples: int, seed: int) -> Tensor:
    batch = chosen.batch_indices(step, examples, seed)
    assert batch is not None
    return batch


@given(counts, counts, seeds, st.integers(0, 3))
def test_an_epoch_is_a_partition_into_batches(examples: int, batch: int, seed: int, epoch: int) -> None:
    chosen = SGD(batch=batch)
    turns = -(-examples // batch)
    batches = [drawn(chosen, epoch * turns + turn, examples, seed) for turn in range(turns)]
    assert torch.equal(torch.cat(batches).sort().values, torch.arange(examples))
    assert all(len(part) == min(batch, examples) for part in batches[:-1])


@given(counts, counts, seeds, st.integers(0, 100), st.booleans())
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
    assert GD().batch_indices(3, 10, 0) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_without_a_gradient_stays(name: str) -> None:
    weights = {"w": torch.arange(3.0), "b": torch.ones(())}
    nothing = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    made = optimizer(name, weight_decay=0.0)
    after, _ = made.update(0, weights, nothing, dict.fromkeys(weights, 0.5), {})
    assert all(torch.equal(after[key], weights[key]) for key in weights)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_leaves_its_arguments_alone_and_goes_downhill(name: str) -> None:
    weights = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    gradient = {"w": torch.tensor([0.5, 0.25], dtype=torch.float64)}
    kept = weights["w"].clone()
    after, _ = optimizer(name).update(0, weights, gradient, {"w": 0.1}, {})
    assert torch.equal(weights["w"], kept)
    assert float(((after["w"] - kept) * gradient["w"]).sum()) < 0


@pytest.mark.parametrize("chosen", [GD(), SGD(batch=2)])
def test_descent_is_weights_minus_step_times_gradient(chosen: AbstractOptimizer) -> None:
    weights, gradient = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([0.5, 4.0])}
    after, _ = chosen.update(0, weights, gradient, {"w": 0.25}, {})
    assert torch.equal(after["w"], torch.tensor([0.875, -3.0]))


LIKE_TORCH: dict[str, tuple[AbstractOptimizer, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "gd": (GD(weight_decay=0.1), lambda w: torch.optim.SGD(w, 0.3, weight_decay=0.1)),
    "momentum": (
        Momentum(dampening=0.25, weight_decay=0.1),
        lambda w: torch.optim.SGD(w, 0.3, momentum=0.9, dampening=0.25, weight_decay=0.1),
    ),
    "nesterov": (
        Nesterov(momentum=0.8, weight_decay=0.1),
        lambda w: torch.optim.SGD(w, 0.3, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "adam": (
        Adam(betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
        lambda w: torch.optim.Adam(w, 0.3, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    ),
    "rmsprop": (
        Rmsprop(smoothing=0.8, eps=1e-4, weight_decay=0.1),
        lambda w: torch.optim.RMSprop(w, 0.3, alpha=0.8, eps=1e-4, weight_decay=0.1),
    ),
    "amsgrad": (
        Adam(betas=(0.8, 0.5), amsgrad=True),
        lambda w: torch.optim.Adam(w, 0.3, betas=(0.8, 0.5), amsgrad=True),
    ),
    "adamw": (AdamW(weight_decay=0.2), lambda w: torch.optim.AdamW(w, 0.3, weight_decay=0.2)),
    "adamw, amsgrad": (AdamW(amsgrad=True), lambda w: torch.optim.AdamW(w, 0.3, amsgrad=True)),
}


@pytest.mark.parametrize("case", LIKE_TORCH)
def test_the_weights_go_where_torch_optim_takes_them(case: str) -> None:
    """To the last bit, through gradients drawn at random, on several weights."""
    ours, theirs = LIKE_TORCH[case]
    generator = torch.Generator().manual_seed(0)

    def drawn_like(weights: Weights) -> Weights:
        return {name: torch.randn(w.shape, generator=generator, dtype=w.dtype) for name, w in weights.items()}

    weights = drawn_like({"w": torch.zeros(3, 4, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)})
    parameters = [weight.clone().requires_grad_() for weight in weights.values()]
    reference, memory = theirs(parameters), cast("Memory", {})
    for step in range(12):
        gradient = drawn_like(weights)
        weights, memory = ours.update(step, weights, gradient, dict.fromkeys(weights, 0.3), memory)
        for parameter, part in zip(parameters, gradient.values(), strict=True):
            parameter.grad = part
        reference.step()
        for name, parameter in zip(weights, parameters, strict=True):
            assert torch.equal(weights[name], parameter.detach()), f"{name} after step {step}"


@given(st.floats(1e-3, 1e3), seeds)
def test_clipping_is_that_of_torch(norm: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = {"w": torch.randn(3, 4, generator=generator), "b": torch.randn(4, generator=generator)}
    factor = GD(clip_norm=norm).clipping(gradient)
    parameters = [torch.zeros_like(part).requires_grad_() for part in gradient.values()]
    for parameter, part in zip(parameters, gradient.values(), strict=True):
        parameter.grad = part.clone()
    torch.nn.utils.clip_grad_norm_(parameters, norm)
    for parameter, part in zip(parameters, gradient.values(), strict=True):
        torch.testing.assert_close(parameter.grad, part * factor, rtol=1e-6, atol=0.0)  # float32


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_recursion_is_the_derivative_of_the_weights_by_every_gradient(name: str) -> None:
    """Along a recorded run the last weights are linear in all gradients: Σ_r V_r g_r, with J̄ = 1 at every step."""
    made, steps = optimizer(name, weight_decay=0.0), 5
    weights: Weights = {"w": torch.ones(3, dtype=torch.float64)}
    generator, sizes = torch.Generator().manual_seed(1), [{"w": 0.1 / (1 + step)} for step in range(steps)]
    gradients, memories, memory = [], [], cast("Memory", {})
    start = weights["w"]
    for step in range(steps):
        gradients.append(torch.randn(3, generator=generator, dtype=torch.float64))
        weights, memory = made.update(step, weights, {"w": gradients[-1]}, sizes[step], memory)
        memories.append(memory)
    bracket, total = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for step in reversed(range(steps)):
        linear = made.recursion(step, sizes[step], memories[step])["w"]
        bracket = (
            linear.momentum_scale + linear.momentum_decay * bracket
        )  # β is the same at every step but the first, before which m = 0
        total -= (linear.momentum_gain * bracket + linear.gradient_scale) * gradients[step]
    torch.testing.assert_close(start + total, weights["w"], rtol=1e-13, atol=0.0)


def test_step_sizes_differ_by_the_longest_beginning_of_a_name() -> None:
    made = GD(layers={"a": 2.0, "a.b": 3.0})
    weights = {name: torch.zeros(1) for name in ("a.c", "a.b.weight", "ab")}
    assert made.factors(weights) == {"a.c": 2.0, "a.b.weight": 3.0, "ab": 1.0}
    with pytest.raises(Mistake, match=r"optimizer\.layers: no parameter's name begins with ac; did you mean 'a\.c'\?"):
        GD(layers={"ac": 2.0}).factors(weights)


# Every schedule: factors between zero and one, after a linear warm-up.


SCHEDULES = choices("schedule")
STEPS = 50


def schedule(name: str, **changes: object) -> AbstractSchedule:
    made = configured("schedule", name, **changes)
    assert isinstance(made, AbstractSchedule)
    return made


def factors(chosen: AbstractSchedule) -> list[float]:
    return [chosen.factor(step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_start_at_one_and_never_rise(name: str) -> None:
    found = factors(schedule(name))
    assert found[0] == 1.0
    assert all(0 < after <= before for before, after in pairwise(found))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_multiplies_the_first_steps(name: str) -> None:
    plain = factors(schedule(name))
    warm = factors(schedule(name, warm_up=4))
    assert warm[:4] == [share * factor for share, factor in zip((0.2, 0.4, 0.6, 0.8), plain, strict=False)]
    assert warm[4:] == plain[4:]


def test_half_a_cosine_is_symmetric_about_its_middle() -> None:
    """(1 + cos x)/2 and (1 + cos(π − x))/2 add up to one, to rounding of numbers about one."""
    half = Cosine()
    assert all(abs(half.shape(step, STEPS) + half.shape(STEPS - step, STEPS) - 1) < 1e-15 for step in range(STEPS))
    assert Cosine(last=0.25).shape(STEPS, STEPS) == 0.25


def test_a_staircase_is_constant_between_stairs() -> None:
    found = factors(Step(every=10, decay=0.5))
    assert [found[step] for step in range(0, STEPS, 10)] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert all(found[step] == found[step - step % 10] for step in range(STEPS))


def test_a_list_is_read_as_it_stands_and_its_end_stays() -> None:
    assert factors(List(factors=(1.0, 0.5, 2.0)))[:5] == [1.0, 0.5, 2.0, 2.0, 2.0]
