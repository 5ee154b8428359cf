"""The exact kernel of examples whose features would not fit: read some at a time, use by use, and multiplied out a
strip of a parameter at a time.

Of as many examples as fit on either side what was read is held, and their part of the kernel is whole; with more, the
others are read again for each such group.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.strips import Chunks, factors_kept, gram_by_strips, names, numbers
from ntkexp.kernel.features.use_by_use import UseByUse
from ntkexp.kernel.read.in_turns import InTurns

FITS = 2e9  # bytes of features, which are faster at once while they fit
TIMES = 3  # that rows are there while they are multiplied out, turned and added up


def kernel_by_strips(left: InTurns, right: InTurns) -> Float[Tensor, "probe out train out_"]:
    """The kernel of two sides, which may be one."""
    kernel: Tensor | None = None
    for k, group in enumerate(left.groups):
        rows, ones = left.chunks(group)
        for m, other in enumerate(right.groups):
            if left is right and m < k:
                continue
            columns, others = (rows, ones) if left is right and m == k else right.chunks(other)
            share = gram_by_strips(ones, others)
            if kernel is None:
                kernel = share.new_empty(left.examples, ones.outputs, right.examples, others.outputs)
            kernel[rows, :, columns] = share
            if left is right and m > k:
                kernel[columns, :, rows] = share.permute(2, 3, 0, 1)
    assert kernel is not None
    return kernel


def fits(some: UseByUse, probe: int, train: int) -> bool:
    """Whether the features of so many examples, and what is multiplied out of them, are small; `some` are like them."""
    one, bytes_each = Chunks([some]), numbers(some.parts[0]).element_size() if some.parts else 0
    factors = factors_kept(one, one, probe, train)
    kept = names(factors)
    rows = sum(size for name, size in one.sizes.items() if name not in kept) * (probe + train) * some.outputs
    made = max((size.numbers for size in factors.values()), default=0)
    held = some.nbytes / some.examples * (probe + train)
    return held + (TIMES * rows + made) * bytes_each <= FITS
