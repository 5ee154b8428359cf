"""Evidence made by hand: matrices that no network gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ntkexp.machine.base import Course, DoesNotApply, Evidence, PathKernel
from ntkexp.optimizer.gd import GD

TRAIN, OTHERS, STEPS, STEP_SIZE = 5, 3, 40, 0.3
POINTS = TRAIN + OTHERS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel_of(features: Tensor, outputs: int = 1) -> Tensor:
    """⟨φ(x), φ(x′)⟩ for each output alike, [probe, out, train, out_]."""
    products = features @ features[:TRAIN].t()
    return products[:, None, :, None] * torch.eye(outputs, dtype=torch.float64)[:, None]


def squared(targets: Tensor, weight: float) -> Callable[[int, Tensor], Tensor]:
    """ℓ′ of the squared loss, at every step."""
    return lambda step, outputs: weight * (outputs - targets)


def evidence(kernel: Tensor, *, is_squared: bool = True) -> Evidence:
    """A run whose kernels are all the same, from outputs and to targets drawn at random."""
    outputs, weight = kernel.shape[1], 1 / TRAIN
    targets, none = random(TRAIN, outputs, seed=1), torch.zeros(POINTS, outputs, dtype=torch.float64)
    course = Course(
        step_sizes=(STEP_SIZE,) * STEPS,
        output_gradient=squared(targets, weight),
        summed_gradient=random(TRAIN, outputs, seed=2),
        weight=weight,
        is_squared=is_squared,
        optimizer=GD(),
    )
    return Evidence(
        inputs=random(POINTS, 4, seed=3),
        train=TRAIN,
        start=random(POINTS, outputs, seed=4),
        end=random(POINTS, outputs, seed=5),
        targets=targets,
        paths={"secant": PathKernel(kernel, random(POINTS, outputs, TRAIN, seed=6), none, "pieces=1")},
        kernel_start=kernel,
        kernel_end=kernel,
        start_pull=none,
        attributed=torch.ones(POINTS, dtype=torch.bool),
        limit=DoesNotApply("made by hand"),
        integrated=range(outputs),
        course=course,
    )


def stepping(found: Evidence, step_sizes: tuple[float, ...]) -> Evidence:
    """The same with other steps."""
    return replace(found, course=replace(found.course, step_sizes=step_sizes))


def along(found: Evidence, paths: Mapping[str, PathKernel]) -> Evidence:
    """The same with other integrals."""
    return replace(found, paths=paths)
