"""Mean-field parametrisation (Mei, Montanari & Nguyen 2018): the readout is an average over neurons."""

from __future__ import annotations

from ntkexp.init.base import AbstractInit
from ntkexp.layer.affine import Parametrisation


class MeanField(AbstractInit):
    """Hidden layers as under NTK parametrisation, the readout scaled by 1/width instead of 1/√width.

    Features then move at any width, once the step size is measured against the largest stable one.
    """

    @property
    def param(self) -> Parametrisation:
        return "ntk"

    @property
    def param_readout(self) -> Parametrisation:
        return "mean_field"
