"""The sketched kernel as users call it."""

from __future__ import annotations

import pytest
import torch

from ntkexp.kernel.read import sketched as chapter
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel.compare import agree
from tests.kernel.known import known
from tests.kernel.problems import problem

EPS = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("name", ["two heads", "convolution", "tied embedding", "encoder, norm before"])
def test_the_kernel_lies_within_its_bar(name: str) -> None:
    network = known(name)
    found, bar = tangent_kernel(network.given.module, network.given.x, network.other, sketch=2000)
    error = float((found - network.kernel[:, :, 5:]).norm())
    assert error <= bar < 0.5 * float(network.kernel.norm())


def test_it_repeats_bit_by_bit_and_another_seed_is_another_sketch() -> None:
    given = problem("tanh")
    one, two, other = (tangent_kernel(given.module, given.x, sketch=20, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.kernel, two.kernel)
    assert one.error_bar == two.error_bar
    assert not torch.equal(one.kernel, other.kernel)


@pytest.mark.parametrize("kept", [0.0, 1e9], ids=["read again", "kept"])
@pytest.mark.parametrize("name", ["convolution", "tied embedding"])
def test_examples_a_few_at_a_time_change_only_rounding(name: str, kept: float, monkeypatch: pytest.MonkeyPatch) -> None:
    network = known(name)
    usual = tangent_kernel(network.given.module, network.given.x, sketch=64)
    monkeypatch.setattr(chapter, "READ", 1.0)
    monkeypatch.setattr(chapter, "KEPT", kept)
    found = tangent_kernel(network.given.module, network.given.x, sketch=64)
    agree(found.kernel, usual.kernel, 1000 * EPS)
    assert found.error_bar == pytest.approx(usual.error_bar, rel=1e-9)


def test_some_outputs_are_those_blocks() -> None:
    given = problem("two heads")
    whole = tangent_kernel(given.module, given.x, sketch=30).kernel
    some = tangent_kernel(given.module, given.x, sketch=30, outputs=[2, 0]).kernel
    agree(some, whole[:, [2, 0]][..., [2, 0]], 100 * EPS)


@pytest.mark.filterwarnings("ignore:.*plain Jacobians")  # test_rules.py hears them
def test_plain_jacobians_are_sketched_too() -> None:
    network = known("running products")
    found, bar = tangent_kernel(network.given.module, network.given.x, sketch=2000)
    assert float((found - network.kernel[:, :, :5]).norm()) <= bar < 0.5 * float(network.kernel.norm())


def test_what_cannot_be_sketched_is_refused_in_one_line() -> None:
    given = problem("tanh")
    for size in (0, -3, True):
        with pytest.raises(Mistake, match=f"sketch={size!r}: give the number of dimensions"):
            tangent_kernel(given.module, given.x, sketch=size)
    with pytest.raises(Mistake, match="a trace is not sketched"):
        tangent_kernel(given.module, given.x, sketch=8, outputs="trace")


def test_more_outputs_than_the_machine_can_hold_are_refused_before_they_are_read() -> None:
    """As of a language model whose scores of every word are the outputs."""
    with pytest.raises(Mistake, match=r"of 3 × 3 examples with 400000 outputs each takes 5\.76e\+03 GB, and this"):
        tangent_kernel(torch.nn.Linear(1, 400_000), torch.ones(3, 1), sketch=8)
