"""Sentences of tokens, which are whole numbers below a `vocabulary`, and one token or class to predict for each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.format.user_path import UserPath, contents, existing, quoted
from ntkexp.mistake import Mistake

# --- Sentences of tokens, which are whole numbers below a `vocabulary`, and one token or class to be told of each.
#
# They reach the network as they are, or encoded as one-hot vectors for networks that know numbers only:
#
#     tokens   [example, position]        one_hot   [example, position, token], 1 at the token and 0 elsewhere
#
# Doubles hold them exactly up to 2^53.


class AbstractTokens(AbstractSource):
    """A source gives tokens; a scale would make them something else, so there is none."""

    standardise: Literal["none"] = "none"
    encoding: Literal["tokens", "one_hot"] = "tokens"

    def sentences(
        self,
        tokens: Int[Tensor, "example position"],
        labels: Int[Tensor, " example"],
        classes: tuple[str, ...],
        vocabulary: int,
    ) -> Examples:
        """Examples in the encoding that is asked for."""
        if self.encoding == "one_hot":
            return Examples(tokens.double(), labels, classes, one_hot=vocabulary)
        return Examples(tokens.double(), labels, classes, vocabulary=vocabulary)


class ModularAddition(AbstractTokens):
    """Modular addition: two numbers as tokens, their sum modulo p as the class.

    `modulus` classes, of which token k is class k; the sign '=' is the token `modulus`.

        x = (a, b)  or  (a, b, =),    y = (a + b) mod p,    all p² pairs of a, b in 0 … p − 1

    A. Power et al., "Grokking: generalization beyond overfitting on small algorithmic datasets" (2022),
    arXiv:2201.02177.

    >>> source = ModularAddition(modulus=5, train=20, probe=5)
    >>> data = source.split()
    >>> torch.equal(data.train.inputs.sum(1).long() % 5, data.train.target)
    True
    """

    train: Count = 64
    probe: CountOrNone = 24
    modulus: int = Field(11, ge=2, le=4096)
    equals: bool = False

    def examples(self, generator: torch.Generator) -> Examples:
        self.refuse_few()
        numbers = torch.arange(self.modulus)
        tokens = torch.cartesian_prod(numbers, numbers)
        labels = tokens.sum(1) % self.modulus
        if self.equals:
            tokens = torch.cat([tokens, torch.full((len(tokens), 1), self.modulus)], 1)
        names = tuple(str(number) for number in range(self.modulus))
        return self.sentences(tokens, labels, names, self.modulus + self.equals)

    def refuse_few(self) -> None:
        """There are no more pairs than there are."""
        asked, pairs = self.train + self.probe + (self.test or 0), self.modulus**2
        if asked > pairs:
            raise Mistake(
                f"data.modulus={self.modulus} makes {pairs} sums, and data.train, data.probe and data.test ask for "
                f"{asked}; lower one of them, or raise data.modulus"
            )


class Text(AbstractTokens):
    """Text from a file, byte by byte: `context` bytes are shown, the next one is to be told.

    A source of few examples by default, since there are many classes.

        ntkexp train model=transformer model.causal=true data=text data.path=book.txt data.context=16

    The tokens are the bytes that the file holds, in order of their codes, and these are the classes as well: a
    class that never occurs would add nothing but size to kernels, which grow with the square of the classes.
    Windows do not overlap, so that no split shows what another asks, and of equal ones a single one is kept.
    """

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
