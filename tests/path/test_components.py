"""Sums along a path by component: partial sums over parameters, by every way in which a path is summed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkexp.experiment.identity import identity
from ntkexp.mistake import Mistake
from ntkexp.path.integrals import ComponentSums
from ntkexp.run.loop import run, train_steps
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.path.test_backward import CASES, QUICK, ROUNDING, Remembering, forwards
from tests.run.small import Memory, Ran, ran, small

SUMMED = 100 * torch.finfo(torch.float64).eps  # some steps, each a sum of some tens of terms, in two orders
SHORT = ("steps=5", "model.width=8", "data.train=10", "data.query=5", "data.test=4", "ladder.machine=[]")
DECAY = "optimizer.weight_decay=0.1"


def of_components(found: Ran, rule: str = "secant") -> ComponentSums:
    return found.outcome.by_component[rule]


def adds_up(found: Ran) -> None:
    """Shares of 𝒮, 𝒟 and what came of each step, by every rule."""
    for rule, path in found.outcome.evidence.paths.items():
        sums = of_components(found, rule)
        by_step = sums.totals.stacked().movedim(0, 2)
        for shares, whole in (
            (sums.parts, path.contributions),
            (sums.decay, path.decay),
            (by_step, found.by_step(rule)),
        ):
            assert torch.equal(shares.isnan().any(-1), whole.isnan())
            missed, size = (shares.sum(-1) - whole).nan_to_num().abs(), shares.nan_to_num().abs().sum(-1)
            assert (missed <= SUMMED * size).all(), rule
        assert sums.parts.nan_to_num().any()


WAYS = {
    "every step": ("optimizer=gd", DECAY, "data.classes=[0,1,2]", "path.substeps=2"),
    "without kernels": ("optimizer=sgd", DECAY, "path.kernels=none"),
    "by layers": ("optimizer=sgd", "optimizer.layers={network.1: 0.25}", "path.kernels=trace"),
    "a flow": ("optimizer=flow", "steps=2"),
    "backwards": ("optimizer=adamw", DECAY, "path.attributed=6"),
    "in phases": ("data=sequence", "optimizer=gd", "data.train=6"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("by", ["module", "parameter"])
def test_components_add_up(way: tuple[str, ...], by: str) -> None:
    adds_up(ran(*SHORT, *way, f"path.by={by}"))


@pytest.mark.parametrize("case", ["nesterov", pytest.param("adamw", marks=pytest.mark.slow)])
def test_backwards_they_are_those_of_the_sum_forwards(case: str) -> None:
    """By the oracle that passes each example's gradients through a memory of their own, weight by weight."""
    found = ran(*QUICK, *CASES[case], "path.by=parameter")
    sums, at = of_components(found), 0
    for k, name in enumerate(sums.components):
        size = found.setting.problem.weights[name].numel()
        parts, decay = forwards(found.setting, "secant", among=slice(at, at + size))
        at += size
        assert (sums.parts[..., k] - parts).norm() <= ROUNDING * sums.parts.norm(), name
        assert (sums.decay[..., k] - decay).norm() <= ROUNDING * (sums.decay.norm() + sums.parts.norm()), name


def test_without_memory_backwards_is_forwards() -> None:
    experiment = small(*SHORT, "path.attributed=1000", "data.classes=all", DECAY, "path.by=parameter")
    remembering = Remembering(**experiment.optimizer.model_dump())
    backwards = experiment.model_copy(update={"optimizer": remembering})
    one, other = (run(prepare(each), Memory()).by_component["secant"] for each in (experiment, backwards))
    for first, second in ((one.parts, other.parts), (one.decay, other.decay)):
        assert (first - second).norm() <= ROUNDING * first.norm()


def test_they_change_nothing_but_the_order_of_sums() -> None:
    with_them, without = (ran(*SHORT, *more).contributions("secant") for more in (("path.by=parameter",), ()))
    assert (with_them - without).abs().max() <= SUMMED * without.abs().max()


def test_the_rest_is_what_is_left() -> None:
    some, all_ = (
        of_components(ran(*SHORT, f"path.by={by}")) for by in ("{first: [network.1.*], rest: ['*']}", "module")
    )
    assert list(some.components) == ["first", "rest"]
    assert torch.equal(some.parts[..., 0], all_.parts[..., list(all_.components).index("network.1")])


def test_a_run_goes_on_from_a_checkpoint() -> None:
    setting, listener = prepare(small(*SHORT, "path.by=module")), Memory()
    whole, part = (begin(setting, listener.trajectory) for _ in range(2))
    train_steps(whole, listener)
    for step, _ in zip(setting.descent.walk(part.weights), range(2), strict=False):
        part.advance(step, due=False)
    state = part.state
    rest = begin(setting, listener.trajectory)
    rest.restore(state)
    train_steps(rest, listener)

    def sums(found: object) -> Tensor:
        return found.accumulator.integrals["secant"].by_component.parts  # type: ignore[attr-defined, no-any-return]

    assert torch.equal(sums(rest), sums(whole))


def test_another_question_is_another_run_but_no_question_is_the_same() -> None:
    asked, other, none = (identity(small(*SHORT, *more)) for more in (("path.by=module",), ("path.by=parameter",), ()))
    assert len({asked, other, none}) == 3


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("path.by: 'x*' of 'a' matches no trained parameter", ("path.by={a: ['x*']}",)),
        ("path.by=module: between snapshots", ("path.by=module", "path.every=snapshots")),
        (
            "name fewer components by path.by",
            ("path.by=parameter", "memory_gb=0.6"),
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused(said: str, more: tuple[str, ...]) -> None:
    with pytest.raises(Mistake) as refusal:
        prepare(small(*SHORT, *more))
    assert said in str(refusal.value)
