"""`ntkexp explain RUN --page`: what made the outputs of a run, and what would change them, as a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.report.run import Run


def write_page(
    run: Run, split: str, numbers: list[int], without: str | None, trust: Sequence[str], again: str | None
) -> Path:
    """Write the page beside the reports of the runs; its path is given back."""
    from ntkexp.report.explain import explain
    from ntkexp.report.page.build import write_explanations

    found = explain(run, split, numbers)
    if not found:
        raise Mistake(f"no point of the split {split} of {run.name} can be explained")
    removed = []
    if without is not None:
        from ntkexp.cli.without import explained, removal

        made, _ = removal(run, split, numbers, without, trust, again, quiet=False)
        removed = explained(made)
    words = [
        *("ntkexp", "explain", str(run.path), "--page", f"--split={split}"),
        *(f"--probe={number}" for number in numbers),
        *([f"--without={without}"] if without else []),
        *([f"--again={again}"] if again else []),
        *(f"--trust={entry}" for entry in trust),
    ]
    page = run.path.parent.parent / "report" / f"explain-{run.name}.html"
    return write_explanations(run, found, removed, page, shlex.join(words))
