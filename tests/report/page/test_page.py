"""The page as a file: alone, escaped, the same bytes each time, with every picture's numbers and what it leaves out."""

from __future__ import annotations

import csv
import math
import re
import shutil
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from itertools import permutations
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from ntkexp.cli.claims import line, notes
from ntkexp.cli.main import run
from ntkexp.mistake import Mistake
from ntkexp.records.claim import TIMINGS, ClaimRecord, Judgement, claim_records, write_claim
from ntkexp.records.contributions import LeaveOut, LeftOut
from ntkexp.records.results import Seconds, write_timings
from ntkexp.records.sweep import read_sweep, write_sweep
from ntkexp.report.claims import holm_rejections, outlook, summarise_claims
from ntkexp.report.comparison import GROUPING_KEYS, MAX_SETTINGS_LETTERS, grouped
from ntkexp.report.explain import worst_points
from ntkexp.report.inventory import flatten_config
from ntkexp.report.leave_out import agreement_of
from ntkexp.report.loaded_run import load_run
from ntkexp.report.material import Material, gather
from ntkexp.report.page.build import HERE, markdown, points_of_run, write, write_claims
from ntkexp.report.page.picture import inline, link
from ntkexp.report.plots.examples import checked
from ntkexp.report.sentence import main_split
from ntkexp.report.tables import PageTable
from tests.report.page.conftest import HOSTILE
from tests.report.synthetic import digits, write_run, write_small_run

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
    figures = re.findall(r"<figure[ >].*?</figure>", page.read_text(encoding="utf-8"), flags=re.S)
    assert len(figures) >= 10
    assert all("numbers (CSV)" in figure for figure in figures)
    inside = [b64decode(href.removeprefix(CSV)).decode() for href in links.hrefs if href.startswith(CSV)]
    beside = [(page.parent / href).read_text("utf-8") for href in links.hrefs if href.endswith(".csv")]
    tables = inside + beside
    assert len(tables) >= len(figures)
    for table in tables:
        assert len(list(csv.DictReader(table.splitlines()))) > 0


def test_what_is_left_out_is_named(outputs: Path, page: Path) -> None:
    material = gather([], outputs)
    assert len(material.left_out) == 2
    text = page.read_text(encoding="utf-8")
    assert "Left out:" in text
    assert "broken" in text
    assert "\n" not in material.left_out_line


def test_every_run_is_in_one_group_with_its_errors(outputs: Path) -> None:
    """Beside runs that chose the same parts; told apart in few letters."""
    runs = gather([], outputs).runs
    groups = grouped(runs)
    assert sorted(run.path for group in groups for run in group.runs) == sorted(run.path for run in runs)
    for group in groups:
        parts = {tuple(flatten_config(run.config).get(key) for key in GROUPING_KEYS) for run in group.runs}
        assert len(parts) == 1 or len(parts) == len(group.runs)
        assert group.table["run"].str.len().max() <= MAX_SETTINGS_LETTERS
        for one, (_, row) in zip(group.runs, group.table.iterrows(), strict=True):
            here = [each for each in one.ladder if each.split == main_split(one.ladder)]
            errors = {each.machine: each.relative_error for each in here if each.relative_error is not None}
            assert {name: row[name] for name in errors} == errors


def test_missing_runs_of_a_sweep_are_counted(outputs: Path, tmp_path: Path) -> None:
    """Three that wait are said in one line."""
    copy = tmp_path / "outputs"
    shutil.copytree(outputs, copy, symlinks=True)
    record = next((copy / "sweeps").glob("*.json"))
    sweep = read_sweep(record)
    waiting = [replace(each, state="waiting") for each in sweep.runs[:3]]
    for each in waiting:
        shutil.rmtree(each.folder, ignore_errors=True)
    write_sweep(replace(sweep, runs=(*waiting, *sweep.runs[3:])))
    assert f"3 runs of {sweep.name}, waiting" in gather([], copy).left_out


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
        assert text.index("<figure") < text.index("All runs")
        found = Links()
        found.feed(text)
        assert len(found.names) == len(set(found.names))


def test_namesakes_from_two_places_are_told_apart(tmp_path: Path) -> None:
    places = [write_small_run(tmp_path / where / "mlp-w64-s0", 64, 0, 0.5) for where in ("here", "there", "nowhere")]
    text = write(gather(list(map(str, places)), tmp_path), tmp_path / "report", "ntkexp report").read_text("utf-8")
    found = Links()
    found.feed(text)
    assert len(found.names) == len(set(found.names))
    names = ["#run-mlp-w64-s0", "#run-mlp-w64-s0-2", "#run-mlp-w64-s0-3"]
    assert [href for href in found.hrefs if href.startswith("#run-")] == 2 * names  # by group, and with all settings


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
    with pytest.raises(Mistake, match="not a plain picture"):
        inline(f"<svg>{content}</svg>", "x", "title")
    with pytest.raises(Mistake, match="not a plain picture"):
        inline(content, "x", "title")


@pytest.mark.parametrize(
    "attribute", ['viewBox="0>1"', "viewBox='\" onload=alert(1)'", 'style="position: fixed"', "x='\\'"]
)
def test_the_first_tag_cannot_be_broken_open(attribute: str) -> None:
    with pytest.raises(Mistake, match="not a plain picture"):
        inline(f"<svg {attribute}></svg>", "x", "title")


def test_a_long_value_is_judged_at_once() -> None:
    """Trying every way to part it would take as long as the square of its length."""
    blanks = " " * 10**6
    for attribute in (f"style='fill: {blanks}!'", f"d='{blanks}!'", f"fill='{blanks}!'"):
        with pytest.raises(Mistake, match="not a plain picture"):
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


# The page of claims: every claim with its verdicts, escaped; and which verdicts stand when all are counted.


def judgement(verdict: str = "supported", p: float | None = 0.001) -> Judgement:
    numbers = {"figure": -0.5, "low": -0.6, "high": math.nan, "p": p, "more_seeds": None}
    told = {"expected": "slope −0.5 ± 0.1", "seeds": (0, 1, 2), "draws": "each drawing weights", "note": HOSTILE}
    return Judgement(verdict=verdict, **numbers, **told)  # type: ignore[arg-type]


def record(folder: Path, name: str, verdict: str = "supported", p: float | None = 0.001) -> ClaimRecord:
    """A claim that was judged, in its folder."""
    looks = {"main": judgement(verdict, p), "control": judgement("refuted"), "second": judgement()}
    said = {"statement": HOSTILE, "source": HOSTILE, "refutes": HOSTILE, "command": f"ntkexp claims {name}"}
    found = ClaimRecord(path=folder / f"{name}-0", name=name, digest="0", size="default", looks=looks, **said)
    write_claim(found)
    return found


def test_fresh_seeds_are_said_with_the_minutes_that_they_take(tmp_path: Path) -> None:
    """Three seeds took 90 seconds of work, so that seven take three and a half minutes, however busy a machine is."""
    found = record(tmp_path / "claims", "one", "undecided", None)
    asked = replace(found, looks={**found.looks, "main": replace(found.main, more_seeds=4)})
    write_claim(asked)
    for uncounted in ({}, {"runs": Seconds(wall=90.0)}):  # as those that were kept before processor time was counted
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


def test_the_second_look_says_what_would_decide_it(tmp_path: Path) -> None:
    """Its three seeds took 30 of the claim's 90 seconds; a control may stay undecided."""
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


class Shown(HTMLParser):
    """The links of a page, the names of its elements, and the scripts in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.hrefs: list[str] = []
        self.names: list[str] = []
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.hrefs += [value or "" for name, value in attrs if name == "href" and tag == "a"]
        self.names += [value or "" for name, value in attrs if name == "id"]


def test_every_claim_is_shown_and_nothing_is_run(tmp_path: Path) -> None:
    for name, verdict in (("one", "supported"), ("two", "refuted"), ("three", "undecided")):
        record(tmp_path / "claims", name, verdict)
    page = write_claims(claim_records(tmp_path / "claims"), tmp_path / "report", "ntkexp claims")
    text = page.read_text(encoding="utf-8")
    shown = Shown(text)
    assert shown.scripts == 1
    assert {"claim-one-0", "claim-two-0", "claim-three-0"} <= set(shown.names)
    assert "3 claims: 1 supported, 1 refuted and 1 undecided." in text
    assert "By Holm&#39;s correction over all 3, 2 of 2 verdicts stand at 5 %." in text
    inside = [href for href in shown.hrefs if href.startswith("#")]
    assert {href[1:] for href in inside} <= set(shown.names)
    files = [page.parent / unquote(href) for href in shown.hrefs if href not in inside]
    assert [file for file in files if not file.exists()] == []


def test_what_is_damaged_is_left_to_its_command(tmp_path: Path) -> None:
    record(tmp_path, "one")
    (record(tmp_path, "two").path / "verdict.json").write_text("{}")
    three = record(tmp_path, "three", "refuted").path / "verdict.json"
    three.write_bytes((tmp_path / "one-0" / "verdict.json").read_bytes())  # what was found of another claim
    assert [found.name for found in claim_records(tmp_path)] == ["one"]


@pytest.mark.parametrize("chances", [*permutations([0.001, 0.007, 0.012, 1.0])][::3])
def test_the_correction_is_holms(chances: tuple[float, ...]) -> None:
    ordered = sorted(chances)
    kept = [all(2 * p <= 0.05 / (len(ordered) - j) for j, p in enumerate(ordered[: k + 1])) for k in range(4)]
    assert holm_rejections(chances) == [kept[ordered.index(p)] for p in chances]
    assert holm_rejections([*chances, None])[-1]


def test_one_claim_needs_no_correction(tmp_path: Path) -> None:
    assert summarise_claims([record(tmp_path, "one", p=0.02)]) == "1 claim: 1 supported."


# The page of explanations: every point can be chosen, and shows both answers and what they rest on.


@pytest.fixture(scope="module")
def explanation_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two points of a run."""
    folder = write_run(tmp_path_factory.mktemp("outputs") / "runs" / "net", digits())
    assert run(["explain", str(folder), "--page", "--split=test", "--query=1", "--query=0"]) == 0
    return folder.parent.parent / "report" / f"explain-{folder.name}.html"


def test_a_run_is_explained_where_it_misses_most(tmp_path: Path) -> None:
    """On the page of runs as well, by names that no other run has there."""
    loaded = load_run(write_run(tmp_path / "runs" / "net", digits()))
    views, split = points_of_run(loaded, "run-a"), main_split(loaded.ladder)
    worst = worst_points(loaded, split, 3)
    assert [view["anchor"] for view in views] == [f"run-a-{split}-{number}" for number in worst]
    table = views[0]["examples"]
    assert isinstance(table, PageTable)
    assert len(table.rows) == min(25, loaded.contributions.sizes["example"])


def test_every_choice_has_its_part(explanation_page: Path) -> None:
    text = explanation_page.read_text(encoding="utf-8")
    parts = re.findall(r'<section id="([\w-]+)" data-part="point"', text)
    assert parts == re.findall(r'<option value="([\w-]+)"', text) == ["test-1", "test-0"]
    assert "Added</em>" in text
    assert "If left out</em>" in text


def test_pieces_add_up_to_the_output(explanation_page: Path) -> None:
    """As their cells are sorted by, to all digits."""
    text = explanation_page.read_text(encoding="utf-8")
    rows = re.search(r'<table id="pieces-test-1".*?</table>', text, re.S)
    assert rows is not None
    *pieces, output = [float(key) for key in re.findall(r'class="number" data-key="([^"]+)"', rows[0])]
    assert sum(pieces) == pytest.approx(output, rel=1e-12)


def test_the_check_shows_what_is_known() -> None:
    """A dot for each removal and point whose effect is known, and the sentence that they come to."""
    actual = np.array([[[1.0], [2.0]], [[3.0], [np.nan]]])
    predicted = np.array([[[1.0], [2.0]], [[3.0], [np.nan]]])
    removals = tuple(LeftOut(influential=not k, examples=(k,)) for k in range(2))
    found = LeaveOut(removals=removals, query=(0, 1), predicted=predicted, actual=actual)
    picture = checked(found, agreement_of(found, 1.0))
    assert picture.table["actual"].tolist() == [1.0, 2.0, 3.0]
    assert "2 retrainings" in picture.figure.get_suptitle().replace("\n", " ")


@pytest.mark.parametrize("other", ["--json", "--picture=x.svg"])
def test_what_a_page_cannot_be_is_one_line(
    explanation_page: Path, other: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = explanation_page.parent.parent / "runs" / explanation_page.stem.removeprefix("explain-")
    assert load_run(folder).finished
    assert run(["explain", str(folder), "--page", other]) == 2
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_choice_shows_its_part_alone(explanation_page: Path, browser: Browser) -> None:
    opened = browser.new_page()
    heard: list[str] = []
    opened.on("console", lambda message: heard.append(message.text))
    opened.goto(explanation_page.as_uri())
    opened.get_by_label("Show").select_option("test-0")
    expect(opened.locator("#test-0")).to_be_visible()
    expect(opened.locator("#test-1")).to_be_hidden()
    opened.close()
    assert heard == []
