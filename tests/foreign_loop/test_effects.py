"""Effects of loops that somebody else wrote, against the same loops with other weights of the examples."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ntkexp.capacity import MemoryBudget
from ntkexp.effects.sweep import AdjointSweep, Effects, MeanName
from ntkexp.foreign_loop import effects as followed_effects
from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.effects import loop_effects
from ntkexp.foreign_loop.example_names import SeenCall, digests
from ntkexp.foreign_loop.trace import Trace
from ntkexp.foreign_loop.user_loss import CallLoss, ExampleLoss
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
    """By the sweep, [query, out, example] in the order of the data."""
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


@dataclass
class NegatedLoop(Loop):
    """A loop whose loss is descended on, negated."""

    def back(self, batch: Tensor, divisor: float = 1.0) -> None:
        super().back(batch, -divisor)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_effects_of_ascent_are_those_of_descent_on_the_negated_loss(kind: Any) -> None:
    def optimizers(model: nn.Sequential, maximize: bool) -> loops.Optimizers:
        return [kind(model.parameters(), lr=0.02, weight_decay=0.01, maximize=maximize)]

    ascent = effects(loop(partial(optimizers, maximize=True)), loops.plain)
    descent = effects(NegatedLoop(**vars(loop(partial(optimizers, maximize=False)))), loops.plain)
    assert ascent.abs().max() > 0
    assert (ascent - descent).abs().max() < 1e-12 * descent.abs().max()


def test_effects_show_how_far_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ntkexp.report.progress.MIN_ESTIMATE_SECONDS", 0.0)  # as if each step took long
    monkeypatch.setattr("ntkexp.report.progress.LONG_TASK_SECONDS", 0.0)
    effects(loop(loops.sgd), loops.plain)
    said = capsys.readouterr().err
    assert "ntkexp: attribution: 8 steps, 1 of them done; " in said
    assert "ntkexp: the sweep for effects: 8 steps, 1 of them done; " in said
    assert "ntkexp: the sweep for effects: step 8 of 8" in said


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


@pytest.mark.parametrize(("rows", "smoothing", "seed"), [(1, 0.1, 4), (2, 0.1, 6), (8, 1e-5, 0)])
def test_class_weights_of_very_different_sizes_are_not_held_against_a_loop(
    rows: int, smoothing: float, seed: int
) -> None:
    """A mean is divided by the sum of a batch's weights, other than `loss=`. Of examples of large weights that are all
    but learned little is left where much cancels, and it has rounded otherwise; the loss without weights is another."""
    draw, sizes = torch.Generator().manual_seed(seed), torch.tensor([3e-4, 7e-1, 1.3e4])
    outputs = (15 * torch.randn(rows, 3, generator=draw)).requires_grad_()
    labels = outputs.argmax(1)
    means = partial(nn.functional.cross_entropy, weight=sizes, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(means(outputs, labels), outputs)

    def share(size: Tensor | None) -> float:
        loss = partial(nn.functional.cross_entropy, weight=size, label_smoothing=smoothing, reduction="none")
        call = ModelCall(0, torch.arange(rows), tuple(map(str, range(rows))), gradient=gradient)
        return CallLoss(lambda found, _: loss(found, labels), lambda *_: outputs, call, 0).share({}).factor

    expected = 1 / float(sizes[labels].sum())
    assert abs(share(sizes) - expected) < 0.1 * expected
    if rows > 1:
        with pytest.raises(Mistake, match="is not the loss that was trained with"):
            share(None)


def test_gradients_whose_squares_underflow_are_followed() -> None:
    """Where a step is too small for its weights to move, nothing is compared with it."""
    given, far = loop(loops.sgd, torch.float32), 50.0

    def body(given: Loop, batch: Tensor) -> None:
        """All examples are of class 0, and all but learned."""
        given.zero()
        outputs, zero = given.model(given.x[batch]), torch.zeros(len(batch), dtype=torch.long)
        shifted = outputs + torch.tensor([far, 0.0, 0.0])
        nn.functional.cross_entropy(shifted, zero).backward()  # type: ignore[no-untyped-call]
        given.step()

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return nn.functional.cross_entropy(
            outputs + torch.tensor([far, 0.0, 0.0]), torch.zeros(len(outputs), dtype=torch.long), reduction="none"
        )

    found = followed(given, body, loss=loss).attribute(effects="derivative")
    gradients = [weight.grad for weight in given.model.parameters() if weight.grad is not None]
    assert 0 < max(float(gradient.abs().max()) for gradient in gradients) < torch.finfo(torch.float32).tiny ** 0.5
    assert bool(found["effect"].notnull().all())


def of_logits(outputs: Any, call: SeenCall) -> Tensor:
    """A loss of what the model gives, where only a part of it is asked for."""
    return of_logits(outputs.logits, call)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (None, r"effects=True: .*loss="),
        (of_logits, r"loss=: it fails at outputs of shape \[6, 3\] .*'logits'\); .* args, kwargs and ids$"),
    ],
)
def test_without_a_loss_nothing_is_guessed_and_nothing_begun(
    loss: ExampleLoss | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = followed(loop(loops.sgd), loops.plain, loss=loss)
    monkeypatch.setattr(type(trace), "contributions", None)  # which would take long
    with pytest.raises(Mistake, match=said):
        trace.attribute(effects=True)


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


# A sweep back over a followed loop that was killed goes on where it was kept, to the same bytes.


CHUNKS = 6e-5  # GB: enough for one query at a time


def trained(to: Path) -> Trace:
    """A loop on disk, which clips and remembers."""
    given = loop(loops.adam)
    return followed(given, loops.scheduled_and_clipped, loss=loss_of(given), to=to, every=3)


TAKE = AdjointSweep.take


def content(folder: Path) -> str:
    """What was written of the contributions and effects."""
    files = sorted(path for path in (folder / "contributions.zarr").rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def stored_effects(
    trace: Trace, kind: Effects = True, mean: MeanName = "renormalised", memory_gb: float = 4.0
) -> Tensor:
    """The effects, which nobody writes down."""
    return loop_effects(trace, kind, mean, MemoryBudget.of_gb(memory_gb), None).values


def stop_once(trace: Trace, monkeypatch: pytest.MonkeyPatch, after: int, memory_gb: float = 4.0) -> list[int]:
    """End a sweep after so many steps back; the steps that later ones will take are counted."""
    monkeypatch.setattr(followed_effects, "SAVE_SECONDS", 0.0)
    taken: list[int] = []

    def take(sweep: AdjointSweep, index: int) -> None:
        if len(taken) == after:
            raise KeyboardInterrupt
        taken.append(index)
        TAKE(sweep, index)

    monkeypatch.setattr(AdjointSweep, "take", take)
    with pytest.raises(KeyboardInterrupt):
        stored_effects(trace, memory_gb=memory_gb)
    return counted(monkeypatch)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that will be taken back."""
    taken: list[int] = []

    def take(sweep: AdjointSweep, index: int) -> None:
        taken.append(index)
        TAKE(sweep, index)

    monkeypatch.setattr(AdjointSweep, "take", take)
    return taken


@pytest.mark.parametrize(("memory_gb", "after"), [(4.0, 5), pytest.param(CHUNKS, 12, marks=pytest.mark.slow)])
def test_a_sweep_that_was_stopped_goes_on(
    memory_gb: float, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trained(tmp_path / "run")
    taken = stop_once(trace, monkeypatch, after, memory_gb)
    found = stored_effects(trace, memory_gb=memory_gb)
    assert len(taken) == (8 if memory_gb == 4.0 else 24) - after  # nothing was taken twice
    assert torch.equal(found, stored_effects(trained(tmp_path / "other"), memory_gb=memory_gb))


@pytest.mark.parametrize(("kind", "mean"), [(True, "fixed"), ("derivative", "renormalised")])
def test_a_sweep_of_something_else_is_begun_anew(
    kind: Effects, mean: MeanName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = trained(tmp_path / "run")
    taken = stop_once(trace, monkeypatch, 5)
    stored_effects(trace, kind, mean)
    assert taken == [7, 6, 5, 4, 3, 2, 1, 0]


KILLED = """
import os, signal, sys
from pathlib import Path
from ntkexp.effects.sweep import Effects, MeanName
from ntkexp.effects.sweep import AdjointSweep
from ntkexp.foreign_loop import effects as followed_effects
from tests.foreign_loop.test_effects import TAKE, trained

def take(sweep, index):
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    TAKE(sweep, index)

followed_effects.SAVE_SECONDS = 0.0
AdjointSweep.take = take
trained(Path(sys.argv[1])).attribute(effects=True)
"""


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], check=False, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    taken = counted(monkeypatch)
    trained(tmp_path / "run").attribute(effects=True)
    assert taken == [2, 1, 0]
    assert not (tmp_path / "run" / "trace" / "sweep.bin").exists()
    trained(tmp_path / "other").attribute(effects=True)
    assert content(tmp_path / "run") == content(tmp_path / "other")
