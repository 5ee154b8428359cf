"""How the error of a rule falls with the step size on a smooth network, over the same path time.

A sum over steps of local errors of order η^{p+1} is of order η^p: 1 for left ends, 2n for n Gauss nodes; a secant has
no error to fall.
"""

from __future__ import annotations

from functools import cache
from math import log

import numpy as np
import pytest

from tests.run.small import ran

TIME = 3.0
STEP_SIZES = (0.2, 0.1, 0.05, 0.025)  # the largest is a fifth to an eighth of the largest stable one
NEAR = 0.2  # the next term of the error still shows at the largest step: a few per cent over a factor 8
SMOOTH = ("model.activation=tanh", "path.rule=[gauss,left,secant]", "path.probes=[probe]", "path.schedule=1000")


@cache
def errors(nodes: int, seed: int) -> dict[str, tuple[float, ...]]:
    """The final error of each rule at each step size."""
    shared = (*SMOOTH, f"path.nodes={nodes}", f"seed={seed}", "ladder.machine=[]")
    runs = [ran(*shared, f"optimizer.step_size={size}", f"steps={round(TIME / size)}") for size in STEP_SIZES]
    return {rule: tuple(run.error(rule) for run in runs) for rule in ("gauss", "left", "secant")}


def slope(found: tuple[float, ...]) -> float:
    """The fitted power of the step size."""
    return float(np.polyfit(list(map(log, STEP_SIZES)), list(map(log, found)), 1)[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rule", "nodes", "order"), [("left", 1, 1), ("gauss", 1, 2), pytest.param("gauss", 2, 4, marks=pytest.mark.slow)]
)
def test_the_order_of_a_rule(rule: str, nodes: int, order: int, seed: int) -> None:
    assert abs(slope(errors(nodes, seed)[rule]) - order) < NEAR


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_secant_is_exact_at_every_step_size(seed: int) -> None:
    assert max(errors(1, seed)["secant"]) < 1e-13  # √120 steps times a few eps, and some room
