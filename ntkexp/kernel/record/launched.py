"""Launched programs: on a GPU small operations take less time than to launch them, and are launched together.

    first run        as usual; then a CUDA graph is captured, if operations are small, and there is room for one
    TRIALS more      as usual, and the graph is replayed beside it: the same numbers come out, or it is given up
    all others       the graph alone, or as usual where values lie otherwise in memory than the first ones

A graph is given up for good where torch fails, as it does at what cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ntkexp.kernel.record.cuda_graph import CudaGraph
from ntkexp.kernel.record.program import Program
from ntkexp.kernel.record.recorder import DispatchMode

TRIALS = 2
SMALL = 2**21  # bytes that an operation makes, on average: they are written while the next one is launched
SEGMENTS = 24e6  # bytes, at most, by which torch rounds up the memory of a graph


class Weighed(DispatchMode):
    """Counts operations, and the bytes of all that they make, of which fewer are held at any time; `reads` says whether
    one gave a number to Python, which a graph cannot."""

    operations, made, reads = 0, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operations += 1
        values = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self.made += sum(value.nbytes for value in values)
        self.reads |= not values
        return found


@dataclass
class Launching:
    """So many bytes for the graphs of a run's programs; of each reason to do without one somebody is told, once."""

    device: torch.device
    room: float
    tell: Callable[[str], None]
    told: set[str] = field(default_factory=set)
    programs: WeakSet[LaunchedProgram] = field(default_factory=WeakSet)

    @cached_property
    def side(self) -> torch.cuda.Stream:
        """The stream on which programs are captured."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch's own

    @property
    def free(self) -> float:
        """Bytes that no graph holds; those of programs that were forgotten are free again."""
        return self.room - sum(each.held for each in self.programs)

    def do_without(self, reason: str) -> None:
        """Tell of a reason, unless it was told."""
        if reason not in self.told:
            self.told.add(reason)
            self.tell(f"cuda_graphs=true: a program is launched operation by operation: {reason}")


@dataclass(eq=False)
class LaunchedProgram:
    """A program that is launched as one, once that has proved to be the same."""

    program: Program
    launching: Launching
    graph: CudaGraph | None = None
    held: float = 0.0  # bytes of its graph
    trials: int = TRIALS  # comparisons that are left
    seen: bool = False

    def run(self, fed: Sequence[Tensor]) -> list[Tensor]:
        """The results for new values."""
        if not self.seen:
            return self.first(fed)
        found = self.replayed(fed)
        if found is not None and not self.trials:
            return found
        expected = self.program.run(fed)
        if found is not None:
            self.trials -= 1
            if not all(same_numbers(*pair) for pair in zip(found, expected, strict=True)):
                self.give_up("its graph gave other numbers")
        return expected

    def first(self, fed: Sequence[Tensor]) -> list[Tensor]:
        """The results, of which it is known then what they take."""
        self.seen = True
        with Weighed() as weighed:
            results = self.program.run(fed)
        kinds = {value.device.type for value in (*fed, *self.program.constants)}
        may = kinds == {self.launching.device.type} and not weighed.reads
        if may and weighed.made <= SMALL * weighed.operations:
            self.capture(fed, SEGMENTS + weighed.made + sum(value.nbytes for value in fed))
        return results

    def capture(self, fed: Sequence[Tensor], size: float) -> None:
        """Make a graph that holds so many bytes, if there is room."""
        if size > self.launching.free:
            self.launching.do_without("memory_gb leaves no more room for graphs")
            return
        try:
            self.graph, self.held = CudaGraph(self.program, fed, self.launching.side), size
            self.launching.programs.add(self)
        except RuntimeError as error:
            self.give_up(str(error).partition("\n")[0])

    def replayed(self, fed: Sequence[Tensor]) -> list[Tensor] | None:
        """What the graph gives, if there is one that takes such values."""
        try:
            return self.graph.replay(fed) if self.graph else None
        except RuntimeError as error:
            self.give_up(str(error).partition("\n")[0])
            return None

    def give_up(self, reason: str) -> None:
        """Go the usual way from now on."""
        self.graph, self.held = None, 0.0
        self.launching.do_without(reason)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether all are equal, or neither is a number."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
