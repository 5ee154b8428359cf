"""A kernel machine: a prediction of the trained network from matrices alone.

The evidence is what a run leaves behind, over all points; the first `train` of them are the training examples. A
machine never sees a network, so it can be tried on matrices made by hand.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ntkexp.component import Component
from ntkexp.optimizer.base import AbstractOptimizer


@dataclass(frozen=True)
class PathKernel:
    """𝒦, 𝒮 and what weight decay added by one rule, and what is known of them (`diagnostics.contributions`)."""

    kernel: Float[Tensor, "probe out train out_"]
    contributions: Float[Tensor, "probe out train"]
    decay: Float[Tensor, "probe out"]
    detail: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)
    half_by: Float[Tensor, "probe out train"] | None = None  # share of the path's time, where that was seen


@dataclass(frozen=True)
class Course:
    """How training went, as far as outputs are concerned."""

    step_sizes: tuple[float, ...]
    output_gradient: Callable[[int, Float[Tensor, "train out"]], Float[Tensor, "train out"]]  # of step s at outputs f
    summed_gradient: Float[Tensor, "train out"]  # Σ_s η_s ℓ′(s)
    weight: float  # wᵢ of full-batch training
    is_squared: bool
    optimizer: AbstractOptimizer

    @property
    def is_flow(self) -> bool:
        """Whether training by small steps is a flow along the gradient of a quadratic function of f."""
        optimizer = self.optimizer
        plain = not (optimizer.remembers or optimizer.weight_decay or optimizer.clip_norm or optimizer.layers)
        return self.is_squared and plain

    @property
    def manner(self) -> str:
        """How a machine is trained that is trained like the network."""
        return f"flow to t={self.time:.4g}" if self.optimizer.flows else "same steps"

    @property
    def time(self) -> float:
        """Σ_s η_s."""
        return sum(self.step_sizes, start=0.0)


class DoesNotApply(Exception):
    """Why a machine has nothing to say about a run."""


@dataclass(frozen=True)
class Limit:
    """The kernels at infinite width, of one output: 𝒢 of the outputs before training, and Θ."""

    start: Float[Tensor, "probe train"]
    tangent: Float[Tensor, "probe train"]

    def of_all(self, outputs: int) -> Float[Tensor, "probe out train out_"]:
        """Θ of as many outputs, which do not know of one another."""
        each = torch.eye(outputs, dtype=self.tangent.dtype, device=self.tangent.device)
        return self.tangent[:, None, :, None] * each[:, None]


@dataclass(frozen=True)
class Evidence:
    """What machines are made of."""

    inputs: Float[Tensor, "probe feature"]
    train: int
    start: Float[Tensor, "probe out"]
    end: Float[Tensor, "probe out"]
    targets: Float[Tensor, "train out"]
    paths: Mapping[str, PathKernel]
    kernel_start: Float[Tensor, "probe out train out_"]
    kernel_end: Float[Tensor, "probe out train out_"]
    start_pull: Float[Tensor, "probe out"]  # J(θ_0)·θ_0, where weights decay
    attributed: Bool[Tensor, " probe"]  # the points at which there are 𝒦 and 𝒮,
    integrated: Sequence[int]  # and the outputs at which there are
    limit: Limit | DoesNotApply
    course: Course

    @property
    def rule(self) -> str:
        """The first rule of the run, whose 𝒦 and 𝒮 the machines use that need one."""
        return next(iter(self.paths))

    @property
    def path(self) -> PathKernel:
        """By that rule."""
        return self.paths[self.rule]

    @property
    def known_limit(self) -> Limit:
        """The kernels at infinite width, or why there are none."""
        if isinstance(self.limit, DoesNotApply):
            raise self.limit
        return self.limit

    @property
    def learned(self) -> Float[Tensor, "train out"]:
        """f_T − f_0 on the training examples."""
        return (self.end - self.start)[: self.train]


@dataclass(frozen=True)
class Prediction:
    """f̂ at every point (`partial`: where there are 𝒦 and 𝒮), the numbers that the machine chose, what else to know."""

    outputs: Float[Tensor, "probe out"]
    detail: str = ""
    note: str = ""
    partial: bool = False


class AbstractMachine(Component):
    """One rung of the ladder."""

    @property
    def needs_limit(self) -> bool:
        """Whether it asks for the kernels at infinite width, which are computed for it alone."""
        return False

    @abstractmethod
    def predict(self, evidence: Evidence) -> Prediction:
        """f̂, or `DoesNotApply`."""


def applied(
    kernel: Float[Tensor, "probe out train out_"], coefficients: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out"]:
    """Σᵢ K(x, xᵢ) aᵢ."""
    return (kernel.flatten(2).flatten(0, 1) @ coefficients.flatten()).view(kernel.shape[:2])


def square(kernel: Float[Tensor, "probe out train out_"]) -> Float[Tensor, "row column"]:
    """The kernel among training examples, as a matrix."""
    return kernel[: kernel.shape[2]].flatten(2).flatten(0, 1)
