"""What makes a filler, as plain data: on whichever machine, the same kernel comes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ntkexp.data.base import Data
from ntkexp.experiment.experiment import Experiment
from ntkexp.kernel_file.fill.filler import AbstractFiller


class AbstractRecipe(ABC):
    """A recipe is a frozen dataclass that can be pickled."""

    @abstractmethod
    def filler(self, experiment: Experiment, data: Data, workers: int) -> AbstractFiller:
        """Make the filler; so many of its tiles may be computed at once in this process."""
