"""One task after another: each phase learns its own examples alone, and the effect of each example is exact."""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.optimizer.base import Memory as OptimizerMemory, Sizes
from ntkexp.optimizer.descent import SGD
from ntkexp.removal.rerun import rerun_of, trained
from ntkexp.removal.retraining import EffectsResult, repetition_remarks
from ntkexp.report.explain import explain, format_explanation, heading_of
from ntkexp.report.forgetting import Forgetting, forgetting_sentence, forgettings, format_tasks
from ntkexp.report.loaded_run import load_run
from ntkexp.report.page.build import write_explanations
from ntkexp.report.plots.figures import tasks
from ntkexp.report.plots.run_plots import figure_of
from ntkexp.report.plots.style import house_style
from ntkexp.report.run import Run
from ntkexp.run.loop import run
from ntkexp.run.setting import Setting, prepare
from ntkexp.shapes import Weights
from tests.report.test_plots import assert_inside, assert_readable
from tests.run.small import Memory, Ran, execute_in, ran, small
from tests.run.test_resumed import ADAM, EFFECTS

ROUNDING = 1e-12  # sums over 20 steps of numbers near 1
SEQUENCE = ("data=sequence", "ladder.machine=[]", "path.rule=[secant]")


@cache
def learned(optimizer: str) -> Ran:
    """A small run on two phases."""
    memory = ("optimizer=momentum", "optimizer.step_size=0.05", "optimizer.batch=5")
    words = {"gd": (), "sgd": ("optimizer=sgd", "optimizer.batch=5"), "momentum": memory}[optimizer]
    return ran(*SEQUENCE, *words, "model.activation=relu")


def by_phase(run: Ran) -> Tensor:
    """[phase, point, out, train], at the points where the path is integrated."""
    assert run.outcome.phases is not None
    parts = [torch.from_numpy(share.contributions[:]) for share in run.outcome.phases.shares["secant"]]
    return torch.stack(parts)[:, run.setting.domain.attributed]


def of_phase(run: Ran, number: int) -> slice:
    """The places of the examples of a phase."""
    return run.setting.problem.phases["train"][number]


def test_an_example_acts_outside_its_phase_by_memory_alone() -> None:
    plain, remembering = by_phase(learned("sgd")), by_phase(learned("momentum"))
    first, second = (of_phase(learned("sgd"), number) for number in (0, 1))
    assert not plain[1, ..., first].any()
    assert not plain[0, ..., second].any()
    assert not remembering[0, ..., second].any()
    assert remembering[1, ..., first].abs().sum() > 0.1 * remembering[1, ..., second].abs().sum()


def test_a_plain_loop_over_the_phases_ends_at_the_same_weights() -> None:
    found = learned("gd")
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
    assert torch.equal(alone.outcome.matrices.end, other.outcome.matrices.end)
    assert torch.equal(alone.contributions("secant"), other.contributions("secant"))
    assert torch.equal(by_phase(other)[0], other.outcome.matrices.paths["secant"].contributions)
    assert all(other.memory.rows[k][name] == row[name] for k, row in enumerate(alone.memory.rows) for name in row)


@pytest.mark.slow
def test_two_phases_of_the_same_data_are_one_longer_run() -> None:
    chosen = (*SEQUENCE[1:], "optimizer.step_size=0.1")
    once = ran("data=digits", "data.query=6", "data.test=0", *chosen)
    sizes = ("data.train=48", "data.query=12", "data.test=0")
    twice = ran("data=sequence", "data.phases=[[3,8],[3,8]]", *sizes, *chosen)
    assert twice.setting.problem.data.phases == ("3 8 (1)", "3 8 (2)")
    for name, weight in once.outcome.weights.items():
        assert torch.allclose(weight, twice.outcome.weights[name], rtol=0, atol=ROUNDING), name
    parts = by_phase(twice)[..., :24] + by_phase(twice)[..., 24:]
    assert torch.allclose(once.contributions("secant")[:24], parts.sum(0)[:24], rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_the_step_is_stable_for_every_phase(alpha: float) -> None:
    """The objective of a centred run is the loss over α²."""
    setting = prepare(small(*SEQUENCE, "init.centred=true", f"init.alpha={alpha}"))
    largest = []
    for place in setting.problem.phases["train"]:
        kernel = setting.start.kernel[place, :, place].flatten(2).flatten(0, 1)
        largest.append(float(torch.linalg.eigvalsh(kernel)[-1]) / len(kernel) / alpha**2)
    assert setting.start.largest_stable_step == pytest.approx(2 / max(largest), rel=1e-12)
    none = prepare(small(*SEQUENCE, "path.kernels=none"))
    assert none.start.largest_stable_step == pytest.approx(setting.start.largest_stable_step, rel=1e-3)  # iterated


def test_kernels_are_kept_at_the_switches() -> None:
    found = ran(*SEQUENCE, "data.steps=[7,13]", "path.schedule=adaptive", "path.count=3")
    assert 7 in found.memory.kernels
    assert len(found.memory.kernels) <= found.setting.experiment.timetable().capacity


def test_every_row_tells_of_every_task() -> None:
    rows = ran(*SEQUENCE, "data.steps=[7,13]").memory.rows
    assert [row["phase"] for row in rows] == [1] * 7 + [2] * 14
    for row in rows:
        for column in ("loss", "accuracy", "loss_query", "accuracy_query"):
            assert row[column] == row[f"{column}_{row['phase']}"]
    first, switch, last = rows[0], rows[7], rows[20]
    assert switch["loss_query_1"] < first["loss_query_1"]  # type: ignore[operator]  # it is a number
    assert switch["loss_query_1"] < last["loss_query_1"]  # type: ignore[operator]  # A is forgotten
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
        ("data.phases=[{_target_:ntkexp.data.Sequence},[4,5]]", "a phase cannot be a sequence"),
        ("data.phases=[[0,1],[2,3,4]]", "which cannot share outputs; choose equal numbers of classes, or"),
        (
            "data.phases=[[3,8],[3,5]] data.test=300",
            "training example of phase . is a query or test example of",
        ),
        ("data.phases=[[3,8],{_target_:ntkexp.data.Wine}]", "one network takes inputs of one shape"),
        ("data.phases=[[3,8],{_target_:ntkexp.data.Digits,train:9}]", "give data.train instead"),
        ("data.source=wine", "classes of data.source=wine cannot be chosen"),
        ("data.outputs=own data.label_noise=0.1", "noise would give labels of other phases"),
        ("data.train=1", "leaves some of the 2 phases without an example"),
        ("steps=1", "there are 2 phases, each of which takes a step"),
        ("stop_at_loss=0.1", "the loss of one phase would end all phases"),
        ("path.effects=true", "effects are not known for data=sequence"),
        ("path.every=snapshots", "switches tasks during training; use path.every=1"),
        ("path.measure=loss", "on one another are computed for outputs only"),
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
    data = small("data=sequence", "data.phases=[[3,8],[8,1]]", "data.outputs=own", "data.query=0", "data.test=0").draw()
    assert data.classes == ("3", "8", "1")
    assert data.train.phase is not None
    assert set(data.train.target[data.train.phase == 1].tolist()) == {1, 2}


# The cause of forgetting: the effects of the examples on an earlier task add up to its change.


TEACHERS = "data.phases=[{_target_:ntkexp.data.Teacher,seed:1},{_target_:ntkexp.data.Teacher,seed:2}]"
CASES = {
    "remembered": ("optimizer=momentum", "optimizer.step_size=0.05"),
    "classes": ("data.outputs=own", "loss=cross_entropy", "optimizer=adam", "optimizer.weight_decay=0.1", "steps=6"),
    "values": (TEACHERS, "data.standardise=each"),
    "shared": ("data.phases=[[0,1,2],[3,4,5]]", "steps=6"),
    "three": ("data.phases=[[0,1],[2,3],[4,5]]", "optimizer=sgd", "optimizer.batch=4"),
}


def finished(name: str, place: Path) -> Run:
    """A small run of one of the cases, from its folder."""
    words = ("data=sequence", "ladder.machine=[]", "path.rule=[secant]", *CASES[name])
    return load_run(execute_in(place, small(*words), words))


@pytest.mark.parametrize("name", ["remembered", *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[1:])])
def test_what_examples_did_is_what_happened(name: str, tmp_path: Path) -> None:
    run = finished(name, tmp_path)
    found = forgettings(run)
    phases = len(run.data["phases"])
    assert [(each.during, each.task) for each in found] == [(q, p) for q in range(2, phases + 1) for p in range(1, q)]
    for each in found:
        assert abs(sum(each.by) + each.decay - each.change) < ROUNDING
        assert abs(each.change) > 1e3 * ROUNDING
        assert bool(each.decay) == (name == "classes")
        at = [run.metrics[run.metrics["phase"] == each.during].iloc[k] for k in (0, -1)]
        if each.during < phases:
            at[1] = run.metrics[run.metrics["phase"] == each.during + 1].iloc[0]
        if each.right is None:
            measured = [row[f"loss_query_{each.task}"] for row in at]
            assert measured == pytest.approx([-each.before, -each.after], rel=ROUNDING)
        else:
            assert each.right == pytest.approx([row[f"accuracy_query_{each.task}"] for row in at], rel=ROUNDING)
    said = format_tasks(run, 3)
    assert said.count("While ") == len(found)
    page = write_explanations(run, explain(run, "query", [0]), [], tmp_path / "page.html", "ntkexp explain")
    assert all(escape(forgetting_sentence(each)) in page.read_text(encoding="utf-8") for each in found)
    assert ("through the momentum" in said) == (name in {"remembered", "classes"})
    assert ("the loss of" in said) == (name == "values")
    assert len(tasks.switches(run)) == phases - 1
    assert tasks.answer(run)[1].startswith(("After its phase, ", "No task"))
    figure = figure_of(run, tasks.draw)
    assert figure is not None
    with house_style():
        assert_inside(figure)
        assert_readable(figure)


def test_parts_are_read_some_points_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished("remembered", tmp_path)
    whole = forgettings(run)
    monkeypatch.setattr("ntkexp.report.run.LARGEST_CHUNK", 5 * run.contributions["by_phase"][0, 0].nbytes)
    for each, expected in zip(forgettings(run), whole, strict=True):
        assert each.by == pytest.approx(expected.by, abs=ROUNDING)
        assert each.points > 5


def test_points_and_examples_go_by_the_classes_of_their_own_phase(tmp_path: Path) -> None:
    """And by means of plain gradients, each acts in its own phase alone."""
    run = finished("shared", tmp_path)
    phases = run.data["query_phase"].tolist()
    found = explain(run, "query", [phases.index(1), phases.index(2)])
    own = ("0", "1", "2"), ("3", "4", "5")
    for phase, explanation in enumerate(found, start=1):
        assert explanation.point.phase == phase
        assert explanation.point.name in own[phase - 1]
        assert explanation.output == f"f for {own[phase - 1][explanation.out]}"
        shared = f"this output is for {own[0][explanation.out]} in phase 1 and {own[1][explanation.out]} in phase 2"
        assert shared in format_explanation(explanation, 3)
        heading = heading_of(explanation)
        assert f", phase {phase}): predicted " in heading
        assert f"; {explanation.output} = " in heading
        for part in explanation.parts:
            assert part.example.phase is not None
            assert part.example.name in own[part.example.phase - 1]
            assert (part.halfway < 0.5) == (part.example.phase == 1)  # of 3 and 3 equal steps
        change = explanation.movement
        assert change is not None
        assert change.sentence in format_explanation(explanation, 3)
        assert change.by_step.sum() == pytest.approx(explanation.sum, rel=ROUNDING)


HAND = Forgetting(
    task=1,
    during=2,
    names=("0 1", "2 3"),
    split="query",
    points=5,
    before=1.0,
    after=0.25,
    right=(1.0, 0.6),
    by=(0.0, -0.5, -0.375, 0.125),
    decay=0.0,
    learned_in=(1, 2, 2, 2),
)


def test_the_sentence_says_who_did_it_and_the_worst_come_first() -> None:
    assert forgetting_sentence(HAND) == (
        "While 2 3 was learned (phase 2), the margin of 0 1 (task 1) fell from 1 to 0.25 at 5 query points, and its "
        "accuracy fell from 100 % to 60 %. Examples of phase 2 moved it by -0.75; half of all harm was done by 1 of "
        "the 3 examples that acted."
    )
    assert (HAND.worst, HAND.harm, HAND.acting) == ([1, 2], 0.875, 3)


def test_runs_without_phases_tell_nothing(tmp_path: Path) -> None:
    run = load_run(execute_in(tmp_path, small("ladder.machine=[]", "steps=2"), ()))
    assert format_tasks(run, 3) == ""
    assert figure_of(run, tasks.draw) is None


# Effects of whole runs: what a run says leaving an example out would change, against trainings without.


def effects_of(setting: Setting) -> EffectsResult:
    found = run(setting, Memory()).effects
    assert found is not None
    return found


def slopes(setting: Setting, example: int, width: float = 1e-5) -> Tensor:
    """−∂f/∂w of one example at all points, by two trainings."""
    rerun = rerun_of(setting.experiment, setting.problem, setting.descent.step_size, setting.experiment.steps)
    weights = rerun.unit_weights.repeat(2, 1)
    weights[:, example] += torch.tensor([width, -width])
    up, down = (rerun.function(rerun.flat.weights(end), setting.problem.inputs) for end in trained(rerun, weights))
    return (down - up) / (2 * width)


def known_points(found: EffectsResult) -> Tensor:
    """The points whose effects are known: the first few of every split."""
    known = found.values.isfinite().all(2).all(1)
    assert known.nonzero().flatten().tolist() == [0, 1, 12, 13, 16]
    return known


@pytest.mark.parametrize(
    "words", [pytest.param(("optimizer=gd", "init.centred=true", "init.alpha=2"), marks=pytest.mark.slow), ADAM]
)
def test_a_run_says_what_an_example_less_would_change(words: tuple[str, ...]) -> None:
    setting = prepare(small(*EFFECTS, *words))
    found = effects_of(setting)
    known = known_points(found)
    expected = slopes(setting, 3)[known]
    assert (found.values[known][:, :, 3] - expected).abs().max() < 1e-6 * expected.abs().max()


def assert_retrained(setting: Setting) -> None:
    """Assert that effects are the changes in trainings without an example."""
    found = effects_of(setting)
    rerun = rerun_of(setting.experiment, setting.problem, setting.descent.step_size, setting.experiment.steps)
    ends = trained(rerun, torch.stack([rerun.unit_weights, rerun.without([3])]))
    whole, without = (rerun.outputs(end, setting.problem.inputs) for end in ends)
    known = known_points(found)
    assert torch.allclose(found.values[known][:, :, 3], (without - whole)[known], rtol=1e-9, atol=1e-12)
    assert (without - whole)[known].abs().max() > 1e-4
    assert found.facts == {"kind": "retrained", "mean": "renormalised"}
    assert found.caveats == ["effects are changes in 12 trainings, each without one example"]


def test_effects_are_retrained_where_that_is_cheaper() -> None:
    assert_retrained(prepare(small(*EFFECTS, *ADAM, "path.effects=true")))


@pytest.mark.parametrize("words", ["path.effects=one_step", "path.mean=fixed", "path.attributed=1"])
def test_what_trainings_do_not_tell_or_tell_too_slowly_is_swept_for(words: str) -> None:
    asked = prepare(small(*EFFECTS, *ADAM, "path.effects=true", words)).sweep
    assert asked is not None
    assert not asked.retrains


def test_a_training_that_does_not_repeat_itself_is_told() -> None:
    ones = torch.ones(3, 2, 1)
    assert repetition_remarks(1e-3 * ones[0], ones) == []
    assert repetition_remarks(0 * ones[0], 0 * ones) == []
    (said,) = repetition_remarks(0.1 * ones[0], ones)
    assert said.startswith("an exact repetition of the training changes the outputs by 0.1")


@pytest.mark.slow
def test_chosen_outputs_have_the_same_effects() -> None:
    every, some = (effects_of(prepare(small(*EFFECTS, *ADAM, *more))).values for more in ((), ("path.outputs=[2]",)))
    assert torch.allclose(some[:2], every[:2, 2:], rtol=1e-12, atol=0)


@pytest.mark.slow
def test_kinks_and_disagreement_are_told() -> None:
    found = effects_of(prepare(small(*EFFECTS, "model.activation=relu", "optimizer=gd")))
    assert any("relu" in sentence for sentence in found.caveats)


class OfMyOwn(SGD):
    """An optimizer without a rule for effects."""

    def update(
        self, step: int, weights: Weights, gradient: Weights, sizes: Sizes, memory: OptimizerMemory
    ) -> tuple[Weights, OptimizerMemory]:
        return super().update(step, weights, {name: part.sign() for name, part in gradient.items()}, sizes, memory)


def of_my_own(*words: str) -> Experiment:
    return Experiment(**dict(small(*EFFECTS, "optimizer=sgd", *words)) | {"optimizer": OfMyOwn()})


def test_an_optimizer_from_elsewhere_has_effects_only_by_few_trainings() -> None:
    with pytest.raises(
        ValidationError,
        match=r"path.effects=derivative: the derivative of .* optimizer=of_my_own is not known",
    ):
        of_my_own()
    setting = prepare(of_my_own("path.effects=true"))
    assert setting.sweep is not None
    assert "12 trainings, each without one example, because the derivative" in setting.sweep.remark
    assert_retrained(setting)
    with pytest.raises(Mistake, match=r"12 trainings, .* are more than the limit of 6 for effects on 3 outputs"):
        prepare(of_my_own("path.effects=true", "path.attributed=1"))


def test_a_flow_has_no_effects() -> None:
    with pytest.raises(Mistake, match=r"path.effects=derivative: optimizer=flow"):
        small(*EFFECTS, "optimizer=flow", "loss=squared")
