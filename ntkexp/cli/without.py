"""`ntkexp explain RUN --without=…`: trained again without some examples, and what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ntkexp.cli.interrupt import interruptible
from ntkexp.cli.progress import listener
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ntkexp.records.removal import Removal
    from ntkexp.report.ledger import LedgerEntry
    from ntkexp.report.run import Run


def leave_out(
    run: Run, split: str, numbers: list[int], text: str, top: int, *, as_json: bool, trust: Sequence[str]
) -> None:
    """Show what leaving out a group changes at these points of a split."""
    made, found = removal(run, split, numbers, text, trust, quiet=as_json)
    if as_json:
        from ntkexp.records.json_file import to_text

        sys.stdout.write(to_text({"ledger": [entry.as_json for entry in made]}))
        return
    from ntkexp.report.effects import known_effects
    from ntkexp.report.ledger_text import ledger_told

    known = known_effects(run)
    sys.stdout.write(ledger_told(explained(made), found, None if known is None else known.agreement, top))


def removal(
    run: Run, split: str, numbers: list[int], text: str, trust: Sequence[str], *, quiet: bool
) -> tuple[list[LedgerEntry], Removal]:
    """Find what leaving out a group changes, and put it in words of the run."""
    from ntkexp.config.target import admit
    from ntkexp.report.explain import numbered
    from ntkexp.report.group import group
    from ntkexp.report.ledger import entries

    if "follow" in run.config:
        raise Mistake(
            f"{run.path} is of a loop of yours, which nothing here can run again without some of its examples"
        )
    points = [numbered(run, split, number) for number in numbers]
    chosen = group(run, text, lambda: influences(run, points))
    admitted = admit(trust)
    from ntkexp.run.without import without

    with interruptible(lambda: "; nothing was kept of it"):
        found = without(run.path, chosen, points, listener(quiet=quiet), admitted)
    return entries(run, split, numbers, found), found


def influences(run: Run, points: Sequence[int]) -> NDArray[np.float64]:
    """How much each training example matters at these points: by its effects, or by what it added."""
    from ntkexp.records.contributions import explained_rule
    from ntkexp.report.effects import effects, influence

    parts = effects(run)
    if parts is None:
        rule = explained_rule(run.rules)
        if rule is None:
            raise Mistake(f"{run.path} holds neither effects nor contributions, so nobody knows who is at the top")
        parts = run.parts(rule).to_numpy()
    return influence(parts[list(points)])


def explained(made: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Choose the output that the network gives a point, where there are several."""
    best: dict[int, LedgerEntry] = {}
    for entry in made:
        if entry.number not in best or entry.before > best[entry.number].before:
            best[entry.number] = entry
    return list(best.values())
