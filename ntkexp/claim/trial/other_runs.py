"""How much of what is attributed in one run belongs to that run, and how much to the algorithm, whoever draws its seed:

    correlation    mean over points x of Spearman over groups G of  Σ_{i ∈ G} τ(x, xᵢ)  with the change of f(x) when G
                   is left out of a training on the same data, which is

    same           the run that τ is of: its start, and its order of batches
    other_order    from the same start, in another order
    other_start    from another start, in the same order
    other_run      from another start, in another order

τ is the `effect` of an example in the first run, its contribution there with the other sign (`contributions`), or what
training without G does change in the first run (`retraining`), which no score can outdo but by luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.datamodel_score import score
from ntkexp.claim.trial.removal_scores import who_leaves
from ntkexp.claim.trial.retraining import Retraining, retraining
from ntkexp.claim.trial.would_change import would_change
from ntkexp.config.compose import compose
from ntkexp.records.sweep import Level
from ntkexp.removal.again import again
from ntkexp.removal.rerun import Rerun
from ntkexp.run.setting import prepare

READ = ("path.rule=[secant]", "path.probes=[probe]", "path.error_samples=0", "ladder.machine=[]")
FAMILY = 10**6
"""Seeds of the other runs begin so much later than those of any look at a claim."""


class OtherRuns(AbstractTrial):
    """A training, in the words of `ntkexp train`, and another one on the same data are repeated without examples."""

    base: tuple[str, ...]
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        trained = retraining([*self.base, *READ], seed)
        runs, told = self.runs(trained), scores(trained)
        found: list[Mapping[str, Level]] = []
        for who, left in who_leaves(self.groups, trained.train, seed).items():
            actual = {name: replace(trained, rerun=run).changes_without(left) for name, run in runs.items()}
            sums = {name: left @ tau.t() for name, tau in told.items()} | {"retraining": actual["same"]}
            found += [
                {"left_out": who, "score": name, "repeated": repeated, "correlation": score(predicted, change)}
                for name, predicted in sums.items()
                for repeated, change in actual.items()
            ]
        return found

    def runs(self, trained: Retraining) -> Mapping[str, Rerun]:
        """The run itself, and those that have more or less in common with it."""
        same, other = trained.rerun, self.other(trained)
        return {
            "same": same,
            "other_order": replace(same, seed=other.seed),
            "other_start": replace(other, seed=same.seed),
            "other_run": other,
        }

    def other(self, trained: Retraining) -> Rerun:
        """A training of another seed on the same data."""
        experiment, steps = trained.setting.experiment, trained.outcome.steps
        own = experiment.data.seed
        of_data = experiment.seed if own is None else own
        words = [*self.base, *READ, f"data.seed={of_data}", f"seed={experiment.seed + FAMILY}", "threads=1"]
        setting = prepare(compose(words))
        return again(setting.experiment, setting.problem, setting.descent.step_size, steps)


def scores(trained: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """What the run itself says that the output changes by without each example."""
    added = trained.outcome.evidence.elsewhere("secant")
    return {"effect": would_change(trained), "contributions": -added[:, 0]}
