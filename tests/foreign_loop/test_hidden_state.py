"""A model that changes by something that is not a tensor, and gradients that were changed as if they had "
"been clipped."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrize

import ntkexp
from ntkexp.foreign_loop.clipping import SUM_EPS, Factors
from ntkexp.foreign_loop.signatures import Replayed, signature
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake

STEPS, HALF = 6, 3
HEAT = {"T": 1.0}  # a global


class Warm(nn.Module):
    """Outputs over a temperature, which a function reads wherever it stands."""

    heat = 1.0

    def __init__(self, read: Callable[[Warm], float]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.layer = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.read, self.held, self.listed = read, {"T": 1.0}, [1.0]
        self.space = SimpleNamespace(T=1.0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) / self.read(self)
        return found


Change: TypeAlias = Callable[[Warm], object]


def hooked(net: Warm) -> None:
    net.layer[1].register_forward_hook(lambda *seen: seen[2] / 2)


def replaced(net: Warm) -> None:
    before = net.layer.forward
    net.layer.forward = lambda x: before(x) / 2  # type: ignore[method-assign, no-untyped-call]  # as people do


HIDDEN: dict[str, tuple[Callable[[Warm], float], Change]] = {
    "dict": (lambda net: net.held["T"], lambda net: net.held.update(T=2.0)),
    "list": (lambda net: net.listed[0], lambda net: net.listed.__setitem__(0, 2.0)),
    "namespace": (lambda net: net.space.T, lambda net: setattr(net.space, "T", 2.0)),
    "class": (lambda net: Warm.heat, lambda net: setattr(Warm, "heat", 2.0)),
    "global": (lambda net: HEAT["T"], lambda net: HEAT.update(T=2.0)),
    "hook": (lambda net: 1.0, hooked),
    "forward": (lambda net: 1.0, replaced),
    "chance": (lambda net: random.random() if HEAT["T"] > 1 else 1.0, lambda net: HEAT.update(T=2.0)),
}


def warm(kind: str, when: int, **more: Any) -> Trace:
    """Follow a loop in which the temperature is changed at some step; or after the last, if there is none such."""
    read, change = HIDDEN[kind]
    Warm.heat, HEAT["T"] = 1.0, 1.0
    net, generator = Warm(read), torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
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


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        pytest.param(kind, when, marks=() if kind == "dict" or when == HALF else pytest.mark.slow)
        for kind in HIDDEN
        for when in (0, HALF, STEPS)
        if (kind, when) != ("chance", STEPS)  # drawn once after the last step, and read by nobody
    ],
)
def test_a_model_that_changes_by_what_is_no_tensor_is_refused(kind: str, when: int) -> None:
    said = r"step \d: the model gave other outputs|when following \w+, the model gave other|look for random numbers"
    with pytest.raises(Mistake, match=said):
        warm(kind, when).attribute()


def test_so_is_one_that_another_process_builds_otherwise(tmp_path: Path) -> None:
    warm("dict", STEPS + 1, to=tmp_path / "run").attribute()
    other = Warm(lambda net: 1.25)
    with pytest.raises(Mistake, match="step 5: the model gave other outputs when the loop called it"):
        load_trace(find_trace(tmp_path / "run"), other).attribute()


def test_what_the_model_gave_itself_is_kept_on_disk(tmp_path: Path) -> None:
    warm("dict", STEPS, to=tmp_path / "run")
    with pytest.raises(Mistake, match="when following ended, the model gave other outputs"):
        load_trace(find_trace(tmp_path / "run"), Warm(lambda net: 1.0)).attribute()


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_a_parametrisation_that_is_registered_at_the_end_is_refused() -> None:
    net, x = nn.Linear(3, 1).double(), torch.eye(3, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ntkexp.follow(net, optimizer, queries=x) as trace:
        (net(x) - 1).square().mean().backward()
        optimizer.step()
        parametrize.register_parametrization(net, "weight", Half())
    with pytest.raises(Mistake, match="when following ended, the model gave other outputs"):
        trace.attribute()


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Drawing(Counting):
    """Draws in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.rand(1)


def test_asking_the_model_itself_leaves_it_as_it_was() -> None:
    net = Counting(2, 1)
    net.train()
    with ntkexp.follow(net, torch.optim.SGD(net.parameters()), queries=torch.eye(2)):
        pass
    assert net.calls == 0
    assert net.training


def test_a_model_that_draws_in_evaluation_is_refused_and_moves_no_generator() -> None:
    net, state = Drawing(2, 1), torch.get_rng_state()
    with (
        pytest.raises(Mistake, match="draws random numbers"),
        ntkexp.follow(net, torch.optim.SGD(net.parameters()), queries=torch.eye(2)),
    ):
        raise AssertionError("the loop begins")
    assert net.calls == 0
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_outputs_that_cancel_are_held_to_their_own_rounding(dtype: torch.dtype) -> None:
    """Sums of a thousand terms that all but vanish, taken in another order: not another model, but near to one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2000, generator=generator, dtype=torch.float64).to(dtype)
    w = torch.randn(1, 2000, generator=generator, dtype=torch.float64).to(dtype)
    both, weights = torch.cat([x, -x], 1), {"w": torch.cat([w, w], 1)}

    def function(weights: dict[str, Tensor], inputs: Any) -> Tensor:
        return torch.as_tensor(1e6 + 0 * inputs[:, :1] + inputs @ weights["w"].T - 1e6)

    order = torch.randperm(4000, generator=generator)
    with torch.no_grad():
        here = function(weights, both)
        there = function({"w": weights["w"][:, order]}, both[:, order])
    replayed = Replayed(function, weights, both, here)
    assert not replayed.other(signature(there))
    assert replayed.other(signature(there + 1e-2 * 1e6 * torch.finfo(dtype).eps * 1e6)) > 0


def test_what_is_other_at_every_call_is_no_rounding() -> None:
    def function(weights: dict[str, Tensor], inputs: Any) -> Tensor:
        return torch.as_tensor(inputs @ weights["w"] * random.random())

    weights, x = {"w": torch.ones(3, 2)}, torch.ones(4, 3)
    replayed = Replayed(function, weights, x, function(weights, x))
    assert replayed.other(signature(function(weights, x))) > 0


def test_one_number_that_alone_is_not_clipped_has_the_scale_of_its_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
    net, x = nn.Linear(3, 1), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ntkexp.follow(net, optimizer, queries=x) as trace:
        for _ in range(STEPS):
            optimizer.zero_grad()
            scaler.scale((net(x) - 9).square().mean()).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_([net.weight], 0.01)
            scaler.step(optimizer)
            scaler.update()
    assert float(trace.attribute()["gradient_factor"].max()) < 1e-3


def test_clipping_at_one_step_under_an_odd_scale_is_recorded() -> None:
    """A scaler from 1000 on, which is doubled at every second step: 1/1000 is 2^k of no small whole number."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ntkexp.follow(net, optimizer, queries=x) as trace:
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            if step == 2:
                clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
    assert float(trace.attribute()["gradient_factor"].min()) < 1e-3


def lone(change: Callable[[nn.Linear, int], None], *, dtype: torch.dtype = torch.float64) -> Any:
    """A loop on a model whose bias is one number, in which gradients are changed before the step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64).to(dtype)
    y = x[:, :1].sin() + 2
    net = nn.Linear(3, 1).to(dtype)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.3, -0.2, 0.5]]))
        net.bias.fill_(0.7)
    before, optimizer = deepcopy(net), torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    with ntkexp.follow(net, optimizer, queries=x[:3]) as trace:
        for step in range(STEPS):
            optimizer.zero_grad()
            (net(x[step % 2 :: 2]) - y[step % 2 :: 2]).square().mean().backward()
            change(net, step)
            optimizer.step()
    found = trace.attribute()
    explained = torch.from_numpy((found["contribution"].sum("example") + found["decay"]).to_numpy())
    return explained, (net(x[:3]) - before(x[:3])).detach()


def decayed(net: nn.Linear, step: int) -> None:
    assert net.bias.grad is not None
    net.bias.grad += 0.1 * net.bias.detach()


def noisy(net: nn.Linear, step: int) -> None:
    assert net.bias.grad is not None
    net.bias.grad += 0.1 * torch.randn(1, generator=torch.Generator().manual_seed(step)).to(net.bias)


def noisy_once(net: nn.Linear, step: int) -> None:
    if step == HALF:
        noisy(net, step)


def cut(net: nn.Linear, step: int) -> None:
    clip_grad_value_([net.bias], 1.5)


def turned(net: nn.Linear, step: int) -> None:
    assert net.bias.grad is not None
    net.bias.grad.neg_()


def turned_all(net: nn.Linear, step: int) -> None:
    assert net.bias.grad is not None
    assert net.weight.grad is not None
    net.bias.grad.neg_()
    net.weight.grad.neg_()


def clipped_and_turned(net: nn.Linear, step: int) -> None:
    clip_grad_norm_([net.weight], 0.2)
    clip_grad_norm_([net.bias], 0.2)
    if step >= HALF:
        turned_all(net, step)


def longer(net: nn.Linear, step: int) -> None:
    assert net.weight.grad is not None
    net.weight.grad *= 1 + 0.3 * step


def shorter_by_chance(net: nn.Linear, step: int) -> None:
    assert net.weight.grad is not None
    assert net.bias.grad is not None
    net.weight.grad *= 0.9 / (1 + step**0.5)
    net.bias.grad *= 0.9 / (1 + step**0.5)


@pytest.mark.parametrize(
    "change",
    [decayed, noisy, noisy_once, cut, turned, turned_all, clipped_and_turned, longer, shorter_by_chance],
    ids=lambda change: change.__name__,
)
def test_a_factor_that_no_clipping_gives_is_refused(change: Callable[[nn.Linear, int], None]) -> None:
    with pytest.raises(Mistake, match=r"step \d: the gradient that was consumed is not that of the examples seen: in"):
        lone(change)


def test_many_steps_make_no_norm_of_chance() -> None:
    """Of a thousand random norms each is near to another, in float32."""
    bound = SUM_EPS * torch.finfo(torch.float32).eps
    generator = torch.Generator().manual_seed(0)
    factors, one = Factors(), {"bias": torch.ones(1), "weight": torch.ones(3)}
    for step, factor in enumerate((0.2 + 0.7 * torch.rand(1000, generator=generator)).tolist()):
        consumed = {"bias": factor * one["bias"], "weight": one["weight"]}
        factors.take(step, {"bias": factor, "weight": 1.0}, one, consumed, bound)
    with pytest.raises(Mistake, match=r"step 0: the gradient that was consumed .* in 'bias' it is"):
        factors.refuse_unexplained()


def clipped(net: nn.Linear, step: int) -> None:
    clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)


def clipped_apart(net: nn.Linear, step: int) -> None:
    clip_grad_norm_([net.weight], 0.5)
    clip_grad_norm_([net.bias], 1.5)


def clipped_once(net: nn.Linear, step: int) -> None:
    if step == HALF:
        clip_grad_norm_(net.parameters(), 0.1)


def clipped_to_less(net: nn.Linear, step: int) -> None:
    clip_grad_norm_(net.parameters(), 0.5 if step < HALF else 0.25)


def bias_left_out(net: nn.Linear, step: int) -> None:
    clip_grad_norm_([net.weight], 0.5)


def meaned(net: nn.Linear, step: int) -> None:
    assert net.weight.grad is not None
    assert net.bias.grad is not None
    net.weight.grad /= 3
    net.bias.grad /= 3


def thrown_away(net: nn.Linear, step: int) -> None:
    assert net.bias.grad is not None
    net.bias.grad.zero_()


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "change",
    [clipped, clipped_apart, clipped_once, clipped_to_less, bias_left_out, meaned, thrown_away],
    ids=lambda change: change.__name__,
)
def test_clipping_by_norm_is_recorded(change: Callable[[nn.Linear, int], None], dtype: torch.dtype) -> None:
    explained, change_of_outputs = lone(change, dtype=dtype)
    assert (explained - change_of_outputs).norm() <= 1e4 * torch.finfo(dtype).eps * change_of_outputs.norm()
