"""What is learned, and by what: the data and the network of an experiment, drawn once, and the same network at
infinite width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.data.base import Data
from ntkexp.experiment.experiment import Experiment
from ntkexp.kernel.record.taping import MemoryLimit
from ntkexp.limit.infinite_kernel import BlockSlices, compute
from ntkexp.limit.network import Network
from ntkexp.machine.base import DoesNotApply, LimitKernels
from ntkexp.mistake import Mistake
from ntkexp.model.base import LearningTask, ScaledOutput
from ntkexp.model.functional import weights_of
from ntkexp.path.budget import copies_of_drawn
from ntkexp.shapes import Weights
from ntkexp.stream import stream


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs and targets run over all points that are read, training examples first."""

    data: Data
    inputs: Float[Tensor, "point *shape"]
    targets: Float[Tensor, "point out"]
    places: Mapping[str, slice]  # where each split that is read lies among the points
    phases: Mapping[str, tuple[slice, ...]]  # where each phase of them does, if there are phases
    module: ScaledOutput
    weights: Weights

    @property
    def train(self) -> int:
        """How many training examples there are."""
        return len(self.data.train.inputs)

    @property
    def outputs(self) -> int:
        """How many outputs the network has."""
        return self.targets.shape[1]


def draw_problem(experiment: Experiment) -> Problem:
    """Draw the data, and the network with its weights at the start, on the experiment's device."""
    data, probes = experiment.draw(), experiment.path.probes
    # the points: training examples always, as they are the right side of every kernel, and the splits that are read
    splits = [name for name in ("train", "probe", "test") if name == "train" or name in probes]
    parts, places, at = list[Tensor](), dict[str, slice](), 0
    for name in splits:
        target = getattr(data, name).target
        parts.append(experiment.loss.targets(target, len(data.classes)))
        if name in probes and len(target):
            places[name] = slice(at, at + len(target))
        at += len(target)
    if not places:
        raise Mistake(
            f"path.probes=[{','.join(probes)}]: the data has no points there; raise data.probe, or add train"
        )
    # where the examples of each phase lie among those of their split: they stand together
    phases = {}
    for name, place in (
        ({"train": slice(0, len(data.train.inputs))} | places).items() if data.phases else ()
    ):
        counts = getattr(data, name).phase.bincount(minlength=len(data.phases)).tolist()
        ends = list(accumulate(counts, initial=place.start))
        phases[name] = tuple(slice(*ends[k : k + 2]) for k in range(len(counts)))

    kind = {"device": experiment.device, "dtype": getattr(torch, experiment.dtype)}
    targets = torch.cat(parts)
    module = draw_network(
        experiment, data, targets.shape[1], copies_of_drawn(kind["dtype"].itemsize)
    )
    return Problem(
        data=data,
        inputs=torch.cat([getattr(data, name).inputs for name in splits]).to(**kind),
        targets=targets.to(**kind),
        places=places,
        phases=phases,
        module=module,
        weights=weights_of(module),
    )


def draw_network(
    experiment: Experiment, data: Data, outputs: int, copies: float = 1.0
) -> ScaledOutput:
    """The module with weights drawn from the experiment's seed, if memory holds `copies` copies of them."""
    shape = tuple(data.train.inputs.shape[1:])
    weights = stream("weights", experiment.seed)
    with MemoryLimit(
        experiment.room_gb,
        "the network",
        "model.width, model.depth or the size of an example",
        copies,
    ):
        module = experiment.model.module(experiment.init, shape, outputs, weights, data.vocabulary)
    return module.to(experiment.device, getattr(torch, experiment.dtype)).eval()


# --- The network of an experiment as its width goes to infinity: its kernels between the points that are read,
#
#     K_0 → α²Θ,    Cov f_0 → α²𝒢    (of h, where f is antisymmetric or centred: `init.base`)
#
# The work is counted in pairs of pixels of pairs of examples, times layers. Where it would exceed what a run
# takes by itself, or no limit is known, the reason stands in place of the kernels.


MOST = 2 * 10**9  # half a minute on two cores
COPIES, SHARE = (
    4,
    0.25,
)  # numbers held at once for each pair of points, and what they may take of the memory


def limit_kernels(
    experiment: Experiment, inputs: Float[Tensor, "point *shape"], train: int, vocabulary: int
) -> LimitKernels | DoesNotApply:
    """The kernels, if a machine of the ladder asks for them."""
    if not any(machine.needs_limit for machine in experiment.ladder.machine):
        return DoesNotApply("it is not asked for")
    try:
        network = experiment.model.limit(
            experiment.init, LearningTask(tuple(inputs.shape[1:]), 1, vocabulary)
        )
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
        return infinite_kernels(network, inputs, train, experiment)
    except Mistake as mistake:  # of variances that are too large for an activation
        return DoesNotApply(str(mistake))


def infinite_kernels(
    network: Network, inputs: Float[Tensor, "point *shape"], train: int, experiment: Experiment
) -> LimitKernels:
    """Compute the kernels of training examples among themselves, exact where one meets itself, and with all other
    points.
    """
    learned, others = slice(0, train), slice(train, len(inputs))
    blocks = [BlockSlices(learned, learned, same=True)]
    blocks += [BlockSlices(others, learned, same=False)] if len(inputs) > train else []
    threads, scale = torch.get_num_threads(), experiment.init.alpha**2
    found = [
        compute(network, block, inputs, inputs, memory_gb=experiment.room_gb / 4, threads=threads)
        for block in blocks
    ]
    start, tangent = (
        torch.cat([getattr(block, name) for block in found]) for name in ("nngp", "ntk")
    )
    return LimitKernels(start=start.mul_(scale), tangent=tangent.mul_(scale))
