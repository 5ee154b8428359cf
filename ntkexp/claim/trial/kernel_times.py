"""How long kernels take: the tangent kernel at infinite width between n examples and n others, of which no pair comes
twice, and a solve with the kernel among n examples.

    kernel_seconds, solve_seconds    time of this process, the shortest of `repeats` attempts

Times are measured, so that another attempt gives others; rows of a seed are measured once and kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.component import Count
from ntkexp.init.base import AbstractInit
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.model.base import AbstractLayered
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class KernelTimes(AbstractTrial):
    """Examples are Gaussian, in this shape; the model's kernel is timed at each size."""

    model: AbstractLayered
    init: AbstractInit
    shape: tuple[Count, ...] = (16,)
    sizes: tuple[Count, ...] = Field((250, 500, 1000), min_length=2)
    repeats: Count = 3

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        generator = stream("trial", seed)
        return [
            self.timed(torch.randn(2, size, *self.shape, generator=generator, dtype=torch.float64))
            for size in self.sizes
        ]

    def timed(self, both: Float[Tensor, "2 example *shape"]) -> dict[str, Level]:
        """The times of some examples and as many others."""
        x, others = both
        layers = self.model.layers(self.init, self.shape, 1)
        matrix, ones = infinite_kernel(layers, x, engine="torch", threads=1)[1], torch.ones(len(x), 1, dtype=x.dtype)
        matrix.diagonal().add_(matrix.diagonal().mean())
        return {
            "examples": len(x),
            "kernel_seconds": self.shortest(lambda: infinite_kernel(layers, x, others, engine="torch", threads=1)[1]),
            "solve_seconds": self.shortest(lambda: torch.linalg.solve(matrix, ones)),
        }

    def shortest(self, work: Callable[[], Tensor]) -> float:
        """The shortest of several attempts."""
        times = []
        for _ in range(self.repeats):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
        return min(times)
