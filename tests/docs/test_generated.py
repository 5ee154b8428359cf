"""The page on the architecture cannot lie: its picture and tables are those of the import contracts."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from ntkexp.config.plain_yaml import read_yaml
from tests.docs import pages as commands
from tests.docs.architecture import ORDER, PAGE, PICTURE, Part, layers_of, page, picture
from tests.docs.readme import ROOT
from tests.docs.reference import CHOICES, FILE, comments, component, reference

WRITE = "run `python -m tests.docs.architecture`"
PARTS = [part for layer in layers_of(ORDER) for part in layer]


def test_the_tables_are_as_they_would_be_written() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), WRITE


def test_the_picture_is_as_it_would_be_drawn() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(layers_of(ORDER)), WRITE


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
def test_every_part_says_in_a_sentence_what_it_is(part: Part) -> None:
    assert len(part.sentence.split()) > 4, part.file


def test_every_file_that_is_named_is_there() -> None:
    named = re.findall(r"(?<!\[)`([\w/]+\.py|(?:\w+/)+)`", PAGE.read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not any((folder / name).exists() for folder in (ROOT, ROOT / "ntkexp"))] == []


# The reference is what the components say, and says something about every key.


def test_it_is_as_it_would_be_written() -> None:
    assert FILE.read_text(encoding="utf-8") == reference(), "run `python -m tests.docs.reference`"


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
def test_every_option_that_takes_a_value_says_which(path: str) -> None:
    options = filter(commands.is_option, commands.ALL[path].params)
    assert [each.opts[0] for each in options if not each.is_flag and not each.metavar] == []
