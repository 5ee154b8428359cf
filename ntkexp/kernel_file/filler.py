"""What can compute a tile: the kernel between some points and some others, by limits of infinite width or networks of
finite width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import hypot
from pathlib import Path
from typing import Any, TypeAlias

from jaxtyping import Float
from torch import Tensor

from ntkexp.data.base import Data
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.problem import draw_network
from ntkexp.kernel.read.outputs import Outputs, wanted
from ntkexp.library import tangent_kernel
from ntkexp.limit.infinite_kernel import BlockPlace, compute
from ntkexp.limit.network import Network
from ntkexp.model.base import LearningTask, ScaledOutput
from ntkexp.model.functional import load_tensors
from ntkexp.path.budget import RATE
from ntkexp.records.atomic import Damaged

# --- Whoever can compute a tile: the kernel between some points and some others, by the names of the file's arrays.


Blocks: TypeAlias = Mapping[str, Float[Tensor, "probe out train out_"]]


class AbstractFiller(ABC):
    """A filler computes a kernel as a function of points."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the kernels that it computes."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """The length of the axes `out` and `out_`."""

    @property
    @abstractmethod
    def kernel(self) -> dict[str, Any]:
        """Which kernel it is, in words of JSON."""

    @property
    @abstractmethod
    def concurrent(self) -> bool:
        """Whether tiles may be computed at once, in threads of one process."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """What a pair of points takes on one core of an ordinary processor, from shapes alone: no less than this."""

    @property
    def remark(self) -> str:
        """What a reader of the kernel should know, when it is computed."""
        return ""

    @abstractmethod
    def between(self, left: Float[Tensor, "probe *shape"], right: Float[Tensor, "train *shape"]) -> Blocks:
        """The kernels between points and other points."""

    @abstractmethod
    def among(self, points: Float[Tensor, "probe *shape"]) -> Blocks:
        """The kernels among points: exact where a point meets itself."""


# --- What makes a filler, as plain data: on whichever machine, the same kernel comes of it.


class AbstractRecipe(ABC):
    """A recipe is a frozen dataclass that can be pickled."""

    @abstractmethod
    def filler(self, experiment: Experiment, data: Data, workers: int) -> AbstractFiller:
        """Make the filler; so many of its tiles may be computed at once in this process."""


# --- The kernels of an architecture as its width goes to infinity, outputs scaled as `init` says: α²𝒢 and α²Θ.


LIMIT_RATE = 1e-10  # seconds for a pair of pixels in a layer; the fused engine takes a few times as long


@dataclass(frozen=True)
class Limit(AbstractFiller):
    """The filler for a network of layers of infinite width."""

    experiment: Experiment
    network: Network
    memory_gb: float  # of one tile

    @property
    def names(self) -> tuple[str, ...]:
        return ("nngp", "ntk")

    @property
    def outputs(self) -> int:
        return 1

    @property
    def kernel(self) -> dict[str, Any]:
        layers = [layer.fields() for layer in self.network.layers]
        return {"kind": "limit", "layers": layers, "alpha": self.experiment.init.alpha}

    @property
    def concurrent(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        return self.network.work * LIMIT_RATE

    def between(self, left: Float[Tensor, "probe *shape"], right: Float[Tensor, "train *shape"]) -> Blocks:
        return self.block(left, right, BlockPlace(slice(0, len(left)), slice(0, len(right)), same=False))

    def among(self, points: Float[Tensor, "probe *shape"]) -> Blocks:
        everything = slice(0, len(points))
        return self.block(points, points, BlockPlace(everything, everything, same=True))

    def block(self, left: Tensor, right: Tensor, place: BlockPlace) -> Blocks:
        """Compute both kernels, scaled."""
        found = compute(self.network, place, left, right, memory_gb=self.memory_gb, threads=1)
        scale = self.experiment.init.alpha**2
        return {"nngp": scale * found.nngp[:, None, :, None], "ntk": scale * found.ntk[:, None, :, None]}


@dataclass(frozen=True)
class LimitRecipe(AbstractRecipe):
    """The limit of the experiment's architecture."""

    def filler(self, experiment: Experiment, data: Data, workers: int) -> Limit:
        return limit_of(experiment, data, workers)


def limit_of(experiment: Experiment, data: Data, workers: int) -> Limit:
    """Find the architecture's limit for these data; to have none is a mistake."""
    task = LearningTask(tuple(data.train.inputs.shape[1:]), 1, data.vocabulary)
    return Limit(experiment, experiment.model.limit(experiment.init, task), experiment.room_gb / workers)


# --- The tangent kernel of networks of finite width, at their start or at the end of a run, as a mean over seeds:
#
# K(x, x′) = 1/n Σ_seed J(θ_seed; x) J(θ_seed; x′)ᵀ


@dataclass(frozen=True)
class Tangent(AbstractFiller):
    """The filler for modules that are alike but for their weights."""

    experiment: Experiment
    modules: tuple[ScaledOutput, ...]
    width: int  # of the output
    wanted: Outputs  # all of these, some, or their trace as one
    told: Mapping[str, Any]  # where the weights come from
    errors: list[tuple[float, float]] = field(default_factory=list)  # bars of sketched tiles, and their norms

    @property
    def names(self) -> tuple[str, ...]:
        return ("ntk",)

    @property
    def outputs(self) -> int:
        return 1 if self.wanted == "trace" else len(wanted(self.wanted, self.width))

    @property
    def kernel(self) -> dict[str, Any]:
        fields = {name: getattr(self.experiment, name).fields() for name in ("model", "init")}
        if (sketch := self.experiment.kernel.sketch) is not None:
            fields |= {"sketch": sketch, "sketch_seed": self.experiment.seed}
        return {"kind": "tangent", **fields, "casts": self.experiment.path.casts, "outputs": self.wanted, **self.told}

    @property
    def concurrent(self) -> bool:
        return False  # torch swaps a module's weights in place while it runs

    @property
    def seconds(self) -> float:
        weights = sum(weight.numel() for module in self.modules for weight in module.parameters())
        return weights * self.width * RATE

    def between(self, left: Float[Tensor, "probe *shape"], right: Float[Tensor, "train *shape"]) -> Blocks:
        return self.mean(left, right)

    def among(self, points: Float[Tensor, "probe *shape"]) -> Blocks:
        return self.mean(points, None)

    def mean(self, left: Tensor, right: Tensor | None) -> Blocks:
        """The mean over the modules, added one by one in their order."""
        first, *rest = (self.one(module, left, right) for module in self.modules)
        return {"ntk": sum(rest, start=first) / len(self.modules)}

    def one(self, module: ScaledOutput, left: Tensor, right: Tensor | None) -> Tensor:
        """The kernel of one module; if it is a sketch, note is taken of its error bar."""
        casts, sketch = self.experiment.path.casts, self.experiment.kernel.sketch
        if sketch is None:
            return tangent_kernel(module, left, right, outputs=self.wanted, casts=casts)
        kernel, bar = tangent_kernel(
            module, left, right, outputs=self.wanted, casts=casts, sketch=sketch, seed=self.experiment.seed
        )
        self.errors.append((bar, float(kernel.norm())))
        return kernel

    @property
    def remark(self) -> str:
        if self.experiment.kernel.sketch is None:
            return ""
        sketch = f"the kernel is a sketch (kernel.sketch={self.experiment.kernel.sketch})"
        return f"{sketch}{self.precision}: it tells drift, spectra and alignment, but no single entries"

    @property
    def precision(self) -> str:
        """How far the tiles may be off that were computed here; others may have computed elsewhere."""
        if not self.errors:
            return ""
        missed, sizes = (hypot(*each) for each in zip(*self.errors, strict=True))
        return f", within {missed / sizes:.1%} of its norm"


@dataclass(frozen=True)
class StartRecipe(AbstractRecipe):
    """Networks as they are drawn from these seeds."""

    seeds: tuple[int, ...]
    wanted: Outputs

    def filler(self, experiment: Experiment, data: Data, workers: int) -> Tangent:
        return at_start(experiment, data, self.seeds, self.wanted)


@dataclass(frozen=True)
class CheckpointRecipe(AbstractRecipe):
    """The network of a run, with its weights `when`: at the start or the end."""

    weights: str
    when: str
    wanted: Outputs

    def filler(self, experiment: Experiment, data: Data, workers: int) -> Tangent:
        return at_checkpoint(experiment, data, Path(self.weights), self.when, self.wanted)


def at_start(experiment: Experiment, data: Data, seeds: Sequence[int], wanted: Outputs) -> Tangent:
    """Draw networks from these seeds."""
    outputs = outputs_of(experiment, data)
    drawn = (experiment.model_copy(update={"seed": seed}) for seed in seeds)
    modules = tuple(draw_network(each, data, outputs) for each in drawn)
    return Tangent(experiment, modules, outputs, wanted, {"seeds": list(seeds)})


def at_checkpoint(experiment: Experiment, data: Data, weights: Path, when: str, wanted: Outputs) -> Tangent:
    """Load the network of a run, with its weights at the `start` or the `end` of training."""
    outputs = outputs_of(experiment, data)
    module = draw_network(experiment, data, outputs)
    try:
        saved = load_tensors(weights, experiment.device)[when]
        module.load_state_dict(saved, strict=False)
    except (LookupError, RuntimeError, TypeError, AttributeError) as error:
        raise Damaged(f"{weights} is damaged: it does not hold the weights of this network at the {when}") from error
    digest = sha256()
    for name in sorted(saved):
        digest.update(name.encode() + saved[name].cpu().numpy().tobytes())
    told = {"weights": when, "weights_sha256": digest.hexdigest()}
    return Tangent(experiment, (module,), outputs, wanted, told)


def outputs_of(experiment: Experiment, data: Data) -> int:
    """Count the outputs that the network has."""
    return experiment.loss.targets(data.train.target, len(data.classes)).shape[1]
