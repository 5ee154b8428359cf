"""Kernels of convolutional networks: layer by layer, in regression, and how long they take (S. Arora et al. 2019,
arXiv:1904.11955).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log, sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal, Self

import pandas as pd
import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from ntkexp.claim.judged import AbstractPicture, JudgedClaim
from ntkexp.claim.picture import JudgedRows, draw_accuracies
from ntkexp.claim.trial import AbstractTrial, refuse_unnamed
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Data, Examples, Standardise
from ntkexp.init import NTK, AbstractInit
from ntkexp.layer.affine import Affine, Convolution
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, AbstractLayered
from ntkexp.model.networks import CNTK
from ntkexp.records.sweep import Level
from ntkexp.stream import stream
from ntkexp.text import listed, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LayerProducts(AbstractTrial):
    """The kernel of each layer from what goes forwards and backwards through it, beside the one from autograd:

    A network of one output, drawn from the seed, is evaluated at `points` points of the data.

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
        layers = {
            name: part
            for name, part in module.named_modules()
            if isinstance(part, Affine | Convolution)
        }
        if not layers:
            raise Mistake(
                f"trial.model: {self.model.option} has no dense or convolutional layer; choose mlp or cnn"
            )
        seen = pass_through(module, layers, x)
        own = {name: autograd_kernel(module, name, x) for name in layers}
        trace = sum(float(kernel.trace()) for kernel in own.values())
        rows = list[Mapping[str, Level]]()
        for name, layer in layers.items():
            patches, signals = per_pixel(layer, *seen[name])
            # Σ_pq ⟨g_p, g′_q⟩ ⟨b_p, b′_q⟩
            pairs = torch.einsum("ipc,jqc->ijpq", signals, signals)
            paired = (pairs * torch.einsum("ipd,jqd->ijpq", patches, patches)).sum((2, 3))
            # ⟨g, g′⟩ ⟨b, b′⟩ of whole layers
            b, g = patches.flatten(1), signals.flatten(1)
            unpaired = (g @ g.t()) * (b @ b.t())
            rows.append(
                {
                    "layer": name,
                    "kind": type(layer).__name__.lower(),
                    "error": float((paired - own[name]).norm() / own[name].norm()),
                    "unpaired": float((unpaired - own[name]).norm() / own[name].norm()),
                    "share": float(own[name].trace()) / trace,
                }
            )
        return rows


def pass_through(
    module: nn.Module, layers: Mapping[str, nn.Module], x: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Read what went into each layer, and the derivative of the output by what came out of it."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, given, z, name=name: seen.update({name: (given[0], z)})
        )
        for name, layer in layers.items()
    ]
    outputs = module(x)
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(outputs.sum(), [z for _, z in seen.values()])
    return {
        name: (given.detach(), g)
        for (name, (given, _)), g in zip(seen.items(), gradients, strict=True)
    }


def autograd_kernel(module: nn.Module, layer: str, x: Tensor) -> Float[Tensor, "example example"]:
    """The kernel of the parameters of one layer, by a gradient for every example."""
    parameters = list(module.get_submodule(layer).parameters())
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(module(one).sum(), parameters)])
        for one in torch.split(x, 1)
    ]
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.t()


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
        data = labelled(self.data, seed)
        named = zip(self.names, self.models, strict=True)
        return [
            {"kernel": name, **row} for name, model in named for row in self.solved(model, data)
        ]

    def solved(self, model: AbstractLayered, data: Data) -> Iterator[dict[str, Level]]:
        layers = model.layers(self.init, tuple(data.train.inputs.shape[1:]), 1)
        x, y = data.train.inputs, centred(data.train.target, len(data.classes))
        among = infinite_kernel(layers, x, threads=1)[1]
        across = infinite_kernel(layers, data.test.inputs, x, threads=1)[1]
        for ridge in self.ridges:
            matrix = among + ridge * among.diagonal().mean() * torch.eye(
                len(among), dtype=among.dtype
            )
            values = torch.linalg.eigvalsh(matrix)
            condition = float(values[-1] / values[0]) if values[0] > 0 else float("inf")
            coefficients = torch.linalg.solve(matrix, y)
            yield {
                "ridge": ridge,
                "accuracy": float(
                    ((across @ coefficients).argmax(1) == data.test.target).double().mean()
                ),
                "residual": float((among @ coefficients - y).abs().max()),
                "condition": condition,
                "bound": len(matrix) * torch.finfo(matrix.dtype).eps * condition,
            }


class LearningCurve(AbstractTrial):
    """How accuracy grows with the number of examples, and where it leads: regression with the kernel of one infinitely
    wide network, beside that of another whose accuracy with more examples is known.

    The kernels are solved on the same `splits` random parts of the training examples, of each size, and classify the
    rest. What one has over the other changes slowly and evenly with n:

        gain(n)        logit accuracy(n) of `model` − logit accuracy(n) of `beside`,  a + b ln n by least squares
        predicted(n)   logit predicted(n) = logit known(n) + a + b ln n, at the sizes `at`

    Both learn from the same examples, so how hard these are is neither in a nor in b. Rows are told apart by `kernel`,
    `model` or `beside`, and by `examples`, the number n.
    """

    model: AbstractLayered
    beside: AbstractLayered
    init: AbstractInit
    data: AbstractSource
    sizes: tuple[Count, ...] = Field((20, 40, 80, 160), min_length=2)
    splits: Count = 200
    at: tuple[Count, ...] = ()
    known: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()

    @model_validator(mode="after")
    def refuse_no_line(self) -> Self:
        """A line goes through two sizes, and what is predicted at a size needs what is known there."""
        if len(set(self.sizes)) < 2:
            raise Mistake(
                f"trial.sizes={[*self.sizes]}: give two different ones, between which a line is drawn"
            )
        if len(self.at) != len(self.known):
            raise Mistake(
                f"trial.known={[*self.known]}: give an accuracy for each of at={[*self.at]}"
            )
        return self

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = labelled(self.data, seed)
        x, labels = data.train.inputs, data.train.target
        if len(x) <= max(self.sizes):
            raise Mistake(
                f"trial.sizes: {max(self.sizes)} of {len(x)} examples leave none to classify; give more"
            )
        found, y = {}, centred(labels, len(data.classes))
        for name, model in {"model": self.model, "beside": self.beside}.items():
            kernel = infinite_kernel(
                model.layers(self.init, tuple(x.shape[1:]), 1), x, threads=1
            ).ntk
            found[name] = [self.accuracy(kernel, labels, y, size, seed) for size in self.sizes]
        predicted = predict_by_gain(
            found["model"], found["beside"], self.sizes, self.at, self.known
        )
        rows: list[Mapping[str, Level]] = [
            {"kernel": name, "examples": size, "accuracy": accuracy}
            for name, accuracies in found.items()
            for size, accuracy in zip(self.sizes, accuracies, strict=True)
        ]
        rows += [
            {"kernel": "model", "examples": n, "predicted": p}
            for n, p in zip(self.at, predicted, strict=True)
        ]
        return rows

    def accuracy(
        self,
        kernel: Float[Tensor, "row column"],
        labels: Tensor,
        y: Float[Tensor, "row class"],
        size: int,
        seed: int,
    ) -> float:
        """The mean over splits; those of a seed are the same for every kernel."""
        generator, right = stream("splits", seed, size), 0
        for _ in range(self.splits):
            order = torch.randperm(len(labels), generator=generator)
            of, new = order[:size], order[size:]
            outputs = kernel[new[:, None], of] @ torch.linalg.solve(kernel[of[:, None], of], y[of])
            right += int((outputs.argmax(1) == labels[new]).sum())
        return right / (self.splits * (len(labels) - size))


def predict_by_gain(
    accuracies: Sequence[float],
    beside: Sequence[float],
    sizes: Sequence[int],
    at: Sequence[int],
    known: Sequence[float],
) -> list[float]:
    """Accuracies at other sizes, where those beside are known: the gain in the logit is a line in the log of the size.

    >>> [round(each, 12) for each in predict_by_gain([0.5, 0.7], [0.5, 0.5], [10, 100], [100, 10], [0.5, 0.25])]
    [0.7, 0.25]
    """
    gains = torch.tensor([accuracies, beside], dtype=torch.float64).logit()
    line, leads = ([(1.0, log(n)) for n in each] for each in (sizes, at))
    fitted = torch.linalg.lstsq(
        torch.tensor(line, dtype=torch.float64), (gains[0] - gains[1])[:, None]
    ).solution
    where = torch.tensor(leads, dtype=torch.float64).reshape(-1, 2) @ fitted
    found: list[float] = (
        (torch.tensor(known, dtype=torch.float64).logit() + where[:, 0]).sigmoid().tolist()
    )
    return found


class AccuracyByExamples(AbstractPicture):
    """Accuracies against the number of examples that kernels learn from, measured and predicted, beside those that were
    published.

    A trial of `LearningCurve` is drawn; `names` says what its two kernels are called, and the `where` of each of
    `numbers` at how many `examples` it was published.
    """

    names: dict[str, str] = Field(min_length=1)

    @model_validator(mode="after")
    def refuse_nowhere(self) -> Self:
        """A published accuracy has its place."""
        if not all("examples" in one.where for one in self.numbers):
            raise Mistake(
                "picture.numbers: where: names no examples; say with how many each was published"
            )
        return self

    def figure(self, judged: JudgedClaim) -> Figure:
        published = {int(one.where["examples"]): one.value for one in self.numbers}
        return draw_accuracies(
            judged.rows("examples", "kernel", "seed"), self.names, published, self.title(judged)
        )

    def title(self, judged: JudgedClaim) -> str:
        """Say where the curve leads, and what was published."""
        found = [
            (one.where["examples"], one.estimate(judged.table), one.value) for one in self.numbers
        ]
        parts = [
            f"{percent(here.value)} ({percent(here.low)} to {percent(here.high)}) with {n:,} examples, published "
            f"{percent(value)}"
            for n, here, value in found
        ]
        return f"{next(iter(self.names.values())).capitalize()}, the curve leads to {'; to '.join(parts)}"

    def here(self, judged: JudgedClaim) -> str:
        rows = judged.rows("examples", "kernel", "seed", "accuracy")
        means = rows.groupby(["kernel", "examples"])["accuracy"].mean()
        ends = rows["examples"].min(), rows["examples"].max()
        told = [
            f"{name} {listed([f'{percent(means[kernel, size])} with {size}' for size in ends])}"
            for kernel, name in self.names.items()
        ]
        seeds = rows["seed"].nunique()
        return f"accuracies by the number of examples are {'; '.join(told)}, by {seeds} seeds; stars were published."


class ScrambledPixels(AbstractSource):
    """Images whose pixels change places, the same way in all images: what lay side by side in them does no longer.

    A control of what is said of convolutions: the information is all there, and no window finds it.

    >>> from ntkexp.data.images import Digits
    >>> sources = Digits(train=9), ScrambledPixels(source=Digits(), train=9)
    >>> whole, scrambled = (source.split().train.inputs for source in sources)
    >>> torch.equal(whole, scrambled), torch.equal(whole.flatten().sort()[0], scrambled.flatten().sort()[0])
    (False, True)
    """

    source: AbstractSource
    standardise: Standardise = "all"

    def examples(self, generator: torch.Generator) -> Examples:
        given = self.source.examples(generator)
        pixels = given.inputs.flatten(2)
        order = torch.randperm(pixels.shape[2], generator=stream("pixels", 0))
        return replace(given, inputs=pixels[:, :, order].view_as(given.inputs))


def labelled(source: AbstractSource, seed: int) -> Data:
    """Data with classes, which kernels can tell apart."""
    data = source.split(seed)
    if not data.classes:
        raise Mistake(
            "trial.data: kernels classify, and the data has no classes; choose data=digits"
        )
    return data


def centred(labels: Tensor, classes: int) -> Float[Tensor, "example class"]:
    """One-hot targets whose rows sum to zero."""
    return torch.nn.functional.one_hot(labels, classes).double() - 1 / classes


INIT = NTK(W_std=sqrt(2), b_std=0.0)
FAMILIES = {"CNTK": False, "CNTK-GAP": True}
MOMENTUM = 0.9

Regressor = Literal["process", "kernel", "network"]
REGRESSORS: tuple[Regressor, ...] = ("process", "kernel", "network")


class ConvolutionalAccuracy(AbstractTrial):
    """Convolutional networks of several depths, with and without global average pooling: how many new images they
    classify.

    The seed draws which images there are, and the weights of the networks, which have `width` channels.

        regressor    accuracy of …
        process      regression with the covariance of the infinitely wide network, its Gaussian process
        kernel       regression with its tangent kernel
        network      a network of finite width, less its first outputs, all layers trained by descent with momentum

    Those named by `regressors` are measured. Targets are one-hot and centred, errors squared; rows are told apart by
    `depth` and by the `family`, `CNTK` or `CNTK-GAP`, with pooling. S. Arora et al., "On exact computation with an
    infinitely wide neural net" (2019), arXiv:1904.11955, table 1.
    """

    data: AbstractSource
    depths: tuple[Count, ...] = Field((3, 4, 6), min_length=1)
    width: Count = 16
    steps: Count = 200
    regressors: tuple[Regressor, ...] = Field(REGRESSORS, min_length=1)
    dtype: Literal["float64", "float32"] = "float32"
    """Networks are trained with such numbers; kernels are always of float64.
    The largest output needs no more than single precision, in which convolutions are four times as fast."""

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        data = labelled(self.data, seed)
        return [
            {"depth": depth, "family": family, "regressor": regressor, "accuracy": accuracy}
            for depth in self.depths
            for family, pooling in FAMILIES.items()
            for regressor, accuracy in self.accuracies(
                CNTK(depth=depth, pooling=pooling, width=self.width),
                data,
                stream("weights", seed, depth),
            )
        ]

    def accuracies(
        self, model: CNTK, data: Data, generator: torch.Generator
    ) -> Iterator[tuple[str, float]]:
        """The accuracies of one architecture."""
        x, new, y = (
            data.train.inputs,
            data.test.inputs,
            centred(data.train.target, len(data.classes)),
        )
        layers = model.layers(INIT, tuple(x.shape[1:]), 1)
        among, across = (
            infinite_kernel(layers, x, threads=1),
            infinite_kernel(layers, new, x, threads=1),
        )

        # Regression with either kernel: K(x, X) K(X, X)⁻¹ Y.
        found = {
            name: right @ torch.linalg.solve(left, y)
            for name, left, right in zip(("process", "kernel"), among, across, strict=True)
            if name in self.regressors
        }

        # A network of finite width, trained with η = 1/λ_max of the tangent kernel at infinite width.
        if "network" in self.regressors:
            step_size = 1 / float(torch.linalg.eigvalsh(among[1])[-1])
            kind: torch.dtype = getattr(torch, self.dtype)
            module = (
                model.module(INIT, tuple(x.shape[1:]), y.shape[1], generator, data.vocabulary)
                .eval()
                .to(kind)
            )
            found["network"] = train_outputs(
                module, x.to(kind), new.to(kind), y.to(kind), step_size, self.steps
            )
        for name, outputs in found.items():
            yield name, float((outputs.argmax(1) == data.test.target).double().mean())


def train_outputs(
    module: nn.Module,
    x: Float[Tensor, "train *shape"],
    new: Float[Tensor, "test *shape"],
    y: Float[Tensor, "train class"],
    step_size: float,
    steps: int,
) -> Float[Tensor, "test class"]:
    """Train a module less its first outputs on ½ Σ (f − y)², and give its outputs at new points.

    >>> line, x = torch.nn.Linear(1, 1).double(), torch.ones(1, 1, dtype=torch.float64)
    >>> train_outputs(line, x, x, 3 * x, step_size=0.1, steps=300).round(decimals=6).item()
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


class KernelTimes(AbstractTrial):
    """How long kernels take: the tangent kernel at infinite width between n examples and n others, of which no pair
    comes twice, and a solve with the kernel among n examples.

    Examples are Gaussian, in this shape; the model's kernel is timed at each size.

        kernel_seconds     the kernel between n examples and n others             ∝ n²
        solve_seconds      a solve with the kernel among n examples               ∝ n³
        strip_seconds      the kernel between n examples and m others             ∝ n
        product_seconds    the kernel among n examples times m vectors            ∝ n²

    where m is the least of the sizes. Seconds are of this process, the shortest of `repeats` attempts; another attempt
    gives others, so rows of a seed are measured once and kept.
    """

    model: AbstractLayered
    init: AbstractInit
    shape: tuple[Count, ...] = (16,)
    sizes: tuple[Count, ...] = Field((250, 500, 1000), min_length=2)
    repeats: Count = 3

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        generator, rows = stream("trial", seed), list[Mapping[str, Level]]()
        layers = self.model.layers(self.init, self.shape, 1)
        least = min(self.sizes)
        for size in self.sizes:
            x, others = torch.randn(2, size, *self.shape, generator=generator, dtype=torch.float64)
            matrix, ones = (
                infinite_kernel(layers, x, engine="torch", threads=1)[1],
                torch.ones(size, least).to(x),
            )
            matrix.diagonal().add_(
                matrix.diagonal().mean()
            )  # regular, so that it can be solved with
            works: dict[str, Callable[[], object]] = {
                "kernel_seconds": partial(
                    infinite_kernel, layers, x, others, engine="torch", threads=1
                ),
                "solve_seconds": partial(torch.linalg.solve, matrix, ones[:, :1]),
                "strip_seconds": partial(
                    infinite_kernel, layers, x, others[:least], engine="torch", threads=1
                ),
                "product_seconds": partial(torch.matmul, matrix, ones),
            }
            row: dict[str, Level] = {"examples": size}
            for name, work in works.items():
                times = []
                for _ in range(self.repeats):
                    begun = time.process_time()
                    work()
                    times.append(time.process_time() - begun)
                row[name] = min(times)
            rows.append(row)
        return rows


COLUMNS = ("depth", "family", "regressor", "accuracy", "seed")


class AccuracyTable(AbstractPicture):
    """A table of accuracies by depth, kernels and networks side by side, with those that the paper has.

    A trial of `ConvolutionalAccuracy` is set beside `per_cent`: by family and depth, what its paper has.

    S. Arora et al., "On exact computation with an infinitely wide neural net" (2019), arXiv:1904.11955, has such a
    table 1.
    """

    per_cent: dict[str, dict[Count, float]]
    numbers: tuple[()] = ()
    """They stand in `per_cent`."""

    def figure(self, judged: JudgedClaim) -> Figure:
        return JudgedRows().figure(judged)

    def table(self, judged: JudgedClaim) -> pd.DataFrame:
        ours = accuracies(judged)
        depths = sorted(
            {depth for depth, *_ in ours}
            | {depth for paper in self.per_cent.values() for depth in paper}
        )
        found: dict[str, list[float | None]] = {"depth": [*depths]}
        for family in dict.fromkeys(family for _, family, _ in ours):
            for name in REGRESSORS:
                found[f"{family} {name}, %"] = [ours.get((depth, family, name)) for depth in depths]
            if family in self.per_cent:
                found[f"{family} paper, %"] = [self.per_cent[family].get(depth) for depth in depths]
        return pd.DataFrame(found)

    def here(self, judged: JudgedClaim) -> str:
        ours, seeds = accuracies(judged), judged.rows(*COLUMNS)["seed"].nunique()
        means = {
            name: fmean(value for (*_, other), value in ours.items() if other == name)
            for name in REGRESSORS
        }
        means_in_words = [
            f"{name} {means[name]:.1f} %"
            for name in sorted(REGRESSORS, key=lambda name: -means[name])
        ]
        plain, pooled = FAMILIES
        gains = [
            f"{ours[depth, pooled, 'kernel'] - value:.1f} points at depth {depth}".replace("-", "−")
            for (depth, family, name), value in ours.items()
            if (family, name) == (plain, "kernel")
        ]
        return (
            f"on the data of the claim, pooling changes the accuracy of the kernel by {listed(gains)}; over all depths "
            f"and families the mean accuracies are {listed(means_in_words)}, by {seeds} seeds."
        )


def accuracies(judged: JudgedClaim) -> dict[tuple[int, str, str], float]:
    """Find the accuracy of each depth, family and regressor in per cent, the mean over seeds."""
    cells = (
        judged.rows(*COLUMNS)
        .groupby(["depth", "family", "regressor"], sort=False)["accuracy"]
        .mean()
        .reset_index()
    )
    names = zip(cells["depth"].astype(int), cells["family"], cells["regressor"], strict=True)
    return dict(zip(names, (100 * cells["accuracy"]).round(1), strict=True))
