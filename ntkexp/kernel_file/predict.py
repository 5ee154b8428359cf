"""Predictions of networks trained with the kernel of a file: solvers of the linear
systems, scores of predictions, and studies that compare several kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveFloat, ValidationError
from torch import Tensor

from ntkexp.capacity import DEFAULT_MEMORY, MemoryBudget, split_range
from ntkexp.closed_form import (
    CG_TOLERANCE,
    AbstractGain,
    DescentGain,
    Ensemble,
    FlowGain,
    Kernels,
    Learned,
    Posterior,
    best_ridge,
    calibration_error,
    conjugate_gradients,
    divergence,
    factorise,
    folds,
    held_out,
    log_loss,
    modes_of,
    probabilities,
    refuse_negative,
)
from ntkexp.component import Component
from ntkexp.config.choices import Choices
from ntkexp.config.field_types import refusal
from ntkexp.config.plain_yaml import read_yaml
from ntkexp.machine.ladder import predicted_label
from ntkexp.mistake import Mistake, NoPlace, WrongArgument, nearest
from ntkexp.on_disk import blocks as row_parts, release_pages, zeros_on_disk
from ntkexp.records.kernel_file import SELF, DamagedKernel, KernelMatrix
from ntkexp.text import short

# --- A kernel file as a matrix. Each row and each column belongs to an *entry*, which is a
# pair of a point and an output.
#
# Kernels of infinite width and traces over outputs have one output. They are applied to
# every column of the targets separately, and the trace is divided by the number of
# columns. For a kernel with all outputs, the targets form one long column
# [point × output].


MAX_ROW_BYTES = 1 << 27
"""Read at most this many bytes of rows at once."""
MEMORY_PARTS_OF_ROWS = 8
"""Rows that are read at once take at most 1/8 of the memory. The program holds three
copies of these rows."""


@dataclass(frozen=True)
class Entries:
    """The kernel matrix of a finished file in double precision,
    read in entire tiles."""

    matrix: KernelMatrix
    budget: MemoryBudget = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        missing = len(self.matrix.missing())
        if missing:
            tiles = len(self.matrix.layout.tiling.todo)
            raise Mistake(
                f"{self.matrix.path} is not finished, or damaged: {tiles - missing} of {tiles} "
                "tiles are finished; the command that began it continues"
            )
        layout = self.matrix.layout
        columns = self.targets.shape[1]
        has_selection = isinstance(self.outputs, list) and self.outputs != list(
            range(columns)
        )
        if has_selection or layout.outputs not in (1, columns):
            raise WrongArgument(
                f"{self.matrix.path} has {layout.outputs} outputs, and {columns} are needed, in "
                "their order; compute it with outputs=all or outputs=trace",
                "outputs",
            )

    @property
    def outputs(self) -> Any:
        """The kernel's outputs: `all`, `trace`, or a list of indices. At infinite
        width, always `all`."""
        return self.matrix.description["kernel"].get("outputs", "all")

    @property
    def share(self) -> float:
        """The factor of the stored kernel: 1/(number of target columns) for a trace,
        else 1."""
        return 1 / self.targets.shape[1] if self.outputs == "trace" else 1.0

    @property
    def eps(self) -> float:
        """The machine epsilon of the entries' floating-point type."""
        return float(np.finfo(self.matrix.layout.dtype).eps)

    @property
    def train(self) -> int:
        return self.matrix.layout.tiling.train

    @property
    def count(self) -> int:
        return self.train * self.matrix.layout.outputs

    def blocks(self, points: slice) -> list[slice]:
        """Split points into blocks of entire tiles.
        The rows of a block are read at once."""
        side = self.matrix.layout.tiling.side
        block_bytes = min(MAX_ROW_BYTES, self.budget.bytes / MEMORY_PARTS_OF_ROWS)
        step = int(block_bytes // (8 * self.count * self.matrix.layout.outputs))
        step = max(step // side, 1) * side
        return split_range(points.start, points.stop, step)

    def rows(self, kernel: str, points: slice) -> Float[Tensor, "row entry"]:
        """Return the kernel between points (rows) and training examples (columns)."""
        kernel_rows = torch.as_tensor(self.matrix.array(kernel, points)).double()
        if not kernel_rows.isfinite().all():
            raise DamagedKernel(
                f"{self.matrix.path} is damaged: {kernel} holds numbers that are not finite; "
                "compute it again"
            )
        return kernel_rows.mul_(self.share).flatten(2).flatten(0, 1)

    def train_matrix(self, kernel: str) -> Float[Tensor, "entry entry"]:
        return torch.cat(
            [self.rows(kernel, block) for block in self.blocks(slice(0, self.train))]
        )

    def diagonal(self, kernel: str, points: slice) -> Float[Tensor, " row"]:
        """Return the kernel of each point with itself."""
        blocks = torch.as_tensor(self.matrix.array(kernel + SELF, points)).double()
        return self.share * blocks.diagonal(dim1=1, dim2=2).flatten()

    @cached_property
    def targets(self) -> Float[Tensor, "point out"]:
        return torch.as_tensor(self.matrix.array("target"))

    @cached_property
    def labels(self) -> Int[Tensor, " point"]:
        return torch.as_tensor(self.matrix.array("label"))

    def columns(
        self, values: Float[Tensor, "point out"]
    ) -> Float[Tensor, "entry column"]:
        """Reshape values at points to right-hand sides of linear systems
        with the kernel matrix."""
        return values if self.matrix.layout.outputs == 1 else values.reshape(-1, 1)

    def values(
        self, columns: Float[Tensor, "entry column"]
    ) -> Float[Tensor, "point out"]:
        """Reshape entries to values at points. This is the inverse of `columns`."""
        return columns.reshape(-1, self.targets.shape[1])


# --- The settings of training (time, ridge), and the solver


Solver: TypeAlias = Literal["eigen", "cholesky", "cg"]

MAX_EIGEN_ENTRIES = 4096
"""If the matrix has at most this many rows, prefer an eigendecomposition."""
KERNEL_COPIES: dict[Solver, int] = {"eigen": 6, "cholesky": 4, "cg": 0}
"""The number of copies of the kernel matrix that each solver holds in memory."""


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    """The settings of training with the kernel: gradient flow for each of `times`, or
    gradient descent with `steps` steps."""

    times: tuple[float, ...] = (math.inf,)
    steps: int | None = None
    step_size: float | None = None
    ridge: float | None = 0.0
    """The ridge. If None, choose the best ridge of a grid by cross-validation."""
    folds: int | None = None
    """The number of folds of the cross-validation, or 0 for leave-one-out."""
    solver: Solver | None = None
    memory_gb: float = 4.0

    def __post_init__(self) -> None:
        refuse_negative(self.ridge or 0.0)
        if (self.steps is None) != (self.step_size is None):
            present = "step_size"
            absent = "steps"
            if self.step_size is None:
                present = "steps"
                absent = "step_size"
            raise WrongArgument(
                f"{present}={getattr(self, present)} goes with {absent}=…: steps of gradient "
                "descent, all of one size",
                present,
                absent,
            )
        if self.folds == 1:
            raise WrongArgument(
                "folds=1: it takes a number of folds ≥ 2, or 0 to leave out one by one",
                "folds",
            )
        _ = self.budget

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget.of_gb(self.memory_gb)

    def gains(self, examples: int) -> dict[str, AbstractGain]:
        """Return the gain of each training time or number of steps, by name.
        `closed_form` defines gains.

        The loss is the mean over `examples` training examples.
        """
        if self.steps is not None and self.step_size is not None:
            name = f"{self.steps} steps of {short(self.step_size)}"
            return {name: DescentGain(self.step_size / examples, self.steps)}
        return {f"t={short(time)}": FlowGain(time / examples) for time in self.times}

    @property
    def is_plain(self) -> bool:
        """True if one linear system suffices: t = ∞, one ridge,
        and no cross-validation."""
        is_endless = self.steps is None and self.times == (math.inf,)
        return is_endless and self.ridge is not None and self.folds is None

    def choose_solver(self, entries: Entries) -> Solver:
        """Return the requested solver, or the first suitable solver
        that fits into the memory.

        Raise if the requested solver is not suitable, or if no solver fits.
        """
        if self.solver not in (None, "eigen") and not self.is_plain:
            raise WrongArgument(
                f"solver={self.solver} supports only t=∞ at one ridge; leave it out, or write "
                "solver=eigen",
                "solver",
            )
        candidates: list[Solver] = ["eigen"]
        if self.is_plain:
            candidates = ["cholesky", "cg"]
            if entries.count <= MAX_EIGEN_ENTRIES:
                candidates = ["eigen", *candidates]
        if self.solver:
            candidates = [self.solver]
        for solver in candidates:
            needed_bytes = 8.0 * KERNEL_COPIES[solver] * entries.count**2
            if self.budget.fits(needed_bytes):
                return solver
        remedy = "" if self.is_plain else "ask for t=∞ at one ridge"
        task = f"solving {entries.count} equations this way"
        raise WrongArgument(
            self.budget.refusal(needed_bytes, task, remedy), "memory_gb"
        )


# --- Coefficients of one kernel


PRODUCTS_PER_REMARK = 25


@dataclass(frozen=True)
class SolvedKernel:
    """The coefficients g(R) y of a kernel, for one training time or number of steps.

    y are the targets, R is the kernel matrix with ridge, and g is the gain of the
    training (`closed_form`). For t = ∞, g(R) = R⁻¹."""

    when: str
    ridge: float
    coefficients: Float[Tensor, "entry column"]
    solver: str
    learned: tuple[Learned, Learned] | None = None
    """The maps B ↦ g(R) B for this training time and for twice this time. They
    determine standard deviations. None for the solver `cg`, with which these maps would
    take too long."""
    left_out: Float[Tensor, "entry column"] | None = None
    """Cross-validated predictions: each training example is predicted
    from the examples of other folds. """
    warning: str | None = None


def solve(
    entries: Entries,
    kernel: str,
    settings: PredictionSettings,
    report: Callable[[str], None],
) -> Iterator[SolvedKernel]:
    """Yield the coefficients for each training time or number of steps."""
    targets = entries.columns(entries.targets[: entries.train])
    solver = settings.choose_solver(entries)
    if solver == "eigen":
        yield from solve_by_modes(entries, kernel, settings, targets)
        return
    (when,) = settings.gains(entries.train)
    ridge = settings.ridge or 0.0
    if solver == "cholesky":
        factor = factorise(entries.train_matrix(kernel), ridge, entries.eps)
        name = f"Cholesky, jitter {factor.jitter:.0e}" if factor.jitter else "Cholesky"
        yield SolvedKernel(
            when, ridge, factor.solve(targets), name, (factor.solve, factor.solve)
        )
        return
    matrix = matrix_for_products(entries, kernel, settings.budget)

    def product(vectors: Tensor) -> Tensor:
        return (
            torch.cat([part @ vectors for part in row_parts(matrix)]) + ridge * vectors
        )

    def remark(count: int, residual: float) -> None:
        if count % PRODUCTS_PER_REMARK == 0:
            report(f"{kernel}: {count} products, residual {residual:.0e}")

    diagonal = entries.diagonal(kernel, slice(0, entries.train)) + ridge
    solution = conjugate_gradients(product, diagonal, targets, report_progress=remark)
    name = f"{solution.products} products, residual {solution.residual:.0e}"
    warning = None
    if not solution.residual <= CG_TOLERANCE:
        warning = (
            f"{kernel}: conjugate gradients did not converge: the relative residual is "
            f"{short(solution.residual)} after {solution.products} products; raise the ridge"
        )
    yield SolvedKernel(when, ridge, solution.solution, name, warning=warning)


def matrix_for_products(
    entries: Entries, kernel: str, budget: MemoryBudget
) -> Float[Tensor, "entry entry"]:
    """Return the kernel matrix of the training examples, for products with vectors.

    If two copies do not fit into the memory, store the matrix in an unnamed file next
    to the kernel file. Reading this file is much faster than reading tiles."""
    shape = (entries.count, entries.count)
    if budget.fits(2 * 8.0 * entries.count**2):
        matrix = torch.empty(shape, dtype=torch.float64)
    else:
        matrix = matrix_on_disk(entries.matrix.path.parent, shape)
    start = 0
    for block in entries.blocks(slice(0, entries.train)):
        rows = entries.rows(kernel, block)
        matrix[start : start + len(rows)] = rows
        start += len(rows)
        release_pages(matrix)
    return matrix


def matrix_on_disk(folder: Path, shape: tuple[int, int]) -> Tensor:
    """Return a matrix in an unnamed file, in this folder or in the temporary folder.

    Raise if neither has enough space.
    """
    temporary = Path(gettempdir())
    for folder_tried in (folder, temporary):
        with suppress(OSError):
            return zeros_on_disk(folder_tried, shape, torch.float64)
    raise NoPlace(
        f"the kernel takes {8e-9 * shape[0] * shape[1]:.2g} GB of disk for products with it, and "
        f"neither {folder} nor {temporary} takes a file of that size; raise memory_gb, or free "
        "the disk"
    )


def solve_by_modes(
    entries: Entries,
    kernel: str,
    settings: PredictionSettings,
    targets: Float[Tensor, "entry column"],
) -> Iterator[SolvedKernel]:
    """Yield the coefficients for each training time or number of steps, from one
    eigendecomposition.
    """
    matrix = entries.train_matrix(kernel)
    modes = modes_of(matrix, entries.eps)
    parts = folds(
        entries.train, settings.folds or entries.train, entries.matrix.layout.outputs
    )

    ridge = settings.ridge
    if ridge is None:
        ridge = best_ridge([matrix], [modes], [targets], parts)
    left_out = None
    if settings.ridge is None or settings.folds is not None:
        left_out = held_out(modes, ridge, targets, parts)
    name = f"{int((modes.values > 0).sum())} of {len(modes.values)} modes"
    largest = float(modes.values[-1]) + ridge
    warning = divergence(settings.step_size, largest, entries.train)
    for when, gain in settings.gains(entries.train).items():
        learned = modes.at(gain, ridge)
        doubled = modes.at(gain.doubled, ridge)
        yield SolvedKernel(
            when, ridge, learned(targets), name, (learned, doubled), left_out, warning
        )
        left_out = None


# --- Scores of predictions
#
#     accuracy                      share of correct classes
#     rmse                          √mean (f̂ − y)², over points and outputs
#     r2                            1 − Σ(f̂ − y)²/Σy²; a constant prediction of zero has r2 = 0
#     log_loss, calibration_error   of the predicted probabilities of classes (`closed_form`)


@dataclass(frozen=True)
class Score:
    """A row of the table of scores, for one kernel, one training time and one split."""

    kernel: str
    when: str
    ridge: float
    split: str
    points: int
    accuracy: float | None
    rmse: float
    r2: float
    log_loss: float | None
    calibration_error: float | None
    solver: str


@dataclass(frozen=True)
class MeanAndDeviation:
    """Predicted outputs at the points of a split.

    The deviation is the standard deviation over random networks,
    or None if it is unknown."""

    mean: Float[Tensor, "point out"]
    deviation: Float[Tensor, " point"] | None


# --- Predictions of every kernel in a file at all points
#
# A file may contain the kernels `nngp` and `ntk` of infinitely wide networks. The
# predictions of `ntk` are the mean and standard deviation over random networks whose
# layers are all trained (`closed_form`). The predictions of `nngp` are for networks
# whose readout alone is trained. At t = ∞, they equal the Gaussian process posterior.
# For a tangent kernel of finite networks, no standard deviation is known.


LEFT_OUT = "left out"


@dataclass(frozen=True)
class KernelPredictions:
    """The scores and predictions of one kernel,
    for one training time or number of steps."""

    kernel: str
    solved: SolvedKernel
    scores: tuple[Score, ...]
    predicted: dict[str, MeanAndDeviation]


def predict(
    entries: Entries, settings: PredictionSettings, report: Callable[[str], None]
) -> Iterator[KernelPredictions]:
    """Yield scores and predictions for each kernel in the file,
    and each training time or number of steps.

    Iterative solvers report their progress to `report`.
    """
    entries = replace(entries, budget=settings.budget)
    for kernel in reversed(entries.matrix.layout.kernels):
        for solved in solve(entries, kernel, settings, report):
            yield predictions_at_splits(entries, kernel, solved)


def predictions_at_splits(
    entries: Entries, kernel: str, solved: SolvedKernel
) -> KernelPredictions:
    predicted = {
        split: predict_at(entries, kernel, solved, points)
        for split, points in entries.matrix.splits.items()
    }
    if solved.left_out is not None:
        predicted[LEFT_OUT] = MeanAndDeviation(entries.values(solved.left_out), None)
    scores = [
        score_of(entries, kernel, solved, split, predicted[split])
        for split in predicted
    ]
    return KernelPredictions(kernel, solved, tuple(scores), predicted)


def score_of(
    entries: Entries,
    kernel: str,
    solved: SolvedKernel,
    split: str,
    outputs: MeanAndDeviation,
) -> Score:
    """Return the scores of the predictions `outputs` on one split."""
    is_left_out = split == LEFT_OUT
    points = entries.matrix.splits["train" if is_left_out else split]
    targets = entries.targets[points]
    labels = entries.labels[points]  # class labels; −1 for regression
    error = outputs.mean - targets
    # outputs that overflow name no class
    classifies = bool((labels >= 0).all() and outputs.mean.isfinite().all())
    accuracy = None
    if classifies:
        is_correct = predicted_label(outputs.mean).long() == labels
        accuracy = float(is_correct.double().mean())
    cross_entropy = None
    calibration = None
    deviation = outputs.deviation
    if classifies and deviation is not None and deviation.isfinite().all():
        chances = probabilities(outputs.mean, deviation)
        cross_entropy = log_loss(chances, labels)
        calibration = calibration_error(chances, labels)
    return Score(
        kernel=kernel,
        # cross-validated predictions exist only for t = ∞
        when="t=∞" if is_left_out else solved.when,
        ridge=solved.ridge,
        split=split,
        points=len(targets),
        accuracy=accuracy,
        rmse=float(error.square().mean().sqrt()),
        r2=1 - float(error.square().sum() / targets.square().sum()),
        log_loss=cross_entropy,
        calibration_error=calibration,
        solver=solved.solver,
    )


def predict_at(
    entries: Entries, kernel: str, solved: SolvedKernel, points: slice
) -> MeanAndDeviation:
    """Predict the outputs at some points and, if known, their standard deviation."""
    learned = solved.learned if "nngp" in entries.matrix.layout.kernels else None
    prior = entries.train_matrix("nngp") if learned and kernel == "ntk" else None
    means: list[Tensor] = []
    variances: list[Tensor] = []
    for block in entries.blocks(points):
        cross = entries.rows(kernel, block)
        means.append(entries.values(cross @ solved.coefficients))
        if learned and prior is not None:  # networks with all layers trained
            start = Kernels(prior, entries.rows("nngp", block))
            ensemble = Ensemble(cross, start, learned[0])
            variances.append(ensemble.variance(entries.diagonal("nngp", block)))
        elif learned:  # networks with only the readout trained
            variances.append(
                Posterior(cross, *learned).variance(entries.diagonal("nngp", block))
            )
    deviation = torch.cat(variances).clamp(min=0).sqrt() if variances else None
    return MeanAndDeviation(torch.cat(means), deviation)


class Study(Component):
    """Several infinite-width kernels that are compared in one table. Each kernel is
    described by overrides of the configuration.

    `base` are overrides for all kernels. `published` holds accuracies of tangent kernels
    from a paper, in per cent, by the name of the kernel. `published_with` describes the
    data of these accuracies.

    >>> Study(kernels={"A": ["model=mlp"]}, base=["data=wine"]).overrides(["data.train=50"])
    {'A': ['data=wine', 'model=mlp', 'data.train=50']}
    """

    kernels: dict[str, tuple[str, ...]] = Field(min_length=1)
    base: tuple[str, ...] = ()
    published: dict[str, PositiveFloat] = Field(default_factory=dict)
    published_with: str = ""

    def overrides(self, overrides: Sequence[str]) -> dict[str, list[str]]:
        """Return the overrides of each kernel, followed by `overrides`. Later overrides
        have precedence."""
        return {
            name: [*self.base, *kernel_words, *overrides]
            for name, kernel_words in self.kernels.items()
        }


def read_study(name: str, choices: Choices) -> Study:
    names = choices.options("study")
    if name not in names:
        raise Mistake(
            f"'{name}' is not a study; choose from {', '.join(names)}{nearest(name, names)}"
        )
    fields = read_yaml(choices.file("study", name))
    try:
        return Study.model_validate(fields)
    except ValidationError as error:
        raise Mistake(
            f"{choices.file('study', name)}: {refusal(error, Study, '', fields)}"
        ) from None
