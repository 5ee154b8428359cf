"""register.jsonl: a log of all versions of the claims, and of the result of each test.

There are two logs. The published log is in the folder of the claims' files. Only
`publish` adds lines to this log. New entries and looks are written to a second log, in
the folder of the outputs. So judging a claim changes no file of a git checkout. The
register consists of the published lines, followed by the new lines of the second log.

A log only grows. Each line is a JSON object: an entry
(a version of a claim), or a look (a test of a claim).

    entry    {"entry": NAME, "date": …, "version": …, "commit": …, "digest": …,
              "sizes": {SIZE: DIGEST, …}, "reason": …, "replaces": DIGEST or null,
              "changed": {FIELD: VALUE, …}, "removed": [FIELD, …], "previous": …}
    look     {"look": NAME, "date": …, "version": …, "commit": …, "digest": …, "size": …,
              "verdict": …, "looks": {"main": {"verdict": …, "figure": …, "interval": [LOW, HIGH],
              "p": …, "seeds": …}, …}, "again": DATE, "reason": …, "previous": …}

A look may judge the tables of an earlier look again, for example because the rules of
judging have changed. Then `again` is the date of the earlier look, and `reason` is the
reason.

The first entry of a claim contains all fields of the claim. A later entry contains the
fields that differ from the entry before. To read an entry, merge its line over the
earlier lines of the same name.

`previous` is the SHA-256 digest of the previous line, so a changed or removed line
breaks the chain. register.seal contains the number of lines and the SHA-256 digest of
the last line, so that a removed end is also detected. A killed process may leave an
unfinished last line, which readers ignore. It may also leave one complete line that
register.seal does not count yet. Readers accept this line.

>>> flatten({"seeds": [0, 1], "trial": {}, "expectation": [{"margin": 0.1}]})
{'seeds': [0, 1], 'trial': {}, 'expectation.0.margin': 0.1}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import (
    Json,
    finite_json,
    read_bytes,
    read_object,
    to_text,
    waited_for,
    write_atomically,
)
from ntkexp.records.claim import ClaimRecord
from ntkexp.text import short

REGISTER, REGISTER_SEAL = "register.jsonl", "register.seal"
FIRST_REASON = "first version that was registered"
"""The reason in a claim's first entry, unless another reason is given."""
MIN_REASON_WORDS = 4
# number of complete lines that a killed process may leave unsealed
MAX_UNSEALED_LINES = 1
# relative tolerance for equal figures, because repetitions of a test differ by rounding
SAME_FIGURE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class RegisterEntry:
    """An entry of the register: a version of a claim. `looks` are the results of the
    version's statistical tests, in order of time."""

    name: str
    date: str
    version: str
    commit: str | None
    digest: str
    sizes: Mapping[str, str]
    reason: str
    replaces: str | None
    changed: Mapping[str, Json]
    removed: tuple[str, ...]
    entered: str = ""  # if the entry was added later: the time and the source
    looks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def differs(self) -> list[str]:
        """The names of the fields that differ from the replaced entry."""
        return [] if self.replaces is None else sorted({*self.changed, *self.removed})

    @property
    def fields(self) -> dict[str, Json]:
        fields: dict[str, Json] = {
            "name": self.name,
            "date": self.date,
            "version": self.version,
            "commit": self.commit,
            "digest": self.digest,
            "reason": self.reason,
            "replaces": self.replaces,
        }
        if self.entered:
            fields["entered"] = self.entered
        return fields | {"changed": self.differs, "looks": list(self.looks)}


@dataclass
class Register:
    """The log of the claims. Each line is checked when the log is read.

    `lines` are the lines of the file `path`. `published` are the lines of the published
    log, which precede them."""

    path: Path
    lines: list[dict[str, Any]]
    last: str = ""  # the SHA-256 digest of the last line
    size: int = 0  # number of bytes of all complete lines
    published: Sequence[dict[str, Any]] = ()

    @classmethod
    def read(cls, path: Path) -> Register:
        """Read the log in a file. A missing file is an empty log."""
        register = cls(path, [])
        register.reload()
        return register

    @classmethod
    def of_claim_file(cls, claim_file: Path, out: Path) -> Register:
        """Read two logs: the published log next to a claim's file, and its continuation
        in `out`, the folder of the claims' outputs."""
        register = cls.read(out / REGISTER)
        register.published = cls.read(claim_file.parent / REGISTER).lines
        return register

    def publish(self, folder: Path, names: Collection[str]) -> int:
        """Append the new lines of the named claims to the published log in `folder`,
        the folder of the claims' files. Return the number of appended lines.

        Do nothing if the folder belongs to the installed package or is not writable.
        """
        package = Path(__file__).resolve().parents[1]
        if folder.resolve().is_relative_to(package) or not os.access(folder, os.W_OK):
            return 0
        published = Register.read(folder / REGISTER)
        with waited_for(published.path):
            published.reload()
            continued = Register(self.path, self.lines, published=published.lines)
            lines = [
                line
                for line in continued.new_lines
                if line.get("entry", line.get("look")) in names
            ]
            for line in lines:
                published.append(without_chain(line))
        return len(lines)

    @property
    def new_lines(self) -> list[dict[str, Any]]:
        """The lines of the file that the published log does not contain."""
        known = [without_chain(line) for line in self.published]
        return [line for line in self.lines if without_chain(line) not in known]

    @property
    def all_lines(self) -> list[dict[str, Any]]:
        """The published lines, followed by the new lines."""
        return [*self.published, *self.new_lines]

    def reload(self) -> None:
        """Read all lines again. Raise if the chain is broken."""
        content = read_bytes(self.path) if self.path.is_file() else b""
        self.size = content.rfind(b"\n") + 1
        self.lines = []
        hashes = [""]
        for number, text in enumerate(content[: self.size].split(b"\n")[:-1], start=1):
            try:
                line = json.loads(text)
                chained = line["previous"] == hashes[-1]
            except (ValueError, KeyError, TypeError):
                chained = False
            if not chained:
                raise Mistake(
                    f"{self.path} is damaged at line {number}: this line or an earlier one was "
                    "changed or removed; restore the committed file"
                )
            self.lines.append(line)
            hashes.append(sha256(text).hexdigest())
        self.last = hashes[-1]

        # all sealed lines must exist; a killed process may have left one more line
        seal = self.path.with_name(REGISTER_SEAL)
        sealed = read_object(seal) if seal.is_file() else {}
        count = int(sealed.get("lines", 0))
        has_sealed = 0 <= count < len(hashes) and hashes[count] == sealed.get(
            "last", ""
        )
        if not has_sealed or len(hashes) - 1 - count > MAX_UNSEALED_LINES:
            raise Mistake(
                f"{self.path} has {len(self.lines)} lines and does not match {seal.name}, which "
                f"seals {count} lines: lines were removed or changed; restore both files as they "
                "were committed"
            )

    def append(self, line: Mapping[str, Json]) -> None:
        """Append a line to the log. The caller must hold the lock on the log, and must
        call `reload` after taking the lock."""
        # Seal a line that a killed process left. Else, a second kill would leave two
        # unsealed lines, which readers reject.
        self.write_seal()
        fields = finite_json({**line, "previous": self.last})
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        with self.path.open("ab") as file:
            file.truncate(self.size)  # removes an unfinished line
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self.size = file.tell()
        self.lines.append(json.loads(text))
        self.last = sha256(text).hexdigest()
        self.write_seal()

    def write_seal(self) -> None:
        """Write register.seal for all lines, unless it counts them already."""
        path = self.path.with_name(REGISTER_SEAL)
        seal = to_text({"lines": len(self.lines), "last": self.last})
        if self.lines and not (path.is_file() and path.read_text() == seal):
            write_atomically(path, seal)

    # --- Reading entries.

    def attempts(self, name: str | None = None) -> list[RegisterEntry]:
        """Return all entries of the claim `name`, or of all claims. Each entry contains
        the results of its tests."""
        entries: list[RegisterEntry] = []
        for line in self.all_lines:
            if "entry" in line and name in {None, line["entry"]}:
                entries.append(entry_of_line(line))
            elif "look" in line:
                # the result of a look belongs to the latest entry with the same digest
                key = (line["look"], line["digest"])
                matching = [
                    entry for entry in entries if (entry.name, entry.digest) == key
                ]
                if matching:
                    look = {field: line[field] for field in LOOK_FIELDS}
                    again = {
                        key: line[key] for key in ("again", "reason") if key in line
                    }
                    matching[-1].looks.append(look | again)
        return entries

    def latest_entry(self, name: str) -> RegisterEntry | None:
        """Return the latest entry of a claim, or None."""
        return next(reversed(self.attempts(name)), None)

    def fields_of(self, name: str) -> dict[str, Json]:
        """Return all fields of the last entry of a claim, as `merged_fields` does."""
        versions = merged_fields(self.attempts(name))
        return versions[-1] if versions else {}

    # --- Adding versions of claims (entries) and test results (looks).

    def enter(
        self,
        name: str,
        sizes: Mapping[str, str],
        fields: Mapping[str, Any],
        reason: str,
        about: Mapping[str, Json],
    ) -> RegisterEntry:
        """Add an entry for the current version of a claim, and return the entry.

        If the last entry has the same digests, add nothing and return the last entry.
        `sizes` are the digests of the claim at each size, `fields` its fields at the
        default size, and `about` the date, version and commit. Raise if an entry after
        the first has no `reason`, or if it uses the seeds of an earlier test again."""
        with waited_for(self.path):
            self.reload()
            latest = self.latest_entry(name)
            if latest is not None and latest.sizes == sizes:
                return latest
            # only the changes of the fields are stored
            new_fields = flatten(fields)
            old_fields = self.fields_of(name)
            changed = {
                key: value
                for key, value in new_fields.items()
                if key not in old_fields or old_fields[key] != value
            }
            removed = sorted(key for key in old_fields if key not in new_fields)
            if latest is not None and len(reason.split()) < MIN_REASON_WORDS:
                refuse_without_reason(latest, sizes, [*changed, *removed])

            # new versions must not use the seeds of earlier tests
            attempts = self.attempts(name)
            versions = zip(attempts, merged_fields(attempts), strict=True)
            looked = [
                version
                for attempt, version in versions
                if any(look["size"] == "default" for look in attempt.looks)
            ]
            refuse_used_seeds(name, new_fields, looked)

            line: dict[str, Json] = {
                "entry": name,
                **about,
                "digest": sizes["default"],
                "sizes": dict(sizes),
                "reason": reason or FIRST_REASON,
                "replaces": None if latest is None else latest.digest,
                "changed": changed,
                "removed": removed,
            }
            self.append(line)
            return self.attempts(name)[-1]

    def record(
        self,
        claim: ClaimRecord,
        about: Mapping[str, Json],
        again: str = "",
        reason: str = "",
    ) -> None:
        """Add the results of a claim's statistical tests (looks),
        unless an equal line already exists.

        If the tables of an earlier look were judged again, `again` is the date of that
        look, and `reason` is the reason."""
        with waited_for(self.path):
            self.reload()
            entries = [
                entry
                for entry in self.attempts(claim.name)
                if claim.digest in entry.sizes.values()
            ]
            entry = entries[-1] if entries else None
            if entry is None:
                raise Mistake(
                    f"{claim.name}: {claim.digest} is not in {self.path}, so its test results "
                    "cannot be recorded"
                )
            looks = outcomes_of(claim.looks_fields)
            recorded = [look for look in entry.looks if look["size"] == claim.size]
            if any(same_outcome(look["looks"], looks) for look in recorded):
                return
            line: dict[str, Json] = {
                "look": claim.name,
                **about,
                "digest": entry.digest,
                "size": claim.size,
                "verdict": claim.verdict,
                "looks": looks,
            }
            if again:
                line |= {"again": measured_date(entry.looks, again), "reason": reason}
            self.append(line)


def without_chain(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line without its link to the previous line."""
    return {key: value for key, value in line.items() if key != "previous"}


def merged_fields(attempts: Sequence[RegisterEntry]) -> list[dict[str, Json]]:
    """Return all fields of each entry of one claim. They are merged from the changes in
    the entry and in all earlier entries."""
    versions: list[dict[str, Json]] = []
    fields: dict[str, Json] = {}
    for attempt in attempts:
        fields = {
            key: value for key, value in fields.items() if key not in attempt.removed
        }
        fields |= attempt.changed
        versions.append(fields)
    return versions


ENTRY_FIELDS = (
    "date",
    "version",
    "commit",
    "digest",
    "sizes",
    "reason",
    "replaces",
    "changed",
)
LOOK_FIELDS = ("date", "version", "commit", "size", "verdict", "looks")


def entry_of_line(line: Mapping[str, Any]) -> RegisterEntry:
    return RegisterEntry(
        line["entry"],
        **{key: line[key] for key in ENTRY_FIELDS},
        removed=tuple(line["removed"]),
        entered=line.get("entered", ""),
    )


def fields_of_look(fields: Mapping[str, Json], look: str) -> dict[str, Json]:
    """Return the fields of the main or the second look. The fields of a claim contain
    only those fields of the second look that differ from the main look.

    >>> fields_of_look({"statement": "…", "main.seeds": [0, 1], "second.seeds": [8, 9]}, "second")
    {'seeds': [8, 9]}
    """
    names = dict.fromkeys(("main", look))
    merged: dict[str, Json] = {}
    for name in names:
        prefix = f"{name}."
        merged |= {
            key.removeprefix(prefix): value
            for key, value in fields.items()
            if key.startswith(prefix)
        }
    return merged


def refuse_used_seeds(
    name: str, now: Mapping[str, Json], seen: Sequence[Mapping[str, Json]]
) -> None:
    """Raise if a changed look would use data that an earlier look has already judged.

    The data of a look are determined by its runs or its trial, and by its seeds. If a
    look has changed, for example in its rules, but its runs and trial have not, it
    needs new seeds. An unchanged look may keep its seeds. `now` are the fields of the
    new version of the claim, and `seen` the fields of all versions that were tested."""
    for look in ("main", "second"):
        after = fields_of_look(now, look)
        versions = [fields_of_look(fields, look) for fields in seen]
        if after in versions:
            continue
        for before in versions:
            if data_fields(before) == data_fields(after):
                refuse_common_seeds(
                    f"{name}: the {look} look", before["seeds"], after["seeds"]
                )


def data_fields(fields: Mapping[str, Json]) -> dict[str, Json]:
    """Return the fields of a look that determine its data, except the seeds."""
    return {
        key: value
        for key, value in fields.items()
        if key.partition(".")[0] in ("runs", "trial")
    }


def refuse_common_seeds(where: str, before: Json, after: Json) -> None:
    assert isinstance(before, list)
    assert isinstance(after, list)
    spent = [seed for seed in after if seed in before]
    if spent:
        first = max(before) + 1
        raise Mistake(
            f"{where} has seed {spent[0]}, whose results were already seen; a look that "
            "was changed after its results were seen needs new seeds, such as "
            f"{first}..{first + len(after) - 1}; to continue with the same seeds, plan "
            "the numbers of seeds beforehand: `looks: [6, 24]`"
        )


def refuse_second_choice(
    attempts: Sequence[RegisterEntry], recorded: Mapping[str, Any]
) -> None:
    """Raise if the main or the second look of `recorded`, an outcome of the last entry,
    repeats an earlier look with other numbers and another verdict.

    A look repeats another one if it has the same specification and the same number of
    seeds. The first outcome counts, even if the control or the statement was changed
    later. If the numbers are equal, the verdicts may differ, because a verdict also
    depends on the control."""
    for name in ("main", "second"):
        looks = looks_of_last_version(attempts, name)
        measured = measured_look(looks, recorded)
        seeds = measured["looks"][name]["seeds"]
        first = next(
            (look for look in looks if look["looks"][name]["seeds"] == seeds), measured
        )
        outcomes = [look["looks"][name] for look in (first, measured)]
        verdicts = [outcome["verdict"] for outcome in outcomes]
        numbers = [(outcome["figure"], *outcome["interval"]) for outcome in outcomes]
        if verdicts[0] != verdicts[1] and not same_outcome(
            [*numbers[0]], [*numbers[1]]
        ):
            raise Mistake(
                f"{attempts[-1].name}: the {name} look of {measured['date'][:10]} was "
                f"{verdicts[1]}, but the first look at the same specification, of "
                f"{first['date'][:10]}, was {verdicts[0]}; the first one counts"
            )


def looks_of_last_version(
    attempts: Sequence[RegisterEntry], name: str
) -> list[dict[str, Any]]:
    """Return the measurements at default size of all entries whose look `name` has the
    same specification as in the last entry."""
    versions = [fields_of_look(fields, name) for fields in merged_fields(attempts)]
    return [
        look
        for attempt, version in zip(attempts, versions, strict=True)
        if version == versions[-1]
        for look in measurements(attempt)
    ]


def measurements(attempt: RegisterEntry) -> list[dict[str, Any]]:
    """Return the looks at default size that measured something. Omit looks that judged
    earlier tables again."""
    return [
        look
        for look in attempt.looks
        if look["size"] == "default" and "again" not in look
    ]


def describe_repetition(attempts: Sequence[RegisterEntry]) -> str:
    """If the last measurement repeated an unchanged main look with another figure, say
    so. Otherwise return ""."""
    looks = [look["looks"]["main"] for look in looks_of_last_version(attempts, "main")]
    for first in looks[:-1]:
        last = looks[-1]
        same_seeds = first["seeds"] == last["seeds"]
        if same_seeds and not same_outcome(first["figure"], last["figure"]):
            return (
                f"{attempts[-1].name}: an earlier look at the same specification had the "
                f"figure {short(first['figure'])}, and this look has {short(last['figure'])}; "
                "Holm's correction counts both looks"
            )
    return ""


def main_looks(attempts: Sequence[RegisterEntry]) -> int:
    """Count the main looks that were taken at all versions of a claim, at least 1.

    The correction for multiple tests counts each of them. Two looks with the same
    figure and the same number of seeds count once. The planned stages of a look share
    one error probability, so they also count once."""
    figures: list[list[Json]] = []
    looks_by_stage: dict[tuple[str, int], int] = {}
    for attempt, fields in zip(attempts, merged_fields(attempts), strict=True):
        specification = json.dumps(fields_of_look(fields, "main"), sort_keys=True)
        for look in measurements(attempt):
            main = look["looks"]["main"]
            figure = [main["figure"], main["seeds"]]
            if any(same_outcome(figure, other) for other in figures):
                continue
            figures.append(figure)
            stage = specification, main["seeds"]
            looks_by_stage[stage] = looks_by_stage.get(stage, 0) + 1
    specifications = {specification for specification, _ in looks_by_stage}
    looks = [
        max(count for stage, count in looks_by_stage.items() if stage[0] == one)
        for one in specifications
    ]
    return max(1, sum(looks))


def refuse_without_reason(
    latest: RegisterEntry, sizes: Mapping[str, str], fields: Sequence[str]
) -> None:
    """Raise because a claim has changed, and no reason was given.

    Args:
        latest: the last entry of the claim.
        sizes: the new digests of the claim at each size.
        fields: the names of its changed fields at the default size.
    """
    parts = fields or [
        f"size {size}" for size in sizes if sizes[size] != latest.sizes[size]
    ]
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    name = latest.name
    raise Mistake(
        f"{name} is not what was registered on {latest.date[:10]} as {latest.digest}: "
        f"{', '.join(parts[:4])}{more} changed; give `ntkexp claims register {name}` "
        f"a reason of at least {MIN_REASON_WORDS} words, or put it back"
    )


def measured_date(looks: Sequence[Mapping[str, Any]], date: str) -> str:
    """Return the date when the tables of a look were measured. `date` is the date of
    the look, which is later if the look judged old tables again."""
    for look in looks:
        if look["date"] == date and "again" in look:
            return str(look["again"])
    return date


def measured_look(
    looks: Sequence[Mapping[str, Any]], recorded: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the look that measured the tables which `recorded` judges. This is
    `recorded` itself, unless it judged the tables of an earlier look again."""
    date = recorded.get("again")
    return next((look for look in looks if look["date"] == date), recorded)


def outcomes_of(looks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the results of a claim's tests as the register records them."""
    outcomes = {}
    for name, look in looks.items():
        outcomes[name] = {
            key: look[key] for key in ("verdict", "figure", "interval", "p")
        }
        outcomes[name]["seeds"] = len(look["seeds"])
    return outcomes


def same_outcome(first: Any, second: Any) -> bool:
    """Return True if two recorded results of a claim's tests are equal up
    to rounding. NaN equals null.

    >>> same_outcome({"figure": 1.0, "interval": [0, None]}, {"figure": 1.0 + 1e-9, "interval": [0, float("nan")]})
    True
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(
            same_outcome(first[key], second[key]) for key in first
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_outcome, first, second))
    if isinstance(first, float | int) and isinstance(second, float | int):
        return math.isclose(first, second, rel_tol=SAME_FIGURE_TOLERANCE, abs_tol=1e-12)
    return bool(finite_json(first) == finite_json(second))


def flatten(value: Any, at: str = "") -> dict[str, Json]:
    """Return the leaves of nested data by dotted keys.

    An empty value is a leaf, and so is a list without mappings.
    """
    items: Iterator[tuple[object, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list | tuple) and any(
        isinstance(item, Mapping) for item in value
    ):
        items = iter(enumerate(value))
    leaves: dict[str, Json] = {}
    for key, item in items:
        leaves |= flatten(item, f"{at}.{key}" if at else str(key))
    return leaves or {at: list(value) if isinstance(value, tuple) else value}
