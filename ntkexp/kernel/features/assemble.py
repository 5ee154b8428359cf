"""Assemble a Jacobian: back-propagate from the outputs to every use of a weight, and
form blocks (see `blocks`).

A *use* of a weight is an operation that combines the weight with a value that depends
on the inputs. The *tap* of a use is the result of a product, or the expanded weight of
an elementwise operation. The network is cut at its taps (see `secant.uses`). Autograd
computes β = ∂f/∂tap, the gradient of the outputs f. From β, this file computes the
gradient of the weight.

If autograd differentiates the surrogate of a step (`secant.replay`) instead of the
network, the result is the secant Jacobian.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TypeAlias

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.func import vmap

from ntkexp.kernel.features.blocks import (
    Block,
    Copies,
    Factored,
    Gradients,
    Rows,
    to_parameter,
)
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.record.convolution import Window
from ntkexp.kernel.secant.call import ChoiceChanged, inner_products
from ntkexp.kernel.secant.ownership import Owners, drop_expanded_axes
from ntkexp.kernel.secant.uses import (
    Element,
    Grouped,
    Product,
    Source,
    Use,
    View,
    rows_of,
)
from ntkexp.shapes import Weights

Cotangent: TypeAlias = Float[Tensor, "out ..."]
"""∂f_c/∂tap for each output c, or for each mixture (weighted sum of outputs)."""

Owner: TypeAlias = Int[Tensor, "..."]
"""The index of the example that each element belongs to,
or -1 if the element reaches no output."""


@dataclass(frozen=True)
class PulledBack:
    """The gradients β = ∂f/∂tap (`cotangents`) at every use of a weight.

    For each elementwise use, `owners` holds the example of each element of the tap. For
    each product, `owners` holds the example of each row of the tap."""

    uses: Sequence[Use]
    cotangents: Sequence[Cotangent]
    owners: Sequence[Owner]
    examples: int
    outputs: int
    leaves: Weights  # the trained weights, or their changes Δθ in a step

    def by_use(self) -> Iterator[tuple[Use, Cotangent, Owner]]:
        """Yield each use with its gradient β = ∂f/∂tap,
        and the example of each element or row."""
        if len(self.owners) < len(self.uses):
            raise ChoiceChanged(BY_COMPARISON)
        return zip(self.uses, self.cotangents, self.owners, strict=True)


def pull_back(
    output: Float[Tensor, "example out"],
    uses: Sequence[Use],
    owned: Owners,
    leaves: Weights,
    mixtures: Float[Tensor, "mixture example out"],
    *,
    at_once: bool = False,
) -> PulledBack:
    """Back-propagate mixtures (weighted sums of outputs) to the tap of every use. With
    `at_once`, run one vectorized backward pass for all mixtures.
    Otherwise run one pass for each."""
    taps = [use.tap for use in uses]
    cotangents: list[Tensor] = []
    if taps and at_once and len(mixtures) > 1:
        cotangents = pull_at_once(output, taps, mixtures)
    elif taps:
        pulled = [pull(output, taps, mixture) for mixture in mixtures]
        cotangents = [stack_outputs(parts) for parts in zip(*pulled, strict=True)]
    return PulledBack(
        uses, cotangents, owned.of_uses, len(output), len(mixtures), leaves
    )


def pull(
    output: Float[Tensor, "*shape"],
    taps: list[Tensor],
    mixture: Float[Tensor, "*shape"],
) -> tuple[Tensor, ...]:
    """Return the gradients of a weighted sum of outputs at the taps."""
    return torch.autograd.grad(
        output, taps, mixture, retain_graph=True, materialize_grads=True
    )


def pull_at_once(
    output: Float[Tensor, "*shape"],
    taps: list[Tensor],
    mixtures: Float[Tensor, " mixture *shape"],
) -> list[Float[Tensor, "mixture ..."]]:
    """Return ∂f/∂tap for all mixtures (weighted sums of outputs), by one
    back-propagation under `vmap`."""
    return list(vmap(partial(pull, output, taps))(mixtures))


def stack_outputs(parts: tuple[Tensor, ...]) -> Cotangent:
    """Stack the tensors of the outputs along a new first axis. In memory, the order is
    [example, out, …], which makes tangent kernels fastest."""
    if len(parts) == 1:
        return parts[0][None]
    if not parts[0].dim():
        return torch.stack(parts)
    return torch.stack(parts, 1).transpose(0, 1)


def select_outputs(
    output: Float[Tensor, "example out"], chosen: Sequence[int]
) -> Float[Tensor, "chosen example out"]:
    """Return the mixtures that select one output each:
    one-hot weights of the outputs."""
    index = torch.tensor(chosen, device=output.device)[:, None]
    one_hot = output.new_zeros(len(chosen), output.shape[1]).scatter(1, index, 1.0)
    return one_hot[:, None].expand(-1, *output.shape)


# The gradients of a weight W and its bias b stay in factored form if W and b occur only
# in products a W + b. Otherwise, for example if W also occurs as an embedding, the
# gradients of all uses are multiplied out and added.


BY_COMPARISON = "a value affects the outputs only through a comparison, which changes between the ends of a step"
NO_BUFFERS: Weights = {}

ProductKey: TypeAlias = tuple[Source | None, Source | None]


def assemble(
    pulled: PulledBack, buffers: Weights = NO_BUFFERS, *, as_copies: bool = False
) -> Jacobian:
    """Return the Jacobian with one block for each parameter, or for each pair of a
    weight and its bias.

    `buffers` maps parameters to buffers for the gradients of grouped products. With
    `as_copies`, a table (such as an embedding) becomes a `Copies` block if it has a
    single use, and if an average example reads fewer elements than the table has."""
    tables = tables_read_once(pulled) if as_copies else frozenset()
    examples = pulled.examples
    blocks: list[Block] = []
    products: dict[ProductKey, list[Factored]] = defaultdict(list)
    sums = RowSums(pulled.leaves)

    # The gradient at each use, as one of the three block formats
    for use, cotangent, owner in pulled.by_use():
        if isinstance(use, Element):
            if isinstance(use.source, View) and use.source.name in tables:
                block = copies(use, use.source, cotangent, owner, examples)
                # under casts, the gradient may have another dtype than the weight
                values = block.values.to(pulled.leaves[block.name].dtype)
                blocks.append(replace(block, values=values))
            else:
                sums.add(use.source, scatter(use, cotangent, owner, examples))
        elif isinstance(use, Grouped):
            inside = buffer_for(use.weight, buffers, examples, sums.rows.keys())
            for source, gradient in multiply_groups(
                use, cotangent, owner, examples, inside
            ):
                sums.add(source, gradient)
        else:
            product = factored(use, cotangent, owner, examples)
            products[use.weight, use.bias].append(product)

    # keep the factors of a product if its parameters occur in no other operation
    factored_alone = factored_keys(pulled.uses)
    for key, parts in products.items():
        joined = join_uses(parts)
        if key in factored_alone and len(joined) == 1:
            blocks.append(joined[0])
            continue
        for product in joined:
            sums.add_product(key, product)
    return Jacobian((*blocks, *sums.blocks()), examples, pulled.outputs)


def join_uses(parts: Sequence[Factored]) -> Sequence[Factored]:
    """Concatenate products of the same weight along the axis of uses. If the factors
    of the bias (`shift`) differ, return the products unchanged."""
    if len(parts) == 1 or len({part.shift for part in parts}) > 1:
        return parts
    inputs = torch.cat([part.inputs for part in parts], dim=1)
    outputs = torch.cat([part.outputs for part in parts], dim=2)
    return [replace(parts[0], inputs=inputs, outputs=outputs)]


@dataclass
class RowSums:
    """Running sums of the gradients of each parameter over its uses, multiplied out."""

    leaves: Weights  # as in `PulledBack`
    rows: dict[str, Float[Tensor, "example out _"]] = field(default_factory=dict)

    def add(self, source: Source, gradient: Gradients) -> None:
        """Add the gradient with respect to `source`, which is a view of a parameter, or
        a value computed from parameters."""
        for name, rows in self.parameter_gradients(source, gradient).items():
            self.rows[name] = self.rows[name] + rows if name in self.rows else rows

    def parameter_gradients(
        self, source: Source, gradient: Gradients
    ) -> dict[str, Float[Tensor, "example out _"]]:
        """Convert the gradient with respect to a value computed from parameters to
        gradients of these parameters."""
        if isinstance(source, View):
            size = self.leaves[source.name].numel()
            if not source.covers(size):
                gradient = to_parameter(gradient, source, size)
            return {source.name: gradient}
        # `source` is computed from parameters: back-propagate for all examples and
        # outputs at once
        names = sorted(source.names)
        leaves = [self.leaves[name] for name in names]
        cotangents = gradient.reshape(-1, *source.delta.shape)
        pulled = pull_at_once(source.delta, leaves, cotangents)
        rows = [part.reshape(*gradient.shape[:2], -1) for part in pulled]
        return dict(zip(names, rows, strict=True))

    def add_product(self, key: ProductKey, block: Factored) -> None:
        """Add the gradients of a weight and its bias. Multiply them out first."""
        weight, bias = key
        if weight is not None:
            self.add(weight, block.of_weight().flatten(2))
        if bias is not None:
            self.add(bias, block.of_bias())

    def blocks(self) -> list[Rows]:
        """Return the sums as blocks, in the dtypes of the parameters. Under casts, the
        gradients may have other dtypes."""
        return [
            Rows(rows.to(self.leaves[name].dtype), name)
            for name, rows in self.rows.items()
        ]


def assemble_uses(pulled: PulledBack) -> Jacobian:
    """Return the Jacobian with one block for each use, without summing over uses.
    Elementwise uses of a parameter, such as table lookups, become `Copies` blocks."""
    blocks: list[Block] = []
    for use, cotangent, owner in pulled.by_use():
        if isinstance(use, Element) and isinstance(use.source, View):
            blocks.append(copies(use, use.source, cotangent, owner, pulled.examples))
        else:
            alone = replace(
                pulled, uses=(use,), cotangents=(cotangent,), owners=(owner,)
            )
            blocks.extend(assemble(alone).blocks)
    return Jacobian(tuple(blocks), pulled.examples, pulled.outputs)


def tables_read_once(pulled: PulledBack) -> frozenset[str]:
    """Return the tables with a single use, if an average example reads fewer elements
    than the table has."""
    count = Counter[str]()
    tables = set[str]()
    for use in pulled.uses:
        weight, bias = weight_and_bias(use)
        count.update(names(weight))
        count.update(names(bias))
        if isinstance(use, Element) and isinstance(weight, View):
            row_numbers = pulled.examples * pulled.leaves[weight.name].numel()
            if use.tap.numel() < row_numbers:
                tables.add(weight.name)
    return frozenset(name for name in tables if count[name] == 1)


def weight_and_bias(use: Use) -> ProductKey:
    """Return the weight and the bias of a use. An elementwise use has no bias."""
    if isinstance(use, Element):
        return use.source, None
    return use.weight, use.bias


def factored_keys(uses: Sequence[Use]) -> set[ProductKey]:
    """Return the pairs (weight, bias) whose parameters occur only in products a W + b of
    this pair."""
    ways: dict[str, set[object]] = defaultdict(set)
    pairs: set[ProductKey] = set()
    for use in uses:
        pair = weight_and_bias(use)
        way: object = use
        if isinstance(use, Product) and all(map(is_plain, pair)):
            pairs.add(pair)
            way = pair
        for name in names(pair[0]) | names(pair[1]):
            ways[name].add(way)
    other_ways = {name for name in ways if len(ways[name]) > 1}
    return {
        pair for pair in pairs if other_ways.isdisjoint(names(pair[0]) | names(pair[1]))
    }


def is_plain(source: Source | None) -> bool:
    """Return True if the weight is a view of a parameter without repeated elements.
    None (no bias) counts as plain."""
    return source is None or (isinstance(source, View) and source.has_no_overlap)


def names(source: Source | None) -> frozenset[str]:
    if source is None:
        return frozenset()
    if isinstance(source, View):
        return frozenset({source.name})
    return source.names


def row_index(
    owner: Int[Tensor, " row"], examples: int
) -> Int[Tensor, "example use"] | None:
    """Return, for each example, the indices of its rows. `owner` holds the example of
    each row, or −1. Return None if rows are sorted by example and every example has the
    same number of rows.

    Pad the lists to equal length with len(owner), an out-of-range row index.

    >>> row_index(torch.tensor([0, 0, 1, 1]), 2), row_index(torch.tensor([1, 0, -1, 1]), 2)
    (None, tensor([[1, 4],
            [0, 3]]))
    """
    uses, rest = divmod(len(owner), examples)
    each_once = torch.arange(examples, device=owner.device)
    if not rest and torch.equal(owner, each_once.repeat_interleave(uses)):
        return None

    # Sort the rows by owner, and drop rows without an owner
    counts = torch.bincount(owner + 1, minlength=examples + 1)
    order = owner.argsort(stable=True)[int(counts[0]) :]
    sorted_owner = owner[order]

    # in sorted order, row k is use number k − start of its owner
    counts = counts[1:]
    starts = counts.cumsum(0) - counts
    use = torch.arange(len(order), device=owner.device) - starts[sorted_owner]
    missing = owner.new_full((examples, int(counts.max())), len(owner))
    return missing.index_put((sorted_owner, use), order)


def select_rows(
    rows: Float[Tensor, "..."], axis: int, index: Int[Tensor, "example use"]
) -> Float[Tensor, "... example use _"]:
    """Gather the rows of each example, with zeros for padding indices. Return a view if
    the rows are in the order [use, example]."""
    examples, uses = index.shape
    count = rows.shape[axis]
    if torch.equal(index.t().reshape(-1), torch.arange(count, device=index.device)):
        return torch.unflatten(rows, axis, (uses, examples)).transpose(axis, axis + 1)
    if (index == count).any():
        rows = with_zeros(rows, axis)
    if axis == 0:
        return rows[index]
    return rows[:, index]


def with_zeros(rows: Shaped[Tensor, "..."], axis: int) -> Shaped[Tensor, "..."]:
    """Append a row of zeros, which the padding index selects (see `row_index`)."""
    shape = list(rows.shape)
    shape[axis] = 1
    return torch.cat([rows, rows.new_zeros(shape)], axis)


def example_axis(owner: Owner, examples: int, among: Sequence[int]) -> int | None:
    """Return the first axis in `among` that is the axis of examples: index k along
    this axis belongs to example k. Return None if there is no such axis."""
    for axis in among:
        index = torch.arange(examples, device=owner.device)
        index = index.view(-1, *[1] * (owner.dim() - axis - 1))
        if bool(((owner == index) | (owner < 0)).all()):
            return axis
    return None


def factored(
    use: Product, cotangent: Cotangent, owner: Owner, examples: int
) -> Factored:
    inputs, outputs = factors(use, cotangent, owner, examples)
    weight = use.weight if isinstance(use.weight, View) else None
    bias = use.bias if isinstance(use.bias, View) else None
    return Factored(inputs, outputs, weight, bias, use.shift)


def factors(
    use: Product | Grouped,
    cotangent: Cotangent,
    owner: Int[Tensor, " row"],
    examples: int,
) -> tuple[Float[Tensor, "example use in_"], Float[Tensor, "example out use features"]]:
    """Return the factors of a product (its inputs a and the gradients β at its tap),
    arranged by example and use."""
    inputs = use.factor.rows if isinstance(use.factor, Window) else use.factor
    rounds, rest = divmod(len(owner), examples)
    one_each = torch.arange(examples, device=owner.device)
    if inputs.dim() == 2 and not rest and torch.equal(owner, one_each.repeat(rounds)):
        # Rows are in the order [use, example], as in a sequence model with time first
        outputs = cotangent.reshape(len(cotangent), -1, examples, cotangent.shape[-1])
        by_round = inputs.reshape(-1, examples, inputs.shape[1])
        return by_round.transpose(0, 1), outputs.permute(2, 0, 1, 3)
    index = row_index(owner, examples)
    if index is None and cotangent.dim() > 3 and cotangent.shape[1] == examples:
        # each pixel is one use of the weight (a view, no copy)
        outputs = cotangent.flatten(3).mT
    elif index is None:
        rows = rows_of(cotangent, batch=1)
        outputs = rows.reshape(len(rows), examples, rounds, rows.shape[-1])
    else:
        rows = rows_of(cotangent, batch=1)
        if (owner < 0).any():
            refuse_unowned(rows[:, owner < 0])
        inputs = select_rows(inputs.flatten(0, -2), 0, index)
        outputs = select_rows(rows, 1, index)
    inputs = inputs.reshape(examples, outputs.shape[2], inputs.shape[-1])
    return inputs, outputs.transpose(0, 1)


def multiply_groups(
    use: Grouped,
    cotangent: Cotangent,
    owner: Int[Tensor, " row"],
    examples: int,
    buffer: Gradients | None,
) -> Iterator[tuple[Source, Gradients]]:
    """Yield the gradients Σ_u β_u ⊗ a_u of a grouped weight, and then of its bias.

    A grouped weight, as in a grouped convolution, has one matrix for each group.
    Compute one matrix product for each example and group, a few examples at a time. If
    there is only one group or only one output, write the gradients of the weight into
    `buffer`. Otherwise the products and `buffer` have different orders of axes."""
    # arrange β as [example, out, features, use], and read a for some examples at a time
    is_window = isinstance(use.factor, Window) and cotangent.shape[1] == examples
    if is_window and row_index(owner, examples) is None:
        assert isinstance(use.factor, Window)
        batches = use.factor.batches()
        outputs = cotangent.flatten(3).transpose(0, 1)
    else:
        inputs, rows = factors(use, cotangent, owner, examples)
        batches = iter([(slice(None), inputs.mT)])
        outputs = rows.mT

    # β of each group, [example, group, out·features, use]
    groups = use.groups
    _, count, features, uses = outputs.shape
    left = torch.unflatten(outputs, 2, (groups, features // groups)).transpose(1, 2)
    left = left.reshape(examples, groups, count * features // groups, uses)

    # Σ_u β a
    shape = left.shape[:3]
    gradients = None
    if buffer is not None and min(groups, count) == 1:
        gradients = buffer.view(*shape, -1)
    for part, shown in batches:
        beta = left[part].flatten(0, 1)
        patches = shown.reshape(len(shown) * groups, shown.shape[1] // groups, uses).mT
        if gradients is None and part == slice(None):
            # use no `out=` here, because compiled programs overwrite no tensors
            gradients = torch.bmm(beta, patches).view(*shape, patches.shape[2])
            break
        if gradients is None:
            gradients = left.new_empty(*shape, patches.shape[2])
        torch.bmm(beta, patches, out=gradients[part].flatten(0, 1))
    assert gradients is not None
    by_output = gradients.view(examples, groups, count, -1).transpose(1, 2)
    yield use.weight, by_output.flatten(2)
    if use.bias is not None:
        yield use.bias, outputs.sum(3)


def buffer_for(
    weight: Source, buffers: Weights, examples: int, taken: Collection[str]
) -> Gradients | None:
    """Return the buffer for the gradients of a weight. Return None if there is no
    buffer, if another use already has gradients for the parameter (`taken`), or if the
    weight is only a part of its parameter."""
    if (
        not isinstance(weight, View)
        or weight.name not in buffers
        or weight.name in taken
    ):
        return None
    inside = buffers[weight.name][:examples]
    if not weight.covers(inside.shape[2]):
        return None
    return inside


def scatter(
    use: Element, cotangent: Cotangent, owner: Owner, examples: int
) -> Gradients:
    """Return the gradient of a weight for each example. Sum the gradient of the
    expanded weight over all copies of each element.

    If the weight was broadcast along the axis of examples, as gains and biases are, sum
    over all other broadcast axes. Otherwise add each element to the gradient of its
    owner."""
    shown = drop_expanded_axes(owner)
    if not (shown >= 0).all():
        refuse_unowned(with_gain(use, cotangent).masked_fill(owner >= 0, 0.0))
    positions = use.positions
    size = (
        prod(use.source.shape)
        if isinstance(use.source, View)
        else use.source.delta.numel()
    )
    along = []
    for d, length in enumerate(owner.shape):
        is_copied = positions.stride(d) == 0 or length == 1
        if length == examples and is_copied:
            along.append(d)
    axis = example_axis(shown, examples, along)
    if axis is not None:
        return add_copies(use, cotangent, axis, size)

    # Element p of example n has the flat index n · size + p
    cotangent = with_gain(use, cotangent)
    has_owner = owner >= 0
    target = owner * size + positions.to(owner.device)
    flat = cotangent.new_zeros(len(cotangent), examples * size)
    flat = flat.index_add(1, target[has_owner], cotangent[:, has_owner])
    return flat.view(-1, examples, size).transpose(0, 1)


def with_gain(use: Element, cotangent: Cotangent) -> Cotangent:
    """Return the gradient with respect to the expanded weight. If the tap is gain ·
    weight, multiply by the gain."""
    if isinstance(use.gain, float) and use.gain == 1:
        return cotangent
    return cotangent * use.gain


def add_copies(use: Element, cotangent: Cotangent, axis: int, size: int) -> Gradients:
    """Return the gradient of the weight of an elementwise operation, from the gradient
    `cotangent` at the tap.

    Multiply by the gain, and sum over the axes along which the weight was broadcast,
    except `axis`, the axis of examples. The result has the element order of the weight.
    """
    positions = use.positions
    copied = [
        d for d in range(positions.dim()) if positions.stride(d) == 0 and d != axis
    ]
    are_last = len(copied) > 0 and copied[0] == use.tap.dim() - len(copied)
    if are_last and isinstance(use.gain, Tensor) and len(cotangent) > 1:
        # sum by matrix products, which are faster for many outputs; under casts, the
        # gain may have lower precision
        kind = torch.promote_types(cotangent.dtype, use.gain.dtype)
        gain = use.gain.expand(use.tap.shape).flatten(copied[0]).to(kind)
        beta = cotangent.flatten(copied[0] + 1).to(kind)
        summed = inner_products(beta, gain[None])[0, ..., 0]
    else:
        summed = with_gain(use, cotangent)
        if copied:
            summed = summed.sum([d + 1 for d in copied])

    # → [out, example, element]
    rows = summed.movedim(axis + 1 - sum(d < axis for d in copied), 1)
    if rows.dim() == 2:
        rows = rows[:, :, None]
    rows = rows.flatten(2)

    # put every element at its index in the weight
    once = positions
    for d in (axis, *copied):
        once = once.narrow(d, 0, 1)
    places = once.reshape(-1).to(rows.device)
    if not torch.equal(places, torch.arange(size, device=rows.device)):
        rows = rows.new_zeros(*rows.shape[:2], size).index_add(2, places, rows)
    return rows.transpose(0, 1)


def refuse_unowned(cotangent: Cotangent) -> None:
    """Raise ChoiceChanged if an element without an owner has a nonzero gradient.

    This only happens if a mask has changed since the owners were computed.
    """
    if cotangent.any():
        raise ChoiceChanged(BY_COMPARISON)


def copies(
    use: Element,
    source: View,
    cotangent: Cotangent,
    owner: Owner,
    examples: int,
) -> Copies:
    """Return the gradients of the elements that each example read from a lookup table,
    such as an embedding."""
    cotangent = with_gain(use, cotangent)
    has_owner = owner >= 0
    if not has_owner.all():
        refuse_unowned(cotangent.masked_fill(has_owner, 0.0))
    positions = use.positions.to(cotangent.device)
    axis = example_axis(
        owner, examples, [d for d, n in enumerate(owner.shape) if n == examples]
    )
    if axis is None:
        index = row_index(owner.reshape(-1), examples)
        if index is None:
            index = torch.arange(owner.numel(), device=owner.device).view(examples, -1)
        values = with_zeros(cotangent.flatten(1), 1)[:, index]
        places = with_zeros(positions_in(source, positions).reshape(-1), 0)
        return Copies(values.transpose(0, 1), places[index], source.name)

    # Sum over the axes along which an example reads the same elements again. If all
    # examples read the same elements, store the indices only once.
    for d in range(positions.dim()):
        if use.positions.stride(d) == 0:
            positions = positions.narrow(d, 0, min(1, positions.shape[d]))
            if d != axis:
                cotangent = cotangent.sum(d + 1, keepdim=True)
    values = cotangent.movedim(axis + 1, 1).reshape(len(cotangent), examples, -1)
    places = positions_in(source, positions).movedim(axis, 0)
    places = places.reshape(len(places), -1).expand(examples, -1)
    return Copies(values.transpose(0, 1), places, source.name)


def positions_in(source: View, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Convert flat indices in a view to flat indices in its parameter.

    >>> positions_in(View("w", (2, 3), (1, 2), 5), torch.tensor([0, 1, 5]))
    tensor([ 5,  7, 10])
    """
    places = torch.full_like(positions, source.offset)
    left = positions
    for size, stride in zip(
        reversed(source.shape), reversed(source.stride), strict=True
    ):
        places = places + left % size * stride
        left = left // size
    return places
