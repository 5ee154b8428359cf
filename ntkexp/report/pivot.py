"""Tables of a result over two settings, with means over seeds. `ntkexp report` prints
these tables.

    rows=model.width columns=init.alpha value=error:frozen_start

A table contains only runs that agree in all other settings, except the seed: a mean
over runs with different settings would hide the differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean, stdev

import pandas as pd

from ntkexp.mistake import Mistake, WrongArgument, nearest
from ntkexp.records.results import SPLITS
from ntkexp.report.analysis.quantities import quantities
from ntkexp.report.inventory import differing, flatten_config, matches
from ntkexp.report.run import Run
from ntkexp.report.sentence import main_split
from ntkexp.report.tables import Table, tabulate
from ntkexp.text import MISSING, counted, short

SEED = "seed"
ERROR = "error:"
WORDS = ("rows", "columns", "value")
EXAMPLE = "rows=model.width columns=init.alpha value=error:frozen_start"


@dataclass(frozen=True)
class PivotRequest:
    """The settings of the rows and columns of a table, and the result in its cells.
    The table contains only runs with the settings `where`."""

    rows: str
    columns: str | None
    value: str
    where: Mapping[str, str] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


def read_request(
    words: Sequence[str], where: Sequence[str]
) -> tuple[PivotRequest, list[str]]:
    """Read the words that describe a table, and the filters `where`. Return the
    request, and the other words: names of runs and sweeps.

    >>> read_request(["rows=seed", "value=loss", "width"], [])[1]
    ['width']
    """
    chosen: dict[str, str] = {}
    names = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in chosen:
            raise WrongArgument(f"table=…: {key}= is given twice", "table")
        if equals and key in WORDS:
            chosen[key] = value
        else:
            names.append(word)
    for key in ("rows", "value"):
        if not chosen.get(key):
            raise WrongArgument(
                f"table=…: it needs {key}=…, such as {EXAMPLE}", "table"
            )
    if chosen.get("columns") == chosen["rows"]:
        raise Mistake(
            f"columns={chosen['rows']}: the rows are this setting; leave it out"
        )
    filters = {}
    for text in where:
        key, equals, value = text.partition("=")
        if not equals:
            raise WrongArgument(
                f"where={text}: it takes KEY=VALUE, such as model.depth=2", "where"
            )
        filters[key] = value
    request = PivotRequest(
        chosen["rows"], chosen.get("columns") or None, chosen["value"], filters
    )
    return request, names


@dataclass(frozen=True)
class PivotCell:
    """The values of a result in the runs of a cell, one for each seed.
    If a run lacks the result, its value is None."""

    values: tuple[float | None, ...] = ()

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        return fmean(self.known) if self.known else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds, with divisor n − 1. None for one seed."""
        return stdev(self.known) if len(self.known) > 1 else None

    @property
    def count(self) -> str:
        """The number of runs with the result. If some runs lack it, also the number
        of all runs."""
        known = len(self.known)
        total = len(self.values)
        return str(known) if known == total else f"{known} of {total}"


@dataclass(frozen=True)
class Pivot:
    """A table of a result over two settings."""

    request: PivotRequest
    rows: tuple[object, ...]
    columns: tuple[object, ...]  # (None,) if the request names no columns
    cells: Mapping[tuple[object, object], PivotCell]

    def cell(self, row: object, column: object) -> PivotCell:
        """Return the cell at a row and a column. A cell without runs is empty."""
        return self.cells.get((row, column), PivotCell())

    @property
    def headings(self) -> list[str]:
        """The headings of all columns except the first."""
        if self.request.columns is None:
            return [self.request.value]
        return [f"{self.request.columns}={value}" for value in self.columns]

    @property
    def caption(self) -> str:
        """A description of the cells."""
        return (
            f"{self.request.value}: arithmetic mean ± standard deviation over seeds "
            "(number of runs)"
        )

    @property
    def remark(self) -> str:
        """The number of runs without a result in one line, or an empty text."""
        cells = self.cells.values()
        missing = sum(len(cell.values) - len(cell.known) for cell in cells)
        if not missing:
            return ""
        total = sum(len(cell.values) for cell in cells)
        return (
            f"{missing} of {counted(total, 'run')} have no {self.request.value}, for example "
            "because they diverged; the means leave them out"
        )


# --- From runs to a table.


def pivot(runs: Sequence[Run], request: PivotRequest) -> Pivot:
    """Group runs into the cells of a table.

    Raise if a key or the value is unknown, or if other settings differ.
    """
    configs = {run.path: flatten_config(run.config) for run in runs}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    for key in (*request.axes, *request.where):
        if key not in keys:
            raise Mistake(f"{key}: no run has this setting{nearest(key, keys)}")
    selected = [
        run
        for run in distinct(runs)
        if all(
            matches(str(configs[run.path].get(key)), value)
            for key, value in request.where.items()
        )
    ]
    if not selected:
        filters = " ".join(
            f"where={key}={value}" for key, value in request.where.items()
        )
        raise WrongArgument(f"{filters}: no run passes; leave one out", "where")
    refuse_other_settings([configs[run.path] for run in selected], request.axes)

    groups: dict[tuple[object, object], list[Run]] = {}
    for run in selected:
        config = configs[run.path]
        column = None if request.columns is None else config.get(request.columns)
        groups.setdefault((config.get(request.rows), column), []).append(run)
    for group in groups.values():
        refuse_other_settings([configs[run.path] for run in group], ())
        refuse_equal_seeds(group)
    results = {run.path: result_of(run, request.value) for run in selected}
    if all(result is None for result in results.values()):
        refuse_unknown_value(selected, request.value)
    return Pivot(
        request=request,
        rows=in_order(row for row, _ in groups),
        columns=in_order(column for _, column in groups),
        cells={
            place: PivotCell(tuple(results[run.path] for run in group))
            for place, group in groups.items()
        },
    )


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Return one run of each identity. Copies of a run have the same identity."""
    return list({run.facts.get("identity") or run.path: run for run in runs}.values())


def refuse_other_settings(
    configs: Sequence[Mapping[str, object]], axes: Sequence[str]
) -> None:
    """Raise if a setting differs that is neither an axis nor the seed.

    The settings of a component, such as `model.depth`, may differ with an axis `model`.
    """
    for key in differing(configs):
        if (
            key == SEED
            or key in axes
            or key.startswith(tuple(f"{axis}." for axis in axes))
        ):
            continue
        values = in_order({config.get(key) for config in configs})
        shown = ", ".join(map(str, values[:3])) + (", …" if len(values) > 3 else "")
        raise WrongArgument(
            f"the runs differ in {key} ({shown}), and a mean over it would hide it; choose by "
            f"where={key}={values[0]}, or name it in rows= or columns=",
            "where",
        )


def refuse_equal_seeds(runs: Sequence[Run]) -> None:
    """Raise if two runs of a cell have the same seed. All settings of such runs are
    equal, so the data files or the versions of ntkexp differ."""
    by_seed: dict[object, Run] = {}
    for run in runs:
        seed = run.config.get(SEED)
        if seed in by_seed:
            raise Mistake(
                f"{by_seed[seed].name} and {run.name} have the same settings and seed={seed}; "
                "their files or their versions differ, so name the runs of one table"
            )
        by_seed[seed] = run


def in_order(values: Iterable[object]) -> tuple[object, ...]:
    """Return different values in order: numbers first, then texts.

    >>> in_order([10, "b", 2, "a", 2])
    (2, 10, 'a', 'b')
    """

    def key(value: object) -> tuple[bool, float, str]:
        is_number = isinstance(value, int | float)
        return not is_number, float(value) if is_number else 0.0, str(value)  # type: ignore[arg-type]

    return tuple(sorted(set(values), key=key))


def result_of(run: Run, value: str) -> float | None:
    """Return a result of a run, or None if the run has none.

    `error:MACHINE` is the relative error on the main split, and `error:MACHINE.SPLIT`
    the relative error on another split. Other names are quantities of a run (see
    `analysis.quantities`), or columns of metrics.csv at the last step with a number.
    """
    if run.diverged:
        return None
    if value.startswith(ERROR):
        machine, split = machine_and_split(run, value)
        errors = [
            row.relative_error
            for row in run.ladder
            if (row.machine, row.split) == (machine, split)
        ]
        return finite(errors[0]) if errors else None
    known = quantities(run)
    if value in known:
        return known[value]
    if value not in run.metrics:
        return None
    numbers = run.metrics[value].dropna()
    return finite(float(numbers.iloc[-1])) if len(numbers) else None


def machine_and_split(run: Run, value: str) -> tuple[str, str]:
    name = value.removeprefix(ERROR)
    machine, _, split = name.rpartition(".")
    if machine and split in SPLITS:
        return machine, split
    return name, main_split(run.ladder)


def finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def refuse_unknown_value(runs: Sequence[Run], value: str) -> None:
    """Raise because no run has a number for the result. Name the reason,
    or the nearest name of a result."""
    if all(run.diverged for run in runs):
        raise Mistake(f"value={value}: all runs diverged; choose a smaller step size")
    names = {str(name) for run in runs for name in run.metrics}
    names |= {f"{ERROR}{row.machine}" for run in runs for row in run.ladder}
    if value in names or value.rpartition(".")[0] in names:
        machine = value.removeprefix(ERROR)
        notes = [
            row.note
            for run in runs
            for row in run.ladder
            if row.note and machine in (row.machine, f"{row.machine}.{row.split}")
        ]
        reason = f" ({notes[0]})" if notes else ""
        raise Mistake(
            f"value={value}: no run has a number for it{reason}; choose another result"
        )
    if "," in value:
        raise Mistake(f"value={value}: a table has one value; make a table of each")
    hint = nearest(value, names) or "; give a column of metrics.csv, or error:MACHINE"
    raise Mistake(f"value={value}: no run has this result{hint}")


# --- Output formats.


def pivot_table(table: Pivot) -> Table:
    """Return the table as text: mean ± standard deviation (number of runs)."""
    rows = [
        [str(row), *(cell_text(table.cell(row, column)) for column in table.columns)]
        for row in table.rows
    ]
    return tabulate([table.request.rows, *table.headings], rows, numbers=table.headings)


def cell_text(cell: PivotCell) -> str:
    """Format a cell.

    >>> cell_text(PivotCell((1.0, 2.0, None))), cell_text(PivotCell((0.5,))), cell_text(PivotCell())
    ('1.5 ± 0.707 (2 of 3)', '0.5 (1)', '–')
    """
    if cell.mean is None:
        return f"{MISSING} ({cell.count})" if cell.values else MISSING
    spread = "" if cell.deviation is None else f" ± {short(cell.deviation)}"
    return f"{short(cell.mean)}{spread} ({cell.count})"


def pivot_frame(table: Pivot) -> pd.DataFrame:
    """Return a row for each cell with runs, in full precision."""
    request = table.request
    rows = []
    for place in product(table.rows, table.columns):
        cell = table.cell(*place)
        if cell.values:
            rows.append(
                {
                    **dict(zip(request.axes, place, strict=False)),
                    "mean": cell.mean,
                    "standard_deviation": cell.deviation,
                    "runs": len(cell.known),
                    "runs_without_value": len(cell.values) - len(cell.known),
                }
            )
    return pd.DataFrame(rows)


def format_latex(table: Pivot) -> str:
    """Format the table for LaTeX, with rules of the package booktabs."""
    header = [table.request.rows, *table.headings]
    lines = [
        f"% {table.caption}; needs \\usepackage{{booktabs}}",
        f"\\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        "\\toprule",
        " & ".join(map(latex_text, header)) + r" \\",
        "\\midrule",
    ]
    for row in table.rows:
        cells = [latex_cell(table.cell(row, column)) for column in table.columns]
        lines.append(" & ".join([latex_text(str(row)), *cells]) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def latex_cell(cell: PivotCell) -> str:
    r"""Format a cell in LaTeX.

    >>> print(latex_cell(PivotCell((2e-15, 4e-15))))
    $3 \times 10^{-15} \pm 1 \times 10^{-15}$ (2)
    """
    if cell.mean is None:
        return "--" if not cell.values else f"-- ({cell.count})"
    spread = "" if cell.deviation is None else rf" \pm {latex_number(cell.deviation)}"
    return f"${latex_number(cell.mean)}{spread}$ ({cell.count})"


def latex_number(number: float) -> str:
    digits, exponential, exponent = short(number).partition("e")
    return rf"{digits} \times 10^{{{exponent}}}" if exponential else digits


def latex_text(text: str) -> str:
    r"""Escape text for LaTeX.

    >>> print(latex_text("W_std=50%"))
    W\_std=50\%
    """
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    return "".join(
        special.get(letter, f"\\{letter}" if letter in "&%$#_{}" else letter)
        for letter in text
    )
