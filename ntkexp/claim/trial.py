"""Trials: measurements in Python code, for claims that cannot be tested
with a sweep of runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Self, TypeAlias

from pydantic import Field, model_validator

from ntkexp.component import Component
from ntkexp.data.base import AbstractSource
from ntkexp.init import AbstractInit
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.records.sweep import Level

Row: TypeAlias = Mapping[str, Level]
"""A row of a trial: measured numbers, and the labels of the row."""
Rows: TypeAlias = Iterable[Row]


def refuse_unnamed(
    key: str, names: Sequence[str], kind: str, parts: Sequence[object]
) -> None:
    """Raise unless every part has a unique name."""
    if len(names) != len(parts) or len(set(names)) < len(names):
        raise Mistake(
            f"{key}={list(names)}: give each of the {len(parts)} {kind} a name of its own"
        )


class AbstractTrial(Component, ABC):
    """A measurement whose only source of randomness is a seed."""

    role: ClassVar[str] = "ntkexp.claim.trial"
    """The module name that digests contain for classes of `ntkexp.claim.papers`. The
    name stays the same if a class moves to another file."""

    @abstractmethod
    def rows(self, seed: int) -> Rows:
        """Run the measurement, and return or yield rows of numbers,
        with columns that label the rows.

        Equal seeds must give equal rows.
        """

    @property
    def draws(self) -> str:
        """A text that says what a seed draws at random, for a trial without a data
        source (see `ntkexp.claim.conduct.drawn`)."""
        return ""


class NetworkTrial(AbstractTrial):
    """A measurement of networks of one architecture, which learn one kind of data."""

    model: AbstractArchitecture
    init: AbstractInit
    data: AbstractSource


class SideBySide(AbstractTrial):
    """Several trials with the same seed. In each row, the column `runs` names the
    trial."""

    names: tuple[str, ...] = Field(min_length=1)
    trials: tuple[AbstractTrial, ...]

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        refuse_unnamed("trial.names", self.names, "trials", self.trials)
        return self

    def rows(self, seed: int) -> Rows:
        for name, trial in zip(self.names, self.trials, strict=True):
            for row in trial.rows(seed):
                yield {"runs": name, **row}
