"""AdamW (Loshchilov & Hutter 2019): Adam, beside which the weights decay by themselves, θ ← (1 − ηλ)θ before a step."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat

from ntkexp.optimizer.adaptive import AbstractAdam


class AdamW(AbstractAdam):
    """An Adam whose decay goes past the memory."""

    weight_decay: NonNegativeFloat = 0.01

    decouples: ClassVar[bool] = True
