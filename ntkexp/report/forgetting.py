"""Who caused the forgetting: what a later phase did to the points of an earlier one, example by example, and what was
predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import BY_PHASE, CHANGE, DECAY_BY_PHASE
from ntkexp.report.examples import example
from ntkexp.report.explain import outputs_of
from ntkexp.report.inventory import flatten_config
from ntkexp.report.run import Run, blocks
from ntkexp.report.tables import Column, Table, format_signed, format_text
from ntkexp.text import percent, short

if TYPE_CHECKING:
    import xarray as xr


# --- Who caused the forgetting: what a later phase did to the points of an earlier one, example by example.
#
# Measured is, with classes, the margin, y f of a single output, else f_y − f_c with c the strongest other class
# at the end of the run; with values, −½‖f − t‖². Its change is linear in that of f, with f̄ halfway between both
# ends:
#
#     Δ margin = g · Δf,    g = y, or e_y − e_c;      Δ(−½‖f − t‖²) = (t − f̄) · Δf;      Δf = Σᵢ 𝒮_p(x, xᵢ) + 𝒟_p(x)
#
# so that what each example did to it adds up, to rounding, to what happened. Means are over the points.


Array = NDArray[np.float64]


@dataclass(frozen=True)
class Forgetting:
    """What learning `during` did to `task`, both counted from 1, at the `points` of a split."""

    task: int
    during: int
    names: tuple[str, str]
    split: str
    points: int
    before: float
    after: float
    right: (
        tuple[float, float] | None
    )  # the shares of points whose label is right, before and after; none for values
    by: tuple[float, ...]  # what each training example did to the measure
    decay: float  # what decay of the weights did to it
    learned_in: tuple[int, ...]  # the phase of each example

    @property
    def change(self) -> float:
        """How the measure changed."""
        return self.after - self.before

    def of_phase(self, phase: int) -> float:
        return sum(done for done, its in zip(self.by, self.learned_in, strict=True) if its == phase)

    @property
    def acting(self) -> int:
        """How many examples moved it at all."""
        return sum(done != 0 for done in self.by)

    @property
    def harm(self) -> float:
        """What all examples that lowered it took together."""
        return -sum(done for done in self.by if done < 0)

    @property
    def worst(self) -> list[int]:
        """The examples that lowered it, those first that did most."""
        return [k for k in np.argsort(self.by, kind="stable").tolist() if self.by[k] < 0]

    @property
    def halving(self) -> int:
        """How many of these did half of the harm."""
        done = np.cumsum([-self.by[k] for k in self.worst])
        return int(np.searchsorted(done, self.harm / 2 * (1 - 1e-12))) + 1 if len(done) else 0


@dataclass(frozen=True, eq=False)
class LaterPhase:
    """What a phase did at the points of a split, from outputs `before` it; parts are NaN where they are unknown."""

    run: Run
    split: str
    during: int
    before: Array  # [point, out]
    change: Array
    parts: xr.DataArray  # [point, out, example], which may be larger than the memory
    decay: Array

    @cached_property
    def attributed(self) -> NDArray[np.bool_]:
        """Whether the parts are known, at each point."""
        return np.concatenate([np.isfinite(block).all(axis=(1, 2)) for block in blocks(self.parts)])

    def by_example(self, here: NDArray[np.int64], slope: Array) -> Array:
        """Add up what each example did to a measure, by its slope at these points."""
        total, first = np.zeros(self.parts.shape[2]), 0
        for block in blocks(self.parts):
            inside = (here >= first) & (here < first + len(block))
            total += np.einsum("xc,xci->i", slope[inside], block[here[inside] - first])
            first += len(block)
        return total

    def to(self, task: int) -> Forgetting | None:
        """What it did to a task, at the points where it is known."""
        # the points of the task that are attributed, before and after the phase
        run, contributions, points = self.run, self.run.contributions, self.run.points[self.split]
        here = np.flatnonzero(
            (contributions.point_phase.to_numpy()[points] == task) & self.attributed
        )
        before = self.before[here]
        after = before + self.change[here]
        if not len(here) or not np.isfinite(after).all():
            return None
        # the derivative of its measure, by which outputs count
        targets = np.asarray(run.data[f"{self.split}_targets"], dtype=float)[here]
        labels = run.data[f"{self.split}_target"][here] if len(run.data["classes"]) else None
        slope = measure_slopes(
            labels, targets, outputs_of(run, "f_T")[points][here], (before + after) / 2
        )
        names = contributions.phase_name.to_numpy()
        return Forgetting(
            task=task,
            during=self.during,
            names=(str(names[task - 1]), str(names[self.during - 1])),
            split=self.split,
            points=len(here),
            before=mean_measure(labels, slope, targets, before),
            after=mean_measure(labels, slope, targets, after),
            right=None
            if labels is None
            else (share_right(targets, before), share_right(targets, after)),
            by=tuple((self.by_example(here, slope) / len(here)).tolist()),
            decay=float((slope * self.decay[here]).sum()) / len(here),
            learned_in=tuple(contributions.example_phase.to_numpy().tolist()),
        )


def forgettings(run: Run) -> list[Forgetting]:
    """What every phase did to the tasks before it, where contributions by phase are known at all outputs."""
    split = next((name for name in ("probe", "test", "train") if name in run.points), None)
    if (
        BY_PHASE not in run.contributions
        or split is None
        or len(run.outs) < run.predictions.sizes["out"]
    ):
        return []
    found = (
        (phase.to(task) for task in range(1, phase.during)) for phase in later_phases(run, split)
    )
    return [each for tasks in found for each in tasks if each is not None]


def later_phases(run: Run, split: str) -> Iterator[LaterPhase]:
    """Read what each phase but the first did at the points of a split, one after the other."""
    contributions, points = run.contributions.isel(probe=run.points[split]), run.points[split]
    changes = np.asarray(contributions[CHANGE].to_numpy(), dtype=float)
    decays = (
        contributions[DECAY_BY_PHASE].to_numpy().astype(float)
        if DECAY_BY_PHASE in contributions
        else np.zeros_like(changes)
    )
    for during in range(2, len(changes) + 1):
        yield LaterPhase(
            run=run,
            split=split,
            during=during,
            before=outputs_of(run, "f_0")[points] + changes[: during - 1].sum(axis=0),
            change=changes[during - 1],
            parts=contributions[BY_PHASE][during - 1],
            decay=decays[during - 1],
        )


def measure_slopes(
    labels: NDArray[np.int64] | None, targets: Array, end: Array, middle: Array
) -> Array:
    """Find how the measure of each point goes with its outputs.

    >>> targets, end = np.array([[-1.0, 1.0, -1.0]]), np.array([[0.5, 0.0, 0.7]])
    >>> measure_slopes(np.array([1]), targets, end, np.zeros((1, 3))).tolist()
    [[0.0, 1.0, -1.0]]
    """
    if labels is None:
        return targets - middle
    if targets.shape[1] == 1:
        return targets
    rows, derivatives = np.arange(len(targets)), np.zeros(targets.shape)
    others = end.copy()
    others[rows, labels] = -np.inf
    derivatives[rows, others.argmax(axis=1)] = -1.0
    derivatives[rows, labels] = 1.0
    return derivatives


def mean_measure(
    labels: NDArray[np.int64] | None, slope: Array, targets: Array, outputs: Array
) -> float:
    """Take the mean of the measure over points."""
    if labels is None:
        return -float(np.square(outputs - targets).sum(axis=1).mean()) / 2
    return float((slope * outputs).sum(axis=1).mean())


def share_right(targets: Array, outputs: Array) -> float:
    """Find the share of points whose label is right.

    >>> share_right(np.array([[-1.0], [1.0]]), np.array([[0.3], [0.2]]))
    0.5
    """
    if targets.shape[1] == 1:
        return float(((outputs > 0) == (targets > 0)).mean())
    return float((outputs.argmax(axis=1) == targets.argmax(axis=1)).mean())


# --- Who caused the forgetting, as a reader sees it: a sentence for every pair of phases, and the worst examples.


def format_tasks(run: Run, top: int) -> str:
    """Say what phases did to earlier tasks, and by which examples most was lost; nothing, if there are no phases."""
    losses = forgettings(run)
    if not losses:
        return ""
    worst = min(losses, key=lambda each: each.change)
    tables = [format_text(tabulate_harm(run, worst).shortened(top))] if worst.worst else []
    return "\n\n".join([*map(forgetting_sentence, losses), *tables]) + "\n"


def forgetting_sentence(forgetting: Forgetting) -> str:
    """Say what happened, and who did it."""
    what, before, after = (
        ("margin", forgetting.before, forgetting.after)
        if forgetting.right
        else ("loss", -forgetting.before, -forgetting.after)
    )
    task, phase = (
        f"{forgetting.names[0]} (task {forgetting.task})",
        f"{forgetting.names[1]} was learned (phase {forgetting.during})",
    )
    at = f"at {forgetting.points} {forgetting.split} {'point' if forgetting.points == 1 else 'points'}"
    right = (
        f", and its accuracy {describe_change(*forgetting.right, percent)}"
        if forgetting.right
        else ""
    )
    moved = describe_change(before, after, short)
    return f"While {phase}, the {what} of {task} {moved} {at}{right}. {describe_causes(forgetting)}"


def describe_change(before: float, after: float, spell: Callable[[float], str]) -> str:
    """Say how a number changed, as far as its digits show.

    >>> describe_change(1.0, 0.71, percent), describe_change(0.5, 0.5, short)
    ('fell from 100 % to 71 %', 'stayed at 0.5')
    """
    if spell(before) == spell(after):
        return f"stayed at {spell(after)}"
    return f"{'fell' if after < before else 'rose'} from {spell(before)} to {spell(after)}"


def describe_causes(forgetting: Forgetting) -> str:
    """Say which examples did how much of it: together all."""
    sign = 1 if forgetting.right else -1
    remembered = {
        phase: forgetting.of_phase(phase)
        for phase in sorted({*forgetting.learned_in} - {forgetting.during})
    }
    own = format_signed(sign * forgetting.of_phase(forgetting.during))
    parts = [f"examples of phase {forgetting.during} moved it by {own}"]
    parts += [
        f"examples of phase {phase}, which the optimizer remembered, by {format_signed(sign * done)}"
        for phase, done in remembered.items()
        if done
    ]
    if forgetting.decay:
        parts.append(f"decay of the weights by {format_signed(sign * forgetting.decay)}")
    if forgetting.halving:
        parts.append(
            f"half of all harm was done by {forgetting.halving} of the {forgetting.acting} examples that acted"
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def tabulate_harm(run: Run, forgetting: Forgetting) -> Table:
    """Give the examples that did harm, those first that did most."""
    what, sign = ("margin", 1) if forgetting.right else ("loss", -1)
    columns = (
        Column(f"harm to {forgetting.names[0]} by", number=False),
        Column("phase"),
        Column("target", number=False),
        Column(f"{what} moved by", spell=format_signed, adds=True),
        Column("of all harm", spell=percent, adds=True),
    )
    rows = []
    for k in forgetting.worst:
        shown, done = example(run, "train", k), forgetting.by[k]
        rows.append(
            (
                f"#{shown.index}",
                forgetting.learned_in[k],
                shown.name,
                sign * done,
                -done / forgetting.harm,
            )
        )
    return Table(columns, tuple(rows))


# --- What the kernel between two tasks, at the switch from one to the other, says of what learning the later one
# changes:
#
#     Δf(x) ≈ −Σ_s η_s w K(x, B) r_s,    r_{s+1} = (1 − η_s w K(B, B)) r_s,    r_0 = ℓ′ at the switch,    x anywhere
#
# with w the weight of an example of B in the loss. It is what happens where the kernel stays as it is, and it is
# known of descent on all examples and the squared loss.


PLAIN = {
    "loss": "squared",
    "optimizer": "gd",
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": None,
}
"""The settings that a run must have had."""


def predicted_change(run: Run, during: int, shift: int = 0) -> Array | None:
    """What the kernel at the switch to a phase, counted from 1, says at all points that were read, [point, out].

    Nothing where the run had other settings, or kept no kernel there. `shift` takes kernels with other examples of the
    phase, that many places on, for those with each.
    """
    settings = flatten_config(run.config)
    if (
        any(settings.get(key) != value for key, value in PLAIN.items())
        or run.config["optimizer"]["layers"]
    ):
        return None
    steps = run.metrics[run.metrics["phase"] == during]
    snapshots = np.flatnonzero(run.kernels["step"].isin(steps["step"].iloc[:1]))
    if not len(snapshots):
        return None
    learned = np.flatnonzero(run.contributions["example_phase"].to_numpy() == during)
    kernel = run.kernels["tangent"].isel(snapshot=snapshots[0]).to_numpy()[:, :, learned]
    missed = run.kernels["output_gradient"].isel(snapshot=snapshots[0]).to_numpy()[learned]
    weight = 1 / len(learned) if settings["loss.reduction"] == "mean" else 1.0
    weight /= float(settings["init.alpha"]) ** 2 if settings["init.centred"] else 1.0
    own = kernel[run.points["train"]][learned]
    sizes = steps["step_size"].dropna().to_numpy() * weight
    return descended(np.roll(kernel, shift, axis=2), own, missed, sizes)


def descended(across: Array, own: Array, missed: Array, sizes: Array) -> Array:
    """Take steps of these sizes with kernels that stay.

    >>> one = np.ones((1, 1, 1, 1))
    >>> descended(2 * one, one, np.array([[4.0]]), np.array([0.5, 0.5])).tolist()  # −½·2·4 − ½·2·2
    [[-6.0]]
    """
    change = np.zeros(across.shape[:2])
    for size in sizes:
        change = change - size * np.tensordot(across, missed, axes=2)
        missed = missed - size * np.tensordot(own, missed, axes=2)
    return change
