"""Retraining without some examples, and scores that should predict its effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jacrev

from ntkexp.claim.expectation import select_rows
from ntkexp.claim.judged import AbstractPicture, Figure, JudgedClaim
from ntkexp.claim.quantity import example_ids
from ntkexp.claim.trial import AbstractTrial, Row, Rows
from ntkexp.component import Count
from ntkexp.config.compose import compose
from ntkexp.effects.sweep import MEANS, sweep_from
from ntkexp.experiment.experiment import Experiment
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.path.recording import RecordedTraining, Recording, row_length
from ntkexp.records.data import Trajectory
from ntkexp.records.sweep import Level
from ntkexp.removal.rerun import WEIGHTS, Rerun, RerunAt, rerun_of, retrain, trained
from ntkexp.removal.retraining import changes
from ntkexp.report.analysis.rank_correlation import DECIMALS, mean_known, spearman
from ntkexp.run.loop import SilentListener, run as run_loop
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, prepare
from ntkexp.stream import normal, stream
from ntkexp.text import short


@dataclass(frozen=True)
class Retraining:
    """A finished training run, and its `rerun`, which repeats the training with
    different example weights."""

    setting: Setting
    outcome: Outcome
    rerun: Rerun

    @property
    def train(self) -> int:
        return self.setting.problem.train

    @property
    def others(self) -> Float[Tensor, " point *shape"]:
        """The points outside the training set."""
        return self.setting.problem.inputs[self.train :]

    @property
    def shown(self) -> Float[Tensor, " point *shape"]:
        """The points outside the training set, before standardisation."""
        problem = self.setting.problem
        splits = {"query": problem.data.query, "test": problem.data.test}
        return torch.cat(
            [
                split.shown
                for name, split in splits.items()
                if name in problem.split_slices
            ]
        )

    @property
    def slopes(self) -> Float[Tensor, " train"]:
        """The loss derivative ℓ′ᵢ of each training example at the end of training."""
        end = self.outcome.matrices.end[: self.train]
        targets = self.setting.problem.targets[: self.train]
        return self.setting.experiment.loss.output_gradient(end, targets)[:, 0]

    def outputs_with(
        self, weights: Float[Tensor, "run train"]
    ) -> Float[Tensor, "run point out"]:
        """Return the outputs at `others` after training with these example weights."""
        vectors = trained(self.rerun, weights)
        with torch.no_grad():
            return torch.stack(
                [self.rerun.outputs(vector, self.others) for vector in vectors]
            )

    def changes_without(
        self, left: Float[Tensor, "group train"]
    ) -> Float[Tensor, "group point"]:
        """Return the changes of the outputs at the points `others` without each group.

        In each row of `left`, 1 marks the examples of the group.
        """
        removals = [group.nonzero().flatten().tolist() for group in left]
        return changes(RerunAt(self.rerun, self.others), removals)[0][:, :, 0]


def retraining(base: Sequence[str], seed: int) -> Retraining:
    """Train with these settings and one thread.

    Raise if the network has several outputs,
    or if there are no points outside the training set."""
    experiment = compose([*base, f"seed={seed}", "threads=1"])
    setting = prepare(experiment)
    if setting.problem.outputs != 1 or not len(
        setting.problem.inputs[setting.problem.train :]
    ):
        raise Mistake(
            "trial.base: choose data of one output, and points to read it at, "
            "such as data=moons data.query=20"
        )
    with TemporaryDirectory() as folder:
        outcome = run_loop(setting, SilentListener(Path(folder)))
    rerun = rerun_of(
        experiment, setting.problem, setting.descent.step_size, outcome.steps
    )
    return Retraining(setting, outcome, rerun)


def draw_groups(
    size: int, groups: int, train: int, seed: int
) -> Float[Tensor, "group train"]:
    """Draw random groups of `size` examples. In each row,
    1 marks the examples of the group.

    >>> draw_groups(5, groups=3, train=10, seed=0).sum(1).tolist()
    [5.0, 5.0, 5.0]
    """
    generator = stream("left out", seed)
    scores = torch.rand(groups, train, generator=generator, dtype=torch.float64)
    return (scores.argsort(1).argsort(1) < size).double()


# --- Leave-out effects, by a backward pass over the steps of a recorded training.


def leave_out_effects(
    retrained: Retraining, *, one_step: bool = False
) -> Float[Tensor, "point train"]:
    """Return the leave-out effects of all examples
    at the points outside the training set.

    With `one_step`, each optimizer step is recomputed exactly without the example.
    Otherwise it is linearised."""
    mean = MEANS[retrained.setting.experiment.path.mean]
    with TemporaryDirectory() as folder:
        training = recorded(retrained, Path(folder))
        gradients = jacrev(
            lambda vector: retrained.rerun.outputs(vector, retrained.others)[:, 0]
        )(training.end)
        sweep = sweep_from(training, gradients, mean, one_step=one_step)
        for _ in sweep.steps_back():
            pass
        return sweep.effects


def recorded(retrained: Retraining, folder: Path) -> RecordedTraining:
    """Repeat a training, and record the weights and optimizer states
    of its steps in a folder."""
    setting = retrained.setting
    steps = retrained.outcome.steps
    optimizer = retrained.setting.experiment.optimizer
    descent = setting.descent
    start = setting.problem.weights
    pull = setting.domain.zero_output_gradient()
    records = (*optimizer.records, *optimizer.differentiated)
    length = row_length(start, records, pull)
    rows = Trajectory(
        folder / "trajectory.bin", steps + 1, length, setting.experiment.dtype
    )
    rows.allocate()
    recording = Recording(
        rows=rows, like=start, records=records, output_gradient_like=pull
    )
    sizes = []
    end = start
    for step in islice(descent.steps_from(start), steps):
        recording.write(step)
        sizes.append(step.step_size)
        end = step.end
    recording.close(len(sizes), end)
    return RecordedTraining(recording=recording, descent=descent, step_sizes=sizes)


BARE = ("path.error_samples=0", "ladder.machine=[]")
"""Settings of runs that need no error bars and no kernel machines."""

OTHER_SEED_OFFSET = 10**6
"""The offset of seeds for runs with different randomness.
It exceeds every seed of a claim."""


def other_setting(words: Sequence[str], experiment: Experiment) -> Setting:
    """Prepare an experiment with the same data and another seed."""
    data_seed = experiment.data.seed
    if data_seed is None:
        data_seed = experiment.seed
    seed = experiment.seed + OTHER_SEED_OFFSET
    return prepare(
        compose([*words, f"data.seed={data_seed}", f"seed={seed}", "threads=1"])
    )


class LeftOutKernel(AbstractTrial):
    """The change of the path kernel if a training example is left out, by the size of
    the training set.

        change = mean over examples i of ‖𝒦ᵢ − 𝒦‖/‖𝒦‖,    𝒦(x, x′) = mean over steps s of K_s(x, x′)

    𝒦ᵢ is the kernel of the same training without example i, for `times` examples i. The
    points x, x′ are outside the training set, and s is every `every`-th step. Each
    training with all examples stops when the loss, the mean of ½(f − y)², is at most
    `until`, so that training sets of all sizes are learned equally well. If it does not
    get there within its steps, or takes no step, the change is NaN. The training
    without an example takes the same number of steps.

    With `fresh_start`, the trainings without an example start from other weights. Then
    the change does not depend on the examples alone."""

    base: tuple[str, ...]
    trains: tuple[Count, ...] = Field((16, 32, 64, 128, 256, 512), min_length=1)
    until: float = Field(gt=0)
    times: Count = 6
    every: Count = 5
    fresh_start: bool = False

    def rows(self, seed: int) -> Rows:
        for train in self.trains:
            yield self.row(seed, train)

    def row(self, seed: int, train: int) -> Row:
        words = [*self.base, f"data.train={train}", f"stop_at_loss={self.until}"]
        words += ["path.rule=[left]", *BARE]
        retrained = retraining(words, seed)
        rerun = retrained.rerun
        missed = retrained.outcome.matrices.end[:train] - rerun.targets
        loss = float(missed.square().sum() / (2 * train))
        row: Row = {"train": train, "train_loss": loss, "steps": rerun.length}
        if loss > self.until or not rerun.length:
            return {**row, "change": nan}

        everyone = rerun.unit_weights[None]
        ones = (everyone - torch.eye(train, dtype=torch.float64))[: self.times]
        without = retrained
        if self.fresh_start:
            other = other_setting(words, retrained.setting.experiment)
            start = other.problem.weights
            without = replace(retrained, rerun=replace(rerun, start=start))
        whole = self.path_kernels(retrained, everyone)[0]
        kernels = self.path_kernels(without, ones)

        # ‖𝒦ᵢ − 𝒦‖/‖𝒦‖
        changes = (kernels - whole).flatten(1).norm(dim=1) / whole.norm()
        return {**row, "change": float(changes.mean())}

    def path_kernels(
        self, retrained: Retraining, weights: Float[Tensor, "training train"]
    ) -> Float[Tensor, "training point point_"]:
        """Return the path kernel 𝒦 of each training, given its example weights."""
        module = retrained.setting.problem.module
        flat = retrained.rerun.flat
        read = [
            step
            for step in retrain(retrained.rerun, weights)
            if step.step % self.every == 0
        ]
        totals = [torch.zeros(()) for _ in weights]
        for step in read:
            for run, vector in enumerate(step.recorded[WEIGHTS]):
                here = tangent_kernel(
                    module, retrained.others, weights=flat.weights(vector)
                )[:, 0, :, 0]
                totals[run] = totals[run] + here / len(read)
        return torch.stack(totals)


class AddedRemovals(AbstractTrial):
    """The additivity of removals: the sum of single removals compared
    with removing the group.

        miss    ‖Σ_{i ∈ G} τᵢ − Δ_G‖/‖Δ_G‖        over points and over groups G of one size

    Δ_G is the change of the output when group G is left out, and everything else
    (start, order, step sizes) stays the same. The column `single` gives the kind of τᵢ:

        retrained    Δ of example i alone
        effect       the leave-out effect of example i
        others       as `retrained`, but for the examples of a different group (a control)

    `base` holds settings as for `ntkexp train`.
    """

    base: tuple[str, ...]
    activations: tuple[str, ...] = Field(("tanh", "relu"), min_length=1)
    sizes: tuple[Count, ...] = Field((2, 5, 10, 20, 50), min_length=1)
    groups: int = Field(32, ge=2, le=1000)

    def rows(self, seed: int) -> Rows:
        for activation in self.activations:
            words = ["path.rule=[left]", *BARE, f"model.activation={activation}"]
            trained = retraining([*self.base, *words], seed)
            if max(self.sizes) >= trained.train:
                raise Mistake(
                    f"trial.sizes: of {trained.train} examples some must remain; lower the last"
                )
            alone = trained.changes_without(
                torch.eye(trained.train, dtype=torch.float64)
            )
            effect = leave_out_effects(trained).t()
            for size in self.sizes:
                left = draw_groups(size, self.groups, trained.train, seed)
                together = trained.changes_without(left)
                sums = {
                    "retrained": left @ alone,
                    "effect": left @ effect,
                    "others": left.roll(1, 0) @ alone,
                }
                for single, added in sums.items():
                    yield {
                        "activation": activation,
                        "size": size,
                        "single": single,
                        "miss": float((added - together).norm() / together.norm()),
                    }


class DatamodelScore(AbstractTrial):
    """The linear datamodeling score (LDS) of contributions
    and other attribution methods.

    The network is retrained on many random halves S of its examples. There is a row for
    each method and each point x, which the column `example` identifies. The score at x
    is the Spearman rank correlation over S between Σ_{i ∈ S} τ(x, xᵢ) and the output
    f_T(x; S). The LDS is the mean over points.

        method           τ(x, xᵢ)
        contributions    𝒮(x, xᵢ) by secants, which sum to f_T − f_0
        tracin           −Σ_s η_s w K_s(x, xᵢ) ℓ′ᵢ(s), with a checkpoint at every step s; w is the
                         weight of the example in the batch mean
        last_gradient    −K_T(x, xᵢ) ℓ′ᵢ(T)
        input            ⟨x, xᵢ⟩ yᵢ
        shuffled         𝒮 of a different example (a control)

    S. M. Park et al., "TRAK: attributing model behavior at scale" (2023),
    arXiv:2303.14186, define the score. TracIn is due to G. Pruthi et al. (2020),
    arXiv:2002.08484. `base` holds settings as for `ntkexp train`."""

    base: tuple[str, ...]
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Rows:
        words = [*self.base, "path.rule=[secant,left]", *BARE]
        retrained = retraining(words, seed)
        groups = draw_groups(retrained.train // 2, self.groups, retrained.train, seed)
        actual = retrained.outputs_with(groups)[:, :, 0]
        ids = example_ids(retrained.shown.numpy())
        for name, tau in attributions(retrained).items():
            scores = spearman((groups @ tau.t()).numpy(), actual.numpy())
            for example, value in zip(ids, scores.tolist(), strict=True):
                yield {"method": name, "example": example, "score": value}


def attributions(retrained: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """Return the attribution τ(x, xᵢ) of each example xᵢ to each point x outside the
    training set, by method."""
    evidence = retrained.outcome.matrices
    problem = retrained.setting.problem
    train = retrained.train
    contributions = evidence.query_contributions("secant")[:, 0]
    flat = problem.inputs.flatten(1)
    return {
        "contributions": contributions,
        "tracin": evidence.query_contributions("left")[:, 0],
        "last_gradient": -evidence.kernel_end[train:, 0, :, 0] * retrained.slopes,
        "input": (flat[train:] @ flat[:train].t()) * problem.targets[:train, 0],
        "shuffled": contributions.roll(1, 1),
    }


def score(
    predicted: Float[Tensor, "group point"], actual: Float[Tensor, "group point"]
) -> float:
    """Return the Spearman correlation over groups, averaged over points.

    Return NaN if a training diverged.

    >>> import torch
    >>> predicted = torch.tensor([[1.0], [2.0], [3.0]])
    >>> [score(predicted, torch.tensor([[0.0], [5.0], [last]])) for last in (90.0, nan)]
    [1.0, nan]
    """
    if not (predicted.isfinite().all() and actual.isfinite().all()):
        return nan
    return round(mean_known(spearman(predicted.numpy(), actual.numpy())), DECIMALS)


# --- Scores that predict the change of the output at x when example i is left out:
#
#     effect           the leave-out effect: each batch's gradient without i is exact, and
#                      everything after this change is linearised
#     one_step         as `effect`, but each optimizer step without i is exact too
#     contributions    −𝒮(x, xᵢ) by secants
#     tracin           Σ_s η_s w K_s(x, xᵢ) ℓ′ᵢ(s), contributions at first order in η;
#                      w is the weight of the example in the batch mean
#     last_gradient    K_T(x, xᵢ) ℓ′ᵢ(T)
#     influence        [K_T(x, X) (ℓ″K_T(X, X)/N + λ)⁻¹]ᵢ ℓ′ᵢ(T)/N for N examples X
#     trak             φ(x)·(ΦᵀΦ)⁻¹φ(xᵢ) ℓ′ᵢ(T), where φ is a random projection of the gradient
#     shuffled         the leave-out effect of a different example (a control)
#
# Influence functions are due to P. W. Koh and P. Liang (2017), arXiv:1703.04730. TRAK,
# here with a single model, is due to S. M. Park et al. (2023), arXiv:2303.14186. See
# also `DatamodelScore` and `ntkexp.effects`.


INFLUENCE_DAMPING = 0.1
"""The damping λ of influence functions, relative to the mean eigenvalue
of ℓ″K_T(X, X)/N."""
EXAMPLES_PER_DIMENSION = 4
"""The number of training examples per dimension of TRAK's random projection."""


def all_scores(retrained: Retraining) -> dict[str, Float[Tensor, "point train"]]:
    """Return the scores τ(x, xᵢ) of all methods in the list above,
    at the points x outside the training set."""
    added = attributions(retrained)
    effect = leave_out_effects(retrained)
    return {
        "effect": effect,
        "one_step": leave_out_effects(retrained, one_step=True),
        **{name: -added[name] for name in ("contributions", "tracin", "last_gradient")},
        "influence": influence(retrained),
        "trak": trak(retrained),
        "shuffled": effect.roll(1, 1),
    }


def influence(retrained: Retraining) -> Float[Tensor, "point train"]:
    """Return influence functions: the predicted change of the output
    at the loss minimum.

    Raise unless the loss is quadratic. Because (JᵀJ/N + λ)⁻¹Jᵀ = Jᵀ(JJᵀ/N + λ)⁻¹, it
    suffices to solve an N × N system for N training examples."""
    loss = retrained.setting.experiment.loss
    train = retrained.train
    if not loss.is_quadratic:
        raise Mistake(
            "trial.base: influence functions need a quadratic loss here; choose loss=squared"
        )
    kernel = retrained.outcome.matrices.kernel_end[:, 0, :, 0]
    # ℓ″K_T(X, X)/N + λ
    curved = loss.curvature * kernel[:train] / train
    damping = INFLUENCE_DAMPING * curved.trace() / train
    damped = curved + damping * torch.eye(train).to(kernel)
    solved: Tensor = torch.linalg.solve(damped, kernel[train:].t())
    return solved.t() * retrained.slopes / train


def trak(retrained: Retraining) -> Float[Tensor, "point train"]:
    """Return TRAK scores, from randomly projected gradients at the end of training."""
    rerun = retrained.rerun
    end = rerun.flat.vector(retrained.outcome.weights)
    dimensions = max(1, retrained.train // EXAMPLES_PER_DIMENSION)
    generator = stream("sketch", rerun.seed)
    projection = normal(generator, len(end), dimensions).to(end)
    jacobian: Tensor = jacrev(
        lambda vector: rerun.outputs(vector, retrained.setting.problem.inputs)[:, 0]
    )(end)
    # φ(x)·(ΦᵀΦ)⁻¹φ(xᵢ) = [φ(x) Φ⁺]ᵢ
    features = jacobian.detach() @ projection
    inverse: Tensor = torch.linalg.pinv(features[: retrained.train])
    return features[retrained.train :] @ inverse * retrained.slopes


READ = ("path.rule=[secant,left]", "path.queries=[query]", *BARE)


class RemovalScores(AbstractTrial):
    """Scores of training examples compared with retraining without groups of examples.

        correlation    the Spearman correlation over groups G between Σ_{i ∈ G} τ(x, xᵢ) and the
                       change of f_T(x) when G is left out; mean over points x
        miss           ‖Σᵢ 𝒮(·, xᵢ) − (f_T − f_0)‖/‖f_T − f_0‖, for contributions

    The column `score` names τ, one of the scores that `all_scores` computes. The column
    `left_out` is `one` for single examples, or the relative size of the random groups.
    `base` holds settings as for `ntkexp train`."""

    base: tuple[str, ...]
    activations: tuple[str, ...] = Field(("tanh", "relu"), min_length=1)
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Rows:
        for activation in self.activations:
            trained = retraining(
                [*self.base, *READ, f"model.activation={activation}"], seed
            )

            # correlations over groups, between the score of each group and the change
            # of the outputs when training leaves out the group
            scores = all_scores(trained)
            for who, left in left_out_groups(self.groups, trained.train, seed).items():
                actual = trained.changes_without(left)
                for name, tau in scores.items():
                    row = {"activation": activation, "left_out": who, "score": name}
                    yield {**row, "correlation": score(left @ tau.t(), actual)}

            # ‖Σᵢ 𝒮(·, xᵢ) − (f_T − f_0)‖/‖f_T − f_0‖
            evidence = trained.outcome.matrices
            others = slice(trained.train, None)
            change = evidence.end[others] - evidence.start[others]
            miss = float(
                (evidence.query_contributions("secant").sum(2) - change).norm()
                / change.norm()
            )
            yield {
                "activation": activation,
                "left_out": "nobody",
                "score": "contributions",
                "miss": miss,
            }


def left_out_groups(
    groups: int, train: int, seed: int
) -> dict[str, Float[Tensor, "group train"]]:
    """Return the groups to leave out: every single example, and random groups of three
    sizes.

    >>> groups = left_out_groups(8, 40, seed=0)
    >>> {name: (len(left), int(left[0].sum())) for name, left in groups.items()}
    {'one': (40, 1), '5 %': (8, 2), '10 %': (8, 4), '50 %': (8, 20)}
    """
    shares = {"5 %": 20, "10 %": 10, "50 %": 2}
    groups_by_name = {
        name: draw_groups(max(1, train // share), groups, train, seed)
        for name, share in shares.items()
    }
    return {"one": torch.eye(train, dtype=torch.float64), **groups_by_name}


class ExactnessOfScores(AbstractTrial):
    """The benefit of exact contributions over TracIn, for several kinds of training.

    Each of the `trainings` is a text of settings, separated by blanks, which are added
    to `base`. It has the rows of `RemovalScores`, with the text in the column
    `training`. The rows with `score` = contributions also have

        gain    correlation of contributions − correlation of TracIn at every step

    Contributions are exact at any step size. TracIn is their first order in the step
    size. So `gain` shows if exactness helps to predict the result of retraining."""

    base: tuple[str, ...]
    trainings: tuple[str, ...] = Field(min_length=1)
    activations: tuple[str, ...] = Field(("tanh", "relu"), min_length=1)
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Rows:
        for training in self.trainings:
            scores = RemovalScores(
                base=(*self.base, *training.split()),
                activations=self.activations,
                groups=self.groups,
            )
            for row in with_gain([*scores.rows(seed)]):
                yield {"training": training, **row}


def with_gain(rows: Sequence[Row]) -> Rows:
    """Add `gain` to the rows of contributions: their correlation minus that of TracIn.

    >>> scores = {"contributions": 0.5, "tracin": 0.25, "effect": 0.75}
    >>> labels = {"activation": "tanh", "left_out": "one"}
    >>> rows = [{**labels, "score": name, "correlation": value} for name, value in scores.items()]
    >>> [row.get("gain") for row in with_gain(rows)]
    [0.25, None, None]
    """
    by_labels = {labels_of(row): row for row in rows if row["score"] == "tracin"}
    for row in rows:
        tracin = by_labels.get(labels_of(row))
        if row["score"] == "contributions" and tracin is not None:
            gain = correlation_of(row) - correlation_of(tracin)
            yield {**row, "gain": gain}
        else:
            yield row


def labels_of(row: Row) -> tuple[Level, Level]:
    """Return the labels that the rows of different scores share."""
    return row["activation"], row["left_out"]


def correlation_of(row: Row) -> float:
    correlation = row["correlation"]
    assert isinstance(correlation, float)
    return correlation


class ScoresByTraining(AbstractPicture):
    """The correlations of scores with training without one example, for several kinds
    of training.

    The picture shows a trial of `ExactnessOfScores`. `scores` and `trainings` map
    values of the columns `score` and `training` to labels. `xlabel` names the
    trainings."""

    has_judged_rows_only = True

    scores: dict[str, str] = Field(min_length=1)
    trainings: dict[str, str] = Field(min_length=1)
    xlabel: str = "training"

    def figure(self, judged: JudgedClaim) -> Figure:
        from ntkexp.claim.paper_figures import draw_scores  # noqa: PLC0415  loads matplotlib

        table = judged.table
        single = select_rows(table, {"quantity": "correlation", "left_out": "one"})
        gain = {
            "quantity": "gain",
            "score": "contributions",
            "left_out": ["one", "50 %"],
        }
        gains = select_rows(table, gain)
        by_level = gains.groupby(["training", "activation", "left_out"])["value"]
        largest = by_level.mean().abs().max()
        answer = f"Means of contributions and TracIn differ by at most {short(largest)}"
        return draw_scores(single, self.scores, self.trainings, self.xlabel, answer)

    def here(self, judged: JudgedClaim) -> str:
        return "dots are means over the seeds of the main look, with 95 % intervals."


READ_OF_RUNS = ("path.rule=[secant]", "path.queries=[query]", *BARE)


class OtherRuns(AbstractTrial):
    """Scores τ from one run, compared with retraining of this run and of runs with
    other seeds, on the same data.

        correlation    the Spearman correlation over groups G between Σ_{i ∈ G} τ(x, xᵢ)
                       and the change of f_T(x) when G is left out of the run
                       `repeated`; mean over points x

    The column `repeated` names the run from which G is left out:

        same           the run of τ
        other_order    a run with the same start and a different order of batches
        other_start    a run with a different start and the same order of batches
        other_run      a run with a different start and a different order of batches

    The column `score` names τ: the leave-out effect (`effect`), the negative
    contribution (`contributions`), or the change measured by retraining (`retraining`),
    all in the first run. No score of the first run can be expected to exceed
    `retraining`. `base` holds settings as for `ntkexp train`."""

    base: tuple[str, ...]
    groups: int = Field(32, ge=4, le=1000)

    def rows(self, seed: int) -> Rows:
        trained = retraining([*self.base, *READ_OF_RUNS], seed)
        runs = self.runs(trained)
        added = trained.outcome.matrices.query_contributions("secant")[:, 0]
        scores = {"effect": leave_out_effects(trained), "contributions": -added}
        for who, left in left_out_groups(self.groups, trained.train, seed).items():
            actual = {
                name: replace(trained, rerun=run).changes_without(left)
                for name, run in runs.items()
            }
            sums = {name: left @ tau.t() for name, tau in scores.items()} | {
                "retraining": actual["same"]
            }
            for (name, predicted), (repeated, change) in product(
                sums.items(), actual.items()
            ):
                yield {
                    "left_out": who,
                    "score": name,
                    "repeated": repeated,
                    "correlation": score(predicted, change),
                }

    def runs(self, trained: Retraining) -> Mapping[str, Rerun]:
        """Return the four runs of the column `repeated`, by name."""
        words = [*self.base, *READ_OF_RUNS]
        setting = other_setting(words, trained.setting.experiment)
        steps = trained.outcome.steps
        other = rerun_of(
            setting.experiment, setting.problem, setting.descent.step_size, steps
        )
        same = trained.rerun
        return {
            "same": same,
            "other_order": replace(same, seed=other.seed),
            "other_start": replace(other, seed=same.seed),
            "other_run": other,
        }
