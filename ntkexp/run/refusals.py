"""What no run is begun for: kernels beyond the memory, steps beyond a lifetime, networks that cannot learn."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.path.budget import Budget
from ntkexp.path.effort import core_seconds, refuse_endless

LEAST_ROWS = 8  # of a block of two points, four times


def refuse_vast(experiment: Experiment) -> None:
    """Refuse kernels that are too large by the numbers of examples alone, before any is drawn."""
    source, size = experiment.data, torch.finfo(getattr(torch, experiment.dtype)).bits // 8
    others = (source.probe if "probe" in experiment.path.probes else 0) + (
        (source.test or 0) if "test" in experiment.path.probes else 0
    )
    points, path = source.train + others, experiment.path
    read = points if "train" in path.probes else others
    rows = path.tangents * points + (experiment.integration.kernels + experiment.integration.rules) * read
    if path.kernels == "none" and experiment.device == "cpu":
        rows = min(rows, LEAST_ROWS)  # the rest lies on disk
    least = float(source.train) * size * rows
    if least > experiment.room_gb * 1e9:
        raise Mistake(
            f"memory_gb={experiment.room_gb:g}: the kernels of {points} points with "
            f"data.train={source.train} of them take {least / 1e9:.4g} GB or more; lower data.train, data.probe or "
            "data.test, or raise memory_gb"
        )


def refuse_long(experiment: Experiment, budget: Budget) -> None:
    """Refuse a run that outlasts its user, unless a loss ends it."""
    if experiment.stop_at_loss is None:
        refuse_endless(effort(experiment, budget), experiment.steps, experiment.device)


def effort(experiment: Experiment, budget: Budget) -> float:
    """How many seconds a core takes for it."""
    return core_seconds(budget, experiment.steps, experiment.integration.passes)


def refuse_infinite(outputs: Float[Tensor, "point out"], experiment: Experiment) -> None:
    """A network that is not finite at its start cannot be trained."""
    finite = outputs.isfinite().all(1)
    if not finite.all():
        raise Mistake(
            f"the network's outputs are not finite before training, at {int((~finite).sum())} of {len(finite)} points; "
            f"{experiment.model.remedy}"
        )


def refuse_dead(*, moves: bool) -> None:
    """A network whose outputs no weight moves cannot be trained either."""
    if not moves:
        raise Mistake(
            "no weight moves an output at any training example, so there is nothing to train: are all units dead?"
        )
