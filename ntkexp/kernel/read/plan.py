"""Choose how many outputs are differentiated together, and the number of threads.

A kernel has one block [out, out_] for each pair of examples. The user selects a part of
it by the option `outputs`: "all" computes complete blocks, a list of indices computes
these rows and columns of each block, and "trace" computes the sum Σ_c K[x, c, x′, c]. The
trace needs no memory for blocks, because outputs are differentiated a few at a time.

>>> selected_outputs("all", 3), selected_outputs([2, 0], 3)
(range(0, 3), [2, 0])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import index
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.assemble import select_outputs
from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.record.tape import Tape, examples
from ntkexp.mistake import Mistake, in_short

# bytes of gradients that are computed at once; more are not faster
OUTPUT_GRADIENT_BYTES = 0.5e9

ChosenOutputs: TypeAlias = Literal["all", "trace"] | Sequence[int]


@dataclass(frozen=True)
class Mixtures:
    """The scalar functions that are differentiated: some of the outputs, or a mixture
    (a weighted sum of all outputs, with weights for each example).

    >>> import torch
    >>> Mixtures(torch.tensor([[0.5, -0.5]]), None).columns.shape  # a mixture of two outputs, of one example
    torch.Size([1, 1, 2])
    """

    # the outputs, or the weights of each output in the mixture
    numbers: Float[Tensor, "example out"]
    chosen: tuple[int, ...] | None  # indices of the outputs, or None for a mixture

    @classmethod
    def of(cls, tape: Tape, chosen: Sequence[int] | None) -> Mixtures:
        outputs = tape.outputs
        return cls(
            outputs, tuple(range(outputs.shape[1]) if chosen is None else chosen)
        )

    @property
    def count(self) -> int:
        if self.chosen is None:
            return 1
        return len(self.chosen)

    @cached_property
    def columns(self) -> Float[Tensor, "mixture example out"]:
        """The weight of every output in each mixture.

        If all examples share one row of weights (stride 0), copy it for each example,
        so that one program works for all mixtures."""
        if self.chosen is None:
            return self.numbers[None].contiguous()
        return select_outputs(self.numbers, self.chosen)


def selected_outputs(outputs: ChosenOutputs | str, count: int) -> Sequence[int]:
    """Return the indices of the outputs that the user selected. Raise Mistake if
    `outputs` is invalid."""
    if isinstance(outputs, str):
        if outputs not in ("all", "trace"):
            raise Mistake(
                f"outputs={in_short(outputs)}: give 'all', 'trace' or a list of outputs, such as "
                "[0, 3]"
            )
        return range(count)
    try:
        chosen = [index(place) for place in outputs]
    except TypeError:
        raise Mistake(
            f"outputs={in_short(outputs)}: give 'all', 'trace' or a list of outputs, such as [0, 3]"
        ) from None
    if not chosen or any(place not in range(count) for place in chosen):
        raise Mistake(
            f"outputs={chosen}: the module has {count}, numbered from 0 to {count - 1}"
        )
    return chosen


def chunks(
    tape: Tape, examples: int, count: int, read: Callable[[Sequence[int]], Jacobian]
) -> Iterator[range]:
    """Yield the indices of all `count` outputs, in groups whose gradients take at most
    OUTPUT_GRADIENT_BYTES.

    Count the gradients of values on the tape, and of weights whose gradients are not
    stored in factored form. To find these weights, first read the Jacobian of one
    output, unless all outputs fit even if every weight is counted."""
    values = tape.bytes_per_example
    weights = sum(tape[slot].nbytes for slot in tape.weights)
    size = int(OUTPUT_GRADIENT_BYTES / ((values + weights) * examples))
    if size < count:
        # bytes of the gradients of one output of one example
        made = 0
        for block in read([0]).blocks:
            single = isinstance(block, Factored) and block.inputs.shape[1] == 1
            made += (
                block.numbers[0].numel() if single else block.size
            ) * block.numbers.element_size()
        size = int(OUTPUT_GRADIENT_BYTES / ((values + made) * examples))
    size = max(1, min(count, size))
    yield from (
        range(first, min(first + size, count)) for first in range(0, count, size)
    )


# A small kernel consists of hundreds of matrix products that take some microseconds each.
# Threads that share such a product wait for each other longer than they compute. So a
# kernel with few operations runs on one thread. The number of operations is
#
#     2 N (1 + C) Σ_z d_z |z|   +   2 N₁ N₂ C² Σ_z |z|        over the products z = a W of one example
#
# N = N₁ + N₂ is the number of examples, C the number of outputs, d_z the number of
# inputs of z, and |z| the number of elements of z. The first term counts the forward
# pass and C backward passes. The second term counts the kernel, if each example uses
# each weight once.


# a few milliseconds on one core; a second core helps only above 2e8 to 7e8 operations
FEW_OPERATIONS = 2e8
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


def threads_by_size(operations: float, most: int) -> int:
    """Return 1 for few operations, else `most`.

    >>> threads_by_size(1e7, most=4), threads_by_size(1e10, most=4)
    (1, 4)
    """
    if operations <= FEW_OPERATIONS:
        return 1
    return most


@contextmanager
def threads_for(operations: float) -> Iterator[None]:
    """Inside the context, run torch on one thread if there are few operations."""
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
    """The matrix products of a network for one example: the number of elements of all
    results, Σ_z |z|, and the number of multiplications, Σ_z d_z |z|."""

    numbers: float
    multiplications: float

    def of_kernel(self, counts: tuple[int, int], outputs: int) -> float:
        """Return the approximate number of operations of a kernel. `counts` holds the
        numbers of left and right examples."""
        left, right = counts
        return (
            2 * (1 + outputs) * self.multiplications * (left + right)
            + 2 * left * right * outputs**2 * self.numbers
        )


def work(tape: Tape) -> Work:
    numbers = multiplications = 0
    for entry in tape.entries:
        if entry.name in MATRIX_PRODUCTS:
            inner = tape[entry.args[-2]].shape[-1]
        elif entry.name == "convolution":
            inner = prod(tape[entry.args[1]].shape[1:])
        else:
            continue
        made = tape[entry.results[0]].numel()
        numbers = numbers + made
        multiplications = multiplications + made * inner
    count = examples(tape.given)
    return Work(numbers / count, multiplications / count)
