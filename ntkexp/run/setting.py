"""From an experiment to what is needed to run it: data, a network at its start, its kernel there, and a step size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.data.base import Data
from ntkexp.diagnostics.spectrum import largest
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.infinite_width import limit_kernels
from ntkexp.kernel.read.cost import Cost, costs
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.allowance import Allowance
from ntkexp.kernel.record.casts import remark, with_casts
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.segment import point
from ntkexp.machine.evidence import DoesNotApply, LimitKernels
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.output import ScaledOutput
from ntkexp.path.budget import Budget, copies_of_drawn
from ntkexp.path.descent import Descent
from ntkexp.path.effort import core_seconds, refuse_endless
from ntkexp.path.points import Points
from ntkexp.run.attributed_points import shares
from ntkexp.shapes import Weights
from ntkexp.stream import stream


@dataclass(frozen=True)
class Setting:
    """Everything at the start of training. Targets and outputs run over all points, training examples first."""

    experiment: Experiment
    data: Data
    module: ScaledOutput
    weights: Weights
    places: Mapping[str, slice]  # where each split that is read lies among the points
    targets: Float[Tensor, "point out"]
    descent: Descent
    outputs: Float[Tensor, "point out"]
    kernel: Float[Tensor, "point out train out_"]
    largest_stable_step: float
    attributed: Int[Tensor, " attributed"]  # the points at which the path is integrated
    chunk: int  # how many of them at once, where that takes a pass backwards
    terms: float  # Σ‖terms of f‖ at the start, at the points that are read
    eps: float  # of the shortest numbers between weights and outputs
    limit: LimitKernels | DoesNotApply  # the kernels at infinite width
    remarks: tuple[str, ...] = ()  # what a reader of the results should know

    @property
    def points(self) -> Points:
        """Where the network is read."""
        return self.descent.points

    @property
    def read(self) -> slice:
        """The points at which the network is read: all, or all but the training examples."""
        return slice(0 if "train" in self.places else self.points.train, None)

    @property
    def integrated(self) -> list[int]:
        """The outputs at which the path is integrated."""
        return list(self.experiment.path.wanted(self.outputs.shape[1]))

    @property
    def path_shape(self) -> tuple[int, int, int, int]:
        """[point, out, train, out_] of the path kernel."""
        points, outputs = self.outputs.shape
        return points, len(self.integrated), self.points.train, outputs

    @property
    def read_blocks(self) -> list[slice]:
        """The blocks of points at which the path is integrated."""
        return (self.points.train_blocks if "train" in self.places else []) + self.points.other_blocks

    @property
    def weight(self) -> float:
        """wᵢ of full-batch training."""
        return self.experiment.loss.weight(self.points.train) * self.descent.scale


def prepare(experiment: Experiment) -> Setting:
    """Draw the data and the network, and look at them once."""
    refuse_vast(experiment)
    data = experiment.draw()
    targets, places = laid_out(experiment, data)
    module = network(experiment, data, targets.shape[1], copies_held(experiment))
    weights = weights_of(module)
    points, budget, few = placed(experiment, data, module, weights, targets.shape[1])
    if experiment.stop_at_loss is None:
        refuse_endless(effort(experiment, budget), experiment.steps, experiment.device)
    outputs, right = points.read(weights)
    refuse_infinite(outputs, experiment)
    kernel = points.tangent_kernel(weights, right)
    refuse_dead(kernel[: points.train])
    scale = experiment.init.alpha**-2 if experiment.init.centred else 1.0
    weight = experiment.loss.weight(points.train) * scale
    stable = 2 / (weight * largest(kernel[: points.train]) * experiment.loss.curvature)
    chosen = attributed(experiment, places)
    return Setting(
        experiment,
        data,
        module,
        weights,
        places,
        targets,
        descending(experiment, points, targets[: points.train], weights, scale, stable),
        outputs,
        kernel,
        stable,
        chosen,
        budget.chunk(len(chosen)) if experiment.optimizer.remembers else len(chosen),
        float(module.sizes(weights, points.inputs[chosen]).norm(dim=1).sum()),
        few.eps,
        limit_kernels(experiment, points.inputs, points.train, data.vocabulary),
        remarked(experiment, module, points, few),
    )


def descending(
    experiment: Experiment,
    points: Points,
    targets: Float[Tensor, "train out"],
    weights: Weights,
    scale: float,
    largest_stable: float,
) -> Descent:
    """How training will go, once it begins."""
    optimizer, size = experiment.optimizer, experiment.optimizer.chosen_step(largest_stable)
    factors, schedule = optimizer.factors(weights), experiment.schedule
    loss, steps, seed = experiment.loss, experiment.steps, experiment.seed
    return Descent(points, targets, loss, scale, optimizer, factors, schedule, size, steps, seed)


def attributed(experiment: Experiment, places: Mapping[str, slice]) -> Int[Tensor, " attributed"]:
    """All points that are read, or `path.attributed` of them where the optimizer remembers."""
    sizes = [place.stop - place.start for place in places.values()]
    taken = shares(experiment.path.attributed, sizes) if experiment.optimizer.remembers else sizes
    parts = [torch.arange(place.start, place.start + n) for place, n in zip(places.values(), taken, strict=True)]
    return torch.cat(parts).to(experiment.device)


def laid_out(experiment: Experiment, data: Data) -> tuple[Float[Tensor, "point out"], dict[str, slice]]:
    """The targets of all points that are read, and where each split lies among them."""
    parts: list[Tensor] = []
    places: dict[str, slice] = {}
    at = 0
    for name in names(experiment):
        target = getattr(data, name).target
        parts.append(experiment.loss.targets(target, len(data.classes)))
        if name in experiment.path.probes and len(target):
            places[str(name)] = slice(at, at + len(target))
        at += len(target)
    return torch.cat(parts).to(experiment.device, getattr(torch, experiment.dtype)), places


def names(experiment: Experiment) -> list[str]:
    """The splits among the points: training examples always, as they are the right side of every kernel."""
    return [name for name in ("train", "probe", "test") if name == "train" or name in experiment.path.probes]


def network(experiment: Experiment, data: Data, outputs: int, copies: float = 1.0) -> ScaledOutput:
    """The module with weights drawn from the experiment's seed, if there is memory for so many copies of them."""
    shape = tuple(data.train.inputs.shape[1:])
    weights = stream("weights", experiment.seed)
    with Allowance(experiment.memory_gb, "the network", "model.width, model.depth or the size of an example", copies):
        module = experiment.model.module(experiment.init, shape, outputs, weights, data.vocabulary)
    return module.to(experiment.device, getattr(torch, experiment.dtype)).eval()


def copies_held(experiment: Experiment) -> float:
    """How many copies of the numbers that are drawn for it a run will hold."""
    return copies_of_drawn(getattr(torch, experiment.dtype).itemsize)


def placed(
    experiment: Experiment, data: Data, module: ScaledOutput, weights: Weights, outputs: int
) -> tuple[Points, Budget, Tape]:
    """The points, in blocks that the memory allows, that memory, and what the network does with two of them."""
    inputs = torch.cat([getattr(data, name).inputs for name in names(experiment)])
    inputs = inputs.to(experiment.device, getattr(torch, experiment.dtype))
    function = with_casts(function_of(module), experiment.path.casts)
    reader = Reader(function, point(weights).trained, programs=ProgramCache())
    few, train = reader.record(weights, inputs[:2]), len(data.train.inputs)
    wanted = experiment.path.wanted(outputs)
    budget = Budget(
        experiment.memory_gb,
        sum(weight.numel() for weight in weights.values()),
        len(inputs),
        train,
        outputs,
        len(wanted),
        experiment.path.kernels,
        len(experiment.path.positions),
        few.bytes_per_example,
        inputs.element_size(),
        experiment.optimizer.copies,
        experiment.optimizer.remembers and bool(experiment.path.finer),
    )
    chosen = wanted if len(wanted) < outputs else None
    return Points(reader, inputs, train, budget.block, budget.keep, chosen), budget, few


def effort(experiment: Experiment, budget: Budget) -> float:
    """Core seconds."""
    return core_seconds(budget, experiment.steps, 2 if experiment.optimizer.remembers else 1)


def refuse_vast(experiment: Experiment) -> None:
    """Kernels that are too large by the numbers of examples alone, before any is drawn."""
    source, size = experiment.data, torch.finfo(getattr(torch, experiment.dtype)).bits // 8
    others = (source.probe if "probe" in experiment.path.probes else 0) + (
        (source.test or 0) if "test" in experiment.path.probes else 0
    )
    least = float(source.train + others) * source.train * size * (2 * experiment.path.kernels + 3)
    if least > experiment.memory_gb * 1e9:
        raise Mistake(
            f"memory_gb={experiment.memory_gb:g}: the kernels of {source.train + others} points with "
            f"data.train={source.train} of them take {least / 1e9:.4g} GB or more; lower data.train, data.probe or "
            "data.test, or raise memory_gb"
        )


def remarked(experiment: Experiment, module: ScaledOutput, points: Points, few: Tape) -> tuple[str, ...]:
    """What the network's numbers cost, and why its kernels do; a secant says by itself what it has no rule for."""
    obstacle = points.reader.obstacle(few) if experiment.path.closing is None else None
    found = (remark(function_of(module), few, experiment.path.casts), obstacle)
    return tuple(each for each in found if each is not None)


def refuse_infinite(outputs: Float[Tensor, "point out"], experiment: Experiment) -> None:
    """A network that is not finite at its start cannot be trained."""
    finite = outputs.isfinite().all(1)
    if not finite.all():
        raise Mistake(
            f"the network's outputs are not finite before training, at {int((~finite).sum())} of {len(finite)} points; "
            f"{experiment.model.remedy}"
        )


def refuse_dead(kernel: Float[Tensor, "train out train_ out_"]) -> None:
    """A network whose outputs no weight moves cannot be trained either."""
    if not kernel.any():
        raise Mistake(
            "no weight moves an output at any training example, so there is nothing to train: are all units dead?"
        )


def glimpsed(experiment: Experiment) -> tuple[Points, Budget, Tape]:
    """The points, the memory and two examples of an experiment that is not to be run."""
    refuse_vast(experiment)
    data = experiment.draw()
    outputs = laid_out(experiment, data)[0].shape[1]
    module = network(experiment, data, outputs, copies_held(experiment))
    return placed(experiment, data, module, weights_of(module), outputs)


def kernel_costs(experiment: Experiment) -> tuple[Points, list[Cost]]:
    """Where the network would be read, and what the kernel of a block of points with the training examples costs."""
    points, _, few = glimpsed(experiment)
    return points, costs(points.reader, few, points.block, points.train)
