"""Plants: changes of the model, of values that it reads, and of gradients between backward and step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_value_, parametrize

from tests.torture.loop.made import WORLD, Loop, Plant, Tampered

CHANCE = np.random.default_rng(3)


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
    "numpy random": (lambda net: 1 + WORLD.get("on", 0.0) * float(CHANCE.random()), switched_on),
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
    layer_of(loop).forward = lambda *args: first(before(*args)) * 0.7


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
            layer.approximate = "tanh"


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
    """An identity with other gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.37 * gradient


def detached_inside(loop: Loop) -> None:
    layer_of(loop).register_forward_hook(lambda *seen: first(seen[2]).detach())


def backward_hook(loop: Loop) -> None:
    layer_of(loop).register_full_backward_hook(lambda _, came, __: tuple(None if g is None else g * 0.4 for g in came))  # type: ignore[attr-defined]


def functional_replaced(loop: Loop) -> None:
    loop.past["linear"] = functional.linear
    functional.linear = lambda x, w, b=None: 1.2 * loop.past["linear"](x, w, b)  # type: ignore[assignment]


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


def grads(weights: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    return ((weight, weight.grad) for weight in weights if weight.grad is not None)


def penalty(of: Callable[[Loop], list[nn.Parameter]]) -> Plant:
    def plant(loop: Loop) -> None:
        for weight, gradient in grads(of(loop)):
            gradient.add_(0.1 * weight.detach() + 0.01)

    return plant


def noise(of: Callable[[Loop], list[nn.Parameter]]) -> Plant:
    def plant(loop: Loop) -> None:
        for _, gradient in grads(of(loop)):
            drawn_ones = torch.tensor([loop.chance.gauss(0, 1) for _ in range(gradient.numel())])
            gradient.add_(0.05 * drawn_ones.to(gradient).view_as(gradient))

    return plant


def times(of: Callable[[Loop], list[nn.Parameter]], by: Callable[[Loop], float]) -> Plant:
    def plant(loop: Loop) -> None:
        factor = by(loop)
        for _, gradient in grads(of(loop)):
            gradient.mul_(factor)

    return plant


def cut(of: Callable[[Loop], list[nn.Parameter]]) -> Plant:
    return lambda loop: clip_grad_value_(of(loop), 0.53 * float(max(g.abs().max() for _, g in grads(of(loop)))))


def signs(loop: Loop) -> None:
    for _, gradient in grads(loop.weights):
        gradient.sign_()


def stale(loop: Loop) -> None:
    now = {id(weight): gradient.clone() for weight, gradient in grads(loop.weights)}
    for weight, gradient in grads(loop.weights):
        gradient.add_(0.3 * loop.past.get("grads", {}).get(id(weight), torch.zeros_like(gradient)))
    loop.past["grads"] = now


def hidden_loss(loop: Loop) -> None:
    """Add an auxiliary loss of a single layer."""
    layer = next(each for each in loop.net.body if isinstance(each, nn.Linear | nn.LSTM))
    first(layer(loop.x)).square().mean().backward()  # type: ignore[no-untyped-call]


def forward_by_name(loop: Loop) -> None:
    """Add a second loss, which avoids the hooks of the model."""
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
TRUE_TIMES = ("factor", "times", "minus", "cut")
"""A record of these plants is right, if it multiplies the gradients."""
