"""Modules that compute in single precision inside."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.record.casts import with_casts
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel import oracle
from tests.kernel.compare import agree
from tests.kernel.problems import Problem, problem

DOUBLE, SINGLE = (torch.finfo(kind).eps for kind in (torch.float64, torch.float32))


class Cast(nn.Module):
    """A norm in single precision, with sums and constants that are told to be in it."""

    def __init__(self, shorter: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 2)
        self.kind = torch.float32 if shorter else torch.float64

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).to(self.kind)
        h = h * torch.rsqrt(h.square().mean(1, keepdim=True, dtype=self.kind) + 1e-3)
        h = h * torch.arange(1, 7, dtype=self.kind) + torch.softmax(h, 1, dtype=self.kind)
        outputs: Tensor = self.outer(h.to(x.dtype))
        return outputs


def cast(shorter: bool = True) -> Problem:
    """With random weights, the same for both."""
    generator = torch.Generator().manual_seed(0)
    made = Cast(shorter).double()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return Problem(made, torch.randn(5, 4, generator=generator, dtype=torch.float64), generator)


def test_without_casts_a_module_is_the_one_that_has_none() -> None:
    """Kept, they cost what rounding to single precision does."""
    expected = oracle.tangent(cast(False).module, cast().x, cast().x)
    with pytest.warns(UserWarning, match=r"without its casts.*moves its outputs by \de-0[6789]"):
        agree(tangent_kernel(cast().module, cast().x, casts="ignore"), expected, 100 * DOUBLE)
    kept = tangent_kernel(cast().module, cast().x)
    agree(kept, expected, 100 * SINGLE)
    assert (kept - expected).abs().max() > 100 * DOUBLE * expected.abs().max()


class Scaled(nn.Module):
    """A gain as long as the weights, beside numbers that were cast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.inner(x).float() * self.gain
        return outputs


def test_a_gain_is_longer_than_what_it_multiplies() -> None:
    module, x = Scaled().double(), cast().x
    agree(tangent_kernel(module, x), oracle.tangent(module, x, x), 100 * SINGLE)


def test_without_casts_a_step_closes_to_double_precision() -> None:
    given = cast()
    end = given.end(0.3)
    errors = {}
    for casts in ("keep", "ignore"):
        reader, own = reader_of(given.module, casts=casts)
        start, after = reader.record(own, given.x), reader.record(end, given.x)
        errors[casts] = (reader.secant(start, after).push - (after.outputs - start.outputs)).abs().max()
        assert start.eps == {"keep": SINGLE, "ignore": DOUBLE}[casts]
    size = given.module(given.x).detach().abs().max()
    assert errors["ignore"] < 300 * DOUBLE * size
    assert 300 * DOUBLE * size < errors["keep"] < 300 * SINGLE * size


def test_casts_that_are_kept_are_warned_of_where_they_cost() -> None:
    given = cast()
    with pytest.warns(UserWarning, match=r"a secant closes to 1e-07 of its outputs; casts=ignore"):
        secant_kernel(given.module, {}, given.end(0.1), given.x, given.x)


def test_a_module_without_casts_is_the_same_either_way() -> None:
    given = problem("tanh")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = secant_kernel(given.module, {}, {}, given.x, given.x)
        assert torch.equal(secant_kernel(given.module, {}, {}, given.x, given.x, casts="ignore"), kept)


def test_another_word_is_refused() -> None:
    with pytest.raises(Mistake, match="casts='drop': give 'keep' or 'ignore'"):
        with_casts(lambda weights, inputs: torch.zeros(1), "drop")  # type: ignore[arg-type]  # as a user may
