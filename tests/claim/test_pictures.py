"""Pictures of claims say what their rows say, on rows made to contradict them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ntkexp.claim.claim import CONTROL, MAIN, SECOND
from ntkexp.claim.conduct import draw
from ntkexp.claim.expectation import Equality
from ntkexp.claim.papers import AccuracyTable, ChangeByWidth, InterpolationPeak, ScalarStep, ScalarTraining
from ntkexp.claim.papers.scalar_functions import ascents, changed_range, given, moved
from ntkexp.claim.picture import AbstractPicture, JudgedClaim, JudgedRows, PublishedNumber
from ntkexp.claim.quantity import Measured
from ntkexp.claim.read import claim_of, read_claim
from ntkexp.config.build import Builder
from ntkexp.mistake import Mistake
from ntkexp.records.claim import ClaimRecord, Exhibit, Judgement, read_exhibit
from tests.claim.subject import CLAIM, changed_claim

LOOK = Judgement(
    verdict="supported", figure=1.0, low=1.0, high=1.0, p=None, more_seeds=None, expected="", seeds=(0, 1), draws="",
    note="",
)  # fmt: skip


def judged(tree: dict[str, Any], table: pd.DataFrame) -> JudgedClaim:
    """A claim that was judged by this table, at every look."""
    claim = claim_of("mine", tree, Builder())
    looks = {MAIN: LOOK, CONTROL: LOOK, SECOND: LOOK}
    said = {"name": "mine", "digest": "0", "size": "quick", "statement": "", "source": "", "refutes": "", "command": ""}
    record = ClaimRecord(path=Path("mine"), looks=looks, **said)
    return JudgedClaim(claim, record, dict.fromkeys(looks, table))


def of_scalars(name: str) -> JudgedClaim:
    """A claim of a scalar function that is shipped, with the rows of its trial."""
    look = read_claim(name, Builder(), "quick").looks[MAIN]
    assert look.trial is not None
    rows = pd.DataFrame([{**row, "seed": seed} for seed in (0, 1) for row in look.trial.rows(seed)])
    measured = pd.concat([rows.assign(quantity=name, value=0.0) for name in ("kernel", "share")])
    return JudgedClaim(
        read_claim(name, Builder()), judged(CLAIM, rows).record, dict.fromkeys((MAIN, CONTROL), measured)
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lookup_table", "A step on (10, 50) moves f(10) from 32 to 35.6, and none of the 30 other values"),
        ("linear", "from 31 to 414.8, and all of the 30 other values, 10 of them the other way"),
        ("reparametrised_linear", "from 31 to 791, and 29 of the 30 other values"),  # k(−10, 10) = 0
    ],
)
def test_a_step_is_told_with_all_values(name: str, said: str) -> None:
    found = of_scalars(name)
    look = found.claim.looks[MAIN]
    assert moved(given(found), look.trial).endswith(said)  # type: ignore[arg-type]
    assert found.claim.picture.figure(found).get_suptitle().replace("\n", " ").endswith(said)


def test_two_bumps_are_told_with_their_extremes() -> None:
    found = of_scalars("radial_basis")
    caption = found.claim.picture.caption(found)
    assert (
        "is least at x = 0, −0.279, and largest at x = 8, 1.204. The kernel of the finite step is largest at x = 7"
        in (caption)
    )


def test_a_kernel_that_widens_is_not_said_to_flatten() -> None:
    found = of_scalars("kernel_during_training")
    assert "narrower each time: 1.483, " in ScalarTraining().here(found)
    rows = found.tables[MAIN]
    steps = rows["ascended"].max() - rows["ascended"]  # the steps backwards
    back = JudgedClaim(found.claim, found.record, {MAIN: rows.assign(ascended=steps)})
    assert "The range of the kernel is not narrower each time" in ScalarTraining().here(back)
    assert changed_range(ascents(back)).endswith("a range of 0.859 … 1.137 to −0.279 … 1.204")


@pytest.mark.parametrize(("power", "nearer"), [(-0.5, "nearer to 1/√n than to 1/n"), (-1.0, "nearer to 1/n than")])
def test_powers_of_the_width_are_told(power: float, nearer: str) -> None:
    rows = [
        {"model.width": w, "seed": seed, "depth": depth, "drift": (1 + seed) * w ** (power if depth == 3 else 7.0)}
        for w in (4, 16, 64) for seed in (0, 1) for depth in (1, 3)
    ]  # fmt: skip
    found = judged(CLAIM, pd.DataFrame(rows))
    picture = ChangeByWidth(where={"depth": 3}, panels={"weights": {"all": "drift"}, "kernel": {"kernel": "drift"}})
    assert nearer in picture.figure(found).get_suptitle().replace("\n", " ")
    assert f"all −{-power:.2g}" in picture.here(found)


def test_a_peak_at_the_end_is_not_said_to_fall() -> None:
    rows = [
        {"parameters": p, "seed": s, "test_error": error + 0.01 * s, "train_error": 1 / p**2, "condition": 10.0 * p}
        for p, error in ((10, 0.2), (60, 1.0), (100, 2.0)) for s in (0, 1)
    ]  # fmt: skip
    found, picture = judged(CLAIM, pd.DataFrame(rows)), InterpolationPeak(threshold=50)
    assert "largest at 100 parameters, 2, the largest number that was tried" in picture.title(found)
    assert "fitted, to 0.001, from 60 parameters on. Below the threshold the test error is least at 10" in (
        picture.here(found)
    )
    assert "is not less than that: 1 at 60" in picture.here(found)


def test_a_table_has_the_depths_of_both() -> None:
    lost = {3: 0.2, 6: -0.1}
    rows = [
        {"depth": depth, "family": family, "regressor": name, "seed": seed,
         "accuracy": 0.5 + 0.1 * seed - lost[depth] * (family == "CNTK-GAP")}
        for depth in lost for family in ("CNTK", "CNTK-GAP") for name in ("process", "kernel", "network")
        for seed in (0, 1)
    ]  # fmt: skip
    found, picture = judged(CLAIM, pd.DataFrame(rows)), AccuracyTable(per_cent={"CNTK": {3: 40.94, 11: 43.42}})
    table = picture.table(found).set_index("depth")
    assert list(table.index) == [3, 6, 11]
    assert table["CNTK paper, %"].tolist() == pytest.approx([40.94, math.nan, 43.42], nan_ok=True)
    assert table["CNTK-GAP kernel, %"].tolist() == pytest.approx([35.0, 65.0, math.nan], nan_ok=True)
    assert "by −20.0 points at depth 3 and 10.0 points at depth 6" in picture.here(found)


@pytest.mark.parametrize("picture", [ScalarStep(), ScalarTraining(), InterpolationPeak(threshold=1)])
def test_a_picture_of_other_rows_is_refused(picture: AbstractPicture) -> None:
    with pytest.raises(Mistake, match=r"^picture: "):
        picture.figure(judged(CLAIM, pd.DataFrame({"seed": [0], "value": [1.0]})))


def test_a_picture_changes_no_digest() -> None:
    picture = {"_target_": "ntkexp.claim.picture.JudgedRows", "published": "A line."}
    plain, told = (claim_of("mine", changed_claim(picture=one), Builder()) for one in (None, picture))
    assert plain.digest == told.digest
    assert plain.picture == JudgedRows()


def test_a_picture_is_kept_with_its_words_and_its_table(tmp_path: Path) -> None:
    class Tabled(JudgedRows):
        def table(self, judged: JudgedClaim) -> pd.DataFrame:
            return pd.DataFrame({"depth": [3, 4], "ours": [0.5, math.nan]})

    found = judged(CLAIM, pd.DataFrame({"model.width": [4, 8], "seed": [0, 0], "value": [1.0, 2.0]}))
    folder = replace(found.record, path=tmp_path)
    draw(replace(found, record=folder, claim=replace(found.claim, picture=Tabled(published="A line."))))
    caption = "Published: A line. Here: blue is the claim's own look, orange the second."
    assert read_exhibit(tmp_path) == Exhibit(caption, ("depth", "ours"), ((3, 0.5), (4, None)))
    assert "<svg" in (tmp_path / "picture.svg").read_text()
    (tmp_path / "picture.json").write_text("{}")
    assert read_exhibit(tmp_path) == Exhibit()


@pytest.mark.parametrize("name", ["lookup_table", "radial_basis", "kernel_during_training"])
def test_published_numbers_stand_beside_those_found(name: str) -> None:
    """They agree in the digits that are given, of which the claim's own expectation is as wide."""
    claim = read_claim(name, Builder(), "quick")
    look = claim.looks[MAIN]
    assert look.trial is not None
    rows = pd.DataFrame([{"runs": "trial", **row, "seed": seed} for seed in (0, 1) for row in look.trial.rows(seed)])
    found = JudgedClaim(claim, judged(CLAIM, rows).record, {MAIN: look.quantity.of(Measured(rows, {}))})
    table = claim.picture.table(found)
    assert table is not None
    digits = 10.0 ** -table["published"].map(lambda value: len(repr(value).partition(".")[2]))
    assert ((table["here"] - table["published"]).abs() <= 0.5 * digits).all(), table
    assert set(table["published"]) <= {part.value for part in look.expectation if isinstance(part, Equality)}


def test_a_number_whose_rows_are_left_out_is_not_found() -> None:
    table = pd.DataFrame({"seed": [0, 1, 0], "depth": [3, 3, 4], "value": [1.0, 3.0, 9.0]})
    number = PublishedNumber(what="accuracy", value=2.5, where={"depth": 3})
    assert number.row(table)["here"] == 2.0
    assert math.isnan(float(number.model_copy(update={"where": {"depth": 6}}).row(table)["here"]))
    with pytest.raises(Mistake, match=r"numbers\.where: the table has no column dpth"):
        number.model_copy(update={"where": {"dpth": 3}}).row(table)


def test_what_is_no_picture_is_refused() -> None:
    with pytest.raises(Mistake, match=r"picture.*ScalarStp.*did you mean 'ScalarStep'"):
        claim_of("mine", changed_claim(picture={"_target_": "ntkexp.claim.papers.ScalarStp"}), Builder())
