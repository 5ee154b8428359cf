"""The kernel by strips of parameters is the kernel, however few examples and elements are taken at a time."""

from __future__ import annotations

import pytest
import torch

from ntkexp.kernel.features import strips
from ntkexp.kernel.features.gram import Sizes
from ntkexp.kernel.read import by_strips, in_turns
from ntkexp.library import strips as library
from ntkexp.library import tangent_kernel
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import KINDS

EPS = torch.finfo(torch.float64).eps


@pytest.fixture
def nothing_fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Features never fit, strips have some elements; how many kernels were made so is counted."""
    made: list[int] = []

    def counted(left: strips.Chunks, right: strips.Chunks) -> torch.Tensor:
        made.append(left.examples)
        return strips.gram_by_strips(left, right)

    monkeypatch.setattr(by_strips, "FITS", -1.0)
    monkeypatch.setattr(library, "FITS", -1.0)
    monkeypatch.setattr(strips, "ROOM", 500)
    monkeypatch.setattr(by_strips, "gram_by_strips", counted)
    return made


FEW = ("tied embedding", "tied and transposed", "overlapping slices")


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name not in FEW)]
)
def test_every_kind_of_use_has_its_share(name: str, nothing_fits: list[int]) -> None:
    network = known(name)
    agree(tangent_kernel(network.given.module, network.given.x, network.other), network.kernel[:, :, 5:], 1000 * EPS)
    assert nothing_fits == [5]


@pytest.mark.parametrize("factors", ["double sum", "multiplied out"])
@pytest.mark.parametrize("name", ["relu", "convolution"])
def test_factors_are_kept_or_multiplied_out(
    name: str, factors: str, nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = known(name)
    monkeypatch.setattr(Sizes, "way", factors)
    agree(tangent_kernel(network.given.module, network.given.x), network.kernel[:, :, :5], 1000 * EPS)


@pytest.mark.parametrize("held", [1.0, 1e9], ids=["groups of one or two", "all held"])
@pytest.mark.parametrize("name", ["relu", "tied embedding"])
def test_examples_a_few_at_a_time(
    name: str, held: float, nothing_fits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = known(name)
    monkeypatch.setattr(in_turns, "READ", 1.0)
    monkeypatch.setattr(by_strips, "HELD", held)
    agree(tangent_kernel(network.given.module, network.given.x), network.kernel[:, :, :5], 1000 * EPS)
    agree(tangent_kernel(network.given.module, network.given.x, network.other), network.kernel[:, :, 5:], 1000 * EPS)
    assert nothing_fits == ([5, 5] if held > 1 else [*[1] * 3, *[2] * 3, *[1] * 2, *[2] * 4])


def test_some_outputs_are_those_blocks(nothing_fits: list[int]) -> None:
    network = known("two heads")
    some = tangent_kernel(network.given.module, network.given.x, outputs=[2, 0])
    agree(some, network.kernel[:, [2, 0]][:, :, :5][..., [2, 0]], 1000 * EPS)
    assert nothing_fits == [5]
