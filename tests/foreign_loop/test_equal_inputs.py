"""Rows with equal inputs count as one example, whose contribution is their sum; and that is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ntkexp
from ntkexp.foreign_loop.example_names import digests
from ntkexp.foreign_loop.trace import Trace

ROWS = 12
CLOSE = 1e-12  # sums of at most 12 rows over 12 steps, relative to the largest contribution


def data(labels: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Rows of which the fourth and the tenth have equal inputs and these labels, or none if there are no labels."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(ROWS, 4, generator=generator).double(), torch.arange(ROWS) % 3
    if labels is not None:
        x[9] = x[3]
        y[3], y[9] = labels
    return x, y


Batches = Callable[[], Iterator[list[int]]]


def whole() -> Iterator[list[int]]:
    for _ in range(4):
        yield list(range(ROWS))


def shuffled() -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield torch.randperm(ROWS, generator=generator).tolist()


def apart() -> Iterator[list[int]]:
    """Epochs of batches in none of which the two rows meet; the last epoch is not complete."""
    for _ in range(3):
        yield from ([0, 3, 5, 7, 11, 1], [2, 9, 4, 6, 8, 10])
    yield [3, 0, 1, 2, 4, 5]


def irregular() -> Iterator[list[int]]:
    """Draws of which none holds both rows."""
    yield from ([0, 3, 5], [3, 1, 2], [9, 4, 6], [7, 8, 3], [10, 11, 9], [0, 1, 5])


def drawn() -> Iterator[list[int]]:
    """Rows drawn with replacement, of which no two have equal inputs."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        yield torch.randint(ROWS, (6,), generator=generator).tolist()


def trained(labels: tuple[int, int] | None, batches: Batches, *, dropout: float = 0.0, **more: Any) -> Trace:
    x, y = data(labels)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        steps = list(batches())
        if "ids" in more:
            now = iter(steps)
            more["ids"] = lambda _: next(now)
        with ntkexp.follow(net, optimizer, queries=x[:2], **more) as trace:
            for batch in steps:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return trace


DIFFERENT, TOGETHER, OFTEN = "with different ∂L/∂f (other labels?)", "several times in one call", "used twice as often"
CASES: dict[str, tuple[tuple[int, int] | None, Batches, float, str]] = {
    "other labels": ((0, 2), whole, 0.0, DIFFERENT),
    "other labels, shuffled": ((0, 2), shuffled, 0.0, DIFFERENT),
    "one label": ((1, 1), whole, 0.0, TOGETHER),
    "other labels, dropout": ((0, 2), whole, 0.5, DIFFERENT),
    "one label, dropout": ((1, 1), whole, 0.5, TOGETHER),
    "other labels, other batches": ((0, 2), apart, 0.0, DIFFERENT),
    "other labels, drawn irregularly": ((0, 2), irregular, 0.0, DIFFERENT),
    "other labels, other batches, dropout": ((0, 2), apart, 0.5, DIFFERENT),
    "one label, other batches": ((1, 1), apart, 0.0, OFTEN),
    "drawn with replacement": (None, drawn, 0.0, TOGETHER),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_inputs_are_reported(case: str, caplog: pytest.LogCaptureFixture) -> None:
    labels, batches, dropout, sign = CASES[case]
    found = trained(labels, batches, dropout=dropout).attribute()
    said = str(found.attrs["equal_inputs"])
    assert sign in said
    assert sum(each in said for each in (DIFFERENT, TOGETHER, OFTEN)) == 1
    assert said in caplog.text
    if labels is not None:
        assert digests(data(labels)[0])[3] in said
        assert found.sizes["example"] == ROWS - 1


@pytest.mark.parametrize("batches", [whole, shuffled, apart], ids=lambda each: each.__name__)
def test_nothing_is_reported_of_other_inputs_or_of_names(batches: Batches, caplog: pytest.LogCaptureFixture) -> None:
    for trace in (trained(None, batches), trained((0, 2), batches, ids="given")):
        found = trace.attribute()
        assert found.sizes["example"] == ROWS
        assert "equal_inputs" not in found.attrs
    assert not caplog.text


@pytest.mark.parametrize("batches", [whole, shuffled, apart, drawn], ids=lambda each: each.__name__)
def test_their_contribution_is_the_sum_over_their_rows(batches: Batches) -> None:
    x, _ = data((0, 2))
    merged = trained((0, 2), batches).attribute()["contribution"]
    named = trained((0, 2), batches, ids="given").attribute()["contribution"]
    rows = {name: [k for k, other in enumerate(digests(x)) if other == name] for name in digests(x)}
    for name in merged["example"].to_numpy().tolist():
        places = [str(k) for k in rows[name] if str(k) in named["example"].to_numpy()]
        expected = named.sel(example=places).sum("example")
        assert float(abs(merged.sel(example=name) - expected).max()) <= CLOSE * float(abs(named).max())


@pytest.mark.slow
def test_the_run_says_it_too_and_a_resumed_loop_the_same(tmp_path: Path) -> None:
    """The names are those of the content, wherever the loop was broken off."""
    x, y = data((0, 2))

    def run(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, count: int, *, broken: bool) -> Trace:
        with ntkexp.follow(net, optimizer, queries=x[:2], to=folder) as trace:
            for _ in range(count):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if broken:
                raise KeyboardInterrupt
        return trace

    found = []
    for name in ("whole", "resumed"):
        folder = tmp_path / "runs" / name
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            net = nn.Linear(4, 3).double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if name == "resumed":
            with pytest.raises(KeyboardInterrupt):
                run(net, optimizer, folder, 2, broken=True)
        trace = run(net, optimizer, folder, 4 if name == "whole" else 2, broken=False)
        found.append(trace.attribute())
        assert DIFFERENT in ntkexp.load_run(folder).outcome
    one, other = found
    assert one.attrs["equal_inputs"] == other.attrs["equal_inputs"]
    assert one["example"].to_numpy().tolist() == other["example"].to_numpy().tolist()
    np.testing.assert_array_equal(one["contribution"], other["contribution"])
