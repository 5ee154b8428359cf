"""The memory of a run, how many points may be read at once with it, and how long the run takes."""

from __future__ import annotations

from dataclasses import dataclass

from ntkexp.kernel.read.plan import AT_ONCE
from ntkexp.mistake import Mistake
from ntkexp.on_disk import ROW_BLOCK_BYTES
from ntkexp.path.integrals import FEWEST, MOST
from ntkexp.path.recording import STRETCHES
from ntkexp.path.settings import Kernels
from ntkexp.text import SECONDS_PER_YEAR, duration

# --- The memory of a run: what it needs whatever happens, and how many points may be read at once with the rest.
#
# program         Python, torch and what else is loaded
# weights         both ends of a step, positions inside it, their difference and mean, the gradient and its parts
# kernels         K_0, K_T, one that is put together; 𝒦 by every rule, and snapshots; the ladder's square matrices
# contributions   𝒮 by every rule at the end of every phase, and its error; where they lie on disk, what is looked at
#                 of
#                 them at once
# totals          per rule what came of each step, or of each stretch of a long path
# features        of the training examples, kept through a step: of all outputs, or of what ℓ′ mixes of them
# block           per point a tape at every position inside a step, the replay's differences and slopes, C pull-backs,
#                 rows of kernels


FEWER = ", or name fewer components by path.by"
PROGRAM = 0.6e9
WEIGHT_COPIES = 9
SQUARE_COPIES = 5
SUM_BYTES = 8  # contributions are added up in float64
SPILLED = 8 * ROW_BLOCK_BYTES


def copies_of_drawn(number_bytes: int) -> float:
    """How often a run holds what drawing its weights takes, or less than that: a weight is drawn as one to four numbers
    of four bytes."""
    return WEIGHT_COPIES * number_bytes / 16


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Sizes of a run, in numbers and bytes."""

    memory_gb: float
    parameters: int
    points: int
    read: int  # of them, at which the path is integrated
    train: int
    outputs: int
    integrated: int  # outputs at which the path is
    rules: int
    tangents: int  # kernels that are kept, or their traces, at once
    path_kernels: int  # 𝒦 by every rule, and snapshots
    errors: int = 0  # sums like contributions that tell their error
    tapes: int  # positions inside a step at which a block is read, both ends included
    tape_bytes: float  # per point
    number_bytes: int
    copies: int = 0  # of the weights, that the optimizer holds during a step
    kernels: Kernels = "all"
    steps: int = 0
    phases: int = 1  # at the end of each of which contributions are kept, if there are several
    doubled: bool = False  # whether a pass backwards is measured by another with twice the pieces
    disk: bool = False  # whether contributions may lie there
    components: int = 0  # by which contributions are told apart, in memory

    @property
    def fixed(self) -> float:
        """Bytes that are needed however small the blocks are."""
        return self.always + (SPILLED if self.spills else self.sums)

    @property
    def spills(self) -> bool:
        """Whether contributions, where they are all that is summed up, lie on disk: in memory they would not fit."""
        may = self.disk and self.kernels == "none"
        return may and self.memory_gb * 1e9 < self.always + self.sums + 2 * self.per_point

    @property
    def always(self) -> float:
        """Bytes that are needed wherever the sums lie."""
        row, keeps_kernels = (
            self.read_outputs * self.train * self.number_bytes,
            self.kernels == "all",
        )
        squares = SQUARE_COPIES * row * self.outputs * self.train * keeps_kernels
        features = (
            self.train * (1 + self.kernel_outputs) * self.tape_bytes
            + (self.kernels == "trace") * AT_ONCE
        )
        weights = (
            (WEIGHT_COPIES + self.copies + self.tapes - 2) * self.parameters * self.number_bytes
        )
        numbers = self.rules * self.read * self.read_outputs * (1 + self.components)
        by_component = (
            self.components * self.rules * self.read * self.integrated * self.train * SUM_BYTES
        )
        totals = 8.0 * min(self.steps * numbers, max(MOST, FEWEST * numbers))
        return PROGRAM + weights + squares + features + totals + by_component

    @property
    def sums(self) -> float:
        """Bytes of kernels, and of what is summed up along the path."""
        kept = self.tangents * self.points * self.kernel_outputs**2
        summed = self.path_kernels * self.read * self.integrated * self.outputs
        parts = self.read * self.integrated * self.train
        contributions = parts * (
            self.rules * self.phases * SUM_BYTES + self.errors * self.number_bytes
        )
        return (kept + summed) * self.train * self.number_bytes + contributions

    @property
    def read_outputs(self) -> int:
        """How many outputs of a point are read: kernels are between all."""
        return self.outputs if self.kernels == "all" else self.integrated

    @property
    def kernel_outputs(self) -> int:
        """How many gradients a training example has, and numbers in a kernel for each output of a point."""
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
        """How many points are read at once: with up to half of what is free, so that tapes can be kept as well."""
        free = self.memory_gb * 1e9 - self.fixed
        if free < 2 * self.per_point:
            needed = (self.fixed + 2 * self.per_point) / 1e9
            raise Mistake(
                f"memory_gb={self.memory_gb:g}: this run needs at least {needed:.1f}; raise memory_gb, or lower "
                f"model.width, data.train, data.probe or data.test{FEWER if self.components else ''}"
            )
        return min(self.points, int(free / 2 / self.per_point))

    def chunk(self, wanted: int) -> int:
        """How many points are attributed at once by a sum backwards: each has an adjoint for every rule and output."""
        adjoint = (
            (self.rules + 1 + self.doubled) * self.integrated * self.parameters * self.number_bytes
        )
        halves = STRETCHES * self.rules * wanted * self.integrated * self.train * self.number_bytes
        kept = 2 * self.train * self.tape_bytes + halves
        free = self.memory_gb * 1e9 - self.fixed - kept
        products = self.integrated * self.train * self.tape_bytes  # of an adjoint with all examples
        reading = self.per_point + 2 * self.tape_bytes + 2 * products
        each = adjoint + (1 + self.doubled) * reading
        if free < each:
            needed = (self.fixed + kept + each) / 1e9
            raise Mistake(
                f"memory_gb={self.memory_gb:g}: attributing a point of this run needs at least {needed:.1f}; raise "
                f"memory_gb, or lower model.width or data.train{FEWER if self.components else ''}"
            )
        return min(wanted, int(free / each))

    @property
    def keep(self) -> bool:
        """Whether the tapes of all points at both ends of a step may be kept."""
        free = self.memory_gb * 1e9 - self.fixed - self.block * self.per_point
        return 2 * self.points * self.tape_bytes < free


# --- How long a run takes, from shapes alone: the same experiment is estimated the same on every machine and day.
#
# seconds   on one core of an ordinary processor: START + steps · positions · (BASE + points · work · RATE) work
# of one point: its weights, and for every number on its tape what the features cost
#
# What would outlast its user is refused before it begins; a run that ends at a loss is not known by its steps.


START, BASE, RATE = 3.0, 0.003, 8e-11
PER_NUMBER = 64  # of a tape, in weights: rows of the features are multiplied with those of the training examples
PATIENCE = {
    "cpu": 10.0,
    "cuda": 10_000.0,
}  # years of such a core: of many cores, a year; a GPU is a thousand of them


def core_seconds(budget: Budget, steps: int, passes: int) -> float:
    """The seconds of a run that goes over its path once, or there and back."""
    work = budget.points * (
        budget.parameters + PER_NUMBER * budget.tape_bytes / budget.number_bytes
    )
    return START + steps * budget.tapes * passes * (BASE + work * RATE)


def refuse_endless(seconds: float, steps: int, device: str) -> None:
    """Refuse a run that would outlast its user."""
    remedy = "steps, model.width, data.train or path.pieces, or end at a loss with stop_at_loss"
    refuse_years(seconds, f"steps={steps}", device, remedy)


def refuse_years(seconds: float, what: str, device: str, remedy: str) -> None:
    """Years are a mistake; `remedy` says which keys make them fewer.

    >>> refuse_years(1e9, "steps=9", "cpu", "steps")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: steps=9: this would take about 32 years on one core, more than 10 years; lower steps
    """
    patience = PATIENCE.get(device.partition(":")[0], PATIENCE["cuda"])
    if seconds > patience * SECONDS_PER_YEAR:
        raise Mistake(
            f"{what}: this would take about {duration(seconds)} on one core, more than {patience:g} years; "
            f"lower {remedy}"
        )
