"""The path integrated at some outputs is that of the whole network, at those outputs."""

from __future__ import annotations

import pytest

from ntkexp.mistake import Mistake
from tests.run.small import ran, small

SHORT = ("data.classes=[1,3,8]", "loss=cross_entropy", "steps=4", "path.rule=[secant,left]")
WAYS = (
    ("optimizer=gd",),
    ("optimizer=sgd", "optimizer.weight_decay=0.1", "path.error_samples=4"),
    ("optimizer=adam", "path.attributed=12"),
    ("optimizer=gd", "path.every=snapshots", "path.count=4"),
    ("optimizer=flow", "optimizer.step_size=0.2", "optimizer.tolerance=1e-3", "path.rule=[gauss]", "steps=2"),
)
EXACT = 1e-12  # the bound of the project for secants
ROUNDING = 1e-13  # other products of matrices, over 4 steps


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_it_is_a_part_of_the_whole(way: tuple[str, ...]) -> None:
    some, whole = ran(*SHORT, *way, "path.outputs=[2,0]"), ran(*SHORT, *way)
    for rule, path in some.outcome.evidence.paths.items():
        other = whole.outcome.evidence.paths[rule]
        for ours, theirs in ((path.kernel, other.kernel), (path.contributions, other.contributions)):
            read = some.setting.domain.rows
            here, there = ours[read], theirs[read][:, [0, 2]]
            assert (here - there).norm() <= ROUNDING * there.norm()


@pytest.mark.parametrize("way", WAYS[:3], ids=" ".join)
def test_the_secant_is_exact_there_and_the_table_says_where(way: tuple[str, ...]) -> None:
    table = ran(*SHORT, *way, "path.outputs=[1]").table
    row = table["secant", "train"]
    assert row.relative_error is not None
    assert row.relative_error < EXACT
    assert row.agreement is None
    assert row.note.endswith("at output 1")
    assert "path.outputs=all" in table["kernel_regression", "train"].note


@pytest.mark.parametrize("outputs", ["[]", "[0,0]", "[3]", "[-1]"])
def test_outputs_that_there_are_not_are_refused(outputs: str) -> None:
    with pytest.raises(Mistake, match=r"path\.outputs"):
        ran(*SHORT, f"path.outputs={outputs}")


def test_all_outputs_by_number_are_all() -> None:
    assert small(*SHORT, "path.outputs=[2,1,0]").path.chosen_outputs(3) == small(*SHORT).path.chosen_outputs(3)
