"""Explanations as a picture: each point, and beside it the examples that made most of its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ntkexp.report.examples import Example
from ntkexp.report.explain import Explanation
from ntkexp.report.plots.examples import TOP, Explained, draw, fitting, given
from ntkexp.report.plots.run_plots import write
from ntkexp.report.plots.style import heading, house_style
from ntkexp.text import percent


def save(explanations: Sequence[Explanation], path: Path) -> None:
    """Write the picture as a file, SVG or PNG by its name."""
    rows = [row(explanation) for explanation in explanations]
    with house_style():
        figure = draw(rows)
        heading(figure, answer(explanations))
        write(figure, path, path.suffix.removeprefix("."))


def row(explanation: Explanation) -> Explained:
    """Put a point in the terms of the picture that a run draws of itself."""
    top = explanation.parts[:TOP]
    return Explained(
        role=f"{explanation.split} {explanation.number}",
        said=given(explanation.output, explanation.prediction),
        point=labelled(explanation.point),
        top=tuple(labelled(part.example) for part in top),
        shares=np.array([part.added for part in top]),
    )


def labelled(example: Example) -> Example:
    """Give an example a name that fits below it."""
    return replace(example, name=fitting(example.text or example.name))


def answer(explanations: Sequence[Explanation]) -> str:
    """Write the title."""
    masses = [explanation.mass for explanation in explanations]
    largest = [sum(abs(part.added) for part in explanation.parts[:TOP]) for explanation in explanations]
    share = percent(sum(largest) / sum(masses)) if sum(masses) else "0 %"
    where = f"these {len(explanations)} points, taken together" if len(explanations) > 1 else "this point"
    return f"The examples shown make {share} of the contributions to {where}"
