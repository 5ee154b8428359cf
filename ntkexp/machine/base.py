"""The interface of kernel machines. A kernel machine predicts the outputs of the
trained network from matrices.

It receives the matrices of a run (`RunMatrices`), but no network. It can therefore be
tested on small matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ntkexp.component import Component
from ntkexp.measure import AbstractMeasure, MeasuredPoints


class Repeated(NamedTuple):
    """The result of repeating a run with a fixed kernel Θ: the coefficients a and the
    factor ρ in f_T = f_0 + Θ(·, X) a + (ρ − 1) J·θ_0. J is the Jacobian at θ_0."""

    coefficients: Float[Tensor, "train out"]  # a
    # ρ: weight decay has multiplied the initial weights by this factor
    remaining: Float[Tensor, ""]


Repeat: TypeAlias = Callable[
    [
        Float[Tensor, "row column"],
        Float[Tensor, "train out"],
        Float[Tensor, "train out"],
    ],
    Repeated,
]
"""A function (Θ(X, X), f_0(X), J(X)·θ_0) ↦ `Repeated`, which repeats the run with the
fixed kernel Θ.

Weight decay multiplies the third argument by ρ. The function may raise `DoesNotApply`."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Properties of a run's training, which kernel machines need to repeat it."""

    time: float  # Σ_s η_s, the sum of the step sizes
    # w max ℓ″ of full-batch training, where w is the weight of an example in the objective
    weight: float
    # True if the loss is quadratic in the outputs, with its minimum at the targets
    is_quadratic: bool
    # True for gradient descent or flow with one step size for all weights, without
    # momentum, weight decay, clipping, changes of the data and sums over mini-batches
    is_plain: bool
    is_flow: bool  # True for gradient flow
    mean_coefficients: Float[Tensor, "train out"] | None
    """−Σ_s η_s ℓ′(s)/Σ_s η_s: minus the time average of ℓ′, the derivatives of the loss
    by the outputs at the training examples. None for an optimizer with momentum or with
    a step size per weight."""
    repeat: Repeat

    @property
    def description(self) -> str:
        """A description of the training, for the rows of kernel
        machines that repeat it."""
        return f"flow to t={self.time:.4g}" if self.is_flow else "same steps"


class DoesNotApply(Exception):
    """Raised if a kernel machine has no prediction for a run.
    The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class PathKernel:
    """The path kernel 𝒦, the contributions 𝒮 and the effect of weight decay,
    by one path rule.

    The axis `read` holds the points `RunMatrices.read`, and the axis `integrated` the
    outputs `RunMatrices.integrated`: 𝒦 and 𝒮 were computed for these. The axis `kept`
    holds all training examples, or has length 0 if 𝒦 was not stored.
    """

    kernel: Float[Tensor, "read integrated kept out_"]
    contributions: Float[Tensor, "read integrated train"]
    decay: Float[Tensor, "read integrated"]
    # change of the outputs by gradients that are only rounding error
    rounding: Float[Tensor, "read integrated"] | None = None
    detail: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)
    half_by: Float[Tensor, "read integrated train"] | None = None
    """The fraction of the training time at which each contribution reached half of its
    value."""

    @property
    def without_examples(self) -> Float[Tensor, "read integrated"]:
        """The part of the change that no example caused: weight decay and rounding."""
        return self.decay if self.rounding is None else self.decay + self.rounding


def for_each_output(
    kernel: Float[Tensor, "query train"], outputs: int
) -> Float[Tensor, "query out train out_"]:
    """Expand the kernel of one output to all outputs, by the identity matrix of the
    outputs."""
    identity = torch.eye(outputs, dtype=kernel.dtype, device=kernel.device)
    return kernel[:, None, :, None] * identity[:, None]


@dataclass(frozen=True, kw_only=True)
class LimitKernels:
    """The kernels of one output at infinite width: `start` is the NNGP kernel 𝒢, and
    `tangent` is the tangent kernel Θ."""

    start: Float[Tensor, "query train"]
    tangent: Float[Tensor, "query train"]

    def of_all(self, outputs: int) -> Float[Tensor, "query out train out_"]:
        """Return the tangent kernel of all outputs,
        which is Θ(x, x′) times the identity."""
        return for_each_output(self.tangent, outputs)

    def traced(self, outputs: int) -> Float[Tensor, "query 1 train 1"]:
        """Return the trace of the tangent kernel over the outputs."""
        return outputs * self.tangent[:, None, :, None]


@dataclass(frozen=True, kw_only=True)
class RunMatrices:
    """The results of a run at all points. Kernel machines predict from these results.
    The first `train` points are the training examples."""

    inputs: Float[Tensor, "query feature"]
    train: int
    start: Float[Tensor, "query out"]
    end: Float[Tensor, "query out"]
    targets: Float[Tensor, "train out"]
    paths: Mapping[str, PathKernel]
    kernel_start: Float[Tensor, "query out kept out_"]
    kernel_end: Float[Tensor, "query out kept out_"]
    # J(θ_0)·θ_0 if there is weight decay, else 0
    initial_weight_term: Float[Tensor, "query out"]
    # the points that have rows in 𝒦 and 𝒮: all points, or all except the training
    # examples
    read: slice
    # the points with a path kernel 𝒦 and contributions 𝒮
    attributed: Bool[Tensor, " query"]
    integrated: Sequence[int]  # the outputs that have 𝒦 and 𝒮
    limit: LimitKernels | DoesNotApply
    training: Training
    seed: int = 0  # the run's seed, for random kernels
    # The measure of the outputs that 𝒦 and 𝒮 explain,
    # or None if they explain the outputs
    measured: MeasuredPoints | None = None
    measure: Callable[[AbstractMeasure], MeasuredPoints | None] | None = None
    """A function that attaches the targets of all points to a measure. It may raise a
    `Mistake`."""

    @property
    def keeps_kernels(self) -> bool:
        """True if tangent kernels were stored for every pair of outputs."""
        return self.kernel_start.shape[2] > 0

    @property
    def rule(self) -> str:
        """The first path rule of the run, whose 𝒦 and 𝒮 the kernel machines use."""
        return next(iter(self.paths))

    @property
    def path(self) -> PathKernel:
        return self.paths[self.rule]

    @property
    def limit_kernels(self) -> LimitKernels:
        """The kernels at infinite width. Raises `DoesNotApply` if they are unknown."""
        if isinstance(self.limit, DoesNotApply):
            raise self.limit
        return self.limit

    def query_contributions(self, rule: str) -> Float[Tensor, "point integrated train"]:
        """Return the contributions 𝒮 by a path rule,
        at all points except the training examples."""
        return self.paths[rule].contributions[self.train - self.read.start :]

    def explained(
        self, outputs: Float[Tensor, "query out"]
    ) -> Float[Tensor, "query explained"]:
        """Return the measure that the run explains,
        or the outputs if it explains the outputs."""
        return outputs if self.measured is None else self.measured(outputs)

    def outputs_after(
        self, change: Float[Tensor, "read integrated"]
    ) -> Float[Tensor, "query explained"]:
        """Return the explained quantity (f, or its measure) before training, plus
        `change`. Points and outputs without contributions get NaN."""
        outs = list(self.integrated)
        start = self.explained(self.start)
        changed = start[self.read, outs] + change
        outputs = changed.new_full(start.shape, torch.nan)
        outputs[self.read, outs] = changed
        return outputs

    @property
    def train_change(self) -> Float[Tensor, "train out"]:
        return (self.end - self.start)[: self.train]


@dataclass(frozen=True)
class Prediction:
    """The prediction f̂ of a kernel machine at every point."""

    outputs: Float[Tensor, "query out"]
    detail: str = ""  # settings and results to show, such as a rank
    note: str = ""
    # True for sums over the path. They are NaN where 𝒦 and 𝒮 were not computed. If 𝒦
    # and 𝒮 explain a measure of the outputs, the sum predicts this measure.
    is_path_sum: bool = False
    # a measure to apply to both f̂ and the network's outputs before they are compared;
    # None to compare the outputs
    measure: MeasuredPoints | None = None


class AbstractMachine(Component):
    """A kernel machine, which is one row of the comparison. A kernel machine with
    `control` is not meant to explain the network, so reports never name it as the
    nearest kernel machine."""

    control: ClassVar[bool] = False
    # True if the machine uses the kernels at infinite width
    needs_limit: ClassVar[bool] = False

    @abstractmethod
    def predict(self, matrices: RunMatrices) -> Prediction:
        """Return the predicted outputs, or raise `DoesNotApply`."""


def apply_kernel(
    kernel: Float[Tensor, "query out train out_"],
    coefficients: Float[Tensor, "train out_"],
) -> Float[Tensor, "query out"]:
    """Return Σᵢ K(x, xᵢ) aᵢ."""
    return (kernel.flatten(2).flatten(0, 1) @ coefficients.flatten()).view(
        kernel.shape[:2]
    )


def train_matrix(
    kernel: Float[Tensor, "query out train out_"],
) -> Float[Tensor, "row column"]:
    """Return the kernel among the training examples as a matrix
    [train · out, train · out]."""
    refuse_none(kernel)
    return kernel[: kernel.shape[2]].flatten(2).flatten(0, 1)


def refuse_none(kernel: Float[Tensor, "query out train out_"]) -> None:
    """Raise `DoesNotApply` if the kernel was not stored. Its axis of training examples
    then has length 0."""
    if not kernel.shape[2]:
        raise DoesNotApply(
            "kernels of all pairs of outputs were not stored: needs path.kernels=all"
        )
