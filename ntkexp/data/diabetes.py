"""Diabetes: ten measurements of 442 patients and how far the disease went in a year, as scikit-learn carries it."""

from __future__ import annotations

import torch

from ntkexp.data.base import AbstractSource, Examples


class Diabetes(AbstractSource):
    """Regression; the inputs are taken in their own units, because standardising is done here."""

    def examples(self, generator: torch.Generator) -> Examples:
        from sklearn.datasets import load_diabetes  # noqa: PLC0415  slow to load, and composing needs none of it

        bunch = load_diabetes(scaled=False)
        return Examples(torch.as_tensor(bunch.data), torch.as_tensor(bunch.target)[:, None])
