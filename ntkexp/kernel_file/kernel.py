"""Kernels for kernel files: infinite-width kernels,
and tangent kernels of finite networks.

The identity of a kernel is the sha256 of its description as canonical JSON. The
description contains everything that affects the kernel's numbers, such as the sha256 of
the data. A command continues an existing file only if its kernel has the identity of the
file."""

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
from ntkexp.experiment.identity import code_digests
from ntkexp.experiment.problem import draw_network
from ntkexp.kernel import ChosenOutputs
from ntkexp.kernel.read.plan import selected_outputs
from ntkexp.library import tangent_kernel
from ntkexp.limit.infinite_kernel import BlockSlices, compute
from ntkexp.limit.network import Network
from ntkexp.loss import Squared, centred_one_hot
from ntkexp.mistake import Mistake
from ntkexp.model.base import LearningTask, ScaledOutput
from ntkexp.model.functional import load_tensors, weights_of
from ntkexp.path.budget import SECONDS_PER_WORK
from ntkexp.records.atomic import Damaged
from ntkexp.records.folder import results_version

Blocks: TypeAlias = Mapping[str, Float[Tensor, "query out train out_"]]
"""A block of each kernel, by the name of the kernel's array in the file."""


def splits_of(data: Data) -> dict[str, Split]:
    """Return the splits by name, in the order of their points in a file."""
    return {name: getattr(data, name) for name in ("train", "query", "test")}


def data_digest(data: Data) -> str:
    """Return the SHA-256 of all inputs and targets."""
    content = sha256()
    for split in splits_of(data).values():
        for part in (split.inputs, split.target):
            content.update(f"{list(part.shape)}".encode())
            content.update(np.ascontiguousarray(part.numpy()).tobytes())
    return content.hexdigest()


@dataclass(frozen=True, eq=False)
class AbstractKernel(ABC):
    """A kernel between the points of `data`, in the order train, query, test.

    Fields of subclasses must be plain data, because workers rebuild the kernel
    from them."""

    experiment: Experiment
    data: Data
    threads: int = 1
    """The number of threads that compute blocks at once, if the kernel is
    `concurrent`."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the kernel's arrays, such as `nngp` and `ntk`."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """The number of outputs: the length of the axes `out` and `out_`."""

    @property
    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """The description of the kernel, in types that JSON can store."""

    @property
    @abstractmethod
    def concurrent(self) -> bool:
        """True if threads of one process may compute several blocks at once."""

    @property
    @abstractmethod
    def seconds_per_pair(self) -> float:
        """A lower estimate of the core seconds per pair of points,
        computed from shapes only."""

    @property
    def remark(self) -> str:
        """A remark that is shown to the user after the computation, or ""."""
        return ""

    @abstractmethod
    def blocks(
        self,
        left: Float[Tensor, " query *shape"],
        right: Float[Tensor, " train *shape"] | None = None,
    ) -> Blocks:
        """Return the kernels between the points `left` and `right`.

        Without `right`, return the kernels between all pairs of `left`. Entries of a point
        with itself are then exact.
        """

    @property
    def options(self) -> dict[str, Any]:
        """The fields that the subclass adds. Workers rebuild the kernel from them."""
        common = {field.name for field in fields(AbstractKernel)}
        own_fields = [
            field for field in fields(self) if field.init and field.name not in common
        ]
        return {field.name: getattr(self, field.name) for field in own_fields}

    @cached_property
    def inputs(self) -> Float[Tensor, " point *shape"]:
        inputs = torch.cat([split.inputs for split in splits_of(self.data).values()])
        return inputs.to(self.experiment.device, getattr(torch, self.experiment.dtype))

    @cached_property
    def targets(self) -> Float[Tensor, "point out"]:
        """The targets of the squared loss, even if the experiment has another loss."""
        target = torch.cat([split.target for split in splits_of(self.data).values()])
        classes = len(self.data.classes)
        if self.outputs == classes == 2:  # a network with two outputs for two classes
            return centred_one_hot(target, classes)
        return Squared().targets(target, classes)

    @property
    def labels(self) -> Int[Tensor, " point"]:
        """The class of each point, or −1 for regression."""
        if not self.data.classes:
            return torch.full((len(self.inputs),), -1)
        return torch.cat([split.target for split in splits_of(self.data).values()])

    @property
    def index(self) -> Int[Tensor, " point"]:
        return torch.cat([split.index for split in splits_of(self.data).values()])

    @cached_property
    def description(self) -> dict[str, Any]:
        """Everything that affects the numbers in the file, as plain data.

        This includes digests of the source files of networks that users wrote.
        """
        code = code_digests(self.experiment)
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
        canonical = json.dumps(self.description, sort_keys=True, allow_nan=False)
        return sha256(canonical.encode()).hexdigest()


# --- Kernels at infinite width: the covariance α²𝒢 (`nngp`) and the tangent kernel α²Θ
# (`ntk`), where α is the output scale of `init`.


SECONDS_PER_PIXEL_PAIR_AND_LAYER = 1e-10
"""A lower estimate. The fused implementation takes a few times as long."""


@dataclass(frozen=True, eq=False)
class InfiniteKernel(AbstractKernel):
    """The NNGP kernel and the tangent kernel of an infinitely wide network. Raise if
    the architecture has no known limit."""

    @cached_property
    def network(self) -> Network:
        task = LearningTask(
            tuple(self.data.train.inputs.shape[1:]), 1, self.data.vocabulary
        )
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
    def seconds_per_pair(self) -> float:
        return self.network.work * SECONDS_PER_PIXEL_PAIR_AND_LAYER

    def blocks(self, left: Tensor, right: Tensor | None = None) -> Blocks:
        columns = left if right is None else right
        block = BlockSlices(slice(0, len(left)), slice(0, len(columns)), right is None)
        budget = self.experiment.budget.part(self.threads)
        kernels = compute(self.network, block, left, right, budget=budget, threads=1)
        scale = self.experiment.init.alpha**2
        return {
            "nngp": scale * kernels.nngp[:, None, :, None],
            "ntk": scale * kernels.ntk[:, None, :, None],
        }


# --- Tangent kernels of networks of finite width, averaged over n seeds:
#
#     K(x, x′) = 1/n Σ_seed J(θ_seed; x) J(θ_seed; x′)ᵀ


@dataclass(frozen=True, eq=False)
class EmpiricalKernel(AbstractKernel):
    """The tangent kernel of finite networks: the mean over several untrained networks,
    or the kernel of the network of a run."""

    seeds: tuple[int, ...] = ()
    """The seeds of the untrained networks."""
    chosen_outputs: ChosenOutputs = "all"
    """The outputs of the kernel: all, a selection, or the trace over outputs, which
    counts as a single output."""
    weights: str = ""
    """The file weights.pt of a run. If it is given, `seeds` has no effect."""
    weights_at: str = "end"
    """The time of the run's weights: `start` or `end` of training."""
    errors: list[tuple[float, float]] = field(default_factory=list, init=False)
    """The error bars and norms of the sketched blocks that this process computed."""

    @cached_property
    def width(self) -> int:
        return self.experiment.loss.targets(
            self.data.train.target, len(self.data.classes)
        ).shape[1]

    @cached_property
    def networks(self) -> tuple[tuple[ScaledOutput, ...], dict[str, Any]]:
        """The networks, and the description of their weights as plain data."""
        if not self.weights:
            if self.experiment.init.parent is not None:
                raise Mistake(
                    f"init.parent={self.experiment.init.parent}: kernel files average over drawn "
                    "weights; for the weights of a run give the run instead"
                )
            modules = []
            for seed in self.seeds:
                experiment = self.experiment.model_copy(update={"seed": seed})
                modules.append(draw_network(experiment, self.data, self.width))
            return tuple(modules), {"seeds": list(self.seeds)}
        module = draw_network(self.experiment, self.data, self.width)
        try:
            state = load_tensors(Path(self.weights), self.experiment.device)[
                self.weights_at
            ]
            saved = {name: state[name] for name in weights_of(module)}
            module.load_state_dict(saved, strict=False)
        except (LookupError, RuntimeError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{self.weights} is damaged: it does not hold the weights of this network at the "
                f"{self.weights_at}"
            ) from error
        content = sha256()
        for name in sorted(saved):
            content.update(name.encode() + saved[name].cpu().numpy().tobytes())
        return (module,), {
            "weights": self.weights_at,
            "weights_sha256": content.hexdigest(),
        }

    @property
    def names(self) -> tuple[str, ...]:
        return ("ntk",)

    @property
    def outputs(self) -> int:
        return (
            1
            if self.chosen_outputs == "trace"
            else len(selected_outputs(self.chosen_outputs, self.width))
        )

    @property
    def spec(self) -> dict[str, Any]:
        parts = {
            name: getattr(self.experiment, name).fields() for name in ("model", "init")
        }
        sketch = self.experiment.kernel.sketch
        if sketch is not None:
            parts |= {"sketch": sketch, "sketch_seed": self.experiment.seed}
        _, source = self.networks
        return {
            "kind": "tangent",
            **parts,
            # the loss determines the number of outputs, for example 1 or 2 for two classes
            "network_outputs": self.width,
            "vocabulary": self.data.vocabulary,
            "casts": self.experiment.path.casts,
            "outputs": self.chosen_outputs,
            **source,
        }

    @property
    def concurrent(self) -> bool:
        # `functional_call` replaces a module's weights in place while it runs
        return False

    @property
    def seconds_per_pair(self) -> float:
        modules, _ = self.networks
        weights = sum(
            weight.numel() for module in modules for weight in module.parameters()
        )
        return weights * self.width * SECONDS_PER_WORK

    def blocks(self, left: Tensor, right: Tensor | None = None) -> Blocks:
        """Return the mean kernel of all networks.
        Record the error bars of sketches in `errors`.

        The order of summation is fixed, so that results are identical to the last bit.
        """
        modules, _ = self.networks
        casts = self.experiment.path.casts
        sketch = self.experiment.kernel.sketch
        seed = self.experiment.seed
        total = None
        for module in modules:
            if sketch is None:
                kernel = tangent_kernel(
                    module, left, right, outputs=self.chosen_outputs, casts=casts
                )
            else:
                kernel, bar = tangent_kernel(
                    module,
                    left,
                    right,
                    outputs=self.chosen_outputs,
                    casts=casts,
                    sketch=sketch,
                    seed=seed,
                )
                self.errors.append((bar, float(kernel.norm())))
            total = kernel if total is None else total + kernel
        assert total is not None
        return {"ntk": total / len(modules)}

    @property
    def remark(self) -> str:
        """The error bar of a sketched kernel,
        from the blocks that this process computed."""
        if self.experiment.kernel.sketch is None:
            return ""
        precision = ""
        if self.errors:
            bars, norms = zip(*self.errors, strict=True)
            precision = f", within {hypot(*bars) / hypot(*norms):.1%} of its norm"
        return (
            f"the kernel is a sketch (kernel.sketch={self.experiment.kernel.sketch}){precision}: "
            "it is good for kernel change, spectra and alignment, not for single entries"
        )
