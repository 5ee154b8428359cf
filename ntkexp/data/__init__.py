"""What is learned: sources of examples, and how they are split."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.data.base import AbstractSource as AbstractSource
    from ntkexp.data.base import Examples as Examples
    from ntkexp.data.breast_cancer import BreastCancer as BreastCancer
    from ntkexp.data.cifar10 import CIFAR10 as CIFAR10
    from ntkexp.data.circle import Circle as Circle
    from ntkexp.data.cued import Cued as Cued
    from ntkexp.data.diabetes import Diabetes as Diabetes
    from ntkexp.data.digits import Digits as Digits
    from ntkexp.data.fashion_mnist import FashionMnist as FashionMnist
    from ntkexp.data.images import AbstractImages as AbstractImages
    from ntkexp.data.integers import Integers as Integers
    from ntkexp.data.mnist import MNIST as MNIST
    from ntkexp.data.modular_addition import ModularAddition as ModularAddition
    from ntkexp.data.moons import Moons as Moons
    from ntkexp.data.parity import Parity as Parity
    from ntkexp.data.sequence import Sequence as Sequence
    from ntkexp.data.sphere import Sphere as Sphere
    from ntkexp.data.synthetic import AbstractSynthetic as AbstractSynthetic
    from ntkexp.data.table import Table as Table
    from ntkexp.data.teacher import Teacher as Teacher
    from ntkexp.data.text import Text as Text
    from ntkexp.data.tokens import AbstractTokens as AbstractTokens
    from ntkexp.data.wine import Wine as Wine
else:
    __getattr__ = classes_of(__name__)
