"""Training with the mean of the first and the last tangent kernel."""

from __future__ import annotations

from torch import Tensor

from ntkexp.machine.base import RunMatrices
from ntkexp.machine.machines import AbstractFrozen


class FrozenMiddle(AbstractFrozen):
    """(K_0 + K_T)/2 throughout."""

    def kernel(self, matrices: RunMatrices) -> Tensor:
        return (matrices.kernel_start + matrices.kernel_end) / 2
