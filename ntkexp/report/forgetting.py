"""Forgetting: how training on a later phase changes a measure at the queries of an
earlier phase, and the part of each training example in this change.

The measure of a query is a margin if there are classes, and the negative loss
otherwise. For a single output, the margin is y f. For several outputs, it is f_y − f_c,
where y is the true class, and c the strongest wrong class at the end of the run. The
loss is ½‖f − t‖² with target t. Let f̄ be the mean of the outputs before and after the
phase, Δf the change of the outputs, and e_c the unit vector of class c. Then the change
of the measure is linear in Δf:

    Δ margin = g · Δf,    g = y, or e_y − e_c;      Δ(−½‖f − t‖²) = (t − f̄) · Δf;      Δf = Σᵢ 𝒮_p(x, xᵢ) + 𝒟_p(x)

𝒮_p and 𝒟_p are the contributions of examples and of weight decay in phase p. So the
parts of the examples and of weight decay add up to the change of the measure, up to
rounding. All results are means over the queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import BY_PHASE, CHANGE, DECAY_BY_PHASE
from ntkexp.report.examples import example
from ntkexp.report.inventory import flatten_config
from ntkexp.report.run import Run, blocks, outputs_of
from ntkexp.report.tables import (
    Column,
    Table,
    format_signed,
    format_text,
    signed_column,
    text_column,
)
from ntkexp.text import percent, short

if TYPE_CHECKING:
    import xarray as xr

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Forgetting:
    """The change of the measure at the queries of phase `task`, while phase `during`
    was learned. Phases are counted from 1."""

    task: int
    during: int
    names: tuple[str, str]  # names of the phases `task` and `during`
    split: str
    points: int  # number of queries
    before: float  # mean measure of the queries before phase `during`
    after: float
    # accuracy before and after the phase; None if there are no classes
    right: tuple[float, float] | None
    by: tuple[float, ...]  # change of the measure due to each training example
    decay: float  # change of the measure due to weight decay
    learned_in: tuple[int, ...]  # the phase of each training example

    @property
    def change(self) -> float:
        return self.after - self.before

    def of_phase(self, phase: int) -> float:
        """Return the sum of the parts of the examples of a phase."""
        parts = zip(self.by, self.learned_in, strict=True)
        return sum(part for part, learned_in in parts if learned_in == phase)

    @property
    def acting(self) -> int:
        """The number of examples whose part is not 0."""
        return sum(part != 0 for part in self.by)

    @property
    def harm(self) -> float:
        """The sum of the negative parts, as a positive number."""
        return -sum(part for part in self.by if part < 0)

    @property
    def worst(self) -> list[int]:
        """The indices of the examples with negative parts, the largest harm first."""
        return [
            k for k in np.argsort(self.by, kind="stable").tolist() if self.by[k] < 0
        ]

    @property
    def halving(self) -> int:
        """The smallest number of examples whose negative parts add up to at least half
        of `harm`. It is 0 if no part is negative."""
        harm_so_far = np.cumsum([-self.by[k] for k in self.worst])
        if not len(harm_so_far):
            return 0
        return int(np.searchsorted(harm_so_far, self.harm / 2 * (1 - 1e-12))) + 1


@dataclass(frozen=True, eq=False)
class LaterPhase:
    """The changes of the outputs during one phase, at the queries of a split.

    `parts` is NaN at queries that were not attributed.
    """

    run: Run
    split: str
    during: int
    before: Array  # outputs before the phase, [point, out]
    change: Array  # change of the outputs, [point, out]
    # contributions, [point, out, example]; this array may exceed the memory
    parts: xr.DataArray
    decay: Array  # change of the outputs by weight decay, [point, out]

    @cached_property
    def attributed(self) -> NDArray[np.bool_]:
        """A mask over the queries, [point]. It is True if all outputs at
        the query were attributed."""
        return np.concatenate(
            [np.isfinite(block).all(axis=(1, 2)) for block in blocks(self.parts)]
        )

    def by_example(self, queries: NDArray[np.int64], slope: Array) -> Array:
        """Return the change of the measure due to each example, summed over `queries`:
        Σₓ g(x) · 𝒮_p(x, xᵢ), [example].

        `slope` holds the derivatives g(x) of the measure, [query, out].
        """
        total = np.zeros(self.parts.shape[2])
        first = 0
        for block in blocks(self.parts):
            inside = (queries >= first) & (queries < first + len(block))
            total += np.einsum(
                "xc,xci->i", slope[inside], block[queries[inside] - first]
            )
            first += len(block)
        return total

    def effect_on(self, task: int) -> Forgetting | None:
        """Return the effect on the attributed queries of a task. Return None if the
        task has no attributed query."""
        # select the outputs at the queries of the task, before and after the phase
        run = self.run
        contributions = run.contributions
        points = run.points[self.split]
        of_task = contributions.point_phase.to_numpy()[points] == task
        queries = np.flatnonzero(of_task & self.attributed)
        before = self.before[queries]
        after = before + self.change[queries]
        if not len(queries) or not np.isfinite(after).all():
            return None

        # g = d measure/df
        targets = np.asarray(run.data[f"{self.split}_targets"], dtype=float)[queries]
        has_classes = len(run.data["classes"]) > 0
        labels = run.data[f"{self.split}_target"][queries] if has_classes else None
        end = outputs_of(run, "f_T")[points][queries]
        slope = measure_slopes(labels, targets, end, (before + after) / 2)

        right = None
        if has_classes:
            right = (share_right(targets, before), share_right(targets, after))
        names = contributions.phase_name.to_numpy()
        return Forgetting(
            task=task,
            during=self.during,
            names=(str(names[task - 1]), str(names[self.during - 1])),
            split=self.split,
            points=len(queries),
            before=mean_measure(labels, slope, targets, before),
            after=mean_measure(labels, slope, targets, after),
            right=right,
            by=tuple((self.by_example(queries, slope) / len(queries)).tolist()),
            decay=float((slope * self.decay[queries]).sum()) / len(queries),
            learned_in=tuple(contributions.example_phase.to_numpy().tolist()),
        )


def forgettings(run: Run) -> list[Forgetting]:
    """Return the effect of each phase on each earlier task.

    Return [] unless the run has contributions by phase at all outputs.
    """
    split = next(
        (name for name in ("query", "test", "train") if name in run.points), None
    )
    if BY_PHASE not in run.contributions or split is None:
        return []
    if len(run.outs) < run.predictions.sizes["out"]:
        return []
    effects = [
        phase.effect_on(task)
        for phase in later_phases(run, split)
        for task in range(1, phase.during)
    ]
    return [effect for effect in effects if effect is not None]


def later_phases(run: Run, split: str) -> Iterator[LaterPhase]:
    """Yield the changes during the second and each later phase."""
    points = run.points[split]
    contributions = run.contributions.isel(query=points)
    changes = np.asarray(contributions[CHANGE].to_numpy(), dtype=float)
    decays = np.zeros_like(changes)
    if DECAY_BY_PHASE in contributions:
        decays = contributions[DECAY_BY_PHASE].to_numpy().astype(float)
    start = outputs_of(run, "f_0")[points]
    for during in range(2, len(changes) + 1):
        yield LaterPhase(
            run=run,
            split=split,
            during=during,
            before=start + changes[: during - 1].sum(axis=0),
            change=changes[during - 1],
            parts=contributions[BY_PHASE][during - 1],
            decay=decays[during - 1],
        )


def measure_slopes(
    labels: NDArray[np.int64] | None, targets: Array, end: Array, middle: Array
) -> Array:
    """Return the derivative g of the measure with respect to the outputs, [query, out].

    `end` are the outputs at the end of the run, and `middle` is f̄. Without `labels`,
    the measure is the negative loss.

    >>> targets, end = np.array([[-1.0, 1.0, -1.0]]), np.array([[0.5, 0.0, 0.7]])
    >>> measure_slopes(np.array([1]), targets, end, np.zeros((1, 3))).tolist()
    [[0.0, 1.0, -1.0]]
    """
    if labels is None:
        return targets - middle
    if targets.shape[1] == 1:
        return targets
    rows = np.arange(len(targets))
    others = end.copy()
    others[rows, labels] = -np.inf
    slopes = np.zeros(targets.shape)
    slopes[rows, others.argmax(axis=1)] = -1.0
    slopes[rows, labels] = 1.0
    return slopes


def mean_measure(
    labels: NDArray[np.int64] | None, slope: Array, targets: Array, outputs: Array
) -> float:
    if labels is None:
        return -float(np.square(outputs - targets).sum(axis=1).mean()) / 2
    return float((slope * outputs).sum(axis=1).mean())


def share_right(targets: Array, outputs: Array) -> float:
    """Return the accuracy: the fraction of queries whose predicted class is correct.

    >>> share_right(np.array([[-1.0], [1.0]]), np.array([[0.3], [0.2]]))
    0.5
    """
    if targets.shape[1] == 1:
        return float(((outputs > 0) == (targets > 0)).mean())
    return float((outputs.argmax(axis=1) == targets.argmax(axis=1)).mean())


# --- Forgetting as text: a sentence for each pair of phases,
# and a table of the most harmful examples.


def format_tasks(run: Run, top: int) -> str:
    """Describe how each phase changed earlier tasks,
    and list the most harmful examples.

    Return "" if the run has no phases.
    """
    losses = forgettings(run)
    if not losses:
        return ""
    sentences = [forgetting_sentence(loss) for loss in losses]
    worst = min(losses, key=lambda loss: loss.change)
    if worst.worst:
        sentences.append(format_text(tabulate_harm(run, worst).shortened(top)))
    return "\n\n".join(sentences) + "\n"


def forgetting_sentence(forgetting: Forgetting) -> str:
    """Describe the change of the measure of a task,
    and the contribution of each phase."""
    task_name, phase_name = forgetting.names
    measure, sign = measure_and_sign(forgetting)
    moved = describe_change(sign * forgetting.before, sign * forgetting.after, short)
    right = ""
    if forgetting.right:
        right = f", and its accuracy {describe_change(*forgetting.right, percent)}"
    noun = "point" if forgetting.points == 1 else "points"
    points = f"{forgetting.points} {forgetting.split} {noun}"
    return (
        f"While {phase_name} was learned (phase {forgetting.during}), the {measure} of {task_name} "
        f"(task {forgetting.task}) {moved} at {points}{right}. {describe_causes(forgetting)}"
    )


def measure_and_sign(forgetting: Forgetting) -> tuple[str, int]:
    """Return ("margin", 1) or ("loss", −1). The loss is the negative of the measure."""
    if forgetting.right:
        return ("margin", 1)
    return ("loss", -1)


def describe_change(before: float, after: float, spell: Callable[[float], str]) -> str:
    """Describe how a number changed. Two numbers count as equal if they format to the
    same text.

    >>> describe_change(1.0, 0.71, percent), describe_change(0.5, 0.5, short)
    ('fell from 100 % to 71 %', 'stayed at 0.5')
    """
    if spell(before) == spell(after):
        return f"stayed at {spell(after)}"
    return (
        f"{'fell' if after < before else 'rose'} from {spell(before)} to {spell(after)}"
    )


def describe_causes(forgetting: Forgetting) -> str:
    """Describe how much the examples of each phase
    and weight decay changed the measure."""
    _, sign = measure_and_sign(forgetting)

    def signed(part: float) -> str:
        return format_signed(sign * part)

    during = forgetting.during
    clauses = [
        f"examples of phase {during} moved it by {signed(forgetting.of_phase(during))}"
    ]
    for phase in sorted({*forgetting.learned_in} - {during}):
        part = forgetting.of_phase(phase)
        if part:
            clauses.append(
                f"examples of phase {phase}, through the momentum, by {signed(part)}"
            )
    if forgetting.decay:
        clauses.append(f"decay of the weights by {signed(forgetting.decay)}")
    if forgetting.halving:
        clauses.append(
            f"half of all harm was done by {forgetting.halving} of the {forgetting.acting} examples that acted"
        )
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."


def tabulate_harm(run: Run, forgetting: Forgetting) -> Table:
    """Return a row for each harmful example, the most harmful first."""
    measure, sign = measure_and_sign(forgetting)
    columns = (
        text_column(f"harm to {forgetting.names[0]} by"),
        Column("phase"),
        text_column("target"),
        signed_column(f"{measure} moved by"),
        Column("of all harm", spell=percent, adds=True),
    )
    rows = []
    for k in forgetting.worst:
        harmful = example(run, "train", k)
        part = forgetting.by[k]
        share = -part / forgetting.harm
        phase = forgetting.learned_in[k]
        rows.append((f"#{harmful.index}", phase, harmful.name, sign * part, share))
    return Table(columns, tuple(rows))


# --- Prediction of forgetting from the tangent kernel K
# at the switch between two tasks:
#
#     Δf(x) ≈ −Σ_s η_s w K(x, B) r_s,    r_{s+1} = (1 − η_s w K(B, B)) r_s,    r_0 = ℓ′(f(B))
#
# B are the examples of the later task, w is the weight of each in the loss, η_s is the
# size of step s, and x is any query. The prediction is exact if the kernel does not
# change. The prediction needs full-batch gradient descent and the squared loss.


PREDICTABLE_SETTINGS = {
    "loss": "squared",
    "optimizer": "gd",
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": None,
}


def predicted_change(run: Run, during: int, shift: int = 0) -> Array | None:
    """Predict the change of the outputs during a phase from the kernel at its start.

    Return [point, out].

    Return None if the run does not have `PREDICTABLE_SETTINGS`, or stored no kernel at
    the start of the phase. As a control, a `shift` exchanges the examples of the phase:
    the columns K(x, xᵢ) are rotated by this many positions."""
    settings = flatten_config(run.config)
    if any(settings.get(key) != value for key, value in PREDICTABLE_SETTINGS.items()):
        return None
    if run.config["optimizer"]["layers"]:
        return None
    steps = run.metrics[run.metrics["phase"] == during]
    snapshots = np.flatnonzero(run.kernels["step"].isin(steps["step"].iloc[:1]))
    if not len(snapshots):
        return None
    learned = np.flatnonzero(run.contributions["example_phase"].to_numpy() == during)
    stored = run.kernels.isel(snapshot=snapshots[0])
    kernel = stored["tangent"].to_numpy()[:, :, learned]
    residual = stored["output_gradient"].to_numpy()[learned]
    weight = 1 / len(learned) if settings["loss.reduction"] == "mean" else 1.0
    weight /= float(settings["init.alpha"]) ** 2 if settings["init.centred"] else 1.0
    own_kernel = kernel[run.points["train"]][learned]
    step_sizes = steps["step_size"].dropna().to_numpy() * weight
    return descended(np.roll(kernel, shift, axis=2), own_kernel, residual, step_sizes)


def descended(
    kernel: Array, own_kernel: Array, residual: Array, step_sizes: Array
) -> Array:
    """Return the change of the outputs in kernel gradient descent
    with constant kernels.

    `kernel` is K(x, B), `own_kernel` is K(B, B), and `residual` is r_0.

    >>> one = np.ones((1, 1, 1, 1))
    >>> descended(2 * one, one, np.array([[4.0]]), np.array([0.5, 0.5])).tolist()  # −½·2·4 − ½·2·2
    [[-6.0]]
    """
    change = np.zeros(kernel.shape[:2])
    for step_size in step_sizes:
        change = change - step_size * np.tensordot(kernel, residual, axes=2)
        residual = residual - step_size * np.tensordot(own_kernel, residual, axes=2)
    return change
