"""A claim: its protocol (`claim.look`), with the statement, its source, and what would refute it, in words.

The digest covers all of these: another threshold makes another claim, in another folder. The digest covers neither the
picture of a claim nor the file that defines a trial or a quantity.
"""

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


class Published(Component):
    """A claim was made in this paper, and there."""

    paper: str = Field(min_length=1)
    section: str = ""

    @property
    def words(self) -> str:
        return f"{self.paper}, {self.section}" if self.section else self.paper


@dataclass(frozen=True)
class Claim:
    """A claim as it was read, at one of its sizes."""

    name: str
    statement: str
    source: Published
    refutes: str
    protocol: Protocol
    picture: AbstractPicture  # it shows what was found, and is nothing that was said beforehand

    @property
    def looks(self) -> dict[str, Look]:
        return self.protocol.looks

    def with_looks(self, looks: Mapping[str, Look]) -> Claim:
        """The claim with each of its looks at one of their planned times."""
        return replace(self, protocol=Protocol(**looks))

    @property
    def fields(self) -> dict[str, Any]:
        words = {
            "statement": self.statement,
            "source": self.source.fields(),
            "refutes": self.refutes,
        }
        return words | {"looks": {name: look.fields for name, look in self.looks.items()}}

    @property
    def registered_fields(self) -> dict[str, Any]:
        """The same fields, of control and second look those alone in which they differ from the claim's own look."""
        looks = dict(self.fields["looks"])
        main = looks.pop(MAIN)
        others = {name: differing(look, main) for name, look in looks.items()}
        return (
            {key: value for key, value in self.fields.items() if key != "looks"}
            | {MAIN: main}
            | others
        )

    @property
    def digest(self) -> str:
        """8 hexadecimal digits of what was said beforehand."""
        return sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.digest}"


def differing(fields: Mapping[str, Any], others: Any) -> dict[str, Any]:
    """Give the fields in which plain data differ from others.

    >>> differing({"seeds": [0], "trial": {"width": 4, "depth": 1}}, {"seeds": [0], "trial": {"width": 8, "depth": 1}})
    {'trial': {'width': 4}}
    """
    found = {}
    for key, value in fields.items():
        other = others.get(key)
        if key not in others or value != other:
            mappings = isinstance(value, Mapping) and isinstance(other, Mapping)
            found[key] = differing(value, other) if mappings else value
    return found
