"""YAML from anywhere: plain data, or one line that says where it is none; never a crash, a hang, or code that runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ntkexp.config.compose import compose
from ntkexp.config.plain_yaml import parsed, read
from ntkexp.mistake import Mistake

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefghi", "bcdefghij", strict=True)
)
CHAIN = "k0: &k0 [x]\n" + "".join(f"k{k}: &k{k} [*k{k - 1}]\n" for k in range(1, 1000))
BROKEN = {
    "a number of 5,000 digits": ("x: " + "9" * 5000, "line 1 .* is no int"),
    "anchors that explode": (LAUGHS, "line 6 .* its anchors and .{4} make more than 100000 entries"),
    "anchors in a chain": (CHAIN, "line 50 .* its anchors and .{4} make more than 50 levels"),
    "an anchor in itself": ("a: &a [*a]", "its anchors and .{4} make more than"),
    "an anchor that is merged with itself": ("a: &a\n  <<: *a", "its anchors and .{4} make more than|unhashable|merg"),
    "a book of references": ("\nx: " + "a" * 10_000 + "${x}", "line 2 .* make more than 100000 entries"),
    "many references": ("x:\n" + "- ${x}\n" * 3_000, "line 2 .* make more than 100000 entries"),
    "very deep lists": ("x: " + "[" * 3000, "more than 50 lists and mappings lie in each other"),
    "very deep mappings": ("\n".join(" " * k + "a:" for k in range(200)), "more than 50 lists and mappings"),
    "an object of Python's": (
        "x: !!python/object/apply:os.system [exit]",
        "os.system is no kind of value here",
    ),
    "a set": ("axes: {model.width: !!set {8, 9}}", "line 1 .*!!set is no kind of value here; write it as"),
    "bytes": ("x: !!binary aGk=", "!!binary is no kind of value here"),
    "pairs": ("x: !!omap [a: 1]", "!!omap is no kind of value here"),
    "a date that is asked for": ("x: [!!timestamp 2020-01-02]", "!!timestamp is no kind of value here"),
    "a tag of somebody's": ("x: !mine 1", "!mine is no kind of value here"),
    "no whole number": ("\nx: !!int 1x", "line 2 .*'1x' is no int"),
    "no truth value": ("x: !!bool maybe", "'maybe' is no bool"),
    "half a character": ('x: "\\ud800"', "is no str"),
    "a character that no text has": ("x: \0", "it is not plain text"),
    "a list as a key": ("? [a]\n: b", "found unhashable key"),
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder for --config-dir."""
    (tmp_path / "model").mkdir()
    return tmp_path


@pytest.mark.parametrize(("text", "words"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_plain_data_is_said_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode())
    with pytest.raises(Mistake, match=words) as caught:
        read(file)
    assert "\n" not in str(caught.value)


def test_dates_are_text_as_they_are_to_hydra() -> None:
    assert parsed("{a: 2020-13-45, b: 2020-01-02}") == {"a": "2020-13-45", "b": "2020-01-02"}


@pytest.mark.parametrize("value", ["2020-13-45", "2020-01-02", "${", "{a: {null: 1}}"])
def test_a_value_of_another_kind_is_refused(value: str, written: Path) -> None:
    (written / "model" / "mine.yaml").write_text(f"_target_: ntkexp.model.MLP\nwidth: {value}\n")
    with pytest.raises(Mistake, match=r"model\.width=.*it takes a whole number|: \S.*width") as caught:
        compose(["model=mine"], written)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["[" * 2000, "&a [*a]", "9" * 5000])
def test_files_that_others_name_are_read_as_carefully(value: str, written: Path) -> None:
    (written / "model" / "mine.yaml").write_text("defaults: [nest, _self_]\n_target_: ntkexp.model.MLP\n")
    (written / "model" / "nest.yaml").write_text(f"width: {value}\n")
    with pytest.raises(Mistake, match=r"nest\.yaml, line 1 cannot be read as YAML"):
        compose(["model=mine"], written)


def test_hydra_imports_nothing_that_a_file_names(
    written: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("packages")
    (place / "leaves_a_mark.py").write_text(f"open({str(place / 'mark')!r}, 'w')\n")
    monkeypatch.syspath_prepend(place)
    shipped = (Path(__file__).parents[2] / "configs" / "config.yaml").read_text()
    (written / "config.yaml").write_text(f"{shipped}\nhydra:\n  searchpath: [pkg://leaves_a_mark]\n")
    with pytest.raises(Mistake, match=r"config\.yaml: settings of Hydra have no effect here"):
        compose([], written)
    assert not (place / "mark").exists()


def test_a_list_of_defaults_is_a_list(written: Path) -> None:
    (written / "config.yaml").write_text("defaults: 3\n")
    with pytest.raises(Mistake, match=r"'defaults' takes a list"):
        compose([], written)


PIECES: tuple[str, ...] = (
    "a",
    "b:",
    ": ",
    "- ",
    "\n",
    "  ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "&x ",
    "*x",
    "!!int ",
    "!!",
    "!x ",
    "'",
    '"',
    "|",
)
PIECES += (
    "#",
    "?",
    "%",
    "@",
    "\t",
    "<<: ",
    "\0",
    "é",
    "\u2028",
    "1",
    "-",
    "0x",
    ".",
    "e9",
    "---",
    "...",
    "~",
    "=",
    "2020-13-45",
)


def test_whatever_is_written_is_data_or_one_line(tmp_path: Path) -> None:
    chance, file = random.Random(0), tmp_path / "a.yaml"
    refused = 0
    for _ in range(400):
        file.write_text("".join(chance.choices(PIECES, k=chance.randrange(1, 25))), encoding="utf-8", newline="")
        try:
            assert isinstance(read(file), dict)
        except Mistake:  # one line, as all of them
            refused += 1
    assert 100 < refused < 400
