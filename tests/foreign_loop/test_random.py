"""Loops whose models draw random numbers are replayed with the same numbers, or refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, dropout

from ntkexp.foreign_loop.example_names import digests
from ntkexp.kernel.read.reader import Reader
from ntkexp.mistake import Mistake
from ntkexp.model.functional import copy_module, function_of
from tests.foreign_loop import loops
from tests.foreign_loop.loops import STEPS, Body, Loop, RandomNet, Way, apart, batches, followed, plain, random_loop


def test_parts_are_those_of_a_loop_that_keeps_its_masks_itself() -> None:
    """−η J̄_s ∇ℓᵢ by plain autograd; each call begins with the same state of the generator."""
    trace = followed(random_loop(loops.sgd), plain)
    given, places = random_loop(loops.sgd), {name: k for k, name in enumerate(trace.examples)}
    names, expected = digests(given.x), torch.zeros(3, 3, len(places), dtype=torch.float64)
    reader = Reader(function_of(copy_module(given.model).eval()), frozenset(dict(given.model.named_parameters())))
    for given.done, batch in zip(range(STEPS), batches()):  # noqa: B905  there is no last batch
        state, start, gradients = torch.get_rng_state(), weights_of(given.model), list[dict[str, Tensor]]()
        for row in range(len(batch)):
            torch.set_rng_state(state)
            given.zero(set_to_none=False)
            cross_entropy(given.model(given.x[batch]), given.y[batch], reduction="none")[row].backward()  # type: ignore[no-untyped-call]
            gradients.append({
                name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
                for name, weight in given.model.named_parameters()
            })  # fmt: skip
        torch.set_rng_state(state)
        plain(given, batch)
        ends = [reader.record(weights, given.queries) for weights in (start, weights_of(given.model))]
        features = reader.along(ends[0], ends[1])
        for row, gradient in zip(batch.tolist(), gradients, strict=True):
            expected[:, :, places[names[row]]] -= 0.3 / len(batch) * features.applied(gradient)
        with torch.no_grad():
            given.model(given.queries)
    assert expected.norm() > 0.01
    assert apart(trace.attribute(quiet=True)["contribution"], expected) < 1e-12


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def own_generator(net: RandomNet, x: Tensor) -> Tensor:
    return net.read(net[0](x) * (torch.rand(8, generator=torch.Generator()).double() if net.training else 1.0))


def leaky(net: RandomNet, x: Tensor) -> Tensor:
    return net.read(functional.rrelu(net[0](x), training=net.training))


def coupled(net: RandomNet, x: Tensor) -> Tensor:
    return net.read(dropout(net[0](x - x.mean(0) * net.training), 0.3, net.training))


def from_elsewhere(net: RandomNet, x: Tensor) -> Tensor:
    return net.read(dropout(net[0](x) * (random.random() if net.training else 1.0), 0.3, net.training))


def seeding(given: Loop, batch: Tensor) -> None:
    """The generator is seeded inside the call, by code that begins after `follow`."""
    hook = given.model[0].register_forward_pre_hook(lambda *_: torch.manual_seed(given.done) and None)
    plain(given, batch)
    hook.remove()


SEEDED = r"step 0: the optimizer's gradient is not .* in '[012]\.(weight|bias)'; did the call draw other random numbers"


@pytest.mark.parametrize(
    ("way", "body", "said"),
    [
        (own_generator, plain, "step 0: the module .*from its own generator"),
        (leaky, plain, "step 0: the module .*through which gradients pass"),
        (coupled, plain, "step 0: the module .*couples the examples of a batch"),
        (from_elsewhere, plain, "step 0: the module .*look for random numbers from outside torch"),
        (loops.dropping, seeding, SEEDED),
    ],
)
def test_numbers_that_cannot_be_drawn_again_are_refused(way: Way, body: Body, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        followed(random_loop(loops.sgd, way), body).attribute()
