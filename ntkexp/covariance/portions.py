"""Examples a few at a time, so that what is done to them one after the other finds them in a cache.

>>> [len(portion) for portion in portions(torch.zeros(5, 3), 2**16)]
[2, 2, 1]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

NUMBERS = 2**17


def portions(x: Float[Tensor, "example ..."], each: int) -> Sequence[Float[Tensor, "few ..."]]:
    """The examples, as many at a time as are reasonable if each takes so many numbers."""
    return torch.split(x, max(1, NUMBERS // max(1, each)))
