"""The interface of kernel machines: each predicts the trained network from matrices.

A kernel machine receives the evidence of a run and no network, so it can be tested on small
matrices.
"""

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
    """The end of training with a fixed kernel Θ: f = f_0 + Θ(·, X) a + (ρ − 1) J·θ_0."""

    coefficients: Float[Tensor, "train out"]  # a
    remaining: Float[Tensor, ""]  # ρ, the factor that decay leaves on the initial weights


Repeat: TypeAlias = Callable[
    [Float[Tensor, "row column"], Float[Tensor, "train out"], Float[Tensor, "train out"]], Repeated
]
"""Repeats training with fixed Θ(X, X) from f_0(X); decay shrinks J(X)·θ_0. It may raise
`DoesNotApply`.
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of a run, as far as kernel machines need it."""

    time: float  # Σ_s η_s
    weight: float  # wᵢℓ″ of full-batch training, if it is constant
    is_quadratic: bool  # the loss is quadratic in the outputs, with its minimum at the targets
    is_plain: bool  # full-batch gradient descent or flow, with one step size for all weights
    is_flow: bool  # gradient flow
    mean_coefficients: Float[Tensor, "train out"] | None
    """−Σ_s η_s ℓ′(s)/Σ_s η_s, or None for an optimizer with memory."""
    repeat: Repeat

    @property
    def manner(self) -> str:
        """The training in words, for a kernel machine that repeats it."""
        return f"flow to t={self.time:.4g}" if self.is_flow else "same steps"


class DoesNotApply(Exception):
    """The reason why a kernel machine has no prediction for a run."""


@dataclass(frozen=True, kw_only=True)
class PathKernel:
    """The sums over the path by one rule: 𝒦, 𝒮 and the effect of weight decay, with their
    `diagnostics`.
    """

    kernel: Float[Tensor, "read integrated kept out_"]  # with all training examples, or with none
    contributions: Float[Tensor, "read integrated train"]
    decay: Float[Tensor, "read integrated"]
    rounding: Float[Tensor, "read integrated"] | None = (
        None  # the effect of gradients that are rounding
    )
    detail: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)
    half_by: Float[Tensor, "read integrated train"] | None = None
    """The share of the path's time after which half of each contribution was reached, if known."""

    @property
    def without_examples(self) -> Float[Tensor, "read integrated"]:
        """The part of the change that no example caused: weight decay and rounding."""
        return self.decay if self.rounding is None else self.decay + self.rounding


@dataclass(frozen=True, kw_only=True)
class LimitKernels:
    """The kernels of one output at infinite width: 𝒢, the covariance before training, and Θ."""

    start: Float[Tensor, "query train"]
    tangent: Float[Tensor, "query train"]

    def of_all(self, outputs: int) -> Float[Tensor, "query out train out_"]:
        """Return Θ for independent outputs: a multiple of the identity."""
        identity = torch.eye(outputs, dtype=self.tangent.dtype, device=self.tangent.device)
        return self.tangent[:, None, :, None] * identity[:, None]

    def traced(self, outputs: int) -> Float[Tensor, "query 1 train 1"]:
        """Return the trace of Θ over the outputs."""
        return outputs * self.tangent[:, None, :, None]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The results of a run at all points, with the `train` training examples first."""

    inputs: Float[Tensor, "query feature"]
    train: int
    start: Float[Tensor, "query out"]
    end: Float[Tensor, "query out"]
    targets: Float[Tensor, "train out"]
    paths: Mapping[str, PathKernel]
    kernel_start: Float[Tensor, "query out kept out_"]
    kernel_end: Float[Tensor, "query out kept out_"]
    start_pull: Float[Tensor, "query out"]  # J(θ_0)·θ_0, if weights decay
    read: slice  # the points of 𝒦 and 𝒮: all points, or all but the training examples
    attributed: Bool[Tensor, " query"]  # the points where 𝒦 and 𝒮 are known
    integrated: Sequence[int]  # the outputs where they are known
    limit: LimitKernels | DoesNotApply
    training: Training
    seed: int = 0  # of the run, for random kernels
    measured: MeasuredPoints | None = (
        None  # the measure whose path is integrated, if it is not the outputs
    )
    measure: Callable[[AbstractMeasure], MeasuredPoints | None] | None = None
    """Returns another measure at these points, or raises a `Mistake`."""

    @property
    def keeps_kernels(self) -> bool:
        """True if kernels were stored for every pair of outputs."""
        return self.kernel_start.shape[2] > 0

    @property
    def rule(self) -> str:
        """The first path rule of the run. Kernel machines use its 𝒦 and 𝒮."""
        return next(iter(self.paths))

    @property
    def path(self) -> PathKernel:
        return self.paths[self.rule]

    @property
    def known_limit(self) -> LimitKernels:
        """The kernels at infinite width. Raises `DoesNotApply` if there are none."""
        if isinstance(self.limit, DoesNotApply):
            raise self.limit
        return self.limit

    def elsewhere(self, rule: str) -> Float[Tensor, "point integrated train"]:
        """Return 𝒮 by a rule at all points but the training examples."""
        return self.paths[rule].contributions[self.train - self.read.start :]

    def explained(self, outputs: Float[Tensor, "query out"]) -> Float[Tensor, "query explained"]:
        """Return the explained quantity at all points: the outputs, or a measure of them."""
        return outputs if self.measured is None else self.measured(outputs)

    def after(self, change: Float[Tensor, "read integrated"]) -> Float[Tensor, "query explained"]:
        """Return f_0, or its measure, plus a change. Points and outputs without an integrated path
        are NaN.
        """
        outs = list(self.integrated)
        start = self.explained(self.start)
        changed = start[self.read, outs] + change
        outputs = changed.new_full(start.shape, torch.nan)
        outputs[self.read, outs] = changed
        return outputs

    @property
    def learned(self) -> Float[Tensor, "train out"]:
        return (self.end - self.start)[: self.train]


@dataclass(frozen=True)
class Prediction:
    """The prediction f̂ of a kernel machine at every point."""

    outputs: Float[Tensor, "query out"]
    detail: str = ""  # numbers that the kernel machine chose
    note: str = ""
    partial: bool = (
        False  # known only where 𝒦 and 𝒮 are; of the measure, if the path is that of a measure
    )
    through: MeasuredPoints | None = None  # the measure that compares f̂ with the network


class AbstractMachine(Component):
    """A kernel machine: one row of the comparison with the network.

    A `control` uses nothing of the network, so it is never named the nearest kernel machine.
    """

    control: ClassVar[bool] = False
    needs_limit: ClassVar[bool] = False  # the kernels at infinite width are computed only if needed

    @abstractmethod
    def predict(self, evidence: Evidence) -> Prediction:
        """Return the prediction, or raise `DoesNotApply`."""


def apply_kernel(
    kernel: Float[Tensor, "query out train out_"], coefficients: Float[Tensor, "train out_"]
) -> Float[Tensor, "query out"]:
    """Return Σᵢ K(x, xᵢ) aᵢ."""
    return (kernel.flatten(2).flatten(0, 1) @ coefficients.flatten()).view(kernel.shape[:2])


def train_matrix(kernel: Float[Tensor, "query out train out_"]) -> Float[Tensor, "row column"]:
    """Return the kernel among training examples as a matrix."""
    refuse_none(kernel)
    return kernel[: kernel.shape[2]].flatten(2).flatten(0, 1)


def refuse_none(kernel: Float[Tensor, "query out train out_"]) -> None:
    """Raise if the kernel was not stored: it then has no training examples."""
    if not kernel.shape[2]:
        raise DoesNotApply("no kernel for every pair of outputs was kept: needs path.kernels=all")
