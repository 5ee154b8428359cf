"""Memory: whether an exception says that none is left.

Several ways lead to a kernel, and where torch cannot go one it is asked to go another. A lack of memory is no such
reason: which numbers come out must not depend on how much of it others took.
"""

from __future__ import annotations

import torch

SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python's or of torch's tells of a lack of memory.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), is_out_of_memory(MemoryError())
    (True, True)
    >>> is_out_of_memory(RuntimeError("shapes differ"))
    False
    """
    known = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS))
