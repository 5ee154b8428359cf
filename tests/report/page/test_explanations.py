"""The page of explanations: every point can be chosen, and shows both answers and what they rest on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from ntkexp.cli.main import run
from ntkexp.records.contributions import LeaveOut, LeftOut
from ntkexp.report.leave_out import held_against
from ntkexp.report.plots.examples import checked
from ntkexp.report.run import load_run
from tests.report.synthetic import digits, write_run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two points of a run."""
    folder = write_run(tmp_path_factory.mktemp("outputs") / "runs" / "net", digits())
    assert run(["explain", str(folder), "--page", "--split=test", "--probe=1", "--probe=0"]) == 0
    return folder.parent.parent / "report" / f"explain-{folder.name}.html"


def test_every_choice_has_its_part(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parts = re.findall(r'<section id="([\w-]+)" data-part="point"', text)
    assert parts == re.findall(r'<option value="([\w-]+)"', text) == ["test-1", "test-0"]
    assert "Added</em>" in text
    assert "If left out</em>" in text


def test_pieces_add_up_to_the_output(page: Path) -> None:
    """As their cells are sorted by, to all digits."""
    text = page.read_text(encoding="utf-8")
    rows = re.search(r'<table id="pieces-test-1".*?</table>', text, re.S)
    assert rows is not None
    *pieces, output = [float(key) for key in re.findall(r'class="number" data-key="([^"]+)"', rows[0])]
    assert sum(pieces) == pytest.approx(output, rel=1e-12)


def test_the_check_shows_what_is_known() -> None:
    """A dot for each removal and point whose effect is known, and the sentence that they come to."""
    actual = np.array([[[1.0], [2.0]], [[3.0], [np.nan]]])
    predicted = np.array([[[1.0], [2.0]], [[3.0], [np.nan]]])
    removals = tuple(LeftOut(influential=not k, examples=(k,)) for k in range(2))
    found = LeaveOut(removals=removals, probe=(0, 1), predicted=predicted, actual=actual)
    picture = checked(found, held_against(found, 1.0))
    assert picture.table["actual"].tolist() == [1.0, 2.0, 3.0]
    assert "2 retrainings" in picture.figure.get_suptitle().replace("\n", " ")


@pytest.mark.parametrize("other", ["--json", "--picture=x.svg"])
def test_what_a_page_cannot_be_is_one_line(page: Path, other: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = page.parent.parent / "runs" / page.stem.removeprefix("explain-")
    assert load_run(folder).finished
    assert run(["explain", str(folder), "--page", other]) == 2
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_choice_shows_its_part_alone(page: Path, browser: Browser) -> None:
    opened = browser.new_page()
    heard: list[str] = []
    opened.on("console", lambda message: heard.append(message.text))
    opened.goto(page.as_uri())
    opened.get_by_label("Show").select_option("test-0")
    expect(opened.locator("#test-0")).to_be_visible()
    expect(opened.locator("#test-1")).to_be_hidden()
    opened.close()
    assert heard == []
