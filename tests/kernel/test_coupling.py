"""Modules whose examples depend on each other have no kernel between examples, and are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel import ProgramCache
from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.record.independence import Trial
from ntkexp.kernel.record.taping import record
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.ownership import BLOCK_ELEMENTS, owner, owner_of_rows, owners
from ntkexp.library import finite_step_kernel, reader_of, secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel import oracle
from tests.kernel.networks import Formula, drawn, drawn_formula, scaled
from tests.kernel.oracle import EPS, agree, applied, normal, refused
from tests.kernel.problems import KINDS, known


def normalised(h: Tensor) -> Tensor:
    """Batch statistics by hand."""
    h = h - h.mean(0)
    return h / (h.square().mean(0) + 1e-5) ** 0.5


COUPLING: dict[str, Callable[..., Tensor]] = {
    "centred inputs": lambda x, w, v: torch.tanh((x - x.mean(0)) @ w) @ v,
    "shuffled inputs": lambda x, w, v: torch.tanh(x.flip(0) @ w) @ v,
    "running sum of inputs": lambda x, w, v: torch.tanh(x.cumsum(0) @ w) @ v,
    "centred units": lambda x, w, v: torch.tanh(x @ w - (x @ w).mean(0)) @ v,
    "batch statistics": lambda x, w, v: torch.tanh(normalised(x @ w)) @ v,
    "softmax over examples": lambda x, w, v: torch.softmax(x @ w, 0) @ v,
    "the next example": lambda x, w, v: torch.tanh(x @ w) @ v + (x @ w @ v).roll(1, 0),
    "attention among examples": lambda x, w, v: ((x @ w) @ (x @ w).t()) @ torch.tanh(x @ w) @ v,
    "dead units, centred": lambda x, w, v: torch.relu(x @ w - (x @ w).mean(0) - 1e3) @ v,
}


def chosen_by_any(x: Tensor) -> Tensor:
    """All examples are doubled if one of them is long, as four of these five are."""
    return x * (2.0 if bool((x.norm(dim=1) > 1.4).any()) else 1.0)


def apart_from_near_ones(x: Tensor) -> Tensor:
    """Examples that are nearly equal are kept apart. There are none here."""
    near = (torch.cdist(x, x) < 1e-3).sum(1, keepdim=True)
    return x * near


HIDDEN: dict[str, Callable[..., Tensor]] = {
    "sorted": lambda x, w, v: torch.tanh(x[x[:, 0].argsort()] @ w) @ v,
    "the last two": lambda x, w, v: torch.tanh(torch.cat([x[:-2], x[-2:].flip(0)]) @ w) @ v,
    "pairs": lambda x, w, v: torch.tanh((x + 0.1 * x[[0, 2, 1, 4, 3]] if len(x) == 5 else 1.1 * x) @ w) @ v,
    "a norm beyond a bound": lambda x, w, v: torch.tanh(torch.where(x.norm() > 100, x.flip(0), x) @ w) @ v,
    "a norm beyond a soft bound": lambda x, w, v: torch.tanh((x + torch.relu(x.norm() - 99) * x.roll(1, 0)) @ w) @ v,
    "if any is long": lambda x, w, v: torch.tanh(chosen_by_any(x) @ w) @ v,
    "near ones": lambda x, w, v: torch.tanh(apart_from_near_ones(x) @ w) @ v,
}
"""Couplings that a run without the first example does not show."""


def coupled(name: str) -> tuple[nn.Module, Tensor]:
    """Return a module that couples, with random weights and inputs."""
    return drawn_formula((COUPLING | HIDDEN)[name], w=(3, 4), v=(4, 2)), normal(5, 3, seed=1)


def step_to(module: nn.Module, x: Tensor) -> Tensor:
    """A secant kernel along a step of a tenth of the weights."""
    return secant_kernel(module, {}, scaled(module, 1.1), x, x)


@pytest.mark.parametrize("name", [*COUPLING, *HIDDEN])
def test_coupling_is_found(name: str) -> None:
    made, x = coupled(name)
    kernels: list[Callable[[nn.Module, Tensor], object]] = [tangent_kernel]
    if name in COUPLING and name != "softmax over examples":
        kernels.append(step_to)
    if name in ("batch statistics", "the last two", "if any is long"):
        kernels.append(lambda made, x: finite_step_kernel(made, x, x[:1], 0.1))
    for kernel in kernels:
        with refused("couples the examples"):
            kernel(made, x)


def test_a_sorted_batch_is_refused_if_its_first_example_stays_first_or_its_readout_is_zero() -> None:
    made, x = coupled("sorted")
    least = int(x[:, 0].argmin())
    with refused("couples the examples"):
        tangent_kernel(made, torch.cat([x[least:], x[:least]]))
    made, x = coupled("sorted")
    with torch.no_grad():
        made.get_parameter("v").zero_()
    with refused("couples the examples"):
        tangent_kernel(made, x)


def test_coupling_is_found_on_a_later_batch_that_inputs_route() -> None:
    """Each example runs alone whenever inputs choose what Python does, since two may do the same to the others."""
    made = drawn_formula(
        lambda t, w, v: torch.tanh(w[7 - t if bool((t > 5).any()) else t].sum(1)) @ v, w=(8, 4), v=(4, 2)
    )
    tangent_kernel(made, torch.tensor([[1, 2], [3, 4], [5, 0]]))
    with refused("couples the examples"):
        tangent_kernel(made, torch.tensor([[6, 2], [3, 1], [1, 7]]))


# Couplings of rows h with a strength s, at random places of random networks.
RANDOM: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sorted": lambda h, s: h[h[:, 0].argsort()],
    "sorted but for two": lambda h, s: torch.cat([h[:2], h[2:][h[2:, 0].argsort()]]),
    "two exchanged": lambda h, s: torch.cat([h[:1], h[1:3].flip(0), h[3:]]),
    "turned round by its sum": lambda h, s: h.flip(0) if float(h.sum()) > 0 else h,
    "another": lambda h, s: h + s * h.roll(1, 0),
    "the first": lambda h, s: h + s * h[:1],
    "the one before the last": lambda h, s: torch.cat([h[:-1], h[-1:] + s * h[-2:-1]]),
    "the nearest": lambda h, s: h + s * h[torch.cdist(h, h).fill_diagonal_(torch.inf).argmin(1)],
    "columns as rows": lambda h, s: h.t().reshape(h.shape),
    "mean": lambda h, s: h - s * h.mean(0),
    "mean of two": lambda h, s: torch.cat([h[:-2], h[-2:] - s * h[-2:].mean(0, keepdim=True)]),
    "mean, detached": lambda h, s: h - s * h.detach().mean(0),
    "below the mean": lambda h, s: torch.where(h > h.mean(), h, 0 * h),
    "median": lambda h, s: h - s * h.median(0).values,
    "deviation": lambda h, s: h / (s + h.std(0, correction=0)),
    "length": lambda h, s: h / h.norm(),
    "largest": lambda h, s: h / (1 + s * h.abs().max()),
    "largest, detached": lambda h, s: h / (1 + s * h.abs().max().detach()),
    "largest of each": lambda h, s: h + s * h.topk(1, 0).values,
    "where it is largest": lambda h, s: (
        h * torch.where(torch.arange(len(h))[:, None] == h[:, :1].argmax(0), 1 + s, 1.0)
    ),
    "running sum": lambda h, s: h + s * h.cumsum(0),
    "running maximum": lambda h, s: h + s * h.cummax(0).values,
    "softmax": lambda h, s: h * torch.softmax(h, 0),
    "attention": lambda h, s: h + s * torch.softmax(h @ h.t(), 1) @ h,
    "rank": lambda h, s: h + s * h[:, :1].argsort(0).argsort(0),
    "place": lambda h, s: h * (1 + s * torch.arange(len(h))[:, None]),
    "number": lambda h, s: h * (1 + s * len(h)),
    "number of values": lambda h, s: h * (1 + s * len(torch.unique((2 * h[:, 0]).round()))),
    "if any is large": lambda h, s: h * (1 + s * bool((h > 1).any())),
    "none": lambda h, s: torch.softmax(h.sort(1).values, 1),
}


@pytest.mark.filterwarnings("ignore:the module casts")  # numbers in float32 that come from comparisons
@pytest.mark.sample(30)
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for seed in range(4) for name in RANDOM])
def test_a_kernel_is_that_of_examples_alone_or_refused(name: str, seed: int) -> None:
    """If coupling does not show at the weights and inputs drawn, the kernel is right, or refused.

    Weak coupling is not taken for rounding, also in single precision.
    """
    chance, dtype = torch.Generator().manual_seed(seed), (torch.float64, torch.float32)[seed % 2]
    rows, depth, place = (int(torch.randint(*ends, (), generator=chance)) for ends in ((3, 9), (1, 4), (0, 5)))
    strength = 10 ** -float(5 * torch.rand((), generator=chance))

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for k, weight in enumerate(weights):
            x = RANDOM[name](x, strength) if k == place else x
            x = x @ weight if k == depth else torch.tanh(x @ weight)
        return RANDOM[name](x, strength) if place > depth else x

    widths = [3, *[5] * depth, 2]
    made = drawn(Formula(function, **{f"w{k}": (widths[k], widths[k + 1]) for k in range(depth + 1)}), seed=seed).to(
        dtype
    )
    x = torch.randn(rows, 3, generator=chance, dtype=dtype)
    with suppress(Mistake) if name != "none" else nullcontext():
        agree(tangent_kernel(made, x), oracle.tangent(made, x, x), 1000 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", KINDS)
def test_there_is_no_false_alarm(name: str) -> None:
    """No example's outputs change with another's inputs, and every element at a use that matters has an owner."""
    network = known(name)
    given = network.given
    moved = given.x.clone()
    moved[-1] += 1
    change = (given.module(moved) - given.module(given.x)).detach()[:-1].abs().max()
    assert change <= 100 * torch.finfo(torch.float64).eps * given.module(given.x).detach().abs().max()
    found = network.reader.checks.owners(network.tape).of_uses
    assert found
    assert {int(owner) for owned in found for owner in owned.flatten()} - {-1} == set(range(len(given.x)))


@pytest.mark.parametrize(("name", "weight"), [("lstm", "cell.weight_hh_l0"), ("constant state", "u")])
def test_rows_of_a_constant_belong_to_examples(name: str, weight: str) -> None:
    """Their products with weights have factors, and no gradient grows like the square of the examples."""
    network = known(name)
    blocks = network.reader.secant(network.tape, network.tape).jacobian.blocks
    assert any(isinstance(block, Factored) and block.weight and block.weight.name == weight for block in blocks)


def test_rows_of_a_constant_that_all_examples_see_belong_to_none() -> None:
    network = known("constant positions")
    assert not network.reader.checks.owners(network.tape).constants


def test_the_owner_of_an_element_is_the_ratio_of_two_sums() -> None:
    """It is refused if numbers overflow, or if the ratio is not whole. Norms may cancel most digits of an element:

    one that is 1e-7 of the largest may be off by 1e-5 of itself, as in transformers of twelve layers.
    """
    for bad in (torch.inf, torch.nan):
        with refused("numbers overflow", kind=NoRule):
            owner(torch.tensor([1.0, bad, 2.0], dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    below = torch.tensor([1.0, 1e-7], dtype=torch.float64)
    assert owner(3 * below + torch.tensor([0.0, 3e-12]), below).tolist() == [2, 2]
    with refused("couples the examples"):
        owner(3 * below + torch.tensor([0.0, 3e-8]), below)


def test_an_element_of_a_row_that_another_example_reaches_is_found_in_any_block() -> None:
    """A few rows are looked at together. Each has one owner, or is refused, like a ratio that is not whole."""
    below = torch.rand(2 * BLOCK_ELEMENTS // 100, 100, dtype=torch.float64) + 1
    whose = torch.arange(len(below)) % 7
    above = (whose[:, None] + 1) * below
    below[:, 3], above[:, 3] = 0.0, 0.0  # which reaches no output
    assert torch.equal(owner_of_rows(above, below), whose)
    assert torch.equal(owner(above, below)[:, [0, 3]], torch.stack((whose, torch.full_like(whose, -1)), 1))
    for times, kind, words in ((9.0, NoRule, "several examples"), (9.5, Mistake, "couples the examples")):
        spoiled = above.clone()
        spoiled[-1, 5] = times * below[-1, 5]
        with pytest.raises(kind, match=words):
            owner_of_rows(spoiled, below)


INDEPENDENT: dict[str, Callable[[], nn.Module]] = {
    "a mean times zero": lambda: drawn_formula(lambda x, w: torch.tanh((x - 0.0 * x.mean(0)) @ w), w=(3, 2)),
    "a norm of one number": lambda: nn.Sequential(nn.Linear(3, 1), nn.LayerNorm((1,)), nn.Linear(1, 2)).double(),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_examples_that_look_coupled_and_are_not_have_a_kernel(name: str) -> None:
    made, x = INDEPENDENT[name](), normal(5, 3, seed=1)
    agree(tangent_kernel(made, x), oracle.tangent(made, x, x), 100 * EPS)


def wide() -> nn.Module:
    """Ratios of sums of 512 positive terms, five layers deep, stay whole to far less than a half."""
    layers = [part for _ in range(4) for part in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 2))


def deep() -> nn.Module:
    """Coefficients in [1, 2] over 350 layers of 6 units grow to 10³³⁴."""
    layers = [part for _ in range(350) for part in (nn.Linear(6, 6), nn.ReLU())]
    return nn.Sequential(nn.Linear(3, 6), *layers, nn.Linear(6, 2)).double()


@pytest.mark.parametrize(("make", "shape", "dtype"), [(deep, (4, 3), torch.float64), (wide, (64, 512), torch.float32)])
def test_every_row_of_a_large_network_has_its_owner(
    make: Callable[[], nn.Module], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    reader, own = reader_of(make())
    found = owners(reader.record(own, normal(*shape).to(dtype)), reader.trained).of_uses
    assert found
    assert all(torch.equal(row, torch.arange(shape[0])) for row in found)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (0.0, "rounding moves outputs of the module by"),
        (1.0, "couples the examples"),
        (torch.inf, "outputs of the module are not finite, so"),
    ],
)
def test_rounding_in_an_exploding_network_is_no_coupling(other: float, words: str) -> None:
    """If all but a few digits are lost, other implementations give other outputs, and some overflow."""

    def function(weights: dict[str, Tensor], x: Any) -> Tensor:
        return torch.stack([(2.0**36 * x * weights["w"]).sin(), x], 1)

    weights, x = {"w": torch.tensor(1.1, dtype=torch.float64)}, torch.linspace(1, 2, 6, dtype=torch.float64)
    tape = record(function, weights, x)
    apart = function(weights, x * (1 + 8 * EPS)) + torch.tensor([0.0, other])
    with refused(words):
        Trial(function, tape, weights, tape.outputs).refuse_coupling(apart, tape.outputs, x, tape.outputs)


# Modules whose gradients are not the derivatives of their values, and modules that change between calls.


def identity(ctx: Any, *gradients: Tensor) -> Tensor:
    return gradients[0]


class Straight(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    backward = staticmethod(identity)


class Newer(torch.autograd.Function):
    """Straight, in the form that torch.func needs."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(identity)


class Saving(torch.autograd.Function):
    """tanh, which saves its result: its gradient is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        kept: Tensor = gradients[0] * (1 - result * result)
        return kept


def applied_to(function: type[torch.autograd.Function], x: Tensor) -> Tensor:
    """The function, whose call torch leaves without types."""
    result: Tensor = function.apply(x)  # type: ignore[no-untyped-call]  # torch's own
    return result


def under_no_grad(h: Tensor) -> Tensor:
    """Clamped, with the gradient of the identity."""
    h = h * 1
    with torch.no_grad():
        h.clamp_(min=0)
    return h


def into_data(h: Tensor) -> Tensor:
    h = h * 1
    h.data.clamp_(min=0)
    return h


UNFAITHFUL: dict[str, Callable[..., Tensor]] = {
    "a detached branch": lambda x, w, v: torch.tanh(x @ w) @ v + (x @ w).detach() @ v,
    "a detached weight": lambda x, w, v: torch.tanh(torch.tanh(x @ w) @ w.detach().t() @ w) @ v,
    "a detached gain": lambda x, w, v: torch.tanh(x @ w * w.detach()[0]) @ v,
    "a straight-through sign": lambda x, w, v: (torch.tanh(x @ w) + (x @ w).sign().detach() - (x @ w).detach()) @ v,
    "an autograd.Function": lambda x, w, v: applied_to(Straight, x @ w) @ v,
    "a newer autograd.Function": lambda x, w, v: applied_to(Newer, x @ w) @ v,
    "a write under no_grad": lambda x, w, v: under_no_grad(x @ w) @ v,
    "a write into data": lambda x, w, v: into_data(x @ w) @ v,
    "a detached correction": lambda x, w, v: x @ w @ v - (x @ w @ v).detach().tanh(),
}


def module(function: Callable[..., Tensor]) -> tuple[nn.Module, Tensor]:
    """Return a formula with random weights, and inputs."""
    return drawn_formula(function, w=(3, 4), v=(4, 2)), normal(5, 3, seed=1)


@pytest.mark.filterwarnings("ignore:.*example by example")
@pytest.mark.parametrize("name", UNFAITHFUL)
def test_an_unfaithful_module_has_a_tangent_kernel_and_no_secant(name: str) -> None:
    made, x = module(UNFAITHFUL[name])
    agree(tangent_kernel(made, x), oracle.tangent(made, x, x), 100 * EPS)
    with refused("gradients are not the derivatives of its values"):
        step_to(made, x)


@pytest.mark.filterwarnings("ignore:.*example by example")
def test_an_autograd_function_that_differentiates_its_values_is_read() -> None:
    made, x = module(lambda x, w, v: applied_to(Saving, x @ w) @ v)
    reader, own = reader_of(made)
    end = scaled(made, 1.1)
    start, after = reader.record(own, x), reader.record(end, x)
    assert all(isinstance(block, Factored) for block in reader.tangent(start).blocks)
    agree(tangent_kernel(made, x), oracle.tangent(made, x, x), 100 * EPS)
    change = after.outputs - start.outputs
    found = applied(reader.secant(start, after).jacobian, {name: end[name] - own[name] for name in own})
    agree(found, change, 100 * EPS, after.outputs.abs().max())


class Counting(nn.Module):
    """A module that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.layer(x) * self.calls
        return outputs


def noisy() -> nn.Module:
    """Return a module with random numbers that torch does not see."""
    generator = np.random.default_rng(0)
    return drawn_formula(lambda x, w: x @ w + generator.normal(), w=(3, 2))


OTHER_OUTPUTS = "returns other outputs when it runs again"
REFUSED: dict[str, tuple[str, Callable[..., object]]] = {
    "no trained parameter": (
        "depend on no parameter",
        lambda x: tangent_kernel(drawn_formula(lambda x, w: (x @ w).detach(), w=(3, 2)), x),
    ),
    "a root at zero, times zero": (
        "autograd's gradients are nan, from Mul on",
        lambda x: step_to(drawn_formula(lambda x, w: ((x @ w) * 0).sqrt(), w=(3, 2)), x),
    ),
    "a hidden row": (
        r"outputs of the module are nan, from aten\._softmax\.default on",
        lambda x: step_to(
            drawn_formula(lambda x, w: torch.softmax((x @ w).masked_fill(torch.tensor(True), -torch.inf), 1), w=(3, 2)),
            x,
        ),
    ),
    "a count of calls": (OTHER_OUTPUTS, lambda x: tangent_kernel(drawn(Counting()), x)),
    "noise": (OTHER_OUTPUTS, lambda x: tangent_kernel(noisy(), x)),
}


@pytest.mark.filterwarnings("ignore:.*example by example")
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_without_a_function_that_weights_train_is_refused(name: str) -> None:
    words, kernel = REFUSED[name]
    with refused(words):
        kernel(normal(5, 3, seed=1))


class WithUnusedNumbers(nn.Module):
    """A module that computes numbers on which its outputs do not depend. A compiled program omits them."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x.square()
        result: Tensor = self.body(x)
        return result


@pytest.mark.filterwarnings("ignore:.*example by example")
@pytest.mark.parametrize("compiled", [False, True], ids=["recorded", "compiled"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_units_within_rounding_of_a_kink_make_no_module_unfaithful(seed: int, compiled: bool) -> None:
    """In single precision, some of many units lie on the other side of their kink when the module runs again."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    module = WithUnusedNumbers(nn.Sequential(*net, nn.Flatten(), nn.Linear(1024, 1)))
    reader, start = reader_of(module.eval())
    if compiled:
        reader = replace(reader, programs=ProgramCache())
    reader.checks.faithful_owners(reader.record(start, torch.randn(64, 1, 8, 8)))
