"""Training loops as users write them, without a trace of `follow`, and the laws of their traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint as recomputed

from ntkexp.foreign_loop.example_names import SeenCall, digests
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import Trace
from ntkexp.model.foreign import load_torchvision
from tests.foreign_loop import other_optimizers
from tests.foreign_loop.other_optimizers import SAM

EXAMPLES, BATCH, STEPS = 18, 6, 8
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""How far the sum of parts may be from the change, relative to it: the bounds of the project for secants."""
CLOSE = 1e-12  # for parts that are summed from replayed weights, relative to all parts

Optimizers: TypeAlias = list[optim.Optimizer]
Maker: TypeAlias = Callable[[nn.Sequential], Optimizers]
Body: TypeAlias = Callable[["Loop", Tensor], None]


@dataclass
class Loop:
    """A network, its optimizers and its data. `weights` are weights of examples in the mean loss, if any."""

    model: nn.Sequential
    optimizers: Optimizers
    x: Tensor
    y: Tensor
    queries: Tensor
    done: int = 0
    scaler: torch.amp.GradScaler | None = None
    stale: Tensor | None = None  # a loss
    weights: Tensor | None = None

    def zero(self, *, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def back(self, batch: Tensor, divisor: float = 1.0) -> None:
        outputs, y = self.model(self.x[batch]), self.y[batch]
        if self.weights is None:
            loss = cross_entropy(outputs, y)
        else:
            weights = self.weights[batch]
            loss = cross_entropy(outputs, y, reduction="none") @ weights / weights.sum().clamp(min=1e-9)
        (loss / divisor).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def loop(optimizers: Maker, dtype: torch.dtype = torch.float64) -> Loop:
    """Return a small network, of a ReLU with a kink and a smooth GELU, and its data."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).to(dtype)
        x, queries = torch.randn(EXAMPLES, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
        y = torch.randint(3, (EXAMPLES,))
    return Loop(model, optimizers(model), x, y, queries)


def batches() -> Iterator[Tensor]:
    """Draw shuffled batches without epochs."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randperm(EXAMPLES, generator=generator)[:BATCH]


def train(given: Loop, body: Body, begin: int = 0, end: int = STEPS, *, evaluates: bool = True) -> None:
    """Take some steps, and evaluate the model after each."""
    for given.done, batch in zip(range(end), batches()):  # noqa: B905  batches never end
        if given.done >= begin:
            body(given, batch)
            if evaluates:
                with torch.no_grad():
                    given.model(given.queries)


def followed(
    given: Loop,
    body: Body,
    kept: list[Trace] | None = None,
    begin: int = 0,
    end: int = STEPS,
    *,
    evaluates: bool = True,
    **more: Any,
) -> Trace:
    """Follow some steps of a loop. The trace is also appended to `kept`, even if the loop raises."""
    with follow(given.model, given.optimizers, queries=given.queries, **more) as trace:
        if kept is not None:
            kept.append(trace)
        train(given, body, begin, end, evaluates=evaluates)
    return trace


def fitted(model: nn.Module, optimizers: Any, loss_of: Callable[[int], Tensor], steps: int = 2, **more: Any) -> Trace:
    """Follow a loop that descends on loss_of(step)."""
    with follow(model, optimizers, **more) as trace:
        for step in range(steps):
            model.zero_grad()
            loss_of(step).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.step()
    return trace


Checkpoint: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]], Tensor]


def checkpoint(given: Loop) -> Checkpoint:
    """Return a checkpoint as people save it: weights, states of the optimizers, and the generator."""
    states = [each.state_dict() for each in given.optimizers]
    return deepcopy((given.model.state_dict(), states, torch.get_rng_state()))


def restore(given: Loop, kept: Checkpoint) -> Loop:
    weights, states, generator = kept
    given.model.load_state_dict(weights)
    for each, state in zip(given.optimizers, states, strict=True):
        each.load_state_dict(state)
    torch.set_rng_state(generator)
    return given


def resumed(make: Callable[[], Loop], body: Body, back: int, **more: Any) -> Trace:
    """Follow a loop to step 5, and again from its checkpoint before step `back`."""
    given, kept = make(), dict[int, Checkpoint]()

    def checked(given: Loop, batch: Tensor) -> None:
        kept[given.done] = checkpoint(given)
        body(given, batch)

    followed(given, checked, end=5, **more)
    kept[5] = checkpoint(given)
    configuration = (more["to"] / "config.json").read_bytes()
    trace = followed(restore(make(), kept[back]), body, begin=back, **more)
    assert (more["to"] / "config.json").read_bytes() == configuration  # it is the same training
    return trace


# --- Optimizers.


def sgd(model: nn.Sequential) -> Optimizers:
    return [optim.SGD(model.parameters(), lr=0.3)]


def momentum(model: nn.Sequential) -> Optimizers:
    return [optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)]


def nesterov(model: nn.Sequential) -> Optimizers:
    return [optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)]


def adam(model: nn.Sequential) -> Optimizers:
    return [optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True)]


def by_axes(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices and the biases."""
    parameters = list(model.parameters())
    return [each for each in parameters if each.dim() == 2], [each for each in parameters if each.dim() == 1]


def adamw(model: nn.Sequential) -> Optimizers:
    matrices, biases = by_axes(model)
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "betas": (0.8, 0.99)}]
    return [optim.AdamW(groups)]


def frozen_adamw(model: nn.Sequential) -> Optimizers:
    """Return AdamW without the first layer, which is frozen."""
    model[0].requires_grad_(False)
    return [optim.AdamW(model[2:].parameters(), lr=0.01)]


def thawed_half_way(given: Loop, batch: Tensor) -> None:
    """The first layer is added to the optimizer half-way."""
    (optimizer,) = given.optimizers
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    added = [weight for weight in given.model.parameters() if id(weight) not in held]
    if given.done == STEPS // 2:
        given.model[0].requires_grad_()
        if added:
            optimizer.add_param_group({"params": added, "lr": optimizer.param_groups[0]["lr"]})
    scheduled_and_clipped(given, batch)


def several(model: nn.Sequential) -> Optimizers:
    return [
        optim.SGD(model[0].parameters(), lr=0.1, momentum=0.5),
        optim.AdamW(model[2].parameters(), lr=0.01),
        optim.SGD(model[4].parameters(), lr=0.2),
    ]


def of(kind: Callable[..., optim.Optimizer], **settings: Any) -> Maker:
    """Return a maker of one optimizer of all parameters. Biases form a group with a smaller step size."""

    def optimizers(model: nn.Sequential) -> Optimizers:
        weights, biases = by_axes(model)
        return [kind([{"params": weights}, {"params": biases, "lr": settings["lr"] / 2}], **settings)]

    optimizers.__name__ = " ".join([kind.__name__, *(f"{key}={value}" for key, value in settings.items())])
    return optimizers


def of_timm(name: str, *, together: bool = False, **settings: Any) -> Maker:
    """Return a maker of an optimizer of timm. Parameters form one group (`together`), or the groups of `of`."""

    def optimizers(model: nn.Sequential) -> Optimizers:
        load_torchvision()
        kind = getattr(pytest.importorskip("timm.optim"), name)
        return [kind(model.parameters(), **settings)] if together else of(kind, **settings)(model)

    optimizers.__name__ = " ".join(["timm", name, *(f"{key}={value}" for key, value in settings.items())])
    return optimizers


def muon_with_adamw(**settings: Any) -> Maker:
    """Return a maker of Muon for matrices with AdamW for other parameters."""

    def optimizers(model: nn.Sequential) -> Optimizers:
        weights, biases = by_axes(model)
        return [optim.Muon(weights, **settings), optim.AdamW(biases, lr=0.01)]

    optimizers.__name__ = " ".join(["Muon", *(f"{key}={value}" for key, value in settings.items())])
    return optimizers


OPTIMIZERS = (
    of(optim.RMSprop, lr=0.01, weight_decay=0.1),
    of(optim.RMSprop, lr=0.01, momentum=0.9, centered=True, foreach=True),
    of(optim.RMSprop, lr=0.01, momentum=0.5, weight_decay=0.1, maximize=True),
    of(optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    of(optim.Adagrad, lr=0.1, maximize=True, fused=True),
    of(optim.Adadelta, lr=1.0, weight_decay=0.1),
    of(optim.Adadelta, lr=1.0, maximize=True, foreach=True),
    of(optim.Adamax, lr=0.01, weight_decay=0.1),
    of(optim.NAdam, lr=0.01, weight_decay=0.1, momentum_decay=0.1),
    of(optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    of(optim.RAdam, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, decoupled_weight_decay=True),
    of(optim.RAdam, lr=0.01, weight_decay=0.1, maximize=True, foreach=True),
    of(optim.ASGD, lr=0.1, lambd=0.01, alpha=0.5, t0=3, weight_decay=0.1),
    of(optim.Adafactor, lr=0.01, weight_decay=0.1),
    of(optim.Adafactor, lr=0.1, d=1.5, maximize=True, foreach=True),
    of(optim.Rprop, lr=0.01, maximize=True),
    muon_with_adamw(lr=0.02),
    muon_with_adamw(lr=0.02, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_steps=3),
    of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    of(optim.Adam, lr=0.01, weight_decay=0.1, maximize=True, foreach=False),
    of(optim.Adam, lr=0.05, betas=(0.5, 0.5), amsgrad=True),
    of(optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True, fused=True),
    of(optim.AdamW, lr=0.01, weight_decay=0.1, maximize=True, fused=True),
    of(optim.AdamW, lr=0.01, weight_decay=0.1, foreach=True),
    of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    of(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    of(other_optimizers.Lion, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    of(other_optimizers.SignSGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    of(other_optimizers.SignSGD, lr=0.01),
    of(other_optimizers.LARS, lr=0.5, weight_decay=0.1, trust_coefficient=0.02),
    of_timm("Lion", lr=0.01, weight_decay=0.1, corrected_weight_decay=True, maximize=True, foreach=True),
    of_timm("Lion", lr=0.01, caution=True, foreach=False),
    of_timm("Lamb", lr=0.01, weight_decay=0.1, max_grad_norm=0.1, foreach=True),
    of_timm("Lamb", lr=0.01, max_grad_norm=None, always_adapt=True, trust_clip=True, grad_averaging=False),
    of_timm("Lamb", lr=0.01, weight_decay=0.1, decoupled_decay=True, caution=True, bias_correction=False),
    of_timm("Lars", lr=1.0, momentum=0.9, weight_decay=0.1, trust_coeff=0.02, nesterov=True),
    of_timm("Lars", lr=0.1, momentum=0.5, dampening=0.1, trust_coeff=0.02, always_adapt=True, trust_clip=True),
    of_timm("Lars", lr=0.1, weight_decay=0.1),
    of(other_optimizers.SGDScheduleFree, lr=0.1, weight_decay=0.1, r=1.0, warmup_steps=2, train_mode=True),
    of(other_optimizers.AdamWScheduleFree, lr=0.01, train_mode=True),
    of(other_optimizers.AdamWScheduleFree, lr=0.01, weight_decay=0.1, warmup_steps=3, train_mode=True),
)
"""Other optimizers of PyTorch, and of other libraries: each option at least once, in some way of computing."""


# --- Networks that draw random numbers in training.


class RandomNet(nn.Sequential):
    """Three layers, and a call of them that is random in training."""

    def __init__(self, way: Callable[[RandomNet, Tensor], Tensor]) -> None:
        super().__init__(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)

    def read(self, hidden: Tensor) -> Tensor:
        outputs: Tensor = self[2](hidden)
        return outputs

    def noise(self, *shape: int) -> Tensor:
        """Return random numbers in [0, 1), and ones in evaluation mode."""
        return torch.rand(shape, dtype=torch.float64) if self.training else torch.ones(shape, dtype=torch.float64)


Way: TypeAlias = Callable[[RandomNet, Tensor], Tensor]


def dropping(net: RandomNet, x: Tensor) -> Tensor:
    hidden = functional.dropout(net[0](x).relu(), 0.3, net.training)
    return net.read(functional.dropout(functional.gelu(net[1](hidden)), 0.5, net.training))


def attending(net: RandomNet, x: Tensor) -> Tensor:
    heads = torch.outer(torch.arange(1.0, 5, dtype=x.dtype), x.new_ones(1)) * net[0](x)[:, None, None]
    mixed = functional.scaled_dot_product_attention(heads, heads.tanh(), heads, dropout_p=0.4 * net.training)
    return net.read(net[1](mixed.mean((1, 2))).tanh())


def recomputing(net: RandomNet, x: Tensor, *, reentrant: bool = True) -> Tensor:
    """Call the second layer with a checkpoint, which computes its activations twice, with the same masks."""

    def part(hidden: Tensor) -> Tensor:
        return functional.dropout(net[1](hidden.tanh()), 0.4, net.training)

    hidden = net[0](x)
    needs_gradients = torch.is_grad_enabled()
    return net.read(recomputed(part, hidden, use_reentrant=reentrant) if needs_gradients else part(hidden))


def recomputing_without_reentry(net: RandomNet, x: Tensor) -> Tensor:
    return recomputing(net, x, reentrant=False)


def skipping(net: RandomNet, x: Tensor) -> Tensor:
    """Call the layers, and skip one of them in half of the calls."""
    hidden = net[0](x).tanh()
    return net.read(net[1](hidden).tanh() if float(net.noise(1)) > 0.5 else hidden)


def noise_added(net: RandomNet, x: Tensor) -> Tensor:
    hidden: Tensor = net[0](x)
    return net.read((hidden + torch.randn_like(hidden) if net.training else hidden).tanh())


def masked(net: RandomNet, x: Tensor) -> Tensor:
    """Call the layers, and drop the same features in all examples."""
    return net.read(net[0](x).tanh().masked_fill(net.noise(8) < 0.3, 0.0))


def dropping_after_selu(net: RandomNet, x: Tensor) -> Tensor:
    return net.read(functional.alpha_dropout(functional.selu(net[0](x)), 0.3, net.training))


def transposed(net: RandomNet, x: Tensor) -> Tensor:
    """Call the layers on transposed activations: in memory, features come before examples."""
    hidden: Tensor = net[0](x).t()
    return net.read(functional.dropout(hidden, 0.3, net.training).t().tanh())


WAYS: tuple[Way, ...] = (
    dropping,
    attending,
    transposed,
    skipping,
    noise_added,
    masked,
    dropping_after_selu,
    recomputing,
    recomputing_without_reentry,
)


def random_loop(optimizers: Maker, way: Way = dropping) -> Loop:
    torch.manual_seed(0)
    model = RandomNet(way).double()
    x, queries, y = torch.randn(EXAMPLES, 4).double(), torch.randn(3, 4).double(), torch.randint(3, (EXAMPLES,))
    return Loop(model, optimizers(model), x, y, queries)


WORDS = 7  # of the language


class Language(nn.Module):
    """A causal layer of attention over tokens, with a row of outputs for each token."""

    def __init__(self, outputs: int = WORDS, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.read, self.norm = nn.Embedding(WORDS, 6), nn.Linear(6, 18), nn.LayerNorm(6)
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(6, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x)
        query, key, value = self.read(self.norm(hidden)).chunk(3, 2)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        outputs: Tensor = self.out(self.dropout(hidden))
        return outputs


# --- Steps.


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
    """Compute one loss from two calls, and the gradients of both at once."""
    given.zero()
    one, other = given.model(given.x[batch[:2]]), given.model(given.x[batch[2:4]])
    (one * other).sum().backward()
    given.step()


def with_a_scaler(given: Loop, batch: Tensor) -> None:
    """Train with a gradient scaler, which divides by its scale and skips a step."""
    given.zero()
    given.back(batch, 1 / 1024)
    for weight in given.model.parameters():
        assert weight.grad is not None
        weight.grad /= 1024
    if given.done != 3:
        given.step()


def with_the_scaler_of_pytorch(given: Loop, batch: Tensor) -> None:
    """Train with PyTorch's gradient scaler. A loss overflows, so that it skips a step."""
    given.scaler = given.scaler or torch.amp.GradScaler("cpu", init_scale=1024.0)
    given.zero()
    loss = cross_entropy(given.model(given.x[batch]), given.y[batch])
    given.scaler.scale(loss * (torch.inf if given.done == 3 else 1.0)).backward()  # type: ignore[no-untyped-call]
    given.scaler.step(given.optimizers[0])
    given.scaler.update()


def zeroed_late(given: Loop, batch: Tensor) -> None:
    outputs = given.model(given.x[batch])
    given.zero()
    cross_entropy(outputs, given.y[batch]).backward()  # type: ignore[no-untyped-call]
    given.step()


def by_sam(given: Loop, batch: Tensor) -> None:
    (optimizer,) = given.optimizers
    assert isinstance(optimizer, SAM)
    given.back(batch)
    optimizer.first_step(zero_grad=True)
    for part in torch.split(batch, 3):
        given.back(part, 2)
    optimizer.second_step(zero_grad=True)


def by_sam_with_a_closure(given: Loop, batch: Tensor) -> None:
    given.zero()
    given.back(batch)
    given.optimizers[0].step(lambda: given.back(batch))  # type: ignore[arg-type, return-value]


def by_hand_like_sam(given: Loop, batch: Tensor) -> None:
    """Move the weights up, and back down by the same amount, which rounds."""
    given.zero()
    given.back(batch)
    moves = [0.05 * weight.grad for weight in given.model.parameters() if weight.grad is not None]
    with torch.no_grad():
        torch._foreach_add_(list(given.model.parameters()), moves)
    given.zero()
    given.back(batch)
    with torch.no_grad():
        torch._foreach_sub_(list(given.model.parameters()), moves)
    given.step()


def by_hand_past_the_count(given: Loop, batch: Tensor) -> None:
    """Move the weights by `.data`, which torch does not count, from the fourth step on."""
    given.zero()
    given.back(batch)
    if given.done > 2:
        kept = [weight.detach().clone() for weight in given.model.parameters()]
        for weight in given.model.parameters():
            assert weight.grad is not None
            weight.data.add_(0.05 * weight.grad)
        given.zero(set_to_none=False)
        given.back(batch)
        for weight, before in zip(given.model.parameters(), kept, strict=True):
            weight.data.copy_(before)
    given.step()


def sam(base: Callable[..., optim.Optimizer], **settings: Any) -> Maker:
    def optimizers(model: nn.Sequential) -> Optimizers:
        return [SAM(model.parameters(), base, **settings)]

    optimizers.__name__ = f"SAM of {base.__name__}"
    return optimizers


SHARPNESS: tuple[tuple[Maker, Body], ...] = (
    (sam(optim.SGD, lr=0.1, momentum=0.9), by_sam),
    (sam(optim.AdamW, lr=0.01, weight_decay=0.1, adaptive=True, rho=0.5), by_sam),
    (sam(optim.SGD, lr=0.1), by_sam_with_a_closure),
    (momentum, by_hand_like_sam),
    (adamw, by_hand_like_sam),
    (momentum, by_hand_past_the_count),
)
"""Loops that take a gradient, move the weights along it, and train with the gradient there."""


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


# --- Laws.


def apart(found: Any, expected: Any) -> float:
    """Return max |found − expected| / max |expected|."""
    ours, theirs = (
        torch.as_tensor(each if isinstance(each, Tensor) else np.asarray(each)) for each in (found, expected)
    )
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def outputs_of(model: nn.Module, queries: Tensor) -> Tensor:
    """Return the outputs at the queries in evaluation mode."""
    was_training = model.training
    with torch.no_grad():
        outputs: Tensor = model.eval()(queries)
    model.train(was_training)
    return outputs


def parts_of(trace: Trace, **more: Any) -> xr.Dataset:
    """Return the attribution, without a page in the folder, whose pictures take long."""
    return replace(trace, folder=None).attribute(quiet=True, **more)


def missed(found: xr.Dataset, change: Any = None, *parts: str) -> float:
    """Return the distance of contributions, decay and the named parts from the change, relative to the change."""
    whole = found["contribution"].sum("example") + sum(found[name] for name in ("decay", *parts))
    return apart(whole, found["change"] if change is None else change)


def outputs_add_up(found: xr.Dataset, change: Tensor, bound: float, *, cancels: bool) -> None:
    """Parts and steps add up to the change of every query and output, and each secant closes.

    Unless parts cancel, the movement by rounding is as small as the rounding of the sum.
    """
    parts, steps, decay, rounding = (
        torch.from_numpy(found[name].values) for name in ("contribution", "by_step", "decay", "rounding")
    )
    size = change.norm()
    if cancels:
        size = parts.abs().sum(2).max().clamp(min=size)
    else:
        assert rounding.abs().max() <= bound * size
    assert (parts.sum(2) + decay + rounding - change).abs().max() <= bound * size
    assert (steps.sum(2) - change).abs().max() <= bound * size
    assert float(found["closure"].max()) <= 1e3 * bound  # relative to steps, and the last steps are small


def closes(given: Loop, start: Tensor, found: xr.Dataset, *, cancels: bool = False) -> None:
    """Assert that all parts add up to the change of the outputs at the queries."""
    change = outputs_of(given.model, given.queries) - start
    assert change.norm() > 0
    outputs_add_up(found, change, BOUNDS[change.dtype], cancels=cancels)


def same_parts(ours: Trace, theirs: Trace, close: float = CLOSE) -> None:
    """Assert that contributions are equal in both traces, and that every step closes."""
    here, there = parts_of(ours), parts_of(theirs)
    size = float(abs(there["contribution"]).max())
    for name in {"contribution", "decay", "rounding", "change"} & set(there):
        assert float(abs(here[name] - there[name]).max()) <= close * size, name
    assert sorted(here["example"].values) == sorted(there["example"].values)
    assert float(here["closure"].max()) < 1e3 * close  # relative to steps, and the last steps are small


# --- Other weights of examples.


def loss_of(given: Loop) -> Any:
    """Return the loss of each example. The digest of its input identifies its label."""
    labels = dict(zip(digests(given.x), given.y.tolist(), strict=True))

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return 7 * cross_entropy(outputs, torch.tensor([labels[name] for name in call.ids]), reduction="none")

    return loss


def trained_with(given: Loop, body: Body, weights: Tensor) -> Tensor:
    """Run a loop with these weights of examples. Return the outputs at the queries."""
    given.weights = weights
    train(given, body)
    return outputs_of(given.model, given.queries)


def weighing(changed: dict[int, float]) -> Tensor:
    """Return the weights of all examples: 1, except for some."""
    weights = torch.ones(EXAMPLES, dtype=torch.float64)
    for example, weight in changed.items():
        weights[example] = weight
    return weights
