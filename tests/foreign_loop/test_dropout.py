"""Loops whose models draw random numbers are followed with the numbers that were drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ntkexp.foreign_loop.again import LoopAgain
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.gallery import Gallery
from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.trace import Trace, find_trace
from ntkexp.kernel.read.reader import Reader
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.progress import Silent
from tests.foreign_loop import loops
from tests.foreign_loop.loops import EXAMPLES, STEPS, Body, Loop, batches, closes, followed, plain
from tests.foreign_loop.test_effects import TOLERANCE, WIDTH, WeightedLoop, loss_of
from tests.foreign_loop.test_store import trained

Forward: TypeAlias = Callable[["Net", Tensor], Tensor]


class Net(nn.Sequential):
    """Three layers, called in some way that is random in training."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)

    def read(self, hidden: Tensor) -> Tensor:
        found: Tensor = self[2](hidden)
        return found

    def noise(self, *shape: int) -> Tensor:
        """Numbers in [0, 1), and ones in evaluation."""
        return torch.rand(shape, dtype=torch.float64) if self.training else torch.ones(shape, dtype=torch.float64)


def dropping(net: Net, x: Tensor) -> Tensor:
    hidden = functional.dropout(net[0](x).relu(), 0.3, net.training)
    return net.read(functional.dropout(functional.gelu(net[1](hidden)), 0.5, net.training))


def attending(net: Net, x: Tensor) -> Tensor:
    heads = torch.outer(torch.arange(1.0, 5, dtype=x.dtype), x.new_ones(1)) * net[0](x)[:, None, None]
    mixed = functional.scaled_dot_product_attention(heads, heads.tanh(), heads, dropout_p=0.4 * net.training)
    return net.read(net[1](mixed.mean((1, 2))).tanh())


def forgetting(net: Net, x: Tensor, *, reentrant: bool) -> Tensor:
    def part(hidden: Tensor) -> Tensor:
        return functional.dropout(net[1](hidden.tanh()), 0.4, net.training)

    hidden = net[0](x)
    return net.read(checkpoint(part, hidden, use_reentrant=reentrant) if torch.is_grad_enabled() else part(hidden))


def passing_over(net: Net, x: Tensor) -> Tensor:
    """A layer is left out of half of the calls."""
    hidden = net[0](x).tanh()
    return net.read(net[1](hidden).tanh() if float(net.noise(1)) > 0.5 else hidden)


def noisy(net: Net, x: Tensor) -> Tensor:
    hidden: Tensor = net[0](x)
    return net.read((hidden + torch.randn_like(hidden) if net.training else hidden).tanh())


def masked(net: Net, x: Tensor) -> Tensor:
    """The same features of all examples."""
    return net.read(net[0](x).tanh().masked_fill(net.noise(8) < 0.3, 0.0))


def selfish(net: Net, x: Tensor) -> Tensor:
    return net.read(functional.alpha_dropout(functional.selu(net[0](x)), 0.3, net.training))


def turned(net: Net, x: Tensor) -> Tensor:
    """Features and examples lie in another order in memory, as the words of a transformer's texts do."""
    hidden: Tensor = net[0](x).t()
    return net.read(functional.dropout(hidden, 0.3, net.training).t().tanh())


def forgetting_one_way(net: Net, x: Tensor) -> Tensor:
    return forgetting(net, x, reentrant=True)


def forgetting_the_other(net: Net, x: Tensor) -> Tensor:
    return forgetting(net, x, reentrant=False)


WAYS = (attending, turned, passing_over, noisy, masked, selfish, forgetting_one_way, forgetting_the_other)


def random_loop(optimizers: loops.Maker, forward: Forward = dropping, seed: int = 0) -> Loop:
    torch.manual_seed(seed)
    model = Net(forward).double()
    x, queries, y = torch.randn(EXAMPLES, 4).double(), torch.randn(3, 4).double(), torch.randint(3, (EXAMPLES,))
    return Loop(model, optimizers(model), x, y, queries)


def with_other_draws(given: Loop, batch: Tensor) -> None:
    """Numbers are drawn between the calls, as many as there were steps."""
    torch.rand(given.done)
    plain(given, batch)


def proved(given: Loop, body: Body, **more: Any) -> Trace:
    """The trace, which closes on the model in evaluation."""
    before = deepcopy(given.model).eval()
    trace = followed(given, body, **more)
    state = torch.get_rng_state()
    dataset = trace.attribute()
    assert torch.equal(torch.get_rng_state(), state)
    given.model.eval()
    closes(given, before, dataset)
    assert dataset["gradient_error"].max() < 1e-13
    return trace


@pytest.fixture(autouse=True)
def generator() -> Any:
    """Whatever is drawn here, others do not hear of it."""
    with torch.random.fork_rng(devices=()):
        yield


@pytest.mark.parametrize("optimizers", [loops.sgd, pytest.param(loops.adam, marks=pytest.mark.slow), loops.adamw])
def test_parts_add_up_with_the_masks_that_were_drawn(optimizers: loops.Maker) -> None:
    proved(random_loop(optimizers), with_other_draws)


FAST = {attending, turned}
KINDS = [pytest.param(way, marks=() if way in FAST else pytest.mark.slow, id=way.__name__) for way in WAYS]


@pytest.mark.parametrize("way", KINDS)
def test_and_with_whatever_else_is_random(way: Forward) -> None:
    proved(random_loop(loops.momentum, way), loops.accumulated)


def test_parts_are_those_of_a_loop_that_keeps_its_masks_by_itself() -> None:
    """−η J̄_s ∇ℓᵢ by plain autograd, the generator put where it was before each call."""
    trace = proved(random_loop(loops.sgd), plain)
    given, places = random_loop(loops.sgd), {name: k for k, name in enumerate(trace.examples)}
    names, expected = digests(given.x), torch.zeros(3, 3, len(places), dtype=torch.float64)
    reader = Reader(function_of(deepcopy(given.model).eval()), frozenset(dict(given.model.named_parameters())))
    for given.done, batch in zip(range(STEPS), batches()):  # noqa: B905  there is no last batch
        state, start = torch.get_rng_state(), weights_of(given.model)
        found = []
        for row in range(len(batch)):
            torch.set_rng_state(state)
            given.zero()
            losses = functional.cross_entropy(given.model(given.x[batch]), given.y[batch], reduction="none")
            losses[row].backward()  # type: ignore[no-untyped-call]  # torch's own
            found.append({name: grad(weight) for name, weight in given.model.named_parameters()})
        torch.set_rng_state(state)
        plain(given, batch)
        ends = [reader.record(weights, given.queries) for weights in (start, weights_of(given.model))]
        features = reader.along(ends[0], ends[1])
        for row, gradient in zip(batch.tolist(), found, strict=True):
            expected[:, :, places[names[row]]] -= 0.3 / len(batch) * features.applied(gradient)
        with torch.no_grad():
            given.model(given.queries)
    parts = torch.from_numpy(trace.attribute()["contribution"].to_numpy())
    assert expected.norm() > 0.01
    assert (parts - expected).abs().max() < 1e-12 * expected.norm()


def grad(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_a_generator_that_was_moved_is_refused_by_step_and_tensor() -> None:
    """Something that begins after `follow` seeds anew, inside the call."""

    def moved(given: Loop, batch: Tensor) -> None:
        hook = given.model[0].register_forward_pre_hook(lambda *_: torch.manual_seed(given.done) and None)
        plain(given, batch)
        hook.remove()

    said = r"step 0: the gradient that was consumed is not .* in '[012]\.(weight|bias)'; were other random numbers"
    with pytest.raises(Mistake, match=said):
        followed(random_loop(loops.sgd), moved).attribute()


def own_generator(net: Net, x: Tensor) -> Tensor:
    return net.read(net[0](x) * (torch.rand(8, generator=torch.Generator()).double() if net.training else 1.0))


def leaky(net: Net, x: Tensor) -> Tensor:
    return net.read(functional.rrelu(net[0](x), training=net.training))


def coupled(net: Net, x: Tensor) -> Tensor:
    return net.read(functional.dropout(net[0](x - x.mean(0) * net.training), 0.3, net.training))


def from_elsewhere(net: Net, x: Tensor) -> Tensor:
    return net.read(functional.dropout(net[0](x) * (random.random() if net.training else 1.0), 0.3, net.training))


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (own_generator, "from a generator of its own"),
        (leaky, "through which gradients pass"),
        (coupled, "couples the examples of a batch"),
        (from_elsewhere, "look for random numbers from outside torch"),
    ],
)
def test_what_cannot_be_drawn_again_is_refused_in_one_line(way: Forward, said: str) -> None:
    with pytest.raises(Mistake, match=rf"step 7: the module .*{said}"):
        followed(random_loop(loops.sgd, way), plain).attribute()


def same(one: Trace, other: Trace) -> None:
    """The same examples added the same, to the rounding of steps that are replayed."""
    ours, theirs = (trace.contributions(Gallery())["contribution"] for trace in (one, other))
    missed = abs(ours.sel(example=theirs["example"]) - theirs).max()
    assert float(missed) < 1e-12 * float(abs(theirs).max())


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_trace_on_disk_tells_the_same(every: int, tmp_path: Path) -> None:
    trace = followed(random_loop(loops.adamw), with_other_draws, to=tmp_path / "run", every=every)
    same(followed(random_loop(loops.adamw), with_other_draws), trace)


@pytest.mark.slow
def test_a_loop_that_is_resumed_goes_on_there(tmp_path: Path) -> None:
    """From a checkpoint of step 3, as people keep it: weights, the optimizer, the generator."""
    given, place = random_loop(loops.adamw), tmp_path / "run"
    with follow(given.model, given.optimizers, queries=given.queries, to=place, every=2):
        trained(given, plain, 0, 3)
        kept = deepcopy((given.model.state_dict(), given.optimizers[0].state_dict()))
        state = torch.get_rng_state()
        trained(given, plain, 3, 5)
    resumed = random_loop(loops.adamw)
    resumed.model.load_state_dict(kept[0])
    resumed.optimizers[0].load_state_dict(kept[1])
    torch.set_rng_state(state)
    with follow(resumed.model, resumed.optimizers, queries=given.queries, to=place, every=2) as trace:
        trained(resumed, plain, 3, STEPS)
    whole = random_loop(loops.adamw)
    with follow(whole.model, whole.optimizers, queries=whole.queries) as expected:
        trained(whole, plain, 0, STEPS)
    assert len(trace.steps) == STEPS
    same(expected, trace)


def ends_with(weights: Tensor) -> Tensor:
    """The outputs at the queries of a loop whose means are by weights of the examples."""
    given = WeightedLoop(**vars(random_loop(loops.adamw)), weights=weights)
    for given.done, batch in zip(range(STEPS), batches()):  # noqa: B905  there is no last batch
        loops.scheduled_and_clipped(given, batch)
        with torch.no_grad():
            given.model(given.queries)
    with torch.no_grad():
        found: Tensor = given.model.eval()(given.queries)
    return found


def again(**more: Any) -> Trace:
    given = random_loop(loops.adamw)
    return followed(given, loops.scheduled_and_clipped, loss=loss_of(given), **more)


@pytest.mark.slow
def test_effects_are_derivatives_with_the_masks_as_they_are() -> None:
    dataset, names = again().attribute(effects="derivative"), digests(random_loop(loops.adamw).x)
    for example in (0, 7):
        weights = torch.ones(EXAMPLES, dtype=torch.float64).repeat(2, 1)
        weights[:, example] += torch.tensor([WIDTH, -WIDTH])
        up, down = map(ends_with, weights)
        found = torch.from_numpy(dataset["effect"].sel(example=names[example]).to_numpy())
        assert (found - (down - up) / (2 * WIDTH)).abs().max() < TOLERANCE * float(abs(dataset["effect"]).max())


@pytest.mark.slow
def test_leaving_out_is_training_without_under_the_same_masks(tmp_path: Path) -> None:
    """And what that changes is split over who was left out."""
    trace, names = again(to=tmp_path / "run", every=3), digests(random_loop(loops.adamw).x)
    weights = torch.ones(EXAMPLES, dtype=torch.float64)
    weights[[3, 8]] = 0.0
    expected = ends_with(weights)
    training = LoopAgain(again, trace, "renormalised")
    found = training.at(training.end_with({names[3]: 0.0, names[8]: 0.0}))
    assert (found - expected).abs().max() < 1e-11  # the same steps, with sums in another order
    group = [list(trace.examples).index(names[k]) for k in (3, 8)]
    removal = loop_without(
        find_trace(tmp_path / "run"), lambda: again(to=tmp_path / "run"), "renormalised", group, [0, 1, 2], Silent()
    )
    change = (expected - ends_with(torch.ones_like(weights))).numpy()
    assert np.linalg.norm(removal.shares.sum(2) - change) < 1e-10 * np.linalg.norm(change)
