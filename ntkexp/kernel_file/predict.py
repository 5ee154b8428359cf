"""Predictions from a kernel file: its numbers as matrices, what is asked, the coefficients, how good the predictions
are, and studies of several kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from pydantic import Field, PositiveFloat, ValidationError
from torch import Tensor

from ntkexp.closed_form import (
    AbstractGain,
    DescentGain,
    Ensemble,
    FlowGain,
    Kernels,
    Learned,
    Posterior,
    calibration_error,
    conjugate_gradients,
    factorise,
    folds,
    held_out,
    log_loss,
    modes_of,
    probabilities,
    refuse_negative,
    ridges,
)
from ntkexp.component import Component
from ntkexp.config.choices import Choices
from ntkexp.config.field_types import refusal
from ntkexp.config.plain_yaml import read_yaml
from ntkexp.machine.ladder import predicted_label
from ntkexp.mistake import Mistake, NoPlace, WrongArgument, nearest
from ntkexp.on_disk import blocks as row_parts
from ntkexp.on_disk import release_pages, zeros_on_disk
from ntkexp.records.kernel_file import SELF, DamagedKernel, KernelMatrix
from ntkexp.text import short

# --- The numbers of a kernel file as matrices: an entry is a point with one of the kernel's outputs.
#
# A kernel with one output holds for every column of the targets alike: one of infinite width, or a trace, of
# which each column gets its share. One with as many as they have holds for all columns together, which then
# follow one another in a single one.


AT_ONCE = 1 << 27  # bytes of rows that are read at once, at most
COPIES_OF_ROWS = 8  # of the rows that are read at once, that fit into the memory; three are held


@dataclass(frozen=True)
class Entries:
    """One file holds these numbers, in double precision. As many rows are read at once as `memory_gb` allows, and whole
    tiles."""

    matrix: KernelMatrix
    memory_gb: float = 4.0

    def __post_init__(self) -> None:
        if missing := len(self.matrix.missing()):
            whole = len(self.matrix.layout.tiling.todo)
            raise Mistake(
                f"{self.matrix.path} is not finished, or damaged: {whole - missing} of {whole} tiles are there; the "
                "command that began it goes on"
            )
        layout, columns = self.matrix.layout, self.targets.shape[1]
        others = isinstance(self.outputs, list) and self.outputs != list(range(columns))
        if others or layout.outputs not in (1, columns):
            raise WrongArgument(
                f"{self.matrix.path} is of {layout.outputs} outputs, and {columns} are to be predicted in their order; "
                "compute it with outputs=all or outputs=trace",
                "outputs",
            )

    @property
    def outputs(self) -> Any:
        """Which outputs the kernel is of: all, their trace, or a list; an infinite width knows no difference."""
        return self.matrix.description["kernel"].get("outputs", "all")

    @property
    def share(self) -> float:
        """The part of the kernel that a column gets."""
        return 1 / self.targets.shape[1] if self.outputs == "trace" else 1.0

    @property
    def train(self) -> int:
        return self.matrix.layout.tiling.train

    @property
    def count(self) -> int:
        return self.train * self.matrix.layout.outputs

    def blocks(self, points: slice) -> list[slice]:
        """Points, as many at a time as are read at once."""
        side = self.matrix.layout.tiling.side
        size = min(AT_ONCE, self.memory_gb * 1e9 / COPIES_OF_ROWS)
        step = int(size // (8 * self.count * self.matrix.layout.outputs))
        step = max(step // side, 1) * side
        return [
            slice(k, min(k + step, points.stop)) for k in range(points.start, points.stop, step)
        ]

    def rows(self, kernel: str, points: slice) -> Float[Tensor, "row entry"]:
        """The kernel between points and training examples."""
        kernel_rows = torch.as_tensor(self.matrix.array(kernel, points)).double()
        if not kernel_rows.isfinite().all():
            raise DamagedKernel(
                f"{self.matrix.path} is damaged: {kernel} holds numbers that are none; compute it again"
            )
        return kernel_rows.mul_(self.share).flatten(2).flatten(0, 1)

    def among(self, kernel: str) -> Float[Tensor, "entry entry"]:
        return torch.cat([self.rows(kernel, block) for block in self.blocks(slice(0, self.train))])

    def own(self, kernel: str, points: slice) -> Float[Tensor, " row"]:
        """The kernel between points and themselves."""
        found = torch.as_tensor(self.matrix.array(kernel + SELF, points)).double()
        return self.share * found.diagonal(dim1=1, dim2=2).flatten()

    @cached_property
    def targets(self) -> Float[Tensor, "point out"]:
        return torch.as_tensor(self.matrix.array("target"))

    @cached_property
    def labels(self) -> Int[Tensor, " point"]:
        return torch.as_tensor(self.matrix.array("label"))

    def columns(self, values: Float[Tensor, "point out"]) -> Float[Tensor, "entry column"]:
        """Values of points as the kernel's matrix takes them."""
        return values if self.matrix.layout.outputs == 1 else values.reshape(-1, 1)

    def values(self, columns: Float[Tensor, "entry column"]) -> Float[Tensor, "point out"]:
        """Columns of the kernel's matrix as values of points."""
        return columns.reshape(-1, self.targets.shape[1])


# --- What is asked of a kernel file: how long networks are trained with it, under which ridge, and how that is
# solved.


Solver: TypeAlias = Literal["eigen", "cholesky", "cg"]

SMALL = 4096  # entries up to which an eigendecomposition takes no longer than a person waits
COPIES: dict[Solver, int] = {"eigen": 6, "cholesky": 4, "cg": 0}  # of the kernel, that are held


@dataclass(frozen=True, kw_only=True)
class Question:
    """`times` of gradient flow, or `steps` of gradient descent; `ridge` None asks for the best of a grid."""

    times: tuple[float, ...] = (math.inf,)
    steps: int | None = None
    step_size: float | None = None
    ridge: float | None = 0.0
    folds: int | None = None  # 0: leave one out
    solver: Solver | None = None
    memory_gb: float = 4.0

    def __post_init__(self) -> None:
        refuse_negative(self.ridge or 0.0)
        if (self.steps is None) != (self.step_size is None):
            given, lacking = (
                ("steps", "step_size") if self.step_size is None else ("step_size", "steps")
            )
            raise WrongArgument(
                f"{given}={getattr(self, given)} goes with {lacking}=…: steps of gradient descent, all of one size",
                *(given, lacking),
            )
        if self.folds == 1:
            raise WrongArgument(
                "folds=1: it takes a number of folds ≥ 2, or 0 to leave out one by one", "folds"
            )
        if not self.memory_gb > 0:
            raise WrongArgument(f"memory_gb={self.memory_gb:g}: it takes a number > 0", "memory_gb")

    def ways(self, examples: int) -> dict[str, AbstractGain]:
        """Name each way to train, under a loss that is the mean over n examples."""
        if self.steps is not None and self.step_size is not None:
            name = f"{self.steps} steps of {short(self.step_size)}"
            return {name: DescentGain(self.step_size / examples, self.steps)}
        return {f"t={short(time)}": FlowGain(time / examples) for time in self.times}

    @property
    def is_plain(self) -> bool:
        """Whether a single inverse is all that is wanted."""
        return (
            self.steps is None
            and self.times == (math.inf,)
            and self.ridge is not None
            and self.folds is None
        )

    def way_to_solve(self, entries: Entries) -> Solver:
        """Choose the solver that was asked for, or the plainest that fits; a cost model that looks at shapes alone."""
        if self.solver not in (None, "eigen") and not self.is_plain:
            raise WrongArgument(
                f"solver={self.solver} gives t=∞ at one ridge; leave it out, or write solver=eigen",
                "solver",
            )
        usual: list[Solver] = (
            ["eigen"] if not self.is_plain or entries.count <= SMALL else ["cholesky"]
        )
        usual += ["cholesky", "cg"] if self.is_plain else []
        needed = {
            each: 8.0 * COPIES[each] * entries.count**2
            for each in ([self.solver] if self.solver else usual)
        }
        for solver, size in needed.items():
            if size <= self.memory_gb * 1e9:
                return solver
        raise WrongArgument(
            f"memory_gb={self.memory_gb:g}: solving {entries.count} equations this way needs {size / 1e9:.1f}; raise it"
            + ("" if self.is_plain else ", or ask for t=∞ at one ridge"),
            "memory_gb",
        )


# --- Coefficients of one kernel, by whichever way the question asks for, and what is needed for variances.


REMARKS = 25  # products between two remarks


@dataclass(frozen=True)
class SolvedKernel:
    """g(R) y of one way to train; `learned` is g, and g of twice the time: None where they cost too much."""

    when: str
    ridge: float
    coefficients: Float[Tensor, "entry column"]
    solver: str
    learned: tuple[Learned, Learned] | None = None
    left_out: Float[Tensor, "entry column"] | None = (
        None  # predictions of training examples by the others
    )


def solve(
    entries: Entries, kernel: str, question: Question, tell: Callable[[str], None]
) -> Iterator[SolvedKernel]:
    """Solve way by way: by one eigendecomposition, by Cholesky's factor, or by conjugate gradients."""
    targets = entries.columns(entries.targets[: entries.train])
    solver, ways = question.way_to_solve(entries), question.ways(entries.train)
    if solver == "eigen":
        yield from solve_by_modes(entries, kernel, question, ways, targets)
        return
    (when,), ridge = ways, question.ridge or 0.0
    if solver == "cholesky":
        factor = factorise(entries.among(kernel), ridge)
        name = f"Cholesky, jitter {factor.jitter:.0e}" if factor.jitter else "Cholesky"
        yield SolvedKernel(when, ridge, factor.solve(targets), name, (factor.solve, factor.solve))
        return
    matrix = matrix_for_products(entries, kernel, question.memory_gb)

    def product(vectors: Tensor) -> Tensor:
        return torch.cat([part @ vectors for part in row_parts(matrix)]) + ridge * vectors

    def remark(count: int, residual: float) -> None:
        if count % REMARKS == 0:
            tell(f"{kernel}: {count} products, residual {residual:.0e}")

    diagonal = entries.own(kernel, slice(0, entries.train)) + ridge
    solved = conjugate_gradients(product, diagonal, targets, tell=remark)
    yield SolvedKernel(
        when, ridge, solved.solution, f"{solved.products} products, residual {solved.residual:.0e}"
    )


def matrix_for_products(
    entries: Entries, kernel: str, memory_gb: float
) -> Float[Tensor, "entry entry"]:
    """The kernel among training examples. If the memory does not hold it twice, it lies in a file without a name beside
    the kernel: a product reads that much faster than the tiles."""
    shape = entries.count, entries.count
    if 2 * 8.0 * entries.count**2 <= memory_gb * 1e9:
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
    """A matrix in a file of this folder, or of the system's folder for such files if this one takes none."""
    places = folder, Path(gettempdir())
    for place in places:
        with suppress(OSError):
            return zeros_on_disk(place, shape, torch.float64)
    raise NoPlace(
        f"the kernel takes {8e-9 * shape[0] * shape[1]:.2g} GB of disk for products with it, and neither {places[0]} "
        f"nor {places[1]} takes a file of that size; raise memory_gb, or free the disk"
    )


def solve_by_modes(
    entries: Entries,
    kernel: str,
    question: Question,
    ways: dict[str, AbstractGain],
    targets: Float[Tensor, "entry column"],
) -> Iterator[SolvedKernel]:
    """Solve every way by one eigendecomposition."""
    matrix = entries.among(kernel)
    modes = modes_of(matrix)
    parts = folds(entries.train, question.folds or entries.train, entries.matrix.layout.outputs)
    if question.ridge is None:  # the one with the smallest squared error on what was left out
        tried = ridges(matrix)
        ridge = min(
            tried,
            key=lambda one: float((held_out(modes, one, targets, parts) - targets).square().sum()),
        )
    else:
        ridge = question.ridge
    needs_modes = question.ridge is None or question.folds is not None
    left_out = held_out(modes, ridge, targets, parts) if needs_modes else None
    name = f"{int((modes.values > 0).sum())} of {len(modes.values)} modes"
    for when, gain in ways.items():
        learned = modes.at(gain, ridge), modes.at(gain.doubled, ridge)
        yield SolvedKernel(when, ridge, learned[0](targets), name, learned, left_out)
        left_out = None


# --- How good predictions are: one row per kernel, way to train and split.
#
#     accuracy                      share of right classes
#     rmse                          √mean (f̂ − y)², over points and outputs
#     r2                            1 − Σ(f̂ − y)²/Σy²; targets are centred, so it compares with saying zero
#     log_loss, calibration_error   of the classes' probabilities (`closed_form`)


@dataclass(frozen=True)
class Score:
    """One row of the table of scores tells of one kernel, way to train and split."""

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
    """Outputs at the points of a split, and their standard deviation over networks, where it is known."""

    mean: Float[Tensor, "point out"]
    deviation: Float[Tensor, " point"] | None


# --- Predictions from a kernel file, of every kernel in it, at all points.
#
# Of `ntk`, in a file that holds `nngp` as well, these are the mean and the deviation of networks that train all layers
# (`closed_form`); of `nngp`, those of networks that train their readout, and at t = ∞ of the Gaussian process itself. A
# tangent kernel of finite networks predicts without a deviation.


LEFT_OUT = "left out"


@dataclass(frozen=True)
class Answer:
    """What one kernel says after one way to train: scores, and outputs by split."""

    kernel: str
    solved: SolvedKernel
    scores: tuple[Score, ...]
    predicted: dict[str, MeanAndDeviation]


def predict(entries: Entries, question: Question, tell: Callable[[str], None]) -> Iterator[Answer]:
    entries = replace(entries, memory_gb=question.memory_gb)
    for kernel in reversed(entries.matrix.layout.kernels):
        for found in solve(entries, kernel, question, tell):
            yield answer_at_splits(entries, kernel, found)


def answer_at_splits(entries: Entries, kernel: str, solved: SolvedKernel) -> Answer:
    splits = entries.matrix.splits
    predicted = {
        split: predict_at(entries, kernel, solved, points) for split, points in splits.items()
    }
    if solved.left_out is not None:
        predicted[LEFT_OUT] = MeanAndDeviation(entries.values(solved.left_out), None)
    scores = []
    for split, outputs in predicted.items():
        points = splits["train" if split == LEFT_OUT else split]
        targets, labels = (
            entries.targets[points],
            entries.labels[points],
        )  # labels below zero are none
        error, classifies = outputs.mean - targets, bool((labels >= 0).all())
        spread = outputs.deviation if classifies else None
        chances = None if spread is None else probabilities(outputs.mean, spread)
        scores.append(
            Score(
                kernel=kernel,
                when="t=∞"
                if split == LEFT_OUT
                else solved.when,  # the only time at which that has a closed form
                ridge=solved.ridge,
                split=split,
                points=len(targets),
                accuracy=float((predicted_label(outputs.mean).long() == labels).double().mean())
                if classifies
                else None,
                rmse=float(error.square().mean().sqrt()),
                r2=1 - float(error.square().sum() / targets.square().sum()),
                log_loss=None if chances is None else log_loss(chances, labels),
                calibration_error=None if chances is None else calibration_error(chances, labels),
                solver=solved.solver,
            )
        )
    return Answer(kernel, solved, tuple(scores), predicted)


def predict_at(
    entries: Entries, kernel: str, solved: SolvedKernel, points: slice
) -> MeanAndDeviation:
    """Predict the outputs at some points, block by block."""
    learned = solved.learned if "nngp" in entries.matrix.layout.kernels else None
    prior = entries.among("nngp") if learned and kernel == "ntk" else None
    means, variances = [], []
    for block in entries.blocks(points):
        cross = entries.rows(kernel, block)
        means.append(entries.values(cross @ solved.coefficients))
        if learned and prior is not None:  # of networks that train all layers
            start = Kernels(prior, entries.rows("nngp", block))
            variances.append(
                Ensemble(cross, start, learned[0]).variance(entries.own("nngp", block))
            )
        elif learned:  # of those that train their readout
            variances.append(Posterior(cross, *learned).variance(entries.own("nngp", block)))
    mean = torch.cat(means)
    return MeanAndDeviation(mean, torch.cat(variances).clamp(min=0).sqrt() if variances else None)


class Study(Component):
    """Several kernels of infinite width, each by its overrides, that are to stand in one table; `base` is common to all
    of them. `published` is an accuracy in per cent that stands beside the NTK's, found with the data that
    `published_with` names.

    >>> Study(kernels={"A": ["model=mlp"]}, base=["data=wine"]).overrides(["data.train=50"])
    {'A': ['data=wine', 'model=mlp', 'data.train=50']}
    """

    kernels: dict[str, tuple[str, ...]] = Field(min_length=1)
    base: tuple[str, ...] = ()
    published: dict[str, PositiveFloat] = Field(default_factory=dict)
    published_with: str = ""

    def overrides(self, words: Sequence[str]) -> dict[str, list[str]]:
        """The overrides that make each kernel; the last word counts."""
        return {name: [*self.base, *own, *words] for name, own in self.kernels.items()}


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
