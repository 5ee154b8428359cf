"""What is logged of a tangent kernel that is kept: how far it has moved, its eigenvalues, and what steps make of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ntkexp.diagnostics.activation_pattern import pattern
from ntkexp.diagnostics.drift import alignment, drift, label_alignment
from ntkexp.diagnostics.spectrum import DENSE, TOP, largest, spectrum
from ntkexp.machine.evidence import DoesNotApply
from ntkexp.path.network_view import NetworkView
from ntkexp.run.row import Row
from ntkexp.run.setting import Setting
from ntkexp.run.tuned_units import SELECTIVITY, unit_selectivity
from ntkexp.shapes import Weights

RESIDUAL_TOPS = (1, 5, 10)
KERNEL_COLUMNS = (
    *("drift", "alignment", "limit_distance", "limit_alignment", "label_alignment"),
    *("trace", "lambda_max", "condition", "effective_rank"),
    *(f"eigenvalue_{k + 1}" for k in range(TOP)),
    *(f"residual_top_{k}" for k in RESIDUAL_TOPS),
    *("stability", "pattern_change"),
)
SKETCH_COLUMNS = ("sketch_error",)


@dataclass(frozen=True)
class KernelObserver:
    """Compares the kernels that it sees with the first."""

    setting: Setting

    @property
    def columns(self) -> tuple[str, ...]:
        """The part of the header that is of kernels."""
        tasks = (SELECTIVITY,) if self.setting.problem.phases else ()
        return (*KERNEL_COLUMNS, *(SKETCH_COLUMNS if self.setting.points.sketch else ()), *tasks)

    @cached_property
    def train_kernel(self) -> Float[Tensor, "train kept train kept_"]:
        """K_0 among the training examples."""
        return self.setting.start.kernel[: self.setting.points.train]

    @cached_property
    def train_limit(self) -> Float[Tensor, "train kept train kept_"] | None:
        """K_∞ among the training examples, where it is known."""
        if isinstance(self.setting.start.limit, DoesNotApply):
            return None
        limit, outputs = self.setting.start.limit, self.setting.problem.targets.shape[1]
        whole = limit.of_all(outputs) if self.setting.points.makes_kernels else limit.traced(outputs)
        return whole[: self.setting.points.train]

    @cached_property
    def pattern(self) -> Bool[Tensor, " unit"]:
        """The activation pattern at the start."""
        return self.pattern_at(self.setting.problem.weights)

    def pattern_at(self, weights: Weights) -> Bool[Tensor, " unit"]:
        """The activation pattern on the training examples."""
        points = self.setting.points
        return torch.cat([pattern(points.tape(weights, block)) for block in points.train_blocks])

    def row(
        self,
        kernel: Float[Tensor, "point kept train kept_"],
        view: NetworkView,
        step: int,
        step_size: float | None,
    ) -> Row:
        """The numbers of a tangent kernel, or of its trace over outputs; λ_max is always that of the kernel.

        How stable a step is depends on the examples that it is on.
        """
        train = self.setting.points.train
        here, start, targets = kernel[:train], self.train_kernel, self.setting.problem.targets[:train]
        changed = self.pattern_at(view.weights) != self.pattern
        row: Row = {
            "drift": drift(here, start),
            "alignment": alignment(here, start),
            "label_alignment": label_alignment(here, targets),
            "trace": float(here.flatten(2).flatten(0, 1).trace()),
            "pattern_change": float(changed.double().mean()) if len(changed) else None,
        }
        if (limit := self.train_limit) is not None:
            row["limit_distance"] = drift(here, limit)
            row["limit_alignment"] = alignment(here, limit)
        row |= self.modes(here, view.train_outputs - targets)
        if not self.setting.points.makes_kernels:
            row["lambda_max"] = view.largest
        if step_size is not None and (top := row["lambda_max"]) is not None:
            weight, curvature = self.setting.descent.weight, self.setting.experiment.loss.curvature
            if self.setting.domain.switches:
                phase = self.setting.descent.phase(step)
                weight, top = self.setting.descent.weight_of(phase.count), self.steepest(here, view, phase.examples)
            row["stability"] = step_size * weight * top * curvature / 2
        if self.setting.problem.phases:
            row[SELECTIVITY] = unit_selectivity(self.setting, view.weights)
        return row | self.sketch(view, here)

    def steepest(self, kernel: Float[Tensor, "train kept train kept_"], view: NetworkView, examples: slice) -> float:
        """λ_max among some training examples."""
        if self.setting.points.makes_kernels:
            return largest(kernel[examples, :, examples])
        return view.largest_among(examples)

    def sketch(self, view: NetworkView, kernel: Float[Tensor, "train kept train kept_"]) -> Row:
        """How far a sketched kernel may be from what it is a sketch of."""
        return {} if self.setting.points.sketch is None else {"sketch_error": view.sketch_error(kernel)}

    def modes(self, kernel: Float[Tensor, "train kept train kept_"], residual: Float[Tensor, "train out"]) -> Row:
        """The numbers of the eigenvalues, of a kernel that is finite and small enough; of a larger one, the first."""
        if not kernel.isfinite().all():
            return {"lambda_max": None}
        entries = kernel.shape[0] * kernel.shape[1]
        if entries > DENSE:
            return {"lambda_max": largest(kernel)}
        modes = spectrum(kernel)
        row: Row = {
            "lambda_max": float(modes.values[0]),
            "condition": modes.condition,
            "effective_rank": modes.effective_rank,
        }
        row |= {f"eigenvalue_{k + 1}": float(value) for k, value in enumerate(modes.values[:TOP])}
        return row | {f"residual_top_{k}": modes.share(residual.reshape(entries, -1), k) for k in RESIDUAL_TOPS}
