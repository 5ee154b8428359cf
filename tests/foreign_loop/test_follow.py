"""Following records the loop as it ran, or refuses it by name, and leaves the rest of the program alone."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import ntkexp
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from tests.bench.follow import Words
from tests.foreign_loop import loops
from tests.foreign_loop.bugs import GRADIENT, REFUSED
from tests.foreign_loop.loops import STEPS, Body, Loop, fitted, followed, loop, missed, outputs_of, plain, sgd

EXACT = loops.BOUNDS[torch.float64]


@pytest.mark.parametrize(("body", "step", "name", "said"), REFUSED, ids=lambda part: getattr(part, "__name__", ""))
def test_a_bug_is_refused_by_step_and_name(body: Body, step: int, name: str, said: str) -> None:
    given = loop(loops.momentum)
    with pytest.raises(Mistake) as refusal:
        followed(given, body).attribute()
    message = str(refusal.value)
    assert message.startswith(f"step {step}: ")
    assert f"'{name}" in message
    assert said in message
    assert given.done == 0 or said != GRADIENT  # other gradients are refused before the second step


def test_rounding_of_sums_that_cancel_is_no_change_by_hand() -> None:
    """Adam's loops.momentum nearly vanishes in the second step, and so do the weights after the first."""
    pull, net = torch.randn(1, 1000), nn.Linear(1000, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(0.01 * pull.sign())
    factors, optimizer = (1.0, -0.9, 1.0), torch.optim.Adam(net.parameters(), lr=0.01)
    assert len(fitted(net, optimizer, lambda step: net(factors[step] * pull).sum(), 3, queries=pull).steps) == 3


class Lines(nn.Linear):
    """Takes rows of numbers of any length, with any axes before them. Each row has one output for each number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x[..., None])).mean(-1)


class FlatLines(nn.Linear):
    """Takes a picture, flat or not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x.flatten(1)))


# --- An optimizer may also update tensors outside the model.


def with_a_head(optimizers: Callable[[list[nn.Parameter], list[nn.Parameter]], list[Any]], **more: Any) -> Trace:
    """A head on top of the followed model is trained too. The gradients of both are clipped together."""
    torch.manual_seed(0)
    given, head = loop(sgd), nn.Linear(3, 3).double()
    both = list(given.model.parameters()), list(head.parameters())
    followed_one, *others = optimizers(*both)

    def body(given: Loop, batch: Tensor) -> None:
        for optimizer in (followed_one, *others):
            optimizer.zero_grad()
        logits = head(given.model(given.x[batch]))
        nn.functional.cross_entropy(logits, given.y[batch]).backward()  # type: ignore[no-untyped-call]
        if not others:
            nn.utils.clip_grad_norm_(both[0] + both[1], 0.2)
        for optimizer in (followed_one, *others):
            optimizer.step()

    return followed(replace(given, optimizers=[followed_one]), body, **more)


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_tensors_outside_the_model_may_be_clipped_with_it(
    on_disk: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = partial(torch.optim.AdamW, lr=0.01)
    trace = with_a_head(lambda model, head: [kind(model + head)], to=tmp_path / "run" if on_disk else None)
    assert "also updates 2 tensors outside the model" in caplog.text
    found = trace.attribute()
    assert missed(found) <= EXACT
    assert 0 < float(found["gradient_factor"].min()) < 0.9


def test_tensors_outside_the_model_change_no_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have the optimizer of the model, or their own."""
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *_: None)
    kind = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
    one, two = (
        with_a_head(optimizers).attribute()["contribution"]
        for optimizers in (
            lambda model, head: [kind(model + head)],
            lambda model, head: [kind(model), kind(head)],
        )
    )
    assert (one == two).all()


# --- The form of a call does not affect the contributions.


class AnyCall(nn.Sequential):
    """Takes inputs by position, by name, both, or in a dict."""

    def forward(self, x: Any, offset: Any = None, scale: float = 1.0, times: int = 1) -> Tensor:
        if isinstance(x, dict):
            x, offset = x["features"], x["shift"]
        if times > 1:
            outputs: Tensor = self(self(x, offset, scale, times=times - 1), offset)
            return outputs
        if x.isnan().any():
            raise ValueError("a batch is broken")
        x = scale * (x if offset is None else x + offset)
        for layer in self:
            x = layer(x)
        return torch.as_tensor(x)


Call: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]


def after_a_failure(net: nn.Module, x: Tensor, offset: Tensor) -> Tensor:
    with pytest.raises(ValueError, match="broken"):
        net(x * float("nan"), offset)
    outputs: Tensor = net(x, offset)
    return outputs


def halved_by_a_hook(net: nn.Module, x: Tensor, offset: Tensor) -> Tensor:
    outputs: Tensor = net(2 * x, 2 * offset)
    return outputs


CALLS: dict[str, tuple[Call, Call]] = {
    "by position and by name": (
        lambda net, x, offset: net(x, offset=offset, scale=0.5),
        lambda net, x, offset: net(x, offset, 0.5),
    ),
    "a dict": (lambda net, x, offset: net({"features": x, "shift": offset}), lambda net, x, offset: net(x, offset)),
    "itself twice": (
        lambda net, x, offset: net(x, offset, times=2),
        lambda net, x, offset: net(net(x, offset), offset),
    ),
    "after a failure": (after_a_failure, lambda net, x, offset: net(x, offset)),
    "inputs that a hook changes": (halved_by_a_hook, lambda net, x, offset: net(x, offset)),
}
"""A call, and the plain calls that compute the same."""


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.sample(5)
def test_a_call_may_have_any_form(case: str, on_disk: bool, tmp_path: Path) -> None:
    x, offset, queries = torch.randn(3, 6, 4, dtype=torch.float64)

    def contributions(call: Call, queries: Tensor, *, hooked: bool = False) -> Any:
        torch.manual_seed(0)
        net = AnyCall(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        if hooked:
            net.register_forward_pre_hook(lambda _, args: tuple(each / 2 for each in args))
        trace = fitted(
            net,
            torch.optim.Adam(net.parameters(), 0.01),
            lambda _: call(net, x, offset).square().mean(),
            queries=queries,
            ids=lambda call: range(6),
            to=tmp_path / str(len(list(tmp_path.iterdir()))) if on_disk else None,
        )
        return trace.attribute(quiet=True)["contribution"]

    call, plain_call = CALLS[case]
    hooked = call is halved_by_a_hook
    found = contributions(call, (1 + hooked) * queries, hooked=hooked)
    assert loops.apart(found, contributions(plain_call, queries)) <= EXACT


@pytest.mark.parametrize(
    ("net", "shape", "asked"),
    [(Lines(1, 3), (4, 5), (2, 7)), (Lines(1, 3), (4, 5, 6), (2, 3, 9)), (FlatLines(6, 3), (4, 2, 3), (2, 6))],
    ids=["other lengths", "more of them", "other axes, the same outputs"],
)
def test_queries_may_have_any_shape_that_the_model_takes(
    net: nn.Module, shape: tuple[int, ...], asked: tuple[int, ...]
) -> None:
    net, x, queries = net.double(), torch.randn(shape).double(), torch.randn(asked).double()
    start, optimizer = outputs_of(net, queries), torch.optim.SGD(net.parameters(), 0.1)
    found = fitted(net, optimizer, lambda _: net(x).square().sum(), queries=queries).attribute()
    assert missed(found, (outputs_of(net, queries) - start).flatten(1)) <= EXACT


def test_queries_of_a_batch_without_its_axis_are_refused_at_the_first_step() -> None:
    """One query without its axis looks like many queries with fewer outputs."""
    net, x = Lines(1, 3).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    with pytest.raises(Mistake, match=r"^queries=: they have 2 axes, .* 6 outputs each, .* with 3 axes, .* 30;"):
        fitted(net, torch.optim.SGD(net.parameters()), lambda _: net(x).square().sum(), 1, queries=x[0])


def test_half_of_a_contribution_is_made_by_the_steps_of_its_example() -> None:
    """If an example occurs at one step only, half of its contribution is complete in the middle of this step."""
    found = followed(loop(sgd), plain)
    seen: dict[str, list[int]] = {}
    for step, _ in found.steps.forwards():
        for call in step.calls:
            for name in call.names:
                seen.setdefault(name, []).append(step.index)
    half_by = found.attribute()["half_by"]
    for name, steps in seen.items():
        times = half_by.sel(example=name).to_numpy() * len(found.steps)
        assert (times >= min(steps)).all()
        assert (times <= max(steps) + 1).all()
        assert len(steps) > 1 or abs(times - steps[0] - 0.5).max() < 1e-9


def test_a_trace_is_shown_in_a_line_and_goes_on(tmp_path: Path) -> None:
    """A trace that is printed or attributed in the middle of the loop shows the steps so far, and all at the end."""
    given, seen, kept = loop(sgd), list[tuple[str, int]](), list[Trace]()

    def looked_at(given: Loop, batch: Tensor) -> None:
        plain(given, batch)
        seen.append((repr(kept[0]), len(kept[0].steps)))

    trace = followed(given, looked_at, kept, to=tmp_path / "run")
    names = "(numbered in order of first use; follow(…, ids='dataset') names them by their index in a Dataset)"
    assert repr(trace) == f"Trace of 8 steps of Sequential, 18 examples {names}, 3 queries, in {tmp_path / 'run'}"
    assert seen[0] == (f"Trace of 1 step of Sequential, 6 examples {names}, 3 queries, in {tmp_path / 'run'}", 1)
    assert trace.attribute().sizes["step"] == STEPS


def test_the_package_lists_its_public_names() -> None:
    assert {"follow", "load_run", "lightning", "huggingface", "__version__"} <= set(dir(ntkexp))
    assert not {"HOMES", "CALLBACKS"} & set(dir(ntkexp))
    assert all(getattr(ntkexp, name) for name in ntkexp.__all__)


# --- Changes outside the steps, and movement by rounding, are parts of their own, and are reported.


def at_last(change: Body) -> Body:
    def body(given: Loop, batch: Tensor) -> None:
        plain(given, batch)
        if given.done == STEPS - 1:
            change(given, batch)

    return body


def clamp(given: Loop, batch: Tensor) -> None:
    given.model[2].get_parameter("weight").data.clamp_(-0.1, 0.1)


def load_average(given: Loop, batch: Tensor) -> None:
    given.model.load_state_dict({name: weight / 2 for name, weight in given.model.state_dict().items()})


def step_unseen(given: Loop, batch: Tensor) -> None:
    """One step of an optimizer that is not followed."""
    given.back(batch)
    torch.optim.SGD(given.model.parameters(), lr=0.2).step()


def heat(given: Loop, batch: Tensor) -> None:
    """A setting of the model changes, and its outputs with it."""
    given.model[3].approximate = "tanh"  # type: ignore[assignment]  # not a tensor


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [clamp, load_average, step_unseen], ids=lambda body: body.__name__)
@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_a_change_outside_the_steps_is_a_part_of_its_own(change: Body, on_disk: bool, tmp_path: Path) -> None:
    given = loop(loops.momentum)
    start = outputs_of(given.model, given.queries)
    trace = followed(given, at_last(change), to=tmp_path / "run" if on_disk else None)
    found = trace.attribute()
    stepped = torch.func.functional_call(trace.module, dict(trace.steps.end), (given.queries,)).detach()
    end = outputs_of(given.model, given.queries)
    assert missed(found, stepped - start) <= EXACT
    assert loops.apart(found["change"], end - start) <= EXACT
    assert loops.apart(found["outside"], end - stepped) <= EXACT * 100  # of a change that is smaller by up to so much
    assert (end - stepped).norm() > 0.01 * (end - start).norm()
    assert "weight" in found.attrs["outside"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (at_last(clamp), "'2.weight' changed outside the steps"),
        (at_last(heat), "'3.approximate' changed outside the steps"),
        (plain, ""),
    ],
    ids=["a clamp", "a setting", "nothing"],
)
def test_a_change_outside_the_steps_is_reported_at_the_end(
    body: Body, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    followed(loop(sgd), body)
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


class Scaled(nn.Linear):
    """Under a loss of directions, the gradient of the scale is rounding."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def rounded() -> Trace:
    """Adam divides rounding by its own size."""
    net, x = Scaled(), torch.randn(6, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return fitted(net, optimizer, lambda _: nn.functional.normalize(net(x)).square()[:, 0].sum(), 6, queries=x[:2])


def test_movement_by_rounding_through_adam_is_measured() -> None:
    found = rounded().attribute(quiet=True)
    change = found["change"].to_numpy()
    gap = np.linalg.norm(found["contribution"].sum("example") + found["decay"] - change) / np.linalg.norm(change)
    assert 1e-3 < gap < 1.01 * found.attrs["rounding"]
    assert loops.apart(found["by_step"].sum("step"), change) < loops.BOUNDS[torch.float32]


def needed(trace: Trace) -> float:
    """The memory that attribution announces, in GB."""
    with pytest.raises(Mistake, match=r"memory_gb=1e-06 is less than the .* of contributions of \d") as refusal:
        trace.attribute(memory_gb=1e-6)
    found = re.search(r"the ([\d.e-]+) GB", str(refusal.value))
    assert found is not None
    return float(found.group(1))


REPORTED: dict[str, tuple[Callable[[], Trace], str]] = {
    "rounding": (rounded, "rounding caused"),
    "a clamp": (lambda: followed(loop(sgd), at_last(clamp)), "changed after the last step"),
    "memory": (lambda: followed(loop(sgd), plain, memory_gb=0.1), "`half_by` is left out"),
    "nothing": (lambda: followed(loop(sgd), plain), ""),
}


@pytest.mark.parametrize(("case", "quiet"), [*((case, False) for case in REPORTED), ("rounding", True)])
def test_attribution_reports_unless_it_is_quiet(
    case: str, quiet: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    make, said = REPORTED[case]
    trace = make()
    memory_gb = needed(trace) if case == "memory" else None
    caplog.clear()
    capfd.readouterr()
    found = trace.attribute(memory_gb=memory_gb, quiet=quiet)
    assert said in caplog.text or quiet
    assert not caplog.text or (said and not quiet)
    assert not quiet or capfd.readouterr() == ("", "")
    assert ("half_by" in found) == (case != "memory")

    # later messages are shown again
    caplog.clear()
    logging.getLogger("ntkexp.follow").warning("later")
    assert "later" in caplog.text


def test_half_by_needs_the_memory_that_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    trace = followed(loop(sgd), plain, memory_gb=0.1)
    trace.attribute(memory_gb=needed(trace))
    announced = re.search(r"`half_by` is left out: .* than the ([\d.e-]+) GB", caplog.text)
    assert announced is not None
    assert "half_by" in trace.attribute(memory_gb=1.1 * float(announced.group(1)), quiet=True)


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """The largest number of bytes that results of operations held at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes, self.most, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in (each for each in tree_iter(results) if isinstance(each, Tensor)):
            memory = tensor.untyped_storage()
            if memory._cdata not in self.known:
                self.known.add(memory._cdata)
                self.bytes += memory.nbytes()
                weakref.finalize(memory, self.forget, memory._cdata, memory.nbytes())
        self.most = max(self.most, self.bytes)
        return results

    def forget(self, place: int, nbytes: int) -> None:
        self.known.discard(place)
        self.bytes -= nbytes


NESTEROV = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
MEMORY: dict[str, tuple[Any, tuple[int, int, int], float | None, dict[str, Any]]] = {
    "SGD, many queries": (torch.optim.SGD, (300, 200, 4), None, {}),
    "SGD, many weights": (torch.optim.SGD, (8, 60, 300), None, {}),
    "SGD, clipped": (torch.optim.SGD, (2, 60, 30000), 5e-4, {}),
    "Nesterov": (NESTEROV, (4, 30, 3000), None, {}),
    "Nesterov, clipped": (NESTEROV, (4, 30, 3000), 5e-4, {}),
    "Nesterov, clipped, a step": (NESTEROV, (4, 30, 3000), 5e-4, {"steps": [1]}),
    "NAdam, many queries": (torch.optim.NAdam, (300, 200, 4), None, {}),
    "NAdam, many weights": (torch.optim.NAdam, (8, 60, 300), None, {}),
    "NAdam, clipped": (torch.optim.NAdam, (4, 30, 3000), 5e-4, {}),
    "BatchNorm, many examples": (torch.optim.SGD, (600, 2, 2000), None, {}),
    "BatchNorm, constant": (torch.optim.SGD, (600, 2, 2000), None, {"batch_norm": "constant"}),
    "BatchNorm, clipped": (torch.optim.SGD, (16, 4, 30000), 5e-4, {}),
}
"""The optimizer, the numbers of examples, queries and hidden units, the bound of clipping by value, and options. Some
networks have BatchNorm."""


@pytest.mark.parametrize("case", MEMORY)
@pytest.mark.sample(6)
def test_attribution_takes_no_more_memory_than_it_announces(case: str) -> None:
    kind, (examples, queries, width), bound, more = MEMORY[case]
    x, asked, y = torch.randn(examples, 4).double(), torch.randn(queries, 4).double(), torch.arange(examples) % 3
    norm = [nn.BatchNorm1d(width)] if "BatchNorm" in case else []
    model = nn.Sequential(nn.Linear(4, width), *norm, nn.Tanh(), nn.Linear(width, 3)).double()
    optimizer = kind(model.parameters(), lr=0.01)
    with ntkexp.follow(model, optimizer, queries=asked, **more) as trace:
        for _ in range(2):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            if bound is not None:
                nn.utils.clip_grad_value_(model.parameters(), bound)
            optimizer.step()
    memory_gb = needed(trace)
    with LiveTensors() as live:
        trace.attribute(memory_gb=memory_gb, quiet=True)
    assert live.most < memory_gb * 1e9


def test_attribution_of_a_language_model_takes_no_more_memory_than_it_announces() -> None:
    model, texts = Words(words=300, longest=32, width=32), torch.randint(300, (64, 33))
    x, y = texts[:, :-1], texts[:, 1:]

    def losses(outputs: Tensor, _: object) -> Tensor:
        return nn.functional.cross_entropy(outputs.mT, y[:2], reduction="none").mean(1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ntkexp.follow(model, optimizer, queries=x[:2], measure=losses) as trace:
        nn.functional.cross_entropy(model(x).mT, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    memory_gb = needed(trace)
    with LiveTensors() as live:
        trace.attribute(memory_gb=memory_gb, quiet=True)
    assert live.most < memory_gb * 1e9


def test_the_queries_are_copied_when_following_begins() -> None:
    """The loop may write into its tensor."""

    def reused(given: Loop, batch: Tensor) -> None:
        plain(given, batch)
        given.queries.copy_(given.x[:3])

    given = loop(loops.adamw)
    asked = given.queries.clone()
    start = outputs_of(given.model, asked)
    found = followed(given, reused).attribute()
    assert missed(found, outputs_of(given.model, asked) - start) <= EXACT
    again = followed(replace(loop(loops.adamw), queries=asked), plain).attribute()
    assert (again["contribution"] == found["contribution"]).all()


# --- follow(log=) gives the numbers of each step that the loop itself finds.

Numbers = dict[str, float]


def one(model: nn.Sequential) -> loops.Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def two(model: nn.Sequential) -> loops.Optimizers:
    first, *rest = model.parameters()
    return [torch.optim.Adam([first], lr=0.01), torch.optim.SGD(rest, lr=0.1)]


def norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([tensor.detach().flatten() for tensor in tensors]).norm())


def measured(given: Loop, steps: int) -> list[Numbers]:
    """The loop's own numbers of steps that accumulate two batches, clip, and have a schedule."""
    found, parameters = list[Numbers](), list(given.model.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in given.optimizers]
    source = loops.batches()
    for _ in range(steps):
        both = torch.cat([next(source), next(source)])
        given.zero()
        for batch in both.chunk(2):
            given.back(batch, divisor=2)
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(given.model(given.x[both]), given.y[both]))
        nn.utils.clip_grad_norm_(parameters, 0.5)
        gradient = norm([weight.grad for weight in parameters if weight.grad is not None])
        rates = [each.param_groups[0]["lr"] for each in given.optimizers]
        names = ["learning_rate"] if len(rates) == 1 else ["learning_rate.0", "learning_rate.1"]
        given.step()
        numbers = {"loss": loss, "examples": len(both), "gradient_norm": gradient, "weight_norm": norm(parameters)}
        found.append(numbers | dict(zip(names, rates, strict=True)))
        for schedule in schedules:
            schedule.step()
    return found


@pytest.mark.parametrize("optimizers", [one, two])
def test_logged_numbers_are_those_of_the_loop(optimizers: loops.Maker, tmp_path: Path) -> None:
    given, logged, found = loop(optimizers), list[tuple[Numbers, int]](), list[Numbers]()

    def ids(call: SeenCall) -> Tensor:
        (x,) = call.args
        assert isinstance(x, Tensor)
        return torch.cdist(x, given.x).argmin(1)

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return nn.functional.cross_entropy(outputs, given.y[[int(name) for name in call.ids]], reduction="none")

    asked: Any = {"queries": given.queries, "ids": ids, "loss": loss, "to": tmp_path / "run"}
    for steps in (4, 2):  # the second part continues the trace of the first
        with ntkexp.follow(given.model, given.optimizers, log=lambda *seen: logged.append(seen), **asked):
            found += measured(given, steps)
    assert [step for _, step in logged] == list(range(6))
    for (numbers, _), expected in zip(logged, found, strict=True):
        assert 0 <= numbers.pop("rule_error") < 1e-14
        assert numbers == pytest.approx(expected, rel=1e-12)
