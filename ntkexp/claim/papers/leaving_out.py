"""Examples are left out: trainings repeated without them, and which scores of examples predict what that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jacrev

from ntkexp.claim.trial import AbstractTrial
from ntkexp.component import Count
from ntkexp.config.compose import compose
from ntkexp.effects.sweep import MEANS, sweep_from
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.path.recording import RecordedTraining, Recording, row_length
from ntkexp.records.data import Trajectory
from ntkexp.records.sweep import Level
from ntkexp.removal.rerun import WEIGHTS, Rerun, RerunAt, again, retrain, trained
from ntkexp.removal.retraining import changes
from ntkexp.report.analysis.rank_correlation import mean_known, spearman
from ntkexp.run.loop import SilentListener
from ntkexp.run.loop import run as run_loop
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, prepare
from ntkexp.stream import stream


@dataclass(frozen=True)
class Retraining:
    """A training as it was, and what repeats it in memory with other weights of its examples."""

    setting: Setting
    outcome: Outcome
    rerun: Rerun

    @property
    def train(self) -> int:
        return self.setting.problem.train

    @property
    def others(self) -> Float[Tensor, "point *shape"]:
        """The points that are no training examples."""
        return self.setting.problem.inputs[self.train :]

    @property
    def slopes(self) -> Float[Tensor, " train"]:
        """ℓ′ of each example at the end."""
        end, targets = (
            self.outcome.evidence.end[: self.train],
            self.setting.problem.targets[: self.train],
        )
        return self.setting.experiment.loss.output_gradient(end, targets)[:, 0]

    def outputs_without(self, left: Float[Tensor, "run train"]) -> Float[Tensor, "run point out"]:
        """The outputs at those points after training with these weights of the examples."""
        vectors = trained(self.rerun, left)
        with torch.no_grad():
            return torch.stack([self.rerun.outputs(vector, self.others) for vector in vectors])

    def changes_without(self, left: Float[Tensor, "group train"]) -> Float[Tensor, "group point"]:
        """What the output at those points changes by when the groups that are marked by 1 are left out."""
        removals = [group.nonzero().flatten().tolist() for group in left]
        return changes(RerunAt(self.rerun, self.others), removals)[0][:, :, 0]


def retraining(base: Sequence[str], seed: int) -> Retraining:
    """Train as these words say, with one thread and one output."""
    experiment = compose([*base, f"seed={seed}", "threads=1"])
    setting = prepare(experiment)
    if setting.problem.outputs != 1 or not len(setting.problem.inputs[setting.problem.train :]):
        raise Mistake(
            "trial.base: choose data of one output, and points to read it at, such as data=moons data.probe=20"
        )
    with TemporaryDirectory() as folder:
        outcome = run_loop(setting, SilentListener(Path(folder)))
    return Retraining(
        setting,
        outcome,
        again(experiment, setting.problem, setting.descent.step_size, outcome.steps),
    )


def draw_groups(size: int, groups: int, train: int, seed: int) -> Float[Tensor, "group train"]:
    """Draw `groups` groups of that size: 1 marks the members of a group, 0 the others.

    >>> draw_groups(5, groups=3, train=10, seed=0).sum(1).tolist()
    [5.0, 5.0, 5.0]
    """
    generator = stream("left out", seed)
    scores = torch.rand(groups, train, generator=generator, dtype=torch.float64)
    return (scores.argsort(1).argsort(1) < size).double()


# --- What would change if an example were left out: its effect, by a sweep back over a training recorded for it.


def would_change(retrained: Retraining, *, one_step: bool = False) -> Float[Tensor, "point train"]:
    """The effects at the points that are no training examples."""
    mean = MEANS[retrained.setting.experiment.path.mean]
    with TemporaryDirectory() as folder:
        training = recorded(retrained, Path(folder))
        gradients = jacrev(lambda vector: retrained.rerun.outputs(vector, retrained.others)[:, 0])(
            training.end
        )
        sweep = sweep_from(training, gradients, mean, one_step=one_step)
        for _ in sweep.steps_back():
            pass
        return sweep.effects


def recorded(retrained: Retraining, folder: Path) -> RecordedTraining:
    """Take the steps of a training once more, and keep them in a folder."""
    setting, steps, optimizer = (
        retrained.setting,
        retrained.outcome.steps,
        retrained.setting.experiment.optimizer,
    )
    descent, start, pull = setting.descent, setting.problem.weights, setting.domain.no_pull()
    records = (*optimizer.records, *optimizer.differentiated)
    room = steps + 1, row_length(start, records, pull)
    rows = Trajectory(folder / "trajectory.bin", *room, setting.experiment.dtype)
    rows.allocate()
    recording, sizes, end = Recording(rows=rows, like=start, records=records, pull=pull), [], start
    for step in islice(descent.walk(start), steps):
        recording.write(step)
        sizes.append(step.step_size)
        end = step.end
    recording.close(len(sizes), end)
    return RecordedTraining(recording=recording, descent=descent, step_sizes=sizes)


FAMILY = 10**6  # seeds of the other runs begin so much later than those of any look at a claim


class LeftOutKernel(AbstractTrial):
    """How much the path kernel depends on the data: training is repeated without one example, and without half of
    them, for each size of the training set.

    A training, in the words of `ntkexp train`, is repeated so often without one example and without half.

        change = ‖𝒦′ − 𝒦‖/‖𝒦‖,    𝒦(x, x′) = mean over steps s of K_s(x, x′)

    between points that were in no training set, by the kernels at the beginnings of every `every`-th step.
    `left_out` is `one`, averaged over several examples; `half`, over several halves; or `nobody`, in a training
    from another start.
    """

    base: tuple[str, ...]
    trains: tuple[Count, ...] = Field((10, 20, 40, 80), min_length=1)
    times: Count = 6
    every: Count = 5

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        rows: list[Mapping[str, Level]] = []
        for train in self.trains:
            words = [
                *self.base,
                f"data.train={train}",
                "path.rule=[left]",
                "path.error_samples=0",
                "ladder.machine=[]",
            ]
            retrained, times = retraining(words, seed), min(self.times, train)
            everyone = torch.ones(1, train, dtype=torch.float64)
            ones = everyone - torch.eye(train, dtype=torch.float64)[:times]
            halves = draw_groups(train // 2, times, train, seed)
            kernels = self.path_kernels(retrained, torch.cat([everyone, ones, halves]))
            of_seed = retrained.setting.experiment.data.seed
            elsewhere = retraining(
                [*words, f"data.seed={seed if of_seed is None else of_seed}"], seed + FAMILY
            )
            kernels = torch.cat([kernels, self.path_kernels(elsewhere, everyone)])

            # ‖𝒦′ − 𝒦‖/‖𝒦‖
            change = (kernels[1:] - kernels[0]).flatten(1).norm(dim=1) / kernels[0].norm()
            without = {
                "one": change[:times].mean(),
                "half": change[times:-1].mean(),
                "nobody": change[-1],
            }
            rows += [
                {"train": train, "left_out": who, "change": value.item()}
                for who, value in without.items()
            ]
        return rows

    def path_kernels(
        self, retrained: Retraining, weights: Float[Tensor, "training train"]
    ) -> Float[Tensor, "training point point_"]:
        """𝒦 of each training: the mean of its kernels at regular steps."""
        module, flat = retrained.setting.problem.module, retrained.rerun.flat
        read = [step for step in retrain(retrained.rerun, weights) if step.step % self.every == 0]
        totals = [torch.zeros(()) for _ in weights]
        for step in read:
            for run, vector in enumerate(step.found[WEIGHTS]):
                here = tangent_kernel(module, retrained.others, weights=flat.weights(vector))[
                    :, 0, :, 0
                ]
                totals[run] = totals[run] + here / len(read)
        return torch.stack(totals)


class AddedRemovals(AbstractTrial):
    """Whether what removals of single examples change adds up to what the removal of all of them together changes:

    A training, in the words of `ntkexp train`, is repeated without groups, with each of these activations.

        miss    ‖Σ_{i ∈ G} τᵢ − Δ_G‖/‖Δ_G‖        over points, and over groups G of one size

    Δ_G is what the output changes by when G is left out of the same training: the same start, order and step
    sizes. What is added up is said by `single`: Δ of each example alone (`retrained`), what a sweep back over the
    training says of it (`effect`), or Δ of the examples of another group (`others`).
    """

    base: tuple[str, ...]
    activations: tuple[str, ...] = Field(("tanh", "relu"), min_length=1)
    sizes: tuple[Count, ...] = Field((2, 5, 10, 20, 50), min_length=1)
    groups: int = Field(32, ge=2, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        rows: list[Mapping[str, Level]] = []
        for activation in self.activations:
            words = [
                "path.rule=[left]",
                "path.error_samples=0",
                "ladder.machine=[]",
                f"model.activation={activation}",
            ]
            trained = retraining([*self.base, *words], seed)
            if max(self.sizes) >= trained.train:
                raise Mistake(
                    f"trial.sizes: of {trained.train} examples some must be left; lower the last"
                )
            alone = trained.changes_without(torch.eye(trained.train, dtype=torch.float64))
            effect = would_change(trained).t()
            for size in self.sizes:
                left = draw_groups(size, self.groups, trained.train, seed)
                together = trained.changes_without(left)
                sums = {
                    "retrained": left @ alone,
                    "effect": left @ effect,
                    "others": left.roll(1, 0) @ alone,
                }
                for single, added in sums.items():
                    miss = float((added - together).norm() / together.norm())
                    rows.append(
                        {"activation": activation, "size": size, "single": single, "miss": miss}
                    )
        return rows


class DatamodelScore(AbstractTrial):
    """Whether contributions predict what training on other examples does: the linear datamodeling score (LDS).

    A training, in the words of `ntkexp train`, is repeated on many halves of its examples.

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
        retrained = retraining(
            [*self.base, "path.rule=[secant,left]", "path.error_samples=0", "ladder.machine=[]"],
            seed,
        )
        groups = draw_groups(retrained.train // 2, self.groups, retrained.train, seed)
        actual = retrained.outputs_without(groups)[:, :, 0]
        return [
            {"method": name, "score": score(groups @ tau.t(), actual)}
            for name, tau in attributions(retrained).items()
        ]


def attributions(retrained: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """What each method says of the points that are no training examples."""
    evidence, problem, train = (
        retrained.outcome.evidence,
        retrained.setting.problem,
        retrained.train,
    )
    own = evidence.elsewhere("secant")[:, 0]
    flat = problem.inputs.flatten(1)
    return {
        "contributions": own,
        "tracin": evidence.elsewhere("left")[:, 0],
        "last_gradient": -evidence.kernel_end[train:, 0, :, 0] * retrained.slopes,
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
    return mean_known(spearman(predicted.numpy(), actual.numpy()))


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
COARSER = 4  # examples for each dimension of TRAK's projection


def all_scores(retrained: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """What every score says, at the points that are no training examples."""
    summed = attributions(retrained)
    effect = would_change(retrained)
    return {
        "effect": effect,
        "one_step": would_change(retrained, one_step=True),
        **{name: -summed[name] for name in ("contributions", "tracin", "last_gradient")},
        "influence": influence(retrained),
        "trak": trak(retrained),
        "shuffled": effect.roll(1, 1),
    }


def influence(retrained: Retraining) -> Float[Tensor, "point train"]:
    """What an optimum would change by, if the loss were a parabola and this its lowest point.

    (JᵀJ/N + λ)⁻¹Jᵀ = Jᵀ(JJᵀ/N + λ)⁻¹, of which the right side solves for N numbers.
    """
    loss, train = retrained.setting.experiment.loss, retrained.train
    if not loss.is_quadratic:
        raise Mistake(
            "trial.base: influence functions are here those of a quadratic loss; choose loss=squared"
        )
    kernel = retrained.outcome.evidence.kernel_end[:, 0, :, 0]
    curved = loss.curvature * kernel[:train] / train
    damped = curved + DAMPING * curved.trace() / train * torch.eye(train).to(kernel)
    reached: Tensor = torch.linalg.solve(damped, kernel[train:].t())
    return reached.t() * retrained.slopes / train


def trak(retrained: Retraining) -> Float[Tensor, "point train"]:
    """Regression with the gradients at the end, of fewer dimensions than there are examples."""
    rerun, end = retrained.rerun, retrained.rerun.flat.vector(retrained.outcome.weights)
    dimensions, generator = max(1, retrained.train // COARSER), stream("sketch", rerun.seed)
    projection = torch.randn(len(end), dimensions, generator=generator, dtype=torch.float64).to(end)
    jacobian: Tensor = jacrev(
        lambda vector: rerun.outputs(vector, retrained.setting.problem.inputs)[:, 0]
    )(end)
    features = jacobian.detach() @ projection
    solved: Tensor = torch.linalg.pinv(features[: retrained.train])
    return features[retrained.train :] @ solved * retrained.slopes


READ = (
    "path.rule=[secant,left]",
    "path.probes=[probe]",
    "path.error_samples=0",
    "ladder.machine=[]",
)


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
        rows: list[Mapping[str, Level]] = []
        for activation in self.activations:
            trained = retraining([*self.base, *READ, f"model.activation={activation}"], seed)

            # Every score, compared with training without groups of every size.
            scores = all_scores(trained)
            for who, left in who_leaves(self.groups, trained.train, seed).items():
                actual = trained.changes_without(left)
                for name, tau in scores.items():
                    row = {"activation": activation, "left_out": who, "score": name}
                    rows.append({**row, "correlation": score(left @ tau.t(), actual)})

            # How far the contributions are from adding up to what training did.
            evidence, others = trained.outcome.evidence, slice(trained.train, None)
            change = evidence.end[others] - evidence.start[others]
            miss = float((evidence.elsewhere("secant").sum(2) - change).norm() / change.norm())
            rows.append(
                {
                    "activation": activation,
                    "left_out": "nobody",
                    "score": "contributions",
                    "miss": miss,
                }
            )
        return rows


def who_leaves(groups: int, train: int, seed: int) -> dict[str, Float[Tensor, "group train"]]:
    """Every example by itself, and groups of shares, by their names.

    >>> {who: (len(left), int(left[0].sum())) for who, left in who_leaves(8, 40, seed=0).items()}
    {'one': (40, 1), '5 %': (8, 2), '10 %': (8, 4), '50 %': (8, 20)}
    """
    shares = {"5 %": 20, "10 %": 10, "50 %": 2}
    groups_by_name = {
        name: draw_groups(max(1, train // share), groups, train, seed)
        for name, share in shares.items()
    }
    return {"one": torch.eye(train, dtype=torch.float64), **groups_by_name}


READ_OF_RUNS = (
    "path.rule=[secant]",
    "path.probes=[probe]",
    "path.error_samples=0",
    "ladder.machine=[]",
)


class OtherRuns(AbstractTrial):
    """How much of what is attributed in one run belongs to that run, and how much to the algorithm, whatever draws its
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
        runs = self.runs(trained)
        added = trained.outcome.evidence.elsewhere("secant")[:, 0]
        scores = {
            "effect": would_change(trained),
            "contributions": -added,
        }  # what the run itself says
        rows: list[Mapping[str, Level]] = []
        for who, left in who_leaves(self.groups, trained.train, seed).items():
            actual = {
                name: replace(trained, rerun=run).changes_without(left)
                for name, run in runs.items()
            }
            sums = {name: left @ tau.t() for name, tau in scores.items()} | {
                "retraining": actual["same"]
            }
            rows += [
                {
                    "left_out": who,
                    "score": name,
                    "repeated": repeated,
                    "correlation": score(predicted, change),
                }
                for name, predicted in sums.items()
                for repeated, change in actual.items()
            ]
        return rows

    def runs(self, trained: Retraining) -> Mapping[str, Rerun]:
        """The run itself, and those that have more or less in common with it."""
        # A training of another seed on the same data.
        experiment, steps = trained.setting.experiment, trained.outcome.steps
        of_data = experiment.seed if experiment.data.seed is None else experiment.data.seed
        words = [
            *self.base,
            *READ_OF_RUNS,
            f"data.seed={of_data}",
            f"seed={experiment.seed + FAMILY}",
            "threads=1",
        ]
        setting = prepare(compose(words))
        other = again(setting.experiment, setting.problem, setting.descent.step_size, steps)
        same = trained.rerun
        return {
            "same": same,
            "other_order": replace(same, seed=other.seed),
            "other_start": replace(other, seed=same.seed),
            "other_run": other,
        }
