"""Execution of a run in its folder: start, resume, write results,
and retrain without examples."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import nan
from pathlib import Path

import torch

from ntkexp.allocator import memory_kept
from ntkexp.config.build import build
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import canonical, files_of, identity
from ntkexp.experiment.problem import draw_problem
from ntkexp.kernel.read.plan import threads_by_size
from ntkexp.mistake import Mistake, Useless
from ntkexp.progress import AbstractProgress
from ntkexp.records.atomic import Damaged, Json
from ntkexp.records.contributions import (
    REMOVAL_FOLDER,
    STORE as LEFT_OUT,
    Removal,
    read_removal,
    write_removal,
)
from ntkexp.records.data import write_data
from ntkexp.records.diagnostics import DIAGNOSTICS
from ntkexp.records.folder import (
    BEGUN,
    CHECKPOINT,
    CONFIG,
    DONE,
    OVERRIDES,
    PROVENANCE,
    RESULTS,
    RunFolder,
    command,
    own_command,
    refuse_other_version,
)
from ntkexp.records.kernels import KERNELS, create_kernels, read_predictions
from ntkexp.records.own_files import drop_half_written
from ntkexp.records.recorded import RECORDED
from ntkexp.records.results import MACHINE, RETRACED, Seconds, read_rows, write_timings
from ntkexp.removal.between import Breakdown, Pair
from ntkexp.removal.rerun import breakdown_between, rerun_of
from ntkexp.removal.retraining import LARGEST_REPEATED_ERROR, removal_of
from ntkexp.report.drawing import draw_run
from ntkexp.report.live_log import LiveLog, open_log
from ntkexp.run.environment import (
    Clock,
    all_threads,
    check_device,
    fix_circumstances,
    provenance,
)
from ntkexp.run.folder_listener import (
    RunRequest,
    data_arrays,
    listen,
    log_keys_of,
    write_outcome,
)
from ntkexp.run.loop import run
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, Survey, setting_of, survey
from ntkexp.run.state import BEGINNING, METRICS, TRAJECTORY, Checkpoint, drop_sums, load
from ntkexp.text import several, short

# --- One attempt to execute a run in its folder, from the beginning or from a
# checkpoint.


OPTIONAL = (RETRACED, LEFT_OUT, DIAGNOSTICS, RECORDED)
"""Results that only some runs have. Repetitions of a run write identical bytes."""

OTHER_FILES = (OVERRIDES, PROVENANCE, "timings.csv", "weights.pt")


def attempt(request: RunRequest, saved: Checkpoint | None) -> None:
    """Execute a run in its folder, from the beginning or
    from the checkpoint `saved`."""
    folder = request.folder
    clock = Clock()
    if saved is not None:
        clock.parts["earlier"] = Seconds(*saved.get("took", (nan, nan)))
    try:
        setting, outcome = train_and_write(request, saved, clock)
        with clock.times("draw"):
            pictures = folder.write_pictures(
                draw_run(folder.path) if request.pictures else {}
            )
    except (Exception, KeyboardInterrupt):
        folder.note_error(traceback.format_exc())
        raise
    finally:
        request.progress.stop()

    # write the timings, then DONE.json, which marks the run as finished
    machine_seconds = {
        MACHINE + machine.name: Seconds(machine.seconds) for machine in outcome.machines
    }
    write_timings(folder.path / "timings.csv", clock.parts | machine_seconds)
    optional = [name for name in OPTIONAL if (folder.path / name).exists()]
    folder.finish(
        [*RESULTS, *optional, *pictures],
        *OTHER_FILES,
        identity=folder.identity,
        outcome=outcome.sentence,
        diverged=outcome.diverged,
        steps=outcome.steps,
        step_size=setting.descent.step_size,
        largest_stable_step=setting.start.largest_stable_step,
    )
    remove_leftovers(folder)


def train_and_write(
    request: RunRequest, saved: Checkpoint | None, clock: Clock
) -> tuple[Setting, Outcome]:
    """Prepare the run, train, and write the results."""
    experiment = request.experiment
    folder = request.folder
    with clock.times("prepare"):
        # the survey is a forward pass at two points, for which one thread suffices
        fix_circumstances(experiment, 1)
        surveyed = survey(experiment)
        threads = threads_of(request, saved, surveyed)
        torch.set_num_threads(threads)
        setting = setting_of(surveyed)
    if saved is None:
        begin_folder(request, setting)

    # allocate the store of kernels; a resumed run keeps its chunks
    problem = setting.problem
    kernels = setting.points.kernels
    create_kernels(
        folder.path / KERNELS,
        len(problem.targets[setting.domain.summed_points]),
        problem.outputs,
        problem.train,
        0 if kernels == "none" else experiment.timetable().capacity,
        traced=kernels == "trace",
    )
    folder.write_sealed(PROVENANCE, provenance(experiment, request.repeat, threads))

    with live_log(request, saved) as log:
        with (
            clock.times("run"),
            memory_kept(problem.weights.values()),
            listen(request, setting, saved, threads, clock, log) as listener,
        ):
            outcome = run(setting, listener, saved["run"] if saved else None)
        if log is not None:
            log.conclude(outcome.results, outcome.steps)

    with clock.times("write"):
        write_outcome(folder, setting, outcome)
        progress: dict[str, Json] = {
            "step": outcome.steps,
            "steps": experiment.steps,
            "outcome": outcome.sentence,
            "diverged": outcome.diverged,
        }
        folder.write_sealed("progress.json", progress)
    return setting, outcome


def threads_of(request: RunRequest, saved: Checkpoint | None, surveyed: Survey) -> int:
    """Return the number of threads of a run.

    By default, the number depends on the cost of a step. A resumed run uses as many
    threads as before, because the number of threads affects the rounding of sums."""
    if saved is not None:
        threads: int = saved["threads"]
        return threads
    most_threads = request.most_threads or all_threads()
    return request.experiment.threads or threads_by_size(
        surveyed.operations, most_threads
    )


def begin_folder(request: RunRequest, setting: Setting) -> None:
    """Remove the files of an earlier attempt,
    and write the files that precede the first step."""
    folder = request.folder
    folder.clear()
    folder.write_json(CONFIG, canonical(request.experiment))
    folder.write(OVERRIDES, "".join(f"{override}\n" for override in request.overrides))
    write_data(folder.path / "data.npz", data_arrays(setting))
    folder.begin(BEGINNING, identity(request.experiment))


def live_log(
    request: RunRequest, saved: Checkpoint | None
) -> AbstractContextManager[LiveLog | None]:
    """Open the log that the user requested. A resumed run continues its log.

    The context's value is None if no log was requested."""
    if request.log is None:
        return nullcontext()
    folder = request.folder.path
    key = log_keys_of(saved).get(request.log)
    earlier_rows = read_rows(folder / METRICS) if saved else ()
    return open_log(
        request.log,
        folder,
        canonical(request.experiment),
        key,
        earlier_rows,
        request.progress,
    )


def remove_leftovers(folder: RunFolder) -> None:
    """Remove the files that a finished run does not need.

    They remain if a process was killed after it had written DONE.json.
    """
    for name in (CHECKPOINT, TRAJECTORY, BEGUN, "error.txt"):
        (folder.path / name).unlink(missing_ok=True)
    drop_half_written(folder.path.iterdir())
    drop_sums(folder.path)


# --- Starting or resuming a run. The files of its folder:
#
# provenance.json, timings.csv, progress.json   depend on the machine and the time of the run
# BEGUN.json, checkpoint.pt, sums-*.bin,        the state of an unfinished run; removed when the
#     trajectory.bin                            run is finished
# all other files                               byte-identical in each repetition with the same
#                                               number of threads


def execute(request: RunRequest, *, force: bool = False) -> Path:
    """Execute a run unless it is finished, and return its folder.

    With `force`, start again even if the run is finished.
    """
    folder = request.folder
    # check the device even if the run is finished
    check_device(request.experiment.device)
    if not force:
        refuse_other_run(folder, request.experiment)
        if folder.is_intact:
            remove_leftovers(folder)
            request.progress.found(folder.path)
            return folder.path
    with folder.claim():
        # another process may have finished the run while this process waited for the
        # lock
        if force or not folder.is_intact:
            attempt_with_restart(request, None if force else usable_checkpoint(request))
    return folder.path


def refuse_other_run(folder: RunFolder, experiment: Experiment) -> None:
    """Raise if the folder contains an undamaged run of another experiment."""
    if not folder.seal_file or folder.damaged_files(CONFIG):
        return
    if folder.identity != identity(experiment):
        raise Useless(
            f"{folder.path} holds another run, …-{folder.identity[:12]}; give this run another "
            "name, or write over it"
        )


def resume(
    path: Path,
    progress: AbstractProgress,
    trusted: tuple[str, ...] = (),
    options: Sequence[str] = (),
    log: str | None = None,
) -> Path:
    """Resume the run in a folder from its config.json, and return the folder.

    The provenance of the resumed run names the command that began the run. If this
    command is not recorded, it names `ntkexp train` with the run's overrides and
    `options`."""
    if not (path / CONFIG).is_file():
        raise Mistake(f"{path} is not a run folder: it has no config.json")
    refuse_other_version(path)

    # the folder may also be the trace of a followed loop, a copy under another name, or
    # a finished run
    folder = RunFolder(path)
    if "follow" in folder.read_json(CONFIG):
        raise Mistake(
            f"{path} is the trace of a followed loop; run that loop again to continue from its "
            "checkpoint"
        )
    if defect := folder.seal_file and folder.misnamed:
        raise Mistake(f"{path} {defect}")
    if folder.is_intact:
        progress.say(f"{path} is finished")
        return path

    # check the files that describe the experiment, and rebuild the experiment
    with folder.claim():
        if damaged := folder.damaged_files(CONFIG, OVERRIDES):
            reason = f"{several(damaged)} not as it was written"
            raise Mistake(
                f"{path} cannot be resumed: {reason}; the command that began it starts it again"
            )
        experiment = rebuild_experiment(folder, trusted)
        overrides = (path / OVERRIDES).read_text(encoding="utf-8").splitlines()
        request = RunRequest(
            experiment=experiment,
            folder=folder,
            overrides=overrides,
            repeat=begun_by(folder) or command("train", overrides, options),
            progress=progress,
            log=log,
        )
        attempt_with_restart(request, usable_checkpoint(request))
    return path


def begun_by(folder: RunFolder) -> str:
    """Return the command that started an unfinished run,
    or an empty text if it is not recorded."""
    try:
        return own_command(folder.provenance["command"])
    except Mistake:
        return ""


def working_folder_advice(folder: RunFolder) -> str:
    """Return the advice to change to the folder where the run was started, or an empty
    text if this is the working folder. Relative paths in a configuration depend on
    it."""
    try:
        started_in = folder.provenance.get("folder")
    except Mistake:
        return ""
    if not isinstance(started_in, str) or started_in == os.getcwd():
        return ""
    return f"; the run was started in {started_in}, so give the command there"


def rebuild_experiment(folder: RunFolder, trusted: tuple[str, ...]) -> Experiment:
    """Return the experiment of a run. Raise if the data files or the code have changed
    since the run began."""
    folder.check(CONFIG)
    if defect := folder.misnamed:
        raise Mistake(f"{folder.path} {defect}")
    try:
        experiment = build(folder.read_json(CONFIG), trusted)
        own_identity = identity(experiment)
    except Mistake as mistake:
        if type(mistake) is not Mistake:  # such as code that is not trusted
            raise
        raise Mistake(f"{mistake}{working_folder_advice(folder)}") from None
    if own_identity != folder.identity:
        files = sorted({str(file) for file in files_of(experiment)})
        reason = "this is another version"
        if files:
            reason = f"{' or '.join(files)} has changed since, or {reason}"
        raise Mistake(
            f"{folder.path} cannot be computed again, because {reason}; run the experiment again"
        )
    return experiment


def usable_checkpoint(request: RunRequest) -> Checkpoint | None:
    """Return the checkpoint of an earlier attempt, or None if there is none.

    If an earlier attempt left no usable checkpoint, warn and return None."""
    folder = request.folder
    progress = request.progress
    if (folder.path / DONE).is_file():
        progress.warn(f"{folder.path} {folder.find_defect()}; the run starts again")
        return None
    try:
        saved = load(folder, identity(request.experiment))
    except Damaged as damage:
        progress.warn(f"{damage}; the run starts again")
        return None
    if saved is None and (folder.path / CONFIG).is_file():
        progress.warn(
            f"{folder.path} was left without a checkpoint; the run starts again"
        )
    return saved


def attempt_with_restart(request: RunRequest, saved: Checkpoint | None) -> None:
    """Execute a run. If a file is found to be damaged, start the run again."""
    try:
        attempt(request, saved)
    except Damaged as damage:
        request.progress.warn(f"{damage}; the run starts again")
        attempt(request, None)


# --- Removals: retrain a finished run without some examples,
# and store the breakdown in its folder.


def remove_group(
    run: Path,
    group: Sequence[int],
    points: Sequence[int],
    progress: AbstractProgress,
    trusted: tuple[str, ...] = (),
) -> Removal:
    """Return the breakdown of the change if a group of training examples is left out.

    `points` are the queries. If the breakdown is not stored in the run folder, compute
    it by retraining, and store it.
    """
    recorded = read_removal(run, group, points)
    if recorded is not None:
        return recorded
    folder = RunFolder(run)
    experiment = rebuild_experiment(folder, trusted)
    # use the number of threads of the run, so that rounding errors repeat
    fix_circumstances(experiment, folder.provenance.get("threads"))
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
    """Train with and without a group of examples. Split the difference of the outputs
    among the left-out examples, and among the steps."""
    facts = folder.sealed_facts
    if facts["diverged"]:
        raise Mistake(
            f"{folder.path} diverged, so its examples have no contributions; choose a smaller "
            "step size"
        )
    problem = draw_problem(experiment)
    rerun = rerun_of(experiment, problem, *folder.steps_taken)

    # select the inputs of the queries, and all pairs (query, output)
    first = 0 if "train" in problem.split_slices else problem.train
    outs = experiment.path.chosen_outputs(problem.outputs)
    inputs = problem.inputs[[first + point for point in points]]
    chosen = torch.cartesian_prod(torch.arange(len(points)), torch.tensor(outs)).view(
        -1, 2
    )

    memory_folder = folder.path / REMOVAL_FOLDER
    memory_folder.mkdir(exist_ok=True)
    weight = Pair(rerun.unit_weights, rerun.without(group))
    breakdown = breakdown_between(
        rerun, weight, inputs, chosen.to(inputs.device), memory_folder, progress
    ).checked()
    pairs = [(points[k], out) for k, out in chosen.tolist()]
    repeated = repetition_error(folder, breakdown, pairs)
    return removal_of(breakdown, group, points, outs, repeated)


def repetition_error(
    folder: RunFolder, breakdown: Breakdown, pairs: Sequence[tuple[int, int]]
) -> float:
    """Return the difference between the outputs of the run and of its exact repetition,
    divided by the change that the removal causes.

    `pairs` are pairs (query, output). Raise if the difference is too large.
    """
    folder.check("predictions.zarr")
    predictions = read_predictions(folder.path / "predictions.zarr")["f_T"]
    original = breakdown.before.new_tensor([predictions[pair] for pair in pairs])
    difference = float((breakdown.before - original).norm())
    changed = float(breakdown.actual.norm())
    if difference > LARGEST_REPEATED_ERROR * (changed or float(original.norm())):
        raise Mistake(
            f"{folder.path}: an exact repetition of the training changes the outputs by "
            f"{short(difference)}, and the removal changes them by {short(changed)}: the steps "
            "amplify rounding errors; choose a smaller step size"
        )
    return difference / changed if changed else difference
