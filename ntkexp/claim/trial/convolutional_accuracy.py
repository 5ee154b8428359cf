"""Convolutional networks of several depths, with and without global average pooling: how many new images they classify.

    regressor    accuracy of …
    process      regression with the covariance of the infinitely wide network, its Gaussian process
    kernel       regression with its tangent kernel
    network      a network of finite width, less its first outputs, all layers trained by descent with momentum

Asked are those named by `regressors`. Targets are one-hot and centred, errors are squared; rows are told apart by
`depth` and by the `family`, `CNTK` or `CNTK-GAP`, with pooling. S. Arora et al., "On exact computation with an
infinitely wide neural net" (2019), arXiv:1904.11955, table 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.limit_regression import centred
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Data
from ntkexp.init.ntk import NTK
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.cntk import CNTK
from ntkexp.records.sweep import Level
from ntkexp.stream import stream

INIT = NTK(W_std=sqrt(2), b_std=0.0)
Regressor = Literal["process", "kernel", "network"]
FAMILIES = {"CNTK": False, "CNTK-GAP": True}
MOMENTUM = 0.9


class ConvolutionalAccuracy(AbstractTrial):
    """The seed draws which images there are, and the weights of the networks, which have `width` channels."""

    data: AbstractSource
    depths: tuple[Count, ...] = Field((3, 4, 6), min_length=1)
    width: Count = 16
    steps: Count = 200
    regressors: tuple[Regressor, ...] = Field(("process", "kernel", "network"), min_length=1)
    dtype: Literal["float64", "float32"] = "float32"
    """Networks are trained with such numbers; kernels are always of float64.
    The largest output needs no more than single precision, in which convolutions are four times as fast."""

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        if not data.classes:
            raise Mistake("trial.data: kernels classify, and the data has no classes; choose data=digits")
        return [
            {"depth": depth, "family": family, "regressor": regressor, "accuracy": accuracy}
            for depth in self.depths
            for family, pooling in FAMILIES.items()
            for regressor, accuracy in self.accuracies(
                CNTK(depth=depth, pooling=pooling, width=self.width), data, stream("weights", seed, depth)
            )
        ]

    def accuracies(self, model: CNTK, data: Data, generator: torch.Generator) -> Iterator[tuple[str, float]]:
        """The accuracies of one architecture."""
        x, new, y = data.train.inputs, data.test.inputs, centred(data.train.target, len(data.classes))
        layers = model.layers(INIT, tuple(x.shape[1:]), 1)
        among, across = infinite_kernel(layers, x, threads=1), infinite_kernel(layers, new, x, threads=1)
        found = {
            name: right @ torch.linalg.solve(left, y)
            for name, left, right in zip(("process", "kernel"), among, across, strict=True)
            if name in self.regressors
        }
        if "network" in self.regressors:
            step_size = 1 / float(torch.linalg.eigvalsh(among[1])[-1])
            found["network"] = self.of_network(model, data, y, step_size, generator)
        for name, outputs in found.items():
            yield name, float((outputs.argmax(1) == data.test.target).double().mean())

    def of_network(
        self, model: CNTK, data: Data, y: Float[Tensor, "train class"], step_size: float, generator: torch.Generator
    ) -> Float[Tensor, "test class"]:
        """The outputs of a network of finite width at new points."""
        x, new = data.train.inputs, data.test.inputs
        kind: torch.dtype = getattr(torch, self.dtype)
        module = model.module(INIT, tuple(x.shape[1:]), y.shape[1], generator, data.vocabulary).eval().to(kind)
        return trained(module, x.to(kind), new.to(kind), y.to(kind), step_size, self.steps)


def trained(
    module: nn.Module,
    x: Float[Tensor, "train *shape"],
    new: Float[Tensor, "test *shape"],
    y: Float[Tensor, "train class"],
    step_size: float,
    steps: int,
) -> Float[Tensor, "test class"]:
    """Train a module less its first outputs on ½ Σ (f − y)², and give its outputs at new points.

    >>> line, x = torch.nn.Linear(1, 1).double(), torch.ones(1, 1, dtype=torch.float64)
    >>> trained(line, x, x, 3 * x, step_size=0.1, steps=300).round(decimals=6).item()
    3.0
    """
    with torch.no_grad():
        at_x, at_new = module(x), module(new)
    optimizer = torch.optim.SGD(module.parameters(), lr=step_size, momentum=MOMENTUM)
    for _ in range(steps):
        optimizer.zero_grad()
        ((module(x) - at_x - y).square().sum() / 2).backward()
        optimizer.step()
    with torch.no_grad():
        outputs: Tensor = module(new) - at_new
    return outputs
