"""What is trained: architectures, from which networks of any width are built."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.model.base import AbstractArchitecture as AbstractArchitecture
    from ntkexp.model.base import AbstractLayered as AbstractLayered
    from ntkexp.model.cnn import CNN as CNN
    from ntkexp.model.cntk import CNTK as CNTK
    from ntkexp.model.deep_linear import DeepLinear as DeepLinear
    from ntkexp.model.huggingface import Huggingface as Huggingface
    from ntkexp.model.layers import Layers as Layers
    from ntkexp.model.linear import Linear as Linear
    from ntkexp.model.lookup_table import LookupTable as LookupTable
    from ntkexp.model.mlp import MLP as MLP
    from ntkexp.model.module import Module as Module
    from ntkexp.model.radial_basis import RadialBasis as RadialBasis
    from ntkexp.model.rbf_network import RBFNetwork as RBFNetwork
    from ntkexp.model.reparametrised_linear import ReparametrisedLinear as ReparametrisedLinear
    from ntkexp.model.resnet import Resnet as Resnet
    from ntkexp.model.scalar import AbstractScalar as AbstractScalar
    from ntkexp.model.scalar_linear import ScalarLinear as ScalarLinear
    from ntkexp.model.timm import Timm as Timm
    from ntkexp.model.transformer import Transformer as Transformer
    from ntkexp.model.uci_ntk import UCINtk as UCINtk
else:
    __getattr__ = classes_of(__name__)
