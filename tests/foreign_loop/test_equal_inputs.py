"""Rows with equal inputs count as one example, whose contribution is their sum; and that is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ntkexp
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.trace import Trace
from tests.foreign_loop.loops import fitted

ROWS = 12
CLOSE = 1e-12  # sums of at most 12 rows over 12 steps, relative to the largest contribution
Labels: TypeAlias = tuple[int, int] | None
Batches: TypeAlias = Callable[[], Iterator[list[int]]]


def data(labels: Labels) -> tuple[Tensor, Tensor]:
    """Rows; if there are labels, the fourth and the tenth have equal inputs and these labels."""
    x, y = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(ROWS) % 3
    if labels is not None:
        x[9] = x[3]
        y[3], y[9] = labels
    return x, y


def whole() -> Iterator[list[int]]:
    for _ in range(4):
        yield list(range(ROWS))


def shuffled() -> Iterator[list[int]]:
    for seed in range(4):
        yield torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).tolist()


def separate() -> Iterator[list[int]]:
    """Epochs of batches without a batch of both rows; the last epoch is not complete."""
    for _ in range(3):
        yield from ([0, 3, 5, 7, 11, 1], [2, 9, 4, 6, 8, 10])
    yield [3, 0, 1, 2, 4, 5]


def irregular() -> Iterator[list[int]]:
    """Draws without a draw of both rows."""
    yield from ([0, 3, 5], [3, 1, 2], [9, 4, 6], [7, 8, 3], [10, 11, 9], [0, 1, 5])


def drawn() -> Iterator[list[int]]:
    """Rows drawn with replacement."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        yield torch.randint(ROWS, (6,), generator=generator).tolist()


def trained(labels: Labels, batches: Batches, *, dropout: float = 0.0, named: bool = False) -> Trace:
    (x, y), steps, more = data(labels), list(batches()), dict[str, Any]()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()
    if named:
        now = iter(steps)
        more["ids"] = lambda _: next(now)

    def loss(step: int) -> Tensor:
        return cross_entropy(net(x[steps[step]]), y[steps[step]])

    return fitted(net, torch.optim.AdamW(net.parameters(), 0.01), loss, len(steps), queries=x[:2], **more)


DIFFERENT, TOGETHER, OFTEN = "with different ∂L/∂f (other labels?)", "several times in one call", "used twice as often"
CASES: dict[str, tuple[Labels, Batches, float, str]] = {
    "other labels": ((0, 2), whole, 0.0, DIFFERENT),
    "other labels, shuffled": ((0, 2), shuffled, 0.0, DIFFERENT),
    "one label": ((1, 1), whole, 0.0, TOGETHER),
    "other labels, dropout": ((0, 2), whole, 0.5, DIFFERENT),
    "one label, dropout": ((1, 1), whole, 0.5, TOGETHER),
    "other labels, other batches": ((0, 2), separate, 0.0, DIFFERENT),
    "other labels, drawn irregularly": ((0, 2), irregular, 0.0, DIFFERENT),
    "other labels, other batches, dropout": ((0, 2), separate, 0.5, DIFFERENT),
    "one label, other batches": ((1, 1), separate, 0.0, OFTEN),
    "drawn with replacement": (None, drawn, 0.0, TOGETHER),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_inputs_are_reported(case: str, caplog: pytest.LogCaptureFixture) -> None:
    labels, batches, dropout, sign = CASES[case]
    found = trained(labels, batches, dropout=dropout).attribute()
    said = str(found.attrs["equal_inputs"])
    assert [each for each in (DIFFERENT, TOGETHER, OFTEN) if each in said] == [sign]
    assert said in caplog.text
    if labels is not None:
        number = found["example"].to_numpy().tolist().index(digests(data(labels)[0])[3])
        assert f"#{number};" in said or f"#{number})" in said
        assert found.sizes["example"] == ROWS - 1


@pytest.mark.parametrize("batches", [whole, shuffled, separate], ids=lambda each: each.__name__)
def test_different_inputs_and_named_rows_are_not_reported(batches: Batches, caplog: pytest.LogCaptureFixture) -> None:
    for trace in (trained(None, batches), trained((0, 2), batches, named=True)):
        found = trace.attribute()
        assert found.sizes["example"] == ROWS
        assert "equal_inputs" not in found.attrs
    assert not caplog.text


@pytest.mark.parametrize("batches", [whole, shuffled, separate, drawn], ids=lambda each: each.__name__)
def test_their_contribution_is_the_sum_over_their_rows(batches: Batches) -> None:
    names = digests(data((0, 2))[0])
    merged, named = (trained((0, 2), batches, named=each).attribute()["contribution"] for each in (False, True))
    for name in merged["example"].to_numpy().tolist():
        rows = [str(k) for k, other in enumerate(names) if other == name and str(k) in named["example"].to_numpy()]
        missed = merged.sel(example=name) - named.sel(example=rows).sum("example")
        assert float(abs(missed).max()) <= CLOSE * float(abs(named).max())


@pytest.mark.slow
def test_a_resumed_loop_reports_the_same_in_its_run(tmp_path: Path) -> None:
    """Names are digests of the content."""
    x, y = data((0, 2))

    def run(folder: Path, broken_after: int | None) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(4, 3).double()
        optimizer, taken = torch.optim.SGD(net.parameters(), 0.1), list[int]()

        def loss(step: int) -> Tensor:
            if len(taken) == broken_after == step:
                raise KeyboardInterrupt
            taken.append(step)
            return cross_entropy(net(x), y)

        if broken_after is not None:
            with pytest.raises(KeyboardInterrupt):
                fitted(net, optimizer, loss, 4, queries=x[:2], to=folder)
        found = fitted(net, optimizer, loss, 4 - len(taken), queries=x[:2], to=folder).attribute()
        assert DIFFERENT in ntkexp.load_run(folder).outcome
        return found

    one, other = run(tmp_path / "runs" / "whole", None), run(tmp_path / "runs" / "resumed", 2)
    assert one.attrs["equal_inputs"] == other.attrs["equal_inputs"]
    assert one["example"].to_numpy().tolist() == other["example"].to_numpy().tolist()
    np.testing.assert_array_equal(one["contribution"], other["contribution"])
