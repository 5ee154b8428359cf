"""The benchmark runs, and prints its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.bench.__main__ import CELLS, REPORTS, main
from tests.bench.asked import parse
from tests.bench.figures import beside, keep, kept, shown


@pytest.mark.slow
def test_the_quick_benchmark_prints_its_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    main(["--quick", "--threads=1", f"--plot={tmp_path / 'cost.svg'}", f"--cells={tmp_path / 'cells'}"])
    torch.set_num_threads(threads)
    titles = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert [title.split()[0] for title in titles] == [
        "torch",
        "Tangent",
        "A",
        "A",
        "Kernels",
        "Whole",
        "A",
        "Adam,",
        "Engine:",
        "Reading",
        "Sketches",
        "Language:",
        "Precision:",
        "Scale:",
        "Following:",
        *["Attribution,"] * 3,
        "Shares",
    ]
    assert (tmp_path / "cost.svg").read_text("utf-8").count("snapshots") >= 3


def test_a_table_without_cells_is_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    main(["sketch", "--quick", "--threads=1", "--json"])
    torch.set_num_threads(threads)
    told = json.loads(capsys.readouterr().out)
    (table,) = told["tables"]
    assert [len(row) for row in table["rows"]] == [len(table["header"])]
    assert table["rows"][0][:3] == ["mlp", 1, 64]
    assert told["cells"] == told["compared"] == []


def test_figures_are_held_against_the_last_of_as_many_threads(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    first = [{"name": "a", "products": 1.0}, {"name": "b", "products": 1.0}]
    assert "--tag" in shown(beside(first, 1, file), 2, 1)
    keep(first, 1, "May", file)
    keep([{"name": "b", "products": 4.0}], 1, "June", file)
    assert {name: each["tag"] for name, each in kept(file)["1"].items()} == {"a": "May", "b": "June"}
    now = [{"name": "a", "products": 2.0}, {"name": "b", "products": 2.0}, {"name": "c", "products": 2.0}]
    assert [(each.tag, each.ratio) for each in beside(now, 1, file)] == [("May", 2.0), ("June", 0.5)]
    assert beside(now, 2, file) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nosuch", "choose from"),
        ("steps --threads=0", "--threads"),
        ("kernels --seconds=-1", "--seconds"),
        ("steps --quick --tag=now", "leave out --quick"),
        ("sketch --tag=now", "--tag is for kernels"),
        ("kernels --only=stride", "--only is for infinite"),
        ("infinite --only=nosuch", "no row"),
        ("reading --plot=/no/such/folder/cost.svg", "is no folder"),
        ("steps --peers=/tmp", "--peers is for"),
    ],
)
def test_what_would_be_measured_in_vain_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words.split(), (*CELLS, *REPORTS), tuple(CELLS))
    assert said in capsys.readouterr().err.splitlines()[-1]
