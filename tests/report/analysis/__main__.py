"""The judge on trial: `python -m tests.report.analysis` prints how often intervals hold and verdicts are false."""

from __future__ import annotations

import sys

import numpy as np

from ntkexp.records.sweep import DEFAULT_MARGIN, Expected
from ntkexp.report.analysis.laws import dependence
from ntkexp.text import MISSING, aligned, percent
from tests.report.analysis.trials import AMOUNTS, DESIGNS, SWEEPS, Design, Laws, fluctuating, laws, variances

HEADER = ("design", "seeds", "held", "bends", "agrees", "differs", "−1 agrees with −½", "agrees (true)", "bends (true)")
EDGE, FAR = Expected(DEFAULT_MARGIN), Expected(0.5)


def rates(found: Laws) -> list[str]:
    """Shares of the sweeps: of intervals that hold, of false verdicts at the edge of the margin, and of true ones."""
    if not any(law.known for law in found.exponents):
        return [MISSING] * (len(HEADER) - 2)
    edges = [found.words(EDGE, scale) for scale in (1.0, 0.1, 0.01)]
    agrees, differs = (max(words[word] for words in edges) for word in ("agrees", "smaller"))
    true = (found.words(Expected(0.0))["agrees"], found.bends(0.3))
    return [percent(x) for x in (found.coverage(), found.bends(), agrees, differs, found.words(FAR)["agrees"], *true)]


def row(name: str, design: Design, seeds: int) -> list[str]:
    """A line of the table."""
    return [name, str(seeds), *rates(laws(design, seeds))]


def held(seeds: int, modes: int, amounts: str) -> str:
    """How often the interval holds the exponent of the first kernel's variance."""
    found = variances(fluctuating(seeds, modes, 0.5, amounts))
    return percent(float(np.mean([law.widened(dependence(seeds)).covers(-1.0) is True for law in found])))


rows = [row(name, design, seeds) for name, design in DESIGNS.items() for seeds in (2, 3, 5)]
sys.stdout.write(f"{SWEEPS} sweeps a row\n{aligned(HEADER, rows, [False] + [True] * (len(HEADER) - 1))}\n")

more = [
    [amounts, str(modes), str(seeds), held(seeds, modes, amounts)]
    for amounts in AMOUNTS
    for modes in (1, 4, 30)
    for seeds in (3, 4, 5, 10)
]
heads = ("seeds fluctuate", "modes of K_0 that vary", "seeds", "held")
sys.stdout.write(f"\n{aligned(heads, more, [False] + [True] * 3)}\n")
