"""One task after another: a phase learns its own examples alone, and what each of them did is known exactly."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.run.setting import prepare
from tests.run.small import Ran, ran, small

ROUNDING = 1e-12  # sums over 20 steps of numbers near 1
SEQUENCE = ("data=sequence", "ladder.machine=[]", "path.rule=[secant]")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "gd": (),
    "sgd": ("optimizer=sgd", "optimizer.batch=5", "optimizer.weight_decay=0.01"),
    "momentum": ("optimizer=momentum", "optimizer.batch=5", "optimizer.step_size=0.05"),
    "adam": ("optimizer=adam", "optimizer.weight_decay=0.01"),
    "nesterov": ("optimizer=nesterov", "optimizer.step_size=0.05"),
}
QUICK = (("sgd", "relu"), ("momentum", "tanh"))


@cache
def learned(optimizer: str, activation: str) -> Ran:
    """A small run on two phases."""
    return ran(*SEQUENCE, *OPTIMIZERS[optimizer], f"model.activation={activation}")


def by_phase(run: Ran) -> Tensor:
    """[phase, point, out, train], at the points where the path is integrated."""
    assert run.outcome.phases is not None
    parts = [torch.from_numpy(share.contributions[:]) for share in run.outcome.phases.shares["secant"]]
    return torch.stack(parts)[:, run.setting.domain.attributed]


def of_phase(run: Ran, number: int) -> slice:
    """Where the examples of a phase are."""
    return run.setting.problem.phases["train"][number]


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        pytest.param(name, activation, marks=[] if (name, activation) in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
        for activation in ("tanh", "relu")
    ],
)
def test_what_a_phase_changes_is_what_examples_add_in_it(name: str, activation: str) -> None:
    found = learned(name, activation)
    assert found.outcome.phases is not None
    read = found.setting.domain.attributed
    decay = torch.stack([share.decay for share in found.outcome.phases.shares["secant"]])[:, read]
    change = found.outcome.phases.change[:, read]
    assert change.norm(dim=(1, 2)).min() > 0.1
    assert (by_phase(found).sum(3) + decay - change).abs().max() < ROUNDING
    whole = found.outcome.evidence.paths["secant"].contributions[read]
    assert (by_phase(found).sum(0) - whole).abs().max() < ROUNDING


def test_an_example_acts_outside_its_phase_by_memory_alone() -> None:
    plain, remembering = by_phase(learned("sgd", "relu")), by_phase(learned("momentum", "tanh"))
    first, second = (of_phase(learned("sgd", "relu"), number) for number in (0, 1))
    assert not plain[1, ..., first].any()
    assert not plain[0, ..., second].any()
    assert not remembering[0, ..., second].any()
    assert remembering[1, ..., first].abs().sum() > 0.1 * remembering[1, ..., second].abs().sum()


def test_a_plain_loop_over_the_phases_ends_at_the_same_weights() -> None:
    found = learned("gd", "relu")
    problem, size = found.setting.problem, found.setting.descent.step_size
    function = function_of(problem.module)
    weights = {name: weight.clone().requires_grad_() for name, weight in problem.weights.items()}
    for place in problem.phases["train"]:
        for _ in range(10):
            missed = function(weights, problem.inputs[place]) - problem.targets[place]
            loss = missed.square().sum(1).mean() / 2
            gradients = torch.autograd.grad(loss, list(weights.values()))
            steps = zip(weights.items(), gradients, strict=True)
            weights = {name: (w - size * g).detach().requires_grad_() for (name, w), g in steps}
    for name, weight in found.outcome.weights.items():
        assert torch.allclose(weight, weights[name], rtol=0, atol=ROUNDING), name


def test_a_sequence_of_one_phase_is_the_run_without() -> None:
    batches = ("path.rule=[secant]", "ladder.machine=[]", "optimizer=sgd", "optimizer.batch=7")
    alone, other = ran("data=digits", *batches), ran("data=sequence", "data.phases=[[3,8]]", *batches)
    assert torch.equal(alone.outcome.evidence.end, other.outcome.evidence.end)
    assert torch.equal(alone.contributions("secant"), other.contributions("secant"))
    assert torch.equal(by_phase(other)[0], other.outcome.evidence.paths["secant"].contributions)
    assert all(other.memory.rows[k][name] == row[name] for k, row in enumerate(alone.memory.rows) for name in row)


@pytest.mark.slow
def test_two_phases_of_the_same_data_are_one_longer_run() -> None:
    chosen = (*SEQUENCE[1:], "optimizer.step_size=0.1")
    once = ran("data=digits", "data.probe=6", "data.test=0", *chosen)
    sizes = ("data.train=48", "data.probe=12", "data.test=0")
    twice = ran("data=sequence", "data.phases=[[3,8],[3,8]]", *sizes, *chosen)
    assert twice.setting.problem.data.phases == ("3 8 (1)", "3 8 (2)")
    for name, weight in once.outcome.weights.items():
        assert torch.allclose(weight, twice.outcome.weights[name], rtol=0, atol=ROUNDING), name
    parts = by_phase(twice)[..., :24] + by_phase(twice)[..., 24:]
    assert torch.allclose(once.contributions("secant")[:24], parts.sum(0)[:24], rtol=0, atol=ROUNDING)


def test_the_step_is_stable_for_every_phase() -> None:
    setting = learned("gd", "relu").setting
    largest = []
    for place in setting.problem.phases["train"]:
        kernel = setting.start.kernel[place, :, place].flatten(2).flatten(0, 1)
        largest.append(float(torch.linalg.eigvalsh(kernel)[-1]) / len(kernel))
    assert setting.start.largest_stable_step == pytest.approx(2 / max(largest), rel=1e-12)
    none = prepare(small(*SEQUENCE, "path.kernels=none"))
    assert none.start.largest_stable_step == pytest.approx(setting.start.largest_stable_step, rel=1e-3)  # iterated


def test_kernels_are_kept_at_the_switches() -> None:
    found = ran(*SEQUENCE, "data.steps=[7,13]", "path.schedule=adaptive", "path.count=3")
    assert 7 in found.memory.kernels
    assert len(found.memory.kernels) <= found.setting.experiment.timetable().room


def test_every_row_tells_of_every_task() -> None:
    rows = ran(*SEQUENCE, "data.steps=[7,13]").memory.rows
    assert [row["phase"] for row in rows] == [1] * 7 + [2] * 14
    for row in rows:
        for column in ("loss", "accuracy", "loss_probe", "accuracy_probe"):
            assert row[column] == row[f"{column}_{row['phase']}"]
    first, switch, last = rows[0], rows[7], rows[20]
    assert switch["loss_probe_1"] < first["loss_probe_1"]  # type: ignore[operator]  # it is a number
    assert switch["loss_probe_1"] < last["loss_probe_1"]  # type: ignore[operator]  # A is forgotten
    assert last["loss_2"] < switch["loss_2"]  # type: ignore[operator]  # B is learned


def test_a_run_that_ends_too_soon_knows_the_phases_it_reached() -> None:
    found = ran(*SEQUENCE, "optimizer.step_size=60", "loss=squared")
    assert found.outcome.diverged
    assert found.outcome.steps < 10
    assert found.outcome.phases is not None
    assert not found.outcome.phases.change[1].any()
    assert not by_phase(found)[1].any()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("data.steps=[5,5]", r"data.steps=\[5, 5\] are 10 steps in all, and steps=20; give steps=10$"),
        ("data.steps=[5,5,10]", "there are 2 phases; give the steps of each"),
        ("data.phases=[]", "data.phases"),
        ("data.phases=[[0,1],[2,12]]", "data.phases, phase 2: data.classes=.* there is no class 12"),
        ("data.phases=[{_target_:ntkexp.data.Sequence},[4,5]]", "a phase that is a sequence itself"),
        ("data.phases=[[0,1],[2,3,4]]", "which cannot share outputs; choose as many, or data.outputs=own"),
        (
            "data.phases=[[3,8],[3,5]] data.test=300",
            "learned in phase . is read, but not learned, in",
        ),
        ("data.phases=[[3,8],{_target_:ntkexp.data.Wine}]", "one network takes inputs of one shape"),
        ("data.phases=[[3,8],{_target_:ntkexp.data.Digits,train:9}]", "give data.train instead"),
        ("data.source=wine", "classes of data.source=wine cannot be chosen"),
        ("data.outputs=own data.label_noise=0.1", "would become one of another phase"),
        ("data.train=1", "no example for some of 2 phases"),
        ("steps=1", "there are 2 phases, each of which takes a step"),
        ("stop_at_loss=0.1", "the loss of one would end them all"),
        ("path.effects=true", "effects are not known for data=sequence"),
        ("path.every=snapshots", "use path.every=1"),
    ],
    ids=lambda text: text[:40],
)
def test_what_makes_no_sequence_is_refused(words: str, advice: str) -> None:
    with pytest.raises(Mistake, match=advice):
        small("data=sequence", *words.split()).draw()


def test_phases_may_be_sources_of_their_own() -> None:
    teachers = "data.phases=[{_target_:ntkexp.data.Teacher,seed:1},{_target_:ntkexp.data.Teacher,seed:2}]"
    data = small("data=sequence", teachers, "data.standardise=each").draw()
    assert data.phases == ("teacher (1)", "teacher (2)")
    assert data.train.target.shape == (24, 1)
    assert not torch.equal(data.train.shown[:12], data.train.shown[12:])


def test_every_class_may_have_an_output_of_its_own() -> None:
    data = small("data=sequence", "data.phases=[[3,8],[8,1]]", "data.outputs=own", "data.probe=0", "data.test=0").draw()
    assert data.classes == ("3", "8", "1")
    assert data.train.phase is not None
    assert set(data.train.target[data.train.phase == 1].tolist()) == {1, 2}
