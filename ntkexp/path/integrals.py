"""The path kernel 𝒦 and the contributions 𝒮 of training examples: sums over the steps
of a path, defined below.

There are sums over the whole path, over each step, over each phase of training, and
over each component (group of parameters).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod, sqrt
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.kernel import Closure
from ntkexp.kernel.secant.segment import bound
from ntkexp.on_disk import RowsInFile, RowsOfArray, copied_like, release_pages
from ntkexp.path.checkpoint import Resumable
from ntkexp.path.components import Components
from ntkexp.path.domain import Domain
from ntkexp.path.rule.base import Substep
from ntkexp.path.step import Step
from ntkexp.path.step_kernel import StepBlock

# --- Norms of the terms of one step, and the check that the step closes: the
# contributions Δ𝒮ᵢ of all examples i must add up to the change Δf of the outputs.


class Rounding(NamedTuple):
    """Data that bound the rounding error of a step.

    `terms` is Σ‖terms of f‖ at the start of the step. `eps` is the machine epsilon of
    the lowest precision in the computation of f from the weights."""

    terms: float
    eps: float


@dataclass
class Tally:
    """Norms of the terms of one step, over all points. They are logged as metrics, and
    they check that the step closes. Δ𝒮ᵢ is the contribution of example i in the step."""

    missed: float = 0.0  # ‖Σᵢ Δ𝒮ᵢ − Δf‖², which is 0 if the step closes exactly
    changed: float = 0.0  # ‖Δf‖², for the change Δf of the outputs
    outputs: float = 0.0  # ‖f(θ_{s+1})‖², at the weights after the step
    contribution_mass: float = 0.0  # Σ|Δ𝒮ᵢ|, over examples i and points
    contribution_sum: float = 0.0  # Σ|Σᵢ Δ𝒮ᵢ|, over points
    # ‖ηK_s‖², for the step size η and the kernel K_s of the step
    kernel_squares: float = 0.0
    kernels: bool = True  # False if only contributions are computed

    def add(
        self,
        block: StepBlock,
        kernel: Float[Tensor, "point out kept out_"],
        parts: Float[Tensor, "point out train"],
        summed: Float[Tensor, "point out"],
        expected: Float[Tensor, "point out"],
    ) -> None:
        """Add the norms at one block of points.

        `kernel` is ηK_s, `parts` are the contributions Δ𝒮ᵢ, and `summed` is Σᵢ Δ𝒮ᵢ.
        `expected` is the change of the outputs according to the rule."""
        change = block.outputs(1.0) - block.outputs(0.0)
        missed, changed, outputs, mass, net, squares = scalars_to_cpu(
            (expected - change).square().sum(),
            change.square().sum(),
            block.outputs(1.0).square().sum(),
            parts.norm(p=1, dim=2).sum(),
            summed.abs().sum(),
            kernel.square().sum(),
        )
        self.missed += missed
        self.changed += changed
        self.outputs += outputs
        self.contribution_mass += mass
        self.contribution_sum += net
        self.kernel_squares += squares
        self.kernels = kernel.numel() > 0

    def closure_error(self, rounding: Rounding) -> Closure | None:
        """Return the error ‖Σᵢ Δ𝒮ᵢ − Δf‖ with a bound, the largest error that rounding
        explains. If the error does not exceed the bound, return None.

        The bound is proportional to the sizes of the outputs and of the contributions.
        If the outputs are not finite, also return None. Another check then reports that
        the run has diverged."""
        size = (
            rounding.terms
            + sqrt(self.outputs)
            + sqrt(self.changed)
            + self.contribution_mass
        )
        closure = Closure(sqrt(self.missed), bound(size, rounding.eps))
        if closure.holds or not isfinite(self.outputs + self.changed):
            return None
        return closure

    @property
    def closure(self) -> float:
        """The relative error of the step's contributions, ‖Σᵢ Δ𝒮ᵢ − Δf‖/‖Δf‖."""
        if not self.changed:
            return 0.0
        return sqrt(self.missed / self.changed)

    @property
    def kernel_mass(self) -> float | None:
        """η‖K_s‖, the step size times the norm of the step's kernel. None if only
        contributions are computed."""
        if not self.kernels:
            return None
        return sqrt(self.kernel_squares)


def scalars_to_cpu(*numbers: Float[Tensor, ""]) -> list[float]:
    """Copy scalars from a device in one transfer.

    >>> scalars_to_cpu(torch.tensor(1.0), torch.tensor(0.5, dtype=torch.float64))
    [1.0, 0.5]
    """
    read: list[float] = torch.stack([number.double() for number in numbers]).tolist()
    return read


# --- The integrals along a path. In step s, with step size η_s, K_s is the kernel of
# the step, ℓ′ᵢ(s) the derivative of the loss by the outputs at example xᵢ, J_s the
# Jacobian, and λ the weight decay.
#
#     path kernel     𝒦(x, xᵢ) = Σ_s η_s K_s(x, xᵢ)            [query, out, train, out_]
#     contributions   𝒮(x, xᵢ) = −Σ_s η_s K_s(x, xᵢ) ℓ′ᵢ(s)     [query, out, train]
#     decay           𝒟(x) = −Σ_s λη_s J_s(x)·θ_s               [query, out]
#
# so that f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x), up to the error of the quadrature rule.
# The secant rule has no error in this equation.


@dataclass(frozen=True)
class Integrals(Resumable):
    """The path kernel 𝒦, the contributions 𝒮 and the decay 𝒟 by one quadrature rule.
    They are NaN at points that are not attributed."""

    substeps: tuple[Substep, ...]
    kernel: Float[Tensor, "query out kept out_"]
    contributions: Float[Tensor, "query out train"]
    decay: Float[Tensor, "query out"]
    by_component: ComponentSums | None = field(default=None, kw_only=True)
    # the change of the outputs by gradients that are only rounding error, but that Adam
    # and similar optimizers amplify
    rounding: Float[Tensor, "query out"] | None = field(default=None, kw_only=True)

    checkpointed: ClassVar[tuple[str, ...]] = (
        "kernel",
        "contributions",
        "decay",
        "by_component",
        "rounding",
    )

    def add(self, step: Step, block: StepBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Add one step at one block of points. Return the kernel ηK_s, the
        contributions −ηK_s ℓ′ and the decay λη J̄·θ."""
        # K_s = ⟨J̄(x), J(xᵢ)⟩ and J̄·(λη ⊙ θ)
        if self.by_component is None:
            products, decay = block.kernel(self.substeps, step.right_factor, step.decay)
        else:
            products, decay = self.add_components(self.by_component, step, block)

        # 𝒦 ← 𝒦 + ηK_s,  𝒮 ← 𝒮 − ηK_s ℓ′,  𝒟 ← 𝒟 − J̄·(λη ⊙ θ)
        kernel, parts = self.add_products(step, block.rows, products)
        self.contributions[block.rows].add_(parts)
        release_pages(self.contributions)
        self.decay[block.rows].sub_(decay)
        return kernel, parts, decay

    def add_products(
        self, step: Step, rows: slice, products: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the products K_s = ⟨J̄(x), J(xᵢ)⟩ of a step to 𝒦. Return the kernel ηK_s
        and the contributions −ηK_s ℓ′ of the step."""
        kernel = products.mul_(step.step_size)
        self.kernel[rows].add_(kernel)
        return kernel, self.weighted(step, kernel).neg_()

    def weighted(
        self, step: Step, products: Tensor
    ) -> Float[Tensor, "query out train"]:
        """Return K_s ℓ′, for the products K_s = ⟨J̄(x), J(xᵢ)⟩."""
        return contract(products, step.output_gradient)

    def add_components(
        self, sums: ComponentSums, step: Step, block: StepBlock
    ) -> tuple[Tensor, Tensor]:
        """Add the terms of each component. Return the products and the decay,
        summed over components."""
        components = sums.components.values()
        terms = block.kernels(self.substeps, step.right_factor, step.decay, components)
        shares = []
        for products, decay in terms:
            parts = self.weighted(step, products).mul(-step.step_size)
            shares.append((parts, -decay))
        sums.add(step.index, block.rows, shares)

        # sum over the components
        products, decay = terms[0]
        for more_products, more_decay in terms[1:]:
            products = products + more_products
            decay = decay + more_decay
        return products, decay

    @property
    def without_examples(self) -> Float[Tensor, "query out"]:
        """The change of the outputs that no example caused: 𝒟(x), plus the change by
        gradients that are only rounding error."""
        if self.rounding is None:
            return self.decay.clone()
        return self.decay + self.rounding

    def total_change(self) -> Float[Tensor, "query out"]:
        return self.contributions.sum(2) + self.without_examples

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The path kernel 𝒦, the contributions 𝒮 and the decay 𝒟."""
        return self.kernel, self.contributions, self.decay


class ContributionIntegrals(Integrals):
    """The contributions 𝒮 and the decay 𝒟, without the path kernel 𝒦.

    Instead of the Jacobian J(xᵢ), a step provides the gradient J(xᵢ)ᵀℓ′ᵢ, in the form
    of a Jacobian with one output. So its products are ⟨J̄(x), J(xᵢ)ᵀℓ′ᵢ⟩ = K_s ℓ′.
    `kernel` is empty: its axis of training examples has length zero."""

    def add_products(
        self, step: Step, rows: slice, products: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.kernel[rows], self.weighted(step, products).mul_(-step.step_size)

    def weighted(
        self, step: Step, products: Tensor
    ) -> Float[Tensor, "query out train"]:
        return products.squeeze(3)


def integrals_at_zero(
    substeps: tuple[Substep, ...], domain: Domain, rules: int = 1
) -> Integrals:
    """Return integrals of zero for the quadrature rule with these substeps.

    `rules` is the number of quadrature rules of the run.
    """
    by_component = None
    if domain.components:
        by_component = components_at_zero(domain, rules)
    kind = Integrals
    if domain.points.makes_kernels:
        kernel = domain.sums(4)
    else:
        kind = ContributionIntegrals
        kernel = domain.like.new_zeros(*domain.shape[:2], 0, domain.outputs)
    return kind(
        substeps, kernel, domain.sums(3), domain.sums(2), by_component=by_component
    )


def contract(
    kernel: Float[Tensor, "query out train out_"],
    output_gradient: Float[Tensor, "train out_"],
) -> Float[Tensor, "query out train"]:
    """Return Kℓ′, contracted over the outputs of the training examples."""
    return torch.einsum("qcnd,nd->qcn", kernel, output_gradient)


# --- The change of the outputs by the gradients and the decay of each step:
#
#     Σᵢ Δ𝒮(x, xᵢ; s) + Δ𝒟(x; s)    [step, query, out],    whose sum over s is f_T(x) − f_0(x)
#
# up to the error of the rule. Without momentum, this is the change of the output during
# step s. With momentum, it is the change that the gradient of step s causes, at step s
# and at all later steps.
#
# On a long path, changes are stored per stretch, a range of consecutive steps. The
# number of steps is not known in advance. So a stretch is one step at first. When there
# are too many stretches, neighbours are merged, and stretches have 2, 4, 8, … steps.


MAX_TOTALS = 2**23
"""Maximum number of stored changes (stretches × queries × outputs), for all rules
together (67 MB)."""

MIN_STRETCHES = 128
"""Every rule may have this number of stretches, even beyond `MAX_TOTALS`."""


@dataclass(kw_only=True)
class StepTotals(Resumable):
    """Changes of the outputs, summed over each stretch of consecutive steps. Stretch k
    contains the steps from edges[k] to edges[k + 1] − 1.

    >>> totals = StepTotals(zero=torch.zeros(1, 1), max_stretches=2)
    >>> for step, added in enumerate([1.0, 2.0, 3.0]):
    ...     totals.add(step, slice(None), torch.tensor([[added]]))
    >>> totals.clipped_edges(3), torch.stack(totals.sums).flatten().tolist()
    ((0, 2, 3), [3.0, 3.0])
    """

    # the initial value: zeros, and NaN at points without contributions
    zero: Float[Tensor, "query out *component"]
    # maximum number of stretches; an even number, so that all can be merged in pairs
    max_stretches: int
    every: int = 1  # steps per stretch
    edges: list[int] = field(default_factory=lambda: [0])
    sums: list[Float[Tensor, "query out *component"]] = field(default_factory=list)

    def add(
        self,
        step: int,
        rows: slice | Int[Tensor, " chosen"],
        added: Float[Tensor, "chosen out *component"],
    ) -> None:
        """Add the change of the outputs in a step, at the points in `rows`."""
        self.cover(step + 1)
        self.sums[bisect_right(self.edges, step) - 1][rows] += added

    def cover(self, steps: int) -> None:
        """Append stretches until they cover `steps` steps."""
        while self.edges[-1] < steps:
            self.append_stretch()

    def append_stretch(self, end: int | None = None) -> None:
        """Append one stretch that ends before step `end`,
        by default `every` steps long.

        If there are `max_stretches` stretches already, first merge them in pairs.
        """
        if len(self.sums) == self.max_stretches:
            pairs = zip(self.sums[::2], self.sums[1::2], strict=True)
            self.sums = [first + second for first, second in pairs]
            self.edges = self.edges[::2]
            self.every *= 2
        if end is None:
            end = self.edges[-1] + self.every
        self.edges.append(end)
        self.sums.append(self.zero.clone())

    def clipped_edges(self, steps: int) -> tuple[int, ...]:
        """Return the edges of the stretches, clipped to a path of `steps` steps."""
        return tuple(min(edge, steps) for edge in self.edges)

    def stacked(self) -> Float[Tensor, "stretch query out *component"]:
        if not self.sums:
            return self.zero.new_zeros(0, *self.zero.shape)
        return torch.stack(self.sums)

    @property
    def state(self) -> dict[str, Any]:
        return {"every": self.every, "edges": self.edges, "sums": self.stacked()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.every = state["every"]
        self.edges = list(state["edges"])
        self.sums = list(state["sums"].to(self.zero.device).unbind())


def totals_at_zero(domain: Domain, rules: int) -> StepTotals:
    """Return totals that start at zero, for one of `rules` quadrature rules."""
    zero = domain.sums(2)
    return StepTotals(zero=zero, max_stretches=max_stretches_per_rule(domain, rules))


def max_stretches_per_rule(domain: Domain, rules: int) -> int:
    """Return the maximum number of stretches per rule. It is even."""
    numbers = prod(domain.shape[:2]) * max(1, len(domain.components))
    return max(MIN_STRETCHES, MAX_TOTALS // max(1, rules * numbers) // 2 * 2)


# --- 𝒮, 𝒟 and the change by each step, split by component.


@dataclass(frozen=True, kw_only=True)
class ComponentSums(Resumable):
    """The contributions 𝒮, the decay 𝒟 and the totals by step,
    split by component on the last axis.

    The sum over the last axis is 𝒮, 𝒟 or the total.
    """

    components: Components
    parts: Float[Tensor, "query out train component"]
    decay: Float[Tensor, "query out component"]
    totals: StepTotals  # [query, out, component]

    checkpointed: ClassVar[tuple[str, ...]] = ("parts", "decay", "totals")

    def add(
        self,
        step: int,
        rows: slice | Int[Tensor, " chosen"],
        shares: Sequence[
            tuple[Float[Tensor, "chosen out train"], Float[Tensor, "chosen out"]]
        ],
        rounding: Sequence[Float[Tensor, "chosen out"]] = (),
    ) -> None:
        """Add the terms of one step at the points in `rows`, split by component.

        `shares` are the changes of 𝒮 and 𝒟 by each component. `rounding` is the change
        by gradients that are only rounding error."""
        parts = torch.stack([parts for parts, _ in shares], -1)
        decay = torch.stack([decay for _, decay in shares], -1)
        self.parts[rows] += parts
        self.decay[rows] += decay
        added = parts.sum(2) + decay
        if rounding:
            added = added + torch.stack(list(rounding), -1)
        self.totals.add(step, rows, added)


def components_at_zero(domain: Domain, rules: int) -> ComponentSums:
    """Return sums of zero, split by component, for one of `rules` rules."""
    count = len(domain.components)
    parts = domain.sums(3)[..., None].repeat(1, 1, 1, count)
    zero = domain.sums(2)[..., None].repeat(1, 1, count)
    totals = StepTotals(zero=zero, max_stretches=max_stretches_per_rule(domain, rules))
    decay = zero.clone()
    return ComponentSums(
        components=domain.components, parts=parts, decay=decay, totals=totals
    )


# --- The sums at the end of each phase. 𝒮(x, xᵢ; T) is the contribution of xᵢ up to
# step T. The contribution in phase p is a difference:
#
#     𝒮_p(x, xᵢ) = 𝒮(x, xᵢ; T_p) − 𝒮(x, xᵢ; T_{p−1}),
#     f(T_p) − f(T_{p−1}) = Σᵢ 𝒮_p(x, xᵢ) + 𝒟_p(x)
#
# Phase p ends at step T_p. With momentum, gradients of earlier phases also move the
# weights in phase p. So 𝒮(·; T_p) needs a backward pass of its own that starts at T_p.
# This pass includes the effects of all earlier gradients, up to step T_p.


class Sums(NamedTuple):
    """The contributions 𝒮 and the decay 𝒟 up to some step, by one quadrature rule."""

    contributions: Float[Tensor, "point out train"]
    decay: Float[Tensor, "point out"]


PhaseEnd: TypeAlias = Mapping[str, Sums]
"""The sums at the end of a phase, by rule."""


def phase_end_of(integrals: Mapping[str, Integrals]) -> PhaseEnd:
    """Copy the current sums."""
    mark = {}
    for name, sums in integrals.items():
        contributions = copied_like(sums.contributions, like=sums.contributions)
        mark[name] = Sums(contributions, sums.without_examples)
    return mark


def phase_end_states(
    phase_ends: Sequence[PhaseEnd],
) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return the sums at the ends of phases as plain data and tensors,
    for a checkpoint."""
    return [
        {name: (sums.contributions, sums.decay) for name, sums in mark.items()}
        for mark in phase_ends
    ]


def restore_phase_ends(
    state: Sequence[Mapping[str, tuple[Tensor | RowsInFile, Tensor]]], like: Tensor
) -> list[PhaseEnd]:
    """Restore the ends of phases from a checkpoint.

    Store them in memory or on disk, like the tensor `like`.
    """
    phase_ends: list[PhaseEnd] = []
    for saved in state:
        mark = {}
        for name, (parts, decay) in saved.items():
            mark[name] = Sums(copied_like(parts, like), decay.to(like.device))
        phase_ends.append(mark)
    return phase_ends


class PhaseShare(NamedTuple):
    """The sums of one phase by one quadrature rule: the sums at its end, minus the sums
    at its beginning."""

    end: Sums
    begin: Sums | None  # None means zero, in the first phase

    @property
    def contributions(self) -> RowsOfArray:
        if self.begin is None:
            return RowsOfArray(self.end.contributions, None)
        return RowsOfArray(self.end.contributions, self.begin.contributions)

    @property
    def decay(self) -> Float[Tensor, "point out"]:
        if self.begin is None:
            return self.end.decay
        return self.end.decay - self.begin.decay


def phase_shares(
    phase_ends: Sequence[PhaseEnd], end: PhaseEnd, rule: str, phases: int
) -> list[PhaseShare]:
    """Return the sums of each phase by one quadrature rule. A phase that was not
    reached has sums of zero.

    >>> import torch
    >>> ones = Sums(torch.ones(1, 1, 1), torch.zeros(1, 1))
    >>> end = {"left": Sums(3 * ones.contributions, ones.decay)}
    >>> shares = phase_shares([{"left": ones}], end, "left", 3)
    >>> [share.contributions[:].item() for share in shares]
    [1.0, 2.0, 0.0]
    """
    ends = [mark[rule] for mark in (*phase_ends, end)]
    ends += [ends[-1]] * (phases - len(ends))
    return [
        PhaseShare(end, begin) for end, begin in zip(ends, (None, *ends), strict=False)
    ]
