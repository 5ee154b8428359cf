"""contributions.zarr: 𝒮(x, xᵢ), what each training example added to each output at each point.

<rule>          [probe, out, train]   attributes: what is known of the parts, as `error_bar` and `cancellation`
<rule>_half_by  [probe, out, train]   the share of the path's time by which half of each was done, where steps are
                                      understood from the end
effect          [probe, out, example] by how much the output would change without the example, as the derivative of
                                      training foretells it; attributes: `mean`, `growth`, `agreement`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.store import Facts, create_store, open_store, put_array

DIMS = ("probe", "out", "train")
EFFECT = "effect"
ORDER = {"secant": 0, "gauss": 1, "left": 3}
"""The rules that are told of first, and that which is told of last."""


def explained_rule(rules: Iterable[str]) -> str | None:
    """Choose the rule that explanations are by, of those that a path was integrated by.

    >>> explained_rule(["left", "secant"]), explained_rule(["left", "my_rule"]), explained_rule([])
    ('secant', 'my_rule', None)
    """
    return min(rules, key=lambda rule: ORDER.get(rule, 2), default=None)


def half_by(rule: str) -> str:
    """Name the array that says when the parts by a rule were made."""
    return f"{rule}_half_by"


def write_contributions(
    path: Path, contributions: Mapping[str, NDArray[np.float64]], facts: Mapping[str, Facts] | None = None
) -> None:
    """Write the contributions by each rule, and what is known of them."""
    store = create_store(path)
    for rule, values in contributions.items():
        put_array(store, rule, np.asarray(values, dtype=np.float64), DIMS, (facts or {}).get(rule, {}))


def add_effect(path: Path, values: NDArray[np.float64], facts: Facts) -> None:
    """Write what leaving each example out would change, beside contributions that are written."""
    put_array(
        open_store(path, write=True), EFFECT, np.asarray(values, dtype=np.float64), ("probe", "out", "example"), facts
    )
