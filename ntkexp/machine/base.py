"""A kernel machine: a prediction of the trained network from matrices alone.

A machine sees the evidence that a run leaves and never a network, so it can be tried on matrices made by hand.
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
    remaining: Float[Tensor, ""]  # ρ, what decay leaves of the weights at the start


Repeat: TypeAlias = Callable[
    [Float[Tensor, "row column"], Float[Tensor, "train out"], Float[Tensor, "train out"]], Repeated
]
"""Repeats the steps of training with a fixed Θ(X, X), from f_0(X) on; decay shrinks J(X)·θ_0. Or `DoesNotApply`."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How training went, as far as outputs are concerned: numbers and matrices, and the steps to be taken once more."""

    time: float  # Σ_s η_s
    weight: float  # wᵢℓ″ of full-batch training, where it is the same everywhere
    is_quadratic: bool  # in the outputs, least at the targets
    is_plain: bool  # whether the gradient of the moment, of all examples, alone moves the weights, all of them alike
    is_flow: bool  # whether they move on a curve instead of in steps
    mean_coefficients: (
        Float[Tensor, "train out"] | None
    )  # −Σ_s η_s ℓ′(s)/Σ_s η_s; none where gradients are remembered
    repeat: Repeat

    @property
    def manner(self) -> str:
        """What is said of a machine that repeats the training of the network."""
        return f"flow to t={self.time:.4g}" if self.is_flow else "same steps"


class DoesNotApply(Exception):
    """Why a machine has nothing to say about a run."""


@dataclass(frozen=True, kw_only=True)
class PathKernel:
    """𝒦, 𝒮 and what weight decay added by one rule, and what is known of them (`diagnostics`)."""

    kernel: Float[Tensor, "read integrated kept out_"]  # of all training examples, or of none
    contributions: Float[Tensor, "read integrated train"]
    decay: Float[Tensor, "read integrated"]
    rounding: Float[Tensor, "read integrated"] | None = None  # moved by gradients that are rounding
    detail: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)
    half_by: Float[Tensor, "read integrated train"] | None = (
        None  # share of the path's time, where that was seen
    )

    @property
    def without_examples(self) -> Float[Tensor, "read integrated"]:
        """The part of the change that no example caused: weight decay and rounding."""
        return self.decay if self.rounding is None else self.decay + self.rounding


@dataclass(frozen=True, kw_only=True)
class LimitKernels:
    """The kernels at infinite width are those of one output: 𝒢 of the outputs before training, and Θ."""

    start: Float[Tensor, "probe train"]
    tangent: Float[Tensor, "probe train"]

    def of_all(self, outputs: int) -> Float[Tensor, "probe out train out_"]:
        """Θ of as many outputs, which do not know of one another."""
        each = torch.eye(outputs, dtype=self.tangent.dtype, device=self.tangent.device)
        return self.tangent[:, None, :, None] * each[:, None]

    def traced(self, outputs: int) -> Float[Tensor, "probe 1 train 1"]:
        """The trace of that over the outputs."""
        return outputs * self.tangent[:, None, :, None]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run leaves behind, over all points; the first `train` of them are the training examples."""

    inputs: Float[Tensor, "probe feature"]
    train: int
    start: Float[Tensor, "probe out"]
    end: Float[Tensor, "probe out"]
    targets: Float[Tensor, "train out"]
    paths: Mapping[str, PathKernel]
    kernel_start: Float[Tensor, "probe out kept out_"]
    kernel_end: Float[Tensor, "probe out kept out_"]
    start_pull: Float[Tensor, "probe out"]  # J(θ_0)·θ_0, where weights decay
    read: slice  # the points that 𝒦 and 𝒮 are about: all, or all but the training examples;
    attributed: Bool[Tensor, " probe"]  # those at which they are known,
    integrated: Sequence[int]  # and the outputs at which they are
    limit: LimitKernels | DoesNotApply
    training: Training
    seed: int = 0  # of the run, for what machines draw
    measured: MeasuredPoints | None = None  # what the path is integrated of, if not of the outputs
    measure: Callable[[AbstractMeasure], MeasuredPoints | None] | None = (
        None  # others at these points, or a mistake
    )

    @property
    def keeps_kernels(self) -> bool:
        """Whether kernels of points with training examples were made, for every pair of outputs."""
        return self.kernel_start.shape[2] > 0

    @property
    def rule(self) -> str:
        """The first rule of the run, whose 𝒦 and 𝒮 the machines use that need one."""
        return next(iter(self.paths))

    @property
    def path(self) -> PathKernel:
        return self.paths[self.rule]

    @property
    def known_limit(self) -> LimitKernels:
        """The kernels at infinite width, or why there are none."""
        if isinstance(self.limit, DoesNotApply):
            raise self.limit
        return self.limit

    def elsewhere(self, rule: str) -> Float[Tensor, "point integrated train"]:
        """𝒮 by a rule at the points that are no training examples."""
        return self.paths[rule].contributions[self.train - self.read.start :]

    def explained(self, outputs: Float[Tensor, "probe out"]) -> Float[Tensor, "probe explained"]:
        """What is explained of outputs at all points: these, or a measure of them."""
        return outputs if self.measured is None else self.measured(outputs)

    def after(self, change: Float[Tensor, "read integrated"]) -> Float[Tensor, "probe explained"]:
        """f_0, or its measure, and a change of it at the points and outputs at which the path was integrated; NaN at
        others.
        """
        outs, start = list(self.integrated), self.explained(self.start)
        changed = start[self.read, outs] + change
        outputs = changed.new_full(start.shape, torch.nan)
        outputs[self.read, outs] = changed
        return outputs

    @property
    def learned(self) -> Float[Tensor, "train out"]:
        return (self.end - self.start)[: self.train]


@dataclass(frozen=True)
class Prediction:
    """f̂ at every point (`partial`: where there are 𝒦 and 𝒮, of what the path was integrated of), the numbers that the
    machine chose, what else to know; and the measure by which f̂ is compared with the network, if by one.
    """

    outputs: Float[Tensor, "probe out"]
    detail: str = ""
    note: str = ""
    partial: bool = False
    through: MeasuredPoints | None = None


class AbstractMachine(Component):
    """A machine is one rung of the ladder. A control knows nothing of the network, so it is never named the nearest
    machine, however small its error.
    """

    control: ClassVar[bool] = False
    needs_limit: ClassVar[bool] = (
        False  # asks for the kernels at infinite width, which are computed for it alone
    )

    @abstractmethod
    def predict(self, evidence: Evidence) -> Prediction:
        """f̂, or `DoesNotApply`."""


def apply_kernel(
    kernel: Float[Tensor, "probe out train out_"], coefficients: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out"]:
    """Σᵢ K(x, xᵢ) aᵢ."""
    return (kernel.flatten(2).flatten(0, 1) @ coefficients.flatten()).view(kernel.shape[:2])


def train_matrix(kernel: Float[Tensor, "probe out train out_"]) -> Float[Tensor, "row column"]:
    """Put the kernel among training examples as a matrix."""
    refuse_none(kernel)
    return kernel[: kernel.shape[2]].flatten(2).flatten(0, 1)


def refuse_none(kernel: Float[Tensor, "probe out train out_"]) -> None:
    """A kernel that was not kept has no training examples."""
    if not kernel.shape[2]:
        raise DoesNotApply("no kernel for every pair of outputs was kept: needs path.kernels=all")
