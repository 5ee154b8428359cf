"""Every rule: the push closes, the reverse is its transpose, and the limit is the derivative."""

from __future__ import annotations

from collections.abc import Callable
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
from ntkexp.kernel.secant.rules.elementwise import exponential
from ntkexp.library import tangent_kernel
from ntkexp.model.functional import function_of
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.networks import Formula
from tests.kernel.oracle import EPS, agree, applied, refused
from tests.kernel.samples import COMPLEX_SAMPLES, SAMPLES
from tests.kernel.samples.base import Sample
from tests.kernel.samples.shaped import ALGEBRA, OWN

NAMES = sorted(RULES)
COMPLEX_NAMES = sorted(COMPLEX)
WRITTEN = ("select_scatter", "slice_scatter")  # torch cannot differentiate them for complex numbers
TINY = 1e-10
BREAKS = (
    *("_cdist_forward", "_prelu_kernel", "abs", "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin"),
    *("aminmax", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max"),
    *("clamp_min", "copysign", "cummax", "cummin", "elu", "eq", "erf", "floor", "fmax", "fmin", "fmod", "frac", "ge"),
    *(
        "gelu",
        "grid_sampler_2d",
        "grid_sampler_3d",
        "gt",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "huber_loss",
        "kthvalue",
        "le",
        "leaky_relu",
    ),
    *("linalg_vector_norm", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill"),
    *("masked_scatter", "masked_select", "max", "max_pool2d_with_indices", "max_pool3d_with_indices", "max_unpool2d"),
    *("maximum", "median", "min", "minimum", "mode", "nan_to_num", "ne", "norm", "relu", "remainder", "round"),
    *("scatter_reduce", "sgn", "sign", "smooth_l1_loss", "softplus", "softshrink", "sort", "threshold", "topk"),
    *("trunc", "where"),
)
"""Rules of functions that are not smooth, or written in two ways: the length of a step decides the case."""


pytestmark = pytest.mark.usefixtures("all_operations")


@dataclass(frozen=True)
class Sampled:
    """A sample between two matrix products and a fixed random readout of its outputs."""

    module: Formula
    x: Tensor
    start: Weights
    direction: Weights
    differentiable: bool = True  # torch records other tapes if not
    tapes: dict[float, Tape] = field(default_factory=dict)

    @cached_property
    def reader(self) -> Reader:
        return Reader(function_of(self.module), frozenset(self.start))

    def tape(self, size: float) -> Tape:
        """Record the sample after a step of this relative size."""
        if size not in self.tapes:
            weights = {name: weight + size * self.direction[name] for name, weight in self.start.items()}
            self.tapes[size] = record(self.reader.function, weights, self.x, differentiable=self.differentiable)
        return self.tapes[size]

    def secant(self, size: float) -> tuple[Reading, Tape, Tape]:
        """Return the secant of the step, and the tapes at its ends."""
        start, end = self.tape(0.0), self.tape(size)
        return self.reader.secant(start, end), start, end

    @property
    def other(self) -> Weights:
        """A direction that differs from the step."""
        return {name: weight.flip(0) for name, weight in self.direction.items()}

    @cached_property
    def jacobians(self) -> Weights:
        """The oracle's Jacobians at the start."""
        return oracle.jacobians(self.module, self.x)


def problem_of(sample: Sample, dtype: torch.dtype = torch.float64) -> Sampled:
    """Return random inputs and weights for a function."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    module = Formula(lambda x, w, v: sample(x @ w, x @ v), w=(4, 6), v=(4, 6)).to(dtype)
    start = {name: (normal(4, 6) / 2).to(dtype) for name in "wv"}
    x = normal(5, 4).to(dtype)
    direction = {name: (normal(4, 6) / 2).to(dtype) for name in "wv"}
    with torch.no_grad():
        for parameter, weight in start.items():
            module.get_parameter(parameter).copy_(weight)
    return Sampled(module, x, start, direction)


@cache
def sampled(name: str) -> Sampled:
    """Return the problem of a sample, recorded and read once for all laws."""
    return problem_of(SAMPLES[name])


def assert_closed(reading: Reading, start: Tape, end: Tape, eps: float = EPS) -> None:
    """The push and J̄Δθ are the change of the outputs, which are known to some eps relative to their size.

    A function of z is known to eps·|z|, and |z| stays below 50 here.
    """
    change, scale = end.outputs - start.outputs, torch.maximum(start.outputs.abs().max(), end.outputs.abs().max())
    agree(reading.jvp, change, 100 * eps, scale)
    step = {name: end[slot].detach() - start[slot].detach() for slot, name in start.weights.items()}
    agree(applied(reading.jacobian, step), change, 100 * eps, scale)


def test_every_rule_has_a_sample() -> None:
    assert set(SAMPLES) == set(RULES)
    assert set(COMPLEX_SAMPLES) == set(COMPLEX)


@pytest.mark.parametrize("name", NAMES)
def test_the_push_and_the_reverse_close(name: str) -> None:
    """The step is so long that every sample uses its rule: the value of its argument changes, and masks do."""
    problem = sampled(name)
    chord = Replay(problem.tape(0.0), problem.tape(3.0), frozenset(problem.start)).state
    assert any(entry.name == name and not chord.deltas.keys().isdisjoint(entry.slots) for entry in chord.start.entries)
    assert_closed(*problem.secant(3.0))


@pytest.mark.sample(60)
@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name in NAMES for size in ((1e-8, 1e-4, 0.3) if name in BREAKS else (1e-8,))],
)
def test_shorter_steps_close(name: str, size: float) -> None:
    assert_closed(*sampled(name).secant(size))


def assert_tangent(problem: Sampled) -> None:
    """At a point, and along a tiny step, the secant is the Jacobian.

    A quotient Δσ/Δz at Δz = 1e-10 would keep six digits; slopes without cancellation differ from σ′ by σ″Δz.
    """
    tape, expected = problem.tape(0.0), oracle.contracted(problem.jacobians, problem.other)
    agree(applied(problem.reader.secant(tape, tape).jacobian, problem.other), expected, 100 * EPS)
    agree(applied(problem.secant(TINY)[0].jacobian, problem.other), expected, 1e-8)


@pytest.mark.sample(90)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_point_the_replay_is_the_jacobian_and_tiny_steps_lose_no_digits(name: str) -> None:
    assert_tangent(sampled(name))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SAME_FOR_COMPLEX.split() else name
        for name in COMPLEX_NAMES
    ],
)
def test_complex_numbers_close_and_have_a_tangent(name: str) -> None:
    problem = replace(problem_of(COMPLEX_SAMPLES[name]), differentiable=name not in WRITTEN)
    chord = Replay(problem.tape(0.0), problem.tape(1.0), frozenset(problem.start)).state
    values = chord.start
    assert any(
        entry.name == name and any(values[slot].is_complex() for slot in (*entry.slots, *entry.results))
        for entry in values.entries
        if not chord.deltas.keys().isdisjoint(entry.slots)
    )
    assert_closed(*problem.secant(1.0))
    assert_tangent(problem)


MEANS = (*sorted(ALGEBRA), "binary_cross_entropy", "binary_cross_entropy_with_logits", "cumprod", "logcumsumexp")
OF_COMPLEX = ("_fft_c2r", "_fft_r2c", "abs", "angle", "bmm", "div", "exp", "mul", "sgn")
BOTH_WAYS = {name: SAMPLES[name] for name in MEANS} | {f"complex {name}": OWN[name] for name in OF_COMPLEX}
"""Rules that take the mean of both ends, or of both orders."""


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
    agree(reading.jvp, end.outputs - start.outputs, 100 * torch.finfo(torch.float32).eps, scale)


def test_a_rule_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tangent is then computed example by example, with a warning."""
    problem = problem_of(SAMPLES["tanh"])
    monkeypatch.setitem(RULES, "tanh", lambda call: call.delta(call.args[0]) @ torch.ones(7))
    with refused(r"the difference rule of aten\.tanh\.default fails here: .*7", kind=NoRule):
        problem.secant(0.3)
    with pytest.warns(UserWarning, match=r"aten\.tanh.*example by example"):
        found = tangent_kernel(problem.module, problem.x)
    agree(found, oracle.tangent(problem.module, problem.x, problem.x), 100 * EPS)


def along(function: Callable[..., Tensor], start: Weights, end: Weights) -> tuple[Reading, Tape, Tape]:
    """Return the secant of a formula of these weights, and the tapes at its ends."""
    module = Formula(function, **{name: tuple(weight.shape) for name, weight in start.items()}).double()
    reader = Reader(function_of(module), frozenset(start))
    before, after = (reader.record(weights, sampled("add").x) for weights in (start, end))
    return reader.secant(before, after), before, after


@pytest.mark.parametrize(
    "function",
    [lambda x, w, v: torch.where(x @ w > v, x @ w, 1.5), lambda x, w, v: torch.where(v > 0, v * 1.0, x @ w)],
    ids=["a threshold", "a mask of weights"],
)
def test_a_weight_that_only_a_comparison_uses_is_refused(function: Callable[..., Tensor]) -> None:
    """It reaches the outputs where the comparison changes, and nowhere at a point."""
    start = {"w": torch.full((4, 6), 0.1).double(), "v": torch.full((6,), 0.1).double()}
    with refused("only through a comparison", kind=NoRule):
        along(function, start, {name: -9.0 * weight for name, weight in start.items()})


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
    """The network is cut there, and the difference of the weight is one of its uses."""
    given = sampled("add").start
    start, end = {"w": given["w"], "v": given["v"][0]}, {"w": 1.3 * given["w"], "v": -given["v"][0]}
    reading, before, after = along(lambda x, w, v: WEIGHTS_FIRST[name](x @ w, v), start, end)
    assert_closed(reading, before, after)


ACROSS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float], float]] = {
    # the arguments of an operation decide the place of its break, which changes the outputs by 1e-4 and more
    "softplus": (lambda h: functional.softplus(1 / 3 + h, 3.0, threshold=1.0), (-1e-3, 1e-3), 1e-12),
    "logit": (lambda h: torch.logit(0.1 + h, eps=0.1), (-1e-3, 1e-3), 1e-12),
    "logit, above": (lambda h: torch.logit(0.9 + h, eps=0.1), (-1e-3, 1e-3), 1e-12),
    # torch's own derivative takes 1/α in single precision, and no step closes for most α
    "celu": (lambda h: functional.celu(h, 0.7), (1.0, 1.0 + 1e-4), 100 * EPS),
}


@pytest.mark.parametrize("name", ACROSS)
def test_a_short_step_across_a_break_closes(name: str) -> None:
    function, sizes, tolerance = ACROSS[name]
    start, end = ({"w": size * sampled("add").direction["w"]} for size in sizes)
    reading, before, after = along(lambda x, w: function(x @ w), start, end)
    agree(reading.jvp, after.outputs - before.outputs, tolerance, after.outputs.abs().max())


@pytest.mark.parametrize("base", [0.0, -2.0, 0.5, 3.0])
def test_powers_of_any_base_close(base: float) -> None:
    """At whole exponents a negative base has a power as well."""
    z0, z1 = torch.cartesian_prod(*(torch.arange(1.0, 6.0, dtype=torch.float64),) * 2).unbind(1)
    b = torch.full_like(z0, base)
    agree(exponential(b, z0, z1) * (z1 - z0), b**z1 - b**z0, 100 * EPS)


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
def test_operations_without_a_rule_are_refused(operation: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Rounding and choices hide behind names that have rules, or give no numbers."""
    problem = sampled("add")
    end = {name: weight + problem.direction[name] for name, weight in problem.start.items()}
    with refused():
        along(lambda x, w, v: operation(x @ w, x @ v) * (x @ w), problem.start, end)
