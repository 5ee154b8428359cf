"""The model itself is asked at the queries when following begins and ends: f_0 and f_T have to be what it gave."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ntkexp.foreign_loop.keeper import AbstractKeeper
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.signed_outputs import OutputsAtEnds, given_now
from ntkexp.foreign_loop.unmoved import named_tensors
from ntkexp.shapes import Inputs, Weights


@dataclass(frozen=True)
class AskedItself:
    """The `model` of the loop; what it gives goes to the `ends` of the trace, and to its folder, if there is one."""

    model: nn.Module
    output: str | int | None
    queries: Inputs
    ends: OutputsAtEnds
    keeper: AbstractKeeper

    def begin(self) -> None:
        """Ask before the first step; a trace that is gone on with knows it."""
        if self.keeper.count:
            assert self.keeper.folder is not None
            self.ends.start = ends_in(TraceFolder(self.keeper.folder)).start
        else:
            self.ends.start = given_now(self.model, self.output, self.queries)
        self.write()

    def end(self, kept: Weights) -> None:
        """Ask after the last step, unless it left other values in the tensors; how they came there is no step's."""
        now = named_tensors(self.model)
        same = (now[k].shape == w.shape and torch.equal(now[k].to(w), w) for k, w in kept.items() if k in now)
        if all(same):
            self.ends.end, self.ends.steps = given_now(self.model, self.output, self.queries), self.keeper.count
            self.write()

    def write(self) -> None:
        """Write it beside the steps."""
        if self.keeper.folder is not None:
            files = TraceFolder(self.keeper.folder)
            files.write(files.asked, vars(self.ends))


def ends_in(files: TraceFolder) -> OutputsAtEnds:
    """What is kept of it; nothing, in traces of before."""
    return OutputsAtEnds(**files.read(files.asked)) if files.asked.is_file() else OutputsAtEnds()
