"""An experiment is carried out in a run folder: begun, resumed from its checkpoint, finished, drawn.

provenance.json, timings.csv, progress.json   what the clock and the machine say
BEGUN.json, checkpoint.pt, sums-*.bin,        where the run stands, its sums if they lie on disk, and its weights; gone
    trajectory.bin                            when it is finished
everything else                               the same bytes each time, at the same number of threads
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ntkexp.config.build import build
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import files_of, folder_name, identity
from ntkexp.mistake import Mistake, Useless
from ntkexp.progress import AbstractProgress
from ntkexp.records.command import command
from ntkexp.records.folder import CONFIG, DONE, OVERRIDES, RunFolder
from ntkexp.records.provenance import PROVENANCE, refuse_other_version
from ntkexp.records.seal import Damaged
from ntkexp.run.attempt import RunRequest, attempt, remove_leftovers
from ntkexp.run.checkpoint import Checkpoint, load
from ntkexp.run.environment import check_device
from ntkexp.text import several


def execute(
    experiment: Experiment,
    overrides: Sequence[str],
    out: Path,
    force: bool,
    progress: AbstractProgress,
    options: Sequence[str] = (),
    pictures: bool = True,
    most_threads: int | None = None,
) -> Path:
    """The folder of the finished run, new, resumed, or found as it was; `options` are those that repeat it."""
    folder = RunFolder(out / "runs" / folder_name(experiment))
    check_device(experiment.device)  # whether or not there is anything to compute
    if not force:
        refuse_other(folder, identity(experiment))
    if not force and folder.whole:
        remove_leftovers(folder)
        progress.found(folder.path)
        return folder.path
    with folder.claim():
        if force or not folder.whole:  # another process may have finished it while the lock was asked for
            repeat = command("train", overrides, options)
            asked = RunRequest(
                experiment=experiment,
                folder=folder,
                overrides=overrides,
                repeat=repeat,
                progress=progress,
                pictures=pictures,
                most_threads=most_threads,
            )
            attempt_twice(asked, None if force else state_left(asked))
    return folder.path


def resume(path: Path, progress: AbstractProgress, trusted: tuple[str, ...] = (), options: Sequence[str] = ()) -> Path:
    """The rest of a run, from its own config; `options` repeat a run that does not say what it was begun by."""
    if not (path / CONFIG).is_file():
        raise Mistake(f"{path} is no run folder: it has no config.json")
    refuse_other_version(path)
    folder = RunFolder(path)
    if "follow" in folder.read_json(CONFIG):
        raise Mistake(f"{path} is the trace of a loop of yours: that loop goes on there, from its own checkpoint")
    if strange := folder.vouching and folder.misnamed:
        raise Mistake(f"{path} {strange}")
    if folder.whole:
        progress.say(f"{path} is finished")
        return path
    with folder.claim():
        if wrong := folder.broken(CONFIG, OVERRIDES):
            what = f"{several(wrong)} not as it was written"
            raise Mistake(f"{path} cannot be resumed: {what}; the command that began it begins it anew")
        experiment = rebuilt(folder, trusted)
        overrides = (path / OVERRIDES).read_text(encoding="utf-8").splitlines()
        repeat = begun_by(folder) or command("train", overrides, options)
        asked = RunRequest(experiment=experiment, folder=folder, overrides=overrides, repeat=repeat, progress=progress)
        attempt_twice(asked, state_left(asked))
    return path


def begun_by(folder: RunFolder) -> str:
    """The command that a dead run was begun by, if it says so."""
    try:
        return str(folder.read_sealed(PROVENANCE)["command"])
    except Mistake:
        return ""


def rebuilt(folder: RunFolder, trusted: tuple[str, ...]) -> Experiment:
    """The experiment of a run, if it is the same today: with other data, or other code, numbers would be others."""
    folder.check(CONFIG)
    if strange := folder.misnamed:
        raise Mistake(f"{folder.path} {strange}")
    experiment = build(folder.read_json(CONFIG), trusted)
    if identity(experiment) != folder.identity:
        files = sorted({str(file) for file in files_of(experiment)})
        other = f"{' or '.join(files)} has changed since, or this is another version" if files else "another version"
        what = other if files else f"this is {other}"
        raise Mistake(f"{folder.path} cannot be computed again, for {what}; run the experiment anew")
    return experiment


def refuse_other(folder: RunFolder, of: str) -> None:
    """Refuse a folder in which another run lies that is not damaged: it is neither this one, nor to be written over."""
    if folder.vouching and not folder.broken(CONFIG) and folder.identity != of:
        raise Useless(
            f"{folder.path} holds another run, …-{folder.identity[:12]}; give it its own name, or write over it"
        )


def state_left(asked: RunRequest) -> Checkpoint | None:
    """Where an earlier attempt left the run; that it has to begin anew is said, with the reason."""
    folder, progress = asked.folder, asked.progress
    if (folder.path / DONE).is_file():
        progress.warn(f"{folder.path} {folder.look()}; the run begins anew")
        return None
    try:
        saved = load(folder, identity(asked.experiment))
    except Damaged as damage:
        progress.warn(f"{damage}; the run begins anew")
        return None
    if saved is None and (folder.path / CONFIG).is_file():
        progress.warn(f"{folder.path} was left without a checkpoint; the run begins anew")
    return saved


def attempt_twice(asked: RunRequest, saved: Checkpoint | None) -> None:
    """Run; once more from the beginning, if a file turns out to be damaged on the way."""
    try:
        attempt(asked, saved)
    except Damaged as damage:
        asked.progress.warn(f"{damage}; the run begins anew")
        attempt(asked, None)
