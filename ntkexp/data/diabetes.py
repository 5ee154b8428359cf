"""Diabetes: ten measurements of 442 patients and how far the disease went in a year."""

from __future__ import annotations

import torch

from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.bundled import read_bundled


class Diabetes(AbstractSource):
    """Regression; the inputs are taken in their own units, because standardising is done here."""

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("diabetes")
        return Examples(inputs, target[:, None])
