"""`Attribution`, the data set that `attribute` and `load_run(…).contributions` return.

`Attribution.to_scores` returns scores for other libraries,
with the sign of these libraries:

    score(xᵢ → x) > 0        the example xᵢ raised the output at x       (contribution)
                             without xᵢ the output would be lower        (effect, with its sign reversed)

dattri, TRAK, quanda and `ntkexp.validate` use this sign. In the data set itself,
`effect` has the opposite sign: it is the change of the output if xᵢ is left out."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import pandas as pd
import xarray as xr

from ntkexp.mistake import WrongArgument, nearest
from ntkexp.records.contributions import (
    BY_COMPONENT,
    COMPONENT,
    CONTRIBUTION,
    DIMS,
    EFFECT,
    MEASURE,
    QUERY_OUT,
)
from ntkexp.report.explain import Explanation
from ntkexp.report.explain_attribution import explain_attribution
from ntkexp.report.outputs import one_output
from ntkexp.report.parts import NO_EXAMPLE
from ntkexp.report.top_examples import FindExample, html_table
from ntkexp.text import counted, listed, percent, short

if TYPE_CHECKING:
    from ntkexp.report.plots.attribution_plots import AttributionPlots

Layout: TypeAlias = Literal["train,test", "test,train"]
LAYOUTS: dict[str, tuple[str, str]] = {
    "train,test": ("example", "query"),
    "test,train": ("query", "example"),
}
"""The axes of each layout, in order."""

# the summary omits parts that are a smaller fraction of the change
SMALLEST_SHARE = 1e-6

RAISED = "positive: the example raised the output"
LOWER_WITHOUT = "positive: the output would be lower without the example"


class Attribution(xr.Dataset):  # type: ignore[no-untyped-call]  # xarray inspects its subclasses
    """The contributions and other parts of the change,
    an xarray data set with the axes query, out and example.

    `trace.attribute()` returns such a data set, and `run.contributions` is one. The
    docstring of `Trace.attribute` lists the arrays. Select and sum arrays as in any
    data set: `found["contribution"].sum("example")`.

    >>> parts = np.array([[[1.0, -2.0]], [[0.5, 0.0]]])
    >>> found = Attribution({"contribution": (DIMS, parts)}, {"example": ["a", "b"]})
    >>> found.to_scores("test,train").to_pandas().to_dict("index")
    {0: {'a': 1.0, 'b': -2.0}, 1: {'a': 0.5, 'b': 0.0}}
    >>> found.to_pandas().head(2)
       query  out example  contribution
    0      0    0       a           1.0
    1      0    0       b          -2.0
    """

    __slots__ = ("_find",)
    _find: FindExample

    def showing(self, find: FindExample) -> Attribution:
        """Set the callback that returns the examples for the table in a notebook. A
        selection of the data set has no callback, so its table
        shows only the names of examples."""
        self._find = find
        return self

    @property
    def _finder(self) -> FindExample:
        find: FindExample = getattr(self, "_find", lambda axis, place: None)
        return find

    def summary(self) -> str:
        """Summarise the attribution: its parts, the error of their sum,
        and the cancellation.

        Returns:
            One sentence.

        >>> arrays = {"contribution": (DIMS, np.array([[[3.0, -1.0]]]))}
        >>> arrays |= {"decay": (QUERY_OUT, np.array([[2.0]])), "change": (QUERY_OUT, np.array([[4.0]]))}
        >>> Attribution(arrays).summary()
        '2 examples and weight decay (50 %) add up to the change of 1 output, to 0 of it; contributions cancel 2 : 1'
        """
        contributions = self[CONTRIBUTION]
        total = contributions.sum("example")
        net = float(abs(total).sum())
        cancellation = float(abs(contributions).sum()) / net if net else 1.0
        cancel = f"contributions cancel {short(cancellation)} : 1"
        examples = counted(contributions.sizes["example"], "example")
        if "change" not in self or self["change"].dims != QUERY_OUT:
            return f"{examples}; {cancel}"
        change = self["change"]
        moved = float(np.linalg.norm(change)) or 1.0

        # add the parts that no example caused, and compute the error of the sum
        causes = [examples]
        for name, words in NO_EXAMPLE.items():
            if name not in self:
                continue
            total = total + self[name]
            share = float(np.linalg.norm(self[name])) / moved
            if share > SMALLEST_SHARE:
                causes.append(f"{words} ({percent(share)})")
        missed = short(float(np.linalg.norm(total - change)) / moved)
        outputs = counted(change.size, "output")
        return f"{listed(causes)} add up to the change of {outputs}, to {missed} of it; {cancel}"

    def __repr__(self) -> str:
        arrays: str = super().__repr__()
        return f"{self.summary()}\n{arrays}" if self.is_complete else arrays

    @property
    def is_complete(self) -> bool:
        """True if the data set has contributions with all their axes."""
        return CONTRIBUTION in self.data_vars and set(self[CONTRIBUTION].dims) == set(
            DIMS
        )

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks: the strongest examples of each query,
        then all arrays."""
        arrays: str = super()._repr_html_()
        if not self.is_complete:
            return arrays
        table = html_table(self, self._finder)
        details = f"<details><summary>all arrays</summary>{arrays}</details>"
        return f"<div><p>{escape(self.summary())}</p>{table}{details}</div>"

    @property
    def plot(self) -> AttributionPlots:  # type: ignore[override]  # includes the plots of xarray
        """Plots of one query as matplotlib axes: `.plot.contributions(query=0)`,
        `.timeline()`, `.components()`."""
        from ntkexp.report.plots.attribution_plots import AttributionPlots  # noqa: PLC0415  loads matplotlib

        return AttributionPlots(self, self._finder)

    def explain(self, query: int = 0, *, out: str | int | None = None) -> Explanation:
        """Explain one output at one query: the terms that add up to it,
        and the strongest examples.

        Args:
            query: Index of the query along its axis.
            out: Name or index of the output. By default, explain the largest output.

        Returns:
            An explanation that prints as a text with tables.
            `as_json(top)` returns it as a dict.

        Raises:
            Mistake: if there is no such query or output,
                or if the query was not attributed.
        """
        return explain_attribution(self, query, out, self._finder)

    def to_scores(
        self,
        layout: Layout = "train,test",
        *,
        score: str = CONTRIBUTION,
        out: str | int | None = None,
        component: str | None = None,
    ) -> xr.DataArray:
        """Return a labelled matrix of scores, [example, query] or [query, example].

        A positive contribution means that the example raised the output. A positive
        effect means that the output would be lower without the example.

        Args:
            layout: 'train,test' for [example, query],
                or 'test,train' for [query, example].
            score: 'contribution', 'contribution_RULE' for another rule, or 'effect'.
                Effects are returned with reversed sign.
            out: Name or index of the output. Required if there are several.
            component: Name of one component, if `by=` divided the contributions.
                The scores of all components add up to the contribution.

        Returns:
            The scores of all attributed queries. The coordinate `query` holds the
            indices of these queries. Call `.to_pandas()` for a data frame, or
            `.to_numpy()` for an array.

        Raises:
            Mistake: if there are several outputs and `out` is missing,
                or if there are no such scores.
        """
        if layout not in LAYOUTS:
            raise WrongArgument(
                f"layout={layout!r} is none of {', '.join(map(repr, LAYOUTS))}",
                "layout",
            )
        parts = one_output(self._one_score(score, component), out)
        for axis in ("query", "example"):
            if axis not in parts.dims:
                raise WrongArgument(
                    f"to_scores: the axis {axis} is missing; keep it by isel({axis}=[0])"
                )

        # drop queries that were not attributed: all scores of such a query are NaN
        labels = {axis: parts[axis] for axis in ("query", "example")}
        scores = parts.assign_coords(labels).dropna("query", how="all")
        if not bool(np.isfinite(scores).all()):
            raise WrongArgument(
                f"score={score!r} is not a finite number for every example", "score"
            )

        facts = {"sign": RAISED}
        if score == EFFECT:
            scores = -scores
            facts = {"sign": LOWER_WITHOUT}
        if MEASURE in self.attrs:
            facts[MEASURE] = str(self.attrs[MEASURE])
        return (
            scores.transpose(*LAYOUTS[layout])
            .rename(score)
            .drop_attrs()
            .assign_attrs(facts)
        )

    def to_pandas(self) -> pd.Series | pd.DataFrame:
        """Return a data frame with a row for each attributed query,
        each output and each example.

        Returns:
            A frame whose columns are contributions, contributions by component, and effects.
            Effects keep their sign, unlike in `to_scores`.
        """
        columns = {
            name: self[name]
            for name in self._scores
            if set(self[name].dims) == set(DIMS)
        }
        if not columns:  # the data set was reduced and has no scores
            return super().to_pandas()
        for name in self._components:
            columns[f"{BY_COMPONENT}.{name}"] = self[BY_COMPONENT].sel(component=name)
        plain = {
            name: (array.dims, array.to_numpy()) for name, array in columns.items()
        }
        arrays = xr.Dataset(plain, {axis: self[axis].to_numpy() for axis in DIMS})
        table = arrays.to_dataframe(dim_order=list(DIMS))
        return table.dropna(how="all").reset_index()

    @property
    def _scores(self) -> list[str]:
        """The sorted names of the score arrays: `contribution`,
        `contribution_RULE` and `effect`.

        Names are sorted, because zarr lists the arrays of a store in no fixed order.
        """
        names = sorted(map(str, self.data_vars))
        return [
            name
            for name in names
            if name in (CONTRIBUTION, EFFECT) or name.startswith(f"{CONTRIBUTION}_")
        ]

    @property
    def _components(self) -> list[str]:
        if BY_COMPONENT in self:
            return [str(name) for name in self[COMPONENT].to_numpy()]
        return []

    def _one_score(self, score: str, component: str | None) -> xr.DataArray:
        """Return the array of a score, or the part of the score
        that acts through one component."""
        names = self._scores
        if score not in names:
            existing = f"there are {listed(names)}" if names else "there are none"
            advice = "; attribute with effects=True" if score == EFFECT else ""
            raise WrongArgument(
                f"score={score!r}: there are no such scores; {existing}{advice}",
                "score",
            )
        if component is None:
            return self[score]
        if score != CONTRIBUTION:
            raise WrongArgument(
                f"component={component!r}: '{score}' is not known by component",
                "component",
            )
        components = self._components
        if component not in components:
            advice = "; attribute with by="
            if components:
                advice = (
                    nearest(component, components)
                    or f"; there are {listed(components)}"
                )
            raise WrongArgument(
                f"component={component!r}: there is no such component{advice}",
                "component",
            )
        return self[BY_COMPONENT].sel(component=component, drop=True)
