"""What a kernel file holds: a kernel between the points of an experiment's data, computed block by block, of networks
of infinite width or as they are drawn or trained.

    identity = sha256(canonical JSON of the description, the sha256 of the points' numbers among it)

Two commands that would fill a file with the same numbers share it; a file is refused for any other kernel.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from math import hypot
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.data.base import Data, Split
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import digest, files_of
from ntkexp.experiment.problem import draw_network
from ntkexp.kernel.read.plan import Outputs, wanted
from ntkexp.library import tangent_kernel
from ntkexp.limit.infinite_kernel import BlockSlices, compute
from ntkexp.limit.network import Network
from ntkexp.loss import Squared
from ntkexp.model.base import LearningTask, ScaledOutput
from ntkexp.model.functional import load_tensors
from ntkexp.path.budget import RATE
from ntkexp.records.atomic import Damaged
from ntkexp.records.folder import results_version

Blocks: TypeAlias = Mapping[str, Float[Tensor, "probe out train out_"]]
"""A block of each kernel, by the names of the file's arrays."""


def splits_of(data: Data) -> dict[str, Split]:
    """The splits of the data by name, in the order in which their points stand in a file."""
    return {name: getattr(data, name) for name in ("train", "probe", "test")}


def data_digest(data: Data) -> str:
    """The digest of all numbers that make the points."""
    content = sha256()
    for split in splits_of(data).values():
        for part in (split.inputs, split.target):
            content.update(f"{list(part.shape)}".encode())
            content.update(np.ascontiguousarray(part.numpy()).tobytes())
    return content.hexdigest()


@dataclass(frozen=True, eq=False)
class AbstractKernel(ABC):
    """A kernel between the points of `data`, train, probe and test in this order; further fields are plain data."""

    experiment: Experiment
    data: Data
    threads: int = 1  # blocks that are computed at once in this process, if it is `concurrent`

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the kernels: there may be two of the same networks."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """The length of the axes `out` and `out_`."""

    @property
    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Which kernel it is, in words of JSON."""

    @property
    @abstractmethod
    def concurrent(self) -> bool:
        """Whether blocks may be computed at once, in threads of one process."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """What a pair of points takes on one core of an ordinary processor, from shapes alone: no less than this."""

    @property
    def remark(self) -> str:
        """What a reader of the kernel should know, when it is computed."""
        return ""

    @abstractmethod
    def between(
        self, left: Float[Tensor, "probe *shape"], right: Float[Tensor, "train *shape"]
    ) -> Blocks:
        """The kernels between points and other points."""

    @abstractmethod
    def among(self, points: Float[Tensor, "probe *shape"]) -> Blocks:
        """The kernels among points: exact where a point meets itself."""

    @property
    def options(self) -> dict[str, Any]:
        """Its own fields, with which a worker elsewhere makes it of the same experiment and data."""
        common = {each.name for each in fields(AbstractKernel)}
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.init and each.name not in common
        }

    @cached_property
    def inputs(self) -> Float[Tensor, "point *shape"]:
        whole = torch.cat([split.inputs for split in splits_of(self.data).values()])
        return whole.to(self.experiment.device, getattr(torch, self.experiment.dtype))

    @cached_property
    def targets(self) -> Float[Tensor, "point out"]:
        """What the squared loss compares, whatever the network's loss is: classes as ±1, or one-hot and centred."""
        target, classes = (
            torch.cat([split.target for split in splits_of(self.data).values()]),
            len(self.data.classes),
        )
        if self.outputs == classes == 2:  # a network with two outputs for two classes
            return torch.nn.functional.one_hot(target, classes).double() - 1 / classes
        return Squared().targets(target, classes)

    @property
    def labels(self) -> Int[Tensor, " point"]:
        """The class of each point, −1 in a regression."""
        if not self.data.classes:
            return torch.full((len(self.inputs),), -1)
        return torch.cat([split.target for split in splits_of(self.data).values()])

    @property
    def index(self) -> Int[Tensor, " point"]:
        return torch.cat([split.index for split in splits_of(self.data).values()])

    @cached_property
    def description(self) -> dict[str, Any]:
        """Everything that decides a number in the file; the code of networks from elsewhere, where they are."""
        code = [digest(file) for file in files_of((self.experiment.model, self.experiment.init))]
        return {
            **({"code": code} if code else {}),
            "kernel": self.spec,
            "data": self.experiment.data.option,
            "data_sha256": data_digest(self.data),
            "dtype": self.experiment.dtype,
            "results_version": results_version,
        }

    @property
    def identity(self) -> str:
        return sha256(
            json.dumps(self.description, sort_keys=True, allow_nan=False).encode()
        ).hexdigest()


# --- The kernels of an architecture as its width goes to infinity, outputs scaled as `init` says: α²𝒢 and α²Θ.


LIMIT_RATE = (
    1e-10  # seconds for a pair of pixels in a layer; the fused engine takes a few times as long
)


@dataclass(frozen=True, eq=False)
class InfiniteKernel(AbstractKernel):
    """The kernels of a network of layers of infinite width; an architecture that has no limit is a mistake."""

    @cached_property
    def network(self) -> Network:
        task = LearningTask(tuple(self.data.train.inputs.shape[1:]), 1, self.data.vocabulary)
        return self.experiment.model.limit(self.experiment.init, task)

    @property
    def names(self) -> tuple[str, ...]:
        return ("nngp", "ntk")

    @property
    def outputs(self) -> int:
        return 1

    @property
    def spec(self) -> dict[str, Any]:
        layers = [layer.fields() for layer in self.network.layers]
        return {"kind": "limit", "layers": layers, "alpha": self.experiment.init.alpha}

    @property
    def concurrent(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        return self.network.work * LIMIT_RATE

    def between(
        self, left: Float[Tensor, "probe *shape"], right: Float[Tensor, "train *shape"]
    ) -> Blocks:
        return self.block(left, right, same=False)

    def among(self, points: Float[Tensor, "probe *shape"]) -> Blocks:
        return self.block(points, points, same=True)

    def block(self, left: Tensor, right: Tensor, *, same: bool) -> Blocks:
        """Both kernels, scaled."""
        block = BlockSlices(slice(0, len(left)), slice(0, len(right)), same)
        room = self.experiment.room_gb / self.threads
        kernels = compute(self.network, block, left, right, memory_gb=room, threads=1)
        scale = self.experiment.init.alpha**2
        return {
            "nngp": scale * kernels.nngp[:, None, :, None],
            "ntk": scale * kernels.ntk[:, None, :, None],
        }


# --- The tangent kernel of networks of finite width, at their start or at the end of a run, as a mean over seeds:
#
# K(x, x′) = 1/n Σ_seed J(θ_seed; x) J(θ_seed; x′)ᵀ


@dataclass(frozen=True, eq=False)
class EmpiricalKernel(AbstractKernel):
    """The tangent kernel of networks as they are drawn from `seeds`, or of one with the weights of a run."""

    seeds: tuple[int, ...] = ()
    wanted: Outputs = "all"  # all of the outputs, some, or their trace as one
    weights: str = ""  # weights.pt of a run, in place of seeds
    when: str = "end"  # its weights at the `start` or the `end` of training
    errors: list[tuple[float, float]] = field(
        default_factory=list, init=False
    )  # bars of sketched blocks, their norms

    @cached_property
    def width(self) -> int:
        return self.experiment.loss.targets(self.data.train.target, len(self.data.classes)).shape[1]

    @cached_property
    def drawn(self) -> tuple[tuple[ScaledOutput, ...], dict[str, Any]]:
        """The networks, alike but for their weights, and in words of JSON where these come from."""
        if not self.weights:
            seeded = (self.experiment.model_copy(update={"seed": seed}) for seed in self.seeds)
            modules = tuple(draw_network(each, self.data, self.width) for each in seeded)
            return modules, {"seeds": list(self.seeds)}
        module = draw_network(self.experiment, self.data, self.width)
        try:
            saved = load_tensors(Path(self.weights), self.experiment.device)[self.when]
            module.load_state_dict(saved, strict=False)
        except (LookupError, RuntimeError, TypeError, AttributeError) as error:
            of = f"the weights of this network at the {self.when}"
            raise Damaged(f"{self.weights} is damaged: it does not hold {of}") from error
        content = sha256()
        for name in sorted(saved):
            content.update(name.encode() + saved[name].cpu().numpy().tobytes())
        return (module,), {"weights": self.when, "weights_sha256": content.hexdigest()}

    @property
    def names(self) -> tuple[str, ...]:
        return ("ntk",)

    @property
    def outputs(self) -> int:
        return 1 if self.wanted == "trace" else len(wanted(self.wanted, self.width))

    @property
    def spec(self) -> dict[str, Any]:
        parts = {name: getattr(self.experiment, name).fields() for name in ("model", "init")}
        if (sketch := self.experiment.kernel.sketch) is not None:
            parts |= {"sketch": sketch, "sketch_seed": self.experiment.seed}
        _, source = self.drawn
        return {
            "kind": "tangent",
            **parts,
            "casts": self.experiment.path.casts,
            "outputs": self.wanted,
            **source,
        }

    @property
    def concurrent(self) -> bool:
        return False  # torch swaps a module's weights in place while it runs

    @property
    def seconds(self) -> float:
        modules, _ = self.drawn
        weights = sum(weight.numel() for module in modules for weight in module.parameters())
        return weights * self.width * RATE

    def between(
        self, left: Float[Tensor, "probe *shape"], right: Float[Tensor, "train *shape"]
    ) -> Blocks:
        return self.mean(left, right)

    def among(self, points: Float[Tensor, "probe *shape"]) -> Blocks:
        return self.mean(points, None)

    def mean(self, left: Tensor, right: Tensor | None) -> Blocks:
        """The mean over the modules, added one by one in their order; sketches leave their error bars."""
        (modules, _), total = self.drawn, None
        casts, sketch, seed = (
            self.experiment.path.casts,
            self.experiment.kernel.sketch,
            self.experiment.seed,
        )
        for module in modules:
            if sketch is None:
                kernel = tangent_kernel(module, left, right, outputs=self.wanted, casts=casts)
            else:
                kernel, bar = tangent_kernel(
                    module, left, right, outputs=self.wanted, casts=casts, sketch=sketch, seed=seed
                )
                self.errors.append((bar, float(kernel.norm())))
            total = kernel if total is None else total + kernel
        assert total is not None
        return {"ntk": total / len(modules)}

    @property
    def remark(self) -> str:
        """Of a sketch, how far the blocks may be off that were computed here; others may have computed elsewhere."""
        if self.experiment.kernel.sketch is None:
            return ""
        precision = ""
        if self.errors:
            missed, sizes = (hypot(*each) for each in zip(*self.errors, strict=True))
            precision = f", within {missed / sizes:.1%} of its norm"
        sketch = f"the kernel is a sketch (kernel.sketch={self.experiment.kernel.sketch})"
        return f"{sketch}{precision}: it is good for drift, spectra and alignment, not for single entries"
