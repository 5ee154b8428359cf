"""Numbers that describe a kernel, the hidden units and the contributions of a run.

A tangent kernel in numbers: its spectrum, its alignment with the targets, and its distance from another kernel.

The largest eigenvalue of a symmetric matrix that is known by its products with vectors alone (Lanczos 1950).

With orthonormal v_1, v_2, … from v_{k+1} ∝ A v_k, made orthogonal to all before, A becomes tridiagonal. Its largest
eigenvalue there is Rayleigh's quotient of the best of all vectors that were reached: it comes from below, and needs a
tenth of the products that A v, A²v, … by themselves would need.

>>> matrix = torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64))
>>> round(largest_eigenvalue(lambda vector: matrix @ vector, torch.ones(3, dtype=torch.float64)), 12)
3.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, sqrt

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ntkexp.kernel.record.tape import Tape
from ntkexp.on_disk import blocks, summed

PRODUCTS, SETTLED = (
    100,
    1e-7,
)  # at most 100 products, until one more changes the value by less than 1e-7


def largest_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Find λ_max on the space that products span from a vector of any shape; NaN where a product is not finite."""
    if not (length := norm(start)):
        return 0.0
    basis, diagonal, beside, eigenvalue = [start / length], list[float](), list[float](), 0.0
    while len(diagonal) < PRODUCTS:
        image = product(basis[-1])
        diagonal.append(inner(image, basis[-1]))
        if not isfinite(diagonal[-1]):
            return diagonal[-1]
        # λ_max of the tridiagonal matrix
        upper = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + upper + upper.mH
        before, eigenvalue = eigenvalue, float(torch.linalg.eigvalsh(tridiagonal)[-1])
        for vector in 2 * basis:  # once would leave what rounding had left of a vector
            image = image - inner(image, vector) * vector
        if abs(eigenvalue - before) <= SETTLED * eigenvalue or norm(image) <= torch.finfo(
            image.dtype
        ).eps * abs(eigenvalue):
            break
        beside.append(norm(image))
        basis.append(image / beside[-1])
    return eigenvalue


def inner(one: Tensor, other: Tensor) -> float:
    """Multiply two vectors of any shape."""
    return float(torch.dot(one.flatten(), other.flatten()))


def norm(vector: Tensor) -> float:
    """Measure the length of a vector of any shape."""
    return sqrt(inner(vector, vector))


# --- What a tangent kernel among the training examples says about training, in numbers.
#
# With the eigenvalues λ of the (M·C)×(M·C) matrix K and p = λ/Σλ:
#
#     effective rank    exp(−Σ p log p)
#     stability         η w λ_max max ℓ″ / 2: gradient descent on a quadratic with this kernel is stable below 1


TOP = 10
DENSE = 4096  # entries; all eigenvalues of a larger matrix would take minutes at every snapshot


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues stand from the largest down, with their eigenvectors."""

    values: Float[Tensor, " mode"]
    modes: Float[Tensor, "entry mode"]

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of the normalised eigenvalues.

        >>> Spectrum(torch.tensor([2.0, 2.0, 0.0]), torch.eye(3)).effective_rank
        2.0
        """
        positive = self.values[self.values > 0]
        shares = positive / positive.sum()
        return float(torch.exp(-(shares * shares.log()).sum()))

    @property
    def condition(self) -> float:
        """λ_max/λ_min; infinite where λ_min is zero to rounding."""
        smallest, largest = float(self.values[-1]), float(self.values[0])
        noise = len(self.values) * torch.finfo(self.values.dtype).eps * largest
        return largest / smallest if smallest > noise else float("inf")

    def share(self, vectors: Float[Tensor, "entry *vector"], top: int) -> float:
        """How much of ‖v‖² lies in the eigenspace of the `top` largest eigenvalues, of all vectors together."""
        inside = self.modes[:, :top].mH @ vectors
        whole = float(vectors.square().sum())
        return float(inside.square().sum()) / whole if whole else float("nan")


def spectrum(kernel: Float[Tensor, "train out train out_"]) -> Spectrum:
    """Find the eigenvalues and eigenvectors of the kernel as a matrix."""
    matrix = kernel.flatten(2).flatten(0, 1)
    values, modes = torch.linalg.eigh((matrix + matrix.mH) / 2)
    return Spectrum(values.flip(0), modes.flip(1))


def largest_kernel_eigenvalue(kernel: Float[Tensor, "train out train out_"]) -> float:
    """λ_max: from all eigenvalues of a matrix that is small enough, from below by products with a larger one."""
    matrix = kernel.flatten(2).flatten(0, 1)
    if len(matrix) <= DENSE:
        return float(torch.linalg.eigvalsh((matrix + matrix.mH) / 2)[-1])
    return largest_eigenvalue(matrix.__matmul__, matrix.diagonal().sqrt())


# --- How far a kernel is from another one: from that of the start, from that of infinite width, from that of the
# labels.
#
# drift             ‖K − K′‖/‖K′‖ alignment         ⟨K, K′⟩/(‖K‖‖K′‖); centred (CKA) with H = 1 − 11ᵀ/M on both
# sides


def drift(kernel: Float[Tensor, "..."], start: Float[Tensor, "..."]) -> float:
    """Find the distance of a kernel from where it started, relative to the start.

    >>> import torch
    >>> drift(1.5 * torch.eye(4), torch.eye(4))
    0.5
    """
    return float((kernel - start).norm() / start.norm())


def alignment(left: Float[Tensor, "..."], right: Float[Tensor, "..."]) -> float:
    """Find the cosine between two kernels.

    >>> import torch
    >>> alignment(torch.eye(4), torch.eye(4) * 3)
    1.0
    """
    return float((left * right).sum() / (left.norm() * right.norm()))


def label_alignment(
    kernel: Float[Tensor, "train kept train kept_"], targets: Float[Tensor, "train out"]
) -> float:
    """Find the CKA of the kernel, averaged over outputs, with the kernel yyᵀ of the targets."""
    averaged = kernel.diagonal(dim1=1, dim2=3).mean(2)
    return alignment(centred(averaged), centred(targets @ targets.t()))


def centred(kernel: Float[Tensor, "train train"]) -> Float[Tensor, "train train"]:
    """H K H."""
    return kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()


# --- Hidden units in numbers: which are on for which example, where slopes jump, and whether units are tuned to one
# task.


# --- Activation patterns: which units of a piecewise linear network are on, for which example.


KINKED = ("relu", "leaky_relu", "abs")


def pattern(tape: Tape) -> Bool[Tensor, " unit"]:
    """The sign at every kink that weights can move, over examples and units."""
    moving = tape.from_inputs & tape.from_weights
    arguments = [entry.slots[0] for entry in tape.entries if entry.name in KINKED]
    signs = [tape[slot].detach().flatten() > 0 for slot in arguments if slot in moving]
    return torch.cat(signs) if signs else torch.zeros(0, dtype=torch.bool)


# --- Kinks of a network: operations on its way from weights to outputs whose slope jumps.


KINKED_OPERATIONS = {
    "relu": "relu",
    "leaky_relu": "leaky_relu",
    "_prelu_kernel": "prelu",
    "hardtanh": "hardtanh",
    "hardsigmoid": "hardsigmoid",
    "threshold": "threshold",
    "abs": "abs",
    "clamp": "clamp",
    "clamp_min": "clamp",
    "clamp_max": "clamp",
    "maximum": "maximum",
    "minimum": "minimum",
    "max": "max",
    "max_pool2d_with_indices": "max pooling",
    "max_pool3d_with_indices": "max pooling",
    "adaptive_max_pool2d": "max pooling",
}
"""The operations, each by the name that people know."""


def kinks(tape: Tape) -> list[str]:
    """Name the operations with kinks among whose arguments are some that weights move, each once."""
    moved = tape.from_weights
    found = [
        KINKED_OPERATIONS[entry.name]
        for entry in tape.entries
        if entry.name in KINKED_OPERATIONS and not moved.isdisjoint(entry.slots)
    ]
    return list(dict.fromkeys(found))


# --- Whether hidden units are tuned to one task, from what they do at the points of each.
#
#     selectivity    Σ_u |r_u(A) − r_u(B)| / Σ_u (r_u(A) + r_u(B))
#
# with r_u(T) the deviation of unit u's activity over the points of task T. It is 0 where all units answer to both
# alike, 1 where each answers to one alone; of more than two tasks, the mean over pairs. Units are what the
# readout takes: the layer with weights that is called last, where others came before it.


def selectivity(answers: Sequence[Float[Tensor, " unit"]]) -> float | None:
    """Compare what units answer to each task; nothing where there is nothing to compare.

    >>> selectivity([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
    1.0
    >>> selectivity([torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])])
    0.0
    """
    contrasts = [
        (one - other).abs().sum() / (one + other).sum() for one, other in combinations(answers, 2)
    ]
    mean = float(torch.stack(contrasts).mean()) if contrasts else math.nan
    return mean if math.isfinite(mean) else None


def activity(network: nn.Module, call: Callable[[], object]) -> Float[Tensor, "point unit"] | None:
    """What the readout of a network takes during a call of it; nothing where no layer with weights came before."""
    heard: list[Tensor] = []

    def hear(_: nn.Module, given: tuple[object, ...]) -> None:
        heard.extend(value.detach() for value in given[:1] if isinstance(value, Tensor))

    layers = [
        layer
        for layer in network.modules()
        if not list(layer.children()) and list(layer.parameters())
    ]
    handles = [layer.register_forward_pre_hook(hear) for layer in layers]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return heard[-1].flatten(1) if len(heard) > 1 else None


# --- What can be said of the integrals of a whole run, in numbers.
#
# cancellation           Σ|𝒮| / Σ_x |Σᵢ 𝒮|: how far the parts exceed their sum
# top_k                  the share of |𝒮| that comes from the k largest contributors to a point, on average
# coefficient_variation  of aᵢ(x) = 𝒦(x, xᵢ)⁻¹ 𝒮(x, xᵢ) over the points x, the median over examples: zero for a kernel
#                        machine whose coefficients do not depend on the query
# left_out               the share of pairs whose 𝒦 is too small to divide by
# symmetry_defect        ‖𝒦 − 𝒦ᵀ‖/‖𝒦‖ among the training examples
# psd_defect             −λ_min/λ_max of the symmetric part of 𝒦 there, if λ_min is negative


TOPS = (1, 5, 10)
SMALL = 1e-3  # of the largest 𝒦


def summary(
    kernel: Float[Tensor, "probe out kept out_"],
    contributions: Float[Tensor, "probe out train"],
    train: int,
) -> dict[str, float]:
    """Find all of these; the first `train` points are the training examples (none, if the path was not read there)."""
    mass = torch.stack([block.abs().sum() for block in blocks(contributions)]).sum()
    facts = {"cancellation": ratio(mass, summed(contributions).abs().sum())}
    facts |= {f"top_{k}": top_share(contributions, k) for k in TOPS}
    facts |= coefficients(kernel, contributions) if is_square(kernel) else {}
    return facts | (defects(kernel[:train]) if train and is_square(kernel) else {})


def is_square(kernel: Float[Tensor, "probe out train out_"]) -> bool:
    """Whether the path was read at every output, and its kernel kept."""
    return kernel.shape[1] == kernel.shape[3] and kernel.shape[2] > 0


def top_share(contributions: Float[Tensor, "probe out train"], k: int) -> float:
    """Find the share of the k largest contributors.

    >>> top_share(torch.tensor([[[3.0, -1.0]]]), 1)
    0.75
    """
    k = min(k, contributions.shape[2])
    sizes = (block.abs().sum(1) for block in blocks(contributions))
    return float(
        torch.cat([each.topk(k, dim=1).values.sum(1) / each.sum(1) for each in sizes]).mean()
    )


def coefficients(
    kernel: Float[Tensor, "probe out train out_"], contributions: Float[Tensor, "probe out train"]
) -> dict[str, float]:
    """How much the coefficients of the kernel machine depend on the query."""
    blocks = kernel.transpose(1, 2)  # [probe, train, out, out_]
    sizes = (
        torch.linalg.svdvals(blocks)[..., -1]
        if blocks.shape[2] > 1
        else blocks[..., 0].abs()[..., 0]
    )
    usable = (sizes > 0) & (sizes >= SMALL * blocks.abs().amax())
    divisor = torch.where(usable[..., None, None], blocks, torch.eye(blocks.shape[2]).to(blocks))
    parts = contributions.transpose(1, 2)[..., None].to(divisor)
    solved = torch.linalg.solve(divisor, parts)[..., 0]  # [probe, train, out]
    known = torch.where(usable[..., None], solved, torch.nan)
    mean = known.nanmean(0)
    deviation = (known - mean).square().nanmean(0).sqrt()
    variation = (deviation / mean.abs()).flatten()
    return {
        "coefficient_variation": float(variation.nanmedian()),
        "left_out": float((~usable).double().mean()),
    }


def defects(kernel: Float[Tensor, "train out train out_"]) -> dict[str, float]:
    """How far the path kernel is from being a kernel."""
    matrix = kernel.flatten(2).flatten(0, 1)
    values = torch.linalg.eigvalsh((matrix + matrix.mH) / 2)
    return {
        "symmetry_defect": ratio((matrix - matrix.mH).norm(), matrix.norm()),
        "psd_defect": max(0.0, ratio(-values[0], values[-1])),
    }


def ratio(above: Tensor, below: Tensor) -> float:
    """above / below, or NaN where there is nothing to divide by."""
    return float(above / below) if below else float("nan")
