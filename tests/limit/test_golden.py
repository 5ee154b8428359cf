"""Kernels that neural_tangents computed, in float64.

Its tolerances: 1e-12 for closed forms; where an example meets itself its arc cosine is off by up to 3e-8; its generic
activations are Gauss-Hermite sums of 120 nodes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ntkexp
from ntkexp.limit.infinite_kernel import Engine

CASES = sorted(Path(__file__).with_name("golden").glob("*.npz"))
OFF, ON = {True: 1e-7, False: 1e-12}, {True: 1e-6, False: 1e-7}
"""Relative tolerances off and on the diagonal, of generic activations and of closed forms."""


def test_the_cases_are_there() -> None:
    assert len(CASES) == 30


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
@pytest.mark.parametrize("engine", ["torch", "fused"])
def test_kernels_are_those_of_the_reference(case: Path, engine: Engine) -> None:
    with np.load(case) as held:
        spec = str(held["spec"])
        arrays = {name: torch.tensor(held[name]) for name in held.files if held[name].dtype == np.float64}
    generic = "Generic" in spec
    sides = {"12": ("x1", "x2"), "11": ("x1", None), "22": ("x2", None)}
    for pair in sorted({name[-2:] for name in arrays if name.startswith("nngp")}):
        one, two = sides[pair]
        found = ntkexp.infinite_kernel(spec, arrays[one], None if two is None else arrays[two], engine=engine)
        for name, kernel in zip(("nngp", "ntk"), found, strict=True):
            compare(kernel, arrays[f"{name}_{pair}"], OFF[generic], ON[generic] if two is None else None)


def compare(kernel: Tensor, expected: Tensor, off: float, on: float | None) -> None:
    """Relative errors, entry by entry."""
    error = (kernel - expected).abs() / expected.abs()
    if on is not None:
        assert float(error.diagonal().max()) <= on
        error = error - torch.diag(error.diagonal())
    assert float(error.max()) <= off
