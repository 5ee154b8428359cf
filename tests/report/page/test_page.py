"""The page as a file: it loads nothing, escapes names, has the same bytes each time, and shows the right numbers."""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import permutations, product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from axe_playwright_python.sync_playwright import Axe
from fontTools.ttLib import TTFont
from matplotlib.font_manager import FontProperties, findfont
from playwright.sync_api import Browser, expect

from ntkexp.cli.claims import line, notes
from ntkexp.cli.main import run
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json
from ntkexp.records.claim import TIMINGS, ClaimRecord, Judgement, claim_records, write_claim
from ntkexp.records.contributions import LeaveOut, LeftOut
from ntkexp.records.folder import RunFolder
from ntkexp.records.results import Seconds, write_timings
from ntkexp.records.sweep import read_sweep, write_sweep
from ntkexp.report.claims import ClaimFamily, holm_rejections, outlook, summarise_claims, tabulate_claims
from ntkexp.report.comparison import GROUPING_KEYS, describe_loop, grouped
from ntkexp.report.explain import explain, worst_points
from ntkexp.report.inventory import flatten_config
from ntkexp.report.leave_out import agreement_of
from ntkexp.report.loaded_run import load_run
from ntkexp.report.material import TILE_MACHINES, gather, headline, tiles
from ntkexp.report.page.build import (
    MAX_CHIPS,
    anchors,
    markdown,
    points_of_run,
    without_failed_fits,
    write,
    write_claims,
    write_explanations,
)
from ntkexp.report.page.fonts import with_fonts
from ntkexp.report.page.picture import inline, link, pictures_of_runs
from ntkexp.report.page.run_table import MAX_CURVE_POINTS, curve_of
from ntkexp.report.plots.examples import checked
from ntkexp.report.run import Run
from ntkexp.report.sentence import main_split
from ntkexp.report.tables import PageTable
from ntkexp.text import percent
from tests.report.drawn import caption_of
from tests.report.page.conftest import HOSTILE
from tests.report.synthetic import digits, write_run, write_small_run

CSV = "data:text/csv;base64,"


class Element:
    """An element of a page, with its attributes, its text and the elements in it."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.children: list[Element] = []
        self.own_text = ""

    @property
    def text(self) -> str:
        return self.own_text + "".join(child.text for child in self.children)

    def all(self, tag: str, css_class: str = "") -> list[Element]:
        """Return the elements of a name and class, at any depth."""
        found = []
        for child in self.children:
            if child.tag == tag and css_class in ("", *child.attributes.get("class", "").split()):
                found.append(child)
            found += child.all(tag, css_class)
        return found

    def one(self, name: str) -> Element:
        """Return the element with an id."""
        (found,) = [each for each in self.everything() if each.attributes.get("id") == name]
        return found

    def everything(self) -> Iterator[Element]:
        for child in self.children:
            yield child
            yield from child.everything()


VOID = ("meta", "link", "br", "input", "wbr", "img", "hr")


class Tree(HTMLParser):
    """A page as a tree of elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(page)
        assert self.open == [self.root]  # every element is closed, in order

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].own_text += data


def parsed(page: Path) -> Element:
    return Tree(page.read_text(encoding="utf-8")).root


class Links:
    """The links, the element names, the loaded sources and the number of scripts of a page."""

    def __init__(self, page: str) -> None:
        elements = list(Tree(page).root.everything())
        values = [(f"{each.tag} {name}", name, value) for each in elements for name, value in each.attributes.items()]
        self.hrefs = [value for place, _, value in values if place == "a href"]
        self.names = [value for _, name, value in values if name == "id"]
        self.sources = [value for place, name, value in values if name in ("src", "srcset") or place == "link href"]
        self.scripts = sum(each.tag == "script" for each in elements)


def assert_links_lead_somewhere(page: Path) -> Links:
    """Each link has a target, and each element its own name."""
    links = Links(page.read_text(encoding="utf-8"))
    for href in links.hrefs:
        if href.startswith("#"):
            assert href[1:] in links.names
        elif not href.startswith(CSV):
            assert (page.parent / unquote(href.partition("#")[0])).exists(), href
    assert len(links.names) == len(set(links.names))
    return links


def test_the_page_loads_nothing_and_escapes_every_name(outputs: Path, page: Path) -> None:
    text, links = page.read_text(encoding="utf-8"), assert_links_lead_somewhere(page)
    assert links.sources == []
    assert not re.findall(r"@import|url\((?!#)", text)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert [rules.get(name) for name in ("default-src", "base-uri", "form-action")] == ["'none'"] * 3
    assert HOSTILE not in text
    assert links.scripts == text.count("<script>") == 1

    material = gather([], outputs)
    assert len(material.left_out) == 2
    assert "\n" not in material.left_out_line
    notices = parsed(page).one("notices")
    assert [notice.text for notice in notices.all("li")] == list(material.left_out)
    assert "open" not in notices.attributes


def test_every_picture_has_its_numbers(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    hrefs = Links(text).hrefs
    figures = re.findall(r"<figure[ >].*?</figure>", text, flags=re.S)
    assert len(figures) >= 10
    assert all(">CSV</a>" in figure for figure in figures)
    inside = [b64decode(href.removeprefix(CSV)).decode() for href in hrefs if href.startswith(CSV)]
    tables = inside + [(page.parent / href).read_text("utf-8") for href in hrefs if href.endswith(".csv")]
    assert len(tables) >= len(figures)
    assert all(list(csv.DictReader(table.splitlines())) for table in tables)


def rows_of(page: Path) -> list[Element]:
    """Return the rows of runs in the table of all runs."""
    return [row for row in parsed(page).one("all-runs").all("tr") if "data-curves" in row.attributes]


def chips(element: Element) -> dict[str, str]:
    return {chip.attributes["data-key"]: chip.attributes["data-value"] for chip in element.all("span", "chip")}


def number(cell: Element) -> float | None:
    """Return the number of a cell: its sort key, which is its text if there is no other."""
    key = cell.attributes.get("data-key", cell.text)
    return float(key) if key else None


def test_every_run_has_one_row_with_its_numbers(outputs: Path, page: Path) -> None:
    material = gather([], outputs)
    by_anchor = {f"#{anchor}": path for path, anchor in anchors(material.runs).items()}
    rows = {by_anchor[row.all("a")[0].attributes["href"]]: row for row in rows_of(page)}
    assert rows.keys() == {run.path for run in material.runs}
    heads = [head.text for head in parsed(page).one("all-runs").all("thead")[0].all("th")]
    for each in material.runs:
        numbers = dict(zip(heads[2:], map(number, rows[each.path].all("td")[2:]), strict=True))
        assert numbers["loss"] == each.metrics["loss"].iloc[-1]
        assert numbers["steps"] == each.metrics["step"].iloc[-1]
        for machine, name in (("secant", "secant"), ("left", "textbook sum"), ("frozen_start", "frozen kernel")):
            errors = [row.relative_error for row in each.ladder if row.machine == machine]
            assert numbers[name] in errors


def test_runs_of_a_group_have_the_same_components_and_different_settings(outputs: Path) -> None:
    runs = gather([], outputs).runs
    groups = grouped(runs)
    assert sorted(run.path for group in groups for run in group.runs) == sorted(run.path for run in runs)
    for group in groups:
        configs = [flatten_config(run.config) for run in group.runs]
        parts = {tuple(config.get(key) for key in GROUPING_KEYS) for config in configs}
        assert len(parts) == 1 or len(parts) == len(group.runs)
        for config, settings in zip(configs, group.by_run, strict=True):
            assert all(str(config[key]) == value for key, value in (*group.components, *group.settings, *settings))
        keys = {tuple(key for key, _ in settings) for settings in group.by_run}
        assert len(keys) == 1  # the same settings distinguish the runs of a group
        if len(group.runs) > 1:
            assert all(len({config[key] for config in configs}) > 1 for key in keys.pop())


def test_settings_are_chips_and_few_are_visible(outputs: Path, tmp_path: Path) -> None:
    """A chip is a setting of the configuration. Runs with many differences fold some of them away."""
    folder = tmp_path / "outputs"
    for k in range(2):
        path = write_small_run(folder / "runs" / f"run-{k}", 8 + k, k, 0.1)
        rewrite_config(path, {"model": {"_target_": "ntkexp.model.MLP", **{f"key_{j}": j + k for j in range(20)}}})
    page = write(gather([], folder), folder / "report", "ntkexp report")
    for k, row in enumerate(rows_of(page)):
        assert chips(row) == {f"model.key_{j}": str(j + k) for j in range(20)}
        hidden = chips(row.all("details", "more")[0])
        assert len(chips(row)) - len(hidden) == MAX_CHIPS


def rewrite_config(path: Path, config: dict[str, Json]) -> None:
    """Write another configuration into a finished run."""
    folder = RunFolder(path)
    (path / "DONE.json").unlink()
    with folder.claim():
        folder.write_json("config.json", config)
        folder.finish(["config.json", "metrics.csv", "results.csv"], outcome="trained", diverged=False)


def test_a_followed_loop_says_what_it_is(outputs: Path, tmp_path: Path) -> None:
    """It forms a separate group, and its settings do not count as differences between runs."""
    folder = tmp_path / "outputs"
    for k in range(2):
        write_small_run(folder / "runs" / f"run-{k}", 8, k, 0.1)
    loop = write_small_run(folder / "runs" / "mine", 8, 0, 0.1)
    rewrite_config(loop, {"follow": {"model": "Net", "parameters": 3, "optimizers": ["AdamW"], "processes": 1}})
    page = write(gather([], folder), folder / "report", "ntkexp report")
    first, second, last = rows_of(page)
    assert (chips(first), chips(second), chips(last)) == ({"seed": "0"}, {"seed": "1"}, {})
    assert "followed loop, AdamW" in last.all("td")[1].text


def test_the_loop_counts_its_examples(tmp_path: Path) -> None:
    loaded = load_run(write_run(tmp_path / "net", digits()))
    loop = replace(loaded, config={"follow": {"optimizers": ["AdamW", "SGD"]}})
    examples = loaded.contributions.sizes["example"]
    assert describe_loop(loop) == f"followed loop, AdamW, SGD, {examples} examples"


def test_the_points_of_a_curve_are_measured_and_in_order() -> None:
    """A long curve keeps its first and last point."""
    rng = np.random.default_rng(0)
    for length in (2, MAX_CURVE_POINTS, 10 * MAX_CURVE_POINTS + 7):
        metrics = pd.DataFrame({"step": np.arange(length), "loss": rng.random(length)})
        metrics.loc[0, "loss"] = np.nan  # not measured
        curve = curve_of(Run(Path(), {}, metrics, ()), "loss")
        assert len(curve) == min(length - 1, MAX_CURVE_POINTS)
        assert np.all(np.diff(curve[:, 0]) > 0)
        assert curve[[0, -1], 0].tolist() == [1, length - 1]
        assert curve[:, 1].tolist() == metrics["loss"][curve[:, 0].astype(int)].tolist()


def test_the_curves_of_a_row_are_those_of_its_run(outputs: Path, page: Path) -> None:
    runs = {run.name: run for run in gather([], outputs).runs}
    for row in rows_of(page):
        metrics = runs[row.all("a")[0].text].metrics.set_index("step")
        for part in row.attributes["data-curves"].split(";"):
            name, _, points = part.partition(":")
            for point in points.split(","):
                step, value = point.split(" ")
                assert float(value) == pytest.approx(metrics[name][int(step)], rel=1e-3)


@pytest.mark.parametrize(("count", "shown"), [(1, [4]), (3, [4, 3, 3])])
def test_pictures_share_their_space(count: int, shown: list[int], tmp_path: Path) -> None:
    """Every run has some pictures before one has all. Three runs have 5.4 MB, and a page holds 4 MB."""
    runs = [Run(tmp_path / f"run-{k}", {}, pd.DataFrame(), ()) for k in range(count)]
    for of_run, letters in product(runs, (100_000, 300_000, 500_000, 900_000)):
        (of_run.path / "plots").mkdir(parents=True, exist_ok=True)
        (of_run.path / "plots" / f"{letters}.svg").write_text(f'<svg><path d="{"M" * letters}"/></svg>')
    found = pictures_of_runs(runs, anchors(runs), tmp_path)
    assert [len(found[of_run.path]) for of_run in runs] == shown


def test_a_law_that_was_not_fitted_is_listed_only_when_all_runs_are_done(outputs: Path) -> None:
    (analysis,) = gather([], outputs).analyses
    unfitted = replace(analysis.laws[0], law=None, reason="too few points")
    finished_sweep = replace(analysis, laws=(*analysis.laws, unfitted))
    assert without_failed_fits(finished_sweep) == finished_sweep
    waiting = tuple(replace(run, state="unfinished") for run in analysis.sweep.runs)
    unfinished = replace(finished_sweep, sweep=replace(analysis.sweep, runs=waiting))
    assert without_failed_fits(unfinished).laws == analysis.laws


def test_a_command_stands_once(outputs: Path, page: Path) -> None:
    commands = [code.text for code in parsed(page).all("code") if code.text.startswith("ntkexp sweep")]
    assert len(commands) == len(set(commands)) == 1


def test_the_report_and_an_explanation_link_to_each_other(tmp_path: Path) -> None:
    loaded = load_run(write_run(tmp_path / "runs" / "net", digits()))
    found = explain(loaded, "test", [0])
    folder = tmp_path / "report"
    for order in ("explanation first", "report first"):
        shutil.rmtree(folder, ignore_errors=True)
        if order == "report first":
            report = write(gather([], tmp_path), folder, "ntkexp report")
        page = write_explanations(loaded, found, [], folder / "explain-net.html", "ntkexp explain")
        linked = "index.html#run-net" in assert_links_lead_somewhere(page).hrefs
        assert linked == (order == "report first")
        if order == "explanation first":
            report = write(gather([], tmp_path), folder, "ntkexp report")
        links = assert_links_lead_somewhere(report)
        assert links.hrefs.count("explain-net.html") == 1
        assert "run-net" in links.names


def test_the_fonts_of_a_page_have_its_letters() -> None:
    """Each letter has a glyph, with the advance of the font that matplotlib draws with."""
    page = Tree(with_fonts('<template id="fonts"></template>‖∂θ−½é')).root
    regular, bold = page.one("fonts").all("data")
    for data, weight in ((regular, "normal"), (bold, "bold")):
        entries = dict(entry.split(":", 1) for entry in data.attributes["data-glyphs"].split(","))
        assert set(map(ord, "‖∂θ−½éAz09")) <= set(map(int, entries))
        path = findfont(FontProperties(family="DejaVu Sans", weight=weight))
        with TTFont(io.BytesIO(b64decode(data.attributes["value"]))) as font, TTFont(path) as whole:
            for code, entry in entries.items():
                glyph, advance = map(int, entry.split(":"))
                name = whole.getBestCmap()[int(code)]
                assert advance == round(1000 * whole["hmtx"][name][0] / whole["head"].unitsPerEm)
                assert font["hmtx"][font.getGlyphName(glyph)] == whole["hmtx"][name]


def test_missing_runs_of_a_sweep_are_counted(outputs: Path, tmp_path: Path) -> None:
    """Three waiting runs are one entry."""
    copy = tmp_path / "outputs"
    shutil.copytree(outputs, copy, symlinks=True)
    record = next((copy / "sweeps").glob("*.json"))
    sweep = read_sweep(record)
    waiting = [replace(each, state="waiting") for each in sweep.runs[:3]]
    for each in waiting:
        shutil.rmtree(each.folder, ignore_errors=True)
    write_sweep(replace(sweep, runs=(*waiting, *sweep.runs[3:])))
    assert f"3 runs of {sweep.name}, waiting" in gather([], copy).left_out


@pytest.mark.slow
def test_the_same_bytes_each_time(outputs: Path, page: Path) -> None:
    first = {file.name: file.read_bytes() for file in page.parent.iterdir()}
    write(gather([], outputs), outputs / "report", "ntkexp report")
    assert {file.name: file.read_bytes() for file in page.parent.iterdir()} == first


def test_a_page_begins_with_its_runs(outputs: Path, tmp_path: Path) -> None:
    for named in (["mlp-w512-s0-picture"], [str(path) for path in (outputs / "runs").glob("*width000[23]")]):
        page = write(gather(named, outputs), tmp_path, "ntkexp report")
        text = page.read_text(encoding="utf-8")
        assert text.index("<dl") < text.index('<table id="all-runs"') < text.index("<figure")
        assert len(Links(text).names) == len(set(Links(text).names))


def test_tiles_omit_diverged_runs_unless_all_diverged(tmp_path: Path) -> None:
    trained = load_run(write_run(tmp_path / "trained", digits()))
    diverged = load_run(write_run(tmp_path / "diverged", digits(stable_fraction=40.0, steps=12)))
    assert diverged.diverged
    values = [tile.value for tile in tiles([trained])]
    assert [tile.value for tile in tiles([trained, diverged])] == values
    assert [tile.value for tile in tiles([diverged, diverged])] == [tile.value for tile in tiles([diverged])] != values
    assert "largest over splits, median over 1 run" in {tile.note for tile in tiles([trained, diverged])}


def test_the_first_screen_has_a_short_heading_and_the_numbers_of_the_runs(outputs: Path, tmp_path: Path) -> None:
    material = gather([], outputs)
    assert len(headline(material)) <= 60
    run = material.runs[0]
    by_label = {tile.label: tile for tile in tiles([run])}
    for machine, label in TILE_MACHINES.items():
        errors = [row.relative_error for row in run.ladder if row.machine == machine and row.relative_error is not None]
        if label in by_label and by_label[label].value != "exact":
            assert by_label[label].value == f"{percent(max(errors))} off"
    text = write(material, tmp_path, "ntkexp report").read_text(encoding="utf-8")
    assert f"<h1>{headline(material)}</h1>" in text
    assert text.count("<dt>") == len(tiles(material.runs)) >= 2
    assert "exact" in text.partition("<dl")[2].partition("</dl>")[0]


def test_runs_of_one_name_have_their_own_anchors(tmp_path: Path) -> None:
    places = [write_small_run(tmp_path / where / "mlp-w64-s0", 64, 0, 0.5) for where in ("here", "there", "nowhere")]
    links = assert_links_lead_somewhere(
        write(gather(list(map(str, places)), tmp_path), tmp_path / "report", "ntkexp report")
    )
    names = ["#run-mlp-w64-s0", "#run-mlp-w64-s0-2", "#run-mlp-w64-s0-3"]
    assert [href for href in links.hrefs if href.startswith("#run-")] == names


@pytest.mark.parametrize(
    ("named", "count"),
    [
        (["width"], 39),
        (["mlp-w512-s0-picture"], 1),
        (["width", "mlp-w512-s0-picture"], 40),
        (["{outputs}"], 40),
        (["{outputs}/runs"], 40),
        (["{outputs}/sweeps/width.json"], 39),
    ],
)
def test_runs_and_sweeps_are_found_by_name_and_by_place(outputs: Path, named: list[str], count: int) -> None:
    assert len(gather([word.format(outputs=outputs) for word in named], outputs).runs) == count


def test_markdown_has_the_same_runs(outputs: Path) -> None:
    material = gather([], outputs)
    text = markdown(material)
    assert sum(line.startswith("|") for line in text.splitlines()) > 50
    assert HOSTILE not in text
    assert {run.name for run in material.runs} <= set(re.findall(r"mlp-[\w-]+", text))


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
    for drawing in (f"<svg>{content}</svg>", content):
        with pytest.raises(Mistake, match="not a plain picture"):
            inline(drawing, "x", "title")


BLANKS = " " * 10**6  # a search with backtracking would take a time quadratic in their number


@pytest.mark.parametrize(
    "drawing",
    [
        '<svg viewBox="0>1"></svg>',
        "<svg viewBox='\" onload=alert(1)'></svg>",
        '<svg style="position: fixed"></svg>',
        "<svg x='\\'></svg>",
        *(f"<svg><path {name}{BLANKS}!'/></svg>" for name in ("style='fill: ", "d='", "fill='")),
    ],
    ids=lambda drawing: drawing[:30],
)
def test_attributes_cannot_break_a_tag(drawing: str) -> None:
    with pytest.raises(Mistake, match="not a plain picture"):
        inline(drawing, "x", "title")


def test_a_link_escapes_the_name_of_a_folder(tmp_path: Path) -> None:
    assert link(tmp_path / "javascript:alert(1)", tmp_path) == "javascript%3Aalert%281%29"


def test_a_picture_gets_its_own_names_and_keeps_its_text() -> None:
    svg = '<?xml?><svg width="72pt"><g id="a"/><path clip-path="url(#a)" d="M 1.23456 2"/><text>0.12345</text></svg>'
    shown = inline(svg, "mine", 'a "b"')
    (name,) = re.findall(r'id="([^"]*)"', shown)
    assert f"url(#{name})" in shown
    assert name not in inline(svg, "another", "")
    for part in ('d="M 1.23 2"', "<text>0.12345</text>", "a &quot;b&quot;"):
        assert part in shown


@pytest.mark.parametrize(
    ("styles", "shared"),
    [
        (("fill: #0072b2", "fill: #0072b2"), True),
        (("fill: #0072b2", "fill: #d55e00"), False),
        (("opacity: 0.5", "opacity: 0.5"), False),  # a group is not transparent as its markers are
        (("fill: #0072b2; fill-opacity: 0.5",) * 3, True),
    ],
)
def test_markers_share_their_style_if_they_inherit_it(styles: tuple[str, ...], shared: bool) -> None:
    markers = "".join(f'<use href="#m" x="{k}" style="{style}"/>\n' for k, style in enumerate(styles))
    shown = inline(f'<svg><defs><path id="m" d="M 0 0"/></defs><g>\n{markers}</g></svg>', "a", "")
    group = Tree(shown).root.all("g")[0]
    assert ("style" in group.attributes) == shared
    used = [{"style": group.attributes.get("style"), **use.attributes}["style"] for use in group.all("use")]
    assert len(used) == len(styles)
    assert len(set(used)) == len(set(styles))


# The page of claims: every claim with its verdicts, escaped, and the verdicts that survive correction.


def judgement(verdict: str = "supported", p: float | None = 0.001) -> Judgement:
    numbers = {"figure": -0.5, "low": -0.6, "high": math.nan, "p": p, "more_seeds": None}
    told = {"expected": "slope −0.5 ± 0.1", "seeds": (0, 1, 2), "draws": "each drawing weights", "note": HOSTILE}
    return Judgement(verdict=verdict, **numbers, **told)  # type: ignore[arg-type]


def record(folder: Path, name: str, verdict: str = "supported", p: float | None = 0.001) -> ClaimRecord:
    """Write a judged claim."""
    looks = {"main": judgement(verdict, p), "control": judgement("refuted"), "second": judgement(verdict)}
    said = {"statement": HOSTILE, "source": HOSTILE, "refutes": HOSTILE, "command": f"ntkexp claims {name}"}
    given: dict[str, Any] = {"name": name, "digest": "0", "size": "default", "looks": looks, **said}
    found = ClaimRecord(path=folder / f"{name}-0", **given)
    write_claim(found)
    return found


def test_fresh_seeds_are_shown_with_their_minutes(tmp_path: Path) -> None:
    """Three seeds took 90 s of CPU time, so seven take 3.5 minutes. The wall time does not matter."""
    found = record(tmp_path / "claims", "one", "undecided", None)
    asked = replace(found, looks={**found.looks, "main": replace(found.main, more_seeds=4)})
    write_claim(asked)
    for uncounted in ({}, {"runs": Seconds(wall=90.0)}):  # old records have no CPU time
        write_timings(asked.path / TIMINGS, uncounted)
        assert outlook(asked) == "7 fresh seeds would probably settle it"
    write_timings(asked.path / TIMINGS, {"runs": Seconds(wall=4000.0, processor=90.0)})
    told = "7 fresh seeds, about 3.5 CPU minutes, would probably settle it"
    assert asked.json_fields["cpu_minutes"] == 1.5
    assert told in line(asked)
    assert told in notes([asked])
    page = write_claims(claim_records(tmp_path / "claims"), tmp_path / "report", "ntkexp claims")
    assert told in page.read_text(encoding="utf-8")
    assert outlook(found) == ""


def test_the_second_look_shows_its_fresh_seeds(tmp_path: Path) -> None:
    """Its three seeds took 30 of the 90 seconds of the claim. A control may stay undecided."""
    found = record(tmp_path / "claims", "one")
    open_ = {name: replace(look, more_seeds=4) for name, look in found.looks.items() if name != "main"}
    asked = replace(found, looks={**found.looks, **open_})
    write_claim(asked)
    write_timings(asked.path / TIMINGS, {"runs": Seconds(90.0, 90.0), "second": Seconds(30.0, 30.0)})
    told = "7 fresh seeds, about 1.2 CPU minutes, would probably settle it"
    assert notes([asked]).count("would probably settle it") == notes([asked]).count(told) == 1
    page = write_claims(claim_records(tmp_path / "claims"), tmp_path / "report", "ntkexp claims")
    assert page.read_text(encoding="utf-8").count(f"second look: {told}") == 1
    assert asked.cpu_minutes == 1.5


def test_every_claim_is_shown_and_nothing_is_run(tmp_path: Path) -> None:
    for name, verdict in (("one", "supported"), ("two", "refuted"), ("three", "undecided")):
        record(tmp_path / "claims", name, verdict)
    record(tmp_path / "claims", "four", p=0.02)
    page = write_claims(claim_records(tmp_path / "claims"), tmp_path / "report", "ntkexp claims")
    links = assert_links_lead_somewhere(page)
    assert links.scripts == 1
    assert {"claim-one-0", "claim-two-0", "claim-three-0"} <= set(links.names)
    text = page.read_text(encoding="utf-8")
    assert "4 claims: 1 supported, 1 refuted, 1 not after correction and 1 undecided." in text
    assert "Verdicts that do not survive Holm&#39;s correction at 5 %, over 4 claims: four." in text


def test_identities_count_apart(tmp_path: Path) -> None:
    """They are no tests, so they belong to no family of tests."""
    claims = [record(tmp_path, name, p=0.012) for name in ("one", "two")]
    identity = replace(record(tmp_path, "exact", p=None), identity=True)
    summary = "2 claims: 2 supported. 1 identity (exact by construction): 1 checked."
    assert summarise_claims([*claims, identity], ClaimFamily(3)) == summary
    assert [row[1] for row in tabulate_claims([*claims, identity], ClaimFamily(3)).rows] == [
        "supported",
        "supported",
        "exact",
    ]
    assert "2 not after correction" in summarise_claims(claims, ClaimFamily(3))


def test_every_look_at_a_claim_is_in_the_family(tmp_path: Path) -> None:
    """With p = 0.01, two claims survive at 5 %/(2 · 2), for twice as many tests as claims, and not at 5 %/(2 · 3)."""
    claims = [record(tmp_path, name, p=0.01) for name in ("one", "two")]
    assert summarise_claims(claims, ClaimFamily(2)) == "2 claims: 2 supported."
    looked_again = summarise_claims(claims, ClaimFamily(2, {"one": 0, "two": 1}))
    assert looked_again.endswith(
        "Verdicts that do not survive Holm's correction at 5 %, over 2 claims and 1 further look: one and two."
    )
    quick = replace(claims[0], size="quick")
    assert "not after correction" not in summarise_claims([quick, replace(quick, name="b")], ClaimFamily(2, {"one": 9}))


def test_damaged_records_are_skipped(tmp_path: Path) -> None:
    record(tmp_path, "one")
    (record(tmp_path, "two").path / "verdict.json").write_text("{}")
    three = record(tmp_path, "three", "refuted").path / "verdict.json"
    three.write_bytes((tmp_path / "one-0" / "verdict.json").read_bytes())  # the verdict of another claim
    assert [found.name for found in claim_records(tmp_path)] == ["one"]


@pytest.mark.parametrize("chances", [*permutations([0.001, 0.007, 0.012, 1.0])][::3])
def test_the_correction_is_holms(chances: tuple[float, ...]) -> None:
    ordered = sorted(chances)
    kept = [all(2 * p <= 0.05 / (len(ordered) - j) for j, p in enumerate(ordered[: k + 1])) for k in range(4)]
    assert holm_rejections(chances) == [kept[ordered.index(p)] for p in chances]
    assert holm_rejections([*chances, None])[-1]


def test_one_claim_needs_no_correction(tmp_path: Path) -> None:
    assert summarise_claims([record(tmp_path, "one", p=0.02)]) == "1 claim: 1 supported."


# The page of explanations: every query can be chosen.


@pytest.fixture(scope="module")
def explanation_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two queries of a run."""
    folder = write_run(tmp_path_factory.mktemp("outputs") / "runs" / "net", digits())
    assert run(["explain", str(folder), "--page", "--split=test", "--query=1", "--query=0"]) == 0
    return folder.parent.parent / "report" / f"explain-{folder.name}.html"


def test_a_run_is_explained_where_it_misses_most(tmp_path: Path) -> None:
    """The page of runs has its worst queries, with unique anchors."""
    loaded = load_run(write_run(tmp_path / "runs" / "net", digits()))
    views, split = points_of_run(loaded, "run-a"), main_split(loaded.ladder)
    worst = worst_points(loaded, split, 3)
    assert [view["anchor"] for view in views] == [f"run-a-{split}-{number}" for number in worst]
    table = views[0]["examples"]
    assert isinstance(table, PageTable)
    assert len(table.rows) == min(25, loaded.contributions.sizes["example"])


def test_every_choice_has_its_part_whose_pieces_add_up(explanation_page: Path) -> None:
    text = explanation_page.read_text(encoding="utf-8")
    parts = re.findall(r'<section id="([\w-]+)" data-part="point"', text)
    assert parts == re.findall(r'<option value="([\w-]+)"', text) == ["test-1", "test-0"]
    assert all(words in text for words in ("Added</em>", "If left out</em>"))
    rows = re.search(r'<table id="pieces-test-1".*?</table>', text, re.S)
    assert rows is not None
    *pieces, output = [float(key) for key in re.findall(r'class="number" data-key="([^"]+)"', rows[0])]
    assert sum(pieces) == pytest.approx(output, rel=1e-12)


def test_the_check_shows_what_is_known() -> None:
    """It has a dot for each known pair of removal and query, and a title."""
    actual = np.array([[[1.0], [2.0]], [[3.0], [np.nan]]])
    predicted = np.array([[[1.0], [2.0]], [[3.0], [np.nan]]])
    removals = tuple(LeftOut(influential=not k, examples=(k,)) for k in range(2))
    found = LeaveOut(removals=removals, query=(0, 1), predicted=predicted, actual=actual)
    agreement = agreement_of(found, 1.0)
    assert (agreement.correlation, agreement.size) == pytest.approx((1.0, 1.0))
    drawn = checked(found, agreement)
    assert drawn.table["actual"].tolist() == [1.0, 2.0, 3.0]
    assert "2 retrainings" in caption_of(drawn.figure)


@pytest.mark.slow
def test_a_choice_shows_its_part_alone(explanation_page: Path, browser: Browser) -> None:
    opened = browser.new_page()
    heard: list[str] = []
    opened.on("console", lambda message: heard.append(message.text))
    opened.goto(explanation_page.as_uri())
    opened.get_by_label("Show").select_option("test-0")
    expect(opened.locator("#test-0")).to_be_visible()
    expect(opened.locator("#test-1")).to_be_hidden()
    found = Axe().run(opened)
    assert found.violations_count == 0, found.generate_report()
    opened.close()
    assert heard == []
