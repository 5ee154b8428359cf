"""Plain Jacobians, one back-propagation for every example and output: right for any module, and slow.

For the tangent of a module with an operation that no difference rule knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ntkexp.kernel.features import Block, Features, Key, Rows
from ntkexp.kernel.tape import Tape
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function

AGREEMENT = 1e-6  # relative: what batching may change in float32, and far less than what coupled examples change


def jacobian(function: Function, tape: Tape, trained: frozenset[str]) -> Features:
    """The features of a point, each parameter's gradients as they are.

    Every example is run by itself, so that no other can enter; outputs that differ from those of the batch show that
    the module couples examples.
    """
    weights = {name: tape[slot].detach().requires_grad_(name in trained) for slot, name in tape.weights.items()}
    leaves = {name: weight for name, weight in weights.items() if name in trained}
    rows: dict[str, list[Tensor]] = {name: [] for name in leaves}
    together = tape[tape.output].detach().flatten(1)
    for k, example in enumerate(tape[tape.inputs].detach()):
        output = function(weights, example[None]).flatten()
        if not torch.allclose(
            output.detach(), together[k], rtol=AGREEMENT, atol=AGREEMENT * float(together.abs().max())
        ):
            raise Mistake(
                "the module couples the examples of a batch: an example gives another output by itself than among "
                "others, so it has no tangent kernel"
            )
        for value in output:
            gradients = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, materialize_grads=True)
            for name, gradient in zip(leaves, gradients, strict=True):
                rows[name].append(gradient.flatten())
    examples, outputs = together.shape
    blocks: dict[Key, Block] = {
        (name, None): Rows(torch.stack(parts).view(examples, outputs, -1), name) for name, parts in rows.items()
    }
    return Features(blocks, examples, outputs)
