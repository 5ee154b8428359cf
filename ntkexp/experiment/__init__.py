"""An experiment as a value, its identity, and its network at infinite width."""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.experiment.experiment import Experiment as Experiment
else:
    __getattr__ = classes_of(__name__)
