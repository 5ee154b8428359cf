"""Modular addition: two numbers as tokens, their sum modulo p as the class.

    x = (a, b)  or  (a, b, =),    y = (a + b) mod p,    all p² pairs of a, b in 0 … p − 1

A. Power et al., "Grokking: generalization beyond overfitting on small algorithmic datasets" (2022), arXiv:2201.02177.

>>> source = ModularAddition(modulus=5, train=20, probe=5)
>>> data = source.split()
>>> torch.equal(data.train.inputs.sum(1).long() % 5, data.train.target)
True
"""

from __future__ import annotations

import torch
from pydantic import Field

from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import Examples
from ntkexp.data.tokens import AbstractTokens
from ntkexp.mistake import Mistake


class ModularAddition(AbstractTokens):
    """`modulus` classes, of which token k is class k; the sign '=' is the token `modulus`."""

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
