"""What was run and what came out, in two sentences."""

from __future__ import annotations

from collections.abc import Sequence

from ntkexp.records.sweep import Sweep
from ntkexp.report.material import Material
from ntkexp.report.run import Run
from ntkexp.report.sentence import SPOKEN, sentence
from ntkexp.report.standing import clause, standing
from ntkexp.text import listed


def what_was_run(material: Material) -> str:
    """Write the first sentence."""
    if len(material.runs) == 1:
        ended, _, _ = material.runs[0].outcome.partition("; ")  # what there is to say of effects stands below
        return f"{material.runs[0].name}, {ended or 'one run'}."
    failed = sum(run.diverged for run in material.runs)
    count = f"{len(material.runs)} finished runs{f' ({failed} diverged)' if failed else ''}"
    if not material.analyses:
        return f"{count}."
    swept = {place.folder for analysis in material.analyses for place in analysis.sweep.runs}
    part = len(swept & material.by_folder.keys())
    some = f", {part} of them in" if part < len(material.runs) else ", in"
    names = listed([f"{analysis.sweep.name} ({extent(analysis.sweep)})" for analysis in material.analyses])
    return f"{count}{some} the sweep{'s' * (len(material.analyses) > 1)} {names}."


def extent(sweep: Sweep) -> str:
    """Say how far the axes of a sweep go.

    >>> from pathlib import Path
    >>> axes = {"model.width": (128, 32, 64)}
    >>> extent(Sweep(path=Path(), name="width", command="", axes=axes, seeds=(), base=(), fits=(), runs=()))
    'model.width 3 values from 32 to 128'
    """
    parts = []
    for key, values in sweep.axes.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) < max(3, len(values)):
            parts.append(f"{key} {', '.join(map(str, values))}")
        else:
            parts.append(f"{key} {len(values)} values from {min(numbers)} to {max(numbers)}")
    seeds, done = len({place.seed for place in sweep.runs}), sum(place.state == "done" for place in sweep.runs)
    missing = [f"{done} of {len(sweep.runs)} runs done"] if done < len(sweep.runs) else []
    return "; ".join([*parts, *([f"{seeds} seeds"] if seeds > 1 else []), *missing])


def what_came_out(runs: Sequence[Run]) -> str:
    """Write the second: how far the machines that are spoken of are from the networks, of all runs."""
    if len(runs) == 1:
        return sentence(runs[0].ladder, diverged=runs[0].diverged)
    clauses = [clause(name, [standing(run.ladder, machine) for run in runs]) for machine, name in SPOKEN.items()]
    text = (
        "; ".join(filter(None, clauses)) or f"no kernel machine was compared with any of {len(runs)} trained networks"
    )
    failed = sum(run.diverged for run in runs)
    left = (
        f"; {failed} of the networks diverged, and {'is' if failed == 1 else 'are'} compared as left" if failed else ""
    )
    return f"{text[0].upper()}{text[1:]}{left}."
