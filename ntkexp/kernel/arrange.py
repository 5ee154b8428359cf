"""Arranging what was pulled back to the uses of weights into features, example by example.

Parameters that are always used together, in products alone, keep their factors. A parameter that is used in several
ways (a tied weight, a gain, a weight made of other weights) gets its gradients multiplied out: the sum over its uses
is then an ordinary sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.features import Block, Factored, Features, Key, Rows
from ntkexp.kernel.rules.base import NoRule
from ntkexp.kernel.uses import Derived, Element, Product, Source, Use, View, rows_of
from ntkexp.shapes import Weights


def arrange(
    uses: Sequence[Use],
    cotangents: Sequence[Float[Tensor, "out ..."]],
    owned: Sequence[Int[Tensor, "..."]],
    examples: int,
    outputs: int,
    leaves: Weights,
) -> Features:
    """Features from β at every use; `owned` says whose each element (each row, of a product) is."""
    factors: dict[Key, list[Factored]] = defaultdict(list)
    rows: dict[str, Float[Tensor, "example out _"]] = {}
    factorable = factorable_keys(uses)
    for use, cotangent, owner in zip(uses, cotangents, owned, strict=True):
        if isinstance(use, Element):
            add_rows(rows, use.source, scattered(use, cotangent, owner, examples), leaves)
            continue
        block = by_example(use, cotangent, owner, examples)
        if (key := (use.weight, use.bias)) in factorable:
            factors[key].append(block)
            continue
        bias, weight = torch.split(block.dense(), [block.biases, block.inputs.shape[2] - block.biases], dim=2)
        for source, gradient in ((use.bias, bias), (use.weight, weight)):
            if source is not None:
                add_rows(rows, source, gradient.flatten(2), leaves)
    blocks: dict[Key, Block] = {key: joined(parts) for key, parts in factors.items()}
    blocks.update({(name, None): Rows(row, name) for name, row in rows.items()})
    return Features(blocks, examples, outputs)


def factorable_keys(uses: Sequence[Use]) -> set[Key]:
    """The pairs of weight and bias whose parameters meet inputs in this pair's products and in no other way."""
    ways: dict[str, set[object]] = defaultdict(set)
    pairs: set[tuple[Source | None, Source | None]] = set()
    for use in uses:
        pair = (use.weight, use.bias) if isinstance(use, Product) else (use.source, None)
        plain = isinstance(use, Product) and not any(isinstance(source, Derived) for source in pair)
        for name in names(pair[0]) | names(pair[1]):
            ways[name].add(pair if plain else use)
        if plain:
            pairs.add(pair)
    return {pair for pair in pairs if all(len(ways[name]) == 1 for name in names(pair[0]) | names(pair[1]))}


def names(source: Source | None) -> frozenset[str]:
    """The parameters behind a source."""
    if source is None:
        return frozenset()
    return frozenset({source.name}) if isinstance(source, View) else source.names


def by_example(
    use: Product, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, " row"], examples: int
) -> Factored:
    """The rows of a product, grouped by the example they belong to."""
    inputs, cotangent = use.factor, rows_of(cotangent, batch=1)
    if use.bias is not None:
        inputs = torch.cat([torch.full_like(inputs[:, :1], use.shift), inputs if use.weight else inputs[:, :0]], dim=1)
    weight, bias = (source if isinstance(source, View) else None for source in (use.weight, use.bias))
    biases = int(use.bias is not None)
    if len(owner) == examples and torch.equal(owner, torch.arange(examples, device=owner.device)):
        return Factored(inputs[:, None], cotangent.transpose(0, 1)[:, :, None], weight, bias, biases)
    refuse_unowned(cotangent[:, owner < 0])
    order = owner.argsort(stable=True)[(owner < 0).sum() :].view(-1)
    uses, rest = divmod(len(order), examples)
    if rest or not torch.equal(owner[order], torch.arange(examples, device=owner.device).repeat_interleave(uses)):
        raise NoRule("the examples use a matrix product a different number of times each")
    order = order.view(examples, uses)
    return Factored(inputs[order], cotangent[:, order].transpose(0, 1), weight, bias, biases)


def joined(parts: Sequence[Factored]) -> Factored:
    """Several uses of the same weights, as one sum over uses."""
    if len(parts) == 1:
        return parts[0]
    inputs = torch.cat([part.inputs for part in parts], dim=1)
    outputs = torch.cat([part.outputs for part in parts], dim=2)
    return Factored(inputs, outputs, parts[0].weight, parts[0].bias, parts[0].biases)


def scattered(
    use: Element, cotangent: Float[Tensor, "out ..."], owner: Int[Tensor, "..."], examples: int
) -> Float[Tensor, "example out size"]:
    """The gradient of each example with respect to the elements that a weight was expanded from."""
    reached = owner >= 0
    refuse_unowned(cotangent[:, ~reached])
    size = prod(use.source.shape) if isinstance(use.source, View) else use.source.delta.numel()
    target = (owner * size + use.positions.to(owner.device))[reached]
    flat = torch.zeros(len(cotangent), examples * size, dtype=cotangent.dtype, device=cotangent.device)
    flat.index_add_(1, target, cotangent[:, reached])
    return flat.view(len(cotangent), examples, size).transpose(0, 1)


def refuse_unowned(cotangent: Float[Tensor, "out ..."]) -> None:
    """What no example owned when it was asked must not matter now (only a mask that changed could make it)."""
    if cotangent.any():
        raise NoRule("a value reaches the outputs through a comparison alone, which changes between the ends of a step")


def add_rows(
    rows: dict[str, Float[Tensor, "example out _"]],
    source: Source,
    gradient: Float[Tensor, "example out size"],
    leaves: Weights,
) -> None:
    """Carry a gradient back from a source to its parameters."""
    if isinstance(source, View):
        positions = source.of(torch.arange(leaves[source.name].numel())).reshape(-1).to(gradient.device)
        carried = {source.name: gradient.new_zeros(*gradient.shape[:2], leaves[source.name].numel())}
        carried[source.name].index_add_(2, positions, gradient)
    else:
        carried = pulled_back(source, gradient, leaves)
    for name, row in carried.items():
        rows[name] = rows[name] + row if name in rows else row


def pulled_back(source: Derived, gradient: Float[Tensor, "example out size"], leaves: Weights) -> Weights:
    """Through the operations on weights alone, one back-propagation for every example and output."""
    wanted = sorted(source.names)
    cotangents = gradient.reshape(-1, *source.delta.shape)
    found = torch.autograd.grad(
        source.delta, [leaves[name] for name in wanted], cotangents, retain_graph=True, is_grads_batched=True
    )
    shape = gradient.shape[:2]
    return {name: row.reshape(*shape, -1) for name, row in zip(wanted, found, strict=True)}
