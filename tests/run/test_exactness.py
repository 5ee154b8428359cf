"""The claim, in one table: what examples contribute by secants adds up to what training did, to rounding.

f_T(x) − f_0(x) = Σ_s J̄_s(x) Δθ_s = Σᵢ 𝒮(x, xᵢ) + decay, for architectures × losses × optimizers, trained by the runner
or by a loop that is followed. The error is at most 1e-12 of the change, or the floor, which is 100 eps (‖f_0‖ + ‖f_T‖);
where parts cancel, their sum loses as many digits as they do: 10 eps Σ|𝒮|.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import ntkexp
from ntkexp.experiment.problem import draw_problem
from ntkexp.kernel.secant.call import Call
from ntkexp.kernel.secant.rules import RULES
from ntkexp.records.results import Result
from tests.config.components import OWN as OWN_MODEL
from tests.config.components import SCALAR, asked_for, networks
from tests.run.cells import LOSSES, NETWORKS, OPTIMIZERS, OWN, SIZES
from tests.run.small import Ran, ran, small

EPS = torch.finfo(torch.float64).eps
EXACT = 1e-12  # the bound of the project for secants
LADDER = "ladder.machine=[secant]"
SPLITS = ("train", "query", "test")
Words: TypeAlias = tuple[str, ...]


def exact(row: Result) -> bool:
    """The definition, written out once more: the error is no more than rounding explains, or than 1e-12."""
    assert row.relative_error is not None
    assert row.floor is not None
    return row.relative_error <= max(EXACT, row.floor)


def assert_exact(run: Ran, splits: tuple[str, ...] = SPLITS, cancellation: float = 0.0) -> None:
    """The sum is exact on every split, but for the digits that parts lose as they cancel."""
    rows = {row.split: row for row in run.rows("secant")}
    assert rows.keys() == set(SPLITS)
    for split in splits:
        row = rows[split]
        known = exact(row) or (row.relative_error or 0.0) < 10 * EPS * cancellation
        assert known, f"{split}: {row.relative_error:.1e} with a floor of {row.floor:.1e}, {cancellation:.1e}-fold"


def thinned(cases: Mapping[str, Words], fast: int) -> list[ParameterSet]:
    """These cases, of which so many are fast, evenly spaced."""
    slow = [k * fast // len(cases) == (k - 1) * fast // len(cases) for k in range(len(cases))]
    return [
        pytest.param(words, id=name, marks=[pytest.mark.slow] * late)
        for (name, words), late in zip(cases.items(), slow, strict=True)
    ]


def cell(network: str, loss: str, optimizer: str) -> Words:
    """A cell of the guide's table."""
    return (*SIZES, *NETWORKS[network], f"loss={loss}", *OPTIMIZERS[optimizer], "path.rule=[secant]")


PAIRS = [  # every network with every optimizer, and every loss with each of both
    (network, LOSSES[(row + column + column // len(LOSSES)) % len(LOSSES)], optimizer)
    for (row, network), (column, optimizer) in product(enumerate(NETWORKS), enumerate(OPTIMIZERS))
]
DIAGONAL = [PAIRS[k] for k in (*range(0, 36, 7), 36)]  # each network, each optimizer and each loss
OTHERS = [names for names in PAIRS if names not in DIAGONAL]
CELLS = [
    *thinned({", ".join(names): cell(*names) for names in DIAGONAL}, 3),
    *thinned({", ".join(names): cell(*names) for names in OTHERS}, 0),
]


@pytest.mark.parametrize("words", CELLS)
def test_every_network_under_every_loss_and_optimizer(words: Words) -> None:
    run = ran(*words, LADDER, trust=[str(OWN)])
    assert_exact(run, cancellation=run.outcome.evidence.path.facts["cancellation"])


def test_a_gradient_that_cancels_is_no_examples() -> None:
    """The slopes of a hinge are ±1: in a balanced batch the last bias has no gradient, and Adam divides by ε alone.

    If examples had parts in this movement, they would cancel 1e6 : 1.
    """
    balanced = ("optimizer.batch=4", "seed=1", "data.seed=0")  # some batches hold as many of one class as of the other
    run = ran(*cell("LSTM", "hinge", "AdamW, decay, clipping"), *balanced, LADDER, trust=[str(OWN)])
    cancellation = run.outcome.evidence.path.facts["cancellation"]
    assert cancellation < 1e3
    assert_exact(run, cancellation=cancellation)


Maker: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
FOLLOWED: dict[str, tuple[Maker, int]] = {  # what a user writes for each of these optimizers, and for its batches
    "GD": (lambda weights: SGD(weights, lr=0.1), 6),
    "SGD": (lambda weights: SGD(weights, lr=0.1), 4),
    "momentum": (lambda weights: SGD(weights, lr=0.1, momentum=0.9), 4),
    "Nesterov": (lambda weights: SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), 6),
    "Adam": (lambda weights: Adam(weights, lr=0.01), 6),
    "AdamW, decay, clipping": (lambda weights: AdamW(weights, lr=0.01, weight_decay=0.1), 5),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("network", "loss", "optimizer"), DIAGONAL, ids=str)
def test_a_loop_of_plain_torch_that_is_followed_is_as_exact(network: str, loss: str, optimizer: str) -> None:
    experiment = small(*cell(network, loss, optimizer), trust=[str(OWN)])
    problem, (make, batch) = draw_problem(experiment), FOLLOWED[optimizer]
    module, x, y = problem.module, problem.inputs, problem.targets
    steps = make(module.parameters())
    with torch.no_grad():
        start = module(x)
    with ntkexp.follow(module, steps, queries=x) as trace:
        for step in range(3):
            rows = (torch.arange(batch) + 2 * step) % problem.train
            steps.zero_grad()
            torch.autograd.backward(experiment.loss.value(module(x[rows]), y[rows]).mean())
            if "clipping" in optimizer:
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            steps.step()
    with torch.no_grad():
        end = module(x)
    found = trace.attribute()
    parts = torch.from_numpy(found["contribution"].to_numpy())
    missed = parts.sum(2) + torch.from_numpy(found["decay"].to_numpy()) - (end - start)
    rounding = max(
        EXACT * size(end - start), 100 * EPS * (size(start) + size(end)), 10 * EPS * size(parts.abs().sum(2))
    )
    assert size(end - start) > 0
    assert size(missed) <= rounding


def size(x: Tensor) -> float:
    return float(x.norm())


FEW = ("data.train=4", "data.query=2", "data.test=2")
SHORT = (*FEW, "model.width=16", "steps=2")
ARCHITECTURES = {name: (*asked_for("model", name), *SHORT) for name in networks()}
TOKENS = {
    "sums": ("data=modular_addition", "data.modulus=3", *FEW, "steps=3"),
    "text": ("data=text", "data.path={text}", "data.context=4", *FEW, "steps=3"),
}
LEARNERS = {
    "transformer": (*asked_for("model", "transformer"), "model.width=8", "model.causal=true"),
    "tied": ("model=transformer", "model.width=8", "model.tied=true", "loss=cross_entropy"),
    "one hot": ("model=mlp", "model.width=8", "data.encoding=one_hot"),
}
IN_32 = ("dtype=float32", "data.train=8", "data.query=4", "data.test=4", "model.width=8")
SINGLE_PRECISION = {
    "float32, CNN": (*IN_32, "model=cnn"),
    "float32, transformer": (*IN_32, "model=transformer", "optimizer=momentum"),
    "float32, Adam": (*IN_32, "optimizer=adam", "model.activation=tanh"),
    "float32, SGD": (
        *IN_32,
        "optimizer=sgd",
        "optimizer.batch=8",
        "optimizer.weight_decay=0.01",
        "loss=cross_entropy",
    ),
}
OTHER_SETTINGS = [
    *thinned({f"{name}, standard": (*words, "init=standard") for name, words in ARCHITECTURES.items()}, 2),
    *thinned({f"{name}, ntk": (*words, "init=ntk", "model.width=8") for name, words in ARCHITECTURES.items()}, 0),
    *thinned({f"{data}, {model}": (*TOKENS[data], *LEARNERS[model]) for data, model in product(TOKENS, LEARNERS)}, 1),
    *thinned(SINGLE_PRECISION, 1),
]


@pytest.mark.parametrize("words", OTHER_SETTINGS)
def test_every_architecture_source_and_precision(words: Words, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"the quick br" * 9 + b"rb kciuq eht" * 5)
    chosen = [word.replace("{text}", str(text)) for word in words]
    assert_exact(ran(*chosen, LADDER, trust=[str(OWN_MODEL)]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(SCALAR))
def test_every_function_of_a_number(name: str) -> None:
    """A table, which has an entry for each number, learns the one that it is given and stays elsewhere."""
    integers = ("data=integers", "data.train=1", "data.query=0", "data.test=30", "optimizer.step_size=0.002", "steps=3")
    rows = {row.split: row for row in ran(*integers, f"model={name}", LADDER).rows("secant")}
    assert exact(rows["train"])
    assert name == "lookup_table" or exact(rows["test"])


ACTIVATIONS = ("relu", "leaky_relu", "tanh", "gelu")
SETTINGS = tuple(product((("optimizer=gd",), ("optimizer=sgd", "optimizer.batch=8")), ("[3,8]", "all")))
SQUARE = {  # a Latin square: every activation, loss and setting meets every other one once
    f"{activation}, {loss}": (f"model.activation={activation}", f"loss={loss}", *optimizer, f"data.classes={classes}")
    for (row, activation), (column, loss) in product(enumerate(ACTIVATIONS), enumerate(LOSSES))
    for optimizer, classes in [SETTINGS[(row + column) % len(SETTINGS)]]
}
VISIBLE = 1e-6  # far above rounding; the textbook sum is wrong by a few per cent at such step sizes


@pytest.mark.parametrize("words", thinned(SQUARE, 4))
def test_the_secant_sum_is_the_network_and_the_textbook_sum_is_not(words: Words) -> None:
    run = ran("steps=6", *words, "ladder.machine=[secant,left]")
    assert_exact(run)
    for row in run.rows("left"):
        assert row.relative_error is not None
        assert row.relative_error > VISIBLE


@pytest.mark.slow
def test_the_error_of_a_long_sum_is_that_of_its_steps() -> None:
    """Steps err by eps of the outputs each, at random: as the root of their number. Sums in float32 err by more."""
    steps = 400
    for row in ran(f"steps={steps}", "dtype=float32", LADDER).rows("secant"):
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.relative_error <= row.floor / 100 * steps**0.5


# The error follows the floor, whatever makes the network's change small: an exact machine cannot beat rounding.

SLACK = 1e4  # the floor is 100 eps times norms; twenty errors of about eps, many of them cancelling, lie well below


def largest_floor(run: Ran) -> float:
    """Errors are no larger than the floor, and that is no larger than it must be."""
    floors = [0.0]
    for row in run.rows("secant"):
        assert exact(row)
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.floor <= EXACT or row.relative_error >= row.floor / SLACK
        floors.append(row.floor)
    return max(floors)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("step_size", "activation"),
    [("1e-9", "relu"), ("1e-7", "tanh"), ("1e-5", "relu"), ("1e-3", "tanh"), ("1e-1", "relu")],
)
def test_the_error_follows_the_floor_at_every_step_size(step_size: str, activation: str) -> None:
    run = ran(f"optimizer.step_size={step_size}", f"model.activation={activation}", LADDER)
    # the network moves in proportion to so small a step size; 1e-13 is what the floor is where it moves by its own size
    assert largest_floor(run) > 1e-15 / float(step_size)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_error_follows_the_floor_at_the_largest_stable_step(activation: str) -> None:
    largest_floor(ran("optimizer.stable_fraction=1", f"model.activation={activation}", LADDER))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("reading", "alpha", "activation"),
    [
        ("init.alpha=1", "1", "relu"),
        ("init.alpha=1", "1e6", "tanh"),
        ("init.centred=true", "1", "tanh"),
        ("init.centred=true", "1e2", "relu"),
        ("init.centred=true", "1e6", "tanh"),
        ("init.antisymmetric=true", "1", "relu"),
        ("init.antisymmetric=true", "1e4", "tanh"),
    ],
)
def test_the_error_follows_the_floor_at_every_output_scale(reading: str, alpha: str, activation: str) -> None:
    run = ran(reading, f"init.alpha={alpha}", f"model.activation={activation}", LADDER)
    # a difference of large terms knows itself worse as they grow; a plain output grows with its rounding
    lazy = reading != "init.alpha=1"
    assert (largest_floor(run) > EXACT) == (lazy and float(alpha) >= 100)


# The closure check runs at every step, and says where a rule is wrong, however little.

QUICK = ("model.activation=tanh", "steps=4", "path.rule=[secant]", LADDER)


@pytest.mark.sample(3)
@pytest.mark.parametrize(  # all pairs
    ("reading", "optimizer", "fraction"),
    [
        ("init.antisymmetric=true", "optimizer=gd", "1e-8"),
        ("init.antisymmetric=true", "optimizer=nesterov", "0.1"),
        ("init.centred=true", "optimizer=gd", "0.1"),
        ("init.centred=true", "optimizer=nesterov", "1e-8"),
        ("init.alpha=1e6", "optimizer=gd", "1e-8"),
        ("init.alpha=1e6", "optimizer=nesterov", "0.1"),
    ],
)
def test_rounding_is_never_taken_for_a_mistake(reading: str, optimizer: str, fraction: str) -> None:
    run = ran(*QUICK, optimizer, reading, f"optimizer.stable_fraction={fraction}")
    assert run.outcome.sentence == "trained for 4 steps"


@pytest.mark.parametrize("optimizer", ["optimizer=gd", "optimizer=nesterov"])
def test_a_rule_that_is_wrong_by_a_billionth_is_found(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["tanh"]

    def wrong(call: Call) -> Tensor:
        found = right(call)
        assert isinstance(found, Tensor)
        return found * (1 + 1e-9)

    monkeypatch.setitem(RULES, "tanh", wrong)
    assert "the secant misses 4 steps, most of all step" in ran(*QUICK, optimizer).outcome.sentence
