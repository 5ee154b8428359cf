"""Difference rules for linear operations, and for rows that are looked up in a table.

    Δ(Av) = A Δv

There are two kinds of rules, and both are exact. The rule `linear_in_first` applies the
operation to the difference of its first argument. The rule `linear_in_all` is for an
operation that is linear in several arguments together, such as `cat`. It applies the
operation to the differences of all arguments at once, with zeros for arguments that do
not change."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.record.tape import is_integer
from ntkexp.kernel.secant.call import (
    Call,
    ChoiceChanged,
    Ends,
    NoRule,
    Result,
    Rule,
    sum_terms,
)
from ntkexp.kernel.secant.rules.bilinear import multiply


def linear_in_first(call: Call) -> Result:
    """Apply the operation to the difference of its first argument. Examples are
    rearrangements, sums, padding, and average pooling."""
    value, *rest = call.args
    constants = tree_map(constant, (rest, call.kwargs))

    def arranged(source: Tensor) -> Any:
        return call.entry.op(source, *constants[0], **constants[1])

    # the indices depend on the inputs, so this is a use of a weight
    if call.is_use(value):
        return call.element_use(value, arranged)
    result: Result = arranged(call.delta(value))
    if isinstance(result, list):
        return tuple(result)
    return result


def select(call: Call) -> Result:
    """Return Δv at one index along an axis."""
    value, dim, place = call.args
    unbound = None if value.delta is None else call.unbound(value, dim)
    if unbound is None:
        return linear_in_first(call)
    result: Result = unbound[place]
    return result


def constant(value: Any) -> Any:
    """Return an argument that must not change in the step, such as an index. Raise
    ChoiceChanged if it changes."""
    if not isinstance(value, Ends):
        return value
    if value.delta is not None:
        raise ChoiceChanged(
            "an argument that must be constant, such as an index or a grid, changes between the "
            "ends of a step"
        )
    return value.start


def reshape(call: Call) -> Tensor:
    """Return Δv in the shape of the result, for `view`, `reshape` and `detach`.

    `detach` has this rule too: it only stops gradients, and its value still changes in
    the step. Call `reshape`, not `view`, because Δv and v may have different
    memory layouts."""
    return call.delta(call.args[0]).reshape(call.start.shape)


def restride(call: Call) -> Tensor:
    """Return the elements of Δv that `as_strided` takes from v. Find them by their
    memory positions in v, because Δv may have another memory layout."""
    value, size, stride = call.args[:3]
    v = value.start
    offset = call.arguments["storage_offset"]
    if offset is None:
        offset = v.storage_offset()
    # for each memory position, the index of the element of v
    count = v.untyped_storage().nbytes() // v.element_size()
    memory = torch.zeros(count, dtype=torch.long, device=v.device)
    elements = memory.as_strided(v.shape, v.stride(), v.storage_offset())
    elements.copy_(torch.arange(v.numel()).view(v.shape))
    places = memory.as_strided(size, stride, offset)
    if call.is_use(value):
        return call.element_use(value, lambda source: source.reshape(-1)[places])
    return call.delta(value).reshape(-1)[places]


def convert(call: Call) -> Tensor:
    """Return Δv in another precision or on another device. Raise ChoiceChanged for a
    conversion to integers or booleans."""
    if is_integer(call.start):
        raise ChoiceChanged(
            "a number that is converted to an integer or a boolean changes between the ends of a "
            "step"
        )
    return call.delta(call.args[0]).to(call.start.dtype)


def replaced(call: Call) -> Tensor:
    """Return Δb in the shape of a, for an operation that
    replaces the values of a by b."""
    value = call.args[1]
    if isinstance(value, Ends) and value.delta is not None:
        return call.delta(value, call.start.shape)
    return torch.zeros_like(call.start)


def linear_in_all(call: Call, args: tuple[Any, ...] | None = None) -> Result:
    """Apply the operation to the differences of its arguments, op([Δa, Δb, …], …).
    Examples are concatenating, stacking, and writing into a tensor."""

    def difference(value: Any) -> Any:
        if not isinstance(value, Ends):
            return value
        if value.delta is not None and is_integer(value.start):
            raise ChoiceChanged("an index or a mask changes between the ends of a step")
        if value.delta is not None:
            return call.delta(value)
        if is_integer(value.start):
            return value.start
        return torch.zeros_like(value.start, dtype=call.start.dtype)

    values = (call.args if args is None else args, call.kwargs)
    deltas, kwargs = tree_map(difference, values)
    result: Result = call.entry.op(*deltas, **kwargs)
    return result


def write_value(call: Call) -> Result:
    """Return the difference of writing a value into a tensor. The value may be a Python
    number, which does not change."""
    if "reduce" in call.kwargs:
        raise NoRule("no difference rule for writing with reduce=…")
    numbers = [value if isinstance(value, Ends) else 0.0 for value in call.args[3:]]
    return linear_in_all(call, (*call.args[:3], *numbers))


def packed(call: Call) -> Result:
    """Return the rows of Δv that `pack_padded_sequence` takes. The other result of the
    operation is the number of sequences at each time."""
    value, lengths, batch_first = call.args
    axes = value.start.shape[:2]
    count = torch.arange(axes.numel(), device=value.start.device).view(axes)
    places = call.entry.op(count, constant(lengths), batch_first)[0]

    def rows(source: Tensor) -> Tensor:
        return source.flatten(0, 1)[places]

    if call.is_use(value):
        return call.element_use(value, rows)
    return rows(call.delta(value))


def log_likelihood(call: Call) -> Result:
    """Return −Δx at the target class. The other result of the operation
    is the total class weight."""
    value, *rest = call.args
    # contiguous, because the backward pass of the operation requires it
    delta: Tensor = call.entry.op(
        call.delta(value).contiguous(), *tree_map(constant, rest)
    )[0]
    return delta


def signed_sum(call: Call, *factors: float) -> Tensor:
    """Return the difference of Σ_k c_k v_k for the factors c_k: Σ_k c_k Δv_k."""
    shape = call.start.shape
    terms = [
        call.delta(value, shape) if factor == 1 else factor * call.delta(value, shape)
        for value, factor in zip(call.args, factors, strict=False)
        if isinstance(value, Ends) and value.delta is not None
    ]
    return sum_terms(terms, shape)


LINEAR_IN_FIRST = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d affine_grid_generator alias
    avg_pool2d avg_pool3d channel_shuffle clone col2im cumsum deg2rad diag_embed diagonal expand flip gather im2col
    index index_select masked_select max_unpool2d max_unpool3d mean nansum neg permute pixel_shuffle pixel_unshuffle
    rad2deg reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d
    replication_pad3d roll rot90 slice split split_with_sizes squeeze sum t take trace transpose tril triu unbind
    unfold unfold_backward unsafe_split unsafe_split_with_sizes unsqueeze upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
"""
UNCHANGED = "empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like zero zeros_like"
JOINED = """
    block_diag cat diagonal_scatter index_add index_copy masked_scatter scatter_add select_scatter slice_scatter stack
"""
LINEAR: dict[str, Rule] = {
    **dict.fromkeys(LINEAR_IN_FIRST.split(), linear_in_first),
    "select": select,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "detach"), reshape),
    **dict.fromkeys(JOINED.split(), linear_in_all),
    # the result depends only on the shape of the argument, so its difference is 0
    **dict.fromkeys(UNCHANGED.split(), lambda call: torch.zeros_like(call.start)),
    **dict.fromkeys(("scatter", "index_fill"), write_value),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), log_likelihood),
    "_pack_padded_sequence": packed,
    "_to_copy": convert,
    "_neg_view": lambda call: -call.delta(call.args[0]),
    "as_strided": restride,
    # the padding is constant, so its difference is zero
    "constant_pad_nd": lambda call: torch.constant_pad_nd(
        call.delta(call.args[0]), call.args[1]
    ),
    **dict.fromkeys(("copy", "fill"), replaced),
    "add": lambda call: signed_sum(call, 1, call.arguments["alpha"]),
    "sub": lambda call: signed_sum(call, 1, -call.arguments["alpha"]),
    "rsub": lambda call: signed_sum(call, -call.arguments["alpha"], 1),  # b − αa
}


# --- Embedding lookups: single rows of a table,
# or sums and means of several rows (bags).


SUM = 0
MEAN = 1
LOG = logging.getLogger("ntkexp")


def embedding(call: Call) -> Result:
    """Return ΔW[index].

    Autograd gives the padding row no gradient, but training a tied weight may change
    it. Tangent kernels omit the row, as autograd does. Secant kernels include its
    change, with a warning."""
    table, index = call.args[:2]
    indices = constant(index)
    padding = call.arguments["padding_idx"]
    delta = looked_up(call, table, indices)
    if padding < 0:
        return delta
    if not call.is_point:
        if not torch.equal(table.start[padding], table.end[padding]) and bool(
            (indices == padding).any()
        ):
            warn_of_padding()
        return delta
    result = Ends(call.start, call.start, None)
    trained = call.slope(
        result,
        lambda z0, z1: (indices != padding)[..., None].expand_as(z0).to(z0.dtype),
    )
    return trained * delta


@cache
def warn_of_padding() -> None:
    """Warn once that secant kernels include the change of the padding row,
    and gradients do not."""
    LOG.warning(
        "ntkexp: the padding row of an embedding changes, because a tied weight is trained: "
        "secants include this change, but tangents omit it, as autograd does; without "
        "padding_idx, both include it"
    )


def looked_up(call: Call, table: Ends, indices: Tensor) -> Tensor:
    """Return ΔW[index], as a use of the table if the indices depend on inputs."""
    if call.is_use(table):
        return call.element_use(table, lambda source: source[indices])
    return call.delta(table)[indices]


def bags(call: Call) -> Result:
    """Return the difference of Σ_k g_k W[index_k] over each bag, or of its mean.
    Padding indices are skipped."""
    arguments = call.arguments
    mode = arguments["mode"]
    padding = arguments["padding_idx"]
    if mode not in (SUM, MEAN):
        raise NoRule("no difference rule for embedding bags with mode='max'")
    table = arguments["weight"]
    indices = constant(arguments["indices"])
    offsets = constant(arguments["offsets"])
    counted = (indices != padding).to(call.start.dtype)
    rows_read = torch.arange(len(indices), device=offsets.device)
    bag = torch.searchsorted(offsets, rows_read, right=True) - 1
    gains = arguments["per_sample_weights"]
    delta = None if table.delta is None else looked_up(call, table, indices)
    if gains is not None:  # Δ(g_k W[index_k]) by the product rule
        rows = Ends(table.start[indices], table.end[indices], delta)
        delta = multiply(call, gains[:, None], rows, rows.start.shape)
    assert delta is not None
    terms = delta * counted[:, None]
    if mode == MEAN:
        size = counted.new_zeros(len(call.start)).index_add(0, bag, counted)
        terms = terms / size[bag][:, None].clamp(min=1)
    summed: Tensor = terms.new_zeros(call.start.shape).index_add(0, bag, terms)
    return summed


LOOKUP: dict[str, Rule] = {
    "embedding": embedding,
    "_embedding_bag": bags,
}
