"""Why a run ends, and what to try where it diverged."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.optimizer.stable_step import AbstractStable
from ntkexp.run.setting import Setting
from ntkexp.text import counted

BLOWN_UP = 1e6  # times the first loss: far beyond what a run that converges passes through


@dataclass(frozen=True)
class Ending:
    """The reason in words, and whether it is that the run diverged."""

    sentence: str
    diverged: bool = False


def ending_before(setting: Setting, loss: float, first: float, step: int) -> Ending | None:
    """Why the run ends before this step, if it does."""
    target = setting.experiment.stop_at_loss
    if target is not None and loss <= target:
        return Ending(f"{count(step)}, to a loss of {loss:.3g}")
    if isfinite(loss) and loss <= BLOWN_UP * (first + 1):
        return None
    said = advice(setting.experiment.optimizer, setting.descent.step_size, setting.start.largest_stable_step)
    return Ending(f"diverged at step {step}{said}", diverged=True)


def count(steps: int) -> str:
    """A number of steps in words.

    >>> count(1), count(2)
    ('trained for 1 step', 'trained for 2 steps')
    """
    return f"trained for {counted(steps, 'step')}"


def advice(optimizer: AbstractOptimizer, size: float, stable: float) -> str:
    """What to try instead of the step size that was set, in the key that set it: a size that is stable at the start,
    or, if this one was, a tenth of it.

    >>> from ntkexp.optimizer.gd import GD
    >>> advice(GD(), 1.0, 2.0)
    ': the step size 1 is 0.5 times the largest stable one at the start, 2; try optimizer.stable_fraction=0.05'
    >>> advice(GD(step_size=8), 8.0, 2.0).partition("; ")[2]
    'try optimizer.step_size=1'
    """
    if not isinstance(optimizer, AbstractStable):
        return f"; try optimizer.step_size={size / 10:.3g}"
    share = size / stable
    calmer = 0.5 if share > 1 else share / 10
    by_size = optimizer.step_size is not None
    key, value = ("step_size", calmer * stable) if by_size else ("stable_fraction", calmer)
    said = f"the step size {size:.3g} is {share:.3g} times the largest stable one at the start, {stable:.3g}"
    return f": {said}; try optimizer.{key}={value:.3g}"
