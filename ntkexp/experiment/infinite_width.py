"""The network of an experiment as its width goes to infinity: its kernels between the points that are read,

    K_0 → α²Θ,    Cov f_0 → α²𝒢    (of h, where f is antisymmetric or centred: `init.base`)

The work is counted in pairs of pixels of pairs of examples, times layers. Where it would exceed what a run takes by
itself, or no limit is known, the reason stands in place of the kernels.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.experiment.experiment import Experiment
from ntkexp.limit.blocks import BlockPlace, compute
from ntkexp.limit.network import Network
from ntkexp.machine.evidence import DoesNotApply, LimitKernels
from ntkexp.mistake import Mistake
from ntkexp.model.learning_task import LearningTask

MOST = 2 * 10**9  # half a minute on two cores
COPIES, SHARE = 4, 0.25  # numbers held at once for each pair of points, and what they may take of the memory


def limit_kernels(
    experiment: Experiment, inputs: Float[Tensor, "point *shape"], train: int, vocabulary: int
) -> LimitKernels | DoesNotApply:
    """The kernels, if a machine of the ladder asks for them."""
    if not any(machine.needs_limit for machine in experiment.ladder.machine):
        return DoesNotApply("nobody asks for it")
    try:
        network = experiment.model.limit(experiment.init, LearningTask(tuple(inputs.shape[1:]), 1, vocabulary))
    except Mistake as mistake:
        return DoesNotApply(str(mistake))
    pairs = train * (train + 1) // 2 + (len(inputs) - train) * train
    work = pairs * network.work
    if work > MOST:
        return DoesNotApply(
            f"the kernels at infinite width take {work / MOST:.1f} times the work that a run does for them; lower "
            "data.train, data.probe or data.test, or compute them into a kernel file"
        )
    held = COPIES * 8 * train * len(inputs) / 1e9
    if held > SHARE * experiment.room_gb:
        return DoesNotApply(
            f"the kernels at infinite width take {held:.1f} GB, more than a quarter of memory_gb="
            f"{experiment.room_gb:g}; raise it, or lower data.train, data.probe or data.test"
        )
    try:
        return kernels(network, inputs, train, experiment)
    except Mistake as mistake:  # of variances that are too large for an activation
        return DoesNotApply(str(mistake))


def kernels(
    network: Network, inputs: Float[Tensor, "point *shape"], train: int, experiment: Experiment
) -> LimitKernels:
    """Compute the kernels of training examples among themselves, exact where one meets itself, and with all other
    points.
    """
    learned, others = slice(0, train), slice(train, len(inputs))
    places = [BlockPlace(learned, learned, same=True)]
    places += [BlockPlace(others, learned, same=False)] if len(inputs) > train else []
    threads, scale = torch.get_num_threads(), experiment.init.alpha**2
    found = [
        compute(network, place, inputs, inputs, memory_gb=experiment.room_gb / 4, threads=threads) for place in places
    ]
    start, tangent = (torch.cat([getattr(block, name) for block in found]) for name in ("nngp", "ntk"))
    return LimitKernels(start=start.mul_(scale), tangent=tangent.mul_(scale))
