"""The evidence: what a run leaves behind, over all points; the first `train` of them are the training examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ntkexp.machine.training import Training


class DoesNotApply(Exception):
    """Why a machine has nothing to say about a run."""


@dataclass(frozen=True, kw_only=True)
class PathKernel:
    """𝒦, 𝒮 and what weight decay added by one rule, and what is known of them (`diagnostics.contributions`)."""

    kernel: Float[Tensor, "read integrated kept out_"]  # of all training examples, or of none
    contributions: Float[Tensor, "read integrated train"]
    decay: Float[Tensor, "read integrated"]
    detail: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)
    half_by: Float[Tensor, "read integrated train"] | None = None  # share of the path's time, where that was seen


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
    """What machines are made of."""

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
        """𝒦 and 𝒮 by that rule."""
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

    def after(self, change: Float[Tensor, "read integrated"]) -> Float[Tensor, "probe out"]:
        """f_0 and a change of it at the points and outputs at which the path was integrated; NaN at others."""
        outs = list(self.integrated)
        known = self.start[self.read, outs] + change
        outputs = known.new_full(self.start.shape, torch.nan)
        outputs[self.read, outs] = known
        return outputs

    @property
    def learned(self) -> Float[Tensor, "train out"]:
        """f_T − f_0 on the training examples."""
        return (self.end - self.start)[: self.train]
