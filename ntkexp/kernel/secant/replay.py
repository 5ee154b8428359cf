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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.record.memory import is_out_of_memory
from ntkexp.kernel.record.tape import Entry, Slot, Tape, is_whole
from ntkexp.kernel.secant.level import Level
from ntkexp.kernel.secant.patches import with_shift
from ntkexp.kernel.secant.rules import RULES
from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule, Rule
from ntkexp.kernel.secant.uses import Derived, Element, Product, Source, Trained, Use


class Replay:
    """`delta` is J̄Δθ at the output, differentiable in the taps of `uses`; `leaves` are the trained Δθ."""

    def __init__(
        self, start: Tape, end: Tape, trained: frozenset[str], scramble: torch.Generator | None = None
    ) -> None:
        compare(start, end)
        if start.output not in start.from_inputs:
            raise NoRule("the outputs do not depend on the inputs")
        self.start, self.end, self.scramble = start, end, scramble
        self.kind = None if scramble is None else torch.float64
        self.trained = Trained(start, trained)
        self.deltas: dict[Slot, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        self.uses: list[Use] = []
        self.unknown: dict[Slot, str] = {}  # results whose difference no rule gives, and why
        self.seed_deltas()
        with torch.enable_grad():
            for entry in start.entries:
                if entry.results and any(slot in self.deltas or slot in self.unknown for slot in entry.slots):
                    self.pass_through(entry)
        if start.output in self.unknown:
            raise NoRule(self.unknown[start.output])
        nothing = torch.zeros_like(start[start.output], requires_grad=True)
        self.delta = self.deltas.get(start.output, nothing)

    def seed_deltas(self) -> None:
        """Differences of the weights; everything else from outside must be the same at both ends."""
        for slot in self.start.outside:
            v0, v1 = self.start[slot], self.end[slot]
            if name := self.start.weights.get(slot):
                delta = self.widened(v1.detach() - v0.detach()).requires_grad_(name in self.trained.names)
                self.deltas[slot] = delta
                if name in self.trained.names:
                    self.leaves[name] = delta
            elif v0 is not v1 and not torch.equal(v0, v1):
                raise NoRule("a buffer or constant of the module differs between the ends of a step")

    def pass_through(self, entry: Entry) -> None:
        """Give the operation's results their differences, or keep why they have none."""
        call = Call(self, entry)
        reasons = [self.unknown[slot] for slot in entry.slots if slot in self.unknown]
        if all(is_settled(v0, v1) for v0, v1 in call.ends):
            return
        elif reasons:
            self.unknown |= dict.fromkeys(entry.results, reasons[0])
        elif entry.name not in RULES:
            choice = f"a choice made by {entry.op} differs between the ends of a step"
            reason = f"no difference rule for the operation {entry.op}"
            self.unknown |= dict.fromkeys(entry.results, choice if all(is_whole(v) for v, _ in call.ends) else reason)
        else:
            self.follow(RULES[entry.name], entry, call)

    def follow(self, rule: Rule, entry: Entry, call: Call) -> None:
        """Give the operation's results the differences that its rule finds."""
        try:
            found = rule(call)
            results = (found,) if isinstance(found, Tensor) else found
            pairs = list(zip(entry.results, results, call.ends, strict=True))
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
                self.deltas[slot] = delta
                if self.scramble is not None and delta.requires_grad:
                    delta.register_hook(Level())  # type: ignore[no-untyped-call]  # torch's own
            elif not is_settled(v0, v1):
                self.unknown[slot] = f"no difference rule for this result of {entry.op}"

    def ends(self, slot: Any) -> Any:
        """The value of a slot at both ends; what is no slot is left as it is."""
        if not isinstance(slot, Slot):
            return slot
        v0, v1 = self.start[slot].detach(), self.end[slot].detach()
        return Ends(v0, v1, self.deltas.get(slot), slot in self.trained.slots, slot in self.start.from_inputs)

    def random_like(self, value: Tensor) -> Tensor:
        """A coefficient in [1, 2], when the replay only asks what reaches what."""
        noise = torch.rand(value.shape, generator=self.scramble, dtype=torch.float64)
        return 1 + noise.to(value.device, self.kind)

    def widened(self, value: Tensor) -> Tensor:
        """The value in double precision, when the replay only asks what reaches what: sums that cancel stay whole."""
        return value if self.kind is None or not value.is_floating_point() else value.to(self.kind)


class Call(AbstractCall):
    """One operation of a replay."""

    def __init__(self, replay: Replay, entry: Entry) -> None:
        self.replay, self.entry = replay, entry
        self.args, self.kwargs = tree_map(replay.ends, (entry.args, entry.kwargs))
        self.ends = [
            (replay.widened(replay.start[slot].detach()), replay.widened(replay.end[slot].detach()))
            for slot in entry.results
        ]
        self.meets_inputs = entry.results[0] in replay.start.from_inputs

    @property
    def is_point(self) -> bool:
        return self.replay.start is self.replay.end

    def is_cut(self, value: Ends) -> bool:
        carries = value.delta is None or (value.delta.requires_grad and value.delta.numel() > 0)
        return value.from_weights and self.meets_inputs and carries

    def delta(self, value: Ends, shape: torch.Size | None = None) -> Tensor:
        assert value.delta is not None, "a rule asked for the difference of a value that cannot change"
        wide = value.delta if shape is None else value.delta.expand(shape)
        if not self.is_cut(value):
            return wide
        return self.picked(value, lambda source: source.expand(wide.shape))

    def picked(self, value: Ends, arranged: Callable[[Tensor], Tensor]) -> Tensor:
        assert value.delta is not None
        tap = arranged(value.delta.detach()).clone().requires_grad_()
        count = torch.arange(value.start.numel(), device=tap.device).view(value.start.shape)
        self.replay.uses.append(Element(tap, self.source(value), arranged(count)))
        return tap

    def mean(self, value: Ends) -> Tensor:
        replay = self.replay
        if replay.scramble is not None and (value.delta is not None or value.from_inputs or value.from_weights):
            return replay.random_like(value.start)
        if value.delta is None or self.is_point:
            return replay.widened(value.start)
        if not value.start.is_floating_point():  # true + true is true
            return (value.start.to(value.delta.dtype) + value.end.to(value.delta.dtype)) / 2
        return (value.start + value.end) / 2

    def slope(self, value: Ends, slope: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        if self.replay.scramble is not None:
            return self.replay.random_like(value.start)
        return slope(value.start, value.end)

    def product(
        self, left: Ends, right: Ends, gain: float = 1.0, bias: Ends | None = None, shift: float = 1.0
    ) -> Tensor:
        if self.is_cut(left):
            return self.swapped_product(left, right, gain, bias, shift)
        factor = self.mean(left) if gain == 1 else gain * self.mean(left)
        terms = []
        if left.delta is not None:
            terms.append(torch.mm(left.delta if gain == 1 else gain * left.delta, self.mean(right)))
        if self.is_cut(right):
            wide = self.start.shape[1:]
            joined = bias if bias is not None and self.is_cut(bias) and bias.start.shape == wide else None
            bias = None if joined is not None else bias
            terms.append(self.use(with_shift(factor, None if joined is None else shift), right, joined))
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

    def use(self, factor: Tensor, weight: Ends, bias: Ends | None) -> Tensor:
        deltas = [value.delta for value in (bias, weight) if value is not None and value.delta is not None]
        by_row = torch.cat([delta.detach() if delta.dim() == 2 else delta.detach()[None] for delta in deltas])
        if factor.dim() == 2:
            tap = torch.mm(factor, by_row)
        else:
            tap = torch.bmm(by_row.t().expand(len(factor), -1, -1), factor.mT)
        added = None if bias is None else self.source(bias)
        self.replay.uses.append(Product(tap.requires_grad_(), factor, self.source(weight), added))
        return tap

    def source(self, value: Ends) -> Source:
        """The parameter that a value made of weights is a view of, or the graph that leads to its parameters."""
        view = self.replay.trained.view(value.start)
        if view is not None:
            return view
        assert value.delta is not None
        leaves = self.replay.leaves
        found = torch.autograd.grad(value.delta.sum(), list(leaves.values()), retain_graph=True, allow_unused=True)
        used = frozenset(name for name, gradient in zip(leaves, found, strict=True) if gradient is not None)
        return Derived(value.delta, used)


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
