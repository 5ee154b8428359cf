"""Networks whose values decide which row goes where, each with a batch of random inputs of its own.

An example is four positions of three numbers. Where the first number of a position is positive the position counts,
which is how many networks tell words from padding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.kernel.problems import Problem

POSITIONS, COUNTED = 4, 9  # of each example; of all five


def counts(x: Tensor) -> Tensor:
    return x[..., 0] > 0


class Layers(nn.Module):
    """A hidden layer at every position, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def hidden(self, x: Tensor) -> Tensor:
        """Of rows of three numbers."""
        return torch.tanh(self.inner(x))


class Packed(Layers):
    """Positions that count are computed alone, and put back into rows of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        mask, room = counts(x), x.new_zeros(*x.shape[:2], 4)
        room[mask] = self.hidden(x[mask])
        outputs: Tensor = self.outer(room.sum(1))
        return outputs


class Scattered(Layers):
    """The same, written by `masked_scatter`."""

    def forward(self, x: Tensor) -> Tensor:
        mask, room = counts(x)[..., None].expand(-1, -1, 4), x.new_zeros(*x.shape[:2], 4)
        outputs: Tensor = self.outer(room.masked_scatter(mask, self.hidden(x[counts(x)])).sum(1))
        return outputs


class Selected(Layers):
    """What counts of all positions, picked out by `masked_select` after the layer."""

    def forward(self, x: Tensor) -> Tensor:
        mask = counts(x)
        flat = self.hidden(x).masked_select(mask[..., None]).view(-1, 4)
        outputs: Tensor = self.outer(x.new_zeros(len(x), 4).index_add(0, mask.nonzero()[:, 0], flat))
        return outputs


class Nested(Layers):
    """A mask of what another mask left."""

    def forward(self, x: Tensor) -> Tensor:
        rows = counts(x).nonzero()[:, 0]
        flat = self.hidden(x[counts(x)])
        large = x[counts(x)][:, 1] > 0
        outputs: Tensor = self.outer(x.new_zeros(len(x), 4).index_add(0, rows[large], flat[large]))
        return outputs


class Pooled(Layers):
    """The mean over positions that count, by a product with the mask."""

    def forward(self, x: Tensor) -> Tensor:
        mask = counts(x).to(x.dtype)[..., None]
        outputs: Tensor = self.outer((self.hidden(x) * mask).sum(1) / (1 + mask.sum(1)))
        return outputs


class Largest(Layers):
    """The first position whose number is the largest, by `gather`."""

    def forward(self, x: Tensor) -> Tensor:
        place = x[..., 0].argmax(1)[:, None, None].expand(-1, 1, 4)
        outputs: Tensor = self.outer(self.hidden(x).gather(1, place)[:, 0])
        return outputs


class Last(Layers):
    """The last position that counts, by an index."""

    def forward(self, x: Tensor) -> Tensor:
        place = (counts(x).sum(1) - 1).clamp(min=0)
        outputs: Tensor = self.outer(self.hidden(x)[torch.arange(len(x)), place])
        return outputs


class Sorted(Layers):
    """Examples in the order of their first number, and back."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        outputs: Tensor = self.outer(self.hidden(x[order]).sum(1))
        return outputs[order.argsort()]


class SortedOutside(Layers):
    """The same, where torch does not see the order come about."""

    def forward(self, x: Tensor) -> Tensor:
        order = np.argsort(x[:, 0, 0].detach().numpy())
        outputs: Tensor = self.outer(self.hidden(x[torch.from_numpy(order)]).sum(1))
        return outputs[torch.from_numpy(np.argsort(order))]


class Bucketed(Layers):
    """Two layers, each for the examples of its bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        bucket = (x[:, 0, 0] > 0).long()
        order = bucket.argsort(stable=True)
        one, two = torch.split(x[order], bucket.bincount(minlength=2).tolist())
        hidden = torch.cat([self.hidden(one), torch.sin(self.other(two))]).sum(1)
        outputs: Tensor = self.outer(hidden)
        return outputs[order.argsort()]


class Ragged(Layers):
    """Rows of all examples one after the other, split by lengths that Python reads."""

    def forward(self, x: Tensor) -> Tensor:
        mask = counts(x)
        parts = torch.split(self.hidden(x[mask]), mask.sum(1).tolist())
        outputs: Tensor = self.outer(torch.stack([part.sum(0) for part in parts]))
        return outputs


class Segments(Layers):
    """The same, as differences of running sums at the offsets of the examples."""

    def forward(self, x: Tensor) -> Tensor:
        ends = counts(x).sum(1).cumsum(0)
        flat = self.hidden(x[counts(x)])
        sums = torch.cat([flat.new_zeros(1, 4), flat.cumsum(0)])
        outputs: Tensor = self.outer(sums[ends] - sums[ends - counts(x).sum(1)])
        return outputs


class Emptied(Ragged):
    """A bucket without a row, which is written to in place."""

    def forward(self, x: Tensor) -> Tensor:
        nothing = self.inner(x[x[:, 0, 0] > 1e9]).mul_(2.0)
        outputs: Tensor = super().forward(torch.cat([x, nothing[:, :, :3] + 1]))
        return outputs


class Bags(nn.Module):
    """Tokens of every length, in bags of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.outer = nn.EmbeddingBag(6, 4, mode="sum"), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = counts(x).sum(1)
        tokens = (2 * x[counts(x)][:, 1].abs()).long().clamp(max=5)
        outputs: Tensor = self.outer(torch.tanh(self.table(tokens, lengths.cumsum(0) - lengths)))
        return outputs


class Tokens(nn.Module):
    """Rows of a table, added up by example: tokens pick, and places steer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.outer = nn.Embedding(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens = counts(x).nonzero()[:, 0], (2 * x[counts(x)][:, 1].abs()).long().clamp(max=5)
        outputs: Tensor = self.outer(torch.tanh(x.new_zeros(len(x), 4).index_add(0, rows, self.table(tokens))))
        return outputs


class Experts(nn.Module):
    """A mixture of experts: each example goes to the best of them, or to the best two."""

    def __init__(self, best: int) -> None:
        super().__init__()
        self.router, self.outer, self.best = nn.Linear(12, 3), nn.Linear(4, 2), best
        self.experts = nn.ModuleList(nn.Linear(12, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        gates, chosen = self.router(x).softmax(1).topk(self.best)
        mixed = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, gates[rows, places, None] * torch.tanh(expert(x[rows])))
        outputs: Tensor = self.outer(mixed)
        return outputs


class Switched(Experts):
    """The same with hard gates, written back by a mask."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        chosen = self.router(x).argmax(1)
        mixed = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            mixed[chosen == number] = torch.tanh(expert(x[chosen == number]))
        outputs: Tensor = self.outer(mixed)
        return outputs


class Sequences(nn.Module):
    """A recurrent network on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.outer = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = counts(x).sum(1).clamp(min=1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=POSITIONS)
        outputs: Tensor = self.outer(states.sum(1))
        return outputs


ROUTED: dict[str, Callable[[], nn.Module]] = {
    "packed padding": Packed,
    "masked scatter": Scattered,
    "masked select": Selected,
    "nested masks": Nested,
    "masked mean": Pooled,
    "gathered": Largest,
    "last position": Last,
    "sorted rows": Sorted,
    "sorted outside torch": SortedOutside,
    "bucketed": Bucketed,
    "ragged": Ragged,
    "segments": Segments,
    "an empty bucket": Emptied,
    "embedding bags": Bags,
    "tokens added up": Tokens,
    "top-1 experts": lambda: Experts(1),
    "top-2 experts": lambda: Experts(2),
    "switched experts": Switched,
    "packed sequences": Sequences,
}


def batch(generator: torch.Generator) -> Tensor:
    """Five examples, in which as many positions count as in any other batch, and as many examples start with one."""
    x = torch.randn(5, POSITIONS, 3, generator=generator, dtype=torch.float64)
    x[:, 0, 0] = x[:, 0, 0].abs() * torch.tensor([1, 1, 1, -1, -1])[torch.randperm(5, generator=generator)]
    later = -x[:, 1:, 0].abs().flatten()
    later[torch.randperm(len(later), generator=generator)[: COUNTED - 3]] *= -1
    x[:, 1:, 0] = later.view(5, -1)
    return x


def routed(name: str) -> Problem:
    """The module of this name with random weights, and a batch."""
    generator = torch.Generator().manual_seed(0)
    module = ROUTED[name]().double().eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(0.7 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return Problem(module, batch(generator), generator)
