"""The store recorded.zarr: the outputs and weights of a run at some of its steps.

    step      [snapshot]               the step; −1 until the snapshot is complete
    outputs   [snapshot, query, out]   the outputs of the network at all points
    weights   [snapshot, weight]       the trained weights, one parameter after the other

The attributes `names` and `shapes` describe the parameters. A run has this store only
if `path.record` is set. The store has only the arrays that `path.record` names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.array_schema import ZARR, Dims, read_store, refuse_odd_store
from ntkexp.records.atomic import RUN_AGAIN, Damaged
from ntkexp.records.kernels import (
    NOT_YET,
    Facts,
    create_snapshots,
    get_array,
    open_store,
    read_steps,
)
from ntkexp.records.schema import RecordedAttributes, checked

RECORDED = "recorded.zarr"
OUTPUTS = "outputs"
WEIGHTS = "weights"
STEP = "step"
NUMBER_BYTES = 8  # all arrays are float64

RECORDED_KINDS: Mapping[str, Dims] = {
    OUTPUTS: ("snapshot", "query", "out"),
    WEIGHTS: ("snapshot", "weight"),
    STEP: ("snapshot",),
}
"""The axes of each array."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each parameter, by its name."""


def recorded_numbers(
    names: Sequence[str], points: tuple[int, int], shapes: Shapes
) -> int:
    """Return the number of recorded numbers at one step. `names` are the recorded
    arrays, and `points` the numbers of points and of outputs.

    >>> recorded_numbers(["outputs", "weights"], (10, 2), {"w": (3, 4)})
    32
    """
    sizes = {OUTPUTS: prod(points), WEIGHTS: sum(map(prod, shapes.values()))}
    return sum(sizes[name] for name in names)


def create_recorded(
    path: Path,
    names: Sequence[str],
    points: tuple[int, int],
    shapes: Shapes,
    capacity: int,
) -> None:
    """Create a store for up to `capacity` steps. Keep existing chunks.

    Args:
        path: The path of the store.
        names: The recorded arrays: outputs, weights or both.
        points: The number of points, and the number of outputs.
        shapes: The shapes of the parameters.
        capacity: The largest number of recorded steps.
    """
    axes = {
        OUTPUTS: {"query": points[0], "out": points[1]},
        WEIGHTS: {"weight": sum(map(prod, shapes.values()))},
    }
    facts: Facts = {
        "names": list(shapes),
        "shapes": [list(shape) for shape in shapes.values()],
    }
    create_snapshots(path, {name: axes[name] for name in names}, capacity, facts)


def refuse_odd_recorded(path: Path, lengths: Mapping[str, int]) -> None:
    """Raise if the store does not have the format that runs write, or if its axes do
    not have these lengths."""
    store = read_store(path)
    attributes = checked(store.attributes, RecordedAttributes, path / ZARR)
    names = attributes["names"]
    shapes = attributes["shapes"]
    if len(set(names)) < len(names) or len(names) != len(shapes):
        raise Damaged(
            f"{path} has content that no run writes: each parameter needs a name and a shape; "
            f"{RUN_AGAIN}"
        )
    snapshots = store.arrays[STEP].shape[0] if STEP in store.arrays else 0
    expected = {"weight": sum(map(prod, shapes)), "snapshot": snapshots}
    refuse_odd_store(store, path, RECORDED_KINDS, [STEP], {**lengths, **expected})


# --- Reading.


def read_outputs(path: Path, step: int) -> NDArray[np.float64]:
    """Return the recorded outputs [query, out] of a step.

    Raise if the run recorded no outputs, or none at this step.
    """
    return read_recorded(path, OUTPUTS, step)


def read_weights(path: Path, step: int) -> dict[str, NDArray[np.float64]]:
    """Return the recorded weights of a step, by the name of the parameter.

    Raise if the run recorded no weights, or none at this step.
    """
    numbers = read_recorded(path, WEIGHTS, step)
    facts = checked(dict(open_store(path).attrs), RecordedAttributes, path / ZARR)
    return split_weights(numbers, facts["names"], facts["shapes"])


def recorded_steps(path: Path) -> list[int]:
    """Return the recorded steps in ascending order."""
    steps = read_steps(path)
    return [int(step) for step in steps[steps != NOT_YET]]


def read_recorded(path: Path, name: str, step: int) -> NDArray[np.float64]:
    """Return a recorded array of a step. Raise if it was not recorded."""
    if not (path / name).is_dir():
        raise Mistake(
            f"{path.parent} recorded no {name}; run it with path.record=[{name}]"
        )
    steps = recorded_steps(path)
    if step not in steps:
        known = ", ".join(map(str, steps))
        raise Mistake(
            f"step={step}: {path.parent} recorded no {name} at this step; it did at {known}, "
            "which path.schedule chooses"
        )
    return np.asarray(
        get_array(open_store(path), name)[steps.index(step)], dtype=np.float64
    )


def split_weights(
    numbers: NDArray[np.float64], names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, NDArray[np.float64]]:
    """Cut a vector of weights into parameters.

    >>> split_weights(np.arange(3.0), ["a", "b"], [[1, 2], [1]])
    {'a': array([[0., 1.]]), 'b': array([2.])}
    """
    ends = np.cumsum([prod(shape) for shape in shapes])[:-1]
    parts = np.split(numbers, ends)
    return {
        name: part.reshape(tuple(shape))
        for name, part, shape in zip(names, parts, shapes, strict=True)
    }
