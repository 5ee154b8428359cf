"""The kernel of Jacobians that are kept use by use, a strip of a parameter's elements at a time.

    K = Σ_strips R R′ᵀ        R[nc, p] = ∂f_c(x_n)/∂θ_p, summed over the uses of θ, for the p of one strip

No row is as long as the weights, in whatever ways they are used: a table of words that is the readout as well gives
what an example read of it, and the outer products of the readout, strip by strip. Parameters that meet inputs in
products of one kind alone keep their factors where that takes fewer operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored, Rows, spread
from ntkexp.kernel.features.features import Key
from ntkexp.kernel.features.gram import Sizes, double_sum, sizes
from ntkexp.kernel.features.total import Total
from ntkexp.kernel.features.use_by_use import Copies, Part, UseByUse
from ntkexp.kernel.secant.uses import View

ROOM, LEAST = 2**23, 2**11  # bytes of a strip, and elements: products of matrices are slower for fewer


@dataclass(frozen=True, eq=False)
class Chunks:
    """The Jacobian of some examples, in chunks that follow each other."""

    found: Sequence[UseByUse]

    @property
    def examples(self) -> int:
        """How many there are."""
        return sum(chunk.examples for chunk in self.found)

    @property
    def outputs(self) -> int:
        """How many each example has."""
        return self.found[0].outputs

    def __iter__(self) -> Iterator[tuple[slice, UseByUse]]:
        """Each chunk, and the examples that it is of."""
        at = 0
        for chunk in self.found:
            yield slice(at, at + chunk.examples), chunk
            at += chunk.examples

    @cached_property
    def parts(self) -> Mapping[str, Sequence[tuple[slice, Part]]]:
        """What each use of a parameter gave, and to which examples."""
        parts = defaultdict[str, list[tuple[slice, Part]]](list)
        for examples, chunk in self:
            for part in chunk.parts:
                for name, _ in extents(part):
                    parts[name].append((examples, part))
        return parts

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """How many elements of each parameter lie up to the last one that is used."""
        sizes: dict[str, int] = defaultdict(int)
        for name, size in (each for chunk in self.found for part in chunk.parts for each in extents(part)):
            sizes[name] = max(sizes[name], size)
        return sizes

    def factored(self, key: Key) -> list[tuple[slice, Factored]]:
        """The uses that keep factors of these weights, and of which examples."""
        uses = ((examples, part) for examples, chunk in self for part in chunk.parts if isinstance(part, Factored))
        return [(examples, part) for examples, part in uses if key_of(part) == key]

    def strip(self, name: str, place: range) -> Float[Tensor, "row size"]:
        """The gradients of these elements of a parameter, a row for each output of each example."""
        rows = numbers(self.found[0].parts[0]).new_zeros(self.examples, self.outputs, len(place))
        for examples, part in self.parts[name]:
            add_strip(rows[examples], part, name, place)
        return rows.flatten(0, 1)

    def thin(self, name: str, place: range) -> Iterator[range]:
        """A strip of a parameter in strips of whole lines of it, that stay in caches until they are multiplied."""
        row_bytes = numbers(self.found[0].parts[0]).element_size() * self.examples * self.outputs
        width = max((line(part) for _, part in self.parts[name][:1]), default=1)
        step = max(1, max(LEAST, ROOM // row_bytes) // width) * width
        return (range(at, min(at + step, place.stop)) for at in range(place.start, place.stop, step))

    def add_weighted(
        self, total: Float[Tensor, "vector size"], vectors: Float[Tensor, "vector row"], name: str, place: range
    ) -> None:
        """V R, added to a total."""
        for some in self.thin(name, place):
            total[:, some.start - place.start : some.stop - place.start].addmm_(vectors, self.strip(name, some))

    def applied(self, vectors: Float[Tensor, "vector size"], name: str, place: range) -> Float[Tensor, "vector row"]:
        """W Rᵀ."""
        each = (
            vectors[:, some.start - place.start : some.stop - place.start] @ self.strip(name, some).t()
            for some in self.thin(name, place)
        )
        return reduce(torch.add, each)


def gram_by_strips(left: Chunks, right: Chunks) -> Float[Tensor, "probe out train out_"]:
    """The kernel of two sides, which may be one object.

    Strips are many, and each may be less than rounding of the sum: they are added up in double precision.
    """
    shape, like = (left.examples, left.outputs, right.examples, right.outputs), numbers(left.found[0].parts[0])
    share, total = (
        Total(like.new_zeros(shape[0] * shape[1], shape[2] * shape[3], dtype=kind), shape[1::2], left is right)
        for kind in (like.dtype, torch.float64)
    )
    apart = [
        key
        for key, size in factors_kept(left, right, left.examples, right.examples).items()
        if size.way != "multiplied out"
    ]
    kept = names(apart)
    for name in (name for name in left.sizes if name in right.sizes and name not in kept):
        for place in left.thin(name, range(min(left.sizes[name], right.sizes[name]))):
            rows, share.begun = left.strip(name, place), False
            share.add_product(rows, rows if right is left else right.strip(name, place))
            total.add(share.matrix)
    kernel = total.whole().view(shape)
    for key in apart:
        add_double_sums(kernel, key, left, right)
    return kernel.to(like.dtype)


def factors_kept(left: Chunks, right: Chunks, probe: int, train: int) -> Mapping[Key, Sizes]:
    """The pairs of weight and bias that meet inputs in products of one kind alone, and how large their factors are for
    so many examples."""
    ways: dict[str, set[Key]] = defaultdict(set)
    uses: dict[Key, list[Factored]] = defaultdict(list)
    for side in (left, right):
        for chunk in side.found:
            for part in chunk.parts:
                for name, _ in extents(part):
                    ways[name].add(key_of(part))
    for part in left.found[0].parts:
        if isinstance(part, Factored):
            uses[key_of(part)].append(part)
    alone = {key: parts for key, parts in uses.items() if all(len(ways[name]) == 1 for name in names([key]))}
    return {key: size_of(parts, probe, train) for key, parts in alone.items()}


def size_of(parts: Sequence[Factored], probe: int, train: int) -> Sizes:
    """That of several uses of the same weights, for so many examples on both sides."""
    uses = sum(part.inputs.shape[1] for part in parts)
    return replace(sizes(parts[0], parts[0]), probe=probe, train=train, uses=uses, uses_=uses)


def add_double_sums(kernel: Float[Tensor, "probe out train out_"], key: Key, left: Chunks, right: Chunks) -> None:
    """Add the share of parameters that keep their factors, chunk by chunk."""
    for (rows, one), (columns, other) in product(left.factored(key), right.factored(key)):
        if right is left and columns.start < rows.start:
            continue
        share = double_sum(one, other)
        kernel[rows, :, columns] += share
        if right is left and columns.start > rows.start:
            kernel[columns, :, rows] += share.permute(2, 3, 0, 1)


def key_of(part: Part) -> Key:
    """What tells whether two uses are of the same kind."""
    return (part.weight, part.bias) if isinstance(part, Factored) else (part.name, None)


def names(keys: Iterable[Key]) -> frozenset[str]:
    """The parameters of pairs of weight and bias."""
    return frozenset(view.name for key in keys for view in key if isinstance(view, View))


def numbers(part: Part) -> Tensor:
    """Some of a part, for their kind and place."""
    return part.gradients if isinstance(part, Copies) else part.numbers


def extents(part: Part) -> list[tuple[str, int]]:
    """The parameters of a use, and how many of their elements lie up to the last that it shows."""
    match part:
        case Factored():
            return [(view.name, view.extent) for view in (part.weight, part.bias) if view is not None]
        case Copies():
            return [(part.name, int(part.places.max()) + 1 if part.places.numel() else 0)]
        case Rows():
            return [(part.name, part.size)]


def add_strip(rows: Float[Tensor, "example out size"], part: Part, name: str, place: range) -> None:
    """Add what a use gives to these elements of a parameter."""
    match part:
        case Factored():
            if part.weight is not None and part.weight.name == name:
                add_outer_products(rows, part, part.weight, place)
            if part.bias is not None and part.bias.name == name:
                add_rows(rows, spread(part.of_bias(), part.bias, part.bias.extent), place)
        case Copies(name=other) if other == name:
            where = torch.where(
                (part.places >= place.start) & (part.places < place.stop), part.places - place.start, len(place)
            )
            beside = rows.new_zeros(*rows.shape[:2], len(place) + 1)
            rows += beside.scatter_add_(2, where[:, None].expand_as(part.gradients), part.gradients)[:, :, :-1]
        case Rows(name=other) if other == name:
            add_rows(rows, part.rows, place)


def add_rows(rows: Float[Tensor, "example out size"], whole: Float[Tensor, "example out size_"], place: range) -> None:
    """Add gradients of a parameter's first elements."""
    some = whole[:, :, place.start : place.stop]
    rows[:, :, : some.shape[2]] += some


def add_outer_products(rows: Float[Tensor, "example out size"], part: Factored, view: View, place: range) -> None:
    """Add Σ_u a_u ⊗ β_u, of which only the rows (or columns) are multiplied out that lie in the strip."""
    count, features = view.shape
    sides = part.inputs[:, None], part.outputs
    if view.stride == (1, count):
        major, minor = sides[1], sides[0]
    elif view.stride == (features, 1):
        major, minor = sides
    else:
        add_rows(rows, spread(part.of_weight().flatten(2), view, view.extent), place)
        return
    width = minor.shape[3]
    first, last = max(place.start - view.offset, 0), min(place.stop - view.offset, count * features)
    if first >= last:
        return
    lines, at = slice(first // width, -(-last // width)), first + view.offset - place.start
    target, left = rows.flatten(0, 1)[:, at : at + last - first], major[..., lines].mT
    if first % width == 0 and last % width == 0:
        factors = (side.expand(*rows.shape[:2], *side.shape[2:]).flatten(0, 1) for side in (left, minor))
        target.view(len(target), -1, width).baddbmm_(*factors)
    else:
        start = lines.start * width
        target += (left @ minor).flatten(2)[:, :, first - start : last - start].flatten(0, 1)


def line(part: Part) -> int:
    """How many neighbours in a parameter come from one element of a factor."""
    if not isinstance(part, Factored) or part.weight is None:
        return 1
    return part.weight.shape[0] if part.weight.stride[0] == 1 else part.weight.shape[1]
