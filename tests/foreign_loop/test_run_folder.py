"""A followed loop that was attributed is a run, which everything reads that reads runs."""

from __future__ import annotations

from pathlib import Path

import matplotlib.figure  # noqa: F401  pictures are then drawn here, not by a process beside
import numpy as np
import pytest
import torch
from torch import nn

import ntkexp
from ntkexp.cli.main import run as command
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import find_trace, load_trace
from ntkexp.mistake import Mistake
from ntkexp.report.explain import explain, format_explanations, worst
from ntkexp.report.sentence import sentence
from tests.foreign_loop import loops
from tests.foreign_loop.loops import Loop, followed, loop

NET = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).double()
"""


@pytest.fixture(scope="module")
def attributed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Path]:
    """A loop, and the folder of the run that was made of it."""
    given, folder = loop(loops.adamw), tmp_path_factory.mktemp("outputs") / "runs" / "mine"
    followed(given, loops.scheduled_and_clipped, to=folder, every=3).attribute()
    return given, folder


def test_its_folder_is_a_run(attributed: tuple[Loop, Path]) -> None:
    given, folder = attributed
    run = ntkexp.load_run(folder)
    (row,) = run.ladder
    assert (row.split, row.machine, row.exact) == ("probe", "secant", True)
    parts, decay, by_step = (run.contributions[name] for name in ("contribution", "decay", "by_step"))
    assert parts.dims == ("probe", "out", "example")
    assert by_step.dims == ("probe", "out", "step")
    change = run.predictions.sel(machine="f_T") - run.predictions.sel(machine="f_0")
    size = float(abs(change).max())
    assert abs(parts.sum("example") + decay - change).max() <= 1e-12 * size
    assert abs(by_step.sum("step") - change).max() <= 1e-12 * size
    with torch.no_grad():
        np.testing.assert_array_equal(run.predictions.sel(machine="f_T"), given.model(given.queries))
    assert run.metrics["step"].tolist() == list(range(loops.STEPS))
    assert run.metrics["gradient_factor"].lt(1).any()  # clipping is seen
    assert run.metrics[["gradient_error", "rule_error"]].to_numpy().max() < 1e-12
    assert run.metrics["closure"].max() < 1e-9  # relative to steps, of which the last are small
    assert "8 steps of a loop were followed" in run.outcome


def test_examples_are_shown_as_rows(attributed: tuple[Loop, Path]) -> None:
    _, folder = attributed
    run = ntkexp.load_run(folder)
    found = explain(run, "probe", worst(run, "probe", 1))
    name = found[0].parts[0].example.name
    place = run.contributions["example"].to_numpy().tolist().index(name)
    told = format_explanations(found, 3)
    assert name in told
    assert f"{run.data['train_shown'][place][0]:.3g}" in told
    assert found[0].prediction == pytest.approx(found[0].start + found[0].sum + found[0].decay, abs=1e-12)


@pytest.mark.slow
def test_a_later_process_attributes_it_alike(
    attributed: tuple[Loop, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = attributed
    before = ntkexp.load_run(folder).contributions["contribution"].to_numpy()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net_of_mine.py").write_text(NET)
    model = "--model=net_of_mine.py:build"
    assert command(["attribute", str(folder), model]) == 2
    assert "add `--trust net_of_mine.py`" in capfd.readouterr().err
    assert command(["attribute", str(folder)]) == 2
    assert "give a function that builds it, --model=" in capfd.readouterr().err
    assert command(["attribute", str(folder), model, "--trust=net_of_mine.py"]) == 0
    assert "reproduces the trained network to rounding" in capfd.readouterr().out
    np.testing.assert_array_equal(ntkexp.load_run(folder).contributions["contribution"].to_numpy(), before)


def test_what_is_not_the_same_is_refused(attributed: tuple[Loop, Path], tmp_path: Path) -> None:
    _, folder = attributed
    with pytest.raises(Mistake, match=r"not the one that was followed in .*mine: its '2\.bias' is missing"):
        load_trace(find_trace(folder), nn.Sequential(nn.Linear(5, 8)))
    with pytest.raises(Mistake, match="holds no trace"):
        find_trace(tmp_path)


def test_a_model_that_nobody_called_is_refused(tmp_path: Path) -> None:
    given = loop(loops.sgd)
    for weight in given.model.parameters():
        weight.grad = torch.zeros_like(weight)
    with follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "run") as trace:
        given.step()
    with pytest.raises(Mistake, match="never called with gradients enabled"):
        trace.attribute()


def test_what_no_step_did_stands_in_all_that_is_read_of_a_run(tmp_path: Path) -> None:
    """An average that is loaded after the last step moves the outputs, and the sum of examples misses that."""
    given = loop(loops.momentum)
    with follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "runs" / "mine") as trace:
        loops.plain(given, torch.arange(6))
        with torch.no_grad():
            for weight in given.model.parameters():
                weight.mul_(0.5)
    with pytest.raises(
        Mistake, match=r"effects of examples lead to the last step, and '0\.weight', and 5 more, changed"
    ):
        trace.attribute(effects=True)
    found = trace.attribute()
    run = ntkexp.load_run(tmp_path / "runs" / "mine")
    (row,) = run.ladder
    assert not row.exact
    assert "of what changed (`outside`) and is no example's" in row.note
    assert row.note in run.outcome
    assert row.note in sentence(run.ladder)
    np.testing.assert_array_equal(run.contributions["outside"], found["outside"])
    with torch.no_grad():
        np.testing.assert_allclose(run.predictions.sel(machine="f_T"), given.model(given.queries), rtol=1e-12)
    (explained,) = explain(run, "probe", [0])
    assert abs(explained.rest) < 1e-12
    assert "outside of all steps" in format_explanations([explained], 3)


@pytest.mark.slow
def test_tokens_are_shown_as_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)).double()
    optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), torch.randint(9, (6, 3))
    with follow(model, optimizer, queries=tokens[:2], to=tmp_path / "runs" / "words") as trace:
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).square().sum().backward()
            optimizer.step()
    trace.attribute(decode=lambda row: "".join("abcdefghi"[token] for token in row))
    run = ntkexp.load_run(tmp_path / "runs" / "words")
    (found,) = explain(run, "probe", [0])
    word = "".join("abcdefghi"[token] for token in tokens[0])
    assert found.point.text == word
    assert word in format_explanations([found], 6)
