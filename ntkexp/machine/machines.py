"""The kernel machines: Domingos' path kernel machines, kernel machines with fixed
kernels, and controls, whose kernels are independent of the network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form import FlowGain, Kernels, condition, modes_of
from ntkexp.machine.base import (
    AbstractMachine,
    DoesNotApply,
    Prediction,
    RunMatrices,
    apply_kernel,
    for_each_output,
    refuse_none,
    train_matrix,
)
from ntkexp.measure import AbstractMeasure, LogProbability
from ntkexp.mistake import Mistake
from ntkexp.naming import option_name
from ntkexp.on_disk import row_blocks, summed
from ntkexp.stream import normal, stream
from ntkexp.text import percent, short

# --- The path kernel machine of Domingos: f̂(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x). Its
# coefficients depend on the query x.
#
# 𝒮 are the contributions, and 𝒟 is the effect of weight decay. With 𝒮 by secants, f̂
# equals the trained network up to rounding. With 𝒮 from the left ends of the steps, f̂
# is the sum in Domingos' paper.


def path_sum(rule: str, matrices: RunMatrices) -> Prediction:
    """Return f_0 + Σᵢ 𝒮 + 𝒟 by a path rule: the initial outputs, plus all contributions
    and the effect of decay. Raise `DoesNotApply` if the run lacks this rule."""
    if rule not in matrices.paths:
        if matrices.training.is_flow:
            raise DoesNotApply(
                "a flow has no finite steps; its path is integrated over time, by gauss"
            )
        raise DoesNotApply(f"the run has no sum by this rule: add {rule} to path.rule")
    path = matrices.paths[rule]
    change = summed(path.contributions) + path.without_examples
    return Prediction(
        matrices.outputs_after(change),
        path.detail,
        describe_parts(path.facts),
        is_path_sum=True,
    )


class AbstractPathSum(AbstractMachine):
    """The sum f_0 + Σᵢ 𝒮 + 𝒟 by the path rule of the same name."""

    @final
    def predict(self, matrices: RunMatrices) -> Prediction:
        return path_sum(self.option, matrices)


def without_machine(rules: Iterable[str]) -> list[str]:
    """Return the path rules that have no kernel machine of the same name.

    >>> without_machine(["secant", "my_rule"])
    ['my_rule']
    """
    named = {option_name(kind.__name__) for kind in AbstractPathSum.__subclasses__()}
    return [rule for rule in rules if rule not in named]


class Secant(AbstractPathSum):
    """The path kernel machine of Domingos by secants,
    f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x); it is exact."""


class Gauss(AbstractPathSum):
    """The path kernel machine of Domingos, by Gauss quadrature."""


class Left(AbstractPathSum):
    """The path kernel machine of Domingos as published:
    kernels at the start of each step."""


def describe_parts(facts: Mapping[str, float]) -> str:
    """Describe the accuracy of single contributions. Their sum may be more accurate.

    >>> describe_parts({"cancellation": 20.3, "error_bar": 1.2e-4})
    'contributions cancel: Σ|c| = 20.3 × |Σc|; relative error of each 1e-4'
    >>> describe_parts({"cancellation": 3.0, "top_10": 0.5, "decay_share": 0.125})
    'contributions cancel: Σ|c| = 3 × |Σc|; the top 10 hold 50 %; decay moved the outputs by 0.125 of their change'
    >>> describe_parts({"cancellation": 20.3, "sum_error_bar": 0.0067})
    'contributions cancel: Σ|c| = 20.3 × |Σc|; estimated error of the sum 0.0067'
    >>> describe_parts({"cancellation": 3.0, "error_bar": float("nan")})
    'contributions cancel: Σ|c| = 3 × |Σc|'
    """
    facts = {name: fact for name, fact in facts.items() if isfinite(fact)}
    if "cancellation" not in facts:
        return ""
    phrases = {
        "cancellation": "contributions cancel: Σ|c| = {} × |Σc|",
        "error_bar": "relative error of each {}",
        "top_10": "the top 10 hold {}",
        "sum_error_bar": "estimated error of the sum {}",
        "flow_error": "the flow is solved to {} of its way",
        "decay_share": "decay moved the outputs by {} of their change",
    }
    numbers = {name: short(fact) for name, fact in facts.items()}
    if "top_10" in facts:
        numbers["top_10"] = percent(facts["top_10"])
    return "; ".join(
        text.format(numbers[name]) for name, text in phrases.items() if name in facts
    )


class Nonlinear(AbstractMachine):
    """A kernel machine inside a nonlinear function g, such as a probability:
    g(f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x)).

    The measure g is applied to the sum by the first path rule, and the result is
    compared with g of the network. With the secant rule, the sum and therefore the
    result are exact. This kernel machine does not divide the change of g among the
    examples. For this, set `path.measure`."""

    measure: AbstractMeasure = LogProbability()

    def predict(self, matrices: RunMatrices) -> Prediction:
        if matrices.measured is not None:
            raise DoesNotApply(
                f"the path explains the {matrices.measured.name}: needs path.measure=output"
            )
        if len(matrices.integrated) < matrices.start.shape[1]:
            raise DoesNotApply("its measure needs all outputs: needs path.outputs=all")
        if matrices.measure is None:
            raise DoesNotApply("the targets of the measure are unknown")
        try:
            g = matrices.measure(self.measure)
        except Mistake as mistake:
            raise DoesNotApply(str(mistake)) from None
        inner = path_sum(matrices.rule, matrices)
        detail = f"{self.measure.option} of the sum by {matrices.rule}"
        return Prediction(
            inner.outputs, detail, inner.note, is_path_sum=True, measure=g
        )


class FixedCoefficients(AbstractMachine):
    """A kernel machine in the usual sense: the path kernel, with coefficients
    independent of the query.

    The coefficients are means over the path:

    f̂(x) = f_0(x) + Σᵢ 𝒦(x, xᵢ) āᵢ,    āᵢ = −Σ_s η_s ℓ′ᵢ(s) / Σ_s η_s.

    If the optimizer has a state, such as momentum, fit āᵢ for each i by least squares
    over the training points x: min Σ_x ‖𝒮(x, xᵢ) − 𝒦(x, xᵢ) āᵢ‖². The normal equations
    are:

    Σ_x 𝒦(x, xᵢ)ᵀ𝒦(x, xᵢ) āᵢ = Σ_x 𝒦(x, xᵢ)ᵀ𝒮(x, xᵢ).
    """

    def predict(self, matrices: RunMatrices) -> Prediction:
        refuse_none(matrices.path.kernel)
        coefficients = matrices.training.mean_coefficients
        if coefficients is None:
            coefficients = fitted_coefficients(matrices)
        outputs = matrices.outputs_after(
            apply_kernel(matrices.path.kernel, coefficients)
        )
        return Prediction(outputs, f"𝒦 by {matrices.rule}", is_path_sum=True)


def fitted_coefficients(matrices: RunMatrices) -> Float[Tensor, "train out"]:
    """Return the least-squares solutions āᵢ of 𝒮(x, xᵢ) = 𝒦(x, xᵢ) āᵢ over the
    attributed training points x."""
    points = matrices.attributed[: matrices.train].nonzero()[:, 0]
    if not len(points):
        raise DoesNotApply(
            "no training example is attributed: add train to path.queries"
        )
    # [train, point·out, out_]
    kernel = matrices.path.kernel[points].permute(2, 0, 1, 3).flatten(1, 2)
    parts = matrices.path.contributions[points].flatten(0, 1).t()[..., None]
    if not (kernel.isfinite().all() and parts.isfinite().all()):
        raise DoesNotApply("the path kernel among the training examples is not finite")
    # 𝒮 is in float64
    fitted: Tensor = torch.linalg.pinv(kernel) @ parts.to(kernel.dtype)
    return fitted[..., 0]


class KernelRegression(AbstractMachine):
    """Kernel regression with the path kernel 𝒦. Its targets are f_T − f_0 at the
    training examples."""

    def predict(self, matrices: RunMatrices) -> Prediction:
        refuse_none(matrices.path.kernel)
        if matrices.measured is not None:
            raise DoesNotApply(
                f"the path kernel explains the {matrices.measured.name}: needs path.measure=output"
            )
        if matrices.read.start:
            raise DoesNotApply(
                "no path kernel at the training examples: add train to path.queries"
            )
        prediction = regression_prediction(matrices.path.kernel, matrices)
        return Prediction(
            prediction.outputs,
            f"𝒦 by {matrices.rule}, {prediction.detail}",
            is_path_sum=True,
        )


# --- Regression with a kernel that may be asymmetric or singular, by the pseudo-inverse
#
# f̂(x) = f_0(x) + K(x, X) K(X, X)⁺ (f_T(X) − f_0(X))
#
# Singular values below `cutoff` times the largest one count as zero.


def regression_prediction(
    kernel: Float[Tensor, "query out train out_"], matrices: RunMatrices
) -> Prediction:
    """Return the prediction of kernel regression,
    whose targets are f_T − f_0 at the training examples."""
    matrix = train_matrix(kernel)
    if kernel.shape[1] < kernel.shape[3]:
        raise DoesNotApply("no path kernel at some outputs: needs path.outputs=all")
    if matrix.isnan().all():
        raise DoesNotApply(
            "no path kernel at the training examples: add train to path.queries"
        )
    attributed = matrices.attributed[: matrices.train]
    if matrix.isnan().any() and not attributed.all():
        raise DoesNotApply(
            f"{int(attributed.sum())} of {matrices.train} training examples are attributed: raise path.attributed"
        )
    if not matrix.isfinite().all():
        raise DoesNotApply("the kernel among the training examples is not finite")
    # a = K⁺ (f_T − f_0), f̂ = f_0 + K a
    U, singular, Vh = torch.linalg.svd(matrix)
    cutoff = len(matrix) * torch.finfo(matrix.dtype).eps
    used = singular > cutoff * singular.max()
    inverse = torch.where(used, 1 / singular, 0.0)
    coefficients = Vh.mH @ (inverse * (U.mH @ matrices.train_change.flatten()))
    outputs = matrices.start + apply_kernel(
        kernel, coefficients.view(matrices.targets.shape)
    )
    return Prediction(
        outputs, f"rank {int(used.sum())}/{len(matrix)}, cut-off {cutoff:.0e}"
    )


# --- Training with a fixed kernel Θ, in function space.
#
# For the loss ½c‖f − y‖² with example weights w/c, gradient flow has a closed form at
# time t. The function g acts on the eigenvalues λ of Θ(X, X):
#
#     f_t(x) = f_0(x) − Θ(x, X) g(Θ(X, X)) (f_0(X) − y),    g(λ) = (1 − e^{−twλ})/λ
#
# For any other loss, repeat the steps of the run. If the optimizer has one step size for
# all weights, then with coefficients a_s, and the factor ρ_s of weight decay,
#
#     f_s(x) = f_0(x) + Θ(x, X) a_s + (ρ_s − 1) J(x)·θ_0.
#
# For gradient descent, f_{s+1}(x) = f_s(x) − η_s Θ(x, X) ℓ′(f_s(X)).


def flow_prediction(
    kernel: Float[Tensor, "query out train out_"], matrices: RunMatrices
) -> Float[Tensor, "query out"]:
    """Return f_t of the gradient flow at the end of training."""
    missing = (matrices.targets - matrices.start[: matrices.train]).flatten()[:, None]
    gain = FlowGain(matrices.training.time * matrices.training.weight)
    coefficients = modes_of(train_matrix(kernel)).at(gain)(missing)
    return matrices.start + apply_kernel(
        kernel, coefficients.view(matrices.targets.shape)
    )


def descent_prediction(
    kernel: Float[Tensor, "query out train out_"], matrices: RunMatrices
) -> Float[Tensor, "query out"]:
    """Return f_T after the steps of the run, taken with a fixed kernel."""
    train = matrices.train
    coefficients, remaining = matrices.training.repeat(
        train_matrix(kernel),
        matrices.start[:train],
        matrices.initial_weight_term[:train],
    )
    return (
        matrices.start
        + apply_kernel(kernel, coefficients)
        + (remaining - 1) * matrices.initial_weight_term
    )


class AbstractFrozen(AbstractMachine):
    """Training with a fixed kernel, from the initial outputs of the network.

    For a quadratic loss and plain gradient descent, the prediction is gradient flow in
    closed form. Otherwise, the kernel machine repeats the steps of the run."""

    @abstractmethod
    def kernel(self, matrices: RunMatrices) -> Float[Tensor, "query out train out_"]:
        """Return the fixed kernel."""

    @final
    def predict(self, matrices: RunMatrices) -> Prediction:
        kernel = self.kernel(matrices)
        # For a loss that is quadratic in f, gradient flow has a closed form.
        if matrices.training.is_quadratic and matrices.training.is_plain:
            return Prediction(
                flow_prediction(kernel, matrices),
                f"flow to t={matrices.training.time:.4g}",
            )
        return Prediction(
            descent_prediction(kernel, matrices), matrices.training.description
        )


class FrozenStart(AbstractFrozen):
    """Training for the same time with the fixed initial tangent kernel K_0."""

    def kernel(self, matrices: RunMatrices) -> Float[Tensor, "query out train out_"]:
        return matrices.kernel_start


class FrozenEnd(AbstractFrozen):
    """Training for the same time with the fixed final tangent kernel K_T."""

    def kernel(self, matrices: RunMatrices) -> Float[Tensor, "query out train out_"]:
        return matrices.kernel_end


class FrozenLimit(AbstractFrozen):
    """Training for the same time with the fixed tangent kernel K_∞
    of infinite width."""

    needs_limit = True

    def kernel(self, matrices: RunMatrices) -> Float[Tensor, "query out train out_"]:
        refuse_none(matrices.kernel_start)
        return matrices.limit_kernels.of_all(matrices.start.shape[1])


class Linearised(AbstractMachine):
    """The network linearised at its start, f_0(x) + J(θ_0; x)(θ − θ_0), trained with
    the same steps (Lee et al. 2019).

    In function space, these are steps with the fixed kernel K_0. Gradients are clipped
    by the factors that were recorded for the network."""

    def predict(self, matrices: RunMatrices) -> Prediction:
        return Prediction(
            descent_prediction(matrices.kernel_start, matrices),
            matrices.training.description,
        )


class NNGP(AbstractMachine):
    """The posterior mean of the network's Gaussian process at infinite width,
    without noise:

    f̂(x) = 𝒢(x, X) 𝒢(X, X)⁻¹ y.

    It describes Bayesian networks, and networks whose readout alone is trained. It does
    not describe networks whose layers are all trained."""

    needs_limit = True

    def predict(self, matrices: RunMatrices) -> Prediction:
        prior = matrices.limit_kernels.start
        if not matrices.training.is_quadratic:
            raise DoesNotApply("its posterior assumes the squared loss")
        try:
            posterior = condition(Kernels(prior[: matrices.train], prior))
        except Mistake as mistake:
            raise DoesNotApply(str(mistake)) from None
        return Prediction(posterior.mean(matrices.targets), "posterior mean")


# --- Controls: kernel machines with a kernel k that is independent of the network. It is
# a Gaussian kernel, or a random positive definite kernel:
#
#     k(x, x′) = exp(−‖x − x′‖²/2h²),  h the median distance between training examples;
#     k = A Aᵀ/r + I,                  a matrix over all r points, with the training
#                                      examples among them. A is an r × r matrix of
#                                      standard normal numbers.
#
# The controls named "identity" write the exact sum of contributions 𝒮 as a kernel
# machine with coefficients that depend on the query:
#
#     f̂(x) = f_0(x) + Σᵢ aᵢ(x) k(x, xᵢ),    aᵢ(x) = 𝒮(x, xᵢ)/k(x, xᵢ),
#
# This is exact for any kernel k. So an exact sum of this form is no evidence that the
# kernel explains the network. The controls named "regression" fit fixed coefficients. A
# random kernel then predicts new points no better than chance.


class RBFIdentity(AbstractMachine):
    """A control: a kernel machine with a Gaussian kernel, and with coefficients that
    depend on the query. With such coefficients, every kernel is exact."""

    control = True

    def predict(self, matrices: RunMatrices) -> Prediction:
        points, train = (
            matrices.inputs[matrices.read],
            matrices.inputs[: matrices.train],
        )
        width = median_distance(train)

        def rows(some: slice) -> Float[Tensor, "query train"]:
            kernel = gaussian_kernel(points[some], train, width)
            if (kernel == 0).any():
                raise DoesNotApply(
                    "the Gaussian kernel is 0 between distant points, and cannot be divided by"
                )
            return kernel

        return divide_and_multiply(matrices, rows, f"h={width:.3g}")


class RandomIdentity(AbstractMachine):
    """A control: a random positive definite kernel with coefficients
    that depend on the query."""

    control = True

    def predict(self, matrices: RunMatrices) -> Prediction:
        kernel = random_kernel(matrices)
        if (kernel == 0).any():
            raise DoesNotApply(
                "the random kernel is 0 between two points, and cannot be divided by"
            )
        return divide_and_multiply(
            matrices, kernel[matrices.read].__getitem__, f"rank {len(kernel)}"
        )


def divide_and_multiply(
    matrices: RunMatrices,
    rows: Callable[[slice], Float[Tensor, "query train"]],
    detail: str,
) -> Prediction:
    """Return Σᵢ aᵢ(x) k(x, xᵢ) with aᵢ(x) = 𝒮(x, xᵢ)/k(x, xᵢ), in blocks of rows."""
    parts = matrices.path.contributions
    changes = []
    for block in row_blocks(parts):
        kernel = rows(block)[:, None]
        changes.append((parts[block] / kernel * kernel).sum(2))
    change = torch.cat(changes)
    outputs = matrices.outputs_after(change + matrices.path.without_examples)
    return Prediction(outputs, f"{detail}, 𝒮 by {matrices.rule}", is_path_sum=True)


class RBFRegression(AbstractMachine):
    """A control: regression with a Gaussian kernel,
    which is independent of the network."""

    control = True

    def predict(self, matrices: RunMatrices) -> Prediction:
        refuse_none(matrices.kernel_start)
        train = matrices.inputs[: matrices.train]
        width = median_distance(train)
        kernel = gaussian_kernel(matrices.inputs, train, width)
        prediction = regression_prediction(
            for_each_output(kernel, matrices.start.shape[1]), matrices
        )
        return Prediction(prediction.outputs, f"h={width:.3g}, {prediction.detail}")


class RandomRegression(AbstractMachine):
    """A control: regression with a random positive definite kernel."""

    control = True

    def predict(self, matrices: RunMatrices) -> Prediction:
        refuse_none(matrices.kernel_start)
        return regression_prediction(
            for_each_output(random_kernel(matrices), matrices.start.shape[1]), matrices
        )


def gaussian_kernel(
    points: Float[Tensor, "query feature"],
    train: Float[Tensor, "train feature"],
    width: float,
) -> Float[Tensor, "query train"]:
    return torch.cdist(points, train).square_().div_(-2 * width**2).exp_()


def median_distance(points: Float[Tensor, "train feature"]) -> float:
    """Return the median of the nonzero distances between points,
    or 1 if all distances are zero.

    >>> median_distance(torch.tensor([[0.0], [3.0], [7.0]])), median_distance(torch.zeros(1, 1))
    (4.0, 1.0)
    """
    distances = torch.cdist(points, points).flatten().cpu().numpy()
    zeros = len(distances) - np.count_nonzero(distances)
    if zeros == len(distances):
        return 1.0
    middle = zeros + (len(distances) - zeros - 1) // 2
    distances.partition(middle)  # in place, to save memory
    return float(distances[middle])


def random_kernel(matrices: RunMatrices) -> Float[Tensor, "query train"]:
    """Return a random kernel between all points and the training examples,
    drawn with the run's seed."""
    points = len(matrices.inputs)
    factor = normal(stream("random kernel", matrices.seed), points, points)
    kernel = (factor @ factor[: matrices.train].t()).div_(points)
    kernel.diagonal().add_(1.0)
    return kernel.to(matrices.end)
