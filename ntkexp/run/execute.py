"""An experiment is carried out in a run folder: begun, resumed from its checkpoint, finished, drawn; or trained again
without some examples.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import nan
from pathlib import Path

import torch

from ntkexp.config.build import build
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import canonical, files_of, folder_name, identity
from ntkexp.experiment.problem import draw_problem
from ntkexp.kernel.read.plan import threads_by_size
from ntkexp.mistake import Mistake, Useless
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import Damaged, Json
from ntkexp.records.contributions import FOLDER, Removal, read_removal, write_removal
from ntkexp.records.contributions import STORE as LEFT_OUT
from ntkexp.records.data import write_data
from ntkexp.records.folder import (
    BEGUN,
    CHECKPOINT,
    CONFIG,
    DONE,
    OVERRIDES,
    PROVENANCE,
    RunFolder,
    command,
    own_command,
    refuse_other_version,
)
from ntkexp.records.kernels import KERNELS, create_kernels, read_predictions
from ntkexp.records.own_files import drop_half_written
from ntkexp.records.results import MACHINE, RETRACED, Seconds, read_rows, write_timings
from ntkexp.removal.between import Ledger, Pair
from ntkexp.removal.rerun import again, ledger_between
from ntkexp.removal.retraining import removal_of
from ntkexp.report.drawing import draw_run
from ntkexp.report.live_log import LiveLog, open_log
from ntkexp.run.environment import Clock, all_threads, check_device, fix_circumstances, provenance
from ntkexp.run.folder_listener import data_arrays, listen, log_keys_of, write_outcome
from ntkexp.run.loop import run
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, setting_of, survey
from ntkexp.run.state import BEGINNING, METRICS, TRAJECTORY, Checkpoint, drop_sums, load
from ntkexp.text import several, short

# --- One attempt at a run in its folder, from the beginning or from a checkpoint, to the last picture.


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
    """An experiment to be carried out in a folder, given by these overrides; `repeat` is a command that repeats it."""

    experiment: Experiment
    folder: RunFolder
    overrides: Sequence[str]
    repeat: str
    progress: AbstractProgress
    pictures: bool = True
    most_threads: int | None = None  # if not one for every core
    log: str | None = None  # one of `LOGS`, to which numbers go while it runs


def attempt(request: RunRequest, saved: Checkpoint | None) -> None:
    """Run, with everything that happens kept in the folder, from the beginning or from a checkpoint."""
    folder, clock = request.folder, Clock()
    if saved is not None:
        clock.parts["earlier"] = Seconds(*saved.get("took", (nan, nan)))
    try:
        setting, outcome = carry_through(request, saved, clock)
        with clock.times("draw"):
            pictures = folder.write_pictures(draw_run(folder.path) if request.pictures else {})
    except (Exception, KeyboardInterrupt):
        folder.note_error(traceback.format_exc())
        raise
    finally:
        request.progress.stop()

    # the timings, and the word that the run is finished
    machines = {MACHINE + rung.name: Seconds(rung.seconds) for rung in outcome.rungs}
    write_timings(folder.path / "timings.csv", clock.parts | machines)
    some = [name for name in SOMETIMES if (folder.path / name).exists()]
    folder.finish(
        [*SAME_BYTES, *some, *pictures],
        *OTHERS,
        identity=folder.identity,
        outcome=outcome.sentence,
        diverged=outcome.diverged,
        steps=outcome.steps,
        step_size=setting.descent.step_size,
        largest_stable_step=setting.start.largest_stable_step,
    )
    remove_leftovers(folder)


def carry_through(
    request: RunRequest, saved: Checkpoint | None, clock: Clock
) -> tuple[Setting, Outcome]:
    """Prepare, run and write."""
    experiment, folder = request.experiment, request.folder
    with clock.times("prepare"):
        of = identity(experiment)
        fix_circumstances(experiment, 1)  # until it is known how much there is to do
        surveyed = survey(experiment)
        # the number the experiment gives; otherwise one that depends on the size of a step alone, so that resumed runs
        # agree
        most = request.most_threads or all_threads()
        threads = (
            saved["threads"]
            if saved
            else experiment.threads or threads_by_size(surveyed.operations, most)
        )
        torch.set_num_threads(threads)
        setting = setting_of(experiment, surveyed)
    if (
        saved is None
    ):  # clear what an earlier attempt left, and write what is known before the first step
        folder.clear()
        folder.write_json(CONFIG, canonical(experiment))
        folder.write(OVERRIDES, "".join(f"{override}\n" for override in request.overrides))
        write_data(folder.path / "data.npz", data_arrays(setting))
        folder.begin(BEGINNING, of)

    # room for the kernels; those of a checkpoint stay
    problem, room = setting.problem, experiment.timetable().room
    points, traced = len(problem.targets[setting.domain.read]), setting.points.kernels == "trace"
    create_kernels(
        folder.path / KERNELS, points, problem.outputs, problem.train, room, traced=traced
    )

    folder.write_sealed(PROVENANCE, provenance(experiment, request.repeat, threads))
    with live_log(request, saved) as log:
        with (
            clock.times("run"),
            listen(folder, setting, saved, of, threads, request.progress, clock, log) as listener,
        ):
            outcome = run(setting, listener, saved["run"] if saved else None)
        if log is not None:
            log.conclude(outcome.ladder, outcome.steps)
    with clock.times("write"):
        write_outcome(folder, setting, outcome)
        reached: dict[str, Json] = {
            "step": outcome.steps,
            "steps": experiment.steps,
            "outcome": outcome.sentence,
        }
        folder.write_sealed("progress.json", {**reached, "diverged": outcome.diverged})
    return setting, outcome


def live_log(
    request: RunRequest, saved: Checkpoint | None
) -> AbstractContextManager[LiveLog | None]:
    """The log of a run that wants one, continued from its checkpoint."""
    if request.log is None:
        return nullcontext()
    folder, key = request.folder.path, log_keys_of(saved).get(request.log)
    earlier = read_rows(folder / METRICS) if saved else ()
    return open_log(
        request.log, folder, canonical(request.experiment), key, earlier, request.progress
    )


def remove_leftovers(folder: RunFolder) -> None:
    """Remove what a finished run needs no more; a kill right after its last word may have left it."""
    leftovers = [folder.path / name for name in (CHECKPOINT, TRAJECTORY, BEGUN, "error.txt")]
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    drop_half_written(folder.path.iterdir())
    drop_sums(folder.path)


# --- An experiment is carried out in a run folder: begun, resumed from its checkpoint, finished, drawn.
#
# provenance.json, timings.csv, progress.json   what the clock and the machine say
# BEGUN.json, checkpoint.pt, sums-*.bin,        where the run stands, its sums if they lie on disk, and its weights;
#     trajectory.bin                            removed when the run is finished
# everything else                               the same bytes each time, at the same number of threads


def execute(
    experiment: Experiment,
    overrides: Sequence[str],
    out: Path,
    force: bool,
    progress: AbstractProgress,
    options: Sequence[str] = (),
    pictures: bool = True,
    most_threads: int | None = None,
    log: str | None = None,
) -> Path:
    """The folder of the finished run, new, resumed, or found as it was; `options` are those that repeat it."""
    folder = RunFolder(out / "runs" / folder_name(experiment))
    check_device(experiment.device)  # whether or not there is anything to compute
    # another run, if it is not damaged, is neither this one nor to be written over
    if (
        not force
        and folder.seal_file
        and not folder.broken(CONFIG)
        and folder.identity != identity(experiment)
    ):
        raise Useless(
            f"{folder.path} holds another run, …-{folder.identity[:12]}; give it its own name, or write over it"
        )
    if not force and folder.whole:
        remove_leftovers(folder)
        progress.found(folder.path)
        return folder.path
    with folder.claim():
        if (
            force or not folder.whole
        ):  # another process may have finished it while this one waited for the lock
            repeat = command("train", overrides, options)
            request = RunRequest(
                experiment=experiment,
                folder=folder,
                overrides=overrides,
                repeat=repeat,
                progress=progress,
                pictures=pictures,
                most_threads=most_threads,
                log=log,
            )
            attempt_twice(request, None if force else state_left(request))
    return folder.path


def resume(
    path: Path,
    progress: AbstractProgress,
    trusted: tuple[str, ...] = (),
    options: Sequence[str] = (),
    log: str | None = None,
) -> Path:
    """The rest of a run, from its own config; `options` repeat a run that does not say what it was begun by."""
    if not (path / CONFIG).is_file():
        raise Mistake(f"{path} is not a run folder: it has no config.json")
    refuse_other_version(path)
    # what lies there may be the trace of a loop, a copy under another name, or finished
    folder = RunFolder(path)
    if "follow" in folder.read_json(CONFIG):
        raise Mistake(
            f"{path} is the trace of a loop of your own: that loop continues there, from its own checkpoint"
        )
    if strange := folder.seal_file and folder.misnamed:
        raise Mistake(f"{path} {strange}")
    if folder.whole:
        progress.say(f"{path} is finished")
        return path
    # the experiment is that of its own files, which have to be as they were written
    with folder.claim():
        if wrong := folder.broken(CONFIG, OVERRIDES):
            what = f"{several(wrong)} not as it was written"
            raise Mistake(
                f"{path} cannot be resumed: {what}; the command that began it starts it again"
            )
        experiment = rebuild_experiment(folder, trusted)
        overrides = (path / OVERRIDES).read_text(encoding="utf-8").splitlines()
        repeat = begun_by(folder) or command("train", overrides, options)
        request = RunRequest(
            experiment=experiment,
            folder=folder,
            overrides=overrides,
            repeat=repeat,
            progress=progress,
            log=log,
        )
        attempt_twice(request, state_left(request))
    return path


def begun_by(folder: RunFolder) -> str:
    """The command that a dead run was begun by, if known."""
    try:
        return own_command(folder.provenance["command"])
    except Mistake:
        return ""


def rebuild_experiment(folder: RunFolder, trusted: tuple[str, ...]) -> Experiment:
    """The experiment of a run, if it is the same today: with other data, or other code, numbers would be others."""
    folder.check(CONFIG)
    if strange := folder.misnamed:
        raise Mistake(f"{folder.path} {strange}")
    experiment = build(folder.read_json(CONFIG), trusted)
    if identity(experiment) != folder.identity:
        files = sorted({str(file) for file in files_of(experiment)})
        other = (
            f"{' or '.join(files)} has changed since, or this is another version"
            if files
            else "another version"
        )
        what = other if files else f"this is {other}"
        raise Mistake(
            f"{folder.path} cannot be computed again, for {what}; run the experiment again"
        )
    return experiment


def state_left(request: RunRequest) -> Checkpoint | None:
    """Where an earlier attempt left the run; that it has to begin anew is said, with the reason."""
    folder, progress = request.folder, request.progress
    if (folder.path / DONE).is_file():
        progress.warn(f"{folder.path} {folder.find_defect()}; the run starts again")
        return None
    try:
        saved = load(folder, identity(request.experiment))
    except Damaged as damage:
        progress.warn(f"{damage}; the run starts again")
        return None
    if saved is None and (folder.path / CONFIG).is_file():
        progress.warn(f"{folder.path} was left without a checkpoint; the run starts again")
    return saved


def attempt_twice(request: RunRequest, saved: Checkpoint | None) -> None:
    """Run; once more from the beginning, if a file turns out to be damaged on the way."""
    try:
        attempt(request, saved)
    except Damaged as damage:
        request.progress.warn(f"{damage}; the run starts again")
        attempt(request, None)


# --- A finished run is trained again without some of its examples, and the difference is kept beside it.


REPEATED = 0.01
"""The training as it was must end where it did, to this share of what the removal changed."""


def remove_group(
    run: Path,
    group: Sequence[int],
    points: Sequence[int],
    progress: AbstractProgress,
    trusted: tuple[str, ...] = (),
) -> Removal:
    """What leaving out these training examples changes at these points of the axis `probe`: found, or found earlier."""
    recorded = read_removal(run, group, points)
    if recorded is not None:
        return recorded
    folder = RunFolder(run)
    experiment = rebuild_experiment(folder, trusted)
    fix_circumstances(experiment, folder.provenance.get("threads"))  # so that rounding repeats
    with folder.claim():
        removal = train_without(folder, experiment, sorted(group), points, progress)
        write_removal(run, removal)
    return removal


def train_without(
    folder: RunFolder,
    experiment: Experiment,
    group: list[int],
    points: Sequence[int],
    progress: AbstractProgress,
) -> Removal:
    """Train twice, and go back over both."""
    facts = folder.sealed_facts
    if facts["diverged"]:
        raise Mistake(
            f"{folder.path} diverged, so its examples have no contributions; choose a smaller step size"
        )
    problem = draw_problem(experiment)
    rerun = again(experiment, problem, *folder.steps_taken)
    first = 0 if "train" in problem.places else problem.train
    outs = experiment.path.chosen_outputs(problem.outputs)
    inputs = problem.inputs[[first + point for point in points]]
    chosen = torch.cartesian_prod(torch.arange(len(points)), torch.tensor(outs)).view(-1, 2)
    memory_folder = folder.path / FOLDER
    memory_folder.mkdir(exist_ok=True)
    weight = Pair(rerun.everyone, rerun.without(group))
    ledger = ledger_between(
        rerun, weight, inputs, chosen.to(inputs.device), memory_folder, progress
    ).closed()
    ended = repetition_error(folder, ledger, [(points[k], out) for k, out in chosen.tolist()])
    return removal_of(ledger, group, points, outs, ended)


def repetition_error(folder: RunFolder, ledger: Ledger, places: Sequence[tuple[int, int]]) -> float:
    """How far the training as it was ended from where the run did, as a share of what the removal changed."""
    folder.check("predictions.zarr")
    predictions = read_predictions(folder.path / "predictions.zarr")["f_T"]
    ended = ledger.before.new_tensor([predictions[place] for place in places])
    missed, changed = float((ledger.before - ended).norm()), float(ledger.actual.norm())
    if missed > REPEATED * (changed or float(ended.norm())):
        raise Mistake(
            f"{folder.path}: trained again as it was, the run ends {short(missed)} from where it did, without these "
            f"examples {short(changed)}: its steps amplify rounding beyond the removal; choose a smaller step size"
        )
    return missed / changed if changed else missed
