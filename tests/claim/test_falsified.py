"""No falsified publication is certified, even if its digests match its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import yaml

from ntkexp.claim.conduct import circumstances, plan_claim, register_claim
from ntkexp.claim.publication import PAGE, SUMS, VERDICTS_FILE, files_of, write_digests
from ntkexp.claim.publish import check, publish, published_record
from ntkexp.claim.read import read_claim
from ntkexp.claim.verdicts_page import page
from ntkexp.cli.claims import registered
from ntkexp.config.compose import Composer
from ntkexp.mistake import Mistake
from ntkexp.records.claim import claim_records
from ntkexp.records.register import RegisterEntry
from ntkexp.report.claims import ClaimFamily
from tests.claim.subject import OF_LINES, judged
from tests.claim.test_register import written

TREE = OF_LINES | {"null": 0, "control": {"trial": {"slope": 0.0}}}
LOOKS = ("main", "control", "second")

Falsify: TypeAlias = Callable[[Path], object]


class Published(NamedTuple):
    """A publication of two claims."""

    folder: Path
    made: Composer
    entries: dict[str, list[RegisterEntry]]

    def check(self, folder: Path, *names: str) -> list[str]:
        return check(folder, self.made, self.entries, ("tests",), names)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    home = tmp_path_factory.mktemp("claims")
    written(home, TREE)
    (home / "claim" / "other.yaml").write_text(yaml.safe_dump(TREE | {"statement": "It falls as 1/width."}))
    made, out = written(home, TREE), home / "out" / "claims"
    for name in ("other", "tiny"):
        register = register_claim(name, made.builder, out)
        register.record(judged(plan_claim(read_claim(name, made.builder), made, out, ("tests",))), circumstances())
    entries = {name: registered(made.builder.choices, out)[name] for name in ("other", "tiny")}
    publish(home / "docs", made, claim_records(out), entries, ("tests",))
    return Published(home / "docs", made, entries)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / VERDICTS_FILE).read_text())
    return rows


def write_rows(rows: object, folder: Path) -> None:
    (folder / VERDICTS_FILE).write_text(json.dumps(rows))


def set_field(folder: Path, *path: str, to: Any = None) -> None:
    """Change a field of the last verdict, to a value or by a function."""
    rows = rows_of(folder)
    place = rows[-1]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to(place.get(path[-1])) if callable(to) else to
    write_rows(rows, folder)


def set_both(folder: Path, key: str, to: Callable[[Any], Any]) -> None:
    """Change a field of the headline and of the main look."""
    set_field(folder, key, to=to)
    set_field(folder, "main", key, to=to)


def write_page(folder: Path) -> None:
    """Write the page of the changed verdicts."""
    shown = [published_record(folder, row) for row in rows_of(folder)]
    (folder / PAGE).write_text(page(shown, ClaimFamily(2)))


def replace_text(folder: Path, file: str, old: str, new: str) -> None:
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))


def set_cell(folder: Path, look: str, row: int, column: int, to: Callable[[str], str]) -> None:
    """Change a cell of a table; row 0 is the header, column −1 the value."""
    file = folder / "tiny" / f"{look}.csv"
    lines = [line.split(",") for line in file.read_text().splitlines()]
    lines[row][column] = to(lines[row][column])
    file.write_text("".join(",".join(line) + "\n" for line in lines))


def times(factor: float) -> Callable[[Any], Any]:
    def scaled(value: Any) -> Any:
        if isinstance(value, list):
            return [scaled(one) for one in value]
        return factor * value

    return scaled


def cell_times(factor: float) -> Callable[[str], str]:
    return lambda cell: repr(factor * float(cell))


def remove_claim(folder: Path) -> None:
    """Remove a claim, its folder and its line on the page."""
    write_rows(rows_of(folder)[1:], folder)
    shutil.rmtree(folder / "other")
    write_page(folder)


def replace_file(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)


def change_lines(folder: Path, look: str, change: Callable[[list[str]], list[str]]) -> None:
    file = folder / "tiny" / f"{look}.csv"
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")


def case(name: str, falsify: Callable[..., object], *arguments: Any, reason: str = "", **more: Any) -> Any:
    return pytest.param(lambda folder: falsify(folder, *arguments, **more), reason, id=name)


def other_words(words: str) -> str:
    return {"supported": "refuted"}.get(words, "supported")


def other_value(key: str) -> Any:
    """Return another valid value."""
    changes = {
        **dict.fromkeys(("figure", "interval", "p"), times(1.1)),
        "verdict": other_words,
        "more_seeds": 3,
        "seeds": lambda seeds: seeds[:-1],
    }
    return changes.get(key, lambda words: f"{words} or so")


HEADLINE = ("verdict", "figure", "interval", "p", "expected", "statement", "source", "command", "entry", "name")
ON_RECORD = ("date", "version", "commit")
OF_LOOK = ("verdict", "figure", "interval", "p", "more_seeds", "expected", "seeds", "draws", "note")


def fields() -> Iterator[Any]:
    for key in (*HEADLINE, *ON_RECORD):
        yield case(f"headline-{key}", set_field, key, to=other_value(key))
    for look in LOOKS:
        for key in OF_LOOK:
            yield case(f"{look}-{key}", set_field, look, key, to=other_value(key))
    for key in ("figure", "interval", "p", "expected"):
        yield case(f"both-{key}", set_both, key, other_value(key), reason=f"main has the {key}")
    for end in (0, 1):
        moved = partial(lambda place, ends: [*ends[:place], ends[place] + 1e-3, *ends[place + 1 :]], end)
        yield case(f"end-{end}", set_both, "interval", moved, reason="main has the interval")
    yield case("no-figure", set_both, "figure", lambda _: None, reason="main has the figure None")
    yield case("no-p", set_both, "p", lambda _: None, reason="main has the p None")
    yield case("one-of-two", remove_claim, reason="lacks 1 claim that must be there, such as other")


def cells() -> Iterator[Any]:
    """Each seed has rows for the widths 1, 2 and 4. The slope depends on the first and the last."""
    for look in LOOKS:
        for row in (1, 3, 4, 6, 7, 9, 10, 12):
            yield case(f"cell-{look}-{row}", set_cell, look, row, -1, cell_times(1.1), reason="and its table says")
        yield case(f"width-{look}", set_cell, look, 1, 1, cell_times(3.0), reason="and its table says")
        yield case(f"seed-{look}", set_cell, look, 2, 2, lambda _: "17", reason="seeds that the claim did not plan")
        yield case(f"shorter-{look}", change_lines, look, lambda lines: lines[:-1])
        yield case(f"longer-{look}", change_lines, look, lambda lines: [*lines, lines[-1].replace(".", ".9")])
        yield case(
            f"a-seed-{look}", change_lines, look, lambda lines: lines[:-3], reason="seeds that the claim did not"
        )


def malformed_verdicts() -> Iterator[Any]:
    for name, content in {
        "no-claims": b"[]",
        "object": b"{}",
        "null": b"null",
        "number": b"1",
        "text": b'"supported"',
        "list-of-lists": b"[[]]",
        "row-without-fields": b"[{}]",
        "cut": b'[{"name": "tiny"',
        "empty": b"",
        "no-utf8": b"[\xff]",
        "marked": b"\xef\xbb\xbf[]",
        "deep": b"[" * 100_000,
        "long-number": b"[" + b"9" * 10_000 + b"]",
        "key-twice": b'[{"name": "a", "name": "b"}]',
    }.items():
        yield case(f"verdicts-{name}", replace_file, VERDICTS_FILE, content, reason=VERDICTS_FILE)
    for name, path, value in (
        ("words-for-a-figure", ("figure",), "0.5"),
        ("yes-for-a-figure", ("figure",), True),
        ("no-number", ("figure",), float("nan")),
        ("endless", ("main", "figure"), float("inf")),
        ("p-of-two", ("p",), 2.0),
        ("three-ends", ("interval",), [0.0, 1.0, 2.0]),
        ("half-a-seed", ("main", "seeds"), [0.5]),
        ("other-verdict", ("main", "verdict"), "proved"),
        ("a-look-of-words", ("main",), "supported"),
        ("another-field", ("stars",), 5),
        ("escape", ("\x1b[31mred",), 5),
        ("half-a-letter", ("statement",), "\ud800"),
        ("words-for-seeds", ("second", "seeds"), "0, 1"),
    ):
        yield case(f"verdicts-{name}", set_field, *path, to=lambda *_, value=value: value, reason=VERDICTS_FILE)
    yield case("verdicts-path", set_field, "name", to="../tiny", reason="is not a claim of the register")
    yield case("verdicts-twice", lambda folder: write_rows([*rows_of(folder), rows_of(folder)[-1]], folder))
    yield case("verdicts-order", lambda folder: write_rows(rows_of(folder)[::-1], folder), reason="order of names")
    yield case(
        "verdicts-less-a-field",
        lambda folder: write_rows([{k: v for k, v in row.items() if k != "p"} for row in rows_of(folder)], folder),
        reason="p: Field required",
    )


def malformed_tables() -> Iterator[Any]:
    file = "tiny/main.csv"
    for name, content in {
        "empty": b"",
        "header-alone": b"runs,width,seed,value\n",
        "no-utf8": b"runs,width,seed,value\ntrial,\xff,0,1\n",
        "nul": b"runs,width,seed,value\n\x00\x00\x00\n",
        "ragged": b"runs,width,seed,value\ntrial,1\ntrial,1,2,3,4,5\n",
        "picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    }.items():
        yield case(f"table-{name}", replace_file, file, content, reason="main.csv")
    for column, name in ((2, "seed"), (3, "value"), (1, "width")):
        yield case(f"table-no-{name}", set_cell, "main", 0, column, lambda _: "mass", reason="main.csv")
    for word in ("many", "inf", "-inf", "1e999", "", "1e308"):
        yield case(f"table-value-{word}", set_cell, "main", 3, -1, lambda _, word=word: word)
    yield case("table-seed-words", set_cell, "main", 3, 2, lambda _: "first", reason="seed holds other than whole")
    yield case("table-seed-half", set_cell, "main", 3, 2, lambda _: "0.5", reason="seed holds other than whole")
    yield case("table-width-words", set_cell, "main", 3, 1, lambda _: "wide")
    yield case("table-width-negative", set_cell, "main", 3, 1, lambda _: "-2")
    yield case("table-missing", lambda folder: (folder / file).unlink(), reason="main.csv")
    yield case("table-is-a-folder", lambda folder: ((folder / file).unlink(), (folder / file).mkdir()), reason="main")


SCRIPTS = {
    "script": "<script>alert(1)</script>",
    "onload": '<g onload="alert(1)"/>',
    "foreign": "<foreignObject><body/></foreignObject>",
    "link": '<a href="https://example.org">x</a>',
    "image": '<image href="https://example.org/x.png"/>',
    "use": '<use xlink:href="https://example.org/x.svg#y"/>',
    "metadata": (
        '<metadata><cc:script xmlns:cc="http://www.w3.org/2000/svg" xmlns:rdf="http://www.w3.org/1999/xlink" '
        'rdf:href="https://example.org/x.js"/></metadata>'
    ),
    "style": "<style>@import url(https://example.org/x.css);</style>",
    "fill": '<path style="fill: url(https://example.org/x.svg#y)"/>',
}


def pictures_and_page() -> Iterator[Any]:
    for name, words in SCRIPTS.items():
        yield case(
            f"picture-{name}", replace_text, "tiny/picture.svg", "</svg>", f"{words}</svg>", reason="picture.svg"
        )
    yield case("picture-sheet", replace_text, "tiny/picture.svg", "<svg", '<?xml-stylesheet href="x.css"?><svg')
    yield case("picture-empty", replace_file, "tiny/picture.svg", b"", reason="is not a plain picture")
    yield case("picture-missing", lambda folder: (folder / "tiny" / "picture.svg").unlink(), reason="picture.svg")
    yield case("page-words", replace_text, PAGE, "refuted", "supported", reason="is not the page of these verdicts")
    yield case("page-less", replace_text, PAGE, "2 claims", "200 claims", reason="is not the page of these verdicts")
    yield case("page-empty", replace_file, PAGE, b"", reason="is not the page of these verdicts")
    yield case("another-file", replace_file, "index.html", b"<p>supported", reason="index.html is no part")
    yield case("another-table", replace_file, "tiny/third.csv", b"seed,value\n", reason="third.csv is no part")


FORGED = [*fields(), *cells(), *malformed_verdicts(), *malformed_tables(), *pictures_and_page()]
"""Falsifications with new digests."""


def few(cases: list[Any], every: int) -> list[Any]:
    """Mark all cases except every n-th as slow."""
    slow = pytest.mark.slow
    return [one if k % every == 0 else pytest.param(*one.values, id=one.id, marks=slow) for k, one in enumerate(cases)]


def refused(published: Published, tmp_path: Path, falsify: Falsify, *, forge: bool) -> str:
    """Falsify a copy. Return the line that refuses it."""
    folder = shutil.copytree(published.folder, tmp_path / "docs")
    falsify(folder)
    if forge:
        files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        write_digests(folder, [file for file in files if file != SUMS])
    with pytest.raises(Mistake) as caught:
        published.check(folder)
    (line,) = str(caught.value).splitlines()
    assert line.isprintable()
    return line


def test_there_are_enough_falsifications() -> None:
    assert len(FORGED) >= 100


def test_a_publication_is_certified(published: Published) -> None:
    assert published.check(published.folder) == ["other", "tiny"]
    assert sorted(files_of(rows_of(published.folder))) == sorted(
        str(path.relative_to(published.folder)) for path in published.folder.rglob("*.*")
    )


@pytest.mark.parametrize(("falsify", "reason"), few(FORGED, 10))
def test_a_falsified_publication_with_digests_of_its_own_is_refused(
    published: Published, tmp_path: Path, falsify: Falsify, reason: str
) -> None:
    assert reason in refused(published, tmp_path, falsify, forge=True)


UNFORGED = [
    *(pytest.param(one.values[0], "", id=one.id) for one in FORGED[::6]),
    *(case(f"cell-main-{row}", set_cell, "main", row, -1, cell_times(1.1)) for row in (2, 5)),
    case("machine", set_field, "machine", to="a larger one", reason="verdicts.json is not as it was published"),
    case(
        "picture-line", replace_text, "tiny/picture.svg", "stroke-width: 0.8", "stroke-width: 8", reason="picture.svg"
    ),
    case("digests-less", lambda folder: replace_file(folder, SUMS, b""), reason="has no digest of verdicts.json"),
    case("digests-missing", lambda folder: (folder / SUMS).unlink(), reason="SHA256SUMS is missing"),
    case("digests-odd", lambda folder: replace_file(folder, SUMS, b"\xff\n"), reason="SHA256SUMS has lines"),
    case(
        "digests-twice",
        lambda folder: replace_file(folder, SUMS, 2 * (folder / SUMS).read_bytes()),
        reason="SHA256SUMS has lines",
    ),
    case(
        "digests-elsewhere",
        lambda folder: replace_file(folder, SUMS, (folder / SUMS).read_bytes() + b"0" * 64 + b"  ../../secret\n"),
        reason="../../secret is no part of the published claims; remove it",
    ),
]


@pytest.mark.parametrize(("falsify", "reason"), few(UNFORGED[::-1], 3))
def test_a_falsified_publication_is_refused(
    published: Published, tmp_path: Path, falsify: Falsify, reason: str
) -> None:
    assert reason in refused(published, tmp_path, falsify, forge=False)


def test_a_part_of_the_claims_is_certified_by_name(published: Published, tmp_path: Path) -> None:
    folder = shutil.copytree(published.folder, tmp_path / "docs")
    remove_claim(folder)
    write_digests(folder, files_of(rows_of(folder)))
    assert published.check(folder, "tiny") == ["tiny"]
    with pytest.raises(Mistake, match="lacks 1 claim that must be there, such as other"):
        published.check(folder, "other", "tiny")
    with pytest.raises(Mistake, match="has a verdict of tiny, which is none of other"):
        published.check(published.folder, "other")
