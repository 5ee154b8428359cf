"""Wine recognition: 13 measurements of 178 wines from three cultivars."""

from __future__ import annotations

import torch
from pydantic import NonNegativeInt, PositiveInt

from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.carried import carried


class Wine(AbstractSource):
    """Three classes; the set is small, and so are its splits."""

    train: PositiveInt = 64
    probe: NonNegativeInt = 32

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = carried("wine")
        return Examples(inputs, target.long(), ("class_0", "class_1", "class_2"))
