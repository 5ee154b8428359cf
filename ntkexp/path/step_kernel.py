"""The kernel of one training step, K(x, xᵢ) = ⟨J̄(x), J(xᵢ)⟩.

J̄(x), on the left, is the mean Jacobian at a point x along the step from θ₀ to θ₁ = θ₀
+ Δθ. A rule (`path/rule`) approximates J̄(x) by a weighted sum over substeps:

    J̄(x) = Σ_substeps weight · J(substep; x)

The Jacobian of a substep [u₀, u₁] is the secant Jacobian from θ₀ + u₀Δθ to θ₀ + u₁Δθ,
or the tangent Jacobian if u₀ = u₁.

J(xᵢ), on the right, is the tangent Jacobian of training example i at θ₀
(`Step.right_factor`). If only contributions are computed, the gradient J(xᵢ)ᵀℓ′ᵢ of the
example's loss replaces J(xᵢ). Then K(x, xᵢ)ℓ′ᵢ replaces K. The contribution of example
i is −η K(x, xᵢ)ℓ′ᵢ, with the step size η."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel import (
    Adjoint,
    DirectionalGradients,
    Jacobian,
    NoRule,
    Segment,
    Tape,
    gram,
)
from ntkexp.mistake import Mistake
from ntkexp.path.points import WITHOUT_RULES, Points
from ntkexp.path.rule.base import Substep
from ntkexp.shapes import Weights

KernelAndProduct: TypeAlias = tuple[
    Float[Tensor, "point out train out_"], Float[Tensor, "point out"]
]
"""K(x, xᵢ), and J̄(x)·v for a vector v in the shape of the weights."""

RightFactor: TypeAlias = Jacobian | DirectionalGradients
"""J(xᵢ) or J(xᵢ)ᵀℓ′ᵢ for a block of examples."""


@dataclass
class StepBlock:
    """A block of points during one step.

    The forward pass at each position in the step is cached.
    """

    points: Points
    segment: Segment  # segment from θ₀ to θ₁
    block: slice  # the block, as a slice of all points
    # index of the first point that has path kernels or contributions
    first_point: int = 0
    tapes: dict[float, Tape] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        """The rows of this block in the arrays of sums. Row 0
        of these arrays is point `first_point`."""
        return slice(
            self.block.start - self.first_point, self.block.stop - self.first_point
        )

    def kernel(
        self,
        substeps: Sequence[Substep],
        right: Sequence[Jacobian],
        vector: Weights | None = None,
    ) -> KernelAndProduct:
        """Return K(x, xᵢ) and J̄(x)·vector. The product is zero if `vector` is None."""
        (both,) = self.kernels(substeps, right, vector, (None,))
        return both

    def kernels(
        self,
        substeps: Sequence[Substep],
        right: Sequence[Jacobian],
        vector: Weights | None,
        components: Collection[Collection[str] | None],
    ) -> list[KernelAndProduct]:
        """Return K(x, xᵢ) and J̄(x)·vector for each component. The inner products are
        only over the parameters of the component.

        The component None contains all parameters.
        """
        right_sides = [[block.of(names) for block in right] for names in components]
        sums: list[KernelAndProduct] = []
        for number, substep in enumerate(substeps):
            jacobian = self.jacobian(substep)
            like = self.outputs(substep.start)
            for k, names in enumerate(components):
                left = jacobian.of(names)
                kernel = kernel_between(left, right_sides[k], like)
                product = kernel.new_zeros(like.shape)
                if vector:
                    product = left.applied(vector)
                if number == 0:
                    sums.append((kernel.mul_(substep.weight), product * substep.weight))
                    continue
                # K += weight · ⟨J(substep; x), J(xᵢ)⟩,   J̄·v += weight · J(substep; x)·v
                sums[k][0].add_(kernel, alpha=substep.weight)
                sums[k][1].add_(product, alpha=substep.weight)
        return sums

    def jacobian(self, substep: Substep) -> Jacobian:
        """Return the secant Jacobian of a substep,
        or its tangent Jacobian if start = end."""
        reader = self.points.reader
        chosen = self.points.chosen
        if substep.start == substep.end:
            return reader.tangent(self.tape(substep.start), chosen)
        try:
            return reader.along(
                self.tape(substep.start), self.tape(substep.end), chosen
            )
        except NoRule as error:
            raise Mistake(f"{error}; {WITHOUT_RULES}") from error

    def tape(self, position: float) -> Tape:
        """Return the tape (recorded forward pass) at the weights θ₀ + uΔθ,
        where u is `position`."""
        if position not in self.tapes:
            weights = self.segment.at(position)
            if position in (0.0, 1.0):
                self.tapes[position] = self.points.tape(weights, self.block)
            else:
                arguments = self.points.arguments(self.block)
                self.tapes[position] = self.points.reader.record(weights, arguments)
        return self.tapes[position]

    def outputs(self, position: float) -> Float[Tensor, "point out"]:
        """Return the outputs at the weights θ₀ + uΔθ, where u is `position`. Omit
        outputs without path integrals."""
        outputs = self.tape(position).outputs
        if self.points.chosen is None:
            return outputs
        return outputs[:, self.points.chosen]


def kernel_between(
    left: Jacobian | Adjoint,
    right: Iterable[RightFactor],
    like: Float[Tensor, "point out"],
    factors: Weights | None = None,
) -> Float[Tensor, "point out train out_"]:
    """Return ⟨left, J(xᵢ)⟩ for the examples of all blocks in `right`. If `left` is an
    adjoint and `factors` are given, return ⟨factors ⊙ left, J(xᵢ)⟩.

    If one side has no parameters, for example because a block does not use the
    parameters of a component, return zeros. Their shape follows from the outputs
    `like`."""
    kernels = [kernel_with_block(left, block, like, factors) for block in right]
    if not kernels:
        return like.new_zeros(*like.shape, 0, 1)
    if len(kernels) == 1:
        return kernels[0]
    return torch.cat(kernels, dim=2)


def kernel_with_block(
    left: Jacobian | Adjoint,
    right: RightFactor,
    like: Float[Tensor, "point out"],
    factors: Weights | None = None,
) -> Float[Tensor, "point out train out_"]:
    """Return ⟨left, J(xᵢ)⟩ for one block of examples."""
    left_parts = left.parts if isinstance(left, Adjoint) else left.blocks
    if left_parts and isinstance(right, DirectionalGradients):
        return right.kernel(left, factors)
    if not left_parts or isinstance(right, DirectionalGradients) or not right.blocks:
        return like.new_zeros(*like.shape, right.examples, right.outputs)
    if isinstance(left, Adjoint):
        return left.kernel(right, factors)
    return gram(left, right)
