"""Generated pages and pictures are up to date, and every part, key and option is described."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ntkexp.config.plain_yaml import read_yaml
from tests.docs import follow
from tests.docs import pages as commands
from tests.docs.architecture import ORDER, PAGE, PICTURE, Part, layers_of, page, picture
from tests.docs.readme import ROOT
from tests.docs.reference import CHOICES, FOLDER, comments, component
from tests.docs.reference import pages as reference_pages

PARTS = [part for layer in layers_of(ORDER) for part in layer]


@pytest.mark.parametrize(
    ("file", "written", "module"),
    [
        (PAGE, page, "architecture"),
        (PICTURE, lambda: picture(layers_of(ORDER)), "architecture"),
        (follow.PAGE, follow.page, "follow"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_generated_files_are_up_to_date(file: Path, written: Callable[[], str], module: str) -> None:
    assert file.read_text(encoding="utf-8") == written(), f"run `python -m tests.docs.{module}`"


def test_the_pages_of_the_reference_are_up_to_date() -> None:
    written = reference_pages()
    for file, text in written.items():
        assert file.read_text(encoding="utf-8") == text, "run `python -m tests.docs.reference`"
    assert set(FOLDER.iterdir()) <= set(written), "this page belongs to no group; delete it"


def test_the_picture_shows_every_part_once_and_in_its_frame() -> None:
    drawn = ElementTree.fromstring(picture(layers_of(ORDER)))
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    assert sorted(str(name.text) for name in drawn.findall("{*}text")) == sorted(c.path.name for c in PARTS)
    for box in drawn.findall("{*}rect[@class]"):
        left, top, wide, high = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert left >= 0
        assert left + wide <= width
        assert top + high <= height


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.path.name)
def test_every_part_is_described_in_a_sentence(part: Part) -> None:
    assert len(part.sentence.split()) > 4, part.file


def test_every_named_file_exists() -> None:
    named = re.findall(r"(?<!\[)`([\w/]+\.py|(?:\w+/)+)`", PAGE.read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not any((folder / name).exists() for folder in (ROOT, ROOT / "ntkexp"))] == []


# Every key and option has a meaning.


@pytest.mark.parametrize("group", CHOICES.groups())
def test_every_key_has_a_meaning(group: str) -> None:
    for name in CHOICES.options(group):
        file = CHOICES.file(group, name)
        told = comments(file)
        assert [key for key in component(read_yaml(file)).model_fields if not told.get(key)] == []


def test_every_key_that_belongs_to_no_group_has_a_meaning() -> None:
    told = comments(CHOICES.root())
    assert [key for key in CHOICES.common() if not told[key]] == []


@pytest.mark.parametrize("path", commands.ALL)
def test_every_option_with_a_value_names_it(path: str) -> None:
    options = filter(commands.is_option, commands.ALL[path].params)
    assert [each.opts[0] for each in options if not each.is_flag and not each.metavar] == []
