"""contributions.zarr: what made each output at each point.

    contribution   [probe, out, example]   𝒮(x, xᵢ), what each training example added; attributes: the `rule` it is by,
                                           and what is known of it, as `error_bar` and `cancellation`
    half_by        [probe, out, example]   the share of the path's time by which half of that was done, where steps are
                                           understood from the end
    decay          [probe, out]            what decay of the weights took away, where they decay
    outside        [probe, out]            what changes after the last step of a followed loop did, if any
    by_step        [probe, out, step]      parts and decay, step by step, or in stretches of steps where there are many:
                                           what came of the gradients and the decay of these steps
    step           [step]                  the first step of each stretch
    last_step      [step]                  and the last
    effect         [probe, out, example]   by how much the output would change without the example, as a sweep back over
                                           training foretells it, or trainings have found; attributes: `kind`
                                           (`removal`, `derivative`, `one_step`, `retrained`), `mean`, `growth`,
                                           `agreement`

The first four are by the rule that explains best; what others say has their names behind, as `contribution_left`.
Attributes of the store say who the examples are (`example`: their numbers in the source, their names, or what they
hold, digested) and which of the network's outputs were read (`out`: nothing is kept of others).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.store import Facts, ManyRows, create_store, open_store, put_array

CONTRIBUTION, HALF_BY, DECAY, BY_STEP = "contribution", "half_by", "decay", "by_step"
OUTSIDE = "outside"
STEP, LAST_STEP = "step", "last_step"
EFFECT = "effect"
RETRAINED = "retrained"
"""The `kind` of effects that trainings without each example have found; others foretell that."""

DIMS = ("probe", "out", "example")
ORDER = {"secant": 0, "gauss": 1, "left": 3}
"""The rules that are told of first, and that which is told of last."""


class ByStep(NamedTuple):
    """What came of each stretch of steps, [probe, out, step]; `edges` are where they begin, and the step after all."""

    sums: NDArray[np.float64]
    edges: Sequence[int]


@dataclass(frozen=True)
class ContributionsByRule:
    """What a rule says of a run, and what is known of that."""

    parts: ManyRows
    decay: NDArray[np.float64] | None = None
    outside: NDArray[np.float64] | None = None
    half_by: NDArray[np.float64] | None = None
    by_step: ByStep | None = None
    facts: Facts = field(default_factory=dict)


def explained_rule(rules: Iterable[str]) -> str | None:
    """Choose the rule that explanations are by, of those that a path was integrated by.

    >>> explained_rule(["left", "secant"]), explained_rule(["left", "my_rule"]), explained_rule([])
    ('secant', 'my_rule', None)
    """
    return min(rules, key=lambda rule: ORDER.get(rule, 2), default=None)


def called(kind: str, rule: str, explained: str) -> str:
    """Name what a rule says.

    >>> called("contribution", "left", "secant"), called("contribution", "left", "left")
    ('contribution_left', 'contribution')
    """
    return kind if rule == explained else f"{kind}_{rule}"


def write_contributions(
    path: Path, rules: Mapping[str, ContributionsByRule], examples: list[int] | list[str], outs: Sequence[int]
) -> None:
    """Write what each rule says of these examples at these outputs."""
    store = create_store(path, {"example": examples, "out": list(outs)})
    first = explained_rule(rules)
    for rule, found in rules.items():
        arrays = {
            CONTRIBUTION: (found.parts, DIMS, {**found.facts, "rule": rule}),
            HALF_BY: (found.half_by, DIMS, {}),
            DECAY: (found.decay, DIMS[:2], {}),
            OUTSIDE: (found.outside, DIMS[:2], {}),
            BY_STEP: (found.by_step and found.by_step.sums, (*DIMS[:2], STEP), {}),
        }
        for kind, (array, dims, facts) in arrays.items():
            if array is not None:
                put_array(store, called(kind, rule, first or rule), array, dims, facts, kind=np.dtype(np.float64))
    if edges := [found.by_step.edges for found in rules.values() if found.by_step is not None]:
        begins = np.array(edges[0], dtype=np.int64)  # which are the same by every rule
        put_array(store, STEP, begins[:-1], (STEP,), {})
        put_array(store, LAST_STEP, begins[1:] - 1, (STEP,), {})


def add_effect(path: Path, values: NDArray[np.float64], facts: Facts) -> None:
    """Write what leaving each example out would change, beside contributions that are written."""
    put_array(open_store(path, write=True), EFFECT, np.asarray(values, dtype=np.float64), DIMS, facts)
