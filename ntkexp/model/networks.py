"""Dense and convolutional networks, linear models, radial basis functions,
and lists of layers."""

from __future__ import annotations

from math import prod, sqrt
from typing import Annotated, Literal, Self

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from ntkexp.component import MAX_COUNT, MAX_DEPTH, Count, CountOrNone, Depth
from ntkexp.init import AbstractInit
from ntkexp.layer.affine import AbstractAffine, Conv, Dense
from ntkexp.layer.base import AbstractLayer, LayerChain, Residual
from ntkexp.layer.linear import Flatten, GlobalAvgPool, Norm, Pooling
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.spec import Activation, at_width, parse_layers
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture, AbstractLayered, LearningTask
from ntkexp.shapes import Shape
from ntkexp.stream import normal


class MLP(AbstractLayered):
    """The multilayer perceptron.

    It has `depth` hidden layers of `width` units, and a linear readout.

    >>> from ntkexp.init import NTK
    >>> network = MLP(width=4, depth=1).layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=2)
    >>> [type(layer).__name__ for layer in network]
    ['Flatten', 'Dense', 'ReLU', 'Dense']
    """

    depth: int = Field(2, ge=0, le=MAX_DEPTH)
    activation: Activation = ReLU()

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        hidden = (init.dense(self.width), self.activation) * self.depth
        return (Flatten(), *hidden, init.readout(outputs))


class DeepLinear(AbstractLayered):
    """Deep linear networks: linear in the inputs but not in the weights,
    so their kernel changes.

    They have `depth` hidden layers of `width` units without activations.

    >>> from ntkexp.init import NTK
    >>> network = DeepLinear(width=4, depth=2).layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=1)
    >>> [type(layer).__name__ for layer in network]
    ['Flatten', 'Dense', 'Dense', 'Dense']
    """

    depth: int = Field(2, ge=0, le=MAX_DEPTH)

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        return (
            Flatten(),
            *(init.dense(self.width),) * self.depth,
            init.readout(outputs),
        )


class Linear(AbstractLayered):
    """The linear model f = W x + b, whose tangent kernel is constant.

    It has one affine layer; `width` has no effect.

    >>> from ntkexp.init import NTK
    >>> network = Linear().layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=2)
    >>> [type(layer).__name__ for layer in network]
    ['Flatten', 'Dense']
    """

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        return (Flatten(), init.readout(outputs))


DEFAULT_SPEC = (
    Flatten(),
    Dense(features=64, W_std=1.5),
    Residual(branch=(ReLU(), Dense(features=64, W_std=1.5))),
    ReLU(),
    Dense(features=1),
)


class Layers(AbstractLayered):
    """A list of layers, in the format of `ntkexp.infinite_kernel`.

    The layers of `spec` are scaled so that the widest hidden layer has `width`
    features. The last layer gets one feature per output. The layers set their scales
    and parametrisation; only the form of the output is taken from `init`.

    >>> from ntkexp.init import NTK
    >>> network = Layers(width=8).layers(NTK(W_std=1, b_std=0), shape=(3,), outputs=2)
    >>> network[-1]
    Dense(features=2, W_std=1.0, b_std=0.0, param='ntk', frozen=False)
    """

    width: Count = 64
    spec: Annotated[LayerChain, BeforeValidator(parse_layers)] = DEFAULT_SPEC

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        if not self.spec or not isinstance(self.spec[-1], AbstractAffine):
            raise Mistake(
                "model.spec ends without a readout; let its last layer be Dense"
            )
        *hidden, readout = at_width(self.spec, self.width)
        return (*hidden, readout.model_copy(update={"features": outputs}))


class UCINtk(AbstractLayered):
    """The networks of Arora et al. 2020 (arXiv:1910.01663),
    whose kernel performs well on small tables.

    The network has `depth` ReLU layers without biases. The first `fixed` layers are not
    trained. The scales and the parametrisation are those of the paper. W_std² is the
    number of inputs in the first layer, so this layer does not scale its inputs. In the
    other layers, W_std² is 1. Only the form of the output is taken from `init`.

    >>> from ntkexp.init import NTK
    >>> network = UCINtk(depth=2, fixed=1).layers(NTK(W_std=1, b_std=0), shape=(4,), outputs=2)
    >>> [(layer.W_std, layer.frozen) for layer in network if isinstance(layer, Dense)]
    [(2.0, True), (1.0, False), (1.0, False)]
    """

    depth: Depth = 3
    fixed: CountOrNone = 0

    @model_validator(mode="after")
    def refuse_untrained(self) -> Self:
        if self.fixed > self.depth:
            raise Mistake(
                f"model.fixed={self.fixed}: there are {self.depth} hidden layers; it takes at most "
                "that many"
            )
        return self

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        scales = [sqrt(prod(shape)), *[1.0] * (self.depth - 1)]
        hidden: list[AbstractLayer] = []
        for k, scale in enumerate(scales):
            hidden += (
                Dense(features=self.width, W_std=scale, frozen=k < self.fixed),
                ReLU(),
            )
        return (Flatten(), *hidden, Dense(features=outputs))


class RBFNetwork(AbstractArchitecture):
    """Networks of radial basis functions: `width` Gaussian units and a linear readout.

    Training also changes the centre and the width of each unit.

        f(x) = readout of φ_j(x) = exp(−½ ‖z_j‖²),    j = 1 … width,    x ∈ ℝᵈ

        ntk, mean_field    z_j = W_std/√d · w_j (x − c_j)    w_j = 1 at the start
        standard           z_j = w_j (x − c_j)               w_j = W_std/√d at the start

    1/w_j is proportional to the width of a unit. The centres c_j ~ N(0, 1) are
    distributed like standardised inputs (Broomhead & Lowe 1988).

    >>> units = Gaussians(torch.zeros(1, 2), torch.ones(1), gain=1.0)
    >>> units(torch.tensor([[1.0, 1.0]])).item() == float(torch.tensor(-1.0).exp())
    True
    """

    width: Count = 128

    def network(
        self, init: AbstractInit, task: LearningTask, generator: torch.Generator
    ) -> nn.Module:
        task.refuse_tokens(self.option)
        inputs = prod(task.shape)
        centres = normal(generator, self.width, inputs)
        inverse_widths = torch.ones(self.width, dtype=torch.float64)
        scale = init.W_std / sqrt(inputs)
        if init.param == "standard":
            units = Gaussians(centres, scale * inverse_widths, 1.0)
        else:
            units = Gaussians(centres, inverse_widths, scale)
        readout = init.readout(task.outputs).build((self.width,), generator)
        return nn.Sequential(nn.Flatten(), units, readout)


class Gaussians(nn.Module):
    """φ_j(x) = exp(−½ (gain · w_j ‖x − c_j‖)²)."""

    def __init__(
        self,
        centre: Float[Tensor, "unit input"],
        inverse: Float[Tensor, " unit"],
        gain: float,
    ) -> None:
        super().__init__()
        self.centre = nn.Parameter(centre)
        self.inverse = nn.Parameter(inverse)
        self.gain = gain

    def forward(
        self, x: Float[Tensor, "example input"]
    ) -> Float[Tensor, "example unit"]:
        # ‖x − c‖² = ‖x‖² − 2 x·c + ‖c‖², without an array of examples × units × inputs
        products = torch.mm(x, self.centre.t())
        distances = (
            x.square().sum(1, keepdim=True) - 2 * products + self.centre.square().sum(1)
        )
        return torch.exp(-(self.gain**2) / 2 * (self.inverse.square() * distances))


class CNN(AbstractLayered):
    """Convolutional networks for images of one to three dimensions.

    They have `depth` convolutions of `width` channels. An activation follows each
    convolution, and pooling follows the first activation.

    >>> from ntkexp.init import NTK
    >>> cnn = CNN(width=4, depth=1, pooling="max")
    >>> network = cnn.layers(NTK(W_std=1, b_std=0), shape=(1, 8, 8), outputs=2)
    >>> [type(layer).__name__ for layer in network]
    ['Conv', 'ReLU', 'MaxPool', 'Flatten', 'Dense']
    """

    width: Count = 64
    depth: Depth = 2
    kernel: Depth = 3
    stride: Depth = 1
    padding: Literal["zero", "circular"] = "zero"
    activation: Activation = ReLU()
    pooling: Pooling = None
    head: Literal["flatten", "average"] = "flatten"

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        if len(shape) < 2:
            raise Mistake(
                f"model=cnn takes images, and the data has examples of shape {list(shape)}; "
                "choose model=mlp"
            )
        convolution = init.conv(
            self.width, self.kernel, self.stride, self.padding == "circular"
        )
        pooling = () if self.pooling is None else (self.pooling,)
        rest = (convolution, self.activation) * (self.depth - 1)
        head = (Flatten(),) if self.head == "flatten" else (GlobalAvgPool(),)
        return (
            convolution,
            self.activation,
            *pooling,
            *rest,
            *head,
            init.readout(outputs),
        )


class CNTK(AbstractLayered):
    """The convolutional networks of Arora et al. 2019 (arXiv:1904.11955),
    whose kernel is the CNTK.

    `depth` counts the convolutions and the readout. Windows are 3 × 3 with zero
    padding, and there are no biases. Only the form of the output is taken from `init`.
    The scales and the NTK parametrisation are those of the paper:

        W_std² = 9 · channels in the first convolution, 2 in the others,
                 2/9 in the readout (2/9 · pixels without pooling).

    If `fixed`, the first convolution and the readout are not trained.

    >>> from ntkexp.init import NTK
    >>> cntk = CNTK(depth=3, pooling=True)
    >>> network = cntk.layers(NTK(W_std=1, b_std=0), shape=(1, 8, 8), outputs=2)
    >>> [type(layer).__name__ for layer in network]
    ['Conv', 'ReLU', 'Conv', 'ReLU', 'GlobalAvgPool', 'Dense']
    """

    width: Count = 64
    depth: int = Field(4, ge=2, le=MAX_DEPTH)
    pooling: bool = False
    fixed: bool = False

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        if len(shape) != 3:
            raise Mistake(
                f"model=cntk takes images, and the data has examples of shape {list(shape)}; "
                "choose model=uci_ntk"
            )
        channels = shape[0]
        pixels = prod(shape[1:])
        first = Conv(features=self.width, W_std=sqrt(9 * channels), frozen=self.fixed)
        other = Conv(features=self.width, W_std=sqrt(2))
        head = GlobalAvgPool() if self.pooling else Flatten()
        scale = sqrt(2 / 9 * (1 if self.pooling else pixels))
        rest = (other, ReLU()) * (self.depth - 2)
        return (
            first,
            ReLU(),
            *rest,
            head,
            Dense(features=outputs, W_std=scale, frozen=self.fixed),
        )


class Resnet(AbstractLayered):
    """Residual networks for small images with pre-activation (He, Zhang,
    Ren & Sun 2016).

    The network has `stages` stages of `blocks` residual blocks. Each stage after the
    first halves the sides of the image and doubles the channels.

        x + conv(σ(norm(conv(σ(norm(x))))))

    >>> from ntkexp.init import NTK
    >>> resnet = Resnet(width=4, stages=2)
    >>> network = resnet.layers(NTK(W_std=1, b_std=0), shape=(1, 8, 8), outputs=2)
    >>> [type(layer).__name__ for layer in network]
    ['Conv', 'Residual', 'Residual', 'ReLU', 'GlobalAvgPool', 'Dense']
    """

    width: Count = 32
    stages: int = Field(3, ge=1, le=16)
    blocks: Depth = 1
    norm: Norm = None
    activation: Activation = ReLU()

    @model_validator(mode="after")
    def refuse_too_wide(self) -> Self:
        if self.width * 2 ** (self.stages - 1) > MAX_COUNT:
            raise Mistake(
                f"model.stages={self.stages}: from model.width={self.width} channels double at "
                f"every stage, to more than {MAX_COUNT}; lower one of the two"
            )
        return self

    def layers(self, init: AbstractInit, shape: Shape, outputs: int) -> LayerChain:
        if len(shape) < 2:
            raise Mistake(
                f"model=resnet takes images, and the data has examples of shape {list(shape)}; "
                "choose model=mlp"
            )
        blocks = []
        for stage in range(self.stages):
            for block in range(self.blocks):
                starts_stage = stage > 0 and block == 0
                stride = 2 if starts_stage else 1
                blocks.append(self.block(init, self.width * 2**stage, stride))
        first = init.conv(self.width, 3)
        return (
            first,
            *blocks,
            *self.pre_activation(),
            GlobalAvgPool(),
            init.readout(outputs),
        )

    def block(self, init: AbstractInit, channels: int, stride: int) -> Residual:
        """Return two convolutions with a shortcut. If the shape changes, the shortcut
        is a 1 × 1 convolution."""
        first = init.conv(channels, 3, stride)
        second = init.conv(channels, 3)
        shortcut = () if stride == 1 else (init.conv(channels, 1, stride),)
        return Residual(
            branch=(*self.pre_activation(), first, *self.pre_activation(), second),
            shortcut=shortcut,
        )

    def pre_activation(self) -> LayerChain:
        """Return the norm, if any, and the activation,
        which precede each convolution."""
        return (self.activation,) if self.norm is None else (self.norm, self.activation)
