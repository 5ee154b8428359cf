"""Effects of followed loops, against the same loops with other weights of the examples."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ntkexp.capacity import MemoryBudget
from ntkexp.effects.sweep import Effects, MeanName
from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.effects import loop_effects
from ntkexp.foreign_loop.example_names import SeenCall, digests
from ntkexp.foreign_loop.trace import Trace
from ntkexp.foreign_loop.user_loss import CallLoss, ExampleLoss
from ntkexp.mistake import Mistake
from tests.foreign_loop import bugs, loops
from tests.foreign_loop.loops import BATCH, EXAMPLES, Body, Loop, apart, followed, loop, loss_of, weighing
from tests.foreign_loop.trainings import (
    MEANS,
    SIZES,
    TRAININGS,
    CountedLoop,
    Losses,
    Mean,
    counted,
    counted_loss,
    over_all,
)

WIDTH = 1e-5  # of central differences, which Adam's ε wants small
TOLERANCE = 1e-6
SLOW = pytest.mark.slow


def effects(given: Loop, body: Body, **more: Any) -> Tensor:
    """By the sweep, [query, out, example] in the order of the data."""
    dataset = followed(given, body, loss=loss_of(given), **more).attribute(effects="derivative", quiet=True)
    return torch.from_numpy(dataset["effect"].sel(example=list(digests(given.x))).to_numpy())


FAST = ("several, clipped", "amsgrad, accumulated", "ragged")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[SLOW] * (each not in FAST)) for each in TRAININGS])
def test_effects_are_the_derivative_of_the_loop(name: str) -> None:
    """−∂f/∂w by central differences."""
    training = TRAININGS[name]
    found, names = training.traced().attribute(effects="derivative", quiet=True)["effect"], training.names
    for example in (0, 5, int((training.make().y == 0).nonzero()[0])):
        down, up = (training.ends(weighing({example: 1 + side * WIDTH})) for side in (-1, 1))
        effect = torch.from_numpy(found.sel(example=names[example]).to_numpy())
        assert (effect - (down - up) / (2 * WIDTH)).abs().max() < TOLERANCE * float(abs(found).max())


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
    assert apart(ascent, descent) < 1e-12


@pytest.mark.slow
def test_a_trace_on_disk_has_the_same_effects(tmp_path: Path) -> None:
    stored = effects(loop(loops.adam), loops.accumulated, to=tmp_path / "trace", every=3)
    assert apart(stored, effects(loop(loops.adam), loops.accumulated)) < 1e-12  # steps are replayed to rounding


def crawling(model: nn.Sequential) -> loops.Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=1e-6)]


@pytest.mark.slow
@pytest.mark.parametrize("mean", ["class weights", "ragged"])
def test_effects_of_small_steps_are_removals(mean: str) -> None:
    """Outputs hardly bend between small steps."""
    given = counted(MEANS[mean], crawling)
    left_out = int((given.y == 1).nonzero()[0])  # an example of the class that counts most
    name, with_loss = digests(given.x)[left_out], counted_loss(given)
    found = followed(given, loops.plain, loss=with_loss).attribute(effects=True)["effect"].sel(example=name)
    without, whole = (
        loops.trained_with(counted(MEANS[mean], crawling), loops.plain, weighing({left_out: weight}))
        for weight in (0.0, 1.0)
    )
    effect = torch.from_numpy(found.to_numpy())
    assert float((effect - without + whole).norm()) < 1e-4 * float(effect.norm())


# --- The factor of each loss in its mean.


@pytest.mark.parametrize(("rows", "smoothing", "seed"), [(1, 0.1, 4), (2, 0.1, 6), (8, 1e-5, 0)])
def test_class_weights_of_very_different_sizes_are_followed(rows: int, smoothing: float, seed: int) -> None:
    """A mean divides by the sum of a batch's weights, and `loss=` does not.

    Large weights of examples that are nearly learned leave small remainders, which round differently. The loss without
    weights is another loss.
    """
    draw, sizes = torch.Generator().manual_seed(seed), torch.tensor([3e-4, 7e-1, 1.3e4])
    outputs = (15 * torch.randn(rows, 3, generator=draw)).requires_grad_()
    labels = outputs.argmax(1)
    means = partial(functional.cross_entropy, weight=sizes, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(means(outputs, labels), outputs)

    def share(size: Tensor | None) -> float:
        loss = partial(functional.cross_entropy, weight=size, label_smoothing=smoothing, reduction="none")
        call = ModelCall(0, torch.arange(rows), tuple(map(str, range(rows))), gradient=gradient)
        return CallLoss(lambda found, _: loss(found, labels), lambda *_: outputs, call, 0).share({}).factor

    expected = 1 / float(sizes[labels].sum())
    assert abs(share(sizes) - expected) < 0.1 * expected
    if rows > 1:
        with pytest.raises(Mistake, match="is not the loss of the loop"):
            share(None)


def test_gradients_whose_squares_underflow_are_followed() -> None:
    """If a step is too small to move its weights, the loss is not compared with the step."""
    given, shift = loop(loops.sgd, torch.float32), torch.tensor([50.0, 0.0, 0.0])

    def losses(outputs: Tensor, *_: object) -> Tensor:
        """All examples are of class 0, and nearly learned."""
        zero = torch.zeros(len(outputs), dtype=torch.long)
        return functional.cross_entropy(outputs + shift, zero, reduction="none")

    def body(given: Loop, batch: Tensor) -> None:
        given.zero()
        losses(given.model(given.x[batch])).mean().backward()  # type: ignore[no-untyped-call]
        given.step()

    found = followed(given, body, loss=losses).attribute(effects="derivative")
    gradients = [weight.grad for weight in given.model.parameters() if weight.grad is not None]
    assert 0 < max(float(gradient.abs().max()) for gradient in gradients) < torch.finfo(torch.float32).tiny ** 0.5
    assert bool(found["effect"].notnull().all())


def summed(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="sum")


def plain_losses(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    each = functional.cross_entropy(outputs, labels, reduction="none")
    return each, torch.ones_like(each)


def weighed_by_hand(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    each, counts = plain_losses(outputs, labels)
    return each * SIZES[labels], counts * SIZES[labels]


def in_uneven_calls(given: Loop, batch: Tensor, *, as_one: bool = False) -> None:
    """A mean in each of two calls, or one mean over both."""
    given.zero()
    for part in torch.split(batch, [2, BATCH - 2]):
        given.back(part, BATCH / len(part) if as_one else 1.0)
    given.step()


def of_all(given: Loop, _: Tensor) -> None:
    loops.plain(given, torch.arange(EXAMPLES))


NO_COUNTS = "the weight of each example"
WEIGHED = Mean(over_all(weighed_by_hand), weighed_by_hand)
UNWEIGHED = Mean(lambda outputs, labels: weighed_by_hand(outputs, labels)[0].mean(), weighed_by_hand)
REFUSED: dict[str, tuple[Mean, Body, bool, str]] = {
    **{name: (mean, loops.plain, False, NO_COUNTS) for name, mean in MEANS.items()},
    "class weights of all": (MEANS["class weights"], of_all, False, NO_COUNTS),
    "by hand": (WEIGHED, loops.plain, False, NO_COUNTS),
    "by hand, of all": (WEIGHED, of_all, False, NO_COUNTS),
    "a sum": (Mean(summed, plain_losses), loops.plain, False, "is a sum"),
    "a sum over calls": (Mean(summed, plain_losses), in_uneven_calls, True, "is a sum"),
    "a mean over calls": (
        Mean(over_all(plain_losses), plain_losses),
        partial(in_uneven_calls, as_one=True),
        False,
        "over all calls",
    ),
    "no class weights": (Mean(functional.cross_entropy, weighed_by_hand), loops.plain, True, "not the loss"),
    "a mean over examples": (UNWEIGHED, loops.plain, True, "each example counts once"),
}
FAST_MEANS = ("class weights", "by hand, of all", "a mean over calls")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[SLOW] * (each not in FAST_MEANS)) for each in REFUSED])
def test_a_loss_that_is_no_mean_over_its_call_is_refused(name: str) -> None:
    mean, body, counts, said = REFUSED[name]
    given: CountedLoop = counted(mean)
    trace = followed(given, body, loss=counted_loss(given, counts=counts))
    with pytest.raises(Mistake, match=said):
        trace.attribute(effects=True)
    if "not the loss" not in said:
        assert "effect" in trace.attribute(effects=True, mean="fixed")


def one_hot(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.one_hot(labels, 3).to(outputs)


def equally(losses: Callable[[Tensor, Tensor], Tensor]) -> Losses:
    return lambda outputs, labels: (losses(outputs, labels), torch.ones(len(outputs)))


def smoothed(outputs: Tensor, labels: Tensor, reduction: str = "none") -> Tensor:
    target = one_hot(outputs, labels) * 0.8 + 0.1
    return functional.cross_entropy(outputs, target, weight=SIZES, reduction=reduction)


def binary(outputs: Tensor, labels: Tensor, reduction: str = "none") -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        outputs, one_hot(outputs, labels), pos_weight=SIZES, reduction=reduction
    )


COUNTED_ONCE = {
    "binary, weighed": Mean(partial(binary, reduction="mean"), equally(lambda *of: binary(*of).sum(1))),
    "squares": Mean(
        lambda o, y: (o - one_hot(o, y)).square().mean(),
        equally(lambda o, y: (o - one_hot(o, y)).square().sum(1) / 2),
    ),
    "probabilities": Mean(partial(smoothed, reduction="mean"), equally(smoothed)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "body"), [*zip(COUNTED_ONCE, (loops.plain, loops.accumulated, loops.with_a_scaler), strict=True)]
)
def test_means_over_examples_need_no_counts(mean: str, body: Body) -> None:
    given = counted(COUNTED_ONCE[mean])
    found = followed(given, body, loss=counted_loss(given, counts=False)).attribute(effects=True)
    assert bool(found["effect"].notnull().all())


# --- Refused.


def of_logits(outputs: Any, call: SeenCall) -> Tensor:
    """A loss of an output that the model does not have."""
    return of_logits(outputs.logits, call)


def of_squares(outputs: Tensor, call: SeenCall) -> Tensor:
    return outputs.square().sum(1)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mm" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (None, r"effects=True: .*loss="),
        (of_logits, r"loss=: it fails at outputs of shape \[6, 3\] .*'logits'\); .* args, kwargs and ids$"),
    ],
)
def test_a_missing_loss_is_noticed_before_the_attribution(loss: ExampleLoss | None, said: str) -> None:
    trace = followed(loop(loops.sgd), loops.plain, loss=loss)
    refused, whole = Products(), Products()  # type: ignore[no-untyped-call]
    with refused, pytest.raises(Mistake, match=said):
        trace.attribute(effects=True)
    with whole:
        trace.attribute(quiet=True)
    assert refused.count < whole.count / 4


def test_effects_through_tensors_outside_the_model_are_refused() -> None:
    """The loss has a trained weight. It multiplies the losses of a call by one factor, as a mean may."""
    given, weight = loop(loops.sgd), nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*given.model.parameters(), weight], lr=0.1)

    def body(given: Loop, batch: Tensor) -> None:
        given.zero()
        losses = nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch])
        ((-weight).exp() * losses + weight).backward()  # type: ignore[no-untyped-call]  # torch's own
        given.step()

    trace = followed(replace(given, optimizers=[optimizer]), body, loss=loss_of(given))
    with pytest.raises(Mistake, match="step 7: the optimizer also updated tensors outside the model"):
        trace.attribute(effects=True)


@pytest.mark.parametrize(
    ("body", "loss", "said"),
    [
        (bugs.clipped_in_part, None, "multiplied by other factors"),
        (bugs.clipped_by_value, None, "multiplied by other factors .* clip all parameters together, by norm"),
        (loops.by_hand_like_sam, None, "used gradients at weights that the loop had moved .SAM."),
        (bugs.normalised, None, "and does not clip"),
        (bugs.never_zeroed, None, "which effects cannot include"),
        (loops.plain, of_squares, "step 7: loss= is not the loss of the loop"),
    ],
)
def test_loops_whose_effects_are_not_known_are_refused(body: Body, loss: ExampleLoss | None, said: str) -> None:
    given = loop(loops.momentum)
    trace = followed(given, body, loss=loss or loss_of(given))
    with pytest.raises(Mistake, match=said):
        trace.attribute(effects=True)


# --- A sweep that was stopped or killed continues from its saved state, to the same bytes.


CHUNKS = 6e-5  # GB: enough for one query at a time


def stored(to: Path) -> Trace:
    given = loop(loops.adam)
    return followed(given, loops.scheduled_and_clipped, loss=loss_of(given), to=to, every=3)


def swept(trace: Trace, kind: Effects = True, mean: MeanName = "renormalised", memory_gb: float = 4.0) -> Tensor:
    return loop_effects(trace, kind, mean, MemoryBudget.of_gb(memory_gb), None).values


def watched(trace: Trace, after: float = float("inf"), stop: Callable[[], object] = int) -> tuple[Trace, list[str]]:
    """Return the trace with a loss that notes the batches of the sweep, and stops the sweep after some batches."""
    loss, seen = trace.loss, list[str]()

    def noting(outputs: Tensor, call: SeenCall) -> Any:
        assert loss is not None
        batch = "".join(call.ids)
        if batch not in seen[-1:]:
            seen.append(batch)
        if len(seen) > after:
            stop()
        return loss(outputs, call)

    return replace(trace, loss=noting), seen


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def _every_step_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every step takes longer than the time between two saved states, and deserves a line."""
    ticks = count(0, 100)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))


@pytest.mark.usefixtures("_every_step_is_saved")
@pytest.mark.parametrize(("memory_gb", "after", "steps"), [(4.0, 5, 8), pytest.param(CHUNKS, 12, 24, marks=SLOW)])
def test_a_stopped_sweep_goes_on(memory_gb: float, after: int, steps: int, tmp_path: Path) -> None:
    trace = stored(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        swept(watched(trace, after, interrupt)[0], memory_gb=memory_gb)
    resumed, seen = watched(trace)
    found = swept(resumed, memory_gb=memory_gb)
    assert len(seen) == 1 + steps - after  # the last step identifies the sweep; no other is taken twice
    assert torch.equal(found, swept(stored(tmp_path / "other"), memory_gb=memory_gb))


@pytest.mark.usefixtures("_every_step_is_saved")
@pytest.mark.parametrize(("kind", "mean"), [(True, "fixed"), ("derivative", "renormalised")])
def test_another_sweep_begins_at_the_last_step(kind: Effects, mean: MeanName, tmp_path: Path) -> None:
    trace = stored(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        swept(watched(trace, 5, interrupt)[0])
    other, seen = watched(trace)
    swept(other, kind, mean)
    assert len(seen) == 8


KILLED = """
import itertools, os, signal, sys, time
from pathlib import Path
from tests.foreign_loop.test_effects import stored, watched

ticks = itertools.count(0, 100)
trace, _ = watched(stored(Path(sys.argv[1])), 5, lambda: os.kill(os.getpid(), signal.SIGKILL))
time.monotonic = lambda: float(next(ticks))
trace.attribute(effects=True)
"""


def content(folder: Path) -> str:
    """A digest of the stored contributions and effects."""
    files = sorted(path for path in (folder / "contributions.zarr").rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], check=False, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    trace, seen = watched(stored(tmp_path / "run"))
    trace.attribute(effects=True)
    assert len(seen) == 1 + 3
    assert not (tmp_path / "run" / "trace" / "sweep.bin").exists()
    stored(tmp_path / "other").attribute(effects=True)
    assert content(tmp_path / "run") == content(tmp_path / "other")


@pytest.mark.usefixtures("_every_step_is_saved")
def test_long_attributions_and_sweeps_show_their_progress(capsys: pytest.CaptureFixture[str]) -> None:
    given = loop(loops.sgd)
    followed(given, loops.plain, loss=loss_of(given)).attribute(effects="derivative")
    said = capsys.readouterr().err
    for task in ("attribution", "the sweep for effects"):
        assert f"ntkexp: {task}: 8 steps, " in said
    assert "ntkexp: the sweep for effects: step 8 of 8" in said
