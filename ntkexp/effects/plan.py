"""The memory of a sweep for leave-out effects, and caveats: reasons why leave-out effects
may not predict the result of retraining without an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ntkexp.capacity import MemoryBudget
from ntkexp.text import several

# --- The memory of a sweep (`effects.sweep`), and the number of outputs per pass.


# number of copies of the final gradient ∂F/∂θ_T for each output F, in addition to the
# adjoints of F
END_GRADIENTS = 1
# number of vectors of the weights' size for each output, in the backward pass of one
# step: p̂, S⊙a and Hγ of `effects.sweep`, and a temporary one
PASS_VECTORS = 4
# number of tapes (recorded forward passes) in this pass: values, tangents, and the
# gradients of both
PASS_TAPES = 6
# largest number of elements of the adjoints in one pass, so that they stay in the CPU
# cache
SWEEP_CACHE_NUMBERS = 2**20


@dataclass(frozen=True, kw_only=True)
class SweepMemory:
    """The sizes that determine the memory of a sweep, and the memory budget."""

    budget: MemoryBudget
    points: int
    outputs: int  # outputs per point
    parameters: int
    train: int
    rows: int  # examples per batch
    # number of adjoints per output: one of the weights, and one of each part of the
    # optimizer's state
    adjoints: int
    tape_bytes: float  # bytes on the tape per example
    number_bytes: int
    single_rows: int = 0  # number of rows whose gradients are formed one by one

    @property
    def points_per_chunk(self) -> int:
        """The number of points in a chunk. Raise
        if not even one point fits into memory."""
        per_point = self.outputs * self.per_output
        self.budget.require(
            2 * max(per_point, self.least_pass),
            "a sweep for the effects on one point",
            "train a smaller network, with fewer examples or smaller batches",
        )
        return self.budget.largest_batch(2 * per_point, self.points)

    @property
    def least_pass(self) -> float:
        """The smallest memory of a backward pass, in bytes: one output in one step, or
        the gradients of single rows, whichever takes more."""
        return max(
            self.per_pass,
            PASS_TAPES * self.single_rows * self.parameters * self.number_bytes,
        )

    @property
    def outputs_per_pass(self) -> int:
        """The number of outputs per backward pass."""
        return self.budget.largest_batch(
            2 * self.per_pass, SWEEP_CACHE_NUMBERS // self.parameters
        )

    @property
    def per_output(self) -> float:
        """Bytes that one output takes during the whole
        backward pass through training."""
        return (
            (self.adjoints + END_GRADIENTS) * self.parameters + self.train
        ) * self.number_bytes

    @property
    def per_pass(self) -> float:
        """Bytes that one output takes in the backward pass of one step."""
        return (
            PASS_TAPES * self.rows * self.tape_bytes
            + PASS_VECTORS * self.parameters * self.number_bytes
        )

    def retraining_remark(self, *, has_sweep: bool = True) -> str:
        """Return a message on the reason for measuring effects by retraining.

        If `has_sweep`, a sweep would take longer. Otherwise a sweep is impossible,
        because the derivative of the optimizer's step is unknown."""
        reason = "the derivative of this optimizer's step is not known"
        if has_sweep:
            outputs = self.points * self.outputs
            reason = f"a backward pass for {outputs} outputs would take longer"
        return (
            f"effects: measured by {self.train} trainings, each without one example, "
            f"because {reason}"
        )


# --- Caveats.
#
# A sweep linearises training. In two cases, the result does not predict what retraining
# without an example gives. First, training may be chaotic. Then the adjoint a_s of the
# weights at step s grows from the last step T to earlier steps, and max_s ‖a_s‖/‖a_T‖
# is large. Second, gradients may jump, for example at the kinks of ReLU. Then two halves
# of a removal cause different changes. To measure this, give a random twentieth of the
# examples the weight w, and let F(w) be the outputs after training:
#
#     agreement = cos(F(½) − F(1), F(0) − F(½))


# Training counts as chaotic if max_s ‖a_s‖/‖a_T‖ is above this limit. In 12 runs, it
# was above the limit if effects were useless, and below 3 otherwise.
CHAOTIC_GROWTH = 1e3
# The smallest agreement at which effects are trusted. In 12 runs, effects predicted
# removals if the agreement was above 0.86. They failed if it was below 0.73.
MIN_AGREEMENT = 0.8
SIGN_EPS = 1e-6  # with a smaller ε, Adam's step is nearly the sign of the gradient


@dataclass(frozen=True, kw_only=True)
class Caveats:
    """The measurements that decide which caveats apply to the effects of a run."""

    # growth of the adjoint a of the weights towards earlier steps: max_s ‖a_s‖/‖a_T‖
    growth: float
    # agreement of the two halves of a removal (see above), or None if it was not
    # measured
    agreement: float | None = None
    kinks: Sequence[str] = ()  # operations and losses with a discontinuous derivative
    eps: float | None = None  # ε of an adaptive optimizer

    @property
    def sentences(self) -> list[str]:
        """The caveats that apply, one sentence each.

        >>> Caveats(growth=1.2, agreement=0.97).sentences
        []
        >>> Caveats(growth=6.7e4).sentences
        ['effects mean little: the outputs are 6.7e+04 times as sensitive to early weights as to late ones; \
try smaller steps']
        """
        return [sentence for sentence in (self.chaos, self.jumps) if sentence]

    @property
    def chaos(self) -> str:
        """The caveat on chaotic training, or an empty text."""
        if self.growth < CHAOTIC_GROWTH:
            return ""
        sensitive = "far more sensitive to early weights than to late ones"
        if self.growth < float("inf"):
            sensitive = (
                f"{self.growth:.2g} times as sensitive to early weights as to late ones"
            )
        return f"effects mean little: the outputs are {sensitive}; try smaller steps"

    @property
    def jumps(self) -> str:
        """The caveat on discontinuous gradients, or an empty text.

        >>> Caveats(growth=1.0, agreement=0.37, kinks=["relu"], eps=1e-8).jumps
        'effects mean little: the two halves of a removal agree only by 0.37, because relu has kinks \
that derivatives ignore and steps with eps=1e-08 follow signs; try tanh or gelu and a larger \
optimizer.eps'
        >>> Caveats(growth=1.0, kinks=["relu"]).jumps
        'relu has kinks, which effects ignore; check effects by training again'
        """
        if self.agreement is not None and self.agreement < MIN_AGREEMENT:
            halves = f"the two halves of a removal agree only by {self.agreement:.2g}"
            reasons = " and ".join(reason for reason, _ in self.reasons)
            remedies = " and ".join(remedy for _, remedy in self.reasons)
            explanation = f", because {reasons}" if reasons else ""
            return (
                f"effects mean little: {halves}{explanation}; try "
                f"{remedies or 'fewer or smaller steps'}"
            )
        if self.kinks:
            return (
                f"{self.kinked}, which effects ignore; check effects by training again"
            )
        return ""

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """The reasons for discontinuous gradients, each with a remedy."""
        reasons = []
        if self.kinks:
            reasons.append((f"{self.kinked} that derivatives ignore", "tanh or gelu"))
        if self.eps is not None and self.eps <= SIGN_EPS:
            reasons.append(
                (f"steps with eps={self.eps:g} follow signs", "a larger optimizer.eps")
            )
        return reasons

    @property
    def kinked(self) -> str:
        """The beginning of a sentence: the operations with kinks."""
        verb = "has" if len(self.kinks) == 1 else "have"
        return f"{several(list(self.kinks))} {verb} kinks"
