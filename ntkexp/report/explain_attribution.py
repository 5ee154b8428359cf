"""Explain one output of a data set of contributions. No run folder is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ntkexp.mistake import WrongArgument
from ntkexp.records.contributions import CONTRIBUTION, DIMS, EFFECT, HALF_BY
from ntkexp.report.examples import Example, named_example
from ntkexp.report.explain import Explanation, explanation_of, parts_of_examples
from ntkexp.report.outputs import output_index, output_names, refuse_query
from ntkexp.report.parts import OutputParts, position_parts

if TYPE_CHECKING:
    import xarray as xr


def explain_attribution(
    arrays: xr.Dataset,
    query: int,
    out: str | int | None,
    find: Callable[[str, int], Example | None],
) -> Explanation:
    """Explain one output at one query of the data set that `attribute` returns.

    Args:
        arrays: The data set.
        query: Index of the query along its axis.
        out: Name or index of the output. By default, explain the largest output.
        find: A function (axis, index) → the example or query to show, or None.
    """
    missing = [name for name in ("start", "change", CONTRIBUTION) if name not in arrays]
    if missing or arrays[CONTRIBUTION].sizes.keys() != set(DIMS):
        raise WrongArgument(
            "explain: it needs the contributions of a followed loop with all their axes; for a run "
            "in a folder, use `ntkexp explain FOLDER`",
            "explain",
        )
    refuse_query(arrays, query)
    query %= arrays.sizes["query"]  # as in NumPy, −1 means the last query
    end = (arrays["start"] + arrays["change"]).isel(query=query).to_numpy()
    column = int(end.argmax()) if out is None else output_index(arrays, out)
    parts = OutputParts(arrays, query, column)
    contributions = parts.read(CONTRIBUTION)
    assert contributions is not None
    times = parts.read(HALF_BY)
    if times is None:
        times = np.full(len(contributions), np.nan)
    effects = parts.read(EFFECT)
    labels = [str(label) for label in arrays["example"].to_numpy()]
    nothing = np.zeros(0)

    def shown(place: int) -> Example:
        return find("example", place) or named_example(
            place, labels[place], nothing, None
        )

    return explanation_of(
        parts,
        contributions,
        start=parts.total("start"),
        end=float(end[column]),
        split="query",
        number=query,
        point=find("query", query)
        or named_example(query, f"query {query}", nothing, None),
        out=column,
        output=output_name(arrays, column),
        rule="secant",
        parts=parts_of_examples(contributions, times, effects, shown),
        positions=position_parts(parts, shown),
    )


def output_name(arrays: xr.Dataset, column: int) -> str:
    """Return the name of an output: its name in a measure if there is one, else "f" for
    a single output, else "f[out]"."""
    name = output_names(arrays)[column]
    if isinstance(name, str):
        return name
    return "f" if arrays.sizes["out"] == 1 else f"f[{name}]"
