"""Judged claims are published, and earlier publications are kept."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pytest

from ntkexp.claim.conduct import circumstances, register_claim
from ntkexp.claim.publication import VERDICTS_FILE, files_of, write_digests
from ntkexp.claim.publish import check, judge_again, publish
from ntkexp.claim.trial import AbstractTrial, Rows
from ntkexp.cli.claims import publish_or_check, registered
from ntkexp.config.compose import Composer, composer
from ntkexp.data import CIFAR10
from ntkexp.data.base import AbstractSource
from ntkexp.mistake import Mistake
from ntkexp.records.claim import ClaimRecord, claim_records
from ntkexp.records.register import RegisterEntry
from ntkexp.report.analysis.two_way import two_way_mean
from tests.claim.subject import OF_LINES, Line, judged, planned
from tests.claim.test_register import written

Entries: TypeAlias = dict[str, Sequence[RegisterEntry]]

TREE = OF_LINES | {"null": 0, "control": {"trial": {"slope": 0.0}}}


def looked_at(folder: Path, tree: dict[str, Any] = TREE) -> tuple[Composer, list[ClaimRecord], Entries]:
    """Register and judge a claim of a user. Return its composer, its record and its entries in the register."""
    made, out = written(folder, tree), folder / "out" / "claims"
    register = register_claim("tiny", made.builder, out)
    register.record(judged(planned(tree, out, made=made)), circumstances())
    return made, claim_records(out), {"tiny": registered(made.builder.choices, out)["tiny"]}


def test_a_publication_has_the_verdicts_and_tables(tmp_path: Path) -> None:
    (made, records, entries), folder = looked_at(tmp_path), tmp_path / "docs"
    assert publish(folder, made, records, entries) == ["tiny"]
    (row,) = json.loads((folder / VERDICTS_FILE).read_text())
    words = (row["name"], row["verdict"], row["control"]["verdict"], row["second"]["verdict"], row["entry"])
    assert words == ("tiny", "supported", "refuted", "supported", entries["tiny"][-1].digest)
    assert [*pd.read_csv(folder / "tiny" / "main.csv")] == ["runs", "width", "seed", "value"]
    assert "1 claim: 1 supported." in (folder / "README.md").read_text()
    assert check(folder, made, entries) == ["tiny"]


def test_the_times_of_files_do_not_choose_the_version_of_a_claim(tmp_path: Path) -> None:
    """A copied folder of an earlier version is newer than that of the version in the register."""
    (made, _, entries), out = looked_at(tmp_path), tmp_path / "out" / "claims"
    earlier = judged(planned(TREE | {"seeds": 3}, out, made=made))
    assert earlier.digest != entries["tiny"][-1].digest
    os.utime(earlier.path / "verdict.json", (2**32, 2**32))
    publish_or_check(["publish", str(tmp_path / "docs")], made, ["tests"], out, "")
    (row,) = json.loads((tmp_path / "docs" / VERDICTS_FILE).read_text())
    assert row["entry"] == entries["tiny"][-1].digest


def test_changed_files_are_not_published_again(tmp_path: Path) -> None:
    """New digests would certify them."""
    (made, records, entries), folder = looked_at(tmp_path), tmp_path / "docs"
    publish(folder, made, records, entries)
    assert publish(folder, made, [], entries) == ["tiny"]
    with (folder / "tiny" / "main.csv").open("a") as table:
        table.write("trial,4,3,0.25\n")
    with pytest.raises(Mistake, match=r"main\.csv is not as it was published"):
        publish(folder, made, [], entries)
    assert publish(folder, made, records, entries) == ["tiny"]
    assert check(folder, made, entries) == ["tiny"]


def test_pictures_of_kept_claims_are_drawn_again(tmp_path: Path) -> None:
    """From the published tables, without the runs: the same picture. Only a picture as published is drawn again."""
    (made, records, entries), folder = looked_at(tmp_path), tmp_path / "docs"
    publish(folder, made, records, entries)
    picture = folder / "tiny" / "picture.svg"
    drawn = picture.read_bytes()
    picture.write_bytes(drawn.replace(b"<path", b"<path ", 1))
    with pytest.raises(Mistake, match=r"picture\.svg is not as it was published"):
        publish(folder, made, [], entries)
    write_digests(folder, files_of(json.loads((folder / VERDICTS_FILE).read_text())))
    assert publish(folder, made, [], entries) == ["tiny"]
    assert picture.read_bytes() == drawn
    assert check(folder, made, entries) == ["tiny"]


def test_earlier_publications_stay_while_their_claims_are_unchanged(tmp_path: Path) -> None:
    """Verdict, tables and page do not need the runs. The files of changed claims are removed."""
    (made, records, mine), folder = looked_at(tmp_path), tmp_path / "docs"
    publish(folder, made, records, mine)
    (row,) = json.loads((folder / VERDICTS_FILE).read_text())
    others = [row | {"name": name, "entry": entry} for name, entry in (("kept", row["entry"]), ("changed", "0" * 8))]
    elsewhere = [row | {"name": "../mine"}, row | {"name": ""}]  # no claims: their folders stay
    (folder / VERDICTS_FILE).write_text(json.dumps([row, *others, *elsewhere]))
    for name in ("kept", "changed", "../mine"):
        (folder / name).mkdir()

    entries = mine | {"kept": mine["tiny"], "changed": mine["tiny"]}
    assert publish(folder, made, records, entries) == ["kept", "tiny"]
    kept, tiny = json.loads((folder / VERDICTS_FILE).read_text())
    assert kept == tiny | {"name": "kept"}
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"kept", "tiny"}
    assert "| [kept](#kept) | supported |" in (folder / "README.md").read_text()
    assert (tmp_path / "mine").is_dir()


def test_the_note_on_seeds_is_written_again(tmp_path: Path) -> None:
    (made, (record,), mine), folder = looked_at(tmp_path), tmp_path / "docs"
    older = replace(record, looks={**record.looks, "main": replace(record.main, draws="as it was said then")})
    publish(folder, made, [older], mine)
    (row,) = json.loads((folder / VERDICTS_FILE).read_text())
    assert row["main"]["draws"] == record.main.draws != older.main.draws


def test_published_tables_are_judged_again_by_the_present_rules(tmp_path: Path) -> None:
    """The outcome is recorded for the same look, and the earlier outcome stays on record."""
    (made, (record,), entries), folder = looked_at(tmp_path), tmp_path / "docs"
    publish(folder, made, [record], entries)
    (first,) = json.loads((folder / VERDICTS_FILE).read_text())

    # the second look is judged with a margin that its slope exceeds
    looks = {**record.looks, "second": replace(record.looks["second"], verdict="undecided", p=None)}
    rows = [first | {"verdict": "not replicated", "second": first["second"] | {"verdict": "undecided", "p": None}}]
    (folder / VERDICTS_FILE).write_text(json.dumps(rows))
    write_digests(folder, files_of(rows))
    register = register_claim("tiny", made.builder, tmp_path / "out" / "claims")
    register.record(replace(record, looks=looks), circumstances() | {"date": "2026-11-30T00:00:00+00:00"})
    entries = {"tiny": register.attempts("tiny")}

    ((again, date),) = judge_again(folder, made, entries)
    assert (again.verdict, again.looks, date) == ("supported", record.looks, first["date"])
    register.record(again, circumstances(), date, "The rules of judging were amended.")
    assert [look["verdict"] for look in register.attempts("tiny")[-1].looks] == ["supported", "not replicated"]
    assert publish(folder, made, [again], {"tiny": register.attempts("tiny")}) == ["tiny"]
    assert json.loads((folder / VERDICTS_FILE).read_text())[0]["verdict"] == "supported"


def test_tables_of_a_changed_look_are_not_judged_again(tmp_path: Path) -> None:
    (made, records, entries), folder = looked_at(tmp_path), tmp_path / "docs"
    publish(folder, made, records, entries)
    for changes, count in (({"refutes": "nothing else"}, 1), ({"trial": TREE["trial"] | {"slope": -1.01}}, 0)):
        made = written(tmp_path, TREE | changes)
        register = register_claim("tiny", made.builder, tmp_path / "out" / "claims", "It was not clear before.")
        assert len(judge_again(folder, made, {"tiny": register.attempts("tiny")})) == count


class SharedExamples(AbstractTrial):
    """Numbers at ten examples that all seeds share."""

    shift: float = 0.0

    def rows(self, seed: int) -> Rows:
        noise = np.random.default_rng(seed).standard_normal(10)
        return [{"height": 0.1 * k + self.shift + 0.1 * noise[k], "example": k, "other": 1.0} for k in range(10)]


def test_published_rows_over_examples_name_the_examples(tmp_path: Path) -> None:
    rule = {"_target_": "ntkexp.claim.expectation.Bound", "limit": 1, "side": "upper", "margin": 0}
    tree = TREE | {
        "trial": {"_target_": f"{__name__}.SharedExamples"},
        "expectation": rule | {"over_examples": True},
        "null": 2,
        "control": {"trial": {"shift": 2.0}},
        "second": {},
    }
    (made, records, entries), folder = looked_at(tmp_path, tree), tmp_path / "docs"
    publish(folder, made, records, entries)
    (row,) = json.loads((folder / VERDICTS_FILE).read_text())
    assert (row["verdict"], row["expected"]) == ("supported", "≤ 1 ± 0 over seeds and examples")
    table = pd.read_csv(folder / "tiny" / "main.csv")
    assert {*table} == {"runs", "seed", "example", "value"}
    expected = two_way_mean(table["seed"].tolist(), table["example"].tolist(), table["value"].tolist())
    assert row["interval"] == pytest.approx([expected.low, expected.high], rel=1e-12)
    assert check(folder, made, entries) == ["tiny"]


@dataclass
class LineThroughPhotographs(Line):
    """A line with data."""

    data: AbstractSource = field(default_factory=lambda: CIFAR10(train=2, query=2, test=0))


def test_without_the_data_the_note_on_seeds_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged data are refused."""
    photographs = tmp_path / "data_batch_1.bin"
    photographs.write_bytes(b"".join(bytes([label, *range(192)] + [label] * 2880) for label in (3, 5) * 4))
    monkeypatch.setenv("CIFAR10", str(tmp_path))
    tree, folder = TREE | {"trial": {"_target_": f"{__name__}.LineThroughPhotographs"}}, tmp_path / "docs"
    made, (record,), mine = looked_at(tmp_path, tree)
    then = replace(record, looks={**record.looks, "main": replace(record.main, draws="each drawing photographs")})

    monkeypatch.delenv("CIFAR10")
    publish(folder, made, [then], mine)
    (row,) = json.loads((folder / VERDICTS_FILE).read_text())
    assert row["main"]["draws"] == then.main.draws

    photographs.write_bytes(b"none")
    monkeypatch.setenv("CIFAR10", str(tmp_path))
    with pytest.raises(Mistake, match="is cut short or damaged"):
        publish(folder, made, [then], mine)


@pytest.mark.parametrize("draws", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_published_verdicts_agree_with_their_tables(draws: bool) -> None:
    made = composer(None, [])
    folder = Path(__file__).parents[2] / "docs" / "claims"
    assert check(folder, made, registered(made.builder.choices, folder), draws=draws)
