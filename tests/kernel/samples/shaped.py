"""Linear operations: rearrangements, pooling by means, interpolation, writes by index."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import torch
from torch import Tensor, fft, linalg, nn
from torch.nn import functional

from ntkexp.kernel.secant.rules.complex_numbers import SAME_FOR_COMPLEX
from tests.kernel.samples.base import PLAIN, Sample, image, positive, square, volume, whole


def resized(h: Tensor, k: Tensor, *, dims: int, mode: str, **how: bool) -> Tensor:
    shape = {1: h[:, None], 2: image(h), 3: volume(h)}[dims]
    return functional.interpolate(shape, scale_factor=2, mode=mode, **how)


def bordered(h: Tensor, k: Tensor, *, dims: int, mode: str) -> Tensor:
    """Pad with a border that repeats pixels."""
    shape, widths = {1: (h[:, None], (2, 1)), 2: (image(h), (2, 1, 1, 0)), 3: (volume(h), (2, 1, 1, 0, 0, 0))}[dims]
    return functional.pad(shape, widths, mode=mode)


def places(dims: int, h: Tensor) -> Tensor:
    """Return positions in a picture, equal for all examples."""
    return (
        torch.linspace(-0.9, 0.8, 2 * dims, dtype=h.dtype)
        .view(1, *[1] * (dims - 1), 2, dims)
        .repeat(len(h), *[1] * (dims + 1))
    )


def diagonal_blocks(a: Tensor, b: Tensor) -> Tensor:
    """Return a matrix with two blocks along the diagonal."""
    found: Tensor = torch.block_diag(a[:2], b[:2])  # type: ignore[no-untyped-call]  # torch's own
    return found


def bags(h: Tensor, k: Tensor) -> Tensor:
    """Sum or average the embeddings of two rows for each example. A row occurs twice, and another is padding."""
    table, index = torch.cat([h.new_ones(1, 3), h.reshape(-1, 3)]), 2 * torch.arange(len(h))[:, None] + whole(1, 2, 1)
    gained = functional.embedding_bag(index, table, mode="sum", per_sample_weights=k[:, :3])
    starts = (3 * torch.arange(len(h))[:, None] + whole(0, 1)).flatten()
    ragged = functional.embedding_bag(index.flatten(), table, starts, mode="mean").view(len(h), 6)
    return torch.cat([gained, ragged, functional.embedding_bag(index * whole(1, 1, 0), table, padding_idx=0)], 1)


def sampled(h: Tensor, k: Tensor, mode: str) -> Tensor:
    """Sample a picture at variable positions, also beyond its border, with each kind of padding."""
    at = torch.stack([k, h.flip(1)], 2)[:, None]
    padded = [
        functional.grid_sample(image(h), at, mode, padding_mode=padding, align_corners=corners)
        for padding in ("zeros", "border", "reflection")
        for corners in (False, True)
    ]
    return torch.cat(padded, 1)


def sampled_volume(h: Tensor, k: Tensor) -> Tensor:
    at = torch.cat([h, k, h * k], 1).view(len(h), 1, 1, 6, 3)
    padded = [
        functional.grid_sample(volume(k), at, padding_mode=padding, align_corners=corners)
        for padding, corners in (("zeros", False), ("border", True), ("reflection", False))
    ]
    return torch.cat([*padded, functional.grid_sample(volume(h), places(3, h), align_corners=True).tile(3)], 1)


def at_places(h: Tensor, k: Tensor) -> Tensor:
    """Sample a picture at variable positions, and at constant positions with each mode."""
    fixed = [functional.grid_sample(image(h), places(2, h), mode, align_corners=False) for mode in MODES]
    return torch.cat([sampled(h, k, "bilinear").flatten(1), torch.cat(fixed, 1).flatten(1)], 1)


def extremes(h: Tensor, k: Tensor) -> Tensor:
    """Reduce several numbers by maximum and minimum, with and without the target. Some numbers are equal."""
    values = torch.cat([k, k.relu()], 1)
    at = columns(h, 3, 0, 3, 1, 1, 0, 5, 5, 3, 5, 0, 1)
    reduced = [
        h.scatter_reduce(1, at, values, how, include_self=included)
        for how in ("amax", "amin")
        for included in (False, True)
    ]
    return torch.cat(reduced, 1)


def packed(h: Tensor, k: Tensor) -> Tensor:
    """Pack sequences of length two out of three from both layouts, and pad them again."""
    lengths = torch.full((len(h),), 2)
    rows = nn.utils.rnn.pack_padded_sequence(h.view(-1, 3, 2) * k.view(-1, 3, 2), lengths, batch_first=True)
    late = nn.utils.rnn.pack_padded_sequence(k.view(-1, 3, 2).transpose(0, 1), lengths)
    both = rows._replace(data=rows.data * late.data)
    return nn.utils.rnn.pad_packed_sequence(both, batch_first=True, total_length=4)[0]


def columns(h: Tensor, *numbers: int) -> Tensor:
    return whole(*numbers).expand(len(h), -1)


MODES = ("bilinear", "nearest", "bicubic")
ARRANGED: dict[str, Sample] = {
    "_adaptive_avg_pool2d": lambda h, k: functional.adaptive_avg_pool2d(image(h), (1, 2)),
    "_adaptive_avg_pool3d": lambda h, k: functional.adaptive_avg_pool3d(volume(h), (1, 1, 2)),
    "_embedding_bag": bags,
    "_pack_padded_sequence": packed,
    "_neg_view": lambda h, k: torch.complex(h, k).conj().imag * h,
    "_to_copy": lambda h, k: h.to(torch.float64, copy=True) * k,
    "_upsample_bicubic2d_aa": partial(resized, dims=2, mode="bicubic", antialias=True),
    "_upsample_bilinear2d_aa": partial(resized, dims=2, mode="bilinear", antialias=True),
    "_upsample_nearest_exact1d": partial(resized, dims=1, mode="nearest-exact"),
    "_upsample_nearest_exact2d": partial(resized, dims=2, mode="nearest-exact"),
    "_upsample_nearest_exact3d": partial(resized, dims=3, mode="nearest-exact"),
    "affine_grid_generator": lambda h, k: functional.affine_grid(square(h), [len(h), 1, 2, 2], align_corners=False),
    "as_strided": lambda h, k: (h.t() * k.t()).as_strided((len(h), 2), (6, 2), 1),
    "avg_pool2d": lambda h, k: functional.avg_pool2d(image(h), 2, stride=1),
    "avg_pool3d": lambda h, k: functional.avg_pool3d(volume(h), (1, 2, 2), stride=1),
    "block_diag": lambda h, k: torch.stack([diagonal_blocks(*pair) for pair in zip(h, k, strict=True)]),
    "channel_shuffle": lambda h, k: functional.channel_shuffle(h[:, :, None, None], 2),
    "col2im": lambda h, k: functional.fold(square(h), (1, 4), (1, 2)),
    "deg2rad": lambda h, k: torch.deg2rad(h),
    "diag_embed": lambda h, k: torch.diag_embed(h),
    "diagonal_scatter": lambda h, k: torch.diagonal_scatter(square(h), k[:, :2], 0, 1, 2),
    "embedding": lambda h, k: functional.embedding(torch.arange(h.numel()).view(h.shape).flip(1), h.reshape(-1, 1)),
    "empty_like": lambda h, k: torch.empty_like(h).fill_(3.0) * k,
    "gather": lambda h, k: h.gather(1, columns(h, 3, 0, 3)),
    "grid_sampler_2d": at_places,
    "grid_sampler_3d": lambda h, k: sampled_volume(h, k).flatten(1),
    "im2col": lambda h, k: functional.unfold(image(h), (2, 2)),
    "index": lambda h, k: h[:, whole(3, 0, 3)],
    "index_add": lambda h, k: torch.index_add(h, 1, whole(3, 0, 3), k[:, :3], alpha=2.0),
    "index_copy": lambda h, k: torch.index_copy(h, 1, whole(3, 0), k[:, :2]),
    "index_fill": lambda h, k: h.index_fill(1, whole(3, 0), 2.0) * k.index_fill(1, whole(1), torch.tensor(3.0)),
    "index_select": lambda h, k: h.index_select(1, whole(3, 0, 3)),
    "masked_scatter": lambda h, k: h.masked_scatter(torch.arange(6) > 2, k[:, 3:].clone()),
    "masked_select": lambda h, k: h.masked_select(torch.arange(6) > 2).view(len(h), 3),
    "max_unpool2d": lambda h, k: functional.max_unpool2d(
        image(h), torch.arange(6).view(1, 1, 2, 3).repeat(len(h), 1, 1, 1), [2, 2]
    ),
    "max_unpool3d": lambda h, k: functional.max_unpool3d(
        volume(h), 2 * torch.arange(6).view(1, 1, 1, 2, 3).repeat(len(h), 1, 1, 1, 1), [1, 2, 1], output_size=[1, 4, 3]
    ),
    "nansum": lambda h, k: h.nansum(1),
    "new_empty": lambda h, k: h.new_empty(h.shape).fill_(3.0) * k,
    "new_empty_strided": lambda h, k: h.new_empty_strided(h.shape, h.stride()).fill_(3.0) * k,
    "pixel_shuffle": lambda h, k: functional.pixel_shuffle(torch.cat([h, k[:, :2]], 1).view(len(h), 4, 1, 2), 2),
    "pixel_unshuffle": lambda h, k: functional.pixel_unshuffle(torch.cat([h, k[:, :2]], 1).view(len(h), 1, 4, 2), 2),
    "rad2deg": lambda h, k: torch.rad2deg(h),
    "reflection_pad1d": partial(bordered, dims=1, mode="reflect"),
    "reflection_pad2d": partial(bordered, dims=2, mode="reflect"),
    "reflection_pad3d": partial(bordered, dims=3, mode="reflect"),
    "replication_pad1d": partial(bordered, dims=1, mode="replicate"),
    "replication_pad2d": partial(bordered, dims=2, mode="replicate"),
    "replication_pad3d": partial(bordered, dims=3, mode="replicate"),
    "reshape": lambda h, k: functional.rms_norm(h, (6,)),
    "rot90": lambda h, k: torch.rot90(square(h), 1, (1, 2)),
    "scatter": lambda h, k: h.scatter(1, columns(h, 3, 0), k[:, :2]) * h.scatter(1, columns(h, 2), 3.0),
    "scatter_add": lambda h, k: h.scatter_add(1, columns(h, 3, 0, 3), k[:, :3]),
    "scatter_reduce": lambda h, k: torch.cat(
        [*(h.scatter_reduce(1, columns(h, 3, 0, 3), k[:, :3], how) for how in ("sum", "mean")), extremes(h, k)], 1
    ),
    "split": lambda h, k: torch.mul(*torch.split(h, 3, 1)),
    "split_with_sizes": lambda h, k: torch.mul(*torch.split(h, [5, 1], 1)),
    "take": lambda h, k: torch.take(h, torch.arange(h.numel()).view(h.shape).flip(1)),
    "trace": lambda h, k: torch.stack([torch.trace(part) for part in square(h)]),
    "unbind": lambda h, k: torch.mul(*square(h).unbind(1)),
    "unfold": lambda h, k: h.unfold(1, 3, 2),
    "unfold_backward": lambda h, k: torch.ops.aten.unfold_backward(square(h), [len(h), 5], 1, 3, 2),
    "unsafe_split": lambda h, k: torch.mul(*torch.unsafe_split(h, 3, 1)),
    "unsafe_split_with_sizes": lambda h, k: torch.mul(*torch.unsafe_split_with_sizes(h, [5, 1], 1)),
    "upsample_bicubic2d": partial(resized, dims=2, mode="bicubic"),
    "upsample_bilinear2d": partial(resized, dims=2, mode="bilinear"),
    "upsample_linear1d": partial(resized, dims=1, mode="linear"),
    "upsample_nearest1d": partial(resized, dims=1, mode="nearest"),
    "upsample_nearest2d": partial(resized, dims=2, mode="nearest"),
    "upsample_nearest3d": partial(resized, dims=3, mode="nearest"),
    "upsample_trilinear3d": partial(resized, dims=3, mode="trilinear"),
}


# Functions of two numbers, element by element; losses; norms of other orders, and distances.


def norms(h: Tensor, k: Tensor) -> Tensor:
    """Return norms of several orders, also infinite ones."""
    orders = (1, 3, 0.5, inf, -inf)
    return torch.stack([torch.linalg.vector_norm(h, order, dim=1) for order in orders], 1) * k[:, :5]


def distances(h: Tensor, k: Tensor) -> Tensor:
    """Return distances between two rows and two other rows, one of which is equal."""
    rows = torch.cat([square(h)[:, :1], square(k)[:, :1]], 1)
    return torch.cat([torch.cdist(square(h), rows, p=p) for p in (2.0, 1.0, inf)], 1)


def powers(h: Tensor, k: Tensor) -> Tensor:
    """Return powers with variable and constant exponents: positive and negative, integers and fractions."""
    below = (1 - positive(h)) * 0.1 - 1
    numbers = [h**3, h**0, below**-2, below**-3, *(positive(h) ** p for p in (-1.0, 0.5, -0.5, 1.5, -0.3))]
    exponents = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 4.0], dtype=h.dtype)
    return torch.stack([positive(h) ** k, 2**h, positive(k) ** exponents, below**exponents, *numbers], 1)


def losses(loss: Callable[..., Tensor], h: Tensor, k: Tensor) -> Tensor:
    own = [loss(a, b, reduction=how) for a, b in zip(h, k, strict=True) for how in ("mean", "sum")]
    return torch.cat([loss(h, k, reduction="none"), torch.stack(own).view(-1, 2)], 1)


def weighted(h: Tensor) -> Tensor:
    """Return a cross-entropy with weights of positions and of positive labels."""
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
    "nll_loss2d_forward": lambda h, k: functional.cross_entropy(
        h.view(len(h), 1, 2, 3).movedim(3, 1),  # as the logits of a text lie
        torch.tensor([[2, 0]]).repeat(len(h), 1, 1),
        reduction="none",
    ),
    "nll_loss_forward": lambda h, k: (
        functional.cross_entropy(h, torch.full((len(h),), 2), reduction="none")[:, None] * k
    ),
    "pow": powers,
    "cumprod": lambda h, k: torch.cat([square(h).cumprod(1).flatten(1), k.cumprod(-1)], 1),
    "prod": lambda h, k: torch.cat(
        [square(h).prod(1), h.prod(1, keepdim=True), torch.stack([r.prod() for r in k])[:, None]], 1
    ),
    "remainder": lambda h, k: torch.remainder(h, 0.7) + torch.remainder(k, positive(h)),
    "smooth_l1_loss": lambda h, k: losses(partial(functional.smooth_l1_loss, beta=0.7), h, k),
    "special_xlog1py": lambda h, k: torch.special.xlog1py(h, positive(k)),
    "std": lambda h, k: h.std(1, keepdim=True) * k + square(k).std(2, correction=0).sum(1, keepdim=True),
    "std_mean": lambda h, k: torch.cat(torch.std_mean(square(h), 2), 1),
    "vdot": lambda h, k: torch.stack([torch.vdot(a, b) for a, b in zip(h, k, strict=True)]),
    "xlogy": lambda h, k: torch.xlogy(h, positive(k)) + torch.xlogy(2.0, positive(h)),
}


# Functions of matrices that stay regular during a step.


def matrix(h: Tensor, k: Tensor) -> Tensor:
    """Return a 3 × 3 matrix for each example."""
    return torch.cat([h, k[:, :3]], 1).view(len(h), 3, 3)


def tall(h: Tensor, k: Tensor) -> Tensor:
    """Return a 4 × 3 matrix for each example."""
    return torch.cat([h, k], 1).view(len(h), 4, 3)


def diagonal(size: float, rows: int = 3, columns: int = 3) -> Tensor:
    """Return a matrix with one number on its diagonal."""
    return size * torch.eye(rows, columns, dtype=torch.float64)


def regular(h: Tensor, k: Tensor) -> Tensor:
    """Return a diagonally dominant matrix."""
    return matrix(h, k).tanh() + diagonal(4.0).to(h)


def definite(h: Tensor, k: Tensor) -> Tensor:
    """Return a positive definite matrix."""
    return matrix(h, k) @ matrix(h, k).mT / 3 + diagonal(1.0).to(h)


def triangles(h: Tensor, k: Tensor) -> Tensor:
    """Solve triangular systems from the left, and from the right with a unit diagonal."""
    lower = linalg.solve_triangular(regular(h, k), square(k).mT, upper=False)
    upper = linalg.solve_triangular(matrix(h, k).tanh(), square(h), upper=True, unitriangular=True, left=False)
    return torch.cat([lower.flatten(1), upper.flatten(1)], 1)


def solved(h: Tensor, k: Tensor) -> Tensor:
    """Solve systems with a shared right-hand side, and with a matrix or vector for each example."""
    shared = linalg.solve(regular(h, k), torch.arange(6.0, dtype=h.dtype).view(3, 2))
    own = linalg.solve(regular(h, k), square(h), left=False)
    return torch.cat([shared.flatten(1), own.flatten(1), linalg.solve(regular(h, k), k[:, :3])], 1)


def eigenvalues(h: Tensor, k: Tensor) -> Tensor:
    """Return eigenvalues computed from each triangle."""
    both = matrix(h, k) + matrix(h, k).mT
    spread = torch.diag(torch.tensor([0.0, 5.0, -7.0], dtype=h.dtype))
    return torch.cat([linalg.eigvalsh(both.tanh() + spread, UPLO=side) for side in ("L", "U")], 1)


def polar(h: Tensor, k: Tensor) -> Tensor:
    """Return the orthogonal polar factor U Vᵀ of a matrix with distinct singular values."""
    u, _, vh = linalg.svd(tall(h, k).tanh() + (diagonal(1.0, 4) * torch.arange(5.0, 16, 5)).to(h), False)
    part: Tensor = u @ vh
    return part.flatten(1)


def decomposed(h: Tensor, k: Tensor) -> Tensor:
    """Return both QR factors. The signs of the columns do not change during a step."""
    return torch.cat(linalg.qr(tall(h, k).tanh() + diagonal(-5.0, 4).to(h)), 1)


ALGEBRA: dict[str, Sample] = {
    "_linalg_det": lambda h, k: linalg.det(matrix(h, k))[:, None] * k,
    "_linalg_eigh": eigenvalues,
    "_linalg_slogdet": lambda h, k: torch.stack(linalg.slogdet(regular(h, k) * h[:, :1, None]), 1),
    "_linalg_solve_ex": solved,
    "_linalg_svd": lambda h, k: torch.cat(
        [linalg.svdvals(square(h)), linalg.matrix_norm(tall(h, k), "nuc")[:, None], polar(h, k)], 1
    ),
    "cholesky_solve": lambda h, k: torch.cholesky_solve(square(k).mT, regular(h, k).tril(), upper=False),
    "linalg_cholesky_ex": lambda h, k: torch.stack(
        [linalg.cholesky(definite(h, k), upper=up) for up in (True, False)]
    ).sum(0),
    "linalg_householder_product": lambda h, k: linalg.householder_product(square(h).mT, k[:, :2]),
    "linalg_inv_ex": lambda h, k: linalg.inv(regular(h, k)),
    "linalg_matrix_exp": lambda h, k: linalg.matrix_exp(matrix(h, k) - matrix(h, k).mT),
    "linalg_pinv": lambda h, k: torch.cat(
        [linalg.pinv(regular(h, k)[:, :2]).flatten(1), linalg.pinv(definite(h, k), hermitian=True).flatten(1)], 1
    ),
    "linalg_qr": decomposed,
    "linalg_solve_triangular": triangles,
}


# Operations of complex numbers with real outputs. Some rules are shared with real numbers.


def parts(z: Tensor) -> Tensor:
    """Return real and imaginary parts."""
    return torch.view_as_real(z)


def number(h: Tensor, k: Tensor) -> Tensor:
    """Return the complex numbers h + ik."""
    return torch.complex(h, k)


def lifted(sample: Sample, h: Tensor, k: Tensor) -> Tensor:
    """Apply a sample to complex numbers."""
    return parts(sample(number(h, k), number(k, h * h)))


def apart(h: Tensor, k: Tensor) -> Tensor:
    """Return numbers with a positive real part, where angles are smooth."""
    return number(positive(h), k)


def written(h: Tensor, k: Tensor) -> Tensor:
    """Write into slices of complex numbers, and return their parts."""
    z = torch.zeros(len(h), 6, dtype=torch.complex128)
    z[:, :4] = fft.rfft(h)
    z[:, 5] = number(k, h)[:, 0]
    return parts(z) * parts(z * number(h, k))


def products(h: Tensor, k: Tensor) -> Tensor:
    """Return a product with a constant complex matrix."""
    fixed = torch.arange(12.0, dtype=h.dtype).view(6, 2)
    weight = number(fixed, fixed.flip(0)).mT.conj()
    return parts(functional.linear(number(h, k), weight, weight[:, 0]))


def transformed(h: Tensor, k: Tensor) -> Tensor:
    """Multiply two signals in the frequency domain."""
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
    **{name: partial(lifted, (PLAIN | ARRANGED)[name]) for name in SAME_FOR_COMPLEX.split()},
    **OWN,
}
