"""A claim: its statement, its source, the result that would refute it, and the protocol
of statistical tests (looks) that decides it (see `look`).

A claim has a digest of these four parts. If a threshold changes, so do the digest and
the folder of the claim. The digest does not depend on the claim's picture, nor on the
file that defines the class of a trial or a quantity."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from pydantic import Field

from ntkexp.claim.judged import AbstractPicture
from ntkexp.claim.look import MAIN, Look, Protocol
from ntkexp.component import Component

IDENTITY = "identity"


class Published(Component):
    """The source of a claim: the paper and the section."""

    paper: str = Field(min_length=1)
    section: str = ""

    @property
    def words(self) -> str:
        return f"{self.paper}, {self.section}" if self.section else self.paper


@dataclass(frozen=True)
class Claim:
    """A claim at one of its sizes (quick, default or full). Sizes differ in their seeds
    and in the extent of their experiments, such as widths or numbers of steps."""

    name: str
    statement: str
    source: Published
    refutes: str
    protocol: Protocol
    picture: AbstractPicture  # not part of the digest
    # True for claims that are exact by construction, which are counted separately
    identity: bool = False
    without_control: str = ""  # the reason why the claim has no control

    @property
    def looks(self) -> dict[str, Look]:
        return self.protocol.looks

    def with_looks(self, looks: Mapping[str, Look]) -> Claim:
        """Return a copy of the claim with these statistical tests (looks), for example
        at their next stages."""
        return replace(self, protocol=Protocol(**looks))

    @property
    def fields(self) -> dict[str, Any]:
        """The plain data that the digest covers."""
        fields: dict[str, Any] = {
            "statement": self.statement,
            "source": self.source.fields(),
            "refutes": self.refutes,
            "looks": {name: look.fields for name, look in self.looks.items()},
        }
        if self.identity:
            fields["kind"] = IDENTITY
        if self.without_control:
            fields["without_control"] = self.without_control
        margins = {
            name: [*map(dict, look.margins)] for name, look in self.looks.items()
        }
        if argued := {name: reasons for name, reasons in margins.items() if reasons}:
            fields["margins"] = argued
        return fields

    @property
    def registered_fields(self) -> dict[str, Any]:
        """The `fields` in the form that the register stores. For the control and the
        second look, only the differences from the main look are listed."""
        fields = self.fields
        looks = dict(fields.pop("looks"))
        main = looks.pop(MAIN)
        differences = {name: differing(look, main) for name, look in looks.items()}
        return {**fields, MAIN: main, **differences}

    @property
    def digest(self) -> str:
        """The first 8 hexadecimal digits of the SHA-256 of the fields."""
        return sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.digest}"


def differing(fields: Mapping[str, Any], others: Any) -> dict[str, Any]:
    """Return the entries of `fields` that `others` lacks, or that differ there.

    Nested mappings are compared entry by entry.

    >>> trial = {"seeds": [0], "trial": {"width": 4, "depth": 1}}
    >>> differing(trial, {"seeds": [0], "trial": {"width": 8, "depth": 1}})
    {'trial': {'width': 4}}
    """
    differences = {}
    for key, value in fields.items():
        if key not in others:
            differences[key] = value
        elif value != others[key]:
            nested = isinstance(value, Mapping) and isinstance(others[key], Mapping)
            differences[key] = differing(value, others[key]) if nested else value
    return differences
