"""Standard parametrisation: what deep learning libraries do."""

from __future__ import annotations

from ntkexp.init.base import AbstractInit
from ntkexp.layer.affine import Parametrisation


class Standard(AbstractInit):
    """Weights of variance W_std²/fan_in, used as they are: the kernel grows with the width."""

    @property
    def param(self) -> Parametrisation:
        return "standard"
