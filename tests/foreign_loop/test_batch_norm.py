"""BatchNorm in training mode: parts through the whole batch, or at constant statistics, and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.foreign_loop import trace as trace_module
from ntkexp.foreign_loop.batch_norm import BatchNormMode, batch_norm_sentence
from ntkexp.foreign_loop.example_gradients import CallReaders
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from ntkexp.report.explain import explain
from ntkexp.report.loaded_run import load_run

ROUNDING = 1e-12  # of sums over a few hundred parts, relative to the change
EXAMPLES, BATCH = 24, 8

Body = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor, int], None]


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    """What a test seeds ends with it."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


def of_rows(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 10), nn.BatchNorm1d(10, **options), nn.Tanh(), nn.Linear(10, 2)).double()


def of_images(**options: Any) -> nn.Sequential:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(36, 2)).double()


def data(net: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shape = (2, 5, 5) if any(isinstance(each, nn.Conv2d) for each in net.modules()) else (5,)
    x = torch.randn(EXAMPLES, *shape, dtype=dtype)
    return x, torch.randint(2, (EXAMPLES,)), torch.randn(3, *shape, dtype=dtype)


def plain(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
    net.train()
    optimizer.zero_grad()
    functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()


def in_parts(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
    """Two calls a step, each with a batch of its own; and one in training mode without gradients."""
    net.train()
    optimizer.zero_grad()
    for some in torch.split(torch.arange(len(x)), len(x) // 2):
        (functional.cross_entropy(net(x[some]), y[some]) / 2).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        net(x)
    optimizer.step()


def half_frozen(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
    """In evaluation at every second step, with the statistics of then."""
    net.train(step % 2 == 1)
    optimizer.zero_grad()
    functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()


def followed(net: nn.Module, optimizer: torch.optim.Optimizer, body: Body = plain, **more: Any) -> tuple[Trace, Tensor]:
    """The trace of a loop, and by how much it moved the outputs at the queries, in evaluation."""
    x, y, queries = data(net, next(net.parameters()).dtype)
    before = deepcopy(net).eval()
    with follow(net, optimizer, queries=queries, **more) as trace:
        for step in range(6):
            batch = torch.randperm(EXAMPLES)[:BATCH]
            body(net, optimizer, x[batch], y[batch], step)
            with torch.no_grad():
                net.eval()(queries)
    with torch.no_grad():
        return trace, deepcopy(net).eval()(queries) - before(queries)


def explained(found: Any) -> Any:
    """All that adds up to the change."""
    names = [name for name in ("decay", "rounding", "statistics", "coupling", "outside") if name in found]
    return found["contribution"].sum("example").to_numpy() + sum(found[name].to_numpy() for name in names)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.3)


def nesterov(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.02)


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizer", [sgd, adamw, nesterov], ids=["sgd", "adamw", "nesterov"])
@pytest.mark.parametrize(
    ("make", "body"),
    [
        (of_rows, plain),
        (lambda: of_images(momentum=None), in_parts),
        (lambda: of_rows(affine=False, momentum=0.3), half_frozen),
    ],
    ids=["rows", "images", "half frozen"],
)
@pytest.mark.parametrize("mode", ["exact", "constant"])
def test_parts_and_statistics_add_up(
    mode: BatchNormMode, make: Callable[[], nn.Module], body: Body, optimizer: Callable[[nn.Module], Any]
) -> None:
    net = make()
    trace, change = followed(net, optimizer(net), body)
    found = trace.attribute(batch_norm=mode, quiet=True)
    moved = float(change.norm())
    # what examples do to one another is orders larger than the change where Adam divides a gradient that cancels
    largest = max(moved, *(float(np.abs(found[name]).max()) for name in ("statistics", "rounding")))
    largest = max(largest, float(np.abs(found["coupling"]).max())) if mode == "constant" else largest
    assert moved > 0.1
    assert np.abs(explained(found) - change.numpy()).max() < ROUNDING * largest
    assert np.abs(found["by_step"].sum("step").to_numpy() - change.numpy()).max() < ROUNDING * largest
    assert float(np.linalg.norm(found["statistics"])) > 1e-3 * moved
    assert ("coupling" in found) == (mode == "constant")
    assert found["gradient_error"].max() < ROUNDING
    assert "running statistics of BatchNorm did" in batch_norm_sentence(found)


@pytest.mark.parametrize("mode", ["exact", "constant"])
def test_components_add_up_through_a_batch(mode: BatchNormMode) -> None:
    net = of_rows()
    found = followed(net, nesterov(net), in_parts)[0].attribute(by="module", batch_norm=mode, quiet=True)
    names = {"by_component": "contribution", "decay_by_component": "decay"}
    names |= {"coupling_by_component": "coupling"} if mode == "constant" else {}
    for name, whole in names.items():
        assert found[name].sizes["component"] == 3
        assert np.abs((found[name].sum("component") - found[whole]).to_numpy()).max() < ROUNDING


def first_numbers(call: SeenCall) -> list[float]:
    """Names of examples."""
    (x,) = call.args
    assert isinstance(x, Tensor)
    found: list[float] = x[:, 0].tolist()
    return found


@pytest.mark.parametrize("mode", ["exact", "constant"])
def test_parts_are_those_of_each_loss(mode: BatchNormMode) -> None:
    """Against autograd of one example's loss after another; the outputs at the queries are linear in what moves."""

    def network() -> nn.Sequential:
        net = nn.Sequential(nn.Linear(5, 10), nn.BatchNorm1d(10, affine=False), nn.Linear(10, 2)).double()
        net[2].requires_grad_(False)
        return net

    net = network()
    (x, y, queries), expected = data(net), torch.zeros(3, 2, EXAMPLES, dtype=torch.float64)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.3)
    with follow(net, optimizer, queries=queries, ids=first_numbers) as trace:
        for step in range(3):
            batch, alone, frozen = torch.randperm(EXAMPLES)[:BATCH], network(), network().eval()
            alone.load_state_dict(net.state_dict())
            frozen.load_state_dict(net.state_dict())

            # ∂ℓᵢ/∂θ through the whole batch, or of an example by itself at the batch's mean and variance
            if mode == "constant":
                hidden = alone[0](x[batch]).detach()
                alone[1].running_mean, alone[1].running_var = hidden.mean(0), hidden.var(0, correction=0)
                alone.eval()
            losses = functional.cross_entropy(alone(x[batch]), y[batch], reduction="none") / BATCH
            for place, loss in zip(batch.tolist(), losses, strict=True):
                gradients = torch.autograd.grad(loss, list(alone[0].parameters()), retain_graph=True)
                for query, out in np.ndindex(3, 2):
                    rows = torch.autograd.grad(frozen(queries)[query, out], list(frozen[0].parameters()))
                    for row, gradient in zip(rows, gradients, strict=True):
                        expected[query, out, place] -= 0.3 * float((row * gradient).sum())
            plain(net, optimizer, x[batch], y[batch], step)
    found = trace.attribute(batch_norm=mode, quiet=True)["contribution"]
    places = [int((x[:, 0] == float(name)).nonzero()) for name in found["example"].to_numpy()]
    assert expected.norm() > 0.1
    assert np.abs(found.to_numpy() - expected[:, :, places].numpy()).max() < ROUNDING * float(expected.norm())


def test_parts_do_not_depend_on_the_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cotangent at a time, made anew whenever it is asked for, or all at once."""
    net = of_images()
    trace, _ = followed(net, nesterov(net), in_parts)
    whole = trace.attribute(quiet=True)["contribution"].to_numpy()

    def cramped(*given: Any) -> CallReaders:
        return replace(CallReaders(*given), buffer_bytes=1e4)

    monkeypatch.setattr(trace_module, "CallReaders", cramped)
    few = trace.attribute(quiet=True)["contribution"].to_numpy()
    assert np.abs(whole - few).max() < ROUNDING * np.abs(whole).max()


def test_under_autocast_parts_casts_and_statistics_add_up(tmp_path: Path) -> None:
    """In float32, from a folder, into another module."""

    def body(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        net.train()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()

    net = of_images().float()
    other = deepcopy(net)
    _, change = followed(net, nesterov(net), body, to=tmp_path / "run")
    found = load_trace(find_trace(tmp_path / "run"), other).attribute(quiet=True)
    assert np.abs(explained(found) - change.numpy()).max() < 1e-5 * float(change.norm())
    assert found["casts_error"].max() > 1e-4

    # a reader of the run is told that part of the change is no example's
    (explanation, *_) = explain(load_run(tmp_path / "run"), "query", [0])
    assert explanation.statistics == pytest.approx(float(found["statistics"][0, explanation.out]), rel=1e-6)
    assert abs(explanation.rest) < 1e-5 * abs(explanation.statistics) + float(np.abs(found["rounding"]).max())


# --- Refused.


def by_hand(net: nn.Module) -> None:
    net[1].running_mean.data.add_(0.1)  # type: ignore[index]


def reset(net: nn.Module) -> None:
    net[1].reset_running_stats()  # type: ignore[index]


@pytest.mark.parametrize("tamper", [by_hand, reset])
@pytest.mark.parametrize("before_step", [False, True], ids=["before a call", "before a step"])
def test_statistics_that_something_else_moves_are_refused(
    tamper: Callable[[nn.Module], None], before_step: bool
) -> None:
    def body(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        net.train()
        if step == 2 and not before_step:
            tamper(net)
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        if step == 2 and before_step:
            tamper(net)
        optimizer.step()

    net = of_rows()
    with pytest.raises(Mistake, match=r"step 2: the running statistics '1\.\w+' were changed by something else than a"):
        followed(net, sgd(net), body)


@pytest.mark.parametrize("which", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize("name", ["1.running_mean", "1.running_var", "1.num_batches_tracked"])
def test_recorded_statistics_that_no_replay_gives_are_refused(name: str, which: int) -> None:
    net = of_rows()
    trace, _ = followed(net, sgd(net))
    events: Any = trace.steps.loop.events  # type: ignore[attr-defined]  # in memory
    (call,) = events[3]["calls"]
    both = [dict(each) for each in call.statistics]
    both[which][name] = both[which][name] + (1 if "num" in name else 1e-6)
    events[3]["calls"] = (replace(call, statistics=tuple(both)),)
    with pytest.raises(Mistake, match=rf"step 3: the running statistics '{name}' are not those to which the replay"):
        trace.attribute(quiet=True)


class Centred(nn.Module):
    """Couples the examples of a batch by itself, and not as a norm does."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(0, keepdim=True) if self.training else x


@pytest.mark.parametrize("mode", ["exact", "constant"])
def test_other_couplings_are_refused(mode: BatchNormMode) -> None:
    net = layers(nn.BatchNorm1d(10), nn.Tanh(), Centred())
    trace, _ = followed(net, sgd(net))
    with pytest.raises(Mistake, match="step 5: the module couples the examples of a batch"):
        trace.attribute(batch_norm=mode, quiet=True)


def layers(*inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 10), *inner, nn.Tanh(), nn.Linear(10, 2)).double()


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ([nn.SyncBatchNorm(10)], r"step 0: layer '1' \(SyncBatchNorm\) takes its statistics from the batches of all"),
        (
            [nn.Unflatten(1, (2, 5)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()],
            r"step 0: layer '2' \(InstanceNorm1d\) moves running statistics; let it track none",
        ),
        (
            [nn.BatchNorm1d(10, track_running_stats=False)],
            r"layer '1' \(BatchNorm1d, track_running_stats=False\) takes its statistics from the batch; let it track",
        ),
    ],
    ids=["sync", "instance", "untracked"],
)
def test_kinds_that_are_not_followed_are_named(inner: Sequence[nn.Module], reason: str) -> None:
    net = layers(*inner)
    with pytest.raises(Mistake, match=reason):
        followed(net, sgd(net))


def test_norms_of_an_example_are_followed_beside() -> None:
    net = layers(nn.BatchNorm1d(10), nn.Unflatten(1, (2, 5)), nn.InstanceNorm1d(2), nn.GroupNorm(2, 2), nn.Flatten())
    trace, change = followed(net, sgd(net))
    assert np.abs(explained(trace.attribute(quiet=True)) - change.numpy()).max() < ROUNDING * float(change.norm())


def test_norms_in_evaluation_are_no_statistics() -> None:
    def body(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        half_frozen(net, optimizer, x, y, 0)

    net = of_rows()
    trace, change = followed(net, sgd(net), body)
    found = trace.attribute(quiet=True)
    assert "statistics" not in found
    assert np.abs(explained(found) - change.numpy()).max() < ROUNDING * float(change.norm())


def test_effects_of_coupled_examples_are_refused() -> None:
    net = of_rows()
    trace, _ = followed(net, sgd(net), loss=lambda outputs, call: outputs.sum(1))
    with pytest.raises(Mistake, match="without an example the statistics of its batches are others too"):
        trace.attribute(effects=True, quiet=True)


# --- The benchmark net of the field: ResNet-9, on random images of CIFAR's shape.


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.inner(x)
        return found


def block(inside: int, outside: int, size: int = 3, stride: int = 1, padding: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inside, outside, size, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "constant"])
def test_a_resnet_9_is_followed(mode: BatchNormMode) -> None:
    w = 4
    net = nn.Sequential(
        *(block(3, w), block(w, 2 * w, 5, 2, 2), Residual(block(2 * w, 2 * w), block(2 * w, 2 * w))),
        *(block(2 * w, 4 * w), nn.MaxPool2d(2), Residual(block(4 * w, 4 * w), block(4 * w, 4 * w))),
        *(block(4 * w, 2 * w, padding=0), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(2 * w, 10, bias=False)),
    ).double()
    x, y, queries = torch.randn(32, 3, 32, 32).double(), torch.randint(10, (32,)), torch.randn(2, 3, 32, 32).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    before = deepcopy(net).eval()
    with follow(net, optimizer, queries=queries) as trace:
        for step in range(4):
            batch = torch.randperm(32)[:16]
            plain(net, optimizer, x[batch], y[batch], step)
    with torch.no_grad():
        change = net.eval()(queries) - before(queries)
    found = trace.attribute(batch_norm=mode, quiet=True)
    assert np.abs(explained(found) - change.numpy()).max() < ROUNDING * float(change.norm())
