"""Wine recognition: 13 measurements of 178 wines from three cultivars."""

from __future__ import annotations

import torch

from ntkexp.component import Count, CountOrNone
from ntkexp.data.base import AbstractSource, Examples
from ntkexp.data.bundled import read_bundled


class Wine(AbstractSource):
    """Three classes; the set is small, and so are its splits."""

    train: Count = 64
    probe: CountOrNone = 32

    def examples(self, generator: torch.Generator) -> Examples:
        inputs, target = read_bundled("wine")
        return Examples(inputs, target.long(), ("class_0", "class_1", "class_2"))
