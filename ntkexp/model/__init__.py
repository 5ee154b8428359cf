"""Architectures, from which networks of any width are built.

Each module imports only from the modules listed before it:

    packed        recurrent layers on packed sequences, in the transforms of torch.func
    functional    a module as a function of its weights
    base          architectures, learning tasks and forms of the output
    networks      dense and convolutional networks, and lists of layers
    scalar        scalar functions of a scalar
    transformer   transformer encoders
    foreign       checks of modules from other sources
    user_function a function in a user's file
    libraries     a user's module, and models of timm and transformers
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.model.base import AbstractArchitecture as AbstractArchitecture
    from ntkexp.model.base import AbstractLayered as AbstractLayered
    from ntkexp.model.libraries import Huggingface as Huggingface
    from ntkexp.model.libraries import Module as Module
    from ntkexp.model.libraries import Timm as Timm
    from ntkexp.model.networks import CNN as CNN
    from ntkexp.model.networks import CNTK as CNTK
    from ntkexp.model.networks import MLP as MLP
    from ntkexp.model.networks import DeepLinear as DeepLinear
    from ntkexp.model.networks import Layers as Layers
    from ntkexp.model.networks import Linear as Linear
    from ntkexp.model.networks import RBFNetwork as RBFNetwork
    from ntkexp.model.networks import Resnet as Resnet
    from ntkexp.model.networks import UCINtk as UCINtk
    from ntkexp.model.scalar import AbstractScalar as AbstractScalar
    from ntkexp.model.scalar import LookupTable as LookupTable
    from ntkexp.model.scalar import RadialBasis as RadialBasis
    from ntkexp.model.scalar import ReparametrisedLinear as ReparametrisedLinear
    from ntkexp.model.scalar import ScalarLinear as ScalarLinear
    from ntkexp.model.transformer import Transformer as Transformer
else:
    __getattr__ = classes_of(__name__)
