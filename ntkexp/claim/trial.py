"""Trials: measurements of a claim, for questions that a sweep of runs cannot answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ntkexp.component import Component
from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Level


def refuse_unnamed(key: str, names: Sequence[str], kind: str, parts: Sequence[object]) -> None:
    """Raise if the names of parts are too few, too many or not unique."""
    if len(names) != len(parts) or len(set(names)) < len(names):
        raise Mistake(
            f"{key}={list(names)}: give each of the {len(parts)} {kind} a name of its own"
        )


class AbstractTrial(Component, ABC):
    """A measurement that draws everything random from a seed."""

    role: ClassVar[str] = "ntkexp.claim.trial"
    """Digests name a trial of this package by role and class, not by the file of the class."""

    @abstractmethod
    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        """Measure and return rows of named numbers, with words that label the rows.

        Equal seeds must give equal rows.
        """


class SideBySide(AbstractTrial):
    """Several trials with the same seed; the column `runs` holds the name of each."""

    names: tuple[str, ...] = Field(min_length=1)
    trials: tuple[AbstractTrial, ...]

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        refuse_unnamed("trial.names", self.names, "trials", self.trials)
        return self

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        named = zip(self.names, self.trials, strict=True)
        return [{"runs": name, **row} for name, trial in named for row in trial.rows(seed)]
