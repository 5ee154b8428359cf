"""The register of claims only grows: it detects changed and removed lines, and every look stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from errno import ENOSPC
from hashlib import sha256
from os import strerror
from pathlib import Path
from typing import Any

import pytest

from ntkexp.mistake import Mistake
from ntkexp.records.claim import ClaimRecord, Judgement
from ntkexp.records.register import (
    FIRST_REASON,
    REGISTER,
    REGISTER_SEAL,
    Register,
    describe_repetition,
    main_looks,
    refuse_second_choice,
)

ABOUT = {"date": "2026-11-24T12:00:00+00:00", "version": "0.1.0", "commit": None}
SAID = {"main": {"trial": "lines", "seeds": [0, 1], "margin": 0.1}}


def said(**fields: Any) -> dict[str, Any]:
    """The fields of a claim with changes of its main look."""
    return {"main": SAID["main"] | fields}


BECAUSE = "The first margin was that of another paper."


def sizes(digest: str) -> dict[str, str]:
    return {"default": digest, "quick": f"{digest}q", "full": digest}


def look(digest: str, size: str = "default", **found: Any) -> ClaimRecord:
    """The result of a look at a claim; `found` are the verdicts of its looks, and the figure of all."""
    figure = found.pop("figure", 1.0)
    verdicts = {"main": "supported", "control": "refuted", "second": "supported"} | found
    looks = {
        name: Judgement(
            verdict=verdict,
            figure=figure,
            low=0.9,
            high=float("nan"),
            p=0.01,
            more_seeds=None,
            expected="≥ 0",
            seeds=(0, 1),
            draws="",
            note="",
        )
        for name, verdict in verdicts.items()
    }
    words: dict[str, Any] = {"statement": "s", "source": "p", "refutes": "r", "command": "c"}
    return ClaimRecord(path=Path("c"), name="mine", digest=digest, size=size, looks=looks, **words)


@pytest.fixture
def register(tmp_path: Path) -> Register:
    """Three lines: a claim, a look at it that refuted it, and the claim with another margin."""
    register = Register.read(tmp_path / REGISTER)
    register.enter("mine", sizes("a"), SAID, "", ABOUT)
    register.record(look("a", main="refuted", second="refuted"), ABOUT)
    register.enter("mine", sizes("b"), said(margin=0.2, seeds=[2, 3]), BECAUSE, ABOUT)
    return register


def test_a_change_is_a_new_entry_and_the_looks_at_the_old_one_stay(register: Register) -> None:
    first, second = Register.read(register.path).attempts("mine")
    assert (first.reason, first.replaces) == (FIRST_REASON, None)
    assert [look["verdict"] for look in first.looks] == ["refuted"]
    assert (second.reason, second.replaces, second.looks) == (BECAUSE, "a", [])
    assert (second.changed, second.differs) == (
        {"main.margin": 0.2, "main.seeds": [2, 3]},
        ["main.margin", "main.seeds"],
    )
    assert register.fields_of("mine") == {"main.trial": "lines", "main.seeds": [2, 3], "main.margin": 0.2}


@pytest.mark.parametrize("reason", ["", "better"])
def test_a_change_without_a_reason_is_refused(register: Register, reason: str) -> None:
    with pytest.raises(
        Mistake, match=r"registered on 2026-11-24 as b: main.seeds, main.margin changed; give .* a reason"
    ):
        register.enter("mine", sizes("c"), said(margin=0.3, seeds=[4]), reason, ABOUT)
    assert len(Register.read(register.path).lines) == 3


def test_the_same_is_entered_once_and_the_same_outcome_recorded_once(register: Register) -> None:
    register.enter("mine", sizes("b"), said(margin=0.2, seeds=[2, 3]), "", ABOUT)
    for found in (look("b"), look("b", figure=1.0 + 1e-9), look("b", figure=1.1), look("bq", "quick")):
        register.record(found, ABOUT)
    assert [each["size"] for each in register.attempts("mine")[-1].looks] == ["default", "default", "quick"]
    with pytest.raises(Mistake, match="its test results cannot be recorded"):
        register.record(look("z"), ABOUT)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"seeds": [*range(1, 9)]}, True),
        ({"seeds": [4, 5, 6]}, False),
        ({"margin": 0.3, "seeds": [2, 3]}, True),  # another rule for data that were looked at
        ({"margin": 0.3, "seeds": [0, 1]}, True),  # data of the first version
        ({"margin": 0.3, "seeds": [4, 5]}, False),
        ({"margin": 0.3, "seeds": [2, 3], "trial": "curves"}, False),  # other data
    ],
)
def test_a_look_that_is_changed_after_it_was_looked_at_takes_fresh_seeds(
    register: Register, changes: dict[str, Any], refused: bool
) -> None:
    register.record(look("b"), ABOUT)
    changed = said(**{"margin": 0.2} | changes)
    if refused:
        with pytest.raises(Mistake, match=r"the main look has seed \d, whose results were already seen.* such as"):
            register.enter("mine", sizes("c"), changed, BECAUSE, ABOUT)
    else:
        register.enter("mine", sizes("c"), changed, BECAUSE, ABOUT)
        assert register.latest_entry("mine") == register.attempts("mine")[2]


@pytest.mark.parametrize(
    ("found", "again", "counts"),
    [
        ({"main": "supported", "figure": 2.0}, False, False),
        ({"main": "supported"}, False, True),  # the numbers are the same: the control blocks no longer
        ({"main": "refuted", "figure": 2.0}, False, True),
        ({"main": "supported", "figure": 2.0}, True, True),  # the same tables
    ],
)
def test_the_first_look_at_an_unchanged_specification_counts(
    register: Register, found: dict[str, Any], again: bool, counts: bool
) -> None:
    """Another statement licenses no further look."""
    register.record(look("b", main="refuted"), ABOUT)
    first = register.attempts("mine")[-1].looks[0]["date"]
    register.enter("mine", sizes("c"), said(margin=0.2, seeds=[2, 3]) | {"statement": "s"}, BECAUSE, ABOUT)
    later = ABOUT | {"date": "2026-11-25T12:00:00+00:00"}
    register.record(look("c", **found), later, first if again else "")
    attempts = register.attempts("mine")
    if counts:
        refuse_second_choice(attempts, attempts[-1].looks[-1])
    else:
        with pytest.raises(Mistake, match="was refuted; the first one counts"):
            refuse_second_choice(attempts, attempts[-1].looks[-1])


def test_the_first_second_look_counts_too(register: Register) -> None:
    register.record(look("b", second="undecided"), ABOUT)
    later = ABOUT | {"date": "2026-11-25T12:00:00+00:00"}
    register.record(look("b", second="supported", figure=1.1), later)
    attempts = register.attempts("mine")
    with pytest.raises(Mistake, match=r"the second look of 2026-11-25 was supported, but .* was undecided"):
        refuse_second_choice(attempts, attempts[-1].looks[-1])


@pytest.mark.parametrize(
    ("figures", "looks"),
    [
        ([], 1),  # the look at the first margin
        ([1.0], 1),  # the same figure
        ([1.1], 2),
        ([1.1, 1.1 + 1e-9], 2),  # a repetition
        ([1.1, 1.2, 1.3], 4),  # an unchanged look that is taken again and again
    ],
)
def test_every_main_look_is_counted(register: Register, figures: list[float], looks: int) -> None:
    for hour, figure in enumerate(figures):
        register.record(look("b", figure=figure), ABOUT | {"date": f"2026-11-25T{hour:02}:00:00+00:00"})
    register.record(look("b", size="quick", figure=9.0), ABOUT)
    register.record(look("b", figure=8.0), ABOUT, again=str(ABOUT["date"]), reason="The rules were amended.")
    assert main_looks(register.attempts("mine")) == looks


@pytest.mark.parametrize(
    ("figure", "warning"),
    [
        (1.1 + 1e-9, ""),  # a repetition
        (1.3, "mine: an earlier look at the same specification had the figure 1.1, and this look has 1.3; Holm's"),
    ],
)
def test_another_figure_of_an_unchanged_look_is_named(register: Register, figure: float, warning: str) -> None:
    for hour, found in enumerate((1.1, figure)):
        register.record(look("b", figure=found), ABOUT | {"date": f"2026-11-25T{hour:02}:00:00+00:00"})
    text = describe_repetition(register.attempts("mine"))
    assert text.startswith(warning)
    assert bool(text) == bool(warning)


def test_planned_stages_are_one_look(register: Register) -> None:
    """They share an error probability."""
    for seeds, figure in ((2, 1.1), (4, 1.2)):
        found = look("b", figure=figure)
        looks = {name: replace(one, seeds=tuple(range(seeds))) for name, one in found.looks.items()}
        register.record(replace(found, looks=looks), ABOUT)
    assert main_looks(register.attempts("mine")) == 2  # one at each margin


def test_an_earlier_version_that_comes_back_is_a_new_entry(register: Register) -> None:
    register.enter("mine", sizes("a"), SAID, "The first margin was right after all.", ABOUT)
    register.record(look("a"), ABOUT)
    assert [len(attempt.looks) for attempt in register.attempts("mine")] == [1, 0, 1]


@pytest.mark.parametrize("line", [0, 1, 2])
@pytest.mark.parametrize("change", [lambda line: "", lambda line: line.replace("mine", "yours", 1)])
def test_a_line_that_is_taken_out_or_changed_is_seen(
    change: Callable[[str], str], line: int, register: Register
) -> None:
    lines = register.path.read_text().splitlines(keepends=True)
    lines[line] = change(lines[line])
    register.path.write_text("".join(lines))
    with pytest.raises(Mistake, match="changed"):
        Register.read(register.path)


def test_a_log_that_is_gone_or_not_sealed_is_seen(register: Register) -> None:
    seal = register.path.with_name(REGISTER_SEAL)
    sealed = seal.read_bytes()
    seal.unlink()
    with pytest.raises(Mistake, match="lines were removed or changed"):
        Register.read(register.path)
    seal.write_bytes(sealed)
    register.path.unlink()
    with pytest.raises(Mistake, match="has 0 lines"):
        Register.read(register.path)


@pytest.mark.parametrize("cut", [5, 0])
def test_a_kill_between_line_and_seal_leaves_a_log_that_goes_on(register: Register, cut: int) -> None:
    seal, before = register.path.with_name(REGISTER_SEAL), register.path.with_name(REGISTER_SEAL).read_bytes()
    register.record(look("b"), ABOUT)
    seal.write_bytes(before)
    whole = register.path.read_bytes()
    register.path.write_bytes(whole[: len(whole) - cut])
    register.record(look("b"), ABOUT)
    assert Register.read(register.path).lines == [json.loads(text) for text in whole.splitlines()]
    assert json.loads(seal.read_text())["last"] == sha256(whole.splitlines()[-1]).hexdigest() or not cut


def test_a_register_on_a_full_disk_stays_readable(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may still fit into the last block of its file when no block is left for the seal."""

    def full(path: Path, content: str) -> None:
        raise OSError(ENOSPC, strerror(ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("ntkexp.records.register.write_atomically", full)
        for figure in (2.0, 3.0, 4.0):
            with pytest.raises(OSError, match="No space left"):
                register.record(look("b", figure=figure), ABOUT)
    found = Register.read(register.path)
    assert [line.get("digest") for line in found.lines] == ["a", "a", "b", "b"]
    found.record(look("b", figure=4.0), ABOUT)
    assert len(Register.read(register.path).lines) == 5
