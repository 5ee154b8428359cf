"""A claim is registered before it is looked at, and the claims of this project stand in their register as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ntkexp.claim.conduct import circumstances, register_claim
from ntkexp.claim.read import claim_names, read_claim
from ntkexp.cli.claims import registered, stands
from ntkexp.config.choices import shipped
from ntkexp.config.compose import composer
from ntkexp.mistake import Mistake
from ntkexp.records.register import REGISTER, SEAL, Register
from ntkexp.report.claims import describe_attempt, tabulate_attempts
from ntkexp.report.page.build import write_claims
from tests.claim.subject import OF_LINES, judged, planned

TINY = OF_LINES | {"quick": {"seeds": 2}}


def written(folder: Path, tree: dict[str, Any]) -> Any:
    """The claim in a folder of a user's own, and what builds it."""
    (folder / "claim").mkdir(exist_ok=True)
    (folder / "claim" / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return composer(folder, ["tests"])


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_claims_of_the_project_stand_in_its_register(every: int) -> None:
    builder = composer(None, []).builder
    attempts = Register.opened(shipped() / "claim" / REGISTER).attempts()
    digests = {attempt.name: attempt.digest for attempt in attempts}  # of the last entry of each name
    names = claim_names(builder.choices)
    assert [*names] == sorted(digests)
    assert {name: read_claim(name, builder).digest for name in names[::every]} == {
        name: digests[name] for name in names[::every]
    }


@pytest.mark.skipif(not (shipped().parent / ".git").exists(), reason="not a checkout")
def test_lines_of_the_register_name_the_commit() -> None:
    assert len(str(circumstances()["commit"]).removesuffix("+")) == 40


def test_a_margin_is_changed_with_a_reason_alone_and_what_the_first_one_found_is_shown(tmp_path: Path) -> None:
    made, out = written(tmp_path, TINY | {"second": {"trial": {"slope": -2.0}}}), tmp_path / "out" / "claims"
    register_claim("tiny", made.builder, out)
    record = judged(planned(TINY | {"second": {"trial": {"slope": -2.0}}}, out, made=made))
    assert (record.main.verdict, record.verdict, record.p) == ("supported", "not replicated", 1.0)
    register = Register.opened(tmp_path / "claim" / REGISTER)
    register.record(record, circumstances())

    made = written(tmp_path, TINY | {"second": {"trial": {"slope": -1.05}}})
    with pytest.raises(Mistake, match=r"second\.trial\.slope changed; say why in a sentence"):
        register_claim("tiny", made.builder, out)
    register_claim("tiny", made.builder, out, "The second slope was that of another claim.")
    attempts = registered(made.builder.choices, out)["tiny"]
    assert [stands(record, attempts[:1]), stands(record, attempts)] == [True, False]
    assert "not replicated" in describe_attempt(attempts[0], stands=False)
    assert [row[3] for row in tabulate_attempts(attempts).rows] == ["not replicated", "–"]
    now = judged(planned(TINY | {"second": {"trial": {"slope": -1.05}}}, out, made=made))
    page = write_claims([now], tmp_path / "report", "ntkexp claims tiny", {"tiny": attempts}).read_text()
    assert "Looked at on" in page
    assert "The second slope was that of another claim." in page


def test_claims_that_cannot_be_written_beside_have_their_register_in_the_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = written(tmp_path, TINY)
    beside = register_claim("tiny", made.builder, tmp_path / "out")
    monkeypatch.setattr("os.access", lambda *_: False)
    elsewhere = register_claim("tiny", made.builder, tmp_path / "out")
    assert elsewhere.path == tmp_path / "out" / REGISTER
    assert (elsewhere.lines, elsewhere.last) == (beside.lines, beside.last)
    assert (tmp_path / "out" / SEAL).read_bytes() == (tmp_path / "claim" / SEAL).read_bytes()
