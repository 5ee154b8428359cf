"""The fused engine, against the recursion in torch."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

import ntkexp
from ntkexp.capacity import MemoryBudget
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool, LayerNorm
from ntkexp.layer.pointwise import GELU, Abs, Cos, Erf, LeakyReLU, Linear, ReLU, Sin
from ntkexp.layer.smooth import Generic, Polynomial, SiLU, Tanh, interpolated
from ntkexp.limit.fused.functions import exponential, source_digest
from ntkexp.limit.infinite_kernel import Engine, block_slices, choose_engine, compute
from ntkexp.limit.network import network
from tests.kernel.oracle import refused
from tests.limit.oracle import close

ONE_GB = MemoryBudget.of_gb(1.0)
RTOL = {torch.float64: 1e-12, torch.float32: 5e-6}  # some ten roundings of each, and the sum over all pairs of pixels
DENSE = Dense(features=3, W_std=1.2, b_std=0.2)


def conv(window: int | tuple[int, ...] = 3, **changes: object) -> Conv:
    return Conv.model_validate({"features": 4, "window": window, "W_std": 1.4, "b_std": 0.1} | changes)


BODY = (conv(), ReLU(), conv(), ReLU())
BODY_OF_SEQUENCES = (conv(5), ReLU(), conv(), Abs())
INNER = Residual(branch=(Abs(), conv(frozen=True)), shortcut=(conv(1),))
NETWORKS: dict[str, tuple[tuple[AbstractLayer, ...], tuple[int, ...]]] = {
    "vectors": ((DENSE, ReLU(), DENSE, Abs(), DENSE), (7,)),
    "vectors, residual": ((DENSE, Residual(branch=(ReLU(), DENSE)), ReLU(), Dense(features=1)), (7,)),
    "vectors, standard": ((DENSE, LeakyReLU(slope=0.3), Dense(features=2, param="standard", b_std=0.1)), (5,)),
    "vectors, curves": (
        (DENSE, LayerNorm(eps=0.1), Erf(), DENSE, GELU(), DENSE, Sin(a=1.2, b=0.7, c=0.4), DENSE, Cos(), DENSE),
        (7,),
    ),
    "vectors, series": (
        (DENSE, Tanh(), DENSE, SiLU(), DENSE, Generic(fn="cos"), DENSE, Polynomial(powers=(0.1, 0.5, 0.2)), DENSE),
        (7,),
    ),
    "series": (
        (conv(), Tanh(), conv(1), LayerNorm(), SiLU(), conv(), Generic(fn="cos"), GlobalAvgPool(), DENSE),
        (2, 4, 5),
    ),
    "series beside margins": ((conv(), Tanh(), conv(), SiLU(), conv(), GlobalAvgPool(), DENSE), (1, 8, 8)),
    "series in long rows": ((conv(), Tanh(), conv(), SiLU(), conv(), Flatten(), DENSE), (1, 4, 64)),
    "curves": (
        (
            *(conv(), LayerNorm(eps=0.1), Erf(), conv(), Residual(branch=(GELU(), conv()))),
            *(conv(1), Sin(a=1.2, b=0.7, c=0.4), conv(1), Cos(), GlobalAvgPool(), DENSE),
        ),
        (2, 4, 5),
    ),
    "mean": ((*BODY, GlobalAvgPool(), DENSE), (3, 6, 7)),
    "flattened": ((*BODY, Flatten(), DENSE), (3, 6, 7)),
    "one pixel": ((*BODY, GlobalAvgPool(), DENSE), (2, 1, 1)),
    "means of inputs": ((GlobalAvgPool(), DENSE, Erf(), DENSE), (2, 3, 4)),
    "windows": (
        (conv(5), ReLU(), conv((3, 5)), LeakyReLU(), conv(1), Linear(), conv(), GlobalAvgPool(), DENSE, ReLU(), DENSE),
        (3, 6, 7),
    ),
    "windows beyond the image": (
        (conv((1, 7)), ReLU(), conv((5, 1)), ReLU(), conv(7), ReLU(), Flatten(), DENSE),
        (2, 4, 5),
    ),
    "residual": ((conv(), Residual(branch=(ReLU(), conv(), INNER)), INNER, ReLU(), GlobalAvgPool(), DENSE), (2, 4, 5)),
    "sequences": ((conv(5), ReLU(), conv(param="standard"), ReLU(), GlobalAvgPool(), DENSE, Erf(), DENSE), (3, 9)),
    "pooled": ((*BODY, AvgPool(window=2), conv(), ReLU(), GlobalAvgPool(), DENSE), (2, 5, 6)),
    "pooled, flattened": ((*BODY, AvgPool(window=(2, 3)), conv(), GELU(), Flatten(), DENSE), (2, 5, 6)),
    "strided": ((*BODY, conv(stride=2), ReLU(), GlobalAvgPool(), DENSE), (2, 5, 6)),
    "pooled sequences": ((*BODY_OF_SEQUENCES, AvgPool(window=2), conv(), ReLU(), Flatten(), DENSE), (2, 9)),
    "strided residual": (
        (
            *BODY[:-1],
            Residual(branch=(ReLU(), conv(stride=2), ReLU(), conv()), shortcut=(conv(1, stride=2),)),
            ReLU(),
            GlobalAvgPool(),
            DENSE,
        ),
        (2, 5, 6),
    ),
    "around": (
        (
            *(conv(circular=True), ReLU(), conv((5, 3), circular=True), Abs()),
            *(conv(), Residual(branch=(GELU(), conv(circular=True))), ReLU(), GlobalAvgPool(), DENSE),
        ),
        (2, 4, 5),
    ),
    "around, windows beyond the image": (
        (conv((5, 7), circular=True), ReLU(), conv(), ReLU(), conv((5, 1), circular=True), ReLU(), Flatten(), DENSE),
        (2, 2, 3),
    ),
    "around, pooled": (
        (conv(circular=True), ReLU(), conv(circular=True), ReLU(), AvgPool(window=2), GlobalAvgPool(), DENSE),
        (1, 5, 4),
    ),
    "around, sequences": ((conv(5, circular=True), ReLU(), conv(circular=True), ReLU(), Flatten(), DENSE), (2, 6)),
    "volumes": ((*BODY, conv((3, 1, 5)), Abs(), GlobalAvgPool(), DENSE), (2, 3, 2, 4)),
    "volumes, around": ((*BODY, conv((5, 3, 1), circular=True), ReLU(), Flatten(), DENSE), (2, 3, 2, 4)),
    "volumes, pooled": ((*BODY, AvgPool(window=2), conv(), ReLU(), Flatten(), DENSE), (1, 2, 3, 4)),
    "strides and pools first": (
        (conv(stride=3), ReLU(), AvgPool(window=(2, 1)), conv(circular=True), GELU(), GlobalAvgPool(), DENSE),
        (2, 9, 8),
    ),
    "levels": (
        (
            *(conv(), ReLU(), AvgPool(window=2), conv(5, circular=True), Abs(), conv(stride=2), Tanh(), conv()),
            *(AvgPool(window=(1, 2)), LayerNorm(eps=0.1), Flatten(), DENSE),
        ),
        (2, 9, 11),
    ),
    "nested strides": (
        (
            conv(),
            Residual(
                branch=(INNER, ReLU(), conv(stride=2), INNER, conv()),
                shortcut=(Residual(branch=(Abs(), conv(1))), AvgPool(window=2), conv()),
            ),
            *(INNER, ReLU(), GlobalAvgPool(), DENSE, ReLU(), DENSE),
        ),
        (2, 4, 6),
    ),
    "volumes, strided": (
        (conv(), ReLU(), conv(stride=2), Residual(branch=(ReLU(), conv())), ReLU(), GlobalAvgPool(), DENSE),
        (2, 3, 2, 4),
    ),
    "linear, strided": ((conv(stride=2), AvgPool(window=2), Flatten(), DENSE), (2, 9)),
    "passing through": (
        (
            conv(),
            Residual(
                branch=(ReLU(), conv(stride=2), ReLU(), conv(stride=2)), shortcut=(AvgPool(window=2), AvgPool(window=2))
            ),
            *(ReLU(), GlobalAvgPool(), DENSE),
        ),
        (2, 8, 4),
    ),
    "steps that differ": (
        (
            *(conv(), ReLU(), AvgPool(window=2), conv()),
            Residual(branch=(ReLU(), conv(stride=2), conv(stride=2)), shortcut=(conv(stride=4),)),
            *(GELU(), Flatten(), DENSE),
        ),
        (2, 9, 13),
    ),
    "concatenation": (
        (
            *(conv(), ReLU(), conv()),
            Concatenation(branches=((ReLU(), conv(features=2)), (), (INNER, Erf(), conv(features=3), Tanh()))),
            *(conv(5, param="standard"), GELU(), GlobalAvgPool(), DENSE),
        ),
        (2, 5, 6),
    ),
    "concatenation, strided": (
        (
            conv(),
            Concatenation(
                branches=(
                    (ReLU(), conv(stride=2, features=2), Residual(branch=(ReLU(), conv()), shortcut=(conv(1),))),
                    (Concatenation(branches=((Abs(), conv(1)), ())), AvgPool(window=2)),
                    (AvgPool(window=2),),
                )
            ),
            *(AvgPool(window=(1, 2)), conv(circular=True), ReLU(), Flatten(), DENSE),
        ),
        (2, 6, 8),
    ),
    "vectors, concatenation": (
        (DENSE, Concatenation(branches=((), (ReLU(), DENSE), (Tanh(),))), DENSE, ReLU(), Dense(features=1)),
        (7,),
    ),
    "without biases": ((conv(b_std=0.0), ReLU(), conv(b_std=0.0), ReLU(), GlobalAvgPool(), DENSE), (1, 5, 5)),
}


def points(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    x[0, ..., : shape[-1] // 2] = 0  # patches of zeros
    return x


ONCE = [
    (name, (row + column) % 2 == 0, dtype)
    for row, name in enumerate(NETWORKS)
    for column, dtype in enumerate((torch.float64, torch.float32))
    if dtype == torch.float64 or row % 3 == 0
] + [("series beside margins", False, torch.float64)]
"""Every network, and every third one in single precision too. Half of them with themselves."""
QUICK = (
    *("mean", "vectors, concatenation", "levels", "nested strides"),
    *("concatenation, strided", "passing through", "steps that differ"),
)


@pytest.mark.parametrize(
    ("name", "same", "dtype"),
    [
        *((name, False, torch.float64) for name in QUICK),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ONCE),
    ],
)
def test_the_engines_agree(name: str, same: bool, dtype: torch.dtype) -> None:
    layers, shape = NETWORKS[name]
    x1, x2 = points(10, shape, dtype), None if same else points(9, shape, dtype, 1)
    fused = ntkexp.infinite_kernel(layers, x1, x2, engine="fused", threads=2)
    assert {kernel.dtype for kernel in fused} == {dtype}
    close(fused, ntkexp.infinite_kernel(layers, x1, x2, engine="torch"), RTOL[dtype], scaled=True)


@pytest.mark.slow
def test_many_vectors_are_cut_into_pieces_that_fit() -> None:
    layers, shape = NETWORKS["vectors"]
    x = points(1300, shape)
    fused = ntkexp.infinite_kernel(layers, x, engine="fused", threads=2)
    rows = ntkexp.infinite_kernel(layers, x[600:670], x, engine="fused", threads=1)
    for one, two, part in zip(fused, ntkexp.infinite_kernel(layers, x, engine="torch"), rows, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(part, two[600:670], rtol=1e-12, atol=0.0)
        assert torch.equal(one, one.t())
    fused = ntkexp.infinite_kernel(layers, x[:300], x[600:], engine="fused", threads=2)
    close(fused, ntkexp.infinite_kernel(layers, x[:300], x[600:], engine="torch"), 1e-12)


@pytest.mark.parametrize("engine", ["torch", "fused"])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("times", "words"), [(1.5, "the NNGP kernel"), (0.75, "the tangent kernel"), (0.25, "")])
def test_an_entry_beyond_the_range_is_refused(times: float, words: str, dtype: torch.dtype, engine: Engine) -> None:
    """Two orthogonal inputs have kernels w²c²/2 and twice that with themselves, and smaller ones with each other."""
    layers = (Dense(features=2, W_std=2**0.5), ReLU(), Dense(features=1, W_std=(2e6 * times) ** 0.5))
    x = 1e-3 * torch.finfo(dtype).max ** 0.5 * torch.eye(2, dtype=dtype)
    for given in ((x,), (x, x.clone()), (x[:1], x)):
        with refused(f"{words} has entries beyond") if words else nullcontext():
            ntkexp.infinite_kernel(layers, *given, engine=engine)


def test_the_number_of_threads_changes_no_bit() -> None:
    layers, shape = NETWORKS["mean"]
    x = points(20, shape)
    one, three = (ntkexp.infinite_kernel(layers, x, engine="fused", threads=threads) for threads in (1, 3))
    close(one, three, 0.0)


@pytest.mark.parametrize("name", ["flattened", "pooled", "strided residual"])
def test_little_memory_cuts_smaller_and_changes_rounding_alone(name: str) -> None:
    """Sums of bands, and bands that are kept: sub-blocks of two images or one on each side, instead of seven."""
    layers, shape = NETWORKS[name]
    x = points(10, shape)
    roomy, narrow = (ntkexp.infinite_kernel(layers, x, engine="fused", memory_gb=room, threads=1) for room in (4, 2e-5))
    close(roomy, narrow, 1e-14)


def test_an_example_meets_itself_without_rounding() -> None:
    """Equal pixels have κ = hq: with W² = 2 and no bias, K(x, x) = ‖x‖²/d through any number of ReLU layers."""
    layers = (*(Dense(features=2, W_std=2**0.5), ReLU()) * 20, Dense(features=1))
    x = points(5, (7,), seed=3)[1:]
    nngp, ntk = ntkexp.infinite_kernel(layers, x, engine="fused")
    norms = x.square().mean(1)
    torch.testing.assert_close(nngp.diagonal(), norms, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(ntk.diagonal(), 21 * norms, rtol=1e-14, atol=0.0)


def test_the_polynomials_are_the_arc_cosine_and_the_arc_sine() -> None:
    from ntkexp.limit.fused import functions as of  # noqa: PLC0415  numba is slow to import

    mpmath.mp.dps = 40

    def error(powers: object, place: float, exact: mpmath.mpf) -> float:
        return float(abs(np.polynomial.polynomial.polyval(place, np.array(powers, float)) / exact - 1))

    for rho in (*np.linspace(0, 1, 101)[:-1].tolist(), 1 - 1e-6):
        exact = mpmath.mpf(rho)
        v, angle = mpmath.sqrt(1 - exact), mpmath.acos(exact)
        gap = (mpmath.sqrt(1 - exact**2) - exact * angle) / v**3
        assert error(of.ANGLE, 2 * rho - 1, angle / v) < 2e-15
        assert error(np.array(of.ANGLE_SINGLE, np.float32), 2 * rho - 1, angle / v) < 4e-7
        assert error(of.GAP, 2 * rho - 1, gap) < 4e-15
        assert error(np.array(of.GAP_SINGLE, np.float32), 2 * rho - 1, gap) < 3e-7
    for z in np.linspace(1e-6, 0.25, 101).tolist():
        w = mpmath.sqrt(mpmath.mpf(z))
        assert error(of.ARC_DOUBLE, z, mpmath.asin(w) / w) < 4e-16
        assert error(np.array(of.ARC_SINGLE, np.float32), z, mpmath.asin(w) / w) < 1e-7


@pytest.mark.parametrize(
    ("layers", "x", "words"),
    [
        ((DENSE, DENSE), torch.ones(2, 3), "a linear network has no fused form"),
        ((DENSE, ReLU(), DENSE), torch.ones(2, 3, requires_grad=True), "no derivatives"),
        ((DENSE, ReLU(), DENSE), torch.ones(2, 3, dtype=torch.float16), "float32 or float64"),
    ],
)
def test_networks_without_a_fused_form_are_left_to_torch(
    layers: tuple[AbstractLayer, ...], x: Tensor, words: str
) -> None:
    net = network(layers, tuple(x.shape[1:]))
    many = 10**9
    left_to = choose_engine("auto", net, x, many, ONE_GB, 1)
    assert isinstance(left_to, partial)
    assert left_to.func.__module__ == "ntkexp.limit.network"
    with refused(words):
        choose_engine("fused", net, x, many, ONE_GB, 1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_exponential_is_that_of_numpy(dtype: type[np.floating[Any]]) -> None:
    """Its argument is reduced in two parts, so that both digits and polynomial round by a few eps."""
    compiled = njit(lambda x: exponential(x))  # noqa: PLW0108  numba does not compile an overload alone
    x = -np.linspace(0, 80, 801, dtype=dtype)
    found = [compiled(each) for each in x]
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=4 * float(np.finfo(dtype).eps))


def test_variances_beyond_reach_of_the_exponential_are_no_waves() -> None:
    """exp(−b²q/2) underflows there, and exp(b²c) would overflow."""
    x = torch.tensor([[60.0, 20.0], [-10.0, 70.0], [60.0, 20.5]], dtype=torch.float64)
    layers = (DENSE, Sin(a=1.2), DENSE)
    fused = ntkexp.infinite_kernel(layers, x, engine="fused")
    close(fused, ntkexp.infinite_kernel(layers, x, engine="torch"), 1e-12)


@pytest.mark.slow
def test_nor_are_they_in_float32() -> None:
    x = torch.tensor([[24.0, 8.0], [-4.0, 28.0], [24.0, 8.2]])
    assert all(
        kernel.isfinite().all() for kernel in ntkexp.infinite_kernel((DENSE, Sin(a=1.2), DENSE), x, engine="fused")
    )


def test_coefficients_of_many_variances_are_found_at_few() -> None:
    """Tables of 48 variances, and a comparison at nine others. A function with a jump is computed everywhere."""
    q, asked = torch.linspace(0, 2, 500, dtype=torch.float64), []

    def slopes(q: Tensor) -> Tensor:
        asked.append(len(q))
        return Tanh().coefficients(q, 128)[1]

    exact = slopes(q)
    torch.testing.assert_close(interpolated(slopes, q), exact, rtol=0.0, atol=5e-14)
    assert asked == [500, 48, 9]
    assert torch.equal(interpolated(lambda q: (q > 1)[None].double(), q), (q > 1)[None].double())

    def wave(q: Tensor) -> Tensor:
        """T₉₆ in √q, which is constant at all 48 variances of the table."""
        return (96 * (2 * (q / 2).sqrt() - 1).clamp(-1, 1).acos()).cos()[None]

    assert torch.equal(interpolated(wave, q), wave(q))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-8)])
def test_terms_that_are_left_out_make_no_difference(dtype: torch.dtype, bound: float) -> None:
    """Σ b_k b_k over the stored terms is E σ′² up to the bound, for every correlation."""
    q = torch.tensor([0.3, 1.9], dtype=torch.float64)
    for layer in (Tanh(), SiLU(), Generic(fn="cos")):
        squares = sum(layer.coefficients(q, 1024)[1][: layer.count(1.9, dtype)].square())
        assert isinstance(squares, Tensor)
        assert float((1 - squares / layer.alone(q)[1]).max()) < bound + 1e-14


@pytest.mark.parametrize("columns", [None, 3000])
@pytest.mark.parametrize("name", ["vectors", "mean"])
def test_blocks_cover_every_pair_once_and_are_small(name: str, columns: int | None) -> None:
    """A block has at most 2³² pixel pairs times layers, and 16 to 2048 examples a side."""
    net, rows = network(*NETWORKS[name]), 5000
    layers, shape = NETWORKS[name]
    work = len(layers) * int(np.prod(shape[1:])) ** 2
    covered = torch.zeros(rows, columns or rows, dtype=torch.uint8)
    for place in block_slices(net, rows, columns):
        height, width = (part.stop - part.start for part in (place.rows, place.columns))
        assert max(height, width) <= 2048
        assert height * width * work <= 2**32
        covered[place.rows, place.columns] += 1
        if columns is None and not place.same:
            covered[place.columns, place.rows] += 1
    assert bool((covered == 1).all())
    heights = {place.rows.stop - place.rows.start for place in block_slices(net, rows, columns)}
    assert max(heights) == min(2048, int((2**32 // work) ** 0.5))
    huge = network(NETWORKS["mean"][0], (3, 600, 700))
    assert {place.rows.stop - place.rows.start for place in block_slices(huge, 32, columns)} == {16}


@pytest.mark.parametrize(("pairs", "module"), [(2, "ntkexp.limit.network"), (3, "ntkexp.limit.fused.run")])
def test_the_fused_engine_is_chosen_for_much_work(pairs: int, module: str) -> None:
    """3e7 pixel pairs times layers: here 1.08e7 for each pair of examples."""
    layers, _ = NETWORKS["mean"]
    net = network(layers, (3, 36, 36))
    chosen = choose_engine("auto", net, torch.ones(2, 3, 36, 36), pairs, ONE_GB, 1)
    assert isinstance(chosen, partial)
    assert net.work * pairs == len(layers) * 36**4 * pairs
    assert chosen.func.__module__ == module


def test_blocks_are_parts_of_the_whole() -> None:
    layers, shape = NETWORKS["flattened"]
    net, x = network(layers, shape), points(9, shape)
    whole = ntkexp.infinite_kernel(layers, x, engine="fused")
    for place in reversed(block_slices(net, 9, None, side=4)):
        block = compute(net, place, x, engine="fused")
        for part, kernel in zip((block.nngp, block.ntk), whole, strict=True):
            torch.testing.assert_close(part, kernel[place.rows, place.columns], rtol=1e-14, atol=0.0)


@pytest.mark.slow
def test_numba_is_loaded_when_it_is_needed() -> None:
    code = "import sys, ntkexp.limit.infinite_kernel; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Compiled code is kept for exactly the files that it was compiled from.


def test_a_change_of_any_file_is_another_place(tmp_path: Path) -> None:
    """Numba itself looks only at the file of a function, and would keep old versions of the others."""
    digests = set()
    for change in ("one", "two"):
        folder = tmp_path / change
        folder.mkdir()
        (folder / "caller.py").write_text("from called import called\n")
        (folder / "called.py").write_text(f"called = '{change}'\n")
        digests.add(source_digest(folder))
    assert len(digests) == 2
