"""Networks width by width, beside what they are at infinite width: outputs, kernels, and training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jacrev

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.component import LARGEST, Count
from ntkexp.config.compose import compose
from ntkexp.data.base import AbstractSource
from ntkexp.effects.trajectory import flat_like
from ntkexp.ensemble.compare import EnsembleTraining, StackedNetworks, comparisons, ensemble, problem, stacked, targets
from ntkexp.init.base import NTK, AbstractInit
from ntkexp.library import tangent_kernel
from ntkexp.limit.infinite_kernel import BlockPlace, compute
from ntkexp.loss.base import Squared
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, LearningTask, ScaledOutput
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.networks import MLP
from ntkexp.records.sweep import Level
from ntkexp.stream import stream

# --- What trials read at many widths: a network that differs by its width alone.


def network_of_width(
    width: int, model: AbstractArchitecture, init: AbstractInit, task: LearningTask, generator: torch.Generator
) -> ScaledOutput:
    """Draw what a model is at this width, before training.

    >>> from ntkexp.init.base import NTK
    >>> from ntkexp.model.networks import MLP
    >>> asked = MLP(depth=1), NTK(W_std=1.0, b_std=0.0), LearningTask((3,), 1), torch.Generator()
    >>> [sum(weight.numel() for weight in network_of_width(width, *asked).parameters()) for width in (2, 8)]
    [8, 32]
    """
    wide = model.model_copy(update={"width": width})
    return wide.module(init, task.shape, task.outputs, generator, task.vocabulary).eval()


class FirstOutputs(AbstractTrial):
    """What networks say before training, beside the Gaussian process that they are at infinite width, width by width:

    Networks of one output are drawn at every width, and read at the first points of the data.

        variance_ratio     mean_x E f(x)²/𝒢(x, x)                    1 at every width
        covariance_ratio   Σ E f(x)f(x′) 𝒢(x, x′)/Σ 𝒢(x, x′)²        1 at every width; the sums go over pairs x ≠
                           x′
        excess_kurtosis    mean_x E f(x)⁴/(E f(x)²)² − 3             of one hidden layer 3 Var(v)/(E v)²/width,
                                                                     v the variance of f given the hidden
                                                                         units' weights

    over so many networks drawn for each.
    """

    model: MLP
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((4, 8, 16, 32), min_length=2)
    networks: Count = 2000
    points: Count = 8

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x = self.data.split(seed).train.inputs[: self.points]
        task, generator = LearningTask(tuple(x.shape[1:]), 1), stream("weights", seed)
        every = slice(0, len(x))
        limit = self.model.limit(self.init, task)
        process = compute(limit, BlockPlace(every, every, same=True), x, memory_gb=1.0).nngp

        def drawn(width: int) -> Float[Tensor, "network point"]:
            modules = [network_of_width(width, self.model, self.init, task, generator) for _ in range(self.networks)]
            untrained = EnsembleTraining(x, x.new_zeros(0, 1), size=0.0, steps=0, divisor=1.0, readout=False)
            return untrained.outputs(modules)[..., 0]

        return [{"width": width, **moments(drawn(width), process)} for width in self.widths]


def moments(outputs: Float[Tensor, "network point"], process: Float[Tensor, "point point_"]) -> Mapping[str, float]:
    """Find all numbers of outputs whose mean is known to be zero.

    >>> import torch
    >>> moments(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    {'variance_ratio': 1.0, 'covariance_ratio': 2.0, 'excess_kurtosis': -2.0}
    """
    second, fourth = outputs.square().mean(0), outputs.pow(4).mean(0)
    found, pairs = outputs.t() @ outputs / len(outputs), process - process.diagonal().diag()
    return {
        "variance_ratio": float((second / process.diagonal()).mean()),
        "covariance_ratio": float((found * pairs).sum() / pairs.square().sum()),
        "excess_kurtosis": float((fourth / second.square()).mean()) - 3,
    }


class FirstKernels(AbstractTrial):
    """The tangent kernels of networks before training, beside the one that they have at infinite width, width by
    width:

    Networks of one output are drawn at every width, and their kernels read among the first points of the data.

        distance    √(E ‖K_0 − K_∞‖²)/‖K_∞‖                  ∝ width^(−1/2)
        variance    Σ_xx′ Var K_0(x, x′)/‖K_∞‖²              ∝ 1/width

    over so many networks drawn for each. The distance counts what their mean is off as well.
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((64, 128, 256, 512, 1024), min_length=2)
    networks: int = Field(10, ge=2, le=LARGEST)
    points: Count = 32

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x = self.data.split(seed).train.inputs[: self.points]
        task, generator = LearningTask(tuple(x.shape[1:]), 1), stream("weights", seed)
        every = slice(0, len(x))
        network = self.model.limit(self.init, task)
        limit = compute(network, BlockPlace(every, every, same=True), x, memory_gb=1.0, threads=1).ntk

        def kernels(width: int) -> Float[Tensor, "network point point_"]:
            drawn = [network_of_width(width, self.model, self.init, task, generator) for _ in range(self.networks)]
            return stacked(drawn).tangent_kernels(x)

        return [{"width": width, **beside(kernels(width), self.init.alpha**2 * limit)} for width in self.widths]


def beside(kernels: Float[Tensor, "network point point_"], limit: Float[Tensor, "point point_"]) -> Mapping[str, float]:
    """Find both numbers.

    >>> import torch
    >>> beside(torch.tensor([[[1.0]], [[3.0]]]), torch.ones(1, 1))
    {'distance': 1.4142135623730951, 'variance': 2.0}
    """
    size = float(limit.square().sum())
    missed = float((kernels - limit).square().sum((1, 2)).mean())
    return {"distance": (missed / size) ** 0.5, "variance": float(kernels.var(0).sum()) / size}


class SummedOutputs(AbstractTrial):
    """How far the kernel of summed outputs stands for the whole tangent kernel, width by width:

    A network of each width, read before training at the first points of the data.

        error    ‖K − k ⊗ 1‖/‖K‖,    k(x, x′) = Σ_cd K(x, c; x′, d)/C

    with K [point, output] × [point, output], and C outputs.
    """

    model: MLP
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((32, 64, 128, 256, 512), min_length=2)
    outputs: Count = 10
    points: Count = 16

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x = self.data.split(seed).train.inputs[: self.points]
        task, generator = LearningTask(tuple(x.shape[1:]), self.outputs), stream("weights", seed)

        def missed(width: int) -> float:
            return distance(tangent_kernel(network_of_width(width, self.model, self.init, task, generator), x, x))

        return [{"width": width, "error": missed(width)} for width in self.widths]


def distance(kernel: Float[Tensor, "point out point_ out_"]) -> float:
    """Compare a kernel with what its summed outputs make of it.

    >>> distance(torch.eye(3).view(1, 3, 1, 3))
    0.0
    """
    count = kernel.shape[1]
    summed = kernel.sum((1, 3)) / count
    stands = torch.einsum("xy,cd->xcyd", summed, torch.eye(count).to(summed))
    return float((kernel - stands).norm() / kernel.norm())


class KernelMovement(AbstractTrial):
    """How far the tangent kernel moves while networks learn, by the width and by the scale α of their output:

    Networks of each width learn targets of one number at each scale; those of a width are the same at all scales.

        movement    √(E ‖K_T − K_0‖²/‖K_0‖²)        where α is large ∝ 1/α (Chizat, Oyallon & Bach 2019)
        test_error  mean (f_T − y)²/mean y²          on points that were not learned

    over so many networks, which start as `init` says and take steps of `stable` · 2/λ_max(K_0).
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field(min_length=1)
    alphas: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=2)
    networks: Count = 10
    steps: Count = 100
    stable: float = Field(0.5, gt=0, le=1)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        x, points = data.train.inputs, torch.cat([data.train.inputs, data.test.inputs])
        task, encoded = LearningTask(tuple(x.shape[1:]), 1), targets(data, Squared())
        learned, truth = encoded[: len(x)], encoded[len(encoded) - len(data.test.inputs) :]

        def row(width: int, alpha: float) -> Mapping[str, Level]:
            init = self.init.model_copy(update={"alpha": alpha})
            generator = stream("weights", seed, width)
            drawn = stacked([network_of_width(width, self.model, init, task, generator) for _ in range(self.networks)])
            before = drawn.tangent_kernels(x)
            size = self.stable * 2 / float(torch.linalg.eigvalsh(before)[:, -1].max())
            after = EnsembleTraining(points, learned, size, self.steps, divisor=1.0, readout=False).trained(drawn)
            moved = (after.tangent_kernels(x) - before).square().sum((1, 2)) / before.square().sum((1, 2))
            with torch.no_grad():
                missed = after.outputs(points)[:, len(x) :] - truth
            error = float(missed.square().mean() / truth.square().mean())
            return {"width": width, "alpha": alpha, "movement": float(moved.mean().sqrt()), "test_error": error}

        return [row(width, alpha) for width in self.widths for alpha in self.alphas]


class Fluctuations(AbstractTrial):
    """How far trained networks differ by their starts, width by width:

    Networks of each width learn targets of one number, and are read at the points that they have not seen.

        fluctuation    √mean_x Var f_T(x)/mean_x f̄_T(x)²

    over networks that all start at zero (of `init.antisymmetric`), trained by the same steps on the same data.
    """

    model: MLP
    init: NTK
    data: AbstractSource
    widths: tuple[Count, ...] = Field((32, 64, 128, 256), min_length=2)
    networks: Count = 20
    steps: Count = 200

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        train, generator = len(data.train.inputs), stream("weights", seed)
        task = LearningTask(tuple(data.train.inputs.shape[1:]), 1)
        x = torch.cat([data.train.inputs, data.test.inputs])
        learned = targets(data, Squared())[:train]

        def trained(width: int) -> Float[Tensor, "network point"]:
            modules = [network_of_width(width, self.model, self.init, task, generator) for _ in range(self.networks)]
            kernel = tangent_kernel(modules[0], x[:train], x[:train]).view(train, train)
            size = 1 / float(torch.linalg.eigvalsh(kernel)[-1])
            return EnsembleTraining(x, learned, size, self.steps, divisor=1.0, readout=False).outputs(modules)[..., 0]

        return [{"width": width, "fluctuation": fluctuation(trained(width)[:, train:])} for width in self.widths]


def fluctuation(outputs: Float[Tensor, "network point"]) -> float:
    """Compare the spread over networks with the size of their mean.

    >>> fluctuation(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    0.5
    """
    spread, size = outputs.var(0, correction=0).mean(), outputs.mean(0).square().mean()
    return float((spread / size).sqrt())


class TrainingBesideKernels(AbstractTrial):
    """Networks in training beside regression with kernels that stand still, width by width, at every step alike:

    Networks of each width learn targets of one number, by steps of `stable` · 2/λ_max of the limit.

        f̂_{t+1}(x) = f̂_t(x) − η Σ_i K(x, x_i) (f̂_t(x_i) − y_i),    f̂_0 = f_0
        gap        √(E_t,x (f_t(x) − f̂_t(x))²/E_t,x (f_t(x) − f_0(x))²)

    over points x that were not learned and so many networks. Rows are told apart by `kernel`: `start`, each
    network's K_0, by which its linearisation trains as well, and `limit`, that of infinite width.
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((64, 128, 256, 512, 1024), min_length=2)
    networks: Count = 4
    steps: Count = 60
    stable: float = Field(0.5, gt=0, le=1)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        x, points = data.train.inputs, torch.cat([data.train.inputs, data.test.inputs])
        task, generator, train = LearningTask(tuple(x.shape[1:]), 1), stream("weights", seed), len(x)
        network = self.model.limit(self.init, task)
        place = BlockPlace(slice(0, len(points)), slice(0, len(points)), same=True)
        limit = self.init.alpha**2 * compute(network, place, points, memory_gb=1.0, threads=1).ntk
        size = self.stable * 2 / float(torch.linalg.eigvalsh(limit[:train, :train])[-1])
        training = EnsembleTraining(
            points, targets(data, Squared())[:train], size, self.steps, divisor=1.0, readout=False
        )
        found: list[Mapping[str, Level]] = []
        for width in self.widths:
            modules = [network_of_width(width, self.model, self.init, task, generator) for _ in range(self.networks)]
            drawn = stacked(modules)
            kernels = {"start": drawn.tangent_kernels(points), "limit": limit}
            gaps = compared(training, drawn, {name: kernel[..., :train] for name, kernel in kernels.items()})
            found += [{"width": width, "kernel": name, "gap": gap} for name, gap in gaps.items()]
        return found


def compared(
    training: EnsembleTraining, drawn: StackedNetworks, kernels: Mapping[str, Float[Tensor, "*network point train"]]
) -> dict[str, float]:
    """Train networks, and kernels beside them; find the gap of each."""
    train = len(training.targets)
    with torch.no_grad():
        start = drawn.outputs(training.inputs)
    regressed = dict.fromkeys(kernels, start)
    moved, missed = 0.0, dict.fromkeys(kernels, 0.0)
    course = training.course(drawn)
    next(course)
    for networks in course:
        with torch.no_grad():
            outputs = networks.outputs(training.inputs)
        moved += float((outputs - start)[:, train:].square().sum())
        for name, kernel in kernels.items():
            here = regressed[name]
            regressed[name] = here - training.size / training.divisor * kernel @ (here[:, :train] - training.targets)
            missed[name] += float((outputs - regressed[name])[:, train:].square().sum())
    return {name: (far / moved) ** 0.5 for name, far in missed.items()}


class EnsembleBesideProcesses(AbstractTrial):
    """Networks trained from random starts, all layers or the readout alone, beside both processes of infinite width:

    So many networks of an experiment, which is said in words as `ntkexp train` takes them.

        mean         the ensemble's mean, off in standard errors of it, by root mean square     about 1 where it
                     follows
        deviation    the ensemble's deviation over that of the process                           about 1

    Rows are told apart by the columns `networks` and `process` (`ntkexp.ensemble.compare`).
    """

    words: tuple[str, ...]
    networks: Count = 100

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        # Seeds of an ensemble follow each other: those of another trial begin behind them.
        experiment = compose([*self.words, f"seed={seed * self.networks}", f"data.seed={seed}"])
        given = problem(experiment)
        found = comparisons(ensemble(experiment, given, self.networks, lambda name, done: None), given.train)
        return [
            {"networks": row.networks, "process": row.process, "mean": row.mean, "deviation": row.deviation}
            for row in found
        ]


WORST = 1e12
"""No condition number is said beyond: rounding has the last word there."""


class WidthSweep(AbstractTrial):
    """Networks of one hidden layer, from few parameters to many, are trained to the end on noisy targets:

    A network of each width learns the same examples.

        parameters     P of the network at each width
        test_error     mean (f − y)² on new points without noise, over the variance of y
        train_error    the same on the training examples, with the noise
        condition      λ_max/λ_min of the tangent kernel among the training examples, before training; where the
                       kernel
                       has no full rank λ_min is what rounding leaves, and the figure is cut at 10¹²

    Training is that of Levenberg and Marquardt: least squares of the linearised network, damped, accepted where
    the loss falls. Gradient descent would have to be followed for very long near P = M, where the kernel is nearly
    singular.

    M. Belkin, D. Hsu, S. Ma & S. Mandal, "Reconciling modern machine-learning practice and the classical bias–variance
    trade-off" (2019), arXiv:1812.11118.
    """

    model: MLP
    init: AbstractInit
    data: AbstractSource
    widths: tuple[Count, ...] = Field((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 40, 80), min_length=3)
    steps: Count = 60

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        x, y = data.train.inputs, data.train.target.double()
        new, truth = data.test.inputs, data.test.target.double()
        if data.classes or y.shape[1] != 1:
            raise Mistake("trial.data: choose data of one real value, such as ntkexp.data.Teacher")
        task = LearningTask(tuple(x.shape[1:]), 1, data.vocabulary)
        scale = float(truth.var(correction=0))

        def row(width: int) -> Mapping[str, Level]:
            module = network_of_width(width, self.model, self.init, task, stream("weights", seed, width))
            function, start = function_of(module), weights_of(module)
            flat = flat_like(start)
            first = flat.vector(start)

            def outputs(vector: Tensor, at: Tensor) -> Tensor:
                return function(flat.weights(vector), at)[:, 0]

            found = fitted(lambda vector: outputs(vector, x) - y[:, 0], first, self.steps)
            with torch.no_grad():
                errors = [float((outputs(found, at) - to[:, 0]).square().mean()) for at, to in ((x, y), (new, truth))]
            jacobian = jacrev(lambda vector: outputs(vector, x))(first)
            return {
                "width": width,
                "parameters": flat.size,
                "train_error": errors[0] / scale,
                "test_error": errors[1] / scale,
                "condition": condition(jacobian),
            }

        return [row(width) for width in self.widths]


def fitted(
    missed: Callable[[Tensor], Float[Tensor, " train"]], start: Float[Tensor, " weight"], steps: int
) -> Float[Tensor, " weight"]:
    """Make the sum of squares small, as far as so many attempts lead.

    >>> fitted(lambda w: w**2 - 4.0, torch.tensor([1.0], dtype=torch.float64), steps=30).round(decimals=9)
    tensor([2.], dtype=torch.float64)
    """
    here, damping = start, 1e-2
    residual, jacobian = missed(here), jacrev(missed)(here)
    for _ in range(steps):
        loss = residual.square().sum()
        move = damped(jacobian, residual, damping)
        after = missed(here - move)
        if after.square().sum() < loss:
            here, damping = here - move, max(damping / 3, 1e-12)
            residual, jacobian = after, jacrev(missed)(here)
        else:
            damping = min(damping * 4, 1e12)
    return here.detach()


def damped(
    jacobian: Float[Tensor, "train weight"], residual: Float[Tensor, " train"], damping: float
) -> Float[Tensor, " weight"]:
    """The step (JᵀJ + damping)⁻¹ Jᵀ r, on the side of the shape that is smaller."""
    rows, columns = jacobian.shape
    if rows < columns:
        gram = jacobian @ jacobian.t() + damping * torch.eye(rows, dtype=jacobian.dtype)
        solved: Tensor = torch.linalg.solve(gram, residual)
        return jacobian.t() @ solved
    gram = jacobian.t() @ jacobian + damping * torch.eye(columns, dtype=jacobian.dtype)
    move: Tensor = torch.linalg.solve(gram, jacobian.t() @ residual)
    return move


def condition(jacobian: Float[Tensor, "train weight"]) -> float:
    """The condition number of the kernel J Jᵀ, of which there is none beyond `WORST`.

    >>> condition(torch.tensor([[2.0, 0.0], [0.0, 1.0]])), condition(torch.ones(2, 1))
    (4.0, 1000000000000.0)
    """
    values = torch.linalg.svdvals(jacobian)
    if len(values) < len(jacobian) or values[-1] <= values[0] / WORST**0.5:
        return WORST
    return float((values[0] / values[-1]).square())
