"""Read and write the folder of published claims: tables, pictures,
verdicts and digests.

docs/claims/README.md               a line for each claim
            verdicts.json           [{"name": …, "verdict": …, "figure": …, "interval": [LOW, HIGH],
                                      "control": {…}, "second": {…}, "entry": DIGEST, …}, …]
            <name>/<look>.csv       the judged table of a look (main, second, control if there is one):
                                    the rows and columns that rules read
            <name>/picture.svg      the picture of the claim
            SHA256SUMS              a digest per file, also for `sha256sum -c SHA256SUMS`

`ntkexp.claim.publish` judges the tables. Each file is read only once, so that it cannot
change between the comparison with its digest and the judging."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from xml.etree import ElementTree

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ntkexp.claim.look import CONTROL, MAIN, SECOND
from ntkexp.mistake import Mistake, first_line
from ntkexp.records.atomic import read_bytes, write_atomically
from ntkexp.records.claim import PICTURE
from ntkexp.text import printable, short

VERDICTS_FILE, PAGE, SUMS = "verdicts.json", "README.md", "SHA256SUMS"
TABLES = tuple(f"{look}.csv" for look in (MAIN, CONTROL, SECOND))
ALWAYS = ("runs", "seed", "value", "bound", "reason")
"""Columns that every rule may use."""

# --- The schema of verdicts.json.


STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Verdict = Literal["supported", "refuted", "below minimum", "undecided"]
Probability = Annotated[float, Field(ge=0, le=1)]
Ends = Annotated[list[float | None], Field(min_length=2, max_length=2)]


class PublishedLook(BaseModel):
    """The verdict on one statistical test (look)."""

    model_config = STRICT
    verdict: Verdict
    figure: float | None
    interval: Ends
    p: Probability | None
    more_seeds: Annotated[int, Field(ge=0)] | None
    expected: str
    seeds: list[int]
    draws: str
    note: str


class PublishedVerdict(BaseModel):
    """The verdict on a claim, with the date and version of the judgement."""

    model_config = STRICT
    name: str
    verdict: Verdict | Literal["not replicated"]
    figure: float | None
    interval: Ends
    p: Probability | None
    expected: str
    control: PublishedLook | None
    second: PublishedLook
    main: PublishedLook
    identity: bool = False
    entry: str
    statement: str
    source: str
    command: str
    date: str | None
    version: str
    commit: str | None
    machine: str


ROWS = TypeAdapter(list[PublishedVerdict])


def read_verdicts(folder: Path) -> list[dict[str, Any]]:
    """Read the published verdicts. Raise if they do not match the schema."""
    return parse_verdicts(read_bytes(folder / VERDICTS_FILE), folder)


def parse_verdicts(content: bytes, folder: Path) -> list[dict[str, Any]]:
    file = folder / VERDICTS_FILE
    try:
        rows: list[dict[str, Any]] = json.loads(
            content.decode(), object_pairs_hook=object_of_pairs
        )
        ROWS.validate_python(rows)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise Mistake(f"{file}: {printable(reason)}; {advice(folder)}") from None
    except (ValueError, RecursionError) as error:
        raise Mistake(
            f"{file} is not JSON ({printable(first_line(error))}); {advice(folder)}"
        ) from None
    names = [row["name"] for row in rows]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Mistake(
            f"{file} has two verdicts of {printable(twice)}; {advice(folder)}"
        )
    return rows


def object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from pairs. Raise if a key appears twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a key twice")
    return fields


def advice(folder: Path) -> str:
    return f"restore it, or remove it and write it again by `ntkexp claims publish {folder}`"


# --- Digests.


LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")


def write_digests(folder: Path, files: Iterable[str]) -> None:
    lines = [
        f"{sha256(read_bytes(folder / file)).hexdigest()}  {file}\n"
        for file in sorted(files)
    ]
    write_atomically(folder / SUMS, "".join(lines))


def read_digests(folder: Path) -> dict[str, str]:
    """Read the file SHA256SUMS, and return a mapping from file names to digests."""
    file = folder / SUMS
    if not file.is_file():
        raise Mistake(f"{file} is missing; `ntkexp claims publish {folder}` writes it")
    lines = read_bytes(file).decode(errors="replace").splitlines()
    matches = [LINE.fullmatch(line) for line in lines]
    digests = {match[2]: match[1] for match in matches if match}
    if len(digests) < len(lines):
        raise Mistake(
            f"{file} has a line that is no digest, or two digests of a file; {advice(folder)}"
        )
    return digests


def files_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all files in a folder that publishes these verdicts."""
    claim_files = [
        file for row in rows for file in files_of_claim(row["name"], looks_of(row))
    ]
    return [PAGE, VERDICTS_FILE, *claim_files]


def files_of_claim(name: str, looks: Iterable[str]) -> list[str]:
    """Return the names of a claim's tables and picture; the picture is last."""
    return [*[f"{name}/{look}.csv" for look in looks], f"{name}/{PICTURE}"]


def looks_of(row: Mapping[str, Any]) -> list[str]:
    """Return the looks of a published verdict. A claim may lack a control."""
    return [look for look in (MAIN, CONTROL, SECOND) if row[look] is not None]


def read_files(
    folder: Path, files: Iterable[str], digests: Mapping[str, str]
) -> dict[str, bytes]:
    """Read files. Raise if the digest of a file is missing or does not match."""
    contents = {}
    for file in files:
        if file not in digests:
            raise Mistake(f"{folder / SUMS} has no digest of {file}; {advice(folder)}")
        contents[file] = read_bytes(folder / file)
        if sha256(contents[file]).hexdigest() != digests[file]:
            raise Mistake(
                f"{folder / file} is not as it was published: its digest differs from {SUMS}"
            )
    return contents


def refuse_other_files(
    folder: Path, files: Iterable[str], digests: Mapping[str, str]
) -> None:
    """Raise if the folder or SHA256SUMS has files other than `files`.
    Ignore hidden files."""
    present = {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    visible = {
        str(path)
        for path in present
        if not any(part.startswith(".") for part in path.parts)
    }
    other = sorted({*visible, *digests} - {*files, SUMS})
    if other:
        raise Mistake(
            f"{folder}: {printable(other[0])} is no part of the published claims; remove it"
        )


# --- Tables and pictures.


def read_table(file: Path, content: bytes | None = None) -> pd.DataFrame:
    """Read a judged table. Only empty cells become NaN;
    words such as `none` stay strings."""
    try:
        source = file if content is None else BytesIO(content)
        return pd.read_csv(source, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise Mistake(
            f"{file} cannot be read as a table ({printable(first_line(error))})"
        ) from error


def refuse_odd_table(table: pd.DataFrame, columns: Iterable[str], file: Path) -> None:
    """Raise if a table lacks `seed` or `value`,
    has a column that no rule reads, or holds words.

    The rules of the look read `columns`. The columns `seed`,
    `value` and `bound` must be numeric."""

    def refuse(reason: str) -> NoReturn:
        raise Mistake(f"{file}: {printable(reason)}")

    for column in ("seed", "value"):
        if column not in table:
            refuse(f"it has no column {column}")
    known = {*ALWAYS, *columns}
    if other := next((str(name) for name in table if name not in known), None):
        refuse(f"the column {other} decides nothing")
    for column in {"value", "bound"} & {*table}:
        if table[column].dtype.kind not in "fiu" and table[column].notna().any():
            refuse(f"{column} holds words")
    if table["seed"].dtype.kind not in "iu":
        refuse("seed holds other than whole numbers")
    if (table["value"].abs() == float("inf")).any():
        refuse(f"value holds {short(float('inf'))}")


SHAPES = frozenset(
    "svg g defs clipPath rect path use text tspan title style image".split()  # noqa: SIM905
)
ABOUT = frozenset(
    {"metadata", "RDF", "Work", "type", "format", "date", "creator", "Agent"}
)
URL = re.compile(r"url\(\s*(?!['\"]?#)|@import|javascript:", re.IGNORECASE)


def refuse_active_picture(content: bytes, file: Path) -> None:
    """Raise if an SVG could run a script or load a file.

    Only shapes, texts, embedded PNG images and metadata are allowed.
    """
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError) as error:
        raise Mistake(
            f"{file} is not an SVG picture ({printable(first_line(error))})"
        ) from error
    if b"<!ENTITY" in content or b"<?xml-" in content:
        raise Mistake(
            f"{file} has an entity or a style sheet, which no picture of a claim has"
        )
    for element in root.iter():
        tag = str(element.tag).rpartition("}")[2]
        if tag not in SHAPES | ABOUT:
            raise Mistake(
                f"{file} has an element {printable(tag)}, which no picture of a claim has"
            )
        for key, value in element.attrib.items():
            name = key.rpartition("}")[2].lower()
            loads = name == "href" and not value.startswith(("#", "data:image/png;"))
            if name.startswith("on") or loads or URL.search(value):
                raise Mistake(
                    f"{file} has an attribute {printable(name)}, which can run or load more"
                )
        if tag == "style" and URL.search(element.text or ""):
            raise Mistake(f"{file} has a style that loads more")
