"""What is known of a network: its tape, reader, features and Jacobians, made once for all laws that ask for them.

Whoever changes a module, a rule or a reader takes a fresh `problem` instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.reader import Reader, Reading
from ntkexp.kernel.record.tape import Tape
from ntkexp.library import reader_of
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.problems import Problem, problem


@dataclass(frozen=True)
class Step:
    """A random step of the weights, read at the inputs of a problem."""

    reading: Reading
    start: Tape
    end: Tape

    @property
    def change(self) -> Tensor:
        """f(end) − f(start)."""
        return self.end.outputs - self.start.outputs

    @property
    def scale(self) -> Tensor:
        """Of the outputs at both ends."""
        return self.start.outputs.abs().max() + self.end.outputs.abs().max()

    @property
    def weights(self) -> Weights:
        """Δθ as the tapes have it."""
        return {name: self.end[slot].detach() - self.start[slot].detach() for slot, name in self.start.weights.items()}


@dataclass(frozen=True)
class Known:
    """A problem, with three more inputs beside its five."""

    given: Problem
    steps: dict[float, Step] = field(default_factory=dict)

    @property
    def unspent(self) -> Problem:
        """The problem with random numbers that nobody has drawn: laws come in any order."""
        generator = torch.Generator()
        generator.set_state(self.given.generator.get_state())
        return replace(self.given, generator=generator)

    @cached_property
    def other(self) -> Tensor:
        return self.unspent.inputs(3)

    @cached_property
    def reader(self) -> Reader:
        return reader_of(self.given.module)[0]

    @cached_property
    def tape(self) -> Tape:
        """At the start, of the five."""
        return self.reader.record(self.given.start, self.given.x)

    @cached_property
    def features(self) -> Jacobian:
        """The tangent features of the five."""
        return self.reader.tangent(self.tape)

    @cached_property
    def jacobians(self) -> Weights:
        """The oracle's, of all eight inputs."""
        return oracle.jacobians(self.given.module, torch.cat([self.given.x, self.other]))

    @cached_property
    def kernel(self) -> Tensor:
        """The oracle's, of the five with all eight."""
        rows = torch.cat(list(self.jacobians.values()), 2)
        return torch.einsum("qcp,ndp->qcnd", rows[:5], rows)

    def step(self, size: float) -> Step:
        if size not in self.steps:
            end = self.reader.record(self.unspent.end(size), self.given.x)
            self.steps[size] = Step(self.reader.secant(self.tape, end), self.tape, end)
        return self.steps[size]


@cache
def known(name: str, dtype: torch.dtype = torch.float64) -> Known:
    return Known(problem(name, dtype=dtype))
