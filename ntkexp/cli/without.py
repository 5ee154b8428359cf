"""`ntkexp explain RUN --without=…`: trained again without some examples, and what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ntkexp.cli.interrupt import interruptible
from ntkexp.mistake import Mistake
from ntkexp.report.progress import listener

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ntkexp.effects.mean import MeanName
    from ntkexp.progress import AbstractProgress
    from ntkexp.records.removal import Removal
    from ntkexp.report.ledger import LedgerEntry
    from ntkexp.report.run import Run


def leave_out(
    run: Run,
    split: str,
    numbers: list[int],
    text: str,
    top: int,
    *,
    again: str | None,
    as_json: bool,
    trust: Sequence[str],
) -> None:
    """Show what leaving out a group changes at these points of a split."""
    made, found = removal(run, split, numbers, text, trust, again, quiet=as_json)
    order = order_of(run) if "top:" in text else ""
    if as_json:
        from ntkexp.records.json_file import to_text

        ordered = {"top": order} if order else {}
        sys.stdout.write(to_text({**ordered, "ledger": [entry.as_json for entry in made]}))
        return
    from ntkexp.report.effects import known_effects
    from ntkexp.report.ledger_text import ledger_told

    known = known_effects(run)
    sys.stdout.write(ledger_told(explained(made), found, None if known is None else known.agreement, top, order))


def removal(
    run: Run, split: str, numbers: list[int], text: str, trust: Sequence[str], again: str | None, *, quiet: bool
) -> tuple[list[LedgerEntry], Removal]:
    """Find what leaving out a group changes, and put it in words of the run."""
    from ntkexp.report.explain import numbered
    from ntkexp.report.group import group
    from ntkexp.report.ledger import entries

    points = [numbered(run, split, number) for number in numbers]
    progress = listener(quiet=quiet)
    chosen = group(run, text, lambda: influences(run, points, progress))
    with interruptible(lambda: "; nothing was kept of it"):
        if "follow" in run.config:
            found = of_a_loop(run, chosen, points, again, trust, progress)
        else:
            found = of_an_experiment(run, chosen, points, again, trust, progress)
    return entries(run, split, numbers, found), found


def of_an_experiment(
    run: Run, group: list[int], points: list[int], again: str | None, trust: Sequence[str], progress: AbstractProgress
) -> Removal:
    """Train an experiment again without a group."""
    from ntkexp.config.target import admit

    if again is not None:
        raise Mistake(
            f"--again is for loops that were followed; {run.path} is an experiment, which is trained as it is"
        )
    admitted = admit(trust)
    from ntkexp.run.without import without

    return without(run.path, group, points, progress, admitted)


def of_a_loop(
    run: Run, group: list[int], points: list[int], again: str | None, trust: Sequence[str], progress: AbstractProgress
) -> Removal:
    """Let the user's function carry a followed loop out without a group."""
    from ntkexp.cli.attribute import found_in
    from ntkexp.foreign_loop.kept.load import trace_in
    from ntkexp.foreign_loop.loop_ledger import loop_without
    from ntkexp.records.removal import read_removal, write_removal

    if (known := read_removal(run.path, group, points)) is not None:
        return known
    if again is None:
        raise Mistake(
            f"{run.path} is of a loop of yours; give a function that carries it out anew, --again=FILE.py:FUNCTION"
        )
    files, effect = trace_in(run.path), run.contributions.get("effect")
    mean: MeanName = "fixed" if effect is not None and effect.attrs["mean"] == "fixed" else "renormalised"
    function = found_in(again, "again", trust)
    with files.folder.claim():
        found = loop_without(files, function, mean, group, points, progress)
        write_removal(run.path, found)
    return found


def influences(run: Run, points: Sequence[int], progress: AbstractProgress) -> NDArray[np.float64]:
    """How much each training example matters at these points: by its effects, or by what it added; which is said."""
    from ntkexp.records.contributions import explained_rule
    from ntkexp.report.effects import effects, influence

    parts = effects(run)
    if parts is None:
        rule = explained_rule(run.rules)
        if rule is None:
            raise Mistake(f"{run.path} holds neither effects nor contributions, so nobody knows who is at the top")
        parts = run.parts(rule).isel(probe=list(points)).to_numpy()
    else:
        parts = parts[list(points)]
    progress.say(f"at the top are examples {order_of(run)}")
    return influence(parts)


def order_of(run: Run) -> str:
    """Say by what examples are at the top, in words that follow 'examples'."""
    from ntkexp.report.effects import effects

    if effects(run) is None:
        return "that added most, as this run has no effects (path.effects=true)"
    return "of the largest effects"


def explained(made: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Choose the output that the network gives a point, where there are several."""
    best: dict[int, LedgerEntry] = {}
    for entry in made:
        if entry.number not in best or entry.before > best[entry.number].before:
            best[entry.number] = entry
    return list(best.values())
