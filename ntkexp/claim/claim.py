"""A claim: what decides it, said before anything is measured.

Look        runs or a trial with these seeds; what is measured of them; what is expected of that, with its margin, and
            the null, which the margin excludes; and how often it is judged
Protocol    the three looks that decide: the claim's own; a control, which must not come out supported; and a second
            look, with seeds of another family, mostly on other data
Claim       the protocol, with the statement, its source, and what would refute it, in words

All of it is digested: another threshold makes another claim, in another folder. How a claim is drawn is no
part of it, and neither is the file in which a trial or a quantity stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ntkexp.claim.expectation import AbstractExpectation
from ntkexp.claim.quantity import AbstractQuantity
from ntkexp.claim.trial import AbstractTrial
from ntkexp.component import Component
from ntkexp.config.compose import split
from ntkexp.records.folder import CIRCUMSTANCES
from ntkexp.report.analysis.estimate import LEVEL
from ntkexp.sweep.definition import Definition

if TYPE_CHECKING:
    from ntkexp.claim.picture import AbstractPicture

MAIN, CONTROL, SECOND = "main", "control", "second"
PAPERS = "ntkexp.claim.papers"


class Published(Component):
    """A claim was made in this paper, and there."""

    paper: str = Field(min_length=1)
    section: str = ""

    @property
    def words(self) -> str:
        return f"{self.paper}, {self.section}" if self.section else self.paper


@dataclass(frozen=True)
class Look:
    """A look at a claim: what is run with which seeds, what is measured of it, and what is expected."""

    runs: Mapping[str, Definition]
    trial: AbstractTrial | None
    seeds: tuple[int, ...]
    quantity: AbstractQuantity
    expectation: tuple[AbstractExpectation, ...]
    nulls: tuple[float | None, ...] = ()  # by parts of the expectation, what is found where the claim does not hold
    planned: tuple[int, ...] = ()  # with how many seeds it is judged, each time it is; none: once, with all of them
    stage: int = -1  # which of these it is now

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of seeds with which it is judged, one time after another."""
        return self.planned or (len(self.seeds),)

    @property
    def level(self) -> float:
        """The share of false verdicts that is spent now: 5 % are split over the planned times as their seeds are.

            level of n_k seeds = 5 % · n_k/(n_1 + … + n_K)

        So little is spent early, and by Bonferroni's inequality all times together stay within 5 %, whatever is judged
        and however the times depend on each other. O'Brien and Fleming's bounds would spend 5 % more exactly, for sums
        of normal numbers whose variance is known; here it is estimated from few seeds, and several parts are joined.

        >>> look = Look({}, None, tuple(range(24)), None, (), planned=(6, 24))
        >>> [round(look.at(stage).level, 12) for stage in (0, 1)]
        [0.01, 0.04]
        """
        return LEVEL * self.sizes[self.stage] / sum(self.sizes)

    @property
    def seeds_now(self) -> tuple[int, ...]:
        return self.seeds[: self.sizes[self.stage]]

    @property
    def runs_now(self) -> dict[str, Definition]:
        return {name: replace(definition, seeds=self.seeds_now) for name, definition in self.runs.items()}

    def at(self, stage: int) -> Look:
        """The look as it is judged at this of its planned times, counted from 0."""
        return replace(self, stage=stage)

    def after(self, verdict: str) -> Look:
        """The look at the next of its planned times, or as it is where it is decided, or was judged with all seeds."""
        last = self.stage in {-1, len(self.sizes) - 1}
        return self if last or verdict != "undecided" else self.at(self.stage + 1)

    def words(self, first: int) -> str:
        """What is expected, in a few words, this part of it before the others."""
        ordered = (self.expectation[first], *self.expectation[:first], *self.expectation[first + 1 :])
        return "; ".join(part.whole_words for part in ordered)

    @property
    def fields(self) -> dict[str, Any]:
        # Sweeps without circumstances such as memory, which make no other claim
        runs = {}
        for name, definition in self.runs.items():
            base = [text for text in definition.base if split(text).key not in CIRCUMSTANCES]
            runs[name] = {"axes": {key: list(values) for key, values in definition.axes.items()}, "base": base}
        return {
            "runs": runs,
            "trial": None if self.trial is None else without_files(self.trial.fields()),
            "seeds": list(self.seeds),
            **({"planned": list(self.planned)} if self.planned else {}),
            **({"null": list(self.nulls)} if self.nulls else {}),
            "quantity": without_files(self.quantity.fields()),
            "expectation": [part.fields() for part in self.expectation],
        }


@dataclass(frozen=True)
class Protocol:
    """What decides a claim: the looks at it, each with its runs, seeds, quantity, expectation and margins."""

    main: Look
    control: Look
    second: Look

    @property
    def looks(self) -> dict[str, Look]:
        return {MAIN: self.main, CONTROL: self.control, SECOND: self.second}


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
        words = {"statement": self.statement, "source": self.source.fields(), "refutes": self.refutes}
        return words | {"looks": {name: look.fields for name, look in self.looks.items()}}

    @property
    def registered_fields(self) -> dict[str, Any]:
        """The same fields, of control and second look those alone in which they differ from the claim's own look."""
        looks = dict(self.fields["looks"])
        main = looks.pop(MAIN)
        others = {name: differing(look, main) for name, look in looks.items()}
        return {key: value for key, value in self.fields.items() if key != "looks"} | {MAIN: main} | others

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


def without_files(fields: Any) -> Any:
    """Plain data of trials and quantities, their classes spelled by what they are instead of where they stand.

    A class of `ntkexp.claim.papers` may move between its files, or out of them, and is the same in every digest; models
    and data that are there for controls alone have no other place.

    >>> without_files({"_target_": "ntkexp.claim.papers.LaterTask", "task": 1})
    {'_target_': 'ntkexp.claim.quantity.LaterTask', 'task': 1}
    >>> without_files({"_target_": "ntkexp.claim.papers.Bottleneck"})
    {'_target_': 'ntkexp.claim.papers.Bottleneck'}
    """
    if isinstance(fields, list | tuple):
        return [without_files(item) for item in fields]
    if not isinstance(fields, Mapping):
        return fields
    cleaned = {key: without_files(value) for key, value in fields.items()}
    package, _, name = str(cleaned.get("_target_", "")).rpartition(".")
    if package == PAPERS:
        cleaned["_target_"] = f"{getattr(getattr(import_module(package), name), 'role', package)}.{name}"
    return cleaned
