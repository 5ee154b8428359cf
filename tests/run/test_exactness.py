"""The claim: the kernel machine with secants is the trained network, to rounding; the textbook sum is not."""

from __future__ import annotations

from itertools import product

import pytest

from ntkexp.records.results import Result
from tests.run.small import ran

ACTIVATIONS = ("relu", "leaky_relu", "tanh", "gelu")
LOSSES = ("squared", "cross_entropy", "logistic", "hinge")
SETTINGS = tuple(product((("optimizer=gd",), ("optimizer=sgd", "optimizer.batch=8")), ("[3,8]", "all")))
SQUARE = [  # a Latin square: every activation, loss and setting meets every other one once; in the fast half, some do
    pytest.param(activation, loss, *SETTINGS[(row + column) % len(SETTINGS)], marks=marks)
    for (row, activation), (column, loss) in product(enumerate(ACTIVATIONS), enumerate(LOSSES))
    for marks in ((pytest.mark.slow,) if (column - row) % 4 // 2 else (),)
]

VISIBLE = 1e-6  # far above rounding; the textbook sum is wrong by a few per cent at such step sizes


def exact(row: Result) -> bool:
    """The definition, written out once more: the error is no more than rounding explains, or than 1e-12."""
    assert row.relative_error is not None
    assert row.floor is not None
    return row.relative_error <= max(1e-12, row.floor)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("activation", "loss", "optimizer", "classes"), SQUARE)
def test_the_secant_sum_is_the_network_and_the_textbook_sum_is_not(
    activation: str, loss: str, optimizer: tuple[str, ...], classes: str
) -> None:
    chosen = ("steps=6", f"model.activation={activation}", f"loss={loss}", *optimizer, f"data.classes={classes}")
    run = ran(*chosen, "ladder.machine=[secant,left]")
    for row in run.rows("secant"):
        assert exact(row), f"{row.split}: {row.relative_error:.1e} with a floor of {row.floor:.1e}"
    for row in run.rows("left"):
        assert row.relative_error is not None
        assert row.relative_error > VISIBLE
    assert {row.split for row in run.rows("secant")} == {"train", "probe", "test"}
