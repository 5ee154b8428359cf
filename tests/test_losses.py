"""Every loss: its output gradient is the derivative of its value, its curvature bounds the Hessian."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from ntkexp.loss import AbstractLoss, Logistic, Squared
from ntkexp.measure import Margin
from ntkexp.mistake import Mistake
from ntkexp.run.setting import survey
from tests.config.components import choices, configured
from tests.kernel.oracle import agree
from tests.run.small import small

EPS = torch.finfo(torch.float64).eps
LOSSES = choices("loss")
KINKED = ("hinge",)  # its second derivative is zero or infinite: max ℓ″ = 1 is a convention, which bounds nothing
FEW = ("data.train=4", "data.query=2", "data.test=2", "steps=3", "model.width=4", "loss=squared")
seeds = st.integers(0, 2**32 - 1)


def loss(name: str, **changes: object) -> AbstractLoss:
    made = configured("loss", name, **changes)
    assert isinstance(made, AbstractLoss)
    return made


def example(name: str, classes: int, seed: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Random outputs, and targets of random labels that include every class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(classes), torch.randint(classes, (4,), generator=generator)])
    targets = loss(name).targets(labels, classes)
    return scale * torch.randn(targets.shape, generator=generator, dtype=torch.float64), targets


def second_derivative(chosen: AbstractLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """∂²ℓ/∂f² of one example."""
    found: Tensor = torch.autograd.functional.hessian(  # type: ignore[no-untyped-call]  # torch's own
        lambda f: chosen.value(f[None], targets[None]).sum(), outputs
    )
    return found


@pytest.mark.parametrize("name", LOSSES)
@given(st.integers(2, 5), seeds)
@settings(max_examples=25)
def test_the_output_gradient_is_the_derivative_of_the_value(name: str, classes: int, seed: int) -> None:
    outputs, targets = example(name, classes, seed)
    outputs.requires_grad_()
    value = loss(name).value(outputs, targets)
    (expected,) = torch.autograd.grad(value.sum(), outputs)
    assert value.shape == (len(outputs),)
    assert (value >= 0).all()
    agree(loss(name).output_gradient(outputs.detach(), targets), expected, 100 * EPS, 1 + expected.abs().max())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("classes", [2, 5])
def test_a_loss_is_not_refused_for_its_kinks(name: str, classes: int) -> None:
    loss(name).refuse_unlike_differences(example(name, classes, seed=0)[1])
    loss(name).refuse_unlike_second_differences(example(name, classes, seed=0)[1])


class Foreign(Squared):
    """A loss of a user's own, whose derivative is wrong by a little."""

    wrong: float = 1e-4

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 + self.wrong) * super().output_gradient(outputs, targets)


class Together(Squared):
    """A loss whose examples share a mean."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().value(outputs - outputs.mean(0), targets)


def test_an_output_gradient_that_is_no_derivative_is_refused() -> None:
    targets = example("squared", 3, seed=0)[1]
    Foreign(wrong=0.0).refuse_unlike_differences(targets)
    with pytest.raises(Mistake, match="is not the derivative of value"):
        Foreign().refuse_unlike_differences(targets)
    with pytest.raises(Mistake, match="depends on others"):
        Together().refuse_unlike_differences(targets)


class Quartic(Squared):
    """A loss that inherits `is_quadratic`, and is not a parabola."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(4).sum(1) / 4

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(3)


class Downwards(Squared):
    curvature = -1.0


class Undefined(Squared):
    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().value(outputs, targets) * torch.nan


WRONG = {
    Quartic: "is_quadratic is True, and value is not",
    Downwards: "curvature is -1.0; give the largest second derivative",
    Undefined: "value is not finite at random outputs",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_loss_with_wrong_facts_is_refused(kind: type[Squared]) -> None:
    """The facts decide the step size, and if flows have closed forms."""
    with pytest.raises(Mistake, match=WRONG[kind]):
        kind().refuse_unlike_differences(example("squared", 3, seed=0)[1])


class ZeroOrOne(Squared):
    """Two classes are encoded as 0 and 1, between which the outputs are nearest to both at ½."""

    def encode(self, labels: Tensor, classes: int) -> Tensor:
        return labels.double()[:, None]


class Turned(Squared):
    """A loss whose smallest target is at the class."""

    def encode(self, labels: Tensor, classes: int) -> Tensor:
        return -super().encode(labels, classes)


class ShiftedLogistic(Logistic):
    """Two classes are encoded as 0 and 1: ℓ = log(1 + exp f) − y f."""

    def encode(self, labels: Tensor, classes: int) -> Tensor:
        return labels.double()[:, None] if classes == 2 else super().encode(labels, classes)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (torch.nn.functional.softplus(outputs) - targets * outputs).sum(1)

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sigmoid() - targets


@pytest.mark.parametrize("classes", [2, 5])
def test_accuracies_read_the_classes_of_every_loss(classes: int) -> None:
    for chosen in (*map(loss, LOSSES), ShiftedLogistic()):
        chosen.refuse_other_classes(classes)


@pytest.mark.parametrize(
    ("wrong", "classes", "reason"),
    [
        (ZeroOrOne(), 2, "accuracies read its sign"),
        (Turned(), 2, "accuracies read its sign"),
        (ZeroOrOne(), 3, "one output for 3 classes"),
        (Turned(), 3, "whose largest entry is not at the class"),
    ],
)
def test_a_loss_whose_predictions_would_be_read_as_other_classes_is_refused(
    wrong: AbstractLoss, classes: int, reason: str
) -> None:
    names = ",".join(map(str, range(classes)))
    experiment = small(*FEW, f"data.classes=[{names}]").model_copy(update={"loss": wrong})
    with pytest.raises(Mistake, match=reason):
        survey(experiment)


def test_the_margin_of_a_loss_with_targets_0_and_1_is_that_of_signs() -> None:
    labels = torch.tensor([0, 1, 1, 0])
    outputs = torch.tensor([[0.5], [2.0], [-3.0], [-0.25]], dtype=torch.float64)
    shifted, signed = ShiftedLogistic(), Logistic()
    margins = [Margin().values(chosen, outputs, chosen.encode(labels, 2)) for chosen in (shifted, signed)]
    assert margins[0].tolist() == margins[1].tolist() == [-0.5, 2.0, -3.0, 0.25]


class Detached(Squared):
    """Its value is right, and autograd has half of its derivative."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        missed = outputs - targets
        return (missed.detach() * missed).sum(1) / 2


class Weighed(Squared):
    """Autograd has its first derivative, but half of its second."""

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        missed = outputs - targets
        return (missed * missed.detach() - missed.detach().square() / 2).sum(1)


@pytest.mark.parametrize(("wrong", "of"), [(Detached(), "value"), (Weighed(), "output_gradient")])
def test_a_value_that_autograd_differentiates_otherwise_has_no_effects(wrong: AbstractLoss, of: str) -> None:
    targets = example("squared", 3, seed=0)[1]
    wrong.refuse_unlike_differences(targets)  # the inputs of the parts are right
    with pytest.raises(Mistake, match=f"autograd's derivatives of value do not match finite differences of {of}"):
        wrong.refuse_unlike_second_differences(targets)


def test_a_run_with_effects_holds_second_derivatives_against_differences() -> None:
    survey(small(*FEW).model_copy(update={"loss": Weighed()}))
    with pytest.raises(Mistake, match="and effects are computed from them"):
        survey(small(*FEW, "path.effects=derivative").model_copy(update={"loss": Weighed()}))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_quadratic_if_its_output_gradient_is_what_misses(name: str) -> None:
    outputs, targets = example(name, 3, seed=0)
    parabola = loss(name).curvature * (outputs - targets)
    missed = float((loss(name).output_gradient(outputs, targets) - parabola).abs().max())
    assert loss(name).is_quadratic == (missed < 10 * EPS * float(parabola.abs().max()))


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in KINKED])
def test_the_curvature_bounds_the_hessian_and_is_nearly_reached(name: str) -> None:
    """At random outputs, and where all or two classes are equally likely."""
    top = 0.0
    for classes in (2, 3, 5):
        outputs, targets = example(name, classes, seed=classes)
        tied = torch.zeros_like(outputs)
        tied[:, 2:] = -50.0
        for place in (outputs, 0.1 * outputs, torch.zeros_like(outputs), tied):
            for row, target in zip(place, targets, strict=True):
                hessian = second_derivative(loss(name), row, target)
                top = max(top, float(torch.linalg.eigvalsh(hessian)[-1]))
    bound = loss(name).curvature
    assert 0.99 * bound <= top <= bound * (1 + 100 * EPS)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_far_outputs_give_finite_numbers(name: str, scale: float) -> None:
    outputs, targets = example(name, 3, seed=0, scale=scale)
    assert loss(name).value(outputs, targets).isfinite().all()
    assert loss(name).output_gradient(outputs, targets).isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_the_encoding_tells_classes_apart(name: str, classes: int) -> None:
    labels = torch.arange(classes)
    targets = loss(name).targets(labels, classes)
    assert targets.dtype == torch.float64
    assert targets.shape == (classes, targets.shape[1])
    found = (targets[:, 0] > 0).long() if targets.shape[1] == 1 else targets.argmax(1)
    assert torch.equal(found, labels)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("classes", [2, 4])
def test_a_loss_falls_along_its_gradient_towards_the_targets(name: str, classes: int) -> None:
    """Descent in the outputs with half the stable step 2/max ℓ″ never raises the loss."""
    outputs, targets = example(name, classes, seed=5, scale=1.0)
    chosen = loss(name)
    values = [float(chosen.value(outputs, targets).sum())]
    for _ in range(50):
        outputs = outputs - 0.5 / chosen.curvature * chosen.output_gradient(outputs, targets)
        values.append(float(chosen.value(outputs, targets).sum()))
    slack = 100 * EPS * values[0]
    assert values[-1] < values[0]
    if name not in KINKED:
        assert all(after <= before + slack for before, after in pairwise(values))


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_and_a_sum(name: str) -> None:
    assert loss(name).weight(8) == 1 / 8
    assert loss(name, reduction="sum").weight(8) == 1.0


@pytest.mark.parametrize("name", LOSSES)
def test_real_values_are_for_the_squared_error(name: str) -> None:
    values = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    if name == "squared":
        assert torch.equal(loss(name).targets(values, 0), values)
    else:
        with pytest.raises(Mistake, match="choose loss=squared"):
            loss(name).targets(values, 0)


def test_squared_targets_of_several_classes_are_centred() -> None:
    targets = loss("squared").targets(torch.arange(5), 5)
    assert targets.sum(1).abs().max() <= 10 * EPS
