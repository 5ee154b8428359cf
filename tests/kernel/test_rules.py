"""Every rule that there is: the push closes, the reverse is its transpose, the limit is the derivative."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ntkexp.kernel.read.reader import Reader, Reading
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.record.taping import record
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.replay import Replay
from ntkexp.kernel.secant.rules import COMPLEX, RULES
from ntkexp.kernel.secant.rules.complex_numbers import SAME_FOR_COMPLEX
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.oracle import agree, applied
from tests.kernel.problems import Formula
from tests.kernel.samples import COMPLEX_SAMPLES, SAMPLES
from tests.kernel.samples.base import Sample
from tests.kernel.samples.shaped import ALGEBRA, OWN

EPS = torch.finfo(torch.float64).eps
NAMES = sorted(RULES)
COMPLEX_NAMES = sorted(COMPLEX)
WRITTEN = ("select_scatter", "slice_scatter")  # which torch cannot differentiate of complex numbers
TINY = 1e-10
BREAKS = (
    *("_cdist_forward", "_prelu_kernel", "abs", "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin"),
    *("aminmax", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max"),
    *("clamp_min", "copysign", "cummax", "cummin", "elu", "eq", "erf", "floor", "fmax", "fmin", "fmod", "frac", "ge"),
    *("gelu", "gt", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "huber_loss", "kthvalue", "le", "leaky_relu"),
    *("linalg_vector_norm", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill"),
    *("masked_scatter", "masked_select", "max", "max_pool2d_with_indices", "max_pool3d_with_indices", "max_unpool2d"),
    *("maximum", "median", "min", "minimum", "mode", "nan_to_num", "ne", "norm", "relu", "remainder", "round"),
    *("scatter_reduce", "sgn", "sign", "smooth_l1_loss", "softplus", "softshrink", "sort", "threshold", "topk"),
    *("trunc", "where"),
)
"""Rules of what is not smooth, or that are written in two ways: the length of a step says which side is met."""


@pytest.fixture(autouse=True)
def all_operations() -> Iterator[None]:
    """Some have no form that torch calls deterministic, which a run asks for that another test carries out."""
    asked = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(asked)


@dataclass(frozen=True)
class Sampled:
    """A sample between two matrix products and a fixed random readout of its outputs."""

    module: Formula
    x: Tensor
    start: Weights
    direction: Weights
    differentiable: bool = True  # of which torch makes other tapes
    tapes: dict[float, Tape] = field(default_factory=dict)

    @cached_property
    def reader(self) -> Reader:
        return Reader(function_of(self.module), frozenset(self.start))

    def tape(self, size: float) -> Tape:
        """After a step of this relative size."""
        if size not in self.tapes:
            weights = {name: weight + size * self.direction[name] for name, weight in self.start.items()}
            self.tapes[size] = record(self.reader.function, weights, self.x, differentiable=self.differentiable)
        return self.tapes[size]

    def secant(self, size: float) -> tuple[Reading, Tape, Tape]:
        """The step, read, and the tapes at its ends."""
        start, end = self.tape(0.0), self.tape(size)
        return self.reader.secant(start, end), start, end

    def step(self, start: Tape, end: Tape) -> Weights:
        """Δθ as the tapes have it: rounding of θ₀ + Δθ belongs to the step, not to the rule."""
        return {name: end[slot].detach() - start[slot].detach() for slot, name in start.weights.items()}

    @property
    def other(self) -> Weights:
        """Another direction than that of the step."""
        return {name: weight.flip(0) for name, weight in self.direction.items()}

    @cached_property
    def jacobians(self) -> Weights:
        """The oracle's, at the start."""
        return oracle.jacobians(self.module, self.x)


def fresh(name: str) -> Sampled:
    return problem_of(SAMPLES[name])


def problem_of(sample: Sample, dtype: torch.dtype = torch.float64) -> Sampled:
    """Random inputs and weights for a function."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    module = Formula(lambda x, w, v: sample(x @ w, x @ v), w=(4, 6), v=(4, 6)).to(dtype)
    start, x, direction = (
        {"w": normal(4, 6) / 2, "v": normal(4, 6) / 2},
        normal(5, 4).to(dtype),
        {"w": normal(4, 6) / 2, "v": normal(4, 6) / 2},
    )
    start, direction = ({name: weight.to(dtype) for name, weight in each.items()} for each in (start, direction))
    with torch.no_grad():
        for parameter, weight in start.items():
            module.get_parameter(parameter).copy_(weight)
    return Sampled(module, x, start, direction)


sampled = cache(fresh)
"""The same, recorded and read once for all laws."""


def test_every_rule_has_a_sample() -> None:
    assert set(SAMPLES) == set(RULES)
    assert set(COMPLEX_SAMPLES) == set(COMPLEX)


@pytest.mark.sample(90)
@pytest.mark.parametrize("name", NAMES)
def test_the_sample_uses_the_rule(name: str) -> None:
    """On a value that changes; a mask does so in a long step alone."""
    problem = sampled(name)
    chord = Replay(problem.tape(0.0), problem.tape(3.0), frozenset(problem.start)).chord
    assert any(entry.name == name and not chord.deltas.keys().isdisjoint(entry.slots) for entry in chord.start.entries)


@pytest.mark.sample(200)
@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name in NAMES for size in ((1e-8, 1e-4, 0.3, 3.0) if name in BREAKS else (1e-8, 3.0))],
)
def test_the_push_and_the_reverse_close(name: str, size: float) -> None:
    problem = sampled(name)
    reading, start, end = problem.secant(size)
    change = end.outputs - start.outputs
    # f itself is known to some eps, relative to its size, and eps·|z| for a function of z: |z| stays below 50 here
    scale = torch.maximum(start.outputs.abs().max(), end.outputs.abs().max())
    agree(reading.push, change, 100 * EPS, scale)
    agree(applied(reading.jacobian, problem.step(start, end)), change, 100 * EPS, scale)


@pytest.mark.sample(90)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_point_the_replay_is_the_jacobian(name: str) -> None:
    problem = sampled(name)
    tape = problem.tape(0.0)
    expected = oracle.contracted(problem.jacobians, problem.direction)
    agree(applied(problem.reader.secant(tape, tape).jacobian, problem.direction), expected, 100 * EPS)


@pytest.mark.sample(90)
@pytest.mark.parametrize("name", NAMES)
def test_tiny_steps_lose_no_digits(name: str) -> None:
    """A quotient Δσ/Δz at Δz = 1e-10 would keep six digits; slopes without cancellation differ from σ′ by σ″Δz."""
    problem = sampled(name)
    expected = oracle.contracted(problem.jacobians, problem.other)
    reading, _, _ = problem.secant(TINY)
    agree(applied(reading.jacobian, problem.other), expected, 1e-8)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SAME_FOR_COMPLEX.split() else name
        for name in COMPLEX_NAMES
    ],
)
def test_complex_numbers_close_and_have_a_tangent(name: str) -> None:
    problem = replace(problem_of(COMPLEX_SAMPLES[name]), differentiable=name not in WRITTEN)
    chord = Replay(problem.tape(0.0), problem.tape(1.0), frozenset(problem.start)).chord
    values = chord.start
    assert any(
        entry.name == name and any(values[slot].is_complex() for slot in (*entry.slots, *entry.results))
        for entry in values.entries
        if not chord.deltas.keys().isdisjoint(entry.slots)
    )
    reading, start, end = problem.secant(1.0)
    change, scale = end.outputs - start.outputs, torch.maximum(start.outputs.abs().max(), end.outputs.abs().max())
    agree(reading.push, change, 100 * EPS, scale)
    agree(applied(reading.jacobian, problem.step(start, end)), change, 100 * EPS, scale)
    expected = oracle.contracted(problem.jacobians, problem.other)
    agree(applied(problem.reader.secant(start, start).jacobian, problem.other), expected, 100 * EPS)
    agree(applied(problem.secant(TINY)[0].jacobian, problem.other), expected, 1e-8)


MEANS = (*sorted(ALGEBRA), "binary_cross_entropy", "binary_cross_entropy_with_logits", "cumprod", "logcumsumexp")
OF_COMPLEX = ("_fft_c2r", "_fft_r2c", "abs", "angle", "bmm", "div", "exp", "mul", "sgn")
BOTH_WAYS = {name: SAMPLES[name] for name in MEANS} | {f"complex {name}": OWN[name] for name in OF_COMPLEX}
"""Rules that are a mean of both ends, or of both orders."""


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_step_and_its_way_back_have_one_secant(name: str) -> None:
    problem = problem_of(BOTH_WAYS[name])
    reading, start, end = problem.secant(0.6)
    back = problem.reader.secant(end, start)
    agree(applied(reading.jacobian, problem.other), applied(back.jacobian, problem.other), 1000 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_in_single_precision_a_step_closes_to_its_rounding(name: str) -> None:
    reading, start, end = problem_of(BOTH_WAYS[name], torch.float32).secant(0.6)
    scale = torch.maximum(start.outputs.abs().max(), end.outputs.abs().max())
    agree(reading.push, end.outputs - start.outputs, 100 * torch.finfo(torch.float32).eps, scale)


def test_a_rule_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tangent is read from Jacobians, which is said."""
    problem = fresh("tanh")
    monkeypatch.setitem(RULES, "tanh", lambda call: call.delta(call.args[0]) @ torch.ones(7))
    start, end = problem.tape(0.0), problem.tape(0.3)
    with pytest.raises(NoRule, match=r"the difference rule of aten\.tanh\.default fails here: .*7") as caught:
        problem.reader.secant(start, end)
    assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match=r"aten\.tanh.*plain Jacobians"):
        found = tangent_kernel(problem.module, problem.x)
    agree(found, oracle.tangent(problem.module, problem.x, problem.x), 100 * EPS)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, v: torch.where(x @ w > v, x @ w, 1.5),
        lambda x, w, v: torch.where(v > 0, v * 1.0, x @ w),
    ],
    ids=["a threshold", "a mask of weights"],
)
def test_what_nothing_but_a_comparison_uses_is_refused(function: Callable[..., Tensor]) -> None:
    """It reaches the outputs where the comparison changes, and nowhere on a point."""
    module = Formula(function, w=(4, 6), v=(6,)).double()
    start = {name: weight.detach().fill_(0.1) for name, weight in module.named_parameters()}
    reader = Reader(function_of(module), frozenset(start))
    x = sampled("add").x
    before, after = (reader.record({name: s * weight for name, weight in start.items()}, x) for s in (1.0, -9.0))
    with pytest.raises(NoRule, match="through a comparison alone"):
        reader.secant(before, after)


WEIGHTS_FIRST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a norm": lambda h, v: functional.layer_norm(v.expand_as(h), (6,), h[0] * 0 + 1) * h,
    "a constant of its shape": lambda h, v: torch.ones_like(v) * h * v,
    "a power": lambda h, v: (0.5 + v * v) ** h,
    "an angle": lambda h, v: torch.atan2(v, h),
    "a bound": lambda h, v: h.clamp(min=v) + torch.hypot(v, h),
    "a mean of two": lambda h, v: torch.lerp(h, v, v),
    "a quotient": lambda h, v: torch.addcdiv(v, v, 0.5 + h * h) + functional.glu(torch.cat([v.expand_as(h), h], 1)),
}


@pytest.mark.parametrize("name", WEIGHTS_FIRST)
def test_a_weight_meets_the_inputs_in_any_place(name: str) -> None:
    """Where the network is cut, the difference of a weight is one of its uses."""
    module = Formula(lambda x, w, v: WEIGHTS_FIRST[name](x @ w, v), w=(4, 6), v=(6,)).double()
    problem = sampled("add")
    start = {"w": problem.start["w"], "v": problem.start["v"][0]}
    reader, size = Reader(function_of(module), frozenset(start)), {"w": 0.3, "v": -2.0}
    before, after = (
        reader.record({key: weight * (1 + share * size[key]) for key, weight in start.items()}, problem.x)
        for share in (0.0, 1.0)
    )
    change, reading = after.outputs - before.outputs, reader.secant(before, after)
    scale = torch.maximum(before.outputs.abs().max(), after.outputs.abs().max())
    agree(applied(reading.jacobian, problem.step(before, after)), change, 100 * EPS, scale)


@pytest.mark.parametrize(
    "function",
    [lambda h: functional.softplus(1 / 3 + h, 3.0, threshold=1.0), lambda h: torch.logit(0.1 + h, eps=0.1)],
    ids=["softplus", "logit"],
)
def test_a_short_step_across_a_break_closes(function: Callable[[Tensor], Tensor]) -> None:
    """Where the numbers that an operation is given put its break."""
    module, problem = Formula(lambda x, w: function(x @ w), w=(4, 6)).double(), sampled("add")
    reader = Reader(function_of(module), frozenset({"w"}))
    before, after = (reader.record({"w": size * problem.direction["w"]}, problem.x) for size in (-1e-3, 1e-3))
    # what a break adds, or leaves out, is 1e-4 of the outputs and more
    agree(reader.secant(before, after).push, after.outputs - before.outputs, 1e-12, after.outputs.abs().max())


def test_celu_is_differentiated_in_double_precision() -> None:
    """torch's own derivative takes 1/α in single precision, which closes no step for most α."""
    module = Formula(lambda x, w: functional.celu(x @ w, 0.7), w=(4, 6)).double()
    problem = sampled("celu")
    reader = Reader(function_of(module), frozenset({"w"}))
    start, end = ({"w": problem.start["w"] + size * problem.direction["w"]} for size in (0.0, 1e-4))
    before, after = (reader.record(weights, problem.x) for weights in (start, end))
    change = after.outputs - before.outputs
    agree(reader.secant(before, after).push, change, 100 * EPS, before.outputs.abs().max())


@pytest.mark.parametrize(
    "operation",
    [
        lambda h, k: torch.div(h, 0.1, rounding_mode="floor"),
        lambda h, k: torch.div(h, k, rounding_mode="trunc"),
        lambda h, k: h.sort(1).values,
        lambda h, k: h.argmax(1, keepdim=True),
        lambda h, k: torch.linalg.vector_norm(h, 0, dim=1, keepdim=True),
        lambda h, k: torch.log(torch.complex(h, k)).real,
        lambda h, k: torch.complex(h, k).cumprod(1).imag,
        lambda h, k: torch.complex(h, k).pow(0.5).imag,
        lambda h, k: torch.linalg.eigh(h.reshape(-1, 2, 3)[:, :, :2])[1].flatten(1)[:, :1],
        lambda h, k: torch.linalg.qr(h.reshape(-1, 3, 2))[0].flatten(1),
        lambda h, k: torch.linalg.qr(h.reshape(-1, 2, 3))[0].flatten(1)[:, :1],
        lambda h, k: functional.embedding_bag(torch.arange(h.numel()).view(h.shape), h.reshape(-1, 1), mode="max"),
        lambda h, k: torch.logical_not(h > 0) * k,
        lambda h, k: (3 * h).long() * k,
        lambda h, k: h.scatter(1, torch.zeros(len(h), 1).long(), 3.0, reduce="add"),
        lambda h, k: h.scatter_reduce(1, torch.zeros(len(h), 2).long(), k[:, :2], "prod"),
        lambda h, k: h.masked_scatter(h > 0, k.contiguous()),
    ],
)
def test_what_no_rule_knows_is_refused_in_one_line(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Rounding and choices hide behind names that have rules, or give no numbers at all."""
    problem = sampled("add")
    module = Formula(lambda x, w, v: operation(x @ w, x @ v) * (x @ w), w=(4, 6), v=(4, 6)).double()
    reader = Reader(function_of(module), frozenset(problem.start))
    end = {name: weight + problem.direction[name] for name, weight in problem.start.items()}
    with pytest.raises(Mistake) as caught:
        reader.secant(reader.record(problem.start, problem.x), reader.record(end, problem.x))
    assert "\n" not in str(caught.value)
