"""Removals from followed loops: retraining without some examples, and the breakdown of the change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ntkexp
from ntkexp.cli.main import run as command
from ntkexp.effects.sweep import MEANS, MeanName
from ntkexp.foreign_loop.again import LoopAgain, trained_again
from ntkexp.foreign_loop.effects import loss_of as known_loss
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.loop_breakdown import loop_without, outputs_at
from ntkexp.foreign_loop.trace import Trace, example_names_in, find_trace
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.records.contributions import Removal
from ntkexp.removal.between import Pair, TrainingPair
from ntkexp.removal.retraining import ChosenOutputs, changes
from ntkexp.report.known_effects import known_effects
from tests.foreign_loop import loops
from tests.foreign_loop.loops import Loop, apart, followed, loop, weighing
from tests.foreign_loop.test_effects import of_squares
from tests.foreign_loop.trainings import TRAININGS, Training, training

CLOSES = 1e-10  # eight steps of some hundred roundings each, and by Adam quotients of small numbers
CLOSE = 1e-11  # of outputs: the same steps, with sums in another order
GROUP = [0, 3, 5, 7]
SLOW = pytest.mark.slow
MOMENTUM = training(loops.momentum, loops.plain)
SGD = TRAININGS["sgd"]


def slow_but(*fast: str) -> list[Any]:
    return [pytest.param(name, marks=[SLOW] * (name not in fast)) for name in TRAININGS]


# --- Training again.


@pytest.mark.parametrize("name", slow_but("amsgrad, accumulated"))
def test_leaving_out_is_training_without(name: str) -> None:
    """Some examples, half of one, and both examples of a call that is then empty."""
    given = TRAININGS[name]
    trace = given.traced()
    emptied = next(loops.batches())[:2].tolist()
    weights = weighing({3: 0.0, 8: 0.0, 11: 0.5} | dict.fromkeys(emptied, 0.0))
    chosen = {each: float(weight) for each, weight in zip(given.names, weights, strict=True) if weight < 1}
    again = LoopAgain(given.traced, trace, "renormalised")
    outputs = again.outputs_at(again.end_with(chosen))
    assert float((outputs - given.ends(weights)).abs().max()) < CLOSE
    assert float((outputs - again.outputs_at(again.flat.vector(trace.steps.end))).abs().max()) > 1e-4


@pytest.mark.slow
def test_effects_are_checked_against_trainings_without_examples(tmp_path: Path) -> None:
    given, folder = TRAININGS["adamw, clipped"], tmp_path / "outputs" / "runs" / "mine"
    found = given.traced(to=folder, every=3).attribute(effects=True, again=lambda: given.traced(to=folder))
    facts = found["effect"].attrs
    assert 0.5 < facts["agreement"] <= 1  # of a net with one kinked layer
    assert "2 retrainings: predicted changes correlate" in facts["caveats"]  # the most for 18 examples, one at a time
    run = ntkexp.load_run(folder)
    assert facts["caveats"] in run.outcome
    known = known_effects(run)
    assert known is not None
    assert known.agreement is not None
    assert known.agreement.removals == 2
    assert known.check is not None
    worst = known.check.removals[0]
    assert worst.influential
    assert worst.examples == (int(np.square(found["effect"].to_numpy()).sum((0, 1)).argmax()),)
    without, _ = changes(LoopAgain(given.traced, given.traced(), "renormalised"), [worst.examples])
    assert abs(known.check.actual[0] - without[0].numpy()).max() < CLOSE


def many_queries(losses: Any = loops.loss_of) -> Training:
    """A loop of 18 examples with 36 outputs, whose sweep takes longer than 18 trainings."""
    queries = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return Training(lambda: replace(loop(loops.momentum), queries=queries), loops.plain, losses)


@pytest.mark.slow
def test_if_a_sweep_takes_longer_effects_are_trainings(tmp_path: Path) -> None:
    given, folder = many_queries(), tmp_path / "outputs" / "runs" / "mine"
    effect = given.traced(to=folder).attribute(effects=True, again=given.traced)["effect"]
    assert effect.attrs["kind"] == "retrained"
    assert "effects are changes in 18 trainings" in effect.attrs["caveats"]
    change = given.ends(weighing({3: 0.0})) - given.ends(weighing({}))
    assert float(change.norm()) > 1e-3
    assert abs(effect.sel(example=given.names[3]).to_numpy() - change.numpy()).max() < CLOSE
    known = known_effects(ntkexp.load_run(folder))
    assert known is not None
    assert known.is_actual
    predicted = given.traced().attribute(effects="derivative", again=given.traced)["effect"]
    assert predicted.attrs["kind"] == "derivative"  # as asked by name


@pytest.mark.slow
def test_another_loss_is_refused_without_a_sweep() -> None:
    with pytest.raises(Mistake, match="is not the loss of the loop"):
        many_queries(lambda _: of_squares).traced().attribute(effects=True, again=many_queries().traced)


def test_effects_that_were_not_checked_say_so() -> None:
    caveats = MOMENTUM.traced().attribute(effects=True, quiet=True)["effect"].attrs["caveats"]
    assert "effects were not checked by retraining without examples; give again=" in caveats


# --- Shares.


def left_out(train: Callable[..., Trace], to: Path, mean: MeanName = "renormalised") -> Removal:
    """The change by leaving the group out at all queries."""
    train(to=to, every=3)
    again = partial(train, to=to, every=3)
    removal = loop_without(find_trace(to), again, mean, GROUP, [0, 1, 2], Silent())
    assert [path.name for path in (to / "removal").iterdir()] == []  # the second trace is gone
    return removal


@pytest.mark.parametrize("name", slow_but("amsgrad, accumulated"))
def test_shares_add_up_to_the_actual_change(name: str, tmp_path: Path) -> None:
    """Against a loop that weighs its means itself."""
    given = TRAININGS[name]
    removal = left_out(given.traced, tmp_path / "run")
    places = [given.names.index(example_names_in(find_trace(tmp_path / "run"))[k]) for k in GROUP]
    change = (given.ends(weighing(dict.fromkeys(places, 0.0))) - given.ends(weighing({}))).numpy()
    size = float(np.linalg.norm(change))
    assert size > 1e-3
    for found in (removal.actual, removal.shares.sum(2), removal.by_step.sum(2)):
        assert float(np.linalg.norm(found - change)) <= CLOSES * size
    counts_nothing = name in ("ignored", "ragged")  # an example of some class
    assert counts_nothing or np.abs(removal.shares).min(axis=(0, 1)).all()  # each of the group did something


@pytest.mark.slow
def test_shares_add_up_for_a_fixed_mean(tmp_path: Path) -> None:
    found = left_out(MOMENTUM.traced, tmp_path / "run", "fixed")
    other = left_out(MOMENTUM.traced, tmp_path / "other")
    assert found.closure < CLOSES
    assert not np.allclose(found.actual, other.actual, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("maker", [loops.momentum, loops.adamw, loops.adam])
def test_shares_of_a_small_change_of_weights_are_effects(maker: loops.Maker, tmp_path: Path) -> None:
    """To first order in the distance, if no unit switches between both trainings."""
    given, h = training(maker, loops.scheduled_and_clipped), 1e-6
    train = partial(given.traced, to=tmp_path / "run", every=3)
    first, weighed = train(), Weighing({given.names[3]: 1 - h})
    second = trained_again(train, weighed, tmp_path / "run" / "second")
    names, loss = first.examples, known_loss(first)
    one, other = (
        FollowedTraining(steps=each.steps, called=each.called, loss=loss, names=names, weighing=weighing)
        for each, weighing in ((first, Weighing()), (second, weighed))
    )
    both = Pair(*(each.weights_of(list(names)) for each in (Weighing(), weighed)))
    pair = TrainingPair(first=one, second=other, weights=both, mean=MEANS["renormalised"])
    outputs = ChosenOutputs([partial(outputs_at, first, one.flat, k) for k in range(3)])
    shares = pair.breakdown(outputs, lambda _: None).shares[:, names[given.names[3]]] / h
    effect = first.attribute(effects="derivative", quiet=True)["effect"].sel(example=given.names[3])
    assert apart(shares, effect.to_numpy().reshape(-1)) < 1e-4


# --- Refused.


def augmented() -> Callable[..., Trace]:
    """A loop whose inputs differ by a little each time that it is carried out, and keep their names."""
    runs = count()

    def train(**more: Any) -> Trace:
        given = loop(loops.adamw)
        x, given.x = given.x, given.x + 1e-6 * next(runs)

        def loss(outputs: Tensor, call: SeenCall) -> Tensor:
            return functional.cross_entropy(outputs, given.y[[int(name) for name in call.ids]], reduction="none")

        return followed(given, loops.plain, loss=loss, ids=lambda call: torch.cdist(call.args[0], x).argmin(1), **more)

    return train


def drifting() -> Callable[..., Trace]:
    """A loop whose loss is scaled by another factor each time, which a change of its weights does not explain."""
    runs = count()

    def train(**more: Any) -> Trace:
        divisor = 1 + 5e-4 * next(runs)

        def body(given: Loop, batch: Tensor) -> None:
            given.zero()
            given.back(batch, divisor)
            given.step()

        return training(loops.sgd, body).traced(**more)

    return train


def less_where_it_went_well(given: Loop, batch: Tensor) -> None:
    """A schedule that depends on the loss."""
    with torch.no_grad():
        loss = functional.cross_entropy(given.model(given.x), given.y)
    given.optimizers[0].param_groups[0]["lr"] = 0.1 * float(loss)
    loops.plain(given, batch)


@pytest.mark.parametrize(
    ("train", "mean", "said"),
    [
        (
            augmented(),
            "renormalised",
            r"shares of the examples miss the actual change by .* exceeds the rounding error",
        ),
        (
            training(loops.sgd, less_where_it_went_well).traced,
            "renormalised",
            r"step \d: without the examples, the optimizer has other settings",
        ),
        (drifting(), "fixed", r"step \d: without the examples, a call has other examples or another loss"),
    ],
    ids=["other inputs", "a schedule by the loss", "another factor of the loss"],
)
def test_shares_that_do_not_add_up_are_refused(
    train: Callable[..., Trace], mean: MeanName, said: str, tmp_path: Path
) -> None:
    with pytest.raises(Mistake, match=said):
        left_out(train, tmp_path / "run", mean)


def test_shares_of_another_loop_are_refused(tmp_path: Path) -> None:
    def other(train: Callable[[], object]) -> None:
        loop_without(find_trace(tmp_path / "run"), train, "renormalised", GROUP, [0], Silent())

    SGD.traced(to=tmp_path / "run", every=3)
    with pytest.raises(Mistake, match="let it run the loop once"):
        other(lambda: None)
    with pytest.raises(Mistake, match="the step updates other parameters or makes other calls"):
        other(partial(training(loops.sgd, loops.accumulated).traced, to=tmp_path / "run", every=3))
    assert len(SGD.traced(to=tmp_path / "run", every=3).steps) == loops.STEPS  # its folder did not change


def other_weights() -> None:
    given = loop(loops.momentum)
    with torch.no_grad():
        given.model[0].get_parameter("weight").add_(1e-9)
    followed(given, loops.plain)


def other_order() -> None:
    given = loop(loops.momentum)
    followed(replace(given, x=given.x.flip(0)), loops.plain)


def other_rates() -> None:
    given = loop(loops.momentum)
    given.optimizers[0].param_groups[0]["lr"] *= 1.5
    followed(given, loops.plain)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("train", "said"),
    [
        (other_weights, r"begins at other weights .*'0\.weight' differs.*seed it"),
        (other_order, "use other examples, or another order"),
        (other_rates, "ends at outputs that are .* away"),
        (lambda: MOMENTUM.traced().attribute(), "would never end"),
        (lambda: None, "followed 0 loops"),
        (lambda: (MOMENTUM.traced(), MOMENTUM.traced()), "followed 2 loops"),
    ],
)
def test_another_loop_is_not_the_same_again(train: Callable[[], object], said: str) -> None:
    trace = MOMENTUM.traced()
    before = torch.random.get_rng_state()
    with pytest.raises(Mistake, match=said):
        changes(LoopAgain(train, trace, "renormalised"), [[0]])
    assert torch.equal(before, torch.random.get_rng_state())
    assert "contribution" in MOMENTUM.traced().attribute(quiet=True)  # the retraining has ended


def test_again_needs_effects() -> None:
    with pytest.raises(Mistake, match="add effects=True"):
        MOMENTUM.traced().attribute(again=lambda: None)


NET = """
from tests.foreign_loop.test_breakdown import MOMENTUM


def train():
    return MOMENTUM.traced(to="outputs/runs/mine", every=3)
"""


@pytest.mark.slow
def test_the_command_explains_a_removal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop_of_mine.py").write_text(NET)
    MOMENTUM.traced(to="outputs/runs/mine", every=3)
    given = ["--again=loop_of_mine.py:train", "--trust=loop_of_mine.py"]

    def printed(*words: str, code: int = 0) -> str:
        assert command(list(words)) == code
        out = capfd.readouterr()
        return out.err if code else out.out

    assert "predicted changes correlate" in printed("attribute", "outputs/runs/mine", "--effects", *given)
    explained = ["explain", "outputs/runs/mine", "--query=0", "--without=top:2"]
    assert "give a function that runs it again, --again=" in printed(*explained, code=2)
    found = printed(*explained, *given)
    assert "trained again without 2 examples" in found
    assert "predicted" in found
    assert printed(*explained) == found  # it is stored
    MOMENTUM.traced(to="outputs/runs/mine", every=3).attribute(effects=True, mean="fixed", quiet=True)
    assert "give a function that runs it again, --again=" in printed(*explained, code=2)  # it is of another mean
    assert printed(*explained, *given) != found
    assert '"shares"' in printed(*explained, "--json")
    assert "choose them by --without=" in printed("explain", "outputs/runs/mine", given[0], code=2)
