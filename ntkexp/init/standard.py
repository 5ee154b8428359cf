"""Standard parametrisation: what deep learning libraries do."""

from __future__ import annotations

from ntkexp.init.base import AbstractInit
from ntkexp.layer.affine import Dense


class Standard(AbstractInit):
    """Weights of variance W_std²/fan_in, used as they are: the kernel grows with the width."""

    def dense(self, features: int) -> Dense:
        return Dense(features=features, W_std=self.W_std, b_std=self.b_std, param="standard")
