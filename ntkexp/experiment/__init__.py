"""An experiment as a value, its identity, and its data and network. In reading order: `experiment`, `identity`,
`problem`.
"""

from typing import TYPE_CHECKING

from ntkexp.naming import classes_of

if TYPE_CHECKING:
    from ntkexp.experiment.experiment import Experiment as Experiment
else:
    __getattr__ = classes_of(__name__)
