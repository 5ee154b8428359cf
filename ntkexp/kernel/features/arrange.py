"""Arranging what was pulled back to the uses of weights into features, example by example.

Parameters that are always used together, in products alone, keep their factors. A parameter that is used in several
ways (a tied weight, a gain, a weight made of other weights) gets its gradients multiplied out: the sum over its uses
is then an ordinary sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.features.blocks import Block, Factored, Rows, spread
from ntkexp.kernel.features.differentiate import pull_at_once
from ntkexp.kernel.features.features import Features, Key
from ntkexp.kernel.features.places import at_places, in_rounds, in_turn
from ntkexp.kernel.features.scatter import BY_COMPARISON, refuse_unowned, scatter
from ntkexp.kernel.secant.patches import Window
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.uses import Derived, Element, Grouped, Product, Source, Use, View, rows_of
from ntkexp.shapes import Weights

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
