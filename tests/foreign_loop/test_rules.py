"""Optimizers whose steps are linear in gradients are followed. Each step is proved, and anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from ntkexp.cli.main import run as command
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.rule_proof import LONG_SUM_DIVISOR
from ntkexp.foreign_loop.signatures import MAX_SUMMED, SIGNATURE_PARTS, Signatures
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.model.foreign import load_module
from tests.foreign_loop import loops, other_optimizers
from tests.foreign_loop.loops import OPTIMIZERS, Loop, Maker, closes, fitted, followed, loop, of, outputs_of, plain

Kind: TypeAlias = Callable[..., optim.Optimizer]
WITHOUT_STATE = ("SignSGD lr=0.01", "timm Lars lr=0.1 weight_decay=0.1")
"""Optimizers without a memory. ASGD has one, an average that moves nothing."""
ALL = (loops.momentum, loops.nesterov, loops.adamw, *OPTIMIZERS)


def moving_besides(maker: Maker, share: float) -> Trace:
    """Follow a loop in which the third step also changes one number, by a share of the tensor's norm."""
    given = loop(maker)

    def besides(optimizer: optim.Optimizer, *_: object) -> None:
        weight = given.model[2].get_parameter("weight")
        weight.data[0, 0] += share * weight.data.norm() * (given.done == 2)

    given.optimizers[0].register_step_post_hook(besides)  # before the hooks of `follow`
    return followed(given, plain)


@pytest.mark.sample(6)
@pytest.mark.parametrize("maker", ALL, ids=lambda each: each.__name__)
def test_a_step_that_leaves_its_rule_is_refused(maker: Maker) -> None:
    moving_besides(maker, 1e-16)  # less than rounding
    with pytest.raises(Mistake, match=r"step 2: '2\.weight' does not follow its optimizer's rule"):
        moving_besides(maker, 1e-12)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "maker",
    [each for each in OPTIMIZERS if not each.__name__.startswith("ASGD") and each.__name__ not in WITHOUT_STATE],
    ids=lambda each: each.__name__,
)
def test_a_changed_memory_is_refused(maker: Maker) -> None:
    """A changed momentum in the loop, and a changed denominator when the step is replayed."""

    def changing(given: Loop, batch: Tensor) -> None:
        plain(given, batch)
        if given.done == 3:
            state = given.optimizers[0].state[given.model[2].get_parameter("weight")]
            torch._foreach_mul_([value for value in state.values() if value.dim()], 1.0 + 1e-6)

    with pytest.raises(Mistake, match=r"step 4: '2\.weight' does not follow|lead to other weights"):
        followed(loop(maker), changing).attribute()


@pytest.mark.parametrize("shape", [(3, 6), (6, 3)])
def test_the_products_of_muon_are_applied_to_each_example(shape: tuple[int, int]) -> None:
    """With f = Wx, J̄δ = δx. PyTorch's iteration is in bfloat16, and its factors move the parts in float64."""
    model = nn.Linear(shape[1], shape[0], bias=False).double()
    x, y, drawn = torch.randn(8, shape[1]).double(), torch.randint(shape[0], (8,)), torch.randint(8, (5, 4))
    queries, expected, updates = torch.randn(2, shape[1]).double(), torch.zeros(2, shape[0], 8).double(), list[Tensor]()
    optimizer = optim.Muon(model.parameters(), lr=0.05, weight_decay=0.0)

    def keep(*_: object) -> None:
        assert model.weight.grad is not None
        updates.append(model.weight.grad.lerp(optimizer.state[model.weight]["momentum_buffer"], 0.95))

    optimizer.register_step_post_hook(keep)
    loss = nn.functional.cross_entropy
    trace = fitted(model, optimizer, lambda step: loss(model(x[drawn[step]]), y[drawn[step]]), 5, queries=queries)
    memory = torch.zeros(8, *shape, dtype=torch.float64)
    places = {name: k for k, name in enumerate(digests(x))}
    for (step, _), update in zip(trace.steps.forwards(), updates, strict=True):
        (call,), gradient = step.calls, torch.zeros_like(memory)
        assert isinstance(call.gradient, Tensor)
        for name, row, output in zip(call.names, call.inputs, call.gradient, strict=True):
            gradient[places[name]] += torch.outer(output, row)
        memory = 0.95 * memory + 0.05 * gradient
        tall = shape[0] > shape[1]
        short, parts = ((each.mT if tall else each) for each in (update.bfloat16(), 0.05 * gradient + 0.95 * memory))
        size = short.norm()
        short, parts = short / size, parts / float(size)
        for _ in range(5):
            gram = short @ short.T
            factor = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            short, parts = torch.addmm(short, factor, short, beta=3.4445), 3.4445 * parts + factor.double() @ parts
        moved = 0.05 * max(1.0, shape[0] / shape[1]) ** 0.5 * (parts.mT if tall else parts)
        expected -= torch.einsum("nci,qi->qcn", moved, queries)
    found = torch.from_numpy(trace.attribute()["contribution"].values)
    torch.testing.assert_close(found, expected[:, :, [places[name] for name in trace.examples]], rtol=1e-12, atol=1e-14)


# --- Subclasses of known optimizers.


class Renamed(optim.RMSprop):
    """Another name."""


class Counting(optim.RMSprop):
    """Calls the step of its parent, and counts."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class Decaying(optim.RMSprop):
    """Also decays the weights."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            torch._foreach_mul_(self.param_groups[0]["params"], 0.999)
        return loss


class Own(optim.Optimizer):
    """May do anything."""


@pytest.mark.parametrize("kind", [Renamed, Counting])
def test_a_subclass_with_the_same_steps_has_the_rule_of_its_parent(kind: Kind) -> None:
    optim.RMSprop([torch.zeros(1)])  # its hooks are then called by both steps
    given = loop(of(kind, lr=0.01, momentum=0.5))
    start = outputs_of(given.model, given.queries)
    trace = followed(given, plain)
    assert len(trace.steps) == loops.STEPS
    closes(given, start, trace.attribute(), cancels=True)


def test_a_subclass_with_other_steps_is_refused_after_the_first() -> None:
    with pytest.raises(Mistake, match=r"'0\.weight' (does not follow|was changed by something other)"):
        followed(loop(of(Decaying, lr=0.01)), plain)


@pytest.mark.parametrize(
    ("optimizers", "said"),
    [
        (lambda model: [optim.LBFGS(model.parameters())], "LBFGS are not followed .each step asks"),
        (lambda model: [optim.SparseAdam(model.parameters())], "SparseAdam are not followed .its gradients are sparse"),
        (of(type("SAM", (optim.SGD,), {}), lr=0.1), "SAM computes gradients at weights that it has moved up"),
        (lambda model: [Own(model.parameters(), {})], "Own are not followed: rules are known for SGD"),
        (of(optim.RMSprop, lr=0.1, differentiable=True), "differentiable=True"),
        (of(other_optimizers.Lion, lr=0.01, betas=(0.9, 0.0)), r"betas=\(…, 0\) forgets the momentum of its step"),
    ],
)
def test_other_optimizers_are_refused_by_name(optimizers: Maker, said: str) -> None:
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

    def step(self, group, state, step_input, buffer=None):
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


def test_a_rule_from_a_file_is_proved_at_every_step_and_required_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scaled_steps.py").write_text(RULE)
    own = load_module(Path("scaled_steps.py"), "rule")
    with pytest.raises(Mistake, match=r"Scaled are not followed: rules are known for .*, or give one, rules="):
        followed(loop(of(own.Scaled, lr=0.01)), plain)
    with pytest.raises(Mistake, match=r"step 0: '0\.weight' does not follow"):
        followed(loop(of(own.Scaled, lr=0.01)), plain, rules=[own.WrongRule()])
    given = loop(of(own.Scaled, lr=0.01))
    start = outputs_of(given.model, given.queries)
    closes(given, start, followed(given, plain, rules=[own.ScaledRule()], to="run", every=3).attribute(), cancels=True)

    # a later process has to get the module and the rule
    known = ["attribute", "run", "--model=scaled_steps.py:build", "--trust=scaled_steps.py"]
    assert command(known) == 2
    assert (
        "the trace has steps of Scaled by ScaledRule, and does not store their rule; give the rule again"
        in capfd.readouterr().err
    )
    assert command([*known, "--rule=scaled_steps.py:build"]) == 2
    assert "it is not a rule of an optimizer" in capfd.readouterr().err
    assert command([*known, "--rule=scaled_steps.py:ScaledRule"]) == 0


def test_a_trace_of_a_library_needs_no_rule_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class is identified by its module and name. Classes of unknown modules are not imported."""
    monkeypatch.chdir(tmp_path)
    Path("lion_net.py").write_text(RULE)
    followed(loop(loops.of_timm("Lion", lr=0.01)), plain, to="run", every=3)
    known = ["--model=lion_net.py:build", "--trust=lion_net.py"]
    assert command(["attribute", "run", *known]) == 0
    followed(loop(of(type("Lion", (other_optimizers.Lion,), {"__module__": "elsewhere"}), lr=0.01)), plain, to="own")
    assert command(["attribute", "own", *known]) == 2
    assert (
        "the trace has steps of elsewhere.Lion, and does not store their rule; give the rule again"
        in capfd.readouterr().err
    )


def test_the_average_of_a_schedule_free_optimizer_is_outside_the_steps() -> None:
    """The steps move y. At the end, `eval()` loads the average x."""
    given = loop(of(other_optimizers.SGDScheduleFree, lr=0.1, train_mode=True))
    start = outputs_of(given.model, given.queries)
    (optimizer,) = given.optimizers
    assert isinstance(optimizer, other_optimizers.SGDScheduleFree)
    with follow(given.model, optimizer, queries=given.queries) as trace:
        loops.train(given, plain)
        at_y = outputs_of(given.model, given.queries)
        optimizer.eval()
    at_x, found = outputs_of(given.model, given.queries), trace.attribute()
    assert loops.missed(found, at_x - start, "outside") <= 1e-12
    assert loops.apart(found["outside"], at_x - at_y) <= 1e-12


@pytest.mark.parametrize("loads", [False, True], ids=["kept", "loaded"])
def test_averages_and_their_schedule_are_followed(loads: bool) -> None:
    """The statistics of the average are renewed at every step; at the end, the average may be loaded."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y, queries = torch.randn(18, 4).double(), torch.randint(3, (18,)), torch.randn(3, 4).double()
    optimizer = optim.SGD(net.parameters(), 0.1, momentum=0.9)
    average, schedule = AveragedModel(net), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    start = outputs_of(net, queries)
    with follow(net, optimizer, queries=queries) as trace:
        for batch in torch.randint(18, (6, 6)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            average.update_parameters(net)
            update_bn([x], average)
            schedule.step()
        if loads:
            net.load_state_dict(average.module.state_dict())
    found = trace.attribute()
    parts = ("rounding", "statistics", *(["outside"] if loads else []))
    assert loops.missed(found, outputs_of(net, queries) - start, *parts) <= 1e-12


def test_losses_by_a_function_are_followed_at_moved_weights() -> None:
    """A gradient of `trace.losses` after an ascent, as in SAM."""
    given = loop(loops.momentum)
    start, weights = outputs_of(given.model, given.queries), list[Tensor](given.model.parameters())

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    with follow(given.model, given.optimizers, queries=given.queries) as trace:
        for _, batch in zip(range(4), loops.batches(), strict=False):
            given.zero()
            with torch.no_grad():
                torch._foreach_add_(weights, 0.01)
            trace.losses(losses, given.x[batch], given.y[batch]).mean().backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                torch._foreach_sub_(weights, 0.01)
            given.step()
    closes(given, start, trace.attribute())


class Overshooting(other_optimizers.Lion):
    """Moves the weights a little too far."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.sub_(weight.grad.sign(), alpha=1e-9 * group["lr"])


@pytest.mark.parametrize(
    ("name", "base", "said"),
    [
        ("Lion", Overshooting, r"'0\.weight' (does not follow its optimizer's rule|was changed by something other)"),
        (
            "Lion",
            other_optimizers.SignSGD,
            "step 0: '0.weight': the optimizer's state has no 'betas', which LionRule reads",
        ),
        ("SignSGD", optim.SGD, r"step 0: '0\.weight' does not follow its optimizer's rule"),
        ("Lamb", optim.Adam, "step 0: '0.weight': the optimizer's state has no 'grad_averaging', which LAMBRule reads"),
        (
            "Lars",
            optim.SGD,
            r"step 0: '0\.weight': the optimizer's state has no 'trust_coefficient', which LARSRule reads",
        ),
    ],
)
def test_an_optimizer_with_a_known_name_and_other_steps_is_refused(name: str, base: type, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        followed(loop(of(type(name, (base,), {}), lr=0.01, weight_decay=0.1)), plain)


def test_signs_of_vanishing_gradients_belong_to_no_example() -> None:
    """The sign of a number whose inverse overflows moves the weight, and `rounding` holds the effect."""
    net, x, queries = nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 4e-38]]), torch.eye(2)
    start, optimizer = outputs_of(net, queries), other_optimizers.SignSGD(net.parameters(), lr=300.0)
    found = fitted(net, optimizer, lambda _: (net(x) - 3).square().mean(), 1, queries=queries).attribute()
    change = outputs_of(net, queries) - start
    assert loops.missed(found, change, "rounding") <= 1e-6
    assert loops.apart(found["rounding"].isel(query=1), change[1]) <= 1e-6
    assert float(abs(found["rounding"].isel(query=0)).max()) == 0


def test_effects_are_refused_where_no_derivative_is_known() -> None:
    given = loop(of(optim.RMSprop, lr=0.01))
    trace = followed(given, plain, loss=loops.loss_of(given))
    with pytest.raises(Mistake, match="effects of a loop with RMSprop are not known"):
        trace.attribute(effects=True)


def test_signatures_of_long_tensors_are_no_less_exact() -> None:
    """They are sums of pieces. In float32 a long sum would round by as much as a step moves a large table."""
    tensor, signatures = torch.randn(SIGNATURE_PARTS * 40 * MAX_SUMMED + 5), Signatures()
    wide = tensor.numel() // SIGNATURE_PARTS
    whole = SIGNATURE_PARTS * wide
    rows, rest = tensor[:whole].view(SIGNATURE_PARTS, wide).double(), tensor[whole:].double()
    expected = torch.cat([
        rows @ signatures.drawn(wide, tensor).double(),
        (rest @ signatures.drawn(len(rest), tensor).double()).view(1),
    ])  # fmt: skip
    missed = (signatures.of({"w": tensor})["w"].double() - expected).norm()
    assert missed <= sqrt(MAX_SUMMED) / LONG_SUM_DIVISOR * torch.finfo(torch.float32).eps * expected.norm()
