"""`load_sweep`: tables equal the CSV files of the sweep, and pictures are drawn on the user's axes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import ntkexp
from ntkexp.mistake import Mistake, WrongArgument
from ntkexp.report.analysis.tables import write_tables
from tests.report.synthetic import write_sweep

KEYS: dict[str, Sequence[int | str]] = {"model.width": (16, 64), "model.activation": ("relu", "tanh")}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("outputs"), axes=KEYS, seeds=(0, 1), failed=[1])


def test_a_sweep_has_the_tables_of_its_files(path: Path) -> None:
    sweep: ntkexp.Sweep = ntkexp.load_sweep(path)
    for table, file in zip((sweep.table, sweep.means, sweep.fits), write_tables(path), strict=True):
        written = pd.read_csv(file)
        assert list(table) == list(written)
        numbers = written.select_dtypes("number").columns
        np.testing.assert_allclose(table[numbers].to_numpy(float), written[numbers], rtol=1e-15)
    assert sweep.axes == KEYS
    assert set(sweep.runs) == set(sweep.table["run"][sweep.table["state"] == "done"])
    run = sweep.runs[sweep.table["run"][0]]
    assert run.metrics["kernel_change"].iloc[-1] == sweep.table["kernel_change"][0]
    assert isinstance(run, ntkexp.Run)


def test_a_sweep_is_found_by_its_name_file_or_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent.parent.parent)
    shutil.copytree(path.parent.parent, "outputs", dirs_exist_ok=True)
    found = [ntkexp.load_sweep(place) for place in ("width", path, str(path), path.parent, "outputs")]
    assert {sweep.name for sweep in found} == {"width"}


def test_a_damaged_run_stays_in_the_table_without_numbers(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, axes=KEYS, seeds=(0,))
    damaged = ntkexp.load_sweep(path).table["run"][2]
    (tmp_path / "runs" / damaged / "results.csv").write_text("nonsense")
    row = ntkexp.load_sweep(path).table.iloc[2]
    assert (row["run"], row["state"]) == (damaged, "unreadable")
    assert "damaged" in row["reason"]
    assert np.isnan(row["kernel_change"])


@pytest.mark.parametrize(("name", "panels"), [("errors", 1), ("heat_map", 2), ("over_steps", 2)], ids=str)
def test_pictures_are_drawn_on_new_and_on_given_axes(path: Path, name: str, panels: int) -> None:
    plot = getattr(ntkexp.load_sweep(path).plot, name)
    assert np.size(plot()) == panels
    figure = Figure(layout="constrained")
    axes = np.atleast_1d(np.array(plot(ax=figure.subplots(), title="Mine", style={"font.size": 11}), dtype=object))
    assert len(axes) == panels
    assert all(part.get_figure(root=True) is figure for part in axes)
    figure.canvas.draw()
    titles = [axes[0].get_title(), *(part.get_suptitle() for part in figure.subfigs)]
    assert "Mine" in titles


def test_the_key_and_the_quantity_can_be_chosen(path: Path) -> None:
    sweep = ntkexp.load_sweep(path)
    errors = sweep.plot.errors("model.activation", split="test")
    assert not isinstance(errors, list)
    assert (errors.get_xlabel(), errors.get_ylabel()) == ("model.activation", "relative error (test)")
    cells = sweep.plot.heat_map("loss")
    assert not isinstance(cells, list)
    (image,) = cells.get_images()
    means = sweep.table.groupby(["model.activation", "model.width"], sort=False)["loss"].mean()
    np.testing.assert_allclose(np.asarray(image.get_array()).flatten(), means, rtol=1e-12)


def test_a_law_has_its_picture(tmp_path: Path) -> None:
    sweep = ntkexp.load_sweep(write_sweep(tmp_path))
    for number, quantity in enumerate(sweep.fits["quantity"], start=1):
        axes = sweep.plot.laws(number)
        assert not isinstance(axes, list)
        means = sweep.table.groupby("model.width")[quantity].mean()
        assert any(np.array_equal(line.get_ydata(), means) for line in axes.get_lines())
    with pytest.raises(WrongArgument, match="number=3: the sweep fits 2 laws"):
        sweep.plot.laws(3)
    with pytest.raises(Mistake, match=r"width has no picture 'heat_map': it sweeps model\.width"):
        sweep.plot.heat_map()


def test_other_places_and_names_are_refused(path: Path, tmp_path: Path) -> None:
    sweep = ntkexp.load_sweep(path)
    with pytest.raises(WrongArgument, match=r"key: 'model\.widht' is none of .*; did you mean 'model\.width'"):
        sweep.plot.errors("model.widht")
    with pytest.raises(WrongArgument, match=r"quantity: 'kernel_chang' is none of .*; did you mean 'kernel_change'"):
        sweep.plot.heat_map("kernel_chang")
    with pytest.raises(Mistake, match="there is no sweep"):
        ntkexp.load_sweep(tmp_path)
    with pytest.raises(Mistake, match="is a run; read it with `load_run`"):
        ntkexp.load_sweep(next(iter(sweep.runs.values())).path)
    write_sweep(tmp_path, "one", seeds=(0,))
    write_sweep(tmp_path, "two", seeds=(0,))
    with pytest.raises(Mistake, match="several sweeps, one and two; give the file of one"):
        ntkexp.load_sweep(tmp_path)
