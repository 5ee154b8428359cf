"""Pictures that another process draws are those that this one draws, whatever becomes of the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ntkexp.mistake import Mistake
from ntkexp.report import painter
from ntkexp.report.painter import another_process, beside, here

FAILING = {
    "at once": "",
    "in the middle of a picture": """print('["ladder.svg", "half')""",
    "between two pictures": """print('["ladder.svg", "<svg/>"]')""",
    "in words": "print('MemoryError')",
}


@pytest.fixture(scope="module")
def drawn(finished: dict[str, Path]) -> dict[str, str]:
    """What this process draws of a run, for which it imports all that it takes."""
    return dict(here(finished["ten classes"]))


@pytest.mark.slow
def test_another_process_draws_the_same(
    finished: dict[str, Path], drawn: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(painter, "here", lambda folder: pytest.fail("it did not come to its end"))
    with another_process() as process:
        assert process is not None
        found = list(beside(process, finished["ten classes"]))
    assert dict(found) == drawn
    assert len(found) == len(drawn)


@pytest.mark.slow
def test_what_a_killed_process_had_not_drawn_is_drawn_here(
    finished: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second half, which outlives it, keeps nobody waiting."""
    monkeypatch.setattr(painter, "here", lambda folder: iter([("ladder.svg", "whole")]))
    with another_process() as process:
        assert process is not None
        drawing = beside(process, finished["ten classes"])
        next(drawing)  # it is drawing, in two
        process.kill()
        assert dict(drawing)["ladder.svg"] == "whole"


@pytest.mark.parametrize("how", FAILING)
def test_what_another_process_does_not_finish_is_drawn_here(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(painter, "BESIDE", [sys.executable, "-S", "-c", FAILING[how]])
    monkeypatch.setattr(painter, "here", lambda folder: iter([("ladder.svg", "whole")]))
    with another_process() as process:
        assert process is not None
        assert dict(beside(process, Path("run"))) == {"ladder.svg": "whole"}


def test_what_is_wrong_with_a_run_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(painter, "BESIDE", [sys.executable, "-S", "-c", ""])
    with another_process() as process:
        assert process is not None
        with pytest.raises(Mistake, match=r"config\.json"):
            list(beside(process, tmp_path))


def test_a_process_that_cannot_be_started_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(painter, "BESIDE", ["/nowhere/python"])
    with another_process() as process:
        assert process is None


@pytest.mark.slow
def test_all_of_the_other_process_ends_with_who_started_it(finished: dict[str, Path]) -> None:
    with another_process() as process:
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f'"{finished["ten classes"]}"\n')
        process.stdin.flush()
        process.stdout.readline()  # it is drawing, in two
        process.stdin.close()
        process.stdin = None
        process.stdout.read()  # whoever still held the other end would keep this waiting
        assert process.wait() == 1


@pytest.mark.usefixtures("drawn")
def test_this_process_draws_if_it_knows_how() -> None:
    with painter.painter() as paint:
        assert paint is here
