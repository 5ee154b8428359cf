"""Loops of training as people write them; none knows that it is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import Trace

EXAMPLES, BATCH, STEPS = 18, 6, 8
Optimizers: TypeAlias = list[torch.optim.Optimizer]
Maker: TypeAlias = Callable[[nn.Sequential], Optimizers]
Body: TypeAlias = Callable[["Loop", Tensor], None]


@dataclass
class Loop:
    """A network, its optimizers and its data."""

    model: nn.Sequential
    optimizers: Optimizers
    x: Tensor
    y: Tensor
    queries: Tensor
    done: int = 0
    scaler: torch.amp.GradScaler | None = None
    stale: Tensor | None = None  # a loss

    def zero(self, *, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def back(self, batch: Tensor, divisor: float = 1.0) -> None:
        loss = nn.functional.cross_entropy(self.model(self.x[batch]), self.y[batch])
        (loss / divisor).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def loop(optimizers: Maker, dtype: torch.dtype = torch.float64) -> Loop:
    """A small network with a kink and without, and its data."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).to(dtype)
        x, queries = torch.randn(EXAMPLES, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
        y = torch.randint(3, (EXAMPLES,))
    return Loop(model, optimizers(model), x, y, queries)


def batches() -> Iterator[Tensor]:
    """Shuffled, without epochs."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randperm(EXAMPLES, generator=generator)[:BATCH]


def followed(given: Loop, body: Body, kept: list[Trace] | None = None, **more: Any) -> Trace:
    """The loop, followed; the trace is also put where it is kept, whatever the loop raises."""
    with follow(given.model, given.optimizers, queries=given.queries, **more) as trace:
        if kept is not None:
            kept.append(trace)
        for given.done, batch in zip(range(STEPS), batches()):  # noqa: B905  there is no last batch
            body(given, batch)
            with torch.no_grad():
                given.model(given.queries)
    return trace


def sgd(model: nn.Sequential) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.3)]


def momentum(model: nn.Sequential) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)]


def nesterov(model: nn.Sequential) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)]


def adam(model: nn.Sequential) -> Optimizers:
    return [torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True)]


def adamw(model: nn.Sequential) -> Optimizers:
    matrices, biases = ([weight for weight in model.parameters() if weight.dim() == axes] for axes in (2, 1))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "betas": (0.8, 0.99)}]
    return [torch.optim.AdamW(groups)]


def several(model: nn.Sequential) -> Optimizers:
    return [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.5),
        torch.optim.AdamW(model[2].parameters(), lr=0.01),
        torch.optim.SGD(model[4].parameters(), lr=0.2),
    ]


def plain(given: Loop, batch: Tensor) -> None:
    given.zero()
    given.back(batch)
    given.step()


def scheduled_and_clipped(given: Loop, batch: Tensor) -> None:
    for optimizer in given.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.8
    given.zero()
    given.back(batch)
    clip_grad_norm_(given.model.parameters(), 0.3)
    given.step()


def one_cycle(given: Loop, batch: Tensor) -> None:
    for group in given.optimizers[0].param_groups:
        group["lr"], group["momentum"] = 0.05 * (1 + given.done), 0.95 - 0.05 * given.done
    plain(given, batch)


def accumulated(given: Loop, batch: Tensor) -> None:
    given.zero(set_to_none=False)
    for part in torch.split(batch, 2):
        given.back(part, 3)
    given.step()


def pairs(given: Loop, batch: Tensor) -> None:
    """Two calls in one loss, with gradients of both at once."""
    given.zero()
    one, other = given.model(given.x[batch[:2]]), given.model(given.x[batch[2:4]])
    (one * other).sum().backward()
    given.step()


def with_a_scaler(given: Loop, batch: Tensor) -> None:
    """What a scaler of gradients does: it takes its scale back, and skips a step."""
    given.zero()
    given.back(batch, 1 / 1024)
    for weight in given.model.parameters():
        assert weight.grad is not None
        weight.grad /= 1024
    if given.done != 3:
        given.step()


def with_the_scaler_of_pytorch(given: Loop, batch: Tensor) -> None:
    """Its losses overflow once, so that it skips that step."""
    given.scaler = given.scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
    given.zero()
    loss = nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch])
    given.scaler.scale(loss * (torch.inf if given.done == 3 else 1.0)).backward()  # type: ignore[no-untyped-call]
    given.scaler.step(given.optimizers[0])
    given.scaler.update()


def zeroed_late(given: Loop, batch: Tensor) -> None:
    outputs = given.model(given.x[batch])
    given.zero()
    nn.functional.cross_entropy(outputs, given.y[batch]).backward()  # type: ignore[no-untyped-call]
    given.step()


def averaged_to_evaluate(given: Loop, batch: Tensor) -> None:
    plain(given, batch)
    kept = {name: weight.clone() for name, weight in given.model.state_dict().items()}
    given.model.load_state_dict({name: weight / 2 for name, weight in kept.items()})
    given.model.load_state_dict(kept)


LOOPS: tuple[tuple[Maker, Body], ...] = (
    (sgd, plain),
    (momentum, scheduled_and_clipped),
    (momentum, one_cycle),
    (nesterov, accumulated),
    (adamw, scheduled_and_clipped),
    (adam, accumulated),
    (several, plain),
    (several, scheduled_and_clipped),
    (sgd, pairs),
    (momentum, with_a_scaler),
    (adamw, with_the_scaler_of_pytorch),
    (adam, zeroed_late),
)


BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""How far the sum of parts may be from the change, relative to it: the bounds of the project for secants."""


def outputs_add_up(found: xr.Dataset, change: Tensor, bound: float, *, cancels: bool) -> None:
    """Parts and steps add up to the change of every query and output, and each secant closes.

    Unless parts cancel, the movement by rounding is as small as the rounding of the sum.
    """
    parts, steps, beside = (torch.from_numpy(found[name].values) for name in ("contribution", "by_step", "decay"))
    beside = beside + torch.from_numpy(found["rounding"].values)
    size = change.norm()
    if cancels:
        size = parts.abs().sum(2).max().clamp(min=size)
    else:
        assert abs(found["rounding"].values).max() <= bound * size
    assert (parts.sum(2) + beside - change).abs().max() <= bound * size
    assert (steps.sum(2) - change).abs().max() <= bound * size
    assert float(found["closure"].max()) <= 1e3 * bound  # relative to steps, of which the last are small


def closes(given: Loop, before: nn.Module, found: xr.Dataset, *, cancels: bool = False) -> None:
    """Parts add up to what training did to a model."""
    with torch.no_grad():
        change = given.model(given.queries) - before(given.queries)
    assert change.norm() > 0
    outputs_add_up(found, change, BOUNDS[change.dtype], cancels=cancels)
