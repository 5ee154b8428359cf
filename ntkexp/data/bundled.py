"""Small data sets that come with the package; their sources stand beside them in sets/README.md.

>>> inputs, target = read_bundled("wine")
>>> inputs.shape, target.unique()
(torch.Size([178, 13]), tensor([0., 1., 2.], dtype=torch.float64))
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

SETS = Path(__file__).resolve().parent / "sets"


def read_bundled(name: str) -> tuple[Float[Tensor, "example feature"], Float[Tensor, " example"]]:
    """Read all inputs and targets of a set by its name, in the order of its file."""
    numbers = torch.from_numpy(np.loadtxt(SETS / f"{name}.csv.gz", delimiter=","))
    return numbers[:, :-1], numbers[:, -1]
