"""Generated pages and pictures are up to date, and every part, key, option and argument is described."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import isclass, isfunction
from pathlib import Path
from xml.etree import ElementTree

import pytest

import ntkexp
from ntkexp.config.plain_yaml import read_yaml
from ntkexp.report.plots.attribution_plots import AttributionPlots
from ntkexp.report.plots.run_plots import gallery
from tests.docs import api, follow, pages as commands
from tests.docs.architecture import ORDER, PAGE, PICTURE, Part, layers_of, page, picture
from tests.docs.readme import ROOT
from tests.docs.reference import CHOICES, FOLDER, comments, component, pages as reference_pages

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


# The page of the Python API.


@pytest.mark.parametrize("name", [name for name in api.NAMES if api.is_called(name)])
def test_a_public_name_documents_its_parameters_and_no_others(name: str) -> None:
    documented = {entry.lstrip("*") for entry in api.described(name)}
    assert documented == set(api.parameters(name))
    assert all(argument.meaning.endswith(".") for argument in api.arguments(name))


def test_every_public_name_has_a_description() -> None:
    exported = {f"ntkexp.{name}" for name in ntkexp.__all__}
    assert exported <= set(api.NAMES)
    assert len(set(api.NAMES)) == len(api.NAMES)
    assert [name for name in api.NAMES if not api.sections(name)[""]] == []


def test_functions_that_return_something_say_what() -> None:
    functions = [name for name in api.NAMES if api.is_called(name) and not isclass(api.place_of(name))]
    assert [name for name in functions if not {"Returns", "Yields"} & set(api.sections(name))] == []


def test_the_page_lists_every_plot_of_a_run_and_of_an_attribution() -> None:
    text = api.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"`run\.plot\.(\w+)\(\)`", text)) == {name for name, _ in gallery()}
    shown = {name.rpartition(".")[2] for name in api.NAMES if name.startswith("Attribution.plot.")}
    plots = {name for name, method in vars(AttributionPlots).items() if returns_axes(method)}
    assert shown == plots


def returns_axes(method: object) -> bool:
    """Return true for a method that draws."""
    return isfunction(method) and method.__annotations__.get("return") == "Axes"


def test_descriptions_name_no_internal_module() -> None:
    shown = api.with_objects(api.PAGE.read_text(encoding="utf-8"))
    modules = set(re.findall(r"ntkexp\.([a-z_]+)[.`]", shown)) - {"bridges", "lightning", "huggingface", "layer"}
    assert modules - set(ntkexp.__all__) == set()
