"""A table with a parameter for every whole number, which generalises to none:

    f(i) = θᵢ,    θᵢ = slope · i + offset at the start,    k(i, j) = 1 if i = j, else 0

Descent on the error at one number leaves all others where they were (Huszár 2020).

>>> table = LookupTable().function()
>>> table(torch.tensor([[10.0], [-10.0]])).flatten().tolist()
[32.0, -28.0]
"""

from __future__ import annotations

from typing import Annotated, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from ntkexp.mistake import Mistake
from ntkexp.model.scalar import AbstractScalar

Entry = Annotated[int, Field(ge=-(10**6), le=10**6)]


class LookupTable(AbstractScalar):
    """The table has the numbers from `first` to `last`."""

    first: Entry = -10
    last: Entry = 20
    slope: float = 3.0
    offset: float = 2.0

    @model_validator(mode="after")
    def refuse_empty(self) -> Self:
        """There is at least one entry."""
        if self.last < self.first:
            raise Mistake(f"model.last={self.last}: the table starts at model.first={self.first}; raise it")
        return self

    def function(self) -> nn.Module:
        keys = torch.arange(self.first, self.last + 1, dtype=torch.float64)
        return TableOfEntries(keys, self.slope * keys + self.offset)


class TableOfEntries(nn.Module):
    """f(x) is the entry whose key is x."""

    key: Tensor

    def __init__(self, key: Float[Tensor, " entry"], entry: Float[Tensor, " entry"]) -> None:
        super().__init__()
        self.register_buffer("key", key)
        self.entry = nn.Parameter(entry[:, None].clone())

    def forward(self, x: Float[Tensor, "example one"]) -> Float[Tensor, "example one"]:
        place = (x[:, 0] - self.key[0]).round().long()
        known = (place >= 0) & (place < len(self.key)) & (x[:, 0] == x[:, 0].round())
        if not known.all():
            raise Mistake(
                f"model=lookup_table has no entry for {float(x[~known][0, 0]):g}; its keys are the whole numbers from "
                f"{int(self.key[0])} to {int(self.key[-1])}, which model.first and model.last say"
            )
        return nn.functional.embedding(place, self.entry)
