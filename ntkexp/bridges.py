"""Contributions and effects of a training that was followed, in the shapes of other libraries.

    QuandaExplainer    explain(test_data, targets)                    [test, train], for quanda's benchmarks
    DattriAttributor   attribute(train_dataloader, test_dataloader)   [train, test], for dattri's metrics

They have the methods of a `quanda.explainers.Explainer` and a `dattri.algorithm.base.BaseAttributor`, and need neither
library. Nothing is computed: test points are found among the queries by their values, and training examples among those
of the training. A test point that is no query is refused, as is an example that the training did not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from ntkexp.foreign_loop.example_names import digests
from ntkexp.kernel.record.tape import examples as count_examples
from ntkexp.mistake import Mistake
from ntkexp.records.contributions import CONTRIBUTION, MEASURE
from ntkexp.report.scores import Attribution
from ntkexp.shapes import Inputs
from ntkexp.text import counted

BLOCK = 256  # rows of a data set that are read at once


@dataclass(frozen=True, eq=False)
class FollowedScores:
    """The scores of a followed training at its queries; `score`, `out` and `component` are those of `to_scores`.

    `examples` are the names of the training examples in the order of the data set: `range(len(dataset))` where `follow`
    took `ids="dataset"`. Without them, examples are found by their values. Set `lower_is_better` if `measure=` is a
    loss: then scores are positive where an example lowered it. A measure has its own targets; those of a library are
    then ignored.
    """

    found: Attribution
    queries: Inputs
    examples: Sequence[object] | None = None
    score: str = CONTRIBUTION
    out: str | int | None = None
    component: str | None = None
    lower_is_better: bool = False

    def __post_init__(self) -> None:
        count, expected = count_examples(self.queries), self.found.sizes["probe"]
        if count != expected:
            raise Mistake(
                f"queries=: these are {count}, and there are scores of {expected}; give those of follow(queries=)"
            )

    def rows(
        self, data: Inputs, targets: Sequence[int] | Tensor | None, names: Sequence[str]
    ) -> Float[Tensor, "test train"]:
        """Scores of these training examples at these test points; where there is an output for each class, at the
        output of each point's target."""
        places = np.array(self.points(data), dtype=int)
        by_class = (
            self.out is None and MEASURE not in self.found.attrs and "out" in self.found.sizes
        )
        if by_class and self.found.sizes["out"] == 1:
            raise Mistake(
                "out=: the model has one output, which speaks for one class and against another; give out=0 if scores "
                "are of the output itself, or follow with a measure= of the target"
            )
        if by_class and (targets is None or len(targets) != len(places)):
            raise Mistake(
                "out=: there is an output for each class; give the targets of the test points, or out="
            )
        outs = (
            [int(target) for target in targets]
            if by_class and targets is not None
            else [self.out] * len(places)
        )

        at = {name: place for place, name in enumerate(self.trained_names)}
        columns, found = [at[name] for name in names], np.empty((len(places), len(names)))
        for out in set(outs):
            rows = [row for row, each in enumerate(outs) if each == out]
            here = self.found.isel(probe=places[rows])
            scores = here.to_scores(
                "test,train", score=self.score, out=out, component=self.component
            ).to_numpy()
            if len(scores) < len(rows):
                raise Mistake(
                    "a test point was not attributed; choose among those that have finite scores"
                )
            found[rows] = scores[:, columns]
        return torch.from_numpy(-found if self.lower_is_better else found)

    @property
    def trained_names(self) -> list[str]:
        """The names of the examples that the training used."""
        return [str(name) for name in self.found["example"].to_numpy().tolist()]

    @cached_property
    def query_places(self) -> dict[str, list[int]]:
        """The places of the queries that hold the same, by the digest of that."""
        places = dict[str, list[int]]()
        for place, row in enumerate(digests(self.queries)):
            places.setdefault(row, []).append(place)
        return places

    def points(self, data: Inputs) -> list[int]:
        """The queries that hold the same as these rows."""
        wanted = digests(data)
        missing = [row for row in wanted if row not in self.query_places]
        if missing:
            raise Mistake(
                f"{len(missing)} of {counted(len(wanted), 'test point')} are not among the queries; follow with "
                "queries= that hold all of them, as they are here (dtype and preprocessing too)"
            )
        if MEASURE in self.found.attrs and any(len(self.query_places[row]) > 1 for row in wanted):
            raise Mistake(
                "queries= holds a row twice, and measure= may differ between the two; leave one of them out"
            )
        return [self.query_places[row][0] for row in wanted]

    def training_names(self, dataset: Any) -> list[str]:
        """The names of the examples of a data set, in its order: those given, or digests of what is read of it."""
        names = (
            read_in_order(dataset)
            if self.examples is None
            else [str(name) for name in self.examples]
        )
        if len(names) != len(dataset):
            raise Mistake(
                f"examples=: these are {len(names)} names for a data set of {len(dataset)}; give one for each"
            )
        if len(set(names)) < len(names):
            raise Mistake(
                "several rows of the data set have the same name, and their scores cannot be told apart; follow with "
                "ids='dataset', and give examples=range(len(dataset))"
            )
        used = set(self.trained_names)
        if unused := [name for name in names if name not in used]:
            raise Mistake(
                f"{len(unused)} of {counted(len(names), 'training example')} were not used in training under their "
                "names; give examples=, the names that follow(ids=) gave them, in the order of the data set"
            )
        return names

    def refuse_other_model(self, model: nn.Module, data: Tensor) -> None:
        """Refuse a model that is not the trained one, by its outputs at test points, unless these are unknown."""
        if (
            MEASURE in self.found.attrs
            or "out" not in self.found.sizes
            or not {"start", "change"} <= set(self.found.data_vars)
        ):
            return
        with torch.no_grad():
            outputs = model(data)
        if not isinstance(outputs, Tensor):
            return
        trained = (
            (self.found["start"] + self.found["change"]).isel(probe=self.points(data)).to_numpy()
        )
        given = outputs.cpu().double().numpy()
        near = torch.finfo(outputs.dtype).eps ** 0.5 * np.linalg.norm(trained)
        if given.shape != trained.shape or not np.linalg.norm(given - trained) <= near:
            raise Mistake(
                "the model gives other outputs than the one that was followed had at the end; load its weights"
            )


def read_in_order(dataset: Any) -> list[str]:
    """Digests of what a model is called with, of all examples of a data set: the first part of each."""
    rows = list[str]()
    for begin in range(0, len(dataset), BLOCK):
        inputs = [dataset[k] for k in range(begin, min(begin + BLOCK, len(dataset)))]
        firsts = [each[0] if isinstance(each, tuple | list) else each for each in inputs]
        if not all(isinstance(each, Tensor) for each in firsts):
            raise Mistake(
                "the data set does not begin with a tensor; give examples=, names in the order of the data set"
            )
        rows += digests(torch.stack(firsts))
    return rows


@dataclass(eq=False)
class QuandaExplainer:
    """A `quanda.explainers.Explainer` by its methods; metrics and benchmarks of quanda take it.

    explainer = QuandaExplainer(model, train_dataset, scores=FollowedScores(found, queries=x_query))
    benchmark.evaluate(QuandaExplainer, {"scores": FollowedScores(found, queries=x_query)})

    Scores are of the output of each target, where there is an output for each class: positive where an example raised
    it. `scores` says which ones.
    """

    model: nn.Module
    train_dataset: Any
    task: str = "image_classification"
    checkpoints: Any = None
    checkpoints_load_func: Any = None
    scores: FollowedScores | None = None

    accepted_tasks = ("image_classification", "text_classification", "causal_lm")

    def __post_init__(self) -> None:
        if self.scores is None:
            raise Mistake(
                "scores=: give those of the followed training, scores=FollowedScores(found, queries=…)"
            )
        self.names = self.scores.training_names(self.train_dataset)

    def explain(
        self, test_data: Tensor, targets: Sequence[int] | Tensor
    ) -> Float[Tensor, "test train"]:
        """Scores of all training examples at some queries."""
        assert self.scores is not None
        self.scores.refuse_other_model(self.model, test_data)
        return self.scores.rows(test_data, targets, self.names).to(test_data.device)

    def self_influence(self, batch_size: int = 32) -> Float[Tensor, " train"]:
        """The score of each training example at itself: all of them have to be queries."""
        found = list[Tensor]()
        for begin in range(0, len(self.train_dataset), batch_size):
            rows = [
                self.train_dataset[k]
                for k in range(begin, min(begin + batch_size, len(self.train_dataset)))
            ]
            scores = self.explain(torch.stack([x for x, _ in rows]), [int(y) for _, y in rows])
            found.append(scores.diagonal(begin))
        return torch.cat(found)


@dataclass(frozen=True, eq=False)
class DattriAttributor:
    """A `dattri.algorithm.base.BaseAttributor` by its methods; metrics of dattri take its scores.

    scores = DattriAttributor(FollowedScores(found, queries=x_query)).attribute(train_loader, test_loader)
    dattri.metric.lds(scores, ground_truth)
    """

    scores: FollowedScores

    def cache(self, full_train_dataloader: DataLoader[Any]) -> None:
        """Do nothing: all scores are there."""

    def attribute(
        self, train_dataloader: DataLoader[Any], test_dataloader: DataLoader[Any]
    ) -> Float[Tensor, "train test"]:
        """Scores of the examples of one loader at those of the other, in their order; where there is an output for each
        class, at the output of each test point's target, the second part of a batch."""
        for loader in (train_dataloader, test_dataloader):
            in_order = (
                isinstance(loader.sampler, SequentialSampler)
                and type(loader.batch_sampler) is BatchSampler
            )
            if not in_order or loader.drop_last:
                raise Mistake(
                    "a DataLoader gives its data set in another order, or in part; load without shuffle="
                )
        names, rows = self.scores.training_names(train_dataloader.dataset), list[Tensor]()
        for batch in test_dataloader:
            parts = batch if isinstance(batch, tuple | list) else (batch,)
            rows.append(self.scores.rows(parts[0], parts[1] if len(parts) > 1 else None, names))
        if not rows:
            raise Mistake("test_dataloader is empty; give the queries, or some of them")
        return torch.cat(rows).T
