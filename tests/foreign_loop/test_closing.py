"""The final check: parts that do not add up are refused, and strong cancellation is reported with its parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop.closing import Closing, ClosingSums
from ntkexp.mistake import Mistake

CLOSED = Closing(missed=1e-16, tolerance=1e-13, change=2.0, cancellation=3.0, parameter="")


def test_a_sum_within_its_tolerance_passes() -> None:
    CLOSED.refuse()
    replace(CLOSED, missed=CLOSED.tolerance).refuse()


@pytest.mark.parametrize("missed", [2e-13, 0.72, float("nan"), float("inf")])
def test_a_sum_beyond_it_is_refused(missed: float) -> None:
    with pytest.raises(Mistake, match=r"miss the change .* contributions cancel 3 : 1; train in float64$"):
        replace(CLOSED, missed=missed).refuse()


def test_the_refusal_names_the_parameter_that_cancels() -> None:
    with pytest.raises(
        Mistake, match=r"by 0\.36 of it, .*, mostly in '2\.bias'; train in float64, or freeze '2\.bias'"
    ):
        replace(CLOSED, missed=0.72, parameter="2.bias").refuse()


def test_rounding_of_parts_counts_for_a_hundredth_of_the_change_at_most() -> None:
    """However large the parts are, a sum that misses by more is refused."""
    start, end = torch.zeros(2, 1), torch.ones(2, 1)
    sums = ClosingSums.at_zero(start, torch.float64)
    sums.mass += 1e12
    closing = sums.check(torch.ones(2, 1, 3).double() / 3, end.double(), start, end)
    assert closing.tolerance < 0.011 * closing.change
    assert closing.cancellation == pytest.approx(1.0)


def test_cancelling_parts_name_their_parameter() -> None:
    """Under a loss of differences of outputs that are almost equal, both parts of a pair nearly cancel."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        first, last = nn.Linear(4, 6), nn.Linear(6, 1)
        model = nn.Sequential(first, nn.Tanh(), last).double()
        rows = torch.randn(16, 4, dtype=torch.float64)
    pairs = rows + 1e-5 * rows.roll(1, 0)
    optimizer = torch.optim.SGD([last.bias, first.weight], lr=0.1)
    for weight in (first.bias, last.weight):
        weight.requires_grad_(False)
    with ntkexp.follow(model, optimizer, queries=rows[:2]) as trace:
        optimizer.zero_grad()
        functional.softplus(model(pairs) - model(rows)).mean().backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
    found = trace.attribute(quiet=True)
    assert found.attrs["cancels_in"] == "2.bias"
    assert found.attrs["cancellation"] > 1e3
