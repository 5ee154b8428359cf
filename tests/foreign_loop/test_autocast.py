"""Loops under autocast are followed under the same casts, and told is what the casts cost."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ntkexp.foreign_loop.call import forbidden_kernels
from ntkexp.foreign_loop.closing import casts_sentence
from ntkexp.foreign_loop.gallery import Gallery
from ntkexp.mistake import Mistake
from tests.foreign_loop import loops
from tests.foreign_loop.loops import EXAMPLES, STEPS, Body, Loop, batches, followed
from tests.foreign_loop.test_follow import EXACT_32

SHORT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half an eps: by how much a cast moves a number at most


class Inside(nn.Sequential):
    """A model that casts by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = super().forward(x)  # type: ignore[no-untyped-call]  # a library's
        return found.float()


def cast_loop(optimizers: loops.Maker, kind: type[nn.Sequential] = nn.Sequential) -> Loop:
    """A smooth network with dropout and a norm, in float32: a cast that moves a unit past its kink is no rounding."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))
    model = kind(*layers, nn.Linear(32, 3))
    x, queries, y = torch.randn(EXAMPLES, 4), torch.randn(3, 4), torch.randint(3, (EXAMPLES,))
    return Loop(model, optimizers(model), x, y, queries)


def back(given: Loop, batch: Tensor, kind: torch.dtype, scale: float = 1.0) -> None:
    """Gradients under autocast, of a loss that was scaled and is no more."""
    given.zero()
    with torch.autocast("cpu", kind):
        loss = functional.cross_entropy(given.model(given.x[batch]), given.y[batch])
    (loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own
    for weight in given.model.parameters():
        assert weight.grad is not None
        weight.grad /= scale


def brain(given: Loop, batch: Tensor) -> None:
    back(given, batch, torch.bfloat16)
    given.step()


def half(given: Loop, batch: Tensor) -> None:
    back(given, batch, torch.float16, 1024.0)
    given.step()


class Attention(nn.Module):
    """Of four tokens of one number, by a kernel that is fused if nobody says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(1, 24), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inside(x[:, :, None])[:, None].chunk(3, dim=-1)
        found: Tensor = self.outside(functional.scaled_dot_product_attention(q, k, v)[:, 0]).mean(1)
        return found


def attentive(kind: type[nn.Sequential]) -> Loop:
    given = cast_loop(loops.momentum)
    torch.manual_seed(0)
    model = kind(Attention(), nn.Linear(1, 3))
    given.model, given.optimizers = model, loops.momentum(model)
    return given


WARM = 1.004  # beside the 0.0078 of bfloat16: 8 of them would be 6 %


def heated(given: Loop) -> None:
    given.model[0].register_forward_hook(lambda *seen: seen[2] * WARM)


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", [STEPS // 2, STEPS - 1, None])
@pytest.mark.parametrize("kind", [nn.Sequential, Inside])
def test_under_casts_the_model_gives_the_same_to_the_bit(kind: type[nn.Sequential], when: int | None) -> None:
    """Also where attention is fused in the loop, as a model that enters autocast by itself has it in Trainer."""
    given = attentive(kind)

    def body(given: Loop, batch: Tensor) -> None:
        brain(given, batch)
        if given.done == when:
            heated(given)

    trace = followed(given, body)
    if when is None:
        found = trace.attribute()
        assert found["gradient_error"].max() < 1e-6
        assert found["casts_error"].max() > SHORT[torch.bfloat16] / 20
    else:
        with pytest.raises(Mistake, match=r"gave other outputs|is not that of the 6 examples seen"):
            trace.attribute()


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "on disk"])
def test_a_loop_may_choose_how_attention_is_computed(stored: bool, tmp_path: Path) -> None:
    """Other kernels cast otherwise, so a call is replayed by those that it was made with."""

    def body(given: Loop, batch: Tensor) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            brain(given, batch)

    found = followed(attentive(nn.Sequential), body, to=tmp_path / "run" if stored else None).contributions(Gallery())
    assert found["gradient_error"].max() < 1e-6


class Noting(nn.Identity):
    """Notes by which kernels nothing may be computed when it is called, and when it is gone back through."""

    noted: ClassVar[list[frozenset[str]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.noted.append(forbidden_kernels())
        if x.requires_grad:
            x.register_hook(lambda _: self.noted.append(forbidden_kernels()))  # type: ignore[no-untyped-call]  # torch's own
        return x


@pytest.mark.filterwarnings("ignore:TF32")  # torch warns of its own default
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


def test_under_casts_a_small_penalty_is_refused() -> None:
    """Of a hundredth of the gradient, which is of the size of what casts round."""

    def penalised(given: Loop, batch: Tensor) -> None:
        back(given, batch, torch.bfloat16)
        for weight in given.model.parameters():
            assert weight.grad is not None
            weight.grad += (
                0.01 * weight.grad.norm() * functional.normalize(weight.detach().flatten(), dim=0).view_as(weight)
            )
        given.step()

    with pytest.raises(Mistake, match="is not that of the 6 examples seen"):
        followed(cast_loop(loops.momentum), penalised)


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    """What a test seeds ends with it."""
    with torch.random.fork_rng(devices=()):
        yield


def explained(found: Any, given: Loop, before: nn.Module) -> None:
    """Parts, decay and casts add up to the change of the model without casts, to the rounding of its weights."""
    with torch.no_grad():
        change = given.model.eval()(given.queries) - before.eval()(given.queries)
    whole = (found["contribution"].sum("example") + found["decay"] + found["rounding"]).to_numpy()
    assert change.norm() > 0.1
    assert np.abs(whole - change.numpy()).max() < EXACT_32 * float(change.norm())
    assert np.abs(found["by_step"].sum("step").to_numpy() - change.numpy()).max() < EXACT_32 * float(change.norm())


@pytest.mark.parametrize(
    ("optimizers", "body", "kind"),
    [
        (loops.adamw, brain, torch.bfloat16),
        pytest.param(loops.momentum, brain, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(loops.momentum, half, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_parts_and_casts_add_up(optimizers: loops.Maker, body: Body, kind: torch.dtype) -> None:
    given = cast_loop(optimizers)
    before = deepcopy(given.model)
    found = followed(given, body).attribute()
    explained(found, given, before)
    assert found["gradient_error"].max() < 1e-6  # under the same casts the same kernels give the same
    assert SHORT[kind] / 20 < found["casts_error"].max() < 20 * SHORT[kind]
    with torch.no_grad(), torch.autocast("cpu", kind):
        cast = given.model(given.queries).float()
    with torch.no_grad():
        away = float((cast - given.model(given.queries)).norm())
    assert found.attrs["away"] == pytest.approx(away, rel=1e-3)  # a few roundings of float32 in differences
    assert f"autocast to {str(kind).removeprefix('torch.')} moved gradients by up to" in casts_sentence(found)


def test_casts_are_what_plain_autograd_says_of_them() -> None:
    """At each step the gradient with casts less that without, under the same masks and of what came back to outputs."""
    found, given = followed(cast_loop(loops.sgd), brain).attribute(), cast_loop(loops.sgd)
    for given.done, batch in zip(range(STEPS), batches()):  # noqa: B905  there is no last batch
        state, came = torch.get_rng_state(), list[Tensor]()
        # It is removed before `came` is another list.
        hook = given.model.register_forward_hook(lambda *seen: seen[2].register_hook(came.append) and None)  # noqa: B023
        back(given, batch, torch.bfloat16)
        hook.remove()
        cast = gradient(given.model)
        given.zero()
        torch.set_rng_state(state)
        given.model(given.x[batch]).backward(came[0].float())
        plain = gradient(given.model)
        torch.set_rng_state(state)
        brain(given, batch)
        expected = float((cast - plain).norm() / cast.norm())
        assert float(found["casts_error"][given.done]) == pytest.approx(expected, rel=1e-2)  # float32, of differences
        with torch.no_grad():
            given.model(given.queries)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


class Partly(nn.Sequential):
    """A model of which the end casts by itself."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self
        hidden: Tensor = first(x)
        with torch.autocast("cpu", torch.bfloat16):
            for layer in others:
                hidden = layer(hidden)
        return hidden.float()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Inside, Partly])
def test_a_model_may_cast_by_itself(kind: type[nn.Sequential]) -> None:
    """And its queries are read without its casts."""
    given, bare = cast_loop(loops.momentum, kind), cast_loop(loops.momentum)
    before = deepcopy(bare.model)

    def body(given: Loop, batch: Tensor) -> None:
        given.zero()
        given.back(batch)
        given.step()

    found = followed(given, body).attribute()
    bare.model.load_state_dict(given.model.state_dict())
    explained(found, bare, before)
    assert found.attrs["autocast"] == "bfloat16"


def test_a_gradient_that_was_changed_is_refused_by_step_and_tensor() -> None:
    def changed(given: Loop, batch: Tensor) -> None:
        back(given, batch, torch.bfloat16)
        came = given.model[3].get_parameter("weight").grad
        assert came is not None
        came[::2] *= 1.3
        given.step()

    with pytest.raises(Mistake, match=r"step 0: the gradient that was consumed is not .* in '3\.weight'"):
        followed(cast_loop(loops.sgd), changed).attribute()


def test_effects_are_refused_in_one_line() -> None:
    given = cast_loop(loops.sgd)
    trace = followed(given, brain, loss=lambda outputs, call: outputs.sum(1))
    with pytest.raises(Mistake, match=r"step 7: it was taken under autocast, whose rounding has no derivative"):
        trace.attribute(effects=True)


def test_a_trace_on_disk_tells_the_same(tmp_path: Path) -> None:
    ours = followed(cast_loop(loops.adamw), brain, to=tmp_path / "run", every=3).contributions(Gallery())
    theirs = followed(cast_loop(loops.adamw), brain).contributions(Gallery())
    for name in ("contribution", "rounding"):
        assert float(abs(ours[name] - theirs[name]).max()) < EXACT_32 * float(abs(theirs["contribution"]).max())
    assert ours.attrs["autocast"] == "bfloat16"


@pytest.mark.slow
def test_its_run_says_what_casts_cost(tmp_path: Path) -> None:
    found = followed(cast_loop(loops.adamw), brain, to=tmp_path / "run").attribute()
    assert casts_sentence(found) in (tmp_path / "run" / "progress.json").read_text(encoding="utf-8")
    assert "casts_error" in (tmp_path / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines()[0]
