"""The examples with the largest |𝒮(x, xᵢ)| for three queries: surest, typical,
least sure.

If there are several outputs, the picture shows contributions
to the largest output at the query."""

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
from ntkexp.report.parts import (
    attributed,
    attributed_in_blocks,
    largest_attributed,
    strongest_first,
)
from ntkexp.report.plots import examples
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.examples import (
    MAX_LABEL_LETTERS,
    TOP,
    Explained,
    spell_prediction,
)
from ntkexp.report.run import Run, blocks, outputs_of
from ntkexp.text import fitting, percent, short

if TYPE_CHECKING:
    import xarray as xr


class SplitParts(NamedTuple):
    """The contributions to the queries of a split, by the best attribution rule."""

    rule: str
    split: str
    known: NDArray[np.int64]  # indices of the attributed queries
    # contributions, [query, out, example]; this array may exceed the memory
    parts: xr.DataArray
    outputs: NDArray[np.float64]  # outputs of the trained network, [query, out]


def read(run: Run) -> SplitParts | None:
    """Read the contributions to the main split.
    Return None if the run has no contributions."""
    rule = explained_rule(run.rules)
    splits = [split for split in ("query", "test", "train") if split in run.points]
    splits = [split for split in splits if len(run.data[f"{split}_index"])]
    if rule is None or not splits:
        return None
    split = splits[0]
    parts = run.parts(rule).isel(query=run.points[split])
    outputs = outputs_of(run, "f_T")[run.points[split]]
    known = np.flatnonzero(attributed_in_blocks(parts).any(axis=1))
    if not known.size or not np.isfinite(outputs).all() or not parts.size:
        return None
    return SplitParts(rule, split, known, parts, outputs)


def draw(run: Run, canvas: Canvas) -> Figure | None:
    read_parts = read(run)
    if read_parts is None:
        return None
    examples.draw(explain(run, read_parts), canvas)
    attributes = run.parts(read_parts.rule).attrs
    title, caption = answer(read_parts.parts.isel(query=read_parts.known), attributes)
    return canvas.finish(title, caption)


def table(run: Run) -> pd.DataFrame:
    columns = ["point", "index", "target", "example", "its_target", "contribution"]
    read_parts = read(run)
    if read_parts is None:
        return pd.DataFrame(columns=columns)
    rows = []
    for row in explain(run, read_parts):
        query = (row.role, row.point.index, row.point.name)
        for shown, value in zip(row.top, row.shares.tolist(), strict=True):
            rows.append((*query, shown.index, shown.name, value))
    return pd.DataFrame(rows, columns=columns)


def explain(run: Run, read_parts: SplitParts) -> list[Explained]:
    """Explain the surest, the median and the least sure query.

    Sureness is the margin between the two largest outputs, or |f| if there is a single
    output. If the run attributes a measure, sureness is the value of the measure."""
    split = read_parts.split
    outputs = read_parts.outputs
    is_measure = OUT_NAME in run.data and outputs.shape[1] == 1
    if is_measure:
        sureness = outputs[:, 0]
    elif outputs.shape[1] == 1:
        sureness = np.abs(outputs[:, 0])
    else:
        sureness = np.diff(np.sort(outputs, axis=1)[:, -2:])[:, 0]
    known = read_parts.known
    order = known[np.argsort(sureness[known], kind="stable")]
    queries = order[[-1, len(order) // 2, 0]].tolist()
    roles = ("largest", "typical", "smallest")
    if len(run.data["classes"]) > 0 and not is_measure:
        roles = ("surest", "typical", "least sure")

    explanations = []
    for role, k in zip(roles, queries, strict=True):
        by_output = read_parts.parts.isel(query=k).to_numpy()
        column = largest_attributed(outputs[k, list(run.outs)], by_output)
        contributions = by_output[column]
        top = strongest_first(contributions)[:TOP]
        out = run.outs[column]
        output = output_name(run, out, outputs.shape[1], phase_of(run, split, k))
        explained = Explained(
            role=role,
            prediction=spell_prediction(output, float(outputs[k, out])),
            point=labelled(run, split, k),
            top=tuple(labelled(run, "train", i) for i in top),
            shares=contributions[top],
        )
        explanations.append(explained)
    return explanations


def labelled(run: Run, split: str, k: int) -> Example:
    """Return an example with a name that fits below its picture,
    with typographic minus signs."""
    shown = example(run, split, k)
    name = shown.name
    if not len(run.data["classes"]):
        name = name.replace("-", "−")
    return replace(shown, name=fitting(name, MAX_LABEL_LETTERS))


def answer(parts: xr.DataArray, attributes: dict[str, Any]) -> tuple[str, str]:
    """Return the title and the caption. The title states the share of the ten largest
    contributions to an output in all contributions."""
    top = min(10, parts.shape[-1])
    total = 0.0
    largest = 0.0
    for block in blocks(parts):
        rows = np.abs(block).reshape(-1, block.shape[-1])
        sizes = np.partition(rows[attributed(rows)], -top, axis=1)
        total += sizes.sum()
        largest += sizes[:, -top:].sum()
    share = percent(largest / total) if total > 0 else "0 %"
    title = f"The top {top} of {parts.shape[-1]} examples make {share} of contributions"
    words = f"The share is that of Σ|contributions|, summed over {len(parts)} queries."
    error = attributes.get("error_bar")
    if error is not None and np.isfinite(error):
        words += f" Each contribution is known to {percent(error)}."
    cancellation = attributes.get("cancellation")
    if cancellation is not None and np.isfinite(cancellation):
        words += f" Contributions cancel {short(cancellation)}-fold."
    return title, f"{examples.COLOURS_IN_WORDS} {words}"
