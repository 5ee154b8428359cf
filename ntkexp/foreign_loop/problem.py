"""The interface through which leave-out effects and reruns read a followed loop.
`trace.Trace` implements it."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from ntkexp.foreign_loop.measure import Measure, MeasuredQueries
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.foreign_loop.step import AbstractSteps
from ntkexp.foreign_loop.user_loss import ExampleLoss
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Function, Inputs


class LoopProblem(Protocol):
    """The steps of a loop, its model, and the queries whose outputs are attributed."""

    steps: AbstractSteps
    module: nn.Module
    queries: Inputs
    loss: ExampleLoss | None
    folder: RunFolder | None
    measured: MeasuredQueries | None

    @property
    def function(self) -> Function:
        """The model in evaluation mode, as a function of its weights
        and the queries."""

    @property
    def called(self) -> CalledModule:
        """The model as a function that repeats each recorded call,
        in its modes and random states."""

    @property
    def examples(self) -> dict[str, int]:
        """The index of each example by name, in order of first use."""

    @property
    def measure(self) -> Measure | None:
        """The measure to attribute, or None
        if the outputs themselves are attributed."""
