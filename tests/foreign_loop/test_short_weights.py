"""Frozen weights in short numbers under adapters in longer ones are casts, as under autocast; what moves is long."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.foreign_loop.closing import casts_sentence
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import find_trace, load_trace
from ntkexp.mistake import Mistake
from tests.foreign_loop import loops
from tests.foreign_loop.loops import EXAMPLES, STEPS, Loop, batches, followed
from tests.foreign_loop.test_autocast import SHORT
from tests.foreign_loop.test_follow import EXACT_32


class Adapted(nn.Module):
    """A frozen layer in short numbers and its adapter in float32, which either casts by itself, or needs autocast."""

    def __init__(self, inside: int, outside: int, kind: torch.dtype, casts: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside).to(kind).requires_grad_(False)
        self.down, self.up, self.casts = nn.Linear(inside, 3, bias=False), nn.Linear(3, outside, bias=False), casts

    def forward(self, x: Tensor) -> Tensor:
        given = x.float() if self.casts else x
        added = self.up(self.down(given))
        found: Tensor = self.base(x.to(self.base.weight.dtype) if self.casts else x)
        whole: Tensor = found + (added.to(found.dtype) if self.casts else added)
        return whole


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    """What a test seeds ends with it."""
    with torch.random.fork_rng(devices=()):
        yield


def adapted_loop(optimizers: loops.Maker, kind: torch.dtype, casts: bool) -> Loop:
    """A network with dropout; its optimizer is given all parameters, as people write it."""
    torch.manual_seed(0)
    first, last = Adapted(4, 32, kind, casts), Adapted(32, 3, kind, casts)
    model = nn.Sequential(first, nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(32), last)
    model[3].to(kind if casts else torch.float32).requires_grad_(False)
    x, queries, y = torch.randn(EXAMPLES, 4), torch.randn(3, 4), torch.randint(3, (EXAMPLES,))
    return Loop(model, optimizers(model), x, y, queries)


def body_under(kind: torch.dtype, *, autocast: bool) -> loops.Body:
    """A step with a loss that is scaled, as float16 needs it."""

    def body(given: Loop, batch: Tensor) -> None:
        given.zero()
        with torch.autocast("cpu", kind, enabled=autocast):
            loss = functional.cross_entropy(given.model(given.x[batch]).float(), given.y[batch])
        (1024 * loss).backward()  # type: ignore[no-untyped-call]  # torch's own
        for weight in given.model.parameters():
            if weight.grad is not None:
                weight.grad /= 1024
        given.step()

    return body


def trained(given: Loop, body: loops.Body, **more: Any) -> tuple[Any, Tensor]:
    """The trace of a loop, and by how much that moved the outputs of the network in float32 throughout."""
    before = deepcopy(given.model)
    with follow(given.model, given.optimizers, queries=given.queries, **more) as trace:
        for given.done, batch in zip(range(STEPS), batches()):  # noqa: B905  there is no last batch
            body(given, batch)
    with torch.no_grad():
        start, end = (deepcopy(net).float().eval()(given.queries) for net in (before, given.model))
    return trace, end - start


@pytest.mark.sample(2)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    ("kind", "optimizers"),
    [(torch.bfloat16, loops.sgd), (torch.float16, loops.momentum)],
    ids=["bfloat16", "float16"],
)
def test_adapters_over_short_weights_add_up(kind: torch.dtype, optimizers: loops.Maker, autocast: bool) -> None:
    """f is the network in the precision of its adapters; what rounding did to their gradients is `casts`, in full."""
    given = adapted_loop(optimizers, kind, casts=not autocast)
    trace, change = trained(given, body_under(kind, autocast=autocast))
    found = trace.attribute(quiet=True)
    whole = (found["contribution"].sum("example") + found["decay"] + found["rounding"]).to_numpy()
    assert change.norm() > 0.1
    assert np.abs(whole - change.numpy()).max() < EXACT_32 * float(change.norm())
    assert np.abs(found["by_step"].sum("step").to_numpy() - change.numpy()).max() < EXACT_32 * float(change.norm())
    assert found["gradient_error"].max() < 1e-6  # the same kernels give the same
    assert SHORT[kind] / 20 < found["casts_error"].max() < 20 * SHORT[kind]

    # how far the network is away that is used, whose own numbers are short
    with torch.no_grad(), torch.autocast("cpu", kind, enabled=autocast):
        cast = given.model.eval()(given.queries).float()
    with torch.no_grad():
        away = cast - deepcopy(given.model).float()(given.queries)
    assert found.attrs["away"] == pytest.approx(float(away.norm()), rel=1e-3)
    name = str(kind).removeprefix("torch.")
    assert casts_sentence(found).startswith(f"frozen weights in {name}{f' and autocast to {name}' * autocast} moved")


def test_short_weights_come_back_from_a_folder(tmp_path: Path) -> None:
    """Into a module that was built in float32, as a later process has it."""
    body = body_under(torch.bfloat16, autocast=False)
    _, change = trained(adapted_loop(loops.sgd, torch.bfloat16, casts=True), body, to=tmp_path / "run")
    again = load_trace(find_trace(tmp_path / "run"), adapted_loop(loops.sgd, torch.float32, casts=True).model)
    found = again.attribute(quiet=True)
    whole = (found["contribution"].sum("example") + found["decay"] + found["rounding"]).to_numpy()
    assert np.abs(whole - change.numpy()).max() < EXACT_32 * float(change.norm())
    assert found.attrs["frozen"] == "bfloat16"


def test_over_short_weights_a_small_penalty_is_refused() -> None:
    """Of a hundredth of the gradient, which is of the size of what short numbers round."""

    def penalised(given: Loop, batch: Tensor) -> None:
        given.zero()
        functional.cross_entropy(given.model(given.x[batch]).float(), given.y[batch]).backward()  # type: ignore[no-untyped-call]
        for weight in given.model.parameters():
            if weight.grad is not None:
                weight.grad += (
                    0.01 * weight.grad.norm() * functional.normalize(weight.detach().flatten(), dim=0).view_as(weight)
                )
        given.step()

    with pytest.raises(Mistake, match="is not that of the 6 examples seen"):
        followed(adapted_loop(loops.sgd, torch.bfloat16, casts=True), penalised)


def test_short_weights_that_move_are_refused_in_one_line() -> None:
    """By themselves, as soon as they need gradients, and as copies of longer ones that the optimizer moves."""
    given = adapted_loop(loops.sgd, torch.bfloat16, casts=True)
    given.model.requires_grad_(True)
    with pytest.raises(Mistake, match=r"'0\.base\.weight' is in bfloat16, too coarse for any proof"):
        followed(given, loops.plain)
    given = adapted_loop(loops.sgd, torch.bfloat16, casts=True)

    def unfrozen(given: Loop, batch: Tensor) -> None:
        if given.done > 1:
            given.model.requires_grad_(True)
        body_under(torch.bfloat16, autocast=False)(given, batch)

    with pytest.raises(Mistake, match=r"is in bfloat16, too coarse for any proof"):
        followed(given, unfrozen)
    model = nn.Linear(4, 3).bfloat16()
    masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
    with (
        pytest.raises(Mistake, match=r"moves a copy of 'weight' in longer numbers, .* train it under autocast"),
        follow(model, torch.optim.SGD(masters), queries=torch.ones(1, 4).bfloat16()),
    ):
        pass


def test_effects_through_short_weights_are_refused() -> None:
    def loss(outputs: Tensor, call: Any) -> Tensor:
        return outputs.float().square().sum(1) / 100

    def body(given: Loop, batch: Tensor) -> None:
        given.zero()
        (given.model(given.x[batch]).float().square().sum(1).mean() / 100).backward()
        given.step()

    trace, _ = trained(adapted_loop(loops.sgd, torch.bfloat16, casts=True), body, loss=loss)
    with pytest.raises(Mistake, match="with frozen weights in short numbers, whose rounding has no derivative"):
        trace.attribute(effects=True, quiet=True)
