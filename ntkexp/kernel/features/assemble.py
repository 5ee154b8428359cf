"""From the outputs of a network to its Jacobian: back-propagation to every use of a weight, and
assembly into blocks.

The network may be the surrogate of a step. A tap is the tensor at which a use of a weight can be
differentiated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.func import vmap

from ntkexp.kernel.features.blocks import Block, Copies, Factored, Rows, spread
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.record.convolution import Window
from ntkexp.kernel.secant.call import NoRule, inner_products
from ntkexp.kernel.secant.ownership import Owners, shown_once
from ntkexp.kernel.secant.uses import Element, Grouped, Product, Source, Use, View, rows_of
from ntkexp.shapes import Weights


@dataclass(frozen=True)
class PulledBack:
    """β = ∂f/∂tap at every use of a weight, and the example that owns each element, or each row of
    a product.
    """

    uses: Sequence[Use]
    cotangents: Sequence[Float[Tensor, "out ..."]]
    owners: Sequence[Int[Tensor, "..."]]
    examples: int
    outputs: int
    leaves: Weights  # the trained weights, or their differences


def pull_back(
    output: Float[Tensor, "example out"],
    uses: Sequence[Use],
    owned: Owners,
    leaves: Weights,
    mixtures: Float[Tensor, "mixture example out"],
    *,
    at_once: bool = False,
) -> PulledBack:
    """Pull mixtures of outputs back to every use. With `at_once`, each operation runs once for all
    mixtures.
    """
    taps = [use.tap for use in uses]
    cotangents: list[Tensor] = []
    if taps and at_once and len(mixtures) > 1:
        cotangents = pull_at_once(output, taps, mixtures)
    elif taps:
        pulled = [
            torch.autograd.grad(output, taps, mixture, retain_graph=True, materialize_grads=True)
            for mixture in mixtures
        ]
        # The outputs of an example are neighbours in memory, in the order in which kernels read
        # them
        for parts in zip(*pulled, strict=True):
            if len(parts) == 1:
                cotangents.append(parts[0][None])
            else:
                cotangents.append(
                    torch.stack(parts, 1).transpose(0, 1) if parts[0].dim() else torch.stack(parts)
                )
    return PulledBack(uses, cotangents, owned.of_uses, len(output), len(mixtures), leaves)


def pull_at_once(
    output: Float[Tensor, "*shape"], taps: list[Tensor], mixtures: Float[Tensor, "mixture *shape"]
) -> list[Float[Tensor, "mixture ..."]]:
    """Return ∂f/∂tap by one back-propagation, whose operations each run for all mixtures."""

    def pull(mixture: Float[Tensor, "*shape"]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, taps, mixture, retain_graph=True, materialize_grads=True)

    return list(vmap(pull)(mixtures))


def select_outputs(
    output: Float[Tensor, "example out"], chosen: Sequence[int]
) -> Float[Tensor, "chosen example out"]:
    """Return one mixture for each chosen output, the same for all examples."""
    index = torch.tensor(chosen, device=output.device)[:, None]
    one_hot = output.new_zeros(len(chosen), output.shape[1]).scatter(1, index, 1.0)
    return one_hot[:, None].expand(-1, *output.shape)


# Parameters that are always used together, in products alone, keep their factors. A parameter with
# several kinds of use (a tied weight, a gain, a weight made of other weights) gets its gradients
# multiplied out, so that the sum over uses is an ordinary sum.


BY_COMPARISON = "a value reaches the outputs through a comparison alone, which changes between the ends of a step"
NOWHERE: Weights = {}

ProductKey: TypeAlias = tuple[Source | None, Source | None]


def assemble(pulled: PulledBack, room: Weights = NOWHERE, *, as_copies: bool = False) -> Jacobian:
    """Return the Jacobian with one block for each parameter, or for each weight and its bias.

    Long gradients may be written into `room`, which starts at the first example. With `as_copies`,
    a table that is used once, and in fewer elements than it has, keeps the places that were read.
    """
    if len(pulled.owners) < len(pulled.uses):
        raise NoRule(BY_COMPARISON)
    tables = tables_read_once(pulled) if as_copies else frozenset()
    blocks: list[Block] = []
    products: dict[ProductKey, list[Factored]] = defaultdict(list)
    sums = RowSums(pulled.leaves)

    # The gradient at each use: copies, rows, or factors
    for use, cotangent, owner in zip(pulled.uses, pulled.cotangents, pulled.owners, strict=True):
        if isinstance(use, Element) and isinstance(use.source, View) and use.source.name in tables:
            read = copies(use, use.source, cotangent, owner, pulled.examples)
            values = read.values.to(pulled.leaves[read.name].dtype)  # after casts
            blocks.append(replace(read, values=values))
        elif isinstance(use, Element):
            sums.add(use.source, scatter(use, cotangent, owner, pulled.examples))
        elif isinstance(use, Grouped):
            inside = room_of(use.weight, room, pulled.examples, sums.rows.keys())
            for source, gradient in multiply_groups(use, cotangent, owner, pulled.examples, inside):
                sums.add(source, gradient)
        else:
            inputs, outputs = factors(use, cotangent, owner, pulled.examples)
            weight = use.weight if isinstance(use.weight, View) else None
            bias = use.bias if isinstance(use.bias, View) else None
            block = Factored(inputs, outputs, weight, bias, use.shift)
            products[use.weight, use.bias].append(block)

    # Products keep their factors if their parameters are used in no other way
    factored = factored_keys(pulled.uses)
    for key, parts in products.items():
        joined = join_uses(parts)
        if key in factored and len(joined) == 1:
            blocks.append(joined[0])
        else:
            for block in joined:
                sums.add_product(key, block)
    return Jacobian((*blocks, *sums.blocks()), pulled.examples, pulled.outputs)


def join_uses(parts: Sequence[Factored]) -> Sequence[Factored]:
    """Return several products with the same weight as one sum over their uses, if they have the
    same shift.
    """
    if len(parts) == 1 or len({part.shift for part in parts}) > 1:
        return parts
    inputs = torch.cat([part.inputs for part in parts], dim=1)
    outputs = torch.cat([part.outputs for part in parts], dim=2)
    return [replace(parts[0], inputs=inputs, outputs=outputs)]


@dataclass
class RowSums:
    """Gradients that are multiplied out, summed over the uses of each parameter."""

    leaves: Weights
    rows: dict[str, Float[Tensor, "example out _"]] = field(default_factory=dict)

    def add(self, source: Source, gradient: Float[Tensor, "example out size"]) -> None:
        """Add the gradient of a source, carried back to its parameters."""
        for name, row in self.carried_back(source, gradient).items():
            self.rows[name] = self.rows[name] + row if name in self.rows else row

    def carried_back(
        self, source: Source, gradient: Float[Tensor, "example out size"]
    ) -> dict[str, Float[Tensor, "example out _"]]:
        """Return the gradients of the parameters that a source shows or is computed from."""
        if isinstance(source, View):
            size = self.leaves[source.name].numel()
            if not source.is_whole(size):
                gradient = spread(gradient, source, size)
            return {source.name: gradient}
        # through operations on weights alone: one back-propagation for every example and output
        names = sorted(source.names)
        cotangents = gradient.reshape(-1, *source.delta.shape)
        rows = pull_at_once(source.delta, [self.leaves[name] for name in names], cotangents)
        return {
            name: row.reshape(*gradient.shape[:2], -1)
            for name, row in zip(names, rows, strict=True)
        }

    def add_product(self, key: ProductKey, block: Factored) -> None:
        """Add the gradients of a weight and a bias, multiplied out."""
        weight, bias = key
        if weight is not None:
            self.add(weight, block.of_weight().flatten(2))
        if bias is not None:
            self.add(bias, block.of_bias())

    def blocks(self) -> list[Rows]:
        """Return the sums as blocks, in the dtype of their parameters: casts may have changed it."""
        return [Rows(row.to(self.leaves[name].dtype), name) for name, row in self.rows.items()]


def assemble_uses(pulled: PulledBack) -> Jacobian:
    """Return the Jacobian with a block for each use, without sums over uses.

    Tables keep the places that were read.
    """
    if len(pulled.owners) < len(pulled.uses):
        raise NoRule(BY_COMPARISON)
    blocks: list[Block] = []
    for use, cotangent, owner in zip(pulled.uses, pulled.cotangents, pulled.owners, strict=True):
        if isinstance(use, Element) and isinstance(use.source, View):
            blocks.append(copies(use, use.source, cotangent, owner, pulled.examples))
        else:
            alone = replace(pulled, uses=(use,), cotangents=(cotangent,), owners=(owner,))
            blocks.extend(assemble(alone).blocks)
    return Jacobian(tuple(blocks), pulled.examples, pulled.outputs)


def tables_read_once(pulled: PulledBack) -> frozenset[str]:
    """Return the parameters with one use, which reads fewer elements than a row for each example
    would have.
    """
    count = Counter[str]()
    tables = set[str]()
    for use in pulled.uses:
        sources = (use.source,) if isinstance(use, Element) else (use.weight, use.bias)
        count.update(name for source in sources for name in names(source))
        if isinstance(use, Element) and isinstance(use.source, View):
            name = use.source.name
            if use.tap.numel() < pulled.examples * pulled.leaves[name].numel():
                tables.add(name)
    return frozenset(name for name in tables if count[name] == 1)


def factored_keys(uses: Sequence[Use]) -> set[ProductKey]:
    """Return the pairs of weight and bias whose parameters are used in products of this pair and in
    no other way.
    """
    ways: dict[str, set[object]] = defaultdict(set)
    pairs: set[ProductKey] = set()
    for use in uses:
        pair = (use.source, None) if isinstance(use, Element) else (use.weight, use.bias)
        # Each element of the weight is an element of a parameter, shown once
        plain = isinstance(use, Product) and all(
            s is None or (isinstance(s, View) and s.shows_once) for s in pair
        )
        for name in names(pair[0]) | names(pair[1]):
            ways[name].add(pair if plain else use)
        if plain:
            pairs.add(pair)
    return {
        pair
        for pair in pairs
        if all(len(ways[name]) == 1 for name in names(pair[0]) | names(pair[1]))
    }


def names(source: Source | None) -> frozenset[str]:
    if source is None:
        return frozenset()
    return frozenset({source.name}) if isinstance(source, View) else source.names


def row_index(owner: Int[Tensor, " row"], examples: int) -> Int[Tensor, "example use"] | None:
    """Return the rows that each example uses, or None if rows are sorted by example, equally many
    for each.

    If an example has fewer rows than others, the number after the last row fills the list.

    >>> row_index(torch.tensor([0, 0, 1, 1]), 2), row_index(torch.tensor([1, 0, -1, 1]), 2)
    (None, tensor([[1, 4],
            [0, 3]]))
    """
    uses, rest = divmod(len(owner), examples)
    if not rest and torch.equal(
        owner, torch.arange(examples, device=owner.device).repeat_interleave(uses)
    ):
        return None
    times = torch.bincount(owner + 1, minlength=examples + 1)
    order = owner.argsort(stable=True)[int(times[0]) :]
    whose = owner[order]
    before = times[1:].cumsum(0) - times[1:]
    nobody = owner.new_full((examples, int(times[1:].max())), len(owner))
    return nobody.index_put(
        (whose, torch.arange(len(order), device=owner.device) - before[whose]), order
    )


def select_rows(
    rows: Float[Tensor, "..."], axis: int, index: Int[Tensor, "example use"]
) -> Float[Tensor, "... example use _"]:
    """Return the rows of each example, with zeros for missing ones. It is a view if rows are sorted
    use by use.
    """
    examples, uses = index.shape
    count = rows.shape[axis]
    if torch.equal(index.t().reshape(-1), torch.arange(count, device=index.device)):
        return rows.reshape(*rows.shape[:axis], uses, examples, *rows.shape[axis + 1 :]).transpose(
            axis, axis + 1
        )
    known = with_zeros(rows, axis) if (index == count).any() else rows
    return known[index] if axis == 0 else known[:, index]


def with_zeros(rows: Shaped[Tensor, "..."], axis: int) -> Shaped[Tensor, "..."]:
    """Append a row of zeros."""
    shape = [1 if d == axis else n for d, n in enumerate(rows.shape)]
    return torch.cat([rows, rows.new_zeros(shape)], axis)


def example_axis(owner: Int[Tensor, "..."], examples: int, among: Sequence[int]) -> int | None:
    """Return the axis, out of some, along which element k belongs to example k, if there is one."""
    for axis in among:
        index = torch.arange(examples, device=owner.device).view(
            -1, *[1] * (owner.dim() - axis - 1)
        )
        if bool(((owner == index) | (owner < 0)).all()):
            return axis
    return None


def factors(
    use: Product | Grouped,
    cotangent: Float[Tensor, "out ..."],
    owner: Int[Tensor, " row"],
    examples: int,
) -> tuple[Float[Tensor, "example use in_"], Float[Tensor, "example out use features"]]:
    """Return the factors of a product at the rows of each example."""
    inputs = use.factor.rows if isinstance(use.factor, Window) else use.factor
    rounds, rest = divmod(len(owner), examples)
    one_each = torch.arange(examples, device=owner.device)
    if inputs.dim() == 2 and not rest and torch.equal(owner, one_each.repeat(rounds)):
        # Rows come in rounds, one row of each example, as if time came first
        outputs = cotangent.reshape(len(cotangent), -1, examples, cotangent.shape[-1])
        return inputs.reshape(-1, examples, inputs.shape[1]).transpose(0, 1), outputs.permute(
            2, 0, 1, 3
        )
    index = row_index(owner, examples)
    if index is None and cotangent.dim() > 3 and cotangent.shape[1] == examples:
        outputs = cotangent.flatten(3).mT  # pixels are uses, and are not copied into rows
    else:
        rows = rows_of(cotangent, batch=1)
        if index is not None:
            if (owner < 0).any():
                refuse_unowned(rows[:, owner < 0])
            inputs = select_rows(inputs.flatten(0, -2), 0, index)
            rows = select_rows(rows, 1, index)
        uses = len(owner) // examples if index is None else index.shape[1]
        outputs = rows.reshape(len(rows), examples, uses, rows.shape[-1])
    return inputs.reshape(examples, outputs.shape[2], inputs.shape[-1]), outputs.transpose(0, 1)


def multiply_groups(
    use: Grouped,
    cotangent: Float[Tensor, "out ..."],
    owner: Int[Tensor, " row"],
    examples: int,
    room: Float[Tensor, "example out size"] | None,
) -> Iterator[tuple[Source, Float[Tensor, "example out size"]]]:
    """Yield the gradients Σ_u β a of grouped kernels and of their bias.

    Each example and group takes one product of matrices, a few examples at a time. Gradients are
    written into their room if its groups follow each other.
    """
    if (
        isinstance(use.factor, Window)
        and cotangent.shape[1] == examples
        and row_index(owner, examples) is None
    ):
        turns = use.factor.turns()
        outputs = cotangent.flatten(3).transpose(0, 1)
    else:
        inputs, rows = factors(use, cotangent, owner, examples)
        turns = iter([(slice(None), inputs.mT)])
        outputs = rows.mT
    groups = use.groups
    (_, count, features, uses) = outputs.shape
    left = outputs.reshape(examples, count, groups, features // groups, uses).transpose(1, 2)
    left = left.reshape(examples, groups, count * features // groups, uses)
    gradients = None if room is None or min(groups, count) > 1 else room.view(*left.shape[:3], -1)
    for part, shown in turns:
        beta = left[part].flatten(0, 1)
        patches = shown.reshape(len(shown) * groups, shown.shape[1] // groups, uses).mT
        if gradients is None and part == slice(
            None
        ):  # not in place, so that a program can be made of it
            gradients = torch.bmm(beta, patches).view(*left.shape[:3], patches.shape[2])
            break
        if gradients is None:
            gradients = left.new_empty(*left.shape[:3], patches.shape[2])
        torch.bmm(beta, patches, out=gradients[part].flatten(0, 1))
    assert gradients is not None
    yield use.weight, gradients.view(examples, groups, count, -1).transpose(1, 2).flatten(2)
    if use.bias is not None:
        yield use.bias, outputs.sum(3)


def room_of(
    weight: Source, room: Weights, examples: int, taken: Collection[str]
) -> Float[Tensor, "example out size"] | None:
    """Return the place for the gradients of a whole parameter, if there is one and it is still
    empty.
    """
    if not isinstance(weight, View) or weight.name not in room or weight.name in taken:
        return None
    inside = room[weight.name][:examples]
    return inside if weight.is_whole(inside.shape[2]) else None


def scatter(
    use: Element, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, "..."], examples: int
) -> Float[Tensor, "example out size"]:
    """Return the gradient of each example with respect to the elements that a weight was expanded
    from.

    A weight that was copied along the axis of examples, as gains and biases are, takes one sum.
    Other gradients go element by element.
    """
    shown = shown_once(owner)
    if not (shown >= 0).all():
        refuse_unowned(with_gain(use, cotangent).masked_fill(owner >= 0, 0.0))
    positions = use.positions
    size = prod(use.source.shape) if isinstance(use.source, View) else use.source.delta.numel()
    along = [
        d
        for d, n in enumerate(owner.shape)
        if n == examples and (positions.stride(d) == 0 or n == 1)
    ]
    axis = example_axis(shown, examples, along)
    if axis is not None:
        return add_copies(use, cotangent, axis, size)
    cotangent = with_gain(use, cotangent)
    reached = owner >= 0
    target = (owner * size + positions.to(owner.device))[reached]
    flat = torch.zeros(
        len(cotangent), examples * size, dtype=cotangent.dtype, device=cotangent.device
    )
    return flat.index_add(1, target, cotangent[:, reached]).view(-1, examples, size).transpose(0, 1)


def with_gain(use: Element, cotangent: Float[Tensor, "out ..."]) -> Float[Tensor, "out ..."]:
    """Return the gradient of the expanded weight. The tap may be a result that it was multiplied
    into.
    """
    return cotangent if isinstance(use.gain, float) and use.gain == 1 else cotangent * use.gain


def add_copies(
    use: Element, cotangent: Float[Tensor, "out ..."], axis: int, size: int
) -> Float[Tensor, "example out size"]:
    """Sum over the axes that the weight was copied along, and sort the rest by its place in the
    weight.
    """
    positions = use.positions
    copied = [d for d in range(positions.dim()) if positions.stride(d) == 0 and d != axis]
    last = len(copied) > 0 and copied[0] == use.tap.dim() - len(copied)
    if (
        last and isinstance(use.gain, Tensor) and len(cotangent) > 1
    ):  # for many outputs, as products of matrices
        kind = torch.promote_types(
            cotangent.dtype, use.gain.dtype
        )  # after casts the gain may have a shorter dtype
        gain = use.gain.expand(use.tap.shape).flatten(copied[0]).to(kind)
        summed = inner_products(cotangent.flatten(copied[0] + 1).to(kind), gain[None])[0, ..., 0]
    else:
        gradients = with_gain(use, cotangent)
        summed = gradients.sum([d + 1 for d in copied]) if copied else gradients
    rows = summed.movedim(axis + 1 - sum(d < axis for d in copied), 1)
    rows = rows.flatten(2) if rows.dim() > 2 else rows[:, :, None]
    once = positions[
        tuple(0 if d in (axis, *copied) else slice(None) for d in range(positions.dim()))
    ]
    places = once.reshape(-1).to(rows.device)
    if not torch.equal(places, torch.arange(size, device=rows.device)):
        rows = rows.new_zeros(*rows.shape[:2], size).index_add(2, places, rows)
    return rows.transpose(0, 1)


def refuse_unowned(cotangent: Float[Tensor, "out ..."]) -> None:
    """Raise if an element without an owner has a gradient.

    Only a mask that changed since owners were found can give it one.
    """
    if cotangent.any():
        raise NoRule(BY_COMPARISON)


def copies(
    use: Element,
    source: View,
    cotangent: Float[Tensor, "out ..."],
    owner: Int[Tensor, "..."],
    examples: int,
) -> Copies:
    """Return the gradients of the elements that an operation read, for each example."""
    cotangent = with_gain(use, cotangent)
    if not (reached := owner >= 0).all():
        refuse_unowned(cotangent.masked_fill(reached, 0.0))
    positions = use.positions.to(cotangent.device)
    outputs = len(cotangent)
    axis = example_axis(owner, examples, [d for d, n in enumerate(owner.shape) if n == examples])
    if axis is None:
        index = row_index(owner.reshape(-1), examples)
        if index is None:
            index = torch.arange(owner.numel(), device=owner.device).view(examples, -1)
        rows = with_zeros(cotangent.flatten(1), 1)[:, index].transpose(0, 1)
        return Copies(
            rows, with_zeros(positions_in(source, positions).reshape(-1), 0)[index], source.name
        )
    # Sum what an example added to the same elements; keep positions that all examples share once
    for d in range(positions.dim()):
        if use.positions.stride(d) == 0:
            positions = positions.narrow(d, 0, min(1, positions.shape[d]))
            cotangent = cotangent if d == axis else cotangent.sum(d + 1, keepdim=True)
    shown = positions_in(source, positions).movedim(axis, 0)
    shown = shown.reshape(len(shown), -1).expand(examples, -1)
    return Copies(
        cotangent.movedim(axis + 1, 1).reshape(outputs, examples, -1).transpose(0, 1),
        shown,
        source.name,
    )


def positions_in(source: View, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return the elements of a parameter, from elements of a view in its own order.

    >>> positions_in(View("w", (2, 3), (1, 2), 5), torch.tensor([0, 1, 5]))
    tensor([ 5,  7, 10])
    """
    places = torch.full_like(positions, source.offset)
    left = positions
    for size, stride in zip(reversed(source.shape), reversed(source.stride), strict=True):
        places = places + left % size * stride
        left = left // size
    return places
