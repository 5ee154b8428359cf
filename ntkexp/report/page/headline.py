"""What was run and what came out, in two sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ntkexp.report.analysis.sweep import Sweep
from ntkexp.report.material import Material
from ntkexp.report.run import Run
from ntkexp.report.sentence import SPOKEN, listed, worst_result
from ntkexp.report.text import share, short


def what_was_run(material: Material) -> str:
    """The first sentence."""
    if len(material.runs) == 1:
        return f"{material.runs[0].name}, {material.runs[0].outcome or 'one run'}."
    count = f"{len(material.runs)} finished runs"
    if not material.analyses:
        return f"{count}."
    swept = {place.folder for analysis in material.analyses for place in analysis.sweep.places}
    part = len(swept & material.by_folder.keys())
    some = f", {part} of them in" if part < len(material.runs) else ", in"
    names = listed([f"{analysis.sweep.name} ({extent(analysis.sweep)})" for analysis in material.analyses])
    return f"{count}{some} the sweep{'s' * (len(material.analyses) > 1)} {names}."


def extent(sweep: Sweep) -> str:
    """The axes of a sweep.

    >>> from pathlib import Path
    >>> extent(Sweep(Path(), "width", "", {"model.width": (32, 64, 128)}, (), (), ()))
    'model.width from 32 to 128'
    """
    parts = []
    for key, values in sweep.axes.items():
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        named = ", ".join(map(str, values)) if not numbers or len(values) < 3 else f"from {values[0]} to {values[-1]}"
        parts.append(f"{key} {named}")
    seeds = len({place.seed for place in sweep.places})
    return "; ".join([*parts, *([f"{seeds} seeds"] if seeds > 1 else [])])


def what_came_out(runs: Sequence[Run]) -> str:
    """The second: how far the machines that are spoken of are from the networks."""
    clauses = []
    for machine, name in SPOKEN.items():
        results = [result for run in runs if (result := worst_result(run.ladder, machine)) is not None]
        errors = [result.relative_error or 0.0 for result in results]
        if results and all(result.exact for result in results):
            every = "every trained network" if len(results) > 1 else "the trained network"
            clauses.append(f"{name} reproduces {every} to rounding ({short(max(errors))} at worst)")
        elif results:
            typical = share(statistics.median(errors))
            clauses.append(f"{name} misses {f'by {typical}, at the median' if len(results) > 1 else f'by {typical}'}")
    text = "; ".join(clauses) or "no kernel machine was compared with a trained network"
    return f"{text[0].upper()}{text[1:]}."
