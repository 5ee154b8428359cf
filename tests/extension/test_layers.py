"""A new layer at infinite width: by its own formula, by the engine that knows it, and not where two share a name."""

from __future__ import annotations

import pytest
import torch

import ntkexp
from ntkexp.layer.kinds import kinds
from ntkexp.layer.pointwise import ReLU
from ntkexp.limit import engine
from ntkexp.mistake import Mistake
from tests.extension.outside import Outside
from tests.kernel.compare import agree

EPS = torch.finfo(torch.float64).eps
SPEC: list[dict[str, object]] = [
    {"layer": "Dense", "features": 8},
    {"layer": "Parabola"},
    {"layer": "Dense", "features": 1},
]
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_its_kernel_is_that_of_its_formula(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = q₁q₂ + 2c² and Θ = K + 4c², where c is also the Θ before it; auto takes torch, which knows every layer."""
    outside.composer.resolve([])
    monkeypatch.setattr(engine, "ENOUGH", 0)
    c = X @ X.t() / 3
    nngp, ntk = ntkexp.infinite_kernel(SPEC, X)
    expected = torch.outer(c.diag(), c.diag()) + 2 * c * c
    agree(nngp, expected, 10 * EPS, expected.max())
    agree(ntk, expected + 4 * c * c, 10 * EPS, expected.max())


def test_the_fused_engine_says_that_it_does_not_know_it(outside: Outside) -> None:
    outside.composer.resolve([])
    with pytest.raises(Mistake, match="engine=fused: some of these layers are none that it knows; choose torch"):
        ntkexp.infinite_kernel(SPEC, X, engine="fused")


def test_a_layer_with_the_name_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Relu", (), {"__module__": "theirs"})
    monkeypatch.setattr("ntkexp.layer.kinds.below", lambda kind: iter([ReLU, theirs]))
    with pytest.raises(Mistake, match=r"theirs\.Relu: there is a layer of this name, ntkexp\.layer\.ReLU; call the"):
        kinds()
