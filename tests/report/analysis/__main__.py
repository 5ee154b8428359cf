"""`python -m tests.report.analysis` prints how often intervals are right and verdicts are wrong in simulated sweeps."""

from __future__ import annotations

import sys

from ntkexp.records.sweep import DEFAULT_MARGIN, Expected
from ntkexp.text import MISSING, aligned, percent
from tests.report.analysis.trials import DESIGNS, SWEEPS, Design, Laws, laws

HEADER = ("design", "seeds", "held", "bends", "agrees", "differs", "−1 agrees with −½", "agrees (true)", "bends (true)")
EDGE, FAR = Expected(DEFAULT_MARGIN), Expected(0.5)


def rates(found: Laws) -> list[str]:
    """Return the shares of right intervals, of false verdicts at the edge of the margin, and of true verdicts."""
    if not any(law.known for law in found.exponents):
        return [MISSING] * (len(HEADER) - 2)
    edges = [found.words(EDGE, scale) for scale in (1.0, 0.1, 0.01)]
    agrees, differs = (max(words[word] for words in edges) for word in ("agrees", "smaller"))
    true = (found.words(Expected(0.0))["agrees"], found.bends(0.3))
    return [percent(x) for x in (found.coverage(), found.bends(), agrees, differs, found.words(FAR)["agrees"], *true)]


def row(name: str, design: Design, seeds: int) -> list[str]:
    """Return a row of the table."""
    return [name, str(seeds), *rates(laws(design, seeds))]


rows = [row(name, design, seeds) for name, design in DESIGNS.items() for seeds in (2, 3, 5)]
sys.stdout.write(f"{SWEEPS} sweeps a row\n{aligned(HEADER, rows, [False] + [True] * (len(HEADER) - 1))}\n")
