"""A random loop: its network, one layer of which is tampered with, its optimizers and how it trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

EXAMPLES, WIDTH = 12, 5
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
