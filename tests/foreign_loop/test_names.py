"""Names of examples (ids="dataset": their indices in the Dataset), and followed loops as runs that others read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, dataloader as loading
from torch.utils.data._utils.collate import default_collate

import ntkexp
from ntkexp.cli.main import run as command
from ntkexp.foreign_loop.again import LoopAgain
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.loop_breakdown import loop_without
from ntkexp.foreign_loop.trace import Trace, find_trace, load_trace
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.removal.rerun import RerunAt, rerun_of
from ntkexp.removal.retraining import changes
from ntkexp.report.explain import explain, format_explanations, worst_points
from ntkexp.report.scores import Attribution
from ntkexp.report.sentence import ladder_sentence
from tests.foreign_loop import loops
from tests.foreign_loop.loops import Loop, apart, fitted, followed, loop
from tests.removal.problems import BATCH, CLIP, DECAY, GROUP, split
from tests.run.small import Ran, ran

COUNT = 11


def data(*, twins: bool = False) -> TensorDataset:
    """Rows that hold their own index; two of them are equal if there are twins."""
    x = torch.arange(COUNT, dtype=torch.float64)[:, None] + torch.tensor([0.0, 0.5], dtype=torch.float64)
    if twins:
        x[7] = x[3]
    return TensorDataset(x, x.sum(1, keepdim=True))


def trained(loader: Any, given: Callable[[Tensor], Tensor] = lambda x: x, split: int = COUNT) -> Trace:
    """Two epochs, each batch in parts."""
    net = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with ntkexp.follow(net, optimizer, queries=torch.ones(1, 2).double(), ids="dataset") as trace:
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                for part, target in zip(x.split(split), y.split(split), strict=True):
                    (net(given(part)) - target).square().sum().backward()
                optimizer.step()
    return trace


WORKERS = {"batch_size": 3, "shuffle": True, "num_workers": 2}


@pytest.mark.parametrize(
    ("settings", "split"),
    [
        ({"batch_size": 3, "shuffle": True}, COUNT),
        ({"batch_size": 4, "shuffle": True, "drop_last": True}, COUNT),
        ({"batch_size": 4, "shuffle": True}, 2),
        ({"batch_size": 1}, COUNT),
        pytest.param(WORKERS, COUNT, marks=pytest.mark.slow),
        pytest.param(WORKERS | {"persistent_workers": True, "prefetch_factor": 3}, 2, marks=pytest.mark.slow),
    ],
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, dict) else str(each),
)
def test_names_are_the_indices_of_the_sampler(settings: dict[str, Any], split: int) -> None:
    trace = trained(DataLoader(data(), **settings), split=split)
    calls = [call for step, _ in trace.steps.forwards() for call in step.calls]
    for call in calls:
        assert isinstance(call.inputs, Tensor)
        assert call.names == tuple(str(int(row[0])) for row in call.inputs)  # the rows hold their index
    assert sum(len(call.names) for call in calls) == 2 * (COUNT - COUNT % 4 if "drop_last" in settings else COUNT)
    assert not {"_ntkexp_asked"} & set(vars(loading._BaseDataLoaderIter))


class Endless(IterableDataset[tuple[Tensor, ...]]):
    """Has no indices."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(data())


def four(**more: Any) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=4, **more)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: trained([data()[:4]]), "no DataLoader was read"),
        (lambda: trained([*four()]), "no DataLoader was read while the loop was followed"),
        (lambda: trained(DataLoader(Endless(), batch_size=4)), "an IterableDataset, which has no indices"),
        (lambda: trained(four(), lambda x: x / 2), "inputs of the model are not rows of a batch as they"),
        (lambda: trained(four(), lambda x: x.flip(0)), "inputs of the model are not rows of a batch"),
        (lambda: trained(DataLoader(data(twins=True), batch_size=11), split=1), "occur at several places of a batch"),
        (lambda: trained(four(collate_fn=lambda rows: default_collate(rows[::-1]))), "its own collate_fn"),  # type: ignore[no-untyped-call]
    ],
)
def test_rows_without_a_known_index_are_refused(act: Callable[[], object], said: str) -> None:
    usual = dict(vars(loading._BaseDataLoaderIter))
    with pytest.raises(Mistake, match=f"ids='dataset': .*{said}.*; let the Dataset return its index too"):
        act()
    assert dict(vars(loading._BaseDataLoaderIter)) == usual


# --- An attributed loop is a run, for everything that reads runs.


NET = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).double()
"""


@pytest.fixture(scope="module")
def attributed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Path]:
    """A loop, and the folder of its run."""
    given, folder = loop(loops.adamw), tmp_path_factory.mktemp("outputs") / "runs" / "mine"
    followed(given, loops.scheduled_and_clipped, to=folder, every=3).attribute()
    return given, folder


def test_a_call_for_an_evaluation_needs_no_names() -> None:
    """The loop evaluates other rows with gradients enabled, and never calls backward."""
    given, rows = loop(loops.sgd), dict[bytes, int]()
    for index, row in enumerate(given.x):
        rows[row.numpy().tobytes()] = index

    def row_of(call: SeenCall) -> list[int]:
        (x,) = call.args
        assert isinstance(x, Tensor)
        return [rows[row.numpy().tobytes()] for row in x]

    def evaluated(given: Loop, batch: Tensor) -> None:
        loops.plain(given, batch)
        given.model(given.queries)

    def trained(given: Loop, batch: Tensor) -> None:
        given.model(given.queries).sum().backward()
        given.step()

    found = followed(given, evaluated, ids=row_of).attribute()
    assert {*found["example"].to_numpy()} <= {str(index) for index in range(loops.EXAMPLES)}
    with pytest.raises(KeyError):
        followed(loop(loops.sgd), trained, ids=row_of)


def test_its_folder_is_a_run(attributed: tuple[Loop, Path]) -> None:
    given, folder = attributed
    run = ntkexp.load_run(folder)
    (row,) = run.ladder
    assert (row.split, row.machine, row.exact) == ("query", "secant", True)
    parts, decay, by_step = (run.contributions[name] for name in ("contribution", "decay", "by_step"))
    assert parts.dims == ("query", "out", "example")
    assert by_step.dims == ("query", "out", "step")
    change = run.predictions.sel(machine="f_T") - run.predictions.sel(machine="f_0")
    size = float(abs(change).max())
    assert abs(parts.sum("example") + decay - change).max() <= 1e-12 * size
    assert abs(by_step.sum("step") - change).max() <= 1e-12 * size
    with torch.no_grad():
        np.testing.assert_array_equal(run.predictions.sel(machine="f_T"), given.model(given.queries))
    assert run.metrics["step"].tolist() == list(range(loops.STEPS))
    assert run.metrics["gradient_factor"].lt(1).any()  # clipping is seen
    assert run.metrics[["gradient_error", "rule_error"]].to_numpy().max() < 1e-12
    assert run.metrics["closure"].max() < 1e-9  # relative to steps, and the last steps are small
    assert "8 steps of a loop were followed" in run.outcome


def test_examples_are_shown_as_rows(attributed: tuple[Loop, Path]) -> None:
    _, folder = attributed
    run = ntkexp.load_run(folder)
    found = explain(run, "query", worst_points(run, "query", 1))
    strongest = found[0].parts[0].example
    place = strongest.index
    told = format_explanations(found, 3)
    assert strongest.name == f"#{place}"
    assert f"\n#{place} " in told
    assert f"{run.data['train_shown'][place][0]:.3g}" in told
    assert found[0].prediction == pytest.approx(found[0].start + found[0].sum + found[0].no_example["decay"], abs=1e-12)


def test_the_explanation_in_memory_is_that_of_the_run(tmp_path: Path) -> None:
    found = followed(loop(loops.adamw), loops.scheduled_and_clipped, to=tmp_path / "run").attribute(by="module")
    run = ntkexp.load_run(tmp_path / "run")
    for query in range(found.sizes["query"]):
        (stored,) = explain(run, "query", [query])
        assert repr(found.explain(query)) == repr(stored)
        in_memory, in_run = found.explain(query).as_json(3), stored.as_json(3)
        assert in_memory.pop("positions", None) == in_run.pop("positions", None)
        assert in_memory == in_run
    assert repr(found.explain(-1)) == repr(found.explain(found.sizes["query"] - 1))
    other = found.explain(0, out=1)
    assert other.start + other.sum + sum(other.no_example.values()) == pytest.approx(other.prediction, abs=1e-12)
    assert str(other).startswith("query 0: f[1] = ")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda found: found.explain(3), "query=3: it takes a number below 3"),
        (lambda found: found.explain(0, out=9), "out=9: there is no such output"),
        (lambda found: found.isel(query=0).explain(0), "with all their axes; for a run in a folder, use"),
        (lambda found: found.drop_vars("start").explain(0), "it needs the contributions of a followed loop"),
    ],
)
def test_what_cannot_be_explained_is_refused(act: Callable[[Attribution], object], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        act(followed(loop(loops.sgd), loops.plain).attribute())


@pytest.mark.slow
def test_a_later_process_finds_the_same(
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
    told = capfd.readouterr().out
    assert "reproduces the trained network to rounding" in told
    assert "examples: numbered in order of first use; follow(…, ids='dataset') names them by their index" in told
    np.testing.assert_array_equal(ntkexp.load_run(folder).contributions["contribution"].to_numpy(), before)


def test_another_model_is_refused(attributed: tuple[Loop, Path], tmp_path: Path) -> None:
    _, folder = attributed
    with pytest.raises(Mistake, match=r"not the one that was followed in .*mine: '2\.bias' is missing"):
        load_trace(find_trace(folder), nn.Sequential(nn.Linear(5, 8)))
    other = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 3))
    with pytest.raises(Mistake, match=r"'0\.weight' is missing or differs"):  # the first in the module's order
        load_trace(find_trace(folder), other)
    with pytest.raises(Mistake, match="holds no trace"):
        find_trace(tmp_path)


def test_a_model_that_was_not_called_is_refused(tmp_path: Path) -> None:
    given = loop(loops.sgd)
    for weight in given.model.parameters():
        weight.grad = torch.zeros_like(weight)
    with ntkexp.follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "run") as trace:
        given.step()
    with pytest.raises(Mistake, match="never called with gradients enabled"):
        trace.attribute()


def test_a_run_shows_the_change_outside_the_steps(tmp_path: Path) -> None:
    """Weights that are halved after the last step move the outputs, and the sum of examples does not contain that."""
    given = loop(loops.momentum)
    with ntkexp.follow(given.model, given.optimizers, queries=given.queries, to=tmp_path / "runs" / "mine") as trace:
        loops.plain(given, torch.arange(6))
        with torch.no_grad():
            for weight in given.model.parameters():
                weight.mul_(0.5)
    with pytest.raises(Mistake, match=r"'0\.weight', and 5 more, changed after the last step"):
        trace.attribute(effects=True)
    found = trace.attribute()
    run = ntkexp.load_run(tmp_path / "runs" / "mine")
    (row,) = run.ladder
    assert not row.exact
    assert "of the change (`outside`), and no example did" in row.note
    assert row.note in run.outcome
    assert row.note in ladder_sentence(run.ladder)
    np.testing.assert_array_equal(run.contributions["outside"], found["outside"])
    with torch.no_grad():
        np.testing.assert_allclose(run.predictions.sel(machine="f_T"), given.model(given.queries), rtol=1e-12)
    (explained,) = explain(run, "query", [0])
    assert abs(explained.rest) < 1e-12
    assert "changes outside the steps" in format_explanations([explained], 3)


@pytest.mark.slow
def test_tokens_are_shown_as_text(tmp_path: Path) -> None:
    model, tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2)).double(), torch.randint(9, (6, 3))
    folder, optimizer = tmp_path / "runs" / "words", torch.optim.SGD(model.parameters(), lr=0.1)
    trace = fitted(model, optimizer, lambda _: model(tokens).square().sum(), queries=tokens[:2], to=folder)
    trace.attribute(decode=lambda row: "".join("abcdefghi"[token] for token in row))
    (found,) = explain(ntkexp.load_run(folder), "query", [0])
    word = "".join("abcdefghi"[token] for token in tokens[0])
    assert found.point.text == word
    assert word in format_explanations([found], 6)


# --- A run of the runner and the same loop, written by hand and followed, have the same parts.


DATA = ("data.classes=[0,1,2]", "data.train=12", "loss=cross_entropy", "model.activation=tanh", "model.width=8")
WORDS = (*DATA, BATCH, "optimizer.step_size=0.05", "steps=6", "path.rule=[secant]", "path.attributed=3")
Maker = Callable[[Iterable[nn.Parameter]], Optimizer]
CASES: dict[str, tuple[str, str, Maker]] = {
    "sgd": ("sgd", DECAY, lambda p: SGD(p, lr=0.05, weight_decay=0.05)),
    "momentum": ("momentum", "optimizer.dampening=0.3", lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.3)),
    "nesterov": ("nesterov", DECAY, lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.05)),
    "clipped": ("momentum", CLIP, lambda p: SGD(p, lr=0.05, momentum=0.9)),
    "adam": ("adam", DECAY, lambda p: Adam(p, lr=0.05, weight_decay=0.05)),
    "amsgrad": ("adam", "optimizer.amsgrad=true", lambda p: Adam(p, lr=0.05, amsgrad=True)),
    "adamw": ("adamw", DECAY, lambda p: AdamW(p, lr=0.05, weight_decay=0.05)),
}
CLOSE = 1e-12  # of the largest part: six steps of some hundred roundings each, and by Adam quotients of small numbers


def by_hand(run: Ran, case: str, to: Path | None = None) -> Trace:
    """The training of the run as people write it, followed."""
    problem, optimizer = deepcopy(run.setting.problem), CASES[case][2]
    model, targets = problem.module, problem.targets[: problem.train]

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return -(outputs.log_softmax(1) * targets[[int(name) for name in call.ids]]).sum(1)

    steps, rows = optimizer(model.parameters()), run.setting.experiment.optimizer.batch_indices
    drawn = [rows(step, problem.train, run.setting.experiment.seed) for step in range(6)]
    batches = [batch for batch in drawn if batch is not None]
    queries = problem.inputs[run.setting.domain.attributed]
    assert len(batches) == 6
    with ntkexp.follow(model, steps, queries=queries, loss=loss, ids=lambda _: batch.tolist(), to=to) as trace:
        for batch in batches:
            steps.zero_grad()
            losses = -(model(problem.inputs[batch]).log_softmax(1) * targets[batch]).sum(1)
            losses.mean().backward()
            if case == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            steps.step()
    return trace


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "adamw" else pytest.mark.slow) for case in CASES]
)
def test_contributions_effects_and_a_removal_are_the_runners(case: str, tmp_path: Path) -> None:
    option, word, _ = CASES[case]
    asked = ("path.effects=derivative", "path.by=parameter", "ladder.machine=[secant]")
    run = ran(f"optimizer={option}", *WORDS, word, *asked)
    domain, effects = run.setting.domain, run.outcome.effects
    found = (
        by_hand(run, case)
        .attribute(effects="derivative", by="parameter", quiet=True)
        .sel(example=[str(k) for k in range(12)])
    )
    assert apart(found["contribution"], run.contributions("secant")[domain.rows]) <= CLOSE
    components = run.outcome.by_component["secant"]
    assert list(components.components) == found["component"].to_numpy().tolist()
    assert apart(found["by_component"], components.parts[domain.rows]) <= CLOSE
    decay = torch.from_numpy(found["decay_by_component"].to_numpy()) - components.decay[domain.rows]
    assert decay.abs().max() <= CLOSE * components.parts[domain.rows].abs().max()
    assert apart(found["by_component_step"], components.totals.stacked().movedim(0, 2)[domain.rows]) <= CLOSE
    assert effects is not None
    known = ~effects.values[domain.attributed].isnan()
    derivative = torch.from_numpy(found["effect"].to_numpy())
    assert known.any()
    assert apart(derivative[known], effects.values[domain.attributed][known]) <= CLOSE

    train = partial(by_hand, run, case, tmp_path / "loop")
    trace, group = train(), [[3], GROUP]
    training = rerun_of(run.setting.experiment, run.setting.problem, run.setting.descent.step_size, 6)
    points = run.setting.problem.inputs[domain.attributed]
    places = [[trace.examples[str(k)] for k in each] for each in group]
    expected, _ = changes(RerunAt(training, points), group)
    assert apart(changes(LoopAgain(train, trace, "renormalised"), places)[0], expected) <= CLOSE

    theirs = loop_without(find_trace(tmp_path / "loop"), train, "renormalised", places[1], [0, 1, 2], Silent())
    ours = split(training, points, training.unit_weights, training.without(GROUP))
    assert apart(theirs.shares.reshape(-1, len(GROUP)), ours.shares[:, GROUP]) <= CLOSE
