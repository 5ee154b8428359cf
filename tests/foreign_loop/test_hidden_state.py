"""Models that change by something other than tensors, and gradients that change without clipping, are refused."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrize

import ntkexp
from ntkexp.foreign_loop.clipping import SUM_EPS, Factors
from ntkexp.foreign_loop.fingerprints import Replayed, fingerprint
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from tests.foreign_loop.loops import fitted, missed, outputs_of

STEPS, HALF = 6, 3
HEAT = {"T": 1.0}  # a global
OTHER = "when following ended, the model returned other outputs"


class Warm(nn.Module):
    """Outputs over a temperature, which a function reads from somewhere."""

    heat = 1.0

    def __init__(self, read: Callable[[Warm], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.read, self.held, self.listed, self.own = read, {"T": 1.0}, [1.0], 1.0
        self.space, self.plain, self.calls = SimpleNamespace(T=1.0), torch.ones(()), 0
        self.hook = self.layer[1].register_forward_hook(lambda *seen: seen[2] / 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x) / self.read(self)
        return outputs


Change: TypeAlias = Callable[[Warm], object]


def replaced(part: Callable[[Warm], Any]) -> Change:
    """Replace the forward of a part, as people do."""

    def change(net: Warm) -> None:
        before = part(net).forward
        part(net).forward = lambda x: before(x) / 2

    return change


def counted(net: Warm) -> float:
    net.calls += 1
    return 1.0 + 0.1 * net.calls * (HEAT["T"] - 1)


class Slanted(torch.autograd.Function):
    """The identity, with other gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.37 * gradients[0]


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def unread(net: Warm) -> float:
    return 1.0


def hot(net: Warm) -> None:
    HEAT["T"] = 2.0


HIDDEN: dict[str, tuple[Callable[[Warm], Any], Change]] = {
    "dict": (lambda net: net.held["T"], lambda net: net.held.update(T=2.0)),
    "list": (lambda net: net.listed[0], lambda net: net.listed.__setitem__(0, 2.0)),
    "namespace": (lambda net: net.space.T, lambda net: setattr(net.space, "T", 2.0)),
    "class": (lambda net: Warm.heat, lambda net: setattr(Warm, "heat", 2.0)),
    "global": (lambda net: HEAT["T"], lambda net: HEAT.update(T=2.0)),
    "attribute": (lambda net: net.own, lambda net: setattr(net, "own", 2.0)),
    "plain tensor": (lambda net: net.plain, lambda net: net.plain.fill_(2.0)),
    "plain tensor anew": (lambda net: net.plain, lambda net: setattr(net, "plain", torch.tensor(2.0))),
    "counter": (counted, hot),
    "chance": (lambda net: random.random() if HEAT["T"] > 1 else 1.0, hot),
    "chance of numpy": (lambda net: float(np.random.default_rng().random()) if HEAT["T"] > 1 else 1.0, hot),
    "clock": (lambda net: 1 + (HEAT["T"] - 1) * (time.perf_counter_ns() % 1000) / 1000, hot),
    "only in evaluation": (lambda net: 1.0 if net.training else HEAT["T"], hot),
    "only with gradients": (lambda net: HEAT["T"] if torch.is_grad_enabled() else 1.0, hot),
    "hook": (unread, lambda net: net.layer[1].register_forward_hook(lambda *seen: seen[2] / 2)),
    "hook before": (unread, lambda net: net.layer[1].register_forward_pre_hook(lambda _, args: (args[0] / 2,))),
    "hook of the model": (unread, lambda net: net.register_forward_hook(lambda *seen: seen[2] / 2)),
    "hook removed": (unread, lambda net: net.hook.remove()),
    "forward": (unread, replaced(lambda net: net.layer)),
    "forward of the model": (unread, replaced(lambda net: net)),
    "activation": (unread, lambda net: net.layer.__setitem__(1, nn.Softsign())),
    "another layer": (unread, lambda net: net.layer.append(nn.Tanh())),
    "parametrisation": (unread, lambda net: parametrize.register_parametrization(net.layer[0], "weight", Half())),
    "gradient inside": (
        unread,
        lambda net: net.layer[1].register_forward_hook(lambda *seen: Slanted.apply(seen[2])),  # type: ignore[no-untyped-call]
    ),
}
NEVER_LATE = ("chance", "chance of numpy", "clock", "counter", "only with gradients", "gradient inside")
"""Changes after the last step that have no effect, or no certain one."""


def warm(kind: str, when: int, **more: Any) -> Trace:
    """Follow a loop in which the temperature changes before a step, after the last step, or never."""
    read, change = HIDDEN[kind]
    Warm.heat, HEAT["T"] = 1.0, 1.0
    net, x = Warm(read), torch.randn(12, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ntkexp.follow(net, optimizer, queries=x[:2], **more) as trace:
        for step in range(STEPS + 1):
            if step == when:
                change(net)
            if step < STEPS:
                optimizer.zero_grad()
                (net(x[step::STEPS]) - 1).square().mean().backward()
                optimizer.step()
    return trace


FAST = ("dict", "attribute", "hook removed")


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        pytest.param(kind, when, marks=() if kind in FAST or when == HALF else pytest.mark.slow)
        for kind in HIDDEN
        for when in (0, HALF, STEPS)
        if when < STEPS or kind not in NEVER_LATE
    ],
)
def test_a_model_that_changes_by_no_tensor_is_refused(kind: str, when: int) -> None:
    said = (
        r"step \d: (at the same weights, the model returned other outputs"
        r"|the optimizer's gradient is not|.* is no longer the tensor)"
        r"|when following \w+, the model returned other|look for random numbers"
    )
    with pytest.raises(Mistake, match=said):
        warm(kind, when).attribute()


@pytest.mark.parametrize(
    ("when", "heat", "said"),
    [
        (STEPS + 1, 1.25, "step 5: at the same weights, the model returned other outputs in the loop"),
        (STEPS, 1.0, OTHER),
    ],
    ids=["built otherwise", "outputs at the end"],
)
def test_another_process_refuses_other_outputs_too(when: int, heat: float, said: str, tmp_path: Path) -> None:
    warm("dict", when, to=tmp_path / "run")
    with pytest.raises(Mistake, match=said):
        load_trace(find_trace(tmp_path / "run"), Warm(lambda net: heat)).attribute()


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Drawing(Counting):
    """Draws in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.rand(1)


@pytest.mark.parametrize("kind", [Counting, Drawing])
def test_following_calls_a_copy_of_the_model_and_draws_nothing(kind: type[Counting]) -> None:
    """A model that draws in evaluation is refused before the loop begins."""
    net, state, began = kind(2, 1), torch.get_rng_state(), list[Trace]()

    def follow() -> None:
        with ntkexp.follow(net, torch.optim.SGD(net.parameters()), queries=torch.eye(2)) as trace:
            began.append(trace)

    if kind is Drawing:
        with pytest.raises(Mistake, match="draws random numbers"):
            follow()
    else:
        follow()
    assert len(began) == (kind is Counting)
    assert net.calls == 0
    assert net.training
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_outputs_that_cancel_may_differ_by_rounding(dtype: torch.dtype) -> None:
    """Sums of thousands of terms that nearly cancel, in two orders."""
    x, w = (torch.randn(count, 2000, dtype=torch.float64).to(dtype) for count in (5, 1))
    both, weights = torch.cat([x, -x], 1), {"w": torch.cat([w, w], 1)}

    def function(weights: dict[str, Tensor], inputs: Any) -> Tensor:
        return torch.as_tensor(1e6 + 0 * inputs[:, :1] + inputs @ weights["w"].T - 1e6)

    order = torch.randperm(4000)
    here, there = function(weights, both), function({"w": weights["w"][:, order]}, both[:, order])
    replayed = Replayed(function, weights, both, here)
    assert not replayed.unexplained_distance(fingerprint(there))
    assert replayed.unexplained_distance(fingerprint(there + 1e-2 * 1e6 * torch.finfo(dtype).eps * 1e6)) > 0


# --- Factors of gradients: clipping by norm and scales are recorded, anything else is refused.


def scaled(when: range, clipped: Callable[[nn.Module], Any], largest: float) -> Trace:
    """Follow a loop with a scale of gradients from 1000 on: 1/1000 is no power of two times a small whole number."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
    net, x = nn.Linear(3, 1), torch.randn(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ntkexp.follow(net, optimizer, queries=x) as trace:
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale((net(x) - 9).square().mean()).backward()
            scaler.unscale_(optimizer)
            if step in when:
                clip_grad_norm_(clipped(net), largest)
            scaler.step(optimizer)
            scaler.update()
    return trace


@pytest.mark.parametrize(
    ("when", "clipped", "largest"),
    [
        (range(STEPS), lambda net: [net.weight], 0.01),  # the bias, one number, has the scale alone
        (range(2, 3), lambda net: net.parameters(), 0.05),
    ],
    ids=["without the bias", "at one step"],
)
def test_clipping_under_an_odd_scale_is_recorded(
    when: range, clipped: Callable[[nn.Module], Any], largest: float
) -> None:
    factors = scaled(when, clipped, largest).attribute()["gradient_factor"]
    assert float(factors.max() if len(when) > 1 else factors.min()) < 1e-3


Gradients: TypeAlias = Callable[[nn.Linear, int], object]


def lone(change: Gradients, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    """The attribution of a loop whose bias is one number and whose gradients change before the step, and its change."""
    x = torch.randn(12, 3, dtype=torch.float64).to(dtype)
    y, net = x[:, :1].sin() + 2, nn.Linear(3, 1).to(dtype)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.3, -0.2, 0.5]]))
        net.bias.fill_(0.7)
    start, optimizer = outputs_of(net, x[:3]), torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    steps = iter(range(STEPS))

    def before_step(*_: object) -> None:
        change(net, next(steps))

    optimizer.register_step_pre_hook(before_step)

    def loss(step: int) -> Tensor:
        outputs: Tensor = net(x[step % 2 :: 2])
        return (outputs - y[step % 2 :: 2]).square().mean()

    found = fitted(net, optimizer, loss, STEPS, queries=x[:3]).attribute()
    return found, outputs_of(net, x[:3]) - start


def grad(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def noise(step: int) -> Tensor:
    return 0.1 * torch.randn(1, generator=torch.Generator().manual_seed(step)).double()


def times(*factors: Callable[[int], float]) -> Gradients:
    """Multiply the gradients of the weight and the bias."""

    def change(net: nn.Linear, step: int) -> None:
        for weight, factor in zip((net.weight, net.bias), factors, strict=True):
            grad(weight).mul_(factor(step))

    return change


def clipped(weight: float, bias: float = 1e9, *, turns: int = STEPS) -> Gradients:
    """Clip the gradients of the weight and the bias, and turn them from some step on."""

    def change(net: nn.Linear, step: int) -> None:
        clip_grad_norm_([net.weight], weight)
        clip_grad_norm_([net.bias], bias)
        if step >= turns:
            times(lambda _: -1, lambda _: -1)(net, step)

    return change


def together(largest: Callable[[int], float]) -> Gradients:
    return lambda net, step: clip_grad_norm_(net.parameters(), largest(step))


NO_CLIPPING: dict[str, Gradients] = {
    "decayed": lambda net, step: grad(net.bias).add_(0.1 * net.bias.detach()),
    "noisy": lambda net, step: grad(net.bias).add_(noise(step)),
    "noisy once": lambda net, step: grad(net.bias).add_(noise(step) * (step == HALF)),
    "cut to many values": lambda net, step: clip_grad_value_([net.bias], 1.5 - 0.1 * step),
    "all turned": times(lambda _: -1, lambda _: -1),
    "clipped and turned": clipped(0.2, 0.2, turns=HALF),
    "longer": times(lambda step: 1 + 0.3 * step, lambda _: 1),
    "shorter by chance": times(*[lambda step: 0.9 / (1 + step**0.5)] * 2),
}
CLIPPING: dict[str, Gradients] = {
    "together": together(lambda _: 1.0),
    "apart": clipped(0.5, 1.5),
    "once": together(lambda step: 0.1 if step == HALF else 1e9),
    "to less": together(lambda step: 0.5 if step < HALF else 0.25),
    "without the bias": clipped(0.5),
    "divided by three": times(lambda _: 1 / 3, lambda _: 1 / 3),
    "by value": lambda net, step: clip_grad_value_([net.bias], 1.5),
    "thrown away": times(lambda _: 1, lambda _: 0),
}


@pytest.mark.parametrize("case", NO_CLIPPING)
def test_a_factor_that_no_clipping_gives_is_refused(case: str) -> None:
    with pytest.raises(
        Mistake, match=r"step \d: the optimizer's gradient is not the gradient of the recorded examples: in"
    ):
        lone(NO_CLIPPING[case])


def test_one_element_that_is_reduced_at_every_step_is_not_clipped() -> None:
    """Clipping by value has the same bound in several steps."""

    def reduced(net: nn.Linear, step: int) -> None:
        gradient = grad(net.weight).view(-1)
        place = gradient.abs().argmax()
        second = gradient.abs().sort().values[-2]
        gradient[place] = gradient[place].sign() * (second + gradient[place].abs()) / 2

    with pytest.raises(
        Mistake, match=r"step \d: .* examples: one element was reduced to .*, and no other step clips by value"
    ):
        lone(reduced)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CLIPPING)
def test_clipping_by_norm_is_recorded(case: str, dtype: torch.dtype) -> None:
    found, change = lone(CLIPPING[case], dtype)
    assert missed(found, change) <= 1e4 * torch.finfo(dtype).eps


def test_random_norms_are_no_clipping() -> None:
    """Each of a thousand random norms is close to another norm in float32."""
    factors, one = Factors(), {"bias": torch.ones(1), "weight": torch.ones(3)}
    for step, factor in enumerate((0.2 + 0.7 * torch.rand(1000)).tolist()):
        consumed = {"bias": factor * one["bias"], "weight": one["weight"]}
        factors.take(step, {"bias": factor, "weight": 1.0}, one, consumed, SUM_EPS * torch.finfo(torch.float32).eps)
    with pytest.raises(Mistake, match=r"step 0: the optimizer's gradient .* in 'bias' it is"):
        factors.refuse_unexplained()
