"""A trial of a claim's own, where sweeps of runs do not do; several side by side; and parts that go by names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator

from ntkexp.component import Component
from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Level

# --- Parts of a trial or of a quantity go by names, by which their rows are told apart.


def refuse_unnamed(key: str, names: Sequence[str], kind: str, parts: Sequence[object]) -> None:
    """Refuse parts of which one has no name, or that of another."""
    if len(names) != len(parts) or len(set(names)) < len(names):
        raise Mistake(
            f"{key}={list(names)}: give each of the {len(parts)} {kind} a name of its own"
        )


# --- A trial of a claim's own, where sweeps of runs do not do: its fields say what and how large, a seed draws it.


class AbstractTrial(Component, ABC):
    """A function of a seed."""

    role: ClassVar[str] = "ntkexp.claim.trial"
    """Digests know a trial of this package by its role and its class, in whichever file that stands."""

    @abstractmethod
    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        """Carry the trial out: rows of named numbers, and of words that tell rows apart; the same for the same seed."""


class SideBySide(AbstractTrial):
    """Several trials of one seed side by side, their rows told apart by the column `runs`: the name that each is
    given.

    Each of the trials is carried out with the seed.
    """

    names: tuple[str, ...] = Field(min_length=1)
    trials: tuple[AbstractTrial, ...]

    @model_validator(mode="after")
    def refuse_names(self) -> Self:
        """Every trial has a name of its own."""
        refuse_unnamed("trial.names", self.names, "trials", self.trials)
        return self

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        named = zip(self.names, self.trials, strict=True)
        return [{"runs": name, **row} for name, trial in named for row in trial.rows(seed)]
