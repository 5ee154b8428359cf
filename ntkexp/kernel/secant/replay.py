"""The replay: how a difference of weights passes through a network, call by call, as one linear map.

Gradients are scaled: what is pulled back through hundreds of layers of random coefficients outgrows numbers.

Whoever asks only what reaches what may scale a gradient on its way, if it is scaled alike each time that it comes by:

>>> import torch
>>> x = torch.ones(1, dtype=torch.float64, requires_grad=True)
>>> y = 3 * x
>>> _ = y.register_hook(GradientScale())
>>> [float(torch.autograd.grad(y, x, torch.full_like(y, size), retain_graph=True)[0]) for size in (2.0**900, 2.0**901)]
[3.0, 6.0]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import frexp, isfinite
from typing import Any

import torch
from torch import Tensor

from ntkexp.kernel.record.memory import is_out_of_memory
from ntkexp.kernel.record.tape import Entry, Slot, Tape, is_whole, map_leaves
from ntkexp.kernel.secant.linear_map import once, passed
from ntkexp.kernel.secant.rules import COMPLEX, RULES
from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Rule
from ntkexp.kernel.secant.uses import Derived, Element, Grouped, Product, Source, Trained, Use
from ntkexp.shapes import Weights

# --- A chord: a step between two tapes of one program, with the differences that are known so far.
#
# Where nothing is asked but what reaches what, all its coefficients are random (`scramble`), in double precision.


@dataclass(frozen=True)
class Chord:
    """Both tapes, the difference of every slot that has one, and the uses of weights that were met."""

    start: Tape
    end: Tape
    trained: Trained
    scramble: torch.Generator | None = None
    is_still: bool = False  # whether every difference is zero, and what it reaches is all that is asked
    deltas: dict[Slot, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)  # the trained Δθ
    uses: list[Use] = field(default_factory=list)
    pieces: dict[tuple[Slot, int], tuple[Tensor, ...]] = field(default_factory=dict)  # of differences, along an axis

    @property
    def is_point(self) -> bool:
        """Whether both ends are one."""
        return self.start is self.end

    @cached_property
    def taken(self) -> dict[tuple[Slot, int], set[int]]:
        """The places along an axis that are selected one by one."""
        found: dict[tuple[Slot, int], set[int]] = defaultdict(set)
        for entry in self.start.entries:
            if entry.name == "select":
                slot, dim, place = entry.args
                shape = self.start[slot].shape
                found[slot, dim % len(shape)].add(place % shape[dim])
        return found

    def ends(self, slot: Any) -> Any:
        """The value of a slot at both ends; what is no slot is left as it is."""
        if not isinstance(slot, Slot):
            return slot
        v0, v1 = self.start[slot].detach(), self.end[slot].detach()
        return Ends(v0, v1, self.deltas.get(slot), slot in self.trained.slots, slot in self.trained.from_inputs)

    def random_like(self, value: Tensor) -> Tensor:
        """A coefficient in [1, 2], when the replay only asks what reaches what; so is each part of a complex one."""
        noise = torch.rand(value.shape, generator=self.scramble, dtype=torch.float64)
        coefficient = 1 + noise.to(value.device, torch.float64)
        return torch.complex(coefficient, self.random_like(value.real)) if value.is_complex() else coefficient

    def widen(self, value: Tensor) -> Tensor:
        """The value in double precision, when the replay only asks what reaches what: sums that cancel stay whole."""
        if self.scramble is None or is_whole(value):
            return value
        return value.to(torch.complex128 if value.is_complex() else torch.float64)


# --- A call: one operation of a network, as the rules see it, with the coefficients of the chord.


class Call(AbstractCall):
    """One operation of a chord."""

    def __init__(self, chord: Chord, entry: Entry) -> None:
        self.chord, self.entry = chord, entry
        self.args = map_leaves(entry.args, chord.ends)
        self.kwargs = {name: map_leaves(value, chord.ends) for name, value in entry.kwargs.items()}
        self.meets_inputs = entry.results[0] in chord.trained.from_inputs

    @cached_property
    def ends(self) -> list[tuple[Tensor, Tensor]]:
        chord, slots = self.chord, self.entry.results
        starts = [chord.widen(chord.start[slot].detach()) for slot in slots]
        ends = starts if chord.is_point else [chord.widen(chord.end[slot].detach()) for slot in slots]
        return list(zip(starts, ends, strict=True))

    @property
    def is_point(self) -> bool:
        return self.chord.is_point

    @property
    def is_still(self) -> bool:
        return self.chord.is_still

    def is_cut(self, value: Ends) -> bool:
        carries = value.delta is None or (value.delta.requires_grad and value.delta.numel() > 0)
        return value.from_weights and self.meets_inputs and carries

    def delta(self, value: Ends, shape: torch.Size | None = None, gain: Tensor | float = 1.0) -> Tensor:
        wide = value.change if shape is None else value.change.expand(shape)
        if not self.is_cut(value):
            return wide if isinstance(gain, float) and gain == 1 else wide * gain
        if isinstance(gain, Tensor) and gain.is_complex():
            return self.picked(value, lambda source: source.expand(wide.shape)) * gain
        return self.picked(value, lambda source: source.expand(wide.shape), gain)

    def pieces(self, value: Ends, dim: int) -> tuple[Tensor, ...] | None:
        taken, pieces = (self.entry.args[0], dim % value.start.dim()), self.chord.pieces
        if self.is_cut(value) or len(self.chord.taken[taken]) < value.start.shape[dim]:
            return None
        if taken not in pieces:
            pieces[taken] = self.delta(value).unbind(dim)
        return pieces[taken]

    def picked(self, value: Ends, arranged: Callable[[Tensor], Tensor], gain: Tensor | float = 1.0) -> Tensor:
        if value.start.is_complex():  # a kernel sums over real numbers, so a use has real taps
            parts = (self.picked(value.view(part), arranged) for part in (real, imaginary))
            return torch.complex(*parts) * gain
        tap = (arranged(value.change.detach()) * gain).requires_grad_()
        count = torch.arange(value.start.numel(), device=tap.device).view(value.start.shape)
        self.chord.uses.append(Element(tap, self.source(value), arranged(count), gain))
        return tap

    def mean(self, value: Ends) -> Tensor:
        chord = self.chord
        if chord.scramble is not None and (value.delta is not None or value.from_inputs or value.from_weights):
            return chord.random_like(value.start)
        if value.delta is None or self.is_point:
            return chord.widen(value.start)
        if is_whole(value.start):  # true + true is true
            return (value.start.to(value.delta.dtype) + value.end.to(value.delta.dtype)) / 2
        return torch.lerp(value.start, value.end, 0.5)

    def slope(self, value: Ends, slope: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        if self.chord.scramble is not None:
            return self.chord.random_like(value.start)
        return slope(value.start, value.end)

    def product(
        self, left: Ends, right: Ends, gain: float = 1.0, bias: Ends | None = None, shift: float = 1.0
    ) -> Tensor:
        if self.is_cut(left):
            return self.swapped_product(left, right, gain, bias, shift)
        factor = self.mean(left) if gain == 1 else gain * self.mean(left)
        terms = []
        if left.delta is not None:
            matrix = self.mean(right)
            way = (partial(torch.matmul, other=matrix), once(partial(torch.matmul, other=matrix.t()), -2))
            shape = (len(left.delta), matrix.shape[1]) if self.is_still else None
            terms.append(passed(left.delta if gain == 1 else gain * left.delta, *way, shape))
        if self.is_cut(right):
            wide = self.start.shape[1:]
            joined = bias if bias is not None and self.is_cut(bias) and bias.start.shape == wide else None
            bias = None if joined is not None else bias
            terms.append(self.use(factor, right, joined, shift))
        elif right.delta is not None:
            terms.append(torch.mm(factor, right.delta))
        if bias is not None and bias.delta is not None:
            terms.append(shift * self.delta(bias, self.start.shape))
        return sum(terms[1:], start=terms[0])

    def swapped_product(self, left: Ends, right: Ends, gain: float, bias: Ends | None, shift: float) -> Tensor:
        """W a = (aᵀ Wᵀ)ᵀ: a use has its weight on the right."""
        if self.is_cut(right):
            raise NoRule(f"{self.entry.op} adds a product of weights to something else")
        result = self.product(right.view(Tensor.t), left.view(Tensor.t), gain).t()
        if bias is None or bias.delta is None:
            return result
        return result + shift * self.delta(bias, self.start.shape)

    def use(self, factor: Tensor, weight: Ends, bias: Ends | None, shift: float = 1.0) -> Tensor:
        assert weight.delta is not None
        if self.is_still:
            tap = nothing(factor, weight.delta.shape[-1])
        else:
            row = None if bias is None or bias.delta is None else shift * bias.delta.detach()
            tap = changes(factor, weight.delta.detach(), row)
        added = None if bias is None else self.source(bias)
        used = Product(tap.requires_grad_(), factor, self.source(weight), added, None if bias is None else shift)
        self.chord.uses.append(used)
        return tap

    def grouped_use(self, factor: Tensor, groups: int, weight: Ends, bias: Ends | None) -> Tensor:
        assert weight.delta is not None
        examples, uses, size = factor.shape
        kernels = weight.delta.detach().reshape(groups, -1, size // groups)
        shown = factor.mT.reshape(examples, groups, -1, uses)
        tap: Tensor = torch.matmul(kernels, shown).flatten(1, 2)
        if bias is not None and bias.delta is not None:
            tap = tap + bias.delta.detach()[:, None]
        added = None if bias is None else self.source(bias)
        self.chord.uses.append(Grouped(tap.requires_grad_(), factor, groups, self.source(weight), added))
        return tap

    def source(self, value: Ends) -> Source:
        """The parameter that a value made of weights is a view of, or the graph that leads to its parameters."""
        view = self.chord.trained.view(value.start)
        if view is not None:
            return view
        assert value.delta is not None
        leaves = self.chord.leaves
        found = torch.autograd.grad(value.delta.sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
        used = frozenset(name for name, gradient in zip(leaves, found, strict=True) if gradient is not None)
        return Derived(value.delta, used)


def real(value: Tensor) -> Tensor:
    """The real parts."""
    return torch.view_as_real(value.resolve_conj()).select(-1, 0)


def imaginary(value: Tensor) -> Tensor:
    """The imaginary parts."""
    return torch.view_as_real(value.resolve_conj()).select(-1, 1)


def changes(factor: Tensor, weight: Tensor, row: Tensor | None) -> Tensor:
    """factor ΔW, and a row for the bias, if there is one."""
    if factor.dim() == 2:
        rows = torch.mm(factor, weight)
        return rows if row is None else rows + row
    images = torch.bmm(weight.t().expand(len(factor), -1, -1), factor.mT)
    return images if row is None else images + row[:, None]


def nothing(factor: Tensor, features: int) -> Tensor:
    """The same, where all differences are zero."""
    return factor.new_zeros((len(factor), features) if factor.dim() == 2 else (len(factor), features, factor.shape[1]))


REACH = 300  # powers of two: a gradient in between is left as it is, bit for bit


class GradientScale:
    """A hook of a tensor: the first gradient that passes decides by which power of two it and all later ones shrink."""

    def __init__(self) -> None:
        self.scale: float | None = None

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or gradient.numel() == 0:  # nothing depends on the tensor
            return gradient
        if self.scale is None:
            self.scale = scale_for(float(gradient.abs().amax()))
        return gradient if self.scale == 1.0 else gradient * self.scale


def scale_for(largest: float) -> float:
    """The power of two that brings a number back to about one from far away.

    >>> scale_for(5.0), scale_for(2.0**600) == 2.0**-600, scale_for(2.0**-600) == 2.0**600
    (1.0, True, True)
    """
    if largest == 0 or not isfinite(largest):
        return 1.0
    power = frexp(largest)[1] - 1
    return 1.0 if abs(power) <= REACH else 2.0**-power


# --- The replay: how a difference of weights passes through a network, as one linear map.
#
# Two tapes of the same program, recorded at the ends of a segment, are walked together. Every value v carries its
# exact difference Δv = v₁ − v₀, built by the rules as an ordinary autograd tensor that is linear in Δθ. At the
# output it is J̄Δθ, which must equal f(θ₁) − f(θ₀): the closure check. Differentiated at the uses of the weights
# it gives β̄. The network that this walk describes has the chord's mean weights and activations, and secant
# slopes: the surrogate.
#
# Literature: the difference rules are discrete gradients (Itoh & Abe 1988, Gonzalez 1996, McLachlan, Quispel &
# Robidoux 1999) chained along a program, as the multipliers of DeepLIFT are (Shrikumar, Greenside & Kundaje
# 2017); integrated gradients (Sundararajan, Taly & Yan 2017) are the integral that they replace.


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
