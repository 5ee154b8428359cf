"""The pages in a real browser, in both colour schemes and at several widths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from matplotlib.figure import Figure
from playwright.sync_api import Browser, Page

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


def column(page: Page, name: str) -> list[str]:
    """Return a column of the table of all runs."""
    place = page.locator("#all-runs th").all_inner_texts().index(name) + 1
    return page.locator(f"#all-runs tbody tr:visible td:nth-child({place})").all_inner_texts()


def unfold(page: Page) -> None:
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (800, "light"), (1400, "light"), (1400, "dark")])
def test_it_fits_every_screen_and_is_accessible(opened: Open, width: int, scheme: Scheme) -> None:
    """axe does not look into pictures: the colour of every text there has a contrast of 4.5, as WCAG asks."""
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
def test_tables_sort_by_number_and_have_pages(opened: Open) -> None:
    page = opened()
    pager = page.locator("#runs .pager").last
    assert pager.inner_text().split("\n")[1] == "1–25 of 40"
    for direction in ("ascending", "descending"):
        page.get_by_role("button", name="model.width").last.click()
        assert page.locator("#all-runs th[aria-sort]").get_attribute("aria-sort") == direction
        shown = [int(text) for text in column(page, "model.width")]
        assert len(shown) == 25
        assert shown == sorted(shown, reverse=direction == "descending")
        assert shown[0] == (32 if direction == "ascending" else 512)
    pager.get_by_role("button", name="Next").click()
    assert len(column(page, "run")) == 15
    assert pager.get_by_role("button", name="Next").is_disabled()


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ("model.width>64 seed=0", 5),
        ("nowhere", 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("model.width=64", 10), ("model.width<64", 9), ("picture", 1))
        ),
    ],
)
def test_tables_filter(opened: Open, wanted: str, count: int) -> None:
    page = opened()
    page.get_by_label("Show runs with").fill(wanted)
    assert len(column(page, "run")) == count
    page.get_by_label("Show runs with").fill("")
    assert len(column(page, "run")) == 25


@pytest.mark.slow
def test_every_table_of_a_sweep_has_its_own_filter(opened: Open) -> None:
    page = opened()
    page.get_by_label("Show points with").fill("model.width=64")
    assert page.locator("#points-width tbody tr:visible").count() == 2
    assert len(column(page, "run")) == 25
    page.get_by_label("Show laws with").fill("frozen")
    assert 0 < page.locator("#fits-width tbody tr:visible").count() < page.locator("#fits-width tbody tr").count()


@pytest.mark.slow
def test_links_lead_into_runs(opened: Open) -> None:
    page = opened(anchor="#run-mlp-w512-s0-picture")
    assert page.locator("#run-mlp-w512-s0-picture table").is_visible()
    page.get_by_label("Show runs with").fill("model.width=32 seed=0")
    page.locator("#all-runs a").first.click()
    assert page.locator("#details details[open]").count() == 2


@pytest.mark.slow
def test_names_are_shown_unchanged_and_text_in_pictures_can_be_selected(opened: Open) -> None:
    page = opened()
    assert HOSTILE in page.locator("#sweep-width").inner_text()
    page.get_by_label("Show runs with").fill("alert")
    assert len(column(page, "run")) == 20
    page.locator("svg text", has_text="model.width").first.select_text()
    assert page.evaluate("getSelection().toString().trim()") == "model.width"


@pytest.mark.slow
def test_a_picture_grows_at_a_click_and_shrinks_at_the_next(opened: Open) -> None:
    """The Enter key works too, and the page keeps its width."""
    page = opened()
    picture = page.locator("figure .scroll").first
    drawing = picture.locator("svg")

    def width() -> float:
        box = drawing.bounding_box()
        assert box is not None
        return box["width"]

    small = width()
    picture.click()
    assert width() > 1.5 * small
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture.click()
    assert width() == small
    picture.focus()
    page.keyboard.press("Enter")
    assert width() > 1.5 * small


@pytest.mark.slow
def test_the_page_prints_without_its_buttons(opened: Open) -> None:
    page = opened()
    page.emulate_media(media="print")
    assert not page.locator(".pager, nav, .filter").first.is_visible()
    assert page.locator("#all-runs tbody tr:visible").count() == 40


def test_without_a_script_everything_is_shown(browser: Browser, page: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(page.as_uri())
    assert plain.locator("#all-runs tbody tr").count() == 40
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
    claims_page.get_by_label("Show claims with").focus()
    claims_page.keyboard.type("verdict=refuted size=quick")
    assert shown(claims_page, 1) == ["two"]
    claims_page.keyboard.press("Control+A")
    claims_page.keyboard.press("Delete")
    assert len(shown(claims_page, 1)) == 2 * len(VERDICTS)
    claims_page.keyboard.press("Tab")  # the table, which scrolls
    claims_page.keyboard.press("Tab")  # its first heading
    claims_page.keyboard.press("Tab")
    for backwards in (False, True):
        claims_page.keyboard.press("Enter")
        assert shown(claims_page, 2) == sorted(2 * list(VERDICTS.values()), reverse=backwards)
    assert claims_page.locator("#claims th[aria-sort]").inner_text().startswith("verdict")


@pytest.mark.slow
def test_black_dots_are_as_light_as_lines_in_the_dark(claims_page: Page) -> None:
    claims_page.emulate_media(color_scheme="dark")
    claims_page.locator("details").first.evaluate("one => { one.open = true; }")
    fills = claims_page.locator("svg.plot use").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
    assert fills
    assert "rgb(0, 0, 0)" not in fills
