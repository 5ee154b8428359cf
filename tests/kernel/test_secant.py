"""The secant kernel: exact for one step of gradient descent, however long, and the tangent at length zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.reader import Reading
from ntkexp.kernel.secant.call import Call, Result
from ntkexp.kernel.secant.rules import RULES
from ntkexp.kernel.secant.rules.linear import warn_of_padding
from ntkexp.kernel.secant.segment import closure, closure_remark
from ntkexp.library import reader_of, secant_kernel
from ntkexp.mistake import Mistake
from tests.kernel.networks import scaled
from tests.kernel.oracle import EPS, agree, applied, refused
from tests.kernel.problems import READ, Known, Step, known, problem

ROUNDING = 300  # times eps, relative to the sizes of f and of the terms that sum to its change
SIZES = (1e-8, 1e-4, 0.3, 3.0)

BROKEN = ("relu", "leaky_relu", "max pooling", "branching", "learned slopes", "two heads", "tied embedding")
"""Networks with kinks and choices, which a longer step crosses."""


def assert_closed(step: Step, eps: float = EPS) -> None:
    """The push and J̄Δθ are Δf. The library warns at an error that is ten times larger."""
    agree(step.reading.jvp, step.change, ROUNDING * eps, step.scale)
    agree(applied(step.reading.jacobian, step.weights), step.change, ROUNDING * eps, step.scale)
    found = closure(step.reading.jvp, step.start, step.end)
    assert found.holds
    assert found.error < found.bound / 10


@pytest.mark.sample(30)
@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in READ for size in (SIZES if name in BROKEN else (1e-8, 3.0))]
)
def test_the_push_and_the_reverse_close(name: str, size: float) -> None:
    assert_closed(known(name).step(size))


SINGLE = ("relu", "tanh", "gelu", "called twice", "convolution", "layer norm", "softmax", "attention", "swiglu")


@pytest.mark.parametrize("size", [1e-6, 0.3])
@pytest.mark.parametrize("name", SINGLE)
def test_they_close_in_single_precision(name: str, size: float) -> None:
    assert_closed(known(name, torch.float32).step(size), torch.finfo(torch.float32).eps)


def test_the_push_includes_the_change_by_frozen_parameters() -> None:
    given = problem("gelu", seed=4)
    next(iter(given.module.parameters())).requires_grad_(False)
    step = Known(given).step(0.5)
    agree(step.reading.jvp, step.change, ROUNDING * EPS, step.scale)


def test_weights_that_are_not_named_are_the_modules_own() -> None:
    given = problem("silu", seed=5)
    some = {"0.weight": given.end(0.5)["0.weight"]}
    expected = secant_kernel(given.module, given.start, given.start | some, given.x, given.x)
    assert torch.equal(secant_kernel(given.module, {}, some, given.x, given.x), expected)


def test_a_softmax_over_many_classes_closes() -> None:
    """More numbers than stay in the cache of a core are read a few rows at a time."""
    h0, v = torch.randn(2, 5, 60_001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Sequential(nn.Softmax(1), nn.Linear(60_001, 1, bias=False))
    reader, own = reader_of(ParametrisedBy(net, h0).double())
    start, end = (reader.record(own | {"h": h}, torch.arange(5)) for h in (h0, h0 + v))
    agree(reader.secant(start, end).jvp, end.outputs - start.outputs, ROUNDING * EPS, 1.0)


class ParametrisedBy(nn.Module):
    """A network whose inputs are rows of a parameter."""

    def __init__(self, net: nn.Module, h: Tensor) -> None:
        super().__init__()
        self.net, self.h = net, nn.Parameter(h)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.net(self.h[rows])
        return outputs


def test_a_row_of_padding_that_a_tied_readout_moves_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The secant closes, or `secant_kernel` would warn. Autograd's gradients leave the row out."""
    table, read = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 7, bias=False)
    read.weight = table.weight
    net = nn.Sequential(table, nn.Flatten(), nn.Linear(8, 4), read).double()
    start = scaled(net, 1.0)
    end = {name: 1.1 * weight + 0.1 for name, weight in start.items()}
    padded, others = torch.tensor([[1, 0], [0, 4]]), torch.tensor([[1, 2], [3, 4]])
    warn_of_padding.cache_clear()
    for queries, reported in ((others, False), (padded, True)):
        assert secant_kernel(net, start, end, queries, others).isfinite().all()
        assert ("padding row" in caplog.text) == reported


# A secant that does not close to a multiple of the rounding of f is refused.


@pytest.mark.parametrize("name", ["relu", "gelu", "softmax", "lstm"])
def test_a_push_that_leaves_something_out_does_not_close(name: str) -> None:
    """A billionth of the change in a step of ordinary size is more than rounding."""
    step = known(name).step(0.3)
    assert not closure((1 - 1e-9) * step.reading.jvp, step.start, step.end).holds
    assert not closure(torch.full_like(step.change, float("nan")), step.start, step.end).holds


@pytest.mark.parametrize(("size", "raises"), [(1e-3, True), (1e-10, False)])
def test_a_rule_that_is_wrong_along_a_step_is_refused_or_warned_of(
    size: float, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of its error decides. At a point the rule is right, as the check against autograd would see."""
    right = RULES["tanh"]

    def wrong(call: Call) -> Result:
        found = right(call)
        assert isinstance(found, Tensor)
        return found if call.is_point else (1 + size) * found

    monkeypatch.setitem(RULES, "tanh", wrong)
    given = problem("tanh")
    words = "the secant misses the change of the outputs by .* where rounding explains"
    with pytest.raises(Mistake, match=words) if raises else pytest.warns(UserWarning, match=words):
        secant_kernel(given.module, {}, given.end(0.3), given.x, given.x)


def test_features_of_other_examples_are_refused() -> None:
    """The push knows no owners of rows, and closes; the Jacobian does not."""
    network = known("tanh")
    step, found = network.step(0.3), network.step(0.3).reading.jacobian
    factored = [block for block in found.blocks if isinstance(block, Factored)]
    assert len(factored) == len(found.blocks)
    flipped = tuple(replace(block, outputs=block.outputs.flip(0)) for block in factored)
    wrong = Reading(Jacobian(flipped, found.examples, found.outputs), step.reading.jvp)
    pushed, read = network.reader.closures(wrong, step.start, step.end)
    assert pushed.holds
    with refused("its kernel would be wrong"):
        closure_remark([pushed, read], EPS)


def test_a_secant_to_where_outputs_are_no_numbers_is_refused() -> None:
    given = problem("tanh")
    with refused("are the outputs finite at both ends"):
        secant_kernel(given.module, {}, scaled(given.module, torch.inf), given.x, given.x)
