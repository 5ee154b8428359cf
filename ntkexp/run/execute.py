"""An experiment is carried out in a run folder: begun, resumed from its checkpoint, finished, drawn.

provenance.json, timings.csv, progress.json   what the clock and the machine say
BEGUN.json, checkpoint.pt, trajectory.bin     where the run stands, and its weights; gone when it is finished
everything else                               the same bytes each time, at the same number of threads
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ntkexp.config.build import build
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import canonical, folder_name, identity
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress
from ntkexp.records.command import command
from ntkexp.records.data import write_data
from ntkexp.records.folder import BEGUN, CONFIG, DONE, OVERRIDES, RunFolder, several
from ntkexp.records.kernels import KERNELS, create_kernels
from ntkexp.records.metrics import RETRACED
from ntkexp.records.provenance import PROVENANCE, refuse_other_version
from ntkexp.records.seal import Damaged, read_sealed
from ntkexp.records.timings import MACHINE, write_timings
from ntkexp.report.plots.run_plots import save as save_plots
from ntkexp.report.run import read_run
from ntkexp.run.checkpoint import BEGINNING, CHECKPOINT, TRAJECTORY, State, load
from ntkexp.run.environment import provenance, settle
from ntkexp.run.folder_listener import diary
from ntkexp.run.loop import run
from ntkexp.run.outcome import Outcome
from ntkexp.run.save import arrays, write
from ntkexp.run.setting import Setting, prepare

SAME_BYTES = (
    "config.json",
    "data.npz",
    "metrics.csv",
    "results.csv",
    "predictions.zarr",
    "kernels.zarr",
    "contributions.zarr",
)
OTHERS = (OVERRIDES, PROVENANCE, "timings.csv", "weights.pt")


def carry_out(
    experiment: Experiment,
    overrides: Sequence[str],
    out: Path,
    force: bool,
    progress: AbstractProgress,
    options: Sequence[str] = (),
) -> Path:
    """The folder of the finished run, new, resumed, or found as it was; `options` are those that repeat it."""
    folder = RunFolder(out / "runs" / folder_name(experiment))
    if not force and folder.whole:
        progress.found(folder.path)
        return folder.path
    with folder.claim():
        if force or not folder.whole:  # another process may have finished it while the lock was asked for
            repeat = command("train", overrides, options)
            saved = None if force else left(folder, identity(experiment), progress)
            conduct(experiment, folder, overrides, repeat, saved, progress)
    return folder.path


def resume(path: Path, progress: AbstractProgress, trusted: tuple[str, ...] = (), options: Sequence[str] = ()) -> Path:
    """The rest of a run, from its own config; `options` repeat a run that does not say what it was begun by."""
    if not (path / CONFIG).is_file():
        raise Mistake(f"{path} is no run folder: it has no config.json")
    refuse_other_version(path)
    folder = RunFolder(path)
    if folder.whole:
        progress.say(f"{path} is finished")
        return path
    with folder.claim():
        if wrong := folder.broken(CONFIG, OVERRIDES):
            what = f"{several(wrong)} not as it was written"
            raise Mistake(f"{path} cannot be resumed: {what}; the command that began it begins it anew")
        experiment = build(folder.read_json(CONFIG), trusted)
        if digits(folder_name(experiment)) != digits(path.resolve().name):
            raise Mistake(f"{path} is of other data, or of another version: run the experiment anew")
        overrides = (path / OVERRIDES).read_text(encoding="utf-8").splitlines()
        repeat = begun_by(folder) or command("train", overrides, options)
        conduct(experiment, folder, overrides, repeat, left(folder, identity(experiment), progress), progress)
    return path


def begun_by(folder: RunFolder) -> str:
    """The command that a dead run was begun by, if it says so."""
    try:
        return str(read_sealed(folder.path / PROVENANCE)["command"])
    except Mistake:
        return ""


def digits(name: str) -> str:
    """The part of a run folder's name that identifies the experiment."""
    return name.rpartition("-")[2]


def left(folder: RunFolder, of: str, progress: AbstractProgress) -> State | None:
    """Where an earlier attempt left the run; that it has to begin anew is said, with the reason."""
    if (folder.path / DONE).is_file():
        progress.warn(f"{folder.path} {folder.look()}; the run begins anew")
        return None
    try:
        saved = load(folder, of)
    except Damaged as damage:
        progress.warn(f"{damage}; the run begins anew")
        return None
    if saved is None and (folder.path / CONFIG).is_file():
        progress.warn(f"{folder.path} was left without a checkpoint; the run begins anew")
    return saved


def conduct(
    experiment: Experiment,
    folder: RunFolder,
    overrides: Sequence[str],
    repeat: str,
    saved: State | None,
    progress: AbstractProgress,
) -> None:
    """Run; once more from the beginning, if a file turns out to be damaged on the way."""
    try:
        attempt(experiment, folder, overrides, repeat, saved, progress)
    except Damaged as damage:
        progress.warn(f"{damage}; the run begins anew")
        attempt(experiment, folder, overrides, repeat, None, progress)


def attempt(
    experiment: Experiment,
    folder: RunFolder,
    overrides: Sequence[str],
    repeat: str,
    saved: State | None,
    progress: AbstractProgress,
) -> None:
    """Run, with everything that happens kept in the folder."""
    clock = Clock()
    try:
        with clock.times("prepare"):
            of = identity(experiment)
            threads = settle(experiment, saved["threads"] if saved else None)
            setting = prepare(experiment)
        if saved is None:
            begin(folder, setting, overrides)
        lay_out(folder, setting)
        folder.write_sealed(PROVENANCE, provenance(experiment, repeat, threads))
        with clock.times("run"), diary(folder, setting, saved, of, threads, progress) as journal:
            outcome = run(setting, journal, saved)
        with clock.times("write"):
            write(folder, setting, outcome)
        with clock.times("draw"):
            save_plots(read_run(folder.path), folder.path / "plots")
    except (Exception, KeyboardInterrupt):
        folder.note_error(traceback.format_exc())
        raise
    finally:
        progress.stop()
    conclude(folder, setting, outcome, clock)


def begin(folder: RunFolder, setting: Setting, overrides: Sequence[str]) -> None:
    """What is known of a run before its first step, in place of whatever an earlier attempt left."""
    folder.clear()
    folder.write_json(CONFIG, canonical(setting.experiment))
    folder.write(OVERRIDES, "".join(f"{override}\n" for override in overrides))
    write_data(folder.path / "data.npz", arrays(setting))
    folder.begin(BEGINNING)


def lay_out(folder: RunFolder, setting: Setting) -> None:
    """Room for the kernels; those of a checkpoint stay."""
    steps, outputs = setting.experiment.steps, setting.targets.shape[1]
    points, train = len(setting.targets[setting.read]), setting.points.train
    room = setting.experiment.path.timetable(steps).room
    create_kernels(folder.path / KERNELS, points, outputs, train, room)


@dataclass
class Clock:
    """Seconds by what they were spent on."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def times(self, what: str) -> Iterator[None]:
        """Count the time spent inside."""
        start = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - start


def conclude(folder: RunFolder, setting: Setting, outcome: Outcome, clock: Clock) -> None:
    """The timings, and the word that the run is finished."""
    machines = {MACHINE + rung.name: rung.seconds for rung in outcome.rungs}
    write_timings(folder.path / "timings.csv", clock.seconds | machines)
    steps = setting.experiment.steps
    folder.write_sealed("progress.json", {"step": outcome.steps, "steps": steps, "outcome": outcome.sentence})
    retraced = [RETRACED] if (folder.path / RETRACED).is_file() else []
    pictures = sorted(f"plots/{file.name}" for file in (folder.path / "plots").iterdir())
    folder.finish(
        [*SAME_BYTES, *retraced, *pictures],
        *OTHERS,
        outcome=outcome.sentence,
        diverged=outcome.diverged,
        steps=outcome.steps,
        step_size=setting.descent.step_size,
        largest_stable_step=setting.largest_stable_step,
    )
    for leftover in (CHECKPOINT, TRAJECTORY, BEGUN, "error.txt"):
        (folder.path / leftover).unlink(missing_ok=True)
