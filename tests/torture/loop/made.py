"""A random loop with a network that has one modified layer, its oracle, and its training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from ntkexp.foreign_loop.example_names import digests
from ntkexp.kernel.read.reader import Reader

EXAMPLES, WIDTH = 12, 5
WORLD: dict[str, float] = {}
LINEAR = functional.linear


class Tampered(nn.Module):
    """A network with one layer that depends on a number `read` from elsewhere."""

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
    """A loop, as plants see it."""

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
        """The first parameter with one number, or the last parameter."""
        return next((w for w in self.weights if w.numel() == 1), self.weights[-1])


Plant: TypeAlias = Callable[[Loop], object]


def body_of(kind: str) -> nn.ModuleList:
    """Return the layers of a network on inputs [example, 4], or [example, 3, 4] for an LSTM."""
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
    """Draw a loop."""
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


# The oracle: the parts of examples, by plain autograd and the formulas of the optimizers.


@dataclass
class Oracle:
    """The change Δθᵢ by each example at every step, and its part of the outputs."""

    loop: Loop
    reader: Reader
    queries: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # Jᵀℓ′ of examples in this step, by parameter
    memory: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    moves: dict[str, int] = field(default_factory=dict)

    def back(self, outputs: Tensor, loss: Tensor, names: tuple[str, ...]) -> None:
        """Record the gradients of each example of a call."""
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
                    held = self.rows.setdefault(name, {})
                    held[key] = held[key] + gradient if key in held else gradient

    def step(self, start: dict[str, Tensor], factors: dict[str, float], settings: list[dict[str, Any]]) -> None:
        """Record a step whose gradients were multiplied by factors."""
        end = {name: weight.detach().clone() for name, weight in self.loop.net.named_parameters()}
        tapes = [self.reader.record(weights, self.queries) for weights in (start, end)]
        features = self.reader.along(tapes[0], tapes[1])
        by_name = dict(self.loop.net.named_parameters())
        for example in sorted({*self.rows, *(name for name, _ in self.memory)}):
            moved = {name: torch.zeros_like(weight) for name, weight in start.items()}
            for optimizer, group in zip(self.loop.optimizers, settings, strict=True):
                own = {id(weight) for weight in optimizer.param_groups[0]["params"]}
                for name, weight in by_name.items():
                    if id(weight) in own and weight.grad is not None:
                        mine = self.rows.get(example, {}).get(name, torch.zeros_like(weight))
                        moved[name] = self.moved(example, name, factors[name] * mine, group, optimizer.state[weight])
            part = features.applied(moved)
            self.parts[example] = self.parts[example] + part if example in self.parts else part
        for name in by_name:
            self.moves[name] = self.moves.get(name, 0) + 1
        self.rows.clear()

    def moved(self, example: str, name: str, mine: Tensor, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """Return the move of a weight by a gradient."""
        key = (example, name)
        if "betas" in group:
            (first_, second), count = group["betas"], float(state["step"])
            held = self.memory[key] = first_ * self.memory.get(key, torch.zeros_like(mine)) + (1 - first_) * mine
            below = state["exp_avg_sq"].sqrt() / math.sqrt(1 - second**count) + group["eps"]
            return torch.as_tensor(-group["lr"] / (1 - first_**count) * held / below)
        if not group["momentum"]:
            return torch.as_tensor(-group["lr"] * mine)
        steps = self.moves.get(name, 0)
        taken = mine if steps == 0 else (1 - group["dampening"]) * mine
        held = self.memory[key] = group["momentum"] * self.memory.get(key, torch.zeros_like(mine)) + taken
        return torch.as_tensor(-group["lr"] * (mine + group["momentum"] * held if group["nesterov"] else held))


# The training loop, with its plant.


STEPS = 6


@dataclass(frozen=True)
class Planted:
    """A plant changes the model before step `when`, or the gradients `between` backward and step, also `always` later.

    If it `multiplies`, a record of the multiplied gradients is right.
    """

    plant: Plant | None
    when: int
    between: bool
    always: bool
    multiplies: bool

    def at(self, step: int) -> bool:
        """Return true if the gradients of this step are changed."""
        return self.between and (step == self.when or (self.always and step > self.when))


def clipped(loop: Loop, step: int) -> None:
    """Clip the gradients of a loop."""
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


def trained(loop: Loop, planted: Planted, oracle: Oracle | None) -> None:
    """Train a loop."""
    order = torch.Generator().manual_seed(5)
    for step in range(STEPS + 1):
        if planted.plant is not None and not planted.between and step == planted.when:
            planted.plant(loop)
        if step == STEPS:
            return
        batch = torch.randperm(EXAMPLES, generator=order)[: 6 + step % 2]
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
            if loop.schedule:
                optimizer.param_groups[0]["lr"] *= 0.8
        for piece in batch.chunk(loop.pieces):
            back(loop, piece, oracle)
        factors = multiplied(loop, planted, step)
        start = {name: weight.detach().clone() for name, weight in loop.net.named_parameters()}
        for optimizer in loop.optimizers:
            if loop.scaler is not None and has_gradients(optimizer):
                loop.scaler.step(optimizer)
            else:
                optimizer.step()
        if oracle is not None:
            oracle.step(start, factors, [dict(optimizer.param_groups[0]) for optimizer in loop.optimizers])
        if loop.scaler is not None and any(map(has_gradients, loop.optimizers)):
            loop.scaler.update()


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return true if there are gradients. PyTorch's scaler skips optimizers without gradients."""
    return any(weight.grad is not None for weight in optimizer.param_groups[0]["params"])


def back(loop: Loop, piece: Tensor, oracle: Oracle | None) -> None:
    """Call the model, and go backward."""
    with torch.autocast("cpu", torch.bfloat16) if loop.casts else torch.enable_grad():
        outputs = loop.net(loop.x[piece])
    loss = (outputs - loop.y[piece]).square().mean() / loop.pieces
    if not loss.requires_grad:  # all weights are frozen
        return
    if oracle is not None:
        oracle.back(outputs, loss, digests(loop.x[piece]))
    (loss if loop.scaler is None else loop.scaler.scale(loss)).backward()


def multiplied(loop: Loop, planted: Planted, step: int) -> dict[str, float]:
    """Clip and plant. Return the true factor of each gradient."""
    rounded = 1.0  # float32 rounds a scale that is not a power of two
    if loop.scaler is not None:
        scale = loop.scaler.get_scale()
        rounded = float(torch.tensor(scale).double().reciprocal().float()) * scale
        for optimizer in filter(has_gradients, loop.optimizers):
            loop.scaler.unscale_(optimizer)
    before = gradients(loop)
    clipped(loop, step)
    held = gradients(loop)
    factors = {name: rounded * share(before[name], held[name]) for name in held}
    if planted.plant is not None and planted.at(step):
        planted.plant(loop)
        for name, now in gradients(loop).items():
            if planted.multiplies and (now.numel() == 1 or "cut" not in loop.past["planted"]):
                factors[name] *= share(held[name], now)
    return factors


def gradients(loop: Loop) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in loop.net.named_parameters() if weight.grad is not None}


def share(was: Tensor, now: Tensor) -> float:
    square = float((was * was).sum())
    return float((was * now).sum()) / square if square else 0.0
