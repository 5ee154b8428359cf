"""Difference rules for operations whose result depends on a comparison: maxima,
sorting, masks, pooling.

Every rule is exact, even if the step changes the result of the comparison. A bar is the
mean over start and end of the step.

    max(a, b) = a + relu(b − a)          Δmax = (1 − w) Δa + w Δb, with w the slope of relu at b − a
    where(m, a, b) = m a + (1 − m) b     m̄ Δa + (1 − m̄) Δb + (ā − b̄) Δm
    m = [a < b], a step in d = a − b     Δm = (m₁ − m₀)/(d₁ − d₀) Δd, 0 if m does not change

The maximum of many values is computed by a tournament: a fixed sequence of maxima of
pairs. Operations that depend on an order (sort, top-k, argmax) have a difference only if
the step does not change the order. Otherwise their rules raise ChoiceChanged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel.secant.call import (
    Call,
    ChoiceChanged,
    Ends,
    NoRule,
    Result,
    Rule,
    merge_axes,
    sum_terms,
    tree_reduce,
)
from ntkexp.kernel.secant.rules.elementwise import analytic, quotient, relu
from ntkexp.kernel.secant.rules.linear import constant, linear_in_all


def pairwise(call: Call, left: Ends, right: Ends, sign: int, tied: float = 0.5) -> Ends:
    """Return max(a, b), or min(a, b) if `sign` is −1, with its difference
    (1 − w) Δa + w Δb.

    w is the slope of relu at `sign` · (b − a) over the step. If a = b at both ends, w
    is `tied`."""

    def share(d0: Tensor, d1: Tensor) -> Tensor:
        return torch.where((d0 == 0) & (d1 == 0), tied, relu(d0, d1))

    choose = torch.maximum if sign > 0 else torch.minimum
    ahead = Ends(sign * (right.start - left.start), sign * (right.end - left.end), None)
    weight = call.slope(ahead, share)
    terms = []
    if left.delta is not None:
        terms.append((1 - weight) * left.delta)
    if right.delta is not None:
        terms.append(weight * right.delta)
    start = choose(left.start, right.start)
    end = choose(left.end, right.end)
    return Ends(start, end, sum_terms(terms, start.shape))


def larger_of_two(sign: int, tied: float, call: Call) -> Tensor:
    """Return Δmax(a, b) or Δmin(a, b), with broadcasting."""
    return pairwise(call, *call.expanded_pair(), sign, tied).change


def clamp(call: Call) -> Tensor:
    """Return the difference of a clamped value. If the bounds are tensors, they may
    change too. Then take the maximum with the lower bound, and the minimum with the
    upper bound."""
    if not any(isinstance(bound, Ends) for bound in call.args[1:]):
        return analytic(None, call)
    shape = call.start.shape
    value = call.expanded(call.args[0], shape)
    for sign, bound in zip(BOUNDS[call.entry.name], call.args[1:], strict=False):
        if bound is not None:
            value = pairwise(call, value, call.expanded(bound, shape), sign, tied=0.0)
    return value.change


def extremes(signs: tuple[int, ...], call: Call) -> Result:
    """Return the difference of the maximum, the minimum or both, along some or all
    axes, by a tournament. If the operation takes two tensors,
    compare them element by element."""
    if "other" in call.arguments:
        return larger_of_two(signs[0], 0.5, call)
    dims = call.arguments.get("dim")
    results = []
    for sign in signs:
        value = merge_axes(call.expanded(call.args[0]), [] if dims is None else dims)

        def larger(left: Ends, right: Ends, sign: int = sign) -> Ends:
            return pairwise(call, left, right, sign)

        best = tree_reduce(value, larger)
        results.append(best.change.reshape(call.start.shape))
    if len(results) == 1:
        return results[0]
    return tuple(results)


def follow_order(call: Call) -> Result:
    """Return Δv in the order of sort, topk and similar operations. Their second result
    is the order. Raise ChoiceChanged if the step changes this order."""
    (_, _), (first, last) = call.result_ends
    if not torch.equal(first, last):
        raise ChoiceChanged(
            f"the order that {call.entry.name} finds differs between the ends of a step"
        )
    dim = call.arguments["dim"]
    delta = call.delta(call.args[0])
    if first.dim() < delta.dim():
        return delta.gather(dim, first.unsqueeze(dim)).squeeze(dim)
    return delta.gather(dim, first)


BOUNDS = {"clamp": (1, -1), "clamp_min": (1,), "clamp_max": (-1,)}
ORDER_OPERATIONS: dict[str, Rule] = {
    "maximum": partial(larger_of_two, 1, 0.5),
    "minimum": partial(larger_of_two, -1, 0.5),
    **dict.fromkeys(("max", "amax"), partial(extremes, (1,))),
    **dict.fromkeys(("min", "amin"), partial(extremes, (-1,))),
    "aminmax": partial(extremes, (-1, 1)),
    **dict.fromkeys(BOUNDS, clamp),
    # if both values are equal, torch gives the whole gradient to the first
    "fmax": partial(larger_of_two, 1, 0.0),
    "fmin": partial(larger_of_two, -1, 0.0),
    **dict.fromkeys(
        ("sort", "topk", "cummax", "cummin", "median", "mode", "kthvalue"), follow_order
    ),
}


# `scatter_reduce`: several values are written to one element, which becomes the maximum m.
# Let a be the mean of the values that are largest at the start, and b the mean of the
# values that are largest at the end. (Several values may be tied.) Both means change in
# the step, and m = max(a, b) at both ends. So
#
#     Δm = (1 − w) Δa + w Δb        w = the slope of relu at b − a
#
# Tied values have equal shares, as in torch. m − a and m − b are means of non-negative
# terms, so they have no cancellation.


@dataclass(frozen=True)
class Competition:
    """The values that compete for each element of a target: the element itself, if
    `counts` is 1, and the values of the source that are written to it."""

    dim: int
    indices: Int[Tensor, "..."]
    counts: Float[Tensor, "..."]

    def gather(self, v: Tensor) -> Tensor:
        return v.gather(self.dim, self.indices)

    def scatter(self, v: Tensor) -> Tensor:
        zero = torch.zeros_like(self.counts, dtype=v.dtype)
        return zero.scatter_add(self.dim, self.indices, v)

    def shares(
        self, m: Tensor, target: Tensor, source: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the share of each value in the maximum m, for the target and the
        source: 1/k for each of the k values that equal m, 0 for all others."""
        of_target = (target == m) * self.counts
        of_source = (source == self.gather(m)).to(self.counts.dtype)
        number = of_target + self.scatter(of_source)
        return of_target / number, of_source / self.gather(number)

    def distance(
        self, m: Tensor, target: Tensor, source: Tensor, shares: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the distance |m − v| of the maximum m from the mean v of the values,
        weighted by `shares`."""
        of_target, of_source = shares
        missed = of_source * (self.gather(m) - source).abs()
        return of_target * (m - target).abs() + self.scatter(missed)


def scatter_reduce(call: Call) -> Result:
    how = call.args[4]
    if how in ("sum", "mean"):
        return linear_in_all(call)
    if how not in ("amax", "amin"):
        raise NoRule(f"no difference rule for scatter_reduce with reduce={how!r}")
    target, dim, index, source = call.args[:4]
    indices = constant(index)
    written = source[tuple(slice(size) for size in indices.shape)]
    kind = target.start.dtype
    rivals = Competition(dim, indices, torch.ones_like(target.start))
    if not call.arguments["include_self"]:
        # an element competes only if no value is written to it
        number = rivals.scatter(torch.ones_like(written.start))
        rivals = replace(rivals, counts=(number == 0).to(kind))

    m0, m1 = (result.to(kind) for result in call.result_ends[0])
    shares0 = rivals.shares(m0, target.start, written.start)
    shares1 = rivals.shares(m1, target.end, written.end)
    # b − a at the start and at the end, where one of a and b is the maximum
    behind = -rivals.distance(m0, target.start, written.start, shares1)
    ahead = rivals.distance(m1, target.end, written.end, shares0)
    w = torch.where((behind == 0) & (ahead == 0), 0.5, relu(behind, ahead))

    # (1 − w) Δa + w Δb
    terms = []
    if target.delta is not None:
        share = call.coefficient(torch.lerp(shares0[0], shares1[0], w))
        terms.append(call.delta(target, gain=share))
    if written.delta is not None:
        share = call.coefficient(torch.lerp(shares0[1], shares1[1], rivals.gather(w)))
        terms.append(rivals.scatter(call.delta(written, gain=share)))
    return sum_terms(terms, call.start.shape)


def index_put(call: Call) -> Result:
    """Return the difference of writing a value where a mask is true, as in
    `h[h < 0] = 0`. Writing at integer indices is linear."""
    target, indices, value, *accumulate = call.args
    axis, mask = next(
        (k, index) for k, index in enumerate(indices) if index is not None
    )
    inner = target.start.dim() - axis - mask.start.dim()
    alone = len(indices) == axis + 1 and mask.start.dtype == torch.bool
    # If each row of the written value belongs to an example, the mask must be the same
    # at both ends, because it decides which row is written where.
    rows = value.delta is not None and not call.is_use(value)
    if rows and mask.delta is not None:
        raise ChoiceChanged(
            "a mask that changes between the ends of a step decides where rows are written"
        )
    if any(accumulate) or not alone or value.start.dim() > inner or rows:
        return linear_in_all(call)
    return select(
        call, mask.view(lambda m: m.reshape(*m.shape, *[1] * inner)), value, target
    )


def combine(constant: float, factor: float, call: Call) -> Tensor:
    """Return Δa (c + k b̄) + Δb (c + k ā), with c = `constant` and k = `factor`. This
    is the difference of the logical operations a and b = ab, a or b = a + b − ab, and a
    xor b = a + b − 2ab."""
    shape = call.start.shape
    kind = next(value.delta.dtype for value in call.args if value.delta is not None)
    if call.start.dtype != torch.bool:
        raise ChoiceChanged("bits of integers change between the ends of a step")
    a, b = call.args
    terms = []
    for value, other in ((a, b), (b, a)):
        if value.delta is not None:
            other_mean = call.mean(as_numbers(other, shape, kind))
            slope = constant + factor * other_mean
            terms.append(slope * call.delta(value, shape))
    return sum_terms(terms, shape)


def select(call: Call, mask: Ends, yes: Any, no: Any) -> Tensor:
    """Return the difference of where(m, a, b): m̄ Δa + (1 − m̄) Δb + (ā − b̄) Δm."""
    shape = call.start.shape
    yes = call.expanded(yes, shape)
    no = call.expanded(no, shape)
    chosen = as_numbers(mask, shape, call.start.dtype.to_real())
    zero = call.start.new_zeros(())
    # m̄ Δa and (1 − m̄) Δb. A factor of zero gives zero even if the difference is
    # infinite.
    yes_part = call.mean(chosen)
    no_part = call.mean(chosen.view(lambda m: 1 - m))
    terms = []
    for part, value in ((yes_part, yes), (no_part, no)):
        if value.delta is not None:
            unchosen = zero if value.delta.dtype == zero.dtype else 0.0
            terms.append(torch.where(part > 0, part * value.delta, unchosen))
    # (ā − b̄) Δm
    if mask.delta is not None:
        changed = (mask.start != mask.end).expand(shape)
        jump = torch.where(changed, (yes.start + yes.end - no.start - no.end) / 2, zero)
        if not jump.isfinite().all():
            raise ChoiceChanged(
                "a mask changes between the ends of a step at an infinite value"
            )
        terms.append(jump * call.delta(mask, shape))
    return sum_terms(terms, shape)


def as_numbers(mask: Ends, shape: torch.Size, dtype: torch.dtype) -> Ends:
    """Convert a mask to zeros and ones, so that the mean over start
    and end can be ½."""
    start, end = (value.expand(shape).to(dtype) for value in (mask.start, mask.end))
    return Ends(start, end, mask.delta, mask.from_weights, mask.from_inputs)


def compare(call: Call) -> Tensor:
    """Return the difference of a comparison m = [a < b]: (m₁ − m₀)/(d₁ − d₀) (Δa − Δb),
    with d = a − b."""
    left, right = call.args
    sides = [value for value in (left, right) if isinstance(value, Ends)]
    kind = next(value.delta.dtype for value in sides if value.delta is not None)
    r0, r1 = (right.start, right.end) if isinstance(right, Ends) else (right, right)
    d0 = left.start - r0
    d1 = left.end - r1
    (before, after) = call.result_ends[0]
    step = quotient(after.to(kind) - before.to(kind), (d1 - d0).to(kind), 0.0)
    shape = before.shape
    terms = []
    if left.delta is not None:
        terms.append(step * call.delta(left, shape))
    if isinstance(right, Ends) and right.delta is not None:
        terms.append(-step * call.delta(right, shape))
    return sum_terms(terms, shape)


MASKS: dict[str, Rule] = {
    "where": lambda call: select(call, *call.args),
    "masked_fill": lambda call: select(call, call.args[1], call.args[2], call.args[0]),
    "index_put": index_put,
    "scatter_reduce": scatter_reduce,
    **dict.fromkeys(("logical_and", "bitwise_and"), partial(combine, 0, 1)),
    **dict.fromkeys(("logical_or", "bitwise_or"), partial(combine, 1, -1)),
    **dict.fromkeys(("logical_xor", "bitwise_xor"), partial(combine, 1, -2)),
    **dict.fromkeys(("gt", "lt", "ge", "le", "eq", "ne"), compare),
    # not m = 1 − m
    **dict.fromkeys(
        ("logical_not", "bitwise_not"), lambda call: -call.delta(call.args[0])
    ),
}


def max_pool(call: Call) -> Result:
    """Return the difference of the maximum of each window, by a tournament between
    shifted copies of the input."""
    value = call.expanded(call.args[0])
    count = call.start.shape[2:]
    how = call.arguments
    window, stride, padding, dilation = (
        # one number for each dimension
        numbers * len(count) if len(numbers) == 1 else numbers
        for numbers in (
            call.args[1],
            how["stride"] or call.args[1],
            how["padding"],
            how["dilation"],
        )
    )
    # padding before and after each axis, the last axis first (as in `pad`). Windows may
    # not reach the last elements: negative padding then cuts them off.
    borders: list[int] = []
    for k in reversed(range(len(count))):
        reach = stride[k] * (count[k] - 1) + dilation[k] * (window[k] - 1) + 1
        borders += [padding[k], reach - value.start.shape[2 + k] - padding[k]]

    def shifted_copies(v: Tensor, fill: float) -> Tensor:
        v = torch.nn.functional.pad(v, borders, value=fill)
        copies = []
        for offset in product(*map(range, window)):
            places = [
                slice(d * o, d * o + s * (n - 1) + 1, s)
                for d, o, n, s in zip(dilation, offset, count, stride, strict=True)
            ]
            copies.append(v[(slice(None), slice(None), *places)])
        return torch.stack(copies, dim=-1)

    # pad with a finite number, because the difference of two infinities would be nan
    lowest = torch.finfo(value.start.dtype).min / 4
    windows = Ends(
        shifted_copies(value.start, lowest),
        shifted_copies(value.end, lowest),
        shifted_copies(value.change, 0.0),
    )
    return tree_reduce(
        windows, lambda left, right: pairwise(call, left, right, 1)
    ).change


def adaptive_max_pool(call: Call) -> Result:
    """Return the difference of the maximum of each window, axis by axis. Windows may
    differ in length; shorter ones repeat their last element.
    """
    best = call.expanded(call.args[0])
    for axis, count in enumerate(
        call.args[1], start=best.start.dim() - len(call.args[1])
    ):
        # Compute the indices of the elements in each window;
        # shorter windows repeat the last one
        size = best.start.shape[axis]
        ends = [(k * size // count, -(-(k + 1) * size // count)) for k in range(count)]
        longest = max(stop - start for start, stop in ends)
        members = [
            [min(start + k, stop - 1) for k in range(longest)] for start, stop in ends
        ]
        places = torch.tensor(members).to(best.start.device)
        # the windows replace the axis, and their elements form a new last axis
        shape = (*best.start.shape[:axis], *places.shape, *best.start.shape[axis + 1 :])
        windows = best.view(
            lambda v, axis=axis, places=places, shape=shape: (  # type: ignore[misc]
                v.index_select(axis, places.flatten()).view(shape).movedim(axis + 1, -1)
            )
        )
        best = tree_reduce(windows, lambda left, right: pairwise(call, left, right, 1))
    return best.change


CHOICE: dict[str, Rule] = {
    **ORDER_OPERATIONS,
    **MASKS,
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), max_pool),
    **dict.fromkeys(("adaptive_max_pool2d", "adaptive_max_pool3d"), adaptive_max_pool),
}
