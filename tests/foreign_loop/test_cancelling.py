"""Gradients that cancel between calls: the last bias under a loss that does not change when all outputs shift.

Its gradient is zero, and floating point leaves a remainder of size eps. Adam and its relatives divide by that size, so
the bias moves by full steps. No example caused this movement, so it must stand in `rounding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop.example_names import SeenCall

EXAMPLES, BATCH, EPOCHS = 24, 8, 3
SUMMED = 200  # eps: nine steps, each a sum over some tens of terms, relative to the sum of their sizes

Loss: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
Optimizers: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


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
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.0),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.01, amsgrad=True),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=0.003, momentum=0.5),
    "NAdam": lambda weights: torch.optim.NAdam(weights, lr=0.01),
    "RAdam": lambda weights: torch.optim.RAdam(weights, lr=0.01),
    "Adamax": lambda weights: torch.optim.Adamax(weights, lr=0.01),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.01),
    "Adadelta": lambda weights: torch.optim.Adadelta(weights, lr=0.5),
}
KINDS = (torch.float32, torch.float64)


def followed(
    loss: Loss, optimizer: Optimizers, kind: torch.dtype, *, frozen: bool, to: Path | None = None
) -> tuple[xr.Dataset, Tensor]:
    """Follow a loop; its attribution, and how far the last bias moved."""
    torch.manual_seed(1)
    last = nn.Linear(12, 2)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), last).to(kind)
    last.bias.requires_grad_(not frozen)
    inputs = torch.randn(EXAMPLES, 6, dtype=kind)
    moving = optimizer(weight for weight in model.parameters() if weight.requires_grad)
    before = last.bias.detach().clone()
    with ntkexp.follow(model, moving, queries=inputs[:3], to=None if to is None else str(to)) as trace:
        for _ in range(EPOCHS):
            for batch in torch.split(torch.randperm(EXAMPLES), BATCH):
                moving.zero_grad()
                loss(model, inputs[batch]).backward()  # type: ignore[no-untyped-call]  # torch's own
                moving.step()
    return trace.attribute(quiet=True), last.bias.detach() - before


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """What a test seeds ends with it."""
    with torch.random.fork_rng(devices=()):
        yield


def bound(found: xr.Dataset, kind: torch.dtype) -> float:
    """How far sums of the parts may be off."""
    size = abs(found["contribution"]).sum() + sum(abs(found[name]).sum() for name in ("rounding", "start", "change"))
    return SUMMED * torch.finfo(kind).eps * float(size)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_movement_of_a_bias_that_no_loss_sees_is_rounding(loss: Loss, optimizer: Optimizers, kind: torch.dtype) -> None:
    found, moved = followed(loss, optimizer, kind, frozen=False)
    alone, _ = followed(loss, optimizer, kind, frozen=True)
    exact = bound(found, kind)

    # the parts add up, and what the bias did is rounding
    parts = found["contribution"].sum("example") + found["decay"] + found["rounding"]
    assert float(abs(parts - found["change"]).max()) <= exact
    assert float(abs(found["rounding"] - moved.double().numpy()).max()) <= exact + 1e-3 * float(moved.abs().max())

    # every example has the part that it has in the loop whose bias stays where it is
    difference = abs(found["contribution"] - alone["contribution"])
    assert float(difference.max()) <= 30 * exact


def test_a_replay_reproduces_steps_whose_gradient_is_rounding(tmp_path: Path) -> None:
    """Steps between checkpoints are taken again: from memory and from disk, a remainder of the same bits."""
    in_memory, _ = followed(triplet, OPTIMIZERS["Adam"], torch.float32, frozen=False)
    stored, _ = followed(triplet, OPTIMIZERS["Adam"], torch.float32, frozen=False, to=tmp_path / "run")
    xr.testing.assert_identical(in_memory["contribution"], stored["contribution"])
    xr.testing.assert_identical(in_memory["rounding"], stored["rounding"])


def test_the_attribution_says_how_strongly_parts_cancel(capsys: pytest.CaptureFixture[str]) -> None:
    """Of plain descent the remainder moves nothing, and the parts of the bias are those of the examples."""
    found, _ = followed(reward, lambda weights: torch.optim.SGD(weights, lr=0.1), torch.float64, frozen=False)
    ratio = float(abs(found["contribution"]).sum() / abs(found["contribution"].sum("example")).sum())
    assert found.attrs["cancellation"] == pytest.approx(ratio, rel=1e-12)
    assert found.attrs["sum_error"] <= found.attrs["sum_tolerance"]
    assert capsys.readouterr().err == ""  # quiet


# --- Effects. At the first step outputs are zero and as many labels are 1 as −1, so the gradient of the last bias
# cancels. The derivative of Adam's step there is 1/eps; the bias of a training without an example moves by one step.


def balanced_loop() -> tuple[nn.Module, Tensor, Tensor]:
    """A network whose outputs are zero at first, inputs, and balanced labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    for weight in model[2].parameters():
        nn.init.zeros_(weight)
    labels = torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)[:, None]
    inputs = torch.randn(12, 3, dtype=torch.float64)
    inputs[:, :1] += labels
    return model, inputs, labels


def train_balanced(kept: Tensor, effects: list[xr.Dataset] | None = None) -> Tensor:
    """Return the outputs at three queries after training on some examples; append the effects if asked to."""
    model, inputs, labels = balanced_loop()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-10)

    def losses(outputs: Tensor, call: SeenCall) -> Tensor:
        (rows,) = call.args
        assert isinstance(rows, Tensor)
        places = torch.cdist(rows, inputs).argmin(1)
        return (outputs - labels[places]).square().squeeze(1)

    def steps() -> None:
        for _ in range(15):
            optimizer.zero_grad()
            (model(inputs[kept]) - labels[kept]).square().mean().backward()
            optimizer.step()

    if effects is None:
        steps()
    else:
        with ntkexp.follow(model, optimizer, queries=inputs[:3], loss=losses) as trace:
            steps()
        effects.append(trace.attribute(effects=True, quiet=True))
    outputs: Tensor = model(inputs[:3]).detach()
    return outputs


def test_effects_leave_out_gradients_that_are_rounding() -> None:
    """They predict trainings without each example; before, they were 10⁸ times too large."""
    everyone = torch.arange(12)
    effects = list[xr.Dataset]()
    whole = train_balanced(everyone, effects)
    (found,) = effects
    changes = [train_balanced(everyone[everyone != k]) - whole for k in range(12)]
    actual = torch.stack(changes, dim=-1)
    predicted = torch.from_numpy(found["effect"].to_numpy())
    correlation = torch.corrcoef(torch.stack([actual.flatten(), predicted.flatten()]))[0, 1]
    assert correlation > 0.8
    assert predicted.abs().max() < 3 * actual.abs().max()
