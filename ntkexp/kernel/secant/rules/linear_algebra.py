"""Difference rules for functions of matrices, in closed form.

A bar is the mean over start and end of the step, and V = ΔA = A₁ − A₀. Each rule is
exact, and symmetric in A₀ and A₁. If A₀ = A₁, it is the derivative."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ntkexp.kernel.secant.call import (
    Call,
    Ends,
    LinearFunction,
    NoRule,
    Result,
    Rule,
    sum_terms,
)
from ntkexp.kernel.secant.rules.bilinear import terms_of
from ntkexp.kernel.secant.rules.elementwise import log_mean, quotient

# nodes for ∫ e^{sA₁} V e^{(1−s)A₀} ds; if the norms of A₀ and A₁ are at most 1, the
# error relative to V is about 2¹⁶ (8!)⁴/(17 (16!)³) = 1e-18
GAUSS_NODES = 8
# if a formula misses a difference by more than this many eps, it is corrected
ROUNDING_MULTIPLE = 100
UNDETERMINED = (
    "the matrix does not determine its eigenvectors or singular vectors: two of its "
    "values are nearly equal, or a vector changes its sign in the step"
)
WITHOUT_VALUE = (
    "some singular vectors belong to no singular value; give full_matrices=False"
)
# eigenvectors at start and end count as the same if their overlap is at least this
OVERLAP = 0.5


def matmul(call: Call, left: Ends, right: Ends) -> Ends:
    """Return a product of matrices, or of batches of matrices, at the start and the end,
    with its difference ΔA B̄ + Ā ΔB."""
    terms = terms_of(torch.matmul, call, left, right)
    start = left.start @ right.start
    end = left.end @ right.end
    return Ends(start, end, sum_terms(terms, start.shape) if terms else None)


def identity(like: Tensor, size: int) -> Tensor:
    return like.new_ones(size).diag_embed()


def symmetric(value: Ends) -> Ends:
    """Build a symmetric matrix from its lower triangle.
    Torch reads only this triangle."""
    return value.view(lambda a: a.tril() + a.tril(-1).mT)


def inverse(call: Call) -> Tensor:
    """Return the difference of A⁻¹: −½ (A₁⁻¹ V A₀⁻¹ + A₀⁻¹ V A₁⁻¹).

    Both terms are exact, since A₁⁻¹ − A₀⁻¹ = A₁⁻¹ (A₀ − A₁) A₀⁻¹. The mean of both is
    symmetric in A₀ and A₁."""
    p0, p1 = (call.coefficient(v) for v in call.result_ends[0])
    v = call.delta(call.args[0])
    if call.is_point:
        return -p0 @ v @ p0
    return (p1 @ v @ p0 + p0 @ v @ p1) * -0.5


def solve(call: Call) -> Tensor:
    """Return ΔX for A X = B, or for X A = B, which is AᵀXᵀ = Bᵀ."""
    matrix, right = call.args
    is_vector = right.start.dim() == 1 or right.start.shape == matrix.start.shape[:-1]
    if is_vector:
        right = right[..., None]
    if not call.arguments["left"]:
        matrix, right = (value.view(lambda v: v.mT) for value in (matrix, right))
    delta = solution(call, matrix, right)
    delta = delta if call.arguments["left"] else delta.mT
    if is_vector:
        return delta[..., 0]
    return delta


def solve_triangular(call: Call) -> Tensor:
    """Return ΔX for a triangular A. With `unitriangular`,
    the diagonal counts as ones."""
    matrix, right = call.args
    ones = call.arguments["unitriangular"]

    def triangle(a: Tensor) -> Tensor:
        if call.arguments["upper"]:
            return a.triu(int(ones))
        return a.tril(-int(ones))

    matrix = matrix.view(triangle)
    if ones:
        eye = identity(matrix.start, matrix.start.shape[-1])
        matrix = replace(matrix, start=matrix.start + eye, end=matrix.end + eye)
    if not call.arguments["left"]:
        return solution(
            call, *(value.view(lambda v: v.mT) for value in (matrix, right))
        ).mT
    return solution(call, matrix, right)


def cholesky_solve(call: Call) -> Tensor:
    """Return the difference of (LLᵀ)⁻¹ B, from the triangular factor L."""
    right, factor = call.args[:2]
    lower = factor.view(lambda f: f.triu().mT if call.arguments["upper"] else f.tril())
    if call.is_use(lower):
        raise NoRule(
            "cholesky_solve has no difference rule for a factor of weights and a right side "
            "that depends on inputs"
        )
    return solution(call, matmul(call, lower, lower.view(lambda f: f.mT)), right)


def solution(call: Call, matrix: Ends, right: Ends) -> Tensor:
    """Return ΔX for A X = B: the average of A₁⁻¹(ΔB − V X₀)
    and A₀⁻¹(ΔB − V X₁), with V = ΔA."""
    inverses = [torch.linalg.inv_ex(a)[0] for a in (matrix.start, matrix.end)]
    x0, x1 = (p @ b for p, b in zip(inverses, (right.start, right.end), strict=True))
    p0, p1 = (call.coefficient(p) for p in inverses)
    terms = []
    if right.delta is not None:
        terms.append((p0 + p1) / 2 @ call.delta(right, x0.shape))
    if matrix.delta is not None:
        terms += [
            p1 @ applied(call, matrix, x0) * -0.5,
            p0 @ applied(call, matrix, x1) * -0.5,
        ]
    return sum_terms(terms, x0.shape)


def applied(call: Call, matrix: Ends, x: Tensor) -> Tensor:
    """Return V x. If A depends on weights alone and x on inputs, V x is a use of the
    weights. It is a product if all examples share one matrix, else elementwise."""
    n = matrix.start.shape[-1]
    if call.is_use(matrix) and matrix.start.numel() == n * n:
        columns = x.movedim(-2, 0).reshape(n, -1)
        product = call.product(
            matrix.view(lambda a: a.reshape(n, n)), Ends(columns, columns, None)
        )
        return product.reshape(n, *x.shape[:-2], x.shape[-1]).movedim(0, -2)
    delta = call.delta(matrix, torch.Size([*x.shape[:-2], n, n]))
    return delta @ call.coefficient(x)


def cholesky(call: Call) -> Tensor:
    """Return ΔL = L̄ Φ(L̄⁻¹ V L̄⁻ᵀ), where Φ(X) is the lower triangle of X
    with half of its diagonal.

    This follows from V = ΔL L̄ᵀ + L̄ ΔLᵀ, and from X = Φ(X) + Φ(X)ᵀ for a symmetric X.
    L̄ is invertible, because it is the mean of two triangular matrices
    with positive diagonals."""
    (l0, l1) = call.result_ends[0]
    upper = call.arguments["upper"]
    middle = (l0 + l1).mT / 2 if upper else (l0 + l1) / 2
    factor = call.coefficient(middle).tril()
    inverse = call.coefficient(torch.linalg.inv_ex(middle)[0]).tril()
    value = call.args[0].view(lambda a: a.mT) if upper else call.args[0]
    x = inverse @ symmetric(call.expanded(value)).change @ inverse.mT
    delta = factor @ ((x.tril() + x.tril(-1)) / 2)
    if upper:
        return delta.mT
    return delta


def qr(call: Call) -> Result:
    """Return ΔQ and ΔR, the unique solution of V = ΔQ R̄ + Q̄ ΔR with an antisymmetric
    Q̄ᵀΔQ and an upper triangular ΔR.

    Columns must be independent at both ends,
    and no diagonal element of R may change its sign.

    Let Q̄ᵀQ̄ = CCᵀ and X = (Q̄ᵀQ̄)⁻¹Q̄ᵀ V R̄⁻¹. Split CᵀXC⁻ᵀ = S + U into an
    antisymmetric S and an upper triangular U. Then ΔR = C⁻ᵀUCᵀR̄."""
    (q0, q1), (r0, r1) = call.result_ends
    if call.arguments["mode"] != "reduced" or r0.shape[-2] != r0.shape[-1]:
        raise NoRule(
            "QR decompositions need a matrix with at least as many rows as columns; give "
            "mode='reduced'"
        )
    diagonal0 = r0.diagonal(dim1=-2, dim2=-1)
    diagonal1 = r1.diagonal(dim1=-2, dim2=-1)
    if bool((diagonal0 * diagonal1 <= 0).any()):
        raise NoRule("a column of Q changes its sign between the ends of a step")
    q = (q0 + q1) / 2
    r = (r0 + r1) / 2
    factor = torch.linalg.cholesky_ex(q.mT @ q)[0]
    back = torch.linalg.inv_ex(factor)[0]
    v = call.delta(call.args[0]) @ call.coefficient(torch.linalg.inv_ex(r)[0]).triu()
    x = call.coefficient(back @ q.mT) @ v @ call.coefficient(back.mT).triu()
    antisymmetric = x.tril(-1) - x.tril(-1).mT
    turned = (
        call.coefficient(back.mT).triu()
        @ (x - antisymmetric)
        @ call.coefficient(factor.mT).triu()
    )
    return v - call.coefficient(q) @ turned, turned @ call.coefficient(r).triu()


def reflections(call: Call) -> Tensor:
    """Return the difference of the first columns of H₁H₂…,
    for reflections H = I − τvvᵀ.

    The vector v of the k-th reflection has zeros, then a one, then column k below the
    diagonal. Apply one reflection after the other, by the product rule."""
    vectors, gains = (
        replace(call.expanded(value), from_inputs=True) for value in call.args
    )
    rows, columns = vectors.start.shape[-2:]
    eye = identity(vectors.start, rows)[:, :columns].expand(vectors.start.shape)
    basis = Ends(eye, eye, None)
    for k in reversed(range(gains.start.shape[-1])):
        below = vectors.view(lambda a, k=k: a[..., k : k + 1].tril(-k - 1))  # type: ignore[misc]
        v = replace(
            below,
            start=below.start + eye[..., k : k + 1],
            end=below.end + eye[..., k : k + 1],
        )
        scaled = matmul(call, v, gains[..., k : k + 1, None])
        # τ v vᵀ Q
        turned = matmul(call, scaled, matmul(call, v.view(lambda a: a.mT), basis))
        delta = None if turned.delta is None else -turned.delta
        if basis.delta is not None:
            delta = basis.delta if delta is None else basis.delta + delta
        basis = Ends(basis.start - turned.start, basis.end - turned.end, delta)
    return basis.change


def pseudo_inverse(call: Call) -> Tensor:
    """Return the difference of the pseudo-inverse A⁺ (Wedin 1973). It is

        −A₁⁺VA₀⁺ + A₁⁺A₁⁺ᵀVᵀ(I − A₀A₀⁺) + (I − A₁⁺A₁)VᵀA₀⁺ᵀA₀⁺

    averaged with the same expression with A₀ and A₁ exchanged. The formula also holds
    if the rank changes, where the derivative diverges."""
    value = call.args[0]
    (p0, p1) = call.result_ends[0]
    delta = call.delta(value)
    if call.arguments["hermitian"]:
        delta = symmetric(call.expanded(value)).change
        value = symmetric(value)
    ends = ((value.start.to(p0), p0), (value.end.to(p1), p1))
    if call.is_point:
        return wedin(call, delta, *ends)
    return (wedin(call, delta, *ends) + wedin(call, delta, *ends[::-1])) / 2


def wedin(
    call: Call, v: Tensor, this: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> Tensor:
    """Return Wedin's expression, −q V p + q qᵀ Vᵀ (I − a p) + (I − q b) Vᵀ pᵀ p.

    `this` is a matrix a with its pseudo-inverse p,
    and `other` a matrix b with its pseudo-inverse q."""
    a, p = this
    b, q = other
    rows, columns = (identity(a, n) for n in a.shape[-2:])
    qq = call.coefficient(q @ q.mT)
    pp = call.coefficient(p.mT @ p)
    left = call.coefficient(columns - q @ b)
    right = call.coefficient(rows - a @ p)
    middle = call.coefficient(q) @ v @ call.coefficient(p)
    return qq @ v.mT @ right + left @ v.mT @ pp - middle


def exponential(call: Call) -> Tensor:
    """Return the difference of e^A. It is ∫₀¹ e^{sA₁} V e^{(1−s)A₀} ds, averaged with
    the same integral with A₀ and A₁ exchanged.

    For a single small matrix, torch truncates the series of e^A so early that its
    values have errors of 1e-12. So the formula misses the change of these values by a
    small matrix R. To correct it, add the linear map X ↦ R ⟨V, X⟩/⟨V, V⟩, which maps V
    to R."""
    value = call.args[0]
    delta = call.delta(value)
    forward = exponential_integral(call, value.start, value.end)
    if call.is_point:
        return forward(delta)
    backward = exponential_integral(call, value.end, value.start)

    def mean(change: Tensor) -> Tensor:
        return (forward(change) + backward(change)) / 2

    # R is the change of the exponential that the integral misses. Correct it only if it
    # is more than rounding.
    e0, e1 = call.result_ends[0]
    step = (value.end - value.start).to(e0)
    missed = e1 - e0 - mean(step)
    size = largest_entry(e0) + largest_entry(e1)
    rounding = ROUNDING_MULTIPLE * torch.finfo(step.dtype).eps * size
    beyond = largest_entry(missed) > rounding
    # ⟨V, X⟩/⟨V, V⟩
    square = step.square().sum((-2, -1), keepdim=True)
    share = step / square.clamp_min(torch.finfo(step.dtype).tiny)
    along = (call.coefficient(share) * delta).sum((-2, -1), keepdim=True)
    remainder = torch.where(beyond, missed, 0.0)
    return mean(delta) + call.coefficient(remainder) * along


def largest_entry(matrix: Tensor) -> Tensor:
    """Return the largest absolute value in each matrix of a batch, as a 1 × 1
    matrix."""
    return matrix.abs().amax((-2, -1), keepdim=True)


def exponential_integral(call: Call, a: Tensor, b: Tensor) -> LinearFunction:
    """Return the map V ↦ ∫₀¹ e^{sA} V e^{(1−s)B} ds.

    Integrate over a short interval [0, h] by Gauss nodes.
    Then double the interval until h = 1:

    I(2h) = e^{hA} I(h) + I(h) e^{hB}
    """
    # halve h until the norms of hA and hB are at most one
    norms = [matrix.abs().sum(-2).amax() for matrix in (a, b) if matrix.numel()]
    size = torch.stack(norms or [torch.ones(())]).amax()
    doublings = int(size.clamp(1, 2**30).log2().ceil())
    h = 0.5**doublings
    nodes, weights = gauss(GAUSS_NODES, a)
    left, right = (
        call.coefficient(torch.linalg.matrix_exp(h * nodes * m)) for m in (a, b)
    )
    left = h * weights * left
    right = right.flip(0)  # the nodes 1 − s are in reverse order
    # e^{hA} and e^{hB} for each doubling
    doubled = [
        tuple(torch.linalg.matrix_exp(h * 2.0**k * m) for m in (a, b))
        for k in range(doublings)
    ]
    factors = [tuple(call.coefficient(m) for m in pair) for pair in doubled]

    def integral(v: Tensor) -> Tensor:
        total = (left @ v @ right).sum(0)
        for before, after in factors:
            total = before @ total + total @ after
        return total

    return integral


def gauss(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return Gauss nodes and weights on [0, 1],
    in a shape that broadcasts with matrices."""
    nodes, weights = (
        torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(count)
    )
    shape = (-1, *[1] * like.dim())
    return ((1 + nodes) / 2).to(like).view(shape), (weights / 2).to(like).view(shape)


def determinant(call: Call) -> Tensor:
    """Return the difference of det A: ⟨∫₀¹ adj(A₀ + sV)ᵀ ds, V⟩. The integrand is a
    polynomial in s, so ⌈n/2⌉ Gauss nodes give its exact integral."""
    value = call.args[0]

    def cofactors(a0: Tensor, a1: Tensor) -> Tensor:
        return mean_cofactors(a0, a1, torch.zeros(a0.shape[:-2]).to(a0))

    slope = call.slope(value, cofactors)
    return (slope * call.delta(value)).sum((-2, -1))


def mean_cofactors(a0: Tensor, a1: Tensor, scale: Tensor) -> Tensor:
    """Return e^−scale ∫₀¹ adj(A₀ + sV)ᵀ ds. For A = U diag(σ) Wᵀ, singular or not,

    adj(A)ᵀ = det(U) det(W) U diag(∏_{j≠i} σ_j) Wᵀ.
    """
    nodes, weights = gauss(max(1, ceil(a0.shape[-1] / 2)), a0)
    u, sizes, vh = torch.linalg.svd(torch.lerp(a0, a1, nodes))
    n = sizes.shape[-1]
    # log ∏_{j≠i} σ_j
    logs = sizes.log()[..., None, :].expand(*sizes.shape, n)
    is_diagonal = torch.eye(n, dtype=torch.bool, device=sizes.device)
    others = torch.where(is_diagonal, 0.0, logs).sum(-1)
    sign = torch.linalg.det(u @ vh).sign()
    products = (others - scale[..., None]).exp() * sign[..., None]
    cofactors = (u * products[..., None, :]) @ vh
    mean: Tensor = (weights * cofactors).sum(0)
    return mean


def log_determinant(call: Call) -> Result:
    """Return the differences of the sign and of log|det|, each as a slope times Δdet.

    The slope of log|det| is the slope of the logarithm between |det A₀| and |det A₁|.
    The slope of the sign is its jump divided by Δdet. All determinants are divided by
    the larger one, so that they do not overflow."""
    value = call.args[0]
    ((s0, s1), (l0, l1), *_) = call.result_ends
    if not bool((l0.isfinite() & l1.isfinite()).all()):
        raise NoRule("the logarithm of the determinant of a singular matrix")
    scale = torch.maximum(l0, l1)
    slope = call.slope(value, lambda a0, a1: mean_cofactors(a0, a1, scale))
    change = (slope * call.delta(value)).sum((-2, -1))
    d0 = s0 * (l0 - scale).exp()
    d1 = s1 * (l1 - scale).exp()
    logs = torch.where(
        s0 == s1, s0 / log_mean(l0 - scale, l1 - scale), (l1 - l0) / (d1 - d0)
    )
    jump = quotient(s1 - s0, d1 - d0, 0.0)
    return call.coefficient(jump) * change, call.coefficient(logs) * change, None, None


def eigenvalues(call: Call) -> Result:
    """Return Δλ = u₁ᵀVu₀/u₁ᵀu₀ and Δu for a symmetric matrix.

    Δλ follows from u₁ᵀ(A₁ − A₀)u₀ = (λ₁ − λ₀) u₁ᵀu₀; see `value_differences`. For Δu,
    see `eigenvectors`."""
    value = symmetric(call.expanded(call.args[0]))
    (_, u0), (_, u1) = (torch.linalg.eigh(a) for a in (value.start, value.end))
    ends, vectors = call.result_ends
    across = (u1, u0), (u0, u1)
    along = (u0, u0), (u1, u1)
    delta = value_differences(call, value, ends, across, along, (u0 * u1).sum(-2))
    if vectors[0].numel() == 0:
        return delta, None
    return delta, eigenvectors(call, value, ends, vectors)


def eigenvectors(
    call: Call,
    value: Ends,
    sizes: tuple[Tensor, Tensor],
    vectors: tuple[Tensor, Tensor],
) -> Tensor | str:
    """Return Δu, from the product rule for Au = λu and a constant uᵀu:

        (Ā − λ̄) Δu − Δλ ū = −V ū,   ūᵀΔu = 0

    The solution is unique if λ differs from the other eigenvalues. If λ is so close to
    another eigenvalue that half of the digits or more are lost,
    return the reason as text."""
    u0, u1 = vectors
    start = value.start.to(u0)
    end = value.end.to(u0)
    mean = (u0 + u1) / 2
    inverses = bordered_inverses((start + end) / 2, (sizes[0] + sizes[1]) / 2, mean)
    if inverses is None:
        return UNDETERMINED
    # If Δu differs from u₁ − u₀ by more than rounding,
    # add a correction along V, as in `value_differences`
    v = value.change
    step = end - start
    missed = u1 - u0 - solved(inverses, step, mean)
    eps = torch.finfo(u0.dtype).eps
    # `eigh` with UPLO="U" reads the upper triangle; then this error is also large
    if not bool((missed.abs() <= eps**0.5).all()):
        return UNDETERMINED
    beyond = torch.where(missed.abs() > ROUNDING_MULTIPLE * eps, missed, 0.0)
    squares = step.square().sum((-2, -1), keepdim=True)
    share = call.coefficient(quotient(beyond, squares, 0.0))
    correction = share * (call.coefficient(step) * v).sum((-2, -1), keepdim=True)
    uncorrected = solved(call.coefficient(inverses), v, call.coefficient(mean))
    return uncorrected + correction


def bordered_inverses(
    matrix: Tensor, values: Tensor, vectors: Tensor
) -> Float[Tensor, "*batch vector n n"] | None:
    """Return the leading n × n block of the inverse of the bordered matrix
    [Ā − λ̄, −ū; ūᵀ, 0] for each eigenvector. Return None if half of the digits or more
    would be lost."""
    n = vectors.shape[-2]
    kind = torch.finfo(vectors.dtype)
    size = values.abs().amax(-1)[..., None, None].clamp(min=kind.tiny)
    apart = matrix[..., None, :, :] - values[..., None, None] * identity(vectors, n)
    column = vectors.mT[..., None]
    above = torch.cat([apart / size[..., None], -column], dim=-1)
    bordered = torch.cat([above, functional.pad(column.mT, (0, 1))], dim=-2)
    if not bool(bordered.isfinite().all()):
        return None
    if not bool((torch.linalg.cond(bordered) * kind.eps**0.5 < 1).all()):
        return None
    inverses: Tensor = torch.linalg.inv(bordered)[..., :n, :n] / size[..., None]
    return inverses


def solved(inverses: Tensor, v: Tensor, vectors: Tensor) -> Tensor:
    """Return −M V u for each vector u with its own matrix M (`inverses`)
    and V = `v`."""
    return -(inverses @ (v @ vectors).mT[..., None])[..., 0].mT


def singular_values(call: Call) -> Result:
    """Return the differences of singular values,
    and of singular vectors if they are determined.

    Δσ = ⟨u₁v₀ᵀ + u₀v₁ᵀ, V⟩/(u₁ᵀu₀ + v₁ᵀv₀) follows from u₁ᵀVv₀ = σ₁v₁ᵀv₀ − σ₀u₁ᵀu₀ and
    the same equation with A₀ and A₁ exchanged."""
    value = call.expanded(call.args[0])
    (u0, _, w0), (u1, _, w1) = (
        torch.linalg.svd(a, full_matrices=False) for a in (value.start, value.end)
    )
    v0 = w0.mT
    v1 = w1.mT
    overlap = ((u0 * u1).sum(-2) + (v0 * v1).sum(-2)) / 2
    across = (u1, v0), (u0, v1)
    along = (u0, v0), (u1, v1)
    ends = call.result_ends[1]
    delta = value_differences(call, value, ends, across, along, overlap)
    rows, columns = value.start.shape[-2:]
    if call.result_ends[0][0].numel() == 0:
        return None, delta, None
    if rows != columns and call.arguments["full_matrices"]:
        return WITHOUT_VALUE, delta, WITHOUT_VALUE
    left, right = singular_vectors(call, value)
    return left, delta, right


def singular_vectors(call: Call, value: Ends) -> tuple[Tensor | str, Tensor | str]:
    """Return the differences of the singular vectors (u, v) of A. They are the
    eigenvectors of [[0, A], [Aᵀ, 0]] with the eigenvalues σ."""

    def twofold(a: Tensor) -> Tensor:
        rows, columns = a.shape[-2:]
        return torch.cat(
            [functional.pad(a, (rows, 0)), functional.pad(a.mT, (0, columns))], -2
        )

    sides = zip(call.result_ends[0], call.result_ends[2], strict=True)
    start, end = (torch.cat([u, w.mT], -2) for u, w in sides)
    delta = eigenvectors(call, value.view(twofold), call.result_ends[1], (start, end))
    if isinstance(delta, str):
        return delta, delta
    left, right = delta.tensor_split([value.start.shape[-2]], -2)
    return left, right.mT


def value_differences(
    call: Call,
    value: Ends,
    sizes: tuple[Tensor, Tensor],
    across: tuple[tuple[Tensor, Tensor], ...],
    along: tuple[tuple[Tensor, Tensor], ...],
    overlap: Tensor,
) -> Tensor:
    """Return Δσ = ⟨G, V⟩ for each eigenvalue or singular value σ
    with its directions u and v.

    `sizes` is the pair (σ₀, σ₁). `across` and `along` are the pairs of directions in G
    and Ḡ.

    If u and v change little, G is the mean of u₁v₀ᵀ and u₀v₁ᵀ, divided by the overlap
    of the directions at start and end. Otherwise, for example if two values cross, G is
    Ḡ, the mean of u₀v₀ᵀ and u₁v₁ᵀ, with a correction along V that makes it exact
    (Gonzalez 1996):

        G = Ḡ + (σ₁ − σ₀ − ⟨Ḡ, V⟩) V/⟨V, V⟩
    """
    v = value.change
    step = value.end - value.start
    same = overlap.abs() >= OVERLAP
    by_overlap = mean_form(call, v, across) / torch.where(same, overlap, 1.0)
    if call.is_point or bool(same.all()):
        return by_overlap
    # ⟨Ḡ, V⟩, and its correction
    plain = sum((left * (step @ right)).sum(-2) for left, right in along) / 2
    squares = step.square().sum((-2, -1))[..., None]
    share = call.coefficient(quotient(sizes[1] - sizes[0] - plain, squares, 0.0))
    correction = share * (call.coefficient(step) * v).sum((-2, -1))[..., None]
    return torch.where(same, by_overlap, mean_form(call, v, along) + correction)


def mean_form(
    call: Call, v: Tensor, pairs: tuple[tuple[Tensor, Tensor], ...]
) -> Tensor:
    """Return the mean of uᵀVw over two pairs (u, w) of directions."""
    terms = [
        (call.coefficient(left) * (v @ call.coefficient(right))).sum(-2)
        for left, right in pairs
    ]
    return (terms[0] + terms[1]) / 2


LINEAR_ALGEBRA: dict[str, Rule] = {
    "_linalg_det": determinant,
    "_linalg_eigh": eigenvalues,
    "_linalg_slogdet": log_determinant,
    "_linalg_solve_ex": solve,
    "_linalg_svd": singular_values,
    "cholesky_solve": cholesky_solve,
    "linalg_cholesky_ex": cholesky,
    "linalg_householder_product": reflections,
    "linalg_inv_ex": inverse,
    "linalg_matrix_exp": exponential,
    "linalg_pinv": pseudo_inverse,
    "linalg_qr": qr,
    "linalg_solve_triangular": solve_triangular,
}
