"""Who caused the forgetting: what each example did to an earlier task adds up to what happened to it."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pytest

from ntkexp.progress import Silent
from ntkexp.report.explain import explain, format_explanation
from ntkexp.report.forgetting import Forgetting, forgettings, format_tasks, sentence
from ntkexp.report.page.build import write_explanations
from ntkexp.report.plots.figures import tasks
from ntkexp.report.plots.style import house_style
from ntkexp.report.run import Run, load_run
from ntkexp.run.execute import execute
from tests.report.test_plots import assert_inside
from tests.run.small import small

ROUNDING = 1e-12  # sums over 20 steps of numbers near 1
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
    return load_run(execute(small(*words), words, place, False, Silent(), pictures=False))


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
            measured = [row[f"loss_probe_{each.task}"] for row in at]
            assert measured == pytest.approx([-each.before, -each.after], rel=ROUNDING)
        else:
            assert each.right == pytest.approx([row[f"accuracy_probe_{each.task}"] for row in at], rel=ROUNDING)
    said = format_tasks(run, 3)
    assert said.count("While ") == len(found)
    page = write_explanations(run, explain(run, "probe", [0]), [], tmp_path / "page.html", "ntkexp explain")
    assert all(escape(sentence(each)) in page.read_text(encoding="utf-8") for each in found)
    assert ("the optimizer remembered" in said) == (name in {"remembered", "classes"})
    assert ("the loss of" in said) == (name == "values")
    assert len(tasks.switches(run)) == phases - 1
    assert tasks.answer(run).startswith(("After its phase, ", "No task"))
    with house_style():
        figure = tasks.draw(run)
        assert figure is not None
        assert_inside(figure)


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
    phases = run.data["probe_phase"].tolist()
    found = explain(run, "probe", [phases.index(1), phases.index(2)])
    own = ("0", "1", "2"), ("3", "4", "5")
    for phase, explanation in enumerate(found, start=1):
        assert explanation.point.phase == phase
        assert explanation.point.name in own[phase - 1]
        assert explanation.output == f"f for {own[phase - 1][explanation.out]}"
        shared = f"this output is for {own[0][explanation.out]} in phase 1 and {own[1][explanation.out]} in phase 2"
        assert shared in format_explanation(explanation, 3)
        assert f", {explanation.point.name}, phase {phase}): f for " in format_explanation(explanation, 3)
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
    split="probe",
    points=5,
    before=1.0,
    after=0.25,
    right=(1.0, 0.6),
    by=(0.0, -0.5, -0.375, 0.125),
    decay=0.0,
    learned_in=(1, 2, 2, 2),
)


def test_the_sentence_says_who_did_it() -> None:
    assert sentence(HAND) == (
        "While 2 3 was learned (phase 2), the margin of 0 1 (task 1) fell from 1 to 0.25 at 5 probe points, and its "
        "accuracy fell from 100 % to 60 %. Examples of phase 2 moved it by -0.75; half of all harm was done by 1 of "
        "the 3 examples that acted."
    )


def test_the_worst_come_first() -> None:
    assert (HAND.worst, HAND.harm, HAND.acting) == ([1, 2], 0.875, 3)


def test_runs_without_phases_tell_nothing(tmp_path: Path) -> None:
    run = load_run(execute(small("ladder.machine=[]", "steps=2"), (), tmp_path, False, Silent(), pictures=False))
    assert format_tasks(run, 3) == ""
    assert tasks.draw(run) is None
