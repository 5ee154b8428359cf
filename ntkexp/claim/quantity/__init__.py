"""What of runs a claim speaks of: a function of their table, which gives each row a number."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.quantity.base import AbstractQuantity as AbstractQuantity
    from ntkexp.claim.quantity.column import Column as Column
    from ntkexp.claim.quantity.columns import Columns as Columns
    from ntkexp.claim.quantity.crossing import Crossing as Crossing
    from ntkexp.claim.quantity.later_task import LaterTask as LaterTask
    from ntkexp.claim.quantity.machine_error import MachineError as MachineError
    from ntkexp.claim.quantity.path_fact import PathFact as PathFact
    from ntkexp.claim.quantity.stored_examples import StoredExamples as StoredExamples
    from ntkexp.claim.quantity.symmetry_defect import SymmetryDefect as SymmetryDefect
    from ntkexp.claim.quantity.time_share import TimeShare as TimeShare
    from ntkexp.claim.quantity.together import Together as Together
    from ntkexp.claim.quantity.weight_rank import WeightRank as WeightRank
else:
    __getattr__ = classes_of(__name__)
