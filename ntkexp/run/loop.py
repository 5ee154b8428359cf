"""The training loop of a run, its backward passes, and its callbacks."""

# ruff: noqa: B027  callbacks do nothing unless they are overridden

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from jaxtyping import Float
from torch import Tensor

from ntkexp.path.points import NetworkView
from ntkexp.path.step import Step
from ntkexp.records.data import Trajectory
from ntkexp.run.diagnose import Measurements
from ntkexp.run.metrics import Observer, Row, share_row
from ntkexp.run.outcome import (
    Ending,
    Outcome,
    ending_before,
    outcome_of,
    steps_in_words,
)
from ntkexp.run.setting import Setting
from ntkexp.run.state import RunState, begin

BackwardPass: TypeAlias = Literal["back", "effects"]
"""The kind of a backward pass: `back` computes path integrals, and `effects` computes
leave-out effects."""


class AbstractListener(ABC):
    """Callbacks of a run, for example to write files or to show progress. By default,
    they do nothing."""

    @property
    @abstractmethod
    def scratch(self) -> Path:
        """A folder for arrays that do not fit into memory."""

    def trajectory(self, rows: int, size: int) -> Trajectory:
        """Allocate `rows` rows of `size` numbers,
        to record the steps for a backward pass."""
        trajectory = Trajectory(self.scratch / "trajectory.bin", rows, size, "float64")
        trajectory.allocate()
        return trajectory

    def on_remark(self, text: str) -> None:
        """Announce a long computation to the user."""

    def on_row(self, row: Row) -> None:
        """Receive the metrics of a step."""

    def on_snapshot(
        self,
        step: int,
        kernel: Float[Tensor, "point kept train kept_"],
        output_gradient: Float[Tensor, "train out_"],
    ) -> None:
        """Receive the tangent kernel at a step, and ℓ′, the gradient of the loss at the
        outputs.

        ℓ′ has a row for each training example, also for examples outside of the batch.
        """

    def on_record(self, step: int, view: NetworkView) -> None:
        """Receive the network at the step of a snapshot. Called after `on_snapshot`."""

    def on_diagnostics(self, step: int, measured: Measurements) -> None:
        """Receive the values of the diagnostics at a step. This is the last call for
        the snapshot of the step."""

    def on_step(self, state: RunState, loss: float) -> None:
        """Handle the end of a training step. A checkpoint may be written."""

    def on_step_back(
        self, state: RunState, backward_pass: BackwardPass, done: int, total: int
    ) -> None:
        """Handle the end of a step of a backward pass. A checkpoint may be written.

        `done` of the `total` steps are complete."""

    def on_late_rows(self, rows: Sequence[Row]) -> None:
        """Receive metrics that only the backward pass computes,
        as one row for each step."""

    def on_end(self) -> None:
        """Handle the end of the last pass. No checkpoint is written later."""


@dataclass(frozen=True)
class SilentListener(AbstractListener):
    """A listener that only stores the trajectory for a backward pass, in `folder`."""

    folder: Path

    @property
    def scratch(self) -> Path:
        return self.folder


# --- A run: training steps, the backward passes that path integrals or effects need,
# and the outcome.
#
# The loop writes no files, but the listener may store checkpoints. A run that is
# resumed from a checkpoint gives bitwise the same results.


def run(
    setting: Setting, listener: AbstractListener, saved: Mapping[str, Any] | None = None
) -> Outcome:
    """Execute a run, from its start or from a saved state, and return its outcome."""
    state = begin(setting, listener.trajectory, listener.scratch)
    if setting.sweep is not None and setting.sweep.remark:
        listener.on_remark(setting.sweep.remark)
    if saved is not None:
        state.restore(saved)
    ending = train_steps(state, listener)
    reverse_pass(state, listener)
    listener.on_end()

    # record the metrics of the network after the last step
    observer = Observer(setting)
    view = NetworkView(setting.points, state.weights)
    kernel = view.stored_kernel()
    row = observer.step(state.step, state.time, view.outputs, state.weights)
    if state.timetable.capacity:
        row |= take_snapshot(state, listener, view, kernel, None)
    listener.on_row(row)
    return outcome_of(state, view.outputs, kernel, ending)


def take_snapshot(
    state: RunState,
    listener: AbstractListener,
    view: NetworkView,
    kernel: Float[Tensor, "point kept train kept_"],
    step: Step | None,
) -> Row:
    """Pass the kernel, the network and the diagnostics of the present step to the
    listener. Return the metrics of the kernel and the numbers of the diagnostics.

    `step` is the next training step, or None after the last step."""
    setting = state.setting
    row: Row = {}
    if setting.experiment.path.kernels != "none":
        observer = Observer(setting)
        listener.on_snapshot(state.step, kernel, observer.output_gradient(view.outputs))
        state.timetable.observe(state.step, kernel[: setting.points.train])
        latest = None
        if step is not None:
            latest = step.step_size
        elif state.step:
            latest = state.step_sizes[-1]
        row |= observer.kernels.row(kernel, view, state.step, latest)
    next_step = None if step is None else lambda: step
    measured = state.diagnostics.measure(
        kernel, view, state.step, state.time, next_step
    )
    listener.on_record(state.step, view)
    listener.on_diagnostics(state.step, measured)
    return row | measured.numbers


def train_steps(state: RunState, listener: AbstractListener) -> Ending:
    """Run the remaining training steps. Return the reason why training ends."""
    setting = state.setting
    observer = Observer(setting)
    first_loss = observer.loss(setting.start.outputs, 0)
    for step in setting.descent.steps_from(state.weights, state.memory, state.step):
        row = observer.row(step, state.time)
        loss = cast("float", row["loss"])  # every row has a loss
        ending = ending_before(setting, loss, first_loss, step.index)
        if ending is not None:
            state.accumulator.close(step)
            return ending

        # take a snapshot of the tangent kernel, if it is due
        due = state.timetable.due(step.index)
        if due:
            kernel = step.view.stored_kernel() if step.index else setting.start.kernel
            row |= take_snapshot(state, listener, step.view, kernel, step)

        tallies = state.advance(step, due=due)
        listener.on_row(row | share_row(tallies, setting.experiment.path.closing_rule))
        listener.on_step(state, loss)
    return Ending(steps_in_words(setting.experiment.steps))


def reverse_pass(state: RunState, listener: AbstractListener) -> None:
    """Run the backward passes of the path integrals and the effects, if needed."""
    for done, total in state.steps_back():
        listener.on_step_back(state, "back", done, total)
    if state.effects is not None:
        for done, total in state.effects.steps_back(state.weights, state.step_sizes):
            listener.on_step_back(state, "effects", done, total)

    # pass on the metrics that only the backward pass computes
    late = state.accumulator.backward_tallies
    if late is not None:
        closing = state.setting.experiment.path.closing_rule
        rows = [
            {"step": step} | share_row(tallies, closing)
            for step, tallies in enumerate(late)
        ]
        listener.on_late_rows(rows)
