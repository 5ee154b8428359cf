"""Layers, as modules of finite width and as steps of the kernel recursion
of infinite width.

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
    from ntkexp.layer.affine import AbstractAffine as AbstractAffine
    from ntkexp.layer.affine import AbstractTapped as AbstractTapped
    from ntkexp.layer.affine import Conv as Conv
    from ntkexp.layer.affine import ConvTranspose as ConvTranspose
    from ntkexp.layer.affine import Dense as Dense
    from ntkexp.layer.affine import PaddedConv as PaddedConv
    from ntkexp.layer.attention import SelfAttention as SelfAttention
    from ntkexp.layer.base import AbstractLayer as AbstractLayer
    from ntkexp.layer.base import Concatenation as Concatenation
    from ntkexp.layer.base import Residual as Residual
    from ntkexp.layer.linear import AbstractNorm as AbstractNorm
    from ntkexp.layer.linear import AbstractPool as AbstractPool
    from ntkexp.layer.linear import AvgPool as AvgPool
    from ntkexp.layer.linear import BatchNorm as BatchNorm
    from ntkexp.layer.linear import Dropout as Dropout
    from ntkexp.layer.linear import Flatten as Flatten
    from ntkexp.layer.linear import GlobalAvgPool as GlobalAvgPool
    from ntkexp.layer.linear import GroupNorm as GroupNorm
    from ntkexp.layer.linear import LayerNorm as LayerNorm
    from ntkexp.layer.linear import MaxPool as MaxPool
    from ntkexp.layer.pointwise import GELU as GELU
    from ntkexp.layer.pointwise import Abs as Abs
    from ntkexp.layer.pointwise import AbstractBent as AbstractBent
    from ntkexp.layer.pointwise import AbstractEntire as AbstractEntire
    from ntkexp.layer.pointwise import AbstractPointwise as AbstractPointwise
    from ntkexp.layer.pointwise import AbstractWave as AbstractWave
    from ntkexp.layer.pointwise import Cos as Cos
    from ntkexp.layer.pointwise import Erf as Erf
    from ntkexp.layer.pointwise import LeakyReLU as LeakyReLU
    from ntkexp.layer.pointwise import Linear as Linear
    from ntkexp.layer.pointwise import ReLU as ReLU
    from ntkexp.layer.pointwise import Sin as Sin
    from ntkexp.layer.smooth import AbstractSmooth as AbstractSmooth
    from ntkexp.layer.smooth import Generic as Generic
    from ntkexp.layer.smooth import Hermite as Hermite
    from ntkexp.layer.smooth import Polynomial as Polynomial
    from ntkexp.layer.smooth import SiLU as SiLU
    from ntkexp.layer.smooth import Tanh as Tanh
else:
    __getattr__ = classes_of(__name__)
