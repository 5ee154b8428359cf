"""How the step size changes along a run: η_s = η · factor(s)."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field

from ntkexp.component import LONGEST, Component


class AbstractSchedule(Component):
    """A factor for every step, after a linear warm-up over the first `warm_up` steps."""

    warm_up: int = Field(0, ge=0, le=LONGEST)

    @abstractmethod
    def shape(self, step: int, steps: int) -> float:
        """The factor without the warm-up."""

    def factor(self, step: int, steps: int) -> float:
        """What the step size is multiplied with at this step."""
        return min(1.0, (step + 1) / (self.warm_up + 1)) * self.shape(step, steps)
