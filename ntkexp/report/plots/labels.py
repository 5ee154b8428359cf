"""Lines are named at their ends, in their colours, instead of in a legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray


class End(NamedTuple):
    """A line ends here, in the units of the data, and has a name."""

    text: str
    height: float
    colour: str


def name_ends(axes: Axes, ends: Sequence[End], gap: float = 0.11) -> None:
    """Write the names to the right of the axes, no closer than `gap` of their height."""
    heights = np.array([end.height for end in ends])
    axes.autoscale_view()  # limits that nobody set are found out late
    places = axes.transLimits.transform(axes.transScale.transform(np.column_stack([np.ones_like(heights), heights])))
    for end, place in zip(ends, spread(places[:, 1], gap), strict=True):
        axes.annotate(
            end.text, (1, place), xytext=(3, 0), xycoords="axes fraction", textcoords="offset points",
            color=end.colour, va="center", fontsize=7, annotation_clip=False,
        )  # fmt: skip


def spread(places: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Move places within [0, 1] as little as it takes to keep the gap and their order, where there is room.

    >>> spread(np.array([0.5, 0.5, 0.0]), 0.2).tolist()
    [0.4, 0.6, 0.0]
    """
    order = np.argsort(places, kind="stable")
    # With z_k = place_k − k·gap the gap becomes an order, and the nearest ordered sequence is the isotonic fit
    steps = gap * np.arange(len(places))
    room = max(0.0, 1 - gap * (len(places) - 1))
    result = np.empty(len(places))
    result[order] = np.clip(isotonic(places[order] - steps), 0, room) + steps
    return result


def isotonic(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Find the nearest sequence that does not fall: neighbours that do are replaced by their mean.

    >>> isotonic(np.array([1.0, 3.0, 2.0])).tolist()
    [1.0, 2.5, 2.5]
    """
    blocks: list[list[float]] = []
    for value in values.tolist():
        blocks.append([value])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return np.array([np.mean(block) for block in blocks for _ in block])
