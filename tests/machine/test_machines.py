"""Evidence made by hand: matrices that no network gave."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import exp, sqrt

import pytest
import torch
from torch import Tensor

from ntkexp.machine.base import (
    AbstractMachine,
    DoesNotApply,
    LimitKernels,
    PathKernel,
    Prediction,
    Repeat,
    Repeated,
    RunMatrices,
    Training,
)
from ntkexp.machine.ladder import Ladder, MachineOutcome, Region, comparison_rows
from ntkexp.machine.machines import (
    NNGP,
    FixedCoefficients,
    FrozenEnd,
    FrozenLimit,
    FrozenStart,
    Gauss,
    KernelRegression,
    Left,
    Linearised,
    RandomIdentity,
    RandomRegression,
    RBFIdentity,
    RBFRegression,
    Secant,
    descent_prediction,
    flow_prediction,
    random_kernel,
)
from ntkexp.records.results import Result
from tests.kernel.oracle import EPS, normal

TRAIN, OTHERS, STEPS, STEP_SIZE = 5, 3, 40, 0.3
POINTS = TRAIN + OTHERS
RTOL, ATOL = 1e-12, 1e-13  # some thousand eps: forty steps, or an eigendecomposition of five


def kernel_of(features: Tensor, outputs: int = 1) -> Tensor:
    """Return ⟨φ(x), φ(x′)⟩ for every output, [query, out, train, out_]."""
    products = features @ features[:TRAIN].t()
    return products[:, None, :, None] * torch.eye(outputs, dtype=torch.float64)[:, None]


def descending(targets: Tensor, sizes: tuple[float, ...]) -> Repeat:
    """Gradient descent on the mean squared loss in steps of these sizes, written out."""

    def repeat(kernel: Tensor, start: Tensor, pull: Tensor) -> Repeated:
        coefficients = torch.zeros_like(start)
        for size in sizes:
            outputs = start + (kernel @ coefficients.flatten()).view_as(start)
            coefficients = coefficients - size / TRAIN * (outputs - targets)
        return Repeated(coefficients, start.new_ones(()))

    return repeat


def evidence(kernel: Tensor) -> RunMatrices:
    """A run whose kernels are all the same, from outputs and to targets drawn at random."""
    outputs, sizes = kernel.shape[1], (STEP_SIZE,) * STEPS
    targets, none = normal(TRAIN, outputs, seed=1), torch.zeros(POINTS, outputs, dtype=torch.float64)
    parts = normal(POINTS, outputs, TRAIN, seed=6)
    training = Training(
        time=sum(sizes),
        weight=1 / TRAIN,
        is_quadratic=True,
        is_plain=True,
        is_flow=False,
        mean_coefficients=normal(TRAIN, outputs, seed=2),
        repeat=descending(targets, sizes),
    )
    return RunMatrices(
        inputs=normal(POINTS, 4, seed=3),
        train=TRAIN,
        start=normal(POINTS, outputs, seed=4),
        end=normal(POINTS, outputs, seed=5),
        targets=targets,
        paths={"secant": PathKernel(kernel=kernel, contributions=parts, decay=none, detail="substeps=1")},
        kernel_start=kernel,
        kernel_end=kernel,
        initial_weight_term=none,
        attributed=torch.ones(POINTS, dtype=torch.bool),
        limit=DoesNotApply("made by hand"),
        read=slice(0, None),
        integrated=range(outputs),
        training=training,
    )


def usual(outputs: int = 1) -> RunMatrices:
    """Nine features, so that the kernel is regular: its condition number is below a thousand."""
    return evidence(kernel_of(normal(POINTS, 9, seed=7), outputs))


def regular(outputs: int = 1) -> RunMatrices:
    """A path kernel of full rank, of other directions than the training examples' own: it is not symmetric."""
    kernel = kernel_of(normal(POINTS, 9, seed=7), outputs)
    return evidence(kernel + 0.1 * normal(*kernel.shape, seed=8))


def singular() -> RunMatrices:
    """A path kernel of rank two."""
    return evidence(kernel_of(normal(POINTS, 2, seed=7)))


def stepping(found: RunMatrices, sizes: tuple[float, ...]) -> RunMatrices:
    return replace(found, training=replace(found.training, time=sum(sizes), repeat=descending(found.targets, sizes)))


def along(found: RunMatrices, **changes: object) -> RunMatrices:
    """Change the path by secants."""
    return replace(found, paths={"secant": replace(found.path, **changes)})  # type: ignore[arg-type]


def unlike_quadratic(found: RunMatrices) -> RunMatrices:
    return replace(found, training=replace(found.training, is_quadratic=False))


def limited(found: RunMatrices, kernel: Tensor) -> RunMatrices:
    """A run with these kernels in the limit, and a zero kernel at its start."""
    return replace(found, kernel_start=0 * found.kernel_start, limit=LimitKernels(start=kernel, tangent=kernel))


# Each machine against its definition, written out.


def fitted(found: RunMatrices) -> Tensor:
    """Regression with two features, which projects."""
    features = normal(POINTS, 2, seed=7)
    weights: Tensor = torch.linalg.lstsq(features[:TRAIN], found.train_change).solution
    return found.start + features @ weights


def gaussian(found: RunMatrices) -> Tensor:
    """Regression with a Gaussian kernel of the median width."""
    distances = torch.cdist(found.inputs, found.inputs[:TRAIN])
    width = distances[:TRAIN][~torch.eye(TRAIN, dtype=torch.bool)].median()
    kernel = torch.exp(-distances.square() / (2 * width**2))
    weights: Tensor = torch.linalg.solve(kernel[:TRAIN], found.train_change)
    return found.start + kernel @ weights


def summed(found: RunMatrices) -> Tensor:
    return found.start + found.path.contributions.sum(2) + found.path.decay


def linear_steps(found: RunMatrices) -> Tensor:
    """Two steps of sizes 0.5 and 0.1 with the first kernel."""
    outputs, theta = found.start, found.kernel_start[:, 0, :, 0]
    for size in (0.5, 0.1):
        outputs = outputs - size * theta @ (outputs[:TRAIN] - found.targets) / TRAIN
    return outputs


def posterior(found: RunMatrices) -> Tensor:
    assert isinstance(found.limit, LimitKernels)
    prior = found.limit.start
    outputs: Tensor = prior @ torch.linalg.solve(prior[:TRAIN], found.targets)
    return outputs


def mean_coefficients(found: RunMatrices) -> Tensor:
    mean = found.training.mean_coefficients
    assert mean is not None
    return found.start + torch.einsum("qcnd,nd->qc", found.kernel_start, mean)


Definition = Callable[[RunMatrices], Tensor]
LOSSY = 1e-10  # solving with the kernel loses its condition number, up to 1e4
DEFINITIONS: dict[str, tuple[AbstractMachine, RunMatrices, Definition, float]] = {
    "path sum": (Secant(), regular(3), summed, 1e-14),
    "regression, singular": (KernelRegression(), singular(), fitted, 1e-11),
    "control regression": (RBFRegression(), regular(), gaussian, LOSSY),
    "control regression, three outputs": (RBFRegression(), regular(3), gaussian, LOSSY),
    "control identity": (RBFIdentity(), regular(), summed, 1e-13),  # a product, a quotient and a sum of five
    "control identity, three outputs": (RBFIdentity(), regular(3), summed, 1e-13),
    "random identity": (RandomIdentity(), regular(), summed, 100 * EPS),
    "linearised": (Linearised(), stepping(usual(), (0.5, 0.1)), linear_steps, RTOL),
    "fixed coefficients": (FixedCoefficients(), usual(2), mean_coefficients, RTOL),
    "posterior": (NNGP(), limited(usual(2), usual().kernel_start[:, 0, :, 0]), posterior, 1e-9),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_machine_is_its_definition(name: str) -> None:
    machine, found, definition, tolerance = DEFINITIONS[name]
    torch.testing.assert_close(machine.predict(found).outputs, definition(found), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("machine", "tolerance"), [(KernelRegression(), 1e-11), (RandomRegression(), 1000 * EPS)])
@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_reproduces_the_learned_outputs(machine: AbstractMachine, tolerance: float, outputs: int) -> None:
    """And no others. A random kernel is at least the identity and at most a few times it: the solve loses nothing."""
    found = regular(outputs)
    predicted = machine.predict(found).outputs
    torch.testing.assert_close(predicted[:TRAIN], found.end[:TRAIN], rtol=tolerance, atol=tolerance)
    assert (predicted[TRAIN:] - found.end[TRAIN:]).norm() > 0.1


def test_a_prediction_says_with_which_kernel() -> None:
    other = replace(regular().path, contributions=2 * regular().path.contributions, detail="quadrature_points=2")
    both = replace(regular(), paths={**regular().paths, "gauss": other})
    for machine, found, detail in (
        (Secant(), both, "substeps=1"),
        (Gauss(), both, "quadrature_points=2"),
        (KernelRegression(), regular(3), f"𝒦 by secant, rank {3 * TRAIN}/{3 * TRAIN}, cut-off "),
        (KernelRegression(), singular(), f"𝒦 by secant, rank 2/{TRAIN}, cut-off {TRAIN * EPS:.0e}"),
        (RBFRegression(), regular(), "h="),
        (RBFIdentity(), replace(regular(), inputs=torch.ones(POINTS, 4).double()), "h=1, 𝒮 by secant"),  # all coincide
    ):
        assert machine.predict(found).detail.startswith(detail)
    torch.testing.assert_close(
        Gauss().predict(both).outputs, both.start + other.contributions.sum(2), rtol=0, atol=1e-14
    )


FAR = torch.cat([regular().inputs[:-1], regular().inputs[-1:] + 1e6])
TWO_FEATURES = singular().kernel_start[:, 0, :, 0]
REFUSED: dict[str, tuple[AbstractMachine, RunMatrices]] = {
    "path.queries": (KernelRegression(), along(regular(), kernel=torch.full_like(regular().path.kernel, torch.nan))),
    "is 0 between distant points": (RBFIdentity(), replace(regular(), inputs=FAR)),
    "add left to path.rule": (Left(), regular()),
    "made by hand": (FrozenLimit(), usual()),
    "made by hand ": (NNGP(), usual()),
    "the kernel is singular": (NNGP(), limited(usual(), TWO_FEATURES)),
    "squared loss": (NNGP(), unlike_quadratic(limited(usual(), TWO_FEATURES))),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_machine_does_not_apply_without_its_evidence(reason: str) -> None:
    machine, found = REFUSED[reason]
    with pytest.raises(DoesNotApply, match=re.escape(reason.strip())):
        machine.predict(found)


def test_a_random_kernel_depends_on_its_seed_and_is_at_least_the_identity() -> None:
    kernel = random_kernel(usual())
    assert torch.equal(kernel, random_kernel(replace(usual(), seed=0)))
    assert not torch.equal(kernel, random_kernel(replace(usual(), seed=1)))
    torch.testing.assert_close(kernel[:TRAIN], kernel[:TRAIN].t(), rtol=0, atol=10 * EPS)
    assert torch.linalg.eigvalsh(kernel[:TRAIN]).min() >= 1 - 100 * EPS


def test_coefficients_that_are_no_means_are_fitted_to_the_training_points_alone() -> None:
    """They know nothing of the contributions elsewhere, which they are to predict."""
    found = usual(2)
    learned = torch.einsum("qcnd,nd->qcn", found.path.kernel, normal(TRAIN, 2, seed=8))
    parts = torch.cat([learned[:TRAIN], found.path.contributions[TRAIN:]])
    there = replace(along(found, contributions=parts), training=replace(found.training, mean_coefficients=None))
    outputs = FixedCoefficients().predict(there).outputs
    torch.testing.assert_close(outputs, found.start + learned.sum(2), rtol=RTOL, atol=ATOL)


# Training with a fixed kernel, against its closed forms: one kernel after another.


TIME = STEPS * STEP_SIZE / TRAIN  # w Σ η
IDENTITY = torch.cat([torch.eye(TRAIN), torch.zeros(OTHERS, TRAIN)]).double()  # examples share nothing


def missing(found: RunMatrices) -> Tensor:
    return found.start[:TRAIN] - found.targets


Process = Callable[[Tensor, RunMatrices], Tensor]
Decay = Callable[[float], float]
PROCESSES = [
    pytest.param(flow_prediction, lambda mode: exp(-TIME * mode), id="flow"),
    pytest.param(descent_prediction, lambda mode: (1 - STEP_SIZE * mode / TRAIN) ** STEPS, id="descent"),
]


@pytest.mark.parametrize(("process", "decay"), PROCESSES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_every_mode_decays_alone(outputs: int, process: Process, decay: Decay) -> None:
    """Every example, under the identity; and the only feature of a kernel of rank one."""
    found = evidence(kernel_of(IDENTITY, outputs))
    after = process(found.kernel_start, found)
    torch.testing.assert_close(after[:TRAIN], found.targets + decay(1.0) * missing(found), rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(after[TRAIN:], found.start[TRAIN:], rtol=RTOL, atol=ATOL)
    feature = normal(POINTS, 1, seed=7)
    found, size = evidence(kernel_of(feature, outputs)), float(feature[:TRAIN].square().sum())
    moved = (1 - decay(size)) * feature @ feature[:TRAIN].t() @ missing(found) / size
    torch.testing.assert_close(process(found.kernel_start, found), found.start - moved, rtol=RTOL, atol=ATOL)


def test_flow_is_the_matrix_exponential_and_descent_with_tiny_steps_is_flow() -> None:
    found = usual()
    theta, flow = found.kernel_start[:, 0, :, 0], flow_prediction(found.kernel_start, found)
    expected = found.targets + torch.linalg.matrix_exp(-TIME * theta[:TRAIN]) @ missing(found)
    torch.testing.assert_close(flow[:TRAIN], expected, rtol=RTOL, atol=ATOL)
    moved = torch.linalg.solve(theta[:TRAIN], expected - found.start[:TRAIN])
    others = found.start[TRAIN:] + theta[TRAIN:] @ moved
    torch.testing.assert_close(flow[TRAIN:], others, rtol=1e-9, atol=1e-10)  # solving loses the condition number
    finer = (stepping(found, (STEP_SIZE / times,) * (STEPS * times)) for times in (40, 80))
    gaps = [float((descent_prediction(found.kernel_start, each) - flow).norm()) for each in finer]
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.1)  # Euler's method is of order one
    assert gaps[1] < 1e-2


def test_a_frozen_machine_takes_the_kernel_of_its_time() -> None:
    first, last = (kernel_of(normal(POINTS, 9, seed=seed), 3) for seed in (7, 8))
    found = replace(evidence(first), kernel_end=last)
    for machine, given, expected in (
        (FrozenStart(), found, flow_prediction(first, found)),
        (FrozenEnd(), found, flow_prediction(last, found)),
        (FrozenEnd(), unlike_quadratic(found), descent_prediction(last, unlike_quadratic(found))),
        (FrozenLimit(), limited(found, first[:, 0, :, 0]), flow_prediction(first, found)),  # for every output
    ):
        torch.testing.assert_close(machine.predict(given).outputs, expected, rtol=0, atol=0)


# The table: each column by its definition, on outputs made by hand.


PLACES = {
    "train": Region(slice(0, TRAIN), torch.full((1, TRAIN), 7 / sqrt(TRAIN))),
    "query": Region(slice(TRAIN, TRAIN + 2), torch.tensor([[3.0, 4.0], [0.0, 6.0]])),
}


class Fixed(AbstractMachine):
    """Says that f̂ = f_T + 1 everywhere, or fails."""

    fails: bool = False

    def predict(self, evidence: RunMatrices) -> Prediction:
        if self.fails:
            torch.linalg.cholesky(-torch.eye(2))
        return Prediction(evidence.end + 1.0, "by hand")


def found(start: Tensor, end: Tensor) -> RunMatrices:
    return replace(evidence(kernel_of(normal(POINTS, 9, seed=7), start.shape[1])), start=start, end=end)


def row(outputs: Tensor, given: RunMatrices, *, classifies: bool = True, split: str = "query") -> Result:
    rungs = [MachineOutcome("fixed", Prediction(outputs, "by hand"), 0.0)]
    table = {result.split: result for result in comparison_rows(rungs, PLACES, given, classifies)}
    return table[split]


def column(*values: float) -> Tensor:
    """One output: zeros on the training examples and on the last point, these on the query points."""
    return torch.tensor([0.0] * TRAIN + [*values, 0.0], dtype=torch.float64)[:, None]


def test_each_column_by_hand() -> None:
    result = row(column(4.0, -1.0), found(column(0.0, 0.0), column(3.0, 4.0)))
    assert (result.split, result.machine, result.detail, result.note) == ("query", "fixed", "by hand", "")
    assert result.relative_error == pytest.approx(sqrt(1 + 25) / 5, rel=1e-15)
    assert result.floor == pytest.approx(100 * EPS * 11 / 5, rel=1e-15)
    assert result.max_error == 5.0
    assert result.agreement == 0.5
    assert result.r2 == pytest.approx(1 - 26 / 0.5, rel=1e-15)


def test_columns_are_empty_where_they_mean_nothing() -> None:
    still = row(column(1.0, 2.0), found(column(1.0, 2.0), column(1.0, 2.0)))
    assert (still.relative_error, still.floor, still.max_error) == (None, None, 0.0)
    assert still.note == "the network did not move here"
    assert row(column(1.0, 2.0), found(column(0.0, 0.0), column(2.0, 2.0))).r2 is None  # a constant network
    assert row(column(1.0, 2.0), found(column(0.0, 0.0), column(1.0, 2.0)), classifies=False).agreement is None


def test_several_outputs_agree_by_their_largest() -> None:
    end, outputs = torch.zeros(POINTS, 3).double(), torch.zeros(POINTS, 3).double()
    end[TRAIN, 1], end[TRAIN + 1, 2] = 1.0, 1.0
    outputs[TRAIN, 1], outputs[TRAIN + 1, 0] = 9.0, 1.0
    assert row(outputs, found(torch.zeros(POINTS, 3).double(), end)).agreement == 0.5


def test_outputs_that_are_not_finite_have_an_error_that_is_none_either() -> None:
    result = row(column(float("nan"), 2.0), found(column(0.0, 0.0), column(1.0, 2.0)))
    assert result.relative_error is not None
    assert torch.tensor([result.relative_error, result.max_error, result.r2]).isnan().all()
    assert not result.exact


def test_a_machine_that_does_not_apply_says_why_on_every_split() -> None:
    rungs = [MachineOutcome("left", DoesNotApply("for this reason"), 0.0)]
    table = comparison_rows(rungs, PLACES, found(column(0.0, 0.0), column(1.0, 2.0)), classifies=True)
    assert table == [Result(split, "left", note="for this reason") for split in PLACES]


def test_climbing_tries_every_machine_in_order() -> None:
    ladder = Ladder(machine=(Left(), Fixed(), Fixed(fails=True), Linearised()))
    rungs = ladder.predict_all(found(column(0.0, 0.0), column(1.0, 2.0)))
    assert [rung.name for rung in rungs] == ["left", "fixed", "fixed", "linearised"]
    outcomes = [type(rung.outcome) for rung in rungs]
    assert outcomes == [DoesNotApply, Prediction, DoesNotApply, Prediction]
    assert str(rungs[2].outcome).startswith("linear algebra failed (")


def test_a_control_says_so_in_every_row() -> None:
    """No other machine does, so that readers of the rows need no list of controls."""
    given = found(column(0.0, 0.0), column(1.0, 2.0))
    table = comparison_rows(
        Ladder(machine=(RBFRegression(), Linearised())).predict_all(given), PLACES, given, classifies=False
    )
    assert {(result.machine, result.control) for result in table} == {("rbf_regression", True), ("linearised", False)}
