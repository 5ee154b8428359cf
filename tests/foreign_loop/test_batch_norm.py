"""BatchNorm in training mode: parts through the whole batch, or at constant statistics, and running statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.foreign_loop.batch_gradients import CoupledOutputs, TermProducts
from ntkexp.foreign_loop.batch_norm import BatchNormMode, batch_norm_sentence
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from ntkexp.report.explain import explain
from ntkexp.report.loaded_run import load_run
from tests.foreign_loop.loops import apart, outputs_of
from tests.foreign_loop.test_follow import needed

ROUNDING = 1e-12  # of sums over a few hundred parts, relative to the change
EXAMPLES, BATCH = 24, 8

Body = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor, int], None]


def of_rows(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 10), nn.BatchNorm1d(10, **options), nn.Tanh(), nn.Linear(10, 2)).double()


def of_images(**options: Any) -> nn.Sequential:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU(), nn.Dropout(0.1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(36, 2)).double()


def data(net: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    channels = [each.in_channels for each in net.modules() if isinstance(each, nn.Conv2d)]
    shape = (channels[0], *[32 if channels[0] == 3 else 5] * 2) if channels else (5,)
    x = torch.randn(EXAMPLES, *shape, dtype=dtype)
    return x, torch.randint(2, (EXAMPLES,)), torch.randn(3, *shape, dtype=dtype)


def step_of(
    *,
    parts: int = 1,
    trains: Callable[[int], bool] = lambda _: True,
    casts: bool = False,
    bound: float = 1e9,
    tamper: Any = None,
) -> Body:
    """A step of some calls, each with another batch. `tamper` changes the module in step 2, around the calls."""

    def body(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        net.train(trains(step))
        optimizer.zero_grad()
        if tamper is not None and step == 2:
            tamper(net, False)
        for some in torch.arange(len(x)).chunk(parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = functional.cross_entropy(net(x[some]), y[some]) / parts
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        if parts > 1:  # statistics also move in a call without gradients
            with torch.no_grad():
                net(x)
        if tamper is not None and step == 2:
            tamper(net, True)
        nn.utils.clip_grad_value_(net.parameters(), bound)
        optimizer.step()

    return body


plain, in_parts = step_of(), step_of(parts=2)
half_frozen = step_of(trains=lambda step: step % 2 == 1)  # with the present statistics at every second step


def followed(
    net: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], body: Body = plain, **more: Any
) -> tuple[Trace, Tensor]:
    """The trace of a loop, and the change of the outputs at the queries, in evaluation."""
    x, y, queries = data(net, next(net.parameters()).dtype)
    start, optimizer = outputs_of(net, queries), make(net)
    with follow(net, optimizer, queries=queries, **more) as trace:
        for step in range(6):
            batch = torch.randperm(len(x))[:BATCH]
            body(net, optimizer, x[batch], y[batch], step)
            outputs_of(net, queries)
    return trace, outputs_of(net, queries) - start


def explained(found: Any) -> Any:
    """The sum of all parts."""
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
    trace, change = followed(make(), optimizer, body)
    found = trace.attribute(batch_norm=mode, quiet=True)
    moved = float(change.norm())
    # under Adam, which divides a gradient that cancels, the coupling is orders larger than the change
    largest = max(moved, *(float(np.abs(found[name]).max()) for name in ("statistics", "rounding")))
    largest = max(largest, float(np.abs(found["coupling"]).max())) if mode == "constant" else largest
    assert moved > 0.1
    assert np.abs(explained(found) - change.numpy()).max() < ROUNDING * largest
    assert np.abs(found["by_step"].sum("step").to_numpy() - change.numpy()).max() < ROUNDING * largest
    assert float(np.linalg.norm(found["statistics"])) > 1e-3 * moved
    assert ("coupling" in found) == (mode == "constant")
    assert found["gradient_error"].max() < ROUNDING
    assert "running statistics of BatchNorm caused" in batch_norm_sentence(found)


class Rounded(nn.Module):
    """A module that rounds its inputs, with the gradients of the identity (a straight-through estimator)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (4 * x).round().sub(4 * x).detach() / 4


@pytest.mark.parametrize("mode", ["exact", "constant"])
def test_surrogate_gradients_after_a_batch_add_up(mode: BatchNormMode) -> None:
    net = nn.Sequential(*list(of_rows())[:3], Rounded(), nn.Linear(10, 2)).double()
    trace, change = followed(net, sgd)
    found = trace.attribute(batch_norm=mode, quiet=True)
    assert "not the derivatives of the model's values" in found.attrs["surrogate_gradients"]
    assert np.abs(explained(found) - change.numpy()).max() < ROUNDING * float(change.norm())


@pytest.mark.parametrize("mode", ["exact", "constant"])
def test_components_add_up_through_a_batch(mode: BatchNormMode) -> None:
    found = followed(of_rows(), nesterov, in_parts)[0].attribute(by="module", batch_norm=mode, quiet=True)
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


def test_a_step_that_repeats_its_gradient_has_the_gradient_of_autograd() -> None:
    """Proof (a) does not compute it again. With clipping, a factor is between the two, and proof (a) computes it."""

    def clipped(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, step: int) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        if step % 2:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()

    trace, _ = followed(of_rows(), lambda net: torch.optim.SGD(net.parameters(), 0.1), clipped)
    for step, _ in trace.steps.forwards():
        expected = trace.called.gradient(step.calls, [step.start] * len(step.calls))
        is_same = all(torch.equal(step.gradient[name], part) for name, part in expected.items())
        assert step.repeats_gradient == is_same == (step.index % 2 == 0)


@pytest.mark.parametrize("mode", ["exact", "constant"])
def test_parts_are_those_of_each_loss(mode: BatchNormMode) -> None:
    """Against autograd of one loss after another. The outputs at the queries are linear in the moving weights."""

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

            # ∂ℓᵢ/∂θ through the whole batch, or at the constant mean and variance of the batch
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


class Backwards(torch.autograd.Function):
    """The identity, without a forward-mode derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OnlyBackwards(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Backwards.apply(x)  # type: ignore[no-untyped-call]
        return result


def small_images() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)).double()


@pytest.mark.parametrize(  # all pairs; the smaller bound clips by value
    ("make", "optimizer", "bound"),
    [(of_rows, sgd, 1.0), (of_rows, nesterov, 1e-3), (small_images, sgd, 1e-3), (small_images, nesterov, 1.0)],
    ids=["rows", "rows, Nesterov, clipped", "images, clipped", "images, Nesterov"],
)
@pytest.mark.sample(2)
def test_forward_mode_and_backward_passes_give_the_same_parts(
    make: Callable[[], nn.Sequential], optimizer: Callable[[nn.Module], Any], bound: float
) -> None:
    """In as little memory as possible too, where the gradients of the examples are computed again for each reading.

    A measure and two components need six directions, fewer than the examples of a batch.
    """

    def attributed(identity: nn.Module, *, little: bool = False) -> Any:
        torch.manual_seed(0)
        net = make().insert(3, identity)
        trace, _ = followed(net, optimizer, step_of(bound=bound), measure=lambda outputs, call: outputs.logsumexp(1))
        by = {"first": ["0.*", "1.bias"], "rest": ["*"]}
        return trace.attribute(by=by, quiet=True, memory_gb=1.1 * needed(trace) if little else None)

    expected = attributed(nn.Identity())
    for found in (attributed(OnlyBackwards()), attributed(OnlyBackwards(), little=True)):
        for name in ("contribution", "by_component"):
            assert apart(found[name], expected[name]) < ROUNDING


def test_products_that_are_not_those_of_the_batch_are_refused() -> None:
    net = of_rows()
    x, _, _ = data(net)
    weights = {name: weight.detach() for name, weight in net.named_parameters()}

    def function(given: Any, inputs: Any) -> Tensor:
        buffers = {name: value.clone() for name, value in net.named_buffers()}
        return torch.func.functional_call(net, {**buffers, **given}, inputs)  # type: ignore[no-any-return]

    coupled = CoupledOutputs.of(function, weights, x, frozenset(weights))
    gradient = torch.randn_like(coupled.outputs)
    whole = dict(zip(coupled.leaves, coupled.gradients(gradient, keep=False), strict=True))
    products = TermProducts(function, weights, x, gradient, whole, directions_at_once=2)
    assert products.agree()
    products.whole["0.weight"] = products.whole["0.weight"] + 1e-6
    assert not products.agree()
    with pytest.raises(Mistake, match=r"step 3: the gradients of 24 examples .* do not add up"):
        products.refuse_other_sum(step=3)


def test_under_autocast_parts_casts_and_statistics_add_up(tmp_path: Path) -> None:
    """In float32, from a folder, into another module."""
    net = of_images().float()
    other = deepcopy(net)
    _, change = followed(net, nesterov, step_of(casts=True), to=tmp_path / "run")
    found = load_trace(find_trace(tmp_path / "run"), other).attribute(quiet=True)
    assert np.abs(explained(found) - change.numpy()).max() < 1e-5 * float(change.norm())
    assert found["casts_error"].max() > 1e-4

    # the page of the run shows the part by statistics
    (explanation, *_) = explain(load_run(tmp_path / "run"), "query", [0])
    statistics = explanation.no_example["statistics"]
    assert statistics == pytest.approx(float(found["statistics"][0, explanation.out]), rel=1e-6)
    assert abs(explanation.rest) < 1e-5 * abs(statistics) + float(np.abs(found["rounding"]).max())


# --- Refused.


@pytest.mark.parametrize(
    "move",
    [lambda net: net[1].running_mean.data.add_(0.1), lambda net: net[1].reset_running_stats()],
    ids=["by hand", "reset"],
)
@pytest.mark.parametrize("when", [False, True], ids=["before a call", "before a step"])
def test_statistics_that_something_else_moves_are_refused(move: Callable[[nn.Module], object], when: bool) -> None:
    def tamper(net: nn.Module, called: bool) -> None:
        if called == when:
            move(net)

    with pytest.raises(
        Mistake, match=r"step 2: the running statistics '1\.\w+' were changed by something other than a"
    ):
        followed(of_rows(), sgd, step_of(tamper=tamper))


@pytest.mark.parametrize("which", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize("name", ["1.running_mean", "1.running_var", "1.num_batches_tracked"])
def test_recorded_statistics_that_no_replay_gives_are_refused(name: str, which: int) -> None:
    trace, _ = followed(of_rows(), sgd)
    events: Any = trace.steps.loop.events  # type: ignore[attr-defined]  # in memory
    (call,) = events[3]["calls"]
    both = [dict(each) for each in call.statistics]
    both[which][name] = both[which][name] + (1 if "num" in name else 1e-6)
    events[3]["calls"] = (replace(call, statistics=tuple(both)),)
    with pytest.raises(Mistake, match=rf"step 3: the replay of a call leads to other running statistics '{name}'"):
        trace.attribute(quiet=True)


class Centred(nn.Module):
    """Couples the examples of a batch, and not as a norm does."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(0, keepdim=True) if self.training else x


def layers(*inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 10), *inner, nn.Tanh(), nn.Linear(10, 2)).double()


SYNC, INSTANCE = nn.SyncBatchNorm(10), nn.InstanceNorm1d(2, track_running_stats=True)
REFUSED: dict[str, tuple[Sequence[nn.Module], dict[str, Any], str]] = {
    "another coupling": (
        [nn.BatchNorm1d(10), nn.Tanh(), Centred()],
        {"batch_norm": "exact"},
        "step 5: the module couples the examples of a batch",
    ),
    "another coupling, constant": (
        [nn.BatchNorm1d(10), nn.Tanh(), Centred()],
        {"batch_norm": "constant"},
        "step 5: the module couples the examples of a batch",
    ),
    "sync": ([SYNC], {}, r"step 0: layer '1' \(SyncBatchNorm\) uses the batches of all"),
    "instance": (
        [nn.Unflatten(1, (2, 5)), INSTANCE, nn.Flatten()],
        {},
        r"step 0: layer '2' \(InstanceNorm1d\) updates running statistics, which is not supported",
    ),
    "untracked": (
        [nn.BatchNorm1d(10, track_running_stats=False)],
        {},
        r"layer '1' \(BatchNorm1d, track_running_stats=False\) takes its statistics from the batch; let it track",
    ),
    "effects": (
        [nn.BatchNorm1d(10)],
        {"effects": True},
        "effects do not know how the batch statistics change",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_couplings_are_refused(case: str) -> None:
    inner, options, said = REFUSED[case]
    with pytest.raises(Mistake, match=said):
        followed(layers(*deepcopy(inner)), sgd, loss=lambda f, call: f.sum(1))[0].attribute(quiet=True, **options)


evaluating = step_of(trains=lambda _: False)
EXAMPLE_NORMS = (nn.Unflatten(1, (2, 5)), nn.InstanceNorm1d(2), nn.GroupNorm(2, 2), nn.Flatten())


@pytest.mark.parametrize(
    ("inner", "body"),
    [([nn.BatchNorm1d(10), *EXAMPLE_NORMS], plain), *(([each], evaluating) for each in (nn.BatchNorm1d(10), SYNC))],
    ids=["norms of an example", "evaluation", "sync in evaluation"],
)
def test_norms_without_a_batch_have_no_statistics(inner: Sequence[nn.Module], body: Body) -> None:
    trace, change = followed(layers(*deepcopy(inner)), sgd, body)
    found = trace.attribute(quiet=True)
    assert ("statistics" in found) == (body is plain)
    assert np.abs(explained(found) - change.numpy()).max() < ROUNDING * float(change.norm())
