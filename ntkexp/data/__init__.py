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
    from ntkexp.data.base import AbstractSource as AbstractSource, Examples as Examples
    from ntkexp.data.images import (
        CIFAR10 as CIFAR10,
        MNIST as MNIST,
        AbstractImages as AbstractImages,
        Clothes as Clothes,
        Digits as Digits,
        FashionMnist as FashionMnist,
    )
    from ntkexp.data.sequence import (
        AbstractTokens as AbstractTokens,
        ModularAddition as ModularAddition,
        Sequence as Sequence,
        Text as Text,
    )
    from ntkexp.data.synthetic import (
        AbstractSynthetic as AbstractSynthetic,
        Circle as Circle,
        Cued as Cued,
        Integers as Integers,
        Moons as Moons,
        Parity as Parity,
        Sphere as Sphere,
        Teacher as Teacher,
    )
    from ntkexp.data.table import (
        BreastCancer as BreastCancer,
        Diabetes as Diabetes,
        Table as Table,
        Wine as Wine,
    )
else:
    __getattr__ = classes_of(__name__)
