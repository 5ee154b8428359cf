"""How kernels are made from Jacobians."""

from __future__ import annotations

from pydantic import Field

from ntkexp.component import LARGEST, Component


class Kernel(Component):
    """Exactly, or from random projections of gradients to so many dimensions."""

    sketch: int | None = Field(None, ge=1, le=LARGEST)
