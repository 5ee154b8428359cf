"""ids="dataset": examples go by their indices in the Dataset that a DataLoader reads, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import dataloader as loading
from torch.utils.data._utils.collate import default_collate

import ntkexp
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake

COUNT = 11


def data(*, twins: bool = False) -> TensorDataset:
    """Rows that say their own index, two of them alike."""
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


@pytest.mark.parametrize(
    ("settings", "split"),
    [
        ({"batch_size": 3, "shuffle": True}, COUNT),
        ({"batch_size": 4, "shuffle": True, "drop_last": True}, COUNT),
        ({"batch_size": 4, "shuffle": True}, 2),
        ({"batch_size": 1}, COUNT),
        pytest.param({"batch_size": 3, "shuffle": True, "num_workers": 2}, COUNT, marks=pytest.mark.slow),
        pytest.param(
            {"batch_size": 3, "shuffle": True, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, dict) else str(each),
)
def test_names_are_the_indices_of_the_sampler(settings: dict[str, Any], split: int) -> None:
    trace = trained(DataLoader(data(), **settings), split=split)
    seen = 0
    for step, _ in trace.steps.forwards():
        for call in step.calls:
            assert isinstance(call.inputs, Tensor)
            assert call.names == tuple(str(int(row[0])) for row in call.inputs)  # as the rows say themselves
            seen += len(call.names)
    assert seen == 2 * (COUNT - COUNT % 4 if "drop_last" in settings else COUNT)
    assert not {"_ntkexp_asked"} & set(vars(loading._BaseDataLoaderIter))


class Endless(IterableDataset[tuple[Tensor, ...]]):
    """Without indices."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(data())


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: trained([data()[:4]]), "no DataLoader was read"),
        (lambda: trained(DataLoader(Endless(), batch_size=4)), "an IterableDataset, which has no indices"),
        (lambda: trained(DataLoader(data(), batch_size=4), lambda x: x / 2), "not called with rows of a batch as they"),
        (lambda: trained(DataLoader(data(), batch_size=4), lambda x: x.flip(0)), "not called with rows of a batch"),
        (lambda: trained(DataLoader(data(twins=True), batch_size=11), split=1), "rows of several places hold what"),
        (
            lambda: trained(DataLoader(data(), batch_size=4, collate_fn=lambda rows: default_collate(rows[::-1]))),  # type: ignore[no-untyped-call]
            "a collate_fn of its own",
        ),
        (lambda: trained([*DataLoader(data(), batch_size=4)]), "no DataLoader was read while it was followed"),
    ],
)
def test_what_has_no_known_index_is_refused_in_one_line(act: Callable[[], object], said: str) -> None:
    usual = dict(vars(loading._BaseDataLoaderIter))
    with pytest.raises(Mistake, match=f"ids='dataset': .*{said}.*; let the Dataset give its index too"):
        act()
    assert dict(vars(loading._BaseDataLoaderIter)) == usual
