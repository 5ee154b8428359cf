"""The kernel after training as a machine of its own: three predictors of new points, by width and number of examples.

    network    f_T, trained from f_0 = 0 on ½(f − y)² until the mean over the examples has fallen to `until`
    before     K_0(x, X) (K_0(X, X) + ridge)⁻¹ y
    after      K_T(x, X) (K_T(X, X) + ridge)⁻¹ y

    error      the share of new points with the wrong sign         beyond    error less that of the network
    loss       mean ½(f − y)² of new points, y = ±1

The ridge is the same share of the mean diagonal for both kernels. Small α makes training rich, large α lazy. Where the
network did not learn its examples in so many steps, there is no kernel after training, and rows have no numbers.

P. M. Long, "Properties of the After Kernel" (2021), arXiv:2105.10585.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.network_of_width import network_of_width
from ntkexp.claim.trial.scaled_network import ScaledNetwork, task_of
from ntkexp.closed_form.gain import FOREVER
from ntkexp.closed_form.modes import modes_of
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.init.base import AbstractInit
from ntkexp.mistake import Mistake
from ntkexp.model.learning_task import LearningTask
from ntkexp.model.mlp import MLP
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class AfterKernel(AbstractTrial):
    """A network of each width learns each number of examples of two classes."""

    model: MLP
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((64, 256), min_length=1)
    trains: tuple[Count, ...] = Field((40, 120), min_length=1)
    alpha: float = Field(0.1, gt=0)
    ridge: float = Field(1e-6, gt=0)
    steps: Count = 6000
    fraction: float = Field(0.4, gt=0, lt=1)
    until: float = Field(0.005, gt=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        places = [(width, train) for width in self.widths for train in self.trains]
        return [
            {"width": width, "train": train, **row}
            for width, train in places
            for row in self.beside(seed, width, train)
        ]

    def beside(self, seed: int, width: int, train: int) -> Iterator[dict[str, Level]]:
        """The rows of one network."""
        data = self.data.model_copy(update={"train": train}).split(seed)
        if len(data.classes) != 2 or not len(data.test.inputs):
            raise Mistake("trial.data: choose data of two classes, and leave some for the test, such as data=digits")
        task, new = task_of(data.train), task_of(data.test)
        asked, generator = LearningTask(tuple(task.inputs.shape[1:]), 1), stream("weights", seed, width)
        module = network_of_width(width, self.model, self.init, asked, generator)
        network = ScaledNetwork(module, self.alpha)
        start = {name: weight.clone() for name, weight in network.start.items()}
        end = network.learned(start, task, self.steps, self.fraction, self.until)
        with torch.no_grad():
            missed = float(half_square(network.outputs(end, task.inputs), task.targets))
            outputs = network.outputs(end, new.inputs)
        said = {"network": outputs} | {
            name: regression(
                network.kernel(weights, task.inputs, task.inputs),
                network.kernel(weights, new.inputs, task.inputs),
                task.targets,
                self.ridge,
            )
            for name, weights in (("before", start), ("after", end))
        }
        known = missed <= self.until
        errors = {name: wrong(found, new.targets) if known else math.nan for name, found in said.items()}
        for name, found in said.items():
            yield {
                "predictor": name,
                "error": errors[name],
                "beyond": errors[name] - errors["network"],
                "loss": float(half_square(found, new.targets)) if known else math.nan,
                "train_loss": missed,
            }


def regression(
    known: Float[Tensor, "train train"],
    across: Float[Tensor, "point train"],
    targets: Float[Tensor, " train"],
    ridge: float,
) -> Float[Tensor, " point"]:
    """Predict points by a kernel, with a ridge that is this share of its mean diagonal.

    >>> kernel = 2 * torch.eye(2, dtype=torch.float64)
    >>> regression(kernel, kernel, torch.tensor([3.0, 6.0], dtype=torch.float64), ridge=0.5).tolist()
    [2.0, 4.0]
    """
    learned = modes_of(known).at(FOREVER, ridge * float(known.diagonal().mean()))
    return (across @ learned(targets[:, None]))[:, 0]


def wrong(outputs: Float[Tensor, " point"], targets: Float[Tensor, " point"]) -> float:
    """The share of points whose sign is not that of their target; none where an output is not finite.

    >>> wrong(torch.tensor([0.5, -0.5, 2.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, -1.0]))
    0.5
    """
    return float((outputs * targets <= 0).double().mean()) if outputs.isfinite().all() else math.nan


def half_square(outputs: Float[Tensor, " point"], targets: Float[Tensor, " point"]) -> Float[Tensor, ""]:
    """The mean of ½(f − y)²."""
    return (outputs - targets).square().mean() / 2
