"""What leaving examples of a followed loop out changes splits over them, to rounding, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ntkexp
from ntkexp.cli.main import run as command
from ntkexp.effects.sweep import MEANS, MeanName, StateAdjoint
from ntkexp.foreign_loop.again import LoopAgain, trained_again
from ntkexp.foreign_loop.effects import loss_of as known_loss
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.loop_breakdown import loop_without, outputs_at
from ntkexp.foreign_loop.trace import Trace, example_names_in, find_trace
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.records.contributions import Removal
from ntkexp.removal import between
from ntkexp.removal.between import Breakdown, Pair, TrainingPair
from ntkexp.removal.retraining import OutputsAt, changes
from ntkexp.report.known_effects import known_effects
from tests.foreign_loop import bugs, loops
from tests.foreign_loop.loops import EXAMPLES, Body, Loop, Maker, followed, loop
from tests.foreign_loop.test_effects import loss_of, trained_with

CLOSES = 1e-10  # eight steps of some hundred roundings each, and by Adam quotients of small numbers
GROUP = [0, 3, 5, 7]
CASES = (
    (loops.sgd, loops.plain),
    (loops.adam, loops.accumulated),
    (loops.momentum, loops.scheduled_and_clipped),
    (loops.nesterov, loops.accumulated),
    (loops.adamw, loops.scheduled_and_clipped),
    (loops.several, loops.scheduled_and_clipped),
    (loops.momentum, loops.with_a_scaler),
    (loops.adamw, bugs.frozen_half_way),
)


def again(optimizers: Maker, body: Body, to: Path) -> Trace:
    """The loop from its seeds on, followed; its network has ReLU in it."""
    given = loop(optimizers)
    return followed(given, body, loss=loss_of(given), to=to, every=3)


def without(optimizers: Maker, body: Body, to: Path, mean: MeanName = "renormalised") -> tuple[Removal, list[int]]:
    """What leaving the group out changes at all queries; the places of the group among the data."""
    train = partial(again, optimizers, body, to)
    train()
    files = find_trace(to)
    data = digests(loop(optimizers).x)
    found = loop_without(files, train, mean, GROUP, [0, 1, 2], Silent())
    assert [path.name for path in (to / "removal").iterdir()] == []  # the second trace is gone
    return found, [data.index(example_names_in(files)[k]) for k in GROUP]


@pytest.mark.parametrize(
    ("optimizers", "body"),
    [pytest.param(*case, marks=() if case == CASES[1] else pytest.mark.slow) for case in CASES],
    ids=lambda part: part.__name__,
)
def test_shares_add_up_to_what_the_loop_would_have_done(optimizers: Maker, body: Body, tmp_path: Path) -> None:
    found, places = without(optimizers, body, tmp_path / "run")
    weights = torch.ones(2, EXAMPLES, dtype=torch.float64)
    weights[1, places] = 0.0
    before, after = (trained_with(optimizers, body, each) for each in weights)
    change = (after - before).numpy()
    size = float(np.linalg.norm(change))
    assert size > 1e-3
    assert float(np.linalg.norm(found.actual - change)) <= CLOSES * size  # of a loop that weighs its means itself
    assert float(np.linalg.norm(found.shares.sum(2) - change)) <= CLOSES * size
    assert float(np.linalg.norm(found.by_step.sum(2) - change)) <= CLOSES * size
    assert np.abs(found.shares).min(axis=(0, 1)).all()  # nobody of the group did nothing


@pytest.mark.slow
def test_a_mean_that_keeps_its_shares_closes_too(tmp_path: Path) -> None:
    found, _ = without(loops.momentum, loops.plain, tmp_path / "run", "fixed")
    other, _ = without(loops.momentum, loops.plain, tmp_path / "other")
    assert found.closure < CLOSES
    assert not np.allclose(found.actual, other.actual, rtol=1e-3)


def paired(to: Path, optimizers: Maker, body: Body, weights: dict[str, float]) -> tuple[TrainingPair, OutputsAt, Trace]:
    """The loop and itself with other weights of examples, and what is asked of both."""
    train = partial(again, optimizers, body, to)
    first, weighed = train(), Weighing(weights)
    second = trained_again(train, weighed, to / "second")
    names = first.examples
    one, other = (
        FollowedTraining(steps=each.steps, called=each.called, loss=known_loss(first), names=names, weighing=weighing)
        for each, weighing in ((first, Weighing()), (second, weighed))
    )
    both = Pair(*(each.left(list(names)) for each in (Weighing(), weighed)))
    pair = TrainingPair(first=one, second=other, weights=both, mean=MEANS["renormalised"])
    return pair, OutputsAt([partial(outputs_at, first, one.flat, k) for k in range(3)]), first


def ledger(to: Path, optimizers: Maker, body: Body, weights: dict[str, float]) -> tuple[Breakdown, Trace]:
    """The ledger between both."""
    pair, outputs, first = paired(to, optimizers, body, weights)
    return pair.breakdown(outputs, lambda _: None), first


@pytest.mark.slow
@pytest.mark.parametrize("optimizers", [loops.momentum, loops.adamw, loops.adam])
def test_between_loops_that_hardly_differ_shares_are_effects(optimizers: Maker, tmp_path: Path) -> None:
    """To first order in the distance; a unit that switches between them would be seen as more."""
    name, h = digests(loop(optimizers).x)[3], 1e-6
    found, first = ledger(tmp_path / "run", optimizers, loops.scheduled_and_clipped, {name: 1 - h})
    place = first.examples[name]
    effect = first.attribute(effects="derivative")["effect"].to_numpy()[:, :, place].reshape(-1)
    assert np.abs(found.shares[:, place].numpy() / h - effect).max() < 1e-4 * np.abs(effect).max()


def test_without_the_correction_shares_would_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkexp.removal.between.along", lambda missed, change: 0.0)
    names = digests(loop(loops.sgd).x)
    found, _ = ledger(tmp_path / "run", loops.sgd, loops.plain, {names[3]: 0.0, names[5]: 0.0})
    assert found.closure > 1e-4


def scaled(patch: pytest.MonkeyPatch) -> None:
    """What examples did in a batch is a little too much."""
    right = between.row_shares
    patch.setattr(between, "row_shares", lambda *of: (1 + 1e-9) * right(*of))


def skipped(patch: pytest.MonkeyPatch) -> None:
    """A step in the middle is not gone back over."""
    right = TrainingPair.step_back

    def step_back(pair: TrainingPair, index: int, adjoint: StateAdjoint, shares: Tensor, magnitude: Tensor) -> Tensor:
        return shares.new_zeros(len(shares)) if index == 4 else right(pair, index, adjoint, shares, magnitude)

    patch.setattr(TrainingPair, "step_back", step_back)


def flat(patch: pytest.MonkeyPatch) -> None:
    """The loss has no curvature: a change of the weights changes no later gradient."""
    patch.setattr(TrainingPair, "curve", lambda pair, step, adjoint, pulled: pulled.new_zeros(len(pulled)))


@pytest.fixture(scope="module")
def left_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingPair, OutputsAt]:
    """A loop, and itself without two examples."""
    names = digests(loop(loops.adamw).x)
    pair, outputs, _ = paired(tmp_path_factory.mktemp("loop"), loops.adamw, loops.plain, {names[3]: 0.0, names[5]: 0.0})
    assert pair.breakdown(outputs, lambda _: None).closed().closure < CLOSES
    return pair, outputs


@pytest.mark.parametrize("plant", [scaled, skipped, flat], ids=lambda plant: plant.__name__)
def test_a_ledger_with_an_error_in_it_is_refused(
    plant: Callable[[pytest.MonkeyPatch], None],
    left_out: tuple[TrainingPair, OutputsAt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, outputs = left_out
    plant(monkeypatch)
    with pytest.raises(Mistake, match=r"shares of the examples miss the actual change by .*, more than rounding"):
        pair.breakdown(outputs, lambda _: None).closed()


def learning_less_where_it_went_well(given: Loop, batch: Tensor) -> None:
    """A schedule that looks at the loss."""
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(given.model(given.x), given.y)
    given.optimizers[0].param_groups[0]["lr"] = 0.1 * float(loss)
    loops.plain(given, batch)


def test_a_schedule_that_looks_at_the_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"step \d: without the examples it was taken with other settings"):
        without(loops.sgd, learning_less_where_it_went_well, tmp_path / "run")


NET = """
from pathlib import Path
from tests.foreign_loop import loops
from tests.foreign_loop.test_breakdown import again


def train():
    return again(loops.momentum, loops.plain, Path("outputs/runs/mine"))
"""


@pytest.mark.slow
def test_the_command_tells_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop_of_mine.py").write_text(NET)
    again(loops.momentum, loops.plain, Path("outputs/runs/mine"))
    given = ["--again=loop_of_mine.py:train", "--trust=loop_of_mine.py"]

    def told(*words: str, code: int = 0) -> str:
        assert command(list(words)) == code
        out = capfd.readouterr()
        return out.err if code else out.out

    assert "predicted changes correlate" in told("attribute", "outputs/runs/mine", "--effects", *given)
    explained = ["explain", "outputs/runs/mine", "--query=0", "--without=top:2"]
    assert "give a function that runs it again, --again=" in told(*explained, code=2)
    found = told(*explained, *given)
    assert "trained again without 2 examples" in found
    assert "predicted" in found
    assert told(*explained) == found  # it was found earlier
    assert '"shares"' in told(*explained, "--json")
    assert "say which by --without=" in told("explain", "outputs/runs/mine", "--again=loop_of_mine.py:train", code=2)


def refused_by(train: Callable[[], object], to: Path) -> None:
    """Leave the group out of another loop than the one that was followed."""
    loop_without(find_trace(to), train, "renormalised", GROUP, [0], Silent())


def test_another_loop_is_refused(tmp_path: Path) -> None:
    again(loops.sgd, loops.plain, tmp_path / "run")
    with pytest.raises(Mistake, match="let it carry out the one that was followed"):
        refused_by(lambda: None, tmp_path / "run")
    with pytest.raises(Mistake, match="the step has other parameters or calls"):
        refused_by(partial(again, loops.sgd, loops.accumulated, tmp_path / "run"), tmp_path / "run")
    assert len(again(loops.sgd, loops.plain, tmp_path / "run").steps) == loops.STEPS  # its folder is as it was


# Loops are carried out again without some of their examples, of which the loops themselves know nothing.


REMOVALS = (
    (loops.momentum, loops.scheduled_and_clipped),
    (loops.adam, loops.accumulated),
    (loops.adamw, loops.scheduled_and_clipped),
    (loops.several, loops.plain),
    (loops.momentum, loops.with_a_scaler),
)
CLOSE = 1e-11  # of outputs: the same steps, with sums in another order


def repeated(optimizers: Maker, body: Body, **more: Any) -> Trace:
    """The loop from its seeds on, followed."""
    given = loop(optimizers)
    return followed(given, body, loss=loss_of(given), **more)


@pytest.mark.parametrize(
    ("optimizers", "body"),
    [pytest.param(*case, marks=() if case == REMOVALS[1] else pytest.mark.slow) for case in REMOVALS],
    ids=lambda part: part.__name__,
)
def test_leaving_out_is_training_without(optimizers: Maker, body: Body) -> None:
    """Against a loop that weighs its means itself; of one call of the accumulated loop nothing is left."""
    trace = repeated(optimizers, body)
    names, weights = digests(loop(optimizers).x), torch.ones(EXAMPLES, dtype=torch.float64)
    emptied = next(loops.batches())[:2].tolist()
    weights[[3, 8, *emptied]], weights[11] = 0.0, 0.5
    chosen = {name: float(weight) for name, weight in zip(names, weights, strict=True) if weight < 1}
    training = LoopAgain(lambda: repeated(optimizers, body), trace, "renormalised")
    found = training.at(training.end_with(chosen))
    assert float((found - trained_with(optimizers, body, weights)).abs().max()) < CLOSE
    assert float((found - training.at(training.flat.vector(trace.steps.end))).abs().max()) > 1e-3


def test_a_call_of_which_nothing_is_left_adds_nothing() -> None:
    """Half of a batch is left out as a call of its own: the other calls are still those of this step."""
    trace = repeated(loops.momentum, loops.accumulated)
    first, _ = next(trace.steps.forwards())
    weights = dict.fromkeys(first.calls[0].names, 0.0)
    found = LoopAgain(lambda: repeated(loops.momentum, loops.accumulated), trace, "fixed").train(weights)
    assert list(found.steps.names()) == list(trace.steps.names())
    assert not torch.equal(found.steps.end["0.weight"], trace.steps.end["0.weight"])


@pytest.mark.slow
def test_effects_are_held_against_trainings_without_examples(tmp_path: Path) -> None:
    def train(**more: Any) -> Trace:
        return repeated(loops.adamw, loops.scheduled_and_clipped, **more)

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
    monkeypatch.setattr("ntkexp.foreign_loop.effects.OUTPUTS_PER_TRAINING", 0.5)  # 18 examples, 9 outputs
    given = (loops.momentum, loops.plain)
    folder = tmp_path / "outputs" / "runs" / "mine"
    found = repeated(*given, to=folder).attribute(effects=True, again=lambda: repeated(*given))["effect"]
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
    predicted = repeated(*given).attribute(effects="derivative", again=lambda: repeated(*given))["effect"]
    assert predicted.attrs["kind"] == "derivative"  # which is asked for by name


@pytest.mark.slow
def test_a_loss_that_was_not_trained_with_is_refused_without_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntkexp.foreign_loop.effects.OUTPUTS_PER_TRAINING", 0.5)
    trace = followed(loop(loops.momentum), loops.plain, loss=lambda outputs, call: outputs.square().sum(1))
    with pytest.raises(Mistake, match="is not the loss that was trained with"):
        trace.attribute(effects=True, again=lambda: repeated(loops.momentum, loops.plain))


def test_without_a_function_nothing_is_believed() -> None:
    caveats = repeated(loops.momentum, loops.plain).attribute(effects=True)["effect"].attrs["caveats"]
    assert "effects were not checked against trainings without examples; give again=" in caveats


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
    repeated(loops.momentum, loops.plain)
    repeated(loops.momentum, loops.plain)


def attributing() -> None:
    repeated(loops.momentum, loops.plain).attribute()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("train", "said"),
    [
        (other_weights, r"begins at other weights .*'0\.weight' differs.*seed it"),
        (other_order, "saw other examples, or in another order"),
        (other_sizes, "ends .* from where it did"),
        (attributing, "would never end"),
        (lambda: None, "followed 0 loops"),
        (twice, "followed 2 loops"),
    ],
)
def test_another_loop_is_not_the_same_again(train: Callable[[], object], said: str) -> None:
    trace = repeated(loops.momentum, loops.plain)
    before = torch.random.get_rng_state()
    with pytest.raises(Mistake, match=said):
        changes(LoopAgain(train, trace, "renormalised"), [[0]])
    assert torch.equal(before, torch.random.get_rng_state())
    assert "contribution" in repeated(loops.momentum, loops.plain).attribute()  # nothing is left of the retraining


def test_what_it_is_for_is_said() -> None:
    with pytest.raises(Mistake, match="add effects=True"):
        repeated(loops.momentum, loops.plain).attribute(again=lambda: None)
