"""One attempt at a run in its folder, from the beginning or from a checkpoint, to the last picture."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import nan
from pathlib import Path

import torch

from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import canonical, identity
from ntkexp.kernel.read.threads import threads_by_size
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import PARTIAL
from ntkexp.records.data import write_data
from ntkexp.records.folder import BEGUN, CHECKPOINT, CONFIG, OVERRIDES, RunFolder
from ntkexp.records.json_file import Json
from ntkexp.records.kernels import KERNELS, create_kernels
from ntkexp.records.leave_out import STORE as LEFT_OUT
from ntkexp.records.metrics import RETRACED
from ntkexp.records.provenance import PROVENANCE
from ntkexp.records.timings import MACHINE, Took, write_timings
from ntkexp.report.painter import Paint, painter
from ntkexp.run.checkpoint import BEGINNING, TRAJECTORY, Checkpoint
from ntkexp.run.clock import Clock
from ntkexp.run.environment import all_threads, fix_circumstances, provenance
from ntkexp.run.folder_listener import listen
from ntkexp.run.kept_sums import drop_sums
from ntkexp.run.loop import run
from ntkexp.run.outcome import Outcome
from ntkexp.run.save import arrays, write
from ntkexp.run.setting import Setting, setting_of
from ntkexp.run.survey import Survey, survey

SAME_BYTES = (
    "config.json",
    "data.npz",
    "metrics.csv",
    "results.csv",
    "predictions.zarr",
    "kernels.zarr",
    "contributions.zarr",
)
SOMETIMES = (RETRACED, LEFT_OUT)
OTHERS = (OVERRIDES, PROVENANCE, "timings.csv", "weights.pt")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Somebody asks for an experiment in a folder: by these overrides, and `repeat` is a command that asks again."""

    experiment: Experiment
    folder: RunFolder
    overrides: Sequence[str]
    repeat: str
    progress: AbstractProgress
    pictures: bool = True
    most_threads: int | None = None  # if not one for every core


@dataclass(frozen=True, kw_only=True)
class Attempted:
    """What is to be told of a run when all of it is written."""

    setting: Setting
    outcome: Outcome
    pictures: tuple[str, ...]
    clock: Clock


def attempt(asked: RunRequest, saved: Checkpoint | None) -> None:
    """Run, with everything that happens kept in the folder."""
    try:
        with painter() if asked.pictures else nullcontext(draw_nothing) as paint:
            attempted = go_through(asked, saved, paint)
    except (Exception, KeyboardInterrupt):
        asked.folder.note_error(traceback.format_exc())
        raise
    finally:
        asked.progress.stop()
    finish(asked.folder, attempted)


def go_through(asked: RunRequest, saved: Checkpoint | None, paint: Paint) -> Attempted:
    """Prepare, run, write and draw."""
    experiment, folder, clock = asked.experiment, asked.folder, Clock()
    if saved is not None:
        clock.parts["earlier"] = Took(*saved.get("took", (nan, nan)))
    with clock.times("prepare"):
        of = identity(experiment)
        fix_circumstances(experiment, 1)  # until it is known how much there is to do
        found = survey(experiment)
        threads = saved["threads"] if saved else choose_threads(asked, found)
        torch.set_num_threads(threads)
        setting = setting_of(experiment, found)
    if saved is None:
        begin(folder, setting, asked.overrides, of)
    make_room(folder, setting)
    folder.write_sealed(PROVENANCE, provenance(experiment, asked.repeat, threads))
    with clock.times("run"), listen(folder, setting, saved, of, threads, asked.progress, clock) as listener:
        outcome = run(setting, listener, saved["run"] if saved else None)
    with clock.times("write"):
        write(folder, setting, outcome)
        reached: dict[str, Json] = {"step": outcome.steps, "steps": experiment.steps, "outcome": outcome.sentence}
        folder.write_sealed("progress.json", {**reached, "diverged": outcome.diverged})
    with clock.times("draw"):
        pictures = draw(folder, paint)
    return Attempted(setting=setting, outcome=outcome, pictures=pictures, clock=clock)


def choose_threads(asked: RunRequest, found: Survey) -> int:
    """Take as many as the experiment says; else as a step asks for, which is the same whenever the run is begun."""
    return asked.experiment.threads or threads_by_size(found.operations, asked.most_threads or all_threads())


def draw_nothing(folder: Path) -> Iterator[tuple[str, str]]:
    """Draw no picture."""
    yield from ()


def draw(folder: RunFolder, paint: Paint) -> tuple[str, ...]:
    """The pictures, written; their names."""
    names = set()
    for name, content in paint(folder.path):
        folder.write(f"plots/{name}", content)
        names.add(f"plots/{name}")
    return tuple(sorted(names))


def begin(folder: RunFolder, setting: Setting, overrides: Sequence[str], of: str) -> None:
    """What is known of a run before its first step, in place of whatever an earlier attempt left."""
    folder.clear()
    folder.write_json(CONFIG, canonical(setting.experiment))
    folder.write(OVERRIDES, "".join(f"{override}\n" for override in overrides))
    write_data(folder.path / "data.npz", arrays(setting))
    folder.begin(BEGINNING, of)


def make_room(folder: RunFolder, setting: Setting) -> None:
    """Room for the kernels; those of a checkpoint stay."""
    outputs, room = setting.problem.outputs, setting.experiment.timetable().room
    points, train = len(setting.problem.targets[setting.domain.read]), setting.problem.train
    traced = setting.points.kernels == "trace"
    create_kernels(folder.path / KERNELS, points, outputs, train, room, traced=traced)


def finish(folder: RunFolder, attempted: Attempted) -> None:
    """The timings, and the word that the run is finished."""
    setting, outcome = attempted.setting, attempted.outcome
    machines = {MACHINE + rung.name: Took(rung.seconds) for rung in outcome.rungs}
    write_timings(folder.path / "timings.csv", attempted.clock.parts | machines)
    some = [name for name in SOMETIMES if (folder.path / name).exists()]
    folder.finish(
        [*SAME_BYTES, *some, *attempted.pictures],
        *OTHERS,
        identity=folder.identity,
        outcome=outcome.sentence,
        diverged=outcome.diverged,
        steps=outcome.steps,
        step_size=setting.descent.step_size,
        largest_stable_step=setting.start.largest_stable_step,
    )
    remove_leftovers(folder)


def remove_leftovers(folder: RunFolder) -> None:
    """Remove what a finished run needs no more; a kill right after its last word may have left it."""
    leftovers = [folder.path / name for name in (CHECKPOINT, TRAJECTORY, BEGUN, "error.txt")]
    for leftover in (*leftovers, *folder.path.glob(f".*{PARTIAL}")):
        leftover.unlink(missing_ok=True)
    drop_sums(folder.path)
