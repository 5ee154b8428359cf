"""Contributions alone: the same numbers, and nothing is made that is as large as a kernel of all pairs of outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev
from torch.utils._pytree import tree_leaves

from ntkexp.experiment.identity import identity
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.mistake import Mistake
from ntkexp.run.loop import train_steps
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.run.small import Memory, ran, small

SHORT = ("steps=4", "path.rule=[secant,left]")
CLASSES = ("data.classes=[1,3,8]", "loss=cross_entropy")
WAYS = (
    ("optimizer=gd", "path.error_samples=2"),
    ("optimizer=sgd", "optimizer.weight_decay=0.1", "optimizer.layers={network.1: 0.25}"),
    ("optimizer=gd", "kernel.sketch=20"),
    ("optimizer=gd", "path.outputs=[2,0]", "path.pieces=2"),
)
STEP = "optimizer.step_size=0.1"  # of those chosen by the kernel, one is from products with vectors
ROUNDING = 1e-12  # sums over outputs before products with the probe's features, over 4 steps


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_contributions_are_those_of_kernels(way: tuple[str, ...]) -> None:
    some, whole = (ran(*SHORT, *CLASSES, *way, STEP, f"path.kernels={kept}") for kept in ("none", "all"))
    for rule, path in some.outcome.evidence.paths.items():
        expected = whole.outcome.evidence.paths[rule]
        torch.testing.assert_close(
            path.contributions,
            expected.contributions,
            rtol=0,
            atol=ROUNDING * float(expected.contributions.nan_to_num().abs().max()),
            equal_nan=True,
        )
        assert path.facts.get("error_bar", 0.0) == pytest.approx(expected.facts.get("error_bar", 0.0), rel=1e-6)
    assert some.table["secant", "probe"].relative_error == pytest.approx(0, abs=1e-12)
    assert some.memory.kernels == {}
    assert "path.kernels=all" in some.table["frozen_start", "train"].note


class Largest(DispatchMode):
    """Watches how many numbers the largest tensor has that an operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [(), pytest.param(("kernel.sketch=30",), marks=pytest.mark.slow)], ids=["exact", "sketched"]
)
def test_nothing_grows_with_the_square_of_the_outputs(more: tuple[str, ...]) -> None:
    sizes = ("data.classes=all", "loss=cross_entropy", "data.train=60", "data.probe=40", "data.test=0")
    found = {}
    for kept in ("none", "all"):
        with Largest() as spy:
            ran(
                *sizes,
                *more,
                "model.width=8",
                "steps=2",
                "path.rule=[secant]",
                "path.error_samples=2",
                f"path.kernels={kept}",
            )
        found[kept] = spy.numbers
    assert found["none"] < 60 * 40 * 10**2 <= found["all"]


@pytest.mark.slow
def test_training_examples_are_read_once_however_many_outputs_there_are() -> None:
    sizes = ("data=modular_addition", "data.encoding=one_hot", "data.modulus=23", "data.train=99", "model.width=32")
    asked = small(*sizes, "steps=2", "path.rule=[secant]", "path.kernels=none", "path.outputs=[0,7]")
    listener = Memory()
    with Largest() as spy:
        train_steps(begin(prepare(asked), listener.trajectory), listener)
    assert spy.numbers < 99 * 23 * 32  # what an output each of them would be pulled back to, layer by layer


def test_the_largest_stable_step_is_found_without_a_kernel() -> None:
    none, whole = (ran("steps=1", f"path.kernels={kept}").setting.start for kept in ("none", "all"))
    assert none.largest_stable_step == pytest.approx(whole.largest_stable_step, rel=1e-6)


@pytest.mark.parametrize("way", ["optimizer=adam", "optimizer=flow", "path.every=snapshots"])
@pytest.mark.parametrize("kept", ["none", "trace"])
def test_what_needs_kernels_is_refused_in_one_line(way: str, kept: str) -> None:
    with pytest.raises(Mistake, match=rf"path\.kernels={kept}: ") as caught:
        small(way, f"path.kernels={kept}")
    assert "\n" not in str(caught.value)


def test_runs_that_keep_kernels_are_those_of_before_there_was_a_choice() -> None:
    assert identity(small("path.kernels=all")) == identity(small())
    assert len({identity(small(f"path.kernels={kept}")) for kept in ("all", "trace", "none")}) == 3


@pytest.mark.slow
def test_a_thousand_outputs_against_plain_jacobians() -> None:
    """By left ends, 𝒮 of one step is −η J(x) J(xᵢ)ᵀ ℓ′ᵢ; of three outputs, from whole Jacobians."""
    many = ("data=modular_addition", "data.encoding=one_hot", "data.modulus=997", "loss=cross_entropy")
    some = ran(*many, "path.kernels=none", "path.rule=[left]", "steps=1", "model.width=8", "path.probes=[probe]")
    setting, chosen = some.setting, [0, 7, 996]
    module, weights, inputs = setting.problem.module, setting.problem.weights, setting.problem.inputs[22:27]

    def jacobian(places: slice) -> Tensor:
        found = jacrev(lambda known: functional_call(module, known, (inputs[places],)))(weights)
        return torch.cat([part.flatten(2) for part in found.values()], dim=2)

    pulled = setting.descent.output_gradient(0, setting.start.outputs[:24])[22:]
    gradients = torch.einsum("ncp,nc->np", jacobian(slice(2)), pulled)
    expected = -setting.descent.size(0) * torch.einsum("qcp,np->qcn", jacobian(slice(2, 5))[:, chosen], gradients)
    found = some.contributions("left")[:3, chosen, 22:]
    assert float((found - expected).norm() / expected.norm()) < ROUNDING
