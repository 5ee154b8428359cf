"""It is said when a sketch takes more than the exact kernel, and only then."""

from __future__ import annotations

import pytest
import torch

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read import reader, sketched
from ntkexp.kernel.secant.uses import View
from ntkexp.library import tangent_kernel
from tests.kernel.problems import problem


def layers(count: int, positions: int) -> Jacobian:
    """Two examples of layers like those of a language model, whose numbers take no memory."""
    nothing = torch.zeros(())
    factors = nothing.expand(2, positions, 768), nothing.expand(2, 1, positions, 2304)
    views = [View(f"{k}", (768, 2304), (1, 768), 0) for k in range(count)]
    return Jacobian(tuple(Factored(*factors, view, None, None) for view in views), 2, 1)


def test_a_few_texts_are_cheaper_exactly() -> None:
    said = sketched.remark(layers(40, positions=64), 32, 0, size=1024)
    assert said is not None
    assert said.startswith("the exact kernel of these 32 examples takes less")


@pytest.mark.parametrize(
    ("count", "positions", "examples"),
    [(1, 64, 2000), (40, 64, 2000), (1, 64, 32)],
    ids=["many examples", "more than are held", "done in no time"],
)
def test_otherwise_nothing_is_said(count: int, positions: int, examples: int) -> None:
    assert sketched.remark(layers(count, positions), examples, 0, size=1024) is None


def test_layers_of_one_use_are_counted_by_their_factors() -> None:
    """⟨a, a′⟩⟨β, β′⟩ for half of all pairs, against outer products."""
    some = layers(1, positions=1)
    assert reader.kernel_operations(some, 100, 0) == 100 * 100 / 2 * (768 + 2304 + 1)
    assert reader.kernel_operations(some, 100, 50) == 100 * 50 * (768 + 2304 + 1)


def test_users_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("convolution")
    monkeypatch.setattr(sketched, "LONG", 1.0)
    with pytest.warns(UserWarning, match="leave sketch out"):
        tangent_kernel(given.module, given.x, sketch=20)
