"""How kernels are made from Jacobians, and for which outputs.

`all` makes blocks [out, out_] for every pair of points; `trace` makes Σ_c K[x, c, x′, c], and only where a kernel is
kept; `none` makes none. Contributions are found by each.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from ntkexp.component import LARGEST, Component

Kernels: TypeAlias = Literal["all", "trace", "none"]


class Kernel(Component):
    """Exactly, or from random projections of gradients to so many dimensions."""

    sketch: int | None = Field(None, ge=1, le=LARGEST)
