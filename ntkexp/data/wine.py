"""Wine recognition: 13 measurements of 178 wines from three cultivars, as scikit-learn carries it."""

from __future__ import annotations

import torch
from pydantic import NonNegativeInt, PositiveInt

from ntkexp.data.base import AbstractSource, Examples


class Wine(AbstractSource):
    """Three classes; the set is small, and so are its splits."""

    train: PositiveInt = 64
    probe: NonNegativeInt = 32

    def examples(self, generator: torch.Generator) -> Examples:
        from sklearn.datasets import load_wine  # noqa: PLC0415  slow to load, and composing needs none of it

        bunch = load_wine()
        names = tuple(str(name) for name in bunch.target_names)
        return Examples(torch.as_tensor(bunch.data), torch.as_tensor(bunch.target), names)
