"""Networks trained from random starts, all layers or the readout alone, beside both processes of infinite width:

    mean         the ensemble's mean, off in standard errors of it, by root mean square     about 1 where it follows
    deviation    the ensemble's deviation over that of the process                           about 1

Rows are told apart by the columns `networks` and `process` (`ntkexp.ensemble.compare`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.component import Count
from ntkexp.config.compose import compose
from ntkexp.ensemble.compare import comparisons, ensemble
from ntkexp.ensemble.problem import problem
from ntkexp.records.sweep import Level


class EnsembleBesideProcesses(AbstractTrial):
    """So many networks of an experiment, which is said in words as `ntkexp train` takes them."""

    words: tuple[str, ...]
    networks: Count = 100

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        # Seeds of an ensemble follow each other: those of another trial begin behind them.
        experiment = compose([*self.words, f"seed={seed * self.networks}", f"data.seed={seed}"])
        given = problem(experiment)
        found = comparisons(ensemble(experiment, given, self.networks, lambda name, done: None), given.train)
        return [
            {"networks": row.networks, "process": row.process, "mean": row.mean, "deviation": row.deviation}
            for row in found
        ]
