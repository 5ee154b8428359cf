"""The parts of every run add up: one table of runs for one law, and the floor of its error.

f_T(x) − f_0(x) = Σᵢ 𝒮(x, xᵢ) + 𝒟(x), split over examples, steps, components and phases, for outputs and measures.
A sum may differ from its parts by rounding only: 100 eps of the outputs, and 10 eps Σ|c| where parts c cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle, product
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import ntkexp
from ntkexp.experiment.problem import draw_problem
from ntkexp.path.points import NetworkView
from ntkexp.path.rule.base import AbstractRule, Substep
from ntkexp.records.results import Result
from ntkexp.run.loop import run
from ntkexp.run.setting import prepare
from tests.config.components import OWN as OWN_MODEL, SCALAR, asked_for, networks
from tests.run.cells import LOSSES, NETWORKS, OPTIMIZERS, OWN, SIZES
from tests.run.small import Memory, Ran, ran, small

EPS = torch.finfo(torch.float64).eps
EXACT = 1e-12  # the bound of the project for secants
VISIBLE = 1e-6  # far above rounding; left ends are wrong by some per cent at these step sizes
SPLITS = ("train", "query", "test")
LADDER = "ladder.machine=[secant]"
Words: TypeAlias = tuple[str, ...]


def exact(row: Result) -> bool:
    """Return whether the error is at most the floor, or 1e-12: the definition, written out once more."""
    assert row.relative_error is not None
    assert row.floor is not None
    return row.relative_error <= max(EXACT, row.floor)


def assert_exact(run: Ran, splits: tuple[str, ...] = SPLITS, cancellation: float = 0.0) -> None:
    """Assert that the secant sum is exact on every split, except for the digits that cancelling parts lose."""
    rows = {row.split: row for row in run.rows("secant")}
    assert rows.keys() >= set(splits)
    for split in splits:
        row = rows[split]
        known = exact(row) or (row.relative_error or 0.0) < 10 * EPS * cancellation
        assert known, f"{split}: {row.relative_error:.1e} with a floor of {row.floor:.1e}, {cancellation:.1e}-fold"


class Sum(NamedTuple):
    """A sum [point, out, …] and its parts, on the last axis."""

    name: str
    whole: Tensor
    parts: Tensor


def splits_of(run: Ran, rule: str) -> Iterator[Sum]:
    """Yield the sums by one rule: over steps and, if the run separates them, over components and phases."""
    outcome, path, steps = run.outcome, run.outcome.matrices.paths[rule], run.by_step(rule)
    examples = torch.cat([path.contributions, path.without_examples[..., None]], dim=2)
    yield Sum("steps", steps.sum(2), examples)
    if rule in outcome.by_component and outcome.by_component[rule] is not None:
        sums = outcome.by_component[rule]
        assert sums.parts.nan_to_num().any()
        yield Sum("components", path.contributions, sums.parts)
        yield Sum("decay of components", path.decay, sums.decay)
        yield Sum("steps of components", steps, sums.totals.stacked().movedim(0, 2))
    if outcome.phases is not None:
        shares = outcome.phases.shares[rule]
        parts = [torch.from_numpy(share.contributions[:]) for share in shares]
        yield Sum("phases", path.contributions, torch.stack(parts, dim=-1))
        yield Sum("decay of phases", path.without_examples, torch.stack([share.decay for share in shares], dim=-1))


def changes_of(run: Ran, rule: str) -> Iterator[Sum]:
    """Yield the recorded changes and their parts by a rule that closes: of the run, its steps and its phases."""
    outcome, evidence, domain = run.outcome, run.outcome.matrices, run.setting.domain
    path, kept = evidence.paths[rule], domain.rows

    def explained(outputs: Tensor) -> Tensor:
        return evidence.explained(outputs)[domain.summed_points][kept][:, list(domain.integrated)]

    parts = torch.cat([path.contributions, path.without_examples[..., None]], dim=2)
    yield Sum("the run", explained(evidence.end) - explained(evidence.start), parts[kept])
    if not run.setting.experiment.optimizer.needs_backward_sum:
        views = (NetworkView(run.setting.points, w) for w in (run.setting.problem.weights, *run.memory.weights))
        changes = torch.stack([explained(view.outputs) for view in views], dim=2).diff(dim=2)
        yield Sum("each step", changes, run.by_step(rule)[kept][..., None])
    if outcome.phases is not None:
        for number, share in enumerate(outcome.phases.shares[rule]):
            moved = outcome.phases.change[number][domain.summed_points][kept]
            assert moved.norm() > 0.1
            parts = torch.cat([torch.from_numpy(share.contributions[:]), share.decay[..., None]], dim=2)
            yield Sum(f"phase {number}", moved, parts[kept])


def assert_sums(parts: Tensor, whole: Tensor, eps: float, name: str) -> None:
    """Assert that parts sum to the whole at each point and output, to rounding of Σ|c|."""
    missed, mass = (whole - parts.sum(-1)).nan_to_num().abs(), parts.nan_to_num().abs().sum(-1)
    together = range(2, missed.dim())
    for axis in reversed(together):
        missed, mass = missed.sum(axis), mass.sum(axis)
    assert (missed <= 100 * eps * mass).all(), (name, float((missed - 100 * eps * mass).max()))


def assert_adds_up(run: Ran) -> None:
    """Assert that each sum of a run is the sum of its parts, and that the secant sums are the recorded changes."""
    evidence = run.outcome.matrices
    eps = torch.finfo(evidence.end.dtype).eps
    for rule in evidence.paths:
        for name, whole, parts in splits_of(run, rule):
            assert torch.equal(whole.isnan(), parts.isnan().any(-1)), name
            assert_sums(parts, whole, eps, f"{name} by {rule}")
    size = float(evidence.explained(evidence.start).norm() + evidence.explained(evidence.end).norm())
    for name, change, parts in changes_of(run, "secant"):
        missed, mass = float((parts.sum(-1) - change).norm()), float(parts.abs().sum(-1).norm())
        assert missed <= 100 * eps * size + 10 * eps * mass, (name, missed, size, mass)
    moving = tuple(row.split for row in run.rows("secant") if row.floor is not None)
    assert moving
    assert_exact(run, moving, evidence.path.facts["cancellation"])
    assert "misses" not in run.outcome.sentence
    for row in (row for row in run.outcome.results if row.machine == "left"):
        assert row.relative_error is not None
        assert row.relative_error > VISIBLE  # the law is no property of every sum


def cell(network: str, loss: str, optimizer: str) -> Words:
    """Return a cell of the guide's table."""
    return (*SIZES, *NETWORKS[network], f"loss={loss}", *OPTIMIZERS[optimizer], "path.rule=[secant]")


PAIRS = [  # every network with every optimizer, and every loss with each of both
    (network, LOSSES[(row + column + column // len(LOSSES)) % len(LOSSES)], optimizer)
    for (row, network), (column, optimizer) in product(enumerate(NETWORKS), enumerate(OPTIMIZERS))
]
DIAGONAL = [PAIRS[k] for k in (*range(0, 36, 7), 36)]  # each network, each optimizer and each loss
FEW = ("data.train=4", "data.query=2", "data.test=2")
ARCHITECTURES = {  # in both parametrizations by turns
    name: (*asked_for("model", name), *FEW, "model.width=16", "steps=2", init)
    for name, init in zip(networks(), cycle(("init=standard", "init=ntk")), strict=False)
}
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
    "CNN": ("model=cnn",),
    "transformer": ("model=transformer", "optimizer=momentum"),
    "Adam": ("optimizer=adam", "model.activation=tanh"),
    "SGD": ("optimizer=sgd", "optimizer.batch=8", "optimizer.weight_decay=0.01", "loss=cross_entropy"),
}
BOTH = ("path.rule=[secant,left]", "ladder.machine=[secant,left]")
SETTINGS = tuple(product((("optimizer=gd",), ("optimizer=sgd", "optimizer.batch=8")), ("[3,8]", "all")))
SQUARE = {  # a Latin square: every activation, loss and setting meets every other one once
    f"{activation}, {loss}": (f"model.activation={activation}", f"loss={loss}", *optimizer, f"data.classes={classes}")
    for (row, activation), (column, loss) in product(
        enumerate(("relu", "leaky_relu", "tanh", "gelu")), enumerate(LOSSES)
    )
    for optimizer, classes in [SETTINGS[(row + column) % len(SETTINGS)]]
}
CUTS = {  # substeps and extrapolations
    f"{n} substeps, {k} extrapolations": (f"path.substeps={n}", f"path.romberg={k}", f"model.activation={activation}")
    for (n, k), activation in zip(
        [(n, k) for n in range(1, 9) for k in range(4) if n % 2**k == 0], cycle(("relu", "tanh")), strict=False
    )
}
SHORT = ("steps=5", "model.width=8", "data.train=10", "data.query=5", "data.test=4")
DECAY, LAYERS = "optimizer.weight_decay=0.3", "optimizer.layers={network.1: 0.25}"
REMEMBERING = {
    "momentum": ("optimizer=momentum", "optimizer.dampening=0.3", DECAY),
    "nesterov": ("optimizer=nesterov", "optimizer.batch=3", DECAY, "path.by=parameter"),
    "rmsprop": ("optimizer=rmsprop", "optimizer.batch=3", DECAY, "optimizer.clip_norm=0.2"),
    "adam": ("optimizer=adam", "optimizer.step_size=0.05", DECAY, "optimizer.clip_norm=0.2", "path.by=module"),
    "amsgrad": ("optimizer=adam", "optimizer.step_size=0.05", "optimizer.amsgrad=true", "optimizer.batch=3"),
    "adamw": ("optimizer=adamw", "optimizer.step_size=0.05", DECAY, "schedule=cosine", "data.classes=all"),
    "layers": ("optimizer=nesterov", LAYERS, DECAY, "optimizer.clip_norm=0.2"),
}
WAYS = {  # to sum a path
    "every step": ("optimizer=gd", DECAY, "path.substeps=2"),
    "without kernels": ("optimizer=sgd", "optimizer.batch=3", DECAY, "path.kernels=none"),
    "with traces": ("optimizer=sgd", LAYERS, "path.kernels=trace"),
    "clipped": ("optimizer=sgd", "optimizer.clip_norm=0.2", "path.queries=[query]"),
    "backwards": ("optimizer=adamw", "optimizer.step_size=0.05", DECAY, "path.attributed=6"),
}
CLASSES = ("data.classes=[0,1,2]", "loss=cross_entropy")
SPLIT_UP = {  # into components or outputs, or as a measure of the outputs
    f"{way}, {more}": (*words, *CLASSES, more)
    for way, words in WAYS.items()
    for more in ("path.by=module", "path.by=parameter", "path.outputs=[2,0]")
}
MEASURES = {  # each measure in two ways to sum a path
    f"{measure}, {way}": (*words, *CLASSES, f"path.measure={measure}", "path.rule=[secant]", LADDER)
    for row, (way, words) in enumerate(WAYS.items())
    for column, measure in enumerate(("margin", "loss", "probability", "log_probability"))
    if way != "with traces" and (row + column) % 2
} | {
    f"{loss}, {classes}": (f"loss={loss}", f"data.classes={classes}", "path.measure=loss", "path.rule=[secant]", LADDER)
    for loss, classes in product(("squared", "hinge", "logistic"), ("[0,1]", "[0,1,2]"))
}
PHASES = {
    f"{name}, {activation}": ("data=sequence", *words, f"model.activation={activation}")
    for (name, words), activation in zip(
        {
            "sgd": ("optimizer=sgd", "optimizer.batch=5", "optimizer.weight_decay=0.01", "path.by=module"),
            "momentum": ("optimizer=momentum", "optimizer.batch=5", "optimizer.step_size=0.05"),
            "gd": (),
            "adam": ("optimizer=adam", "optimizer.weight_decay=0.01"),
            "nesterov": ("optimizer=nesterov", "optimizer.step_size=0.05"),
        }.items(),
        cycle(("relu", "tanh")),
        strict=False,
    )
}


def rows(group: str, cases: Mapping[str, Words], shared: Words, fast: int) -> list[ParameterSet]:
    """Return a group of rows: `fast` of them are fast, evenly spaced, and the others are slow."""
    slow = [k * fast // len(cases) == (k - 1) * fast // len(cases) for k in range(len(cases))]
    return [
        pytest.param((*shared, *words), id=f"{group}: {name}", marks=[pytest.mark.slow] * late)
        for (name, words), late in zip(cases.items(), slow, strict=True)
    ]


TABLE = [
    *rows("cell", {", ".join(names): cell(*names) for names in DIAGONAL}, (LADDER,), 3),
    *rows("cell", {", ".join(names): cell(*names) for names in PAIRS if names not in DIAGONAL}, (LADDER,), 0),
    *rows("architecture", ARCHITECTURES, (LADDER,), 2),
    *rows("tokens", {f"{d}, {m}": (*TOKENS[d], *LEARNERS[m]) for d, m in product(TOKENS, LEARNERS)}, (LADDER,), 1),
    *rows("float32", SINGLE_PRECISION, (LADDER, *IN_32), 1),
    *rows("square", SQUARE, (*BOTH, "steps=6"), 4),
    *rows("cut", CUTS, (*BOTH, "path.queries=[query]", "steps=3", "optimizer.stable_fraction=0.5"), 5),
    *rows("memory", REMEMBERING, (*BOTH, *SHORT, "path.attributed=1000", "steps=9"), 7),
    *rows("way", SPLIT_UP, (*BOTH, *SHORT), 8),
    *rows("measure", MEASURES, SHORT, 5),
    *rows("phases", PHASES, (*BOTH, "model.width=16"), 3),
]


@pytest.mark.parametrize("words", TABLE)
@pytest.mark.sample(24)
def test_parts_add_up(words: Words, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"the quick br" * 9 + b"rb kciuq eht" * 5)
    chosen = [word.replace("{text}", str(text)) for word in words]
    own = [str(path) for path in (OWN, OWN_MODEL) if any(str(path) in word or "own" in word for word in words)]
    assert_adds_up(ran(*chosen, trust=own))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(SCALAR))
def test_every_function_of_a_number(name: str) -> None:
    """A table has an entry for each number. It learns the entry of the training example and stays elsewhere."""
    integers = ("data=integers", "data.train=1", "data.query=0", "data.test=30", "optimizer.step_size=0.002", "steps=3")
    assert_exact(ran(*integers, f"model={name}", LADDER), ("train",) if name == "lookup_table" else ("train", "test"))


FLOW = (
    *("optimizer=flow", "optimizer.step_size=0.2", "optimizer.tolerance=1e-8", "model.activation=tanh"),
    *("path.rule=[gauss]", "path.quadrature_points=3", "path.queries=[query]", "ladder.machine=[gauss]", "steps=6"),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "more",
    [
        ("optimizer.weight_decay=0.05",),
        ("loss=cross_entropy", "data.classes=all", "schedule=cosine"),
        ("data.classes=[3,8]", "path.by=module"),
    ],
    ids=" ".join,
)
def test_a_flow_closes_to_its_accuracy(more: Words) -> None:
    run = ran(*FLOW, *more)
    for name, whole, parts in splits_of(run, "gauss"):
        assert_sums(parts, whole, EPS, name)
    error = {row.split: row.relative_error for row in run.rows("gauss")}["query"]
    assert error is not None
    assert error < 1e-6
    facts = run.outcome.matrices.paths["gauss"].facts
    assert facts["flow_error"] < 1e-6
    assert (facts.get("decay_share", 0.0) > 1e-3) == ("optimizer.weight_decay=0.05" in more)


# A gradient that cancels is no example's: balanced labels leave the last bias nothing but rounding.

BALANCED = (
    *("model.width=8", "steps=12", "loss=cross_entropy", "init.centred=true", "path.rule=[secant]", LADDER),
    *("data=table", "data.target=label", "data.train=12", "data.query=6", "data.test=null", "optimizer.eps=1e-12"),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop"])
def test_parts_stay_as_small_as_the_change_by_training(tmp_path: Path, optimizer: str) -> None:
    """A third of the labels are x. If the bias of x counted in the first step, it would leave parts of 10¹² · 0.01."""
    points = np.random.default_rng(0).normal(size=(24, 2))
    lines = [f"{a},{b},{'xyz'[k % 3]}" for k, (a, b) in enumerate(points)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,label", *lines]) + "\n")
    run = ran(*BALANCED, f"data.path={tmp_path / 'table.csv'}", f"optimizer={optimizer}")
    rounding = run.outcome.matrices.path.rounding
    assert rounding is not None
    assert rounding.any()
    assert run.contributions("secant").abs().max() < 100 * run.change.abs().max()
    assert_exact(run, ("train", "query"))
    steps = next(splits_of(run, "secant"))
    assert_sums(steps.parts, steps.whole, EPS, "steps")


def test_adam_divides_by_epsilon_alone_where_batches_are_balanced() -> None:
    """The slopes of a hinge are ±1. If examples had parts in the movement of the bias, they would cancel 1e6 : 1."""
    balanced = ("optimizer.batch=4", "seed=1", "data.seed=0")  # some batches hold two of each class
    run = ran(*cell("LSTM", "hinge", "AdamW, decay, clipping"), *balanced, LADDER, trust=[str(OWN)])
    assert run.outcome.matrices.path.facts["cancellation"] < 1e3
    assert_adds_up(run)


Maker: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
FOLLOWED: dict[str, tuple[Maker, int]] = {  # the optimizers of the cells in a user's own loop, and the batches
    "GD": (lambda weights: SGD(weights, lr=0.1), 6),
    "SGD": (lambda weights: SGD(weights, lr=0.1), 4),
    "momentum": (lambda weights: SGD(weights, lr=0.1, momentum=0.9), 4),
    "Nesterov": (lambda weights: SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), 6),
    "Adam": (lambda weights: Adam(weights, lr=0.01), 6),
    "AdamW, decay, clipping": (lambda weights: AdamW(weights, lr=0.01, weight_decay=0.1), 5),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("network", "loss", "optimizer"), DIAGONAL, ids=str)
def test_a_followed_loop_of_plain_torch_is_as_exact(network: str, loss: str, optimizer: str) -> None:
    experiment = small(*cell(network, loss, optimizer), trust=[str(OWN)])
    problem, (make, batch) = draw_problem(experiment), FOLLOWED[optimizer]
    module, x, y = problem.module, problem.inputs, problem.targets
    steps, start = make(module.parameters()), module(x).detach()
    with ntkexp.follow(module, steps, queries=x) as trace:
        for step in range(3):
            rows = (torch.arange(batch) + 2 * step) % problem.train
            steps.zero_grad()
            torch.autograd.backward(experiment.loss.value(module(x[rows]), y[rows]).mean())
            if "clipping" in optimizer:
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            steps.step()
    end, found = module(x).detach(), trace.attribute()
    parts, decay = (torch.from_numpy(found[name].to_numpy()) for name in ("contribution", "decay"))
    missed = float((parts.sum(2) + decay - (end - start)).norm())
    change, outputs, mass = (float(each.norm()) for each in (end - start, torch.cat([start, end]), parts.abs().sum(2)))
    assert change > 0
    assert missed <= max(EXACT * change, 100 * EPS * outputs, 10 * EPS * mass)


@pytest.mark.slow
def test_the_error_of_a_long_sum_is_that_of_its_steps() -> None:
    """Steps err by eps of the outputs each, at random: as the root of their number. Sums in float32 err by more."""
    steps = 400
    for row in ran(f"steps={steps}", "dtype=float32", LADDER).rows("secant"):
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.relative_error <= row.floor / 100 * steps**0.5


# The error follows the floor when the network's change is small: an exact machine cannot beat rounding.

SLACK = 1e4  # the floor is 100 eps times norms; twenty errors of about eps, many of them cancelling, lie well below
CENTRED, ANTISYMMETRIC = "init.centred=true", "init.antisymmetric=true"
FLOORS: list[tuple[Words, str, tuple[float, float]]] = [  # settings, activation, and bounds of the largest floor
    # The network moves in proportion to a small step size; the floor is 1e-13 if it moves by its own size.
    *(
        ((f"optimizer.step_size={1e-9}",), "relu", (1e-6, np.inf)),
        (("optimizer.step_size=1e-7",), "tanh", (1e-8, np.inf)),
    ),
    *(
        (("optimizer.step_size=1e-5",), "relu", (1e-10, np.inf)),
        (("optimizer.step_size=1e-3",), "tanh", (EXACT, np.inf)),
    ),
    (("optimizer.step_size=1e-1",), "relu", (1e-14, np.inf)),
    *((("optimizer.stable_fraction=1",), activation, (0.0, np.inf)) for activation in ("relu", "tanh")),
    # A difference of large terms knows itself worse as they grow; a plain output grows with its rounding.
    *((("init.alpha=1",), "relu", (0.0, EXACT)), (("init.alpha=1e6",), "tanh", (0.0, EXACT))),
    *(((CENTRED,), "tanh", (0.0, EXACT)), ((CENTRED, "init.alpha=1e2"), "relu", (EXACT, np.inf))),
    *(((CENTRED, "init.alpha=1e6"), "tanh", (EXACT, np.inf)), ((ANTISYMMETRIC,), "relu", (0.0, EXACT))),
    ((ANTISYMMETRIC, "init.alpha=1e4"), "tanh", (EXACT, np.inf)),
]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("words", "activation", "floors"), FLOORS)
def test_the_error_follows_the_floor(words: Words, activation: str, floors: tuple[float, float]) -> None:
    """Errors are no larger than the floor, and the floor is no larger than it must be."""
    largest = 0.0
    for row in ran(*words, f"model.activation={activation}", LADDER).rows("secant"):
        assert exact(row)
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.floor <= EXACT or row.relative_error >= row.floor / SLACK
        largest = max(largest, row.floor)
    assert floors[0] <= largest <= floors[1]


# The closure check runs at every step. It finds a wrong rule, however small the error, and no rounding.

QUICK = ("model.activation=tanh", "steps=4", "ladder.machine=[]")


@pytest.mark.sample(3)
@pytest.mark.parametrize(  # all pairs
    ("reading", "optimizer", "fraction"),
    [
        (ANTISYMMETRIC, "optimizer=gd", "1e-8"),
        (ANTISYMMETRIC, "optimizer=nesterov", "0.1"),
        (CENTRED, "optimizer=gd", "0.1"),
        (CENTRED, "optimizer=nesterov", "1e-8"),
        ("init.alpha=1e6", "optimizer=gd", "1e-8"),
        ("init.alpha=1e6", "optimizer=nesterov", "0.1"),
    ],
)
def test_rounding_is_never_taken_for_a_mistake(reading: str, optimizer: str, fraction: str) -> None:
    run = ran(*QUICK, "path.rule=[secant]", optimizer, reading, f"optimizer.stable_fraction={fraction}")
    assert run.outcome.sentence == "trained for 4 steps"


class Halves(AbstractRule):
    """A rule of a user's own: the secants of both halves of a step, whose mean closes it up to a relative error."""

    closes: ClassVar[bool] = True
    error: float = 0.0

    def quadrature(self, points: int, substeps: int, romberg: int) -> tuple[Substep, ...]:
        count = 2 * substeps
        return tuple(Substep(k / count, (k + 1) / count, (1 + self.error) / count) for k in range(count))

    def detail(self, points: int, substeps: int, romberg: int) -> str:
        return ""


@pytest.mark.parametrize("optimizer", ["optimizer=gd", "optimizer=nesterov"])
@pytest.mark.parametrize(("error", "told"), [(0.0, "trained for 4 steps"), (1e-9, "misses 4 steps, most of all step")])
def test_a_rule_of_any_name_is_held_to_its_promise(optimizer: str, error: float, told: str) -> None:
    experiment, memory = small(*QUICK, optimizer, "path.error_samples=2", "path.attributed=1000"), Memory()
    path = experiment.path.model_copy(update={"rule": (Halves(error=error),)})
    outcome = run(prepare(experiment.model_copy(update={"path": path})), memory)
    assert told in outcome.sentence
    assert "error_bar" in outcome.matrices.path.facts
    closures = [row["closure"] or 0.0 for row in memory.shares or memory.rows[:-1]]
    assert 0 < max(closures) < 1e-11 if error == 0 else min(closures) > 1e-10
