"""The benchmark runs, and prints its tables."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from ntkexp.removal.rerun import trained
from ntkexp.run.loop import SilentListener, train_steps
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.bench import attribution_scores
from tests.bench.__main__ import CELLS, REPORTS, main, parse
from tests.bench.attribution import Measurement
from tests.bench.attribution_asked import AbstractAsked, OneOutput, OwnLoss
from tests.bench.attribution_case import FIRST, QUICK, Case, Cells, Size, Training, changes, fresh_ends
from tests.bench.attribution_page import LINES, PAGE, page, read
from tests.bench.attribution_scores import damping_of, end_of, gauss_newton, influence, last_product, slopes, tracin
from tests.bench.cell import beside, compared, keep, kept
from tests.bench.peers import Kernel, Race


@pytest.mark.slow
def test_the_quick_benchmark_prints_its_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    main(["--quick", "--threads=1", f"--plot={tmp_path / 'cost.svg'}", f"--cells={tmp_path / 'cells'}"])
    torch.set_num_threads(threads)
    titles = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert [title.split()[0] for title in titles] == [
        "torch",
        "Tangent",
        "A",
        "A",
        "Kernels",
        "Whole",
        "A",
        "Adam,",
        "Engine:",
        "Reading",
        "Sketches",
        "Language:",
        "Precision:",
        "Scale:",
        "Following:",
        "Measure:",
        *["Attribution,"] * 3,
        "Shares",
    ]
    assert (tmp_path / "cost.svg").read_text("utf-8").count("snapshots") >= 3


def test_a_table_without_cells_is_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    main(["sketch", "--quick", "--threads=1", "--json"])
    torch.set_num_threads(threads)
    told = json.loads(capsys.readouterr().out)
    (table,) = told["tables"]
    assert [len(row) for row in table["rows"]] == [len(table["header"])]
    assert table["rows"][0][:3] == ["mlp", 1, 64]
    assert told["cells"] == told["compared"] == []


def test_figures_are_held_against_the_last_of_as_many_threads(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    first = [{"name": "a", "products": 1.0}, {"name": "b", "products": 1.0}]
    assert "--tag" in compared(beside(first, 1, file), 2, 1)
    keep(first, 1, "May", file)
    keep([{"name": "b", "products": 4.0}], 1, "June", file)
    assert {name: each["tag"] for name, each in kept(file)["1"].items()} == {"a": "May", "b": "June"}
    now = [{"name": "a", "products": 2.0}, {"name": "b", "products": 2.0}, {"name": "c", "products": 2.0}]
    assert [(each.tag, each.ratio) for each in beside(now, 1, file)] == [("May", 2.0), ("June", 0.5)]
    assert beside(now, 2, file) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nosuch", "choose from"),
        ("steps --threads=0", "--threads"),
        ("kernels --seconds=-1", "--seconds"),
        ("steps --quick --tag=now", "leave out --quick"),
        ("sketch --tag=now", "--tag is for kernels"),
        ("kernels --only=stride", "--only is for infinite"),
        ("infinite --only=nosuch", "no row"),
        ("reading --plot=/no/such/folder/cost.svg", "is no folder"),
        ("steps --peers=/tmp", "--peers is for"),
    ],
)
def test_what_would_be_measured_in_vain_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words.split(), (*CELLS, *REPORTS), tuple(CELLS))
    assert said in capsys.readouterr().err.splitlines()[-1]


# The scores of the bench are what their formulas say, what was measured is kept, and the page says what it holds.


SGD = ("data=digits", "optimizer=sgd", "optimizer.step_size=0.1", "model.activation=tanh", "model.width=4")
CLASSES = (*SGD, "data.classes=all", "loss=cross_entropy")
SMALL = 1e-12  # a step size that leaves the weights where they were
ROUNDING = 1e-9  # of numbers near 1, after a solve whose condition is at most 1/damping times the examples


def case_of(*words: str, size: Size = QUICK, asked: AbstractAsked | None = None, seed: int = 0) -> Case:
    """A training of three steps."""
    return Case(words, size, asked or OneOutput(), seed)


def matrix(case: Case, curved: Tensor) -> Tensor:
    """Σᵢ Jᵢᵀ ℓ″ᵢ Jᵢ/N at the end, from ℓ″ of every example."""
    rerun, end = case.rerun, end_of(case.rerun)
    jacobian = jacrev(lambda vector: rerun.outputs(vector, rerun.inputs))(end)
    return torch.einsum("icp,icd,idq->pq", jacobian, curved, jacobian).detach() / rerun.examples


@pytest.mark.slow
def test_tracin_is_the_first_order_of_contributions() -> None:
    case = case_of(*SGD, "path.rule=[left]")
    listener = SilentListener(Path())  # SGD has no second pass, so nothing is written
    state = begin(prepare(case.experiment), listener.trajectory)
    train_steps(state, listener)
    expected = -state.accumulator.integrals["left"].parts[1][-case.size.read :, 0]
    torch.testing.assert_close(tracin(case.rerun, case.of), expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.slow
def test_the_influence_function_solves_with_the_gauss_newton_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution_scores, "RESIDUAL", 1e-12)
    case = case_of(*SGD)
    rerun, end = case.rerun, end_of(case.rerun)
    found = matrix(case, torch.ones(rerun.examples, 1, 1).to(end))
    damped = found + damping_of(rerun, end, 0.1) * torch.eye(len(found))
    losses = jacrev(lambda vector: rerun.loss.value(rerun.outputs(vector, rerun.inputs), rerun.targets))(end)
    expected = slopes(case.of, end) @ torch.linalg.solve(damped, losses.t()) / rerun.examples
    torch.testing.assert_close(influence(rerun, case.of, 0.1), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_the_gauss_newton_matrix_has_the_curvature_of_the_loss() -> None:
    case = case_of(*CLASSES, asked=OwnLoss())
    rerun, end = case.rerun, end_of(case.rerun)
    share = rerun.outputs(end, rerun.inputs).detach().softmax(1)
    expected = matrix(case, torch.diag_embed(share) - share[:, :, None] * share[:, None])
    vectors = torch.randn(2, len(end), generator=torch.Generator().manual_seed(0)).to(end)
    torch.testing.assert_close(gauss_newton(rerun, end, vectors), vectors @ expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.slow
def test_tracin_of_a_single_small_step_is_the_last_product() -> None:
    case = case_of(*SGD, f"optimizer.step_size={SMALL}", size=QUICK._replace(steps=1))  # whose batch is everyone
    expected = SMALL / case.size.train * last_product(case.rerun, case.of)
    torch.testing.assert_close(tracin(case.rerun, case.of), expected, rtol=ROUNDING, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "asked"), [(SGD, OneOutput()), (CLASSES, OwnLoss())])
def test_a_single_step_without_an_example_is_training_without_it(words: tuple[str, ...], asked: AbstractAsked) -> None:
    case = case_of(*words, "optimizer.step_size=1e-6", size=QUICK._replace(steps=1), asked=asked, seed=1)
    actual = changes(case)["one"].t()
    assert (actual != 0).any()
    torch.testing.assert_close(case.scores["one step"](), actual, rtol=1e-4, atol=1e-12)  # of first order in 1e-6


@pytest.mark.slow
def test_fresh_trainings_are_those_of_their_seeds_one_by_one() -> None:
    case = case_of(*SGD, "optimizer=adam", "optimizer.step_size=0.01", size=QUICK._replace(batch=5))
    weight = 1 - torch.eye(case.size.train).double()[:2]
    expected = [trained(case.rerun_from(FIRST + k), weight[[k]])[0] for k in range(2)]
    assert not torch.allclose(expected[0], expected[1], atol=0.1)
    torch.testing.assert_close(fresh_ends(case, weight), torch.stack(expected), rtol=ROUNDING, atol=ROUNDING)


def test_margins_are_what_losses_fall_with() -> None:
    outputs = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, 1.0]], dtype=torch.float64)
    targets = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    asked = OwnLoss()
    margin = asked.margin(outputs, targets).requires_grad_()
    loss = torch.nn.functional.softplus(-margin)
    torch.testing.assert_close(asked.of(outputs, targets), loss)
    (slope,) = torch.autograd.grad(loss.sum(), margin)
    torch.testing.assert_close(asked.pull(outputs, targets), -slope)


@pytest.mark.slow
def test_what_is_kept_is_not_measured_again(tmp_path: Path) -> None:
    training, cells = Training("MLP, SGD", SGD, QUICK, OneOutput()), Cells(tmp_path)
    measurement = Measurement(cells, [training], None, seeds=1)
    replace(measurement, limit=0.0, took={}).run()
    names = [work.name for work in measurement.missing()]
    assert len(names) > 2  # nothing was begun
    measurement.run()
    assert measurement.missing() == []
    case, before = training.case(0), {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    cells.path(case, "last").unlink()
    assert [work.name for work in measurement.missing()] == ["last"]
    assert cells.whole(case, tuple(names)) is None
    measurement.run()
    changed = {path for path in tmp_path.iterdir() if path.stat().st_mtime_ns != before[path]}
    assert changed == {cells.path(case, "last")}


def test_the_page_says_what_was_measured() -> None:
    measured, text = read(LINES.read_text("utf-8")), PAGE.read_text("utf-8")
    assert list(measured) == ["one run", "fresh seeds", "TSLOO"]
    assert page(measured, text) == text


# What other programs tell is read as it comes, and who is late or fails is said to be so.


def test_each_kernel_has_a_median_or_a_reason() -> None:
    kernels: list[Kernel] = [("mlp", width, 1, 8, "a method") for width in (1, 2, 3, 4)]
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as stream, open(writing, "wb", buffering=0) as told:
        told.write(b'9.0\n2.0\n4.0\n"ended"\n"too large"\n5.0\n')  # and then nothing, for a call too long
        found = dict(Race(Path(), seconds=0.01).laps("a program", stream, kernels))
    assert found == {kernels[0]: 3.0, kernels[1]: "too large", kernels[2]: "> 0.01 s"}  # the last waits for a new start
