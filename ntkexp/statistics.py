"""Statistics of kernels, hidden units and contributions.

The file has four parts: eigenvalues of a kernel, distances between kernels, activations
of hidden units, and statistics of the path kernel and the contributions.

>>> matrix = torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64))
>>> start = torch.ones(3, dtype=torch.float64)
>>> round(largest_eigenvalue(lambda vector: matrix @ vector, start), 12)
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

from ntkexp.kernel import Tape
from ntkexp.on_disk import blocks, summed
from ntkexp.stream import normal, stream

MAX_LANCZOS_PRODUCTS = 100
LANCZOS_TOLERANCE = 1e-7
"""Stop the Lanczos iteration if one more product with the matrix changes the largest
eigenvalue by at most this fraction."""


def largest_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Compute λ_max of a symmetric matrix A from its products
    with vectors (Lanczos 1950).

    Orthonormalise the vectors start, A start, A² start, … to a basis v_1, v_2, …. In
    this basis, A is a tridiagonal matrix, whose largest eigenvalue approaches λ_max
    from below. This needs about a tenth of the products of power iteration.

    `start` may have any shape. If an inner product vᵀAv is infinite or NaN, return it.
    """
    length = norm(start)
    if not length:
        return 0.0
    basis = [start / length]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    eigenvalue = 0.0
    while len(diagonal) < MAX_LANCZOS_PRODUCTS:
        # α_k = v_kᵀ A v_k, a diagonal element of the tridiagonal matrix
        image = product(basis[-1])
        diagonal.append(inner(image, basis[-1]))
        if not isfinite(diagonal[-1]):
            return diagonal[-1]
        # λ_max of the tridiagonal matrix, whose off-diagonal elements are β_k
        upper = torch.diag(torch.tensor(off_diagonal, dtype=torch.float64), 1)
        tridiagonal = (
            torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + upper + upper.mH
        )
        previous = eigenvalue
        eigenvalue = float(torch.linalg.eigvalsh(tridiagonal)[-1])
        # β_k v_{k+1} = A v_k, orthogonalised to all v. A single pass would leave
        # rounding errors, so orthogonalise twice.
        for vector in 2 * basis:
            image = image - inner(image, vector) * vector
        beta = norm(image)
        has_settled = abs(eigenvalue - previous) <= LANCZOS_TOLERANCE * eigenvalue
        if has_settled or beta <= torch.finfo(image.dtype).eps * abs(eigenvalue):
            break
        off_diagonal.append(beta)
        basis.append(image / beta)
    return eigenvalue


def inner(left: Tensor, right: Tensor) -> float:
    return float(torch.dot(left.flatten(), right.flatten()))


def norm(vector: Tensor) -> float:
    return sqrt(inner(vector, vector))


# --- Eigenvalues of the tangent kernel between the training examples
#
# The kernel K of M examples and C outputs is an (M·C)×(M·C) matrix with eigenvalues λ.
# With p = λ/Σλ, the step size η, the weight w of an example in the objective, and the
# bound max ℓ″ of the loss's second derivative,
#
#     effective rank    exp(−Σ p log p)
#     stability         η w λ_max max ℓ″ / 2: gradient descent on a quadratic is stable below 1


TOP = 10
"""Number of leading eigenvalues in the metrics."""
MAX_DENSE_ROWS = 4096
"""All eigenvalues are computed only for matrices with at most this many rows. Larger
matrices would take minutes per snapshot."""


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues in descending order, and their eigenvectors."""

    values: Float[Tensor, " mode"]
    modes: Float[Tensor, "entry mode"]

    @property
    def effective_rank(self) -> float:
        """Return exp(−Σ p log p) for the normalised eigenvalues p, or NaN if no eigenvalue
        is positive.

        >>> Spectrum(torch.tensor([2.0, 2.0, 0.0]), torch.eye(3)).effective_rank
        2.0
        """
        positive = self.values[self.values > 0]
        if not len(positive):
            return float("nan")
        shares = positive / positive.sum()
        return float(torch.exp(-(shares * shares.log()).sum()))

    @property
    def condition(self) -> float:
        """Return λ_max/λ_min, or infinity if λ_min is zero up to rounding."""
        largest = float(self.values[0])
        smallest = float(self.values[-1])
        rounding = len(self.values) * torch.finfo(self.values.dtype).eps * largest
        return largest / smallest if smallest > rounding else float("inf")

    def share(self, vectors: Float[Tensor, " entry *vector"], top: int) -> float:
        """Return the fraction of Σ‖v‖² in the span of the
        `top` leading eigenvectors."""
        coordinates = self.modes[:, :top].mH @ vectors
        total = float(vectors.square().sum())
        return float(coordinates.square().sum()) / total if total else float("nan")


def spectrum(kernel: Float[Tensor, "train out train out_"]) -> Spectrum:
    """Compute the eigenvalues and eigenvectors of the kernel,
    as an (M·C)×(M·C) matrix."""
    matrix = kernel.flatten(2).flatten(0, 1)
    values, modes = torch.linalg.eigh((matrix + matrix.mH) / 2)
    return Spectrum(values.flip(0), modes.flip(1))


def largest_kernel_eigenvalue(kernel: Float[Tensor, "train out train out_"]) -> float:
    """Compute λ_max: for small matrices by a full decomposition,
    for large ones by Lanczos.

    The start vector is random, because a fixed vector can be orthogonal to the leading
    eigenvector. For example, √K(x, x) is orthogonal to it if each input x has a
    partner −x."""
    matrix = kernel.flatten(2).flatten(0, 1)
    if len(matrix) <= MAX_DENSE_ROWS:
        return float(torch.linalg.eigvalsh((matrix + matrix.mH) / 2)[-1])
    noise = normal(stream("largest eigenvalue"), len(matrix)).to(matrix)
    return largest_eigenvalue(matrix.__matmul__, matrix.diagonal().sqrt() * noise)


# --- Distances between two kernels
#
#     kernel change    ‖K − K′‖/‖K′‖
#     alignment        ⟨K, K′⟩/(‖K‖‖K′‖); CKA is the alignment of H K H and H K′ H, H = 1 − 11ᵀ/M


def kernel_change(kernel: Float[Tensor, "..."], start: Float[Tensor, "..."]) -> float:
    """Return the kernel change ‖K − K_0‖/‖K_0‖.

    >>> import torch
    >>> kernel_change(1.5 * torch.eye(4), torch.eye(4))
    0.5
    """
    return float((kernel - start).norm() / start.norm())


def alignment(left: Float[Tensor, "..."], right: Float[Tensor, "..."]) -> float:
    """Return the alignment ⟨K, K′⟩/(‖K‖‖K′‖), the cosine between two kernels.

    >>> import torch
    >>> alignment(torch.eye(4), torch.eye(4) * 3)
    1.0
    """
    return float((left * right).sum() / (left.norm() * right.norm()))


def label_alignment(
    kernel: Float[Tensor, "train kept train kept_"], targets: Float[Tensor, "train out"]
) -> float:
    """Return the centred alignment (CKA) of two matrices between examples: the kernel,
    averaged over its outputs, and y yᵀ with the targets y."""
    return alignment(centred(averaged(kernel)), centred(targets @ targets.t()))


def averaged(
    kernel: Float[Tensor, "train kept train kept_"],
) -> Float[Tensor, "train train"]:
    """Return the mean of K[x, c, x′, c] over the outputs c."""
    return kernel.diagonal(dim1=1, dim2=3).mean(2)


def centred(kernel: Float[Tensor, "train train"]) -> Float[Tensor, "train train"]:
    """Return the centred kernel H K H with H = 1 − 11ᵀ/M."""
    return (
        kernel
        - kernel.mean(0, keepdim=True)
        - kernel.mean(1, keepdim=True)
        + kernel.mean()
    )


# --- Hidden units: activation patterns, kinks, and selectivity for tasks


KINKED_AT_ZERO = ("relu", "leaky_relu", "abs")
"""Operations whose only kink is at 0, by their names on a tape
(a recorded forward pass)."""


def pattern(tape: Tape) -> Bool[Tensor, " unit"]:
    """Return the activation pattern: for each argument of an operation with a kink at
    0, True if the argument is positive.

    The pattern has an entry for each element of such an argument, for all layers and
    examples. Arguments must depend on both inputs and weights."""
    variable = tape.from_inputs & tape.from_weights
    arguments = [
        entry.slots[0] for entry in tape.entries if entry.name in KINKED_AT_ZERO
    ]
    signs = [
        tape[slot].detach().flatten() > 0 for slot in arguments if slot in variable
    ]
    return torch.cat(signs) if signs else torch.zeros(0, dtype=torch.bool)


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
"""Common names of the operations whose slope jumps, by their names on a tape."""


def kinks(tape: Tape) -> list[str]:
    """Return the common names of the operations
    with kinks whose arguments depend on weights."""
    names: dict[str, None] = {}
    for entry in tape.entries:
        depends_on_weights = not tape.from_weights.isdisjoint(entry.slots)
        if entry.name in KINKED_OPERATIONS and depends_on_weights:
            names[KINKED_OPERATIONS[entry.name]] = None
    return list(names)


def selectivity(responses: Sequence[Float[Tensor, " unit"]]) -> float | None:
    """Return the selectivity of hidden units for tasks,
    averaged over pairs of tasks A and B.

        selectivity = Σ_u |r_u(A) − r_u(B)| / Σ_u (r_u(A) + r_u(B))

    The response r_u(T) is the standard deviation of the activity of unit u over the
    points of task T. The selectivity is 0 if all units respond equally to both tasks,
    and 1 if each unit responds to only one task. Return None if there are fewer than
    two tasks, or if no unit responds.

    >>> selectivity([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])])
    1.0
    >>> selectivity([torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])])
    0.0
    """
    contrasts = [
        (first - second).abs().sum() / (first + second).sum()
        for first, second in combinations(responses, 2)
    ]
    mean = float(torch.stack(contrasts).mean()) if contrasts else math.nan
    return mean if math.isfinite(mean) else None


def activity(
    network: nn.Module, call: Callable[[], object]
) -> Float[Tensor, "point unit"] | None:
    """Run `call`, which calls the network, and return the inputs of the readout (the
    last layer with weights).

    Return None if the network has only one layer with weights.
    """
    layer_inputs: list[Tensor] = []

    def record_input(_: nn.Module, arguments: tuple[object, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            layer_inputs.append(arguments[0].detach())

    layers_with_weights = [
        layer
        for layer in network.modules()
        if not list(layer.children()) and list(layer.parameters())
    ]
    handles = [
        layer.register_forward_pre_hook(record_input) for layer in layers_with_weights
    ]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return layer_inputs[-1].flatten(1) if len(layer_inputs) > 1 else None


# --- Statistics of the path kernel 𝒦(x, xᵢ) and of the contributions 𝒮(x, xᵢ) of
# training examples xᵢ at queries x
#
#     cancellation           Σ|𝒮| / Σ_x |Σᵢ 𝒮|
#     top_k                  mean share of the k largest contributors in Σᵢ|𝒮| of a query
#     coefficient_variation  relative standard deviation of aᵢ(x) = 𝒦(x, xᵢ)⁻¹ 𝒮(x, xᵢ) over the
#                            queries x, median over examples; zero for a kernel machine whose
#                            coefficients do not depend on the query
#     left_out               fraction of pairs (x, xᵢ) whose 𝒦 is too small to divide by
#     symmetry_defect        ‖𝒦 − 𝒦ᵀ‖/‖𝒦‖ between training examples
#     psd_defect             max(0, −λ_min/λ_max) of the symmetric part of 𝒦(X, X); infinite if
#                            λ_min < 0 and no eigenvalue is positive


TOP_CONTRIBUTORS = (1, 5, 10)
MIN_KERNEL_SHARE = 1e-3
"""No coefficient aᵢ(x) is computed if the smallest singular value of the block
𝒦(x, xᵢ) is below this fraction of the largest entry of 𝒦."""


def summary(
    kernel: Float[Tensor, "query out kept out_"],
    contributions: Float[Tensor, "query out train"],
    train: int,
) -> dict[str, float]:
    """Compute the statistics in the list above.

    The first `train` queries are the training examples. `train` is 0 if the training
    examples are not queries."""
    mass = torch.stack([block.abs().sum() for block in blocks(contributions)]).sum()
    facts = {"cancellation": ratio(mass, summed(contributions).abs().sum())}
    facts |= {f"top_{k}": top_share(contributions, k) for k in TOP_CONTRIBUTORS}
    if is_square(kernel):
        facts |= coefficients(kernel, contributions)
        if train:
            facts |= defects(kernel[:train])
    return facts


def is_square(kernel: Float[Tensor, "query out train out_"]) -> bool:
    """Return True if the run stored its path kernel for all pairs of outputs."""
    return kernel.shape[1] == kernel.shape[3] and kernel.shape[2] > 0


def top_share(contributions: Float[Tensor, "query out train"], k: int) -> float:
    """Return the mean share of the k largest contributors in Σᵢ|𝒮| of a query.

    >>> top_share(torch.tensor([[[3.0, -1.0]]]), 1)
    0.75
    """
    k = min(k, contributions.shape[2])
    shares = []
    for block in blocks(contributions):
        sizes = block.abs().sum(1)  # [query, train]
        shares.append(sizes.topk(k, dim=1).values.sum(1) / sizes.sum(1))
    return float(torch.cat(shares).mean())


def coefficients(
    kernel: Float[Tensor, "query out train out_"],
    contributions: Float[Tensor, "query out train"],
) -> dict[str, float]:
    """Return `coefficient_variation` and `left_out`, which describe how aᵢ(x) depends
    on the query x."""
    pair_blocks = kernel.transpose(1, 2)  # [query, train, out, out_]
    outputs = pair_blocks.shape[2]
    sizes = smallest_singular_values(pair_blocks)
    usable = (sizes > 0) & (sizes >= MIN_KERNEL_SHARE * pair_blocks.abs().amax())
    # aᵢ(x) = 𝒦(x, xᵢ)⁻¹ 𝒮(x, xᵢ), NaN for unusable blocks
    divisor = torch.where(
        usable[..., None, None], pair_blocks, torch.eye(outputs).to(pair_blocks)
    )
    right_side = contributions.transpose(1, 2)[..., None].to(divisor)
    solved = torch.linalg.solve(divisor, right_side)[..., 0]  # [query, train, out]
    solved = torch.where(usable[..., None], solved, torch.nan)
    mean = solved.nanmean(0)
    deviation = (solved - mean).square().nanmean(0).sqrt()
    variation = (deviation / mean.abs()).flatten()
    return {
        "coefficient_variation": float(variation.nanmedian()),
        "left_out": float((~usable).double().mean()),
    }


def smallest_singular_values(
    matrices: Float[Tensor, "*batch out out_"],
) -> Float[Tensor, "*batch"]:
    if matrices.shape[-1] == 1:
        return matrices[..., 0].abs()[..., 0]
    values: Tensor = torch.linalg.svdvals(matrices)
    return values[..., -1]


def defects(kernel: Float[Tensor, "train out train out_"]) -> dict[str, float]:
    """Return `symmetry_defect` and `psd_defect`
    of the path kernel between training examples."""
    matrix = kernel.flatten(2).flatten(0, 1)
    values = torch.linalg.eigvalsh((matrix + matrix.mH) / 2)
    psd_defect = max(0.0, ratio(-values[0], values[-1]))
    if values[0] < 0 and values[-1] <= 0:
        psd_defect = math.inf
    return {
        "symmetry_defect": ratio((matrix - matrix.mH).norm(), matrix.norm()),
        "psd_defect": psd_defect,
    }


def ratio(numerator: Tensor, denominator: Tensor) -> float:
    """Return the quotient, or NaN if the denominator is zero."""
    return float(numerator / denominator) if denominator else float("nan")
