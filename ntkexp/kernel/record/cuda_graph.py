"""A CUDA graph: the operations of a program, captured on a GPU, are launched again as one.

    capture   copies of what is fed → warm-ups on a stream at the side → the operations, noted there and not carried out
    replay    what is fed, copied to where the graph reads → the graph → what it wrote, copied from there

A graph reads and writes the memory that it was captured with, of which nothing is handed out. What it gives lies as the
program's own results do: in memory of its own, or in that of what was fed, or of constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ntkexp.kernel.record.memories import put_together, taken_apart
from ntkexp.kernel.record.program import Program

WARM_UPS = 3  # as torch's own


class CudaGraph:
    """A program as it was captured, and the memories that it reads and writes."""

    def __init__(self, program: Program, fed: Sequence[Tensor], side: torch.cuda.Stream) -> None:
        memories, self.places = taken_apart(fed)
        self.read = [memory.clone() for memory in memories]
        values = put_together(self.read, self.places)
        self.graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(side.device)
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):  # which a capture that fails does not leave by itself
                for _ in range(WARM_UPS):
                    program.run(values)
                with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
                    results = program.run(values)
        finally:
            here.wait_stream(side)
        known = [*values, *program.constants]
        count = len(taken_apart(known)[0])
        memories, places = taken_apart([*known, *results])
        self.constants, self.written = memories[len(self.read) : count], memories[count:]
        self.results = places[len(known) :]

    def replay(self, fed: Sequence[Tensor]) -> list[Tensor] | None:
        """What the program makes of values that lie in memory as the first ones did, and nothing of others."""
        memories, places = taken_apart(fed)
        if places != self.places or [one.shape for one in memories] != [one.shape for one in self.read]:
            return None
        torch._foreach_copy_(self.read, memories)
        self.graph.replay()
        made = [torch.empty_like(memory) for memory in self.written]
        if made:
            torch._foreach_copy_(made, self.written)
        return put_together([*memories, *self.constants, *made], self.results)
