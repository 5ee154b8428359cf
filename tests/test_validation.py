"""Scores are compared with trainings without the named examples. Each training is stored once."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import ntkexp
from ntkexp.cli.main import run as command
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.records.ground_truth import VALIDATION_FOLDER, TrainingWithout
from ntkexp.report.analysis.rank_correlation import spearman
from ntkexp.report.loaded_run import load_run
from ntkexp.report.validation import linear_datamodeling_score
from ntkexp.validation import RunSubject, asked_points
from tests.foreign_loop import loops
from tests.foreign_loop.loops import followed, loop
from tests.run.small import execute_in, small

WORDS = ("data=digits", "threads=1", "model.activation=tanh", "path.effects=derivative", "ladder.machine=[]", "steps=6")
SMALL: dict[str, Any] = {"leave_out": 4, "top": 2, "trainings": 9, "queries": 5, "quiet": True}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return execute_in(tmp_path_factory.mktemp("outputs"), small(*WORDS), WORDS)


@given(st.integers(0, 2**32 - 1))
def test_scores_that_add_up_to_what_happens_are_perfect(seed: int) -> None:
    """LDS = 1 where outputs are an increasing function of Σ τ over who is there, and −1 for −τ."""
    drawn = np.random.default_rng(seed)
    scores, left_out = drawn.normal(size=(3, 12)), drawn.random((20, 12)) < 0.3
    outputs = np.exp((~left_out).astype(float) @ scores.T)
    assert linear_datamodeling_score(scores, left_out, outputs, 3).by_query == pytest.approx(1.0, abs=1e-12)
    assert linear_datamodeling_score(-scores, left_out, outputs, 3).by_query == pytest.approx(-1.0, abs=1e-12)


def test_equal_scores_predict_nothing() -> None:
    """Sums of equal scores differ by rounding, and the ranks of the differences are random."""
    drawn = np.random.default_rng(0)
    left_out = drawn.random((50, 200)).argsort(1).argsort(1) < 50
    scores = np.repeat(drawn.normal(size=(3, 1)), 200, axis=1)
    assert np.ptp(left_out.astype(float) @ scores.T, axis=0).max() > 0
    scores[1, 0] *= 1 + 1e-6
    found = linear_datamodeling_score(scores, left_out, drawn.normal(size=(50, 3)), 10)
    assert np.isnan(found.by_query).tolist() == [True, False, True]


@given(st.integers(0, 2**32 - 1))
def test_ranks_correlate_as_in_a_data_frame(seed: int) -> None:
    """With ties, which whole numbers have."""
    import pandas as pd  # noqa: PLC0415  the oracle

    drawn = np.random.default_rng(seed)
    one, other = (drawn.integers(0, 5, (15, 4)).astype(float) for _ in range(2))
    expected = pd.DataFrame(one).corrwith(pd.DataFrame(other), method="spearman")
    assert spearman(one, other) == pytest.approx(expected.to_numpy(), abs=1e-12)


@pytest.mark.slow
def test_the_interval_holds_what_more_trainings_find() -> None:
    """40 draws of noisy scores: at a confidence of 95 %, fewer than 32 hits have a chance of 5e-5."""
    drawn, held = np.random.default_rng(0), 0
    for _ in range(40):
        scores, noise = drawn.normal(size=(6, 30)), drawn.normal(size=(6, 30))
        left_out = drawn.random((2000, 30)) < 0.2
        outputs = (~left_out).astype(float) @ (scores + noise).T
        few = linear_datamodeling_score(scores, left_out[:40], outputs[:40], 200)
        held += few.low <= linear_datamodeling_score(scores, left_out, outputs, 0).value <= few.high
    assert held >= 32


def test_trained_with_everyone_it_is_the_run(finished: Path) -> None:
    run = load_run(finished)
    points = asked_points(run, "query", 5)
    ((_, outputs),) = RunSubject(finished, tuple(points)).outputs([TrainingWithout(())])
    known = run.predictions.sel(machine="f_T").to_numpy()[points]
    assert abs(outputs - known).max() <= 1e-11 * abs(known).max()  # sums of six steps, in another order


def test_without_an_example_it_is_what_the_library_of_removals_says(finished: Path) -> None:
    """And from fresh weights it is another training, of the same data."""
    from ntkexp.run.execute import remove_group  # noqa: PLC0415  next to its oracle

    points = asked_points(load_run(finished), "query", 2)
    subject = RunSubject(finished, tuple(points))
    found = dict(
        subject.outputs(
            [TrainingWithout(()), TrainingWithout((3, 7)), TrainingWithout((), 5), TrainingWithout((3, 7), 5)]
        )
    )
    removal = remove_group(finished, [3, 7], points, Silent())
    change = found[TrainingWithout((3, 7))] - found[TrainingWithout(())]
    assert abs(change - removal.actual).max() <= 1e-9 * abs(removal.actual).max()
    assert abs(found[TrainingWithout((), 5)] - found[TrainingWithout(())]).max() > 1e-3
    assert abs(found[TrainingWithout((3, 7), 5)] - found[TrainingWithout((), 5)]).max() > 1e-6


def times(folder: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_mtime_ns for path in (folder / VALIDATION_FOLDER).iterdir() if path.suffix != ".npz"
    }


def test_a_kept_training_is_not_repeated_and_another_is_not_trusted(finished: Path, tmp_path: Path) -> None:
    """A validation that was broken off goes on. Effects of a smooth network predict it; their opposite does not."""
    run = shutil.copytree(finished, tmp_path / finished.name)
    first = ntkexp.validate(run, **SMALL)
    before = times(run)
    gone = sorted(before)[4:]
    for name in gone:
        (run / VALIDATION_FOLDER / name).unlink()
    opposite = -load_run(run).contributions["effect"].to_numpy()[asked_points(load_run(run), None, 5)]
    found = ntkexp.validate(run, {"opposite": opposite}, **SMALL)
    assert {name: time for name, time in times(run).items() if name not in gone} == {
        name: time for name, time in before.items() if name not in gone
    }
    assert times(run).keys() == before.keys()
    known = first.truth.outputs
    assert abs(found.truth.outputs - known).max() < 1e-11 * abs(known).max()  # sums of six steps, with other trainings
    by_name = {each.name: each.lds.value for each in found.scores}
    assert by_name["opposite"] == by_name["effect"] > 0.9  # −effect is the score of an effect

    assert "9 trainings without 4 random examples of" in str(found)
    whole = times(run)
    again = ntkexp.validate(run, {"upside down": -opposite}, **{**SMALL, "top": None})
    assert times(run) == whole
    assert again.truth.digest == found.truth.digest
    assert next(each for each in again.scores if each.name == "upside down").lds.value < -0.9

    paths = sorted(run / VALIDATION_FOLDER / name for name in whole)
    paths[0].write_bytes(paths[1].read_bytes())  # a training of other examples, whole and sealed
    paths[2].write_bytes(paths[2].read_bytes()[:-9])
    assert abs(ntkexp.validate(run, **SMALL).truth.outputs - known).max() < 1e-11 * abs(known).max()


@pytest.mark.slow
def test_workers_find_the_same_bytes(finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(finished, tmp_path / finished.name)
    words = ["--trainings=9", "--leave-out=4", "--top=2", "--queries=5", "--workers=1"]
    assert command(["validate", str(run), *words]) == 0
    said = capfd.readouterr().out
    assert "LDS" in said
    assert re.search(r"left out by each training: .*ground_truth\.npz$", said, re.M)
    other = shutil.copytree(finished, tmp_path / "elsewhere" / finished.name)
    truth = ntkexp.validate(other, **SMALL).truth
    with np.load(run / VALIDATION_FOLDER / "ground_truth.npz") as stored:
        assert stored["facts"][2] == truth.digest
        for name in ("left_out", "outputs", "whole"):
            np.testing.assert_array_equal(stored[name], getattr(truth, name))


def test_a_followed_loop_is_carried_out_without_examples() -> None:
    """By a loop that computes every mean by hand."""

    def train() -> None:
        kept.append(followed(loop(loops.adamw), loops.plain))

    kept: list[object] = []
    train()
    trace = kept[0]
    assert isinstance(trace, Trace)
    found = ntkexp.validate(trace, again=train, leave_out=2, top=1, trainings=3, quiet=True)
    places, names = found.truth.left_out[0].nonzero()[0], list(trace.examples)
    given_loop = loop(loops.adamw)
    x = given_loop.x
    gone = [k for k, name in enumerate(digests(x)) if name in {names[place] for place in places}]
    weights = torch.ones(len(x), dtype=torch.float64)
    weights[gone] = 0.0
    for _, batch in zip(range(loops.STEPS), loops.batches(), strict=False):
        given_loop.zero()
        losses = torch.nn.functional.cross_entropy(given_loop.model(x[batch]), given_loop.y[batch], reduction="none")
        ((weights[batch] * losses).sum() / weights[batch].sum()).backward()  # type: ignore[no-untyped-call]
        given_loop.step()
    expected = given_loop.model(given_loop.queries).detach().numpy()
    assert abs(found.truth.outputs[0] - expected).max() < 1e-10


@pytest.mark.parametrize("to", ["memory", "disk"])
@pytest.mark.sample(1)
def test_effects_of_a_followed_loop_are_validated(to: str, tmp_path: Path) -> None:
    """They are scores of the opposite sign, and a folder that holds them keeps them."""

    def loss(outputs: torch.Tensor, call: Any) -> torch.Tensor:
        rows = [known[name] for name in call.ids]
        return torch.nn.functional.cross_entropy(outputs, given_loop.y[rows], reduction="none")

    def train() -> Trace:
        options: dict[str, Any] = {"to": tmp_path / "trace"} if to == "disk" else {}
        return followed(loop(loops.adamw), loops.plain, loss=loss, **options)

    given_loop = loop(loops.adamw)
    known = {name: row for row, name in enumerate(digests(given_loop.x))}
    trace = train()
    attribution = trace.attribute(effects=True, quiet=True)
    small: dict[str, Any] = {"leave_out": 2, "top": None, "trainings": 3, "quiet": True}
    found = ntkexp.validate(trace, attribution, again=train, **small)
    scores = {"opposite": -attribution["effect"], "copy": attribution["contribution"]}
    expected = ntkexp.validate(trace, scores, again=train, **small)
    by_name = {each.name: each.lds.value for each in found.scores}
    of_copies = {each.name: each.lds.value for each in expected.scores}
    assert by_name == {"contribution": of_copies["copy"], "effect": of_copies["opposite"]}
    assert of_copies["contribution"] == of_copies["copy"]
    if to == "disk":
        assert of_copies["effect"] == of_copies["opposite"]
        np.testing.assert_array_equal(load_run(tmp_path / "trace").contributions["effect"], attribution["effect"])
    with pytest.raises(Mistake, match="is the attribution of other examples"):
        ntkexp.validate(trace, attribution.isel(example=[0]), again=train, **small)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"leave_out": 0}, "leave_out=0 of 24 examples: it takes a share below 1, or from 1 to 23"),
        ({"leave_out": 24}, "leave_out=24 of 24"),
        ({"leave_out": np.nan}, "leave_out=nan: it takes a number"),
        ({"top": np.inf}, "top=inf: it takes a number"),
        ({"queries": 0}, "queries=0: it takes a whole number"),
        ({"trainings": 2}, "trainings=2: correlations of ranks need at least 3"),
        ({"fresh": -1}, "fresh=-1"),
        ({"scores": np.zeros((24, 5))}, r"its shape is \(24, 5\).*transpose it"),
        ({"scores": np.full((5, 24), np.nan)}, "not finite"),
        ({"scores": np.array(["a"])}, "not numbers"),
        ({"scores": [[1], [2, 3]]}, "scores: not an array"),
        ({"split": "tset"}, "test"),
        ({"again": print}, "is a run of an experiment; leave it out"),
    ],
)
def test_what_cannot_be_is_refused(finished: Path, words: dict[str, Any], told: str) -> None:
    validate = partial(ntkexp.validate, finished, **{**SMALL, **words})
    with pytest.raises(Mistake, match=told):
        validate()
