"""The backward sum: contributions through an optimizer with momentum,
from the last step to the first.

Step s is linear in the gradient g that it uses (`LinearStep` defines the symbols):

    p = g + λθ        m ← βm + α ⊙ p        θ ← (1 − d)θ − S ⊙ m − N ⊙ p − r

m is the momentum, and θ are the weights. J̄(s) is the secant Jacobian of the
outputs along the step, or the Jacobian of another quadrature rule. Going back from the
last step, the sum updates two adjoints, U and V:

    U_s = S_s ⊙ J̄(s) + β_{s+1} U_{s+1}     the adjoint of m_s: −∂(final outputs)/∂m_s
    V_s = α_s U_s + N_s ⊙ J̄(s)             the adjoint of p_s: −∂(final outputs)/∂p_s

    kernel     K_s(x, xᵢ) = ⟨V_s(x), c_s Jᵢ⟩        contribution of example i: −K_s(x, xᵢ) ℓ′ᵢ
    decay      −⟨V_s, λθ_s⟩ − J̄(s)·dθ_s
    rounding   −⟨V_s, e_s⟩ − J̄(s)·r_s

The gradient of the step is g = Σᵢ c Jᵢᵀℓ′ᵢ + e. Jᵢ is the Jacobian at training example
i, ℓ′ᵢ the derivative of the loss by the outputs of this example, and c a factor, such
as the factor of gradient clipping. e is a rounding error, which no example caused. If
J̄ is the secant Jacobian, then contributions, decay and rounding add up to
Σ_s J̄(s)Δθ_s = f_T − f_0, exactly.

Some optimizers, such as Muon, apply a linear map M to the update of a matrix of
weights: θ ← θ − M(S ⊙ m + N ⊙ p). Then MᵀJ̄ replaces J̄ in U and V.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel import Adjoint, Jacobian
from ntkexp.kernel.features.adjoint import zero_adjoint
from ntkexp.kernel.features.blocks import Block, Rows
from ntkexp.optimizer.base import IDLE, Coefficient, LinearStep, Mixing, per_weight
from ntkexp.path.step_kernel import RightFactor, kernel_between
from ntkexp.shapes import Weights


@dataclass(frozen=True, kw_only=True)
class BackwardStep:
    """The data of one step that the backward sum needs. They come from a run
    or from a followed loop."""

    start: Weights  # θ_s, the weights before the step
    difference: Weights  # θ_{s+1} − θ_s
    # the optimizer's linear step for each parameter that changed. S and N are its
    # fields `momentum_scale` and `gradient_scale` (see `LinearStep.divided`)
    linear: Mapping[str, LinearStep]
    # Jᵢ at the weights of the model call, or Jᵢᵀℓ′ᵢ in the form of a Jacobian with one
    # output
    right: Sequence[RightFactor]
    rounding: Weights  # e, by parameter
    # factors in [0, 1] of the elements of c Jᵢ, by parameter; missing parameters have 1.
    # The factor is 0 where g is only a rounding error. In a loop that clips gradients
    # by value, it is the clipping factor of the element.
    credit: Weights
    factor: Mapping[str, float] | None = None  # c, by parameter; None: 1


class StepTerms(NamedTuple):
    """The terms of one step. Their inner products are over all parameters, or over the
    parameters of one component."""

    kernel: Float[Tensor, "query out train out_"]  # ⟨V, c Jᵢ⟩
    decay: Float[Tensor, "query out"]
    rounding: Float[Tensor, "query out"]


class StepResult(NamedTuple):
    """The terms of one step, and the change of the outputs along the step."""

    terms: StepTerms
    # J̄Δθ, which is f(θ_{s+1}) − f(θ_s) if J̄ is the secant Jacobian
    change: Float[Tensor, "query out"]
    by_component: Sequence[
        StepTerms
    ] = ()  # the terms of each component; their sum is `terms`


@dataclass(kw_only=True)
class BackwardSum:
    """The recursion for the adjoint U. With `components`, each step also returns the
    terms of each component."""

    adjoint: Adjoint | None = None  # U; None before the first step is added
    # β_{s+1} of the step that was added last, by parameter
    momentum_decay: Mapping[str, float] = field(default_factory=dict)
    # parameters with a map M in any step so far
    mixed: set[str] = field(default_factory=set)
    saved: Sequence[Tensor] = ()  # the tensors of U from a checkpoint
    components: Sequence[Collection[str]] = ()

    def add(
        self, step: BackwardStep, substeps: Iterable[tuple[float, Jacobian]]
    ) -> StepResult:
        """Add one step. J̄ is the weighted sum of the Jacobians in `substeps`."""
        coefficients = StepCoefficients.of(step)
        self.mixed |= coefficients.mixing.keys()
        forms_v = bool(self.mixed) or coefficients.needs_v(step.credit)
        gradient_part: Adjoint | None = None  # N ⊙ J̄
        change = next(iter(step.start.values())).new_zeros(())
        groups = self.components or (None,)
        sums = [
            TermSums(step, coefficients, names, change, change, change)
            for names in groups
        ]
        beta = self.apply_momentum_decay()
        for weight, secant in substeps:
            # U_s = S_s ⊙ MᵀJ̄(s) + β_{s+1} U_{s+1}. The first substep multiplies U by β.
            jacobian = self.apply_mixing_adjoint(secant, step, coefficients)
            self.adjoint = self.adjoint or self.first_adjoint(jacobian, step.start)
            self.adjoint = self.adjoint.extended_to(jacobian, step.start)
            self.adjoint.accumulate(
                jacobian, times(weight, coefficients.momentum_scale), beta
            )
            beta = 1.0

            # J̄Δθ
            change = torch.add(change, secant.applied(step.difference), alpha=weight)

            # N ⊙ J̄ is the second term of V. Store it if V must be formed. Otherwise
            # add its products to the sums now.
            if forms_v:
                gradient_part = gradient_part or self.adjoint.zeros()
                scale = broadcast_all(coefficients.gradient_scale, step.start)
                gradient_part.accumulate(jacobian, times(weight, scale), 1.0)
            for terms in sums:
                terms.add_secant(
                    weight, secant, change, with_gradient_scale=not forms_v
                )
        self.momentum_decay = coefficients.momentum_decay

        # V = α U + N ⊙ J̄, and the terms ⟨V, ·⟩
        assert self.adjoint is not None
        v = coefficients.adjoint_of_gradient(self.adjoint, gradient_part, step.start)
        for terms in sums:
            terms.add_adjoint(v, change)
        return self.result(sums, change)

    def apply_momentum_decay(self) -> float:
        """Return β_{s+1} if it is the same for all parameters.

        Otherwise multiply the adjoint U_{s+1} of each parameter by its β, and return 1.
        """
        beta = shared_value(self.momentum_decay)
        if beta is not None:
            return beta
        if self.adjoint is not None:
            self.adjoint.shrink(self.momentum_decay)
        return 1.0

    def apply_mixing_adjoint(
        self, secant: Jacobian, step: BackwardStep, coefficients: StepCoefficients
    ) -> Jacobian:
        """Return MᵀJ̄. For parameters in `mixed`, the result has dense rows, one per
        query and output."""
        if not self.mixed:
            return secant

        jacobian = secant.with_rows(self.mixed, step.start)
        blocks: list[Block] = []
        for block in jacobian.blocks:
            if isinstance(block, Rows) and block.name in coefficients.mixing:
                shape = step.start[block.name].shape
                matrices = block.rows.view(*block.rows.shape[:2], *shape)
                rows = coefficients.mixing[block.name].adjoint(matrices).flatten(2)
                blocks.append(Rows(rows, block.name))
            else:
                blocks.append(block)
        return replace(jacobian, blocks=tuple(blocks))

    def first_adjoint(self, jacobian: Jacobian, weights: Weights) -> Adjoint:
        """Return the adjoint U = 0, or U from the checkpoint."""
        adjoint = zero_adjoint(jacobian, weights)
        for part, total in zip(adjoint.parts.values(), self.saved, strict=False):
            part.copy_(total)
        self.saved = ()
        return adjoint

    def result(self, sums: Sequence[TermSums], change: Tensor) -> StepResult:
        """Return the terms of the step, in total and by component."""
        by_component = [terms.result(change) for terms in sums]
        whole = by_component[0]
        if not self.components:
            return StepResult(whole, change)
        for terms in by_component[1:]:
            whole = StepTerms(*map(torch.add, whole, terms))
        return StepResult(whole, change, by_component)

    @property
    def state(self) -> list[Tensor]:
        """The tensors of the adjoint U, for a checkpoint."""
        if self.adjoint is None:
            return list(self.saved)
        return list(self.adjoint.parts.values())


@dataclass(frozen=True)
class StepCoefficients:
    """The coefficients of a step (see `LinearStep`), by parameter.

    The last three entries are vectors of weights. The backward sum contains their
    inner products with V and J̄.
    """

    momentum_scale: dict[str, Tensor]  # S, the factor of m
    gradient_scale: dict[str, Coefficient]  # N, the factor of p
    momentum_gain: dict[str, Coefficient]  # α, the factor of p in m
    momentum_decay: dict[str, float]  # β, the factor of the old m
    mixing: dict[str, Mixing]  # M, a linear map of the update
    l2: Weights  # λθ; empty if zero
    decoupled_decay: Weights  # dθ; empty if zero
    residual: Weights  # r; empty if zero

    @classmethod
    def of(cls, step: BackwardStep) -> StepCoefficients:
        """Collect the coefficients of all parameters.
        A parameter without an update has zeros."""
        read = cls({}, {}, {}, {}, {}, {}, {}, {})
        l2: dict[str, Coefficient] = {}
        decoupled_decay: dict[str, Coefficient] = {}
        residual: dict[str, Tensor] = {}
        for name, weight in step.start.items():
            linear = step.linear.get(name, IDLE)
            read.momentum_scale[name] = per_weight(linear.momentum_scale, weight)
            read.gradient_scale[name] = linear.gradient_scale
            read.momentum_gain[name] = linear.momentum_gain
            read.momentum_decay[name] = linear.momentum_decay
            if linear.mixing is not None:
                read.mixing[name] = linear.mixing
            if linear.residual is not None:
                residual[name] = linear.residual
            l2[name] = linear.l2
            decoupled_decay[name] = linear.decoupled_decay
        if residual:
            zeros = {
                name: torch.zeros_like(weight) for name, weight in step.start.items()
            }
            residual = zeros | residual
        return replace(
            read,
            l2=decayed(l2, step.start),
            decoupled_decay=decayed(decoupled_decay, step.start),
            residual=residual,
        )

    def needs_v(self, credit: Weights) -> bool:
        """Return True if V must be formed.

        This is the case if α or N differs between the weights of a parameter. It is
        also the case if N ≠ 0 and some elements have a `credit` other than 1."""
        coefficients = (*self.gradient_scale.values(), *self.momentum_gain.values())
        if any(isinstance(coefficient, Tensor) for coefficient in coefficients):
            return True
        return bool(credit) and any(self.gradient_scale.values())

    def adjoint_of_gradient(
        self, adjoint: Adjoint, gradient_part: Adjoint | None, weights: Weights
    ) -> ScaledAdjoint:
        """Return V = α U + N ⊙ J̄, in the memory of `gradient_part` (N ⊙ J̄). If
        `gradient_part` is None, return U with the numbers α as scale."""
        if gradient_part is None:
            return ScaledAdjoint(adjoint, scalars_only(self.momentum_gain))
        v = gradient_part
        v.add(adjoint, broadcast_all(self.momentum_gain, weights))
        return ScaledAdjoint(v, dict.fromkeys(self.momentum_gain, 1.0))


class ScaledAdjoint(NamedTuple):
    """An adjoint with a scale factor for each parameter."""

    adjoint: Adjoint
    scale: Mapping[str, float]

    def applied(self, vector: Weights) -> Float[Tensor, "query out"]:
        """Return the inner product with a vector of weights."""
        scale = shared_value(self.scale)
        if scale is not None:
            return scale * self.adjoint.applied(vector)
        scaled = {name: self.scale[name] * part for name, part in vector.items()}
        return self.adjoint.applied(scaled)


@dataclass
class TermSums:
    """The running sums of the terms of one step, over the parameters in `names`. None
    means all parameters."""

    step: BackwardStep
    coefficients: StepCoefficients
    names: Collection[str] | None
    kernel: Tensor
    decay: Tensor
    rounding: Tensor

    @property
    def examples(self) -> Iterator[RightFactor]:
        """Yield Jᵢ in blocks of examples, because the Jacobians of all examples may not
        fit into memory."""
        return (jacobian.of(self.names) for jacobian in self.step.right)

    def add_secant(
        self,
        weight: float,
        secant: Jacobian,
        like: Float[Tensor, "query out"],
        *,
        with_gradient_scale: bool,
    ) -> None:
        """Add the terms with J̄. If `with_gradient_scale`, also add the terms with
        N ⊙ J̄. (If V is formed, V includes these terms.)"""
        jacobian = secant.of(self.names)
        coefficients = self.coefficients

        # −J̄·dθ and −J̄·r
        if coefficients.decoupled_decay:
            self.decay = self.decay - weight * jacobian.applied(
                coefficients.decoupled_decay
            )
        if coefficients.residual:
            self.rounding = self.rounding - weight * jacobian.applied(
                coefficients.residual
            )

        # ⟨N ⊙ J̄, c Jᵢ⟩, −⟨N ⊙ J̄, λθ⟩ and −⟨N ⊙ J̄, e⟩
        if not with_gradient_scale or not any(coefficients.gradient_scale.values()):
            return
        part = jacobian.scaled(scalars_only(coefficients.gradient_scale))
        left = part
        if self.step.factor is not None:
            left = part.scaled(self.step.factor)
        self.kernel = self.kernel + weight * kernel_between(left, self.examples, like)
        if coefficients.l2:
            self.decay = self.decay - weight * part.applied(coefficients.l2)
        if self.step.rounding:
            self.rounding = self.rounding - weight * part.applied(self.step.rounding)

    def add_adjoint(self, v: ScaledAdjoint, like: Float[Tensor, "query out"]) -> None:
        """Add ⟨V, c Jᵢ⟩, −⟨V, λθ⟩ and −⟨V, e⟩."""
        # Let the scale of V include c. If all parameters have the same scale, multiply
        # after the product.
        factor = self.step.factor or {}
        scales = {
            name: number * factor.get(name, 1.0) for name, number in v.scale.items()
        }
        scale = shared_value(scales)
        right: Iterable[RightFactor] = self.examples
        if scale is None:
            right = (jacobian.scaled(scales) for jacobian in self.examples)
            scale = 1.0
        # V is multiplied by the credit, which is zero where the gradient is only a
        # rounding error
        part = ScaledAdjoint(v.adjoint.of(self.names), v.scale)
        product = kernel_between(part.adjoint, right, like, self.step.credit)
        self.kernel = self.kernel + scale * product

        if self.coefficients.l2 and part.adjoint.parts:
            self.decay = self.decay - part.applied(self.coefficients.l2)
        if self.step.rounding and part.adjoint.parts:
            self.rounding = self.rounding - part.applied(self.step.rounding)

    def result(self, like: Float[Tensor, "query out"]) -> StepTerms:
        """Return the terms in the shape of the outputs `like`."""
        return StepTerms(
            self.kernel, self.decay.expand_as(like), self.rounding.expand_as(like)
        )


def times(number: float, weights: Weights) -> Weights:
    """Return the weights, multiplied by a number."""
    if number == 1:
        return weights
    return {name: number * weight for name, weight in weights.items()}


def broadcast_all(coefficients: Mapping[str, Coefficient], weights: Weights) -> Weights:
    """Expand all coefficients to the shapes of the weights."""
    return {
        name: per_weight(each, weights[name]) for name, each in coefficients.items()
    }


def decayed(factors: Mapping[str, Coefficient], weights: Weights) -> Weights:
    """Return the weights times their factors,
    or an empty dict if all factors are zero."""
    if not any(isinstance(factor, Tensor) or factor for factor in factors.values()):
        return {}
    return {name: weight * factors[name] for name, weight in weights.items()}


def scalars_only(coefficients: Mapping[str, Coefficient]) -> dict[str, float]:
    """Return the coefficients that are numbers. Omit tensors."""
    return {
        name: each
        for name, each in coefficients.items()
        if not isinstance(each, Tensor)
    }


def shared_value(numbers: Mapping[str, float]) -> float | None:
    """Return the coefficient if it is the same for all parameters, else None.

    >>> shared_value({"a": 0.9, "b": 0.9}), shared_value({"a": 0.9, "b": 1.0}), shared_value({})
    (0.9, None, 1.0)
    """
    first = next(iter(numbers.values()), 1.0)
    if any(number != first for number in numbers.values()):
        return None
    return first
