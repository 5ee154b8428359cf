"""What came of each step, where steps are summed as they are taken: the change of the outputs, step by step."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from ntkexp.path import integrals
from ntkexp.path.points import NetworkView
from tests.run.small import Ran, ran

QUICK = ("path.rule=[secant,left]", "ladder.machine=[]", "data.train=10", "data.probe=5", "data.test=4")
CASES = {
    "decay": ("optimizer.weight_decay=0.1", "path.probes=[probe]"),
    "clipped": ("optimizer=sgd", "optimizer.batch=3", "optimizer.clip_norm=0.5", "data.classes=all"),
    "kernel free": ("path.kernels=none", "path.outputs=[2,7]", "data.classes=all"),
    "float32": ("dtype=float32",),
}
BACK = "optimizer=momentum"


@cache
def undisturbed(*words: str) -> Ran:
    """A run of which every step is told by itself."""
    return ran(*QUICK, *words)


SOME = ("clipped", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "clipped"))


@pytest.mark.parametrize("case", SOME)
def test_it_is_the_change_of_the_outputs(case: str) -> None:
    found = undisturbed(*CASES[case])
    points, domain = found.setting.points, found.setting.domain
    ways = [found.setting.problem.weights, *found.memory.weights]
    outputs = torch.stack([NetworkView(points, weights).outputs for weights in ways], dim=2)
    changes = outputs.diff(dim=2)[domain.read][:, list(domain.integrated)]
    eps = torch.finfo(changes.dtype).eps
    assert (found.by_step("secant") - changes).abs().max() < 100 * eps * outputs.abs().max()  # of tens of layers' terms
    for rule, path in found.outcome.evidence.paths.items():
        together, sums = path.contributions.sum(2) + path.decay, found.by_step(rule)
        assert (sums.sum(2) - together).abs().max() < 100 * eps * path.contributions.abs().sum(2).max()


@pytest.mark.parametrize("words", [(), pytest.param((BACK,), marks=pytest.mark.slow)], ids=["online", "back"])
def test_long_paths_are_told_in_stretches(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    exact = undisturbed(*words).by_step("secant")
    monkeypatch.setattr(integrals, "MOST", 1)
    monkeypatch.setattr(integrals, "FEWEST", 4)
    found = ran(*QUICK, *words)
    edges = found.outcome.by_step["secant"].until(found.outcome.steps)
    assert edges == (0, 8, 16, 20)
    together = np.add.reduceat(exact.numpy(), edges[:-1], axis=2)
    tolerance = 1e-14 * float(exact.abs().max())  # sums of 8 numbers
    np.testing.assert_allclose(found.by_step("secant").numpy(), together, atol=tolerance)


def test_a_run_that_ends_sooner_is_told_as_far_as_it_went() -> None:
    found = ran(*QUICK, "steps=100000", "stop_at_loss=0.3")
    steps = found.outcome.steps
    assert 0 < steps < 100
    assert found.outcome.by_step["secant"].until(steps) == tuple(range(steps + 1))
