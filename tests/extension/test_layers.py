"""A new layer at infinite width: by its own formula, by the engine that knows it, and not where two share a name."""

from __future__ import annotations

import pytest
import torch

import ntkexp
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.linear import Flatten
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.spec import kinds
from ntkexp.limit import infinite_kernel
from ntkexp.limit.fused.program import program
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
    monkeypatch.setattr(infinite_kernel, "ENOUGH", 0)
    c = X @ X.t() / 3
    nngp, ntk = ntkexp.infinite_kernel(SPEC, X)
    expected = torch.outer(c.diag(), c.diag()) + 2 * c * c
    agree(nngp, expected, 10 * EPS, expected.max())
    agree(ntk, expected + 4 * c * c, 10 * EPS, expected.max())


@pytest.mark.parametrize("name", ["Parabola", "Lifted"])
def test_the_fused_engine_says_that_it_does_not_know_it(outside: Outside, name: str) -> None:
    """Neither a layer that says no form, nor one that would inherit the form of a formula that it replaced."""
    outside.composer.resolve([])
    spec: list[dict[str, object]] = [SPEC[0], {"layer": name}, SPEC[2]]
    with pytest.raises(Mistake, match=f"engine=fused: {name} has no fused form; choose torch"):
        ntkexp.infinite_kernel(spec, X, engine="fused")


@pytest.mark.parametrize("shape", [(3,), (2, 4, 5)], ids=["vectors", "images"])
def test_the_fused_form_that_it_says_is_used(outside: Outside, shape: tuple[int, ...]) -> None:
    """Nothing before the mean over the last pixels is left to torch."""
    outside.composer.resolve([])
    weights, end = (Conv(features=2), (Flatten(),)) if len(shape) > 1 else (Dense(features=2), ())
    layers = (*(weights, kinds()["Shrunk"](), ReLU()) * 2, *end, Dense(features=1))
    known = program(layers, shape)
    assert known is not None
    assert known.rest == layers[-1:] * len(end)
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fused, expected = (ntkexp.infinite_kernel(layers, x, engine=engine) for engine in ("fused", "torch"))
    for one, other in zip(fused, expected, strict=True):
        agree(one, other, 100 * EPS, other.max())


def test_a_layer_with_the_name_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Relu", (), {"__module__": "theirs"})
    monkeypatch.setattr("ntkexp.layer.spec.below", lambda kind: iter([ReLU, theirs]))
    with pytest.raises(Mistake, match=r"theirs\.Relu: there is a layer of this name, ntkexp\.layer\.ReLU; call the"):
        kinds()
