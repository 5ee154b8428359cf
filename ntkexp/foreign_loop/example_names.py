"""By what names the examples of a call go.

nothing given     digests of what each example holds: `digests`; equal_inputs.py says if one may be several
ids=…             names that the user's function of the call gives, or a keyword of the model holds: `names_of`
ids="dataset"     their indices in the Dataset that a DataLoader reads: `RecordedLoading`
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
from torch.utils.data import IterableDataset
from torch.utils.data import dataloader as loading
from torch.utils.data._utils.collate import default_collate

from ntkexp.kernel.record.tape import examples, tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import arguments
from ntkexp.shapes import Inputs

# --- A call of the model as functions of the user's see it: those that name its examples, and those that give losses.


@dataclass(frozen=True)
class SeenCall:
    """What the model was called with, and the names of its examples, once they have some."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Inputs, ids: tuple[str, ...] = ()) -> SeenCall:
        """The call with these inputs.

        >>> SeenCall.of((1, 2)).args, SeenCall.of({"x": 3}).kwargs["x"]
        ((1, 2), 3)
        """
        placed, named = arguments(inputs)
        return cls(placed, named, ids)


Ids: TypeAlias = Callable[[SeenCall], Sequence[object] | Tensor] | str | None
"""The names of the examples of a call: a function of it, or the keyword that holds them."""


def digests(inputs: Inputs) -> tuple[str, ...]:
    """Each example by what it holds, so that neither shuffling nor epochs nor duplicates need an index.

    >>> import torch
    >>> one, other, again = digests(torch.tensor([[1.0], [2.0], [1.0]]))
    >>> one == again, one == other
    (True, False)
    """
    columns = [tensor.detach().cpu()[:, None].flatten(1).contiguous() for tensor in tensors(inputs)]
    rows = zip(*(column.view(torch.uint8).numpy() for column in columns), strict=True)
    return tuple(
        sha256(b"".join(part.tobytes() for part in row)).hexdigest()[:DIGITS] for row in rows
    )


def is_digest(name: str) -> bool:
    """Whether a name is what `digests` gives.

    >>> is_digest(digests(torch.ones(1, 2))[0]), is_digest("17")
    (True, False)
    """
    return len(name) == DIGITS and set(name) <= set("0123456789abcdef")


def names_of(inputs: Inputs, ids: Ids) -> tuple[str, ...] | None:
    """The names of the examples of a call, if they have some.

    >>> import torch
    >>> names_of({"x": torch.ones(2, 3), "row": torch.tensor([4, 7])}, "row")
    ('4', '7')
    >>> names_of(torch.ones(2, 3), lambda call: call.args[0].sum(1))
    ('3.0', '3.0')
    """
    if ids is None:
        return None
    if isinstance(ids, str):
        if not isinstance(inputs, Mapping) or ids not in inputs:
            raise Mistake(f"ids={ids!r}: the model is not called with such a keyword")
        found: object = inputs[ids]
    else:
        found = ids(SeenCall.of(inputs))
    if not isinstance(found, Tensor | Sequence):
        raise Mistake(
            f"ids=: it gives a {type(found).__name__}; give a list with a name for each example of a call"
        )
    names = tuple(map(str, found.tolist() if isinstance(found, Tensor) and found.dim() else found))
    if len(names) != (count := examples(inputs)):
        raise Mistake(
            f"ids=: it gives {len(names)} names for the {count} examples of a call; give one for each"
        )
    return names


# --- ids="dataset": examples go by their indices in the Dataset that a DataLoader reads.
#
# While a loop is followed, the indices that each DataLoader requests of its Dataset are recorded, batch by batch, and
# digests of the rows of the batch. A call goes by the indices of the rows that it is made with. Whatever leaves more
# than one answer is refused: rows that were changed on their way to the model, that stand elsewhere too, or in no known
# order.


DIGITS = 16  # of a digest, which is a name
DATASET = "dataset"  # the value of `ids=`
RECENT = 256  # batches among which the rows of a call are looked for: a loop may gather some before it calls the model

REQUESTED = "_ntkexp_requested"
"""The indices that an iterator has requested of its Dataset, and not loaded yet."""

Places: TypeAlias = tuple[int, ...]
"""The indices of the rows of a call."""


@dataclass(frozen=True)
class RecordedBatch:
    """The indices of a batch, and the digests of the rows of each of its tensors."""

    dataset: object
    indices: Places
    columns: tuple[tuple[str, ...], ...]

    def places(self, rows: tuple[str, ...]) -> set[Places]:
        """Where these rows can stand one behind another."""
        last = len(self.indices) - len(rows)
        found = (
            self.indices[at : at + len(rows)]
            for column in self.columns
            for at in range(last + 1)
            if column[at] == rows[0] and column[at : at + len(rows)] == rows
        )
        return set(found)


@dataclass
class RecordedLoading:
    """The latest batches of all DataLoaders, and the indices that are under way to each, in order."""

    batches: deque[RecordedBatch] = field(default_factory=lambda: deque(maxlen=RECENT))
    reason: str = "no DataLoader was read while it was followed"  # why nothing is known

    def names(self, call: SeenCall) -> list[str]:
        """The indices of the rows of a call: every tensor whose rows differ has to agree on them."""
        leaves = tree_leaves((call.args, dict(call.kwargs)))
        columns = [digests(each) for each in leaves if isinstance(each, Tensor) and each.dim()]
        telling = [rows for rows in columns if len(set(rows)) > 1] or columns
        found, known = set[Places](), list[RecordedBatch]()
        for batch in self.batches:
            here = [batch.places(rows) for rows in telling]
            if here and (both := set.intersection(*here)):
                found |= both
                known.append(batch)
        if len(found) == 1 and len({id(batch.dataset) for batch in known}) == 1:
            return [str(index) for index in next(iter(found))]

        reason = (
            self.reason
            if not self.batches
            else "the model is not called with rows of a batch as they were loaded"
        )
        if len(found) > 1:
            reason = "rows of several places hold what the model is called with"
        elif known and len({id(batch.dataset) for batch in known}) > 1:
            reason = "DataLoaders read several Datasets that hold the same"
        raise Mistake(
            f"ids='dataset': {reason}; let the Dataset give its index too, and name it by a function, ids=…"
        )

    def record(self, iterator: Any, batch: object) -> None:
        """Record a batch that was loaded, unless its rows have no known indices."""
        requested = vars(iterator).get(REQUESTED)
        indices = requested.popleft() if requested else None
        known = isinstance(indices, list | tuple) and all(
            isinstance(each, int | Tensor) for each in indices
        )
        if isinstance(iterator._dataset, IterableDataset):
            self.reason = "the DataLoader reads an IterableDataset, which has no indices"
        elif indices is None:
            self.reason = "the DataLoader was begun before it was followed"
        elif not known:
            self.reason = "the DataLoader asks for no batches of indices"
        elif iterator._collate_fn is not default_collate:
            self.reason = "the DataLoader has a collate_fn of its own, which may put rows elsewhere"
        elif not getattr(iterator, "_in_order", True):
            self.reason = "the DataLoader gives batches in another order than it asks for them (in_order=False)"
        else:
            leaves = [
                each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.dim()
            ]
            columns = tuple(digests(each) for each in leaves if len(each) == len(indices))
            self.batches.append(RecordedBatch(iterator._dataset, tuple(map(int, indices)), columns))


@contextmanager
def recorded_loading() -> Iterator[RecordedLoading]:
    """Record what DataLoaders load, in this process or by workers, which are asked for batches ahead."""
    recorded, kind = RecordedLoading(), loading._BaseDataLoaderIter
    next_index: Callable[..., Any] = kind._next_index
    next_batch: Callable[..., Any] = kind.__next__
    reset: Callable[..., Any] = kind._reset

    def record_request(iterator: Any) -> Any:
        found = next_index(iterator)
        if not iterator._num_workers:
            vars(iterator)[REQUESTED] = deque([found])
        elif REQUESTED in vars(
            iterator
        ):  # other workers were asked for batches that were not recorded
            vars(iterator)[REQUESTED].append(found)
        return found

    def record_batch(iterator: Any) -> Any:
        batch = next_batch(iterator)
        recorded.record(iterator, batch)
        return batch

    def forget_requests(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        vars(iterator)[REQUESTED] = deque()
        return reset(iterator, *args, **kwargs)

    own: dict[str, Callable[..., Any]] = {
        "_next_index": record_request,
        "__next__": record_batch,
        "_reset": forget_requests,
    }
    before = {name: vars(kind)[name] for name in own}
    try:
        for name, function in own.items():
            setattr(kind, name, function)
        yield recorded
    finally:
        for name, function in before.items():
            setattr(kind, name, function)
