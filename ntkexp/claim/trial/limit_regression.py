"""Regression with the kernels of infinitely wide networks, on the same examples: how many of new ones they classify.

    f(x) = Θ(x, X) (Θ(X, X) + ridge·mean diagonal)⁻¹ Y,    Y one-hot and centred

    accuracy    share of test examples whose largest output is their class
    residual    max |f(X) − Y|, which is 0 where the closed form returns the training labels
    condition   of Θ(X, X) + ridge
    bound       n·eps·condition, what rounding alone explains of the residual

Rows are told apart by `kernel`, the name that a model is given, and by `ridge`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from ntkexp.claim.named import refuse_unnamed
from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.data.base import AbstractSource, Data
from ntkexp.init.base import AbstractInit
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered
from ntkexp.records.sweep import Level


class LimitRegression(AbstractTrial):
    """Each model's kernel is solved with each ridge; the seed draws which examples there are."""

    names: tuple[str, ...] = Field(min_length=1)
    models: tuple[AbstractLayered, ...]
    init: AbstractInit
    data: AbstractSource
    ridges: tuple[Annotated[float, Field(ge=0)], ...] = (0.0,)

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        """Every model has a name of its own."""
        refuse_unnamed("trial.names", self.names, "models", self.models)
        return self

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        if not data.classes:
            raise Mistake("trial.data: kernels classify, and the data has no classes; choose data=digits")
        named = zip(self.names, self.models, strict=True)
        return [{"kernel": name, **row} for name, model in named for row in self.solved(model, data)]

    def solved(self, model: AbstractLayered, data: Data) -> Iterator[dict[str, Level]]:
        """The rows of one model."""
        layers = model.layers(self.init, tuple(data.train.inputs.shape[1:]), 1)
        x, y = data.train.inputs, centred(data.train.target, len(data.classes))
        among = infinite_kernel(layers, x, threads=1)[1]
        across = infinite_kernel(layers, data.test.inputs, x, threads=1)[1]
        for ridge in self.ridges:
            matrix = among + ridge * among.diagonal().mean() * torch.eye(len(among), dtype=among.dtype)
            values = torch.linalg.eigvalsh(matrix)
            condition = float(values[-1] / values[0]) if values[0] > 0 else float("inf")
            coefficients = torch.linalg.solve(matrix, y)
            yield {
                "ridge": ridge,
                "accuracy": float(((across @ coefficients).argmax(1) == data.test.target).double().mean()),
                "residual": float((among @ coefficients - y).abs().max()),
                "condition": condition,
                "bound": len(matrix) * torch.finfo(matrix.dtype).eps * condition,
            }


def centred(labels: Tensor, classes: int) -> Float[Tensor, "example class"]:
    """One-hot targets whose rows sum to zero."""
    return torch.nn.functional.one_hot(labels, classes).double() - 1 / classes
