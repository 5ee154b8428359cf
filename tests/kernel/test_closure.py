"""A secant closes to a multiple of the rounding of f, and one that does not is found out."""

from __future__ import annotations

import pytest
import torch

from ntkexp.kernel.closure import closure
from ntkexp.library import reader_of
from tests.kernel.problems import READ, problem

SINGLE = ("relu", "gelu", "called twice", "convolution", "layer norm", "softmax", "attention", "swiglu")


@pytest.mark.parametrize("size", [1e-6, 0.3])
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in READ), *((name, torch.float32) for name in SINGLE)]
)
def test_every_network_closes_well_within_the_bound(name: str, dtype: torch.dtype, size: float) -> None:
    given = problem(name, dtype=dtype)
    reader, own = reader_of(given.module)
    start, end = reader.record(own, given.x), reader.record(given.end(size), given.x)
    found = closure(reader.secant(start, end).push, start, end)
    assert found.holds
    assert found.error < found.bound / 10


@pytest.mark.parametrize("name", ["relu", "gelu", "softmax", "lstm"])
def test_a_push_that_leaves_something_out_does_not_close(name: str) -> None:
    """A thousandth of a millionth of a step of ordinary size is more than rounding."""
    given = problem(name)
    reader, own = reader_of(given.module)
    start, end = reader.record(own, given.x), reader.record(given.end(0.3), given.x)
    assert not closure((1 - 1e-9) * reader.secant(start, end).push, start, end).holds


def test_what_is_no_number_does_not_close() -> None:
    given = problem("tanh")
    reader, own = reader_of(given.module)
    tape = reader.record(own, given.x)
    assert not closure(torch.full_like(tape.outputs, float("nan")), tape, tape).holds
