"""A claim: what is said beforehand of runs that will decide it, its looks and their changes, and what pictures are
drawn from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pandas as pd
from pydantic import Field

from ntkexp.claim.expectation.base import AbstractExpectation, column
from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.component import Component
from ntkexp.config.override import split
from ntkexp.config.plain_yaml import spelled
from ntkexp.mistake import Mistake, nearest
from ntkexp.records.claim import ClaimRecord
from ntkexp.records.folder import CIRCUMSTANCES
from ntkexp.sweep.definition import Definition

# --- What is otherwise in another look at a claim, or at another size of it: a control, a second look, quick, or
# full.
#
# base: [data=teacher]                  said to all runs, after what they were told before axes: {model.width:
# [32, 64]}         other values on an axis runs: {mlp: {base: […], axes: {…}}}   the same for the runs of one
# name seeds: 3 quantity, expectation, trial          with _target_: another one; without: the same with these
# fields otherwise


KEYS = ("base", "axes", "runs", "seeds", "quantity", "expectation", "trial")
Tree = dict[str, Any]


def changed(tree: Mapping[str, Any], change: Mapping[str, Any], name: str) -> Tree:
    """Make another claim of one.

    >>> claim = {"runs": {"mlp": {"base": ["steps=9"], "axes": {"seed": [1]}}}, "quantity": "drift", "seeds": 5}
    >>> changed(claim, {"base": ["data=moons"], "quantity": "loss", "seeds": 3}, "quick")["runs"]["mlp"]["base"]
    ['steps=9', 'data=moons']
    """
    if not isinstance(change, Mapping):
        raise Mistake(f"{name}={spelled(change)}: it takes KEY: VALUE lines; its keys are {', '.join(KEYS)}")
    for key in change:
        if key not in KEYS:
            raise Mistake(f"{name}.{key}: there is no such key; there are {', '.join(KEYS)}{nearest(str(key), KEYS)}")
    found = deepcopy(dict(tree))
    for_all = {key: change[key] for key in ("base", "axes") if change.get(key)}
    of_each = dict.fromkeys(found.get("runs", {}), for_all) if for_all else {}
    for run, more in [*of_each.items(), *(change.get("runs") or {}).items()]:
        if run not in found["runs"]:
            raise Mistake(f"{name}.runs.{run}: the claim has no such runs{nearest(run, found['runs'])}")
        found["runs"][run] = rerun(found["runs"][run], more)
    refuse_idle(tree, change, name)
    if "seeds" in change:
        found["seeds"] = change["seeds"]
    for key in ("quantity", "trial"):
        if key in change:
            found[key] = merged(found.get(key), change[key])
    if "expectation" in change:
        found["expectation"] = expected(found.get("expectation"), change["expectation"])
    return found


def rerun(run: Mapping[str, Any], more: Mapping[str, Any]) -> Tree:
    """Tell one kind of runs more; an axis that they do not have is left to those that have it."""
    axes = dict(run.get("axes") or {})
    axes |= {key: values for key, values in (more.get("axes") or {}).items() if key in axes}
    return {"axes": axes, "base": [*(run.get("base") or []), *(more.get("base") or [])]}


def refuse_idle(tree: Mapping[str, Any], change: Mapping[str, Any], name: str) -> None:
    """Refuse other values on an axis that no runs have."""
    known = [key for run in tree.get("runs", {}).values() for key in run.get("axes") or {}]
    asked = [change, *(change.get("runs") or {}).values()]
    for key in (key for one in asked for key in one.get("axes") or {}):
        if key not in known:
            raise Mistake(f"{name}.axes.{key}: no runs of the claim have this axis{nearest(key, known)}")


def expected(before: Any, change: Any) -> Any:
    """Change every part of what is expected, or put another in its place."""
    if isinstance(before, list) and isinstance(change, Mapping) and "_target_" not in change:
        return [merged(part, change) for part in before]
    return merged(before, change)


def merged(before: Any, change: Any) -> Any:
    """Put fields in place of those of the same name; what names its class is another component."""
    if isinstance(before, Mapping) and isinstance(change, Mapping) and "_target_" not in change:
        return {**before, **change}
    return change


# --- A claim: what is said beforehand of runs that will decide it, and the three looks at it that are judged.
#
#     statement, source     what is claimed, and where
#     look                  the claim itself, its control, which must not come out supported, and a second look at it
#
# All that is said is digested: whoever changes a threshold has another claim, in another folder.


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


# --- What pictures of a claim are drawn from: the claim, what was found, and the tables that were judged.


@dataclass(frozen=True)
class JudgedClaim:
    """A claim was judged so, by the tables of its looks."""

    claim: Claim
    record: ClaimRecord
    tables: Mapping[str, pd.DataFrame]

    @property
    def table(self) -> pd.DataFrame:
        """The first look, which is the claim's own, was judged by this table."""
        return self.tables[MAIN]

    def rows(self, *columns: str, look: str = MAIN) -> pd.DataFrame:
        """Find the rows that have all of these columns, each once, though several of its numbers may be judged."""
        table = self.tables[look]
        for name in columns:
            column(table, name, "picture")
        once = table.drop(columns=["value", "quantity"], errors="ignore").drop_duplicates()
        return once.dropna(subset=list(columns)).reset_index(drop=True)
