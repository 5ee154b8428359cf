"""The schemas of the files in a run folder.

A run folder may come from an untrusted source. Its digests (seals) show that files are
unchanged, but not that a run wrote them. So readers validate files against these
schemas, and raise if a file does not have the format that runs write.

    JSON files                    a pydantic model each
    metrics.csv, retraced.csv     `refuse_odd_metrics`
    results.csv, timings.csv      a pydantic model for their rows
    data.npz and *.zarr           `records.array_schema`

>>> checked({"identity": "ab", "seals": {}}, Begun, Path("BEGUN.json"))
{'identity': 'ab', 'seals': {}}
>>> checked({"identity": 3, "seals": {}}, Begun, Path("BEGUN.json"))
Traceback (most recent call last):
ntkexp.records.atomic.Damaged: BEGUN.json has content that no run writes: identity: Input should be a valid string
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from ntkexp.records.atomic import RUN_AGAIN, Damaged
from ntkexp.text import printable

# --- Values.


MAX_TEXT_LETTERS = 20_000  # maximum length of a text
MAX_CODE_FILES = 10_000  # maximum number of files that define a network
MAX_NAME_LETTERS = 250  # maximum length of the name of a file, a class and so on

Split: TypeAlias = Literal["train", "query", "test"]


def inside(name: str) -> str:
    """Return the relative path `name`. Raise ValueError if it leads out
    of the folder."""
    parts = PurePosixPath(name).parts
    if "\0" in name or name.startswith("/") or ".." in parts or not parts:
        raise ValueError(f"{name!r} is no file inside the folder")
    return name


Words = Annotated[str, Field(strict=True, max_length=MAX_TEXT_LETTERS)]
Text = Annotated[Words, AfterValidator(printable)]
"""A text that is shown to users. Control characters are escaped."""
Name = Annotated[str, Field(strict=True, max_length=MAX_NAME_LETTERS)]
FileName = Annotated[Name, AfterValidator(inside)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**62)]
Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Digest = Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
Yes = Annotated[bool, Field(strict=True)]
Cell = Annotated[float | None, BeforeValidator(lambda cell: cell or None)]
"""A number in a table. An empty cell is None."""


class Record(BaseModel):
    """A JSON object, which may have more keys than the schema."""

    model_config = ConfigDict(extra="allow", frozen=True)


# --- The JSON files of a run folder.


class Begun(Record):
    """The schema of BEGUN.json."""

    identity: Name
    seals: dict[FileName, tuple[Count, Digest]]


class Done(Begun):
    """The schema of DONE.json."""

    sizes: dict[FileName, Count]
    outcome: Text = ""
    diverged: Yes = False
    steps: Count | None = None
    step_size: Number | None = None


class Progress(Record):
    """The schema of progress.json."""

    step: Count
    steps: Count
    diverged: Yes = False


class Provenance(Record):
    """The schema of provenance.json."""

    results_version: Count | None = None
    ntkexp: Text = ""
    command: Text = ""
    threads: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = None
    code: Annotated[list[Digest], Field(max_length=MAX_CODE_FILES)] = []


SEALED_RECORDS: Mapping[str, type[Record]] = {
    "BEGUN.json": Begun,
    "DONE.json": Done,
    "progress.json": Progress,
    "provenance.json": Provenance,
}


class PathSettings(Record):
    queries: Annotated[list[Split], Field(min_length=1, max_length=3)] = [
        "train",
        "query",
        "test",
    ]


class Followed(Record):
    processes: Annotated[int, Field(strict=True, ge=1, le=10**6)]
    optimizers: Annotated[list[Text], Field(min_length=1)]
    measure: Annotated[Text, Field(min_length=1)] | None = None


class Config(Record):
    """The keys of config.json that readers use.

    The keys `run`, `state` and `outcome` must be absent, because a table of runs has
    its own columns with these names."""

    path: PathSettings = PathSettings()
    follow: Followed | None = None
    run: None = None
    state: None = None
    outcome: None = None


class RemovalFacts(Record):
    """The schema of removal/KEY.json."""

    growth: Number
    repeated: Number
    emptied: Count
    seals: dict[FileName, tuple[Count, Digest]]


class SweepRunRecord(Record):
    """The schema of a run in sweeps/NAME.json."""

    folder: Annotated[
        str, Field(strict=True, min_length=1, max_length=4096, pattern=r"^[^\x00]*$")
    ]
    axes: dict[Name, Any]
    seed: Integer
    state: Text
    reason: Text | None = None


class SweepRecord(Record):
    """The schema of sweeps/NAME.json."""

    name: Annotated[Text, Field(min_length=1)]
    command: Text = ""
    axes: dict[Name, list[Any]]
    seeds: list[Integer] = []
    base: list[Text] = []
    fits: list[dict[str, Any]] = []
    runs: Annotated[list[SweepRunRecord], Field(min_length=1)]


Valid = TypeVar("Valid", bound=Record)


def validated(record: Mapping[str, Any], model: type[Valid], path: Path) -> Valid:
    """Validate a record. Raise if it is invalid."""
    try:
        return model.model_validate(record)
    except ValidationError as error:
        raise Damaged(
            f"{path} has content that no run writes: {first_fault(error)}"
        ) from None


def checked(
    record: Mapping[str, Any], model: type[Record], path: Path
) -> dict[str, Any]:
    """Validate a record, and return it with control characters escaped.
    Raise if it is invalid."""
    return validated(record, model, path).model_dump(exclude_none=True)


def checked_config(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """Validate the content of config.json, and return it with control characters
    escaped. Raise if it is invalid."""
    checked(record, Config, path)
    config: dict[str, Any] = printable_texts(record)
    return config


def printable_texts(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): printable_texts(item) for key, item in value.items()}
    return (
        [printable_texts(item) for item in value] if isinstance(value, list) else value
    )


def first_fault(error: ValidationError) -> str:
    """Return the key and the message of the first error that pydantic found."""
    fault = error.errors(include_url=False, include_input=False)[0]
    location = ".".join(str(part)[:60] for part in fault["loc"])
    return f"{location}: {fault['msg']}"


# --- Tables.


LARGEST_TABLE = 1 << 30  # largest size of a table (CSV) in bytes


Row = TypeVar("Row", bound=BaseModel)


def checked_row(cells: Mapping[str, Any], model: type[Row]) -> Row:
    """Validate the cells of a row, and return the row.
    Raise ValueError with the first error."""
    try:
        return model.model_validate(cells)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None


class ResultRow(BaseModel):
    """A row of results.csv."""

    split: Words
    machine: Words
    detail: Words
    relative_error: Cell
    floor: Cell
    max_error: Cell
    agreement: Cell
    r2: Cell
    note: Words
    control: Annotated[bool, BeforeValidator({"True": True, "False": False}.get)]


def checked_seconds(seconds: float) -> float:
    """Return a time in seconds. Raise ValueError if it is negative or infinite. NaN is
    allowed."""
    if seconds < 0 or seconds == math.inf:
        raise ValueError("Input should be a finite number that is not negative")
    return seconds


class TimingRow(BaseModel):
    """A row of timings.csv."""

    what: Text
    seconds: Annotated[float, AfterValidator(checked_seconds)]
    processor: Cell = None


def refuse_odd_metrics(path: Path) -> None:
    """Raise if a table of metrics has no column `step`, has a duplicate column,
    or is too large."""
    size = path.stat().st_size
    if size > LARGEST_TABLE:
        raise Damaged(
            f"{path} has {size} bytes, and tables are read up to {LARGEST_TABLE}; {RUN_AGAIN}"
        )
    with path.open(encoding="utf-8", newline="") as file:
        header = next(csv.reader(file), [])
    if "step" not in header or len(set(header)) < len(header):
        raise Damaged(
            f"{path} is damaged: its columns are not 'step' and others, each once; {RUN_AGAIN}"
        )


# --- zarr.json: the metadata of arrays and stores that `records.kernels` writes.


class Codec(BaseModel):
    name: Literal["bytes"]


class ChunkShape(BaseModel):
    chunk_shape: list[Annotated[int, Field(strict=True, ge=1, lt=2**40)]]


class ChunkGrid(BaseModel):
    name: Literal["regular"]
    configuration: ChunkShape


class ArrayRecord(Record):
    """The zarr.json of an array: uncompressed numbers with named axes."""

    zarr_format: Literal[3]
    node_type: Literal["array"]
    shape: Annotated[
        list[Annotated[int, Field(strict=True, ge=0, lt=2**40)]],
        Field(min_length=1, max_length=8),
    ]
    data_type: Literal["float64", "int64", "bool"]
    chunk_grid: ChunkGrid
    codecs: Annotated[list[Codec], Field(min_length=1, max_length=1)]
    dimension_names: list[Name]
    attributes: dict[str, Any] = {}


class GroupRecord(Record):
    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: dict[str, Any] = {}


# --- The attributes of stores.


class PredictionsAttributes(Record):
    machines: Annotated[list[Name], Field(min_length=2)]


class RecordedAttributes(Record):
    names: list[Words]
    shapes: list[Annotated[list[Count], Field(max_length=32)]]


class ContributionsAttributes(Record):
    example: list[Integer] | list[Name]
    out: Annotated[list[Count], Field(min_length=1)]
    component: list[Name] | None = None
    phases: list[Name] | None = None


class RuleAttributes(Record):
    rule: Annotated[Name, Field(min_length=1)]
    error_bar: Number | None = None
    cancellation: Number | None = None


class EffectAttributes(Record):
    kind: Name | None = None
    mean: Name | None = None
    growth: Number | None = None
