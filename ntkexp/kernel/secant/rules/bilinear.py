"""Difference rules for products of numbers, of matrices, or of images and filters. Both
factors may change in the step. With Ā = (A₀ + A₁)/2, the mean over start and end,

    Δ(AB) = ΔA·B̄ + Ā·ΔB

This product rule is exact for every bilinear operation:

    (A₁ − A₀)(B₀ + B₁)/2 + (A₀ + A₁)(B₁ − B₀)/2 = A₁B₁ − A₀B₀

A product of weights with a value that depends on the inputs is a use
of the weights (call.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.record.convolution import CONVOLVE_BACK, Window
from ntkexp.kernel.secant.call import (
    Call,
    Ends,
    NoRule,
    Rule,
    apply_linear,
    concatenated,
    merge_axes,
    on_shared_vector,
    sum_terms,
    tree_reduce,
)
from ntkexp.kernel.secant.rules.elementwise import applied, sigmoid


def multiply(
    call: Call, left: Ends | float, right: Ends | float, shape: torch.Size
) -> Tensor:
    """Return Δ(ab) = Δa·b̄ + ā·Δb for two values with broadcasting,
    or for a value and a number."""
    terms = []
    for value, other in ((left, right), (right, left)):
        if isinstance(value, Ends) and value.delta is not None:
            factor = call.mean(other) if isinstance(other, Ends) else other
            terms.append(call.delta(value, shape, factor))
    return sum_terms(terms, shape)


def product_of(call: Call, left: Ends, right: Ends) -> Ends:
    """Return ab at both ends, with its difference, for two values with broadcasting."""
    start = left.start * right.start
    varies = left.delta is not None or right.delta is not None
    delta = multiply(call, left, right, start.shape) if varies else None
    from_inputs = left.from_inputs or right.from_inputs
    return Ends(start, left.end * right.end, delta, from_inputs=from_inputs)


def add_scaled(of_two: Callable[..., Tensor], call: Call) -> Tensor:
    """Return Δ(x + c·g(a, b)) = Δx + c·Δg, for a product or a quotient g."""
    added, left, right = call.args
    shape = call.start.shape
    terms = []
    if added.delta is not None:
        terms.append(call.delta(added, shape))
    if left.delta is not None or right.delta is not None:
        terms.append(call.arguments["value"] * of_two(call, left, right, shape))
    return sum_terms(terms, shape)


def prod(call: Call) -> Tensor:
    """Return the difference of the product of all elements, or of products along an
    axis. Elements may be zero, so apply the product rule to pairs of elements, then to
    pairs of products, and so on."""
    value, *dims = call.args
    factors = merge_axes(call.expanded(value), dims[0] if dims else [])
    product = tree_reduce(factors, partial(product_of, call))
    return product.change.reshape(call.start.shape)


def cumprod(call: Call) -> Tensor:
    """Return the difference of cumulative products. Elements may be zero, so apply the
    product rule to pₙ ← pₙ₋ₖ pₙ, in rounds k = 1, 2, 4, …"""
    value = call.expanded(call.args[0])
    dim = call.arguments["dim"]
    if value.start.dim() == 0:
        return value.change
    products = value.view(lambda v: v.movedim(dim, -1))
    distance = 1
    length = products.start.shape[-1]
    while distance < length:
        early = products[..., : length - distance]
        late = product_of(call, early, products[..., distance:])
        products = concatenated(products[..., :distance], late)
        distance *= 2
    return products.change.movedim(-1, dim)


def glu(call: Call) -> Tensor:
    """Return Δ(a·s(b)) = Δa·s̄ + ā·Δs, where a and b are the halves of the input, s is
    the sigmoid, and Δs = D_sigmoid Δb."""
    value = call.expanded(call.args[0])
    dim = call.arguments["dim"]
    left = value.view(lambda v: v.chunk(2, dim)[0])
    right = value.view(lambda v: v.chunk(2, dim)[1])
    gate = applied(call, right, torch.sigmoid, sigmoid)
    return multiply(call, left, gate, call.start.shape)


def cross(call: Call) -> Tensor:
    """Return Δ(a × b) = Δa × b̄ + ā × Δb."""
    left, right = call.args
    op = call.entry.op
    how = call.kwargs
    terms = []
    if left.delta is not None:
        terms.append(op(call.delta(left, call.start.shape), call.mean(right), **how))
    if right.delta is not None:
        terms.append(op(call.mean(left), call.delta(right, call.start.shape), **how))
    return sum_terms(terms, call.start.shape)


def div(call: Call) -> Tensor:
    """Return Δ(a/b) with broadcasting. One of a and b may be a number."""
    if call.arguments.get("rounding_mode") is not None:
        raise NoRule("no difference rule for a division with rounding_mode")
    above, below = call.args
    return divide(call, above, below, call.start.shape)


def divide(
    call: Call, above: Ends | float, below: Ends | float, shape: torch.Size
) -> Tensor:
    """Return Δ(a/b) = Δa·mean(1/b) − ā·Δb/(b₀b₁). This is the product rule for a and
    1/b; the slope of 1/b is −1/(b₀b₁)."""
    if not isinstance(below, Ends) or below.delta is None:
        divisor = call.mean(below) if isinstance(below, Ends) else below
        assert isinstance(above, Ends)
        return call.delta(above, shape) / divisor
    terms = []
    if isinstance(above, Ends) and above.delta is not None:
        terms.append(
            call.delta(above, shape)
            * call.slope(below, lambda b0, b1: (1 / b0 + 1 / b1) / 2)
        )
    factor = call.mean(above) if isinstance(above, Ends) else above
    terms.append(
        call.delta(below, shape)
        * (factor * call.slope(below, lambda b0, b1: -1 / (b0 * b1)))
    )
    return sum_terms(terms, shape)


NUMBER_PRODUCTS: dict[str, Rule] = {
    "mul": lambda call: multiply(call, call.args[0], call.args[1], call.start.shape),
    "addcmul": partial(add_scaled, multiply),
    "div": div,
    "addcdiv": partial(add_scaled, divide),
    "prod": prod,
    "cumprod": cumprod,
    "glu": glu,
    "linalg_cross": cross,
}


def addmm(call: Call) -> Tensor:
    """Return the difference of βx + αAB: β Δx + α (ΔA B̄ + Ā ΔB)."""
    bias, left, right = call.args
    return call.product(
        left, right, call.arguments["alpha"], bias, call.arguments["beta"]
    )


def terms_of(
    product: Callable[[Tensor, Tensor], Tensor], call: Call, left: Ends, right: Ends
) -> list[Tensor]:
    """Return a list with ΔA B̄ if A changes, and with Ā ΔB if B changes."""
    terms = []
    if left.delta is not None:
        terms.append(product(left.delta, call.mean(right)))
    if right.delta is None:
        return terms
    return [*terms, product(call.mean(left), right.delta)]


def batch_product(call: Call, left: Ends, right: Ends, shape: torch.Size) -> Tensor:
    """Return Δ(A_k B_k) = ΔA_k B̄_k + Ā_k ΔB_k for a batch of matrices. If all B_k are
    the same weight, record one use of it. If they are different weights, record a use
    of each."""

    def is_copied(value: Tensor) -> bool:
        return value.shape[0] == 1 or value.stride(0) == 0

    if not (call.is_use(left) or call.is_use(right)):
        return sum_terms(terms_of(torch.bmm, call, left, right), shape)
    batch, rows, columns = shape
    if call.is_use(right) and is_copied(right.start):
        folded = call.product(
            left.view(lambda v: v.reshape(batch * rows, -1)), right[0]
        )
        return folded.view(batch, rows, columns)
    if call.is_use(left) and is_copied(left.start):
        turned = right.view(lambda v: v.transpose(1, 2).reshape(batch * columns, -1))
        folded = call.product(turned, left.view(lambda v: v[0].t()))
        return folded.view(batch, columns, rows).transpose(1, 2)
    return torch.stack([call.product(left[k], right[k]) for k in range(batch)])


def baddbmm(call: Call) -> Tensor:
    """Return the difference of βx + αA_kB_k: β Δx + α (ΔA_k B̄_k + Ā_k ΔB_k)."""
    added, left, right = call.args
    if call.is_use(left) or call.is_use(right):
        raise NoRule("no difference rule for baddbmm of a weight and inputs")
    gain = call.arguments["alpha"]
    shift = call.arguments["beta"]
    terms = []
    if added.delta is not None:
        terms.append(shift * call.delta(added, call.start.shape))
    terms += [gain * term for term in terms_of(torch.bmm, call, left, right)]
    return sum_terms(terms, call.start.shape)


def trilinear(call: Call) -> Tensor:
    """Return the difference of Σ_ij a_i W_oij c_j (`nn.Bilinear`). It is a product of
    all pairs a_i c_j with W, reshaped to a matrix."""
    left, weight, right, *layout = call.args
    if layout[:4] != [[1, 3], [0], [1, 2], [2, 3]]:
        raise NoRule(
            "no difference rule for products of three tensors, except nn.Bilinear"
        )
    pairs = product_of(call, left[:, :, None], right[:, None, :])
    return call.product(
        pairs.view(lambda v: v.flatten(1)),
        weight.view(lambda v: v.reshape(len(v), -1).t()),
    )


MATRICES: dict[str, Rule] = {
    "_trilinear": trilinear,
    "mm": lambda call: call.product(*call.args),
    "mv": lambda call: call.product(call.args[0], call.args[1][:, None])[:, 0],
    **dict.fromkeys(
        ("dot", "vdot"),
        lambda call: call.product(call.args[0][None], call.args[1][:, None])[0, 0],
    ),
    "addmm": addmm,
    "bmm": lambda call: batch_product(
        call, call.args[0], call.args[1], call.start.shape
    ),
    "baddbmm": baddbmm,
}


# Convolutions may have any number of dimensions, stride, padding, dilation and groups.
# As a function of its weight, a convolution is a matrix product of patches (one row for
# each output position) with the kernel. So each position is a use of the weight.


def convolution(call: Call) -> Tensor:
    """Return the difference of a convolution x ∗ W + b: Δx ∗ W̄ + x̄ ∗ ΔW + Δb."""
    x, kernel, bias, *how = call.args
    terms = []
    if x.delta is not None:  # Δx ∗ W̄
        terms.append(input_convolution(call, call.delta(x), call.mean(kernel), how))
    if call.is_use(kernel):
        added = bias if bias is not None and call.is_use(bias) else None
        terms.append(convolution_use(call, x, kernel, added, how))
        bias = None if added is not None else bias
    elif kernel.delta is not None:
        terms.append(torch.convolution(call.mean(x), kernel.delta, None, *how))
    if bias is not None and bias.delta is not None:
        along = [1, -1] + [1] * (call.start.dim() - 2)
        terms.append(call.delta(bias.view(lambda v: v.view(along)), call.start.shape))
    return sum_terms(terms, call.start.shape)


def input_convolution(
    call: Call, delta: Tensor, mean: Tensor, how: list[Any]
) -> Tensor:
    """Return Δx ∗ W̄. Its transpose may get many vectors along leading axes, and treats
    all of them as one batch of images."""
    lead = 1 - delta.dim()
    shape = delta.shape[1:]

    def linear(v: Tensor) -> Tensor:
        images = torch.convolution(v.flatten(0, lead - 1), mean, None, *how)
        return images.view(*v.shape[:lead], *images.shape[1:])

    def transpose(w: Tensor) -> Tensor:
        images: Tensor = CONVOLVE_BACK(w.flatten(0, lead - 1), shape, mean, *how)
        return images.view(*w.shape[:lead], *shape)

    shared = on_shared_vector(transpose, -delta.dim())
    zero_shape = call.start.shape if call.state.pullback_only else None
    return apply_linear(delta, linear, shared, zero_shape)


def convolution_use(
    call: Call, x: Ends, kernel: Ends, bias: Ends | None, how: list[Any]
) -> Tensor:
    """Return x̄ ∗ ΔW + Δb as a product of patches with the kernel ΔW, or as one product
    for each group. Record a use of W."""
    stride, padding, dilation, transposed, _, groups = how
    image = call.mean(x)
    size = kernel.start.shape[2:]
    # convert a transposed convolution to a plain one: spread the input, exchange input
    # and output channels, and reverse the window
    if transposed:
        image = spread_image(image, size, how)
        padding = (0,) * len(size)
        stride = (1,) * len(size)
        window = tuple(range(2, kernel.start.dim()))
        kernel = kernel.view(
            lambda v: (
                v.view(groups, -1, *v.shape[1:])
                .transpose(1, 2)
                .flatten(0, 1)
                .flip(window)
            )
        )
    rows = Window(image, size, stride, padding, dilation).rows
    if groups > 1:
        tap = call.grouped_use(rows, groups, kernel.view(lambda v: v.flatten(1)), bias)
    else:
        tap = call.product_use(rows, kernel.view(lambda v: v.flatten(1).t()), bias)
    return tap.view(call.start.shape)


def spread_image(image: Tensor, size: Sequence[int], how: list[Any]) -> Tensor:
    """Insert zeros between and around the pixels of the input of a transposed
    convolution with a window of this size."""
    stride, padding, dilation, _, extra, _ = how
    # zeros between the pixels
    apart = [(n - 1) * s + 1 for n, s in zip(image.shape[2:], stride, strict=True)]
    axes = [
        torch.arange(n, device=image.device) * s
        for n, s in zip(image.shape, (1, 1, *stride), strict=True)
    ]
    places = torch.meshgrid(*axes, indexing="ij")
    spread = image.new_zeros(*image.shape[:2], *apart).index_put(places, image)
    # zeros before and after each axis, the last axis first (as in `pad`)
    margins: list[int] = []
    for k in reversed(range(len(size))):
        margin = dilation[k] * (size[k] - 1) - padding[k]
        margins += [margin, margin + extra[k]]
    return torch.nn.functional.pad(spread, margins)


BILINEAR: dict[str, Rule] = {**NUMBER_PRODUCTS, **MATRICES, "convolution": convolution}
