"""What a ladder means, in one sentence of its own numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ntkexp.records.results import Result
from ntkexp.report.text import share, short

SPOKEN = {
    "secant": "the secant kernel machine",
    "gauss": "the Gauss–Legendre sum",
    "left": "the textbook sum",
    "frozen_start": "the frozen kernel",
}
"""The machines the sentence speaks of, in this order."""


def sentence(results: Sequence[Result]) -> str:
    """Which machines are the trained network, and by how much the others miss it, each on its worst split."""
    worst = {name: worst_result(results, name) for name in SPOKEN}
    found = {SPOKEN[name]: result for name, result in worst.items() if result is not None}
    if not found:
        return nothing(results)
    exact = {name: result for name, result in found.items() if result.exact}
    inexact = {name: result for name, result in found.items() if not result.exact}
    several = len({result.split for result in results}) > 1
    parts = [reproduces(exact)] if exact else []
    if inexact:
        parts.append(misses(inexact, "up to " if several else "", named=not exact))
    secant = worst["secant"]
    if secant is not None and not secant.exact:
        parts.append(f"rounding explains no more than {short(secant.tolerance)} of the secant's miss")
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def worst_result(results: Sequence[Result], machine: str) -> Result | None:
    """A machine's result on the split where it exceeds its tolerance most."""
    return max(
        (row for row in results if row.machine == machine and is_number(row.relative_error)),
        key=lambda row: (row.relative_error or 0.0) / row.tolerance,
        default=None,
    )


def reproduces(exact: dict[str, Result]) -> str:
    """The machines that are the network."""
    errors = ", ".join(short(result.relative_error) for result in exact.values())
    verb = "reproduces" if len(exact) == 1 else "reproduce"
    return f"{listed(list(exact))} {verb} the trained network to rounding ({errors})"


def misses(inexact: dict[str, Result], at_most: str, *, named: bool) -> str:
    """The machines that are not; `named` if the network has not been spoken of yet."""
    (first, *others) = [(name, at_most + share(result.relative_error or 0.0)) for name, result in inexact.items()]
    target = " the trained network" if named else ""
    clauses = [f"{first[0]} misses{target} by {first[1]}", *(f"{name} by {size}" for name, size in others)]
    return ", ".join(clauses)


def nothing(results: Sequence[Result]) -> str:
    """Why there is nothing to compare."""
    spoken = [row for row in results if row.machine in SPOKEN]
    if any(row.max_error is not None and not math.isfinite(row.max_error) for row in spoken):
        return "The trained network is not finite, so no kernel machine can be compared with it."
    if any(row.max_error is not None for row in spoken):
        return "Training did not change the network, so there is nothing for a kernel machine to reproduce."
    reason = next((row.note for row in spoken if row.note), "")
    return "No kernel machine was compared with the trained network" + (f": {reason}." if reason else ".")


def listed(names: list[str]) -> str:
    """Names in a row, with an 'and' before the last.

    >>> listed(["this", "that", "the other"])
    'this, that and the other'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def is_number(error: float | None) -> bool:
    """Whether there is an error to speak of."""
    return error is not None and math.isfinite(error)
