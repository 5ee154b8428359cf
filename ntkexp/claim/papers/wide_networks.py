"""Networks of growing width compared with infinite width: outputs,
kernels and training.

Most of the claims are from J. Lee et al. 2019, arXiv:1902.06720. If a trial tests
another paper, its docstring names the paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.capacity import MemoryBudget
from ntkexp.claim.expectation import select_rows
from ntkexp.claim.judged import AbstractPicture, Figure, JudgedClaim
from ntkexp.claim.trial import AbstractTrial, NetworkTrial, Rows
from ntkexp.component import MAX_COUNT, MAX_DEPTH, Count
from ntkexp.config.compose import compose
from ntkexp.ensemble import (
    EnsembleTraining,
    StackedNetworks,
    comparisons,
    ensemble,
    problem,
    stacked,
    targets,
)
from ntkexp.init import AbstractInit
from ntkexp.layer.base import LayerChain
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.spec import Activation
from ntkexp.library import tangent_kernel
from ntkexp.limit.infinite_kernel import BlockSlices, KernelBlock, compute
from ntkexp.loss import Squared
from ntkexp.model.base import (
    AbstractArchitecture,
    AbstractLayered,
    LearningTask,
    ScaledOutput,
)
from ntkexp.report.analysis.laws import number
from ntkexp.report.analysis.power_law import PowerLaw, power_law
from ntkexp.shapes import Shape
from ntkexp.stream import stream
from ntkexp.text import listed

ONE_GB = MemoryBudget.of_gb(1.0)  # memory for kernels at infinite width


def network_of_width(
    width: int,
    model: AbstractArchitecture,
    init: AbstractInit,
    task: LearningTask,
    generator: torch.Generator,
) -> ScaledOutput:
    """Return an untrained network of this width, with random weights from `generator`.

    >>> from ntkexp.init import NTK
    >>> from ntkexp.model.networks import MLP
    >>> model, init, task = MLP(depth=1), NTK(W_std=1.0, b_std=0.0), LearningTask((3,), 1)
    >>> network = network_of_width(8, model, init, task, torch.Generator())
    >>> sum(weight.numel() for weight in network.parameters())
    32
    """
    wide = model.model_copy(update={"width": width})
    return wide.module(
        init, task.shape, task.outputs, generator, task.vocabulary
    ).eval()


class Bottleneck(AbstractLayered):
    """A multilayer perceptron whose first or last hidden layer has `narrow` units at
    every width.

    This is a control for claims about wide networks. A layer with few random units
    stays random, however wide the other layers are.

    >>> from ntkexp.init import NTK
    >>> from ntkexp.layer.affine import Dense
    >>> network = Bottleneck(width=8, narrow=2).layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=1)
    >>> [layer.features for layer in network if isinstance(layer, Dense)]
    [2, 8, 1]
    """

    depth: int = Field(2, ge=1, le=MAX_DEPTH)
    narrow: Count = 4
    place: Literal["first", "last"] = "first"
    activation: Activation = ReLU()

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        widths = [self.width] * self.depth
        widths[0 if self.place == "first" else -1] = self.narrow
        hidden = (
            layer for width in widths for layer in (init.dense(width), self.activation)
        )
        return (Flatten(), *hidden, init.readout(outputs))


class AbstractEnsembles(NetworkTrial):
    """Ensembles of networks of several widths, with one output."""

    widths: tuple[Count, ...] = Field(min_length=2)
    networks: Count

    def ensembles(
        self, x: Float[Tensor, " point *shape"], seed: int
    ) -> Iterator[tuple[int, list[ScaledOutput]]]:
        """Yield each width with its untrained networks, for inputs like `x`."""
        task = LearningTask(tuple(x.shape[1:]), 1)
        generator = stream("weights", seed)
        for width in self.widths:
            yield (
                width,
                [
                    network_of_width(width, self.model, self.init, task, generator)
                    for _ in range(self.networks)
                ],
            )

    def limit_kernels(
        self, x: Float[Tensor, " point *shape"], threads: int | None = None
    ) -> KernelBlock:
        """Compute the kernels at infinite width between the points."""
        network = self.model.limit(self.init, LearningTask(tuple(x.shape[1:]), 1))
        every = slice(0, len(x))
        block = BlockSlices(every, every, same=True)
        return compute(network, block, x, budget=ONE_GB, threads=threads)


train_all_layers = partial(EnsembleTraining, divisor=1.0, readout=False)
"""Full-batch training of all layers on Σ ½(f − y)²."""


class FirstOutputs(AbstractEnsembles):
    """The outputs of untrained networks compared with the Gaussian process
    at infinite width.

    At each width, E is the mean over `networks` networks with one output. The points x
    are the first training examples, and 𝒢 is the covariance (NNGP kernel) of the
    process.

        variance_ratio     mean_x E f(x)²/𝒢(x, x)                    1 at every width
        covariance_ratio   Σ E f(x)f(x′) 𝒢(x, x′)/Σ 𝒢(x, x′)²        1 at every width; pairs x ≠ x′
        excess_kurtosis    mean_x E f(x)⁴/(E f(x)²)² − 3             ∝ 1/width

    With one hidden layer, f is Gaussian for fixed input weights. Its variance is a mean
    of independent v, one per hidden unit, so the excess kurtosis is
    3 Var(v)/(E v)²/width."""

    model: AbstractLayered
    widths: tuple[Count, ...] = Field((4, 8, 16, 32), min_length=2)
    networks: Count = 2000
    points: Count = 8

    def rows(self, seed: int) -> Rows:
        x = self.data.split(seed).train.inputs[: self.points]
        process = self.limit_kernels(x).nngp
        untrained = train_all_layers(x, x.new_zeros(0, 1), size=0.0, steps=0)
        return [
            {"width": width, **moments(untrained.outputs(networks)[..., 0], process)}
            for width, networks in self.ensembles(x, seed)
        ]


def moments(
    outputs: Float[Tensor, "network point"], process: Float[Tensor, "point point_"]
) -> Mapping[str, float]:
    """Return the columns of `FirstOutputs` for one width, from outputs with mean zero.

    `process` is the covariance of the Gaussian process.

    >>> import torch
    >>> moments(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    {'variance_ratio': 1.0, 'covariance_ratio': 2.0, 'excess_kurtosis': -2.0}
    """
    second = outputs.square().mean(0)
    covariance = outputs.t() @ outputs / len(outputs)
    pairs = process - process.diagonal().diag()
    return {
        "variance_ratio": float((second / process.diagonal()).mean()),
        "covariance_ratio": float((covariance * pairs).sum() / pairs.square().sum()),
        "excess_kurtosis": excess_kurtosis(outputs),
    }


def excess_kurtosis(outputs: Float[Tensor, "network point"]) -> float:
    """Return the excess kurtosis of outputs with mean zero, averaged over points.

    >>> excess_kurtosis(torch.tensor([[1.0], [-1.0]]))
    -2.0
    """
    return (
        float((outputs.pow(4).mean(0) / outputs.square().mean(0).square()).mean()) - 3
    )


class OutputsInTraining(AbstractEnsembles):
    """The deviation of outputs from a Gaussian distribution during training, by width.

    At each width, `networks` networks with one output learn the same targets. The step
    size is `fraction` times the largest stable step size at infinite width. The outputs
    f_t at test points are recorded after each number t of steps in `times`. E, Var and
    f̄_t are taken over the networks.

        excess_kurtosis    mean_x E(f_t(x) − f̄_t(x))⁴/(Var f_t(x))² − 3        0 for a Gaussian
        remaining          √(mean_x Var f_t(x)/mean_x Var f_0(x))
    """

    model: AbstractLayered
    widths: tuple[Count, ...] = Field((4, 8, 16, 32), min_length=2)
    times: tuple[Annotated[int, Field(ge=0, le=MAX_COUNT)], ...] = Field(
        (0, 10, 100), min_length=1
    )
    networks: Count = 2000
    points: Count = 8
    fraction: float = Field(0.1, gt=0, lt=1)

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        train = len(data.train.inputs)
        x = torch.cat([data.train.inputs, data.test.inputs[: self.points]])
        learned = targets(data, Squared())[:train]
        limit = self.limit_kernels(x[:train]).ntk
        # `fraction` · 2/λ_max(K_∞)
        size = self.fraction * 2 / float(torch.linalg.eigvalsh(limit)[-1])
        training = train_all_layers(x, learned, size, max(self.times))

        for width, networks in self.ensembles(x, seed):
            outputs = {
                time: of_time[:, train:, 0]
                for time, of_time in training.outputs_at(self.times, networks).items()
            }
            first = outputs[min(outputs)].var(0, correction=0).mean()
            for time, f in outputs.items():
                variance = f.var(0, correction=0).mean()
                yield {
                    "width": width,
                    "steps": time,
                    "excess_kurtosis": excess_kurtosis(f - f.mean(0)),
                    "remaining": float((variance / first).sqrt()),
                }


class FirstKernels(AbstractEnsembles):
    """The tangent kernels of untrained networks compared with the kernel
    at infinite width.

    E and Var are the mean and the variance over `networks` networks of each width, with
    one output. K_0(x, x′) is computed for all pairs of the first training examples. The
    distance includes the bias E K_0 − K_∞.

        distance    √(E ‖K_0 − K_∞‖²)/‖K_∞‖                  ∝ width^(−1/2)
        variance    Σ_xx′ Var K_0(x, x′)/‖K_∞‖²              ∝ 1/width
    """

    widths: tuple[Count, ...] = Field((64, 128, 256, 512, 1024), min_length=2)
    networks: int = Field(10, ge=2, le=MAX_COUNT)
    points: Count = 32

    def rows(self, seed: int) -> Rows:
        x = self.data.split(seed).train.inputs[: self.points]
        limit = self.init.alpha**2 * self.limit_kernels(x, threads=1).ntk  # K_∞
        size = float(limit.square().sum())  # ‖K_∞‖²

        for width, networks in self.ensembles(x, seed):
            kernels = stacked(networks).tangent_kernels(x)
            # E ‖K_0 − K_∞‖²
            missed = float((kernels - limit).square().sum((1, 2)).mean())
            variance = float(kernels.var(0).sum())  # Σ Var K_0
            yield {
                "width": width,
                "distance": (missed / size) ** 0.5,
                "variance": variance / size,
            }


class SummedOutputs(NetworkTrial):
    """The error of approximating the tangent kernel by the kernel
    of the summed outputs, by width.

        error    ‖K − k ⊗ 1‖/‖K‖,    k(x, x′) = Σ_cd K(x, c; x′, d)/C

    K is the kernel of an untrained network with C outputs c, d, with axes [point,
    output, point, output], at the first training examples. 1 is the identity of the
    outputs."""

    model: AbstractLayered
    widths: tuple[Count, ...] = Field((32, 64, 128, 256, 512), min_length=2)
    outputs: Count = 10
    points: Count = 16

    def rows(self, seed: int) -> Rows:
        x = self.data.split(seed).train.inputs[: self.points]
        task = LearningTask(tuple(x.shape[1:]), self.outputs)
        generator = stream("weights", seed)
        for width in self.widths:
            network = network_of_width(width, self.model, self.init, task, generator)
            kernel = tangent_kernel(network, x, x)
            # k, and K − k ⊗ 1
            k = kernel.sum((1, 3)) / self.outputs
            identity = torch.eye(self.outputs).to(k)
            rest = kernel - torch.einsum("xy,cd->xcyd", k, identity)
            yield {"width": width, "error": float(rest.norm() / kernel.norm())}


class KernelMovement(NetworkTrial):
    """The kernel change during training, by width and by the scale α of the output.

    For each width, `networks` networks learn a scalar target, and E is the mean over
    them. All scales use the same initial weights. The step size is `stable` ·
    2/λ_max(K_0).

        movement    √(E ‖K_T − K_0‖²/‖K_0‖²)        ∝ 1/α for large α (Chizat, Oyallon & Bach 2019)
        test_error  mean (f_T − y)²/mean y²          on test points
    """

    widths: tuple[Count, ...] = Field(min_length=1)
    alphas: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=2)
    networks: Count = 10
    steps: Count = 100
    stable: float = Field(0.5, gt=0, le=1)

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        x = data.train.inputs
        points = torch.cat([data.train.inputs, data.test.inputs])
        task = LearningTask(tuple(x.shape[1:]), 1)
        encoded = targets(data, Squared())
        learned = encoded[: len(x)]
        truth = encoded[len(encoded) - len(data.test.inputs) :]

        for width, alpha in product(self.widths, self.alphas):
            # Draw the same weights for all scales.
            init = self.init.model_copy(update={"alpha": alpha})
            generator = stream("weights", seed, width)
            networks = stacked(
                [
                    network_of_width(width, self.model, init, task, generator)
                    for _ in range(self.networks)
                ]
            )
            before = networks.tangent_kernels(x)

            # Train with step size `stable` · 2/λ_max(K_0).
            size = self.stable * 2 / float(torch.linalg.eigvalsh(before)[:, -1].max())
            after = train_all_layers(points, learned, size, self.steps).trained(
                networks
            )

            # √(E ‖K_T − K_0‖²/‖K_0‖²), and the error on test points
            change = (after.tangent_kernels(x) - before).square().sum((1, 2))
            relative = change / before.square().sum((1, 2))
            with torch.no_grad():
                residual = after.outputs(points)[:, len(x) :] - truth
            error = float(residual.square().mean() / truth.square().mean())
            yield {
                "width": width,
                "alpha": alpha,
                "movement": float(relative.mean().sqrt()),
                "test_error": error,
            }


class Fluctuations(AbstractEnsembles):
    """The spread of trained networks due to their initial weights, by width.

        fluctuation    √(mean_x Var f_T(x)/mean_x f̄_T(x)²)        at test points x

    For each width, `networks` networks learn a scalar target with the same step size on
    the same data. Var and f̄_T are the variance and the mean over them. With
    `init.antisymmetric`, all networks start from the zero function."""

    model: AbstractLayered
    widths: tuple[Count, ...] = Field((32, 64, 128, 256), min_length=2)
    networks: Count = 20
    steps: Count = 200

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        train = len(data.train.inputs)
        x = torch.cat([data.train.inputs, data.test.inputs])
        learned = targets(data, Squared())[:train]

        for width, networks in self.ensembles(x, seed):
            kernel = tangent_kernel(networks[0], x[:train], x[:train])
            values = torch.linalg.eigvalsh(kernel.view(train, train))
            training = train_all_layers(x, learned, 1 / float(values[-1]), self.steps)
            outputs = training.outputs(networks)[:, train:, 0]
            spread = outputs.var(0, correction=0).mean()  # mean_x Var f_T(x)
            fluctuation = (spread / outputs.mean(0).square().mean()).sqrt()
            yield {"width": width, "fluctuation": float(fluctuation)}


class TrainingBesideKernels(AbstractEnsembles):
    """Networks in training compared with gradient descent under a fixed kernel,
    step by step.

        f̂_{t+1}(x) = f̂_t(x) − η Σ_i K(x, x_i) (f̂_t(x_i) − y_i),    f̂_0 = f_0
        gap        √(E (f_t(x) − f̂_t(x))²/E (f_t(x) − f_0(x))²)

    For each width, `networks` networks learn a scalar target. E is the mean over them,
    over steps t and over test points x. The step size is η = `stable` · 2/λ_max(K_∞).
    The column `kernel` gives K: for `start`, it is the initial kernel K_0 of each
    network (f̂ is then the linearised network), and for `limit`, it is K_∞."""

    widths: tuple[Count, ...] = Field((64, 128, 256, 512, 1024), min_length=2)
    networks: Count = 4
    steps: Count = 60
    stable: float = Field(0.5, gt=0, le=1)

    def rows(self, seed: int) -> Rows:
        data = self.data.split(seed)
        x = data.train.inputs
        points = torch.cat([data.train.inputs, data.test.inputs])
        train = len(x)
        limit = self.init.alpha**2 * self.limit_kernels(points, threads=1).ntk
        # The largest stable step size is 2/λ_max(K_∞).
        size = self.stable * 2 / float(torch.linalg.eigvalsh(limit[:train, :train])[-1])
        learned = targets(data, Squared())[:train]
        training = train_all_layers(points, learned, size, self.steps)
        for width, modules in self.ensembles(x, seed):
            networks = stacked(modules)
            kernels = {"start": networks.tangent_kernels(points), "limit": limit}
            gaps = regression_gaps(
                training,
                networks,
                {name: kernel[..., :train] for name, kernel in kernels.items()},
            )
            for name, gap in gaps.items():
                yield {"width": width, "kernel": name, "gap": gap}


def regression_gaps(
    training: EnsembleTraining,
    networks: StackedNetworks,
    kernels: Mapping[str, Float[Tensor, "*network point train"]],
) -> dict[str, float]:
    """Train networks f, and predictors f̂ with each fixed kernel. Return the relative
    distance (`gap`) between f and f̂ for each kernel."""
    train = len(training.targets)
    with torch.no_grad():
        start = networks.outputs(training.inputs)
    regressed = dict.fromkeys(kernels, start)  # f̂
    change = 0.0  # Σ (f_t − f_0)²
    errors = dict.fromkeys(kernels, 0.0)  # Σ (f_t − f̂_t)²
    course = training.course(networks)
    next(course)
    for trained in course:
        with torch.no_grad():
            outputs = trained.outputs(training.inputs)
        change += float((outputs - start)[:, train:].square().sum())
        for name, kernel in kernels.items():
            # f̂ ← f̂ − η K (f̂(X) − y)
            residual = regressed[name][:, :train] - training.targets
            step = training.size / training.divisor * kernel @ residual
            regressed[name] = regressed[name] - step
            errors[name] += float((outputs - regressed[name])[:, train:].square().sum())
    return {name: (error / change) ** 0.5 for name, error in errors.items()}


class EnsembleBesideProcesses(AbstractTrial):
    """Ensembles of trained networks compared with the Gaussian processes
    at infinite width.

    `words` are the settings of the experiment, as for `ntkexp train`. The columns
    `networks` (all layers or only the readout trained) and `process` label the rows
    (`ntkexp.ensemble`). A point is pinned if the training examples reduce the spread of
    the process at this point to less than a tenth. The numbers below are computed
    without pinned points. If all points are pinned, the column `reason` says so.

        mean         the rms difference between the means of ensemble and process, in standard
                     errors; 1 if they are equal
        deviation    standard deviation of the ensemble / standard deviation of the process; 1 if
                     they are equal
    """

    words: tuple[str, ...]
    networks: Count = 100

    def rows(self, seed: int) -> Rows:
        # An ensemble uses `networks` consecutive seeds.
        # Give each trial its own range of seeds.
        experiment = compose(
            [*self.words, f"seed={seed * self.networks}", f"data.seed={seed}"]
        )
        learned = problem(experiment)
        networks = ensemble(experiment, learned, self.networks, lambda name, done: None)
        for row in comparisons(networks, learned.train):
            reason = f"all {row.among} points are pinned by examples"
            yield {
                "networks": row.networks,
                "process": row.process,
                "mean": row.mean,
                "deviation": row.deviation,
                "reason": "" if row.points else reason,
            }


class ChangeByWidth(AbstractPicture):
    """The relative changes of weights and kernel against width,
    with guide lines 1/√n and 1/n.

    `panels` maps each panel title to a dict {line name: column}. `where` selects the
    rows. The title of the picture describes the last line.

    The axes follow J. Lee et al., "Wide neural networks of any depth evolve as linear
    models under gradient descent" (2019), arXiv:1902.06720, figure 1."""

    along: str = "model.width"
    where: dict[str, Any] = Field(default_factory=dict)
    panels: dict[str, dict[str, str]] = Field(min_length=1)

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.paper_figures import draw_change_by_width  # noqa: PLC0415  loads matplotlib

        return draw_change_by_width(
            self.rows(judged), self.along, self.panels, self.title(judged)
        )

    def here(self, judged: JudgedClaim) -> str:
        rows = self.rows(judged)
        exponents = []
        for lines in self.panels.values():
            words = [
                f"{line} {number(self.law(rows, name).exponent.value)}"
                for line, name in lines.items()
            ]
            exponents.append(listed(words))
        return (
            f"the exponents of width are: {'; '.join(exponents)}, "
            f"by {rows['seed'].nunique()} seeds."
        )

    def title(self, judged: JudgedClaim) -> str:
        """Describe the fitted exponent of the last line."""
        panel, lines = list(self.panels.items())[-1]
        exponent = self.law(self.rows(judged), list(lines.values())[-1]).exponent.value
        near, far = "1/√n", "1/n"
        if exponent < -0.75:  # nearer to −1 than to −1/2
            near, far = far, near
        return (
            f"The change of the {panel} goes as n to the power {number(exponent)}, "
            f"nearer to {near} than to {far}"
        )

    def rows(self, judged: JudgedClaim) -> pd.DataFrame:
        columns = [name for lines in self.panels.values() for name in lines.values()]
        return select_rows(judged.rows(self.along, "seed"), self.where).dropna(
            subset=columns
        )

    def law(self, rows: pd.DataFrame, name: str) -> PowerLaw:
        x, y = (np.asarray(rows[key], dtype=np.float64) for key in (self.along, name))
        return power_law(x, y, rows["seed"].to_numpy(dtype=np.int64))
