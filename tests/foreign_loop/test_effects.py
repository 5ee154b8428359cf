"""Effects of loops that somebody else wrote, against the same loops with other weights of the examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ntkexp.foreign_loop.model_call import digests
from ntkexp.foreign_loop.seen_call import SeenCall
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from tests.foreign_loop import bugs, loops
from tests.foreign_loop.loops import EXAMPLES, STEPS, Body, Loop, batches, followed, loop

WIDTH = 1e-5  # of central differences, which Adam's ε wants small
TOLERANCE = 1e-6


@dataclass
class WeightedLoop(Loop):
    """A loop whose means are by weights of the examples."""

    weights: Tensor = field(default_factory=lambda: torch.ones(EXAMPLES, dtype=torch.float64))

    def back(self, batch: Tensor, divisor: float = 1.0) -> None:
        losses = nn.functional.cross_entropy(self.model(self.x[batch]), self.y[batch], reduction="none")
        weights = self.weights[batch]
        whole = weights.sum().clamp(min=1e-9)  # a mean of nothing is zero
        (losses @ weights / whole / divisor).backward()  # type: ignore[no-untyped-call]


def loss_of(given: Loop) -> Any:
    """The loss of each example, whose label is known by what the example holds."""
    labels = dict(zip(digests(given.x), given.y.tolist(), strict=True))

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        wanted = torch.tensor([labels[name] for name in call.ids])
        return 7 * nn.functional.cross_entropy(outputs, wanted, reduction="none")

    return loss


def effects(given: Loop, body: Body, **more: Any) -> Tensor:
    """By the sweep, [probe, out, example] in the order of the data."""
    dataset = followed(given, body, loss=loss_of(given), **more).attribute(effects="derivative")
    order = [dataset["example"].to_numpy().tolist().index(name) for name in digests(given.x)]
    return torch.from_numpy(dataset["effect"].to_numpy()[:, :, order])


def trained_with(optimizers: loops.Maker, body: Body, weights: Tensor) -> Tensor:
    """The outputs at the queries after the same loop with these weights."""
    given = WeightedLoop(**vars(loop(optimizers)), weights=weights)
    for given.done, batch in zip(range(STEPS), batches()):  # noqa: B905  there is no last batch
        body(given, batch)
    with torch.no_grad():
        found: Tensor = given.model(given.queries)
    return found


def differences(optimizers: loops.Maker, body: Body, example: int) -> Tensor:
    """−∂f/∂w of one example."""
    weights = torch.ones(EXAMPLES, dtype=torch.float64).repeat(2, 1)
    weights[:, example] += torch.tensor([WIDTH, -WIDTH])
    up, down = (trained_with(optimizers, body, each) for each in weights)
    return (down - up) / (2 * WIDTH)


CASES = (
    (loops.momentum, loops.scheduled_and_clipped),
    (loops.nesterov, loops.accumulated),
    (loops.adamw, loops.scheduled_and_clipped),
    (loops.adam, loops.accumulated),
    (loops.several, loops.scheduled_and_clipped),
    (loops.momentum, loops.with_a_scaler),
    (loops.adamw, bugs.frozen_half_way),
)


@pytest.mark.parametrize(
    ("optimizers", "body"),
    [pytest.param(*case, marks=() if case == CASES[4] else pytest.mark.slow) for case in CASES],
    ids=lambda part: part.__name__,
)
def test_effects_are_the_derivative_of_the_loop(optimizers: loops.Maker, body: Body) -> None:
    found = effects(loop(optimizers), body)
    for example in (0, 5, 11):
        expected = differences(optimizers, body, example)
        assert (found[:, :, example] - expected).abs().max() < TOLERANCE * found.abs().max()


@pytest.mark.slow
def test_a_trace_on_disk_has_the_same_effects(tmp_path: Path) -> None:
    kept = effects(loop(loops.adam), loops.accumulated, to=tmp_path / "trace", every=3)
    held = effects(loop(loops.adam), loops.accumulated)
    assert (kept - held).abs().max() < 1e-12 * held.abs().max()  # steps are replayed to rounding


def test_a_loss_that_was_not_trained_with_is_refused() -> None:
    given = loop(loops.sgd)

    def wrong(outputs: Tensor, call: SeenCall) -> Tensor:
        return outputs.square().sum(1)

    trace = followed(given, loops.plain, loss=wrong)
    with pytest.raises(Mistake, match="step 7: loss= is not the loss that was trained with"):
        trace.attribute(effects=True)


def test_without_a_loss_nothing_is_guessed() -> None:
    with pytest.raises(Mistake, match=r"effects=True: .*loss="):
        followed(loop(loops.sgd), loops.plain).attribute(effects=True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (bugs.clipped_in_part, "multiplied with other factors"),
        (bugs.normalised, "and does not clip"),
        (bugs.never_zeroed, "effects do not know"),
    ],
)
def test_what_effects_do_not_know_is_refused(body: Body, said: str) -> None:
    given = loop(loops.momentum)
    trace: Trace = followed(given, body, loss=loss_of(given))
    with pytest.raises(Mistake, match=said):
        trace.attribute(effects=True)
