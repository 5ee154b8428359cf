"""What of runs a claim speaks of: a function of their table, which gives each row a number."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.quantity.base import AbstractQuantity as AbstractQuantity
    from ntkexp.claim.quantity.base import Column as Column
    from ntkexp.claim.quantity.base import Columns as Columns
    from ntkexp.claim.quantity.base import Crossing as Crossing
    from ntkexp.claim.quantity.base import Together as Together
    from ntkexp.claim.quantity.runs import LaterTask as LaterTask
    from ntkexp.claim.quantity.runs import MachineError as MachineError
    from ntkexp.claim.quantity.runs import PathFact as PathFact
    from ntkexp.claim.quantity.runs import StoredExamples as StoredExamples
    from ntkexp.claim.quantity.runs import SymmetryDefect as SymmetryDefect
    from ntkexp.claim.quantity.runs import WeightRank as WeightRank
    from ntkexp.claim.quantity.time_share import TimeShare as TimeShare
else:
    __getattr__ = classes_of(__name__)
