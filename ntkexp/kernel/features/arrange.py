"""Features are made: differentiation of the outputs of a network, and what was pulled back to the uses of weights
arranged by example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.func import vmap

from ntkexp.kernel.features.blocks import Block, Factored, Features, Key, Rows, spread
from ntkexp.kernel.record.convolution import Window
from ntkexp.kernel.secant.linear_map import inner_products
from ntkexp.kernel.secant.ownership import Owners, shown_once
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.uses import Derived, Element, Grouped, Product, Source, Use, View, rows_of
from ntkexp.shapes import Weights

# --- Differentiation: from the outputs of a network, or of its surrogate, to its features.
#
# The outputs are differentiated at the taps of every use of a weight, one output after the other or all at once;
# or one mixture of them, for which it takes a single back-propagation.


Jacobian = TypeVar("Jacobian")


def differentiate(
    arranged: Callable[..., Jacobian],
    output: Float[Tensor, "example out"],
    uses: Sequence[Use],
    owned: Owners,
    leaves: Weights,
    mixtures: Float[Tensor, "mixture example out"],
    *,
    at_once: bool = False,
) -> Jacobian:
    """The Jacobian of mixtures of outputs, as it is arranged from what is pulled back to every use (`arrange.arrange`).

    `leaves` are the weights, or the differences of weights, that are trained.
    """
    taps = [use.tap for use in uses]
    pull = pull_at_once if at_once and len(mixtures) > 1 else pull_one_by_one
    cotangents = pull(output, taps, mixtures) if taps else []
    return arranged(uses, cotangents, owned.of_uses, len(output), len(mixtures), leaves)


def pull_one_by_one(
    output: Float[Tensor, "example out"], taps: list[Tensor], mixtures: Float[Tensor, "mixture example out"]
) -> list[Float[Tensor, "mixture ..."]]:
    """∂f/∂tap, with a back-propagation for every mixture."""
    pulled = [
        torch.autograd.grad(output, taps, mixture, retain_graph=True, materialize_grads=True) for mixture in mixtures
    ]
    return [stacked(parts) for parts in zip(*pulled, strict=True)]


def stacked(parts: tuple[Tensor, ...]) -> Float[Tensor, "mixture ..."]:
    """What the mixtures pulled back, those of an example beside each other in memory, as kernels go through them."""
    if len(parts) == 1:
        return parts[0][None]
    return torch.stack(parts, 1).transpose(0, 1) if parts[0].dim() else torch.stack(parts)


def pull_at_once(
    output: Float[Tensor, "*shape"], taps: list[Tensor], mixtures: Float[Tensor, "mixture *shape"]
) -> list[Float[Tensor, "mixture ..."]]:
    """∂f/∂tap, with a back-propagation in which every operation runs for all mixtures."""

    def pull(mixture: Float[Tensor, "*shape"]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, taps, mixture, retain_graph=True, materialize_grads=True)

    return list(vmap(pull)(mixtures))


def each_output(output: Float[Tensor, "example out"], chosen: Sequence[int]) -> Float[Tensor, "chosen example out"]:
    """One for each chosen output in turn, of all examples."""
    places = torch.tensor(chosen, device=output.device)[:, None]
    each = torch.zeros(len(chosen), output.shape[1], dtype=output.dtype, device=output.device).scatter(1, places, 1.0)
    return each[:, None].expand(-1, *output.shape)


# --- Places: which rows of a product, or elements, belong to which example.


def in_rounds(owner: Int[Tensor, " row"], examples: int) -> bool:
    """Whether rows of matrices follow each other in rounds, one row of each example, as where time comes first.

    >>> in_rounds(torch.tensor([0, 1, 0, 1]), 2), in_rounds(torch.tensor([0, 0, 1, 1]), 2)
    (True, False)
    """
    rounds, rest = divmod(len(owner), examples)
    return not rest and torch.equal(owner, torch.arange(examples, device=owner.device).repeat(rounds))


def in_turn(owner: Int[Tensor, " row"], examples: int) -> Int[Tensor, "example use"] | None:
    """The rows that each example uses; None where they follow each other example by example, as many of each.

    Of an example with fewer than others, rows that are not there: those after the last.

    >>> in_turn(torch.tensor([0, 0, 1, 1]), 2), in_turn(torch.tensor([1, 0, -1, 1]), 2)
    (None, tensor([[1, 4],
            [0, 3]]))
    """
    uses, rest = divmod(len(owner), examples)
    if not rest and torch.equal(owner, torch.arange(examples, device=owner.device).repeat_interleave(uses)):
        return None
    times = torch.bincount(owner + 1, minlength=examples + 1)
    order = owner.argsort(stable=True)[int(times[0]) :]
    whose, before = owner[order], times[1:].cumsum(0) - times[1:]
    nobody = owner.new_full((examples, int(times[1:].max())), len(owner))
    return nobody.index_put((whose, torch.arange(len(order), device=owner.device) - before[whose]), order)


def at_places(
    rows: Float[Tensor, "..."], axis: int, places: Int[Tensor, "example use"]
) -> Float[Tensor, "... example use _"]:
    """The rows of each example, zeros where it has none; a view, where all uses follow each other use by use."""
    examples, uses = places.shape
    count = rows.shape[axis]
    if torch.equal(places.t().reshape(-1), torch.arange(count, device=places.device)):
        return rows.reshape(*rows.shape[:axis], uses, examples, *rows.shape[axis + 1 :]).transpose(axis, axis + 1)
    known = with_zeros(rows, axis) if (places == count).any() else rows
    return known[places] if axis == 0 else known[:, places]


def with_zeros(rows: Shaped[Tensor, "..."], axis: int) -> Shaped[Tensor, "..."]:
    """The rows, and one of zeros after the last."""
    shape = [1 if d == axis else n for d, n in enumerate(rows.shape)]
    return torch.cat([rows, rows.new_zeros(shape)], axis)


# --- Scattering: the gradients of a weight that an elementwise operation used, added up over all its copies.
#
# A weight that was copied along the axis of the examples, as gains and biases are, takes one sum; any other takes
# its gradients element by element to where they belong.


BY_COMPARISON = "a value reaches the outputs through a comparison alone, which changes between the ends of a step"


def scatter(
    use: Element, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, "..."], examples: int
) -> Float[Tensor, "example out size"]:
    """The gradient of each example with respect to the elements that a weight was expanded from."""
    if not (shown_once(owner) >= 0).all():
        refuse_unowned(with_gain(use, cotangent).masked_fill(owner >= 0, 0.0))
    positions = use.positions
    size = prod(use.source.shape) if isinstance(use.source, View) else use.source.delta.numel()
    axis = axis_of_examples(positions, owner, examples)
    if axis is not None:
        return add_copies(use, cotangent, axis, size)
    cotangent, reached = with_gain(use, cotangent), owner >= 0
    target = (owner * size + positions.to(owner.device))[reached]
    flat = torch.zeros(len(cotangent), examples * size, dtype=cotangent.dtype, device=cotangent.device)
    return flat.index_add(1, target, cotangent[:, reached]).view(-1, examples, size).transpose(0, 1)


def with_gain(use: Element, cotangent: Float[Tensor, "out ..."]) -> Float[Tensor, "out ..."]:
    """The gradient of the expanded weight, where the tap is a result that it was multiplied into."""
    return cotangent if isinstance(use.gain, float) and use.gain == 1 else cotangent * use.gain


def axis_of_examples(positions: Int[Tensor, "..."], owner: Int[Tensor, "..."], examples: int) -> int | None:
    """The axis that counts examples, if a weight was copied along it, as gains and biases are."""
    shown = shown_once(owner)
    for axis in range(owner.dim()):
        if owner.shape[axis] == examples and (positions.stride(axis) == 0 or examples == 1):
            index = torch.arange(examples, device=owner.device).view(-1, *[1] * (owner.dim() - axis - 1))
            if bool(((shown == index) | (shown < 0)).all()):
                return axis
    return None


def add_copies(
    use: Element, cotangent: Float[Tensor, "out ..."], axis: int, size: int
) -> Float[Tensor, "example out size"]:
    """The sum over the axes that the weight was copied along, and what is left by its place in the weight."""
    positions = use.positions
    copied = [d for d in range(positions.dim()) if positions.stride(d) == 0 and d != axis]
    rows = sum_over(use, cotangent, copied).movedim(axis + 1 - sum(d < axis for d in copied), 1)
    rows = rows.flatten(2) if rows.dim() > 2 else rows[:, :, None]
    once = positions[tuple(0 if d in (axis, *copied) else slice(None) for d in range(positions.dim()))]
    places = once.reshape(-1).to(rows.device)
    if not torch.equal(places, torch.arange(size, device=rows.device)):
        rows = rows.new_zeros(*rows.shape[:2], size).index_add(2, places, rows)
    return rows.transpose(0, 1)


def sum_over(use: Element, cotangent: Float[Tensor, "out ..."], axes: list[int]) -> Float[Tensor, "out ..."]:
    """The gradient of the expanded weight, added up; of many outputs by products, where pixels are the last axes."""
    last = len(axes) > 0 and axes[0] == use.tap.dim() - len(axes)
    if last and isinstance(use.gain, Tensor) and len(cotangent) > 1:
        kind = torch.promote_types(cotangent.dtype, use.gain.dtype)  # casts may have left the gain a shorter one
        gain = use.gain.expand(use.tap.shape).flatten(axes[0]).to(kind)
        return inner_products(cotangent.flatten(axes[0] + 1).to(kind), gain[None])[0, ..., 0]
    whole = with_gain(use, cotangent)
    return whole.sum([d + 1 for d in axes]) if axes else whole


def refuse_unowned(cotangent: Float[Tensor, "out ..."]) -> None:
    """What no example owned when it was asked must not matter now (only a mask that changed could make it)."""
    if cotangent.any():
        raise NoRule(BY_COMPARISON)


# --- Arranging what was pulled back to the uses of weights into features, example by example.
#
# Parameters that are always used together, in products alone, keep their factors. A parameter that is used in
# several ways (a tied weight, a gain, a weight made of other weights) gets its gradients multiplied out: the sum
# over its uses is then an ordinary sum.


NOWHERE: Weights = {}


def arrange(
    uses: Sequence[Use],
    cotangents: Sequence[Float[Tensor, "out ..."]],
    owned: Sequence[Int[Tensor, "..."]],
    examples: int,
    outputs: int,
    leaves: Weights,
    room: Weights = NOWHERE,
) -> Features:
    """Features from β at every use; `owned` says whose each element (each row, of a product) is. Gradients of which
    there are many may be written into `room`, which begins with the first example."""
    products: dict[Key, list[Factored]] = defaultdict(list)
    rows: dict[str, Float[Tensor, "example out _"]] = {}
    factorable = factorable_keys(uses)
    if len(owned) < len(uses):
        raise NoRule(BY_COMPARISON)
    for use, cotangent, owner in zip(uses, cotangents, owned, strict=True):
        if isinstance(use, Element):
            add_rows(rows, use.source, scatter(use, cotangent, owner, examples), leaves)
            continue
        if isinstance(use, Grouped):
            place = None if names(use.weight) & rows.keys() else place_of(use.weight, room, examples)
            for part, gradient in by_group(use, cotangent, owner, examples, place):
                add_rows(rows, part, gradient, leaves)
            continue
        products[use.weight, use.bias].append(by_example(use, cotangent, owner, examples))
    blocks: dict[Key, Block] = {}
    for key, parts in products.items():
        alike = join_uses(parts)
        if key in factorable and len(alike) == 1:
            blocks[key] = alike[0]
            continue
        weight, bias = key
        for block in alike:
            if isinstance(weight, View | Derived):
                add_rows(rows, weight, block.of_weight().flatten(2), leaves)
            if bias is not None:
                add_rows(rows, bias, block.of_bias(), leaves)
    blocks.update({(name, None): Rows(row.to(leaves[name].dtype), name) for name, row in rows.items()})  # after casts
    return Features(blocks, examples, outputs)


def factorable_keys(uses: Sequence[Use]) -> set[Key]:
    """The pairs of weight and bias whose parameters meet inputs in this pair's products and in no other way."""
    ways: dict[str, set[object]] = defaultdict(set)
    pairs: set[tuple[Source | None, Source | None]] = set()
    for use in uses:
        pair = (use.source, None) if isinstance(use, Element) else (use.weight, use.bias)
        plain = isinstance(use, Product) and all(map(keeps_factors, pair))
        for name in names(pair[0]) | names(pair[1]):
            ways[name].add(pair if plain else use)
        if plain:
            pairs.add(pair)
    return {pair for pair in pairs if all(len(ways[name]) == 1 for name in names(pair[0]) | names(pair[1]))}


def keeps_factors(source: Source | None) -> bool:
    """Whether each element of what is multiplied with is a parameter of its own, or there is nothing."""
    return source is None or (isinstance(source, View) and source.shows_once)


def names(source: Source | None) -> frozenset[str]:
    """The parameters behind a source."""
    if source is None:
        return frozenset()
    return frozenset({source.name}) if isinstance(source, View) else source.names


def by_example(
    use: Product, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, " row"], examples: int
) -> Factored:
    """The rows of a product, grouped by the example they belong to."""
    inputs, outputs = factors(use, cotangent, owner, examples)
    weight, bias = (source if isinstance(source, View) else None for source in (use.weight, use.bias))
    return Factored(inputs, outputs, weight, bias, use.shift)


def by_group(
    use: Grouped,
    cotangent: Float[Tensor, "out ..."],
    owner: Int[Tensor, " row"],
    examples: int,
    place: Float[Tensor, "example out size"] | None,
) -> Iterator[tuple[Source, Float[Tensor, "example out size"]]]:
    """The gradients of kernels and of their bias: one product of matrices for each example and group."""
    if isinstance(use.factor, Window) and cotangent.shape[1] == examples and in_turn(owner, examples) is None:
        turns, outputs = use.factor.turns(), cotangent.flatten(3).transpose(0, 1)
    else:
        inputs, rows = factors(use, cotangent, owner, examples)
        turns, outputs = iter([(slice(None), inputs.mT)]), rows.mT
    yield use.weight, multiplied_by_group(turns, outputs, use.groups, place)
    if use.bias is not None:
        yield use.bias, outputs.sum(3)


def place_of(weight: Source, room: Weights, examples: int) -> Float[Tensor, "example out size"] | None:
    """Where the gradients of a whole parameter belong, if there is such a place."""
    if not isinstance(weight, View) or weight.name not in room:
        return None
    place = room[weight.name][:examples]
    return place if weight.is_whole(place.shape[2]) else None


def multiplied_by_group(
    turns: Iterator[tuple[slice, Float[Tensor, "part in_ use"]]],
    outputs: Float[Tensor, "example out features use"],
    groups: int,
    place: Float[Tensor, "example out size"] | None,
) -> Float[Tensor, "example out size"]:
    """Σ_u β a, in every group, for a few examples at a time; in its place, where groups follow each other there."""
    examples, count, features, uses = outputs.shape
    left = outputs.reshape(examples, count, groups, features // groups, uses).transpose(1, 2)
    left = left.reshape(examples, groups, count * features // groups, uses)
    found = None if place is None or min(groups, count) > 1 else place.view(*left.shape[:3], -1)
    for part, shown in turns:
        rows = left[part].flatten(0, 1)
        right = shown.reshape(len(shown) * groups, shown.shape[1] // groups, uses).mT
        if found is None and part == slice(None):  # nothing is overwritten, so that a program can be made of it
            found = torch.bmm(rows, right).view(*left.shape[:3], right.shape[2])
            break
        if found is None:
            found = left.new_empty(*left.shape[:3], right.shape[2])
        torch.bmm(rows, right, out=found[part].flatten(0, 1))
    assert found is not None
    return found.view(examples, groups, count, -1).transpose(1, 2).flatten(2)


def factors(
    use: Product | Grouped, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, " row"], examples: int
) -> tuple[Float[Tensor, "example use in_"], Float[Tensor, "example out use features"]]:
    """The factors of a product at the rows of each example."""
    inputs = use.factor.rows if isinstance(use.factor, Window) else use.factor
    if inputs.dim() == 2 and in_rounds(owner, examples):
        outputs = cotangent.reshape(len(cotangent), -1, examples, cotangent.shape[-1])
        return inputs.reshape(-1, examples, inputs.shape[1]).transpose(0, 1), outputs.permute(2, 0, 1, 3)
    places = in_turn(owner, examples)
    if places is None and cotangent.dim() > 3 and cotangent.shape[1] == examples:
        outputs = cotangent.flatten(3).mT  # pixels are uses, and need not become rows
    else:
        rows = rows_of(cotangent, batch=1)
        if places is not None:
            if (owner < 0).any():
                refuse_unowned(rows[:, owner < 0])
            inputs, rows = at_places(inputs.flatten(0, -2), 0, places), at_places(rows, 1, places)
        uses = len(owner) // examples if places is None else places.shape[1]
        outputs = rows.reshape(len(rows), examples, uses, rows.shape[-1])
    return inputs.reshape(examples, outputs.shape[2], inputs.shape[-1]), outputs.transpose(0, 1)


def join_uses(parts: Sequence[Factored]) -> Sequence[Factored]:
    """Several uses of the same weights, as one sum over uses; left apart, if the bias is not used alike."""
    if len(parts) == 1 or len({part.shift for part in parts}) > 1:
        return parts
    inputs = torch.cat([part.inputs for part in parts], dim=1)
    outputs = torch.cat([part.outputs for part in parts], dim=2)
    return [replace(parts[0], inputs=inputs, outputs=outputs)]


def add_rows(
    rows: dict[str, Float[Tensor, "example out _"]],
    source: Source,
    gradient: Float[Tensor, "example out size"],
    leaves: Weights,
) -> None:
    """Carry a gradient back from a source to its parameters."""
    if isinstance(source, View):
        size = leaves[source.name].numel()
        carried = {source.name: gradient if source.is_whole(size) else spread(gradient, source, size)}
    else:
        carried = pull_back(source, gradient, leaves)
    for name, row in carried.items():
        rows[name] = rows[name] + row if name in rows else row


def pull_back(source: Derived, gradient: Float[Tensor, "example out size"], leaves: Weights) -> Weights:
    """Gradients go through the operations on weights alone, by one back-propagation for every example and output."""
    wanted = sorted(source.names)
    cotangents = gradient.reshape(-1, *source.delta.shape)
    found = pull_at_once(source.delta, [leaves[name] for name in wanted], cotangents)
    shape = gradient.shape[:2]
    return {name: row.reshape(*shape, -1) for name, row in zip(wanted, found, strict=True)}
