"""`ntkexp explain`: the training examples that made a prediction, as a table and as a picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.report.explain import Explanation

KINDS = (".svg", ".png")
FEW, ON_A_PAGE = 3, 12
"""Points that are explained if nobody says which: on a terminal, and on a page."""


def explain(
    folder: Path,
    split: str | None,
    numbers: Sequence[int],
    worst: int | None,
    top: int,
    picture: Path | None,
    *,
    without: str | None,
    again: str | None,
    page: bool,
    as_json: bool,
    trust: Sequence[str],
) -> None:
    """Explain the points that were asked for: by number, or those that the network misses most."""
    from ntkexp.report import explain as explanations
    from ntkexp.report.explain_text import all_told
    from ntkexp.report.forgetting_text import told_of_tasks
    from ntkexp.report.ladder import main_split
    from ntkexp.report.run import load_run

    refuse_both(numbers, worst, picture, page, as_json)
    if again is not None and without is None:
        raise Mistake("--again is what a loop is trained with without some examples; add --without=K,… to say which")
    run = load_run(folder.expanduser())
    chosen = split or ("probe" if numbers else main_split(run.ladder))
    wanted = list(numbers) or explanations.worst(run, chosen, worst or (ON_A_PAGE if page else FEW))
    if page:
        from ntkexp.cli.explain_page import write_page

        sys.stdout.write(f"{write_page(run, chosen, wanted, without, trust, again)}\n")
        return
    if without is not None:
        from ntkexp.cli.without import leave_out

        leave_out(run, chosen, wanted, without, top, again=again, as_json=as_json, trust=trust)
        return
    found = explanations.explain(run, chosen, wanted)
    if not found:
        raise Mistake(f"no point of the split {chosen} of {run.name} can be explained")
    if as_json:
        from ntkexp.records.json_file import to_text

        if picture is not None:
            draw(found, picture.expanduser())
        sys.stdout.write(to_text({"points": [each.as_json(top) for each in found]}))
        return
    if tasks := told_of_tasks(run, top):
        sys.stdout.write(f"{tasks}\n")
    where = picture.expanduser() if picture else place(run.path, chosen, wanted)
    sys.stdout.write(f"{all_told(found, top)}\n")
    draw(found, where)
    sys.stdout.write(f"{where}\n")


def refuse_both(numbers: Sequence[int], worst: int | None, picture: Path | None, page: bool, as_json: bool) -> None:
    """Refuse options of which only one can be meant."""
    if numbers and worst is not None:
        raise Mistake("--probe names points and --worst looks for them; give one of the two")
    if page and as_json:
        raise Mistake("--page and --json are two ways to tell the same; give one of the two")
    if page and picture is not None:
        raise Mistake("--page has pictures of its own; leave out --picture")


def place(run: Path, split: str, numbers: Sequence[int]) -> Path:
    """Where the picture goes if nobody says: into the report beside the runs."""
    name = "-".join(["explain", run.name, split, *map(str, numbers[:8])])
    return run.parent.parent / "report" / f"{name}.svg"


def draw(found: Sequence[Explanation], where: Path) -> None:
    """Draw the picture into its file."""
    from ntkexp.report.plots.explanation import save

    if where.suffix not in KINDS:
        raise Mistake(f"--picture={where}: it takes a file whose name ends in {' or '.join(KINDS)}")
    try:
        save(found, where)
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise Mistake(f"--picture={where}: {error.strerror}; choose another place") from None
