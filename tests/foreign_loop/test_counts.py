"""Means that divide by something else than the number of examples: by class weights, or by targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.foreign_loop.again import LoopAgain
from ntkexp.foreign_loop.example_names import SeenCall, digests
from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.trace import Trace, find_trace
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from tests.foreign_loop import loops
from tests.foreign_loop.loops import BATCH, EXAMPLES, STEPS, Body, Loop, batches, followed, loop

WIDTH, TOLERANCE = 1e-5, 1e-6  # of central differences, and of effects beside them
CLOSE = 1e-11  # of outputs: the same steps, with sums in another order
LEFT = int((loop(loops.sgd).y == 1).nonzero()[0])  # which is of the class that counts most
SIZES = torch.tensor([1.0, 2.5, 0.3], dtype=torch.float64)  # of classes

Losses: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Total: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mean:
    """A mean as loops have it, and as `losses` of examples and what they count."""

    total: Total
    losses: Losses


def cross_entropies(**options: Any) -> Mean:
    """By the weights of classes, or over the targets that are there."""

    def losses(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        each = functional.cross_entropy(outputs, labels, **options, reduction="none")
        sizes = options.get("weight", torch.ones_like(SIZES))[labels]
        return each, sizes * (labels != options.get("ignore_index"))

    return Mean(partial(functional.cross_entropy, **options), losses)


def likelihoods(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logs = functional.log_softmax(outputs, 1)
    return functional.nll_loss(logs, labels, weight=SIZES, reduction="none"), SIZES[labels]


def ragged(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each output is a position, and of an example of class k the first k are there."""
    mask = (torch.arange(3) < labels[:, None]).to(outputs)
    each = functional.binary_cross_entropy_with_logits(outputs, torch.ones_like(outputs) / 3, reduction="none")
    return (each * mask).sum(1), mask.sum(1)


def over_all(losses: Losses) -> Total:
    """Σℓ/Σm."""

    def total(outputs: Tensor, labels: Tensor) -> Tensor:
        each, counts = losses(outputs, labels)
        return each.sum() / counts.sum()

    return total


MEANS = {
    "class weights": cross_entropies(weight=SIZES),
    "smoothed": cross_entropies(weight=SIZES, label_smoothing=0.2),
    "ignored": cross_entropies(ignore_index=2),
    "likelihoods": Mean(
        lambda outputs, labels: functional.nll_loss(functional.log_softmax(outputs, 1), labels, weight=SIZES),
        likelihoods,
    ),
    "ragged": Mean(over_all(ragged), ragged),
}


@dataclass
class CountedLoop(Loop):
    """A loop with such a mean; with `weights` of examples it is formed by hand."""

    mean: Mean = MEANS["class weights"]
    weights: Tensor | None = None

    def back(self, batch: Tensor, divisor: float = 1.0) -> None:
        outputs, labels = self.model(self.x[batch]), self.y[batch]
        if self.weights is None:
            loss = self.mean.total(outputs, labels)
        else:
            each, counts = self.mean.losses(outputs, labels)
            loss = each @ self.weights[batch] / (counts @ self.weights[batch])
        (loss / divisor).backward()  # type: ignore[no-untyped-call]  # torch's own


def counted(mean: Mean, optimizers: loops.Maker, weights: Tensor | None = None) -> CountedLoop:
    return CountedLoop(**vars(loop(optimizers)), mean=mean, weights=weights)


def loss_of(given: Loop, losses: Losses, *, counts: bool = True) -> Any:
    """What `loss=` is, with what examples count, or without."""
    labels = dict(zip(digests(given.x), given.y.tolist(), strict=True))

    def loss(outputs: Tensor, call: SeenCall) -> Any:
        found = losses(outputs, torch.tensor([labels[name] for name in call.ids]))
        return found if counts else found[0]

    return loss


def traced(mean: Mean, optimizers: loops.Maker, body: Body, **more: Any) -> Trace:
    given = counted(mean, optimizers)
    return followed(given, body, loss=loss_of(given, mean.losses), **more)


def by_hand(mean: Mean, optimizers: loops.Maker, body: Body, weights: Tensor) -> Tensor:
    """The outputs at the queries after the loop with these weights of examples."""
    given = counted(mean, optimizers, weights)
    for given.done, batch in zip(range(STEPS), batches()):  # noqa: B905  there is no last batch
        body(given, batch)
    with torch.no_grad():
        found: Tensor = given.model(given.queries)
    return found


def weighing(example: int, weight: float) -> Tensor:
    found = torch.ones(EXAMPLES, dtype=torch.float64)
    found[example] = weight
    return found


EACH = [pytest.param(mean, id=name, marks=() if name == "ragged" else pytest.mark.slow) for name, mean in MEANS.items()]


@pytest.mark.parametrize("mean", EACH)
def test_effects_are_the_derivative_of_a_mean_by_what_examples_count(mean: Mean) -> None:
    found = traced(mean, loops.momentum, loops.scheduled_and_clipped).attribute(effects="derivative")
    names = found["example"].to_numpy().tolist()
    values, labels = torch.from_numpy(found["effect"].to_numpy()), loop(loops.momentum).y
    for example in (0, 1, int((labels == 0).nonzero()[0])):
        ends = [
            by_hand(mean, loops.momentum, loops.scheduled_and_clipped, weighing(example, 1 + side * WIDTH))
            for side in (-1, 1)
        ]
        expected = (ends[0] - ends[1]) / (2 * WIDTH)
        place = names.index(digests(loop(loops.momentum).x)[example])
        assert (values[:, :, place] - expected).abs().max() < TOLERANCE * values.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_leaving_out_is_training_without_what_an_example_counts(mean: Mean, tmp_path: Path) -> None:
    """Carried out again, and in shares that add up to it."""
    train = partial(traced, mean, loops.adamw, loops.plain)
    trace = train(to=tmp_path / "run")
    name, weights = digests(loop(loops.adamw).x)[LEFT], weighing(LEFT, 0.0)
    expected = by_hand(mean, loops.adamw, loops.plain, weights)
    training = LoopAgain(train, trace, "renormalised")
    found = training.at(training.end_with({name: 0.0}))
    assert float((found - expected).abs().max()) < CLOSE
    removed = loop_without(
        find_trace(tmp_path / "run"), train, "renormalised", [trace.examples[name]], [0, 1, 2], Silent()
    )
    change = (expected - by_hand(mean, loops.adamw, loops.plain, torch.ones_like(weights))).numpy()
    assert abs(removed.actual - change).max() < CLOSE
    assert abs(removed.shares.sum(2) - change).max() < CLOSE


def crawling(model: nn.Sequential) -> loops.Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=1e-6)]


@pytest.mark.slow
@pytest.mark.parametrize("mean", ["class weights", "ragged"])
def test_small_steps_change_by_the_removal(mean: str) -> None:
    """Outputs hardly bend where steps are small."""
    given = counted(MEANS[mean], crawling)
    with_loss = loss_of(given, MEANS[mean].losses)
    found = followed(given, loops.plain, loss=with_loss).attribute(effects=True)
    name = digests(given.x)[LEFT]
    effect = torch.from_numpy(found["effect"].sel(example=name).to_numpy())
    ends = [by_hand(MEANS[mean], crawling, loops.plain, weighing(LEFT, weight)) for weight in (0.0, 1.0)]
    assert float((effect - ends[0] + ends[1]).norm()) < 1e-4 * float(effect.norm())


def summed(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels, reduction="sum")


def plain_losses(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    each = functional.cross_entropy(outputs, labels, reduction="none")
    return each, torch.ones_like(each)


def weighed_by_hand(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    each, counts = plain_losses(outputs, labels)
    return each * SIZES[labels], counts * SIZES[labels]


def in_uneven_calls(given: Loop, batch: Tensor) -> None:
    given.zero()
    for part in torch.split(batch, [2, BATCH - 2]):
        given.back(part)
    given.step()


def in_uneven_parts(given: Loop, batch: Tensor) -> None:
    """One mean over both calls of a step."""
    given.zero()
    for part in torch.split(batch, [2, BATCH - 2]):
        given.back(part, BATCH / len(part))
    given.step()


def of_all(given: Loop, _: Tensor) -> None:
    loops.plain(given, torch.arange(EXAMPLES))


UNSAID = "what each example counts"
REFUSED = {
    "class weights": (MEANS["class weights"], loops.plain, False, UNSAID),
    "class weights of all": (MEANS["class weights"], of_all, False, UNSAID),
    "smoothed": (MEANS["smoothed"], loops.plain, False, UNSAID),
    "ignored": (MEANS["ignored"], loops.plain, False, UNSAID),
    "likelihoods": (MEANS["likelihoods"], loops.plain, False, UNSAID),
    "ragged": (MEANS["ragged"], loops.plain, False, UNSAID),
    "by hand": (Mean(over_all(weighed_by_hand), weighed_by_hand), loops.plain, False, UNSAID),
    "by hand, of all": (Mean(over_all(weighed_by_hand), weighed_by_hand), of_all, False, UNSAID),
    "a sum": (Mean(summed, plain_losses), loops.plain, False, "is a sum"),
    "a sum over calls": (Mean(summed, plain_losses), in_uneven_calls, True, "is a sum"),
    "a mean over calls": (Mean(over_all(plain_losses), plain_losses), in_uneven_parts, False, "over all calls"),
    "no class weights": (Mean(functional.cross_entropy, weighed_by_hand), loops.plain, True, "not the loss"),
    "a mean over examples": (
        Mean(lambda o, y: weighed_by_hand(o, y)[0].mean(), weighed_by_hand),
        loops.plain,
        True,
        "each example counts once",
    ),
}


FAST = ("class weights", "by hand, of all", "a mean over calls")


@pytest.mark.parametrize(
    ("mean", "body", "counts", "said"),
    [pytest.param(*case, id=name, marks=() if name in FAST else pytest.mark.slow) for name, case in REFUSED.items()],
)
def test_shares_of_no_mean_over_a_call_are_refused(mean: Mean, body: Body, counts: bool, said: str) -> None:
    given = counted(mean, loops.sgd)
    trace = followed(given, body, loss=loss_of(given, mean.losses, counts=counts))
    with pytest.raises(Mistake, match=said):
        trace.attribute(effects=True)
    if "not the loss" not in said:
        assert "effect" in trace.attribute(effects=True, mean="fixed")


TAKEN = {
    "binary, weighed": Mean(
        lambda o, y: functional.binary_cross_entropy_with_logits(o, one_hot(o, y), pos_weight=SIZES),
        lambda o, y: (
            functional.binary_cross_entropy_with_logits(o, one_hot(o, y), pos_weight=SIZES, reduction="none").sum(1),
            torch.ones(len(o)),
        ),
    ),
    "squares": Mean(
        lambda o, y: (o - one_hot(o, y)).square().mean(),
        lambda o, y: ((o - one_hot(o, y)).square().sum(1) / 2, torch.ones(len(o))),
    ),
    "probabilities": Mean(
        lambda o, y: functional.cross_entropy(o, one_hot(o, y) * 0.8 + 0.1, weight=SIZES),
        lambda o, y: (
            functional.cross_entropy(o, one_hot(o, y) * 0.8 + 0.1, weight=SIZES, reduction="none"),
            torch.ones(len(o)),
        ),
    ),
}


def one_hot(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.one_hot(labels, 3).to(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("body", [loops.plain, loops.accumulated, loops.with_a_scaler])
@pytest.mark.parametrize("mean", TAKEN.values(), ids=TAKEN)
def test_means_over_examples_need_not_say_what_each_counts(mean: Mean, body: Body) -> None:
    given = counted(mean, loops.sgd)
    found = followed(given, body, loss=loss_of(given, mean.losses, counts=False)).attribute(effects=True)
    assert bool(found["effect"].notnull().all())
