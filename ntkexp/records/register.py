"""claim/register.jsonl: what claims said beforehand, when and why it was changed, and what every look at them found.

The log lies beside the files of the claims, and only grows, by a line of JSON for each

    entry    {"entry": NAME, "date": …, "version": …, "commit": …, "digest": …, "sizes": {SIZE: DIGEST, …},
              "reason": …, "replaces": DIGEST or null, "changed": {FIELD: VALUE, …}, "removed": [FIELD, …],
              "previous": …}
    look     {"look": NAME, "date": …, "version": …, "commit": …, "digest": …, "size": …, "verdict": …,
              "looks": {"main": {"verdict": …, "figure": …, "interval": [LOW, HIGH], "p": …, "seeds": …}, …},
              "previous": …}

An entry holds the fields by which it differs from the one that it replaces, the first of a name all of them: what any
entry said is the sum of its line and of those before it. `previous` is the SHA-256 of the line before, so that a line
which is changed or taken out breaks the chain at the next one; `register.seal` holds the number of lines and the
SHA-256 of the last, so that the end cannot be taken off either. A kill leaves at most an unfinished last line, which
counts for nothing, or a whole one that is not sealed yet, which counts.

>>> flatten({"seeds": [0, 1], "trial": {}, "expectation": [{"margin": 0.1}]})
{'seeds': [0, 1], 'trial': {}, 'expectation.0.margin': 0.1}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
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

REGISTER, SEAL = "register.jsonl", "register.seal"
FIRST = "first version that was registered"
"""The reason of a claim's first entry, unless another is given."""
SHORTEST = 4
"""Words that a reason has at least."""
UNSEALED = 1
"""Lines behind the seal that a killed process may leave."""
SAME = 1e-6
"""Figures of one look at two times differ by no more than this share, by rounding alone."""


@dataclass(frozen=True)
class RegisterEntry:
    """An entry of the register with the looks at it, the latest last."""

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
    entered: str = ""  # when and from what, where it was not entered on its date
    looks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def differs(self) -> list[str]:
        """The fields in which it differs from the entry that it replaces."""
        return [] if self.replaces is None else sorted({*self.changed, *self.removed})

    @property
    def fields(self) -> dict[str, Json]:
        about: dict[str, Json] = {
            "name": self.name,
            "date": self.date,
            "version": self.version,
            "commit": self.commit,
        }
        about |= {"digest": self.digest, "reason": self.reason, "replaces": self.replaces}
        about |= {"entered": self.entered} if self.entered else {}
        return about | {"changed": self.differs, "looks": list(self.looks)}


@dataclass
class Register:
    """The log in a file, as far as it was read; reading it checks every line."""

    path: Path
    lines: list[dict[str, Any]]
    last: str = ""  # the SHA-256 of the last line
    size: int = 0  # bytes of all whole lines

    @classmethod
    def opened(cls, path: Path) -> Register:
        """Read the log; one that is not there is empty."""
        register = cls(path, [])
        register.read()
        return register

    @classmethod
    def beside(cls, claim_file: Path, out: Path) -> Register:
        """Read the log beside a claim's file.

        The claims of an installed package, and those in a folder that cannot be written to, have theirs in the folder
        `out` of the claims' outputs, where it goes on from the log beside them.
        """
        beside, package = claim_file.parent / REGISTER, Path(__file__).resolve().parents[1]
        if os.access(claim_file.parent, os.W_OK) and not claim_file.resolve().is_relative_to(
            package
        ):
            return cls.opened(beside)
        if beside.is_file() and not (out / REGISTER).is_file():
            for name in (SEAL, REGISTER):
                write_atomically(out / name, read_bytes(beside.with_name(name)))
        return cls.opened(out / REGISTER)

    def read(self) -> None:
        """Read all lines again, and refuse a chain that is broken."""
        content = read_bytes(self.path).decode(errors="replace") if self.path.is_file() else ""
        self.lines = []
        whole, end, _ = content.rpartition("\n")
        hashes = [""]
        for number, text in enumerate(whole.split("\n") if whole else [], start=1):
            try:
                line = json.loads(text)
                chained = line["previous"] == hashes[-1]
            except (ValueError, KeyError, TypeError):
                chained = False
            if not chained:
                raise Mistake(
                    f"{self.path} is damaged at line {number}: a line before it was changed or taken out, or it was "
                    "itself; restore the file as it was committed"
                )
            self.lines.append(line)
            hashes.append(sha256(text.encode()).hexdigest())
        self.last, self.size = hashes[-1], len(f"{whole}{end}".encode())

        # The end: what was sealed must be there, and lines behind that are of a process that was killed.
        seal = self.path.with_name(SEAL)
        sealed = read_object(seal) if seal.is_file() else {}
        count = int(sealed.get("lines", 0))
        if (
            not 0 <= count < len(hashes)
            or hashes[count] != sealed.get("last", "")
            or len(hashes) - count > UNSEALED + 1
        ):
            raise Mistake(
                f"{self.path} has {len(self.lines)} lines and is not the log that {seal.name} seals, of {count} lines: "
                "lines were taken out or changed; restore both files as they were committed"
            )

    def append(self, line: Mapping[str, Json]) -> None:
        """Write a line behind the last one, the chain going on; the caller holds the lock and has read the log."""
        text = json.dumps(
            finite_json({**line, "previous": self.last}), ensure_ascii=False, allow_nan=False
        )
        written = f"{text}\n".encode()
        with self.path.open("r+b") as file:
            file.truncate(self.size)  # of a line that was left unfinished
            file.seek(self.size)
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(json.loads(text))
        self.last, self.size = sha256(text.encode()).hexdigest(), self.size + len(written)
        write_atomically(
            self.path.with_name(SEAL), to_text({"lines": len(self.lines), "last": self.last})
        )

    # --- What stands in it.

    def attempts(self, name: str | None = None) -> list[RegisterEntry]:
        """Give all entries, or those of one name, in their order, each with its looks."""
        found: list[RegisterEntry] = []
        for line in self.lines:
            if "entry" in line and name in {None, line["entry"]}:
                said = (
                    "date",
                    "version",
                    "commit",
                    "digest",
                    "sizes",
                    "reason",
                    "replaces",
                    "changed",
                )
                found.append(
                    RegisterEntry(
                        line["entry"],
                        **{key: line[key] for key in said},
                        removed=tuple(line["removed"]),
                        entered=line.get("entered", ""),
                    )
                )
            elif "look" in line:
                # an entry that was returned to has its looks at the later of its two lines
                of = [
                    one for one in found if (one.name, one.digest) == (line["look"], line["digest"])
                ]
                if of:
                    seen = ("date", "version", "commit", "size", "verdict", "looks")
                    of[-1].looks.append({key: line[key] for key in seen})
        return found

    def standing(self, name: str) -> RegisterEntry | None:
        """Find the last entry of a name, which is the one that stands."""
        return next(reversed(self.attempts(name)), None)

    def fields_of(self, name: str) -> dict[str, Json]:
        """Find what the standing entry said: the sum of all lines of its name."""
        fields: dict[str, Json] = {}
        for attempt in self.attempts(name):
            fields = {key: value for key, value in fields.items() if key not in attempt.removed} | {
                **attempt.changed
            }
        return fields

    # --- What is added to it.

    def enter(
        self,
        name: str,
        sizes: Mapping[str, str],
        fields: Mapping[str, Any],
        reason: str,
        about: Mapping[str, Json],
    ) -> RegisterEntry:
        """Enter what a claim says now, unless that is what stands; a change takes a reason of a sentence.

        `sizes` are the digests of the claim at each of its sizes, `fields` what it says at its default size, `about`
        the date, version and commit. A first entry needs no reason; a claim that was changed without one is refused.
        """
        with waited_for(self.path):
            self.read()
            before = self.standing(name)
            if before is not None and before.sizes == sizes:
                return before
            now, then = flatten(fields), self.fields_of(name)
            changed = {
                key: value for key, value in now.items() if key not in then or then[key] != value
            }
            removed = sorted(key for key in then if key not in now)
            if before is not None and len(reason.split()) < SHORTEST:
                parts = [*changed, *removed] or [
                    f"size {size}" for size in sizes if sizes[size] != before.sizes[size]
                ]
                what = ", ".join(parts[:4]) + (
                    f" and {len(parts) - 4} more" if len(parts) > 4 else ""
                )
                raise Mistake(
                    f"{name} is not what was registered on {before.date[:10]} as {before.digest}: {what} changed; "
                    f"give `ntkexp claims register {name}` a reason of at least {SHORTEST} words, or put it back"
                )
            if before is not None and before.looks:
                refuse_spent_seeds(name, {key: now.get(key) for key in [*changed, *removed]}, then)
            line: dict[str, Json] = {
                "entry": name,
                **about,
                "digest": sizes["default"],
                "sizes": dict(sizes),
            }
            line |= {
                "reason": reason or FIRST,
                "replaces": None if before is None else before.digest,
            }
            self.append(line | {"changed": changed, "removed": removed})
            return self.attempts(name)[-1]

    def record(self, claim: ClaimRecord, about: Mapping[str, Json]) -> None:
        """Write down what a look found, unless the same look at the same entry found the same before."""
        with waited_for(self.path):
            self.read()
            entry = next(
                (
                    one
                    for one in self.attempts(claim.name)[::-1]
                    if claim.digest in one.sizes.values()
                ),
                None,
            )
            if entry is None:
                raise Mistake(
                    f"{claim.name}: {claim.digest} is not in {self.path}, so no look at it can be recorded"
                )
            looks = {
                name: {
                    "verdict": look.verdict,
                    "figure": look.figure,
                    "interval": [look.low, look.high],
                    "p": look.p,
                    "seeds": len(look.seeds),
                }
                for name, look in claim.looks.items()
            }
            known = [one for one in entry.looks if one["size"] == claim.size]
            if any(same_outcome(one["looks"], looks) for one in known):
                return
            line: dict[str, Json] = {
                "look": claim.name,
                **about,
                "digest": entry.digest,
                "size": claim.size,
            }
            self.append(line | {"verdict": claim.verdict, "looks": looks})


def refuse_spent_seeds(name: str, changed: Mapping[str, Json], then: Mapping[str, Json]) -> None:
    """Refuse a claim in which nothing but seeds changed after a look, and some of them were looked at already."""
    if any(key.rpartition(".")[2] not in {"seeds", "planned"} for key in changed):
        return  # another claim
    for key, seeds in changed.items():
        before = then.get(key)
        if isinstance(seeds, list) and isinstance(before, list) and key.endswith("seeds"):
            spent = [seed for seed in seeds if seed in before]
            if spent:
                raise Mistake(
                    f"{name}: seed {spent[0]} of {key} was looked at already; a number of seeds that is chosen after "
                    f"a look takes fresh ones alone, such as {max(before) + 1}..{max(before) + len(seeds)}; to go on "
                    "with the same, plan it beforehand: `looks: [6, 24]`"
                )


def same_outcome(first: Any, second: Any) -> bool:
    """Whether two looks found the same, to rounding; NaN was written as null.

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
        return math.isclose(first, second, rel_tol=SAME, abs_tol=1e-12)
    return bool(finite_json(first) == finite_json(second))


def flatten(value: Any, at: str = "") -> dict[str, Json]:
    """Give plain data as leaves by their dotted places; a list without mappings, and what is empty, is a leaf."""
    items: Iterator[tuple[object, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        items = iter(enumerate(value))
    leaves: dict[str, Json] = {}
    for key, item in items:
        leaves |= flatten(item, f"{at}.{key}" if at else str(key))
    return leaves or {at: list(value) if isinstance(value, tuple) else value}
