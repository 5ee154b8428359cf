"""The phases of grokking, and the training examples that each phase needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from ntkexp.claim.papers.lazy_and_rich import (
    ScaledFunction,
    refuse_unclassified,
    share_right,
)
from ntkexp.claim.trial import NetworkTrial, Rows
from ntkexp.component import Count
from ntkexp.data.base import Data, Split
from ntkexp.loss import Squared, centred_one_hot
from ntkexp.model.functional import function_of, weights_of
from ntkexp.optimizer import GD
from ntkexp.removal.between import Pair
from ntkexp.removal.rerun import (
    WEIGHTS,
    Rerun,
    pair_of,
    retrain,
    store_trajectories,
)
from ntkexp.removal.retraining import ChosenOutputs
from ntkexp.report.progress import Quiet
from ntkexp.schedule import Constant
from ntkexp.stream import stream


class RemovalByPhase(NetworkTrial):
    """The effect of removing a training example, by phases of grokking.

    A network f = α (g(θ) − g(θ₀)) learns classes by full-batch gradient descent, with
    the loss ½‖f − y‖²/α² and targets y one-hot minus 1/C. The training is repeated
    without one example. Let Δ be the resulting change of the margins of all held-out
    examples after `steps` steps. A margin is the correct output minus the mean of the
    other outputs. Δ is split exactly among the steps, Δ = Σ_s b_s, where b_s is the
    part due to the missing gradient of the example in step s (`removal.between`).

    Each phase of the training with all examples has a row:

        memorising      until all training examples are right for the first time
        waiting         until half of the held-out examples are right
        generalising    the remaining steps

        share           Σ_s b_s·Δ/‖Δ‖² over the steps of the phase
        time            the number of steps of the phase, divided by `steps`
        beyond          share − time; 0 if all steps matter equally
        accuracy        the accuracy on held-out examples at the end of the phase
        cancellation    Σ_s |b_s·Δ|/‖Δ‖² over all steps; 1 if no steps cancel each other
        miss            |Σ_s b_s·Δ/‖Δ‖² − 1|, the error of the split

    The shares, `cancellation` and `miss` are means over the first `removals` examples.
    A phase without steps has share 0. If the training examples are never all right,
    there is only the row `memorising`, with NaN."""

    alpha: float = Field(gt=0)
    step_size: float = Field(gt=0)
    steps: Count = 700
    removals: Count = 2

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        refuse_unclassified(data, least=3)
        rerun = self.rerun(data, seed)
        curves = accuracies(rerun, data)
        if 1 not in curves.train:
            numbers = ("share", "time", "beyond", "accuracy", "cancellation", "miss")
            return [{"phase": "memorising", **dict.fromkeys(numbers, nan)}]
        shares = torch.stack(
            [step_shares(rerun, i, data.test) for i in range(self.removals)]
        )
        known = curves.train.index(1)
        later = range(known, self.steps)
        half = next((s for s in later if curves.test[s] >= 1 / 2), self.steps)
        ends = {"memorising": known, "waiting": half, "generalising": self.steps}
        return phase_rows(shares, ends, curves.test)

    def rerun(self, data: Data, seed: int) -> Rerun:
        """Return the training with all examples."""
        inputs = data.train.inputs
        classes = len(data.classes)
        generator = stream("weights", seed)
        module = self.model.module(
            self.init, tuple(inputs.shape[1:]), classes, generator
        ).eval()
        start = weights_of(module)
        optimizer = GD(step_size=self.step_size)
        return Rerun(
            function=ScaledFunction(function_of(module), start, self.alpha).outputs,
            start=start,
            inputs=inputs,
            targets=centred_one_hot(data.train.target, classes),
            loss=Squared(),
            scale=1 / self.alpha**2,
            optimizer=optimizer,
            factors=optimizer.factors(start),
            schedule=Constant(),
            step_size=self.step_size,
            steps=self.steps,
            length=self.steps,
            seed=seed,
        )


class AccuracyCurves(NamedTuple):
    """The accuracies before each step and after the last step."""

    train: list[float]
    test: list[float]


def accuracies(rerun: Rerun, data: Data) -> AccuracyCurves:
    """Train, and return the accuracies on training and on held-out examples."""
    curves = AccuracyCurves([], [])

    def measure(weights: Float[Tensor, " weight"]) -> None:
        with torch.no_grad():
            for curve, split in zip(curves, (data.train, data.test), strict=True):
                outputs = rerun.outputs(weights, split.inputs)
                curve.append(share_right(outputs, split.target))

    weights = rerun.flat.vector(rerun.start)[None]
    for step in retrain(rerun, rerun.unit_weights[None]):
        measure(step.recorded[WEIGHTS][0])
        weights = step.weights
    measure(weights[0])
    return curves


def step_shares(rerun: Rerun, example: int, test: Split) -> Float[Tensor, " step"]:
    """Return b_s·Δ/‖Δ‖² for each step s, if training leaves out one example."""
    weight = Pair(rerun.unit_weights, rerun.without([example]))
    with TemporaryDirectory() as folder:
        store = store_trajectories(rerun, weight, Path(folder), Quiet())
        pair = pair_of(rerun, store, weight)
        with torch.no_grad():
            before = margins(rerun, pair.first.end, test)
            change = margins(rerun, pair.second.end, test) - before
        direction = change / change.square().sum()

        def projected(weights: Float[Tensor, " weight"]) -> Float[Tensor, " one"]:
            return (margins(rerun, weights, test) @ direction)[None]

        return pair.breakdown(ChosenOutputs([projected]), lambda done: None).by_step[0]


def margins(
    rerun: Rerun, weights: Float[Tensor, " weight"], split: Split
) -> Float[Tensor, " point"]:
    return margins_of(rerun.outputs(weights, split.inputs), split.target)


def margins_of(
    outputs: Float[Tensor, "point out"], labels: Int[Tensor, " point"]
) -> Float[Tensor, " point"]:
    """Return the correct output minus the mean of the other outputs.

    >>> margins_of(torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([0])).tolist()
    [2.5]
    """
    right = outputs.gather(1, labels[:, None])[:, 0]
    classes = outputs.shape[1]
    return (right * classes - outputs.sum(1)) / (classes - 1)


def phase_rows(
    shares: Float[Tensor, "removal step"],
    ends: dict[str, int],
    accuracy: Sequence[float],
) -> Rows:
    """Return a row for each phase. `ends` are the steps at which the phases end.

    >>> shares = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    >>> rows = phase_rows(shares, {"early": 1, "late": 4}, [0.0, 0.2, 0.4, 0.6, 0.8])
    >>> [(row["share"], row["time"], row["accuracy"]) for row in rows]
    [(0.5, 0.25, 0.2), (0.5, 0.75, 0.8)]
    """
    steps = shares.shape[1]
    cancellation = float(shares.abs().sum(1).mean())
    miss = float((shares.sum(1) - 1).abs().mean())
    start = 0
    for phase, end in ends.items():
        share = float(shares[:, start:end].sum(1).mean())
        time = (end - start) / steps
        yield {
            "phase": phase,
            "share": share,
            "time": time,
            "beyond": share - time,
            "accuracy": accuracy[end],
            "cancellation": cancellation,
            "miss": miss,
        }
        start = end
