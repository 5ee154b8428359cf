"""Several trials of one seed side by side, their rows told apart by the column `runs`: the name that each is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import Field, model_validator

from ntkexp.claim.named import refuse_unnamed
from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.records.sweep import Level


class SideBySide(AbstractTrial):
    """Each of the trials is carried out with the seed."""

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
