"""What changed the model and was no step that was followed: an average of weights that is loaded, a clamp.

    f_T − f_0 = Σ contributions + decay + casts + outside      outside = f(as the loop left it) − f(after the last step)

Between steps such a change is refused, as later steps begin at it; after the last it is a part of its own.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.calls import Autocast
from ntkexp.foreign_loop.moved import named_tensors
from ntkexp.kernel.record.taping import columns
from ntkexp.records.contributions import OUTSIDE
from ntkexp.shapes import Inputs, Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class Outside:
    """The `names` of what is otherwise than after the last step, and the `tensors` among it as the loop left them."""

    names: tuple[str, ...] = ()
    tensors: Weights = field(default_factory=dict)

    def moves(
        self, called: CalledModule, casts: Autocast | None, end: Weights, queries: Inputs
    ) -> Float[Tensor, "probe out"]:
        """What these tensors change in the outputs at some queries."""
        after = deepcopy(called.module)
        for name, tensor in named_tensors(after).items():
            tensor.data = self.tensors.get(name, end.get(name, tensor)).detach().to(tensor, copy=True)
        left = CalledModule(after, called.output, casts).function
        weights = {name: tensor.detach() for name, tensor in after.named_parameters() if name in end}
        with torch.no_grad():
            return columns(left, weights, queries) - columns(called.function, end, queries)

    @property
    def named(self) -> str:
        """What changed, in words.

        >>> Outside(("a", "b", "c")).named
        "'a', and 2 more,"
        """
        return f"'{self.names[0]}'" + (f", and {len(self.names) - 1} more," if self.names[1:] else "")


def done_outside(found: xr.Dataset) -> str:
    """The sentence on what no followed step did; none, if there was nothing."""
    if OUTSIDE not in found.attrs:
        return ""
    named = Outside(tuple(str(found.attrs[OUTSIDE]).split(", "))).named
    if OUTSIDE not in found:
        return f"{named} changed after the last step; what is attributed is the model without that"
    ours, moved = (float((found[name] ** 2).sum() ** 0.5) for name in (OUTSIDE, "change"))
    share = short(ours / moved if moved else ours)
    return f"{named} changed after the last step, which did {share} of what changed (`outside`) and is no example's"
