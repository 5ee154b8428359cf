"""Handwritten digits of 8 × 8 pixels with 17 greys, the test part of the UCI set, as scikit-learn carries it.

>>> Digits(train=100).split().train.inputs.shape
torch.Size([100, 1, 8, 8])
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from ntkexp.data.images import AbstractImages, Pictures


class Digits(AbstractImages):
    """1797 pictures in ten classes, about 180 of each."""

    names: ClassVar[tuple[str, ...]] = tuple("0123456789")
    white: ClassVar[float] = 16.0
    classes: tuple[int, ...] | Literal["all"] = (3, 8)

    def pictures(self) -> Pictures:
        from sklearn.datasets import load_digits  # noqa: PLC0415  slow to load, and composing needs none of it

        bunch = load_digits()
        return torch.as_tensor(bunch.images, dtype=torch.uint8)[:, None], torch.as_tensor(bunch.target)
