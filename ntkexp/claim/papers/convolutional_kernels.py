"""Kernels of convolutional networks: their layers,
their accuracy in regression, and their cost.

The claims are from S. Arora et al. 2019, arXiv:1904.11955.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log, nan, sqrt
from statistics import fmean
from typing import Annotated, Any, Literal, Self

import pandas as pd
import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from ntkexp.claim.judged import AbstractPicture, Figure, JudgedClaim
from ntkexp.claim.papers.lazy_and_rich import share_right
from ntkexp.claim.picture import JudgedRows
from ntkexp.claim.trial import AbstractTrial, NetworkTrial, Rows, refuse_unnamed
from ntkexp.closed_form import conjugate_gradients
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource, Data, Examples, Standardise
from ntkexp.init import NTK, AbstractInit
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.layer.affine import Affine, Convolution
from ntkexp.limit.infinite_kernel import infinite_kernel
from ntkexp.loss import centred_one_hot
from ntkexp.machine.machines import gaussian_kernel, median_distance
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractLayered
from ntkexp.model.networks import CNTK
from ntkexp.records.sweep import Level
from ntkexp.stream import normal, stream
from ntkexp.text import listed, percent


class LayerProducts(NetworkTrial):
    """The kernel of each layer, as a product of forward and backward signals. It is
    compared with the kernel by autograd.

    A network with one output is evaluated at `points` points of the data (Arora et al.
    2019, section 3). Let f = f(x) and f′ = f(x′):

        ⟨∂f/∂W, ∂f′/∂W⟩ = gain² Σ_pq ⟨g_p, g′_q⟩ ⟨b_p, b′_q⟩

    The sum runs over all pairs of pixels p, q; a dense layer has one pixel. b_p is the
    input patch at pixel p, and g_p is the gradient of f with respect to the layer's
    output at pixel p. A bias is an additional entry of the patch.

        error       ‖products − autograd‖/‖autograd‖ of a layer
        share       the share of the layer in the trace of the kernel
        unpaired    the error of ⟨g, g′⟩⟨b, b′⟩, where g and b are vectors over all pixels (a
                    control)
    """

    points: Count = 8

    def rows(self, seed: int) -> Rows:
        x = self.data.split(seed).train.inputs[: self.points]
        module = self.model.module(
            self.init, tuple(x.shape[1:]), 1, stream("weights", seed)
        ).eval()
        layers = {
            name: part
            for name, part in module.named_modules()
            if isinstance(part, Affine | Convolution)
        }
        if not layers:
            raise Mistake(
                f"trial.model: {self.model.option} has no dense or convolutional layer; "
                "choose mlp or cnn"
            )
        seen = pass_through(module, layers, x)
        own = {name: autograd_kernel(module, name, x) for name in layers}
        trace = sum(float(kernel.trace()) for kernel in own.values())
        for name, layer in layers.items():
            patches, signals = per_pixel(layer, *seen[name])
            kernel = own[name]

            # Σ_pq ⟨g_p, g′_q⟩ ⟨b_p, b′_q⟩
            of_signals = torch.einsum("ipc,jqc->ijpq", signals, signals)
            of_patches = torch.einsum("ipd,jqd->ijpq", patches, patches)
            paired = (of_signals * of_patches).sum((2, 3))

            # ⟨g, g′⟩ ⟨b, b′⟩, over all pixels
            b = patches.flatten(1)
            g = signals.flatten(1)
            unpaired = (g @ g.t()) * (b @ b.t())
            yield {
                "layer": name,
                "kind": type(layer).__name__.lower(),
                "error": float((paired - kernel).norm() / kernel.norm()),
                "unpaired": float((unpaired - kernel).norm() / kernel.norm()),
                "share": float(kernel.trace()) / trace,
            }


def pass_through(
    module: nn.Module, layers: Mapping[str, nn.Module], x: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the input of each layer, and the gradient of the network's output with
    respect to the layer's output."""
    inputs: dict[str, Tensor] = {}
    results: dict[str, Tensor] = {}

    def note(
        name: str, layer: nn.Module, arguments: tuple[Tensor, ...], z: Tensor
    ) -> None:
        inputs[name] = arguments[0]
        results[name] = z

    hooks = [
        layer.register_forward_hook(partial(note, name))
        for name, layer in layers.items()
    ]
    outputs = module(x)
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(outputs.sum(), list(results.values()))
    signals = dict(zip(results, gradients, strict=True))
    return {name: (inputs[name].detach(), signals[name]) for name in results}


def autograd_kernel(
    module: nn.Module, layer: str, x: Tensor
) -> Float[Tensor, "example example"]:
    """Return the tangent kernel of one layer's parameters,
    from one autograd call per example."""
    parameters = list(module.get_submodule(layer).parameters())
    rows = []
    for point in torch.split(x, 1):
        gradients = torch.autograd.grad(module(point).sum(), parameters)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.t()


def per_pixel(layer: nn.Module, given: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's input patches [example, pixel, entry], and `g` rearranged as
    [example, pixel, out].

    `given` is the input of the layer, and `g` the gradient with respect to its output.
    A dense layer has one pixel."""
    if isinstance(layer, Affine):
        patches = layer.gain * given[:, None]
        signals = g[:, None]
    elif isinstance(layer, Convolution) and given.dim() == 4:
        padded = nn.functional.pad(layer.gain * given, layer.borders, layer.mode)
        window = tuple(layer.weight.shape[2:])
        patches = nn.functional.unfold(padded, window, stride=layer.stride).transpose(
            1, 2
        )
        signals = g.flatten(2).transpose(1, 2)
    else:
        raise Mistake(
            "trial.data: convolutions are read on images of two axes; choose data=digits"
        )
    if layer.bias is not None:
        patches = torch.cat(
            [patches, torch.full_like(patches[..., :1], layer.shift)], 2
        )
    return patches, signals


class LimitRegression(AbstractTrial):
    """Kernel regression with the tangent kernels Θ of infinitely wide networks.

        f(x) = Θ(x, X) (Θ(X, X) + λ)⁻¹ Y,    λ = ridge · mean diagonal of Θ(X, X)

    X are the n training examples, and Y their one-hot targets minus 1/C.

        accuracy    the accuracy on test examples
        residual    max |f(X) − Y|, which is 0 without ridge
        condition   the condition number of Θ(X, X) + λ
        bound       n·eps·condition, a bound on the rounding error of the residual

    The columns `kernel` (the name of the model) and `ridge` label the rows.
    The seed draws the examples."""

    names: tuple[str, ...] = Field(min_length=1)
    models: tuple[AbstractLayered, ...]
    init: AbstractInit
    data: AbstractSource
    ridges: tuple[Annotated[float, Field(ge=0)], ...] = (0.0,)

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        refuse_unnamed("trial.names", self.names, "models", self.models)
        return self

    def rows(self, seed: int) -> Rows:
        data = labelled(self.data, seed)
        for name, model in zip(self.names, self.models, strict=True):
            for row in self.solved(model, data):
                yield {"kernel": name, **row}

    def solved(self, model: AbstractLayered, data: Data) -> Iterator[dict[str, Level]]:
        layers = model.layers(self.init, tuple(data.train.inputs.shape[1:]), 1)
        x = data.train.inputs
        y = centred_one_hot(data.train.target, len(data.classes))
        among = infinite_kernel(layers, x, threads=1)[1]
        across = infinite_kernel(layers, data.test.inputs, x, threads=1)[1]
        identity = torch.eye(len(among), dtype=among.dtype)
        for ridge in self.ridges:
            matrix = among + ridge * among.diagonal().mean() * identity
            values = torch.linalg.eigvalsh(matrix)
            condition = float("inf")
            if values[0] > 0:
                condition = float(values[-1] / values[0])
            coefficients = torch.linalg.solve(matrix, y)
            yield {
                "ridge": ridge,
                "accuracy": share_right(across @ coefficients, data.test.target),
                "residual": float((among @ coefficients - y).abs().max()),
                "condition": condition,
                "bound": len(matrix) * torch.finfo(matrix.dtype).eps * condition,
            }


class LearningCurve(NetworkTrial):
    """A learning curve of kernel regression,
    extrapolated with the known curve of another kernel.

    Two infinitely wide networks are compared: `model`, and the other kernel `beside`.
    For each size n, both kernels are fitted on the same `splits` random subsets of n
    examples, and classify the remaining examples. On the logit scale, the difference of
    their accuracies changes slowly with n. A line is fitted to it by least squares, and
    then extrapolated to the sizes `at`:

        logit accuracy_model(n) − logit accuracy_beside(n) ≈ a + b ln n
        logit predicted(n) = logit known(n) + a + b ln n

    `known` are the accuracies of `beside` at these sizes. The difficulty of the
    examples affects both kernels equally, and cancels in the difference.

    With `classical`, two kernels without a network are fitted on the same subsets:

        linear      k(x, x′) = 1 + ⟨x, x′⟩/d,  d the number of pixel values
        gaussian    k(x, x′) = exp(−‖x − x′‖²/2h²)

    Each accuracy of the Gaussian kernel is the best of those with h = 1/4, 1/2, 1, 2
    and 4 median distances. This choice in hindsight favours the Gaussian kernel. The
    columns `kernel` (`model`, `beside`, `linear` or `gaussian`) and `examples` (n)
    label the rows."""

    model: AbstractLayered
    beside: AbstractLayered
    sizes: tuple[Count, ...] = Field((20, 40, 80, 160), min_length=2)
    splits: Count = 200
    at: tuple[Count, ...] = ()
    known: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    classical: bool = False
    dtype: Literal["float64", "float32"] = "float64"
    """The precision of the kernels. The linear systems are always solved in float64.

    Single precision suffices for accuracies,
    and makes kernels of images more than twice as fast."""

    @model_validator(mode="after")
    def refuse_no_line(self) -> Self:
        """Raise if there are fewer than two sizes,
        or if a known accuracy is missing."""
        if len(set(self.sizes)) < 2:
            raise Mistake(
                f"trial.sizes={[*self.sizes]}: give two different sizes, to fit a line"
            )
        if len(self.at) != len(self.known):
            raise Mistake(
                f"trial.known={[*self.known]}: give an accuracy for each of at={[*self.at]}"
            )
        return self

    def rows(self, seed: int) -> Rows:
        data = labelled(self.data, seed)
        kind: torch.dtype = getattr(torch, self.dtype)
        x = data.train.inputs.to(kind)
        labels = data.train.target
        if len(x) <= max(self.sizes):
            raise Mistake(
                f"trial.sizes: {max(self.sizes)} of {len(x)} examples leave none to classify; "
                "give more"
            )
        y = centred_one_hot(labels, len(data.classes))
        kernels = {}
        for name, model in {"model": self.model, "beside": self.beside}.items():
            layers = model.layers(self.init, tuple(x.shape[1:]), 1)
            kernels[name] = [infinite_kernel(layers, x, threads=1).ntk.to(y)]
        if self.classical:
            kernels |= classical_kernels(data.train.inputs.flatten(1))

        # Of several kernels with the same name, choose the best at each size.
        found = {
            name: [
                max(self.accuracy(one, labels, y, size, seed) for one in same_name)
                for size in self.sizes
            ]
            for name, same_name in kernels.items()
        }
        predicted = predict_by_gain(
            found["model"], found["beside"], self.sizes, self.at, self.known
        )
        for name, accuracies in found.items():
            for size, accuracy in zip(self.sizes, accuracies, strict=True):
                yield {"kernel": name, "examples": size, "accuracy": accuracy}
        for n, p in zip(self.at, predicted, strict=True):
            yield {"kernel": "model", "examples": n, "predicted": p}

    def accuracy(
        self,
        kernel: Float[Tensor, "row column"],
        labels: Tensor,
        y: Float[Tensor, "row class"],
        size: int,
        seed: int,
    ) -> float:
        """Return the mean accuracy over random splits, or NaN if an output is not
        finite. All kernels use the same splits."""
        generator = stream("splits", seed, size)
        right = 0
        for _ in range(self.splits):
            order = torch.randperm(len(labels), generator=generator)
            train = order[:size]
            new = order[size:]
            coefficients = torch.linalg.solve(kernel[train[:, None], train], y[train])
            outputs = kernel[new[:, None], train] @ coefficients
            if not outputs.isfinite().all():
                return nan
            right += int((outputs.argmax(1) == labels[new]).sum())
        return right / (self.splits * (len(labels) - size))


def classical_kernels(
    x: Float[Tensor, "example feature"],
) -> dict[str, list[Float[Tensor, "example example"]]]:
    """Return the linear kernel, and Gaussian kernels of several widths
    (see `LearningCurve`)."""
    median = median_distance(x)
    widths = [median * factor for factor in (1 / 4, 1 / 2, 1, 2, 4)]
    return {
        "linear": [1 + x @ x.t() / x.shape[1]],
        "gaussian": [gaussian_kernel(x, x, width) for width in widths],
    }


def predict_by_gain(
    accuracies: Sequence[float],
    others: Sequence[float],
    sizes: Sequence[int],
    at: Sequence[int],
    known: Sequence[float],
) -> list[float]:
    """Predict the accuracies of a kernel at the sizes `at`, by comparison with another
    kernel (see `LearningCurve`).

    Args:
        accuracies: The accuracies of the kernel at `sizes`.
        others: The accuracies of the other kernel at `sizes`.
        sizes: The measured numbers of training examples.
        at: The numbers of training examples to predict for.
        known: The accuracies of the other kernel at `at`.

    >>> predicted = predict_by_gain([0.5, 0.7], [0.5, 0.5], [10, 100], [100, 10], [0.5, 0.25])
    >>> [round(accuracy, 12) for accuracy in predicted]
    [0.7, 0.25]
    """
    # Fit a and b in logit accuracy − logit other ≈ a + b ln n.
    first, second = torch.tensor([accuracies, others], dtype=torch.float64).logit()
    gains = (first - second)[:, None]
    coefficients = torch.linalg.lstsq(log_columns(sizes), gains).solution

    # logit predicted(n) = logit known(n) + a + b ln n
    known_logits = torch.tensor(known, dtype=torch.float64).logit()
    predicted_gains = (log_columns(at) @ coefficients)[:, 0]
    predicted = (known_logits + predicted_gains).sigmoid()
    return [float(accuracy) for accuracy in predicted]


def log_columns(sizes: Sequence[int]) -> Float[Tensor, "size two"]:
    """Return a matrix with a row (1, ln n) for each size n."""
    rows = [(1.0, log(size)) for size in sizes]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


class AccuracyByExamples(AbstractPicture):
    """Measured, predicted and published accuracies against the number
    of training examples.

    The picture shows a trial of `LearningCurve`. `names` maps `model` and `beside` to
    labels. Each entry of `numbers` gives its number of examples in `where`."""

    names: dict[str, str] = Field(min_length=1)

    @model_validator(mode="after")
    def refuse_nowhere(self) -> Self:
        if not all("examples" in one.where for one in self.numbers):
            raise Mistake(
                "picture.numbers: where: names no examples; give the number of examples of each"
            )
        return self

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.paper_figures import draw_accuracies  # noqa: PLC0415  loads matplotlib

        published = {int(one.where["examples"]): one.value for one in self.numbers}
        return draw_accuracies(
            judged.rows("examples", "kernel", "seed"),
            self.names,
            published,
            self.title(judged),
        )

    def title(self, judged: JudgedClaim) -> str:
        """Describe the predicted and the published accuracies."""
        parts = []
        for published in self.numbers:
            here = published.estimate(judged.table)
            parts.append(
                f"{percent(here.value)} ({percent(here.low)} to {percent(here.high)}) "
                f"with {published.where['examples']:,} examples, "
                f"published {percent(published.value)}"
            )
        kernel = next(iter(self.names.values())).capitalize()
        return f"{kernel}, the curve leads to {'; to '.join(parts)}"

    def here(self, judged: JudgedClaim) -> str:
        rows = judged.rows("examples", "kernel", "seed", "accuracy")
        means = rows.groupby(["kernel", "examples"])["accuracy"].mean()
        ends = rows["examples"].min(), rows["examples"].max()
        accuracies = []
        for kernel, name in self.names.items():
            words = [f"{percent(means[kernel, size])} with {size}" for size in ends]
            accuracies.append(f"{name} {listed(words)}")
        return (
            f"accuracies by the number of examples are {'; '.join(accuracies)}, "
            f"by {rows['seed'].nunique()} seeds; stars were published."
        )


class ScrambledPixels(AbstractSource):
    """Images whose pixels are permuted, with the same permutation in all images.

    This is a control for claims about convolutions: it preserves all information, but
    destroys the spatial neighbourhoods.

    >>> from ntkexp.data.images import Digits
    >>> plain = Digits(train=9).split().train.inputs
    >>> scrambled = ScrambledPixels(source=Digits(), train=9).split().train.inputs
    >>> torch.equal(plain, scrambled)
    False
    >>> torch.equal(plain.flatten().sort()[0], scrambled.flatten().sort()[0])
    True
    """

    source: AbstractSource
    standardise: Standardise = "all"

    def examples(self, generator: torch.Generator) -> Examples:
        examples = self.source.examples(generator)
        pixels = examples.inputs.flatten(2)
        order = torch.randperm(pixels.shape[2], generator=stream("pixels", 0))
        return replace(examples, inputs=pixels[:, :, order].view_as(examples.inputs))


def labelled(source: AbstractSource, seed: int) -> Data:
    """Return the data for a seed. Raise if the data have no classes."""
    data = source.split(seed)
    if not data.classes:
        raise Mistake(
            "trial.data: kernels classify, and the data has no classes; choose data=digits"
        )
    return data


INIT = NTK(W_std=sqrt(2), b_std=0.0)
FAMILIES = {"CNTK": False, "CNTK-GAP": True}
MOMENTUM = 0.9

Regressor = Literal["process", "kernel", "network"]
REGRESSORS: tuple[Regressor, ...] = ("process", "kernel", "network")


class ConvolutionalAccuracy(AbstractTrial):
    """The accuracy of convolutional networks and their kernels, by depth and pooling.

        regressor
        process      regression with the covariance (NNGP kernel) of the infinitely wide network
        kernel       regression with the tangent kernel of the infinitely wide network
        network      a network with `width` channels, f − f_0, trained with momentum

    Targets are one-hot minus 1/C, and the loss is squared. The columns `depth`,
    `family` (`CNTK`, or `CNTK-GAP` with global average pooling) and `regressor` label
    the rows. The seed draws images and weights.

    S. Arora et al., "On exact computation with an infinitely wide neural net" (2019),
    arXiv:1904.11955, table 1.
    """

    data: AbstractSource
    depths: tuple[Count, ...] = Field((3, 4, 6), min_length=1)
    width: Count = 16
    steps: Count = 200
    regressors: tuple[Regressor, ...] = Field(REGRESSORS, min_length=1)
    dtype: Literal["float64", "float32"] = "float32"
    """The precision of networks. Kernels are always computed in float64.

    Single precision suffices for accuracies,
    and makes convolutions four times as fast."""

    def rows(self, seed: int) -> Rows:
        data = labelled(self.data, seed)
        return [
            {
                "depth": depth,
                "family": family,
                "regressor": regressor,
                "accuracy": accuracy,
            }
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
        x = data.train.inputs
        new = data.test.inputs
        y = centred_one_hot(data.train.target, len(data.classes))
        layers = model.layers(INIT, tuple(x.shape[1:]), 1)
        among = infinite_kernel(layers, x, threads=1)
        across = infinite_kernel(layers, new, x, threads=1)

        # K(x, X) K(X, X)⁻¹ Y for both kernels
        outputs_by_name = {}
        for name, left, right in zip(("process", "kernel"), among, across, strict=True):
            if name in self.regressors:
                outputs_by_name[name] = right @ torch.linalg.solve(left, y)

        # The network, trained with η = 1/λ_max(Θ)
        if "network" in self.regressors:
            step_size = 1 / float(torch.linalg.eigvalsh(among[1])[-1])
            kind: torch.dtype = getattr(torch, self.dtype)
            shape = tuple(x.shape[1:])
            module = model.module(INIT, shape, y.shape[1], generator, data.vocabulary)
            module = module.eval().to(kind)
            outputs_by_name["network"] = train_outputs(
                module, x.to(kind), new.to(kind), y.to(kind), step_size, self.steps
            )
        for name, outputs in outputs_by_name.items():
            yield name, share_right(outputs, data.test.target)


def train_outputs(
    module: nn.Module,
    x: Float[Tensor, " train *shape"],
    new: Float[Tensor, " test *shape"],
    y: Float[Tensor, "train class"],
    step_size: float,
    steps: int,
) -> Float[Tensor, "test class"]:
    """Train a network f minus its initial outputs f_0, with the loss ½ Σ (f − f_0 −
    y)². Return f − f_0 at new points.

    >>> line, x = torch.nn.Linear(1, 1).double(), torch.ones(1, 1, dtype=torch.float64)
    >>> train_outputs(line, x, x, 3 * x, step_size=0.1, steps=300).round(decimals=6).item()
    3.0
    """
    with torch.no_grad():
        at_x = module(x)
        at_new = module(new)
    optimizer = torch.optim.SGD(module.parameters(), lr=step_size, momentum=MOMENTUM)
    for _ in range(steps):
        optimizer.zero_grad()
        missed = module(x) - at_x - y
        (missed.square().sum() / 2).backward()
        optimizer.step()
    with torch.no_grad():
        outputs: Tensor = module(new) - at_new
    return outputs


class OperationCount(DispatchMode):
    """Counts operations of matrix products, elementwise functions and reductions inside
    the block.

        matrix product         m k n for an m × k and a k × n matrix
        elementwise function   1 per number of the result
        reduction              1 per number of the input

    Other functions, such as `cat`, count as 0. Functions of `torch.linalg` whose number
    of operations is unknown raise.

    >>> matrix = torch.ones(3, 3)
    >>> with OperationCount() as count:
    ...     product = matrix @ matrix + matrix
    >>> count.operations
    36
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            self.operations += flops // 2  # a multiplication and an addition
        elif packet is torch.ops.aten.mv:
            self.operations += args[0].numel()
        elif torch.Tag.pointwise in func.tags:
            self.operations += result.numel()
        elif torch.Tag.reduction in func.tags:
            self.operations += args[0].numel()
        elif "linalg" in str(packet):
            raise Mistake(f"the operations of {packet} cannot be counted")
        return result


class KernelOperations(AbstractTrial):
    """The number of operations for kernels at infinite width, by the number n of
    Gaussian examples (see `OperationCount`).

        kernel_operations    compute the n × n kernel between two sets of examples
        solve_operations     solve a linear system with the n × n kernel, by elimination

    Numbers of operations are reproducible. Times are not: they depend on the other work
    of the machine, so their differences between seeds do not show how uncertain the
    power of n is. A few operations depend on the inputs, so the counts of seeds differ
    slightly.

    If `others` is given, the second set has this number of examples. If `products` is
    given, the system is solved by conjugate gradients with this number of products."""

    model: AbstractLayered
    init: AbstractInit
    shape: tuple[Count, ...] = (16,)
    sizes: tuple[Count, ...] = Field((250, 500, 1000), min_length=2)
    others: Count | None = None
    products: Count | None = None

    @property
    def draws(self) -> str:
        return "each drawing data"

    def rows(self, seed: int) -> Rows:
        generator = stream("trial", seed)
        layers = self.model.layers(self.init, self.shape, 1)
        for size in self.sizes:
            x, others = normal(generator, 2, size, *self.shape)
            others = others[: self.others]
            with OperationCount() as kernel:
                infinite_kernel(layers, x, others, engine="torch", threads=1)
            matrix = infinite_kernel(layers, x, engine="torch", threads=1)[1]
            # a ridge makes the matrix nonsingular
            matrix.diagonal().add_(matrix.diagonal().mean())
            with OperationCount() as solve:
                self.solve(matrix, torch.ones(size, 1).to(x))
            yield {
                "examples": size,
                "kernel_operations": kernel.operations,
                "solve_operations": solve.operations,
            }

    def solve(
        self, matrix: Float[Tensor, "n n"], right: Float[Tensor, "n 1"]
    ) -> Float[Tensor, "n 1"]:
        if self.products is None:
            return eliminate(matrix, right)
        return conjugate_gradients(
            partial(torch.mm, matrix), matrix.diagonal(), right, 0.0, self.products
        ).solution


def eliminate(
    matrix: Float[Tensor, "n n"], right: Float[Tensor, "n 1"]
) -> Float[Tensor, "n 1"]:
    """Solve a linear system with a symmetric positive definite matrix
    by Gaussian elimination.

    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> eliminate(matrix, torch.tensor([[3.0], [4.0]])).tolist()
    [[1.0], [1.0]]
    """
    matrix = matrix.clone()
    right = right.clone()
    for k in range(len(matrix)):
        # subtract multiples of row k from the rows below
        factors = matrix[k + 1 :, k, None] / matrix[k, k]
        matrix[k + 1 :, k + 1 :] -= factors * matrix[k, k + 1 :]
        right[k + 1 :] -= factors * right[k]
    for k in reversed(range(len(matrix))):
        known = (matrix[k, k + 1 :, None] * right[k + 1 :]).sum(0)
        right[k] = (right[k] - known) / matrix[k, k]
    return right


ACCURACY_COLUMNS = ("depth", "family", "regressor", "accuracy", "seed")


class AccuracyTable(AbstractPicture):
    """A table of accuracies by depth, next to the accuracies in the paper.

    The table shows a trial of `ConvolutionalAccuracy`. `per_cent` holds the paper's
    accuracies by family and depth: S. Arora et al., "On exact computation with an
    infinitely wide neural net" (2019), arXiv:1904.11955, table 1."""

    per_cent: dict[str, dict[Count, float]]
    numbers: tuple[()] = ()
    """Not used. `per_cent` replaces it."""

    def figure(self, judged: JudgedClaim) -> Figure:
        return JudgedRows().figure(judged)

    def table(self, judged: JudgedClaim) -> pd.DataFrame:
        ours = accuracies(judged)
        depths = sorted(
            {depth for depth, *_ in ours}
            | {depth for paper in self.per_cent.values() for depth in paper}
        )
        columns: dict[str, list[float | None]] = {"depth": [*depths]}
        for family in dict.fromkeys(family for _, family, _ in ours):
            for name in REGRESSORS:
                columns[f"{family} {name}, %"] = [
                    ours.get((depth, family, name)) for depth in depths
                ]
            if family in self.per_cent:
                columns[f"{family} paper, %"] = [
                    self.per_cent[family].get(depth) for depth in depths
                ]
        return pd.DataFrame(columns)

    def here(self, judged: JudgedClaim) -> str:
        ours = accuracies(judged)
        seeds = judged.rows(*ACCURACY_COLUMNS)["seed"].nunique()
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
            f"{ours[depth, pooled, 'kernel'] - value:.1f} points at depth {depth}".replace(
                "-", "−"
            )
            for (depth, family, name), value in ours.items()
            if (family, name) == (plain, "kernel")
        ]
        return (
            "on the data of the claim, pooling changes the accuracy of the kernel by "
            f"{listed(gains)}; "
            f"the mean accuracies over all depths and families are {listed(means_in_words)}, "
            f"by {seeds} seeds."
        )


def accuracies(judged: JudgedClaim) -> dict[tuple[int, str, str], float]:
    """Return the mean accuracy over seeds, in per cent, for each depth,
    family and regressor."""
    rows = judged.rows(*ACCURACY_COLUMNS).astype({"depth": int})
    cells = rows.groupby(["depth", "family", "regressor"], sort=False)
    means = (100 * cells["accuracy"].mean()).round(1)
    return dict(zip(means.index, means, strict=True))
