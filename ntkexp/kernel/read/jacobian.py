"""Plain Jacobians, one back-propagation for every example and output: right for any module, and slow.

For the tangent of a module with an operation that no difference rule knows, or whose gradients are its own.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Rows
from ntkexp.kernel.features.features import Features, Key
from ntkexp.kernel.read.faithful import dense
from ntkexp.kernel.record.independence import COUPLED, refuse_change
from ntkexp.kernel.record.inputs import part
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.record.taping import columns
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function


def jacobian(
    function: Function, tape: Tape, trained: frozenset[str], mixtures: Float[Tensor, "mixture example out"]
) -> Features:
    """The features of a point, each parameter's gradients as they are, of mixtures of outputs.

    Every example is run by itself, so that no other can enter; outputs that differ from those of the batch show that
    the module couples examples. Of a module that draws random numbers for a batch as a whole, all are run each time.
    """
    weights = {name: tape[slot].detach().requires_grad_(name in trained) for slot, name in tape.weights.items()}
    leaves = {name: weight for name, weight in weights.items() if name in trained}
    rows: dict[str, list[Tensor]] = {name: [] for name in leaves}
    together = tape.outputs
    for k in range(len(together)):
        this = slice(k, k + 1)
        with torch.enable_grad():
            whole = columns(function, weights, tape.given if tape.drawn else part(tape.given, this))
        output = whole[this] if tape.drawn else whole
        refuse_change(output.detach(), together[this], tape, COUPLED)
        if not output.requires_grad:
            raise Mistake("the outputs depend on no parameter that requires gradients, so the tangent kernel is zero")
        for mixture in mixtures[:, this]:
            gradients = torch.autograd.grad(
                output, list(leaves.values()), mixture, retain_graph=True, materialize_grads=True
            )
            for name, gradient in zip(leaves, gradients, strict=True):
                rows[name].append(dense(gradient).flatten())
    shape = (len(together), len(mixtures), -1)
    blocks: dict[Key, Block] = {
        (name, None): Rows(torch.stack(found).view(shape), name) for name, found in rows.items()
    }
    return Features(blocks, len(together), len(mixtures))
