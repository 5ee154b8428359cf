"""Effects of whole runs: what a run says leaving an example out would change, against trainings without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import Memory as OptimizerMemory
from ntkexp.optimizer.base import Sizes
from ntkexp.optimizer.descent import SGD
from ntkexp.removal.rerun import again, drifted, trained
from ntkexp.removal.retraining import EffectsFound
from ntkexp.run.loop import run
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import RunState
from ntkexp.shapes import Weights
from tests.run.small import Memory, small

QUICK = (
    "data=digits", "data.classes=[0,1,2]", "data.train=12", "data.probe=4", "data.test=3", "loss=cross_entropy",
    "steps=6", "model.width=6", "model.activation=tanh", "path.rule=[left]", "ladder.machine=[left]",
    "path.attributed=5", "path.effects=derivative",
)  # fmt: skip
ADAM = ("optimizer=adam", "optimizer.step_size=0.02", "optimizer.batch=4", "optimizer.eps=1e-4")


def effects_of(setting: Setting, listener: Memory | None = None, saved: dict[str, Any] | None = None) -> EffectsFound:
    found = run(setting, listener or Memory(), saved).effects
    assert found is not None
    return found


def slopes(setting: Setting, example: int, width: float = 1e-5) -> Tensor:
    """−∂f/∂w of one example at all points, by two trainings."""
    rerun = again(setting.experiment, setting.problem, setting.descent.step_size, setting.experiment.steps)
    weights = rerun.everyone.repeat(2, 1)
    weights[:, example] += torch.tensor([width, -width])
    up, down = (rerun.function(rerun.flat.weights(end), setting.problem.inputs) for end in trained(rerun, weights))
    return (down - up) / (2 * width)


@pytest.mark.parametrize(
    "words", [pytest.param(("optimizer=gd", "init.centred=true", "init.alpha=2"), marks=pytest.mark.slow), ADAM]
)
def test_a_run_says_what_an_example_less_would_change(words: tuple[str, ...]) -> None:
    setting = prepare(small(*QUICK, *words))
    values = effects_of(setting).values
    known = values.isfinite().all(2).all(1)
    assert known.nonzero().flatten().tolist() == [0, 1, 12, 13, 16]  # the first few of every split
    expected = slopes(setting, 3)[known]
    assert (values[known][:, :, 3] - expected).abs().max() < 1e-6 * expected.abs().max()


def test_where_training_without_each_example_is_cheaper_the_truth_is_told() -> None:
    setting, listener = prepare(small(*QUICK, *ADAM, "path.effects=true")), Memory()
    found = effects_of(setting, listener)
    rerun = again(setting.experiment, setting.problem, setting.descent.step_size, setting.experiment.steps)
    ends = trained(rerun, torch.stack([rerun.everyone, rerun.without([3])]))
    whole, without = (rerun.outputs(end, setting.problem.inputs) for end in ends)
    known = found.values.isfinite().all(2).all(1)
    assert known.nonzero().flatten().tolist() == [0, 1, 12, 13, 16]
    assert torch.allclose(found.values[known][:, :, 3], (without - whole)[known], rtol=1e-9, atol=1e-12)
    assert found.facts == {"kind": "retrained", "mean": "renormalised"}
    assert found.caveats == ["effects are changes in 12 trainings, each without one example"]


@pytest.mark.parametrize("words", ["path.effects=one_step", "path.mean=fixed", "path.attributed=1"])
def test_what_trainings_do_not_tell_or_tell_too_slowly_is_swept_for(words: str) -> None:
    asked = prepare(small(*QUICK, *ADAM, "path.effects=true", words)).sweep
    assert asked is not None
    assert not asked.retrains


def test_a_training_that_does_not_repeat_itself_is_told() -> None:
    ones = torch.ones(3, 2, 1)
    assert drifted(1e-3 * ones[0], ones) == []
    assert drifted(0 * ones[0], 0 * ones) == []
    (said,) = drifted(0.1 * ones[0], ones)
    assert said.startswith("trained again as it was, the run ends 0.1 from where it did")


@pytest.mark.slow
def test_chosen_outputs_have_the_same_effects() -> None:
    every, some = (effects_of(prepare(small(*QUICK, *ADAM, *more))).values for more in ((), ("path.outputs=[2]",)))
    assert torch.allclose(some[:2], every[:2, 2:], rtol=1e-12, atol=0)


class Interrupted(Memory):
    """Stops within a chunk of the sweeps, at its end, or in the next one."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after
        self.saved: dict[str, Any] = {}

    def on_sweep(self, state: RunState, done: int, whole: int) -> None:
        assert whole == 12
        if done == self.after:
            self.saved = state.state
            raise KeyboardInterrupt


def in_chunks(setting: Setting) -> Setting:
    """The same, with so little memory that three points are swept at once."""
    assert setting.sweep is not None
    plan = setting.sweep.plan
    return replace(setting, sweep=replace(setting.sweep, plan=replace(plan, free=2 * 3.5 * 3 * plan.per_output)))


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (ADAM, 2),
        *(pytest.param(words, k, marks=pytest.mark.slow) for words in (ADAM, ("optimizer=gd",)) for k in (2, 6, 7)),
    ],
)
def test_an_interrupted_sweep_goes_on_to_the_same_bits(words: tuple[str, ...], after: int) -> None:
    setting = in_chunks(prepare(small(*QUICK, *words)))
    undisturbed, listener = effects_of(setting), Interrupted(after)
    with pytest.raises(KeyboardInterrupt):
        run(setting, listener)
    resumed = effects_of(setting, listener, listener.saved)
    assert torch.equal(resumed.values.nan_to_num(), undisturbed.values.nan_to_num())
    assert resumed.facts == undisturbed.facts


@pytest.mark.slow
def test_kinks_and_disagreement_are_told() -> None:
    found = effects_of(prepare(small(*QUICK, "model.activation=relu", "optimizer=gd")))
    assert any("relu" in sentence for sentence in found.caveats)


class OfMyOwn(SGD):
    """An optimizer that nobody has differentiated."""

    def update(
        self, step: int, weights: Weights, gradient: Weights, sizes: Sizes, memory: OptimizerMemory
    ) -> tuple[Weights, OptimizerMemory]:
        return super().update(step, weights, {name: part.sign() for name, part in gradient.items()}, sizes, memory)


def test_an_optimizer_from_elsewhere_has_no_effects() -> None:
    experiment = small(*QUICK, "optimizer=sgd")
    with pytest.raises(ValidationError, match=r"path.effects=derivative: nobody knows .* optimizer=of_my_own does"):
        Experiment(**dict(experiment) | {"optimizer": OfMyOwn()})


def of_my_own(*words: str) -> Experiment:
    return Experiment(**dict(small(*QUICK, "optimizer=sgd", "path.effects=true", *words)) | {"optimizer": OfMyOwn()})


def test_but_where_trainings_are_few_they_find_them() -> None:
    setting = prepare(of_my_own())
    assert setting.sweep is not None
    assert "12 trainings, each without one example, are the truth; there is no other way" in setting.sweep.sentence
    found = effects_of(setting)
    assert found.facts == {"kind": "retrained", "mean": "renormalised"}
    rerun = again(setting.experiment, setting.problem, setting.descent.step_size, setting.experiment.steps)
    ends = trained(rerun, torch.stack([rerun.everyone, rerun.without([3])]))
    whole, without = (rerun.outputs(end, setting.problem.inputs) for end in ends)
    known = found.values.isfinite().all(2).all(1)
    changed = (without - whole)[known]
    assert changed.abs().max() > 1e-3  # its steps are signs
    assert torch.allclose(found.values[known][:, :, 3], changed, rtol=1e-9, atol=1e-12)
    with pytest.raises(Mistake, match=r"12 trainings, .* are more than the 6 that effects on 3 outputs are worth"):
        prepare(of_my_own("path.attributed=1"))


def test_a_flow_has_no_effects() -> None:
    with pytest.raises(Mistake, match=r"path.effects=derivative: optimizer=flow"):
        small(*QUICK, "optimizer=flow", "loss=squared")
