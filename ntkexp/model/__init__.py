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
    from ntkexp.model.base import (
        AbstractArchitecture as AbstractArchitecture,
        AbstractLayered as AbstractLayered,
    )
    from ntkexp.model.libraries import (
        Huggingface as Huggingface,
        Module as Module,
        Timm as Timm,
    )
    from ntkexp.model.networks import (
        CNN as CNN,
        CNTK as CNTK,
        MLP as MLP,
        DeepLinear as DeepLinear,
        Layers as Layers,
        Linear as Linear,
        RBFNetwork as RBFNetwork,
        Resnet as Resnet,
        UCINtk as UCINtk,
    )
    from ntkexp.model.scalar import (
        AbstractScalar as AbstractScalar,
        LookupTable as LookupTable,
        RadialBasis as RadialBasis,
        ReparametrisedLinear as ReparametrisedLinear,
        ScalarLinear as ScalarLinear,
    )
    from ntkexp.model.transformer import Transformer as Transformer
else:
    __getattr__ = classes_of(__name__)
