"""Layers of networks. A layer builds a torch module of finite width, and transforms the
kernels of infinite width.

Each module imports only from the modules listed before it:

    base         the interface of layers, chains, residual layers and concatenations
    affine       dense layers and convolutions
    linear       flattening, dropout, pooling and norms
    pointwise    activations with elementary kernels
    attention    self-attention
    smooth       other smooth activations, by series
    spec         layers as plain data, and the list of all layers
    sequential   an `nn.Sequential` as layers
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.layer.affine import (
        AbstractAffine as AbstractAffine,
        AbstractTapped as AbstractTapped,
        Conv as Conv,
        ConvTranspose as ConvTranspose,
        Dense as Dense,
        PaddedConv as PaddedConv,
    )
    from ntkexp.layer.attention import SelfAttention as SelfAttention
    from ntkexp.layer.base import (
        AbstractBranching as AbstractBranching,
        AbstractLayer as AbstractLayer,
        Concatenation as Concatenation,
        Residual as Residual,
    )
    from ntkexp.layer.linear import (
        AbstractNorm as AbstractNorm,
        AbstractPool as AbstractPool,
        AvgPool as AvgPool,
        BatchNorm as BatchNorm,
        Dropout as Dropout,
        Flatten as Flatten,
        GlobalAvgPool as GlobalAvgPool,
        GroupNorm as GroupNorm,
        LayerNorm as LayerNorm,
        MaxPool as MaxPool,
    )
    from ntkexp.layer.pointwise import (
        GELU as GELU,
        Abs as Abs,
        AbstractBent as AbstractBent,
        AbstractEntire as AbstractEntire,
        AbstractPointwise as AbstractPointwise,
        AbstractWave as AbstractWave,
        Cos as Cos,
        Erf as Erf,
        LeakyReLU as LeakyReLU,
        Linear as Linear,
        ReLU as ReLU,
        Sin as Sin,
    )
    from ntkexp.layer.smooth import (
        AbstractSmooth as AbstractSmooth,
        Generic as Generic,
        Hermite as Hermite,
        Polynomial as Polynomial,
        SiLU as SiLU,
        Tanh as Tanh,
    )
else:
    __getattr__ = classes_of(__name__)
