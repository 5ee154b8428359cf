"""Operations of complex numbers, with real outputs: those of real numbers that go alike, and their own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fft
from torch.nn import functional

from ntkexp.kernel.secant.rules.complex_numbers import ALIKE
from tests.kernel.samples.arranged import ARRANGED
from tests.kernel.samples.base import Sample, positive, square
from tests.kernel.samples.plain import PLAIN


def parts(z: Tensor) -> Tensor:
    """As real numbers."""
    return torch.view_as_real(z)


def number(h: Tensor, k: Tensor) -> Tensor:
    """A complex number for each pair."""
    return torch.complex(h, k)


def lifted(sample: Sample, h: Tensor, k: Tensor) -> Tensor:
    """The same with two complex numbers."""
    return parts(sample(number(h, k), number(k, h * h)))


def apart(h: Tensor, k: Tensor) -> Tensor:
    """Numbers that stay away from zero, where angles have no slope, and from its left, where they jump."""
    return number(positive(h), k)


def written(h: Tensor, k: Tensor) -> Tensor:
    """Into a part of the numbers, and seen by their parts."""
    z = torch.zeros(len(h), 6, dtype=torch.complex128)
    z[:, :4] = fft.rfft(h)
    z[:, 5] = number(k, h)[:, 0]
    return parts(z) * parts(z * number(h, k))


def products(h: Tensor, k: Tensor) -> Tensor:
    """Of matrices, one of them constant."""
    fixed = torch.arange(12.0, dtype=h.dtype).view(6, 2)
    weight = number(fixed, fixed.flip(0)).mT.conj()
    return parts(functional.linear(number(h, k), weight, weight[:, 0]))


def transformed(h: Tensor, k: Tensor) -> Tensor:
    """To frequencies and back, by a gain."""
    found: Tensor = fft.irfft(fft.rfft(h) * fft.rfft(k), n=6)
    return found


OWN: dict[str, Sample] = {
    "_conj": lambda h, k: parts(number(h, k).conj() * number(k, h)),
    "_fft_c2c": lambda h, k: parts(fft.ifft2(fft.fft2(number(h, k).view(-1, 2, 3)) * 1j)),
    "_fft_c2r": transformed,
    "_fft_r2c": lambda h, k: torch.cat([fft.rfft(h).real, fft.rfft(k).imag], 1),
    "_to_copy": lambda h, k: parts(h.to(torch.complex128) * number(k, h)),
    "abs": lambda h, k: number(h, k).abs() * k,
    "addcdiv": lambda h, k: parts(torch.addcdiv(number(h, k), number(k, h), apart(h, k), value=0.3)),
    "addcmul": lambda h, k: parts(torch.addcmul(number(h, k), number(k, h), number(k, k), value=0.3)),
    "addmm": products,
    "angle": lambda h, k: apart(h, k).angle(),
    "bmm": lambda h, k: parts(square(number(h, k)) @ square(number(k, h)).mH),
    "complex": lambda h, k: parts(number(h, k[:, :1]) + number(torch.ones(6, dtype=h.dtype), k)),
    "_conj_physical": lambda h, k: parts(number(h, k).conj_physical()),
    "_unsafe_view": lambda h, k: parts(square(number(h, k)).mT.reshape(len(h), 6)),
    "detach": lambda h, k: parts(number(h, k).clone().exp_()),
    "diagonal_scatter": lambda h, k: parts(torch.diagonal_scatter(square(number(h, k)), number(k, h)[:, :2], 0, 1, 2)),
    "div": lambda h, k: parts(number(h, k) / apart(h, k) + h / apart(k, h)),
    "dot": lambda h, k: torch.stack([parts(torch.dot(*pair)) for pair in zip(number(h, k), number(k, h), strict=True)]),
    "exp": lambda h, k: parts(number(h, k).exp()),
    "index_copy": written,
    "index_put": lambda h, k: parts(
        number(h, k).index_put((torch.tensor([[n] for n in range(len(h))]), torch.tensor([3, 1])), number(k, h)[:, :2])
    ),
    "masked_fill": lambda h, k: parts(number(h, k).masked_fill(torch.arange(6) > 2, 2.0)),
    "mm": lambda h, k: parts(number(h, k) @ number(torch.eye(6, dtype=h.dtype), torch.ones(6, 6, dtype=h.dtype))),
    "mul": lambda h, k: parts(number(h, k) * number(k, h)[:, :1] * k),
    "mv": lambda h, k: parts(number(h, k) @ number(torch.ones(6, dtype=h.dtype), torch.arange(6.0, dtype=h.dtype))),
    "polar": lambda h, k: parts(torch.polar(positive(h), k) + torch.polar(torch.ones_like(h), h)),
    "pow": lambda h, k: parts(number(h, k) ** 3 + number(k, h).square()),
    "reciprocal": lambda h, k: parts(apart(h, k).reciprocal()),
    "reshape": written,
    "select_scatter": written,
    "sgn": lambda h, k: parts(apart(h, k).sgn()),
    "slice_scatter": written,
    "view_as_complex": lambda h, k: torch.view_as_complex(h.view(-1, 3, 2)).abs(),
    "view_as_real": lambda h, k: parts(number(h, k)),
    "where": lambda h, k: parts(torch.where(h > 0, number(h, k), 1j * h)),
}
COMPLEX_SAMPLES: dict[str, Sample] = {
    **{name: partial(lifted, (PLAIN | ARRANGED)[name]) for name in ALIKE.split()},
    **OWN,
}
