"""From the outputs of a network, or of its surrogate, to its Jacobian: differentiated at every use of a weight, and
what was pulled back there assembled into gradient blocks, example by example.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
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

# --- Differentiation: the outputs, one after the other or all at once, or one mixture of them for which it takes a
# single back-propagation, at the taps of every use of a weight.


@dataclass(frozen=True)
class PulledBack:
    """β = ∂f/∂tap at every use of a weight, and the example that owns each element (each row, of a product)."""

    uses: Sequence[Use]
    cotangents: Sequence[Float[Tensor, "out ..."]]
    owners: Sequence[Int[Tensor, "..."]]
    examples: int
    outputs: int
    leaves: Weights  # the weights, or differences of weights, that are trained


def pull_back(
    output: Float[Tensor, "example out"],
    uses: Sequence[Use],
    owned: Owners,
    leaves: Weights,
    mixtures: Float[Tensor, "mixture example out"],
    *,
    at_once: bool = False,
) -> PulledBack:
    """What mixtures of outputs pull back to every use; `at_once` runs every operation for all mixtures."""
    taps = [use.tap for use in uses]
    cotangents: list[Tensor] = []
    if taps and at_once and len(mixtures) > 1:
        cotangents = pull_at_once(output, taps, mixtures)
    elif taps:
        pulled = [
            torch.autograd.grad(output, taps, mixture, retain_graph=True, materialize_grads=True)
            for mixture in mixtures
        ]
        # Those of an example beside each other in memory, as kernels go through them
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
    """∂f/∂tap, with a back-propagation in which every operation runs for all mixtures."""

    def pull(mixture: Float[Tensor, "*shape"]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, taps, mixture, retain_graph=True, materialize_grads=True)

    return list(vmap(pull)(mixtures))


def select_outputs(
    output: Float[Tensor, "example out"], chosen: Sequence[int]
) -> Float[Tensor, "chosen example out"]:
    """A mixture for each chosen output in turn, the same of all examples."""
    index = torch.tensor(chosen, device=output.device)[:, None]
    each = torch.zeros(
        len(chosen), output.shape[1], dtype=output.dtype, device=output.device
    ).scatter(1, index, 1.0)
    return each[:, None].expand(-1, *output.shape)


# --- Assembly: the gradient blocks of every parameter.
#
# Parameters that are always used together, in products alone, keep their factors. A parameter that is used in
# several ways (a tied weight, a gain, a weight made of other weights) gets its gradients multiplied out: the sum
# over its uses is then an ordinary sum.


BY_COMPARISON = "a value reaches the outputs through a comparison alone, which changes between the ends of a step"
NOWHERE: Weights = {}

ProductKey: TypeAlias = tuple[Source | None, Source | None]


def assemble(pulled: PulledBack, room: Weights = NOWHERE, *, as_copies: bool = False) -> Jacobian:
    """The Jacobian with one block for each parameter, or each weight and its bias. Gradients of which there are many
    may be written into `room`, which begins with the first example. With `as_copies` a table that is read once, and in
    fewer elements than it has, keeps the places where it was read."""
    blocks: list[Block] = []
    products: dict[ProductKey, list[Factored]] = defaultdict(list)
    rows: dict[str, Float[Tensor, "example out _"]] = {}
    leaves = pulled.leaves
    if len(pulled.owners) < len(pulled.uses):
        raise NoRule(BY_COMPARISON)
    tables = tables_read_once(pulled) if as_copies else frozenset()
    for use, cotangent, owner in zip(pulled.uses, pulled.cotangents, pulled.owners, strict=True):
        if isinstance(use, Element) and isinstance(use.source, View) and use.source.name in tables:
            read = copies(use, use.source, cotangent, owner, pulled.examples)
            blocks.append(
                replace(read, values=read.values.to(leaves[read.name].dtype))
            )  # after casts
        elif isinstance(use, Element):
            add_rows(rows, use.source, scatter(use, cotangent, owner, pulled.examples), leaves)
        elif isinstance(use, Grouped):
            inside = room_of(use.weight, room, pulled.examples, rows.keys())
            for source, gradient in multiply_groups(use, cotangent, owner, pulled.examples, inside):
                add_rows(rows, source, gradient, leaves)
        else:
            inputs, outputs = factors(use, cotangent, owner, pulled.examples)
            weight, bias = (
                source if isinstance(source, View) else None for source in (use.weight, use.bias)
            )
            products[use.weight, use.bias].append(
                Factored(inputs, outputs, weight, bias, use.shift)
            )
    kept = factored_keys(pulled.uses)
    for (weight_, bias_), parts in products.items():
        joined: Sequence[Factored] = parts
        if (
            len(parts) > 1 and len({part.shift for part in parts}) == 1
        ):  # several uses as one sum over uses
            inputs = torch.cat([part.inputs for part in parts], dim=1)
            outputs = torch.cat([part.outputs for part in parts], dim=2)
            joined = [replace(parts[0], inputs=inputs, outputs=outputs)]
        if (weight_, bias_) in kept and len(joined) == 1:
            blocks.append(joined[0])
            continue
        for block in joined:
            add_products(rows, (weight_, bias_), block, leaves)
    blocks += [Rows(row.to(leaves[name].dtype), name) for name, row in rows.items()]  # after casts
    return Jacobian(tuple(blocks), pulled.examples, pulled.outputs)


def assemble_uses(pulled: PulledBack) -> Jacobian:
    """The Jacobian with a block for each use: nothing is added up, and what was read of a table stays with the places
    where it was read."""
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
    """The parameters with one use, which reads fewer elements than a row of each example would have."""
    count, found = Counter[str](), set[str]()
    for use in pulled.uses:
        sources = (use.source,) if isinstance(use, Element) else (use.weight, use.bias)
        count.update(name for source in sources for name in names(source))
        if isinstance(use, Element) and isinstance(use.source, View):
            name = use.source.name
            if use.tap.numel() < pulled.examples * pulled.leaves[name].numel():
                found.add(name)
    return frozenset(name for name in found if count[name] == 1)


def factored_keys(uses: Sequence[Use]) -> set[ProductKey]:
    """The pairs of weight and bias whose parameters meet inputs in this pair's products and in no other way."""
    ways: dict[str, set[object]] = defaultdict(set)
    pairs: set[ProductKey] = set()
    for use in uses:
        pair = (use.source, None) if isinstance(use, Element) else (use.weight, use.bias)
        # Each element of what is multiplied with is a parameter of its own, or there is nothing
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


def add_rows(
    rows: dict[str, Float[Tensor, "example out _"]],
    source: Source,
    gradient: Float[Tensor, "example out size"],
    leaves: Weights,
) -> None:
    """Carry a gradient back from a source to its parameters."""
    if isinstance(source, View):
        size = leaves[source.name].numel()
        carried = {
            source.name: gradient if source.is_whole(size) else spread(gradient, source, size)
        }
    else:  # through the operations on weights alone, by one back-propagation for every example and output
        wanted = sorted(source.names)
        cotangents = gradient.reshape(-1, *source.delta.shape)
        found = pull_at_once(source.delta, [leaves[name] for name in wanted], cotangents)
        carried = {
            n: row.reshape(*gradient.shape[:2], -1) for n, row in zip(wanted, found, strict=True)
        }
    for name, row in carried.items():
        rows[name] = rows[name] + row if name in rows else row


def add_products(
    rows: dict[str, Float[Tensor, "example out _"]],
    key: ProductKey,
    block: Factored,
    leaves: Weights,
) -> None:
    """Carry the gradients of products back from a weight and a bias to their parameters."""
    weight, bias = key
    if weight is not None:
        add_rows(rows, weight, block.of_weight().flatten(2), leaves)
    if bias is not None:
        add_rows(rows, bias, block.of_bias(), leaves)


# --- Row index: which rows of a product, or elements, belong to which example.


def row_index(owner: Int[Tensor, " row"], examples: int) -> Int[Tensor, "example use"] | None:
    """The rows that each example uses; None where they follow each other example by example, as many of each.

    Of an example with fewer than others, rows that are not there: those after the last.

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
    whose, before = owner[order], times[1:].cumsum(0) - times[1:]
    nobody = owner.new_full((examples, int(times[1:].max())), len(owner))
    return nobody.index_put(
        (whose, torch.arange(len(order), device=owner.device) - before[whose]), order
    )


def select_rows(
    rows: Float[Tensor, "..."], axis: int, index: Int[Tensor, "example use"]
) -> Float[Tensor, "... example use _"]:
    """The rows of each example, zeros where it has none; a view, where all uses follow each other use by use."""
    examples, uses = index.shape
    count = rows.shape[axis]
    if torch.equal(index.t().reshape(-1), torch.arange(count, device=index.device)):
        return rows.reshape(*rows.shape[:axis], uses, examples, *rows.shape[axis + 1 :]).transpose(
            axis, axis + 1
        )
    known = with_zeros(rows, axis) if (index == count).any() else rows
    return known[index] if axis == 0 else known[:, index]


def with_zeros(rows: Shaped[Tensor, "..."], axis: int) -> Shaped[Tensor, "..."]:
    """The rows, and one of zeros after the last."""
    shape = [1 if d == axis else n for d, n in enumerate(rows.shape)]
    return torch.cat([rows, rows.new_zeros(shape)], axis)


def example_axis(owner: Int[Tensor, "..."], examples: int, among: Sequence[int]) -> int | None:
    """The axis among some along which each element belongs to the example of its number, if there is one."""
    for axis in among:
        index = torch.arange(examples, device=owner.device).view(
            -1, *[1] * (owner.dim() - axis - 1)
        )
        if bool(((owner == index) | (owner < 0)).all()):
            return axis
    return None


# --- Products: the factors of each example's rows, or of groups the product.


def factors(
    use: Product | Grouped,
    cotangent: Float[Tensor, "out ..."],
    owner: Int[Tensor, " row"],
    examples: int,
) -> tuple[Float[Tensor, "example use in_"], Float[Tensor, "example out use features"]]:
    """The factors of a product at the rows of each example."""
    inputs = use.factor.rows if isinstance(use.factor, Window) else use.factor
    rounds, rest = divmod(len(owner), examples)
    one_each = torch.arange(examples, device=owner.device)
    if inputs.dim() == 2 and not rest and torch.equal(owner, one_each.repeat(rounds)):
        # Rows follow each other in rounds, one row of each example, as where time comes first
        outputs = cotangent.reshape(len(cotangent), -1, examples, cotangent.shape[-1])
        return inputs.reshape(-1, examples, inputs.shape[1]).transpose(0, 1), outputs.permute(
            2, 0, 1, 3
        )
    index = row_index(owner, examples)
    if index is None and cotangent.dim() > 3 and cotangent.shape[1] == examples:
        outputs = cotangent.flatten(3).mT  # pixels are uses, and need not become rows
    else:
        rows = rows_of(cotangent, batch=1)
        if index is not None:
            if (owner < 0).any():
                refuse_unowned(rows[:, owner < 0])
            inputs, rows = select_rows(inputs.flatten(0, -2), 0, index), select_rows(rows, 1, index)
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
    """The gradients Σ_u β a of kernels, one product of matrices for each example and group, and of their bias.

    They are made a few examples at a time; in their room, where groups follow each other there.
    """
    if (
        isinstance(use.factor, Window)
        and cotangent.shape[1] == examples
        and row_index(owner, examples) is None
    ):
        turns, outputs = use.factor.turns(), cotangent.flatten(3).transpose(0, 1)
    else:
        inputs, rows = factors(use, cotangent, owner, examples)
        turns, outputs = iter([(slice(None), inputs.mT)]), rows.mT
    groups, (_, count, features, uses) = use.groups, outputs.shape
    left = outputs.reshape(examples, count, groups, features // groups, uses).transpose(1, 2)
    left = left.reshape(examples, groups, count * features // groups, uses)
    found = None if room is None or min(groups, count) > 1 else room.view(*left.shape[:3], -1)
    for part, shown in turns:
        beta = left[part].flatten(0, 1)
        patches = shown.reshape(len(shown) * groups, shown.shape[1] // groups, uses).mT
        if found is None and part == slice(
            None
        ):  # nothing is overwritten, so that a program can be made of it
            found = torch.bmm(beta, patches).view(*left.shape[:3], patches.shape[2])
            break
        if found is None:
            found = left.new_empty(*left.shape[:3], patches.shape[2])
        torch.bmm(beta, patches, out=found[part].flatten(0, 1))
    assert found is not None
    yield use.weight, found.view(examples, groups, count, -1).transpose(1, 2).flatten(2)
    if use.bias is not None:
        yield use.bias, outputs.sum(3)


def room_of(
    weight: Source, room: Weights, examples: int, taken: Collection[str]
) -> Float[Tensor, "example out size"] | None:
    """Where the gradients of a whole parameter belong, if there is such a place and nothing is there yet."""
    if not isinstance(weight, View) or weight.name not in room or weight.name in taken:
        return None
    inside = room[weight.name][:examples]
    return inside if weight.is_whole(inside.shape[2]) else None


# --- Elements: the gradients of a weight that an elementwise operation used, added up over all its copies.
#
# A weight that was copied along the axis of the examples, as gains and biases are, takes one sum; any other takes
# its gradients element by element to where they belong.


def scatter(
    use: Element, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, "..."], examples: int
) -> Float[Tensor, "example out size"]:
    """The gradient of each example with respect to the elements that a weight was expanded from."""
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
    cotangent, reached = with_gain(use, cotangent), owner >= 0
    target = (owner * size + positions.to(owner.device))[reached]
    flat = torch.zeros(
        len(cotangent), examples * size, dtype=cotangent.dtype, device=cotangent.device
    )
    return flat.index_add(1, target, cotangent[:, reached]).view(-1, examples, size).transpose(0, 1)


def with_gain(use: Element, cotangent: Float[Tensor, "out ..."]) -> Float[Tensor, "out ..."]:
    """The gradient of the expanded weight, where the tap is a result that it was multiplied into."""
    return cotangent if isinstance(use.gain, float) and use.gain == 1 else cotangent * use.gain


def add_copies(
    use: Element, cotangent: Float[Tensor, "out ..."], axis: int, size: int
) -> Float[Tensor, "example out size"]:
    """The sum over the axes that the weight was copied along, and what is left by its place in the weight."""
    positions = use.positions
    copied = [d for d in range(positions.dim()) if positions.stride(d) == 0 and d != axis]
    last = len(copied) > 0 and copied[0] == use.tap.dim() - len(copied)
    if last and isinstance(use.gain, Tensor) and len(cotangent) > 1:  # of many outputs by products
        kind = torch.promote_types(
            cotangent.dtype, use.gain.dtype
        )  # casts may have left the gain a shorter one
        gain = use.gain.expand(use.tap.shape).flatten(copied[0]).to(kind)
        summed = inner_products(cotangent.flatten(copied[0] + 1).to(kind), gain[None])[0, ..., 0]
    else:
        whole = with_gain(use, cotangent)
        summed = whole.sum([d + 1 for d in copied]) if copied else whole
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
    """What no example owned when ownership was determined must not matter now (only a mask that changed could make
    it)."""
    if cotangent.any():
        raise NoRule(BY_COMPARISON)


def copies(
    use: Element,
    source: View,
    cotangent: Float[Tensor, "out ..."],
    owner: Int[Tensor, "..."],
    examples: int,
) -> Copies:
    """The elements of a parameter that an operation used, example by example."""
    cotangent = with_gain(use, cotangent)
    if not (reached := owner >= 0).all():
        refuse_unowned(cotangent.masked_fill(reached, 0.0))
    positions, outputs = use.positions.to(cotangent.device), len(cotangent)
    axis = example_axis(owner, examples, [d for d, n in enumerate(owner.shape) if n == examples])
    if axis is None:
        index = row_index(owner.reshape(-1), examples)
        if index is None:
            index = torch.arange(owner.numel(), device=owner.device).view(examples, -1)
        rows = with_zeros(cotangent.flatten(1), 1)[:, index].transpose(0, 1)
        return Copies(
            rows, with_zeros(positions_in(source, positions).reshape(-1), 0)[index], source.name
        )
    # What an example gave to the same elements again and again is added up; positions that all share are kept once
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
    """The elements of a parameter, given those of a view of it in their order.

    >>> positions_in(View("w", (2, 3), (1, 2), 5), torch.tensor([0, 1, 5]))
    tensor([ 5,  7, 10])
    """
    places, left = torch.full_like(positions, source.offset), positions
    for size, stride in zip(reversed(source.shape), reversed(source.stride), strict=True):
        places = places + left % size * stride
        left = left // size
    return places
