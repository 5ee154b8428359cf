"""Which scores of training examples predict what training without some of them changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan

import pandas as pd
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jacrev

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.retraining import Retraining, groups_of, retraining, would_change
from ntkexp.config.compose import compose
from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Level
from ntkexp.removal.rerun import Rerun, again
from ntkexp.run.setting import prepare
from ntkexp.stream import stream


class DatamodelScore(AbstractTrial):
    """Whether contributions predict what training on other examples does: the linear datamodeling score (LDS).

    A training, in the words of `ntkexp train`, is repeated on so many halves of its examples.

        score = mean over points x of Spearman over halves S of  Σ_{i ∈ S} τ(x, xᵢ)  with  f_T(x), trained on S
                                                                 alone

        method           τ(x, xᵢ)
        contributions    𝒮(x, xᵢ) by secants, whose sum is the network
        tracin           −Σ_s η_s w K_s(x, xᵢ) ℓ′ᵢ(s), its first order, with a checkpoint at every step
        last_gradient    −K_T(x, xᵢ) ℓ′ᵢ(T)
        input            ⟨x, xᵢ⟩ yᵢ
        shuffled         𝒮 of another example

    S. M. Park et al., "TRAK: attributing model behavior at scale" (2023), arXiv:2303.14186, define the score;
    TracIn is of G. Pruthi et al. (2020), arXiv:2002.08484.
    """

    base: tuple[str, ...]
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        found = retraining([*self.base, "path.rule=[secant,left]", "path.error_samples=0", "ladder.machine=[]"], seed)
        kept = groups_of(found.train // 2, self.groups, found.train, seed)
        actual = found.outputs_without(kept)[:, :, 0]
        return [{"method": name, "score": score(kept @ tau.t(), actual)} for name, tau in attributions(found).items()]


def attributions(found: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """What each method says of the points that are no training examples."""
    evidence, problem, train = found.outcome.evidence, found.setting.problem, found.train
    gradient = found.setting.experiment.loss.output_gradient(evidence.end[:train], problem.targets[:train])[:, 0]
    own = evidence.elsewhere("secant")[:, 0]
    flat = problem.inputs.flatten(1)
    return {
        "contributions": own,
        "tracin": evidence.elsewhere("left")[:, 0],
        "last_gradient": -evidence.kernel_end[train:, 0, :, 0] * gradient,
        "input": (flat[train:] @ flat[:train].t()) * problem.targets[:train, 0],
        "shuffled": own.roll(1, 1),
    }


def score(predicted: Float[Tensor, "group point"], actual: Float[Tensor, "group point"]) -> float:
    """Correlate ranks over groups, point by point, and average; there is no figure where a training diverged.

    >>> import torch
    >>> predicted = torch.tensor([[1.0], [2.0], [3.0]])
    >>> score(predicted, torch.tensor([[0.0], [5.0], [90.0]])), score(predicted, torch.tensor([[0.0], [5.0], [nan]]))
    (1.0, nan)
    """
    if not (predicted.isfinite().all() and actual.isfinite().all()):
        return nan
    ranks = [pd.DataFrame(part.numpy()).rank() for part in (predicted, actual)]
    return round(float(ranks[0].corrwith(ranks[1]).mean()), 15)


# --- What scores of training examples say that an output changes by when one of them is left out:
#
#     effect           each mean that it took part in is taken without it, and what comes of that is linear
#     one_step         the same, with each step of the optimizer taken without it
#     contributions    −𝒮(x, xᵢ) by secants: what it added is taken off
#     tracin           Σ_s η_s w K_s(x, xᵢ) ℓ′ᵢ(s), the first order of that
#     last_gradient    K_T(x, xᵢ) ℓ′ᵢ(T)
#     influence        K_T(x, X)(ℓ″K_T/N + λ)⁻¹ ℓ′(T)/N, of the example; λ a tenth of the kernel's mean eigenvalue
#     trak             φ(x)·(ΦᵀΦ)⁻¹φ(xᵢ) ℓ′ᵢ(T), φ the gradient projected at random to N/4 dimensions
#     shuffled         the effect of another example
#
# Influence functions are of P. W. Koh and P. Liang (2017), arXiv:1703.04730, TRAK is of S. M. Park et al. (2023),
# arXiv:2303.14186, here of one model; for the others see `DatamodelScore` and `ntkexp.effects`.


DAMPING = 0.1
COARSER = 4
"""TRAK projects to one dimension for so many examples."""


def told_changes(found: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """What every score says, at the points that are no training examples."""
    summed = attributions(found)
    effect = would_change(found)
    return {
        "effect": effect,
        "one_step": would_change(found, one_step=True),
        **{name: -summed[name] for name in ("contributions", "tracin", "last_gradient")},
        "influence": influence(found),
        "trak": trak(found),
        "shuffled": effect.roll(1, 1),
    }


def influence(found: Retraining) -> Float[Tensor, "point train"]:
    """What an optimum would change by, if the loss were a parabola and this its lowest point.

    (JᵀJ/N + λ)⁻¹Jᵀ = Jᵀ(JJᵀ/N + λ)⁻¹, of which the right side solves for N numbers.
    """
    loss, train = found.setting.experiment.loss, found.train
    if not loss.is_quadratic:
        raise Mistake("trial.base: influence functions are here those of a quadratic loss; choose loss=squared")
    kernel = found.outcome.evidence.kernel_end[:, 0, :, 0]
    curved = loss.curvature * kernel[:train] / train
    damped = curved + DAMPING * curved.trace() / train * torch.eye(train).to(kernel)
    reached: Tensor = torch.linalg.solve(damped, kernel[train:].t())
    return reached.t() * slopes(found) / train


def trak(found: Retraining) -> Float[Tensor, "point train"]:
    """Regression with the gradients at the end, of fewer dimensions than there are examples."""
    rerun, end = found.rerun, found.rerun.flat.vector(found.outcome.weights)

    def outputs(vector: Tensor) -> Float[Tensor, " point"]:
        return rerun.outputs(vector, found.setting.problem.inputs)[:, 0]

    dimensions, generator = max(1, found.train // COARSER), stream("sketch", rerun.seed)
    drawn = torch.randn(len(end), dimensions, generator=generator, dtype=torch.float64).to(end)
    features: Tensor = jacrev(outputs)(end).detach() @ drawn
    solved: Tensor = torch.linalg.pinv(features[: found.train])
    return features[found.train :] @ solved * slopes(found)


def slopes(found: Retraining) -> Float[Tensor, " train"]:
    """ℓ′ of each example at the end."""
    problem, end = found.setting.problem, found.outcome.evidence.end
    return found.setting.experiment.loss.output_gradient(end[: found.train], problem.targets[: found.train])[:, 0]


READ = ("path.rule=[secant,left]", "path.probes=[probe]", "path.error_samples=0", "ladder.machine=[]")


class RemovalScores(AbstractTrial):
    """Which scores of training examples say what training without some of them changes, and which say what was added:

    A training, in the words of `ntkexp train`, is repeated without examples, with each of these activations.

        correlation    mean over points x of Spearman over groups G of  Σ_{i ∈ G} τ(x, xᵢ)  with the change of
                       f_T(x) when
                       G is left out of the same training: the same start, order and step sizes
        miss           ‖Σᵢ 𝒮(·, xᵢ) − (f_T − f_0)‖/‖f_T − f_0‖, of the contributions alone

    τ are the scores of `ntkexp.claim.trial.scores`; `left_out` says who leaves: `one` example, each in turn, or
    random groups of a share.
    """

    base: tuple[str, ...]
    activations: tuple[str, ...] = Field(("tanh", "relu"), min_length=1)
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        found: list[Mapping[str, Level]] = []
        for activation in self.activations:
            trained = retraining([*self.base, *READ, f"model.activation={activation}"], seed)
            of_activation = [*self.correlations(trained, seed), self.sum_of_contributions(trained)]
            found += [{"activation": activation, **row} for row in of_activation]
        return found

    def correlations(self, trained: Retraining, seed: int) -> Sequence[Mapping[str, Level]]:
        """Every score, held against training without groups of every size."""
        told, rows = told_changes(trained), list[Mapping[str, Level]]()
        for who, left in who_leaves(self.groups, trained.train, seed).items():
            actual = trained.changes_without(left)
            rows += [
                {"left_out": who, "score": name, "correlation": score(left @ tau.t(), actual)}
                for name, tau in told.items()
            ]
        return rows

    def sum_of_contributions(self, trained: Retraining) -> Mapping[str, Level]:
        """How far the contributions are from adding up to what training did."""
        evidence, others = trained.outcome.evidence, slice(trained.train, None)
        added = evidence.elsewhere("secant").sum(2)
        change = evidence.end[others] - evidence.start[others]
        return {"left_out": "nobody", "score": "contributions", "miss": float((added - change).norm() / change.norm())}


def who_leaves(groups: int, train: int, seed: int) -> dict[str, Float[Tensor, "group train"]]:
    """Every example by itself, and groups of shares, by their names.

    >>> {who: (len(left), int(left[0].sum())) for who, left in who_leaves(8, 40, seed=0).items()}
    {'one': (40, 1), '5 %': (8, 2), '10 %': (8, 4), '50 %': (8, 20)}
    """
    shares = {"5 %": 20, "10 %": 10, "50 %": 2}
    drawn = {name: groups_of(max(1, train // share), groups, train, seed) for name, share in shares.items()}
    return {"one": torch.eye(train, dtype=torch.float64), **drawn}


READ_OF_RUNS = ("path.rule=[secant]", "path.probes=[probe]", "path.error_samples=0", "ladder.machine=[]")
FAMILY = 10**6
"""Seeds of the other runs begin so much later than those of any look at a claim."""


class OtherRuns(AbstractTrial):
    """How much of what is attributed in one run belongs to that run, and how much to the algorithm, whoever draws its
    seed:

    A training, in the words of `ntkexp train`, and another one on the same data are repeated without examples.

        correlation    mean over points x of Spearman over groups G of  Σ_{i ∈ G} τ(x, xᵢ)  with the change of f(x)
                       when G
                       is left out of a training on the same data, which is

        same           the run that τ is of: its start, and its order of batches
        other_order    from the same start, in another order
        other_start    from another start, in the same order
        other_run      from another start, in another order

    τ is the `effect` of an example in the first run, its contribution there with the other sign (`contributions`),
    or what training without G does change in the first run (`retraining`), which no score can outdo but by luck.
    """

    base: tuple[str, ...]
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        trained = retraining([*self.base, *READ_OF_RUNS], seed)
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
        words = [*self.base, *READ_OF_RUNS, f"data.seed={of_data}", f"seed={experiment.seed + FAMILY}", "threads=1"]
        setting = prepare(compose(words))
        return again(setting.experiment, setting.problem, setting.descent.step_size, steps)


def scores(trained: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """What the run itself says that the output changes by without each example."""
    added = trained.outcome.evidence.elsewhere("secant")
    return {"effect": would_change(trained), "contributions": -added[:, 0]}
