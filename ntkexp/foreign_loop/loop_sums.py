"""What steps of a loop did, added up on the way back over them, and what was proved of each."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.foreign_loop.attribution import StepFound
from ntkexp.foreign_loop.kept.save import CASTS, PROOFS
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.mistake import Mistake
from ntkexp.path.backward.half_times import STRETCHES, Halves, halves_at_zero

LOG = logging.getLogger("ntkexp.follow")

MASSES = 2**27
"""What acted when is told if it takes no more numbers than these, a gigabyte."""

Named: TypeAlias = dict[str, tuple[tuple[str, ...], Tensor]]
"""Arrays with the names of their axes."""


@dataclass
class LoopSums:
    """So far, of the steps that were gone back over."""

    parts: Float[Tensor, "probe out example"]
    decay: Float[Tensor, "probe out"]
    casts: Float[Tensor, "probe out"]
    by_step: Float[Tensor, "probe out step"]
    proofs: Float[Tensor, "proof step"]
    halves: Halves | None

    def take(self, step: FollowedStep, rows: Int[Tensor, " row"], found: StepFound) -> None:
        """Take in a step, each of whose rows is of the example that is named for it."""
        self.parts.index_add_(2, rows, found.parts)
        if self.halves is not None:
            self.halves.add_rows(step.index, rows, found.parts)
        self.decay += found.decay
        self.casts += found.casts
        self.by_step[:, :, step.index] = found.parts.sum(2) + found.decay + found.casts
        proved = (found.factor, found.gradient_error, step.rule_error, found.closure, found.casts_error)
        self.proofs[:, step.index] = torch.tensor(proved, dtype=torch.float64)

    def arrays(self, *, cast: bool) -> Named:
        """All of it; what casts did, if there were any."""
        proofs = {name: (("step",), each) for name, each in zip((*PROOFS, CASTS), self.proofs, strict=True)}
        found: Named = {
            "contribution": (("probe", "out", "example"), self.parts),
            "decay": (("probe", "out"), self.decay),
            "casts": (("probe", "out"), self.casts),
            "by_step": (("probe", "out", "step"), self.by_step),
            **proofs,
        }
        if self.halves is not None:
            found["half_by"] = (("probe", "out", "example"), self.halves.by([1.0] * self.by_step.shape[2]))
        return found if cast else {name: each for name, each in found.items() if name not in {"casts", CASTS}}


def sums_at_zero(outputs: Float[Tensor, "probe out"], examples: int, steps: int, memory_gb: float) -> LoopSums:
    """No step taken in yet; what does not fit into the memory is refused, or, as `half_by`, left out."""
    size = outputs.element_size()
    parts_gb, halves_gb = (n * outputs.numel() * examples * size / 1e9 for n in (2, 2 * STRETCHES))  # formed, and kept
    needed = parts_gb + outputs.numel() * steps * size / 1e9
    if needed > memory_gb:
        raise Mistake(
            f"memory_gb={memory_gb:g}: what {examples} examples add to {outputs.numel()} outputs of the queries takes "
            f"{needed:.2g} GB; ask at fewer queries, or attribute(memory_gb={1.1 * needed:.2g})"
        )
    tells_when = STRETCHES * outputs.numel() * examples <= MASSES
    if tells_when and needed + halves_gb > memory_gb:
        tells_when = False
        LOG.warning("ntkexp: `half_by` is left out: it takes %.2g GB, and memory_gb=%g", needed + halves_gb, memory_gb)
    parts = outputs.new_zeros(*outputs.shape, examples)
    return LoopSums(
        parts=parts,
        decay=torch.zeros_like(outputs),
        casts=torch.zeros_like(outputs),
        by_step=outputs.new_zeros(*outputs.shape, steps),
        proofs=torch.zeros(len(PROOFS) + 1, steps, dtype=torch.float64),
        halves=halves_at_zero(steps, parts) if tells_when else None,
    )
