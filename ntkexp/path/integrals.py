"""The two integrals along a path, accumulated step by step without keeping the trajectory, in all, by phase, and by
step.
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

from ntkexp.kernel.secant.segment import Closure, bound
from ntkexp.on_disk import RowsInFile, RowsOfArray, copied_like, release_pages
from ntkexp.path.checkpoint import Resumable
from ntkexp.path.components import Components
from ntkexp.path.domain import Domain
from ntkexp.path.rule.base import Piece
from ntkexp.path.step import Step
from ntkexp.path.step_kernel import StepBlock

# --- What one step adds to the contributions of one rule, in a few numbers, and whether it closes.


class Rounding(NamedTuple):
    """What rounds along a path: Σ‖terms of f‖ at its start, and eps of the shortest numbers between weights and f."""

    terms: float
    eps: float


@dataclass
class Tally:
    """Sums over blocks of points."""

    missed: float = 0.0  # ‖Σᵢ Δ𝒮ᵢ − Δf‖²
    changed: float = 0.0  # ‖Δf‖²
    outputs: float = 0.0  # ‖f(θ_{s+1})‖²
    contribution_mass: float = 0.0  # Σ|Δ𝒮|
    contribution_sum: float = 0.0  # Σ_x |Σᵢ Δ𝒮|
    kernel_squares: float = 0.0  # ‖ηK_s‖²
    kernels: bool = True  # whether there are any

    def add(
        self,
        block: StepBlock,
        kernel: Float[Tensor, "point out kept out_"],
        parts: Float[Tensor, "point out train"],
        summed: Float[Tensor, "point out"],
        expected: Float[Tensor, "point out"],
    ) -> None:
        """Count the kernel and the contributions of a step at some points, `summed` Σᵢ Δ𝒮ᵢ, and how far the change of
        their outputs is from what it should be.
        """
        change = block.outputs(1.0) - block.outputs(0.0)
        missed, changed, outputs, mass, net, squares = fetched(
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

    def miss(self, rounding: Rounding) -> Closure | None:
        """How far a secant is from its step, if rounding does not explain it.

        What is summed are contributions, so their size counts as well. Where the outputs themselves are not numbers any
        more the run has diverged, and says so.
        """
        size = rounding.terms + sqrt(self.outputs) + sqrt(self.changed) + self.contribution_mass
        closure = Closure(sqrt(self.missed), bound(size, rounding.eps))
        return None if closure.holds or not isfinite(self.outputs + self.changed) else closure

    @property
    def closure(self) -> float:
        """‖Σᵢ Δ𝒮ᵢ − Δf‖/‖Δf‖."""
        return sqrt(self.missed / self.changed) if self.changed else 0.0

    @property
    def kernel_mass(self) -> float | None:
        """η‖K_s‖, where kernels were made."""
        return sqrt(self.kernel_squares) if self.kernels else None


def fetched(*numbers: Float[Tensor, ""]) -> list[float]:
    """Numbers from a device, which is waited for once.

    >>> fetched(torch.tensor(1.0), torch.tensor(0.5, dtype=torch.float64))
    [1.0, 0.5]
    """
    found: list[float] = torch.stack([number.double() for number in numbers]).tolist()
    return found


# --- The two integrals along a path, accumulated step by step without keeping the trajectory:
#
#     path kernel     𝒦(x, xᵢ) = Σ_s η_s K_s(x, xᵢ)            [probe, out, train, out_]
#     contributions   𝒮(x, xᵢ) = −Σ_s η_s K_s(x, xᵢ) ℓ′ᵢ(s)     [probe, out, train]
#     decay           𝒟(x) = −Σ_s λη_s J_s(x)·θ_s               [probe, out]
#
# so that f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x) to the accuracy with which the rule reads a step; exactly, for
# secants.


@dataclass(frozen=True)
class Integrals(Resumable):
    """𝒦 and 𝒮 by one rule; a 𝒦 without training examples is not accumulated, nor is any kernel made."""

    pieces: tuple[Piece, ...]
    kernel: Float[Tensor, "probe out kept out_"]  # of all training examples, or of none
    contributions: Float[Tensor, "probe out train"]
    decay: Float[Tensor, "probe out"]
    by_component: ComponentSums | None = field(
        default=None, kw_only=True
    )  # where components are told apart
    rounding: Float[Tensor, "probe out"] | None = field(
        default=None, kw_only=True
    )  # of optimizers that divide

    checkpointed: ClassVar[tuple[str, ...]] = (
        "kernel",
        "contributions",
        "decay",
        "by_component",
        "rounding",
    )

    def add(self, step: Step, block: StepBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Accumulate one step at one block of points; what it adds to 𝒦 and 𝒮, and takes from 𝒟."""
        # K_s = ⟨J̄(x), J(xᵢ)⟩ and J̄·(λη ⊙ θ); where no kernels are made, J(xᵢ)ᵀℓ′ᵢ stands for J(xᵢ)
        if self.by_component is None:
            kernel, shrunk = block.kernel(self.pieces, step.side, step.decay)
        else:
            # of each component, of which the whole is the sum
            components = self.by_component.components.values()
            terms = block.kernels(self.pieces, step.side, step.decay, components)
            makes_kernels, size = bool(self.kernel.shape[2]), step.step_size
            shares = [
                (
                    (
                        contract(each, step.output_gradient) if makes_kernels else each.squeeze(3)
                    ).mul(-size),
                    -taken,
                )
                for each, taken in terms
            ]
            self.by_component.add(step.index, block.rows, shares)
            kernel, shrunk = (sum(each[1:], start=each[0]) for each in zip(*terms, strict=True))
        if self.kernel.shape[2]:
            kernel.mul_(step.step_size)  # η K_s
            parts = contract(kernel, step.output_gradient).neg_()
            self.kernel[block.rows].add_(kernel)
        else:
            parts, kernel = kernel.squeeze(3).mul_(-step.step_size), self.kernel[block.rows]
        self.contributions[block.rows].add_(parts)
        release_pages(self.contributions)
        self.decay[block.rows].sub_(shrunk)
        return kernel, parts, shrunk

    @property
    def without_examples(self) -> Float[Tensor, "probe out"]:
        """𝒟(x), and the movement by gradients that are rounding."""
        return self.decay.clone() if self.rounding is None else self.decay + self.rounding

    def together(self) -> Float[Tensor, "probe out"]:
        """Σᵢ 𝒮(x, xᵢ) + 𝒟(x), and the movement by gradients that are rounding."""
        return self.contributions.sum(2) + self.without_examples

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """𝒦, 𝒮 and 𝒟."""
        return self.kernel, self.contributions, self.decay


def integrals_at_zero(pieces: tuple[Piece, ...], domain: Domain, rules: int = 1) -> Integrals:
    """Nothing accumulated by the rule of these pieces; NaN at points where the path is not integrated."""
    if domain.points.makes_kernels:
        kernel = domain.sums(4)
    else:
        kernel = domain.like.new_zeros(*domain.shape[:2], 0, domain.outputs)
    by_component = components_at_zero(domain, rules) if domain.components else None
    return Integrals(pieces, kernel, domain.sums(3), domain.sums(2), by_component=by_component)


def contract(
    kernel: Float[Tensor, "probe out train out_"], output_gradient: Float[Tensor, "train out_"]
) -> Float[Tensor, "probe out train"]:
    """K ℓ′, a sum over the training side's outputs."""
    return torch.einsum("qcnd,nd->qcn", kernel, output_gradient)


# --- What came of each step: all that its gradients contributed, and what decay of the weights took away.
#
#     Σᵢ Δ𝒮(x, xᵢ; s) + Δ𝒟(x; s)        [step, probe, out],        whose sum over s is f_T(x) − f_0(x)
#
# as far as the rule closes. By an optimizer that remembers nothing that is by how much the step moved the output;
# what another remembers of a gradient counts where the gradient was taken. Long paths are summed over stretches of
# 2, 4, 8, … steps, the shortest that need no more than `MOST` numbers, or `FEWEST` stretches: a path may end sooner
# than planned, so stretches are joined two by two when there would be too many.


MOST, FEWEST = 2**23, 128
"""Numbers that all rules keep together, which are 67 MB, and stretches that are kept if they take more than that."""


@dataclass(kw_only=True)
class StepTotals(Resumable):
    """Stretches of steps, one after another from the first step on, with their sums; `edges` are where they begin, and
    the step after the last.

    >>> totals = StepTotals(zero=torch.zeros(1, 1), most=2)
    >>> for step, added in enumerate([1.0, 2.0, 3.0]):
    ...     totals.add(step, slice(None), torch.tensor([[added]]))
    >>> totals.until(3), torch.stack(totals.sums).flatten().tolist()
    ((0, 2, 3), [3.0, 3.0])
    """

    zero: Float[Tensor, "probe out *component"]  # NaN at points where the path is not integrated
    most: int  # an even number, so that all can be joined
    every: int = 1
    edges: list[int] = field(default_factory=lambda: [0])
    sums: list[Float[Tensor, "probe out *component"]] = field(default_factory=list)

    def add(
        self,
        step: int,
        rows: slice | Int[Tensor, " chosen"],
        added: Float[Tensor, "chosen out *component"],
    ) -> None:
        """Take in what came of a step at some of the points."""
        self.reach(step + 1)
        self.sums[bisect_right(self.edges, step) - 1][rows] += added

    def reach(self, steps: int) -> None:
        """Extend the stretches to `steps` steps; all but the last are equally long."""
        while self.edges[-1] < steps:
            self.extend()

    def extend(self, end: int | None = None) -> None:
        """Have one stretch more, up to before this step, or as long as others are; two become one if there are too
        many.
        """
        if len(self.sums) == self.most:
            self.sums = [
                first + second
                for first, second in zip(self.sums[::2], self.sums[1::2], strict=True)
            ]
            self.edges = self.edges[::2]
            self.every *= 2
        self.edges.append(self.edges[-1] + self.every if end is None else end)
        self.sums.append(self.zero.clone())

    def until(self, steps: int) -> tuple[int, ...]:
        """The edges of the stretches of a path of `steps` steps."""
        return tuple(min(edge, steps) for edge in self.edges)

    def stacked(self) -> Float[Tensor, "stretch probe out *component"]:
        """The sums as one tensor."""
        return torch.stack(self.sums) if self.sums else self.zero.new_zeros(0, *self.zero.shape)

    @property
    def state(self) -> dict[str, Any]:
        """The sums, for a checkpoint."""
        return {"every": self.every, "edges": self.edges, "sums": self.stacked()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the sums of a checkpoint."""
        self.every, self.edges = state["every"], list(state["edges"])
        self.sums = list(state["sums"].to(self.zero.device).unbind())


def totals_at_zero(domain: Domain, rules: int) -> StepTotals:
    """Empty sums of one rule."""
    zero = domain.sums(2)
    return StepTotals(zero=zero, most=most_stretches(domain, rules))


def most_stretches(domain: Domain, rules: int) -> int:
    """How many stretches there may be, of each rule in all and by each component."""
    numbers = prod(domain.shape[:2]) * max(1, len(domain.components))
    return max(FEWEST, MOST // max(1, rules * numbers) // 2 * 2)


# --- The same by component, where components are told apart: shares of 𝒮, of 𝒟, and of what came of each step.


@dataclass(frozen=True, kw_only=True)
class ComponentSums(Resumable):
    """Shares of `components`, on the last axis, which add up to the whole."""

    components: Components
    parts: Float[Tensor, "probe out train component"]
    decay: Float[Tensor, "probe out component"]
    totals: StepTotals  # [probe, out, component]

    checkpointed: ClassVar[tuple[str, ...]] = ("parts", "decay", "totals")

    def add(
        self,
        step: int,
        rows: slice | Int[Tensor, " chosen"],
        shares: Sequence[tuple[Float[Tensor, "chosen out train"], Float[Tensor, "chosen out"]]],
        rounding: Sequence[Float[Tensor, "chosen out"]] = (),
    ) -> None:
        """Take in what a step added to 𝒮 and 𝒟 at some of the points, by each component, and what rounding did."""
        parts, decay = (torch.stack(each, -1) for each in zip(*shares, strict=True))
        self.parts[rows] += parts
        self.decay[rows] += decay
        added = parts.sum(2) + decay
        self.totals.add(step, rows, added + torch.stack(list(rounding), -1) if rounding else added)


def components_at_zero(domain: Domain, rules: int) -> ComponentSums:
    """Empty sums of one rule."""
    count = len(domain.components)
    parts, zero = (domain.sums(axes)[..., None].repeat(*[1] * axes, count) for axes in (3, 2))
    totals = StepTotals(zero=zero, most=most_stretches(domain, rules))
    return ComponentSums(
        components=domain.components, parts=parts, decay=zero.clone(), totals=totals
    )


# --- What a path has added up by the end of each of its phases, so that each phase's share is a difference.
#
#     𝒮_p(x, xᵢ) = 𝒮(x, xᵢ; T_p) − 𝒮(x, xᵢ; T_{p−1}),        f(T_p) − f(T_{p−1}) = Σᵢ 𝒮_p(x, xᵢ) + 𝒟_p(x)
#
# where T_p is the step at which phase p ends. An optimizer that remembers moves weights by gradients of earlier
# phases too: 𝒮(·; T) is then the sum over the gradients until T of what they did until T, and has a pass
# backwards of its own.


class Sums(NamedTuple):
    """𝒮 and 𝒟 so far, by one rule."""

    contributions: Float[Tensor, "point out train"]
    decay: Float[Tensor, "point out"]


Mark: TypeAlias = Mapping[str, Sums]
"""The sums at the end of a phase, by rule."""


def mark_of(integrals: Mapping[str, Integrals]) -> Mark:
    """The sums as they are now."""
    return {
        name: Sums(copied_like(sums.contributions, like=sums.contributions), sums.without_examples)
        for name, sums in integrals.items()
    }


def states(marks: Sequence[Mark]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Marks as plain data and tensors, for a checkpoint."""
    return [
        {name: (sums.contributions, sums.decay) for name, sums in mark.items()} for mark in marks
    ]


def marks_from(
    state: Sequence[Mapping[str, tuple[Tensor | RowsInFile, Tensor]]], like: Tensor
) -> list[Mark]:
    """Marks of a checkpoint, where the sums of the run lie."""
    return [
        {
            name: Sums(copied_like(parts, like), decay.to(like.device))
            for name, (parts, decay) in mark.items()
        }
        for mark in state
    ]


class Share(NamedTuple):
    """What was added in one phase by one rule: the sums at its end, but for those at its beginning."""

    end: Sums
    begin: Sums | None  # of the first phase, zero

    @property
    def contributions(self) -> RowsOfArray:
        """What each example added."""
        return RowsOfArray(
            self.end.contributions, None if self.begin is None else self.begin.contributions
        )

    @property
    def decay(self) -> Float[Tensor, "point out"]:
        """What decay of the weights took away."""
        return self.end.decay if self.begin is None else self.end.decay - self.begin.decay


def by_phase(marks: Sequence[Mark], end: Mark, rule: str, phases: int) -> list[Share]:
    """The shares of the phases by a rule, from the sums at their ends; a phase that was not reached has none.

    >>> import torch
    >>> ones = Sums(torch.ones(1, 1, 1), torch.zeros(1, 1))
    >>> shares = by_phase([{"left": ones}], {"left": Sums(3 * ones.contributions, ones.decay)}, "left", 3)
    >>> [share.contributions[:].item() for share in shares]
    [1.0, 2.0, 0.0]
    """
    ends = [mark[rule] for mark in (*marks, end)]
    ends += [ends[-1]] * (phases - len(ends))
    return [Share(end, begin) for end, begin in zip(ends, (None, *ends), strict=False)]
