"""The memory of a sweep for effects, and caveats on the derivative as a prediction of removals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ntkexp.capacity import MemoryBudget
from ntkexp.text import several

# --- The memory of a sweep, and the number of outputs that it handles at once.


END_GRADIENTS = 1  # copies of ∂F/∂θ_T for each output, besides its adjoints
PASS_VECTORS = 4  # vectors of each output in a pass: p̂, S⊙a, H γ, and one in transit
PASS_TAPES = 6  # tapes in a pass: values, tangents, and gradients of both
SWEEP_CACHE_NUMBERS = 2**20  # in all γ of one pass, so that they stay in a processor's cache


@dataclass(frozen=True, kw_only=True)
class SweepMemory:
    """The sizes of a sweep, and the memory budget."""

    budget: MemoryBudget
    points: int
    outputs: int  # of each point
    parameters: int
    train: int
    rows: int  # of a batch
    adjoints: int  # of each output: of the weights, and of the optimizer's memory
    tape_bytes: float  # per example
    number_bytes: int
    taken_out: int = 0  # rows whose single gradients are needed

    @property
    def chunk(self) -> int:
        """The number of points at once."""
        per_point = self.outputs * self.per_output
        self.budget.require(
            2 * max(per_point, self.least_pass),
            "a sweep for the effects on one point",
            "train a smaller network, with fewer examples or smaller batches",
        )
        return self.budget.largest_batch(2 * per_point, self.points)

    @property
    def least_pass(self) -> float:
        """Bytes of a pass with one output, and of the gradients of single rows."""
        return max(self.per_pass, PASS_TAPES * self.taken_out * self.parameters * self.number_bytes)

    @property
    def together(self) -> int:
        """The number of outputs that take a step together."""
        return self.budget.largest_batch(2 * self.per_pass, SWEEP_CACHE_NUMBERS // self.parameters)

    @property
    def per_output(self) -> float:
        """Bytes of one output during the whole sweep."""
        return ((self.adjoints + END_GRADIENTS) * self.parameters + self.train) * self.number_bytes

    @property
    def per_pass(self) -> float:
        """Bytes of one output in a pass."""
        return (
            PASS_TAPES * self.rows * self.tape_bytes
            + PASS_VECTORS * self.parameters * self.number_bytes
        )

    def spared(self, *, swept: bool = True) -> str:
        """The reason to retrain without each example instead of a sweep, in words."""
        trainings = f"effects: {self.train} trainings, each without one example,"
        if not swept:
            why = "the derivative of this optimizer's step is not known"
            return f"{trainings} are exact, and the only way, as {why}"
        outputs = self.points * self.outputs
        return (
            f"{trainings} take less than a sweep back for {outputs} outputs and are exact: there "
            "is no sweep"
        )


# --- Caveats. The derivative is exact, and yet says little about leaving an example out in two
# cases. If training is chaotic, the adjoint grows on the way back, max_s ‖a_s‖/‖a_T‖. If gradients
# jump, as at kinks of ReLU, only trainings with half of a removal and all of it show that:
#
#     agreement = cos(F(½) − F(1), F(0) − F(½)),    F(w): outputs if a twentieth of the examples weigh w


CHAOTIC_GROWTH = 1e3  # 12 measured runs: useless derivatives were above, all others below 3
MIN_AGREEMENT = 0.8  # 12 measured runs: single removals were predicted above .86, not below .73
SIGN_EPS = 1e-6  # below this ε, Adam's step is nearly the sign of its gradient


@dataclass(frozen=True, kw_only=True)
class Caveats:
    """The facts that decide how much an effect means."""

    growth: float
    agreement: float | None = None  # None: not measured
    kinks: Sequence[str] = ()  # operations and losses whose slope jumps
    eps: float | None = None  # ε of an adaptive optimizer

    @property
    def sentences(self) -> list[str]:
        """The reasons why effects mean little, one sentence each.

        >>> Caveats(growth=1.2, agreement=0.97).sentences
        []
        >>> Caveats(growth=6.7e4).sentences
        ['effects mean little: on the way back the adjoint grows 6.7e+04 times; try smaller steps']
        """
        return [each for each in (self.chaos, self.jumps) if each]

    @property
    def chaos(self) -> str:
        """The sentence on chaotic training."""
        if self.growth < CHAOTIC_GROWTH:
            return ""
        grows = f"{self.growth:.2g} times" if self.growth < float("inf") else "beyond all bounds"
        return f"effects mean little: on the way back the adjoint grows {grows}; try smaller steps"

    @property
    def jumps(self) -> str:
        """The sentence on gradients that jump.

        >>> Caveats(growth=1.0, agreement=0.37, kinks=["relu"], eps=1e-8).jumps
        'effects mean little: the two halves of a removal agree by 0.37 only, because relu has kinks \
that no derivative sees and steps with eps=1e-08 follow signs; try tanh or gelu and a larger \
optimizer.eps'
        >>> Caveats(growth=1.0, kinks=["relu"]).jumps
        'relu has kinks, which effects do not see; check effects by training again'
        """
        if self.agreement is not None and self.agreement < MIN_AGREEMENT:
            halves = f"the two halves of a removal agree by {self.agreement:.2g} only"
            reasons = " and ".join(reason for reason, _ in self.reasons)
            remedies = " and ".join(remedy for _, remedy in self.reasons)
            because = f", because {reasons}" if reasons else ""
            return (
                f"effects mean little: {halves}{because}; try "
                f"{remedies or 'fewer or smaller steps'}"
            )
        if self.kinks:
            return f"{self.kinked}, which effects do not see; check effects by training again"
        return ""

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """The reasons for jumps, each with its remedy."""
        reasons = []
        if self.kinks:
            reasons.append((f"{self.kinked} that no derivative sees", "tanh or gelu"))
        if self.eps is not None and self.eps <= SIGN_EPS:
            reasons.append((f"steps with eps={self.eps:g} follow signs", "a larger optimizer.eps"))
        return reasons

    @property
    def kinked(self) -> str:
        """The operations with kinks, as the beginning of a sentence."""
        verb = "has" if len(self.kinks) == 1 else "have"
        return f"{several(list(self.kinks))} {verb} kinks"
