"""What is refused names its cause and the way out, and the way out works."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import ntkexp
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3).sin()
EXACT = 1e-12  # sums of 8 examples over 4 steps, relative to the change


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))


class ActorCritic(nn.Module):
    """A policy and a value of each state."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.both, self.named = network(), named

    def forward(self, x: Tensor) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        policy, value = self.both(x).split([2, 1], 1)
        return {"pi": policy, "v": value} if self.named else (policy, value)


def closes(trace: Trace) -> None:
    found = trace.attribute()
    missed = found["contribution"].sum("example") + found["decay"] - found["change"]
    assert float(abs(missed).max()) <= EXACT * float(abs(found["change"]).max())


def two_outputs(named: bool, output: object, *used: str) -> Trace:
    """A loop whose loss uses some of the outputs."""
    net = ActorCritic(named=named)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, optimizer, queries=X[:2], output=output) as trace:  # type: ignore[arg-type]  # some are slips
        for _ in range(2):
            optimizer.zero_grad()
            answer = net(X)
            policy, value = (answer["pi"], answer["v"]) if named else answer
            parts = {"pi": policy, "v": value}
            losses = torch.stack([(parts[name] - 1).square().mean() for name in used])
            losses.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return trace


def asked(queries: Tensor) -> None:
    net = network()
    with ntkexp.follow(net, torch.optim.SGD(net.parameters(), 0.1), queries=queries):
        pass


def through_functional_call() -> None:
    """The inner step of MAML, whose gradients come back to the weights through others."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, optimizer, queries=X[:2]):
        own = dict(net.named_parameters())
        inner = torch.autograd.grad(net(X).square().mean(), list(own.values()), create_graph=True)
        fast = {name: weight - 0.1 * slope for (name, weight), slope in zip(own.items(), inner, strict=True)}
        torch.func.functional_call(net, fast, (X,)).square().mean().backward()
        optimizer.step()


def through_a_copy() -> None:
    """First-order MAML: the gradient of a copy is put in place of that of the model."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, optimizer, queries=X[:2]):
        fast = deepcopy(net)
        fast(X).square().mean().backward()
        for weight, other in zip(net.parameters(), fast.parameters(), strict=True):
            weight.grad = other.grad
        optimizer.step()


def second_stage(*, first_trains: slice = slice(None), together: bool = False) -> Trace:
    """Adam, and then SGD, which is followed from the beginning or not."""
    net = network()
    adam, sgd = torch.optim.Adam(net[first_trains].parameters(), 0.01), torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, [adam, sgd] if together else adam, queries=X[:2]) as trace:
        for step in range(4):
            now = adam if step < 2 else sgd
            net.zero_grad()
            (net(X) - 1).square().mean().backward()
            now.step()
    return trace


SECOND = r"does the loss use the output {} of the model as well, or alone\? One is followed: name it, output=…"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "both outputs": (lambda: two_outputs(True, "pi", "pi", "v"), SECOND.format("'v'")),
    "the other output": (
        lambda: two_outputs(True, "pi", "v"),
        r"no gradient came back to .*, but to 'v'; name .*output=…",
    ),
    "both outputs by place": (lambda: two_outputs(False, 0, "pi", "v"), SECOND.format("1")),
    "outputs as a list": (lambda: two_outputs(True, ["pi", "v"], "pi"), r"output=\['pi', 'v'\] is a list; give .* one"),
    "outputs as a tuple": (lambda: two_outputs(True, ("pi", "v"), "pi"), r"output=\('pi', 'v'\) is a tuple; give"),
    "one query": (lambda: asked(X[0]), r"need an axis of examples, also if there is only one: give x\[None\]"),
    "one input of a kernel": (
        lambda: ntkexp.tangent_kernel(network(), X[0]),
        r"\(one example is x\[None\]\)",
    ),
    "one image of a kernel": (lambda: ntkexp.tangent_kernel(pictures(), torch.ones(1, 4, 4)), r"^x1: .*x\[None\]"),
    "MAML": (through_functional_call, r"step 0: the model was called with another tensor in place of '0\.weight'"),
    "first-order MAML": (through_a_copy, r"step 0: model\(x\) was never called .*, or only a copy of the model was"),
    "stage two": (second_stage, r"step 2: '0\.weight' was moved by another optimizer \(SGD\).*follow\(model, \[first,"),
    "stage two thaws": (lambda: second_stage(first_trains=slice(2, 3)), r"moved by another optimizer \(SGD\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_cause_and_the_way_out(case: str) -> None:
    act, said = REFUSED[case]
    with pytest.raises(Mistake, match=said) as refusal:
        act()
    assert "\n" not in str(refusal.value)


def test_other_shapes_of_queries_get_no_advice_that_does_not_help() -> None:
    with pytest.raises(Mistake, match="the model cannot be called with them") as refusal:
        asked(torch.zeros(3, 5, dtype=torch.float64))
    assert "axis of examples" not in str(refusal.value)


class AsOne(nn.Module):
    """The outputs of a model as one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.inner(x), 1)


def test_the_ways_out_work() -> None:
    closes(two_outputs(True, "v", "v"))
    closes(second_stage(together=True))
    asked(X[0][None])

    # both outputs as one tensor
    net = AsOne(ActorCritic(named=False))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, optimizer, queries=X[:2]) as trace:
        for _ in range(2):
            optimizer.zero_grad()
            policy, value = net(X).split([2, 1], 1)
            (policy.square().mean() + (value - 1).square().mean()).backward()
            optimizer.step()
    closes(trace)
