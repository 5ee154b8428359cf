"""A claim: what is said beforehand of runs that will decide it, and the three looks at it that are judged.

    statement, source     what is claimed, and where
    look                  the claim itself, its control, which must not come out supported, and a second look at it

All that is said is digested: whoever changes a threshold has another claim, in another folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pydantic import Field

from ntkexp.claim.expectation.base import AbstractExpectation
from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.component import Component
from ntkexp.config.override import split
from ntkexp.records.folder import CIRCUMSTANCES
from ntkexp.sweep.definition import Definition

MAIN, CONTROL, SECOND = "main", "control", "second"


class Published(Component):
    """A claim was made in this paper, and there."""

    paper: str = Field(min_length=1)
    section: str = ""

    @property
    def words(self) -> str:
        """The paper and the section are named."""
        return f"{self.paper}, {self.section}" if self.section else self.paper


@dataclass(frozen=True)
class Look:
    """A look at a claim: what is run with which seeds, what is measured of it, and what is expected."""

    runs: Mapping[str, Definition]
    trial: AbstractTrial | None
    seeds: tuple[int, ...]
    quantity: AbstractQuantity
    expectation: tuple[AbstractExpectation, ...]

    def words(self, first: int) -> str:
        """What is expected, in a few words, this part of it before the others."""
        ordered = (self.expectation[first], *self.expectation[:first], *self.expectation[first + 1 :])
        return "; ".join(part.whole_words for part in ordered)

    @property
    def fields(self) -> dict[str, Any]:
        """The look is plain data."""
        return {
            "runs": {name: asked(definition) for name, definition in self.runs.items()},
            "trial": None if self.trial is None else self.trial.fields(),
            "seeds": list(self.seeds),
            "quantity": self.quantity.fields(),
            "expectation": [part.fields() for part in self.expectation],
        }


@dataclass(frozen=True)
class Claim:
    """A claim as it was read, at one of its sizes."""

    name: str
    statement: str
    source: Published
    refutes: str
    looks: Mapping[str, Look]
    picture: AbstractPicture  # it shows what was found, and is nothing that was said beforehand

    @property
    def fields(self) -> dict[str, Any]:
        """All that was said beforehand is plain data."""
        said = {"statement": self.statement, "source": self.source.fields(), "refutes": self.refutes}
        return said | {"looks": {name: look.fields for name, look in self.looks.items()}}

    @property
    def digest(self) -> str:
        """8 hexadecimal digits of what was said beforehand."""
        return sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        """The folder of the claim has this name."""
        return f"{self.name}-{self.digest}"


def asked(definition: Definition) -> dict[str, Any]:
    """What a sweep asks for, without circumstances."""
    base = [text for text in definition.base if split(text).key not in CIRCUMSTANCES]
    return {"axes": {key: list(values) for key, values in definition.axes.items()}, "base": base}
