"""Breast cancer Wisconsin (diagnostic): 30 measurements of cell nuclei in 569 tumours."""

from __future__ import annotations

import torch

from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.bundled import read_bundled


class BreastCancer(AbstractSource):
    """Two classes, malignant and benign."""

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("breast_cancer")
        return Examples(inputs, target.long(), ("malignant", "benign"))
