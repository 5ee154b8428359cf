"""Evidence made by hand: matrices that no network gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import exp, sqrt

import pytest
import torch
from torch import Tensor

from ntkexp.machine.base import (
    AbstractMachine,
    DoesNotApply,
    Evidence,
    LimitKernels,
    PathKernel,
    Prediction,
    Repeat,
    Repeated,
    Training,
)
from ntkexp.machine.ladder import Ladder, Region, Rung, ladder_rows
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

TRAIN, OTHERS, STEPS, STEP_SIZE = 5, 3, 40, 0.3
POINTS = TRAIN + OTHERS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel_of(features: Tensor, outputs: int = 1) -> Tensor:
    """⟨φ(x), φ(x′)⟩ for each output alike, [query, out, train, out_]."""
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


def evidence(kernel: Tensor, *, is_quadratic: bool = True) -> Evidence:
    """A run whose kernels are all the same, from outputs and to targets drawn at random."""
    outputs, sizes = kernel.shape[1], (STEP_SIZE,) * STEPS
    targets, none = random(TRAIN, outputs, seed=1), torch.zeros(POINTS, outputs, dtype=torch.float64)
    training = Training(
        time=sum(sizes),
        weight=1 / TRAIN,
        is_quadratic=is_quadratic,
        is_plain=True,
        is_flow=False,
        mean_coefficients=random(TRAIN, outputs, seed=2),
        repeat=descending(targets, sizes),
    )
    return Evidence(
        inputs=random(POINTS, 4, seed=3),
        train=TRAIN,
        start=random(POINTS, outputs, seed=4),
        end=random(POINTS, outputs, seed=5),
        targets=targets,
        paths={"secant": path_kernel(kernel, random(POINTS, outputs, TRAIN, seed=6), none)},
        kernel_start=kernel,
        kernel_end=kernel,
        start_pull=none,
        attributed=torch.ones(POINTS, dtype=torch.bool),
        limit=DoesNotApply("made by hand"),
        read=slice(0, None),
        integrated=range(outputs),
        training=training,
    )


def path_kernel(kernel: Tensor, contributions: Tensor, decay: Tensor) -> PathKernel:
    """Integrals of which nothing else is known."""
    return PathKernel(kernel=kernel, contributions=contributions, decay=decay, detail="substeps=1")


def stepping(found: Evidence, step_sizes: tuple[float, ...]) -> Evidence:
    repeat = descending(found.targets, step_sizes)
    return replace(found, training=replace(found.training, time=sum(step_sizes), repeat=repeat))


def along(found: Evidence, paths: Mapping[str, PathKernel]) -> Evidence:
    return replace(found, paths=paths)


# Machines that solve for coefficients, and the controls that have nothing to do with the network.


def regular(outputs: int = 1) -> Evidence:
    """A path kernel of full rank, of other directions than the training examples' own: it is not symmetric."""
    kernel = kernel_of(random(POINTS, 9, seed=7), outputs)
    return evidence(kernel + 0.1 * random(*kernel.shape, seed=8))


def singular() -> Evidence:
    """A path kernel of rank two."""
    return evidence(kernel_of(random(POINTS, 2, seed=7)))


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_with_a_regular_kernel_reproduces_what_was_learned(outputs: int) -> None:
    found = regular(outputs)
    prediction = KernelRegression().predict(found)
    # the kernel's condition number is below a thousand
    torch.testing.assert_close(prediction.outputs[:TRAIN], found.end[:TRAIN], rtol=1e-11, atol=1e-11)
    assert prediction.detail.startswith(f"𝒦 by secant, rank {TRAIN * outputs}/{TRAIN * outputs}, cut-off ")


def test_regression_with_a_singular_kernel_projects_and_says_so() -> None:
    found = singular()
    prediction = KernelRegression().predict(found)
    features = random(POINTS, 2, seed=7)
    fitted = torch.linalg.lstsq(features[:TRAIN], found.learned).solution
    expected = found.start + features @ fitted
    torch.testing.assert_close(prediction.outputs, expected, rtol=1e-11, atol=1e-11)
    cutoff = TRAIN * torch.finfo(torch.float64).eps
    assert prediction.detail == f"𝒦 by secant, rank 2/{TRAIN}, cut-off {cutoff:.0e}"


def test_regression_refuses_a_kernel_that_was_not_read() -> None:
    found = regular()
    unread = along(found, {"secant": replace(found.path, kernel=torch.full_like(found.path.kernel, torch.nan))})
    with pytest.raises(DoesNotApply, match=r"path\.queries"):
        KernelRegression().predict(unread)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_identity_holds_for_any_contributions(outputs: int) -> None:
    found = regular(outputs)
    rounding = 1e-14 * float(found.path.contributions.abs().sum(2).max())  # a product, a quotient and a sum of five
    summed = found.start + found.path.contributions.sum(2)
    torch.testing.assert_close(RBFIdentity().predict(found).outputs, summed, rtol=0, atol=rounding)


def test_the_identity_does_not_apply_where_the_kernel_vanishes() -> None:
    far = regular()
    inputs = far.inputs.clone()
    inputs[-1] += 1e6
    with pytest.raises(DoesNotApply, match="vanishes"):
        RBFIdentity().predict(replace(far, inputs=inputs))


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_control_regression_is_gaussian_with_the_median_width(outputs: int) -> None:
    found = regular(outputs)
    distances = torch.cdist(found.inputs, found.inputs[:TRAIN])
    off_diagonal = distances[:TRAIN][~torch.eye(TRAIN, dtype=torch.bool)]
    width = float(off_diagonal.median())
    kernel = torch.exp(-distances.square() / (2 * width**2))
    expected = found.start + kernel @ torch.linalg.solve(kernel[:TRAIN], found.learned)
    prediction = RBFRegression().predict(found)
    torch.testing.assert_close(prediction.outputs, expected, rtol=1e-10, atol=1e-10)  # condition number below 1e4
    assert prediction.detail.startswith(f"h={width:.3g}, rank {TRAIN * outputs}/")


def test_examples_that_coincide_still_have_a_width() -> None:
    found = regular()
    same = replace(found, inputs=torch.ones_like(found.inputs))
    assert RBFIdentity().predict(same).detail == "h=1, 𝒮 by secant"


def test_the_path_sum_adds_the_contributions_of_its_rule() -> None:
    found = regular(3)
    other = replace(found.path, contributions=2 * found.path.contributions, detail="points=2")
    both = along(found, {**found.paths, "gauss": other})
    for machine, times, detail in ((Secant(), 1, "substeps=1"), (Gauss(), 2, "points=2")):
        prediction = machine.predict(both)
        assert prediction.detail == detail
        torch.testing.assert_close(
            prediction.outputs, found.start + times * found.path.contributions.sum(2), rtol=1e-14, atol=1e-14
        )


def test_a_rule_that_was_not_accumulated_does_not_apply() -> None:
    with pytest.raises(DoesNotApply, match=r"add left to path\.rule"):
        Left().predict(regular())


# A random kernel: exact where it is divided by and multiplied with again, and a kernel all the same.


EVIDENCE = evidence(kernel_of(random(POINTS, 3)))
EPS = torch.finfo(torch.float64).eps


def test_any_kernel_divides_out() -> None:
    path = EVIDENCE.paths["secant"]
    expected = EVIDENCE.start + path.contributions.sum(2) + path.decay
    torch.testing.assert_close(RandomIdentity().predict(EVIDENCE).outputs, expected, rtol=0, atol=100 * EPS)


def test_its_regression_reproduces_what_was_learned() -> None:
    """The kernel is at least the identity, and at most a few times it, so that nothing is lost in the solve."""
    outputs = RandomRegression().predict(EVIDENCE).outputs
    torch.testing.assert_close(outputs[:TRAIN], EVIDENCE.end[:TRAIN], rtol=0, atol=1000 * EPS)
    assert (outputs[TRAIN:] - EVIDENCE.end[TRAIN:]).norm() > 0.1


def test_another_seed_draws_another() -> None:
    assert torch.equal(random_kernel(EVIDENCE), random_kernel(replace(EVIDENCE, seed=0)))
    assert not torch.equal(random_kernel(EVIDENCE), random_kernel(replace(EVIDENCE, seed=1)))


def test_it_is_symmetric_and_at_least_the_identity() -> None:
    kernel = random_kernel(EVIDENCE)[:TRAIN]
    torch.testing.assert_close(kernel, kernel.t(), rtol=0, atol=10 * EPS)
    assert torch.linalg.eigvalsh(kernel).min() >= 1 - 100 * EPS


# Training with a fixed kernel, against its closed forms: MATH 8 for one kernel after another.


TIME = STEPS * STEP_SIZE / TRAIN  # w Σ η
IDENTITY = torch.cat([torch.eye(TRAIN), torch.zeros(OTHERS, TRAIN)]).double()  # no example says anything of another
RTOL, ATOL = 1e-12, 1e-13  # some thousand eps: forty steps, or an eigendecomposition of five


def missing(found: Evidence) -> Tensor:
    return found.start[:TRAIN] - found.targets


Process = Callable[[Tensor, Evidence], Tensor]
Decay = Callable[[float], float]
PROCESSES = [
    pytest.param(flow_prediction, lambda mode: exp(-TIME * mode), id="flow"),
    pytest.param(descent_prediction, lambda mode: (1 - STEP_SIZE * mode / TRAIN) ** STEPS, id="descent"),
]


@pytest.mark.parametrize(("process", "decay"), PROCESSES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_under_the_identity_every_example_decays_alone(outputs: int, process: Process, decay: Decay) -> None:
    found = evidence(kernel_of(IDENTITY, outputs))
    after = process(found.kernel_start, found)
    torch.testing.assert_close(after[:TRAIN], found.targets + decay(1.0) * missing(found), rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(after[TRAIN:], found.start[TRAIN:], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(("process", "decay"), PROCESSES)
def test_a_kernel_of_rank_one_moves_along_its_feature(process: Process, decay: Decay) -> None:
    feature = random(POINTS, 1, seed=7)
    found = evidence(kernel_of(feature))
    size = float(feature[:TRAIN].square().sum())
    along = feature @ feature[:TRAIN].t() @ missing(found) / size
    expected = found.start - (1 - decay(size)) * along
    torch.testing.assert_close(process(found.kernel_start, found), expected, rtol=RTOL, atol=ATOL)


def test_flow_is_the_matrix_exponential() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7)))
    theta = found.kernel_start[:, 0, :, 0]
    decay = torch.linalg.matrix_exp(-TIME * theta[:TRAIN])
    expected = found.targets + decay @ missing(found)
    torch.testing.assert_close(flow_prediction(found.kernel_start, found)[:TRAIN], expected, rtol=RTOL, atol=ATOL)
    moved = torch.linalg.solve(theta[:TRAIN], expected - found.start[:TRAIN])
    # solving with the kernel loses its condition number, about a thousand
    torch.testing.assert_close(
        flow_prediction(found.kernel_start, found)[TRAIN:],
        found.start[TRAIN:] + theta[TRAIN:] @ moved,
        rtol=1e-9,
        atol=1e-10,
    )


def test_descent_with_tiny_steps_is_flow() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7)))
    gaps = []
    for times in (40, 80):
        finer = stepping(found, (STEP_SIZE / times,) * (STEPS * times))
        gaps.append(
            float((descent_prediction(found.kernel_start, finer) - flow_prediction(found.kernel_start, found)).norm())
        )
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.1)  # Euler's method is of order one
    assert gaps[1] < 1e-2


def test_frozen_takes_the_kernel_of_its_end() -> None:
    first, last = (kernel_of(random(POINTS, 9, seed=seed)) for seed in (7, 8))
    found = replace(evidence(first), kernel_end=last)
    for machine, kernel in ((FrozenStart(), first), (FrozenEnd(), last)):
        torch.testing.assert_close(machine.predict(found).outputs, flow_prediction(kernel, found), rtol=0, atol=0)
    other = replace(found, training=replace(found.training, is_quadratic=False))
    torch.testing.assert_close(FrozenEnd().predict(other).outputs, descent_prediction(last, other), rtol=0, atol=0)


def test_linearised_takes_the_same_steps() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7)))
    uneven = stepping(found, (0.5, 0.1))
    outputs, theta = found.start, found.kernel_start[:, 0, :, 0]
    for size in (0.5, 0.1):
        outputs = outputs - size * theta @ (outputs[:TRAIN] - found.targets) / TRAIN
    torch.testing.assert_close(Linearised().predict(uneven).outputs, outputs, rtol=RTOL, atol=ATOL)


def test_fixed_coefficients_are_means_over_the_path() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7), outputs=2))
    mean = found.training.mean_coefficients
    expected = found.start + torch.einsum("qcnd,nd->qc", found.kernel_start, mean)
    torch.testing.assert_close(FixedCoefficients().predict(found).outputs, expected, rtol=RTOL, atol=ATOL)


def test_coefficients_that_are_no_means_are_fitted_to_the_training_points_alone() -> None:
    """They know nothing of the contributions elsewhere, which they are to predict."""
    found = evidence(kernel_of(random(POINTS, 9, seed=7), outputs=2))
    true = random(TRAIN, 2, seed=8)
    learned = torch.einsum("qcnd,nd->qcn", found.path.kernel, true)
    parts = torch.cat([learned[:TRAIN], found.path.contributions[TRAIN:]])
    remembering = replace(found.training, mean_coefficients=None)
    there = replace(found, training=remembering, paths={"secant": replace(found.path, contributions=parts)})
    outputs = FixedCoefficients().predict(there).outputs
    torch.testing.assert_close(outputs, found.start + learned.sum(2), rtol=RTOL, atol=ATOL)


def test_frozen_at_the_limit_takes_it_for_every_output() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7), outputs=3))
    theta = found.kernel_start[:, 0, :, 0]
    wide = replace(
        found, kernel_start=torch.zeros_like(found.kernel_start), limit=LimitKernels(start=theta, tangent=theta)
    )
    torch.testing.assert_close(
        FrozenLimit().predict(wide).outputs, FrozenStart().predict(found).outputs, rtol=0, atol=0
    )


def test_the_posterior_interpolates_and_solves() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7), outputs=2))
    prior = found.kernel_start[:, 0, :, 0]
    outputs = NNGP().predict(replace(found, limit=LimitKernels(start=prior, tangent=prior))).outputs
    expected = prior @ torch.linalg.solve(prior[:TRAIN], found.targets)
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-10)  # solving loses the condition number


@pytest.mark.parametrize("machine", [FrozenLimit(), NNGP()])
def test_without_a_limit_its_machines_do_not_apply(machine: AbstractMachine) -> None:
    with pytest.raises(DoesNotApply, match="made by hand"):
        machine.predict(evidence(kernel_of(IDENTITY)))


def test_a_singular_prior_or_another_loss_has_no_posterior() -> None:
    singular = kernel_of(random(POINTS, 2, seed=7))[:, 0, :, 0]
    found = replace(evidence(kernel_of(IDENTITY)), limit=LimitKernels(start=singular, tangent=singular))
    with pytest.raises(DoesNotApply, match="the kernel is singular"):
        NNGP().predict(found)
    with pytest.raises(DoesNotApply, match="squared loss"):
        NNGP().predict(replace(found, training=replace(found.training, is_quadratic=False)))


# The table: each column by its definition, on outputs made by hand.


PLACES = {
    "train": Region(slice(0, TRAIN), torch.full((1, TRAIN), 7 / sqrt(TRAIN))),
    "query": Region(slice(TRAIN, TRAIN + 2), torch.tensor([[3.0, 4.0], [0.0, 6.0]])),
}


class Fixed(AbstractMachine):
    """Says that f̂ = f_T + 1 everywhere, or fails."""

    fails: bool = False

    def predict(self, evidence: Evidence) -> Prediction:
        if self.fails:
            torch.linalg.cholesky(-torch.eye(2))
        return Prediction(evidence.end + 1.0, "by hand")


def found(start: Tensor, end: Tensor) -> Evidence:
    return replace(evidence(kernel_of(random(POINTS, 9, seed=7), start.shape[1])), start=start, end=end)


def row(outputs: Tensor, given: Evidence, *, classifies: bool = True, split: str = "query") -> Result:
    rungs = [Rung("fixed", Prediction(outputs, "by hand"), 0.0)]
    table = {result.split: result for result in ladder_rows(rungs, PLACES, given, classifies)}
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


def test_a_split_in_which_nothing_moved_has_no_relative_error() -> None:
    result = row(column(1.0, 2.0), found(column(1.0, 2.0), column(1.0, 2.0)))
    assert (result.relative_error, result.floor, result.max_error) == (None, None, 0.0)
    assert result.note == "the network did not move here"


def test_a_network_that_is_constant_has_no_r2() -> None:
    assert row(column(1.0, 2.0), found(column(0.0, 0.0), column(2.0, 2.0))).r2 is None


def test_regression_has_no_agreement() -> None:
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
    rungs = [Rung("left", DoesNotApply("for this reason"), 0.0)]
    table = ladder_rows(rungs, PLACES, found(column(0.0, 0.0), column(1.0, 2.0)), classifies=True)
    assert table == [Result(split, "left", note="for this reason") for split in PLACES]


def test_climbing_tries_every_machine_in_order() -> None:
    ladder = Ladder(machine=(Left(), Fixed(), Fixed(fails=True), Linearised()))
    rungs = ladder.climb(found(column(0.0, 0.0), column(1.0, 2.0)))
    assert [rung.name for rung in rungs] == ["left", "fixed", "fixed", "linearised"]
    outcomes = [type(rung.outcome) for rung in rungs]
    assert outcomes == [DoesNotApply, Prediction, DoesNotApply, Prediction]
    assert str(rungs[2].outcome).startswith("linear algebra failed (")


def test_a_control_says_so_in_every_row() -> None:
    """And no other machine does: whoever looks at the rows need not know machines by name."""
    given = found(column(0.0, 0.0), column(1.0, 2.0))
    table = ladder_rows(Ladder(machine=(RBFRegression(), Linearised())).climb(given), PLACES, given, classifies=False)
    assert {(result.machine, result.control) for result in table} == {("rbf_regression", True), ("linearised", False)}
