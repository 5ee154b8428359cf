"""Functions of one number without a closed form for their slope, on their domains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernel.samples.base import Sample, inside, positive


def on(domain: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> Sample:
    """The function where it is defined."""
    return lambda h, k: function(domain(h))


def anywhere(h: Tensor) -> Tensor:
    return h


def above_one(h: Tensor) -> Tensor:
    return 1 + positive(h)


CURVED: dict[str, Sample] = {
    "_prelu_kernel": on(anywhere, lambda z: functional.prelu(z, torch.linspace(-1, 2, 6, dtype=z.dtype))),
    "acos": on(inside, torch.acos),
    "acosh": on(above_one, torch.acosh),
    "asin": on(inside, torch.asin),
    "asinh": on(anywhere, torch.asinh),
    "atan": on(anywhere, torch.atan),
    "atanh": on(inside, torch.atanh),
    "ceil": lambda h, k: h.ceil() * k,
    "celu": on(anywhere, lambda z: functional.celu(z, 0.5)),
    "clamp": lambda h, k: h.clamp(-0.5, 0.7) + h.clamp(-k.abs(), k.abs()) + k.clamp(max=h[:, :1]),
    "clamp_max": lambda h, k: h.clamp_max(0.5) + h.clamp_max(k),
    "clamp_min": lambda h, k: h.clamp_min(0.5) + h.clamp_min(k) + k.clamp_min(torch.zeros(6, dtype=h.dtype)),
    "cosh": on(anywhere, torch.cosh),
    "elu": on(anywhere, lambda z: functional.elu(z) + functional.selu(z)),
    "erfc": on(anywhere, torch.erfc),
    "erfinv": on(inside, torch.erfinv),
    "exp2": on(anywhere, torch.exp2),
    "expm1": on(anywhere, torch.expm1),
    "floor": lambda h, k: h.floor() * k,
    "frac": on(anywhere, torch.frac),
    "hardshrink": on(anywhere, functional.hardshrink),
    "hardsigmoid": on(anywhere, functional.hardsigmoid),
    "hardswish": on(anywhere, functional.hardswish),
    "hardtanh": on(anywhere, functional.hardtanh),
    "i0": on(anywhere, torch.i0),
    "lgamma": on(positive, torch.lgamma),
    "log10": on(positive, torch.log10),
    "log1p": on(positive, torch.log1p),
    "log2": on(positive, torch.log2),
    "log_sigmoid_forward": on(anywhere, functional.logsigmoid),
    "logit": on(lambda h: 0.5 + inside(h) / 2, lambda z: torch.logit(z) + torch.logit(2 * z - 0.5, eps=0.1)),
    "mish": on(anywhere, functional.mish),
    "nan_to_num": on(anywhere, torch.nan_to_num),
    "round": lambda h, k: h.round() * k,
    "sgn": lambda h, k: h.sgn() * k,
    "sign": lambda h, k: h.sign() * k,
    "sinc": on(anywhere, torch.sinc),
    "sinh": on(anywhere, torch.sinh),
    "softplus": on(anywhere, lambda z: functional.softplus(z, 1.5) + functional.softplus(z, 3.0, threshold=1.0)),
    "softshrink": on(anywhere, lambda z: functional.softshrink(z, 0.3)),
    "special_erfcx": on(anywhere, torch.special.erfcx),
    "special_i0e": on(anywhere, torch.special.i0e),
    "special_i1": on(anywhere, torch.special.i1),
    "special_i1e": on(anywhere, torch.special.i1e),
    "special_log_ndtr": on(anywhere, torch.special.log_ndtr),
    "special_ndtri": on(lambda h: 0.5 + inside(h) / 2, torch.special.ndtri),
    "tan": on(inside, torch.tan),
    "threshold": on(anywhere, lambda z: functional.threshold(z, 0.1, 2.0)),
    "trunc": lambda h, k: h.trunc() * k,
}
