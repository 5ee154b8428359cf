"""Kernels of more examples than fit: read some at a time, use by use or as sketches, and what each way costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Factored, Features, Key, Rows, joined, nothing
from ntkexp.kernel.features.gram import sizes
from ntkexp.kernel.features.use_by_use import (
    Chunks,
    Copies,
    Part,
    UseByUse,
    factors_kept,
    gram_by_strips,
    names,
    numbers,
)
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape, as_inputs, part
from ntkexp.kernel.record.tape import examples as count_examples
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.uses import View
from ntkexp.kernel.sketch import SLOWER, VECTORS, Sketch, Sketched, error_bar, operations, random_vectors, sketched_gram
from ntkexp.shapes import Inputs, Weights

# --- Batches: a point is read so many examples at a time that what is recorded of them fits memory that is at hand.
#
# More memory than that the system hands out page by page, each of them cleared first, which takes longer than
# most operations on it. Features of all batches are then joined.


AT_ONCE = 2**26  # bytes of a tape
BATCH = 2**25  # bytes of each tape where there are several
FEW = 16  # examples that are recorded without a look at one of them


@dataclass(frozen=True)
class Batches:
    """A point, and inputs; of the first batch there is a tape already."""

    reader: Reader
    weights: Weights
    inputs: Inputs
    places: tuple[slice, ...]
    tape: Tape

    @property
    def examples(self) -> int:
        """How many there are in all batches."""
        return count_examples(self.inputs)

    def read(self, read: Callable[[Tape, Sequence[int], Weights], Features], chosen: Sequence[int]) -> Features:
        """The features of all examples; at once, where those of the batches have no common form."""
        if len(self.places) == 1:
            return read(self.tape, chosen, {})
        found = joined((partial(read, tape, chosen) for tape in self.tapes()), self.examples)
        return read(self.reader.record(self.weights, self.inputs), chosen, {}) if found is None else found

    def tapes(self) -> Iterator[Tape]:
        """One after the other, each forgotten when the next is asked for."""
        yield self.tape
        for place in self.places[1:]:
            yield self.reader.record(self.weights, part(self.inputs, place))


def batches(reader: Reader, weights: Weights, inputs: Inputs) -> Batches:
    """The inputs in batches of equal size, but for one example."""
    given = as_inputs(inputs)
    places = cut(count_examples(given), count(reader, weights, given))
    return Batches(reader, weights, given, places, reader.record(weights, part(given, places[0])))


def count(reader: Reader, weights: Weights, inputs: Inputs) -> int:
    """How many batches there are."""
    total = count_examples(inputs)
    if total <= FEW:
        return 1
    one = part(inputs, slice(0, 1))
    size = total * reader.bytes_per_example(one, lambda: reader.record(weights, part(inputs, slice(0, 2))))
    return 1 if size <= AT_ONCE else min(total // 2, -(-int(size) // BATCH))


def cut(total: int, count: int) -> tuple[slice, ...]:
    """Consecutive places of as many examples each, but for one.

    >>> cut(5, 2)
    (slice(0, 2, None), slice(2, 5, None))
    """
    ends = [k * total // count for k in range(count + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(ends))


# --- Examples that are read some at a time, use by use: no features of them all, no rows as long as the weights.


READ = 0.2e9  # bytes of the values of examples that are read at once
KEPT = 2e9  # bytes of what is read, on either side


@dataclass(frozen=True)
class InTurns:
    """Examples, and how a network is recorded and read at some of them; what was read is kept while it fits."""

    record: Callable[[Inputs], Tape]
    read: Callable[[Tape], UseByUse]
    inputs: Inputs
    kept: dict[tuple[int, int], UseByUse] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """How many there are."""
        return count_examples(self.inputs)

    @cached_property
    def places(self) -> list[slice]:
        """Which examples are read at once: as many each time as differ by one at most."""
        each = self.record(part(self.inputs, slice(0, 2))).bytes_per_example
        turns = -(-self.examples // max(2, int(READ / each)))
        return list(cut(self.examples, turns))

    def jacobians(self) -> Iterator[tuple[slice, UseByUse]]:
        """The Jacobian of all examples, some at a time."""
        return ((place, self.jacobian(place)) for place in self.places)

    @cached_property
    def groups(self) -> list[list[slice]]:
        """The same, as many together as may be held."""
        count = max(1, int(KEPT / self.jacobian(self.places[0]).nbytes))
        return [self.places[at : at + count] for at in range(0, len(self.places), count)]

    def chunks(self, group: Sequence[slice]) -> tuple[slice, Chunks]:
        """The examples of a group, and their Jacobian."""
        return slice(group[0].start, group[-1].stop), Chunks([self.jacobian(place) for place in group])

    def jacobian(self, place: slice) -> UseByUse:
        """The Jacobian of these examples, kept while there is room."""
        key = place.start, place.stop
        found = self.kept.get(key)
        if found is None:
            found = self.read(self.record(part(self.inputs, place)))
            if sum(each.nbytes for each in self.kept.values()) + found.nbytes <= KEPT:
                self.kept[key] = found
        return found


# --- The exact kernel of examples whose features would not fit: read some at a time, use by use, and multiplied out a
# strip of a parameter at a time.
#
# Of as many examples as fit on either side what was read is held, and their part of the kernel is whole; with
# more, the others are read again for each such group.


FITS = 2e9  # bytes of features, which are faster at once while they fit
TIMES = 3  # that rows are there while they are multiplied out, turned and added up


def kernel_by_strips(left: InTurns, right: InTurns) -> Float[Tensor, "probe out train out_"]:
    """The kernel of two sides, which may be one."""
    kernel: Tensor | None = None
    for k, group in enumerate(left.groups):
        rows, ones = left.chunks(group)
        for m, other in enumerate(right.groups):
            if left is right and m < k:
                continue
            columns, others = (rows, ones) if left is right and m == k else right.chunks(other)
            share = gram_by_strips(ones, others)
            if kernel is None:
                kernel = share.new_empty(left.examples, ones.outputs, right.examples, others.outputs)
            kernel[rows, :, columns] = share
            if left is right and m > k:
                kernel[columns, :, rows] = share.permute(2, 3, 0, 1)
    assert kernel is not None
    return kernel


def fits(some: UseByUse, probe: int, train: int) -> bool:
    """Whether the features of so many examples, and what is multiplied out of them, are small; `some` are like them."""
    one, bytes_each = Chunks([some]), numbers(some.parts[0]).element_size() if some.parts else 0
    factors = factors_kept(one, one, probe, train)
    kept = names(factors)
    rows = sum(size for name, size in one.sizes.items() if name not in kept) * (probe + train) * some.outputs
    made = max((size.numbers for size in factors.values()), default=0)
    held = some.nbytes / some.examples * (probe + train)
    return held + (TIMES * rows + made) * bytes_each <= FITS


# --- What a kernel is expected to cost, parameter by parameter: how it is read, and the size of that.


JACOBIANS = "Jacobians"


@dataclass(frozen=True)
class Cost:
    """The cost of one block of features: that of the kernel of some points with the training examples."""

    parameters: str
    way: str
    uses: int  # for each example
    bytes: int  # of the features of both sides, and of what is made of them
    multiplications: int


def costs(reader: Reader, tape: Tape, probe: int, train: int) -> list[Cost]:
    """The costs for so many points and training examples, each of them like those on the tape."""
    try:
        features, rows = reader.factored(tape), "gradients"
    except NoRule:
        features, rows = reader.tangent(tape), JACOBIANS
    return [cost(key, block, probe, train, rows) for key, block in features.blocks.items()]


def cost(key: Key, block: Block, probe: int, train: int, rows: str) -> Cost:
    """The cost of one block."""
    if isinstance(block, Factored):
        size = replace(sizes(block, block), probe=probe, train=train)
        factors = (probe + train) * size.uses * (size.inputs + size.out * size.features)
        numbers = (factors + size.numbers) * block.inputs.element_size()
        return Cost(parameter_names(key), size.way, size.uses, numbers, size.operations)
    _, out, length = block.rows.shape
    numbers = (probe + train) * out * length * block.rows.element_size()
    return Cost(parameter_names(key), rows, 1, numbers, probe * out * train * out * length)


def parameter_names(key: Key) -> str:
    """The parameters of a block."""
    return ", ".join(part.name if isinstance(part, View) else str(part) for part in key if part is not None)


# --- The sketched tangent kernel: examples are read some at a time, and only their sketches are kept of them all.
#
# No features of all examples, no rows as long as the weights: for each example and output k numbers, and for the
# error bar gradients of a strip of the weights at a time. What was read is kept for it while it fits, else read
# again.


GRADIENTS = 2**28  # bytes of the gradients of some weights, along all vectors


class SketchedKernel(NamedTuple):
    """K̂, and how large ‖K̂ − K‖_F is at most, in 99 of 100 cases."""

    kernel: Float[Tensor, "probe out train out_"]
    error_bar: float


@dataclass(frozen=True)
class SketchedPoints(InTurns):
    """Examples whose Jacobians are projected and contracted."""

    def sketched(self, sketch: Sketch) -> Float[Tensor, "example out size"]:
        """J S."""
        return torch.cat([sketch.of(found.parts) for _, found in self.jacobians()])

    def gradient(self, vector: Float[Tensor, "example out"], like: Weights) -> Weights:
        """Jᵀ v."""
        total = nothing(like)
        for place, found in self.jacobians():
            found.weighted(vector[place]).add_to(total)
        return total

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        return torch.cat([found.applied(weights) for _, found in self.jacobians()])

    @property
    def has_few_uses(self) -> bool:
        """Whether products with vectors are faster by factors than by gradients multiplied out once for all vectors."""
        return has_few_uses(self.jacobian(self.places[0]))


def sketched_kernel(
    left: SketchedPoints, right: SketchedPoints, weights: Weights, size: int, seed: int
) -> SketchedKernel:
    """The kernel of two sides, which may be one, and its error bar; `weights` are those that are trained."""
    sketch = Sketch(size, seed, {name: weight.shape for name, weight in weights.items()})
    other = right.sketched(sketch)
    one = other if left is right else left.sketched(sketch)
    found = sketched_gram(Sketched(one), Sketched(other))
    vectors = random_vectors(other.shape[:2], seed, other)
    missed = torch.einsum("qcnd,vnd->vqc", found, vectors) - products(left, right, vectors, weights)
    return SketchedKernel(found, error_bar(missed))


def products(
    left: SketchedPoints, right: SketchedPoints, vectors: Float[Tensor, "vector train out_"], weights: Weights
) -> Float[Tensor, "vector probe out"]:
    """K v = J̄(Jᵀv)."""
    if left.has_few_uses and right.has_few_uses:
        return torch.stack([left.applied(right.gradient(vector, weights)) for vector in vectors])
    results = vectors.new_zeros(len(vectors), left.examples, vectors.shape[2])
    for some in together(weights, GRADIENTS // (len(vectors) * vectors.element_size())):
        gradients = [vectors.new_zeros(len(vectors), len(place)) for _, place in some]
        for examples, chunks in map(right.chunks, right.groups):
            for gradient, strip in zip(gradients, some, strict=True):
                chunks.add_weighted(gradient, vectors[:, examples].flatten(1), *strip)
        for examples, chunks in map(left.chunks, left.groups):
            for gradient, strip in zip(gradients, some, strict=True):
                results[:, examples] += chunks.applied(gradient, *strip).view_as(results[:, examples])
    return results


def has_few_uses(some: UseByUse) -> bool:
    """Whether each weight is used about as often as there are vectors, in products alone."""
    return all(isinstance(part, Factored) and part.inputs.shape[1] <= VECTORS for part in some.parts)


def together(weights: Weights, most: int) -> Iterator[list[tuple[str, range]]]:
    """Strips of all weights, so many elements at a time at most.

    >>> [list(map(str, some)) for some in together({"w": torch.ones(5), "b": torch.ones(1)}, 3)]
    [["('w', range(0, 3))"], ["('w', range(3, 5))", "('b', range(0, 1))"]]
    """
    some: list[tuple[str, range]] = []
    left = most
    for name, weight in weights.items():
        at = 0
        while at < weight.numel():
            end = min(at + left, weight.numel())
            some.append((name, range(at, end)))
            left, at = left - (end - at), end
            if not left:
                yield some
                some, left = [], most
    if some:
        yield some


# --- Whether a sketch is worth its while: what it and its error bar take, against what the exact kernel takes.
#
# Of n rows of P numbers, each a sum of u outer products, and v vectors for the bar, counted in multiplications:
#
#     exact    n u P + n² P/2
#     bar      2 n u P + 2 n v P        beside the sketch itself
#
# so the exact kernel of a few dozen rows takes less than the bar alone. What both read is not in it.


LONG = 1e11  # multiplications of a sketch that are worth a word: a second or two


def remark(some: UseByUse, probe: int, train: int, size: int) -> str | None:
    """What to say of a sketch of so many examples, with as many as `train` or with themselves, which are like some."""
    sketched = of_sketch(some, probe, train, size)
    held = (probe + train) * some.nbytes / some.examples <= KEPT
    if sketched < LONG or not held or (exact := of_kernel(some, probe, train)) > sketched:
        return None
    return (
        f"the exact kernel of these {probe + train} examples takes less than this sketch of it, some {exact:.1g} "
        f"multiplications for {sketched:.1g}, and has no error: leave sketch out"
    )


def of_kernel(some: UseByUse, probe: int, train: int) -> float:
    """Multiplications of the exact kernel; with themselves, where `train` is none, of half of it."""
    one, other = Chunks([some]), train or probe
    factors = factors_kept(one, one, probe, other)
    kept = names(factors)
    rows = sum(size for name, size in one.sizes.items() if name not in kept) * some.outputs**2 * probe * other
    made = sum(multiplied_out(part) for part in some.parts if isinstance(part, Factored) and not is_kept(part, kept))
    total = sum(size.operations for size in factors.values()) + rows + made * (probe + other)
    return total if train else total / 2


def of_sketch(some: UseByUse, probe: int, train: int, size: int) -> float:
    """Multiplications of a sketch to so many dimensions, and of its error bar."""
    weights = sum(Chunks([some]).sizes.values())
    each = sum(of_part(part, size) for part in some.parts)
    made = sum(multiplied_out(part) for part in some.parts if isinstance(part, Factored))
    bar = VECTORS * made if has_few_uses(some) else made + VECTORS * some.outputs * weights
    return (probe + train) * each + (probe + (train or probe)) * bar


def of_part(part: Part, size: int) -> float:
    """Multiplications of the sketch of one use, for an example."""
    match part:
        case Factored():
            return min(operations(part.inputs, part.outputs, size))
        case Copies():
            return SLOWER * part.gradients[0].numel()
        case Rows():
            return SLOWER * part.rows[0].numel()


def multiplied_out(part: Factored) -> int:
    """Multiplications of an example's gradients."""
    return part.outputs[0].numel() * part.rows


def is_kept(part: Factored, kept: frozenset[str]) -> bool:
    """Whether the factors of these parameters are never multiplied out."""
    return any(view is not None and view.name in kept for view in (part.weight, part.bias))
