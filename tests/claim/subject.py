"""A small claim with tiny networks, and a claim with a trial that takes no time."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from ntkexp.claim.conduct import PlannedClaim, Workshop, carry_out, conclude, plan_claim
from ntkexp.claim.read import claim_of
from ntkexp.claim.trial import AbstractTrial
from ntkexp.config.compose import Composer, composer
from ntkexp.records.claim import ClaimRecord
from ntkexp.report.progress import Quiet
from tests.kernel_file.subjects import Here

SLOPE = {"_target_": "ntkexp.claim.expectation.Slope", "along": "model.width", "value": -1.0, "margin": 5.0}
TINY = [
    *("data=circle", "data.train=4", "data.query=2", "data.test=0", "steps=2", "path.rule=[secant]", "path.count=2"),
    *("path.error_samples=0", "ladder.machine=[secant]"),
]
CLAIM: dict[str, Any] = {
    "statement": "The wider, the less it moves.",
    "source": {"paper": "A paper", "section": "1"},
    "runs": {"axes": {"model.width": [4, 64]}, "base": TINY},
    "seeds": 2,
    "quantity": "weights_moved",
    "expectation": SLOPE,
    "null": 10,
    "refutes": "another slope",
    "control": {"base": ["init=mean_field"], "expectation": {"value": 50.0}},
    "second": {"base": ["data=sphere"]},
    "quick": {"axes": {"model.width": [4, 8]}},
}


class Line(AbstractTrial):
    """A trial whose results follow a power law with noise."""

    slope: float = -1.0

    def rows(self, seed: int) -> Sequence[dict[str, float]]:
        noise = np.random.default_rng(seed).standard_normal(3)
        return [{"width": w, "height": w**self.slope * np.exp(0.01 * n)} for w, n in zip((1, 2, 4), noise, strict=True)]


def changed_claim(**changes: Any) -> dict[str, Any]:
    """Return the claim with changed fields. None removes a field."""
    found = deepcopy(CLAIM) | changes
    return {key: value for key, value in found.items() if value is not None}


OF_LINES = changed_claim(
    runs=None,
    trial={"_target_": "tests.claim.subject.Line"},
    quantity="height",
    expectation={"_target_": "ntkexp.claim.expectation.Slope", "along": "width", "value": -1.0, "margin": 0.2},
    control={"trial": {"slope": 0.0}},
    second={"trial": {"slope": -1.05}},
    quick=None,
    seeds=4,
)


def planned(tree: dict[str, Any], out: Any, size: Any = "default", made: Composer | None = None) -> PlannedClaim:
    """Plan a claim."""
    made = made or composer(None, ["tests"])
    return plan_claim(claim_of("tiny", tree, made.builder, size), made, out, ("tests",))


def judged(found: PlannedClaim) -> ClaimRecord:
    """Run a claim in this process, and judge it."""
    return conclude(found, carry_out(found, Workshop(Here(1), Quiet(), ("tests",))), "default")
