"""NTK parametrisation (Jacot, Gabriel & Hongler 2018)."""

from __future__ import annotations

from ntkexp.init.base import AbstractInit
from ntkexp.layer.affine import Parametrisation


class NTK(AbstractInit):
    """Unit weights, scaled by 1/√fan_in in the forward pass: the kernel has a limit as the width grows."""

    @property
    def param(self) -> Parametrisation:
        return "ntk"
