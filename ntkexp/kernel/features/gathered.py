"""Uses that share their β are one use: positions before a mean over them, or the one position that is read.

    Σ_u a_u ⊗ w_u β = (Σ_u w_u a_u) ⊗ β        with w_u one or nothing

so a layer whose result is only summed up, or looked at in one place, costs a kernel what a layer of one use does.
Whether they do is read from the numbers, for which a device is waited: a kernel by itself can afford that, a step not.

>>> from ntkexp.kernel.features.blocks import Factored
>>> a, beta = torch.arange(6.0).view(1, 3, 2), torch.tensor([[1.0], [0.0], [1.0]]).view(1, 1, 3, 1)
>>> found = gathered(Factored(a, beta, None, None, None))
>>> (found.inputs * found.outputs[:, 0]).tolist()
[[[4.0, 6.0]]]
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.features import Features


def in_few_uses(features: Features) -> Features:
    """The same features, with as few uses as they can have."""
    blocks = features.blocks.items()
    return replace(
        features, blocks={key: gathered(block) if isinstance(block, Factored) else block for key, block in blocks}
    )


def gathered(block: Factored) -> Factored:
    """The same gradients from one use of each example, where all of an example's uses have one β or none."""
    examples, uses, _ = block.inputs.shape
    if uses < 2 or not examples or share(block.outputs[:1]) is None:  # as most show by their first example
        return block
    weights = share(block.outputs)
    if weights is None:
        return block
    total = weights.sum(1, keepdim=True).clamp(min=1)  # in the outputs, so that a bias has its share as well
    inputs = torch.bmm((weights / total)[:, None], block.inputs)
    return replace(block, inputs=inputs, outputs=block.outputs.sum(2, keepdim=True))


def share(outputs: Float[Tensor, "example out use features"]) -> Float[Tensor, "example use"] | None:
    """One for each use that has the β of its example, nothing for one that has none; None if one has another."""
    if torch.equal(outputs[:, :, :1].expand_as(outputs), outputs):  # which is soon seen
        return outputs.new_ones(len(outputs), outputs.shape[2])
    uses = (outputs != 0).any(3).any(1)
    first = uses.to(torch.uint8).argmax(1)  # each example's first use with any β
    alike = outputs[torch.arange(len(outputs), device=first.device), :, first]
    weights = uses.to(outputs.dtype)
    return weights if torch.equal(alike[:, :, None] * weights[:, None, :, None], outputs) else None
