"""Sums of contributions over the steps of a followed loop, by example, step, component
and position, and a plan of their memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.capacity import MemoryBudget
from ntkexp.foreign_loop.batch_norm import BatchNormMode
from ntkexp.foreign_loop.closing import ClosingSums
from ntkexp.foreign_loop.positions import LoopPositions, Positions
from ntkexp.foreign_loop.run_folder import CASTS, PROOFS
from ntkexp.kernel import Tape
from ntkexp.kernel.features.adjoint import CACHED_NUMBERS
from ntkexp.kernel.features.gram import PIECE_BYTES, PIECE_ELEMENTS
from ntkexp.path.components import Components
from ntkexp.path.recording import STRETCHES, Halves, halves_at_zero
from ntkexp.records.contributions import BY_POSITION, JUMPS, POSITION
from ntkexp.text import counted

LOG = logging.getLogger("ntkexp.follow")

NamedArrays: TypeAlias = dict[str, tuple[tuple[str, ...], Tensor]]
"""Arrays by name, each with the names of its axes."""


# --- The terms of one step, and their sums.


class StepProofs(NamedTuple):
    """Factors and errors of the three proofs of a step,
    in the order of `run_folder.PROOFS`."""

    gradient_factor: float  # (a) smallest factor c of all parameters
    # (a) relative distance of c g from the gradient that the optimizer used
    gradient_error: float
    # (b) relative distance between the weights after the step and those by the
    # optimizer's update rule
    rule_error: float
    closure: float  # (c) relative error of the secant, ‖J̄Δθ − Δf‖/‖Δf‖
    # norm of the error that casts made in the gradient, relative to the norm of the
    # gradient that the optimizer used
    casts_error: float


class LoopTerms(NamedTuple):
    """The terms of one step, summed over all parameters or over one component."""

    # −⟨V, c Jᵢᵀℓ′ᵢ⟩ for each row i of the calls,
    # with the adjoint V of the step (`attribution`)
    contributions: Float[Tensor, "query out row"]
    decay: Float[Tensor, "query out"]
    # effect of rounding errors in gradients, and of casts
    rounding: Float[Tensor, "query out"]
    # effect of examples on one another in BatchNorm
    coupling: Float[Tensor, "query out"]


@dataclass(frozen=True)
class StepSummands:
    """The terms of one step, the indices at which they are added to the sums, and the
    errors of the step's proofs."""

    index: int  # position of the step in `by_step`
    rows: Int[Tensor, " row"]  # index of the example of each row of the step's calls
    terms: LoopTerms
    statistics: Float[Tensor, "query out"]  # change by BatchNorm's running statistics
    # change that no secant explains, because a discrete choice (an argmax) changed
    jumps: Float[Tensor, "query out"]
    proofs: StepProofs
    by_component: Sequence[LoopTerms]  # terms of each component

    @property
    def magnitudes(self) -> tuple[Float[Tensor, "query out"], ...]:
        """The parts of the change in this step, with Σ|contributions|."""
        terms = self.terms
        mass = terms.contributions.abs().sum(2)
        outside = (self.statistics, self.jumps, terms.coupling)
        return (mass, terms.decay, terms.rounding, *outside)


@dataclass
class TermTotals:
    """Sums of terms over the steps so far. If there are components, they are the first
    axis of each tensor."""

    contributions: Float[Tensor, "*component query out example"]
    decay: Float[Tensor, "*component query out"]
    rounding: Float[Tensor, "*component query out"]
    coupling: Float[Tensor, "*component query out"]
    by_step: Float[Tensor, "*component query out step"]

    @classmethod
    def at_zero(
        cls, zero: Float[Tensor, "*component query out"], examples: int, steps: int
    ) -> TermTotals:
        return cls(
            contributions=zero.new_zeros(*zero.shape, examples),
            decay=torch.zeros_like(zero),
            rounding=torch.zeros_like(zero),
            coupling=torch.zeros_like(zero),
            by_step=zero.new_zeros(*zero.shape, steps),
        )

    def of(self, component: int) -> TermTotals:
        """Return views of the sums of one component."""
        return TermTotals(*(total[component] for total in vars(self).values()))

    def add(
        self,
        index: int,
        rows: Int[Tensor, " row"],
        terms: LoopTerms,
        of_no_example: Float[Tensor, "query out"] | None = None,
    ) -> None:
        """Add one step.

        Args:
            index: position of the step in `by_step`.
            rows: index of the example of each row of the step's calls.
            terms: terms of the step.
            of_no_example: change in this step by BatchNorm's running statistics and
                by jumps (`StepSummands`). It is added to `by_step` only.
        """
        contributions = terms.contributions.to(self.contributions.dtype)
        self.contributions.index_add_(2, rows, contributions)
        self.decay += terms.decay
        self.rounding += terms.rounding
        self.coupling += terms.coupling
        change = contributions.sum(2) + terms.decay + terms.rounding
        if of_no_example is not None:
            change = change + of_no_example
        self.by_step[:, :, index] = change + terms.coupling

    def arrays_by_component(self) -> NamedArrays:
        """Return the sums with components as their last axis."""
        axes = ("query", "out")
        by_component = {
            "by_component": ((*axes, "example"), self.contributions),
            "decay_by_component": (axes, self.decay),
            "rounding_by_component": (axes, self.rounding),
            "coupling_by_component": (axes, self.coupling),
            "by_component_step": ((*axes, "step"), self.by_step),
        }
        return {
            name: ((*names, "component"), value.movedim(0, -1))
            for name, (names, value) in by_component.items()
        }


@dataclass
class LoopSums:
    """All sums over the steps so far, and the errors of each step's proofs. The last
    step of the loop is added first."""

    totals: TermTotals
    statistics: Float[Tensor, "query out"]  # effect of BatchNorm's running statistics
    # part of the change that no secant explains, because a discrete choice changed
    jumps: Float[Tensor, "query out"]
    carried: Float[Tensor, "query out"]  # effect of momentum from before these steps
    other_steps: Float[Tensor, "query out"]  # change in steps that were not followed
    proofs: Float[Tensor, "proof step"]
    closing: ClosingSums
    halves: Halves | None
    by_component: TermTotals | None
    by_position: LoopPositions | None

    def add(self, step: StepSummands) -> None:
        if self.halves is not None:
            self.halves.add_rows(step.index, step.rows, step.terms.contributions)
        self.totals.add(step.index, step.rows, step.terms, step.statistics + step.jumps)
        self.statistics += step.statistics
        self.jumps += step.jumps
        self.proofs[:, step.index] = torch.tensor(step.proofs, dtype=torch.float64)
        if self.by_component is not None:
            for component, share in enumerate(step.by_component):
                self.by_component.of(component).add(step.index, step.rows, share)

    @property
    def total(self) -> Float[Tensor, "query out"]:
        """The sum of all parts, which is the change of the outputs in all steps."""
        totals = self.totals
        by_these = totals.contributions.sum(2) + totals.decay + totals.rounding
        by_these = by_these + self.statistics + self.jumps + totals.coupling
        return by_these + self.carried + self.other_steps

    def arrays(
        self, *, cast: bool, batch_norm: BatchNormMode | None, some_steps: bool
    ) -> NamedArrays:
        """Return all sums by name.

        Args:
            cast: True if the loop used casts; then include their error in each step.
            batch_norm: mode of BatchNorm, or None if no running statistics are updated.
            some_steps: True if not all steps of the loop were followed.
        """
        outputs = ("query", "out")
        totals = self.totals
        arrays: NamedArrays = {
            "contribution": (("query", "out", "example"), totals.contributions),
            "decay": (outputs, totals.decay),
            "rounding": (outputs, totals.rounding),
            "by_step": (("query", "out", "step"), totals.by_step),
        }
        if batch_norm is not None:
            arrays["statistics"] = (outputs, self.statistics)
        if bool(self.jumps.any()):
            arrays[JUMPS] = (outputs, self.jumps)
        if batch_norm == "constant":
            arrays["coupling"] = (outputs, totals.coupling)
        for name, values in zip((*PROOFS, CASTS), self.proofs, strict=True):
            if cast or name != CASTS:
                arrays[name] = (("step",), values)
        if some_steps or bool(self.carried.any()):
            arrays["carried"] = (outputs, self.carried)
        if some_steps:
            arrays["other_steps"] = (outputs, self.other_steps)
        if self.halves is not None:
            half_by = self.halves.half_times([1.0] * totals.by_step.shape[2])
            arrays["half_by"] = (("query", "out", "example"), half_by)
        if self.by_component is not None:
            arrays |= self.by_component.arrays_by_component()
            if batch_norm != "constant":
                del arrays["coupling_by_component"]
        if self.by_position is not None:
            axes = ("query", "out", "example", POSITION)
            arrays[BY_POSITION] = (axes, self.by_position.parts)
        return arrays


# --- The memory of the sums and of one step. If they do not fit into the budget, an
# error is raised before the first step is attributed. If only `half_by` does not fit,
# it is omitted. (`half_by` is the share of the steps by which half of a contribution
# was made.)


MAX_HALF_BY_NUMBERS = 2**27
"""`half_by` is computed if it needs at most this many numbers (1 GB)."""

PRODUCT_COPIES = 5
"""The number of arrays of inner products ⟨V, J⟩ that exist at once in a step. They hold
the products of one parameter, their sum over parameters, a multiple of the sum, its
negative, and temporary values."""

CACHED_COPIES = 6
"""The number of blocks of gradients that exist at once. A block is as large as the
processor's cache."""

RECORDING_TAPES = 6
"""Further memory while the first step records a program for the gradients of the
largest batch, in units of its tape. The recorder holds all intermediate results."""

BATCH_NORM_TAPES = 4
"""Further memory of a batch that BatchNorm couples, in units of its tape: the autograd
graph, and the intermediate results of one forward-mode or backward pass."""


@dataclass(frozen=True)
class StepMemory:
    """The peak memory of one step."""

    tape: Tape  # recorded forward pass of the queries
    rows: int  # largest number of examples in a step
    sizes: Sequence[int]  # number of weights of each parameter
    # number of arrays like the adjoint: 1 for U, 2 with V (`path.backward_sum`), and one
    # more for MᵀJ̄ if the optimizer multiplies its update by a matrix M
    adjoints: int
    has_batch_norm: bool  # True if BatchNorm couples the examples of a step

    @property
    def parameters(self) -> int:
        return sum(self.sizes)

    @property
    def products(self) -> float:
        """Bytes of the inner products of a step,
        between the adjoint V and the gradients."""
        outputs = self.tape.outputs
        return float(
            PRODUCT_COPIES * outputs.numel() * self.rows * outputs.element_size()
        )

    @property
    def held(self) -> float:
        """Bytes of the adjoints, of the tapes of queries and examples, and of the
        blocks of gradients."""
        points, outputs_each = self.tape.outputs.shape
        outputs = points * outputs_each
        number_bytes = self.tape.outputs.element_size()

        # the adjoints, and one parameter of an adjoint times factors of its elements
        numbers = self.adjoints * outputs * self.parameters + outputs * max(self.sizes)

        # the blocks of gradients
        rows = max(self.rows, outputs)
        piece = max(PIECE_BYTES // number_bytes, PIECE_ELEMENTS * rows)
        numbers += min(piece, rows * self.parameters)
        cached = (self.rows + 1) * outputs * self.parameters
        numbers += CACHED_COPIES * min(CACHED_NUMBERS, cached)

        # If a forward pass uses a weight several times, the secant Jacobian may hold
        # the rows of this weight (`Jacobian.with_sums_over_uses`). Count the rows of
        # every weight, if they are small enough to be held.
        for size in self.sizes:
            if outputs * size * number_bytes <= PIECE_BYTES:
                numbers += outputs * size

        # the tapes of queries and examples
        tapes = points * (3 + 2 * outputs_each)
        tapes += self.rows * (2 + outputs_each + RECORDING_TAPES)
        if self.has_batch_norm:
            tapes += self.rows * BATCH_NORM_TAPES
        return numbers * number_bytes + self.tape.bytes_per_example * tapes


def sums_at_zero(
    step: StepMemory,
    examples: int,
    steps: int,
    budget: MemoryBudget,
    components: Components,
    positions: Positions | None,
) -> LoopSums:
    """Return sums that start at zero. Raise if the sums
    and one step do not fit into memory.

    Omit `half_by`, with a warning, if only this sum does not fit.
    """
    outputs = step.tape.outputs
    by = ""
    fewer = ""
    if components:
        by = f" by {counted(len(components), 'component')}"
        fewer = ", by fewer components"
    contributions = f"contributions of {examples} examples to {outputs.numel()} outputs of the queries"
    needed = needed_bytes(step, examples, steps, components)
    budget.require(needed, f"{contributions}{by}", f"give fewer queries{fewer}")
    budget = budget.holding(needed)
    with_halves = STRETCHES * outputs.numel() * examples <= MAX_HALF_BY_NUMBERS
    half_bytes = 2 * STRETCHES * outputs.numel() * examples * outputs.element_size()
    if with_halves and not budget.fits(half_bytes):
        with_halves = False
        LOG.warning(
            "ntkexp: `half_by` is left out: %s",
            budget.refusal(half_bytes, "it and other sums"),
        )
    zero = torch.zeros_like(outputs, dtype=accumulated_in(outputs))
    totals = TermTotals.at_zero(zero, examples, steps)
    halves = None
    by_component = None
    by_position = None
    if with_halves:
        halves = halves_at_zero(steps, outputs.new_zeros(*outputs.shape, examples))
    if components:
        zeros = zero.new_zeros(len(components), *zero.shape)
        by_component = TermTotals.at_zero(zeros, examples, steps)
    if positions is not None:
        by_position = LoopPositions.at_zero(positions, totals.contributions, budget)
    return LoopSums(
        totals=totals,
        statistics=zero.clone(),
        jumps=zero.clone(),
        carried=zero.clone(),
        other_steps=zero.clone(),
        proofs=torch.zeros(len(StepProofs._fields), steps, dtype=torch.float64),
        closing=ClosingSums.at_zero(outputs, zero.dtype),
        halves=halves,
        by_component=by_component,
        by_position=by_position,
    )


def needed_bytes(
    step: StepMemory, examples: int, steps: int, components: Components
) -> float:
    """Return the bytes that the sums and one step take."""
    outputs = step.tape.outputs
    sum_bytes = accumulated_in(outputs).itemsize
    contributions = outputs.numel() * examples * (outputs.element_size() + sum_bytes)
    by_step = outputs.numel() * steps * sum_bytes
    sums = contributions + by_step + step.products
    return sums * (1 + len(components)) + step.held


def accumulated_in(outputs: Tensor) -> torch.dtype:
    """Return the dtype of sums over steps: float64,
    unless the device does not support it.

    >>> accumulated_in(torch.ones(1, dtype=torch.float32))
    torch.float64
    """
    return outputs.dtype if outputs.device.type == "mps" else torch.float64
