"""The page of claims in a real browser: accessible, as wide as the screen, sorted and filtered by keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from axe_playwright_python.sync_playwright import Axe
from matplotlib.figure import Figure
from playwright.sync_api import Browser, Page

from ntkexp.records.claim import PICTURE, Exhibit, claim_records, write_claim, write_exhibit
from ntkexp.report.page.build import write_claims
from ntkexp.report.plots.run_plots import svg
from tests.report.page.test_browser import Scheme
from tests.report.page.test_claims import record

pytestmark = pytest.mark.slow
VERDICTS = {"one": "supported", "two": "refuted", "three": "undecided"}


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Claims with pictures and tables, each at two sizes."""
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
def page(browser: Browser, claims: str) -> Iterator[Page]:
    opened = browser.new_page()
    opened.goto(claims)
    yield opened
    opened.close()


def shown(page: Page, place: int) -> list[str]:
    """What a column of the table of all claims shows."""
    return page.locator(f"#claims tbody tr:visible td:nth-child({place})").all_inner_texts()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_claims_fit_every_screen_and_are_accessible(page: Page, width: int, scheme: Scheme) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.locator("figcaption", has_text="Here: a line.").count() == 2 * len(VERDICTS)


def test_claims_are_sorted_and_filtered_by_keyboard(page: Page) -> None:
    page.get_by_label("Show claims with").focus()
    page.keyboard.type("verdict=refuted size=quick")
    assert shown(page, 1) == ["two"]
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    assert len(shown(page, 1)) == 2 * len(VERDICTS)
    page.keyboard.press("Tab")  # the table, which scrolls in itself
    page.keyboard.press("Tab")  # its first heading
    page.keyboard.press("Tab")
    for backwards in (False, True):
        page.keyboard.press("Enter")
        assert shown(page, 2) == sorted(2 * list(VERDICTS.values()), reverse=backwards)
    assert page.locator("#claims th[aria-sort]").inner_text().startswith("verdict")


def test_black_dots_are_as_light_as_lines_in_the_dark(page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    page.locator("details").first.evaluate("one => { one.open = true; }")
    fills = page.locator("svg.plot use").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
    assert fills
    assert "rgb(0, 0, 0)" not in fills
