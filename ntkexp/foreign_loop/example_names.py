"""Names of the examples of a call, by the option `ids` of `follow`.

no `ids`          a digest of each example's inputs: `digests`. Examples with equal inputs have equal
                  names; `equal_inputs` reports them
ids=function      names that the user's function of the model call returns: `names_of`
ids=keyword       the values of the model's keyword argument of this name: `names_of`
ids="dataset"     indices in the Dataset that a DataLoader reads: `RecordedLoading`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, dataloader as loading
from torch.utils.data._utils.collate import default_collate

from ntkexp.kernel.record.tape import examples, tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import arguments
from ntkexp.shapes import Inputs
from ntkexp.text import DIGEST_LENGTH


@dataclass(frozen=True)
class SeenCall:
    """A call of the model, in the form that the user's functions `ids`,
    `loss` and `measure` receive."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    ids: tuple[str, ...] = ()  # names of the examples of the call

    @classmethod
    def of(cls, inputs: Inputs, ids: tuple[str, ...] = ()) -> SeenCall:
        """Return the call with these inputs.

        >>> SeenCall.of((1, 2)).args, SeenCall.of({"x": 3}).kwargs["x"]
        ((1, 2), 3)
        """
        args, kwargs = arguments(inputs)
        return cls(args, kwargs, ids)


Ids: TypeAlias = Callable[[SeenCall], Sequence[object] | Tensor] | str | None
"""The option `ids=`: a function that returns the names of a call's examples, the
model's keyword argument that holds these names, or "dataset"."""


def digests(inputs: Inputs) -> tuple[str, ...]:
    """Return a digest of the content of each example. It does not depend on the other
    examples of the batch.

    >>> import torch
    >>> one, other, again = digests(torch.tensor([[1.0], [2.0], [1.0]]))
    >>> one == again, one == other
    (True, False)
    """
    columns = [
        tensor.detach().cpu()[:, None].flatten(1).contiguous()
        for tensor in tensors(inputs)
    ]
    rows = zip(*(column.view(torch.uint8).numpy() for column in columns), strict=True)
    contents = (b"".join(part.tobytes() for part in row) for row in rows)
    return tuple(sha256(content).hexdigest()[:DIGEST_LENGTH] for content in contents)


def names_of(
    inputs: Inputs, ids: Ids, count: int | None = None
) -> tuple[str, ...] | None:
    """Return the names that `ids` gives to the `count` examples of a call,
    or None without `ids`.

    By default, `count` is the length of the input tensors along their first axis.

    >>> import torch
    >>> names_of({"x": torch.ones(2, 3), "row": torch.tensor([4, 7])}, "row")
    ('4', '7')
    >>> names_of(torch.ones(2, 3), lambda call: call.args[0].sum(1))
    ('3.0', '3.0')
    """
    if ids is None:
        return None
    values: object
    if callable(ids):
        values = ids(SeenCall.of(inputs))
    elif isinstance(inputs, Mapping) and ids in inputs:
        values = inputs[ids]
    else:
        raise Mistake(
            f"ids={ids!r}: the model is not called with a keyword of this name"
        )
    if not isinstance(values, Tensor | Sequence):
        raise Mistake(
            f"ids=: the names are a {type(values).__name__}; give a list with a name "
            "for each example of a call"
        )
    if isinstance(values, Tensor):
        values = values.tolist() if values.dim() else [values.item()]
    names = tuple(map(str, values))
    count = examples(inputs) if count is None else count
    if len(names) != count:
        raise Mistake(
            f"ids=: there are {len(names)} names for the {count} examples of a call; "
            "give one name for each example"
        )
    return names


# --- ids="dataset": the indices of the examples in the Dataset that a DataLoader reads.
#
# Every batch that a DataLoader loads during the loop is recorded: the indices that the
# DataLoader requested from its Dataset, and a digest of each row. The rows of a model
# call are then found among the recorded batches by their digests, and named by their
# indices. An error is raised if rows were changed between the DataLoader and the model,
# if equal rows have several indices, or if the order of the rows is unknown.


DATASET = "dataset"  # value of `ids=`: name examples by their index in the data set
# number of recent batches that are searched. A loop may load several batches before it
# calls the model.
RECENT_BATCHES = 256

REQUESTED = "_ntkexp_requested"
"""The name of an attribute that is added to a DataLoader's iterator. It holds the
indices of the batches that the iterator has requested and not loaded yet."""

Indices: TypeAlias = tuple[int, ...]
"""Indices of examples in a Dataset, one for each row of a batch or call."""


@dataclass(frozen=True)
class RecordedBatch:
    """A loaded batch: its indices in the Dataset, and a digest of each row."""

    dataset: object
    indices: Indices
    columns: tuple[tuple[str, ...], ...]  # for each tensor, the digests of its rows

    def places(self, rows: tuple[str, ...]) -> set[Indices]:
        """Find all places where a tensor of this batch has consecutive rows with these
        digests. Return the indices of the rows at each place."""
        matches = set[Indices]()
        for column in self.columns:
            for start in range(len(self.indices) - len(rows) + 1):
                end = start + len(rows)
                if column[start] == rows[0] and column[start:end] == rows:
                    matches.add(self.indices[start:end])
        return matches


@dataclass
class RecordedLoading:
    """The latest batches of all DataLoaders."""

    batches: deque[RecordedBatch] = field(
        default_factory=lambda: deque(maxlen=RECENT_BATCHES)
    )
    # for the error message: why the latest batch was not recorded
    reason: str = "no DataLoader was read while the loop was followed"

    def names(self, call: SeenCall) -> list[str]:
        """Return the indices of the rows of a call.
        Raise if they are unknown or ambiguous.

        Search for the rows in the latest batches. All tensors of the call must lead to
        the same indices. Ignore a tensor whose rows are all equal, such as a mask, if
        another tensor has different rows."""
        leaves = tree_leaves((call.args, dict(call.kwargs)))
        columns = [
            digests(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()
        ]
        with_different_rows = [rows for rows in columns if len(set(rows)) > 1]
        columns = with_different_rows or columns

        candidates = set[Indices]()
        datasets = set[int]()
        for batch in self.batches:
            matches = [batch.places(rows) for rows in columns]
            common = set.intersection(*matches) if matches else set()
            if common:
                candidates |= common
                datasets.add(id(batch.dataset))
        if len(candidates) == 1 and len(datasets) == 1:
            return [str(index) for index in candidates.pop()]

        if len(candidates) > 1:
            reason = "the inputs of the model occur at several places of a batch"
        elif len(datasets) > 1:
            reason = "several Datasets contain the inputs of the model"
        elif self.batches:
            reason = (
                "the inputs of the model are not rows of a batch as they were loaded"
            )
        else:
            reason = self.reason
        raise Mistake(
            f"ids='dataset': {reason}; let the Dataset return its index too, and give a "
            "function, ids=…, that returns this index"
        )

    def record(self, iterator: Any, batch: object) -> None:
        """Record a loaded batch, or the reason why the indices
        of its rows are unknown."""
        requested = vars(iterator).get(REQUESTED)
        indices = requested.popleft() if requested else None
        if isinstance(iterator._dataset, IterableDataset):
            self.reason = (
                "the DataLoader reads an IterableDataset, which has no indices"
            )
        elif indices is None:
            self.reason = "the DataLoader was started before the loop was followed"
        elif not are_indices(indices):
            self.reason = "the DataLoader does not request batches of indices"
        elif iterator._collate_fn is not default_collate:
            self.reason = (
                "the DataLoader has its own collate_fn, which may reorder the rows"
            )
        elif not getattr(iterator, "_in_order", True):
            self.reason = (
                "the DataLoader returns batches in another order than it requests them "
                "(in_order=False)"
            )
        else:
            leaves = tree_leaves(batch)
            rows = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
            columns = tuple(digests(leaf) for leaf in rows if len(leaf) == len(indices))
            self.batches.append(
                RecordedBatch(iterator._dataset, tuple(map(int, indices)), columns)
            )


def are_indices(value: object) -> bool:
    """Return True for a list of integers, as a batch sampler yields."""
    if not isinstance(value, list | tuple):
        return False
    return all(isinstance(index, int | Tensor) for index in value)


@contextmanager
def recorded_loading() -> Iterator[RecordedLoading]:
    """Patch the iterators of DataLoaders, so that loaded batches are recorded.

    A DataLoader without workers loads each batch when it is requested. One with workers
    requests several batches in advance, so the requested indices wait in a queue, the
    attribute `REQUESTED`, until their batch arrives."""
    recorded = RecordedLoading()
    kind = loading._BaseDataLoaderIter
    next_index: Callable[..., Any] = kind._next_index
    next_batch: Callable[..., Any] = kind.__next__
    reset: Callable[..., Any] = kind._reset

    def record_request(iterator: Any) -> Any:
        indices = next_index(iterator)
        if not iterator._num_workers:
            vars(iterator)[REQUESTED] = deque([indices])
        # With workers, the attribute is missing if earlier requests were not recorded.
        # The indices of the next batch are then unknown.
        elif REQUESTED in vars(iterator):
            vars(iterator)[REQUESTED].append(indices)
        return indices

    def record_batch(iterator: Any) -> Any:
        batch = next_batch(iterator)
        recorded.record(iterator, batch)
        return batch

    def forget_requests(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        vars(iterator)[REQUESTED] = deque()
        return reset(iterator, *args, **kwargs)

    patches: dict[str, Callable[..., Any]] = {
        "_next_index": record_request,
        "__next__": record_batch,
        "_reset": forget_requests,
    }
    originals = {name: vars(kind)[name] for name in patches}
    try:
        for name, patch in patches.items():
            setattr(kind, name, patch)
        yield recorded
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)
