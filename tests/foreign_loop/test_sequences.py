"""Packed sequences: the examples of a batch share one tensor of rows, and each keeps its own contribution.

The oracle trains the same network, and calls it on each sequence alone, without padding and without packing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import ntkexp
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.mistake import Mistake

EXAMPLES, LONGEST, WORDS, WIDTH = 6, 5, 7, 3
ROUNDING = 1e-12  # of sums of 6 examples over 4 steps, relative to the largest contribution

BATCHES = ((0, 1, 2), (3, 4, 5), (0, 1, 2), (2, 0, 4))
"""Some batches have one shape and one number of words, and other lengths."""
LENGTHS = torch.tensor([5, 3, 2, 5, 4, 1])

with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    TEXTS = torch.randint(1, WORDS, (EXAMPLES, LONGEST))
    TEXTS[torch.arange(LONGEST) >= LENGTHS[:, None]] = 0
    TARGETS = torch.randn(EXAMPLES, 2, dtype=torch.float64)


class Reader(nn.Module):
    """A recurrent network that reads packed sequences, or one sequence alone (`lengths` is None)."""

    def __init__(
        self,
        cell: Callable[..., nn.RNNBase] = nn.LSTM,
        *,
        read: Callable[[Reader, Tensor, Tensor], Tensor],
        ordered: bool = False,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self.table = nn.Embedding(WORDS, WIDTH)
            self.cell: nn.RNNBase = cell(WIDTH, 4, batch_first=True, dropout=dropout, **options)
            self.outer = nn.Linear(8 if self.cell.bidirectional else 4, 2)
        self.read, self.ordered = read, ordered
        self.double()

    def forward(self, texts: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths, rows = torch.tensor([texts.shape[1]]), self.table(texts)
            states, final = self.cell(rows)
            outputs: Tensor = self.outer(alone(self.read, states, final))
            return outputs
        outputs = self.outer(self.read(self, texts, lengths))
        return outputs

    def packed(self, texts: Tensor, lengths: Tensor) -> object:
        return pack_padded_sequence(self.table(texts), lengths, batch_first=True, enforce_sorted=self.ordered)


def of_last_layer(final: object) -> Tensor:
    hidden = final[0] if isinstance(final, tuple) else final
    assert isinstance(hidden, Tensor)
    return hidden


def final_state(model: Reader, texts: Tensor, lengths: Tensor) -> Tensor:
    """The states after the last word, in both directions."""
    hidden = of_last_layer(model.cell(model.packed(texts, lengths))[1])
    return torch.cat(list(hidden[-2:] if model.cell.bidirectional else hidden[-1:]), 1)


def mean_state(model: Reader, texts: Tensor, lengths: Tensor) -> Tensor:
    states, _ = pad_packed_sequence(model.cell(model.packed(texts, lengths))[0], batch_first=True)
    total: Tensor = states.sum(1) / lengths[:, None]
    return total


def from_a_list(model: Reader, texts: Tensor, lengths: Tensor) -> Tensor:
    """Python cuts each sequence to its length."""
    rows = [model.table(text[:length]) for text, length in zip(texts, lengths.tolist(), strict=True)]
    hidden = of_last_layer(model.cell(pack_sequence(rows, enforce_sorted=model.ordered))[1])
    return torch.cat(list(hidden[-2:] if model.cell.bidirectional else hidden[-1:]), 1)


def alone(read: Callable[..., Tensor], states: Tensor, final: object) -> Tensor:
    """Apply the readout to one sequence that is not packed."""
    if read is mean_state:
        return states.mean(1)
    hidden = of_last_layer(final)
    return torch.cat(list(hidden[-2:] if states.shape[2] == 8 else hidden[-1:]), 1)


def ordered_rows(batch: tuple[int, ...]) -> Tensor:
    """The examples of a batch, the longest first."""
    rows = torch.tensor(batch)
    return rows[LENGTHS[rows].argsort(descending=True, stable=True)]


def names_of(call: SeenCall) -> list[str]:
    """Name examples by their words, however they are padded."""
    (texts, *_) = call.args
    assert isinstance(texts, Tensor)
    return ["".join(str(word) for word in text if word) for text in texts.tolist()]


def trained(model: Reader, *, packed: bool) -> xr.Dataset:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    queries = (TEXTS[[3, 1]], LENGTHS[[3, 1]]) if packed else TEXTS[3:4]
    with ntkexp.follow(model, optimizer, queries=queries, ids=names_of) as trace:
        for batch in BATCHES:
            optimizer.zero_grad()
            rows = ordered_rows(batch)
            if packed:
                outputs = model(TEXTS[rows], LENGTHS[rows])
                (outputs - TARGETS[rows]).square().sum(1).mean().backward()
            else:
                for row in rows:
                    outputs = model(TEXTS[row : row + 1, : LENGTHS[row]])
                    ((outputs - TARGETS[row]).square().sum() / len(rows)).backward()
            optimizer.step()
    return trace.attribute(quiet=True)


CELLS = (nn.LSTM, nn.GRU, nn.RNN)
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "both directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
    "two layers in both directions": {"num_layers": 2, "bidirectional": True},
}
READS = (final_state, mean_state, from_a_list)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("cell", "form", "read", "ordered"),
    [
        pytest.param(*case, id=f"{case[0].__name__}, {case[1]}, {case[2].__name__}, {'' if case[3] else 'un'}ordered")
        for case in product(CELLS, FORMS, READS, (False, True))
    ],
)
def test_an_example_contributes_as_it_does_alone(
    cell: type[nn.RNNBase], form: str, read: Callable[[Reader, Tensor, Tensor], Tensor], ordered: bool
) -> None:
    """Contributions and changes agree with a loop over single sequences, and all parts add up."""
    found = trained(Reader(cell, read=read, ordered=ordered, **FORMS[form]), packed=True)
    expected = trained(Reader(cell, read=read, ordered=ordered, **FORMS[form]), packed=False)
    size = float(abs(expected["contribution"]).max())
    ours = found["contribution"][:1].sel(example=expected["example"]).to_numpy()
    assert np.abs(ours - expected["contribution"].to_numpy()).max() <= ROUNDING * size
    total = found["contribution"].sum("example") + found["decay"] + found["rounding"]
    assert float(abs(total - found["change"]).max()) <= ROUNDING * size


def of_examples(outputs: Tensor, call: SeenCall) -> Tensor:
    known = dict(zip(names_of(SeenCall((TEXTS,), {})), TARGETS, strict=True))
    return (outputs - torch.stack([known[name] for name in call.ids])).square().sum(1)


def padded_state(model: Reader, texts: Tensor, lengths: Tensor) -> Tensor:
    """The state after the last word, of padded sequences."""
    states, _ = model.cell(model.table(texts))
    last: Tensor = states[torch.arange(len(states)), lengths - 1]
    return last


def padded_mean(model: Reader, texts: Tensor, lengths: Tensor) -> Tensor:
    states, _ = model.cell(model.table(texts))
    counts = torch.arange(states.shape[1]) < lengths[:, None]
    return torch.where(counts[..., None], states, 0.0).sum(1) / lengths[:, None]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("read", "padded"), [(final_state, padded_state), (mean_state, padded_mean)])
@pytest.mark.parametrize("cell", CELLS)
def test_effects_are_those_of_padded_sequences(
    cell: type[nn.RNNBase], read: Callable[..., Tensor], padded: Callable[..., Tensor]
) -> None:
    found: list[np.ndarray] = []
    expected: list[np.ndarray] = []
    for way, kept in ((read, found), (padded, expected)):
        model = Reader(cell, read=way)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        queries = (TEXTS[:2], LENGTHS[:2])
        with ntkexp.follow(model, optimizer, queries=queries, ids=names_of, loss=of_examples) as trace:
            for batch in BATCHES[:3]:
                optimizer.zero_grad()
                rows = torch.tensor(batch)
                call = SeenCall((TEXTS[rows],), {}, tuple(names_of(SeenCall((TEXTS[rows],), {}))))
                of_examples(model(TEXTS[rows], LENGTHS[rows]), call).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        kept.append(trace.attribute(effects=True, quiet=True)["effect"].to_numpy())
    assert np.abs(found[0] - expected[0]).max() <= ROUNDING * np.abs(expected[0]).max()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.sample(1)
def test_elements_of_packed_rows_may_be_dropped(ordered: bool) -> None:
    """A mask belongs to a row of the batch. The parts add up, or `attribute` would raise."""
    model = Reader(nn.LSTM, read=final_state, ordered=ordered, num_layers=2, dropout=0.5)
    found = trained(model, packed=True)
    assert float(found["gradient_error"].max()) < 1e-13
    assert float(abs(found["change"]).max()) > 0


def lengths_from_words(model: Reader, texts: Tensor, lengths: Tensor) -> Tensor:
    return final_state(model, texts, (texts > 0).sum(1))


def only_words(model: Reader, texts: Tensor, lengths: Tensor) -> Tensor:
    """A state for each word, up to the longest sequence of the batch."""
    states: Tensor = pad_packed_sequence(model.cell(model.packed(texts, lengths))[0], batch_first=True)[0]
    return states


def asked(model: nn.Module, *queries: object) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ntkexp.follow(model, optimizer, queries=queries):
        pass


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "masks, and lengths from words": (
        lambda: trained(Reader(read=lengths_from_words, num_layers=2, dropout=0.5), packed=True),
        "random numbers for the rows of packed sequences.*pass the lengths as a separate input",
    ),
    "packed sequences as inputs": (
        lambda: asked(nn.LSTM(3, 2), pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])),
        "the inputs are packed sequences.*let the model call pack_padded_sequence",
    ),
    "a list of lengths": (
        lambda: asked(Reader(read=lambda m, texts, n: final_state(m, texts, torch.tensor(n))), TEXTS[:2], [5, 3]),
        "give a tensor in place of a list",
    ),
    "outputs as wide as the batch": (
        lambda: asked(Reader(read=only_words), TEXTS[:2], LENGTHS[:2]),
        "10 numbers for an example in the whole batch, but 6 .*total_length=",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_way_out(case: str) -> None:
    act, words = REFUSED[case]
    with pytest.raises(Mistake, match=words):
        act()
