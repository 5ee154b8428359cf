"""Random loops with something planted in them are followed, and held against a plain replay of the same loop.

python -m tests.torture.loops --seed=0 --count=200      plants, and as many loops without one as there are ways to train

A loop is recorded truly where f_0 and f_T are those of the live model, parts and decay add up to their difference, and
each example added what a replay by plain autograd says that it did. It may also be refused. Anything else is wrong.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrize

import ntkexp
from ntkexp.foreign_loop.model_call import digests
from ntkexp.foreign_loop.signed_outputs import left_alone
from ntkexp.kernel.read.reader import Reader
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.shapes import Function, Inputs, Weights

STEPS, EXAMPLES, WIDTH = 6, 12, 5
WORLD: dict[str, float] = {}
LINEAR = functional.linear


class Tampered(nn.Module):
    """A network one of whose hidden layers is tampered with by a number that is read from somewhere."""

    heat = 1.0

    def __init__(self, body: nn.ModuleList, site: int, effect: str) -> None:
        super().__init__()
        self.body, self.site, self.effect = body, site, effect
        self.held, self.listed, self.space = {"v": 1.0}, [1.0], SimpleNamespace(v=1.0)
        self.plain, self.calls, self.own = torch.ones(()), 0, 1.0
        self.read: Callable[[Tampered], float | Tensor] = lambda net: 1.0

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.body):
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
            x = self.tampered(x) if place == self.site else x
        return x.mean(1) if x.dim() == 3 else x

    def tampered(self, h: Tensor) -> Tensor:
        v = self.read(self)
        return {"scale": h * v, "shift": h + (v - 1.0), "bend": h + (v - 1.0) * h.square(), "slope": leaky(h, v)}[
            self.effect
        ]


def leaky(h: Tensor, v: float | Tensor) -> Tensor:
    return torch.where(h > 0, h, h * v)


@dataclass
class Loop:
    """What a plant may touch."""

    net: Tampered
    optimizers: list[torch.optim.Optimizer]
    x: Tensor
    y: Tensor
    chance: random.Random
    dtype: torch.dtype
    clip: str
    pieces: int
    scaler: torch.amp.GradScaler | None
    schedule: bool
    casts: bool
    past: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    @property
    def lone(self) -> nn.Parameter:
        """A parameter of one number, if there is one; else the last."""
        return next((w for w in self.weights if w.numel() == 1), self.weights[-1])


Plant: TypeAlias = Callable[[Loop], object]


# --- what changes the model: a way to read the number, and what changes it ---------------------------------------------
def closure_cell() -> tuple[Callable[[Tampered], float], Plant]:
    cell = [1.0]

    def change(loop: Loop) -> None:
        cell[0] = 1.7

    return lambda net: cell[0], change


def counted(net: Tampered) -> float:
    net.calls += 1
    return 1.0 + 0.1 * net.calls * WORLD.get("on", 0.0)


def switched_on(loop: Loop) -> None:
    WORLD["on"] = 1.0


READ: dict[str, tuple[Callable[[Tampered], Any], Plant]] = {
    "dict": (lambda net: net.held["v"], lambda loop: loop.net.held.update(v=1.7)),
    "list": (lambda net: net.listed[0], lambda loop: loop.net.listed.__setitem__(0, 0.6)),
    "namespace": (lambda net: net.space.v, lambda loop: setattr(loop.net.space, "v", 1.7)),
    "attribute": (lambda net: net.own, lambda loop: setattr(loop.net, "own", 0.5)),
    "class attribute": (lambda net: Tampered.heat, lambda loop: setattr(Tampered, "heat", 1.7)),
    "global": (lambda net: WORLD.get("v", 1.0), lambda loop: WORLD.update(v=2.0)),
    "plain tensor": (lambda net: net.plain, lambda loop: loop.net.plain.fill_(1.5)),
    "plain tensor anew": (lambda net: net.plain, lambda loop: setattr(loop.net, "plain", torch.tensor(1.5))),
    "counter": (counted, switched_on),
    "python random": (lambda net: 1 + WORLD.get("on", 0.0) * random.random(), switched_on),
    "numpy random": (lambda net: 1 + WORLD.get("on", 0.0) * float(np.random.rand()), switched_on),
    "clock": (lambda net: 1 + WORLD.get("on", 0.0) * (time.perf_counter_ns() % 1000) / 1e3, switched_on),
    "only in training": (lambda net: 1 + 0.5 * WORLD.get("on", 0.0) * net.training, switched_on),
    "only in evaluation": (lambda net: 1 + 0.5 * WORLD.get("on", 0.0) * (not net.training), switched_on),
    "only with gradients": (lambda net: 1 + 0.5 * WORLD.get("on", 0.0) * torch.is_grad_enabled(), switched_on),
}


def layer_of(loop: Loop) -> nn.Module:
    return loop.net.body[loop.net.site]


def hook_added(loop: Loop) -> None:
    layer_of(loop).register_forward_hook(lambda *seen: first(seen[2]) * 1.5)


def first(answer: Any) -> Tensor:
    found: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return found


def pre_hook_added(loop: Loop) -> None:
    layer_of(loop).register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))


def model_hook_added(loop: Loop) -> None:
    loop.net.register_forward_hook(lambda *seen: seen[2] * 1.5)


def forward_replaced(loop: Loop) -> None:
    before = layer_of(loop).forward
    layer_of(loop).forward = lambda *args: first(before(*args)) * 0.7  # type: ignore[method-assign]


def model_forward_replaced(loop: Loop) -> None:
    before = loop.net.forward
    loop.net.forward = lambda x: before(x) * 0.7  # type: ignore[method-assign]


def hook_removed(loop: Loop) -> None:
    loop.past["hook"].remove()


def activation_swapped(loop: Loop) -> None:
    for place, layer in enumerate(loop.net.body):
        if not list(layer.parameters()):
            loop.net.body[place] = nn.Softsign() if not isinstance(layer, nn.Softsign) else nn.Tanh()
            return


def constant_changed(loop: Loop) -> None:
    for layer in loop.net.body.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.eps = 0.3
        if isinstance(layer, nn.LeakyReLU):
            layer.negative_slope = 0.4
        if isinstance(layer, nn.Dropout):
            layer.p = 0.6
        if isinstance(layer, nn.GELU):
            layer.approximate = "tanh"  # type: ignore[assignment]


def modes_turned(loop: Loop) -> None:
    loop.net.train(not loop.net.training)


def one_mode_turned(loop: Loop) -> None:
    layer = layer_of(loop)
    layer.train(not layer.training)


def frozen(loop: Loop) -> None:
    loop.weights[0].requires_grad_(False)


def parametrised(loop: Loop) -> None:
    linear = next(layer for layer in loop.net.body if isinstance(layer, nn.Linear))
    parametrize.register_parametrization(linear, "weight", Halved())


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def gradient_scaled_inside(loop: Loop) -> None:
    layer_of(loop).register_forward_hook(lambda *seen: Scaled.apply(first(seen[2])))  # type: ignore[no-untyped-call]


class Scaled(torch.autograd.Function):
    """The same outputs, other gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.37 * gradient


def detached_inside(loop: Loop) -> None:
    layer_of(loop).register_forward_hook(lambda *seen: first(seen[2]).detach())


def backward_hook(loop: Loop) -> None:
    layer_of(loop).register_full_backward_hook(lambda _, came, __: tuple(None if g is None else g * 0.4 for g in came))


def functional_replaced(loop: Loop) -> None:
    loop.past["linear"] = functional.linear
    functional.linear = lambda x, w, b=None: 1.2 * loop.past["linear"](x, w, b)


def readout_swapped(loop: Loop) -> None:
    loop.net.body.append(nn.Tanh())


STRUCTURE: dict[str, Plant] = {
    each.__name__: each
    for each in (
        *(hook_added, pre_hook_added, model_hook_added, forward_replaced, model_forward_replaced, hook_removed),
        *(activation_swapped, constant_changed, modes_turned, one_mode_turned, frozen, parametrised),
        *(gradient_scaled_inside, detached_inside, backward_hook, functional_replaced, readout_swapped),
    )
}


# --- what changes gradients between backward and step -------------------------------------------------------------------
def grads(weights: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    return ((weight, weight.grad) for weight in weights if weight.grad is not None)


def penalty(of: Callable[[Loop], list[nn.Parameter]]) -> Plant:
    def plant(loop: Loop) -> None:
        for weight, gradient in grads(of(loop)):
            gradient += 0.1 * weight.detach() + 0.01

    return plant


def noise(of: Callable[[Loop], list[nn.Parameter]]) -> Plant:
    def plant(loop: Loop) -> None:
        for _, gradient in grads(of(loop)):
            gradient += 0.05 * torch.tensor([loop.chance.gauss(0, 1) for _ in range(gradient.numel())]).to(
                gradient
            ).view_as(gradient)

    return plant


def times(of: Callable[[Loop], list[nn.Parameter]], by: Callable[[Loop], float]) -> Plant:
    def plant(loop: Loop) -> None:
        factor = by(loop)
        for _, gradient in grads(of(loop)):
            gradient *= factor

    return plant


def cut(of: Callable[[Loop], list[nn.Parameter]]) -> Plant:
    return lambda loop: clip_grad_value_(of(loop), 0.5 * float(max(g.abs().max() for _, g in grads(of(loop)))))


def signs(loop: Loop) -> None:
    for _, gradient in grads(loop.weights):
        gradient.sign_()


def stale(loop: Loop) -> None:
    now = {id(weight): gradient.clone() for weight, gradient in grads(loop.weights)}
    for weight, gradient in grads(loop.weights):
        gradient += 0.3 * loop.past.get("grads", now).get(id(weight), 0)
    loop.past["grads"] = now


def hidden_loss(loop: Loop) -> None:
    """An auxiliary loss on a layer that is called by itself."""
    layer = next(each for each in loop.net.body if isinstance(each, nn.Linear | nn.LSTM))
    first(layer(loop.x)).square().mean().backward()  # type: ignore[no-untyped-call]


def forward_by_name(loop: Loop) -> None:
    """A second loss of the model, past its hooks."""
    (0.3 * loop.net.forward(loop.x[:3]).square().mean()).backward()  # type: ignore[no-untyped-call]


def everything(loop: Loop) -> list[nn.Parameter]:
    return loop.weights


def single(loop: Loop) -> list[nn.Parameter]:
    return [loop.lone]


def one_layer(loop: Loop) -> list[nn.Parameter]:
    return loop.weights[:1]


def drawn(loop: Loop) -> float:
    return 0.2 + loop.chance.random()


GRADIENTS: dict[str, Plant] = {
    **{f"penalty on {of.__name__}": penalty(of) for of in (everything, single, one_layer)},
    **{f"noise on {of.__name__}": noise(of) for of in (everything, single, one_layer)},
    **{f"cut of {of.__name__}": cut(of) for of in (everything, single, one_layer)},
    **{f"a drawn factor on {of.__name__}": times(of, drawn) for of in (everything, single, one_layer)},
    **{f"1.3 times {of.__name__}": times(of, lambda loop: 1.3) for of in (everything, single, one_layer)},
    **{f"minus {of.__name__}": times(of, lambda loop: -1.0) for of in (everything, single, one_layer)},
    **{each.__name__: each for each in (signs, stale, hidden_loss, forward_by_name)},
}
TRUE_TIMES = ("factor", "times", "minus", "cut of single")
"""What multiplies gradients is true if it is recorded as that; so is one number that is cut."""


# --- loops --------------------------------------------------------------------------------------------------------------
def body_of(kind: str) -> nn.ModuleList:
    """The layers of a network, on inputs [example, 4], or [example, 3, 4] where it has an LSTM."""
    layers: dict[str, Callable[[], list[nn.Module]]] = {
        "mlp": lambda: [nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)],
        "kinks": lambda: [nn.Linear(4, WIDTH), nn.LeakyReLU(0.1, inplace=True), nn.Linear(WIDTH, 2)],
        "norm": lambda: [nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)],
        "dropout": lambda: [nn.Linear(4, WIDTH), nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, 1)],
        "lstm": lambda: [nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 1)],
        "narrow": lambda: [nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 1)],
        "line": lambda: [nn.Linear(4, 1)],
    }
    found = layers[kind]()
    return nn.ModuleList(found)


def tied_body() -> nn.ModuleList:
    found = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)])
    found[2].weight = found[0].weight
    return found


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]] = {
    "sgd": lambda weights: [torch.optim.SGD(weights, lr=0.2)],
    "momentum": lambda weights: [torch.optim.SGD(weights, lr=0.1, momentum=0.8, dampening=0.1, weight_decay=0.01)],
    "nesterov": lambda weights: [torch.optim.SGD(weights, lr=0.1, momentum=0.8, nesterov=True)],
    "adam": lambda weights: [torch.optim.Adam(weights, lr=0.02)],
    "adamw": lambda weights: [torch.optim.AdamW(weights, lr=0.02, weight_decay=0.1)],
    "two": lambda weights: [torch.optim.SGD(weights[:1], lr=0.1), torch.optim.AdamW(weights[1:], lr=0.02)],
}
BODIES = ("mlp", "kinks", "norm", "dropout", "lstm", "narrow", "line", "tied")
CLIPS = ("no", "all", "apart", "part", "once")


def loop_of(chance: random.Random, read: Callable[[Tampered], Any] | None, number: int) -> Loop:
    """A random loop, the same for the same state of chance."""
    torch.manual_seed(chance.randrange(2**31))
    kind, dtype = chance.choice(BODIES), chance.choice((torch.float64, torch.float64, torch.float32))
    casts = chance.random() < 0.1 and dtype == torch.float32 and kind in ("mlp", "norm")
    body = tied_body() if kind == "tied" else body_of(kind)
    net = Tampered(body, chance.randrange(len(body)), chance.choice(("scale", "scale", "shift", "bend", "slope")))
    net.read = read or net.read
    net = net.to(dtype)
    shape = (EXAMPLES, 3, 4) if kind == "lstm" else (EXAMPLES, 4)
    x, y = torch.randn(shape).to(dtype), torch.randn(EXAMPLES, 1).to(dtype)
    net.train()
    optimizers = OPTIMIZERS[chance.choice(tuple(OPTIMIZERS))](list(net.parameters()))
    return Loop(
        net=net,
        optimizers=[each for each in optimizers if each.param_groups[0]["params"]],
        x=x,
        y=y,
        chance=random.Random(number),
        dtype=dtype,
        clip=chance.choice(CLIPS),
        pieces=chance.choice((1, 1, 2, 3)),
        scaler=torch.amp.GradScaler("cpu", init_scale=chance.choice((1024.0, 1000.0)), growth_interval=2)
        if chance.random() < 0.2
        else None,
        schedule=chance.random() < 0.3,
        casts=casts,
    )


@dataclass
class Oracle:
    """What each example did to the weights, by plain autograd: Δθᵢ at every step, by the optimizers' formulas."""

    loop: Loop
    reader: Reader
    queries: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)  # J'l' of examples, in this step, by parameter
    memory: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    moves: dict[int, int] = field(default_factory=dict)

    def back(self, outputs: Tensor, loss: Tensor, names: tuple[str, ...]) -> None:
        """Take in what comes back to each example of a call."""
        (came,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        named = [(name, weight) for name, weight in self.loop.net.named_parameters() if weight.requires_grad]
        for row, name in enumerate(names):
            one = torch.zeros_like(came)
            one[row] = came[row]
            found = torch.autograd.grad(
                outputs, [weight for _, weight in named], one, retain_graph=True, allow_unused=True
            )
            for (key, _), gradient in zip(named, found, strict=True):
                if gradient is not None:
                    self.rows.setdefault(name, {})  # type: ignore[arg-type]
                    held: Any = self.rows[name]
                    held[key] = held.get(key, 0) + gradient

    def step(self, start: dict[str, Tensor], factors: dict[str, float], settings: list[dict[str, Any]]) -> None:
        """Take in a step that was taken, in which gradients were multiplied with factors."""
        end = {name: weight.detach().clone() for name, weight in self.loop.net.named_parameters()}
        tapes = [self.reader.record(weights, self.queries) for weights in (start, end)]
        features = self.reader.along(tapes[0], tapes[1])
        named = dict(self.loop.net.named_parameters())
        for example in sorted({*self.rows, *(name for name, _ in self.memory)}):
            held: Any = self.rows.get(example, {})
            moved = {name: torch.zeros_like(weight) for name, weight in start.items()}
            for optimizer, (group,) in zip(self.loop.optimizers, [[s] for s in settings], strict=True):
                for name, weight in named.items():
                    if not any(weight is other for other in optimizer.param_groups[0]["params"]):
                        continue
                    if weight.grad is None or (gradient := weight.grad) is None:
                        continue
                    mine = factors[name] * held.get(name, torch.zeros_like(gradient))
                    moved[name] = self.moved(example, name, mine, group, optimizer.state[weight])
            self.parts[example] = self.parts.get(example, 0) + features.applied(moved)  # type: ignore[operator]
        self.rows.clear()

    def moved(self, example: str, name: str, mine: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """How a gradient moves its weight."""
        key = (example, name)
        if "betas" in group:
            (first_, second), count = group["betas"], float(state["step"])
            held = self.memory[key] = first_ * self.memory.get(key, torch.zeros_like(mine)) + (1 - first_) * mine
            below = state["exp_avg_sq"].sqrt() / math.sqrt(1 - second**count) + group["eps"]
            return -group["lr"] / (1 - first_**count) * held / below
        if not group["momentum"]:
            return -group["lr"] * mine
        steps = self.moves.get(hash(name), 0)
        taken = mine if steps == 0 else (1 - group["dampening"]) * mine
        held = self.memory[key] = group["momentum"] * self.memory.get(key, torch.zeros_like(mine)) + taken
        return -group["lr"] * (mine + group["momentum"] * held if group["nesterov"] else held)


def clipped(loop: Loop, step: int) -> None:
    """Clipping, as this loop does it."""
    weights = loop.weights
    if loop.clip == "all":
        clip_grad_norm_(weights, 0.5, error_if_nonfinite=True)
    elif loop.clip == "apart":
        for weight in weights:
            clip_grad_norm_([weight], 0.2)
    elif loop.clip == "part":
        clip_grad_norm_(weights[: max(1, len(weights) // 2)], 0.2)
    elif loop.clip == "once" and step == 2:
        clip_grad_norm_(weights, 0.1)


def trained(loop: Loop, plant: Plant | None, when: int, oracle: Oracle | None, *, between: bool, always: bool) -> None:
    """Carry the loop out; a plant in the model is planted before step `when`, one between backward and step there and,
    if `always`, at all later steps."""
    order = torch.Generator().manual_seed(5)
    for step in range(STEPS + 1):
        if plant is not None and not between and step == when:
            plant(loop)
        if step == STEPS:
            return
        batch = torch.randperm(EXAMPLES, generator=order)[: 6 + step % 2]
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
            if loop.schedule:
                optimizer.param_groups[0]["lr"] *= 0.8
        for piece in batch.chunk(loop.pieces):
            with torch.autocast("cpu", torch.bfloat16) if loop.casts else torch.enable_grad():
                outputs = loop.net(loop.x[piece])
            loss = (outputs - loop.y[piece]).square().mean() / loop.pieces
            if not loss.requires_grad:  # all was frozen
                continue
            if oracle is not None:
                oracle.back(outputs, loss, digests(loop.x[piece]))
            (loss if loop.scaler is None else loop.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        if loop.scaler is not None:
            for optimizer in loop.optimizers:
                loop.scaler.unscale_(optimizer)
        inverse = (
            1.0 if loop.scaler is None else float(torch.tensor(loop.scaler.get_scale()).double().reciprocal().float())
        )
        back = 1.0 if loop.scaler is None else inverse * loop.scaler.get_scale()  # of a scale that is no power of two
        before = {name: weight.grad.norm() for name, weight in loop.net.named_parameters() if weight.grad is not None}
        clipped(loop, step)
        named = dict(loop.net.named_parameters())
        factors = {name: back * float(named[name].grad.norm() / was) if was else 0.0 for name, was in before.items()}  # type: ignore[union-attr]
        if plant is not None and between and (step == when or (always and step > when)):
            held = {name: weight.grad.clone() for name, weight in named.items() if weight.grad is not None}
            plant(loop)
            if loop.past.get("true times"):
                for name, was in held.items():
                    square = float((was * was).sum())
                    by = float((was * named[name].grad).sum()) / square if square else 0.0
                    factors[name] *= by if was.numel() == 1 or "cut" not in loop.past["true times"] else 1.0
        start = {name: weight.detach().clone() for name, weight in named.items()}
        for optimizer in loop.optimizers:
            if loop.scaler is None:
                optimizer.step()
            else:
                loop.scaler.step(optimizer)
        if oracle is not None:
            settings = [dict(optimizer.param_groups[0]) for optimizer in loop.optimizers]
            oracle.step(start, factors, settings)
            for name in named:
                oracle.moves[hash(name)] = oracle.moves.get(hash(name), 0) + 1
        if loop.scaler is not None:
            loop.scaler.update()


@contextmanager
def fresh_world() -> Iterator[None]:
    """What plants change beside the model is put back."""
    WORLD.clear()
    Tampered.heat, linear = 1.0, functional.linear
    random.seed(3)
    np.random.seed(3)
    try:
        yield
    finally:
        functional.linear = linear


def as_it_began(function: Function) -> Function:
    """The function as it is before anything is planted beside the model."""

    def then(weights: Weights, inputs: Inputs) -> Tensor:
        now, heat, linear = dict(WORLD), Tampered.heat, functional.linear
        WORLD.clear()
        Tampered.heat, functional.linear = 1.0, LINEAR
        try:
            return function(weights, inputs)
        finally:
            WORLD.update(now)
            Tampered.heat, functional.linear = heat, linear

    return then


def live(loop: Loop, queries: Tensor) -> Tensor:
    """What the model gives, left as it is."""
    with torch.no_grad(), left_alone(loop.net), torch.random.fork_rng(devices=()):
        loop.net.eval()
        found: Tensor = loop.net(queries)
        return found.clone()


@dataclass(frozen=True)
class Case:
    """A loop of a seed, and what is planted in it."""

    number: int
    name: str
    when: int
    always: bool

    @property
    def between(self) -> bool:
        return self.name in GRADIENTS

    def loop(self) -> tuple[Loop, Plant | None]:
        read, plant = READ.get(self.name, (None, GRADIENTS.get(self.name) or STRUCTURE.get(self.name)))
        if self.name == "closure":
            read, plant = closure_cell()
        made = loop_of(random.Random(self.number), read, self.number)
        if self.name == "hook_removed":
            made.past["hook"] = layer_of(made).register_forward_hook(lambda *seen: first(seen[2]) * 1.5)
        made.past["true times"] = self.name if any(word in self.name for word in TRUE_TIMES) else ""
        torch.manual_seed(7)
        return made, plant

    def verdict(self) -> tuple[str, str]:
        """What became of it: recorded, refused, or wrong; and what is to be said of that."""
        with fresh_world():
            loop, plant = self.loop()
            queries = loop.x[:3] * 0.9
            begun = live(loop, queries)
            try:
                with ntkexp.follow(loop.net, loop.optimizers, queries=queries) as trace:
                    trained(loop, plant, self.when, None, between=self.between, always=self.always)
                ended = live(loop, queries)
                found = trace.attribute()
            except Mistake as error:
                return "refused", str(error)
        change = torch.from_numpy(found["change"].to_numpy())
        bound = 1e-9 if loop.dtype == torch.float64 else 3e-3
        size = float(begun.norm() + ended.norm())
        moved = float(change.norm())
        casts = torch.from_numpy(found["casts"].to_numpy()) if "casts" in found else torch.zeros_like(change)
        room = bound * (size + moved) + (2e-2 * size if loop.casts else 0.0)
        explained = torch.from_numpy((found["contribution"].sum("example") + found["decay"]).to_numpy()) + casts
        for what, missed in (
            ("f_0", float((torch.from_numpy(found["start"].to_numpy()) - begun).norm())),
            ("f_T", float((torch.from_numpy(found["start"].to_numpy()) + change - ended).norm())),
            ("sum", float((explained - change).norm()) - found.attrs.get("rounding", 0.0) * moved),
        ):
            if not missed <= room:
                return "wrong", f"{what} is off by {missed:.2g}, of {moved:.2g}"
        return self.by_example(found, room + 0.0 * moved)

    def by_example(self, found: Any, room: float) -> tuple[str, str]:
        """Hold the parts of examples against the oracle's."""
        with fresh_world():
            loop, plant = self.loop()
            if loop.casts:
                return "recorded", ""
            queries, copy = loop.x[:3] * 0.9, deepcopy(loop.net).eval()
            reader = Reader(as_it_began(function_of(copy)), frozenset(dict(loop.net.named_parameters())))
            oracle = Oracle(loop, reader, queries)
            live(loop, queries)
            torch.manual_seed(7)
            trained(loop, plant, self.when, oracle, between=self.between, always=self.always)
        worst = 0.0
        for name in found["example"].to_numpy().tolist():
            ours = torch.from_numpy(found["contribution"].sel(example=name).to_numpy())
            theirs = oracle.parts.get(name, torch.zeros_like(ours))
            worst = max(worst, float((ours - theirs).norm()))
        rounding = float(found.attrs.get("rounding", 0.0)) * float(np.linalg.norm(found["change"].to_numpy()))
        if not worst <= room + rounding:
            return "wrong", f"an example's part is off by {worst:.2g}, of {float(abs(found['contribution']).max()):.2g}"
        return "recorded", ""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Plants of every kind in turn, at random places; and loops without."""
    chance = random.Random(seed)
    names = [*READ, "closure", *STRUCTURE, *GRADIENTS]
    for number in range(count):
        when = (
            chance.choice((0, 1, 3, 5, STEPS))
            if names[number % len(names)] not in GRADIENTS
            else chance.choice((0, 2, 5))
        )
        yield Case(chance.randrange(2**31), names[number % len(names)], when, chance.random() < 0.7)


def plain_cases(seed: int, count: int) -> Iterator[Case]:
    """Loops as people write them."""
    chance = random.Random(seed + 1)
    return (Case(chance.randrange(2**31), "nothing", 0, False) for _ in range(count))


def search(seed: int, count: int, said: Callable[[str], object]) -> tuple[Counter[str], Counter[str]]:
    """What became of the plants, and of the loops without one."""
    both = (Counter[str](), Counter[str]())
    for counts, several in zip(both, (cases(seed, count), plain_cases(seed, max(1, count // 2))), strict=True):
        for case in several:
            verdict, why = case.verdict()
            counts[verdict] += 1
            if verdict == "wrong" or (case.name == "nothing" and verdict != "recorded"):
                said(f"{verdict}: {case}: {why}")
    return both


def main() -> None:
    """Search, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args()
    planted, plain = search(given.seed, given.count, print)
    print(f"planted: {dict(planted)}; loops without: {dict(plain)}")
    raise SystemExit(1 if planted["wrong"] or plain["wrong"] or plain["refused"] else 0)


if __name__ == "__main__":
    main()
