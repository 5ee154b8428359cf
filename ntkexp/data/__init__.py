"""Data: sources of examples, and their splits.

Each module imports only from the modules listed before it:

    base        examples, splits, and the abstract source
    synthetic   generated data
    arrays      a user's arrays
    table       a user's table, and small data sets in the package
    images      sets of labelled images
    sequence    sentences of tokens, and tasks one after another
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.data.arrays import Arrays as Arrays
    from ntkexp.data.base import AbstractSource as AbstractSource
    from ntkexp.data.base import Examples as Examples
    from ntkexp.data.images import CIFAR10 as CIFAR10
    from ntkexp.data.images import MNIST as MNIST
    from ntkexp.data.images import AbstractImages as AbstractImages
    from ntkexp.data.images import Clothes as Clothes
    from ntkexp.data.images import Digits as Digits
    from ntkexp.data.images import FashionMnist as FashionMnist
    from ntkexp.data.sequence import AbstractTokens as AbstractTokens
    from ntkexp.data.sequence import ModularAddition as ModularAddition
    from ntkexp.data.sequence import Sequence as Sequence
    from ntkexp.data.sequence import Text as Text
    from ntkexp.data.synthetic import AbstractSynthetic as AbstractSynthetic
    from ntkexp.data.synthetic import Circle as Circle
    from ntkexp.data.synthetic import Cued as Cued
    from ntkexp.data.synthetic import Integers as Integers
    from ntkexp.data.synthetic import Moons as Moons
    from ntkexp.data.synthetic import Parity as Parity
    from ntkexp.data.synthetic import Sphere as Sphere
    from ntkexp.data.synthetic import Teacher as Teacher
    from ntkexp.data.table import BreastCancer as BreastCancer
    from ntkexp.data.table import Diabetes as Diabetes
    from ntkexp.data.table import Table as Table
    from ntkexp.data.table import Wine as Wine
else:
    __getattr__ = classes_of(__name__)
