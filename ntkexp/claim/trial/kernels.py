"""Kernels by themselves: how long they take, layer by layer, regression with those of infinite width, and those of
functions of one number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Annotated, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from ntkexp.claim.trial.base import AbstractTrial, refuse_unnamed
from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import AbstractSource, Data
from ntkexp.init.base import NTK, AbstractInit
from ntkexp.layer.affine import Affine, Convolution
from ntkexp.library import ascend, finite_step_kernel, tangent_kernel
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, AbstractLayered
from ntkexp.model.functional import function_of, weights_of
from ntkexp.model.networks import CNTK
from ntkexp.model.scalar import AbstractScalar
from ntkexp.records.sweep import Level
from ntkexp.shapes import Weights
from ntkexp.stream import stream


class KernelTimes(AbstractTrial):
    """How long kernels take: the tangent kernel at infinite width between n examples and n others, of which no pair
    comes twice, and a solve with the kernel among n examples.

    Examples are Gaussian, in this shape; the model's kernel is timed at each size.

        kernel_seconds, solve_seconds    time of this process, the shortest of `repeats` attempts

    Times are measured, so that another attempt gives others; rows of a seed are measured once and kept.
    """

    model: AbstractLayered
    init: AbstractInit
    shape: tuple[Count, ...] = (16,)
    sizes: tuple[Count, ...] = Field((250, 500, 1000), min_length=2)
    repeats: Count = 3

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        generator = stream("trial", seed)
        return [
            self.timed(torch.randn(2, size, *self.shape, generator=generator, dtype=torch.float64))
            for size in self.sizes
        ]

    def timed(self, both: Float[Tensor, "2 example *shape"]) -> dict[str, Level]:
        """The times of some examples and as many others."""
        x, others = both
        layers = self.model.layers(self.init, self.shape, 1)
        matrix, ones = infinite_kernel(layers, x, engine="torch", threads=1)[1], torch.ones(len(x), 1, dtype=x.dtype)
        matrix.diagonal().add_(matrix.diagonal().mean())
        return {
            "examples": len(x),
            "kernel_seconds": self.shortest(lambda: infinite_kernel(layers, x, others, engine="torch", threads=1)[1]),
            "solve_seconds": self.shortest(lambda: torch.linalg.solve(matrix, ones)),
        }

    def shortest(self, work: Callable[[], Tensor]) -> float:
        """The shortest of several attempts."""
        times = []
        for _ in range(self.repeats):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
        return min(times)


class LayerProducts(AbstractTrial):
    """The kernel of each layer from what goes forwards and backwards through it, beside the one from autograd:

    A network of one output, drawn by the seed, is read at so many points of the data.

        ⟨∂f/∂W, ∂f′/∂W⟩ = gain² Σ_pq ⟨g_p, g′_q⟩ ⟨b_p, b′_q⟩     summed over all pairs of pixels p, q; one pixel,
                                                                 if dense

    b_p is the patch that the weight is multiplied with at pixel p, g_p the derivative of f by what comes out
    there. Biases are patches of their shift (Arora et al. 2019, section 3).

        error       ‖products − autograd‖/‖autograd‖ of a layer       share    of the layer in the trace of the whole
                    kernel
        unpaired    the error of ⟨g, g′⟩⟨b, b′⟩ with pixels left in one long vector, which is no kernel of a convolution
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    points: Count = 8

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        x = self.data.split(seed).train.inputs[: self.points]
        module = self.model.module(self.init, tuple(x.shape[1:]), 1, stream("weights", seed)).eval()
        layers = {name: part for name, part in module.named_modules() if isinstance(part, Affine | Convolution)}
        if not layers:
            raise Mistake(f"trial.model: {self.model.option} has no dense or convolutional layer; choose mlp or cnn")
        seen = through(module, layers, x)
        own = {name: autograd(module, name, x) for name in layers}
        whole = sum(float(kernel.trace()) for kernel in own.values())
        return [
            {
                "layer": name,
                "kind": type(layer).__name__.lower(),
                "error": missed(paired(layer, *seen[name]), own[name]),
                "unpaired": missed(unpaired(layer, *seen[name]), own[name]),
                "share": float(own[name].trace()) / whole,
            }
            for name, layer in layers.items()
        ]


def through(module: nn.Module, layers: Mapping[str, nn.Module], x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What went into each layer, and the derivative of the output by what came out of it."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.register_forward_hook(lambda _, given, z, name=name: seen.update({name: (given[0], z)}))
        for name, layer in layers.items()
    ]
    outputs = module(x)
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(outputs.sum(), [z for _, z in seen.values()])
    return {name: (given.detach(), g) for (name, (given, _)), g in zip(seen.items(), gradients, strict=True)}


def autograd(module: nn.Module, layer: str, x: Tensor) -> Float[Tensor, "example example"]:
    """The kernel of the parameters of one layer, by a gradient for every example."""
    parameters = list(module.get_submodule(layer).parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(module(one).sum(), parameters)])
        for one in torch.split(x, 1)
    ]
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.t()


def paired(layer: nn.Module, given: Tensor, g: Tensor) -> Float[Tensor, "example example"]:
    """Σ_pq ⟨g_p, g′_q⟩ ⟨b_p, b′_q⟩."""
    patches, signals = per_pixel(layer, given, g)
    left = torch.einsum("ipc,jqc->ijpq", signals, signals)
    return (left * torch.einsum("ipd,jqd->ijpq", patches, patches)).sum((2, 3))


def unpaired(layer: nn.Module, given: Tensor, g: Tensor) -> Float[Tensor, "example example"]:
    """⟨g, g′⟩ ⟨b, b′⟩ of whole layers."""
    patches, signals = (part.flatten(1) for part in per_pixel(layer, given, g))
    return (signals @ signals.t()) * (patches @ patches.t())


def per_pixel(layer: nn.Module, given: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The patches [example, pixel, entry], with an entry for the bias, and the signals [example, pixel, feature]."""
    if isinstance(layer, Affine):
        patches, signals = layer.gain * given[:, None], g[:, None]
    elif isinstance(layer, Convolution) and given.dim() == 4:
        padded = nn.functional.pad(layer.gain * given, layer.borders, layer.mode)
        window = tuple(layer.weight.shape[2:])
        patches = nn.functional.unfold(padded, window, stride=layer.stride).transpose(1, 2)
        signals = g.flatten(2).transpose(1, 2)
    else:
        raise Mistake("trial.data: convolutions are read on images of two axes; choose data=digits")
    if layer.bias is not None:
        patches = torch.cat([patches, torch.full_like(patches[..., :1], layer.shift)], 2)
    return patches, signals


def missed(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖/‖expected‖."""
    return float((found - expected).norm() / expected.norm())


class LimitRegression(AbstractTrial):
    """Regression with the kernels of infinitely wide networks, on the same examples: how many of new ones they
    classify.

    Each model's kernel is solved with each ridge; the seed draws which examples there are.

        f(x) = Θ(x, X) (Θ(X, X) + ridge·mean diagonal)⁻¹ Y,    Y one-hot and centred

        accuracy    share of test examples whose largest output is their class
        residual    max |f(X) − Y|, which is 0 where the closed form returns the training labels
        condition   of Θ(X, X) + ridge
        bound       n·eps·condition, what rounding alone explains of the residual

    Rows are told apart by `kernel`, the name that a model is given, and by `ridge`.
    """

    names: tuple[str, ...] = Field(min_length=1)
    models: tuple[AbstractLayered, ...]
    init: AbstractInit
    data: AbstractSource
    ridges: tuple[Annotated[float, Field(ge=0)], ...] = (0.0,)

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        """Every model has a name of its own."""
        refuse_unnamed("trial.names", self.names, "models", self.models)
        return self

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        if not data.classes:
            raise Mistake("trial.data: kernels classify, and the data has no classes; choose data=digits")
        named = zip(self.names, self.models, strict=True)
        return [{"kernel": name, **row} for name, model in named for row in self.solved(model, data)]

    def solved(self, model: AbstractLayered, data: Data) -> Iterator[dict[str, Level]]:
        """The rows of one model."""
        layers = model.layers(self.init, tuple(data.train.inputs.shape[1:]), 1)
        x, y = data.train.inputs, centred(data.train.target, len(data.classes))
        among = infinite_kernel(layers, x, threads=1)[1]
        across = infinite_kernel(layers, data.test.inputs, x, threads=1)[1]
        for ridge in self.ridges:
            matrix = among + ridge * among.diagonal().mean() * torch.eye(len(among), dtype=among.dtype)
            values = torch.linalg.eigvalsh(matrix)
            condition = float(values[-1] / values[0]) if values[0] > 0 else float("inf")
            coefficients = torch.linalg.solve(matrix, y)
            yield {
                "ridge": ridge,
                "accuracy": float(((across @ coefficients).argmax(1) == data.test.target).double().mean()),
                "residual": float((among @ coefficients - y).abs().max()),
                "condition": condition,
                "bound": len(matrix) * torch.finfo(matrix.dtype).eps * condition,
            }


def centred(labels: Tensor, classes: int) -> Float[Tensor, "example class"]:
    """One-hot targets whose rows sum to zero."""
    return torch.nn.functional.one_hot(labels, classes).double() - 1 / classes


INIT = NTK(W_std=sqrt(2), b_std=0.0)
Regressor = Literal["process", "kernel", "network"]
FAMILIES = {"CNTK": False, "CNTK-GAP": True}
MOMENTUM = 0.9


class ConvolutionalAccuracy(AbstractTrial):
    """Convolutional networks of several depths, with and without global average pooling: how many new images they
    classify.

    The seed draws which images there are, and the weights of the networks, which have `width` channels.

        regressor    accuracy of …
        process      regression with the covariance of the infinitely wide network, its Gaussian process
        kernel       regression with its tangent kernel
        network      a network of finite width, less its first outputs, all layers trained by descent with momentum

    Asked are those named by `regressors`. Targets are one-hot and centred, errors are squared; rows are told apart by
    `depth` and by the `family`, `CNTK` or `CNTK-GAP`, with pooling. S. Arora et al., "On exact computation with an
    infinitely wide neural net" (2019), arXiv:1904.11955, table 1.
    """

    data: AbstractSource
    depths: tuple[Count, ...] = Field((3, 4, 6), min_length=1)
    width: Count = 16
    steps: Count = 200
    regressors: tuple[Regressor, ...] = Field(("process", "kernel", "network"), min_length=1)
    dtype: Literal["float64", "float32"] = "float32"
    """Networks are trained with such numbers; kernels are always of float64.
    The largest output needs no more than single precision, in which convolutions are four times as fast."""

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        if not data.classes:
            raise Mistake("trial.data: kernels classify, and the data has no classes; choose data=digits")
        return [
            {"depth": depth, "family": family, "regressor": regressor, "accuracy": accuracy}
            for depth in self.depths
            for family, pooling in FAMILIES.items()
            for regressor, accuracy in self.accuracies(
                CNTK(depth=depth, pooling=pooling, width=self.width), data, stream("weights", seed, depth)
            )
        ]

    def accuracies(self, model: CNTK, data: Data, generator: torch.Generator) -> Iterator[tuple[str, float]]:
        """The accuracies of one architecture."""
        x, new, y = data.train.inputs, data.test.inputs, centred(data.train.target, len(data.classes))
        layers = model.layers(INIT, tuple(x.shape[1:]), 1)
        among, across = infinite_kernel(layers, x, threads=1), infinite_kernel(layers, new, x, threads=1)
        found = {
            name: right @ torch.linalg.solve(left, y)
            for name, left, right in zip(("process", "kernel"), among, across, strict=True)
            if name in self.regressors
        }
        if "network" in self.regressors:
            step_size = 1 / float(torch.linalg.eigvalsh(among[1])[-1])
            found["network"] = self.of_network(model, data, y, step_size, generator)
        for name, outputs in found.items():
            yield name, float((outputs.argmax(1) == data.test.target).double().mean())

    def of_network(
        self, model: CNTK, data: Data, y: Float[Tensor, "train class"], step_size: float, generator: torch.Generator
    ) -> Float[Tensor, "test class"]:
        """The outputs of a network of finite width at new points."""
        x, new = data.train.inputs, data.test.inputs
        kind: torch.dtype = getattr(torch, self.dtype)
        module = model.module(INIT, tuple(x.shape[1:]), y.shape[1], generator, data.vocabulary).eval().to(kind)
        return trained(module, x.to(kind), new.to(kind), y.to(kind), step_size, self.steps)


def trained(
    module: nn.Module,
    x: Float[Tensor, "train *shape"],
    new: Float[Tensor, "test *shape"],
    y: Float[Tensor, "train class"],
    step_size: float,
    steps: int,
) -> Float[Tensor, "test class"]:
    """Train a module less its first outputs on ½ Σ (f − y)², and give its outputs at new points.

    >>> line, x = torch.nn.Linear(1, 1).double(), torch.ones(1, 1, dtype=torch.float64)
    >>> trained(line, x, x, 3 * x, step_size=0.1, steps=300).round(decimals=6).item()
    3.0
    """
    with torch.no_grad():
        at_x, at_new = module(x), module(new)
    optimizer = torch.optim.SGD(module.parameters(), lr=step_size, momentum=MOMENTUM)
    for _ in range(steps):
        optimizer.zero_grad()
        ((module(x) - at_x - y).square().sum() / 2).backward()
        optimizer.step()
    with torch.no_grad():
        outputs: Tensor = module(new) - at_new
    return outputs


ROUNDING = 1e-9
"""A value that moves by a smaller share of f(x′)'s movement does not move."""

Whole = Annotated[int, Field(ge=-(10**4), le=10**4)]


class ScalarCurve(AbstractTrial):
    """The kernel of a function of one number with one observation x′, drawn over x, and what a step of descent does:

    A scalar function is looked at between `first` and `last`, with an observation (observed, value).

        share        k(x, x′)/k(x′, x′); `least` and `largest` are its extremes over x, `least_at` and `largest_at`
                     their x
        finite       the same of the kernel k̃ of a finite step, η = `ascent`; `finite_largest_at` is where that is
                     largest
        spread       largest − least
        before       f(x) at the start                        after    f(x) after a step of η on (f(x′) − value)²
        moved        after − before                           wrong_way    1 where f(x) really moved against f(x′),
                     else 0
        error        |k(x, x′) − (delta·[x = x′] + product·x x′ + constant)|, as a share of k(x′, x′)

    Rows are told apart by `x`, which is the observation's `place` or elsewhere, on one `side` of the boundary; by
    the number of steps `ascended` that raise f(x′) before all this; and by the `start`: `given`, which is the
    model's own, or `drawn`, which has scatter·N(0, 1) added to every parameter (Huszár 2020).
    """

    model: AbstractScalar
    first: Whole = -10
    last: Whole = 20
    observed: Whole = 10
    value: float = 50.0
    step_size: float = Field(0.1, gt=0)
    scatter: float = Field(1.0, gt=0)
    boundary: float = -0.1
    delta: float = 0.0
    product: float = 0.0
    constant: float = 0.0
    ascended: tuple[CountOrNone, ...] = (0,)
    ascent: float = Field(1.0, gt=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        if not self.first <= self.observed <= self.last:
            raise Mistake(f"trial.observed={self.observed} is not in {self.first} … {self.last}")
        module = self.model.function()
        own, generator = weights_of(module), stream("weights", seed)
        drawn = {name: weight + self.scatter * noise_like(weight, generator) for name, weight in own.items()}
        starts = {"given": own, "drawn": drawn}
        return [row for start, weights in starts.items() for row in self.curves(module, start, weights)]

    def curves(self, module: nn.Module, start: str, weights: Weights) -> Iterator[dict[str, Level]]:
        """The rows of one start."""
        x = torch.arange(self.first, self.last + 1, dtype=torch.float64)[:, None]
        here = self.observed - self.first
        for steps in self.ascended:
            reached = ascend(module, x[here : here + 1], steps, self.ascent, weights=weights)
            for row in self.curve(module, reached, x, here):
                yield {"start": start, "ascended": steps, **row}

    def curve(self, module: nn.Module, weights: Weights, x: Tensor, here: int) -> Iterator[dict[str, Level]]:
        """The rows at one place of the weights."""
        point = x[here : here + 1]
        kernel = tangent_kernel(module, x, point, weights=weights)[:, 0, 0, 0]
        share = kernel / kernel[here]
        finite = finite_step_kernel(module, x, point, self.ascent, weights=weights)[:, 0, 0, 0] / kernel[here]
        before, after = self.step(module, weights, x, here)
        moved = after - before
        formula = self.product * x[:, 0] * self.observed + self.constant
        formula[here] += self.delta
        whole: dict[str, Level] = {
            "least": share.min().item(),
            "least_at": x[share.argmin()].item(),
            "largest": share.max().item(),
            "largest_at": x[share.argmax()].item(),
            "finite_largest_at": x[finite.argmax()].item(),
            "spread": (share.max() - share.min()).item(),
        }
        for k, place in enumerate(x[:, 0].tolist()):
            yield {
                "x": int(place),
                "place": "observed" if k == here else "elsewhere",
                "side": "left" if place < self.boundary else "right",
                "kernel": kernel[k].item(),
                "share": share[k].item(),
                "finite": finite[k].item(),
                **whole,
                "before": before[k].item(),
                "after": after[k].item(),
                "moved": moved[k].item(),
                "wrong_way": float((moved[k] / moved[here]).item() < -ROUNDING),
                "error": ((kernel[k] - formula[k]).abs() / kernel[here]).item(),
            }

    def step(self, module: nn.Module, weights: Weights, x: Tensor, here: int) -> tuple[Tensor, Tensor]:
        """All values before and after a step of descent on the squared error: an ascent by −2η (f(x′) − value)."""
        function = function_of(module)
        before = function(weights, x)[:, 0]
        size = 2 * self.step_size * (self.value - before[here]).item()
        after = function(ascend(module, x[here : here + 1], 1, size, weights=weights), x)[:, 0]
        return before, after


def noise_like(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw N(0, 1) in the shape of a weight."""
    return torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


class FiniteSteps(AbstractTrial):
    """How far the kernel of a finite step is from the tangent kernel, step size by step size:

    A model is read on data: at `points` of them, after steps on each of `observed` others.

        error            ‖k̃_η − k‖/‖k‖ between the probe points and the first training examples
        centred_error    the same of (k̃_η + k̃_{−η})/2, in which the first order cancels

    Networks are drawn by the seed; a function that starts where its fields say gets scatter·N(0, 1) added to its
    weights.
    """

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource
    step_sizes: tuple[Annotated[float, Field(gt=0)], ...] = Field((0.1, 0.03, 0.01), min_length=2)
    points: Count = 16
    observed: Count = 4
    scatter: float = Field(0.0, ge=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = self.data.split(seed)
        generator = stream("weights", seed)
        module = self.model.module(self.init, tuple(data.train.inputs.shape[1:]), 1, generator, data.vocabulary).eval()
        weights = {
            name: weight + self.scatter * noise_like(weight, generator) for name, weight in weights_of(module).items()
        }
        seen = torch.cat([data.train.inputs, data.probe.inputs, data.test.inputs])[: self.points]
        observed = data.train.inputs[: self.observed]
        tangent = tangent_kernel(module, seen, observed, weights=weights)

        def finite(step_size: float) -> Tensor:
            return finite_step_kernel(module, seen, observed, step_size, weights=weights)

        def missed(kernel: Tensor) -> float:
            return float((kernel - tangent).norm() / tangent.norm())

        return [
            {"step_size": eta, "error": missed(finite(eta)), "centred_error": missed((finite(eta) + finite(-eta)) / 2)}
            for eta in self.step_sizes
        ]
