"""The story of a run: walk the path from where it stands, walk it back if the optimizer remembers, tell a journal what
happens, look back.

A run is pure: it writes nothing itself. The journal may keep checkpoints, from which the same run goes on to the same
bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ntkexp.optimizer.base import AbstractOptimizer
from ntkexp.optimizer.stable_step import AbstractStable
from ntkexp.path.accumulate.ledger import EveryStep
from ntkexp.path.backward.recording import Recording, length
from ntkexp.run.listener import AbstractJournal
from ntkexp.run.metrics import Observer, shares
from ntkexp.run.outcome import Ending, Outcome, look_back
from ntkexp.run.second_pass import retraced
from ntkexp.run.setting import Setting
from ntkexp.run.state import Walk, begin

BLOWN_UP = 1e6  # times the first loss: far beyond what a run that converges passes through


def run(setting: Setting, journal: AbstractJournal, saved: Mapping[str, Any] | None = None) -> Outcome:
    """A whole run, or the rest of one."""
    walk = begin(setting)
    if saved is not None:
        walk.restore(saved["walk"])
    recording = recorded(setting, journal) if setting.experiment.optimizer.remembers else None
    ending = go(walk, journal, recording)
    if recording is not None:
        recording.write(walk.step, walk.weights, {})
        go_back(walk, journal, recording, saved["retrace"] if saved else None)
    journal.walked()
    return finish(walk, journal, ending)


def recorded(setting: Setting, journal: AbstractJournal) -> Recording:
    """Room for the weights of every step."""
    weights, records = setting.weights, setting.experiment.optimizer.records
    size = length(weights, records)
    return Recording(journal.trajectory(setting.experiment.steps + 1, size), weights, records)


def go(walk: Walk, journal: AbstractJournal, recording: Recording | None) -> Ending:
    """Take the remaining steps; why there are no more."""
    setting, observer = walk.setting, Observer(walk.setting)
    first = observer.loss(setting.outputs)
    for step in setting.descent.walk(walk.weights, walk.memory, walk.step):
        loss = observer.loss(step.outputs)
        if (reason := end_of(setting, loss, first, step.index)) is not None:
            walk.close(step)
            return reason
        row = observer.step(step.index, walk.time, step.outputs, step.segment.start) | observer.size(step)
        if due := walk.timetable.due(step.index):
            kernel = setting.points.tangent_kernel(step.segment.start, step.right)
            row |= observer.kernel(kernel, step.outputs, step.segment.start, step.step_size)
            journal.snapshot(step.index, kernel, observer.output_gradient(step.outputs))
            walk.timetable.saw(step.index, kernel[: setting.points.train])
        journal.row(row | shares(walk.advance(step, due=due), setting.experiment.path.closing))
        if recording is not None:
            recording.write(step.index, step.segment.start, step.memory)
        journal.stepped(walk, loss)
    return Ending(counted(setting.experiment.steps))


def go_back(walk: Walk, journal: AbstractJournal, recording: Recording, saved: Mapping[str, Any] | None = None) -> None:
    """Integrate the path from its end, which is where an optimizer with memory is understood from."""
    retrace = retraced(walk, recording)
    if saved is not None:
        retrace.restore(saved)
    for _ in retrace.steps_back():
        journal.retraced(retrace)
    walk.ledger = EveryStep(retrace.integrals, None, retrace.hindsight)
    for step in range(walk.step):
        walk.check(step, retrace.tallied(step))
    closing = walk.setting.experiment.path.closing
    journal.attributed([{"step": step} | shares(retrace.tallied(step), closing) for step in range(walk.step)])


def finish(walk: Walk, journal: AbstractJournal, ending: Ending) -> Outcome:
    """See where the path has led, and look back."""
    setting, observer = walk.setting, Observer(walk.setting)
    outputs, right = setting.points.read(walk.weights)
    kernel = setting.points.tangent_kernel(walk.weights, right)
    row = observer.step(walk.step, walk.time, outputs, walk.weights)
    journal.row(row | observer.kernel(kernel, outputs, walk.weights, walk.step_sizes[-1] if walk.step else None))
    journal.snapshot(walk.step, kernel, observer.output_gradient(outputs))
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
    advice = advised(setting.experiment.optimizer, setting.descent.step_size, setting.largest_stable_step)
    return Ending(f"diverged at step {step}{advice}", diverged=True)


def advised(optimizer: AbstractOptimizer, size: float, stable: float) -> str:
    """What to try instead of the step size that was set, in the key that set it: a size that is stable at the start,
    or, if this one was, a tenth of it.

    >>> from ntkexp.optimizer.gd import GD
    >>> advised(GD(), 1.0, 2.0)
    ': the step size 1 is 0.5 times the largest stable one at the start, 2; try optimizer.stable_fraction=0.05'
    >>> advised(GD(step_size=8), 8.0, 2.0).partition("; ")[2]
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
