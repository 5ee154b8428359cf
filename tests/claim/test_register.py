"""A claim is registered before its first look, and the register has the claims of this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ntkexp.claim.conduct import Workshop, circumstances, look_as_planned, register_claim
from ntkexp.claim.read import claim_names, read_claim
from ntkexp.cli.claims import is_current, registered
from ntkexp.config.choices import shipped
from ntkexp.config.compose import composer
from ntkexp.mistake import Mistake
from ntkexp.records.register import REGISTER, REGISTER_SEAL, Register
from ntkexp.report.claims import describe_attempt, outlook, tabulate_attempts
from ntkexp.report.page.build import write_claims
from ntkexp.report.progress import Quiet
from tests.claim.subject import OF_LINES, judged, planned
from tests.kernel_file.subjects import Here

TINY = OF_LINES | {"quick": {"seeds": 2}}


def written(folder: Path, tree: dict[Any, Any]) -> Any:
    """Write a claim into a folder of a user. Return its composer."""
    (folder / "claim").mkdir(exist_ok=True)
    (folder / "claim" / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return composer(folder, ["tests"])


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_the_register_has_the_claims_of_the_project(every: int) -> None:
    builder = composer(None, []).builder
    attempts = Register.read(shipped() / "claim" / REGISTER).attempts()
    digests = {attempt.name: attempt.digest for attempt in attempts}  # the last entry of each name
    names = claim_names(builder.choices)
    assert [*names] == sorted(digests)
    assert {name: read_claim(name, builder).digest for name in names[::every]} == {
        name: digests[name] for name in names[::every]
    }


@pytest.mark.skipif(not (shipped().parent / ".git").exists(), reason="not a checkout")
def test_lines_of_the_register_name_the_commit() -> None:
    assert len(str(circumstances()["commit"]).removesuffix("+")) == 40


def test_a_changed_claim_needs_a_reason_and_its_first_outcome_stays_visible(tmp_path: Path) -> None:
    made, out = written(tmp_path, TINY | {"second": {"trial": {"slope": -2.0}}}), tmp_path / "out" / "claims"
    register_claim("tiny", made.builder, out)
    record = judged(planned(TINY | {"second": {"trial": {"slope": -2.0}}}, out, made=made))
    assert (record.main.verdict, record.verdict, record.p) == ("supported", "not replicated", 1.0)
    register = Register.of_claim_file(tmp_path / "claim" / "tiny.yaml", out)
    register.record(record, circumstances())

    made = written(tmp_path, TINY | {"second": {"trial": {"slope": -1.05}}})
    with pytest.raises(Mistake, match=r"second\.trial\.slope changed; give .* a reason of at least 4 words"):
        register_claim("tiny", made.builder, out)
    register_claim("tiny", made.builder, out, "The second slope was that of another claim.")
    attempts = registered(made.builder.choices, out)["tiny"]
    assert [is_current(record, attempts[:1]), is_current(record, attempts)] == [True, False]
    assert "not replicated" in describe_attempt(attempts[0], stands=False)
    assert [row[3] for row in tabulate_attempts(attempts).rows] == ["not replicated", "–"]
    now = judged(planned(TINY | {"second": {"trial": {"slope": -1.05}}}, out, made=made))
    page = write_claims([now], tmp_path / "report", "ntkexp claims tiny", {"tiny": attempts}).read_text()
    assert "Looked at on" in page
    assert "The second slope was that of another claim." in page


def test_a_claim_takes_its_planned_looks(tmp_path: Path) -> None:
    """Four seeds do not decide a margin as narrow as the noise, and forty seeds do."""
    tree = TINY | {"seeds": 40, "looks": [4, 40], "second": {}, "quick": None}
    tree["expectation"] = tree["expectation"] | {"margin": 0.006}
    made = written(tmp_path, tree)
    claim = read_claim("tiny", made.builder)
    assert claim.fields["looks"]["main"]["planned"] == [4, 40]
    workshop = Workshop(Here(1), Quiet(), ("tests",))
    records = list(look_as_planned(claim, made, tmp_path / "out", workshop, "default"))
    assert [record.main.verdict for record in records] == ["undecided", "supported"]
    assert [len(record.main.seeds) for record in records] == [4, 40]
    assert [len(record.looks["control"].seeds) for record in records] == [4, 4]  # four seeds refute it
    assert {record.digest for record in records} == {claim.digest}
    assert outlook(records[0]) == ""  # no other seeds are needed


@pytest.mark.parametrize("looks", [[24], [4, 5], [5, 4, 6], [1, 6], "4, 6"])
def test_looks_that_cannot_be_planned_are_refused(tmp_path: Path, looks: Any) -> None:
    made = written(tmp_path, TINY | {"seeds": 6, "looks": looks})
    with pytest.raises(Mistake, match=r"looks=.*from 2 or more to all 6, such as \[2, 6\]"):
        read_claim("tiny", made.builder)


RULES = "ntkexp.claim.expectation."
SLOPE = {"_target_": f"{RULES}Slope", "along": "width", "value": 0.0, "margin": 5.0}
BOUND = {"_target_": f"{RULES}Bound", "limit": 0.5, "side": "upper", "margin": 0.1}
RATIO = {"_target_": f"{RULES}Equality", "value": 2.0, "margin": 0.5, "scale": "log"}
IDENTITY = {"_target_": f"{RULES}Identity", "tolerance": 0.1}
LOCATION = {"_target_": f"{RULES}Location", "along": "width", "value": 8.0, "margin": 0.5}


@pytest.mark.parametrize(
    ("expectation", "null", "reason"),
    [
        (SLOPE, None, r"slope 0 ± 5 also holds at 0\.0"),
        (SLOPE, -4, r"slope 0 ± 5 also holds at -4\.0"),
        (BOUND, None, "null is missing"),
        (BOUND, 0.55, "also holds at 0.55"),
        (RATIO, 2.9, "also holds at 2.9"),
        (IDENTITY, 0.01, "also holds at 0.01"),
        (LOCATION, 9, r"also holds at 9\.0"),
        ([SLOPE, BOUND], [-6], "a number, or one for each of the 2 rules"),
    ],
)
def test_a_claim_that_holds_at_its_null_is_refused(tmp_path: Path, expectation: Any, null: Any, reason: str) -> None:
    made = written(tmp_path, TINY | {"expectation": expectation, None: null})  # YAML reads the key null as None
    with pytest.raises(Mistake, match=reason):
        read_claim("tiny", made.builder)


@pytest.mark.parametrize(
    ("expectation", "null"),
    [(SLOPE, 5), (BOUND, 0.6), (RATIO, 3.1), (RATIO, 0), (IDENTITY, 0.1), (LOCATION, 13), (LOCATION, 0)],
)
def test_a_claim_that_excludes_its_null_is_read(tmp_path: Path, expectation: Any, null: float) -> None:
    made = written(tmp_path, TINY | {"expectation": expectation, None: null})
    claim = read_claim("tiny", made.builder)
    assert [look.nulls for look in claim.looks.values()] == [(null,), (), (null,)]
    assert claim.fields["looks"]["main"]["null"] == [null]


def test_a_misspelled_key_is_named_before_a_missing_one(tmp_path: Path) -> None:
    slope = {key: value for key, value in SLOPE.items() if key != "margin"} | {"margni": 0.1}
    made = written(tmp_path, TINY | {"expectation": slope})
    message = r"expectation\.margni: Slope has no such key.*did you mean 'expectation\.margin'"
    with pytest.raises(Mistake, match=message):
        read_claim("tiny", made.builder)


def test_other_seeds_are_judged_once(tmp_path: Path) -> None:
    made = written(tmp_path, TINY | {"seeds": 6, "looks": [3, 6], "second": {"seeds": 12}, "quick": {"seeds": 2}})
    assert {name: look.sizes for name, look in read_claim("tiny", made.builder).looks.items()} == {
        "main": (3, 6),
        "control": (3, 6),
        "second": (12,),
    }
    assert read_claim("tiny", made.builder, "quick").looks["main"].sizes == (2,)


def test_only_a_publication_changes_the_register_beside_the_claims(tmp_path: Path) -> None:
    """The new lines stay in the outputs until then, and are published once."""
    made, out = written(tmp_path, TINY), tmp_path / "out"
    register = register_claim("tiny", made.builder, out)
    assert register.path == out / REGISTER
    assert sorted(path.name for path in (tmp_path / "claim").iterdir()) == ["tiny.yaml"]
    published = tmp_path / "claim" / REGISTER
    assert [register.publish(tmp_path / "claim", {"tiny"}) for _ in range(2)] == [1, 0]
    assert Register.read(published).attempts() == register.attempts()
    assert published.with_name(REGISTER_SEAL).is_file()

    # the lines of the outputs follow the published lines
    register_claim("tiny", written(tmp_path, TINY | {"refutes": "nothing"}).builder, out, "It was not clear before.")
    assert [attempt.reason for attempt in registered(made.builder.choices, out)["tiny"]] == [
        "first version that was registered",
        "It was not clear before.",
    ]
    assert len(Register.read(published).lines) == 1


def test_a_package_keeps_its_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register = register_claim("tiny", written(tmp_path, TINY).builder, tmp_path / "out")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert register.publish(tmp_path / "claim", {"tiny"}) == 0
    assert not (tmp_path / "claim" / REGISTER).exists()
