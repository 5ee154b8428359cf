"""Public functions that compute kernels of any `nn.Module`, without a run.

>>> import torch
>>> layer = torch.nn.Linear(2, 1, dtype=torch.float64)
>>> x = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64)
>>> tangent_kernel(layer, x)[:, 0, :, 0]
tensor([[ 6.,  7.],
        [ 7., 10.]], dtype=torch.float64)
"""

from __future__ import annotations

from ntkexp.library.infinite import infinite_kernel
from ntkexp.library.kernel_machine import KernelMachine
from ntkexp.library.module import reader_of
from ntkexp.library.secant import ascend, finite_step_kernel, secant_kernel
from ntkexp.library.tangent import tangent_kernel
from ntkexp.library.tangent_object import TangentKernel

__all__ = [
    "KernelMachine",
    "TangentKernel",
    "ascend",
    "finite_step_kernel",
    "infinite_kernel",
    "reader_of",
    "secant_kernel",
    "tangent_kernel",
]
