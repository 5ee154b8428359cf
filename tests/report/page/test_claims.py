"""The page of claims: every claim with its verdicts, escaped; and which verdicts stand when all are counted."""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser
from itertools import permutations
from pathlib import Path
from urllib.parse import unquote

import pytest

from ntkexp.cli.commands.claims import line, notes
from ntkexp.records.claim import TIMINGS, ClaimRecord, Judgement, claim_records, write_claim
from ntkexp.records.results import Took, write_timings
from ntkexp.report.claims import outlook, standing, summary
from ntkexp.report.page.build import write_claims

HOSTILE = "<script>alert('&')</script>"


def judgement(verdict: str = "supported", p: float | None = 0.001) -> Judgement:
    """One look."""
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


def test_more_seeds_are_said_with_the_minutes_that_they_take(tmp_path: Path) -> None:
    """Three seeds took 90 seconds of work, so that four more take two minutes, however long the machine was busy."""
    found = record(tmp_path / "claims", "one", "undecided", None)
    asked = replace(found, looks={**found.looks, "main": replace(found.main, more_seeds=4)})
    write_claim(asked)
    for uncounted in ({}, {"runs": Took(wall=90.0)}):  # as those that were kept before processor time was counted
        write_timings(asked.path / TIMINGS, uncounted)
        assert outlook(asked) == "4 more seeds would probably decide"
    write_timings(asked.path / TIMINGS, {"runs": Took(wall=4000.0, processor=90.0)})
    told = "4 more seeds, about 2.0 CPU minutes, would probably decide"
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
    write_timings(asked.path / TIMINGS, {"runs": Took(90.0, 90.0), "second": Took(30.0, 30.0)})
    told = "4 more seeds, about 0.7 CPU minutes, would probably decide"
    assert notes([asked]).count("would probably decide") == notes([asked]).count(told) == 1
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
    assert standing(chances) == [kept[ordered.index(p)] for p in chances]
    assert standing([*chances, None])[-1]


def test_one_claim_needs_no_correction(tmp_path: Path) -> None:
    assert summary([record(tmp_path, "one", p=0.02)]) == "1 claim: 1 supported."
