"""What is asked of a kernel file: how long networks are trained with it, under which ridge, and how that is solved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ntkexp.closed_form.gain import AbstractGain, DescentGain, FlowGain
from ntkexp.closed_form.modes import refuse_negative
from ntkexp.kernel_file.predict.entries import Entries
from ntkexp.mistake import WrongArgument
from ntkexp.text import short

Solver: TypeAlias = Literal["eigen", "cholesky", "cg"]

SMALL = 4096  # entries up to which an eigendecomposition takes no longer than a person waits
COPIES: dict[Solver, int] = {"eigen": 6, "cholesky": 4, "cg": 0}  # of the kernel, that are held


@dataclass(frozen=True, kw_only=True)
class Question:
    """`times` of gradient flow, or `steps` of gradient descent; `ridge` None asks for the best of a grid."""

    times: tuple[float, ...] = (math.inf,)
    steps: int | None = None
    step_size: float | None = None
    ridge: float | None = 0.0
    folds: int | None = None  # 0: leave one out
    solver: Solver | None = None
    memory_gb: float = 4.0

    def __post_init__(self) -> None:
        refuse_negative(self.ridge or 0.0)
        if (self.steps is None) != (self.step_size is None):
            given, lacking = ("steps", "step_size") if self.step_size is None else ("step_size", "steps")
            raise WrongArgument(
                f"{given}={getattr(self, given)} goes with {lacking}=…: so many steps of gradient descent of one size",
                *(given, lacking),
            )
        if self.folds == 1:
            raise WrongArgument("folds=1: it takes a number of folds ≥ 2, or 0 to leave out one by one", "folds")
        if not self.memory_gb > 0:
            raise WrongArgument(f"memory_gb={self.memory_gb:g}: it takes a number > 0", "memory_gb")

    def ways(self, examples: int) -> dict[str, AbstractGain]:
        """Name each way to train, under a loss that is the mean over so many examples."""
        if self.steps is not None and self.step_size is not None:
            name = f"{self.steps} steps of {short(self.step_size)}"
            return {name: DescentGain(self.step_size / examples, self.steps)}
        return {f"t={short(time)}": FlowGain(time / examples) for time in self.times}

    @property
    def is_plain(self) -> bool:
        """Whether a single inverse is all that is wanted."""
        return self.steps is None and self.times == (math.inf,) and self.ridge is not None and self.folds is None

    def way_to_solve(self, entries: Entries) -> Solver:
        """Choose the solver that was asked for, or the plainest that fits; a cost model that looks at shapes alone."""
        if self.solver not in (None, "eigen") and not self.is_plain:
            raise WrongArgument(
                f"solver={self.solver} gives t=∞ at one ridge; leave it out, or write solver=eigen", "solver"
            )
        usual: list[Solver] = ["eigen"] if not self.is_plain or entries.count <= SMALL else ["cholesky"]
        usual += ["cholesky", "cg"] if self.is_plain else []
        tried = [self.solver] if self.solver else usual
        for solver in tried:
            if self.bytes(solver, entries) <= self.memory_gb * 1e9:
                return solver
        needed = self.bytes(tried[-1], entries) / 1e9
        raise WrongArgument(
            f"memory_gb={self.memory_gb:g}: solving {entries.count} equations this way needs {needed:.1f}; raise it"
            + ("" if self.is_plain else ", or ask for t=∞ at one ridge"),
            "memory_gb",
        )

    @staticmethod
    def bytes(solver: Solver, entries: Entries) -> float:
        """Count what is held at once."""
        return 8.0 * COPIES[solver] * entries.count**2
