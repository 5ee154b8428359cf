"""Text from a file, byte by byte: `context` bytes are shown, the next one is to be told.

    ntkexp train model=transformer model.causal=true data=text data.path=book.txt data.context=16

The tokens are the bytes that the file holds, in order of their codes, and these are the classes as well: a class that
never occurs would add nothing but size to kernels, which grow with the square of the classes. Windows do not overlap,
so that no split shows what another asks, and of equal ones a single one is kept.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import Examples
from ntkexp.data.format.user_path import UserPath, contents, existing, quoted
from ntkexp.data.tokens import AbstractTokens
from ntkexp.mistake import Mistake


class Text(AbstractTokens):
    """A source of few examples by default, since there are many classes."""

    train: Count = 32
    probe: CountOrNone = 16
    test: CountOrNone | None = 16
    path: UserPath
    context: Count = 16

    def files(self) -> tuple[Path, ...]:
        return (existing(self.path),)

    def examples(self, generator: torch.Generator) -> Examples:
        raw = contents(self.path)
        present = sorted(set(raw))
        position = torch.zeros(256, dtype=torch.int64)
        position[present] = torch.arange(len(present))
        windows = self.windows(position[np.frombuffer(raw, np.uint8).astype(np.int64)])
        names = tuple(name(byte) for byte in present)
        return self.sentences(windows[:, :-1], windows[:, -1], names, len(names))

    def windows(self, tokens: Int[Tensor, " position"]) -> Int[Tensor, "example window"]:
        """Pieces of the text, of which there have to be enough."""
        size = self.context + 1
        count = len(tokens) // size
        cut: Tensor = torch.unique(tokens[: count * size].view(count, size), dim=0) if count else tokens[:0]
        asked = self.train + self.probe + (self.test or 0)
        if asked > len(cut):
            raise Mistake(
                f"{quoted(self.path)} holds {len(tokens)} bytes, and in them {len(cut)} different windows of "
                f"data.context={self.context} and one more; data.train, data.probe and data.test ask for {asked}; "
                "lower one of them, or take a longer text"
            )
        return cut


def name(byte: int) -> str:
    """A byte as a person would write it.

    >>> name(97), name(10), name(32), name(200)
    ('a', '0x0a', '0x20', '0xc8')
    """
    return chr(byte) if 32 < byte < 127 else f"0x{byte:02x}"
