"""Bindings: functions of torch that run one operation each, and are called in half the time of the operation itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from ntkexp.kernel.record.convolve import convolve
from ntkexp.kernel.record.same import same

aten = torch.ops.aten

OF_TENSORS = """
    abs.default add.Tensor addcmul.default addmm.default any.default bmm.default cat.default clamp_min.default
    clone.default constant_pad_nd.default div.Tensor eq.Scalar erf.default exp.default gt.Scalar
    index_copy.default index_select.default le.Scalar lerp.Scalar lt.Scalar maximum.default mean.dim minimum.default
    mm.default mul.Tensor native_group_norm.default native_layer_norm.default neg.default permute.default
    pow.Tensor_Scalar relu.default rsqrt.default rsub.Scalar select.int sigmoid.default sign.default sqrt.default
    squeeze.dim stack.default sub.Tensor sum.dim_IntList t.default tanh.default transpose.int unsqueeze.default
    where.self
"""


def operation(name: str) -> OpOverload:
    """The operation of this name and overload."""
    packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(aten, packet), overload)
    return found


FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {
    operation(name): getattr(torch, name.split(".")[0]) for name in OF_TENSORS.split()
} | {aten.convolution.default: convolve, aten.equal.default: same}
METHODS: dict[OpOverload, str] = {
    aten.view.default: "view",
    aten._unsafe_view.default: "view",
    aten.expand.default: "expand",
}
