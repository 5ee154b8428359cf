"""The pages in a real browser, in both colour schemes and at several widths."""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest
from axe_playwright_python.sync_playwright import Axe
from matplotlib.figure import Figure
from playwright.sync_api import Browser, Locator, Page, expect

from ntkexp.records.claim import PICTURE, Exhibit, claim_records, write_claim, write_exhibit
from ntkexp.report.page.build import write_claims
from ntkexp.report.plots.rendering import svg
from tests.report.page.conftest import HOSTILE
from tests.report.page.test_page import record

Open = Callable[..., Page]
Scheme = Literal["light", "dark"]


@pytest.fixture
def opened(browser: Browser, page: Path) -> Iterator[Open]:
    """A function that opens the page. Messages of the page and requests fail the test."""
    heard: list[str] = []
    pages: list[Page] = []

    def open_page(width: int = 1400, scheme: Scheme = "light", anchor: str = "") -> Page:
        new = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        new.on("console", lambda message: heard.append(message.text))
        new.on("pageerror", lambda error: heard.append(str(error)))
        new.on("dialog", lambda dialog: heard.append(dialog.message))
        new.on(
            "request", lambda request: heard.append(request.url) if request.url.partition("#")[0] != address else None
        )
        new.goto(f"{address}{anchor}")
        new.locator("#runs > details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        pages.append(new)
        return new

    address = page.as_uri()
    yield open_page
    for one in pages:
        one.close()
    assert heard == []


def filter_of(page: Page, table: str) -> Locator:
    """Return the filter of a table."""
    caption = page.locator(f"#{table} caption").inner_text()
    return page.get_by_label(f"Filter {caption}", exact=True)


ON_AREAS = ("rgb(253, 253, 253)", "rgb(2, 2, 2)")  # `ON_DARK` and `ON_LIGHT` of `report.plots.style`


def column(page: Page, name: str, table: str = "all-runs") -> list[str]:
    """Return the visible cells of a column."""
    place = page.locator(f"#{table} th[scope=col]").all_inner_texts().index(name) + 1
    return page.locator(f"#{table} tbody tr:not(.group):visible td:nth-child({place})").all_inner_texts()


def saved(page: Page, tmp_path: Path, button: Locator) -> Path:
    """Press a button, and return the file that it downloads."""
    with page.expect_download() as download:
        button.click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    return path


def unfold(page: Page) -> None:
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (800, "light"), (1400, "light"), (1400, "dark")])
def test_it_fits_every_screen_and_is_accessible(opened: Open, width: int, scheme: Scheme) -> None:
    """axe does not look into pictures: the colour of every text there has a contrast of 4.5, as WCAG asks.

    `tests.report.test_plots` compares text on coloured areas with these areas.
    """
    page = opened(width, scheme)
    unfold(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    colours = page.evaluate(
        """() => [...new Set([...document.querySelectorAll('svg text, svg tspan')]
            .map(text => getComputedStyle(text).fill))]"""
    )
    paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert paper > 0.9 if scheme == "light" else paper < 0.1
    assert len(colours) >= 3
    colours = [colour for colour in colours if channels(colour) not in {channels(ink) for ink in ON_AREAS}]
    assert {colour: ratio for colour in colours if (ratio := contrast(luminance(colour), paper)) < 4.5} == {}


def channels(colour: str) -> tuple[float, float, float]:
    """Parse rgb(r, g, b) from 0 to 255, or color(srgb r g b) from 0 to 1."""
    whole = 1 if colour.startswith("color") else 255
    red, green, blue = (float(part) / whole for part in re.findall(r"[\d.]+", colour.partition("(")[2])[:3])
    return red, green, blue


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    """Return the contrast ratio of WCAG."""
    high, low = max(one, other), min(one, other)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
def test_tables_sort_by_number_within_groups_and_have_pages(opened: Open) -> None:
    page = opened()
    pager = page.locator("#runs .pager").first
    assert pager.inner_text().split("\n")[1] == "1–25 of 40"
    for direction in ("ascending", "descending"):
        page.locator("#all-runs").get_by_role("button", name="loss").click()
        assert page.locator("#all-runs th[aria-sort]").get_attribute("aria-sort") == direction
        shown = (
            page.locator("#all-runs tbody")
            .first.locator("tr:not(.group):visible td.curve")
            .evaluate_all("cells => cells.map(cell => Number(cell.dataset.key))")
        )
        assert len(shown) == 25
        assert shown == sorted(shown, reverse=direction == "descending")
    pager.get_by_role("button", name="Next").click()
    assert len(column(page, "run")) == 15
    assert pager.get_by_role("button", name="Next").is_disabled()


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ("model.width>64 seed=0", 4),
        ("nowhere", 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("width=64", 10),
                ("model.width<64", 9),
                ("picture", 1),
                ("textbook_sum>0.004", 1),
                ("frozen_kernel>0 width=32 seed=0", 2),
            )
        ),
    ],
)
def test_tables_filter(opened: Open, wanted: str, count: int) -> None:
    """Filters know columns, and settings by their full and their short key."""
    page = opened()
    filter_of(page, "all-runs").fill(wanted)
    assert len(column(page, "run")) == count
    filter_of(page, "all-runs").fill("")
    assert len(column(page, "run")) == 25


@pytest.mark.slow
def test_every_table_of_a_sweep_has_its_own_filter(opened: Open) -> None:
    page = opened()
    filter_of(page, "points-width").fill("model.width=64")
    assert page.locator("#points-width tbody tr:visible").count() == 2
    assert len(column(page, "run")) == 25


@pytest.mark.slow
def test_links_lead_into_runs(opened: Open) -> None:
    page = opened(anchor="#run-mlp-w512-s0-picture")
    assert page.locator("#run-mlp-w512-s0-picture table").first.is_visible()
    filter_of(page, "all-runs").fill("model.width=32 seed=0")
    page.locator("#all-runs td a").locator("visible=true").first.click()
    expect(page.locator("#details > details[open]")).to_have_count(2)  # the browser opens it a moment later


@pytest.mark.slow
def test_names_are_shown_unchanged_and_text_in_pictures_can_be_selected(opened: Open) -> None:
    page = opened()
    assert HOSTILE in page.locator("#sweep-width").inner_text()
    filter_of(page, "all-runs").fill("alert")
    assert len(column(page, "run")) == 20
    page.locator("svg text", has_text="model.width").first.select_text()
    assert page.evaluate("getSelection().toString().trim()") == "model.width"


@pytest.mark.slow
def test_curves_of_selected_runs_are_drawn_together(opened: Open) -> None:
    """There is a line and a label for each selected run, in the order of their last values."""
    page = opened()
    panel = page.locator("#overlay")
    assert panel.is_hidden()
    names = column(page, "run")[:3]
    for name in names:
        page.get_by_label(f"Draw the curves of {name}").check()
    assert panel.locator("path[style*=dasharray]").count() == 3
    for quantity in ("loss", "kernel change"):
        panel.get_by_label("Curves of").select_option(label=quantity)
        assert quantity in str(panel.locator("svg").first.get_attribute("aria-label")).lower()
        last = {name: last_value(page, name, quantity.replace(" ", "_")) for name in names}
        heights = {name: float(panel.locator("text", has_text=name).get_attribute("y") or "nan") for name in names}
        assert sorted(names, key=lambda name: -last[name]) == sorted(names, key=lambda name: heights[name])
    filter_of(page, "all-runs").fill("model.width=32 seed=0")
    page.get_by_role("button", name="Draw curves").click()
    assert panel.locator("path[style*=dasharray]").count() == 2
    panel.get_by_role("button", name="Clear").click()
    assert panel.is_hidden()


def last_value(page: Page, name: str, curve: str) -> float:
    row = page.locator("#all-runs tr[data-curves]", has_text=name)
    curves = dict(part.split(":") for part in (row.get_attribute("data-curves") or "").split(";"))
    return float(curves[curve].split(",")[-1].split(" ")[1])


@pytest.mark.slow
def test_a_picture_opens_large_and_grows(opened: Open) -> None:
    """By a click or its button; the keyboard zooms and closes. The picture returns to its place."""
    page = opened()
    figure = page.locator("main figure").first
    small = width_of(figure.locator("svg"))
    figure.locator(".scroll").click()
    large = page.locator("dialog svg")
    fitted = width_of(large)
    assert fitted > 1.2 * small
    page.keyboard.press("+")
    assert width_of(large) > 1.3 * fitted
    page.keyboard.press("0")
    assert width_of(large) == pytest.approx(fitted, abs=20)  # the bars of the window may differ
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert width_of(figure.locator("svg")) == small
    figure.get_by_role("button", name="Enlarge").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Close").click()
    page.wait_for_selector("dialog", state="detached")
    assert width_of(figure.locator("svg")) == small


def width_of(drawing: Locator) -> float:
    box = drawing.bounding_box()
    assert box is not None
    return box["width"]


@pytest.mark.slow
def test_a_table_is_saved_with_every_digit(opened: Open, tmp_path: Path) -> None:
    """The file has the rows that pass the filter, and runs no formula."""
    page = opened()
    filter_of(page, "all-runs").fill("seed=0 model.width=32")
    tools = page.locator("#runs > .tools").first
    rows = list(csv.DictReader(saved(page, tmp_path, tools.get_by_role("button", name="CSV")).read_text().splitlines()))
    assert len(rows) == 2
    shown = page.locator("#all-runs tr[data-curves]:visible td.curve")
    keys = [shown.nth(k).get_attribute("data-key") for k in range(2)]
    assert [row["loss"] for row in rows] == keys
    latex = saved(page, tmp_path, tools.get_by_role("button", name="LaTeX")).read_text()
    assert latex.count("\\\\") == 3
    assert r"\toprule" in latex
    page.evaluate("document.querySelector('#all-runs td a').textContent = '=1+1'")
    page.evaluate("document.querySelector('#all-runs tr.filtered')?.classList.remove('filtered')")
    assert "'=1+1" in saved(page, tmp_path, tools.get_by_role("button", name="CSV")).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_are_saved_as_in_print(opened: Open, tmp_path: Path, scheme: Scheme) -> None:
    """The SVG has the colours of print in both schemes. The PDF has the size and text of the SVG."""
    page = opened(scheme=scheme)
    unfold(page)
    figures = page.locator("#run-mlp-w512-s0-picture figure")
    for k in range(0, figures.count(), 2):  # Chromium stops after ten downloads from one page
        figure = figures.nth(k)
        drawing = saved(page, tmp_path, figure.get_by_role("button", name="SVG"))
        text = drawing.read_text(encoding="utf-8")
        assert "var(" not in text
        root = ElementTree.fromstring(text)
        _, _, width, height = root.attrib["viewBox"].split()
        assert root.attrib["width"] == f"{width}pt"
        pdf = saved(page, tmp_path, figure.get_by_role("button", name="PDF")).read_bytes()
        assert pdf.startswith(b"%PDF-1.5\n")
        (box,) = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
        assert [float(side) for side in box] == [float(width), float(height)]
        words = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
        assert pdf_texts(pdf) == words


def pdf_texts(pdf: bytes) -> list[str]:
    """Return the texts of a PDF file that the page wrote, by the letters of its fonts."""
    start = int(pdf.rsplit(b"startxref\n", 1)[1].split()[0])
    assert pdf[start:].startswith(b"xref\n")
    streams = [zlib.decompress(part) for part in re.findall(rb"stream\n(.*?)\nendstream", pdf, re.S)]
    content = streams[0].decode("latin-1")
    maps = [stream.decode() for stream in streams if b"beginbfchar" in stream]
    letters = {}
    for weight, text in zip(("normal", "bold"), maps, strict=True):
        pairs = re.findall(r"beginbfchar <(\w+)> <(\w+)>", text)
        letters[weight] = {glyph: bytes.fromhex(code).decode("utf-16-be") for glyph, code in pairs}
    found = []
    for weight, glyphs in re.findall(r"/(normal|bold) [\d.]+ Tf\n.*?<(\w*)> Tj", content):
        found.append("".join(letters[weight][glyphs[k : k + 4]] for k in range(0, len(glyphs), 4)))
    return found


@pytest.mark.slow
def test_the_page_prints_all_rows_without_its_controls(opened: Open) -> None:
    page = opened()
    page.emulate_media(media="print")
    assert page.locator(":not(th) > button:visible, input:visible, nav:visible").count() == 0
    assert page.locator("#all-runs tbody tr[data-curves]:visible").count() == 40


@pytest.mark.slow
def test_no_table_is_cut_in_print(opened: Open) -> None:
    """A landscape page of A4 has 1032 pixels between its margins."""
    page = opened(width=1032, scheme="dark")
    unfold(page)
    page.emulate_media(media="print", color_scheme="dark")
    widths = page.locator("table:visible").evaluate_all("tables => tables.map(table => table.offsetWidth)")
    assert page.locator("#points-width.wide").count() == 1
    assert max(widths) <= 1032
    assert luminance(page.evaluate("getComputedStyle(document.body).color")) < 0.1


@pytest.mark.slow
def test_every_control_has_a_name(opened: Open) -> None:
    """Buttons of different tables and pictures have different names."""
    page = opened()
    unfold(page)
    for figure in page.locator("main figure:visible").all()[:5]:
        title = figure.locator("svg").get_attribute("aria-label")
        for kind in ("Enlarge", "SVG", "PDF"):
            assert figure.get_by_role("button", name=f"{kind} {'' if kind == 'Enlarge' else 'of '}{title}").count() == 1


def test_without_a_script_everything_is_shown(browser: Browser, page: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(page.as_uri())
    assert plain.locator("#all-runs tbody tr[data-curves]:visible").count() == 40
    assert plain.locator("button, input, select:visible").count() == 0
    context.close()


# The page of claims.


VERDICTS = {"one": "supported", "two": "refuted", "three": "undecided"}


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of claims with pictures and tables, in two sizes."""
    folder = tmp_path_factory.mktemp("claims")
    figure = Figure()
    figure.subplots().plot([1, 2], "o-k")
    for name, verdict in VERDICTS.items():
        whole = record(folder, name, verdict)
        for found in (whole, replace(whole, path=folder / f"{name}-quick", size="quick")):
            write_claim(found)
            (found.path / PICTURE).write_text(svg(figure))
            write_exhibit(found.path, Exhibit("Here: a line.", ("depth", "paper, %"), ((3, 40.94), (4, None))))
    return write_claims(claim_records(folder), folder / "report", "ntkexp claims").as_uri()


@pytest.fixture
def claims_page(browser: Browser, claims: str) -> Iterator[Page]:
    opened = browser.new_page()
    opened.goto(claims)
    yield opened
    opened.close()


def shown(claims_page: Page, place: int) -> list[str]:
    """Return a column of the table of all claims."""
    return claims_page.locator(f"#claims tbody tr:visible td:nth-child({place})").all_inner_texts()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_claims_fit_every_screen_and_are_accessible(claims_page: Page, width: int, scheme: Scheme) -> None:
    claims_page.set_viewport_size({"width": width, "height": 900})
    claims_page.emulate_media(color_scheme=scheme)
    unfold(claims_page)
    assert claims_page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(claims_page)
    assert found.violations_count == 0, found.generate_report()
    assert claims_page.locator("figcaption", has_text="Here: a line.").count() == 2 * len(VERDICTS)


@pytest.mark.slow
def test_claims_are_sorted_and_filtered_by_keyboard(claims_page: Page) -> None:
    filter_of(claims_page, "claims").focus()
    claims_page.keyboard.type("verdict=refuted size=quick")
    assert shown(claims_page, 1) == ["two"]
    claims_page.keyboard.press("Control+A")
    claims_page.keyboard.press("Delete")
    assert len(shown(claims_page, 1)) == 2 * len(VERDICTS)
    for _ in range(8):  # past the buttons for files and the table, which scrolls
        claims_page.keyboard.press("Tab")
        if claims_page.evaluate("document.activeElement.textContent") == "verdict":
            break
    for backwards in (False, True):
        claims_page.keyboard.press("Enter")
        assert shown(claims_page, 2) == sorted(2 * list(VERDICTS.values()), reverse=backwards)
    assert claims_page.locator("#claims th[aria-sort]").inner_text().startswith("verdict")


@pytest.mark.slow
def test_black_dots_are_as_light_as_lines_in_the_dark(claims_page: Page) -> None:
    claims_page.emulate_media(color_scheme="dark")
    claims_page.locator("#details details").first.evaluate("one => { one.open = true; }")
    fills = claims_page.locator("svg.plot use").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
    assert fills
    assert "rgb(0, 0, 0)" not in fills
