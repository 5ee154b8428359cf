"""What the data asks of a network: a shape of its examples, tokens or numbers in them, and a number of outputs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.stream import stream


@dataclass(frozen=True)
class LearningTask:
    """Examples of a `shape` have so many `outputs`; unless `vocabulary` is 0 they are tokens, numbers below it."""

    shape: tuple[int, ...]
    outputs: int
    vocabulary: int = 0

    def sample(self, examples: int = 2) -> Float[Tensor, "example *shape"]:
        """Make up examples to try a network on.

        >>> LearningTask((3,), 1, vocabulary=4).sample().tolist()
        [[0.0, 1.0, 2.0], [3.0, 0.0, 1.0]]
        """
        if self.vocabulary:
            tokens = torch.arange(examples * prod(self.shape)) % self.vocabulary
            return tokens.view(examples, *self.shape).double()
        return torch.randn(examples, *self.shape, generator=stream("trial"), dtype=torch.float64)

    @property
    def said(self) -> str:
        """The examples are spoken of in these words."""
        tokens = f", tokens below {self.vocabulary}" if self.vocabulary else ""
        return f"the data has examples of shape {list(self.shape)}{tokens}"

    def refuse_tokens(self, model: str) -> None:
        """Most networks calculate with their inputs, and a token is no quantity."""
        if self.vocabulary:
            raise Mistake(
                f"model={model} takes numbers, and the data has tokens; choose model=transformer, or "
                "data.encoding=one_hot"
            )
