"""Kernels of many examples, whose Jacobian is computed batch by batch.

If an assembled Jacobian (one block for each parameter) does not fit into memory, the
Jacobian has one block for each use of a weight. If the exact kernel would take too
long, a sketched kernel is computed from random projections.

Batches are so small that every tape reuses memory that the process already holds. New
memory would be slow, because the system first fills it with zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple
from warnings import warn

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored, zeros
from ntkexp.kernel.features.gram import ParameterChunk, cut_parameter, gram
from ntkexp.kernel.features.jacobian import Assembly, Jacobian, stacked
from ntkexp.kernel.read.program_cache import input_signature
from ntkexp.kernel.read.reader import Reader, kernel_operations, row_operations
from ntkexp.kernel.record.tape import (
    Tape,
    as_inputs,
    examples as count_examples,
    part as tape_part,
)
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.sketch import (
    BUCKET_COST,
    VECTORS,
    Sketch,
    error_bar,
    operations,
    random_vectors,
    sketched_gram,
)
from ntkexp.shapes import Inputs, Weights

# maximum bytes of a single tape; longer inputs are cut into batches
MAX_TAPE_BYTES = 2**26
BATCH_TAPE_BYTES = 2**25  # bytes of the tape of one batch
# for at most this many examples, the size of a tape is not measured first
UNMEASURED_EXAMPLES = 16


@dataclass(frozen=True)
class Batches:
    """Inputs, cut into batches, and the weights. `tape` is
    the tape of the first batch."""

    reader: Reader
    weights: Weights
    inputs: Inputs
    places: tuple[slice, ...]
    tape: Tape

    @property
    def examples(self) -> int:
        return count_examples(self.inputs)

    def read(self, chosen: Sequence[int]) -> Jacobian:
        """Return the Jacobian of all examples. If an operation has no difference rule,
        warn and read example by example."""
        try:
            return self.assembled(chosen)
        except NoRule as error:
            warn(error.remark, stacklevel=5)
        if len(self.places) == 1:
            return self.reader.one_by_one(self.tape, chosen)
        assembly = Assembly(self.examples)
        for tape in self.tapes():
            assembly.add(self.reader.one_by_one(tape, chosen))
        return assembly.jacobian

    def assembled(self, chosen: Sequence[int]) -> Jacobian:
        """Return the assembled Jacobian of all examples. Copy each batch into a common
        buffer, and drop its tape."""
        if len(self.places) == 1:
            return self.reader.assembled(self.tape, chosen)
        assembly = Assembly(self.examples)
        for tape in self.tapes():
            # if the blocks have other formats than in earlier batches, read all
            # examples at once
            if not assembly.add(self.reader.assembled(tape, chosen, assembly.rows)):
                return self.reader.assembled(
                    self.reader.record(self.weights, self.inputs), chosen
                )
        return assembly.jacobian

    def tapes(self) -> Iterator[Tape]:
        """Yield the tape of each batch. Hold only one at a time."""
        yield self.tape
        for place in self.places[1:]:
            yield self.reader.record(self.weights, tape_part(self.inputs, place))


def batches(reader: Reader, weights: Weights, inputs: Inputs) -> Batches:
    """Cut inputs into batches whose sizes differ by at most one."""
    detached = as_inputs(inputs)
    total = count_examples(detached)
    count = 1
    if total > UNMEASURED_EXAMPLES:

        def bytes_of_two() -> float:
            return reader.record(
                weights, tape_part(detached, slice(0, 2))
            ).bytes_per_example

        key = input_signature(tape_part(detached, slice(0, 1)))
        bytes_each = reader.check_cache.sizes.get(key, bytes_of_two)
        if total * bytes_each > MAX_TAPE_BYTES:
            count = min(total // 2, -(-int(total * bytes_each) // BATCH_TAPE_BYTES))
    places = even_slices(total, count)
    return Batches(
        reader,
        weights,
        detached,
        places,
        reader.record(weights, tape_part(detached, places[0])),
    )


def even_slices(total: int, count: int) -> tuple[slice, ...]:
    """Return consecutive slices whose lengths differ by at most one.

    >>> even_slices(5, 2)
    (slice(0, 2, None), slice(2, 5, None))
    """
    ends = [k * total // count for k in range(count + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(ends))


READ_BYTES = 0.2e9  # bytes of the values on the tape of one batch
# bytes of Jacobians that stay in memory, on each side (left and right examples)
MAX_JACOBIAN_BYTES = 2e9


@dataclass(frozen=True)
class BatchedJacobian:
    """Examples whose Jacobian is computed batch by batch, with one block for each use.
    Jacobians stay in memory while they fit."""

    reader: Reader
    weights: Weights
    inputs: Inputs
    chosen: Sequence[int]
    # True: read example by example if an operation has no difference rule
    any_module: bool = False
    kept: dict[tuple[int, int], Jacobian] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        return count_examples(self.inputs)

    @cached_property
    def places(self) -> list[slice]:
        """The batches, as slices whose lengths differ by at most one."""
        bytes_each = self.reader.record(
            self.weights, tape_part(self.inputs, slice(0, 2))
        ).bytes_per_example
        turns = -(-self.examples // max(2, int(READ_BYTES / bytes_each)))
        return list(even_slices(self.examples, turns))

    @cached_property
    def groups(self) -> list[list[slice]]:
        """Groups of consecutive batches. The Jacobians of one group are held
        at the same time."""
        count = max(1, int(MAX_JACOBIAN_BYTES / self.jacobian(self.places[0]).nbytes))
        return [
            self.places[at : at + count] for at in range(0, len(self.places), count)
        ]

    def together(self, group: Sequence[slice]) -> tuple[slice, Jacobian]:
        """Return the slice of examples in a group, and their Jacobian."""
        return slice(group[0].start, group[-1].stop), stacked(
            [self.jacobian(place) for place in group]
        )

    def jacobian(self, place: slice) -> Jacobian:
        """Return the Jacobian of a batch, and keep it if it fits into memory."""
        key = place.start, place.stop
        jacobian = self.kept.get(key)
        if jacobian is None:
            tape = self.reader.record(self.weights, tape_part(self.inputs, place))
            try:
                jacobian = self.reader.use_by_use(tape, self.chosen)
            except NoRule as error:
                if not self.any_module:
                    raise
                warn(error.remark, stacklevel=2)
                jacobian = self.reader.one_by_one(tape, self.chosen)
            held = sum(other.nbytes for other in self.kept.values())
            if held + jacobian.nbytes <= MAX_JACOBIAN_BYTES:
                self.kept[key] = jacobian
        return jacobian


def kernel_by_groups(
    left: BatchedJacobian, right: BatchedJacobian
) -> Float[Tensor, "query out train out_"]:
    """Return the exact kernel between left and right examples whose assembled Jacobians
    would not fit into memory."""
    kernel: Tensor | None = None
    for k, group in enumerate(left.groups):
        rows, one = left.together(group)
        for other_group in left.groups[k:] if left is right else right.groups:
            same = left is right and other_group is group
            columns, other = (rows, one) if same else right.together(other_group)
            share = gram(one, other)
            if kernel is None:
                kernel = share.new_empty(
                    left.examples, one.outputs, right.examples, other.outputs
                )
            kernel[rows, :, columns] = share
            if left is right and not same:
                kernel[columns, :, rows] = share.permute(2, 3, 0, 1)
    assert kernel is not None
    return kernel


# For a sketched tangent kernel, examples are read in batches, and only their sketches
# stay in memory: k numbers for each example and output. The error bar needs the
# gradients again, one chunk of the weights at a time. So Jacobians of batches stay in
# memory as long as they fit. All other Jacobians are computed again.


# bytes of the products V J for one chunk of the weights, over all vectors V
GRADIENT_CHUNK_BYTES = 2**28


class SketchedKernel(NamedTuple):
    """The sketched kernel K̂, and a bound of ‖K̂ − K‖_F that holds in 99
    of 100 cases."""

    kernel: Float[Tensor, "query out train out_"]
    error_bar: float


def sketched_kernel(
    left: BatchedJacobian,
    right: BatchedJacobian,
    weights: Weights,
    size: int,
    seed: int,
) -> SketchedKernel:
    """Return the sketched kernel between left and right examples, and its error bar."""
    sketch = Sketch(
        size, seed, {name: weight.shape for name, weight in weights.items()}
    )
    other = sketch_of(right, sketch)
    one = other if left is right else sketch_of(left, sketch)
    estimate = sketched_gram(one, other)
    vectors = random_vectors(other.shape[:2], seed, other)
    estimated = torch.einsum("qcnd,vnd->vqc", estimate, vectors)  # K̂ V
    missed = estimated - products(left, right, vectors, weights)
    return SketchedKernel(estimate, error_bar(missed))


def sketch_of(
    side: BatchedJacobian, sketch: Sketch
) -> Float[Tensor, "example out size"]:
    """Return J S, the sketch of all examples."""
    return torch.cat([sketch.of(side.jacobian(place).blocks) for place in side.places])


def products(
    left: BatchedJacobian,
    right: BatchedJacobian,
    vectors: Float[Tensor, "vector train out_"],
    weights: Weights,
) -> Float[Tensor, "vector query out"]:
    """Return K v = J_left(J_rightᵀ v) for each vector v.

    If weights have few uses, multiply their factors with one vector at a time.
    Otherwise multiply out the gradients, one chunk of the weights at a time, and use
    them for all vectors."""
    if all(has_few_uses(side.jacobian(side.places[0])) for side in (left, right)):
        return products_one_by_one(left, right, vectors, weights)
    results = vectors.new_zeros(len(vectors), left.examples, vectors.shape[2])
    most = GRADIENT_CHUNK_BYTES // (len(vectors) * vectors.element_size())
    for some in together(weights, most):
        gradients = [vectors.new_zeros(len(vectors), piece.size) for piece in some]
        for group in right.groups:  # V J_right for this chunk of the weights
            examples, jacobian = right.together(group)
            for total, piece in zip(gradients, some, strict=True):
                for place, rows in cached_chunks(jacobian, piece):
                    total[:, place].addmm_(vectors[:, examples].flatten(1), rows)
        for group in left.groups:  # (V J_right) J_leftᵀ
            examples, jacobian = left.together(group)
            target = results[:, examples]
            for total, piece in zip(gradients, some, strict=True):
                for place, rows in cached_chunks(jacobian, piece):
                    target += (total[:, place] @ rows.t()).view_as(target)
    return results


def products_one_by_one(
    left: BatchedJacobian,
    right: BatchedJacobian,
    vectors: Float[Tensor, "vector train out_"],
    weights: Weights,
) -> Float[Tensor, "vector query out"]:
    """Return K v from the factors of the gradients, for one vector v at a time."""
    results = []
    for vector in vectors:
        # J_rightᵀ v
        gradient = {name: zeros(weight) for name, weight in weights.items()}
        for place in right.places:
            weighted = right.jacobian(place).weighted(vector[place])
            for name, part in weighted.total(weights).items():
                gradient[name].add_(part)
        # J_left (J_rightᵀ v)
        parts = [left.jacobian(place).applied(gradient) for place in left.places]
        results.append(torch.cat(parts))
    return torch.stack(results)


def cached_chunks(
    jacobian: Jacobian, piece: ParameterChunk
) -> Iterator[tuple[slice, Float[Tensor, "row size"]]]:
    """Cut a chunk of a parameter into smaller chunks whose gradients stay in the cache.
    Yield their slices and gradients."""
    if piece.name in jacobian.uses:
        for thin in cut_parameter(jacobian, piece.name, piece.elements):
            place = slice(
                thin.elements.start - piece.elements.start,
                thin.elements.stop - piece.elements.start,
            )
            yield place, jacobian.chunk(thin.name, thin.elements)


def has_few_uses(some: Jacobian) -> bool:
    """Return True if weights occur only in products,
    with at most VECTORS uses for each example."""
    return all(
        isinstance(block, Factored) and block.inputs.shape[1] <= VECTORS
        for block in some.blocks
    )


def together(weights: Weights, most: int) -> Iterator[list[ParameterChunk]]:
    """Cut all weights into groups of chunks,
    with at most `most` elements in each group.

    >>> for some in together({"w": torch.ones(5), "b": torch.ones(1)}, 3):
    ...     print([(piece.name, piece.elements) for piece in some])
    [('w', range(0, 3))]
    [('w', range(3, 5)), ('b', range(0, 1))]
    """
    some: list[ParameterChunk] = []
    left = most
    for name, weight in weights.items():
        at = 0
        while at < weight.numel():
            end = min(at + left, weight.numel())
            some.append(ParameterChunk(name, range(at, end)))
            left = left - (end - at)
            at = end
            if not left:
                yield some
                some = []
                left = most
    if some:
        yield some


# Is a sketch worth its cost? Take a Jacobian with n rows of P numbers, each a sum of u
# outer products, and an error bar from v vectors. The numbers of multiplications are
#
#     exact kernel                n u P + n² P/2
#     error bar of the sketch     2 n u P + 2 n v P
#
# So for a few dozen rows, the exact kernel takes fewer multiplications than the error
# bar alone. Computing the Jacobian costs the same in both cases.


# only a sketch with at least this many multiplications (a second or two) gets a remark
LONG_MULTIPLICATIONS = 1e11


def sketch_multiplications(some: Jacobian, query: int, train: int, size: int) -> float:
    """Return the multiplications of all sketches and of the error bar."""
    total = 0.0
    for block in some.blocks:
        if isinstance(block, Factored):
            total += (query + train) * min(
                operations(block.inputs, block.outputs, size)
            )
        else:
            total += (query + train) * BUCKET_COST * block.numbers[0].numel()

    # products of the Jacobian with the random vectors
    factored = sum(
        row_operations(block) for block in some.blocks if isinstance(block, Factored)
    )
    if has_few_uses(some):
        bar = VECTORS * factored
    else:
        bar = factored + VECTORS * some.outputs * sum(some.extents.values())
    return total + (query + (train or query)) * bar


def remark(some: Jacobian, query: int, train: int, size: int) -> str | None:
    """Return a remark if the sketch takes long, and the exact kernel would take fewer
    multiplications and fit into memory. Otherwise return None.

    The kernel is between `query` and `train` examples, or between `query` examples and
    themselves if `train` is 0. `some` is the Jacobian of a few examples."""
    sketched = sketch_multiplications(some, query, train, size)
    is_held = (query + train) * some.nbytes / some.examples <= MAX_JACOBIAN_BYTES
    if sketched < LONG_MULTIPLICATIONS or not is_held:
        return None
    exact = kernel_operations(some, query, train)
    if exact > sketched:
        return None
    return (
        f"the exact kernel of these {query + train} examples takes fewer multiplications than "
        f"this sketch, about {exact:.1g} instead of {sketched:.1g}, and has no error: leave sketch out"
    )
