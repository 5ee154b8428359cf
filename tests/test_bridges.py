"""Scores in the shapes of other libraries: rows and columns are theirs, numbers are those that were found.

The last test runs quanda and dattri themselves; tests/others.txt says how to install them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import ntkexp
from ntkexp.bridges import DattriAttributor, FollowedScores, QuandaExplainer
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.mistake import Mistake
from ntkexp.model.foreign import load_torchvision
from ntkexp.report.scores import Attribution

CLASSES, COUNT = 3, 24
LABELS = torch.arange(COUNT) % CLASSES


def points(count: int, seed: int) -> Tensor:
    """Points around a centre for each class."""
    centres = 2 * torch.eye(CLASSES, 4)[torch.arange(count) % CLASSES]
    return centres + 0.3 * torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


DATA, QUERIES, TARGETS = TensorDataset(points(COUNT, 0), LABELS), points(6, 1), LABELS[:6]


def trained(queries: Tensor = QUERIES, **options: Any) -> tuple[nn.Module, Attribution]:
    """A network and what made its outputs at the queries, in some order of its examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with ntkexp.follow(model, optimizer, queries=queries, **options) as trace:
        for x, y in [batch for _ in range(3) for batch in DataLoader(DATA, 8, shuffle=True)]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval(), trace.attribute(quiet=True)


@pytest.fixture(scope="module")
def followed() -> tuple[nn.Module, Attribution]:
    return trained(ids="dataset")


def by_index(found: Attribution) -> FollowedScores:
    return FollowedScores(found, QUERIES, range(COUNT))


def test_an_explainer_finds_points_and_examples_again(followed: tuple[nn.Module, Attribution]) -> None:
    """Points in any order and number; columns in the order of the data set, after any order of training."""
    model, found = followed
    chosen = torch.tensor([4, 0, 0, 3])
    scores = QuandaExplainer(model, DATA, scores=by_index(found)).explain(QUERIES[chosen], TARGETS[chosen])
    ordered = found["contribution"].sel(example=[str(k) for k in range(COUNT)]).to_numpy()
    np.testing.assert_array_equal(scores, ordered[chosen, TARGETS[chosen]])


def test_examples_are_found_by_what_they_hold(followed: tuple[nn.Module, Attribution]) -> None:
    model, found = trained()
    explained = QuandaExplainer(model, DATA, scores=FollowedScores(found, QUERIES)).explain(QUERIES, TARGETS)
    expected = QuandaExplainer(*(followed[0], DATA), scores=by_index(followed[1])).explain(QUERIES, TARGETS)
    np.testing.assert_array_equal(explained, expected)  # both trainings are equal


def test_an_attributor_gives_the_same_with_its_axes_swapped(followed: tuple[nn.Module, Attribution]) -> None:
    model, found = followed
    loaders = DataLoader(DATA, 5), DataLoader(TensorDataset(QUERIES, TARGETS), 4)
    scores = DattriAttributor(by_index(found)).attribute(*loaders)
    expected = QuandaExplainer(model, DATA, scores=by_index(found)).explain(QUERIES, TARGETS)
    np.testing.assert_array_equal(scores, expected.T)


def test_a_loss_counts_as_better_when_it_is_lower() -> None:
    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return nn.functional.cross_entropy(outputs, TARGETS, reduction="none")

    model, found = trained(measure=loss)
    known = FollowedScores(found, QUERIES, lower_is_better=True)
    scores = QuandaExplainer(model, DATA, scores=known).explain(QUERIES, TARGETS)
    assert scores.shape == (6, COUNT)
    np.testing.assert_allclose(scores.sum(1), -found["contribution"].sum("example")[:, 0], rtol=0, atol=1e-6)
    same = LABELS[None] == TARGETS[:, None]
    assert scores[same].mean() > 0 > scores[~same].mean()  # one's own class helps


def test_self_influence_is_the_score_of_an_example_at_itself() -> None:
    model, found = trained(DATA.tensors[0], ids="dataset")
    known = FollowedScores(found, DATA.tensors[0], range(COUNT))
    scores = QuandaExplainer(model, DATA, scores=known).self_influence(batch_size=7)
    parts = found["contribution"].sel(example=[str(k) for k in range(COUNT)]).to_numpy()
    np.testing.assert_array_equal(scores, [parts[k, LABELS[k], k] for k in range(COUNT)])


def shuffled(known: FollowedScores) -> Any:
    return DattriAttributor(known).attribute(DataLoader(DATA, 5, shuffle=True), DataLoader(TensorDataset(QUERIES)))


REFUSED: dict[str, Callable[[nn.Module, FollowedScores], Any]] = {
    "1 of 2 test points are not among the": lambda model, known: QuandaExplainer(model, DATA, scores=known).explain(
        torch.stack([QUERIES[0], QUERIES[1] + 1]), TARGETS[:2]
    ),
    "give the targets of the test points": lambda model, known: DattriAttributor(known).attribute(
        DataLoader(DATA, 5), DataLoader(TensorDataset(QUERIES), 4)
    ),
    "the model returns other outputs": lambda model, known: QuandaExplainer(
        nn.Linear(4, CLASSES), DATA, scores=known
    ).explain(QUERIES, TARGETS),
    "24 of 24 training examples were not used": lambda model, known: QuandaExplainer(
        model, DATA, scores=replace(known, examples=None)
    ),
    "there are 24 names for a data set of 3": lambda model, known: QuandaExplainer(
        model, Subset(DATA, range(3)), scores=known
    ),
    "several rows of the data set have the same name": lambda model, known: QuandaExplainer(
        model, Subset(DATA, [0, 1, 0]), scores=replace(known, examples=None)
    ),
    "load without shuffle=": lambda model, known: shuffled(known),
    "the model has one output": lambda model, known: replace(known, found=known.found.isel(out=[0])).rows(
        QUERIES, TARGETS, ["0"]
    ),
    "there are 5, but scores of 6": lambda model, known: replace(known, queries=QUERIES[:5]),
    "a test point was not attributed": lambda model, known: replace(
        known, found=known.found.assign(contribution=lambda data: data["contribution"].where(data["query"] > 0))
    ).rows(QUERIES, TARGETS, ["0"]),
    "scores=": lambda model, known: QuandaExplainer(model, DATA),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_known_is_refused(said: str, followed: tuple[nn.Module, Attribution]) -> None:
    model, found = followed
    with pytest.raises(Mistake) as refused:
        REFUSED[said](model, by_index(found))
    assert said in str(refused.value)


@pytest.mark.others
@pytest.mark.filterwarnings("ignore")  # of other libraries
def test_quanda_and_dattri_take_them(followed: tuple[nn.Module, Attribution], tmp_path: Path) -> None:
    """A benchmark of quanda, and metrics of both unmodified libraries."""
    load_torchvision()
    from dattri.metric import lds  # noqa: PLC0415  both are slow, and are missing in other tests
    from quanda.benchmarks.downstream_eval import ClassDetection  # noqa: PLC0415

    model, found = followed

    # the top example has the class of the point, since classes lie apart
    torch.save(model.state_dict(), tmp_path / "model.pt")
    benchmark = ClassDetection(
        model=model,
        train_dataset=DATA,
        eval_dataset=TensorDataset(QUERIES, TARGETS),
        checkpoints=[str(tmp_path / "model.pt")],
        checkpoints_load_func=lambda net, path: net.load_state_dict(torch.load(path)),
        use_predictions=True,
    )
    result = benchmark.evaluate(QuandaExplainer, {"scores": by_index(found)}, batch_size=4)
    assert result["score"] == 1.0

    # sums of scores over subsets are a linear datamodel: their own sums are predicted exactly
    loaders = DataLoader(DATA, 5), DataLoader(TensorDataset(QUERIES, TARGETS), 4)
    scores = DattriAttributor(by_index(found)).attribute(*loaders)
    subsets = torch.stack([torch.randperm(COUNT)[:12] for _ in range(20)])
    truth = torch.stack([scores[subset].sum(0) for subset in subsets])
    correlations, _ = lds(scores, (truth, subsets))
    np.testing.assert_allclose(correlations, 1.0, rtol=0, atol=1e-12)
