"""Scores of a followed training loop, in the interfaces of other attribution libraries.

    QuandaExplainer    explain(test_data, targets) → [test, train]
    DattriAttributor   attribute(train_dataloader, test_dataloader) → [train, test]

The classes have the methods of `quanda.explainers.Explainer` and
`dattri.algorithm.base.BaseAttributor`, but do not import these libraries. They compute
no scores, but look up the scores of a finished attribution. They find a test point by
its values among the queries of the followed loop, and a training example by its name or
its values. They raise an error if a test point is not a query of the loop, or if the
loop did not use a training example."""

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

ROWS_AT_ONCE = 256
"""Number of rows of a data set to read at once."""


@dataclass(frozen=True, eq=False)
class FollowedScores:
    """The scores of a followed training loop at its queries.

    Args:
        found: The attribution of the loop, from `trace.attribute()`.
        queries: The queries that were given to `follow(queries=…)`.
        examples: The names of the training examples in the order of the data set, for
            example `range(len(dataset))` after `follow(ids="dataset")`. Without names,
            examples are identified by their values.
        score: See `Attribution.to_scores`.
        out: See `Attribution.to_scores`. By default, the output of the target's class.
        component: See `Attribution.to_scores`.
        lower_is_better: Set to True if `measure=` is a loss. Examples that lowered the
            loss then have positive scores.

    If the loop was followed with `measure=`, the targets that quanda or dattri passes
    are ignored, because the measure has its own targets.

    Raises:
        Mistake: if the number of `queries` differs from the number of queries in
        `found`.
    """

    found: Attribution
    queries: Inputs
    examples: Sequence[object] | None = None
    score: str = CONTRIBUTION
    out: str | int | None = None
    component: str | None = None
    lower_is_better: bool = False

    def __post_init__(self) -> None:
        count = count_examples(self.queries)
        expected = self.found.sizes["query"]
        if count != expected:
            raise Mistake(
                f"queries=: there are {count}, but scores of {expected}; give the "
                "queries of follow(queries=)"
            )

    def rows(
        self, data: Inputs, targets: Sequence[int] | Tensor | None, names: Sequence[str]
    ) -> Float[Tensor, "test train"]:
        """Return the scores of the training examples `names` at the test points `data`.

        If the model has an output for each class, use the output of each point's target
        class."""
        queries = np.array(self.points(data), dtype=int)
        outs = self.outputs_of(targets, len(queries))
        column_of_name = {
            name: column for column, name in enumerate(self.trained_names)
        }
        columns = [column_of_name[name] for name in names]
        scores = np.empty((len(queries), len(names)))
        for out in set(outs):
            rows = [row for row, out_of_row in enumerate(outs) if out_of_row == out]
            of_output = self.found.isel(query=queries[rows]).to_scores(
                "test,train", score=self.score, out=out, component=self.component
            )
            if len(of_output) < len(rows):
                raise Mistake(
                    "a test point was not attributed; choose among those that have finite scores"
                )
            scores[rows] = of_output.to_numpy()[:, columns]
        return torch.from_numpy(-scores if self.lower_is_better else scores)

    def outputs_of(
        self, targets: Sequence[int] | Tensor | None, count: int
    ) -> Sequence[int | str | None]:
        """Return the output to explain at each test point, by index or name. Return
        None for each point if there is no choice of outputs."""
        has_measure = MEASURE in self.found.attrs
        if self.out is not None or has_measure or "out" not in self.found.sizes:
            return [self.out] * count
        if self.found.sizes["out"] == 1:
            raise Mistake(
                "out=: the model has one output for two classes; give out=0 for scores of this "
                "output, or follow with a measure= that depends on the target"
            )
        if targets is None or len(targets) != count:
            raise Mistake(
                "out=: there is an output for each class; give the targets of the test points, "
                "or out="
            )
        return [int(target) for target in targets]

    @property
    def trained_names(self) -> list[str]:
        """The names of the examples that the followed loop used."""
        return [str(name) for name in self.found["example"].to_numpy().tolist()]

    @cached_property
    def query_positions(self) -> dict[str, list[int]]:
        """The positions of all queries, by the digest of their values."""
        positions: dict[str, list[int]] = {}
        for position, digest in enumerate(digests(self.queries)):
            positions.setdefault(digest, []).append(position)
        return positions

    def points(self, data: Inputs) -> list[int]:
        """Return the positions of the queries whose values equal the rows of `data`."""
        wanted = digests(data)
        missing = [digest for digest in wanted if digest not in self.query_positions]
        if missing:
            raise Mistake(
                f"{len(missing)} of {counted(len(wanted), 'test point')} are not among the "
                "queries; follow with queries= that contain all of them, with the same dtype and "
                "preprocessing"
            )
        has_repeated = any(len(self.query_positions[digest]) > 1 for digest in wanted)
        if MEASURE in self.found.attrs and has_repeated:
            raise Mistake(
                "queries= holds a row twice, and measure= may differ between the two; leave one of "
                "them out"
            )
        return [self.query_positions[digest][0] for digest in wanted]

    def training_names(self, dataset: Any) -> list[str]:
        """Return the names of the examples of a data set. These are `examples` if
        given, and digests of the examples' values otherwise."""
        examples = read_in_order(dataset) if self.examples is None else self.examples
        names = [str(name) for name in examples]
        if len(names) != len(dataset):
            raise Mistake(
                f"examples=: there are {len(names)} names for a data set of "
                f"{len(dataset)}; give one name for each example"
            )
        if len(set(names)) < len(names):
            raise Mistake(
                "several rows of the data set have the same name, so that their scores cannot be "
                "distinguished; follow with ids='dataset', and give examples=range(len(dataset))"
            )
        used = set(self.trained_names)
        unused = [name for name in names if name not in used]
        if unused:
            raise Mistake(
                f"{len(unused)} of {counted(len(names), 'training example')} were not "
                "used in training under their names; give examples=, the names from "
                "follow(ids=), in the order of the data set"
            )
        return names

    def refuse_other_model(self, model: nn.Module, data: Tensor) -> None:
        """Raise if the outputs of `model` differ from the outputs of the followed model
        at the end of training.

        Check nothing if the attribution does not contain the outputs.
        """
        has_outputs = "out" in self.found.sizes and {"start", "change"} <= set(
            self.found.data_vars
        )
        if MEASURE in self.found.attrs or not has_outputs:
            return
        with torch.no_grad():
            outputs = model(data)
        if not isinstance(outputs, Tensor):
            return
        at_end = self.found["start"] + self.found["change"]
        expected = at_end.isel(query=self.points(data)).to_numpy()
        actual = outputs.cpu().double().numpy()
        tolerance = torch.finfo(outputs.dtype).eps ** 0.5 * np.linalg.norm(expected)
        if (
            actual.shape != expected.shape
            or not np.linalg.norm(actual - expected) <= tolerance
        ):
            raise Mistake(
                "the model returns other outputs than the followed model did at the "
                "end; load the weights of the followed model"
            )


def read_in_order(dataset: Any) -> list[str]:
    """Return the digest of each input of a data set. If an example is a tuple, its first
    item is the input."""
    names: list[str] = []
    for start in range(0, len(dataset), ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, len(dataset))
        inputs = []
        for k in range(start, end):
            example = dataset[k]
            inputs.append(example[0] if isinstance(example, tuple | list) else example)
        if not all(isinstance(value, Tensor) for value in inputs):
            raise Mistake(
                "the data set does not begin with a tensor; give examples=, names in the order of "
                "the data set"
            )
        names += digests(torch.stack(inputs))
    return names


@dataclass(eq=False)
class QuandaExplainer:
    """An explainer for the metrics and benchmarks of quanda.

        scores = FollowedScores(found, queries=x_query)
        explainer = QuandaExplainer(model, train_dataset, scores=scores)
        benchmark.evaluate(QuandaExplainer, {"scores": scores})

    If the model has an output for each class, the scores refer to the output of each
    target. They are positive if an example raised this output.

    Args:
        model: The trained model.
        train_dataset: The training data set.
        task: The task, for quanda.
        checkpoints: Ignored. quanda passes it.
        checkpoints_load_func: Ignored. quanda passes it.
        scores: The scores to look up. Required.

    Raises:
        Mistake: if `scores` is missing, or if the loop did not use an example
            of the data set.
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
                "scores=: give those of the followed training, "
                "scores=FollowedScores(found, queries=…)"
            )
        self.names = self.scores.training_names(self.train_dataset)

    def explain(
        self, test_data: Tensor, targets: Sequence[int] | Tensor
    ) -> Float[Tensor, "test train"]:
        """Return the scores of all training examples at the test points.

        Args:
            test_data: The test points, which must be queries of the followed loop.
            targets: The class of each test point.

        Returns:
            The scores, [test, train].

        Raises:
            Mistake: if a test point is not a query, or if the model has other weights.
        """
        assert self.scores is not None
        self.scores.refuse_other_model(self.model, test_data)
        return self.scores.rows(test_data, targets, self.names).to(test_data.device)

    def self_influence(self, batch_size: int = 32) -> Float[Tensor, " train"]:
        """Return the score of each training example at itself.

        Args:
            batch_size: The number of examples to look up at once.

        Returns:
            The scores, [train].

        Raises:
            Mistake: if an example is not a query of the followed loop.
        """
        diagonals: list[Tensor] = []
        for start in range(0, len(self.train_dataset), batch_size):
            end = min(start + batch_size, len(self.train_dataset))
            batch = [self.train_dataset[k] for k in range(start, end)]
            scores = self.explain(
                torch.stack([x for x, _ in batch]), [int(y) for _, y in batch]
            )
            diagonals.append(scores.diagonal(start))
        return torch.cat(diagonals)


@dataclass(frozen=True, eq=False)
class DattriAttributor:
    """An attributor for the metrics of dattri.

        attributor = DattriAttributor(FollowedScores(found, queries=x_query))
        dattri.metric.lds(attributor.attribute(train_loader, test_loader), ground_truth)

    Args:
        scores: The scores to look up.
    """

    scores: FollowedScores

    def cache(self, full_train_dataloader: DataLoader[Any]) -> None:
        """Do nothing, because the scores were computed before."""

    def attribute(
        self, train_dataloader: DataLoader[Any], test_dataloader: DataLoader[Any]
    ) -> Float[Tensor, "train test"]:
        """Return the scores of all training examples at all test points,
        in the order of the loaders.

        Args:
            train_dataloader: A loader of the training examples that does not shuffle.
            test_dataloader: A loader of queries of the followed loop that does not
                shuffle. If the model has an output for each class, the second item of a
                batch must be the targets.

        Returns:
            The scores, [train, test].

        Raises:
            Mistake: if a loader shuffles, or if a test point is not a query.
        """
        for loader in (train_dataloader, test_dataloader):
            is_sequential = isinstance(loader.sampler, SequentialSampler)
            has_plain_batches = (
                type(loader.batch_sampler) is BatchSampler and not loader.drop_last
            )
            if not is_sequential or not has_plain_batches:
                raise Mistake(
                    "the DataLoader returns its data set in another order, or only a "
                    "part of it; load without shuffle="
                )
        names = self.scores.training_names(train_dataloader.dataset)
        rows: list[Tensor] = []
        for batch in test_dataloader:
            parts = batch if isinstance(batch, tuple | list) else (batch,)
            targets = parts[1] if len(parts) > 1 else None
            rows.append(self.scores.rows(parts[0], targets, names))
        if not rows:
            raise Mistake("test_dataloader is empty; give the queries, or some of them")
        return torch.cat(rows).T
