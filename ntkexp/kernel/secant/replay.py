"""The replay: how a difference of weights passes through a network, as one linear map.

Two tapes of the same program, recorded at the ends of a segment, are walked together. Every value v carries its exact
difference Δv = v₁ − v₀, built by the rules as an ordinary autograd tensor that is linear in Δθ. At the output it is
J̄Δθ, which must equal f(θ₁) − f(θ₀): the closure check. Differentiated at the uses of the weights it gives β̄. The
network that this walk describes has the chord's mean weights and activations, and secant slopes: the surrogate.

Literature: the difference rules are discrete gradients (Itoh & Abe 1988, Gonzalez 1996, McLachlan, Quispel & Robidoux
1999) chained along a program, as the multipliers of DeepLIFT are (Shrikumar, Greenside & Kundaje 2017); integrated
gradients (Sundararajan, Taly & Yan 2017) are the integral that they replace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ntkexp.kernel.record.entry import Entry, Slot
from ntkexp.kernel.record.out_of_memory import is_out_of_memory
from ntkexp.kernel.record.tape import Tape, is_whole
from ntkexp.kernel.secant.call import Call
from ntkexp.kernel.secant.chord import Chord
from ntkexp.kernel.secant.gradient_scale import GradientScale
from ntkexp.kernel.secant.rules import COMPLEX, RULES
from ntkexp.kernel.secant.rules.base import NoRule, Rule
from ntkexp.kernel.secant.uses import Trained, Use
from ntkexp.shapes import Weights


class Replay:
    """`delta` is J̄Δθ at the output, differentiable in the taps of `uses`; or J̄v, of any other direction v. Where only
    the way back is asked, everything is `still`: Δθ is taken for zero."""

    def __init__(
        self,
        start: Tape,
        end: Tape,
        trained: frozenset[str],
        constants: frozenset[Slot] = frozenset(),
        scramble: torch.Generator | None = None,
        direction: Weights | None = None,
        *,
        still: bool = False,
    ) -> None:
        compare(start, end)
        if start.output not in start.from_inputs:
            raise NoRule("the outputs do not depend on the inputs")
        still = still or (start is end and direction is None)
        self.chord = Chord(start, end, Trained(start, trained, constants), scramble, still)
        self.unknown: dict[Slot, str] = {}  # results whose difference no rule gives, and why
        self.seed_deltas(direction)
        with torch.enable_grad():
            for entry in start.entries:
                if entry.results and any(slot in self.chord.deltas or slot in self.unknown for slot in entry.slots):
                    self.pass_through(entry)
        if start.output in self.unknown:
            raise NoRule(self.unknown[start.output])
        nothing = torch.zeros_like(start[start.output], requires_grad=True)
        self.delta = self.chord.deltas.get(start.output, nothing)

    @property
    def uses(self) -> list[Use]:
        """Where weights met inputs, in their order."""
        return self.chord.uses

    @property
    def leaves(self) -> Weights:
        """The trained Δθ."""
        return self.chord.leaves

    def seed_deltas(self, direction: Weights | None) -> None:
        """Differences of the weights; everything else from outside must be the same at both ends."""
        chord = self.chord
        for slot in chord.start.outside:
            v0, v1 = chord.start[slot], chord.end[slot]
            if name := chord.start.weights.get(slot):
                trained = name in chord.trained.names
                if chord.is_still:
                    step = torch.zeros_like(v0.detach())
                else:
                    step = v1.detach() - v0.detach() if direction is None or not trained else direction[name].detach()
                delta = chord.widen(step).requires_grad_(trained)
                chord.deltas[slot] = delta
                if trained:
                    chord.leaves[name] = delta
            elif v0 is not v1 and not torch.equal(v0, v1):
                raise NoRule("a buffer or constant of the module differs between the ends of a step")

    def pass_through(self, entry: Entry) -> None:
        """Give the operation's results their differences, or keep why they have none."""
        call = Call(self.chord, entry)
        reasons = [self.unknown[slot] for slot in entry.slots if slot in self.unknown]
        ends = [(self.chord.start[slot], self.chord.end[slot]) for slot in entry.results]
        if all(is_settled(v0, v1) for v0, v1 in ends):
            return
        if reasons:
            self.unknown |= dict.fromkeys(entry.results, reasons[0])
            return
        start = self.chord.start
        is_complex = start.is_complex and any(start[slot].is_complex() for slot in (*entry.slots, *entry.results))
        rule = (COMPLEX if is_complex else RULES).get(entry.name)
        if rule is None:
            choice = f"a choice made by {entry.op} differs between the ends of a step"
            reason = f"no difference rule for the operation {entry.op}{' of complex numbers' if is_complex else ''}"
            self.unknown |= dict.fromkeys(entry.results, choice if all(is_whole(v) for v, _ in ends) else reason)
        else:
            self.follow(rule, entry, call, ends)

    def follow(self, rule: Rule, entry: Entry, call: Call, ends: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Give the operation's results the differences that its rule finds."""
        try:
            found = rule(call)
            results = (found, *[None] * (len(ends) - 1)) if isinstance(found, Tensor) else found
            pairs = list(zip(entry.results, results, ends, strict=True))
        except NoRule as error:
            self.unknown |= dict.fromkeys(entry.results, f"{error.reason} (at {entry.op})")
            return
        except Exception as error:  # arguments that nobody thought of: better no secant than a traceback
            if is_out_of_memory(error):
                raise
            words = next(iter(str(error).splitlines()), type(error).__name__)
            self.unknown |= dict.fromkeys(entry.results, f"the difference rule of {entry.op} fails here: {words}")
            return
        for slot, delta, (v0, v1) in pairs:
            if delta is not None:
                moved = delta
                if v0.is_complex() and not delta.is_complex():  # where the real part alone changes
                    moved = torch.complex(delta, torch.zeros_like(delta))
                self.chord.deltas[slot] = moved
                if self.chord.scramble is not None and moved.requires_grad:
                    moved.register_hook(GradientScale())  # type: ignore[no-untyped-call]  # torch's own
            elif not is_settled(v0, v1):
                self.unknown[slot] = f"no difference rule for this result of {entry.op}"


def is_settled(v0: Tensor, v1: Tensor) -> bool:
    """Whether nothing can pass through a result: equal whole numbers and masks carry no difference."""
    return is_whole(v0) and torch.equal(v0, v1)


def compare(start: Tape, end: Tape) -> None:
    """Both tapes must tell of the same program, one that overwrites nothing."""
    for entry in start.entries:
        if entry.op._schema.is_mutable:
            raise NoRule(f"the module overwrites a tensor inside an operation of torch ({entry.op})")
    if start is end or start.structure == end.structure:
        return
    if len(start.entries) != len(end.entries):
        raise NoRule("the module runs different operations at the two ends of a step")
    for entry, later in zip(start.entries, end.entries, strict=True):
        if (entry.op, entry.args, entry.kwargs, entry.scalars) != (later.op, later.args, later.kwargs, later.scalars):
            raise NoRule(f"at {entry.op} the module takes different ways at the two ends of a step")
    raise NoRule("the module makes tensors of different shapes at the two ends of a step")
