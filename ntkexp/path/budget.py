"""Estimate the memory and the time of a run, and choose the
number of points in a block."""

from __future__ import annotations

from dataclasses import dataclass

from ntkexp.capacity import MemoryBudget
from ntkexp.kernel.read.plan import OUTPUT_GRADIENT_BYTES
from ntkexp.mistake import Mistake
from ntkexp.on_disk import ROW_BLOCK_BYTES
from ntkexp.path.integrals import MAX_TOTALS, MIN_STRETCHES
from ntkexp.path.recording import STRETCHES
from ntkexp.path.settings import Kernels
from ntkexp.text import SECONDS_PER_YEAR, duration

# --- The memory of a run:
#
# program         Python, torch and other libraries
# weights         copies of the weights: at both ends of a step and at positions inside it, their
#                 difference and mean; the gradient and its parts
# kernels         the first tangent kernel, and two copies of the current one while its blocks are
#                 concatenated; the latest one of an adaptive timetable; the path kernel 𝒦 of each
#                 quadrature rule; kernel snapshots; the square matrices of the table of kernel machines
# contributions   𝒮 of each rule at the end of each phase of training, and the error of 𝒮. If 𝒮 is
#                 on disk, only the pages in use count.
# totals          for each rule, the change of the outputs in each step, or in each range of steps
# features        the Jacobians of the training examples in a step, or their gradients Jᵀℓ′
# block           for each point of a block, a tape (recorded forward pass) at each position inside
#                 a step, differences and slopes of the secant, one gradient per output, and rows of
#                 kernels


PROGRAM = 0.6e9  # bytes
# copies of the weights, in addition to those at positions inside a step
WEIGHT_COPIES = 9
SQUARE_COPIES = 5  # square matrices for the table of kernel machines
RECORDED_COPIES = 3  # copies of the weights in float64 while they are written
SUM_BYTES = 8  # contributions are summed in float64
SPILLED = 8 * ROW_BLOCK_BYTES  # pages in use of contributions on disk


def copies_of_drawn(number_bytes: int) -> float:
    """Return a lower bound on the memory of a run, as a multiple of the memory that
    drawing its initial weights takes.

    Drawing takes up to 16 bytes per weight.
    """
    return WEIGHT_COPIES * number_bytes / 16


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """The sizes that determine the memory of a run."""

    budget: MemoryBudget
    parameters: int
    points: int
    summed_points: int  # number of points that have path kernels or contributions
    train: int
    outputs: int
    integrated: int  # number of outputs that have path kernels or contributions
    rules: int
    tangents: int  # number of tangent kernels (or of their traces) in memory
    # number of path kernels (one for each quadrature rule) and of kernel snapshots
    path_kernels: int
    errors: int = 0  # number of error arrays in the shape of contributions
    # number of positions in a step at which a block is evaluated,
    # including start and end
    tapes: int
    tape_bytes: float  # bytes on the tape of one point
    number_bytes: int
    # number of copies of the weights that the optimizer holds during a step
    copies: int = 0
    kernels: Kernels = "all"
    steps: int = 0
    # number of phases; the contributions at the end of each phase are in memory
    phases: int = 1
    doubled: bool = False  # True if a second backward sum estimates the error
    disk: bool = False  # True if contributions may be stored on disk
    # number of components (groups of parameters) by which contributions are split
    components: int = 0
    records_weights: bool = False  # True if the weights are stored at snapshots

    @property
    def fixed(self) -> float:
        """Bytes that do not depend on the size of a block."""
        return self.always + (SPILLED if self.spills else self.sums)

    @property
    def spills(self) -> bool:
        """True if contributions are stored on disk, because they do not fit into
        memory. This is possible only if no kernels are summed."""
        may = self.disk and self.kernels == "none"
        return may and not self.budget.holding(self.always).fits(
            self.sums + 2 * self.per_point
        )

    @property
    def always(self) -> float:
        """Bytes of everything except the blocks and the sums of kernels
        and contributions."""
        row = self.gradient_outputs * self.train * self.number_bytes
        squares = (
            SQUARE_COPIES * row * self.outputs * self.train * (self.kernels == "all")
        )
        features = (
            self.train * (1 + self.kernel_outputs) * self.tape_bytes
            + (self.kernels == "trace") * OUTPUT_GRADIENT_BYTES
        )
        weights = (
            (WEIGHT_COPIES + self.copies + self.tapes - 2)
            * self.parameters
            * self.number_bytes
        )
        numbers = (
            self.rules
            * self.summed_points
            * self.gradient_outputs
            * (1 + self.components)
        )
        by_component = (
            self.components
            * self.rules
            * self.summed_points
            * self.integrated
            * self.train
            * SUM_BYTES
        )
        totals = 8.0 * min(
            self.steps * numbers, max(MAX_TOTALS, MIN_STRETCHES * numbers)
        )
        recorded = RECORDED_COPIES * self.parameters * SUM_BYTES * self.records_weights
        return PROGRAM + weights + squares + features + totals + by_component + recorded

    @property
    def sums(self) -> float:
        """Bytes of the stored kernels and of the sums along the path."""
        kept = self.tangents * self.points * self.kernel_outputs**2
        summed = self.path_kernels * self.summed_points * self.integrated * self.outputs
        parts = self.summed_points * self.integrated * self.train
        contributions = parts * (
            self.rules * self.phases * SUM_BYTES + self.errors * self.number_bytes
        )
        return (kept + summed) * self.train * self.number_bytes + contributions

    @property
    def gradient_outputs(self) -> int:
        """The number of outputs per point whose gradients are computed. These are all
        outputs if `kernels` is "all"."""
        return self.outputs if self.kernels == "all" else self.integrated

    @property
    def kernel_outputs(self) -> int:
        """The number of gradients per training example, which is the length of the
        kernel's axis out_."""
        return self.outputs if self.kernels == "all" else 1

    @property
    def per_point(self) -> float:
        """Bytes of one point while its block is evaluated."""
        kernel_row = (
            self.gradient_outputs * self.kernel_outputs * self.train * self.number_bytes
        )
        return (self.tapes + 3 + 2 * self.gradient_outputs) * self.tape_bytes + (
            4 + self.components
        ) * kernel_row

    @property
    def block(self) -> int:
        """The number of points in a block.

        A block uses half of the free memory. Cached tapes (recorded forward passes) may
        use the rest.
        """
        self.require()
        return self.budget.holding(self.fixed).largest_batch(
            2 * self.per_point, self.points
        )

    def require(self) -> None:
        """Raise if even blocks of one point do not fit into memory."""
        remedy = f"lower model.width, data.train, data.query or data.test{self.component_advice}"
        what = (
            f"this run of {self.points} points, {self.train} of them training examples"
        )
        self.budget.holding(self.fixed).require(2 * self.per_point, what, remedy)

    def chunk(self, wanted: int) -> int:
        """Return the number of points in a chunk of the backward sum, at most `wanted`.

        Each point has an adjoint for each quadrature rule and output.
        """
        adjoint = (
            (self.rules + 1 + self.doubled)
            * self.integrated
            * self.parameters
            * self.number_bytes
        )
        halves = (
            STRETCHES
            * self.rules
            * wanted
            * self.integrated
            * self.train
            * self.number_bytes
        )
        held = 2 * self.train * self.tape_bytes + halves
        # the inner products ⟨U, J(xᵢ)⟩ of an adjoint with all examples
        products = self.integrated * self.train * self.tape_bytes
        reading = self.per_point + 2 * self.tape_bytes + 2 * products
        per_point = adjoint + (1 + self.doubled) * reading
        budget = self.budget.holding(self.fixed + held)
        remedy = f"lower model.width or data.train{self.component_advice}"
        budget.require(per_point, "this run with the attribution of one point", remedy)
        return budget.largest_batch(per_point, wanted)

    @property
    def component_advice(self) -> str:
        """Advice to use fewer components, for an error message.
        It is empty if there are no components."""
        return ", or name fewer components by path.by" if self.components else ""

    @property
    def keeps_tapes(self) -> bool:
        """True if the tapes of all points at both ends of a step fit into memory."""
        blocks = self.fixed + self.block * self.per_point
        return self.budget.holding(blocks).fits(2 * self.points * self.tape_bytes)

    @property
    def peak(self) -> float:
        tapes = 2 * self.points * self.tape_bytes if self.keeps_tapes else 0.0
        return self.fixed + self.block * self.per_point + tapes


# --- The estimated time of a run. It depends only on shapes, so that every computer
# gives the same estimate:
#
# seconds   = START_SECONDS + steps · positions · (POSITION_SECONDS
#             + points · work · SECONDS_PER_WORK),   on one core
# work      = number of weights + WORK_PER_NUMBER · numbers on the tape of one point
#
# A run that would take years is rejected. A run that ends at a given loss has no known
# number of steps, and is not rejected.


START_SECONDS = 3.0
POSITION_SECONDS = 0.003
SECONDS_PER_WORK = 8e-11
# The estimate of the work of a position assumes that a run uses each number on its
# tape in this many multiplications per training example.
WORK_PER_NUMBER = 64
# limits of core years; a GPU counts as a thousand cores
MAX_CORE_YEARS = {"cpu": 10.0, "cuda": 10_000.0}


def core_seconds(memory: RunMemory, passes: int) -> float:
    """Return the estimated seconds of a run with this number
    of passes over its path."""
    work = memory.points * (
        memory.parameters + WORK_PER_NUMBER * memory.tape_bytes / memory.number_bytes
    )
    return START_SECONDS + memory.steps * memory.tapes * passes * (
        POSITION_SECONDS + work * SECONDS_PER_WORK
    )


def refuse_endless(seconds: float, steps: int, device: str) -> None:
    """Raise if a run would take years."""
    remedy = "steps, model.width, data.train or path.substeps, or end at a loss with stop_at_loss"
    refuse_years(seconds, f"steps={steps}", device, remedy)


def refuse_years(seconds: float, what: str, device: str, remedy: str) -> None:
    """Raise if a task would take years. The message advises to lower the keys
    in `remedy`.

    >>> refuse_years(1e9, "steps=9", "cpu", "steps")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: steps=9: this would take about 32 years on one core, more than 10 years; lower steps
    """
    patience = MAX_CORE_YEARS.get(device.partition(":")[0], MAX_CORE_YEARS["cuda"])
    if seconds > patience * SECONDS_PER_YEAR:
        raise Mistake(
            f"{what}: this would take about {duration(seconds)} on one core, more than "
            f"{patience:g} years; lower {remedy}"
        )
