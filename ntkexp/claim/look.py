"""The protocol of a claim: up to three statistical tests (looks), which are fixed
before anything is measured.

Look        the runs or the trial, the seeds, the measured quantity, the expected range of the
            quantity, the null value that this range excludes, the reasons of its margins, and the
            planned numbers of seeds
Protocol    the main look; a control, which must not be supported; and a second look (replication)
            with different seeds and usually different data. A control changes the world: data,
            labels or parametrisation. A claim may lack a control, for a stated reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from ntkexp.claim.expectation import AbstractExpectation
from ntkexp.claim.quantity import AbstractQuantity
from ntkexp.claim.trial import AbstractTrial
from ntkexp.config.compose import split
from ntkexp.mistake import Mistake
from ntkexp.records.folder import CIRCUMSTANCES
from ntkexp.report.analysis.estimate import LEVEL
from ntkexp.sweep.definition import Definition

MAIN, CONTROL, SECOND = "main", "control", "second"
SOURCE, MINIMUM = "source", "minimum"
"""The origins of a margin: a number in the paper, or
a stated minimal effect of interest."""
PAPERS = "ntkexp.claim.papers"


@dataclass(frozen=True)
class Look:
    """One statistical test of a claim, planned in advance and possibly sequential.

    Attributes:
        runs: The sweeps whose runs are measured, by name.
        trial: The trial to be measured instead of, or in addition to, the runs.
        seeds: The seeds of all stages together.
        quantity: The measured quantity.
        expectation: The rules for the quantity, which must all hold.
            A rule is also called a part.
        nulls: For each rule, the figure to be expected if the claim is false.
            Empty if the claim's file gives none.
        margins: For each rule, the reason of its margin: {origin: reason} or {}. Empty
            if the claim's file gives no reasons. The reasons are in `Claim.fields`, not
            in the `fields` of the look.
        planned: Numbers of seeds, one per stage. The look is judged at each stage until
            it is decided. If empty, it is judged once, with all seeds.
        stage: The index of the current number in `planned`.
    """

    runs: Mapping[str, Definition]
    trial: AbstractTrial | None
    seeds: tuple[int, ...]
    quantity: AbstractQuantity
    expectation: tuple[AbstractExpectation, ...]
    nulls: tuple[float | None, ...] = ()
    margins: tuple[Mapping[str, str], ...] = ()
    planned: tuple[int, ...] = ()
    stage: int = -1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of seeds at each stage."""
        return self.planned or (len(self.seeds),)

    @property
    def level(self) -> float:
        """The error probability of the current stage.

        The total of 5 % is split over the K stages in proportion
        to their numbers of seeds:

            level of the stage with n_k seeds = 5 % · n_k/(n_1 + … + n_K)

        So early stages have a small error probability. By Bonferroni's inequality, the
        total error probability is at most 5 %, however the stages depend on one
        another. The bounds of O'Brien and Fleming would be less conservative. But they
        assume normal sums of known variance, and here the variance is estimated from
        few seeds, and several parts are combined.

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
        """The sweeps, with the seeds of the current stage."""
        return {
            name: replace(definition, seeds=self.seeds_now)
            for name, definition in self.runs.items()
        }

    def at(self, stage: int) -> Look:
        """Return this test with `stage` as its current stage."""
        return replace(self, stage=stage)

    def after(self, verdict: str) -> Look:
        """Return this test at its next stage,
        if `verdict` is undecided and there is a next stage.

        Otherwise, return it unchanged.
        """
        last = self.stage in {-1, len(self.sizes) - 1}
        return self if last or verdict != "undecided" else self.at(self.stage + 1)

    def direction_null(self, part: int) -> float | None:
        """Return the null value of a part for the verdict `below minimum`, on the
        part's scale.

        Return None if this verdict is impossible: the rule has no direction, or the
        null value has no logarithm, or the margin is a number in the paper, so that a
        smaller effect refutes the paper."""
        rule = self.expectation[part]
        origins = self.margins[part] if self.margins else {}
        null = self.nulls[part] if self.nulls else None
        if null is None:
            null = rule.null
        if SOURCE in origins or null is None or not rule.one_sided:
            return None
        try:
            return rule.scaled(null)
        except Mistake:  # no logarithm
            return None

    def unargued(self, part: int) -> bool:
        """Return whether the margin of a part needs a reason,
        and the claim gives none."""
        return self.expectation[part].needs_reason and not (
            self.margins and self.margins[part]
        )

    def words(self, first: int) -> str:
        """List the parts (rules) of the expectation as text. Move part number `first`
        to the front."""
        others = (*self.expectation[:first], *self.expectation[first + 1 :])
        return "; ".join(
            part.whole_words for part in (self.expectation[first], *others)
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The plain data that the digest covers."""
        fields: dict[str, Any] = {
            "runs": {
                name: sweep_fields(definition) for name, definition in self.runs.items()
            },
            "trial": None if self.trial is None else without_files(self.trial.fields()),
            "seeds": list(self.seeds),
        }
        if self.planned:
            fields["planned"] = list(self.planned)
        if self.nulls:
            fields["null"] = list(self.nulls)
        fields["quantity"] = without_files(self.quantity.fields())
        fields["expectation"] = [part.fields() for part in self.expectation]
        return registered_spelling(fields)


def sweep_fields(definition: Definition) -> dict[str, Any]:
    """Return a sweep as plain data. Omit settings such as memory,
    which do not affect results."""
    base = [text for text in definition.base if split(text).key not in CIRCUMSTANCES]
    return {
        "axes": {key: list(values) for key, values in definition.axes.items()},
        "base": base,
    }


@dataclass(frozen=True)
class Protocol:
    """The statistical tests (looks) that decide a claim. The control may be missing."""

    main: Look
    second: Look
    control: Look | None = None

    @property
    def looks(self) -> dict[str, Look]:
        if self.control is None:
            return {MAIN: self.main, SECOND: self.second}
        return {MAIN: self.main, CONTROL: self.control, SECOND: self.second}


# Current names (as patterns) → the names that settings and columns had when claims were
# registered. Digests are computed with the old names.
REGISTERED_NAMES = {
    r"\bpath\.queries\b": "path.probes",
    r"(?<![A-Za-z])query(?![A-Za-z_])": "probe",
    r"\bpath\.substeps\b": "path.pieces",
    r"\bpath\.quadrature_points\b": "path.nodes",
    r"\bkernel_change\b": "drift",
}


def registered_spelling(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace current names in the fields of a look by the old names,
    which digests use.

    >>> registered_spelling({"base": ["data.query=4", "path.queries=[query]"], "column": "accuracy_query"})
    {'base': ['data.probe=4', 'path.probes=[probe]'], 'column': 'accuracy_probe'}
    """
    text = json.dumps(fields)
    for name, registered in REGISTERED_NAMES.items():
        text = re.sub(name, registered, text)
    spelled: dict[str, Any] = json.loads(text)
    return spelled


def without_files(fields: Any) -> Any:
    """In plain data, replace the module of each trial and quantity
    by its class variable `role`.

    Then a class of `ntkexp.claim.papers` can move to another file without changing
    digests. Models and data in that package have no role, and keep their module.

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
        role = getattr(getattr(import_module(package), name), "role", package)
        cleaned["_target_"] = f"{role}.{name}"
    return cleaned
