"""The page as a file: alone, escaped, the same bytes each time, with every picture's numbers and what it leaves out."""

from __future__ import annotations

import csv
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ntkexp.mistake import Mistake
from ntkexp.report.material import Material, gather
from ntkexp.report.page.build import HERE, markdown, write
from ntkexp.report.page.picture import inline, link
from tests.report.page.conftest import HOSTILE
from tests.report.sweeps import write_small_run

CSV = "data:text/csv;base64,"


class Links(HTMLParser):
    """Everything that a page points to, and the names of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []
        self.names: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "srcset") or (tag == "link" and name == "href"):
                self.sources.append(value or "")
            elif name == "href" and tag == "a":
                self.hrefs.append(value or "")
            elif name == "id":
                self.names.append(value or "")


@pytest.fixture(scope="session")
def links(page: Path) -> Links:
    found = Links()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def test_nothing_is_loaded_from_elsewhere(page: Path, links: Links) -> None:
    assert links.sources == []
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.findall(r"@import|url\((?!#)", text)


def test_every_link_leads_somewhere(page: Path, links: Links) -> None:
    for href in links.hrefs:
        if href.startswith("#"):
            assert href[1:] in links.names
        elif not href.startswith(CSV):
            assert (page.parent / href).exists(), href
    assert len(links.names) == len(set(links.names))


def test_every_picture_has_its_numbers(page: Path, links: Links) -> None:
    figures = re.findall(r"<figure>.*?</figure>", page.read_text(encoding="utf-8"), flags=re.S)
    assert len(figures) >= 10
    assert all("numbers (CSV)" in figure for figure in figures)
    inside = [b64decode(href.removeprefix(CSV)).decode() for href in links.hrefs if href.startswith(CSV)]
    beside = [(page.parent / href).read_text("utf-8") for href in links.hrefs if href.endswith(".csv")]
    tables = inside + beside
    assert len(tables) >= len(figures)
    for table in tables:
        assert len(list(csv.DictReader(table.splitlines()))) > 0


def test_what_is_left_out_is_named_and_counted(outputs: Path, page: Path) -> None:
    material = gather([], outputs)
    assert len(material.left_out) == 2
    text = page.read_text(encoding="utf-8")
    assert "Left out 2:" in text
    assert "broken" in text
    assert "\n" not in material.left_out_line


def test_hostile_names_do_no_harm(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert text.count("<script>") == 1


@pytest.mark.slow
def test_the_same_bytes_each_time(outputs: Path, page: Path) -> None:
    first = {file.name: file.read_bytes() for file in page.parent.iterdir()}
    write(gather([], outputs), outputs / "report", "ntkexp report")
    assert {file.name: file.read_bytes() for file in page.parent.iterdir()} == first


def test_a_page_of_runs_alone_begins_with_their_machines(outputs: Path, tmp_path: Path) -> None:
    for named in (["mlp-w512-s0-picture"], [str(path) for path in (outputs / "runs").glob("*width000[23]")]):
        text = write(gather(named, outputs), tmp_path, "ntkexp report").read_text(encoding="utf-8")
        assert text.index("<figure>") < text.index("All runs")
        found = Links()
        found.feed(text)
        assert len(found.names) == len(set(found.names))


def test_namesakes_from_two_places_are_told_apart(tmp_path: Path) -> None:
    places = [write_small_run(tmp_path / where / "mlp-w64-s0", 64, 0, 0.5) for where in ("here", "there", "nowhere")]
    text = write(gather(list(map(str, places)), tmp_path), tmp_path / "report", "ntkexp report").read_text("utf-8")
    found = Links()
    found.feed(text)
    assert len(found.names) == len(set(found.names))
    assert [href for href in found.hrefs if href.startswith("#run-")] == [
        "#run-mlp-w64-s0",
        "#run-mlp-w64-s0-2",
        "#run-mlp-w64-s0-3",
    ]


def test_the_script_is_short() -> None:
    assert len((HERE / "script.js").read_text().splitlines()) < 200


@pytest.mark.parametrize(
    ("named", "runs"), [(["width"], 39), (["mlp-w512-s0-picture"], 1), (["width", "mlp-w512-s0-picture"], 40)]
)
def test_runs_and_sweeps_are_found_by_name(outputs: Path, named: list[str], runs: int) -> None:
    assert len(gather(named, outputs).runs) == runs


def test_runs_and_sweeps_are_found_by_place(outputs: Path, tmp_path: Path) -> None:
    for place in (outputs, outputs / "runs", outputs / "sweeps" / "width.json"):
        assert len(gather([str(place)], tmp_path).runs) in (39, 40)


def test_nothing_to_report_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"^nothing is left to report: [^\n]* holds no run$"):
        gather([], tmp_path)


def test_markdown_says_the_same(outputs: Path) -> None:
    text = markdown(gather([], outputs))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 50
    assert HOSTILE not in text
    assert material_names(gather([], outputs)) <= set(re.findall(r"mlp-[\w-]+", text))


def material_names(material: Material) -> set[str]:
    return {run.name for run in material.runs}


@pytest.mark.parametrize(
    "content",
    [
        "<script>alert(1)</script>",
        '<g onload="alert(1)"/>',
        "<foreignObject/>",
        '<image href="http://elsewhere/x.png"/>',
        '<a href="javascript:alert(1)"/>',
        "<svg/>",
        '<meta http-equiv="refresh" content="0; url=https://elsewhere"/>',
        '<base href="https://elsewhere"/>',
        '<form action="https://elsewhere"><input name="word"/></form>',
        '<a href="https://elsewhere"><text>here</text></a>',
        '<link rel="stylesheet" href="https://elsewhere"/>',
        "<title><b>HTML</b></title>",
        "<desc/>",
        '<animate attributeName="href" to="javascript:alert(1)"/>',
        '<set attributeName="onclick"/>',
        '<use href="https://elsewhere/x.svg#a"/>',
        '<use xlink:href="data:image/svg+xml,x#a"/>',
        '<image href="data:image/svg+xml;base64,AAAA"/>',
        '<image href="#a" xlink:href="https://elsewhere"/>',
        '<path fill="url(https://elsewhere)"/>',
        '<path fill=" URL (https://elsewhere)"/>',
        '<path clip-path="url(https://elsewhere#a)"/>',
        '<path style="fill: url(https://elsewhere)"/>',
        r'<path style="fill: u\72l(//elsewhere)"/>',
        '<path style="fill: &#117;rl(//elsewhere)"/>',
        '<g style="position: fixed; inset: 0"/>',
        '<g class="note"/>',
        '<g tabindex="0"/>',
        "<x:script/>",
        "<SCRIPT/>",
        "<![CDATA[<script>alert(1)</script>]]>",
        "<scr<!-- -->ipt/>",
        "<?xml-stylesheet href='https://elsewhere'?>",
        "<!DOCTYPE svg [<!ENTITY a 'b'>]>",
        "<g",
        "<g></path>",
        "&nbsp;",
    ],
)
def test_a_picture_with_more_in_it_is_refused(content: str) -> None:
    with pytest.raises(Mistake, match="no plain picture"):
        inline(f"<svg>{content}</svg>", "x", "title")
    with pytest.raises(Mistake, match="no plain picture"):
        inline(content, "x", "title")


@pytest.mark.parametrize(
    "attribute", ['viewBox="0>1"', "viewBox='\" onload=alert(1)'", 'style="position: fixed"', "x='\\'"]
)
def test_the_first_tag_cannot_be_broken_open(attribute: str) -> None:
    with pytest.raises(Mistake, match="no plain picture"):
        inline(f"<svg {attribute}></svg>", "x", "title")


def test_a_long_value_is_judged_at_once() -> None:
    """Trying every way to part it would take as long as the square of its length."""
    blanks = " " * 10**6
    for attribute in (f"style='fill: {blanks}!'", f"d='{blanks}!'", f"fill='{blanks}!'"):
        with pytest.raises(Mistake, match="no plain picture"):
            inline(f"<svg><path {attribute}/></svg>", "x", "title")


def test_the_policy_of_the_page_leaves_no_way_out(page: Path) -> None:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.read_text())
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert [rules.get(name) for name in ("default-src", "base-uri", "form-action")] == ["'none'"] * 3


def test_no_address_is_made_of_a_folder_s_name(tmp_path: Path) -> None:
    assert link(tmp_path / "javascript:alert(1)", tmp_path) == "javascript%3Aalert%281%29"


def test_a_picture_takes_names_of_its_own_and_keeps_its_text() -> None:
    svg = '<?xml?><svg width="72pt"><g id="a"/><path clip-path="url(#a)" d="M 1.23456 2"/><text>0.12345</text></svg>'
    shown = inline(svg, "mine", 'a "b"')
    assert 'id="mine-a"' in shown
    assert "url(#mine-a)" in shown
    assert 'd="M 1.23 2"' in shown
    assert "<text>0.12345</text>" in shown
    assert "a &quot;b&quot;" in shown
