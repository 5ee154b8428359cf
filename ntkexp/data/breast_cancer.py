"""Breast cancer Wisconsin (diagnostic): 30 measurements of cell nuclei in 569 tumours, as scikit-learn carries it."""

from __future__ import annotations

import torch

from ntkexp.data.base import AbstractSource, Examples


class BreastCancer(AbstractSource):
    """Two classes, malignant and benign."""

    def examples(self, generator: torch.Generator) -> Examples:
        from sklearn.datasets import load_breast_cancer  # noqa: PLC0415  slow to load, and composing needs none of it

        bunch = load_breast_cancer()
        names = tuple(str(name) for name in bunch.target_names)
        return Examples(torch.as_tensor(bunch.data), torch.as_tensor(bunch.target), names)
