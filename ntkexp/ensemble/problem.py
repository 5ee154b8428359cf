"""A one-dimensional problem for an ensemble: what is learned at which places along a line or a circle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.data.base import Data
from ntkexp.experiment.experiment import Experiment
from ntkexp.init.ntk import NTK
from ntkexp.loss.base import AbstractLoss
from ntkexp.mistake import Mistake
from ntkexp.optimizer.gd import GD

ROUND = 1e-6  # how far from 1 a norm may be on the unit circle


@dataclass(frozen=True)
class EnsembleProblem:
    """Points, the training examples first, then others in the order of their places."""

    inputs: Float[Tensor, "point *shape"]
    places: Float[Tensor, " point"]
    targets: Float[Tensor, "point out"]
    train: int
    axis: str  # what the places are
    divisor: float  # training makes the sum of ½(f − y)² over examples small, divided by this


def problem(experiment: Experiment) -> EnsembleProblem:
    """Draw the problem of an experiment that the processes are about; any other experiment is refused."""
    refuse_other(experiment)
    data = experiment.draw()
    encoded = targets(data, experiment.loss)
    everything = torch.cat([getattr(data, name).inputs for name in ("train", "probe", "test")])
    places, axis = positions(everything.flatten(1))
    train = len(data.train.inputs)
    order = torch.cat([torch.arange(train), train + places[train:].argsort()])
    divisor = experiment.loss.divisor(train) / experiment.loss.curvature
    return EnsembleProblem(everything[order], places[order], encoded[order], train, axis, divisor)


def targets(data: Data, loss: AbstractLoss) -> Float[Tensor, "point 1"]:
    """Encode the targets as the loss compares outputs with them, in one column."""
    found = torch.cat([getattr(data, name).target for name in ("train", "probe", "test")])
    encoded = loss.targets(found, len(data.classes))
    if encoded.shape[1] != 1:
        raise Mistake(f"an ensemble is drawn of one output, and the data has {encoded.shape[1]}; choose data=circle")
    return encoded


def positions(inputs: Float[Tensor, "point feature"]) -> tuple[Float[Tensor, " point"], str]:
    """Find the positions of points along the one dimension that they have."""
    if inputs.shape[1] == 1:
        return inputs[:, 0], "input"
    if inputs.shape[1] == 2 and bool(((inputs.norm(dim=1) - 1).abs() < ROUND).all()):
        return torch.atan2(inputs[:, 1], inputs[:, 0]), "angle"
    raise Mistake(
        f"an ensemble is drawn over one dimension, and the data has inputs of {inputs.shape[1]} numbers; choose "
        "data=circle, or data=table with one column beside the target"
    )


def refuse_other(experiment: Experiment) -> None:
    """Outputs before training must be random, and training plain."""
    if not experiment.loss.is_quadratic or type(experiment.optimizer) is not GD:
        raise Mistake("the processes are those of loss=squared and optimizer=gd; choose them")
    if experiment.optimizer.weight_decay or experiment.optimizer.clip_norm or experiment.optimizer.layers:
        raise Mistake("the processes are those of plain gradient descent; leave out decay, clipping and layers' steps")
    if experiment.stop_at_loss is not None or any(
        experiment.schedule.factor(step, experiment.steps) != 1.0 for step in range(experiment.steps)
    ):
        raise Mistake("the processes are those of so many equal steps; leave out stop_at_loss, schedule and warm-up")
    if experiment.switches:
        raise Mistake("the processes are those of one data set; leave out data=sequence")
    init = experiment.init
    if not isinstance(init, NTK) or init.antisymmetric or init.centred:
        raise Mistake("the processes start from random outputs; choose init=ntk, neither antisymmetric nor centred")
