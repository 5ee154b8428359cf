"""The error bar's estimator ‖Σ_s e_s‖² from a sample of steps, on errors that are made up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkexp.path.forward_sum import ErrorBar

STEPS, DRAWS = 30, 4000


def estimate(errors: Tensor, every: int) -> float:
    """What the error bar says when it sees the errors [step, probe, out, train] of its sample."""
    bar = ErrorBar(rule="secant", coarse=(), fine=(), gain=1.0, every=every, total=torch.zeros_like(errors[0]))
    sample = errors[[step for step in range(len(errors)) if bar.measures(step)]]
    bar.restore({"total": sample.sum(0), "squares": sample.square().sum()})
    return bar.estimate(len(errors))


def made_up(drift: float) -> Tensor:
    """Independent errors around a common one: they add up, or cancel, as the drift is large or zero."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(STEPS, 5, 1, 40, generator=generator, dtype=torch.float64)
    return noise + drift * torch.randn(5, 1, 40, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("drift", [0.0, 0.3, 3.0])
def test_it_is_exact_when_every_step_is_measured(drift: float) -> None:
    errors = made_up(drift)
    assert estimate(errors, every=1) == pytest.approx(float(errors.sum(0).norm()), rel=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("every", [2, 5, 10])
@pytest.mark.parametrize("drift", [0.3, 3.0])
def test_its_square_is_unbiased_over_the_order_of_the_errors(drift: float, every: int) -> None:
    errors, generator = made_up(drift), torch.Generator().manual_seed(1)
    orders = (torch.randperm(STEPS, generator=generator) for _ in range(DRAWS))
    squares = torch.tensor([estimate(errors[order], every) ** 2 for order in orders], dtype=torch.float64)
    deviation = float(squares.std()) / DRAWS**0.5
    assert abs(float(squares.mean()) - float(errors.sum(0).square().sum())) < 4 * deviation  # 1 in 10,000 by chance


@pytest.mark.parametrize("every", [2, 5, 10])
def test_it_never_says_less_than_a_measured_step_does(every: int) -> None:
    errors = made_up(0.0)
    errors[1::2] = -errors[::2]  # neighbours cancel
    assert estimate(errors, every) > 0


def test_a_single_measured_step_stands_for_all() -> None:
    errors = made_up(0.0)[:1].repeat(STEPS, 1, 1, 1)
    assert estimate(errors, every=STEPS) == pytest.approx(float(errors.sum(0).norm()), rel=1e-12)


def test_without_a_measured_step_nothing_is_known() -> None:
    assert torch.tensor(estimate(made_up(0.0)[:2], every=10)).isnan()
