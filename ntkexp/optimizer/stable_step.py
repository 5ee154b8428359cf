"""A step size that may be given as a fraction of the largest stable one."""

from __future__ import annotations

from pydantic import PositiveFloat, model_validator

from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractOptimizer


class AbstractStable(AbstractOptimizer):
    """A step size, given outright or as a fraction of the largest one at which gradient descent is stable at the
    start; half of it by default.
    """

    step_size: PositiveFloat | None = None
    stable_fraction: PositiveFloat | None = None

    @model_validator(mode="after")
    def refuse_both(self) -> AbstractStable:
        """One step cannot have two sizes."""
        if self.step_size is not None and self.stable_fraction is not None:
            raise Mistake(
                f"optimizer.step_size={self.step_size:g} optimizer.stable_fraction={self.stable_fraction:g}: both set "
                "the step size; give one of them"
            )
        return self

    def chosen_step(self, largest_stable: float) -> float:
        return self.step_size or (self.stable_fraction or 0.5) * largest_stable
