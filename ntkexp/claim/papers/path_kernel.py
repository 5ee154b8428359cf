"""Measurements of path kernels and contributions (P. Domingos 2020, arXiv:2012.00152).

In this file, 𝒮(x, xᵢ) is the contribution of training example xᵢ to f_T(x) − f_0(x). 𝒦
is the path kernel, the average of the tangent kernel over the training path. Both
depend on the quadrature `rule`, which integrates over each step.

A quantity returns a table. "Rows have …" says which number is in the
column `value` of each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ntkexp.claim.quantity import AbstractQuantity, Measured, example_ids
from ntkexp.component import Count
from ntkexp.mistake import Mistake, nearest
from ntkexp.report.analysis.rank_correlation import spearman
from ntkexp.report.plots.figures.time_profile import profile
from ntkexp.report.run import Run, outputs_of

EPS = 2.0**-52
Array = NDArray[np.float64]


class MachineError(AbstractQuantity):
    """The relative error of a kernel machine, with a bound on its rounding error.

    Rows have the error of the kernel machine `machine` on the split `split`.

        bound = max(tolerance, 10 ε Σ|𝒮|/|Σ𝒮|)

    The tolerance comes from the table of kernel machines, and ε is the machine epsilon.
    The second term applies if the kernel machine is a sum of contributions 𝒮, which may
    cancel."""

    machine: str
    split: str = "query"

    def of(self, measured: Measured) -> pd.DataFrame:
        errors = [self.error(run) for run in measured.runs]
        values = [error for error, _ in errors]
        bounds = [bound for _, bound in errors]
        return measured.table.assign(value=values, bound=bounds)

    def error(self, run: Run | None) -> tuple[float, float]:
        """Return the error and its bound, or NaN
        if the run lacks this kernel machine."""
        if run is None:
            return math.nan, math.nan
        key = (self.machine, self.split)
        row = next((row for row in run.ladder if (row.machine, row.split) == key), None)
        if row is None or row.relative_error is None:
            return math.nan, math.nan
        cancellation = 0.0
        if self.machine in run.rules:  # the kernel machine is a sum of contributions
            cancellation = float(run.parts(self.machine).attrs.get("cancellation", 0.0))
        return row.relative_error, max(row.tolerance, 10 * EPS * cancellation)


class PathFact(AbstractQuantity):
    """A stored number about the contributions by one rule,
    such as `cancellation` or `error_bar`.

    Rows have this number. `ntkexp.statistics` defines the numbers.
    """

    fact: str
    rule: str = "secant"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.per_run(self.number)

    def number(self, run: Run) -> float:
        if self.rule not in run.rules:
            return math.nan
        facts = {
            str(name): fact
            for name, fact in run.parts(self.rule).attrs.items()
            if isinstance(fact, int | float)
        }
        if self.fact not in facts:
            raise Mistake(
                f"quantity.fact={self.fact}: a path has {', '.join(facts)}"
                f"{nearest(self.fact, facts)}"
            )
        return float(facts[self.fact])


class SymmetryDefect(AbstractQuantity):
    """The deviation of the path kernel from a symmetric positive semidefinite matrix.

    Rows have the defects of the path kernels,
    labelled by the columns `rule` and `defect`.

        asymmetry    ‖𝒦 − 𝒦ᵀ‖ / ‖𝒦‖                    over [example, output] × [example, output]
        negativity   max(0, −λ_min) / λ_max            eigenvalues of (𝒦 + 𝒦ᵀ)/2
    """

    rules: tuple[str, ...] = ("secant",)

    def of(self, measured: Measured) -> pd.DataFrame:
        rows = []
        for row, run in zip(
            measured.table.to_dict("records"), measured.runs, strict=True
        ):
            if run is None:
                continue
            for rule in self.rules:
                kernel = run.kernels[f"path_{rule}"].to_numpy()[run.points["train"]]
                side = kernel.shape[2] * kernel.shape[3]
                for name, value in defects(kernel.reshape(side, side)).items():
                    rows.append({**row, "rule": rule, "defect": name, "value": value})
        return pd.DataFrame(rows)


def defects(kernel: NDArray[Any]) -> dict[str, float]:
    """Return the asymmetry and the negativity of a matrix (see `SymmetryDefect`).

    >>> defects(np.diag([2.0, -1.0]))
    {'asymmetry': 0.0, 'negativity': 0.5}
    """
    values = np.linalg.eigvalsh((kernel + kernel.T) / 2)
    return {
        "asymmetry": float(np.linalg.norm(kernel - kernel.T) / np.linalg.norm(kernel)),
        "negativity": max(0.0, -float(values[0])) / float(values[-1]),
    }


MIN_KERNEL_SHARE = 1e-3
"""Coefficients 𝒮/𝒦 are computed only where |𝒦| is at least this fraction
of the largest |𝒦|."""


class AbstractPathQuantity(AbstractQuantity):
    """A measurement of the contributions at the points of one split."""

    rule: str = "secant"
    split: str = "query"

    def contributions(self, run: Run) -> Array:
        """Return 𝒮, [point, out, example]."""
        parts: Array = run.parts(self.rule).to_numpy()
        return parts[run.points[self.split]]

    def path_kernel(self, run: Run) -> Array:
        """Return 𝒦 between the points of all splits and the training examples."""
        return run.kernels[f"path_{self.rule}"].to_numpy()


class WeightRank(AbstractPathQuantity):
    """The rank correlation between weights of examples
    and their accumulated loss derivatives.

    Rows have the Spearman correlation over the training examples i of a run, between

        mean_x |w(x, xᵢ)|    and    ∫|ℓ′ᵢ| dt

        weight           w(x, xᵢ)
        coefficient      aᵢ(x) = 𝒮(x, xᵢ)/𝒦(x, xᵢ), approximately a mean of ℓ′ᵢ over the path
        contribution     𝒮(x, xᵢ)

    The network must have one output. Queries x are the points of a split. The integral
    is computed by the trapezoidal rule over the steps whose kernels are stored. As a
    control, `lag` shifts the integrals, so that each weight is paired with the integral
    of a different example."""

    lag: int = Field(0, ge=0, le=10**6)
    weight: Literal["coefficient", "contribution"] = "coefficient"

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.per_run(self.correlation)

    def correlation(self, run: Run) -> float:
        points = run.points[self.split]
        outputs = run.predictions.sizes["out"]
        if outputs != 1:
            raise Mistake(
                f"quantity: {run.name} has {outputs} outputs, and weights for one are compared"
            )
        # mean_x |w(x, xᵢ)|
        weights = self.contributions(run)[:, 0]
        if self.weight == "coefficient":
            kernel = self.path_kernel(run)[points, 0, :, 0]
            usable = np.abs(kernel) >= MIN_KERNEL_SHARE * np.abs(kernel).max()
            divisors = np.where(usable, kernel, 1.0)
            weights = np.where(usable, weights / divisors, np.nan)
        mean_weights = np.nanmean(np.abs(weights), axis=0)

        # ∫|ℓ′ᵢ| dt
        time_at = run.metrics.set_index("step")["time"]
        times = time_at.reindex(run.kernels["step"].to_numpy()).to_numpy(dtype=float)
        sizes = np.abs(run.kernels["output_gradient"].to_numpy()[:, :, 0])
        areas = np.diff(times)[:, None] * (sizes[1:] + sizes[:-1]) / 2
        integrals = np.roll(areas.sum(axis=0), self.lag)

        known = np.isfinite(mean_weights)
        return float(spearman(mean_weights[known, None], integrals[known, None])[0])


Share = Literal[
    "same_class",
    "nearest_input",
    "nearest_kernel",
    "same_example",
    "top_share",
    "chance",
]


class StoredExamples(AbstractPathQuantity):
    """The largest contributors to predictions,
    for a network with one output on two classes.

    Each run has a row for each point of a split and each of these shares. The columns
    `quantity` and `example` label the share and the point. The first four shares are 1
    if the statement is true for the point, and 0 otherwise:

        same_class       the training example with the largest |𝒮| has the predicted label
        nearest_input    the nearest training example by input distance has the predicted label
        nearest_kernel   the training example with the largest 𝒦(x, xᵢ)/√𝒦(xᵢ, xᵢ) has the predicted
                         label
        same_example     both kinds of nearest example are the same example
        chance           the probability that a random training example has the predicted label
        top_share        Σ|𝒮| over the `top` largest contributors / Σ|𝒮| over all examples
    """

    shares: tuple[Share, ...] = ("same_class", "chance")
    top: Count = 5

    def of(self, measured: Measured) -> pd.DataFrame:
        tables = []
        for (_, row), run in zip(measured.table.iterrows(), measured.runs, strict=True):
            points = self.measure(run)
            repeated = pd.DataFrame([row] * len(points)).reset_index(drop=True)
            tables.append(pd.concat([repeated, points], axis=1))
        return pd.concat(tables, ignore_index=True)

    def measure(self, run: Run | None) -> pd.DataFrame:
        """Return a row for each share and point. A missing run gives NaN."""
        if run is None:
            return pd.DataFrame(
                {"quantity": self.shares, "example": 0, "value": np.nan}
            )
        values = self.values(run)
        ids = example_ids(run.data[f"{self.split}_shown"])
        return pd.concat(
            [
                pd.DataFrame({"quantity": name, "example": ids, "value": values[name]})
                for name in self.shares
            ],
            ignore_index=True,
        )

    def values(self, run: Run) -> Mapping[str, Array]:
        """Return the values of all shares at each point."""
        points = run.points[self.split]
        train = run.points["train"]
        parts = self.contributions(run)
        outputs = run.predictions.sizes["out"]
        if outputs != 1 or not len(run.data["classes"]):
            raise Mistake(
                f"quantity: {run.name} has {outputs} outputs; "
                "stored examples need one output for two classes"
            )
        predicted = np.sign(outputs_of(run, "f_T")[points, 0])
        labels = np.sign(run.data["train_targets"][:, 0])
        largest = np.abs(parts[:, 0]).argmax(axis=1)

        # 𝒦(x, xᵢ)/√𝒦(xᵢ, xᵢ)
        kernel = self.path_kernel(run)[:, 0, :, 0]
        diagonal = np.maximum(np.diag(kernel[train]), np.finfo(float).tiny)
        like = (kernel[points] / np.sqrt(diagonal)).argmax(axis=1)

        # ‖x − x′‖² = ‖x‖² − 2⟨x, x′⟩ + ‖x′‖²
        x = run.data[f"{self.split}_inputs"].reshape(len(predicted), -1)
        learned = run.data["train_inputs"].reshape(len(labels), -1)
        distance = (x**2).sum(1)[:, None] - 2 * x @ learned.T + (learned**2).sum(1)
        near = distance.argmin(axis=1)
        return {
            "same_class": (labels[largest] == predicted).astype(float),
            "nearest_input": (labels[near] == predicted).astype(float),
            "nearest_kernel": (labels[like] == predicted).astype(float),
            "same_example": (near == like).astype(float),
            "top_share": top_shares(parts[:, 0], self.top),
            "chance": (labels[None] == predicted[:, None]).mean(axis=1),
        }


def top_shares(parts: Array, top: int) -> Array:
    """Return Σ|𝒮| over the `top` largest contributors relative to Σ|𝒮|,
    for each point.

    >>> top_shares(np.array([[3.0, -1.0, 0.0]]), 1).tolist()
    [0.75]
    """
    sizes = np.sort(np.abs(parts), axis=1)[:, ::-1]
    shares: Array = sizes[:, :top].sum(axis=1) / sizes.sum(axis=1)
    return shares


class EnoughExamples(AbstractPathQuantity):
    """The smallest fraction of examples whose contributions nearly give the predictions
    on a split.

    Rows have the smallest m/M, for M training examples sorted
    by decreasing ‖𝒮(·, xᵢ)‖, such that

        ‖Σ_{i ≤ m′} 𝒮(·, xᵢ) − Σᵢ 𝒮(·, xᵢ)‖ ≤ tolerance ‖Σᵢ 𝒮(·, xᵢ)‖    for all m′ ≥ m
    """

    tolerance: float = Field(0.01, gt=0)

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.per_run(self.share)

    def share(self, run: Run) -> float:
        parts = self.contributions(run)
        return enough(parts.reshape(-1, parts.shape[2]), self.tolerance)


def enough(parts: Array, tolerance: float) -> float:
    """Return the smallest fraction of columns whose partial sum is within `tolerance`
    of the sum.

    Columns are summed in the order of decreasing norm.

    >>> enough(np.array([[3.0, 0.001, 0.0, -1.0]]), 0.01), enough(np.array([[1.0, 1.0]]), 0.01)
    (0.5, 1.0)
    """
    order = np.argsort(-np.linalg.norm(parts, axis=0), kind="stable")
    sums = parts[:, order].cumsum(axis=1)
    errors = np.linalg.norm(sums - sums[:, -1:], axis=0)
    too_large = np.flatnonzero(errors > tolerance * np.linalg.norm(sums[:, -1]))
    # Entry k is the sum of k + 1 columns. One column more than the last one that is too
    # large suffices.
    count = 1
    if len(too_large):
        count = too_large[-1] + 2
    return float(count / parts.shape[1])


class MarginBound(AbstractPathQuantity):
    """A generalisation bound for kernel machines, applied to the path kernel.

    Rows have these numbers, labelled by the column `quantity`.

        bound     mean_i φ(yᵢ f(xᵢ)) + (2B/n) √(Σᵢ 𝒦(xᵢ, xᵢ)) + 3 √(ln(2/δ)/2n)
        error     the share of points of a split at which f_T has the wrong sign

    Here f = f_T − f_0 at n training examples of two classes, φ(z) = min(1, max(0, 1 −
    z)), B² = fᵀ 𝒦⁻¹ f and δ = 0.05. 𝒦 is made symmetric, 𝒦 ← (𝒦 + 𝒦ᵀ)/2,
    and 10⁻⁶ times its mean diagonal is added to its diagonal. For a kernel that does
    not depend on the labels, the error is below the bound with probability 1 − δ
    (P. Bartlett & S. Mendelson 2002, theorem 22). The path kernel does depend on the
    labels."""

    def of(self, measured: Measured) -> pd.DataFrame:
        return measured.by_run(self.measure, ("bound", "error"))

    def measure(self, run: Run) -> Mapping[str, float]:
        train = run.points["train"]
        points = run.points[self.split]
        targets = run.data["train_targets"]
        if targets.shape[1] != 1 or not len(run.data["classes"]):
            raise Mistake(
                f"quantity: {run.name} has no two classes; the bound is one on their margin"
            )
        kernel = self.path_kernel(run)[train, 0, :, 0]
        after = outputs_of(run, "f_T")[:, 0]
        before = outputs_of(run, "f_0")[:, 0]
        labels = np.sign(targets[:, 0])
        wanted = np.sign(run.data[f"{self.split}_targets"][:, 0])
        return {
            "bound": margin_bound(kernel, (after - before)[train], labels),
            "error": float((np.sign(after[points]) != wanted).mean()),
        }


def margin_bound(
    kernel: Array,
    outputs: Array,
    labels: Array,
) -> float:
    """Return the bound on the error (see `MarginBound`).

    >>> margin_bound(1e-12 * np.eye(200), np.ones(200), np.ones(200)) > 1  # this kernel memorises
    True
    >>> round(margin_bound(np.ones((200, 200)), np.ones(200), np.ones(200)), 2)
    0.43
    """
    n = len(labels)
    ridge = 1e-6 * np.diag(kernel).mean()
    kernel = (kernel + kernel.T) / 2 + ridge * np.eye(n)
    square = float(outputs @ np.linalg.solve(kernel, outputs))
    norm = math.sqrt(max(0.0, square))
    hinge = np.clip(1 - labels * outputs, 0, 1).mean()
    complexity = 2 * norm * math.sqrt(np.trace(kernel)) / n
    confidence = 3 * math.sqrt(math.log(2 / 0.05) / (2 * n))
    return float(hinge + complexity + confidence)


class KernelChange(AbstractPathQuantity):
    """The relative change of the path kernel between two runs that differ in one
    setting.

    Rows have the change between the runs whose axis `along` has the values `one` (𝒦)
    and `other` (𝒦′). The kernels are taken between the points of a split and the
    training examples.

        change = ‖𝒦′ − 𝒦‖/‖𝒦‖

    Both runs must have the same training inputs. Labels,
    noise or hyperparameters may differ."""

    along: str
    one: Any
    other: Any

    def of(self, measured: Measured) -> pd.DataFrame:
        table = measured.table
        rest = [axis for axis in measured.axes if axis != self.along]
        if self.along not in measured.axes:
            raise Mistake(
                f"quantity.along={self.along}: it is no axis of the runs"
                f"{nearest(self.along, measured.axes)}"
            )
        one = table[table[self.along] == self.one]
        other = table[table[self.along] == self.other]
        pairs = one.merge(other, on=["runs", "seed", *rest], suffixes=("", "_other"))
        values = [
            self.change(measured.known.get(first), measured.known.get(second))
            for first, second in zip(pairs["run"], pairs["run_other"], strict=True)
        ]
        compared: pd.DataFrame = pairs.assign(value=values)
        return compared

    def change(self, one: Run | None, other: Run | None) -> float:
        if one is None or other is None:
            return math.nan
        if not np.array_equal(one.data["train_inputs"], other.data["train_inputs"]):
            raise Mistake(
                f"quantity: {one.name} and {other.name} learn from other inputs; "
                "vary a setting that keeps the inputs"
            )
        first = self.path_kernel(one)[one.points[self.split]]
        second = self.path_kernel(other)[other.points[self.split]]
        return float(np.linalg.norm(second - first) / np.linalg.norm(first))


class TimeShare(AbstractQuantity):
    """The time profile of a run: the share of a quantity in each tenth
    of the training time.

    Rows have the share of a tenth, labelled by the column `tenth` from 1 to 10. Time is
    the sum of the step sizes η. If the quantity accumulates at a constant rate, each
    share is 0.1. `mass` chooses the quantity of a step:

        contribution_mass    Σ|Δ𝒮| over examples and queries
        contribution_sum     Σ|Σᵢ Δ𝒮ᵢ| over queries
        kernel_mass          η‖K‖
    """

    mass: Literal["contribution_mass", "contribution_sum", "kernel_mass"] = (
        "contribution_mass"
    )

    def of(self, measured: Measured) -> pd.DataFrame:
        shares = np.array([self.shares(run) for run in measured.runs])
        tenths = [
            measured.table.assign(tenth=k + 1, value=shares[:, k]) for k in range(10)
        ]
        return pd.concat(tenths, ignore_index=True)

    def shares(self, run: Run | None) -> Array:
        """Return the ten shares, or NaN if a step lacks the measurement."""
        unknown = np.full(10, np.nan)
        if run is None:
            return unknown
        steps = run.series("step_size", self.mass)
        if not len(steps) or len(steps) < len(run.metrics) - 1:
            return unknown
        return profile(steps["step_size"].to_numpy(), steps[self.mass].to_numpy())
