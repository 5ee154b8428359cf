"""The story of a run: walk the path from where it stands, tell a journal what happens, look back.

A run is pure: it writes nothing itself. The journal may keep checkpoints, from which the same run goes on to the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ntkexp.journal import AbstractJournal
from ntkexp.look_back import Ending, Outcome, look_back
from ntkexp.observe import Observer, shared
from ntkexp.prepare import Setting
from ntkexp.walk import Walk, begin

BLOWN_UP = 1e6  # times the first loss: far beyond what a run that converges passes through


def run(setting: Setting, journal: AbstractJournal, saved: Mapping[str, Any] | None = None) -> Outcome:
    """A whole run, or the rest of one."""
    walk = begin(setting)
    if saved is not None:
        walk.restore(saved)
    return finish(walk, journal)


def finish(walk: Walk, journal: AbstractJournal) -> Outcome:
    """Take the remaining steps, and look back."""
    setting, observer = walk.setting, Observer(walk.setting)
    first = observer.loss(setting.outputs)
    snapshots = setting.experiment.path.snapshots(setting.experiment.steps)
    ending = Ending(counted(setting.experiment.steps))
    for step in setting.descent.walk(walk.weights, walk.step):
        loss = observer.loss(step.outputs)
        if (reason := end_of(setting, loss, first, step.index)) is not None:
            ending = reason
            break
        row = observer.step(step.index, walk.time, step.outputs, step.segment.start) | {"step_size": step.step_size}
        if step.index in snapshots:
            kernel = setting.points.tangent_kernel(step.segment.start, step.right)
            row |= observer.kernel(kernel, step.outputs, step.segment.start, step.step_size)
            journal.snapshot(step.index, kernel)
        journal.row(row | shared(walk.advance(step)))
        journal.stepped(walk, loss)
    outputs, right = setting.points.read(walk.weights)
    kernel = setting.points.tangent_kernel(walk.weights, right)
    row = observer.step(walk.step, walk.time, outputs, walk.weights)
    journal.row(row | observer.kernel(kernel, outputs, walk.weights, walk.step_sizes[-1] if walk.step else None))
    journal.snapshot(walk.step, kernel)
    return look_back(walk, outputs, kernel, ending)


def counted(steps: int) -> str:
    """A number of steps in words."""
    return "trained for 1 step" if steps == 1 else f"trained for {steps} steps"


def end_of(setting: Setting, loss: float, first: float, step: int) -> Ending | None:
    """Whether the run ends before this step."""
    target = setting.experiment.stop_at_loss
    if target is not None and loss <= target:
        return Ending(f"{counted(step)}, to a loss of {loss:.3g}")
    if isfinite(loss) and loss <= BLOWN_UP * (first + 1):
        return None
    ratio = setting.descent.step_size / setting.largest_stable_step
    return Ending(
        f"diverged at step {step}: the step size {setting.descent.step_size:.3g} is {ratio:.3g} times the largest "
        f"stable one at the start, {setting.largest_stable_step:.3g}; try optimizer.stable_fraction=0.5",
        diverged=True,
    )
