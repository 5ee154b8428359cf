"""The data and the network of an experiment,
and the network's kernels at infinite width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.data.base import Data
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import code_digests, code_files
from ntkexp.experiment.parent import ParentRun, start_from, untrained
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
    """The drawn data and network of an experiment.

    Inputs and targets hold the training examples, and then the points of the other
    splits in `path.queries`."""

    data: Data
    inputs: Float[Tensor, " point *shape"]
    targets: Float[Tensor, "point out"]
    split_slices: Mapping[str, slice]  # the points of each split of `path.queries`
    # The points of each phase of a split. Empty if the data have no phases.
    phases: Mapping[str, tuple[slice, ...]]
    module: ScaledOutput
    weights: Weights

    @property
    def train(self) -> int:
        """The number of training examples."""
        return len(self.data.train.inputs)

    @property
    def outputs(self) -> int:
        """The number of outputs of the network."""
        return self.targets.shape[1]


def draw_problem(experiment: Experiment) -> Problem:
    """Draw the data and the initial network on the experiment's device.

    Raise if the splits in `path.queries` have no points, or if memory does not suffice.
    """
    data = experiment.draw()
    # the training examples are the columns of every kernel
    splits = ["train"]
    splits += [name for name in ("query", "test") if name in experiment.path.queries]
    split_slices = slices_of_queries(experiment, data, splits)
    inputs = torch.cat([getattr(data, name).inputs for name in splits])
    targets = torch.cat(
        [
            experiment.loss.targets(getattr(data, name).target, len(data.classes))
            for name in splits
        ]
    )
    dtype = getattr(torch, experiment.dtype)
    copies = copies_of_drawn(dtype.itemsize)
    module = draw_network(experiment, data, targets.shape[1], copies)
    load_parent(experiment, data, module, targets.shape[1])
    return Problem(
        data=data,
        inputs=inputs.to(experiment.device, dtype),
        targets=targets.to(experiment.device, dtype),
        split_slices=split_slices,
        phases=phases_of_splits(data, split_slices),
        module=module,
        weights=weights_of(module),
    )


def slices_of_queries(
    experiment: Experiment, data: Data, splits: Sequence[str]
) -> dict[str, slice]:
    """Return the points of each split in `path.queries`, if all points of `splits` are
    numbered in order. Raise if there are none."""
    queries = experiment.path.queries
    slices = dict[str, slice]()
    first = 0
    for name in splits:
        count = len(getattr(data, name).target)
        if name in queries and count:
            slices[name] = slice(first, first + count)
        first += count
    if not slices:
        raise Mistake(
            f"path.queries=[{','.join(queries)}]: the data has no points there; raise data.query, or add train"
        )
    return slices


def load_parent(
    experiment: Experiment, data: Data, module: ScaledOutput, outputs: int
) -> None:
    """Replace the drawn weights by the weights of `init.parent`, if there is a parent.

    Raise if the parent has another network.
    """
    if experiment.init.parent is None:
        return
    parent = ParentRun.of(experiment.init.parent)
    parent.refuse_other_network(experiment.fields())
    if code_digests(experiment) != parent.code:
        raise Mistake(parent.code_refusal(code_files(experiment)))
    constants = untrained(module)
    if constants and experiment.seed != parent.seed:
        with_seed = experiment.model_copy(update={"seed": parent.seed})
        drawn = draw_network(with_seed, data, outputs)
        parent.refuse_other_constants(constants, untrained(drawn))
    start_from(parent, module)


def phases_of_splits(
    data: Data, split_slices: Mapping[str, slice]
) -> dict[str, tuple[slice, ...]]:
    """Return the points of each phase by split, or {} if the data have no phases.

    In every split, the examples of a phase are consecutive.
    """
    if not data.phases:
        return {}
    phases = {}
    slices = {"train": slice(0, len(data.train.inputs)), **split_slices}
    for name, split in slices.items():
        counts = getattr(data, name).phase.bincount(minlength=len(data.phases)).tolist()
        bounds = accumulate(counts, initial=split.start)
        phases[name] = tuple(slice(*pair) for pair in pairwise(bounds))
    return phases


def draw_network(
    experiment: Experiment, data: Data, outputs: int, copies: float = 1.0
) -> ScaledOutput:
    """Return the network with weights drawn from the seed, in evaluation mode.

    Raise if memory cannot hold `copies` copies of the network's weights.
    """
    shape = tuple(data.train.inputs.shape[1:])
    weights = stream("weights", experiment.seed)
    with MemoryLimit(
        experiment.budget,
        "the network",
        "model.width, model.depth or the size of an example",
        copies,
    ):
        module = experiment.model.module(
            experiment.init, shape, outputs, weights, data.vocabulary
        )
    return module.to(experiment.device, getattr(torch, experiment.dtype)).eval()


# --- The kernels of an experiment's network at infinite width: the tangent kernel Θ and
# the covariance 𝒢 of the initial outputs. In the limit,
#
#     K_0 → α²Θ,    Cov f_0 → α²𝒢
#
# If f is antisymmetric or centred, Θ and 𝒢 are the kernels of the network h from which f
# is built (`ntkexp.init`). If the computation is too large, or if no limit is known, a
# `DoesNotApply` with the reason replaces the kernels.


# limit of (pixel pairs) × (example pairs) × (layers): half a minute on two cores
MAX_LIMIT_WORK = 2 * 10**9
NUMBERS_PER_PAIR = 4  # number of entries in memory for each pair of points
LIMIT_MEMORY_PARTS = 4  # the kernels may take a quarter of the memory limit


def limit_kernels(
    experiment: Experiment,
    inputs: Float[Tensor, " point *shape"],
    train: int,
    vocabulary: int,
) -> LimitKernels | DoesNotApply:
    """Return the kernels at infinite width, if a kernel machine needs them.

    Otherwise, return a `DoesNotApply` with the reason.
    """
    if not any(machine.needs_limit for machine in experiment.ladder.machine):
        return DoesNotApply("it is not asked for")
    try:
        network = limit_network(experiment, tuple(inputs.shape[1:]), vocabulary)
    except Mistake as mistake:
        return DoesNotApply(str(mistake))
    pairs = train * (train + 1) // 2 + (len(inputs) - train) * train
    work = pairs * network.work
    if work > MAX_LIMIT_WORK:
        return DoesNotApply(
            f"the kernels at infinite width take {work / MAX_LIMIT_WORK:.1f} times the work that "
            "a run allows for them; lower data.train, data.query or data.test, or compute them "
            "into a kernel file"
        )
    needed = LIMIT_MEMORY_PARTS * NUMBERS_PER_PAIR * 8 * train * len(inputs)
    if not experiment.budget.fits(needed):
        task = "a run with the kernels at infinite width"
        remedy = "lower data.train, data.query or data.test"
        return DoesNotApply(experiment.budget.refusal(needed, task, remedy))
    try:
        return infinite_kernels(network, inputs, train, experiment)
    except Mistake as mistake:  # for example, a variance is too large for an activation
        return DoesNotApply(str(mistake))


def limit_network(
    experiment: Experiment, shape: tuple[int, ...], vocabulary: int
) -> Network:
    """Return the network of infinite width. Raise if the model has none, or if the
    weights come from a parent."""
    if experiment.init.parent is not None:
        raise Mistake("the weights are those of init.parent, and not drawn")
    return experiment.model.limit(experiment.init, LearningTask(shape, 1, vocabulary))


def infinite_kernels(
    network: Network,
    inputs: Float[Tensor, " point *shape"],
    train: int,
    experiment: Experiment,
) -> LimitKernels:
    """Return α²𝒢 and α²Θ between all points (rows) and the training examples (columns).

    Entries K(x, x) of an example with itself are exact.
    """
    train_points = slice(0, train)
    blocks = [BlockSlices(train_points, train_points, same=True)]
    if len(inputs) > train:
        blocks.append(BlockSlices(slice(train, len(inputs)), train_points, same=False))
    budget = experiment.budget.part(LIMIT_MEMORY_PARTS)
    threads = torch.get_num_threads()
    computed = [
        compute(network, block, inputs, inputs, budget=budget, threads=threads)
        for block in blocks
    ]
    nngp = torch.cat([block.nngp for block in computed])
    ntk = torch.cat([block.ntk for block in computed])
    scale = experiment.init.alpha**2
    return LimitKernels(start=nngp.mul_(scale), tangent=ntk.mul_(scale))
