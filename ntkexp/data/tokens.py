"""Sentences of tokens, which are whole numbers below a `vocabulary`, and one token or class to be told of each.

They reach the network as they are, or encoded as one-hot vectors for networks that know numbers only:

    tokens   [example, position]        one_hot   [example, position, token], 1 at the token and 0 elsewhere

Doubles hold them exactly up to 2^53.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Int
from torch import Tensor

from ntkexp.data.base import AbstractSource, Examples


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
