"""Which training examples made a prediction? The largest |𝒮(x, xᵢ)| for the surest, a typical and the least sure point.

With several outputs, the contributions to the one that the network gives the point.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ntkexp.records.contributions import explained_rule
from ntkexp.records.data import OUT_NAME
from ntkexp.report.examples import Example, example, output_name, phase_of
from ntkexp.report.explain import largest_explained, read_at, where_read
from ntkexp.report.plots import examples
from ntkexp.report.plots.examples import TOP, Explained, fitting, spell_prediction
from ntkexp.report.plots.style import heading
from ntkexp.report.run import Run, blocks
from ntkexp.text import percent, short

if TYPE_CHECKING:
    import xarray as xr


class Read(NamedTuple):
    """What is known of the points of a split."""

    rule: str
    split: str
    known: NDArray[np.int64]
    parts: xr.DataArray  # too many to be read at once, perhaps
    outputs: NDArray[np.float64]


def read(run: Run) -> Read | None:
    """Read the contributions to the points that the run is judged by, if there are any."""
    rule = explained_rule(run.rules)
    split = next(
        (s for s in ("probe", "test", "train") if s in run.points and len(run.data[f"{s}_index"])),
        None,
    )
    if rule is None or split is None:
        return None
    parts = run.parts(rule).isel(probe=run.points[split])
    outputs = run.predictions.sel(machine="f_T").isel(probe=run.points[split]).to_numpy()
    known = np.flatnonzero(where_read(parts).any(axis=1))  # with some optimizers a few points alone
    if not known.size or not np.isfinite(outputs).all() or not parts.size:
        return None
    return Read(rule, split, known, parts, outputs)


def draw(run: Run) -> Figure | None:
    found = read(run)
    if found is None:
        return None
    figure = examples.draw(explain(run, found))
    heading(figure, answer(found.parts.isel(probe=found.known), run.parts(found.rule).attrs))
    return figure


def table(run: Run) -> pd.DataFrame:
    found = read(run)
    rows = explain(run, found) if found else []
    lines = [
        (row.role, row.point.index, row.point.name, shown.index, shown.name, value)
        for row in rows
        for shown, value in zip(row.top, row.shares.tolist(), strict=True)
    ]
    return pd.DataFrame(
        lines, columns=["point", "index", "target", "example", "its_target", "contribution"]
    )


def explain(run: Run, read: Read) -> list[Explained]:
    """Explain three of the points that are known, chosen by how far their largest output is from zero or from the next
    one; or by a measure, where that is explained.
    """
    split, known, outputs = read.split, read.known, read.outputs
    sure = (
        np.abs(outputs[:, 0])
        if outputs.shape[1] == 1
        else np.diff(np.sort(outputs, axis=1)[:, -2:])[:, 0]
    )
    if measured := OUT_NAME in run.data and outputs.shape[1] == 1:
        sure = outputs[:, 0]
    order = known[np.argsort(sure[known], kind="stable")]
    by_class = len(run.data["classes"]) > 0 and not measured
    roles = ("surest", "typical", "least sure") if by_class else ("largest", "typical", "smallest")
    explanations = []
    for role, k in zip(roles, order[[-1, len(order) // 2, 0]].tolist(), strict=True):
        of_all = read.parts.isel(probe=k).to_numpy()
        column = largest_explained(outputs[k, list(run.outs)], of_all)
        chosen, here = run.outs[column], of_all[column]
        top = np.argsort(-np.abs(here), kind="stable")[:TOP]
        most = tuple(labelled(run, "train", i) for i in top.tolist())
        output = output_name(run, chosen, outputs.shape[1], phase_of(run, split, k))
        prediction = spell_prediction(output, float(outputs[k, chosen]))
        explanations.append(Explained(role, prediction, labelled(run, split, k), most, here[top]))
    return explanations


def labelled(run: Run, split: str, k: int) -> Example:
    """Put one example under a name that fits: its class, or its values with the sign that the axes use."""
    found = example(run, split, k)
    return replace(
        found,
        name=fitting(found.name if len(run.data["classes"]) else found.name.replace("-", "−")),
    )


def answer(parts: xr.DataArray, facts: dict[str, Any]) -> str:
    """Write the title: how concentrated the contributions are, and how well their parts are known."""
    top, total, most = min(10, parts.shape[-1]), 0.0, 0.0
    for block in blocks(parts):
        rows = np.abs(block).reshape(-1, block.shape[-1])
        sizes = np.partition(rows[read_at(rows)], -top, axis=1)
        total, most = total + sizes.sum(), most + sizes[:, -top:].sum()
    part = percent(most / total) if total > 0 else "0 %"
    where = f"each of {len(parts)} points" if len(parts) > 1 else "a point"
    error, cancellation = facts.get("error_bar"), facts.get("cancellation")
    trust = (
        [f"each is known to {percent(error)}"] if error is not None and np.isfinite(error) else []
    )
    trust += (
        [f"they cancel {short(cancellation)}-fold"]
        if cancellation is not None and np.isfinite(cancellation)
        else []
    )
    trusted = f"; {', and '.join(trust)}" if trust else ""
    return f"The top {top} of {parts.shape[-1]} examples for {where} make {part} of its contributions{trusted}"
