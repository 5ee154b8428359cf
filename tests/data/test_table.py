"""Tables of users: columns that are read, and the words that refuse the others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.images import Digits
from ntkexp.data.table import BreastCancer, Table, Wine, read_bundled
from ntkexp.mistake import Mistake

Refusal = Callable[[AbstractSource], str]
Written = Callable[..., Path]
GOOD = "size,rooms,garden,price\n50,2,true,100.5\n70,3,FALSE,150\n\n90,4,true,200.25\n60,2,false,120\n80,4,true,170\n"


def table(path: Path, target: str | int = "price", **fields: object) -> Table:
    """Return a table with three training rows."""
    return Table.model_validate({"path": path, "target": target, "train": 3, "query": 1} | fields)


def read(source: Table) -> Examples:
    """All examples, in the order of the file."""
    return source.examples(torch.Generator())


def test_numbers_and_truth_values_are_features(written: Written) -> None:
    examples = read(table(written(GOOD)))
    assert examples.inputs.tolist() == [[50, 2, 1], [70, 3, 0], [90, 4, 1], [60, 2, 0], [80, 4, 1]]
    assert examples.target.tolist() == [[100.5], [150], [200.25], [120], [170]]
    assert examples.classes == ()


def test_the_reading_agrees_with_pandas(written: Written) -> None:
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 3)), columns=["a", "b", "c"])
    examples = read(table(written(frame.to_csv(index=False)), target="b"))
    assert np.array_equal(examples.inputs.numpy(), frame[["a", "c"]].to_numpy())
    assert np.array_equal(examples.target.numpy(), frame[["b"]].to_numpy())


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (["b", "a", "b", "a"], ("a", "b")),
        (["True", "false", "FALSE", "true"], ("false", "true")),
        (["10", "9", "10", "-1"], ("-1", "9", "10")),
        (["1.0", "0.0", "0", "1"], ("0", "1")),
        (["<=50K", ">50K", ">50K", "<=50K"], ("<=50K", ">50K")),
    ],
)
def test_texts_truth_values_and_few_whole_numbers_are_classes(
    cells: list[str], classes: tuple[str, ...], written: Written
) -> None:
    text = "x,y\n" + "".join(f"{k},{cell}\n" for k, cell in enumerate(cells))
    examples = read(table(written(text), target="y"))
    assert examples.classes == classes
    assert examples.target.dtype == torch.int64
    named = [classes[label] for label in examples.target.tolist()]
    assert [name.lower() for name in named] == [cell.lower().removesuffix(".0") for cell in cells]


@pytest.mark.parametrize(("different", "classes"), [(20, 20), (21, 0)])
def test_twenty_whole_numbers_are_classes_and_more_are_real(different: int, classes: int, written: Written) -> None:
    text = "x,y\n" + "".join(f"{k},{k % different}\n" for k in range(60))
    assert len(read(table(written(text), target="y")).classes) == classes


def test_parquet_and_csv_are_the_same_data(written: Written, tmp_path: Path) -> None:
    frame = pd.read_csv(written(GOOD))
    frame.to_parquet(tmp_path / "table.PARQUET", index=False)
    one, other = read(table(tmp_path / "table.csv")), read(table(tmp_path / "table.PARQUET"))
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.target, other.target)


def test_quoted_cells_blanks_line_ends_and_a_byte_order_mark_do_no_harm(written: Written) -> None:
    text = '\ufeff"size, net", rooms\r\n "1",2.5\r\n2 , 3.5\r\n'
    examples = read(table(written(text), target="rooms"))
    assert examples.inputs.tolist() == [[1], [2]]
    assert read(table(written(text), target="size, net")).classes == ("1", "2")


GAPS = "a,b,y\n1,10,0\n,20,1\n3,x,0\n5,40,1\n7,60,0\n9,inf,1\n"


def test_drop_takes_the_rows_without_gaps(written: Written) -> None:
    examples = read(table(written(GAPS), target="y", missing="drop"))
    assert examples.inputs.tolist() == [[1, 10], [5, 40], [7, 60]]
    assert examples.target.tolist() == [0, 1, 0]


@pytest.mark.parametrize("seed", range(8))
def test_mean_fills_with_the_mean_of_the_training_rows(seed: int, written: Written) -> None:
    data = table(written(GAPS), target="y", missing="mean", train=4, seed=seed).split()
    raw = torch.tensor([[1, 10], [torch.nan, 20], [3, torch.nan], [5, 40], [7, 60], [9, torch.nan]]).double()
    mean = raw[data.train.index].nanmean(0)
    for split in (data.train, data.query, data.test):
        expected = torch.where(raw[split.index].isnan(), mean, raw[split.index])
        assert torch.equal(split.shown, expected)


@pytest.mark.parametrize("cell", ["", "NA", "nan", "?", "null", "N/A"])
@pytest.mark.parametrize("missing", ["refuse", "drop", "mean"])
def test_a_missing_target_is_refused_whatever_is_said_of_features(
    cell: str, missing: str, written: Written, refusal: Refusal
) -> None:
    text = f"x,y\n1,0.5\n,{cell}\n3,1.5\n"
    assert "line 3, column 'y'" in refusal(table(written(text), target="y", missing=missing))


@pytest.mark.parametrize("missing", ["refuse", "drop", "mean"])
@pytest.mark.parametrize("cell", ["12x", "inf", "1_000", "1e999"])
def test_a_target_that_is_no_number_among_numbers_is_refused(
    cell: str, missing: str, written: Written, refusal: Refusal
) -> None:
    line = refusal(table(written(f"x,y\n1,0.5\n2,2\n3,{cell}\n"), target="y", missing=missing))
    assert f"line 4, column 'y' is '{cell}'" in line


MANY = "".join(f"{k},name{k}\n" for k in range(30))
BAD: dict[str, tuple[str, str]] = {
    "an empty file": ("", "is empty"),
    "empty lines": ("\n\n", "is empty"),
    "a header alone": ("a,y\n", "no rows"),
    "a target without a cell": ("a,y\n1,0.5\n2,\n", "line 3, column 'y' is '': the target is missing"),
    "a single column": ("y\n1\n2\n", "single column"),
    "no such column": ("a,yy\n1,2\n", "did you mean 'yy'?"),
    "the same name twice": ("a,y,a\n1,2,3\n", "more than one column 'a'"),
    "a nameless column": (",a,y\n0,1,2\n", "column 1 has no name"),
    "semicolons": ("a;y\n1;2\n", "';'"),
    "tabs": ("a\ty\n1\t2\n", "'\\t'"),
    "a row too short": ("a,y\n1,2\n3\n", "line 3: 1 cells, and the header has 2"),
    "a row too long": ("a,y\n1,2,3\n", "line 2: 3 cells"),
    "an open quotation mark": ('a,y\n1,2\n"3,4\n5,6\n', "line 3"),
    "a quotation mark inside": ('a,y\n"1"2,2\n', "line 2"),
    "text": ("city,y\nParis,1\nRome,0\n", "line 2, column 'city' is 'Paris'"),
    "text with a line break": ('"ci\nty",y\n"Pa\nris",1\nRome,0\n', "column 'ci\\nty' is 'Pa\\nris'"),
    "an empty column": ("a,b,y\n1,,0\n2,,1\n", "column 'b' is ''"),
    "a date": ("day,y\n2024-01-01,1\n2024-01-02,0\n", "'2024-01-01'"),
    "too many texts": (f"a,y\n{MANY}", "30 different texts"),
    "one class": ("a,y\n1,c\n2,c\n3,c\n4,c\n", "same target"),
    "too few rows": ("a,y\n1,c\n2,d\n", "there are 2"),
    "a number among texts": ("x,y\n1,cat\n2,7\n3,dog\n", "line 3, column 'y' is '7'"),
    "a row too long after a name of two lines": ('x,"the\nname",y\n1,2,0.5\n\n"2",\n', "line 5: 2 cells"),
    "a text after cells of two lines": ('"x\n",y\n"1\n",0.5\n\n2,oops\n3,1.5\n4,2\n', "line 6, column 'y'"),
}


SPARSE = "a,b,y\n" + "".join(f"{k},{1 if k == 59 else ''},{k % 2}\n" for k in range(60))


@pytest.mark.parametrize(
    ("text", "missing", "words"),
    [
        (GAPS, "refuse", ("line 3, column 'a' is ''", "data.missing=drop")),
        ("a,b,y\n1,,0\n,2,1\n", "drop", ("data.missing=drop",)),  # every row has a gap
        (SPARSE, "mean", ("feature 2",)),  # the only value is outside of the training split
    ],
    ids=["gaps", "gaps in every row", "no value in training"],
)
def test_gaps_that_cannot_be_filled_are_refused(
    text: str, missing: str, words: tuple[str, ...], written: Written, refusal: Refusal
) -> None:
    line = refusal(table(written(text), target="y", missing=missing))
    assert all(word in line for word in words)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("missing", ["refuse", "mean"])
def test_bad_tables_are_refused_in_one_line(kind: str, missing: str, written: Written, refusal: Refusal) -> None:
    text, said = BAD[kind]
    assert said in refusal(table(written(text), target="y", missing=missing))


def test_long_lists_and_cells_are_shortened(written: Written, refusal: Refusal) -> None:
    names = [f"column{k}" for k in range(500)]
    line = refusal(table(written(",".join(names) + "\n" + ",".join("1" * 500) + "\n"), target="colunm7"))
    assert "did you mean 'column7'?" in line
    assert len(line) < 500
    assert len(refusal(table(written("a,y\n" + "x" * 10000 + ",1\n"), target="y"))) < 500


def test_another_encoding_is_refused_by_line(tmp_path: Path, refusal: Refusal) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("a,y\n1,2\n3,café\n".encode("latin-1"))
    assert "line 3: byte 0xe9" in refusal(table(path, target="y"))
    path.write_bytes("a,y\n1,2\n".encode("utf-16"))
    assert "UTF-8" in refusal(table(path, target="y"))


@pytest.mark.parametrize("place", ["", "no/such/folder.csv", "line\nbreak.csv", "null\0byte.csv", "x" * 300 + ".csv"])
def test_paths_that_lead_nowhere_are_refused(place: str, tmp_path: Path, refusal: Refusal) -> None:
    assert "data.path=" in refusal(table(tmp_path / place))


@pytest.mark.parametrize("ending", ["table.xlsx", "table", "table.csv.gz", "t.parquet"])
def test_other_endings_are_refused(ending: str, written: Written, refusal: Refusal) -> None:
    words = "not a Parquet file" if ending == "t.parquet" else ".csv or .parquet"
    assert words in refusal(table(written(GOOD, ending)))


@pytest.mark.parametrize(
    ("names", "column", "words"),
    [
        (["a", "a", "y"], [1.0, 2.0], "more than one column 'a'"),
        (["nested", "y"], [[1], [2]], "row 1, column 'nested'"),
        (["day", "y"], pd.to_datetime(["2024-01-01", "2024-01-02"]), "row 1, column 'day'"),
        (["x", "y"], [1.0, None], "row 2, column 'x'"),
    ],
)
def test_parquet_columns_that_cannot_be_learned_from_are_refused(
    names: list[str], column: Any, words: str, tmp_path: Path, refusal: Refusal
) -> None:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    columns = [arrow.array(column, from_pandas=False)] * (len(names) - 1)
    parquet.write_table(arrow.table([*columns, arrow.array([0.5, 1.5])], names=names), tmp_path / "t.parquet")
    assert words in refusal(table(tmp_path / "t.parquet", target="y"))


@given(st.binary(max_size=60) | st.text('01a,.\n\r"\0 é-', max_size=60).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # every example writes the file
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,y\n" + raw)
    try:
        said, finite = "read", bool(read(table(tmp_path / "t.csv", target="y")).inputs.isfinite().all())
    except Mistake as mistake:
        said, finite = str(mistake), True
    assert finite
    assert len(said.splitlines()) == 1


def test_without_pyarrow_it_is_said_how_to_get_it(
    written: Written, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refusal(table(written(GOOD, "t.parquet")))


def test_a_file_that_may_not_be_read_is_refused(
    written: Written, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(GOOD)

    def denied(path: Path, mode: str) -> bytes:
        raise PermissionError(13, os.strerror(13), str(path))

    # the tests may run as root, who may read everything
    monkeypatch.setattr(Path, "open", denied)
    assert "cannot be read: Permission denied" in refusal(table(path))


def test_the_file_belongs_to_the_identity_of_a_run(written: Written) -> None:
    path = written(GOOD)
    assert table(path).files() == (path,)
    assert table(path).fields()["path"] == str(path)


def test_a_column_may_be_called_by_a_number(written: Written) -> None:
    assert read(table(written("1,2\n0.5,1.5\n"), target=2)).target.tolist() == [[1.5]]


def test_a_missing_file_is_answered_with_files_of_its_kind_alone(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("mode.md", "data.csv", "irises.csv"):
        (tmp_path / name).touch()
    assert "did you mean" not in refusal(Table(path=tmp_path / "nope.csv", target="y"))
    assert "did you mean 'irises.csv'?" in refusal(Table(path=tmp_path / "irisis.csv", target="y"))


# The data sets that come with the package are those that others load under their names, bit by bit.


def load(name: str, **options: Any) -> Any:
    """Return the data that scikit-learn loads."""
    from sklearn import datasets  # noqa: PLC0415  slow to import where tests are only collected

    return getattr(datasets, f"load_{name}")(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("breast_cancer", {}), ("diabetes", {"scaled": False}), ("digits", {}), ("wine", {})]
)
def test_the_numbers_are_those_of_scikit_learn(name: str, options: dict[str, bool]) -> None:
    inputs, target = read_bundled(name)
    their_inputs, their_target = load(name, return_X_y=True, **options)
    assert np.array_equal(inputs.numpy(), their_inputs)
    assert np.array_equal(target.numpy(), their_target)


def test_clothes_are_as_many_of_each_kind_and_no_two_alike() -> None:
    greys, kinds = read_bundled("clothes")
    assert torch.equal(torch.bincount(kinds.long()), torch.full((10,), 180))
    assert torch.equal(greys, greys.round())
    assert greys.min() == 0
    assert greys.max() == 16
    assert len(np.unique(greys.numpy(), axis=0)) == 1800


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "name"), [(BreastCancer(), "breast_cancer"), (Wine(), "wine"), (Digits(classes="all"), "digits")]
)
def test_classes_have_their_names(source: BreastCancer | Wine | Digits, name: str) -> None:
    assert source.split().classes == tuple(str(each) for each in load(name).target_names)
