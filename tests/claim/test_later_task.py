"""What is asked of tasks that are learned in turn, against what is known of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ntkexp.claim.papers import LaterTask
from ntkexp.claim.papers.later_tasks import share_of_tenth
from ntkexp.claim.quantity import Measured
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.report.forgetting import foretold
from ntkexp.report.run import Run, load_run
from ntkexp.run.execute import execute
from tests.run.small import ran, small
from tests.run.test_forgetting import HAND

ROUNDING = 1e-12  # sums over 20 steps of numbers near 1
TASKS = ("data=sequence", "ladder.machine=[]", "path.rule=[secant]", "path.count=2")
FACTS = ("closure", "forgetting", "top_share", "switch", "shuffled", "selectivity", "gained")


def cued(**fields: float) -> str:
    """Both tasks of a seed in turn."""
    told = "".join(f",{name}:{value}" for name, value in fields.items())
    tasks = ",".join(f"{{_target_:ntkexp.data.Cued,task:{task}{told}}}" for task in (1, 2))
    return f"data.phases=[{tasks}]"


def finished(place: Path, *words: str) -> Run:
    asked = (*TASKS, *words)
    return load_run(execute(small(*asked), asked, place, False, Silent(), pictures=False))


def facts(run: Run, *names: str) -> dict[str, float]:
    table = pd.DataFrame({"runs": ["runs"], "run": [run.name], "seed": [0]})
    found = LaterTask.model_validate({"facts": names}).of(Measured(table, {run.name: run}))
    return dict(zip(found["quantity"], found["value"], strict=True))


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A linear model, whose kernel stays."""
    return finished(tmp_path_factory.mktemp("linear"), "model=linear", "init.alpha=3", "init.centred=true")


def test_the_kernel_of_a_linear_model_foretells_all_of_it(linear: Run) -> None:
    found = facts(linear, *FACTS[:-1])
    assert 0 < found["closure"] < ROUNDING
    assert found["shuffled"] < found["switch"] == 1.0
    told, change = foretold(linear, 2), linear.contributions["change"].sel(phase=2).to_numpy()
    assert told is not None
    assert np.abs(told - change).max() < ROUNDING < 1e-3 * np.abs(change).max()
    assert np.isnan(found["selectivity"])  # there are no units between inputs and readout


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("optimizer", {"_target_": "ntkexp.optimizer.SGD"}),
        ("optimizer", {"weight_decay": 0.1}),
        ("optimizer", {"layers": {"network.1": 2.0}}),
        ("loss", {"_target_": "ntkexp.loss.Logistic"}),
    ],
)
def test_what_no_kernel_foretells_is_refused(part: str, told: dict[str, object], linear: Run) -> None:
    other = replace(linear, config=linear.config | {part: linear.config[part] | told})
    with pytest.raises(Mistake, match="keeps no kernel from which a change could be foretold; use optimizer=gd"):
        facts(other, "switch")


def test_what_was_lost_is_what_the_log_says(tmp_path: Path) -> None:
    """Targets are −1 and 1, so that the mean ½‖y‖² is ½."""
    run = finished(tmp_path)
    loss = run.metrics["loss_probe_1"]
    rise = loss.iloc[-1] - loss[run.metrics["phase"] == 2].iloc[0]
    assert rise > 0.01
    found = facts(run, *FACTS)
    assert found["forgetting"] == pytest.approx(2 * rise, rel=ROUNDING)
    assert found["selectivity"] - found["gained"] == pytest.approx(run.metrics["selectivity"][0], rel=ROUNDING)


def test_the_worst_tenth_of_the_later_examples() -> None:
    """Of three, the one worst: a half of ⅞."""
    assert share_of_tenth(HAND) == 0.5 / 0.875


def test_a_run_without_the_tasks_is_refused(linear: Run) -> None:
    for quantity, advice in ((LaterTask(during=3), "learns 2 tasks"), (LaterTask(task=2), "before the later one")):
        with pytest.raises(Mistake, match=advice):
            quantity.measure(linear)
    whole = replace(linear)
    vars(whole)["contributions"] = linear.contributions.drop_vars("by_phase")
    with pytest.raises(Mistake, match="has no tasks with probe points; use data=sequence"):
        LaterTask().measure(whole)


def test_units_that_hear_no_cue_are_tuned_to_no_task() -> None:
    rows = ran(*TASKS, cued(cue=0), "data.standardise=none", "model.depth=1").memory.rows
    assert {row["selectivity"] for row in rows if "selectivity" in row} == {0.0}


def test_at_large_scale_units_stay_as_they_were() -> None:
    def moved(alpha: float) -> float:
        words = ("data.standardise=none", "model.depth=1", "init.centred=true", f"init.alpha={alpha}")
        first, *_, last = (
            row["selectivity"] for row in ran(*TASKS, cued(), *words).memory.rows if "selectivity" in row
        )
        assert first is not None
        assert last is not None
        return abs(last - first)

    assert moved(1000.0) < 1e-4 < moved(0.1)


def test_selectivity_is_that_of_the_units_before_the_readout() -> None:
    found = ran(*TASKS, "model.depth=2", "init.antisymmetric=true")
    problem, weights = found.setting.problem, dict(found.outcome.weights)
    network = problem.module.network
    assert isinstance(network, torch.nn.Sequential)
    before = network[:-1]
    known = {name: weights[f"network.{name}"] for name, _ in before.named_parameters()}
    parts = [problem.inputs[place] for place in problem.phases["probe"]]
    one, other = (torch.func.functional_call(before, known, (part,)).std(0) for part in parts)
    expected = float((one - other).abs().sum() / (one + other).sum())
    assert found.memory.rows[-1]["selectivity"] == pytest.approx(expected, rel=ROUNDING)
