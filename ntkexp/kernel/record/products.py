"""Compute float32 products in full precision.

Torch may round the factors of a float32 product to TF32 (by default in convolutions on
a GPU) or to bfloat16. Both keep at most three of the seven digits of float32. A secant
would then not be exact, and a tangent kernel would have errors of 1e-3. So kernels are
computed with torch's settings for full precision. The precision is also measured,
because a device may ignore the settings, and a module may change them in its forward.

Torch has two interfaces for these settings. The older one raises an error if the two
disagree, so both are set:

    older    torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    newer    fp32_precision of each kind of product
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from ntkexp.mistake import Mistake

aten = torch.ops.aten

# --- Torch's settings.


SETTING_NAMES = (
    "cudnn.conv",
    "cudnn.rnn",
    "cuda.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
    "mkldnn.matmul",
)
MULTIPLYING = [attrgetter(name)(torch.backends) for name in SETTING_NAMES]
MatmulPrecision: TypeAlias = Literal["highest", "high", "medium"]


@dataclass(frozen=True)
class Precisions:
    """Torch's settings for products of float32 numbers.

    `by_kind` belongs to the newer interface, and the other fields to the older one. If
    the user has set only the newer interface, torch cannot report a setting of the
    older one. The field is then None, and the setting stays unchanged."""

    by_kind: tuple[str, ...]
    allow_tf32: bool | None
    matmul: MatmulPrecision | None


def precisions_by_kind() -> tuple[str, ...]:
    return tuple([kind.fp32_precision for kind in MULTIPLYING])


def current_precisions() -> Precisions:
    allow_tf32: bool | None = None
    matmul: MatmulPrecision | None = None
    with suppress(RuntimeError):
        allow_tf32 = torch.backends.cudnn.allow_tf32
    with suppress(RuntimeError):
        matmul = cast(MatmulPrecision, torch.get_float32_matmul_precision())
    return Precisions(precisions_by_kind(), allow_tf32, matmul)


def set_precisions(precisions: Precisions) -> None:
    # The older interface comes first, because it overwrites the newer settings
    if precisions.allow_tf32 is not None:
        torch.backends.cudnn.allow_tf32 = precisions.allow_tf32
    if precisions.matmul is not None:
        torch.set_float32_matmul_precision(precisions.matmul)
    for kind, precision in zip(MULTIPLYING, precisions.by_kind, strict=True):
        kind.fp32_precision = precision


def keep_full_precision() -> Precisions:
    """Set full precision for all float32 products. Return the previous settings."""
    before = current_precisions()
    allow_tf32 = None if before.allow_tf32 is None else False
    matmul: MatmulPrecision | None = None if before.matmul is None else "highest"
    set_precisions(Precisions(("ieee",) * len(MULTIPLYING), allow_tf32, matmul))
    return before


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products in full precision inside the context.
    Then restore the settings.

    >>> with full_precision():
    ...     torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32
    ('ieee', False)
    """
    before = keep_full_precision()
    try:
        yield
    finally:
        set_precisions(before)


# --- A test of the precision. Multiply a matrix A, whose elements need 13 bits, by the
# identity. The product equals A if the factors keep the 24 bits of float32, in any order
# of summation. TF32 keeps 11 bits, and bfloat16 keeps 8.


SIDE = 16
# the elements 2¹⁶(1 + 2⁻¹²) of A. A product is rounded to integers, so relative errors
# below 2⁻¹⁷ do not count: errors of convolutions by Fourier transforms are far below
# this bound, and errors of TF32 are above it.
ELEMENT = 2.0**16 + 2.0**4

SHORTENED_PRODUCTS: Mapping[OpOverload, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    aten.mm.default: lambda a, one: (a, one),
    aten.addmm.default: lambda a, one: (torch.zeros_like(a), a, one),
    aten.bmm.default: lambda a, one: (a[None], one[None]),
    aten.baddbmm.default: lambda a, one: (
        torch.zeros_like(a)[None],
        a[None],
        one[None],
    ),
    aten.linear.default: lambda a, one: (a, one),
    aten.convolution.default: lambda a, one: (
        a[:, :, None],
        one[:, :, None],
        None,
        [1],
        [0],
        [1],
        False,
        [0],
        1,
    ),
}
"""The operations that torch may compute in lower precision. Each value is a
function of A and the identity matrix. It returns the arguments with which the operation
computes the product of these matrices."""


@torch.no_grad()
def shortened(operations: Iterable[OpOverload], device: torch.device) -> str | None:
    """Return the name of the first operation that the device computes in less than
    float32 precision at torch's current settings, or None."""
    matrix = torch.full((SIDE, SIDE), ELEMENT, dtype=torch.float32, device=device)
    one = torch.eye(SIDE, dtype=torch.float32, device=device)
    for operation in operations:
        product = operation(*SHORTENED_PRODUCTS[operation](matrix, one))
        if not torch.equal(product.reshape(SIDE, SIDE).round_(), matrix):
            return operation._schema.name
    return None


def refuse_rounded_products(values: Mapping[str, Tensor]) -> None:
    """Raise Mistake if the device of one of the tensors computes float32 products in
    lower precision, although torch is set to full precision."""
    for device in {
        value.device
        for value in values.values()
        if value.dtype == torch.float32 and not value.is_meta
    }:
        if operation := shortened(SHORTENED_PRODUCTS, device):
            raise Mistake(
                f"the device {device} computes float32 products ({operation}) in lower "
                "precision, such as TF32, so a kernel would have errors of 1e-3; give "
                "module.double(), or compute on another device"
            )


def refuse_shorter_products(
    operation: OpOverload, product: Tensor, before: tuple[str, ...]
) -> None:
    """Raise Mistake if the module has changed torch's settings since `before`, and has
    computed a float32 product in lower precision."""
    if product.dtype != torch.float32 or precisions_by_kind() == before:
        return
    if shortened([operation], product.device):
        raise Mistake(
            f"the module lets torch compute float32 products ({operation._schema.name}) "
            "in TF32 or bfloat16, so a kernel would have errors of 1e-3; do not change "
            "torch.backends or the matmul precision in its forward (cudnn.flags allows "
            "TF32 unless allow_tf32=False), or give module.double()"
        )
