"""Loops are carried out again without some of their examples, of which the loops themselves know nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ntkexp
from ntkexp.foreign_loop.again import LoopAgain
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.removal.retraining import changes
from ntkexp.report.explain import known_effects
from tests.foreign_loop import loops
from tests.foreign_loop.loops import EXAMPLES, Body, Maker, followed, loop
from tests.foreign_loop.test_effects import loss_of, trained_with

CASES = (
    (loops.momentum, loops.scheduled_and_clipped),
    (loops.adam, loops.accumulated),
    (loops.adamw, loops.scheduled_and_clipped),
    (loops.several, loops.plain),
    (loops.momentum, loops.with_a_scaler),
)
CLOSE = 1e-11  # of outputs: the same steps, with sums in another order


def again(optimizers: Maker, body: Body, **more: Any) -> Trace:
    """The loop from its seeds on, followed."""
    given = loop(optimizers)
    return followed(given, body, loss=loss_of(given), **more)


@pytest.mark.parametrize(
    ("optimizers", "body"),
    [pytest.param(*case, marks=() if case == CASES[1] else pytest.mark.slow) for case in CASES],
    ids=lambda part: part.__name__,
)
def test_leaving_out_is_training_without(optimizers: Maker, body: Body) -> None:
    """Against a loop that weighs its means itself; of one call of the accumulated loop nothing is left."""
    trace = again(optimizers, body)
    names, weights = digests(loop(optimizers).x), torch.ones(EXAMPLES, dtype=torch.float64)
    emptied = next(loops.batches())[:2].tolist()
    weights[[3, 8, *emptied]], weights[11] = 0.0, 0.5
    chosen = {name: float(weight) for name, weight in zip(names, weights, strict=True) if weight < 1}
    found = LoopAgain(lambda: again(optimizers, body), trace, "renormalised").outputs_with(chosen)
    assert float((found - trained_with(optimizers, body, weights)).abs().max()) < CLOSE
    assert float((found - LoopAgain(lambda: None, trace, "renormalised").at_end(trace)).abs().max()) > 1e-3


def test_a_call_of_which_nothing_is_left_adds_nothing() -> None:
    """Half of a batch is left out as a call of its own: the other calls are still those of this step."""
    trace = again(loops.momentum, loops.accumulated)
    first, _ = next(trace.steps.forwards())
    weights = dict.fromkeys(first.calls[0].names, 0.0)
    found = LoopAgain(lambda: again(loops.momentum, loops.accumulated), trace, "fixed").train(weights)
    assert list(found.steps.names()) == list(trace.steps.names())
    assert not torch.equal(found.steps.end["0.weight"], trace.steps.end["0.weight"])


@pytest.mark.slow
def test_effects_are_held_against_trainings_without_examples(tmp_path: Path) -> None:
    def train(**more: Any) -> Trace:
        return again(loops.adamw, loops.scheduled_and_clipped, **more)

    folder = tmp_path / "outputs" / "runs" / "mine"
    found = train(to=folder, every=3).attribute(effects=True, again=lambda: train(to=folder))
    facts = found["effect"].attrs
    assert 0.5 < facts["agreement"] <= 1  # of a net with one kinked layer
    assert "2 retrainings: predicted changes correlate" in facts["caveats"]  # 18 examples: one at a time is all
    run = ntkexp.load_run(folder)
    known = known_effects(run)
    assert known is not None
    assert known.agreement is not None
    assert known.agreement.removals == 2
    assert facts["caveats"] in run.outcome
    assert known.check is not None
    worst = known.check.removals[0]
    assert worst.influential
    assert worst.examples == (int(np.square(found["effect"].to_numpy()).sum((0, 1)).argmax()),)
    train_without, _ = changes(LoopAgain(train, train(), "renormalised"), [worst.examples])
    assert abs(known.check.actual[0] - train_without[0].numpy()).max() < CLOSE


@pytest.mark.slow
def test_where_a_sweep_takes_longer_effects_are_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkexp.foreign_loop.effects.OUTPUTS", 0.5)  # 18 examples, 9 outputs
    given = (loops.momentum, loops.plain)
    folder = tmp_path / "outputs" / "runs" / "mine"
    found = again(*given, to=folder).attribute(effects=True, again=lambda: again(*given))["effect"]
    assert found.attrs["kind"] == "retrained"
    assert "effects are changes in 18 trainings" in found.attrs["caveats"]
    names, weights = digests(loop(loops.momentum).x), torch.ones(2, EXAMPLES, dtype=torch.float64)
    weights[1, 3] = 0.0
    whole, without = (trained_with(*given, each) for each in weights)
    assert float((without - whole).norm()) > 1e-3
    place = found["example"].to_numpy().tolist().index(names[3])
    assert abs(found.to_numpy()[:, :, place] - (without - whole).numpy()).max() < CLOSE
    known = known_effects(ntkexp.load_run(folder))
    assert known is not None
    assert known.is_actual
    predicted = again(*given).attribute(effects="derivative", again=lambda: again(*given))["effect"]
    assert predicted.attrs["kind"] == "derivative"  # which is asked for by name


@pytest.mark.slow
def test_a_loss_that_was_not_trained_with_is_refused_without_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkexp.foreign_loop.effects.OUTPUTS", 0.5)
    trace = followed(loop(loops.momentum), loops.plain, loss=lambda outputs, call: outputs.square().sum(1))
    with pytest.raises(Mistake, match="is not the loss that was trained with"):
        trace.attribute(effects=True, again=lambda: again(loops.momentum, loops.plain))


def test_without_a_function_nothing_is_believed() -> None:
    caveats = again(loops.momentum, loops.plain).attribute(effects=True)["effect"].attrs["caveats"]
    assert "effects were not held against trainings without examples; give again=" in caveats


def other_weights() -> None:
    given = loop(loops.momentum)
    with torch.no_grad():
        given.model[0].get_parameter("weight").add_(1e-9)
    followed(given, loops.plain)


def other_order() -> None:
    given = loop(loops.momentum)
    given.x = given.x.flip(0)
    followed(given, loops.plain)


def other_sizes() -> None:
    given = loop(loops.momentum)
    given.optimizers[0].param_groups[0]["lr"] *= 1.5
    followed(given, loops.plain)


def twice() -> None:
    again(loops.momentum, loops.plain)
    again(loops.momentum, loops.plain)


def attributing() -> None:
    again(loops.momentum, loops.plain).attribute()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("train", "said"),
    [
        (other_weights, r"begins at other weights .*'0\.weight' is otherwise.*seed it"),
        (other_order, "saw other examples, or in another order"),
        (other_sizes, "ends .* from where it did"),
        (attributing, "would do so for ever"),
        (lambda: None, "followed 0 loops"),
        (twice, "followed 2 loops"),
    ],
)
def test_another_loop_is_refused(train: Callable[[], object], said: str) -> None:
    trace = again(loops.momentum, loops.plain)
    before = torch.random.get_rng_state()
    with pytest.raises(Mistake, match=said):
        changes(LoopAgain(train, trace, "renormalised"), [[0]])
    assert torch.equal(before, torch.random.get_rng_state())
    assert "contribution" in again(loops.momentum, loops.plain).attribute()  # nothing is left of the retraining


def test_what_it_is_for_is_said() -> None:
    with pytest.raises(Mistake, match="add effects=True"):
        again(loops.momentum, loops.plain).attribute(again=lambda: None)
