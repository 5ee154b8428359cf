"""A trace: the steps of a loop that was followed, and what can be said of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from ntkexp.foreign_loop.attribution import Backwards
from ntkexp.foreign_loop.watch import Watch
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.shapes import Inputs

if TYPE_CHECKING:
    import xarray as xr


@dataclass
class Trace:
    """`module` is a copy of the model, whose weights are given to it."""

    watch: Watch
    module: nn.Module
    queries: Inputs

    @cached_property
    def examples(self) -> dict[str, int]:
        """The examples that were seen, in order of their first use."""
        names = (name for step in self.watch.steps for call in step.calls for name in call.names)
        return {name: place for place, name in enumerate(dict.fromkeys(names))}

    def attribute(self) -> xr.Dataset:
        """What each example added to each output of each query; parts and decay add up to f_T − f_0."""
        import xarray as xr  # noqa: PLC0415  slow, and following needs none

        steps = self.watch.steps
        if not steps:
            raise Mistake("no step was followed; were the model and the optimizer those that the loop uses?")
        reader = Reader(
            function_of(self.module, self.watch.output), frozenset(self.watch.weights), programs=ProgramCache()
        )
        last = reader.record(self.watch.weights, self.queries)
        back, later = Backwards(reader, self.queries, last), self.watch.weights
        outputs = last.outputs
        parts, decay = outputs.new_zeros(*outputs.shape, len(self.examples)), torch.zeros_like(outputs)
        by_step, figures = outputs.new_zeros(*outputs.shape, len(steps)), []
        for step in reversed(steps):
            found = back.take(step, later, steps)
            places = [self.examples[name] for call in step.calls for name in call.names]
            parts.index_add_(2, torch.tensor(places, dtype=torch.long, device=parts.device), found.parts)
            decay += found.decay
            by_step[:, :, step.index] = found.parts.sum(2) + found.decay
            figures.append((found.factor, found.gradient_error, found.closure))
            later = step.start
        change = outputs - back.later.outputs
        proofs = torch.tensor(figures[::-1], dtype=torch.float64).T
        arrays = {
            "contribution": (("probe", "out", "example"), parts),
            "decay": (("probe", "out"), decay),
            "by_step": (("probe", "out", "step"), by_step),
            "change": (("probe", "out"), change),
            **{name: (("step",), proof) for name, proof in zip(PROOFS, proofs, strict=True)},
        }
        return xr.Dataset(
            {name: (axes, value.cpu().numpy()) for name, (axes, value) in arrays.items()},
            coords={"example": list(self.examples)},
        )


PROOFS = ("gradient_factor", "gradient_error", "closure")
