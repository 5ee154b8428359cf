"""The claim: the kernel machine with secants is the trained network, to rounding; the textbook sum is not."""

from __future__ import annotations

import pytest

from ntkexp.records.results import Result
from tests.run.small import ran

ACTIVATIONS = ("relu", "leaky_relu", "tanh", "gelu")
LOSSES = ("squared", "cross_entropy", "logistic", "hinge")
OPTIMIZERS = (("optimizer=gd",), ("optimizer=sgd", "optimizer.batch=8"))
CLASSES = ("data.classes=[3,8]", "data.classes=all")

VISIBLE = 1e-6  # far above rounding; the textbook sum is wrong by a few per cent at such step sizes


def exact(row: Result) -> bool:
    """The definition, written out once more: the error is no more than rounding explains, or than 1e-12."""
    assert row.relative_error is not None
    assert row.floor is not None
    return row.relative_error <= max(1e-12, row.floor)


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda overrides: overrides[0])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_secant_sum_is_the_network_and_the_textbook_sum_is_not(
    activation: str, loss: str, optimizer: tuple[str, ...], classes: str
) -> None:
    run = ran(f"model.activation={activation}", f"loss={loss}", *optimizer, classes, "ladder.machine=[secant,left]")
    for row in run.rows("secant"):
        assert exact(row), f"{row.split}: {row.relative_error:.1e} with a floor of {row.floor:.1e}"
    for row in run.rows("left"):
        assert row.relative_error is not None
        assert row.relative_error > VISIBLE
    assert {row.split for row in run.rows("secant")} == {"train", "probe", "test"}
