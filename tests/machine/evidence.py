"""Evidence made by hand: matrices that no network gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ntkexp.machine.base import DoesNotApply, Evidence, PathKernel, Repeat, Repeated, Training

TRAIN, OTHERS, STEPS, STEP_SIZE = 5, 3, 40, 0.3
POINTS = TRAIN + OTHERS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel_of(features: Tensor, outputs: int = 1) -> Tensor:
    """⟨φ(x), φ(x′)⟩ for each output alike, [probe, out, train, out_]."""
    products = features @ features[:TRAIN].t()
    return products[:, None, :, None] * torch.eye(outputs, dtype=torch.float64)[:, None]


def descending(targets: Tensor, sizes: tuple[float, ...]) -> Repeat:
    """Gradient descent on the mean squared loss in steps of these sizes, written out."""

    def repeat(kernel: Tensor, start: Tensor, pull: Tensor) -> Repeated:
        coefficients = torch.zeros_like(start)
        for size in sizes:
            outputs = start + (kernel @ coefficients.flatten()).view_as(start)
            coefficients = coefficients - size / TRAIN * (outputs - targets)
        return Repeated(coefficients, start.new_ones(()))

    return repeat


def evidence(kernel: Tensor, *, is_quadratic: bool = True) -> Evidence:
    """A run whose kernels are all the same, from outputs and to targets drawn at random."""
    outputs, sizes = kernel.shape[1], (STEP_SIZE,) * STEPS
    targets, none = random(TRAIN, outputs, seed=1), torch.zeros(POINTS, outputs, dtype=torch.float64)
    training = Training(
        time=sum(sizes),
        weight=1 / TRAIN,
        is_quadratic=is_quadratic,
        is_plain=True,
        is_flow=False,
        mean_coefficients=random(TRAIN, outputs, seed=2),
        repeat=descending(targets, sizes),
    )
    return Evidence(
        inputs=random(POINTS, 4, seed=3),
        train=TRAIN,
        start=random(POINTS, outputs, seed=4),
        end=random(POINTS, outputs, seed=5),
        targets=targets,
        paths={"secant": path_kernel(kernel, random(POINTS, outputs, TRAIN, seed=6), none)},
        kernel_start=kernel,
        kernel_end=kernel,
        start_pull=none,
        attributed=torch.ones(POINTS, dtype=torch.bool),
        limit=DoesNotApply("made by hand"),
        read=slice(0, None),
        integrated=range(outputs),
        training=training,
    )


def path_kernel(kernel: Tensor, contributions: Tensor, decay: Tensor) -> PathKernel:
    """Integrals of which nothing else is known."""
    return PathKernel(kernel=kernel, contributions=contributions, decay=decay, detail="pieces=1")


def stepping(found: Evidence, step_sizes: tuple[float, ...]) -> Evidence:
    repeat = descending(found.targets, step_sizes)
    return replace(found, training=replace(found.training, time=sum(step_sizes), repeat=repeat))


def along(found: Evidence, paths: Mapping[str, PathKernel]) -> Evidence:
    return replace(found, paths=paths)
