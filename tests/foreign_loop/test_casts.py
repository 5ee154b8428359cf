"""Loops that compute in short numbers, under autocast or over frozen weights: the cost of casts is a part.

f_T − f_0 = Σ contributions + decay + rounding,    with f in the precision of the weights that move
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ntkexp
from ntkexp.foreign_loop.call import forbidden_kernels
from ntkexp.foreign_loop.closing import casts_sentence
from ntkexp.foreign_loop.trace import find_trace, load_trace
from ntkexp.mistake import Mistake
from tests.foreign_loop import loops
from tests.foreign_loop.loops import EXAMPLES, STEPS, Body, Loop, Maker, apart, followed, missed, outputs_of, parts_of

SHORT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an eps: a cast moves a number by at most this share
EXACT = loops.BOUNDS[torch.float32]
BRAIN, HALF = torch.bfloat16, torch.float16


class Inside(nn.Sequential):
    """A model that enters autocast itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BRAIN):
            outputs: Tensor = super().forward(x)  # type: ignore[no-untyped-call]  # torch's own
        return outputs.float()


class Partly(nn.Sequential):
    """A model that enters autocast after its first layer."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self
        hidden: Tensor = first(x)
        with torch.autocast("cpu", BRAIN):
            for layer in others:
                hidden = layer(hidden)
        return hidden.float()


class Adapted(nn.Module):
    """A frozen layer in short numbers and its adapter in float32, which either casts itself, or needs autocast."""

    def __init__(self, inside: int, outside: int, kind: torch.dtype, casts: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inside, outside).to(kind).requires_grad_(False)
        self.down, self.up, self.casts = nn.Linear(inside, 3, bias=False), nn.Linear(3, outside, bias=False), casts

    def forward(self, x: Tensor) -> Tensor:
        added = self.up(self.down(x.float() if self.casts else x))
        base: Tensor = self.base(x.to(self.base.weight.dtype) if self.casts else x)
        outputs: Tensor = base + (added.to(base.dtype) if self.casts else added)
        return outputs


class Attention(nn.Module):
    """Attention over four tokens of one number, by a fused kernel if the loop allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(1, 24), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x[:, :, None])[:, None].chunk(3, dim=-1)
        outputs: Tensor = self.outside(functional.scaled_dot_product_attention(q, k, v)[:, 0]).mean(1)
        return outputs


def loop_of(model: nn.Sequential, optimizers: Maker) -> Loop:
    x, queries, y = torch.randn(EXAMPLES, 4), torch.randn(3, 4), torch.randint(3, (EXAMPLES,))
    return Loop(model, optimizers(model), x, y, queries)


def cast_loop(optimizers: Maker, kind: type[nn.Sequential] = nn.Sequential) -> Loop:
    """A smooth network with dropout and a norm, in float32: a cast that moves a unit past a kink is not rounding."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))
    return loop_of(kind(*layers, nn.Linear(32, 3)), optimizers)


def attentive_loop(kind: type[nn.Sequential] = nn.Sequential) -> Loop:
    torch.manual_seed(0)
    return loop_of(kind(Attention(), nn.Linear(1, 3)), loops.momentum)


def adapted_loop(optimizers: Maker, kind: torch.dtype = BRAIN, casts: bool = True) -> Loop:
    """A network with dropout. Its optimizer gets all parameters, as people write it."""
    torch.manual_seed(0)
    first, last = Adapted(4, 32, kind, casts), Adapted(32, 3, kind, casts)
    model = nn.Sequential(first, nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(32), last)
    model[3].to(kind if casts else torch.float32).requires_grad_(False)
    return loop_of(model, optimizers)


def back(given: Loop, batch: Tensor, kind: torch.dtype, *, scale: float = 1.0, autocast: bool = True) -> None:
    """Gradients of a scaled loss, without the scale."""
    given.zero()
    with torch.autocast("cpu", kind, enabled=autocast):
        loss = functional.cross_entropy(given.model(given.x[batch]).float(), given.y[batch])
    (loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own
    for weight in trained(given.model):
        assert weight.grad is not None
        weight.grad /= scale


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def under(kind: torch.dtype, *, scale: float = 1.0, autocast: bool = True, then: Body | None = None) -> Body:
    """A step in short numbers; `then` changes its gradients."""

    def body(given: Loop, batch: Tensor) -> None:
        back(given, batch, kind, scale=scale, autocast=autocast)
        if then is not None:
            then(given, batch)
        given.step()

    return body


brain = under(BRAIN)


# --- Parts add up.


@dataclass(frozen=True)
class Case:
    """A loop in short numbers, and the network that it is explained by."""

    make: Callable[[], Loop]
    body: Body
    kind: torch.dtype
    autocast: bool = True
    named: str = "autocast to {}"


CASES = {
    "adamw": Case(lambda: cast_loop(loops.adamw), brain, BRAIN),
    "momentum": Case(lambda: cast_loop(loops.momentum), brain, BRAIN),
    "float16": Case(lambda: cast_loop(loops.momentum), under(HALF, scale=1024.0), HALF),
    "frozen": Case(
        lambda: adapted_loop(loops.sgd), under(BRAIN, scale=1024, autocast=False), BRAIN, False, "frozen weights in {}"
    ),
    "frozen float16": Case(
        lambda: adapted_loop(loops.momentum, HALF), under(HALF, scale=1024, autocast=False), HALF, False, "in {}"
    ),
    "frozen, autocast": Case(
        lambda: adapted_loop(loops.sgd, BRAIN, casts=False),
        brain,
        BRAIN,
        named="frozen weights in {0} and autocast to {0}",
    ),
    "frozen float16, autocast": Case(
        lambda: adapted_loop(loops.momentum, HALF, casts=False), under(HALF, scale=1024), HALF
    ),
}
FAST = ("adamw", "frozen", "frozen float16, autocast")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in FAST)) for each in CASES])
def test_parts_and_casts_add_up(name: str) -> None:
    case = CASES[name]
    given = case.make()
    start = outputs_of(deepcopy(given.model).float(), given.queries)
    found = followed(given, case.body, evaluates=False).attribute(quiet=True)
    end = outputs_of(deepcopy(given.model).float(), given.queries)
    assert (end - start).norm() > 0.1
    assert missed(found, end - start, "rounding") < EXACT
    assert apart(found["by_step"].sum("step"), end - start) < EXACT
    assert found["gradient_error"].max() < 1e-6  # under the same casts the same kernels give the same
    assert SHORT[case.kind] / 20 < found["casts_error"].max() < 20 * SHORT[case.kind]

    # the distance to the network that the loop uses
    with torch.autocast("cpu", case.kind, enabled=case.autocast):
        away = outputs_of(given.model, given.queries).float() - end
    assert found.attrs["away"] == pytest.approx(float(away.norm()), rel=1e-3)  # float32, in differences
    assert f"{case.named.format(str(case.kind)[6:])} changed gradients by up to" in casts_sentence(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Inside, Partly])
def test_a_model_may_enter_autocast_itself(kind: type[nn.Sequential]) -> None:
    """Its queries are read without its casts."""
    given, bare = cast_loop(loops.momentum, kind), cast_loop(loops.momentum)
    start = outputs_of(bare.model, bare.queries)
    found = followed(given, loops.plain).attribute(quiet=True)
    bare.model.load_state_dict(given.model.state_dict())
    assert missed(found, outputs_of(bare.model, bare.queries) - start, "rounding") < EXACT
    assert found.attrs["autocast"] == "bfloat16"


def test_casts_are_the_difference_of_two_gradients_by_autograd() -> None:
    """At each step: the gradient with casts less the gradient without, with the same masks and output gradients."""
    found, given = followed(cast_loop(loops.sgd), brain).attribute(quiet=True), cast_loop(loops.sgd)
    for given.done, batch in zip(range(STEPS), loops.batches()):  # noqa: B905  there is no last batch
        state, came = torch.get_rng_state(), list[Tensor]()
        hook = given.model.register_forward_hook(lambda *seen: seen[2].register_hook(came.append) and None)  # noqa: B023
        back(given, batch, BRAIN)
        hook.remove()
        cast = gradient(given.model)
        given.zero()
        torch.set_rng_state(state)
        given.model(given.x[batch]).backward(came[0].float())
        plain = gradient(given.model)
        torch.set_rng_state(state)
        brain(given, batch)
        expected = float((cast - plain).norm() / cast.norm())
        assert float(found["casts_error"][given.done]) == pytest.approx(expected, rel=1e-2)  # float32, in differences
        with torch.no_grad():
            given.model(given.queries)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


# --- Calls are replayed by the kernels of the loop.


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("model", [nn.Sequential, pytest.param(Inside, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chosen", [None, SDPBackend.MATH], ids=["fused", "plain"])
def test_attention_is_replayed_as_the_loop_computed_it(
    chosen: SDPBackend | None, model: type[nn.Sequential], stored: bool, tmp_path: Path
) -> None:
    """Other kernels cast otherwise."""

    def body(given: Loop, batch: Tensor) -> None:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if chosen is None else chosen):
            brain(given, batch)

    found = parts_of(followed(attentive_loop(model), body, to=tmp_path / "run" if stored else None))
    assert found["gradient_error"].max() < 1e-6
    assert found["casts_error"].max() > SHORT[BRAIN] / 20


class Noting(nn.Identity):
    """Notes the kernels that are forbidden in its forward and backward pass."""

    noted: ClassVar[list[frozenset[str]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.noted.append(forbidden_kernels())
        if x.requires_grad:
            x.register_hook(lambda _: self.noted.append(forbidden_kernels()))  # type: ignore[no-untyped-call]
        return x


@pytest.mark.filterwarnings("ignore:TF32")  # torch warns of a default
def test_a_call_is_replayed_by_its_kernels() -> None:
    def body(given: Loop, batch: Tensor) -> None:
        with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            loops.plain(given, batch)

    given = loops.loop(loops.sgd)
    given.model.insert(1, Noting())
    trace = followed(given, body)
    step, _ = next(trace.steps.forwards())
    Noting.noted.clear()
    trace.called.gradient(step.calls, [step.start])
    assert Noting.noted == [frozenset({"mkldnn", "math", "cudnn", "mem_efficient"})] * 2


def clipped_in_long_numbers(given: Loop, batch: Tensor) -> None:
    """A factor that no clipping of torch has to the bit, so that replayed weights differ in rounding."""
    norm = gradient(given.model).double().norm()
    for weight in trained(given.model):
        weight.grad = (weight.grad.double() * min(1.0, 0.3 / float(norm))).float()  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [cast_loop, adapted_loop], ids=["autocast", "frozen"])
@pytest.mark.sample(1)
def test_a_trace_on_disk_adds_up_too(make: Callable[[Maker], Loop], tmp_path: Path) -> None:
    """Also if replayed weights round otherwise, and into a module that was built in float32, in a later process."""
    given = make(loops.adamw)
    start = outputs_of(deepcopy(given.model).float(), given.queries)
    body = under(BRAIN, autocast=make is cast_loop, then=clipped_in_long_numbers)
    followed(given, body, to=tmp_path / "run", every=3)
    found = parts_of(load_trace(find_trace(tmp_path / "run"), make(loops.adamw).model.float()))
    change = outputs_of(given.model.float(), given.queries) - start
    assert missed(found, change, "rounding") < EXACT
    in_memory = parts_of(followed(make(loops.adamw), body))
    for name in ("contribution", "rounding"):
        assert float(abs(found[name] - in_memory[name]).max()) < EXACT * float(abs(in_memory["contribution"]).max())
    assert found.attrs["autocast" if make is cast_loop else "frozen"] == "bfloat16"


@pytest.mark.slow
def test_a_run_reports_the_cost_of_casts(tmp_path: Path) -> None:
    found = followed(cast_loop(loops.adamw), brain, to=tmp_path / "run").attribute(quiet=True)
    assert casts_sentence(found) in (tmp_path / "run" / "progress.json").read_text(encoding="utf-8")
    assert "casts_error" in (tmp_path / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines()[0]


# --- Refused.


def penalised(given: Loop, batch: Tensor) -> None:
    """Add a hundredth of the gradient's size, about as much as casts round."""
    for weight in trained(given.model):
        assert weight.grad is not None
        weight.grad += (
            0.01 * weight.grad.norm() * functional.normalize(weight.detach().flatten(), dim=0).view_as(weight)
        )


def grown(given: Loop, batch: Tensor) -> None:
    came = given.model[3].get_parameter("weight").grad
    assert came is not None
    came[::2] *= 1.3


WARM = 1.004  # half an eps of bfloat16


def heated(when: int, kind: type[nn.Sequential] = nn.Sequential) -> None:
    """The model gives warmer outputs after some step."""

    def body(given: Loop, batch: Tensor) -> None:
        brain(given, batch)
        if given.done == when:
            given.model[0].register_forward_hook(lambda *seen: seen[2] * WARM)

    followed(attentive_loop(kind), body).attribute(quiet=True)


def unfrozen(begin: int) -> None:
    """Short weights need gradients from some step on."""
    given = adapted_loop(loops.sgd)

    def body(given: Loop, batch: Tensor) -> None:
        if given.done >= begin:
            given.model.requires_grad_(True)
        under(BRAIN, autocast=False)(given, batch)

    if not begin:
        given.model.requires_grad_(True)
    followed(given, body)


def moving_a_copy() -> None:
    """The optimizer moves copies of the weights in longer numbers."""
    model = nn.Linear(4, 3).bfloat16()
    masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
    ntkexp.follow(model, torch.optim.SGD(masters), queries=torch.ones(1, 4).bfloat16()).__enter__()


def with_effects(given: Loop, body: Body) -> None:
    def loss(outputs: Tensor, call: Any) -> Tensor:
        return outputs.float().square().sum(1) / 100

    followed(given, body, loss=loss).attribute(effects=True, quiet=True)


def squares(given: Loop, batch: Tensor) -> None:
    given.zero()
    (given.model(given.x[batch]).float().square().sum(1).mean() / 100).backward()
    given.step()


OTHER, COARSE = "is not the gradient of the 6 recorded examples", "is in bfloat16, whose rounding errors are too large"
WARMER = f"returned other outputs|{OTHER}"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a penalty": (lambda: followed(cast_loop(loops.momentum), under(BRAIN, then=penalised)), OTHER),
    "a penalty over frozen weights": (
        lambda: followed(adapted_loop(loops.sgd), under(BRAIN, autocast=False, then=penalised)),
        OTHER,
    ),
    "a grown gradient": (
        lambda: followed(cast_loop(loops.sgd), under(BRAIN, then=grown)),
        r"step 0: the optimizer's gradient is not .* in '3\.weight'",
    ),
    "warmer half-way": (lambda: heated(STEPS // 2), WARMER),
    "warmer half-way, inside": (lambda: heated(STEPS // 2, Inside), WARMER),
    "warmer at the end": (lambda: heated(STEPS - 1), WARMER),
    "warmer at the end, inside": (lambda: heated(STEPS - 1, Inside), WARMER),
    "short weights": (lambda: unfrozen(0), rf"'0\.base\.weight' {COARSE}"),
    "unfrozen short weights": (lambda: unfrozen(2), COARSE),
    "a copy of short weights": (
        moving_a_copy,
        r"updates a float32 copy of 'weight', .* train it under autocast",
    ),
    "effects": (
        lambda: with_effects(cast_loop(loops.sgd), brain),
        r"step 7: it was taken under autocast, and the rounding has no derivative",
    ),
    "effects over frozen weights": (
        lambda: with_effects(adapted_loop(loops.sgd), squares),
        "with frozen weights in half precision, and the rounding has no derivative",
    ),
}


@pytest.mark.parametrize("case", [pytest.param(k, marks=[pytest.mark.slow] * ("inside" in k)) for k in REFUSED])
def test_casts_hide_no_change(case: str) -> None:
    act, said = REFUSED[case]
    with pytest.raises(Mistake, match=said):
        act()
