"""Whether half of a removal does half of it: trainings in which a twentieth of the examples weigh ½, and nothing.

    agreement = cos(F(½) − F(1), F(0) − F(½))        F(w): the outputs at the points that are asked about

It is near 1 where the outputs change smoothly with the weights of examples, whatever their derivative is.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.removal.rerun import Rerun
from ntkexp.removal.train import trained
from ntkexp.stream import stream

SHARE = 20  # one of so many examples is left out


def agreement(
    rerun: Rerun, end: Float[Tensor, " weight"], inputs: Float[Tensor, "point *shape"], outputs: tuple[int, ...]
) -> float:
    """The cosine, for a group drawn from the seed; `end` is where training led with all examples."""
    chosen = torch.randperm(rerun.examples, generator=stream("half", rerun.seed))[: max(1, rerun.examples // SHARE)]
    half, none = rerun.everyone.clone(), rerun.everyone.clone()
    half[chosen], none[chosen] = 0.5, 0.0
    ends = (end, *trained(rerun, torch.stack([half, none])))
    with torch.no_grad():
        at_all, at_half, at_none = (rerun.outputs(each, inputs)[:, list(outputs)].flatten() for each in ends)
    first, second = at_half - at_all, at_none - at_half
    return float(first @ second / (first.norm() * second.norm()))
