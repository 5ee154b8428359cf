"""The path integrated at some points is that at all, at those points, and nothing is held of others."""

from __future__ import annotations

import pytest

from tests.run.small import ran

SHORT = ("data.classes=[1,3,8]", "loss=cross_entropy", "steps=4", "path.rule=[secant,left]")
WAYS = (
    ("optimizer=sgd", "optimizer.weight_decay=0.1", "optimizer.step_size=0.1", "path.error_samples=4"),
    ("optimizer=sgd", "optimizer.step_size=0.1", "path.kernels=none"),
    ("optimizer=adam", "optimizer.step_size=0.01", "path.attributed=12"),
    ("optimizer=gd", "optimizer.step_size=0.1", "path.every=snapshots", "path.count=4"),
)
ROUNDING = 1e-13  # other blocks of points, over 4 steps


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_it_is_a_part_of_the_whole(way: tuple[str, ...]) -> None:
    some, whole = ran(*SHORT, *way, "path.probes=[probe]"), ran(*SHORT, *way)
    probe = whole.setting.problem.places["probe"]
    for rule, path in some.outcome.evidence.paths.items():
        other = whole.outcome.evidence.paths[rule]
        pairs = [(path.kernel, other.kernel), (path.contributions, other.contributions), (path.decay, other.decay)]
        if path.half_by is not None and other.half_by is not None:
            pairs.append((path.half_by, other.half_by))
        for ours, all_of_theirs in pairs:
            theirs = all_of_theirs[probe]
            assert ours.shape == theirs.shape
            known = ours.isfinite() & theirs.isfinite()
            assert known.any() or not ours.numel()
            assert (ours - theirs)[known].norm() <= ROUNDING * theirs[known].norm()


def test_machines_say_what_they_lack_and_where_they_are_exact() -> None:
    table = ran(*SHORT, "path.probes=[probe]").table
    assert table["secant", "probe"].relative_error == pytest.approx(0, abs=1e-12)
    assert table["rbf_identity", "probe"].relative_error == pytest.approx(0, abs=1e-12)
    assert "add train to path.probes" in table["kernel_regression", "probe"].note
