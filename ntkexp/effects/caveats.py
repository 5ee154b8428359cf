"""How much the derivative says about leaving examples out, in words; nothing, where nothing speaks against it.

The derivative is exact, and yet says little where training is chaotic, which shows as growth on the way back,
max_s ‖a_s‖/‖a_T‖, or where gradients jump, which shows only in trainings with half of a removal and all of it:

    agreement = cos(F(½) − F(1), F(0) − F(½)),    F(w): the outputs when a twentieth of the examples weigh w
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ntkexp.text import several

CHAOTIC = 1e3  # where this was measured, runs whose derivatives said nothing were above, all others below 3
AGREES = 0.8  # in 12 runs the derivative foretold single removals where it was above .86, and not below .73
SIGNS = 1e-6  # an ε below which Adam's step is nearly the sign of its gradient


@dataclass(frozen=True, kw_only=True)
class Caveats:
    """What there is to know."""

    growth: float
    agreement: float | None = None  # None: nobody trained with half of a removal
    kinks: Sequence[str] = ()  # operations of the network, or a loss, whose slope jumps
    eps: float | None = None  # of an optimizer that divides by it

    @property
    def sentences(self) -> list[str]:
        """Why effects mean little, a sentence each.

        >>> Caveats(growth=1.2, agreement=0.97).sentences
        []
        >>> Caveats(growth=6.7e4).sentences
        ['effects mean little: on the way back what outputs feel of the weights grows 6.7e+04 times; try smaller steps']
        """
        return [each for each in (self.chaos, self.jumps) if each]

    @property
    def chaos(self) -> str:
        """Training is chaotic."""
        if self.growth < CHAOTIC:
            return ""
        grows = f"{self.growth:.2g} times" if self.growth < float("inf") else "beyond all bounds"
        return f"effects mean little: on the way back what outputs feel of the weights grows {grows}; try smaller steps"

    @property
    def jumps(self) -> str:
        """Gradients jump.

        >>> Caveats(growth=1.0, agreement=0.37, kinks=["relu"], eps=1e-8).jumps
        'effects mean little: half of a removal and the rest of it agree by 0.37 only, as relu has kinks that no \
derivative sees, and eps=1e-08 makes steps of signs; try tanh or gelu, and a larger optimizer.eps'
        >>> Caveats(growth=1.0, kinks=["relu"]).jumps
        'relu has kinks, which effects do not see; trust no effect that was not checked by training again'
        """
        if self.agreement is not None and self.agreement < AGREES:
            found = f"effects mean little: half of a removal and the rest of it agree by {self.agreement:.2g} only"
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
