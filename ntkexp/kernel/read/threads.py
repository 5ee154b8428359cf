"""Threads by size: a small kernel is hundreds of products that take microseconds, and threads that share one of these
wait for each other longer than they work; for milliseconds, where other programs want the same cores.

    operations   2 N (1 + C) Σ_z d_z |z|   +   2 N₁ N₂ C² Σ_z |z|        over the products z = a W of one example

with d_z inputs and |z| numbers: those of forward, pull-backs and Gram, whose last sum holds for one use of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from ntkexp.kernel.record.tape import Entry, Tape, examples

FEW = 2e8  # operations: some milliseconds of one core; steps of runs gain by a second from between 2e8 and 7e8
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


def threads_by_size(operations: float, most: int) -> int:
    """One thread for a few operations; for many, as many as there may be.

    >>> threads_by_size(1e7, most=4), threads_by_size(1e10, most=4)
    (1, 4)
    """
    return 1 if operations <= FEW else most


@contextmanager
def threads_for(operations: float) -> Iterator[None]:
    """So many threads for a while, of those that torch was given."""
    before = torch.get_num_threads()
    chosen = threads_by_size(operations, before)
    if chosen == before:
        yield
        return
    torch.set_num_threads(chosen)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Work:
    """What the products of a network take for one example: the numbers that they give, and their multiplications."""

    numbers: float
    multiplications: float

    def of_kernel(self, counts: tuple[int, int], outputs: int) -> float:
        """About how many operations the kernel of so many examples with so many takes, for so many outputs."""
        left, right = counts
        return 2 * (1 + outputs) * self.multiplications * (left + right) + 2 * left * right * outputs**2 * self.numbers


def work(tape: Tape) -> Work:
    """That of the network on a tape."""
    sizes = [size(tape, entry) for entry in tape.entries]
    numbers, multiplications = (sum(each[k] for each in sizes) / examples(tape.given) for k in (0, 1))
    return Work(numbers, multiplications)


def size(tape: Tape, entry: Entry) -> tuple[int, int]:
    """The numbers that a product of matrices gives, and its multiplications; none of any other operation."""
    numbers = tape[entry.results[0]].numel() if entry.results else 0
    if entry.name in PRODUCTS:
        return numbers, numbers * tape[entry.args[-2]].shape[-1]
    if entry.name == "convolution":
        return numbers, numbers * prod(tape[entry.args[1]].shape[1:])
    return 0, 0
