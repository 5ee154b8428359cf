"""Every optimizer whose steps are linear in gradients is followed, proved step by step, and refused where it does
anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import sqrt
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn, optim

from ntkexp.cli.main import run as command
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.rule import (
    LONG_SUM_DIVISOR,
    MAX_SUMMED,
    SIGNATURE_PARTS,
    Signatures,
)
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from ntkexp.model.foreign import load_module
from tests.foreign_loop import loops
from tests.foreign_loop.loops import (
    Loop,
    Maker,
    Optimizers,
    batches,
    closes,
    followed,
    loop,
    plain,
)

Kind: TypeAlias = Callable[..., optim.Optimizer]


def of(kind: Kind, **settings: Any) -> Maker:
    """All parameters by one optimizer, biases in a group of their own that learns more slowly."""

    def optimizers(model: nn.Sequential) -> Optimizers:
        weights, biases = ([each for each in model.parameters() if each.dim() == axes] for axes in (2, 1))
        groups = [{"params": weights}, {"params": biases, "lr": settings["lr"] / 2}]
        return [kind(groups, **settings)]

    optimizers.__name__ = " ".join([kind.__name__, *(f"{key}={value}" for key, value in settings.items())])
    return optimizers


def with_adamw(**settings: Any) -> Maker:
    """Muon for matrices, AdamW for the rest, as people use it."""

    def optimizers(model: nn.Sequential) -> Optimizers:
        weights, biases = ([each for each in model.parameters() if each.dim() == axes] for axes in (2, 1))
        return [optim.Muon(weights, **settings), optim.AdamW(biases, lr=0.01)]

    optimizers.__name__ = " ".join(["Muon", *(f"{key}={value}" for key, value in settings.items())])
    return optimizers


OPTIMIZERS = (
    of(optim.RMSprop, lr=0.01, weight_decay=0.1),
    of(optim.RMSprop, lr=0.01, momentum=0.9, centered=True, foreach=True),
    of(optim.RMSprop, lr=0.01, momentum=0.5, weight_decay=0.1, maximize=True),
    of(optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
    of(optim.Adagrad, lr=0.1, maximize=True, fused=True),
    of(optim.Adadelta, lr=1.0, weight_decay=0.1),
    of(optim.Adadelta, lr=1.0, maximize=True, foreach=True),
    of(optim.Adamax, lr=0.01, weight_decay=0.1),
    of(optim.NAdam, lr=0.01, weight_decay=0.1, momentum_decay=0.1),
    of(optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
    of(optim.RAdam, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, decoupled_weight_decay=True),
    of(optim.RAdam, lr=0.01, weight_decay=0.1, maximize=True, foreach=True),
    of(optim.ASGD, lr=0.1, lambd=0.01, alpha=0.5, t0=3, weight_decay=0.1),
    of(optim.Adafactor, lr=0.01, weight_decay=0.1),
    of(optim.Adafactor, lr=0.1, d=1.5, maximize=True, foreach=True),
    of(optim.Rprop, lr=0.01, maximize=True),
    with_adamw(lr=0.02),
    with_adamw(lr=0.02, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", ns_steps=3),
    of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    of(optim.Adam, lr=0.01, weight_decay=0.1, maximize=True, foreach=False),
)
"""What PyTorch's optimizers do, beyond what `loops` has; each option at least once, in some way of computing."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizers", OPTIMIZERS, ids=lambda each: each.__name__)
def test_what_a_step_does_besides_its_rule_is_refused(optimizers: Maker) -> None:
    given = loop(optimizers)

    def besides(optimizer: optim.Optimizer, *_: object) -> None:
        weight = given.model[2].get_parameter("weight")
        weight.data[0, 0] += 1e-12 * weight.data.norm() * (given.done == 2)

    given.optimizers[0].register_step_post_hook(besides)  # before those of `follow`
    with pytest.raises(Mistake, match=r"step 2: '2\.weight' is not where its optimizer's rule leads"):
        followed(given, plain)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "optimizers",
    [each for each in OPTIMIZERS if not each.__name__.startswith("ASGD")],  # it remembers an average that moves nothing
    ids=lambda each: each.__name__,
)
def test_what_it_remembers_is_not_changed_unseen(optimizers: Maker) -> None:
    """A memory of gradients is held in the loop; what a step is divided by, when it is taken again."""
    given = loop(optimizers)

    def changing(given: Loop, batch: torch.Tensor) -> None:
        plain(given, batch)
        if given.done == 3:
            state = given.optimizers[0].state[given.model[2].get_parameter("weight")]
            torch._foreach_mul_([value for value in state.values() if value.dim()], 1.0 + 1e-6)

    with pytest.raises(Mistake, match=r"step 4: '2\.weight' is not where|lead to other weights"):
        followed(given, changing).attribute()


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizers", OPTIMIZERS, ids=lambda each: each.__name__)
def test_a_loop_that_is_resumed_from_disk_tells_the_same(optimizers: Maker, tmp_path: Path) -> None:
    """Killed after five steps, with weights of the fourth; the frozen layer moves by what is remembered, or not."""

    def freezing(given: Loop, batch: torch.Tensor) -> None:
        given.model[0].requires_grad_(given.done < 4)
        plain(given, batch)

    given, kept = loop(optimizers), dict[str, Any]()
    before = deepcopy(given.model)
    for begin, end in ((0, 5), (4, loops.STEPS)):
        if begin:
            given.model.load_state_dict(kept["weights"])
            given.optimizers = optimizers(given.model)
            for each, state in zip(given.optimizers, kept["states"], strict=True):
                each.load_state_dict(state)
        with follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "run", every=3):
            for given.done, batch in zip(range(end), batches()):  # noqa: B905  there is no last batch
                if given.done >= begin:
                    freezing(given, batch)
                if given.done == 3:
                    states = [each.state_dict() for each in given.optimizers]
                    kept = deepcopy({"weights": given.model.state_dict(), "states": states})
    closes(given, before, load_trace(find_trace(tmp_path / "run"), deepcopy(before)).attribute(), cancels=True)


# --- An oracle: with f = Wx, J̄δ = δx, and what each example did is carried forwards, one after another.


def taken_forwards(trace: Trace, model: nn.Linear, x: torch.Tensor, moved: Moved) -> torch.Tensor:
    """−Σ_s δᵢ(s)x, where example i has its own memory, which takes its gradients in alone."""
    names = list(trace.examples)
    memory = torch.zeros(len(names), *model.weight.shape, dtype=x.dtype)
    parts = torch.zeros(len(trace.queries), len(model.weight), len(names), dtype=x.dtype)
    for index, (step, _) in enumerate(trace.steps.forwards()):
        (call,) = step.calls
        assert call.gradient is not None
        gradient = torch.zeros_like(memory)
        for name, row, output in zip(call.names, call.inputs, call.gradient, strict=True):
            gradient[names.index(name)] += torch.outer(output, row)
        memory, move = moved(index, memory, gradient)
        parts -= torch.einsum("nci,qi->qcn", move, trace.queries)
    return parts


Moved: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rmsprop_forwards(buffers: list[dict[str, torch.Tensor]]) -> Moved:
    def moved(index: int, memory: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = 0.9 * memory + gradient / (buffers[index]["square_avg"].sqrt() + 1e-8)
        return memory, 0.05 * memory

    return moved


def muon_forwards(buffers: list[dict[str, torch.Tensor]]) -> Moved:
    """Every product of PyTorch's iteration is taken with the parts of examples beside it, in long numbers."""

    def moved(index: int, memory: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = 0.95 * memory + 0.05 * gradient
        u, parts = buffers[index]["u"], 0.05 * gradient + 0.95 * memory
        a, b, c = (3.4445, -4.7750, 2.0315)
        tall = u.shape[0] > u.shape[1]
        short = u.bfloat16().T if tall else u.bfloat16()
        parts = parts.mT if tall else parts
        size = short.norm()
        short, parts = short / size, parts / float(size)
        for _ in range(5):
            gram = short @ short.T
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            short, parts = torch.addmm(short, factor, short, beta=a), a * parts + factor.double() @ parts
        return memory, 0.05 * max(1.0, u.shape[0] / u.shape[1]) ** 0.5 * (parts.mT if tall else parts)

    return moved


@pytest.mark.parametrize("shape", [(3, 6), (6, 3)])
@pytest.mark.parametrize(
    ("kind", "settings", "forwards"),
    [
        (optim.RMSprop, {"lr": 0.05, "momentum": 0.9}, rmsprop_forwards),
        (optim.Muon, {"lr": 0.05, "weight_decay": 0.0}, muon_forwards),
    ],
)
def test_parts_are_those_of_each_example_by_itself(
    kind: Kind, settings: dict[str, Any], forwards: Callable[..., Moved], shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(shape[1], shape[0], bias=False).double()
    x, y = torch.randn(8, shape[1]).double(), torch.randint(shape[0], (8,))
    optimizer, buffers = kind(model.parameters(), **settings), list[dict[str, torch.Tensor]]()
    with follow(model, optimizer, queries=torch.randn(2, shape[1]).double()) as trace:
        for batch in torch.randint(8, (5, 4)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
            if "momentum_buffer" in state and model.weight.grad is not None:
                state["u"] = model.weight.grad.lerp(state["momentum_buffer"], 0.95)
            buffers.append(state)
    found = trace.attribute()["contribution"].values
    expected = taken_forwards(trace, model, x, forwards(buffers))
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-12, atol=1e-14)


# --- Classes that are derived from a known one.


class Renamed(optim.RMSprop):
    """Another name."""


class Counting(optim.RMSprop):
    """Calls the step of the class that it is derived from, and counts."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class Decaying(optim.RMSprop):
    """Does more than the class that it is derived from."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            torch._foreach_mul_(self.param_groups[0]["params"], 0.999)
        return loss


class Own(optim.Optimizer):
    """May do anything."""


@pytest.mark.parametrize("kind", [Renamed, Counting])
def test_a_class_that_changes_no_step_goes_by_the_one_that_it_is_derived_from(kind: Kind) -> None:
    optim.RMSprop([torch.zeros(1)])  # whose hooks are then called by both steps
    given = loop(of(kind, lr=0.01, momentum=0.5))
    before = deepcopy(given.model)
    trace = followed(given, plain)
    assert len(trace.steps) == loops.STEPS
    closes(given, before, trace.attribute(), cancels=True)


def test_and_one_that_does_more_is_refused_after_its_first_step() -> None:
    with pytest.raises(Mistake, match=r"'0\.weight' (is not where|was changed by something other)"):
        followed(loop(of(Decaying, lr=0.01)), plain)


@pytest.mark.parametrize(
    ("optimizers", "said"),
    [
        (lambda model: [optim.LBFGS(model.parameters())], "LBFGS are not followed .each of its steps asks"),
        (lambda model: [optim.SparseAdam(model.parameters())], "SparseAdam are not followed .its gradients are sparse"),
        (of(type("SAM", (optim.SGD,), {}), lr=0.1), "SAM takes gradients at weights that it has moved up"),
        (lambda model: [Own(model.parameters(), {})], "Own are not followed: rules are known for SGD"),
        (of(optim.RMSprop, lr=0.1, differentiable=True), "differentiable=True"),
    ],
)
def test_others_are_refused_by_name(optimizers: Maker, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        followed(loop(optimizers), plain)


RULE = """
import torch
from ntkexp import AbstractOptimizerRule, LinearStep


class Scaled(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 0.1)
                weight.sub_(group["lr"] * mean / mean.square().mean().sqrt())


class ScaledRule(AbstractOptimizerRule):
    kinds, factor = (Scaled,), 1.0

    def step(self, group, state, taken, room=None):
        size = self.factor * group["lr"] / state["mean"].square().mean().sqrt()
        return LinearStep(momentum_scale=float(size), momentum_decay=0.9, momentum_gain=0.1)

    def momentum(self, group, state):
        return state.get("mean")


class WrongRule(ScaledRule):
    factor = 1.0 + 1e-9


def build():
    layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    return torch.nn.Sequential(*layers).double()
"""


def test_a_rule_from_a_file_is_held_against_every_step_and_asked_for_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scaled_steps.py").write_text(RULE)
    own = load_module(Path("scaled_steps.py"), "rule")
    with pytest.raises(Mistake, match=r"Scaled are not followed: rules are known for .*, or give one, rules="):
        followed(loop(of(own.Scaled, lr=0.01)), plain)
    with pytest.raises(Mistake, match=r"step 0: '0\.weight' is not where"):
        followed(loop(of(own.Scaled, lr=0.01)), plain, rules=[own.WrongRule()])
    given = loop(of(own.Scaled, lr=0.01))
    before = deepcopy(given.model)
    closes(given, before, followed(given, plain, rules=[own.ScaledRule()], to="run", every=3).attribute(), cancels=True)

    # in a later process, which knows neither module nor rule
    known = ["attribute", "run", "--model=scaled_steps.py:build", "--trust=scaled_steps.py"]
    assert command(known) == 2
    assert "the trace has steps of Scaled by ScaledRule, whose rule has to be given again" in capfd.readouterr().err
    assert command([*known, "--rule=scaled_steps.py:build"]) == 2
    assert "it is not a rule of an optimizer" in capfd.readouterr().err
    assert command([*known, "--rule=scaled_steps.py:ScaledRule"]) == 0


def test_effects_are_refused_where_no_derivative_is_known() -> None:
    given = loop(of(optim.RMSprop, lr=0.01))

    def loss(outputs: torch.Tensor, call: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, given.y[[int(name) for name in call.ids]], reduction="none")

    places = {tuple(row.tolist()): str(place) for place, row in enumerate(given.x)}
    trace = followed(given, plain, loss=loss, ids=lambda call: [places[tuple(row.tolist())] for row in call.args[0]])
    with pytest.raises(Mistake, match="effects of a loop with RMSprop are not known"):
        trace.attribute(effects=True)


def test_signatures_of_long_tensors_are_no_less_exact() -> None:
    """Sums of pieces: a long one in single precision would round by as much as a step moves a large table."""
    generator = torch.Generator().manual_seed(0)
    tensor, signatures = torch.randn(SIGNATURE_PARTS * 40 * MAX_SUMMED + 5, generator=generator), Signatures()
    wide = tensor.numel() // SIGNATURE_PARTS
    whole = SIGNATURE_PARTS * wide
    rows, rest = tensor[:whole].view(SIGNATURE_PARTS, wide).double(), tensor[whole:].double()
    expected = torch.cat([
        rows @ signatures.drawn(wide, tensor).double(),
        (rest @ signatures.drawn(len(rest), tensor).double()).view(1),
    ])  # fmt: skip
    missed = (signatures.of({"w": tensor})["w"].double() - expected).norm()
    assert missed <= sqrt(MAX_SUMMED) / LONG_SUM_DIVISOR * torch.finfo(torch.float32).eps * expected.norm()
