"""What of runs a claim speaks of: a function of their table, which gives each row a number."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.quantity.base import AbstractQuantity as AbstractQuantity
    from ntkexp.claim.quantity.base import Column as Column
    from ntkexp.claim.quantity.base import Columns as Columns
    from ntkexp.claim.quantity.base import Crossing as Crossing
    from ntkexp.claim.quantity.base import Together as Together
else:
    __getattr__ = classes_of(__name__)
