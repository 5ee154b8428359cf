"""Handwritten digits of 8 × 8 pixels with 17 greys, the test part of the UCI set.

>>> Digits(train=100).split().train.inputs.shape
torch.Size([100, 1, 8, 8])
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from ntkexp.data.bundled import read_bundled
from ntkexp.data.images import AbstractImages, Pictures


class Digits(AbstractImages):
    """1797 pictures in ten classes, about 180 of each."""

    names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    white: ClassVar[float] = 16.0
    classes: tuple[int, ...] | Literal["all"] = (3, 8)

    def pictures(self) -> Pictures:
        greys, labels = read_bundled("digits")
        return greys.to(torch.uint8).reshape(-1, 1, 8, 8), labels.long()
