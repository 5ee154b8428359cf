"""Gradients that cancel between calls, and sums of parts that cancel: the final check of the sum.

The last bias has no gradient under a loss that does not change when all outputs shift. Floating point leaves a rest
of size eps. Adam and its relatives divide by that size, so the bias moves by full steps. No example caused this
movement, so it belongs to `rounding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import xarray as xr
from torch import Tensor, nn, optim
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop.closing import Closing, ClosingSums
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.mistake import Mistake
from tests.foreign_loop.loops import fitted

EXAMPLES, BATCH, EPOCHS = 24, 8, 3
SUMMED = 200  # eps: nine steps, each a sum over some tens of terms, relative to the sum of their sizes

Loss: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
Optimizers: TypeAlias = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def others(inputs: Tensor, by: int) -> Tensor:
    """The partners of a batch."""
    return inputs.roll(by, dims=1)


def reward(model: nn.Module, inputs: Tensor) -> Tensor:
    margins: Tensor = model(inputs) - model(others(inputs, 1))
    return -functional.logsigmoid(margins).mean()


def triplet(model: nn.Module, inputs: Tensor) -> Tensor:
    return functional.triplet_margin_loss(model(inputs), model(others(inputs, 1)), model(others(inputs, 2)))


def siamese(model: nn.Module, inputs: Tensor) -> Tensor:
    distance: Tensor = (model(inputs) - model(others(inputs, 1))).square().sum(1)
    return (distance[::2].sum() + (1 - distance[1::2]).relu().sum()) / len(inputs)


def list_net(model: nn.Module, inputs: Tensor) -> Tensor:
    scores: Tensor = model(inputs).sum(1)
    return -(inputs[:, 0].softmax(0) * scores.log_softmax(0)).sum()


def info_nce(model: nn.Module, inputs: Tensor) -> Tensor:
    """Each row of four scores has its first one as the positive."""
    scores = model(inputs).sum(1).view(-1, 4)
    return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def cox(model: nn.Module, inputs: Tensor) -> Tensor:
    """The negative partial log-likelihood; times of death are in order."""
    risk: Tensor = model(inputs).sum(1)
    return (risk.logcumsumexp(0) - risk).mean()


LOSSES: tuple[Loss, ...] = (reward, triplet, siamese, list_net, info_nce, cox)
OPTIMIZERS: Mapping[str, Optimizers] = {
    "AdamW": lambda weights: optim.AdamW(weights, lr=0.01, weight_decay=0.0),
    "Adam": lambda weights: optim.Adam(weights, lr=0.01, amsgrad=True),
    "RMSprop": lambda weights: optim.RMSprop(weights, lr=0.003, momentum=0.5),
    "NAdam": lambda weights: optim.NAdam(weights, lr=0.01),
    "RAdam": lambda weights: optim.RAdam(weights, lr=0.01),
    "Adamax": lambda weights: optim.Adamax(weights, lr=0.01),
    "Adagrad": lambda weights: optim.Adagrad(weights, lr=0.01),
    "Adadelta": lambda weights: optim.Adadelta(weights, lr=0.5),
}


def followed(
    loss: Loss, optimizer: Optimizers, kind: torch.dtype, *, frozen: bool = False, scale: float = 1.0, **more: Any
) -> tuple[xr.Dataset, Tensor]:
    """Follow a loop. Return its attribution, and the movement of the last bias."""
    torch.manual_seed(1)
    last = nn.Linear(12, 2)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), last).to(kind)
    last.bias.requires_grad_(not frozen)
    inputs, moving = torch.randn(EXAMPLES, 6, dtype=kind), [each for each in model.parameters() if each.requires_grad]
    start = last.bias.detach().clone()
    batches = [batch for _ in range(EPOCHS) for batch in torch.split(torch.randperm(EXAMPLES), BATCH)]

    def losses(step: int) -> Tensor:
        return loss(model, inputs[batches[step]]) * scale

    def unscale(*_: object) -> None:
        torch._foreach_div_([weight.grad for weight in moving if weight.grad is not None], scale)

    steps = optimizer(moving)
    steps.register_step_pre_hook(unscale)
    trace = fitted(model, steps, losses, len(batches), queries=inputs[:3], **more)
    return trace.attribute(quiet=True), last.bias.detach() - start


def bound(found: xr.Dataset, kind: torch.dtype) -> float:
    """The possible error of sums of the parts."""
    size = abs(found["contribution"]).sum() + sum(abs(found[name]).sum() for name in ("rounding", "start", "change"))
    return SUMMED * torch.finfo(kind).eps * float(size)


PAIRS = [  # every loss with every optimizer, in both precisions by turns
    pytest.param(
        loss, OPTIMIZERS[name], (torch.float32, torch.float64)[(row + column) % 2], id=f"{loss.__name__}-{name}"
    )
    for (row, loss), (column, name) in product(enumerate(LOSSES), enumerate(OPTIMIZERS))
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("loss", "optimizer", "kind"), PAIRS)
def test_movement_of_a_bias_without_a_gradient_is_rounding(
    loss: Loss, optimizer: Optimizers, kind: torch.dtype
) -> None:
    found, moved = followed(loss, optimizer, kind)
    alone, _ = followed(loss, optimizer, kind, frozen=True)
    exact = bound(found, kind)

    # the parts add up, and the movement of the bias is rounding
    parts = found["contribution"].sum("example") + found["decay"] + found["rounding"]
    assert float(abs(parts - found["change"]).max()) <= exact
    assert float(abs(found["rounding"] - moved.double().numpy()).max()) <= exact + 1e-3 * float(moved.abs().max())

    # every example has its part of the loop with a frozen bias
    difference = abs(found["contribution"] - alone["contribution"])
    assert float(difference.max()) <= 30 * exact


def test_a_scaled_loss_leaves_the_same_contributions() -> None:
    """The rounding of gradients has the scale of the gradients that the optimizer got."""
    plain, scaled = (followed(reward, OPTIMIZERS["Adam"], torch.float64, scale=each)[0] for each in (1.0, 2.0**24))
    for name in ("contribution", "rounding"):
        assert float(abs(plain[name] - scaled[name]).max()) <= bound(plain, torch.float64)


def test_a_replay_has_the_bits_of_steps_whose_gradient_is_rounding(tmp_path: Path) -> None:
    in_memory, _ = followed(triplet, OPTIMIZERS["Adam"], torch.float32)
    stored, _ = followed(triplet, OPTIMIZERS["Adam"], torch.float32, to=tmp_path / "run")
    for name in ("contribution", "rounding"):
        xr.testing.assert_identical(in_memory[name], stored[name])


def test_the_attribution_says_how_strongly_parts_cancel(capsys: pytest.CaptureFixture[str]) -> None:
    """In plain descent the remainder moves nothing, and the parts of the bias belong to the examples."""
    found, _ = followed(reward, lambda weights: optim.SGD(weights, lr=0.1), torch.float64)
    ratio = float(abs(found["contribution"]).sum() / abs(found["contribution"].sum("example")).sum())
    assert found.attrs["cancellation"] == pytest.approx(ratio, rel=1e-12)
    assert found.attrs["sum_error"] <= found.attrs["sum_tolerance"]
    assert capsys.readouterr().err == ""  # quiet


# --- The final check.

CLOSED = Closing(missed=1e-16, tolerance=1e-13, change=2.0, cancellation=3.0, parameter="")
BIAS = r"by 0\.36 of the change, .*, mostly in '2\.bias'; train in float64, or freeze '2\.bias'"


@pytest.mark.parametrize(
    ("missed", "parameter", "said"),
    [
        (1e-13, "", None),
        *((each, "", r"contributions cancel 3 : 1; train in float64$") for each in (2e-13, 0.72, torch.nan, torch.inf)),
        (0.72, "2.bias", BIAS),
    ],
)
def test_a_sum_beyond_its_tolerance_is_refused(missed: float, parameter: str, said: str | None) -> None:
    closing = replace(CLOSED, missed=missed, parameter=parameter)
    if said is None:
        closing.refuse()
        return
    with pytest.raises(Mistake, match=rf"misses the change .*{said}"):
        closing.refuse()


def test_the_tolerance_is_at_most_a_hundredth_of_the_change() -> None:
    """However large the parts are."""
    start, end = torch.zeros(2, 1), torch.ones(2, 1)
    sums = ClosingSums.at_zero(start, torch.float64)
    sums.mass += 1e12
    closing = sums.check(torch.ones(2, 1, 3).double() / 3, end.double(), start, end)
    assert closing.tolerance < 0.011 * closing.change
    assert closing.cancellation == pytest.approx(1.0)


def test_cancelling_parts_name_their_parameter() -> None:
    """Under a loss of differences of outputs that are almost equal, both parts of a pair nearly cancel."""
    first, last, rows = nn.Linear(4, 6), nn.Linear(6, 1), torch.randn(16, 4, dtype=torch.float64)
    model = nn.Sequential(first, nn.Tanh(), last).double()
    pairs, optimizer = rows + 1e-5 * rows.roll(1, 0), optim.SGD([last.bias, first.weight], lr=0.1)
    for weight in (first.bias, last.weight):
        weight.requires_grad_(False)

    def loss(_: int) -> Tensor:
        return functional.softplus(model(pairs) - model(rows)).mean()

    found = fitted(model, optimizer, loss, 1, queries=rows[:2]).attribute(quiet=True)
    assert found.attrs["cancels_in"] == "2.bias"
    assert found.attrs["cancellation"] > 1e3


# --- Effects. At the first step outputs are zero and the labels 1 and −1 are equally many, so the gradient of the last
# bias cancels. The derivative of Adam's step there is 1/eps; without an example the bias moves by one step.


def train_balanced(kept: Tensor, effects: list[xr.Dataset] | None = None) -> Tensor:
    """Return the outputs at three queries after training on some examples; append the effects to a list."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    for weight in model[2].parameters():
        nn.init.zeros_(weight)
    labels = torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)[:, None]
    inputs = torch.randn(12, 3, dtype=torch.float64)
    inputs[:, :1] += labels
    optimizer = optim.Adam(model.parameters(), lr=0.01, eps=1e-10)

    def losses(outputs: Tensor, call: SeenCall) -> Tensor:
        (rows,) = call.args
        assert isinstance(rows, Tensor)
        return (outputs - labels[torch.cdist(rows, inputs).argmin(1)]).square().squeeze(1)

    with ntkexp.follow(model, optimizer, queries=inputs[:3], loss=losses) as trace:
        for _ in range(15):
            optimizer.zero_grad()
            (model(inputs[kept]) - labels[kept]).square().mean().backward()
            optimizer.step()
    if effects is not None:
        effects.append(trace.attribute(effects=True, quiet=True))
    outputs: Tensor = model(inputs[:3]).detach()
    return outputs


def test_effects_leave_out_gradients_that_are_rounding() -> None:
    """They predict trainings without each example. With such gradients they were 10⁸ times too large."""
    everyone, effects = torch.arange(12), list[xr.Dataset]()
    whole = train_balanced(everyone, effects)
    actual = torch.stack([train_balanced(everyone[everyone != k]) - whole for k in range(12)], dim=-1)
    predicted = torch.from_numpy(effects[0]["effect"].to_numpy())
    correlation = torch.corrcoef(torch.stack([actual.flatten(), predicted.flatten()]))[0, 1]
    assert correlation > 0.8
    assert predicted.abs().max() < 3 * actual.abs().max()
