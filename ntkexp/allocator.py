"""Settings of the C library's memory allocator.

glibc returns freed blocks above 32 MB to the operating system. The next large tensor
then gets new pages of memory, which the system first fills with zeros. Filling these
pages may take longer than the arithmetic on the tensor. The functions below change this
behaviour.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

LIBRARY = ctypes.CDLL(None)
LARGE_MODEL_BYTES = 1e8  # size of the weights of a large model
KEPT_BYTES = 2**28  # freed memory of allocations up to this size stays in the process
MMAP_THRESHOLD = -3  # option of mallopt
TRIM_THRESHOLD = -1  # option of mallopt
# upper limits of the values that glibc itself adapts
GLIBC_MAXIMA = {MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
# not empty inside `memory_kept`, so that nested uses do nothing
KEEPING: list[int] = []


@contextmanager
def memory_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Make the C library keep freed memory, because allocating new pages can take
    longer than the arithmetic.

    Do nothing for large models, or if the user has configured malloc.
    """
    set_option = getattr(LIBRARY, "mallopt", None)  # glibc only
    configured = {"MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if set_option is None or KEEPING or configured or is_large(tensors):
        yield
        return
    KEEPING.append(KEPT_BYTES)
    set_option(MMAP_THRESHOLD, KEPT_BYTES)
    set_option(TRIM_THRESHOLD, 4 * KEPT_BYTES)
    try:
        yield
    finally:
        KEEPING.clear()
        for option, value in GLIBC_MAXIMA.items():
            set_option(option, value)
        LIBRARY.malloc_trim(0)


def is_large(tensors: Iterable[Tensor]) -> bool:
    return sum(tensor.nbytes for tensor in tensors) > LARGE_MODEL_BYTES


def release_memory(tensors: Iterable[Tensor]) -> None:
    """Return freed memory to the operating system, if the model with these tensors is
    large.

    The C library keeps freed blocks smaller than 32 MB for later use. For a large
    model, these blocks add up to several times the size of the weights."""
    trim = getattr(LIBRARY, "malloc_trim", None)  # glibc only
    if trim is not None and is_large(tensors):
        gc.collect()
        trim(0)
