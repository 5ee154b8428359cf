"""Plain Jacobians, one back-propagation for every example and output: right for any module, and slow.

For the tangent of a module with an operation that no difference rule knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntkexp.kernel.company import refuse_change
from ntkexp.kernel.features import Block, Features, Key, Rows
from ntkexp.kernel.recorder import columns
from ntkexp.kernel.tape import Tape
from ntkexp.shapes import Function


def jacobian(function: Function, tape: Tape, trained: frozenset[str]) -> Features:
    """The features of a point, each parameter's gradients as they are.

    Every example is run by itself, so that no other can enter; outputs that differ from those of the batch show that
    the module couples examples.
    """
    weights = {name: tape[slot].detach().requires_grad_(name in trained) for slot, name in tape.weights.items()}
    leaves = {name: weight for name, weight in weights.items() if name in trained}
    rows: dict[str, list[Tensor]] = {name: [] for name in leaves}
    together = tape.outputs
    for k, example in enumerate(tape[tape.inputs].detach()):
        output = columns(function, weights, example[None])
        refuse_change(output.detach(), together[k : k + 1], together)
        for value in output[0]:
            gradients = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, materialize_grads=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                rows[name].append(gradient.flatten())
    examples, outputs = together.shape
    blocks: dict[Key, Block] = {
        (name, None): Rows(torch.stack(parts).view(examples, outputs, -1), name) for name, parts in rows.items()
    }
    return Features(blocks, examples, outputs)
