"""All readers can distinguish the colours, which are visible on light and dark pages."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from ntkexp.report.plots.style import (
    COLOUR,
    COLOURS,
    GREY,
    LINE,
    colour,
    dashes,
    line_look,
    luminance,
    shade,
)

PAGES = {"light": "#ffffff", "dark": "#15171a"}
LEAST_CONTRAST = 3  # WCAG 2.1, 1.4.11: graphical objects

# Machado, Oliveira and Fernandes (2009), doi:10.1109/TVCG.2009.113, severity 1, on linear sRGB
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
LEAST_DISTANCE = {"normal": 20, "protanopia": 20, "deuteranopia": 20, "tritanopia": 18}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def cielab(colour: str, vision: str) -> NDArray[np.float64]:
    """Return L*, a*, b* (D65) of a colour, as a reader with this vision sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    x, y, z = np.cbrt((XYZ @ seen) / XYZ.sum(axis=1))  # all colours here are lighter than the linear part
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted(luminance(to_rgb(each)) for each in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("vision", VISION)
def test_lines_have_colours_that_every_reader_can_tell_apart(vision: str) -> None:
    seen = [cielab(one, vision) for one in (*COLOURS, GREY)]
    distances = [float(np.linalg.norm(one - other)) for one, other in combinations(seen, 2)]
    assert min(distances) >= LEAST_DISTANCE[vision]


MACHINES = ("my_machine", "thirds", "another", "x", "kernel_of_mine")
INKS = {*COLOURS, GREY, *(colour(name) for name in (*COLOUR, *MACHINES)), *(shade(k, 24) for k in range(24))}


@pytest.mark.parametrize("page", PAGES)
def test_every_colour_is_visible_on_every_page(page: str) -> None:
    assert min(contrast(ink, PAGES[page]) for ink in INKS) >= LEAST_CONTRAST


def test_machines_and_lines_look_different() -> None:
    """Two lines of one colour have different dashes."""
    looks = [(colour(name), dashes(name)) for name in COLOUR if name not in ("frozen_start", "linearised")]
    assert len(set(looks)) == len(looks)
    assert {*LINE} <= {*COLOUR}
    lines = [tuple(line_look(k).values()) for k in range(24)]
    assert len(set(lines)) == 24
