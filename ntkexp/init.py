"""Initialisation: parametrisation, scales of weights, and the form of the output f.

`layer.affine` defines the scales W_std and b_std of weights and biases. h(θ) is the
composition of the layers, and α is `alpha`. The output f of the network is

    plain           f = α h
    antisymmetric   f = α (h(θ_a) − h(θ_b))/√2 with θ_a = θ_b at the start
    centred         f = α (h(θ) − h(θ_0)), with the loss divided by α²

An antisymmetric network starts at f_0 = 0 with the kernel of h. A centred network
becomes lazy as α → ∞ (Chizat, Oyallon & Bach 2019)."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from ntkexp.component import Component
from ntkexp.layer.affine import Conv, Dense, Parametrisation
from ntkexp.mistake import Mistake

MAX_WEIGHT_SCALE = 1e20
"""The largest W_std and b_std. Larger scales make the kernels of deep networks
overflow."""


PARENT = re.compile(r"(.+)@(\d{1,12}|end)", re.DOTALL)
"""The form of `init.parent`: RUN@STEP or RUN@end, where RUN is the folder of a run. The
weights of this run at this step are the initial weights of the new network (a child)."""


class AbstractInit(Component):
    """A parametrisation with its scales. It creates the layers that have weights."""

    W_std: float = Field(gt=0, le=MAX_WEIGHT_SCALE)
    b_std: float = Field(ge=0, le=MAX_WEIGHT_SCALE)
    alpha: float = Field(1.0, gt=0)
    antisymmetric: bool = False
    centred: bool = False
    parent: str | None = None

    @field_validator("parent")
    @classmethod
    def refuse_other_parents(cls, parent: str | None) -> str | None:
        if parent is not None and not PARENT.fullmatch(parent):
            raise Mistake("it takes RUN@STEP, such as outputs/runs/mlp-…@100 or …@end")
        return parent

    @model_validator(mode="after")
    def refuse_centred_child(self) -> Self:
        if self.centred and self.parent is not None:
            raise Mistake(
                f"init.parent={self.parent}: init.centred=true subtracts the outputs at drawn "
                "weights, which a child does not have; leave out one of the two"
            )
        return self

    def fields(self) -> dict[str, Any]:
        """Return the fields as plain data. Omit `parent` unless it is set: it was added
        later, and digests of older claims must stay valid."""
        fields = super().fields()
        if self.parent is None:
            del fields["parent"]
        return fields

    @property
    @abstractmethod
    def param(self) -> Parametrisation:
        """The parametrisation of hidden layers."""

    @property
    def param_readout(self) -> Parametrisation:
        """The parametrisation of the last layer."""
        return self.param

    def dense(self, features: int) -> Dense:
        return Dense(
            features=features, W_std=self.W_std, b_std=self.b_std, param=self.param
        )

    def conv(
        self, features: int, window: int, stride: int = 1, circular: bool = False
    ) -> Conv:
        return Conv(
            features=features,
            W_std=self.W_std,
            b_std=self.b_std,
            param=self.param,
            window=window,
            stride=stride,
            circular=circular,
        )

    def readout(self, features: int) -> Dense:
        return Dense(
            features=features,
            W_std=self.W_std,
            b_std=self.b_std,
            param=self.param_readout,
        )


class Standard(AbstractInit):
    """Standard parametrisation, as in PyTorch.

    Weights have variance W_std²/fan_in. The tangent kernel grows with the width.
    """

    @property
    def param(self) -> Parametrisation:
        return "standard"


class NTK(AbstractInit):
    """NTK parametrisation (Jacot, Gabriel & Hongler 2018).

    Weights have variance 1, and the forward pass scales them by 1/√fan_in. The tangent
    kernel converges as the width grows."""

    @property
    def param(self) -> Parametrisation:
        return "ntk"


class MeanField(AbstractInit):
    """Mean-field parametrisation (Mei, Montanari & Nguyen 2018):
    the readout averages over neurons.

    Hidden layers use the NTK parametrisation. The readout is scaled by 1/width instead
    of 1/√width. If the step size is a fixed fraction of the largest stable step size,
    training changes the features at every width, unlike in the NTK parametrisation."""

    @property
    def param(self) -> Parametrisation:
        return "ntk"

    @property
    def param_readout(self) -> Parametrisation:
        return "mean_field"
