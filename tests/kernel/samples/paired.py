"""Functions of two numbers, element by element; losses; norms of other orders, and distances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from tests.kernel.samples.base import Sample, positive, square


def norms(h: Tensor, k: Tensor) -> Tensor:
    """By sums of powers, and by the largest and smallest."""
    orders = (1, 3, 0.5, inf, -inf)
    return torch.stack([torch.linalg.vector_norm(h, order, dim=1) for order in orders], 1) * k[:, :5]


def distances(h: Tensor, k: Tensor) -> Tensor:
    """Between two rows and two others, one of them the same."""
    rows = torch.cat([square(h)[:, :1], square(k)[:, :1]], 1)
    return torch.cat([torch.cdist(square(h), rows, p=p) for p in (2.0, 1.0, inf)], 1)


def powers(h: Tensor, k: Tensor) -> Tensor:
    """Exponents that are numbers, of either sign and whole or not; constants; and weights."""
    below = (1 - positive(h)) * 0.1 - 1
    numbers = [h**3, h**0, below**-2, below**-3, *(positive(h) ** p for p in (-1.0, 0.5, -0.5, 1.5, -0.3))]
    exponents = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 4.0], dtype=h.dtype)
    return torch.stack([positive(h) ** k, 2**h, positive(k) ** exponents, below**exponents, *numbers], 1)


def losses(loss: Callable[..., Tensor], h: Tensor, k: Tensor) -> Tensor:
    own = [loss(a, b, reduction=how) for a, b in zip(h, k, strict=True) for how in ("mean", "sum")]
    return torch.cat([loss(h, k, reduction="none"), torch.stack(own).view(-1, 2)], 1)


def weighted(h: Tensor) -> Tensor:
    """An entropy whose labels and places weigh more or less."""
    weight, positive = torch.arange(1.0, 7.0, dtype=h.dtype), torch.arange(6.0, 0.0, -1.0, dtype=h.dtype)
    return functional.binary_cross_entropy_with_logits(
        h, torch.full_like(h, 0.3), weight, pos_weight=positive, reduction="none"
    )


PAIRED: dict[str, Sample] = {
    "_cdist_forward": distances,
    "addcdiv": lambda h, k: torch.addcdiv(h, k, positive(h)[:, :1], value=0.3) + torch.addcdiv(k, h, positive(k)),
    "atan2": lambda h, k: torch.atan2(h, k) + torch.atan2(k, torch.arange(6, dtype=h.dtype) - 2.5),
    "binary_cross_entropy": lambda h, k: losses(functional.binary_cross_entropy, h.sigmoid(), k.sigmoid()),
    "binary_cross_entropy_with_logits": lambda h, k: (
        losses(functional.binary_cross_entropy_with_logits, h, k.sigmoid()).sum(1, keepdim=True) + weighted(h)
    ),
    "copysign": lambda h, k: torch.copysign(h, k) + torch.copysign(k, torch.tensor(-1.0)),
    "fmax": lambda h, k: torch.fmax(h, k[:, :1]) + torch.fmax(h, h * 1.0),
    "fmin": lambda h, k: torch.fmin(h, k[:, :1]) + torch.fmin(h, h * 1.0),
    "fmod": lambda h, k: torch.fmod(h, 0.7) + torch.fmod(k, positive(h)),
    "glu": lambda h, k: functional.glu(h) * functional.glu(k),
    "huber_loss": lambda h, k: losses(partial(functional.huber_loss, delta=0.7), h, k),
    "hypot": lambda h, k: torch.hypot(h, k[:, :1]) + torch.hypot(k, torch.tensor(0.3, dtype=h.dtype)),
    "ldexp": torch.ldexp,
    "lerp": lambda h, k: (
        torch.lerp(h, k, 0.3) + torch.lerp(h, k[:, :1], h * k) + torch.lerp(h, torch.ones_like(h), 2.0)
    ),
    "linalg_cross": lambda h, k: torch.linalg.cross(square(h), square(k)[:, :1]),
    "linalg_vector_norm": lambda h, k: (
        torch.linalg.vector_norm(h, dim=1, keepdim=True) * k + norms(h, k).sum(1, keepdim=True)
    ),
    "logaddexp": lambda h, k: torch.logaddexp(h, k[:, :1]) + torch.logaddexp(k, torch.tensor(50.0, dtype=h.dtype)),
    "logaddexp2": lambda h, k: torch.logaddexp2(h, k[:, :1]),
    "mse_loss": lambda h, k: losses(functional.mse_loss, h, k),
    "nll_loss2d_forward": lambda h, k: functional.nll_loss(
        h.view(len(h), 3, 1, 2), torch.tensor([[2, 0]]).repeat(len(h), 1, 1), reduction="none"
    ),
    "nll_loss_forward": lambda h, k: (
        functional.cross_entropy(h, torch.full((len(h),), 2), reduction="none")[:, None] * k
    ),
    "pow": powers,
    "prod": lambda h, k: torch.cat(
        [square(h).prod(2), h.prod(1, keepdim=True), torch.stack([r.prod() for r in k])[:, None]], 1
    ),
    "remainder": lambda h, k: torch.remainder(h, 0.7) + torch.remainder(k, positive(h)),
    "smooth_l1_loss": lambda h, k: losses(partial(functional.smooth_l1_loss, beta=0.7), h, k),
    "special_xlog1py": lambda h, k: torch.special.xlog1py(h, positive(k)),
    "std": lambda h, k: h.std(1, keepdim=True) * k + square(k).std(2, correction=0).sum(1, keepdim=True),
    "std_mean": lambda h, k: torch.cat(torch.std_mean(square(h), 2), 1),
    "vdot": lambda h, k: torch.stack([torch.vdot(a, b) for a, b in zip(h, k, strict=True)]),
    "xlogy": lambda h, k: torch.xlogy(h, positive(k)) + torch.xlogy(2.0, positive(h)),
}
