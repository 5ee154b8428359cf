"""The memory and the time that a run takes, and the number of points that it reads at once."""

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
# weights         both ends of a step, positions inside it, their difference and mean, the gradient and its parts
# kernels         K_0, K_T, one while its blocks are joined; 𝒦 by every rule; snapshots; square matrices of the
#                 table of kernel machines
# contributions   𝒮 by every rule at the end of every phase, and its error; on disk, the pages in use
# totals          per rule the change by each step, or by each stretch of a long path
# features        of the training examples during a step: of all outputs, or weighted by ℓ′
# block           per point a tape at every position inside a step, differences and slopes of the secant, C
#                 gradients, rows of kernels


PROGRAM = 0.6e9
WEIGHT_COPIES = 9
SQUARE_COPIES = 5
SUM_BYTES = 8  # contributions are added up in float64
SPILLED = 8 * ROW_BLOCK_BYTES


def copies_of_drawn(number_bytes: int) -> float:
    """Return how many times a run holds the memory of drawing its weights, at least.

    A weight is drawn as one to four numbers of four bytes.
    """
    return WEIGHT_COPIES * number_bytes / 16


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """The sizes of a run, in numbers and bytes."""

    budget: MemoryBudget
    parameters: int
    points: int
    read: int  # points of the path integrals
    train: int
    outputs: int
    integrated: int  # outputs of the path integrals
    rules: int
    tangents: int  # tangent kernels, or their traces, in memory
    path_kernels: int  # 𝒦 by every rule, and snapshots
    errors: int = 0  # sums as large as contributions, for the error
    tapes: int  # positions in a step that a block reads, with both ends
    tape_bytes: float  # per point
    number_bytes: int
    copies: int = 0  # of the weights, in the optimizer during a step
    kernels: Kernels = "all"
    steps: int = 0
    phases: int = 1  # each keeps contributions at its end
    doubled: bool = False  # a second backward pass measures the error
    disk: bool = False  # contributions may be on disk
    components: int = 0  # contributions of each are in memory

    @property
    def fixed(self) -> float:
        """Bytes that do not depend on the blocks."""
        return self.always + (SPILLED if self.spills else self.sums)

    @property
    def spills(self) -> bool:
        """True if contributions go to disk: nothing else is summed, and they do not fit into the
        memory."""
        may = self.disk and self.kernels == "none"
        return may and not self.budget.holding(self.always).fits(self.sums + 2 * self.per_point)

    @property
    def always(self) -> float:
        """Bytes that do not depend on where the sums are."""
        row = self.read_outputs * self.train * self.number_bytes
        squares = SQUARE_COPIES * row * self.outputs * self.train * (self.kernels == "all")
        features = (
            self.train * (1 + self.kernel_outputs) * self.tape_bytes
            + (self.kernels == "trace") * OUTPUT_GRADIENT_BYTES
        )
        weights = (
            (WEIGHT_COPIES + self.copies + self.tapes - 2) * self.parameters * self.number_bytes
        )
        numbers = self.rules * self.read * self.read_outputs * (1 + self.components)
        by_component = (
            self.components * self.rules * self.read * self.integrated * self.train * SUM_BYTES
        )
        totals = 8.0 * min(self.steps * numbers, max(MAX_TOTALS, MIN_STRETCHES * numbers))
        return PROGRAM + weights + squares + features + totals + by_component

    @property
    def sums(self) -> float:
        """Bytes of kernels, and of the sums along the path."""
        kept = self.tangents * self.points * self.kernel_outputs**2
        summed = self.path_kernels * self.read * self.integrated * self.outputs
        parts = self.read * self.integrated * self.train
        contributions = parts * (
            self.rules * self.phases * SUM_BYTES + self.errors * self.number_bytes
        )
        return (kept + summed) * self.train * self.number_bytes + contributions

    @property
    def read_outputs(self) -> int:
        """The outputs of a point that are read; for kernels, all."""
        return self.outputs if self.kernels == "all" else self.integrated

    @property
    def kernel_outputs(self) -> int:
        """The gradients of a training example; also the numbers of a kernel for each output of a
        point."""
        return self.outputs if self.kernels == "all" else 1

    @property
    def per_point(self) -> float:
        """Bytes of one point while its block is read."""
        kernel_row = self.read_outputs * self.kernel_outputs * self.train * self.number_bytes
        return (self.tapes + 3 + 2 * self.read_outputs) * self.tape_bytes + (
            4 + self.components
        ) * kernel_row

    @property
    def block(self) -> int:
        """The number of points in a block, which uses half of the free memory; tapes use the
        rest."""
        self.require()
        return self.budget.holding(self.fixed).largest_batch(2 * self.per_point, self.points)

    def require(self) -> None:
        """Raise if the memory does not suffice for blocks of one point."""
        remedy = f"lower model.width, data.train, data.query or data.test{self.fewer}"
        what = f"this run of {self.points} points, {self.train} of them training examples"
        self.budget.holding(self.fixed).require(2 * self.per_point, what, remedy)

    def chunk(self, wanted: int) -> int:
        """Return the number of points in a chunk of the backward sum. Each has an adjoint for every
        rule and output."""
        adjoint = (
            (self.rules + 1 + self.doubled) * self.integrated * self.parameters * self.number_bytes
        )
        halves = STRETCHES * self.rules * wanted * self.integrated * self.train * self.number_bytes
        held = 2 * self.train * self.tape_bytes + halves
        products = self.integrated * self.train * self.tape_bytes  # of an adjoint with all examples
        reading = self.per_point + 2 * self.tape_bytes + 2 * products
        per_point = adjoint + (1 + self.doubled) * reading
        budget = self.budget.holding(self.fixed + held)
        remedy = f"lower model.width or data.train{self.fewer}"
        budget.require(per_point, "this run with the attribution of one point", remedy)
        return budget.largest_batch(per_point, wanted)

    @property
    def fewer(self) -> str:
        """The advice to name fewer components, if there are any."""
        return ", or name fewer components by path.by" if self.components else ""

    @property
    def keep(self) -> bool:
        """True if the tapes of all points at both ends of a step fit into the memory."""
        blocks = self.fixed + self.block * self.per_point
        return self.budget.holding(blocks).fits(2 * self.points * self.tape_bytes)

    @property
    def peak(self) -> float:
        """The most bytes at any time."""
        tapes = 2 * self.points * self.tape_bytes if self.keep else 0.0
        return self.fixed + self.block * self.per_point + tapes


# --- The time of a run, from shapes alone, so that every machine estimates the same:
#
# seconds   on one core: START_SECONDS + steps · positions · (POSITION_SECONDS + points · work · SECONDS_PER_WORK)
# work      of one point: its weights, and the features of every number on its tape
#
# A run that would outlast its user is refused. The steps of a run that ends at a loss are not
# known.


START_SECONDS = 3.0
POSITION_SECONDS = 0.003
SECONDS_PER_WORK = 8e-11
WORK_PER_NUMBER = 64  # of a tape, for products of its features with the training examples
MAX_CORE_YEARS = {"cpu": 10.0, "cuda": 10_000.0}  # a GPU is a thousand cores


def core_seconds(memory: RunMemory, passes: int) -> float:
    """Return the seconds of a run with one pass over its path, or two."""
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
    """Raise if a task would take years. `remedy` names the keys that make it shorter.

    >>> refuse_years(1e9, "steps=9", "cpu", "steps")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: steps=9: this would take about 32 years on one core, more than 10 years; lower steps
    """
    patience = MAX_CORE_YEARS.get(device.partition(":")[0], MAX_CORE_YEARS["cuda"])
    if seconds > patience * SECONDS_PER_YEAR:
        raise Mistake(
            f"{what}: this would take about {duration(seconds)} on one core, more than "
            f"{patience:g} years; "
            f"lower {remedy}"
        )
