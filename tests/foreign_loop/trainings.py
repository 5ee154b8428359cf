"""Trainings that can be repeated with other weights of the examples, to check effects and removals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ntkexp.foreign_loop.example_names import SeenCall, digests
from ntkexp.foreign_loop.trace import Trace
from tests.foreign_loop import bugs, loops
from tests.foreign_loop.loops import Body, Loop, Maker, followed, loop, loss_of, trained_with

# --- Means that do not divide by the number of examples, but by class weights or by the number of targets.


Losses: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Total: TypeAlias = Callable[[Tensor, Tensor], Tensor]
SIZES = torch.tensor([1.0, 2.5, 0.3], dtype=torch.float64)  # of classes


@dataclass(frozen=True)
class Mean:
    """A mean of losses, and the losses of examples with their weights in this mean."""

    total: Total
    losses: Losses


def cross_entropies(**options: Any) -> Mean:
    """Return a mean with class weights, or over the targets that are not ignored."""

    def losses(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        each = functional.cross_entropy(outputs, labels, **options, reduction="none")
        sizes = options.get("weight", torch.ones_like(SIZES))[labels]
        return each, sizes * (labels != options.get("ignore_index"))

    return Mean(partial(functional.cross_entropy, **options), losses)


def likelihoods(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logs = functional.log_softmax(outputs, 1)
    return functional.nll_loss(logs, labels, weight=SIZES, reduction="none"), SIZES[labels]


def ragged(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses over positions (the outputs). An example of class k has the first k positions."""
    mask = (torch.arange(3) < labels[:, None]).to(outputs)
    each = functional.binary_cross_entropy_with_logits(outputs, torch.ones_like(outputs) / 3, reduction="none")
    return (each * mask).sum(1), mask.sum(1)


def over_all(losses: Losses) -> Total:
    """Return the mean Σℓ/Σm."""

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
    """A loop with such a mean. With `weights` of examples, compute the weighted mean Σwℓ/Σwm."""

    mean: Mean = MEANS["class weights"]

    def back(self, batch: Tensor, divisor: float = 1.0) -> None:
        outputs, labels = self.model(self.x[batch]), self.y[batch]
        if self.weights is None:
            loss = self.mean.total(outputs, labels)
        else:
            each, counts = self.mean.losses(outputs, labels)
            loss = each @ self.weights[batch] / (counts @ self.weights[batch])
        (loss / divisor).backward()  # type: ignore[no-untyped-call]  # torch's own


def counted(mean: Mean, maker: Maker = loops.sgd) -> CountedLoop:
    return CountedLoop(**vars(loop(maker)), mean=mean)


def counted_loss(given: CountedLoop, *, counts: bool = True) -> Any:
    """Return the function for `loss=`. With `counts`, it also returns the weights in the mean."""
    labels = dict(zip(digests(given.x), given.y.tolist(), strict=True))

    def loss(outputs: Tensor, call: SeenCall) -> Any:
        found = given.mean.losses(outputs, torch.tensor([labels[name] for name in call.ids]))
        return found if counts else found[0]

    return loss


# --- The table.


@dataclass(frozen=True)
class Training:
    """A loop that starts from fixed seeds."""

    make: Callable[[], Any]
    body: Body
    loss: Callable[[Any], Any] = loss_of

    @property
    def names(self) -> list[str]:
        return list(digests(self.make().x))

    def traced(self, **more: Any) -> Trace:
        given = self.make()
        return followed(given, self.body, loss=self.loss(given), **more)

    def ends(self, weights: Tensor) -> Tensor:
        """Train with these weights of examples. Return the outputs at the queries."""
        return trained_with(self.make(), self.body, weights)


def training(maker: Maker, body: Body) -> Training:
    return Training(lambda: loop(maker), body)


TRAININGS = {
    "sgd": training(loops.sgd, loops.plain),
    "momentum, clipped": training(loops.momentum, loops.scheduled_and_clipped),
    "nesterov, accumulated": training(loops.nesterov, loops.accumulated),
    "adamw, clipped": training(loops.adamw, loops.scheduled_and_clipped),
    "amsgrad, accumulated": training(loops.adam, loops.accumulated),
    "several": training(loops.several, loops.plain),
    "several, clipped": training(loops.several, loops.scheduled_and_clipped),
    "momentum, scaled": training(loops.momentum, loops.with_a_scaler),
    "adamw, frozen half-way": training(loops.adamw, bugs.frozen_half_way),
    "adamw, thawed half-way": training(loops.frozen_adamw, loops.thawed_half_way),
    "dropout": Training(lambda: loops.random_loop(loops.adamw), loops.scheduled_and_clipped),
    **{
        name: Training(partial(counted, mean, loops.adamw), loops.scheduled_and_clipped, counted_loss)
        for name, mean in MEANS.items()
    },
}
