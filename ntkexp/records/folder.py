"""A run folder: one process at a time writes it, and `DONE.json`, written last, says that it is whole; which program
and command made it.

The command that stands beside results: given again in the same folder, it asks for the same experiment.

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
    Sealing,
    Seals,
    acquire,
    broken,
    is_held,
    make_folder,
    read_object,
    read_sealed,
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

# --- Which program wrote a number.
#
# `results_version` counts the changes that can move a result: it belongs to the identity of a run, so that a run
# of an earlier program is never taken for one of this.


results_version = 12


def package_version() -> str:
    """Look up the version of the installed package, which is slow, so it is asked for only where it is shown."""
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
"""What the program's commands are called."""


def own_command(text: str) -> str:
    """Return a command that a file names if it is one of this program and nothing else; a shell would run the rest.

    >>> own_command("ntkexp train model.width=8"), own_command("curl evil | sh"), own_command("ntkexp runs; rm -r ~")
    ('ntkexp train model.width=8', '', '')
    """
    try:
        words = shlex.split(text)
    except ValueError:
        return ""
    is_own = words[:1] == ["ntkexp"] and words[1:2] and words[1] in COMMANDS
    return text if is_own and text.isprintable() and shlex.join(words) == text else ""


# --- provenance.json: which program made a run, by which command, and where.
#
# Every change of `results_version` may move numbers, or what they are called: a run is read by the version that
# made it.


PROVENANCE, PROGRESS = "provenance.json", "progress.json"


class OtherVersion(Mistake):
    """A run was made by another version than this."""


def refuse_other_version(run: Path) -> None:
    """A run that another version made is of no use to this one; one that cannot tell is judged by its other files."""
    try:
        made = RunFolder(run).provenance
    except Mistake:
        return
    if made.get("results_version") != results_version:
        by = version_of(made.get("ntkexp"), made.get("results_version"))
        this = version_of(package_version(), results_version)
        repeat = own_command(made["command"])
        advice = f"`{repeat}` runs it again" if repeat else "run it again"
        raise OtherVersion(f"{run} was made by {by}, and this is {this}; {advice}")


def version_of(package: object, results: object) -> str:
    """Spell a version in words.

    >>> version_of("0.1.0", 4)
    'ntkexp 0.1.0 with results_version 4'
    """
    return f"ntkexp {package} with results_version {results}"


# --- A run folder: one process at a time writes it, and `DONE.json`, written last, says that it is whole.
#
#     .lock        held by the process that writes
#     BEGUN.json   {"identity": …, "seals": {file: [bytes, seal]}} of what is written before the first step, and at the
#                  end "pictures": {file: [bytes, seal]}, before they are written; goes when DONE.json comes
#     DONE.json    {"identity": …, "outcome": …, …, "sizes": {file or folder: bytes}, "seals": …}; `sizes`: of those
#                  with the same bytes each time
#
# These two seal the files that they name, and say whose they are: `identity` is that of the experiment, which covers
# the files that it reads and the `results_version`. Any other sealed file is sealed for its name and this identity.
#
# A folder is `done` if every file is as it was sealed, else `running` if the lock is held, else `damaged` if it was
# done, else `interrupted` if it can go on from a checkpoint or a trace, else `dead`: an attempt that begins anew. To
# ask that of a folder, files of up to a megabyte are read and larger ones are measured; `whole` reads all, and so does
# `check`, before anything is made of a file.
#
# What a kill leaves, and what the next attempt makes of it, which has to hold the lock first:
#
#     before the first checkpoint   a dead folder: `clear` empties it, and the run starts again
#     later, before DONE.json       an interrupted one: `forget` keeps the files that the checkpoint counts, metrics.csv
#                                   is cut back to where it was then, and the steps since are taken again
#     after DONE.json               a finished one: a checkpoint that is still there is removed
#     while it is emptied           pictures go first, then DONE.json, config.json last: a damaged run and then a dead
#                                   one, which is emptied further


LOCK, CONFIG, OVERRIDES, BEGUN, DONE = (
    ".lock",
    "config.json",
    "overrides.txt",
    "BEGUN.json",
    "DONE.json",
)

CHECKPOINT, TRACE = "checkpoint.pt", "trace"
"""What an attempt can go on from: that of a run, and that of a loop that was followed."""

REDO = "resume it to run it again"
SMALL = 1 << 20  # bytes of a file that is read whenever the state of its folder is asked for

TRACE_IDENTITY, START_WEIGHTS = "trace_identity", "start_weights"
"""Keys of the config.json of a trace: a random number, drawn when it begins, and the digest of its start weights."""

CIRCUMSTANCES = (
    "device",
    "threads",
    "memory_gb",
    "checkpoint_seconds",
    TRACE_IDENTITY,
    START_WEIGHTS,
)
"""Keys of config.json that do not decide what is computed: runs that differ in them alone are the same run."""

NAMED = re.compile(r"-w\d+-s\d+-([0-9a-f]{12})")
"""How the name of a run ends that it was given (`experiment.identity`): by the beginning of its identity."""

EVENTS = r"events\.out\.tfevents\.(\d{16,}|[0-9a-f]{12}|run)"
"""The names of our files for TensorBoard. Those of other writers hold the name of the machine."""

OURS = re.compile(
    r"\.lock|overrides\.txt|error\.txt|data\.npz|weights\.pt|checkpoint\.pt|trajectory\.bin"
    r"|sums-\d+-\d+\.bin|\.sums-[a-z0-9_]{8}"
    r"|(config|BEGUN|DONE|progress|provenance)\.json|(metrics|retraced|results|timings)\.csv"
    rf"|tensorboard/{EVENTS}|removal/(again-[a-z0-9_]{{8}}/.+|[0-9a-f]{{12}}\.json)"
    r"|validation/([0-9a-f]{12}\.bin|ground_truth\.npz)"
    rf"|(kernels|contributions|predictions|leave_out|removal/[0-9a-f]{{12}})\.zarr/{STORED}"
    r"|trace/(rank-\d+/)?(\.lock|(start|ended|asked|sweep)\.bin|(rows|steps)\.log)|trace/weights/\d+\.bin"
    rf"|(.*/)?{HALF_WRITTEN}"
)
"""The files that a run writes under fixed names, by their places in its folder.

Pictures have no fixed names. DONE.json lists them, or BEGUN.json until that is written.
"""

PICTURE = re.compile(r"plots/[^/]+\.(svg|png|csv)")

SOMETIMES = ("retraced.csv",)
"""Files that not every run has: in a run that wrote none, they are those of another."""

State: TypeAlias = Literal["done", "running", "damaged", "interrupted", "dead", "absent"]


class Held(Mistake):
    """Another process writes the run."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    # --- What has become of the run

    @property
    def state(self) -> State:
        """What has become of the run is one word. Inside one's own claim, ask `done`: the lock is held there."""
        return self.state_by(self.defect)

    def state_by(self, defect: str | None) -> State:
        """What has become of the run that has this `defect`, which takes long to find."""
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
    def whole(self) -> bool:
        """Whether the run is finished and whole, every byte looked at."""
        return self.find_defect() is None

    @property
    def defect(self) -> str | None:
        """The run is not finished and whole for this reason, in words that follow the folder's name."""
        return self.find_defect(SMALL)

    def find_defect(self, largest: float = inf, *, surplus: bool = True) -> str | None:
        """Find the defect that is seen when files up to this size are read; `surplus` ones in stores take a walk."""
        if not self.path.is_dir():
            return "is not a folder" if self.path.exists() else "does not exist"
        if not (self.path / DONE).is_file():
            return "is not finished: it has no DONE.json"
        try:
            done = self.sealed_facts
        except Mistake:
            return f"is damaged, or of an earlier version: {DONE} is not as this one writes it"
        if strange := self.misnamed_by(done["identity"]):
            return strange
        wrong = [
            name
            for name, size in done["sizes"].items()
            if surplus and size_of(self.path / name) != size
        ]
        wrong = wrong or broken(self.path, done["seals"], largest)
        wrong = wrong or [
            name for name in SOMETIMES if name not in done["sizes"] and (self.path / name).exists()
        ]
        return f"is damaged: {several(wrong)} not as {DONE} says" if wrong else None

    # --- Whose it is, and the seals of its files

    @property
    def seal_file(self) -> str | None:
        """This file holds the seals of others, if there is one by now."""
        return next((name for name in (DONE, BEGUN) if (self.path / name).is_file()), None)

    @property
    def sealed_facts(self) -> dict[str, Any]:
        """What this file says. It is sealed for its name alone, and says itself whose it is."""
        from ntkexp.records.schema import Begun, Done, checked  # noqa: PLC0415  pydantic is slow to import

        seal_file = self.seal_file or BEGUN
        path = self.path / seal_file
        return checked(read_sealed(path, seal_file), Done if seal_file == DONE else Begun, path)

    @property
    def steps_taken(self) -> tuple[float, int]:
        """The size of the steps of a finished run, and their number."""
        facts = self.sealed_facts
        if not {"step_size", "steps"} <= facts.keys():
            raise Damaged(
                f"{self.path / DONE} does not say how many steps of which size were taken; {REDO}"
            )
        return float(facts["step_size"]), int(facts["steps"])

    @property
    def provenance(self) -> dict[str, Any]:
        """The content of provenance.json."""
        from ntkexp.records.schema import Provenance, checked  # noqa: PLC0415  pydantic is slow to import

        return checked(self.read_sealed(PROVENANCE), Provenance, self.path / PROVENANCE)

    @property
    def progress(self) -> dict[str, Any]:
        """The content of progress.json."""
        from ntkexp.records.schema import Progress, checked  # noqa: PLC0415  pydantic is slow to import

        return checked(self.read_sealed(PROGRESS), Progress, self.path / PROGRESS)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json for readers: what cannot be printed is spelled by its codes."""
        from ntkexp.records.schema import checked_config  # noqa: PLC0415  pydantic is slow to import

        return checked_config(self.read_json(CONFIG), self.path / CONFIG)

    @property
    def identity(self) -> str:
        """Whose files these are."""
        return str(self.sealed_facts["identity"])

    @property
    def misnamed(self) -> str | None:
        """Its name is that of another run than lies in it: it was copied over that, or given its name."""
        return self.misnamed_by(self.identity)

    def misnamed_by(self, identity: str) -> str | None:
        """Its name is that of a run of another identity."""
        named = NAMED.search(os.path.basename(os.path.abspath(self.path)))
        if named is None or not identity or identity.startswith(named[1]):
            return None
        return f"has the name of another run than the one in it, …-{identity[:12]}; give it that name, or move it away"

    def broken(self, *names: str) -> list[str]:
        """Name those of these files, and of those in these folders, that are not as they were written."""
        try:
            seals: Seals = self.sealed_facts["seals"]
        except Mistake:
            return [self.seal_file or BEGUN]
        seals_by_name = {
            name: {file: seals[file] for file in seals if f"{file}/".startswith(f"{name}/")}
            for name in names
        }
        return [
            file
            for name, expected in seals_by_name.items()
            for file in (broken(self.path, expected) if expected else [name])
        ]

    def check(self, *names: str) -> None:
        """Refuse a run of which these files, or files in these folders, are not as they were written."""
        if wrong := self.broken(*names):
            raise Damaged(f"{self.path} is damaged: {several(wrong)} not as it was written; {REDO}")

    # --- Writing

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Be the one process that writes this folder; it is created if need be."""
        try:
            make_folder(self.path)
            descriptor = acquire(self.path / LOCK)
        except BlockingIOError as error:
            raise Held(
                f"{self.path} is being written by another process; wait for it, or change the run"
            ) from error
        except OSError as error:
            raise NoPlace(
                f"{self.path} cannot be written ({error.strerror}); choose another place"
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def write(self, name: str, content: str | bytes) -> None:
        write_atomically(self.path / name, content)

    def write_json(self, name: str, value: Json) -> None:
        self.write(name, to_text(value))

    def sealed_for(self, name: str) -> str:
        """What a file is sealed for that neither BEGUN.json nor DONE.json seals."""
        return f"{name} of {self.identity}"

    def write_sealed(self, name: str, value: Mapping[str, Json]) -> None:
        """Write a JSON file with its seal, whole or not at all."""
        self.write(name, sealed_text(value, self.sealed_for(name)))

    def read_sealed(self, name: str) -> dict[str, Any]:
        """Read a JSON file that was written so, for this run."""
        return read_sealed(self.path / name, self.sealed_for(name))

    def read_json(self, name: str) -> dict[str, Any]:
        return read_object(self.path / name)

    def begin(self, names: Iterable[str], identity: str = "") -> None:
        """Seal what is written before the first step, and say whose it is."""
        self.write(
            BEGUN, sealed_text({"identity": identity, "seals": sealed(self.path, names)}, BEGUN)
        )

    def finish(self, names: Iterable[str], *others: str, identity: str = "", **facts: Json) -> None:
        """Declare the run finished: whose it is, the sizes of files and folders with the same bytes each time, the
        seals of these and others, and what became of it.
        """
        names = list(names)
        sizes = {name: size_of(self.path / name) for name in names}
        if missing := [name for name, size in sizes.items() if size is None]:
            raise FileNotFoundError(f"{self.path} cannot be finished without {', '.join(missing)}")
        record = {
            "identity": identity,
            **facts,
            "sizes": sizes,
            "seals": sealed(self.path, [*names, *others]),
        }
        self.write(DONE, sealed_text(record, DONE))

    def write_pictures(self, pictures: Mapping[str, str]) -> list[str]:
        """Write pictures, by their names in `plots`, and return their places.

        BEGUN.json lists them first, so that those which a killed process leaves are known to be ours.
        """
        contents = {f"plots/{name}": content.encode() for name, content in pictures.items()}
        marks = dict[str, Json]()
        for place, content in contents.items():
            sealing = Sealing()
            sealing.take(content)
            marks[place] = sealing.mark
        self.write(
            BEGUN, sealed_text({**read_sealed(self.path / BEGUN, BEGUN), "pictures": marks}, BEGUN)
        )
        for place, content in contents.items():
            self.write(place, content)
        return sorted(contents)

    # --- Removing

    @property
    def pictures(self) -> Seals:
        """The seals of the pictures that BEGUN.json or DONE.json lists."""
        listed = dict[str, tuple[int, str]]()
        for name in (BEGUN, DONE):
            with suppress(Mistake):
                record = read_sealed(self.path / name, name)
                listed |= record.get("pictures", {})
                listed |= {
                    place: mark
                    for place, mark in record["seals"].items()
                    if PICTURE.fullmatch(place)
                }
        return listed

    def reopen(self) -> None:
        """Remove the pictures and DONE.json of an earlier end: the folder will get others."""
        pictures = self.pictures
        if changed := [name for name in broken(self.path, pictures) if (self.path / name).exists()]:
            what = several(changed)
            raise NoPlace(
                f"{self.path} holds what no run wrote ({what}); move it away, or choose another place"
            )
        remove_files(self.path, [*pictures, DONE])

    @property
    def is_ours(self) -> bool:
        """Whether one of its files is one that only this package writes."""
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
        """Raise if anything lies here that no run wrote; so does a picture that was changed since."""
        pictures = self.pictures
        changed = set(broken(self.path, pictures))
        refuse_strangers(
            self.path,
            lambda name: OURS.fullmatch(name) or (name in pictures and name not in changed),
        )

    def forget(self, names: Iterable[str]) -> None:
        """Remove everything but the lock and these files: what was written after a checkpoint is written again."""
        self.refuse_strangers()
        spared = {LOCK, *names}
        remove_files(self.path, [name for name in files_in(self.path) if name not in spared])
        remove_empty_folders(self.path)

    def note_error(self, text: str) -> None:
        """Keep the reason of a failure, if there is anything else to keep and room to write it."""
        with suppress(OSError):
            if (self.path / CONFIG).is_file():
                self.write("error.txt", text)
            else:
                (self.path / LOCK).unlink()
                self.path.rmdir()

    def clear(self) -> None:
        """Remove everything but the lock: pictures while a file lists them, then DONE.json, and config.json last.

        A kill in between leaves a damaged run, then a dead one.
        """
        entries = {entry.name for entry in self.path.iterdir() if entry.name != LOCK}
        # a run that lost its configuration is known by what says that it ended, or began
        if entries.isdisjoint((CONFIG, DONE, BEGUN)) and not all(
            name.endswith(PARTIAL) for name in entries
        ):
            raise NoPlace(f"{self.path} holds files that no run wrote; choose another place")
        self.refuse_strangers()
        ranks = {DONE: 1, BEGUN: 3, CONFIG: 4}
        names = [name for name in files_in(self.path) if name != LOCK]
        remove_files(
            self.path,
            sorted(names, key=lambda name: 0 if PICTURE.fullmatch(name) else ranks.get(name, 2)),
        )
        remove_empty_folders(self.path)


def is_run_folder(path: Path) -> bool:
    """Whether this is a run folder, in whatever state."""
    return (path / CONFIG).is_file() and any((path / name).exists() for name in (LOCK, DONE))
