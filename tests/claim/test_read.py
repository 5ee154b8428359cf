"""A claim says everything beforehand, and what it lacks is said in one line before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ntkexp.claim.claim import CONTROL, MAIN, SECOND
from ntkexp.claim.read import claim_names, claim_of, read_claim
from ntkexp.config.build import Builder
from ntkexp.mistake import Mistake
from tests.claim.subject import CLAIM, SLOPE, changed_claim, planned

NO_MARGIN = {key: value for key, value in SLOPE.items() if key != "margin"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"runs": None}, "the claim has no runs; give it `runs` with axes and base, or a `trial`"),
    ({"expectation": NO_MARGIN}, "expectation.margin is missing; it takes a number > 0"),
    ({"expectation": []}, r"expectation=\[\]: nothing is expected, so nothing can be judged; give a rule or several"),
    ({"control": {"expectation": []}}, r"control: expectation=\[\]: nothing is expected"),
    ({"seeds": 1}, "seeds=1: one seed says nothing of chance; give two or more"),
    ({"second": {"seeds": 1}}, "second: seeds=1: one seed"),
    ({"second": {"seeds": True}}, "second: seed=true"),
    (
        {"second": {"seeds": [1, 8]}},
        "second: seed 1 is one of the claim itself; give others, or how many, as seeds: 20",
    ),
    ({"control": None}, "control is missing: a claim says it before it is measured"),
    ({"contrl": {}}, "contrl: a claim has no such key; .*; did you mean 'control'"),
    ({"control": {"expectations": {}}}, "control.expectations: there is no such key; .* did you mean 'expectation'"),
    ({"quick": {"axes": {"model.widht": [1]}}}, "quick.axes.model.widht: .* did you mean 'model.width'"),
    ({"expectation": {"_target_": "ntkexp.claim.expectation.Slop"}}, "did you mean 'Slope'"),
    ({"expectation": SLOPE | {"margn": 1}}, "expectation.margn: Slope has no such key; .* did you mean"),
    ({"source": {"section": "2"}}, "source.paper is missing"),
    ({"runs": {"mlp": 3}}, "runs: they take axes and base"),
]


@pytest.mark.parametrize(("changes", "said"), MISTAKES, ids=[said[:30] for _, said in MISTAKES])
def test_what_is_no_claim_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said) as caught:
        claim_of("mine", changed_claim(**changes), Builder())
    assert "\n" not in str(caught.value)


def test_an_unknown_claim_is_answered_with_the_nearest() -> None:
    with pytest.raises(Mistake, match="did you mean 'kernel_stays'"):
        read_claim("kernel_stay", Builder())


def test_a_quantity_that_is_no_column_is_refused_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="'drfit' is no number of a run; did you mean 'drift'"):
        planned(changed_claim(quantity="drfit"), tmp_path)


@pytest.mark.parametrize("name", claim_names(Builder().choices))
@pytest.mark.parametrize("size", ["quick", "default", "full"])
def test_every_claim_that_is_shipped_can_be_read(name: str, size: Any) -> None:
    claim = read_claim(name, Builder(), size)
    assert claim.looks.keys() == {MAIN, CONTROL, SECOND}
    assert not set(claim.looks[MAIN].seeds) & set(claim.looks[SECOND].seeds)
    assert claim.looks[CONTROL].fields != claim.looks[MAIN].fields
    assert "papers" not in str(claim.fields)  # a trial or a quantity may move to another file, and is the same claim


@pytest.mark.parametrize(
    "changes",
    [{"expectation": SLOPE | {"margin": 0.3}}, {"refutes": "nothing"}, {"seeds": 3}, {"second": {"seeds": [8, 9]}}],
)
def test_whoever_changes_a_word_has_another_claim(changes: dict[str, Any]) -> None:
    assert claim_of("mine", changed_claim(**changes), Builder()).digest != claim_of("mine", CLAIM, Builder()).digest


def test_circumstances_make_no_other_claim() -> None:
    elsewhere = CLAIM["runs"] | {"base": [*CLAIM["runs"]["base"], "memory_gb=2"]}
    assert (
        claim_of("mine", changed_claim(runs=elsewhere), Builder()).digest == claim_of("mine", CLAIM, Builder()).digest
    )


@pytest.mark.parametrize(
    ("given", "size", "seeds"),
    [
        (None, "default", (1000, 1001)),
        (4, "default", (1000, 1001, 1002, 1003)),
        (4, "quick", (1000, 1001)),
        ("7..9", "default", (7, 8, 9)),
    ],
)
def test_the_second_look_has_as_many_seeds_as_it_asks_for(given: object, size: Any, seeds: tuple[int, ...]) -> None:
    second = CLAIM["second"] | ({} if given is None else {"seeds": given})
    assert claim_of("mine", changed_claim(second=second), Builder(), size).looks[SECOND].seeds == seeds


def test_a_size_is_that_of_all_looks() -> None:
    claim = claim_of("mine", CLAIM, Builder(), "quick")
    assert {look.runs["runs"].axes["model.width"] for look in claim.looks.values()} == {(4, 8)}
    assert claim.looks[SECOND].runs["runs"].base[-2:] == ("data=sphere", "threads=1")
