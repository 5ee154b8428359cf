"""A table over two settings has the means of NumPy, and hides no other setting."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ntkexp.cli.main import run as run_command
from ntkexp.cli.results import Format, format_pivot
from ntkexp.mistake import Mistake
from ntkexp.records.results import Result
from ntkexp.report.pivot import Pivot, pivot, read_request
from ntkexp.report.run import Run
from tests.report.synthetic import digits, write_run

TABLE = ("rows=model.width", "columns=init.alpha", "value=error:left")
WIDTHS, ALPHAS, SEEDS = (8, 64, 128), (0.5, 10.0), (0, 1, 2)


def error_of(width: int, alpha: float, seed: int) -> float:
    return float(np.random.default_rng([width, int(10 * alpha), seed]).uniform(0.01, 1))


def made(width: int, alpha: float, seed: int, **others: Mapping[str, object]) -> Run:
    """A run with two errors, and a loss that is twice the error."""
    error = error_of(width, alpha, seed)
    config = {
        "model": {"_target_": "ntkexp.model.MLP", "width": width},
        "init": {"_target_": "ntkexp.init.NTK", "alpha": alpha},
        "seed": seed,
        **others,
    }
    metrics = pd.DataFrame({"step": [0, 1, 2], "loss": [9.0, 2 * error, np.nan], "diagnostics.mine": [1.0, 2.0, error]})
    ladder = (Result("query", "left", relative_error=error), Result("test", "left", relative_error=3 * error))
    return Run(Path(f"{width}-{alpha}-{seed}-{len(others)}"), config, metrics, ladder)


GRID = [made(*place) for place in product(WIDTHS, ALPHAS, SEEDS)]


def tabulated(runs: Sequence[Run], *words: str, where: Sequence[str] = ()) -> Pivot:
    request, names = read_request(words or TABLE, where)
    assert not names
    return pivot(runs, request)


@pytest.mark.parametrize(
    ("value", "factor"),
    [("error:left.query", 1), ("error:left", 1), ("error:left.test", 3), ("loss", 2), ("diagnostics.mine", 1)],
)
def test_cells_are_means_and_deviations_over_seeds(value: str, factor: int) -> None:
    """`error:left` is on the main split, and a metric at the last step with a number."""
    found = tabulated(GRID[::-1], *TABLE[:2], f"value={value}")
    assert (found.rows, found.columns) == (WIDTHS, ALPHAS)
    for width, alpha in product(WIDTHS, ALPHAS):
        expected = [factor * error_of(width, alpha, seed) for seed in SEEDS]
        cell = found.cell(width, alpha)
        assert cell.mean == pytest.approx(np.mean(expected), rel=1e-12)
        assert cell.deviation == pytest.approx(np.std(expected, ddof=1), rel=1e-12)
        assert cell.count == "3"


def test_a_table_without_columns_has_one(tmp_path: Path) -> None:
    found = tabulated(GRID, TABLE[0], TABLE[2], where=["init.alpha=.5"])
    assert found.columns == (None,)
    assert found.cell(8, None).mean == pytest.approx(np.mean([error_of(8, 0.5, seed) for seed in SEEDS]))


def test_a_setting_of_a_listed_component_is_a_setting() -> None:
    """Networks of the same layers differ in a layer's scale."""

    def network(seed: int, scale: float) -> Run:
        dense = {"_target_": "ntkexp.layer.Dense", "b_std": scale}
        residual = {"_target_": "ntkexp.layer.Residual", "branch": [dense]}
        return made(8, 1.0, seed, model={"_target_": "ntkexp.model.Layers", "spec": [residual]})

    runs = [network(0, 0.0), network(1, 3.0)]
    request = ("rows=model", "value=loss")
    with pytest.raises(Mistake, match=r"differ in model\.spec\.0\.branch\.0\.b_std \(0\.0, 3\.0\)"):
        tabulated(runs, *request)
    where = ["model.spec.0.branch.0.b_std=3"]
    assert tabulated(runs, *request, where=where).cell("layers", None).mean == pytest.approx(2 * error_of(8, 1.0, 1))
    by_scale = tabulated(runs, "rows=model.spec.0.branch.0.b_std", "value=loss")
    assert by_scale.rows == (0.0, 3.0)


def test_csv_has_every_digit() -> None:
    rows = list(csv.DictReader(StringIO(format_pivot(tabulated(GRID), Format.csv))))
    assert [(int(row["model.width"]), float(row["init.alpha"])) for row in rows] == list(product(WIDTHS, ALPHAS))
    for row in rows:
        cell = tabulated(GRID).cell(int(row["model.width"]), float(row["init.alpha"]))
        assert float(row["mean"]) == cell.mean
        assert float(row["standard_deviation"]) == cell.deviation
        assert (row["runs"], row["runs_without_value"]) == ("3", "0")


def test_missing_cells_and_results_are_shown() -> None:
    """Three runs of a cell are absent; one of another cell has no result; one cell has one seed."""
    without = replace(GRID[3], ladder=())
    runs = [run for run in GRID[:-2] if run.config["model"]["width"] != 8 or run.config["init"]["alpha"] != 0.5]
    found = tabulated([without if run is GRID[3] else run for run in runs])
    assert found.cell(8, 0.5).mean is None
    assert found.cell(8, 10.0).count == "2 of 3"
    assert found.cell(128, 10.0).deviation is None
    assert found.remark.startswith("1 of 13 runs have no error:left, for example because they diverged")
    markdown = format_pivot(found, Format.md).splitlines()
    assert markdown[0] == r"| model.width | init.alpha=0.5 | init.alpha=10.0 |"
    assert markdown[2].startswith("| 8 | – | ")
    assert markdown[2].endswith(" (2 of 3) |")
    assert "±" not in markdown[4].split("|")[3]
    latex = format_pivot(found, Format.latex)
    assert r"\begin{tabular}{lrr}" in latex
    assert "\n8 & -- & $" in latex
    assert latex.count(r"\pm") == 4  # of five cells with results, one has one run
    assert latex.count(r"\\") == 4


OTHERS = {
    "another setting": (made(8, 0.5, 3, steps={"count": 5}), TABLE, (), r"the runs differ in steps.count \(5, None\)"),
    "unknown rows": (None, ("rows=model.widht", *TABLE[1:]), (), "rows|did you mean 'model.width'"),
    "unknown filter": (None, TABLE, ("model.with=8",), "did you mean 'model.width'"),
    "no run": (None, TABLE, ("model.width=9",), "^where=model.width=9: no run passes"),
    "an unknown result": (None, (*TABLE[:2], "value=error:lef"), (), "did you mean 'error:left'"),
    "no number": (
        replace(made(8, 0.5, 0), ladder=(Result("test", "nngp", note="no limit is known"),)),
        (*TABLE[:2], "value=error:nngp"),
        ("init.alpha=0.5",),
        r"no run has a number for it \(no limit is known\); choose another result",
    ),
    "two results": (None, (*TABLE[:2], "value=kernel_change,error:left"), (), "a table has one value"),
    "no value": (None, TABLE[:2], (), "^table=…: it needs value="),
    "equal axes": (None, (TABLE[0], "columns=model.width", TABLE[2]), (), "the rows are this setting"),
    "a setting less": (
        None,
        (TABLE[0], TABLE[2]),
        (),
        r"the runs differ in init.alpha \(0.5, 10.0\).* where=init.alpha=0.5",
    ),
    "an odd filter": (None, TABLE, ("model.width",), "it takes KEY=VALUE"),
    "rows twice": (None, ("rows=seed", *TABLE), (), "rows= is given twice"),
}


@pytest.mark.parametrize(("more", "words", "where", "reason"), OTHERS.values(), ids=OTHERS)
def test_tables_are_refused_in_one_line(
    more: Run | None, words: Sequence[str], where: Sequence[str], reason: str
) -> None:
    with pytest.raises(Mistake, match=reason):
        tabulated([*GRID, *([more] if more else [])], *words, where=where)


def test_settings_of_a_component_may_differ_with_it_but_not_within_a_cell() -> None:
    def of(kind: str, seed: int, **fields: int) -> Run:
        run = made(8, 0.5, seed)
        model = {"_target_": f"ntkexp.model.{kind}", "width": 8, **fields}
        return replace(run, path=Path(f"{kind}-{seed}-{fields}"), config=run.config | {"model": model})

    words = ("rows=model", "value=error:left")
    runs = [of("MLP", 0, depth=2), of("MLP", 1, depth=2), of("CNN", 0, kernel=3)]
    assert tabulated(runs, *words).rows == ("cnn", "mlp")
    with pytest.raises(Mistake, match=r"the runs differ in model.depth \(1, 2\)"):
        tabulated([*runs, of("MLP", 2, depth=1)], *words)
    with pytest.raises(Mistake, match="have the same settings and seed=0; their files or their versions differ"):
        tabulated([*runs, replace(runs[0], path=Path("elsewhere"))], *words)


def test_the_command_reads_folders(
    finished: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for steps, seed in product((30, 60), (0, 1)):
        write_run(tmp_path / f"{steps}-{seed}", digits(steps=steps, seed=seed))
    words = ["report", str(tmp_path), "--table", "rows=steps", "value=error:left"]
    assert run_command(words) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["steps", "error:left"]
    assert [line.split()[0] for line in lines[1:3]] == ["30", "60"]
    assert lines[-1] == "error:left: arithmetic mean ± standard deviation over seeds (number of runs)"
    assert run_command([*words, "--where=steps=30", "--format=latex", f"--out={tmp_path / 't.tex'}"]) == 0
    assert (tmp_path / "t.tex").read_text(encoding="utf-8").count("\\\\") == 2
    for wrong, reason in (
        ([*words, "--format=html"], "--table writes text, md, csv, json or latex"),
        (["report", str(finished["diverged"]), *words[2:]], "all runs diverged; choose a smaller step size"),
        (["report", "--format=latex"], "it is a format of --table"),
        (["report", "--where=steps=30"], "it selects runs of --table"),
    ):
        capfd.readouterr()
        assert run_command(wrong) == 2
        assert reason in capfd.readouterr().err
