"""Whether half of a removal does half of it: trainings in which a twentieth of the examples weigh ½, and nothing.

    agreement = cos(F(½) − F(1), F(0) − F(½))        F(w): the outputs at the points that are asked about

It is near 1 where the outputs change smoothly with the weights of examples, whatever their derivative is.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.removal.rerun import Rerun
from ntkexp.removal.train import trained
from ntkexp.stream import stream

SHARE = 20  # one of so many examples is left out


def agreement(
    rerun: Rerun, end: Float[Tensor, " weight"], inputs: Float[Tensor, "point *shape"], outputs: tuple[int, ...]
) -> float:
    """The cosine, for a group drawn from the seed; `end` is where training led with all examples."""
    chosen = twentieth(rerun.examples, rerun.seed)
    half, none = rerun.everyone.clone(), rerun.everyone.clone()
    half[chosen], none[chosen] = 0.5, 0.0
    ends = (end, *trained(rerun, torch.stack([half, none])))
    with torch.no_grad():
        at_all, at_half, at_none = (rerun.outputs(each, inputs)[:, list(outputs)].flatten() for each in ends)
    return cosine(at_all, at_half, at_none)


def twentieth(examples: int, seed: int) -> Int[Tensor, " chosen"]:
    """The group of examples, drawn from the seed."""
    return torch.randperm(examples, generator=stream("half", seed))[: max(1, examples // SHARE)]


def cosine(at_all: Tensor, at_half: Tensor, at_none: Tensor) -> float:
    """The cosine, given the outputs of the three trainings one after another.

    >>> cosine(torch.zeros(2), torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0]))
    1.0
    """
    first, second = at_half - at_all, at_none - at_half
    return float(first @ second / (first.norm() * second.norm()))
