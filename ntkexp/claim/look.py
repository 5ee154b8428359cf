"""The looks at a claim: its protocol, stated before anything is measured.

Look        runs or a trial with these seeds; the quantity that is measured; its expected value, with a margin; the
            null, which the margin excludes; and how often the look is judged
Protocol    the three looks that decide: the claim's own; a control, which must not come out supported; and a second
            look, with seeds of another family, mostly on other data
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ntkexp.claim.expectation import AbstractExpectation
from ntkexp.claim.quantity import AbstractQuantity
from ntkexp.claim.trial import AbstractTrial
from ntkexp.config.compose import split
from ntkexp.records.folder import CIRCUMSTANCES
from ntkexp.report.analysis.estimate import LEVEL
from ntkexp.sweep.definition import Definition

MAIN, CONTROL, SECOND = "main", "control", "second"
PAPERS = "ntkexp.claim.papers"


@dataclass(frozen=True)
class Look:
    """A look at a claim: what is run with which seeds, what is measured of it, and what is expected."""

    runs: Mapping[str, Definition]
    trial: AbstractTrial | None
    seeds: tuple[int, ...]
    quantity: AbstractQuantity
    expectation: tuple[AbstractExpectation, ...]
    nulls: tuple[
        float | None, ...
    ] = ()  # by parts of the expectation, what is found where the claim does not hold
    planned: tuple[
        int, ...
    ] = ()  # with how many seeds it is judged, each time it is; none: once, with all of them
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
        return {
            name: replace(definition, seeds=self.seeds_now)
            for name, definition in self.runs.items()
        }

    def at(self, stage: int) -> Look:
        """The look as it is judged at this of its planned times, counted from 0."""
        return replace(self, stage=stage)

    def after(self, verdict: str) -> Look:
        """The look at the next of its planned times, or as it is where it is decided, or was judged with all seeds."""
        last = self.stage in {-1, len(self.sizes) - 1}
        return self if last or verdict != "undecided" else self.at(self.stage + 1)

    def words(self, first: int) -> str:
        """What is expected, in a few words, this part of it before the others."""
        ordered = (
            self.expectation[first],
            *self.expectation[:first],
            *self.expectation[first + 1 :],
        )
        return "; ".join(part.whole_words for part in ordered)

    @property
    def fields(self) -> dict[str, Any]:
        # Sweeps without circumstances such as memory, which make no other claim
        runs = {}
        for name, definition in self.runs.items():
            base = [text for text in definition.base if split(text).key not in CIRCUMSTANCES]
            runs[name] = {
                "axes": {key: list(values) for key, values in definition.axes.items()},
                "base": base,
            }
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
        cleaned["_target_"] = (
            f"{getattr(getattr(import_module(package), name), 'role', package)}.{name}"
        )
    return cleaned
