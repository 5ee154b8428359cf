"""The pages in docs/ are right: experiments compose, keys and options exist, and programs print the shown text."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.compose import composer, resolve
from ntkexp.sweep.definition import define
from ntkexp.sweep.plan import plan
from tests.bench.__main__ import parser_of
from tests.docs import orders
from tests.docs.follow import sentence
from tests.docs.pages import PAGES, Page, carried_out, known_keys, options, printed
from tests.docs.readme import COMMANDS, GUIDE, MORE_COMMANDS, ROOT, SETUPS, blocks
from tests.docs.search import ANSWERS
from tests.foreign_loop.bugs import RECORDED, REFUSED

NAMES = [path.name for path in PAGES]
CARRIED_OUT = [name for name in NAMES if name not in {"guide.md", "coming-from.md"}]  # other tests run them
VALUED = {"--trust", "--config-dir"}
MEASURED = orders.STEP_SIZES[:2]


@pytest.fixture(params=NAMES)
def page(request: pytest.FixtureRequest) -> Page:
    return Page(ROOT / "docs" / request.param)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CARRIED_OUT)
def test_every_experiment_is_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(ROOT / "docs" / name)
    page.files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for line in page.commands:
        _, command, *words = shlex.split(line)
        options = [word.split("=", 1) for word in words if word.split("=")[0] in VALUED]
        trust = [value for name, value in options if name == "--trust"]
        own = next((Path(value) for name, value in options if name == "--config-dir"), None)
        overrides = [word for word in words if not word.startswith("--")]
        if command == "sweep":
            assert plan(define(overrides, Choices(config_folders(own))), composer(own, trust), tmp_path).runs
        elif command in {"train", "config"} and "data.path" not in line:  # programs of the page write the data
            resolve(overrides, own, trust)


def test_every_option_exists(page: Page) -> None:
    said = " ".join([page.prose, *page.commands])
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", said)) <= options() | of_the_bench()


def of_the_bench() -> set[str]:
    """Return the options of `python -m tests.bench`."""
    return {word for each in parser_of(())._actions for word in each.option_strings}


def test_every_key_exists(page: Page) -> None:
    known = known_keys()
    said = {word.partition("=")[0] for word in re.findall(r"`([a-z_]+\.(?!NAME)\w+(?:=[^`]*)?)`", page.prose)}
    heads = {key.split(".")[0] for key in known}
    assert {
        key
        for key in said
        if key.split(".")[0] in heads and not key.endswith((".yaml", ".json", ".py", ".npz", ".zarr"))
    } <= known


def test_links_lead_somewhere(page: Page) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.text):
        file = (page.path.parent / target) if target else page.path
        assert file.is_file(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {anchored(heading) for heading in headings}, anchor


def anchored(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


# The site: tutorials contain pictures, and notebooks state their topics.


def pages_below(caption: str) -> list[Path]:
    """Return the pages of a part of the navigation."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    names = index.partition(f":caption: {caption}\n")[2].partition("```")[0].split()
    return [ROOT / "docs" / f"{name}.md" for name in names]


@pytest.mark.parametrize("path", [*pages_below("Learn"), *pages_below("Do")], ids=lambda path: str(path.stem))
def test_a_page_to_learn_from_has_a_picture(path: Path) -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    assert pictures
    assert all((path.parent / picture).is_file() for picture in pictures)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: str(path.stem))
def test_a_notebook_teaches_something_and_stores_its_outputs(path: Path) -> None:
    first, *others = json.loads(path.read_text(encoding="utf-8"))["cells"]
    said = "".join(first["source"])
    assert "**What you learn:**" in said
    assert "```python" in said  # the API in a line or two
    assert "".join(others[-1]["source"]).startswith("**Try next:**")
    outputs = [output for cell in others for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [output for output in outputs if output["output_type"] == "error"] == []


@pytest.mark.parametrize("words", ANSWERS)
def test_words_of_users_lead_to_a_section(words: str) -> None:
    page, _, section = ANSWERS[words].partition("#")
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    listed = re.findall(r"^<!-- search: (.*) -->\n\n(?:## (.*)$)?", text, re.MULTILINE)
    places = {entry: anchored(heading) for entries, heading in listed for entry in entries.split("; ")}
    assert places[words.lower()] == section


@pytest.mark.slow
def test_the_example_of_the_secant_prints_the_shown_text(tmp_path: Path) -> None:
    for block in Page(ROOT / "docs" / "secant.md").blocks:
        block.run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CARRIED_OUT)
def test_everything_runs(name: str, tmp_path: Path) -> None:
    Page(ROOT / "docs" / name).carry_out(tmp_path)


@pytest.mark.slow
def test_the_tables_agree_with_measurements() -> None:
    """Measure the two larger step sizes. The others take too many steps."""
    shown = tables_in(Page(ROOT / "docs" / "secant.md").text)
    measured = tables_in("\n\n".join(orders.tables(MEASURED)))
    assert len(shown) == len(measured) == 2
    for ours, theirs in zip(shown, measured, strict=True):
        assert list(ours) == [(net, str(size)) for net in orders.NETS for size in orders.STEP_SIZES]
        assert list(theirs) == [(net, str(size)) for net in orders.NETS for size in MEASURED]
        for place, errors in theirs.items():
            # one digit is shown, and processors round differently, which kinks amplify
            assert ours[place] == pytest.approx(errors, rel=1.0, abs=1e-14), place


def tables_in(text: str) -> Sequence[dict[tuple[str, ...], list[float]]]:
    """Return the rows of each table, by network and step size."""
    found = [block.splitlines()[2:] for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)]
    cells = [[[cell.strip() for cell in line.strip("|").split("|")] for line in lines] for lines in found]
    numbers = [rows for rows in cells if all(re.fullmatch(r"[\d.e+-]+", row[-1]) for row in rows)]
    return [{tuple(row[:2]): [float(cell) for cell in row[2:]] for row in rows} for rows in numbers]


def test_at_least_twenty_bugs_are_planted_and_described() -> None:
    described = [sentence(body) for body in (*RECORDED, *(body for body, *_ in REFUSED))]
    assert len(set(described)) == len(described) >= 20
    assert all(each.endswith(".") for each in described)


# The commands of the README and the guide, in order, in one folder.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table of measurements, and a module."""
    from sklearn.datasets import load_iris  # noqa: PLC0415  slow to import where tests are only collected

    place = tmp_path_factory.mktemp("stranger")
    iris = load_iris()
    rows = [[*map(str, x), iris.target_names[label]] for x, label in zip(iris.data, iris.target, strict=True)]
    lines = [",".join(row) for row in [["length", "width", "petal length", "petal width", "species"], *rows]]
    (place / "measurements.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (place / "my_net.py").write_bytes((ROOT / "tests" / "config" / "own_net.py").read_bytes())
    return place


@pytest.mark.slow
def test_the_default_run_prints_the_table_shown(folder: Path) -> None:
    (_, _, command) = SETUPS[0].split(" && ")
    found, shown = rows(printed(["bash", "-c", command], folder)), rows(blocks("text", GUIDE)[0])
    assert list(found) == list(shown)
    for machine, errors in shown.items():
        # processors round differently, and kinks amplify that: errors agree to 5 %, or are both rounding
        for error, other in zip(errors, found[machine], strict=True):
            assert other == pytest.approx(error, rel=0.05, abs=1e-12, nan_ok=True), machine


def rows(text: str) -> dict[str, list[float]]:
    """Parse the errors of each kernel machine on the three splits."""
    _, *lines = text.partition("kernel machine  ")[2].partition("\n\n")[0].splitlines()
    cells = {line.split()[0]: line.split()[1:4] for line in lines}
    return {machine: [float(cell.replace("–", "nan")) for cell in found] for machine, found in cells.items()}


@pytest.mark.slow
@pytest.mark.parametrize("line", dict.fromkeys([*COMMANDS, *MORE_COMMANDS]))
def test_every_command_runs(line: str, folder: Path) -> None:
    assert carried_out(line, folder)
