"""Path integrals of a measure of the outputs: the parts follow the chain rule where it has a closed form."""

from __future__ import annotations

import pytest
import torch

from ntkexp.experiment.identity import identity
from ntkexp.loss import Squared
from ntkexp.machine.base import Prediction
from ntkexp.mistake import Mistake
from ntkexp.run.setting import prepare
from tests.run.small import Ran, ran, small

ROUNDING = 1e-13  # hundreds of eps: some steps, each a sum over twelve examples, through logarithms and exponentials
SHORT = ("steps=5", "model.width=8", "data.train=12", "data.query=5", "data.test=4", "ladder.machine=[]")
CLASSES = ("data.classes=[0,1,2]", "loss=cross_entropy")


def test_parts_of_a_squared_loss_are_those_of_the_output_times_its_mean_error() -> None:
    """½(f_1 − y)² − ½(f_0 − y)² = (½(f_0 + f_1) − y)(f_1 − f_0), on one step and so for every part of f_1 − f_0."""
    one_step = (*SHORT, "steps=1", "path.rule=[secant]")
    output, loss = ran(*one_step), ran(*one_step, "path.measure=loss")
    evidence = output.outcome.matrices
    error = (evidence.start + evidence.end) / 2 - output.setting.problem.targets
    expected = error[..., None] * output.contributions("secant")
    assert (loss.contributions("secant") - expected).norm() <= ROUNDING * expected.norm()
    torch.testing.assert_close(loss.outcome.weights, output.outcome.weights, rtol=0, atol=0)


@pytest.fixture(scope="module")
def two_runs() -> tuple[Ran, Ran]:
    """One step of a classifier, explained by its outputs and by its probabilities, with the same machines."""
    nonlinear = "{_target_:ntkexp.machine.Nonlinear,measure:probability}"
    machines = f"ladder.machine=[secant,{nonlinear},frozen_start,kernel_regression]"
    one_step = (*SHORT, *CLASSES, "steps=1", "path.rule=[secant,left]", machines)
    return ran(*one_step), ran(*one_step, "path.measure=probability")


def test_tangents_are_those_of_the_chain_rule(two_runs: tuple[Ran, Ran]) -> None:
    """By left ends, on one step: 𝒮(x, xᵢ) = ∇g(f_0)·𝒮_f(x, xᵢ), with ∇g by autograd."""
    output, probability = two_runs
    start = output.outcome.matrices.start.detach().requires_grad_()
    (slope,) = torch.autograd.grad((start.softmax(1) * output.setting.problem.targets).sum(), start)
    expected = torch.einsum("pc,pci->pi", slope, output.contributions("left"))[:, None]
    assert (probability.contributions("left") - expected).norm() <= ROUNDING * expected.norm()


def test_machines_are_compared_in_the_measure(two_runs: tuple[Ran, Ran]) -> None:
    """A machine of outputs goes through g; a regression with the path kernel of the measure does not apply."""
    output, probability = two_runs
    frozen = next(rung.outcome for rung in output.outcome.machines if rung.name == "frozen_start")
    assert isinstance(frozen, Prediction)
    targets, points = output.setting.problem.targets, output.setting.problem.split_slices["query"]
    predicted, end, start = (
        (each.softmax(1) * targets).sum(1)[points]
        for each in (frozen.outputs, output.outcome.matrices.end, output.outcome.matrices.start)
    )
    expected = float((predicted - end).norm() / (end - start).norm())
    assert probability.table["frozen_start", "query"].relative_error == pytest.approx(expected, rel=1e-10)
    for machine in ("kernel_regression", "nonlinear"):
        assert "needs path.measure=output" in probability.table[machine, "query"].note


def test_a_kernel_machine_with_a_nonlinearity_is_exact_by_secants(two_runs: tuple[Ran, Ran]) -> None:
    """g(b + Σᵢ aᵢ K), whose inner sum gives the outputs."""
    for row in two_runs[0].rows("nonlinear"):
        assert row.relative_error is not None
        assert row.floor is not None
        assert row.relative_error <= row.floor
        assert row.note.endswith("error in the probability of its outputs")


@pytest.mark.slow
def test_one_output_has_a_margin_and_no_probability() -> None:
    """The margin is the output with a sign; without probabilities, `nonlinear` gives its reason in the ladder."""
    output, margin = ran(*SHORT, "ladder.machine=[nonlinear]"), ran(*SHORT, "path.measure=margin")
    expected = output.setting.problem.targets[..., None] * output.contributions("secant")
    assert (margin.contributions("secant") - expected).norm() <= ROUNDING * expected.norm()
    assert output.rows("nonlinear")[0].note.startswith("loss=squared makes no probabilities of outputs")


def test_the_default_measure_leaves_a_run_as_it_was() -> None:
    """It has the same folder, and its path is read without a measure; rounding enters a loss by its slope."""
    plain, output, loss = (small(*SHORT, *more) for more in ((), ("path.measure=output",), ("path.measure=loss",)))
    assert identity(plain) == identity(output) != identity(loss)
    setting, found = prepare(output), prepare(loss).measured
    assert setting.domain.explained is setting.domain.points
    assert setting.measured is None
    assert found is not None
    far = found.targets + 50.0
    torch.testing.assert_close(found.slopes(far), Squared().output_gradient(far, found.targets).norm(dim=1))


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("path.measure=probability: loss=squared makes no probabilities", ("path.measure=probability",)),
        ("path.measure=log_probability: loss=hinge makes no", ("path.measure=log_probability", "loss=hinge")),
        ("path.measure=margin: the data have real values and no classes", ("path.measure=margin", "data=sphere")),
        ("path.measure=loss: it is one number for all outputs", ("path.measure=loss", "path.outputs=[0]")),
        ("path.measure=loss: effects are changes of the outputs", ("path.measure=loss", "path.effects=true")),
        ("path.measure=loss: snapshots interpolate", ("path.measure=loss", "path.every=snapshots")),
        ("path.measure=loss: the effects of the tasks of data=sequence", ("path.measure=loss", "data=sequence")),
    ],
)
def test_what_has_no_measure_is_refused(said: str, more: tuple[str, ...]) -> None:
    with pytest.raises(Mistake) as refusal:
        prepare(small(*SHORT, *more))
    assert said in str(refusal.value)
