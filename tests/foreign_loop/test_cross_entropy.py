"""Traces store targets and weights in place of the large gradients of a cross-entropy, and lose no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop.cross_entropy import Logits
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.mistake import Mistake
from ntkexp.report.scores import Attribution

WORDS, LENGTH, TEXTS = 128, 32, 40
BATCH_BYTES = TEXTS * LENGTH * WORDS * 8

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
    return plain(outputs, targets.where(targets % 3 > 0, -100))


def of_some_positions(outputs: Tensor, targets: Tensor) -> Tensor:
    return plain(outputs[:, :-1], targets[:, 1:])


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, WORDS, dtype=outputs.dtype)
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), weight=weight)


def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.log_softmax(-1).gather(-1, targets[..., None]).mean()


def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
    return 2.0**16 * plain(outputs, targets)


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def ascending(outputs: Tensor, targets: Tensor) -> Tensor:
    return -plain(outputs, targets)


def with_penalty(outputs: Tensor, targets: Tensor) -> Tensor:
    return plain(outputs, targets) + 1e-6 * outputs.square().mean()


COMPACT = (plain, ignoring, of_some_positions, weighted, by_hand, scaled)
WHOLE = (smooth, ascending, with_penalty)


@pytest.mark.parametrize("spread", [1.0, 1000.0], ids=["uncertain", "certain"])  # 1000: most probabilities are 0 or 1
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("loss", [*COMPACT, *WHOLE])
def test_targets_and_weights_give_every_bit_or_are_not_used(loss: Loss, dtype: torch.dtype, spread: float) -> None:
    outputs = (spread * torch.randn(2 * TEXTS, LENGTH, WORDS)).to(dtype).requires_grad_()
    held = Logits.of(outputs)
    assert held is not None
    (gradient,) = torch.autograd.grad(loss(outputs, torch.randint(WORDS, outputs.shape[:2])), outputs)
    found = held.compressed(gradient)
    assert (found is not None) == (loss in COMPACT)
    assert found is None or torch.equal(found.at(outputs), gradient)


class Backwards(DispatchMode):
    """Counts the gradients of `log_softmax`."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._log_softmax_backward_data.default
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("loss", [smooth, with_penalty])
def test_other_losses_are_recognised_by_one_comparison(loss: Loss, spread: float) -> None:
    outputs = (spread * torch.randn(TEXTS, LENGTH, WORDS).double()).requires_grad_()
    held = Logits.of(outputs)
    assert held is not None
    (gradient,) = torch.autograd.grad(loss(outputs, torch.randint(WORDS, outputs.shape[:2])), outputs)
    with Backwards() as backwards:
        assert held.compressed(gradient) is None
    assert backwards.count == 1


def test_a_single_other_bit_is_not_lost() -> None:
    outputs = torch.randn(TEXTS, LENGTH, WORDS).double().requires_grad_()
    held = Logits.of(outputs)
    assert held is not None
    (gradient,) = torch.autograd.grad(plain(outputs, torch.randint(WORDS, outputs.shape[:2])), outputs)
    gradient[-1, -1, -1] = torch.nextafter(gradient[-1, -1, -1], torch.tensor(1.0).double())
    assert held.compressed(gradient) is None


def test_small_and_short_outputs_are_left_alone() -> None:
    assert Logits.of(torch.ones(2, WORDS)) is None
    assert Logits.of(torch.ones(2**20, 10)) is None
    assert Logits.of(torch.ones(TEXTS, LENGTH, 4 * WORDS, dtype=torch.bfloat16)) is None


# --- Followed loops.


class Model(nn.Module):
    """A language model without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.words, self.readout = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.readout(self.words(x).tanh()) / self.temperature
        return result


Way: TypeAlias = Callable[[Model, Tensor, Tensor], None]


def loss_of_each(outputs: Tensor, call: SeenCall) -> Tensor:
    """The mean loss of each text."""
    (texts,) = call.args
    assert isinstance(texts, Tensor)
    each = functional.cross_entropy(outputs[:, :-1].flatten(0, 1), texts[:, 1:].flatten(), reduction="none")
    return each.view(len(texts), -1).mean(1)


def once(model: Model, outputs: Tensor, targets: Tensor) -> None:
    of_some_positions(outputs, targets).backward()  # type: ignore[no-untyped-call]


def twice(model: Model, outputs: Tensor, targets: Tensor) -> None:
    (0.5 * of_some_positions(outputs, targets)).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    once(model, outputs, targets)


def without(way: Way) -> Way:
    """Write to the outputs before the backward pass, which leaves their values and the gradient, but is no longer
    certain to."""

    def act(model: Model, outputs: Tensor, targets: Tensor) -> None:
        copied = outputs.clone()
        outputs.detach().mul_(1.0)
        way(model, copied, targets)

    return act


def follow(
    way: Way, out: Path | None = None, loss: Callable[[Tensor, SeenCall], Tensor] | None = None, **options: Any
) -> tuple[Attribution, int]:
    """Return the attribution, and the bytes of the stored steps."""
    torch.manual_seed(0)
    model, texts = Model().double(), torch.randint(WORDS, (3, TEXTS, LENGTH + 1))
    asked = texts[0, :2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    with ntkexp.follow(model, optimizer, queries=asked, measure=loss_of_each, to=out, loss=loss) as trace:
        for batch in texts:
            optimizer.zero_grad()
            way(model, model(batch), batch)
            optimizer.step()
    size = 0 if out is None else (out / "trace" / "steps.log").stat().st_size
    return trace.attribute(quiet=True, **options), size


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("options", [{}, {"positions": True}], ids=["texts", "positions"])
@pytest.mark.parametrize("way", [once, twice])
@pytest.mark.sample(4)
def test_contributions_have_the_same_bits(way: Way, options: dict[str, Any], on_disk: bool, tmp_path: Path) -> None:
    found, size = follow(way, tmp_path / "compact" if on_disk else None, **options)
    other, whole_size = follow(without(way), tmp_path / "whole" if on_disk else None, **options)
    assert found.equals(other)
    if on_disk:
        assert whole_size > 3 * BATCH_BYTES
        assert (size < BATCH_BYTES) == (way is once)


def test_effects_are_those_of_the_whole_gradient() -> None:
    found, _ = follow(once, loss=loss_of_each, effects=True)
    other, _ = follow(without(once), loss=loss_of_each, effects=True)
    assert found.equals(other)


def test_other_outputs_are_refused_by_their_step() -> None:
    def warmer(model: Model, outputs: Tensor, targets: Tensor) -> None:
        once(model, outputs, targets)
        model.temperature *= 1.5

    with pytest.raises(Mistake, match=r"^step 1: at the same weights, the model returned other outputs"):
        follow(warmer)


def test_other_labels_of_equal_inputs_are_reported() -> None:
    x, y = torch.randn(1024, 3).double(), torch.randint(WORDS, (1024,))
    x[1], y[1] = x[0], (y[0] + 1) % WORDS
    model = nn.Linear(3, WORDS).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ntkexp.follow(model, optimizer, queries=x[:1], output=None) as trace:
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert "1 example with different ∂L/∂f (other labels?): #0" in trace.attribute(quiet=True).attrs["equal_inputs"]
