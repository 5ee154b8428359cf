"""What is followed is what was trained, or is refused by name."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
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
from tests.foreign_loop.bugs import GRADIENT, RECORDED, REFUSED, loss_of_a_stale_graph, with_a_penalty
from tests.foreign_loop.loops import Body, Loop, Maker, adamw, closes, followed, loop, momentum, nesterov, plain, sgd

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


def test_writes_past_the_count_of_pytorch_are_seen() -> None:
    def clamps(given: Loop, batch: torch.Tensor) -> None:
        plain(given, batch)
        row = given.model[0].get_parameter("weight").data[0]
        row[0] = torch.nextafter(row[0], torch.ones_like(row[0]))  # of one element, by the least there is

    with pytest.raises(Mistake, match=r"step 1: '0\.weight' was changed by something other than the optimizer"):
        followed(loop(momentum), clamps)


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


def test_buffers_that_are_assigned_anew_are_seen() -> None:
    # The last layer's bias changes no gradient, and the new tensor was written to as often as the old one: never.
    given = loop(sgd)
    bias = given.model[4].get_parameter("bias")
    del given.model[4].bias
    given.model[4].register_buffer("bias", bias.detach().clone())
    given.optimizers = [torch.optim.SGD(given.model.parameters(), lr=0.1)]

    def assigns(given: Loop, batch: torch.Tensor) -> None:
        plain(given, batch)
        given.model[4].bias = given.model[4].get_buffer("bias") + 0.1

    with pytest.raises(Mistake, match=r"step 1: '4\.bias', which no followed optimizer moves"):
        followed(given, assigns)


def test_sparse_gradients_are_refused_by_name() -> None:
    net = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with ntkexp.follow(net, optimizer, queries=torch.arange(3)):
        net(torch.tensor([0, 3])).sum().backward()
        with pytest.raises(Mistake, match=r"step 0: the gradient of 'weight' is sparse"):
            optimizer.step()


def test_gradients_divided_by_how_often_a_batch_has_a_row_are_refused_before_the_loop() -> None:
    net = nn.Embedding(5, 2, scale_grad_by_freq=True)
    following = ntkexp.follow(net, torch.optim.SGD(net.parameters(), 0.1), queries=torch.arange(3))
    with pytest.raises(Mistake, match=r"the gradient of 'weight' is divided by how often a batch has each row"):
        following.__enter__()


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


def test_one_number_for_all_examples_is_refused() -> None:
    loss = MeanOfSquares(2, 1)
    optimizer = torch.optim.SGD(loss.parameters())
    with (
        pytest.raises(Mistake, match="the model gives one number for all examples"),
        ntkexp.follow(loss, optimizer, queries=torch.zeros(1, 2)),
    ):
        loss(torch.ones(4, 2))


def test_what_has_diverged_is_called_so() -> None:
    with pytest.raises(Mistake, match=r"step \d: '.*' is no longer finite; training has diverged"):
        followed(loop(lambda model: [torch.optim.SGD(model.parameters(), lr=1e200)]), plain)


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


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: followed(loop(sgd), lambda given, batch: None).attribute(), "no step was followed"),
        (lambda: followed(loop(lambda _: sgd(loop(sgd).model)), plain), "not a parameter of the"),
        (lambda: followed(stepped(), plain), "has taken steps already"),
        (lambda: followed(loop(all_but_one), given_one_more), "step 4: '4.bias' was given to the optimizer"),
        (lambda: followed(loop(all_but_one), moved_by_hand), "step 1: '4.bias', which no followed optimizer moves"),
        (lambda: followed(loop(sgd), plain, ids="name"), "not called with such a keyword"),
        (lambda: followed(loop(sgd), plain, ids=lambda call: ["a"]), "1 names for the 6 examples of a call"),
        (lambda: followed(loop(sgd), plain, ids=lambda call: None), "ids=: it gives a NoneType"),
        (lambda: followed(loop(sgd), plain, ids=["a"]), "ids= is a list"),
        (lambda: followed(loop(sgd), plain, loss="mean"), "loss= is a str"),
        (lambda: followed(loop(sgd), plain, every=0), "every=0"),
        (lambda: followed(loop(sgd), plain, output="logits"), "output='logits'"),
        (lambda: followed(loop(sgd), plain).attribute(mean="half"), "mean='half' is none of"),  # type: ignore[arg-type]  # a slip
        (lambda: followed(loop(sgd), plain).attribute(effects="all"), "effects='all' is none of"),  # type: ignore[arg-type]  # a slip
        (lambda: followed(loop(sgd), plain).attribute(memory_gb=float("nan")), "memory_gb=nan: it takes a number > 0"),
        (lambda: followed(loop(sgd), plain).attribute(decode="text"), "decode= is a str"),  # type: ignore[arg-type]  # a slip
        (lambda: followed(loop(lambda model: []), plain), "there is no optimizer"),
        (lambda: followed(loop(lambda model: 2 * sgd(model)), plain), "in the list twice"),
        (lambda: followed(asking(torch.zeros(3, 5).double()), plain), "queries=: the model cannot be called with them"),
        (lambda: followed(asking(torch.zeros(3, 4)), plain), "queries=: the model cannot be called with them"),
        (lambda: followed(asking(torch.zeros(0, 4).double()), plain), "queries=: they are empty"),
        (lambda: followed(loop(sgd), exchanging_weights), r"step 4: '4\.weight' is no longer the tensor"),
        (lambda: followed(loop(sgd), plain, memory_gb=1e-5), "step 4: the steps followed so far take more"),
    ],
)
def test_what_is_not_followed_is_refused_in_one_line(act: Callable[[], object], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        act()


def asking(queries: torch.Tensor) -> Loop:
    """A loop that is asked for these."""
    return replace(loop(sgd), queries=queries)


def exchanging_weights(given: Loop, batch: torch.Tensor) -> None:
    """The optimizer goes on with a weight that the model has no longer; gradients are scaled alike."""
    if given.done == 4:
        given.model[4].weight = nn.Parameter(1.1 * given.model[4].get_parameter("weight").detach())
    plain(given, batch)


class MeanOfSquares(torch.nn.Linear):
    """A model that gives its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def all_but_one(model: nn.Sequential) -> loops.Optimizers:
    return [torch.optim.SGD(list(model.parameters())[:-1], lr=0.1)]


def given_one_more(given: Loop, batch: torch.Tensor) -> None:
    if given.done == 4:
        given.optimizers[0].add_param_group({"params": [given.model[4].get_parameter("bias")]})
    plain(given, batch)


def moved_by_hand(given: Loop, batch: torch.Tensor) -> None:
    plain(given, batch)
    with torch.no_grad():
        given.model[4].get_parameter("bias").add_(0.1)


def stepped() -> Loop:
    """A loop whose optimizer remembers a step."""
    given = loop(momentum)
    plain(given, next(loops.batches()))
    return given


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


class Digamma(nn.Linear):
    """An operation through which no difference is passed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 + super().forward(x).tanh()).digamma()


def test_what_no_secant_leads_through_is_refused_before_training() -> None:
    net = Digamma(3, 4)
    with (
        pytest.raises(Mistake, match=r"no difference rule for the operation aten\.digamma"),
        ntkexp.follow(net, torch.optim.SGD(net.parameters()), queries=torch.ones(1, 3)),
    ):
        raise AssertionError("the loop begins")


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
    with pytest.raises(Mistake, match=r"memory_gb=1e-06: contributions of \d+ examples to .* take") as refusal:
        trace.attribute(memory_gb=1e-6)
    found = re.search(r"take ([\d.e-]+) GB", str(refusal.value))
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


class SAM(torch.optim.SGD):
    """Called like the one that ascends first."""


def wrapped(given: Loop) -> Loop:
    first = nn.Sequential(given.model[0])
    return replace(given, model=nn.Sequential(first), optimizers=sgd(first))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: followed(loop(lambda m: [SAM(m.parameters())]), plain), "SAM takes gradients at weights that it has"),
        (lambda: followed(wrapped(loop(sgd)), inside), "step 0: model.* was never called .* perhaps its part '0.0'"),
        (
            lambda: followed(loop(sgd), with_a_penalty),
            "as weight_decay .* part of the module's output",
        ),
    ],
)
def test_a_refusal_names_the_way_out(act: Callable[[], object], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        act()


def inside(given: Loop, batch: torch.Tensor) -> None:
    given.zero()
    given.model[0][0](given.x[batch]).square().sum().backward()  # type: ignore[index]  # a part of a part
    given.step()


def test_the_package_lists_what_users_call() -> None:
    assert {"follow", "load_run", "lightning", "huggingface", "__version__"} <= set(dir(ntkexp))
    assert not {"HOMES", "CALLBACKS"} & set(dir(ntkexp))
    assert all(getattr(ntkexp, name) for name in ntkexp.__all__)
    assert ntkexp.__version__
