"""What a run says of its path kernel and of contributions, a number each (P. Domingos 2020, arXiv:2012.00152)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ntkexp.claim.quantity import AbstractQuantity, Measured
from ntkexp.component import Count
from ntkexp.mistake import Mistake, nearest
from ntkexp.report.analysis.rank_correlation import spearman
from ntkexp.report.plots.figures.time_profile import profile
from ntkexp.report.run import Run

EPS = 2.0**-52


class MachineError(AbstractQuantity):
    """The relative error of a kernel machine, beside what rounding explains of it.

    Rows have the error of this machine on this split, of every run.

    bound = max(10⁻¹², floor, 10 ε Σ|𝒮|/|Σ𝒮|)      a sum whose parts cancel loses as many digits as they exceed it
    """

    machine: str
    split: str = "probe"

    def of(self, measured: Measured) -> pd.DataFrame:
        errors = [self.error(measured.known.get(name)) for name in measured.table["run"]]
        return measured.table.assign(
            value=[error for error, _ in errors], bound=[bound for _, bound in errors]
        )

    def error(self, run: Run | None) -> tuple[float, float]:
        """The error in one ladder, and its bound; NaN where the machine did not come to one."""
        rows = () if run is None else run.ladder
        row = next(
            (row for row in rows if (row.machine, row.split) == (self.machine, self.split)), None
        )
        if run is None or row is None or row.relative_error is None:
            return math.nan, math.nan
        facts = (
            run.parts(self.machine).attrs if self.machine in run.rules else {}
        )  # where a rule summed the parts
        return row.relative_error, max(
            row.tolerance, 10 * EPS * float(facts.get("cancellation", 0.0))
        )


class PathFact(AbstractQuantity):
    """What is known of the contributions of a run, by one rule: `cancellation`, `error_bar`, `coefficient_variation`,
    …

    Rows have this number of the path of their run.

    They are the numbers of `ntkexp.diagnostics` and the error bar of the parts, as the run has kept
    them.
    """

    fact: str
    rule: str = "secant"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.table.assign(
            value=[self.number(measured.known.get(name)) for name in measured.table["run"]]
        )

    def number(self, run: Run | None) -> float:
        """The number of one run; NaN where it has none."""
        if run is None or self.rule not in run.rules:
            return math.nan
        facts = {
            str(name): fact
            for name, fact in run.parts(self.rule).attrs.items()
            if isinstance(fact, int | float)
        }
        if self.fact not in facts:
            raise Mistake(
                f"quantity.fact={self.fact}: a path has {', '.join(facts)}{nearest(self.fact, facts)}"
            )
        return float(facts[self.fact])


class SymmetryDefect(AbstractQuantity):
    """How far the path kernel among training examples is from what a kernel must be: symmetric, with no negative
    values.

    Rows have the defects of these rules' path kernels; the runs read the training examples.

        asymmetry    ‖𝒦 − 𝒦ᵀ‖ / ‖𝒦‖                    over [example, output] × [example, output]
        negativity   max(0, −λ_min) / λ_max            of (𝒦 + 𝒦ᵀ)/2

    Rows are told apart by the columns `rule` and `defect`.
    """

    rules: tuple[str, ...] = ("secant",)

    def of(self, measured: Measured) -> pd.DataFrame:
        rows = []
        for row in measured.table.to_dict("records"):
            run = measured.known.get(str(row["run"]))
            if run is None:
                continue
            for rule in self.rules:
                kernel = run.kernels[f"path_{rule}"].to_numpy()[run.points["train"]]
                side = kernel.shape[2] * kernel.shape[3]
                found = defects(kernel.reshape(side, side))
                rows += [
                    {**row, "rule": rule, "defect": name, "value": value}
                    for name, value in found.items()
                ]
        return pd.DataFrame(rows)


def defects(kernel: NDArray[Any]) -> dict[str, float]:
    """Find both defects of a matrix.

    >>> defects(np.diag([2.0, -1.0]))
    {'asymmetry': 0.0, 'negativity': 0.5}
    """
    values = np.linalg.eigvalsh((kernel + kernel.T) / 2)
    return {
        "asymmetry": float(np.linalg.norm(kernel - kernel.T) / np.linalg.norm(kernel)),
        "negativity": max(0.0, -float(values[0])) / float(values[-1]),
    }


SMALL = 1e-3


class WeightRank(AbstractQuantity):
    """Whether examples that were badly fitted for long weigh much: a rank correlation over training examples.

    Rows have the rank correlation of their run.

        Spearman of  mean_x |w(x, xᵢ)|  with  ∫|ℓ′ᵢ| dt    for a network of one output

        weight           w(x, xᵢ)
        coefficient      aᵢ(x) = 𝒮(x, xᵢ)/𝒦(x, xᵢ), which is nearly a mean of ℓ′ᵢ over the path by definition
        contribution     𝒮(x, xᵢ), in which the kernel counts as well

    Queries x are the points of a split; where 𝒦 is small against its largest value, nothing is divided by it. The
    integral goes over the kernels that were kept, by the trapezoidal rule. `lag` compares with the integral of
    another example.
    """

    rule: str = "secant"
    split: str = "probe"
    lag: int = Field(0, ge=0, le=10**6)
    weight: Literal["coefficient", "contribution"] = "coefficient"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.table.assign(
            value=[self.correlation(measured.known.get(name)) for name in measured.table["run"]]
        )

    def correlation(self, run: Run | None) -> float:
        if run is None:
            return math.nan
        points = run.points[self.split]
        parts = run.parts(self.rule).to_numpy()[points]
        if (outputs := run.predictions.sizes["out"]) != 1:
            raise Mistake(
                f"quantity: {run.name} has {outputs} outputs, and weights for one are compared"
            )
        # mean_x |w(x, xᵢ)|
        weights = np.abs(parts[:, 0])
        if self.weight == "coefficient":
            kernel = run.kernels[f"path_{self.rule}"].to_numpy()[points, 0, :, 0]
            usable = np.abs(kernel) >= SMALL * np.abs(kernel).max()
            weights = np.abs(np.where(usable, parts[:, 0] / np.where(usable, kernel, 1.0), np.nan))

        # ∫|ℓ′ᵢ| dt
        times = (
            run.metrics.set_index("step")["time"]
            .reindex(run.kernels["step"].to_numpy())
            .to_numpy(dtype=float)
        )
        sizes = np.abs(run.kernels["output_gradient"].to_numpy()[:, :, 0])
        misfit = np.asarray((np.diff(times)[:, None] * (sizes[1:] + sizes[:-1]) / 2).sum(axis=0))
        mean_weights = np.nanmean(weights, axis=0)
        known = np.isfinite(mean_weights)
        return float(spearman(mean_weights[known, None], np.roll(misfit, self.lag)[known, None])[0])


Share = Literal[
    "same_class", "nearest_input", "nearest_kernel", "same_example", "top_share", "chance"
]


class StoredExamples(AbstractQuantity):
    """Whether a prediction compares a point with stored examples: what its contributors are, point by point,
    averaged.

    Rows have these shares, told apart by the column `quantity`.

        same_class       share of points whose largest contributor has the label of the prediction
        nearest_input    share of points whose nearest training example in input space has the label of the
                         prediction
        nearest_kernel   the same of the example with the largest 𝒦(x, xᵢ)/√𝒦(xᵢ, xᵢ)
        same_example     share of points of which both are the same example
        top_share        share of Σ|𝒮| that comes from the k largest contributors; if all were equal, k/M
        chance           share of points whose prediction has the label of an example drawn at random

    of a network of one output on two classes. Labels are those that were trained on; the largest contributor has
    most |𝒮|.
    """

    shares: tuple[Share, ...] = ("same_class", "chance")
    rule: str = "secant"
    split: str = "probe"
    top: Count = 5

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.by_run(self.measure, self.shares)

    def measure(self, run: Run) -> Mapping[str, float]:
        points, train = run.points[self.split], run.points["train"]
        parts = run.parts(self.rule).to_numpy()[points]
        targets = run.data["train_targets"]
        if (outputs := run.predictions.sizes["out"]) != 1 or not len(run.data["classes"]):
            raise Mistake(
                f"quantity: {run.name} has {outputs} outputs; stored examples are those of two classes"
            )
        kernel = run.kernels[f"path_{self.rule}"].to_numpy()[:, 0, :, 0]
        predicted = np.sign(run.predictions.sel(machine="f_T").to_numpy()[points, 0])
        labels = np.sign(targets[:, 0])
        likeness = kernel[points] / np.sqrt(
            np.maximum(np.diag(kernel[train]), np.finfo(float).tiny)
        )
        # ‖x − x′‖² = ‖x‖² − 2⟨x, x′⟩ + ‖x′‖²
        ones, others = (run.data[f"{split}_inputs"] for split in (self.split, "train"))
        ones, others = ones.reshape(len(ones), -1), others.reshape(len(others), -1)
        distance = (ones**2).sum(1)[:, None] - 2 * ones @ others.T + (others**2).sum(1)
        near, like = distance.argmin(axis=1), likeness.argmax(axis=1)
        largest = np.abs(parts[:, 0]).argmax(axis=1)
        return {
            "same_class": float((labels[largest] == predicted).mean()),
            "nearest_input": float((labels[near] == predicted).mean()),
            "nearest_kernel": float((labels[like] == predicted).mean()),
            "same_example": float((near == like).mean()),
            "top_share": top_share(parts[:, 0], self.top),
            "chance": float((labels[None] == predicted[:, None]).mean()),
        }


def top_share(parts: NDArray[np.float64], top: int) -> float:
    """Find the share of the largest, averaged over points.

    >>> top_share(np.array([[3.0, -1.0, 0.0]]), 1)
    0.75
    """
    sizes = np.sort(np.abs(parts), axis=1)[:, ::-1]
    return float((sizes[:, :top].sum(axis=1) / sizes.sum(axis=1)).mean())


class EnoughExamples(AbstractQuantity):
    """How many examples are enough to make the predictions: those that contribute most, as a share of all.

    Rows have the share of their run.

        least m/M with  ‖Σ_{i ≤ m} 𝒮(·, xᵢ) − Σᵢ 𝒮(·, xᵢ)‖ ≤ tolerance ‖Σᵢ 𝒮(·, xᵢ)‖

    over the points of a split; examples are taken in the order of ‖𝒮(·, xᵢ)‖, the largest first.
    """

    tolerance: float = Field(0.01, gt=0)
    rule: str = "secant"
    split: str = "probe"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.table.assign(
            value=[self.share(measured.known.get(name)) for name in measured.table["run"]]
        )

    def share(self, run: Run | None) -> float:
        if run is None:
            return math.nan
        parts = run.parts(self.rule).to_numpy()[run.points[self.split]]
        return enough(parts.reshape(-1, parts.shape[2]), self.tolerance)


def enough(parts: NDArray[np.float64], tolerance: float) -> float:
    """The share of the columns whose sum is that of all: no fewer of them will do.

    >>> enough(np.array([[3.0, 0.001, 0.0, -1.0]]), 0.01), enough(np.array([[1.0, 1.0]]), 0.01)
    (0.5, 1.0)
    """
    order = np.argsort(-np.linalg.norm(parts, axis=0), kind="stable")
    sums = parts[:, order].cumsum(axis=1)
    missed = np.linalg.norm(sums - sums[:, -1:], axis=0)
    beyond = np.flatnonzero(missed > tolerance * np.linalg.norm(sums[:, -1]))
    return float((beyond[-1] + 2 if len(beyond) else 1) / parts.shape[1])


class MarginBound(AbstractQuantity):
    """A known bound on kernel machines, put on the path kernel as if that had been given beforehand.

    Rows have these numbers, told apart by the column `quantity`.

        bound     mean_i φ(yᵢ f(xᵢ)) + (2B/n) √(Σᵢ 𝒦(xᵢ, xᵢ)) + 3 √(ln(2/δ)/2n),    φ(z) = min(1, max(0, 1 − z))
        error     share of the points of a split whose sign is wrong

    With f = f_T − f_0 at n examples of two classes, B² = fᵀ 𝒦⁻¹ f the square of its norm, 𝒦 = (𝒦 + 𝒦ᵀ)/2 among the
    examples with a ridge of 10⁻⁶ of its mean diagonal, and δ = 0.05. Of a kernel that the labels had no part in,
    the error is below the bound with probability 1 − δ (P. Bartlett & S. Mendelson 2002, theorem 22).
    """

    rule: str = "secant"
    split: str = "probe"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.by_run(self.measure, ("bound", "error"))

    def measure(self, run: Run) -> Mapping[str, float]:
        train, points, targets = (
            run.points["train"],
            run.points[self.split],
            run.data["train_targets"],
        )
        if targets.shape[1] != 1 or not len(run.data["classes"]):
            raise Mistake(
                f"quantity: {run.name} has no two classes; the bound is one on their margin"
            )
        kernel = run.kernels[f"path_{self.rule}"].to_numpy()[train, 0, :, 0]
        after, before = (
            run.predictions.sel(machine=name).to_numpy()[:, 0] for name in ("f_T", "f_0")
        )
        # Labels of all points, and what was learned.
        labels, wanted = np.sign(targets[:, 0]), np.sign(run.data[f"{self.split}_targets"][:, 0])
        error = float((np.sign(after[points]) != wanted).mean())
        return {"bound": margin_bound(kernel, (after - before)[train], labels), "error": error}


def margin_bound(
    kernel: NDArray[np.float64], outputs: NDArray[np.float64], labels: NDArray[np.float64]
) -> float:
    """The bound on the error, from the kernel among the examples.

    >>> margin_bound(1e-12 * np.eye(200), np.ones(200), np.ones(200)) > 1  # memory, one by one
    True
    >>> round(margin_bound(np.ones((200, 200)), np.ones(200), np.ones(200)), 2)
    0.43
    """
    n = len(labels)
    kernel = (kernel + kernel.T) / 2 + 1e-6 * np.diag(kernel).mean() * np.eye(n)
    norm = math.sqrt(max(0.0, float(outputs @ np.linalg.solve(kernel, outputs))))
    hinge = np.clip(1 - labels * outputs, 0, 1).mean()
    return float(
        hinge
        + 2 * norm * math.sqrt(np.trace(kernel)) / n
        + 3 * math.sqrt(math.log(2 / 0.05) / (2 * n))
    )


class KernelChange(AbstractQuantity):
    """How much the path kernel differs between two runs of a seed that are alike but for one setting.

    Rows have the change between the runs at `one` and at `other` along an axis.

        change = ‖𝒦′ − 𝒦‖/‖𝒦‖    between the points of a split and the training examples

    Both learn from the same inputs: labels, noise, or the way of training may differ.
    """

    along: str
    one: Any
    other: Any
    rule: str = "secant"
    split: str = "probe"

    def of(self, measured: Measured) -> pd.DataFrame:
        table, rest = measured.table, [axis for axis in measured.axes if axis != self.along]
        if self.along not in measured.axes:
            raise Mistake(
                f"quantity.along={self.along}: it is no axis of the runs{nearest(self.along, measured.axes)}"
            )
        one, other = (table[table[self.along] == level] for level in (self.one, self.other))
        pairs = one.merge(other, on=["runs", "seed", *rest], suffixes=("", "_other"))
        runs = zip(pairs["run"], pairs["run_other"], strict=True)
        values = [self.change(*map(measured.known.get, names)) for names in runs]
        compared: pd.DataFrame = pairs.assign(value=values)
        return compared

    def change(self, one: Run | None, other: Run | None) -> float:
        """The change between two runs; NaN where one of them has no result."""
        if one is None or other is None:
            return math.nan
        if not np.array_equal(one.data["train_inputs"], other.data["train_inputs"]):
            raise Mistake(
                f"quantity: {one.name} and {other.name} learn from other inputs; vary what leaves them alike"
            )
        kernel, second = (
            run.kernels[f"path_{self.rule}"].to_numpy()[run.points[self.split]]
            for run in (one, other)
        )
        return float(np.linalg.norm(second - kernel) / np.linalg.norm(kernel))


class TimeShare(AbstractQuantity):
    """When in training something came about: the share of its mass that falls into each tenth of the path's time.

    Rows have the shares of ten tenths.

        mass    `contribution_mass`, Σ|Δ𝒮| of a step; `contribution_sum`, Σ|Σᵢ Δ𝒮ᵢ|; or `kernel_mass`, η‖K‖

    Rows of a run are told apart by `tenth`, 1 … 10; evenly spread, each has a share of 0.1.
    """

    mass: Literal["contribution_mass", "contribution_sum", "kernel_mass"] = "contribution_mass"

    def of(self, measured: Measured) -> pd.DataFrame:
        shares = np.array([self.shares(measured.known.get(name)) for name in measured.table["run"]])
        return pd.concat(
            [measured.table.assign(tenth=k + 1, value=shares[:, k]) for k in range(10)],
            ignore_index=True,
        )

    def shares(self, run: Run | None) -> NDArray[np.float64]:
        """The shares of one run; NaN where the mass was not measured at every step."""
        steps = None if run is None else run.series("step_size", self.mass)
        if run is None or steps is None or not len(steps) or len(steps) < len(run.metrics) - 1:
            return np.full(10, np.nan)
        return profile(steps["step_size"].to_numpy(), steps[self.mass].to_numpy())
