"""The bench prints its tables, and its scores agree with their formulas."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
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
from tests.bench.attribution_case import FIRST_FRESH, QUICK, Case, Cells, Size, Training, changes, fresh_ends
from tests.bench.attribution_page import LINES, PAGE, page, read
from tests.bench.attribution_scores import damping_of, end_of, gauss_newton, influence, last_product, slopes, tracin
from tests.bench.peers import Answer, Racer, median_of

TITLES = (
    *("torch", "Tangent", "A", "A", "Kernels", "Whole", "Language:", "Scale:", "Following:", "Measure:"),
    *("Small", "Attribution,", "Attribution,", "Attribution,"),
)


@pytest.fixture
def _threads() -> Iterator[None]:
    """Restore the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
def test_the_quick_bench_prints_every_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--quick", "--threads=1", "--json", f"--cells={tmp_path / 'cells'}"])
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line and not line[0].isdigit()]  # progress of `scale`
    titles = [line for line in lines if not line.startswith((" ", "cell "))]  # progress of `attribution`
    assert tuple(title.split()[0] for title in titles) == TITLES
    tables = json.loads(printed.out)["tables"]
    assert tuple(table["title"].split()[0] for table in tables) == TITLES[6:]
    assert all(len(row) == len(table["header"]) for table in tables for row in table["rows"])


@pytest.mark.usefixtures("_threads")
def test_json_has_cells(capsys: pytest.CaptureFixture[str]) -> None:
    main(["training", "--quick", "--threads=1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [cell["name"] for cell in found["cells"]] == ["queries: training examples", "queries: other points"]
    assert all(cell["gain"] == cell["peers"]["plain step"] / cell["seconds"] for cell in found["cells"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nosuch", "choose from"),
        ("steps --threads=0", "--threads"),
        ("kernels --seconds=-1", "--seconds"),
        ("kernels --only=stride", "--only is for infinite"),
        ("infinite --only=nosuch", "no row"),
        ("steps --peers=/tmp", "--peers is for"),
        ("attribution --minutes=-1", "--minutes are 0 or more"),
    ],
)
def test_options_without_effect_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words.split(), (*CELLS, *REPORTS))
    assert message in capsys.readouterr().err.splitlines()[-1]


# Scores agree with their formulas, results are kept, and the page agrees with its file.


SGD = ("data=digits", "optimizer=sgd", "optimizer.step_size=0.1", "model.activation=tanh", "model.width=4")
CLASSES = (*SGD, "data.classes=all", "loss=cross_entropy")
SMALL = 1e-12  # a step size that does not change the weights
ROUNDING = 1e-9  # of numbers near 1, after a solve whose condition is at most 1/damping times the examples


def case_of(*words: str, size: Size = QUICK, asked: AbstractAsked | None = None, seed: int = 0) -> Case:
    """Return a training of three steps."""
    return Case(words, size, asked or OneOutput(), seed)


def matrix(case: Case, curved: Tensor) -> Tensor:
    """Return Σᵢ Jᵢᵀ ℓ″ᵢ Jᵢ/N at the end, with ℓ″ of each example."""
    rerun, end = case.rerun, end_of(case.rerun)
    jacobian = jacrev(lambda vector: rerun.outputs(vector, rerun.inputs))(end)
    return torch.einsum("icp,icd,idq->pq", jacobian, curved, jacobian).detach() / rerun.examples


@pytest.mark.slow
def test_tracin_is_the_first_order_of_contributions() -> None:
    case = case_of(*SGD, "path.rule=[left]")
    listener = SilentListener(Path())  # SGD has no second pass
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
    case = case_of(*SGD, f"optimizer.step_size={SMALL}", size=QUICK._replace(steps=1))  # its batch has all examples
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
    expected = [trained(case.rerun_from(FIRST_FRESH + k), weight[[k]])[0] for k in range(2)]
    assert not torch.allclose(expected[0], expected[1], atol=0.1)
    torch.testing.assert_close(fresh_ends(case, weight), torch.stack(expected), rtol=ROUNDING, atol=ROUNDING)


def test_minus_the_derivative_by_the_margin_is_the_pull() -> None:
    outputs = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, 1.0]], dtype=torch.float64)
    targets = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    asked = OwnLoss()
    margin = asked.margin(outputs, targets).requires_grad_()
    loss = torch.nn.functional.softplus(-margin)
    torch.testing.assert_close(asked.of(outputs, targets), loss)
    (slope,) = torch.autograd.grad(loss.sum(), margin)
    torch.testing.assert_close(asked.pull(outputs, targets), -slope)


@pytest.mark.slow
def test_kept_cells_are_not_computed_again(tmp_path: Path) -> None:
    training, cells = Training("MLP, SGD", SGD, QUICK, OneOutput()), Cells(tmp_path)
    measurement = Measurement(cells, [training], None, seeds=1)
    replace(measurement, limit=0.0).run()
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


def test_the_page_agrees_with_its_file() -> None:
    measured, text = read(LINES.read_text("utf-8")), PAGE.read_text("utf-8")
    assert list(measured) == ["one run", "fresh seeds", "TSLOO"]
    assert page(measured, text) == text


# A program answers with seconds or a reason. One that is late or dies is stopped, and started again for the next
# kernel.


PROGRAM = """
import json, sys, time
for line in sys.stdin:
    kind, seconds = json.loads(line)
    if kind == "dies":
        break
    time.sleep(100 if kind == "late" else 0)
    print(json.dumps("too large" if kind == "large" else seconds), flush=True)
"""


@pytest.mark.parametrize(
    ("kernel", "answer"),
    [(("fast", 3.0), 3.0), (("large", 1.0), "too large"), (("dies", 1.0), "it died"), (("late", 1.0), "> 0.01 s")],
)
def test_each_kernel_has_a_median_or_a_reason(kernel: tuple[str, float], answer: Answer) -> None:
    is_late = kernel[0] == "late"
    with Racer((sys.executable, "-c", PROGRAM), seconds=0.01 if is_late else 60.0) as racer:
        patience = racer.first
        if is_late:
            racer.first = 0.0
        assert median_of(racer, kernel, times=3) == answer
        racer.first = patience
        assert median_of(racer, ("fast", 2.0), times=1) == 2.0
