"""What is followed is what was trained, or is refused by name."""

from __future__ import annotations

import re
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import ntkexp
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from tests.foreign_loop import loops
from tests.foreign_loop.bugs import GRADIENT, RECORDED, REFUSED, loss_of_a_stale_graph
from tests.foreign_loop.loops import (
    Body,
    Loop,
    Maker,
    adamw,
    closes,
    followed,
    loop,
    momentum,
    nesterov,
    plain,
    sgd,
)

EXACT = 1e-12  # the bound of the project for secants
EXACT_32 = 1e-5


@pytest.mark.sample(6)
@pytest.mark.parametrize("body", RECORDED, ids=lambda body: body.__name__)
def test_a_bug_is_recorded_as_what_it_did(body: Body) -> None:
    given = loop(momentum)
    before = deepcopy(given.model)
    closes(given, before, followed(given, body).attribute())


@pytest.mark.parametrize(("body", "step", "name", "said"), REFUSED, ids=lambda part: getattr(part, "__name__", ""))
def test_or_it_is_refused_by_step_and_name(body: Body, step: int, name: str, said: str) -> None:
    with pytest.raises(Mistake) as refusal:
        followed(loop(momentum), body).attribute()
    message = str(refusal.value)
    assert message.startswith(f"step {step}: ")
    assert f"'{name}" in message
    assert said in message


def test_what_pytorch_refuses_itself_leaves_a_trace() -> None:
    given, traces = loop(momentum), list[Trace]()
    before = deepcopy(given.model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        followed(given, loss_of_a_stale_graph, kept=traces)
    dataset = traces[0].attribute()
    closes(given, before, dataset)


def test_a_loop_is_not_changed_by_being_followed() -> None:
    one, other = loop(momentum), loop(momentum)
    followed(one, plain)
    for other.done, batch in zip(range(loops.STEPS), loops.batches()):  # noqa: B905  there is no last batch
        plain(other, batch)
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not one.model._forward_hooks


def test_the_parts_of_sgd_are_those_of_a_loop_over_examples() -> None:
    """−η Σ_s K̄_s(x, xᵢ) ℓ′ᵢ, from the library's secant kernel, step by step."""
    given, expected = loop(sgd), torch.zeros(3, 3, loops.EXAMPLES, dtype=torch.float64)
    trace = followed(given, plain)
    places = {name: place for place, name in enumerate(digests(given.x))}
    for step, end in trace.steps.forwards():
        (call,) = step.calls
        assert isinstance(call.inputs, torch.Tensor)
        kernel = ntkexp.secant_kernel(trace.module, step.start, end, given.queries, call.inputs)
        parts = -0.3 * torch.einsum("qcnd,nd->qcn", kernel, call.gradient)
        expected.index_add_(2, torch.tensor([places[name] for name in call.names]), parts)
    found = trace.attribute()["contribution"].sel(example=list(places)).values
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-12, atol=1e-14)


def test_a_loop_that_raises_leaves_a_trace() -> None:
    given = loop(sgd)
    before = deepcopy(given.model)

    def raises(given: Loop, batch: torch.Tensor) -> None:
        if given.done == 5:
            raise KeyError("a loop's own")
        plain(given, batch)

    traces: list[Trace] = []
    with pytest.raises(KeyError):
        followed(given, raises, kept=traces)
    (trace,) = traces
    dataset = trace.attribute()
    closes(given, before, dataset)


def test_rounding_of_sums_that_cancel_is_no_change_by_hand() -> None:
    """Adam's memory all but vanishes in the second step, and so do the weights after the first."""
    pull = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    net = nn.Linear(1000, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(0.01 * pull.sign())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with ntkexp.follow(net, optimizer, queries=pull) as trace:
        for factor in (1.0, -0.9, 1.0):
            optimizer.zero_grad()
            net(factor * pull).sum().backward()
            optimizer.step()
    assert len(trace.steps) == 3


@pytest.mark.parametrize("optimizers", [momentum, adamw], ids=lambda each: each.__name__)
def test_steps_taken_again_are_those_whose_weights_are_kept(optimizers: Maker) -> None:
    some, all_of_them = (followed(loop(optimizers), plain, every=every).attribute() for every in (None, 1))
    np.testing.assert_allclose(some["by_step"], all_of_them["by_step"], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("optimizers", [momentum, nesterov, adamw], ids=lambda each: each.__name__)
@pytest.mark.parametrize("share", [1e-12, 1e-16])
def test_what_a_step_does_besides_its_rule_is_seen_beyond_rounding(optimizers: Maker, share: float) -> None:
    given = loop(optimizers)

    def besides(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weight = given.model[2].get_parameter("weight")
        weight.data[0, 0] += share * weight.data.norm()

    given.optimizers[0].register_step_post_hook(besides)  # before those of `follow`
    if share < torch.finfo(torch.float64).eps:  # what escapes
        followed(given, plain)
        return
    with pytest.raises(Mistake, match=r"step 0: '2\.weight' is not where its optimizer's rule leads"):
        followed(given, plain)


class Lines(nn.Linear):
    """Reads lines of numbers, of any length and with any axes before them; each has an output for each number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x[..., None])).mean(-1)


class FlatLines(nn.Linear):
    """Takes a picture or what lies flat."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x.flatten(1)))


def followed_at(net: nn.Module, x: torch.Tensor, queries: torch.Tensor, steps: int = 2) -> Trace:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, optimizer, queries=queries) as trace:
        for _ in range(steps):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    return trace


def test_queries_whose_axes_are_not_those_of_a_batch_are_refused_at_the_first_step() -> None:
    """One query without its axis is taken for many, of fewer outputs."""
    net, x = Lines(1, 3).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    with pytest.raises(Mistake, match=r"^queries=: they have 2 axes, .* 6 outputs each, .* with 3 axes, .* with 30;"):
        followed_at(net, x, x[0], steps=1)


@pytest.mark.parametrize(
    ("net", "shape", "asked"),
    [(Lines(1, 3), (4, 5), (2, 7)), (Lines(1, 3), (4, 5, 6), (2, 3, 9)), (FlatLines(6, 3), (4, 2, 3), (2, 6))],
    ids=["other lengths", "more of them", "other axes, the same outputs"],
)
def test_queries_of_other_shapes_that_the_model_takes_are_kept(
    net: nn.Module, shape: tuple[int, ...], asked: tuple[int, ...]
) -> None:
    """However many outputs they have: their parts add up."""
    net, before = net.double(), deepcopy(net).double()
    x, queries = (torch.randn(each, dtype=torch.float64) for each in (shape, asked))
    found = followed_at(net, x, queries).attribute()
    change = (net(queries) - before(queries)).detach().flatten(1).numpy()
    assert abs(found["contribution"].sum("example").values - change).max() <= EXACT * np.linalg.norm(change)


def test_batches_of_nobody_add_nothing() -> None:
    def sometimes_empty(given: Loop, batch: torch.Tensor) -> None:
        plain(given, batch[:0] if given.done == 3 else batch)

    given = loop(momentum)
    before = deepcopy(given.model)
    closes(given, before, followed(given, sometimes_empty).attribute())


def test_examples_may_have_names() -> None:
    given = loop(sgd)
    names = {name: f"row {k}" for k, name in enumerate(digests(given.x))}
    trace = followed(given, plain, ids=lambda call: [names[name] for name in digests(call.args[0])])
    assert set(trace.attribute()["example"].values.tolist()) <= set(names.values())


def test_half_of_what_an_example_added_is_done_by_its_steps() -> None:
    """An example that is seen at one step alone has half of it done in the middle of that step."""
    given = loop(sgd)
    found = followed(given, loops.plain)
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


class Scaled(nn.Linear):
    """Outputs of length one, whatever they are multiplied with: the gradient of that is rounding alone."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


def test_what_rounding_did_through_adam_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        net, x = Scaled(), torch.randn(6, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with ntkexp.follow(net, optimizer, queries=x[:2]) as trace:
        for _ in range(6):
            optimizer.zero_grad()
            nn.functional.normalize(net(x)).square()[:, 0].sum().backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
    found = trace.attribute()
    change = found["change"].to_numpy()
    missed = np.linalg.norm(found["contribution"].sum("example") + found["decay"] - change) / np.linalg.norm(change)
    assert 1e-3 < missed < 1.01 * found.attrs["rounding"]
    assert np.linalg.norm(found["by_step"].sum("step") - change) < EXACT_32 * np.linalg.norm(change)
    assert "rounding did" in caplog.text


def clamped_at_last(given: Loop, batch: torch.Tensor) -> None:
    plain(given, batch)
    if given.done == loops.STEPS - 1:
        given.model[2].get_parameter("weight").data.clamp_(-0.1, 0.1)


def hotter(given: Loop, batch: torch.Tensor) -> None:
    """A model's own number changes in the loop; outputs go with it."""
    given.model[3].approximate = "tanh" if given.done == loops.STEPS - 1 else "none"  # type: ignore[assignment]  # no tensor
    plain(given, batch) if given.done < loops.STEPS - 1 else None


@pytest.mark.parametrize(("body", "name"), [(clamped_at_last, "2.weight"), (hotter, "3.approximate"), (plain, None)])
def test_what_no_step_changed_is_said_at_the_end(
    body: Body, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    followed(loop(sgd), body)
    assert (f"'{name}' changed outside the steps" in caplog.text) if name else not caplog.text


def averaged_at_last(given: Loop, batch: torch.Tensor) -> None:
    """An average of the weights is loaded at the end."""
    plain(given, batch)
    if given.done == loops.STEPS - 1:
        given.model.load_state_dict({name: weight / 2 for name, weight in given.model.state_dict().items()})


def one_step_more(given: Loop, batch: torch.Tensor) -> None:
    """A step of an optimizer that nobody follows is the last."""
    plain(given, batch)
    if given.done == loops.STEPS - 1:
        given.back(batch)
        torch.optim.SGD(given.model.parameters(), lr=0.2).step()


@pytest.mark.sample(2)
@pytest.mark.parametrize("body", [clamped_at_last, averaged_at_last, one_step_more], ids=lambda body: body.__name__)
@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on disk"])
def test_what_no_step_changed_is_a_part_of_its_own(body: Body, on_disk: bool, tmp_path: Path) -> None:
    given = loop(momentum)
    with torch.no_grad():
        before = given.model(given.queries)
    trace = followed(given, body, to=tmp_path / "run" if on_disk else None)
    found = trace.attribute()
    with torch.no_grad():
        change = (given.model(given.queries) - before).numpy()
        steps = (ntkexp_outputs(trace, given.queries) - before).numpy()
    size = np.linalg.norm(change) + np.linalg.norm(steps)
    parts = found["contribution"].sum("example") + found["decay"]
    pairs = ((found["change"], change), (parts, steps), (found["outside"], change - steps))
    assert all(np.abs(ours.to_numpy() - theirs).max() <= EXACT * size for ours, theirs in pairs)
    assert np.linalg.norm(found["outside"]) > 0.01 * size
    assert "weight" in found.attrs["outside"]


def ntkexp_outputs(trace: Trace, queries: torch.Tensor) -> torch.Tensor:
    """What the network gave after the last step that was followed."""
    outputs: torch.Tensor = torch.func.functional_call(trace.module, dict(trace.steps.end), (queries,))
    return outputs


@pytest.mark.parametrize("body", [each[0] for each in REFUSED if each[3] == GRADIENT], ids=lambda body: body.__name__)
def test_a_gradient_that_is_not_of_the_examples_is_refused_before_the_second_step(body: Body) -> None:
    given = loop(momentum)
    with pytest.raises(Mistake, match="step 0: the gradient that was consumed is not that"):
        followed(given, body)
    assert given.done == 0


def by_hand(given: Loop, batch: torch.Tensor) -> None:
    """Gradients are assigned and never set to zero, which adds nothing to those before."""
    loss = nn.functional.cross_entropy(given.model(given.x[batch]), given.y[batch])
    weights = list(given.model.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    given.step()


def adam_with_a_tensor(model: nn.Sequential) -> loops.Optimizers:
    """Its rate is in float32, and so is what torch makes of it."""
    return [torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)]


@pytest.mark.parametrize(
    ("optimizers", "body"),
    [(momentum, by_hand), (adamw, by_hand), (adam_with_a_tensor, plain)],
    ids=lambda part: part.__name__,
)
def test_what_was_refused_by_mistake_is_recorded(optimizers: Maker, body: Body) -> None:
    given = loop(optimizers)
    before = deepcopy(given.model)
    closes(given, before, followed(given, body).attribute())


def test_a_trace_is_shown_in_a_line_and_goes_on(tmp_path: Path) -> None:
    """Who looks at it, or attributes it, in the middle sees what there is then, and all of it at the end."""
    given, seen = loop(sgd), []

    def looked_at(given: Loop, batch: torch.Tensor) -> None:
        plain(given, batch)
        seen.append((repr(kept[0]), len(kept[0].steps)))

    kept: list[Trace] = []
    trace = followed(given, looked_at, kept, to=tmp_path / "run")
    names = "(named by digests of what they hold; follow(…, ids='dataset') names them by their places in a Dataset)"
    assert repr(trace) == f"Trace of 8 steps of Sequential, 18 examples {names}, 3 queries, in {tmp_path / 'run'}"
    assert seen[0] == (f"Trace of 1 step of Sequential, 6 examples {names}, 3 queries, in {tmp_path / 'run'}", 1)
    assert trace.attribute().sizes["step"] == loops.STEPS


def needed(trace: Trace) -> float:
    """What attribution says that it takes, in GB."""
    with pytest.raises(Mistake, match=r"memory_gb=1e-06 is less than the .* of contributions of \d") as refusal:
        trace.attribute(memory_gb=1e-6)
    found = re.search(r"the ([\d.e-]+) GB", str(refusal.value))
    assert found is not None
    return float(found.group(1))


def test_sums_keep_to_the_memory_or_say_what_they_take(caplog: pytest.LogCaptureFixture) -> None:
    trace = followed(loop(sgd), plain, memory_gb=0.1)
    assert "half_by" not in trace.attribute(memory_gb=1.1 * needed(trace))
    assert "`half_by` is left out" in caplog.text
    assert "half_by" in trace.attribute(memory_gb=0.1)


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """The most bytes that results of operations held at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes, self.most, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in (each for each in tree_iter(found) if isinstance(each, torch.Tensor)):
            memory = tensor.untyped_storage()
            if memory._cdata not in self.known:
                self.known.add(memory._cdata)
                self.bytes += memory.nbytes()
                weakref.finalize(memory, self.forget, memory._cdata, memory.nbytes())
        self.most = max(self.most, self.bytes)
        return found

    def forget(self, place: int, nbytes: int) -> None:
        self.known.discard(place)
        self.bytes -= nbytes


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam])
def test_attribution_takes_no_more_than_it_says(kind: Any) -> None:
    """Of whole batches, many queries, and of more weights than either, where U is what takes the memory."""
    for examples, queries, width in ((300, 200, 4), (8, 60, 300)):
        draw = torch.Generator().manual_seed(0)
        x, at = (torch.randn(count, 4, generator=draw).double() for count in (examples, queries))
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
        given = Loop(model, [kind(model.parameters(), lr=0.01)], x, torch.arange(examples) % 3, at)
        with follow(given.model, given.optimizers, queries=at) as trace:
            for _ in range(2):
                plain(given, torch.arange(examples))
        room = 1.1 * needed(trace)
        with LiveTensors() as live:
            trace.attribute(memory_gb=room, quiet=True)
        assert live.most < room * 1e9


def test_the_package_lists_what_users_call() -> None:
    assert {"follow", "load_run", "lightning", "huggingface", "__version__"} <= set(dir(ntkexp))
    assert not {"HOMES", "CALLBACKS"} & set(dir(ntkexp))
    assert all(getattr(ntkexp, name) for name in ntkexp.__all__)
    assert ntkexp.__version__
