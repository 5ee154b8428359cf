"""How the step size changes: its factor at every step."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.schedule.base import AbstractSchedule as AbstractSchedule
    from ntkexp.schedule.base import Constant as Constant
    from ntkexp.schedule.base import Cosine as Cosine
    from ntkexp.schedule.base import List as List
    from ntkexp.schedule.base import Step as Step
else:
    __getattr__ = classes_of(__name__)
