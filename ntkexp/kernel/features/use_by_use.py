"""Jacobians use by use, for which nothing is added up, and their kernel, a strip of a parameter's elements each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.features.arrange import BY_COMPARISON, arrange, in_turn, refuse_unowned, with_gain, with_zeros
from ntkexp.kernel.features.blocks import Factored, Features, Key, Rows, spread, zeros
from ntkexp.kernel.features.gram import Sizes, Total, double_sum, sizes
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.uses import Element, Use, View
from ntkexp.shapes import Weights

# --- A Jacobian use by use: each operation that used a weight keeps what it gave to the gradient, and nothing is
# added up.
#
# Features join the uses of a parameter, and multiply out those that have no factors in common: a table of tokens
# takes a row as long as itself for every example. Here the same table takes what an example read of it, and
# where:
#
#     (∂f/∂θ)[p] = Σ_e gradient_e · [place_e = p]
#
# That is all that contractions of a Jacobian need, and sketches of it; inner products of examples need features.


@dataclass(frozen=True)
class Copies:
    """The gradients of copies of a parameter's elements, and the element that each is a copy of."""

    gradients: Float[Tensor, "example out copy"]
    places: Int[Tensor, "example copy"]
    name: str

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        return torch.einsum("nce,ne->nc", self.gradients, weights[self.name].reshape(-1)[self.places])

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> Copies:
        """Σ_c ℓ′_c of the gradients, as a single output."""
        gradients = torch.einsum("nc,nce->ne", output_gradient, self.gradients)[:, None]
        return Copies(gradients, self.places, self.name)

    def total(self, weights: Weights) -> Weights:
        """The sum over examples and outputs, in the shape of the parameter."""
        found = zeros(weights[self.name])  # of numbers that may be longer than those that it was used with
        found.view(-1).index_add_(0, self.places.reshape(-1), self.gradients.sum(1).flatten().to(found.dtype))
        return {self.name: found}


Part: TypeAlias = Factored | Rows | Copies


@dataclass(frozen=True)
class UseByUse:
    """A Jacobian as the sum of what each use gives."""

    parts: Sequence[Part]
    examples: int
    outputs: int

    @property
    def nbytes(self) -> int:
        """The memory of all parts."""
        held = (value for part in self.parts for value in vars(part).values())
        return sum(value.nbytes for value in held if isinstance(value, Tensor))

    def applied(self, weights: Weights) -> Float[Tensor, "example out"]:
        """J v, for a v in the shape of the weights."""
        return torch.stack([part.applied(weights) for part in self.parts]).sum(0)

    def weighted(self, output_gradient: Float[Tensor, "example out"]) -> UseByUse:
        """The Jacobian contracted with ℓ′ on its outputs: J(x)ᵀℓ′ for every example."""
        return UseByUse([part.weighted(output_gradient) for part in self.parts], self.examples, 1)

    def add_to(self, gradient: Weights) -> Weights:
        """Add the sum over examples and outputs to the gradient of the weights, in its place."""
        for part in self.parts:
            for name, value in part.total(gradient).items():
                gradient[name].add_(value)
        return gradient


def of_features(features: Features) -> UseByUse:
    """Features as they are, each block a part."""
    return UseByUse(tuple(features.blocks.values()), features.examples, features.outputs)


def keep_uses(
    uses: Sequence[Use],
    cotangents: Sequence[Float[Tensor, "out ..."]],
    owned: Sequence[Int[Tensor, "..."]],
    examples: int,
    outputs: int,
    leaves: Weights,
) -> UseByUse:
    """The Jacobian from β at every use; `owned` says whose each element (each row, of a product) is."""
    if len(owned) < len(uses):
        raise NoRule(BY_COMPARISON)
    parts: list[Part] = []
    for use, cotangent, owner in zip(uses, cotangents, owned, strict=True):
        if isinstance(use, Element) and isinstance(use.source, View):
            parts.append(copies(use, use.source, cotangent, owner, examples))
        else:
            alone = arrange((use,), (cotangent,), (owner,), examples, outputs, leaves)
            parts.extend(alone.blocks.values())
    return UseByUse(parts, examples, outputs)


def copies(
    use: Element, source: View, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, "..."], examples: int
) -> Copies:
    """The elements of a parameter that an operation used, example by example."""
    cotangent = with_gain(use, cotangent)
    if not (reached := owner >= 0).all():
        refuse_unowned(cotangent.masked_fill(reached, 0.0))
    positions, outputs = use.positions.to(cotangent.device), len(cotangent)
    axis = axis_that_counts(owner, examples)
    if axis is not None:
        gradients, shown = add_equal(cotangent, positions, axis)
        places = places_in(source, shown).movedim(axis, 0)
        places = places.reshape(len(places), -1).expand(examples, -1)
        gradients = gradients.movedim(axis + 1, 1).reshape(outputs, examples, -1).transpose(0, 1)
        return Copies(gradients, places, source.name)
    turns = in_turn(owner.reshape(-1), examples)
    if turns is None:
        turns = torch.arange(owner.numel(), device=owner.device).view(examples, -1)
    rows = with_zeros(cotangent.flatten(1), 1)[:, turns].transpose(0, 1)
    return Copies(rows, with_zeros(places_in(source, positions).reshape(-1), 0)[turns], source.name)


def add_equal(
    cotangent: Float[Tensor, "out ..."], positions: Int[Tensor, "..."], axis: int
) -> tuple[Float[Tensor, "out ..."], Int[Tensor, "..."]]:
    """What an example gave to the same elements again and again, added up; places that all examples share, once."""
    copied = [d for d in range(positions.dim()) if positions.stride(d) == 0]
    gradients = cotangent
    for d in copied:
        positions = positions.narrow(d, 0, min(1, positions.shape[d]))
        if d != axis:
            gradients = gradients.sum(d + 1, keepdim=True)
    return gradients, positions


def axis_that_counts(owner: Int[Tensor, "..."], examples: int) -> int | None:
    """The axis along which each element belongs to the example of its number, if there is one."""
    for axis in range(owner.dim()):
        if owner.shape[axis] == examples:
            index = torch.arange(examples, device=owner.device).view(-1, *[1] * (owner.dim() - axis - 1))
            if bool(((owner == index) | (owner < 0)).all()):
                return axis
    return None


def places_in(source: View, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The elements of a parameter, given those of a view of it in their order.

    >>> places_in(View("w", (2, 3), (1, 2), 5), torch.tensor([0, 1, 5]))
    tensor([ 5,  7, 10])
    """
    places, left = torch.full_like(positions, source.offset), positions
    for size, stride in zip(reversed(source.shape), reversed(source.stride), strict=True):
        places = places + left % size * stride
        left = left // size
    return places


# --- The kernel of Jacobians that are kept use by use, a strip of a parameter's elements at a time.
#
#     K = Σ_strips R R′ᵀ        R[nc, p] = ∂f_c(x_n)/∂θ_p, summed over the uses of θ, for the p of one strip
#
# No row is as long as the weights, in whatever ways they are used: a table of words that is the readout as well
# gives what an example read of it, and the outer products of the readout, strip by strip. Parameters that meet
# inputs in products of one kind alone keep their factors where that takes fewer operations.


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
