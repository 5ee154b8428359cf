"""What a sweep for effects takes, and how far the derivative can be believed about leaving examples out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ntkexp.mistake import Mistake
from ntkexp.text import several

# --- What a sweep for effects takes, and how many outputs it goes back for at once.


BEGUN = 1  # row of an output beside its adjoints: ∂F/∂θ_T, of which the first is made
ROWS = 4  # of an output in a pass: what is pulled, what was moved, H γ, and one on the way
PASS = 6  # tapes of a pass: values, tangents, and gradients of both
IN_CACHE = 2**20  # numbers in the γ of one pass: as many as a processor keeps at hand


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Sizes in numbers, and the bytes that are free."""

    free: float  # bytes
    points: int
    outputs: int  # of each
    steps: int
    parameters: int
    train: int
    rows: int  # of a batch
    adjoints: int  # of an output: of the weights, and of what the optimizer remembers
    tape_bytes: float  # per example
    number_bytes: int
    taken_out: int = 0  # rows whose gradients are needed one by one

    @property
    def chunk(self) -> int:
        """How many points at once."""
        each = self.outputs * self.per_output
        if self.free / 2 < max(each, self.least_pass):
            needed = (2 * max(each, self.least_pass) - self.free) / 1e9
            raise Mistake(
                f"effects: a sweep for one point needs {needed:.1f} GB more; raise memory_gb, or train a smaller "
                "network, with fewer examples or smaller batches"
            )
        return max(1, min(self.points, int(self.free / 2 / each)))

    @property
    def least_pass(self) -> float:
        """Bytes of a pass of one output, and of the gradients of single rows."""
        return max(self.per_pass, PASS * self.taken_out * self.parameters * self.number_bytes)

    @property
    def together(self) -> int:
        """How many outputs take a step back together."""
        return max(1, min(IN_CACHE // self.parameters, int(self.free / 2 / self.per_pass)))

    @property
    def per_output(self) -> float:
        """Bytes of an output throughout the sweep."""
        return ((self.adjoints + BEGUN) * self.parameters + self.train) * self.number_bytes

    @property
    def per_pass(self) -> float:
        """Bytes of an output in a pass."""
        return PASS * self.rows * self.tape_bytes + ROWS * self.parameters * self.number_bytes

    def spared(self, *, swept: bool = True) -> str:
        """What is said instead where trainings cost less; or where no sweep could be made, but they cost as little."""
        trainings = f"effects: {self.train} trainings, each without one example,"
        if not swept:
            why = "the derivative of this optimizer's step is not known"
            return f"{trainings} are exact, and the only way, as {why}"
        outputs = self.points * self.outputs
        return f"{trainings} take less than a sweep back for {outputs} outputs and are exact: there is no sweep"


# --- How much the derivative says about leaving examples out, in words; nothing, where nothing speaks against it.
#
# The derivative is exact, and yet says little where training is chaotic, which shows as growth on the way back,
# max_s ‖a_s‖/‖a_T‖, or where gradients jump, which shows only in trainings with half of a removal and all of it:
#
#     agreement = cos(F(½) − F(1), F(0) − F(½)),    F(w): the outputs when a twentieth of the examples weigh w


CHAOTIC = 1e3  # where this was measured, runs whose derivatives said nothing were above, all others below 3
AGREES = 0.8  # in 12 runs the derivative predicted single removals where it was above .86, and not below .73
SIGNS = 1e-6  # an ε below which Adam's step is nearly the sign of its gradient


@dataclass(frozen=True, kw_only=True)
class Caveats:
    """What there is to know."""

    growth: float
    agreement: float | None = None  # None: no retraining with half of a removal
    kinks: Sequence[str] = ()  # operations of the network, or a loss, whose slope jumps
    eps: float | None = None  # of an optimizer that divides by it

    @property
    def sentences(self) -> list[str]:
        """Why effects mean little, a sentence each.

        >>> Caveats(growth=1.2, agreement=0.97).sentences
        []
        >>> Caveats(growth=6.7e4).sentences
        ['effects mean little: on the way back the adjoint grows 6.7e+04 times; try smaller steps']
        """
        return [each for each in (self.chaos, self.jumps) if each]

    @property
    def chaos(self) -> str:
        """Training is chaotic."""
        if self.growth < CHAOTIC:
            return ""
        grows = f"{self.growth:.2g} times" if self.growth < float("inf") else "beyond all bounds"
        return f"effects mean little: on the way back the adjoint grows {grows}; try smaller steps"

    @property
    def jumps(self) -> str:
        """Gradients jump.

        >>> Caveats(growth=1.0, agreement=0.37, kinks=["relu"], eps=1e-8).jumps
        'effects mean little: the two halves of a removal agree by 0.37 only, as relu has kinks that no \
derivative sees, and eps=1e-08 makes steps of signs; try tanh or gelu, and a larger optimizer.eps'
        >>> Caveats(growth=1.0, kinks=["relu"]).jumps
        'relu has kinks, which effects do not see; trust no effect that was not checked by training again'
        """
        if self.agreement is not None and self.agreement < AGREES:
            found = f"effects mean little: the two halves of a removal agree by {self.agreement:.2g} only"
            reasons, remedies = zip(*self.reasons, strict=True) if self.reasons else ((), ())
            why = f", as {', and '.join(reasons)}" if reasons else ""
            return f"{found}{why}; try {', and '.join(remedies) or 'fewer or smaller steps'}"
        if self.kinks:
            return f"{self.kinked}, which effects do not see; trust no effect that was not checked by training again"
        return ""

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """What makes gradients jump, and what to do about it."""
        found = [(f"{self.kinked} that no derivative sees", "tanh or gelu")] if self.kinks else []
        if self.eps is not None and self.eps <= SIGNS:
            found.append((f"eps={self.eps:g} makes steps of signs", "a larger optimizer.eps"))
        return found

    @property
    def kinked(self) -> str:
        """Who has kinks."""
        return f"{several(list(self.kinks))} {'has' if len(self.kinks) == 1 else 'have'} kinks"
