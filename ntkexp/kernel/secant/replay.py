"""Replay a tape on differences: propagate a change Δθ of the weights through the
network, operation by operation.

A step goes from weights θ₀ to θ₁. The replay reads two tapes of the same program,
recorded at θ₀ and θ₁. For every value v on them, Δv = v₁ − v₀.

    forward     apply the difference rule of each operation, from Δθ to J̄Δθ at the output
    backward    β̄ = ∂⟨u, J̄Δθ⟩/∂tap at every use of a weight (see `uses`), for a vector u in the
                shape of the outputs, by autograd through the rules

Every Δv is an autograd tensor that is linear in Δθ.

The linear map from Δθ to J̄Δθ is called the *surrogate* of the step. It is a linearized
network: its weights and activations are means over the start and the end of the step,
and its slopes are secant slopes. If θ₁ = θ₀, the slopes are derivatives, and J̄ is the
Jacobian.

Literature: the difference rules are discrete gradients (Itoh & Abe 1988, Gonzalez 1996,
McLachlan, Quispel & Robidoux 1999) chained along a program, like the multipliers of
DeepLIFT (Shrikumar, Greenside & Kundaje 2017). The rules replace the integral of
integrated gradients (Sundararajan, Taly & Yan 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp, isfinite

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ntkexp.kernel.record.tape import Entry, Slot, Tape, is_integer
from ntkexp.kernel.record.taping import is_out_of_memory
from ntkexp.kernel.secant.call import Call, ChoiceChanged, NoRule, ReplayState
from ntkexp.kernel.secant.rules import COMPLEX, RULES
from ntkexp.kernel.secant.uses import Trained
from ntkexp.shapes import Weights


class Replay:
    """The differences of all values of a network in one step.

    `delta` is J̄Δθ at the output, or J̄v if a `direction` v is given. Autograd can
    differentiate `delta` with respect to the taps of `uses`. If only these gradients
    are needed, `pullback_only` saves time: it replaces Δθ by zero. `constants` count as
    inputs, and `coefficient_noise` serves the search for owners (see `ownership`)."""

    def __init__(
        self,
        start: Tape,
        end: Tape,
        trained: frozenset[str],
        constants: frozenset[Slot] = frozenset(),
        coefficient_noise: torch.Generator | None = None,
        direction: Weights | None = None,
        *,
        pullback_only: bool = False,
    ) -> None:
        refuse_different_programs(start, end)
        if start.output not in start.from_inputs:
            raise NoRule("the outputs do not depend on the inputs")
        state = ReplayState(
            start,
            end,
            Trained(start, trained, constants),
            coefficient_noise,
            pullback_only or (start is end and direction is None),
        )
        self.state = state
        self.uses = state.uses
        self.leaves = state.leaves  # Δθ of the trained weights
        # for each result that has no difference: the reason
        self.unknown: dict[Slot, NoRule] = {}
        # Set Δθ, then Δv for every operation that depends on it, in order
        self.seed_deltas(direction)
        with torch.enable_grad():
            for entry in start.entries:
                if entry.results and any(
                    slot in state.deltas or slot in self.unknown for slot in entry.slots
                ):
                    self.apply_rule(entry)
        if start.output in self.unknown:
            raise self.unknown[start.output]
        zero = torch.zeros_like(start[start.output], requires_grad=True)
        self.delta = state.deltas.get(start.output, zero)

    def pullback(
        self, cotangent: Tensor, *, retain_graph: bool = False
    ) -> tuple[Tensor, ...]:
        """Return β̄ = ∂⟨u, J̄Δθ⟩/∂tap at every use, for a cotangent u of the outputs.
        Set `retain_graph` to keep autograd's graph for another call."""
        taps = [use.tap for use in self.uses]
        return torch.autograd.grad(
            self.delta,
            taps,
            cotangent,
            retain_graph=retain_graph,
            materialize_grads=True,
        )

    def seed_deltas(self, direction: Weights | None) -> None:
        """Set the differences of the weights. Raise NoRule if the step changes another
        value, such as a buffer."""
        state = self.state
        for slot in state.start.outside:
            v0 = state.start[slot]
            v1 = state.end[slot]
            if name := state.start.weights.get(slot):
                trained = name in state.trained.names
                if state.pullback_only:
                    step = torch.zeros_like(v0.detach())
                elif direction is not None and trained:
                    step = direction[name].detach()
                else:
                    step = v1.detach() - v0.detach()
                delta = state.to_double(step).requires_grad_(trained)
                state.deltas[slot] = delta
                if trained:
                    state.leaves[name] = delta
            elif v0 is not v1 and not torch.equal(v0, v1):
                raise NoRule(
                    "a buffer or constant of the module differs between the ends of a step"
                )

    def apply_rule(self, entry: Entry) -> None:
        """Compute the differences of an operation's results by its rule. If this is
        impossible, store the reason in `unknown`."""
        ends = [(self.state.start[s], self.state.end[s]) for s in entry.results]
        if all(is_unchanged_choice(v0, v1) for v0, v1 in ends):
            return

        # if an argument has no difference, the results have none either, for the same
        # reason
        reasons = [self.unknown[slot] for slot in entry.slots if slot in self.unknown]
        differences = reasons[0] if reasons else self.differences(entry, ends)
        if isinstance(differences, NoRule):
            self.unknown |= dict.fromkeys(entry.results, differences)
            return

        for (slot, delta), (v0, v1) in zip(differences, ends, strict=True):
            if isinstance(delta, Tensor):
                self.set_delta(slot, delta, is_complex=v0.is_complex())
            elif is_unchanged_choice(v0, v1):
                continue
            elif delta is None:
                self.unknown[slot] = missing_rule(entry, [(v0, v1)], v0.is_complex())
            else:
                self.unknown[slot] = NoRule(f"{delta} (at {entry.op})")

    def differences(
        self, entry: Entry, ends: Sequence[tuple[Tensor, Tensor]]
    ) -> list[tuple[Slot, Tensor | str | None]] | NoRule:
        """Return the slot of each result of an operation, with its difference by the
        rule (see `Result`). If there is no rule, or if it fails, return the reason."""
        state = self.state
        tensors = [state.start[slot] for slot in (*entry.slots, *entry.results)]
        is_complex = state.start.is_complex and any(
            tensor.is_complex() for tensor in tensors
        )
        rules = COMPLEX if is_complex else RULES
        if entry.name not in rules:
            return missing_rule(entry, ends, is_complex)
        try:
            deltas = rules[entry.name](Call(state, entry))
            if isinstance(deltas, Tensor):
                deltas = (deltas, *[None] * (len(ends) - 1))
            return list(zip(entry.results, deltas, strict=True))
        except NoRule as error:
            return type(error)(f"{error.reason} (at {entry.op})")
        except Exception as error:
            # the rule does not support these arguments, so there is no secant
            if is_out_of_memory(error):
                raise
            words = next(iter(str(error).splitlines()), type(error).__name__)
            return NoRule(f"the difference rule of {entry.op} fails here: {words}")

    def set_delta(self, slot: Slot, delta: Tensor, *, is_complex: bool) -> None:
        """Store the difference of a value, which may be complex."""
        # a real difference of a complex value: the imaginary part does not change
        if is_complex and not delta.is_complex():
            delta = torch.complex(delta, torch.zeros_like(delta))
        self.state.deltas[slot] = delta
        if self.state.coefficient_noise is not None and delta.requires_grad:
            delta.register_hook(GradientScale())  # type: ignore[no-untyped-call]  # torch's own


def missing_rule(
    entry: Entry, ends: Sequence[tuple[Tensor, Tensor]], is_complex: bool
) -> NoRule:
    """Return the reason why an operation without a rule has no difference."""
    if all(is_integer(start) for start, _ in ends):
        return ChoiceChanged(
            f"a choice made by {entry.op} differs between the ends of a step"
        )
    of_complex = " of complex numbers" if is_complex else ""
    return NoRule(f"no difference rule for the operation {entry.op}{of_complex}")


def is_unchanged_choice(v0: Tensor, v1: Tensor) -> bool:
    """Return True if a result consists of integers or booleans, and
    is the same at both ends."""
    return is_integer(v0) and torch.equal(v0, v1)


def without_floats(values: object) -> object:
    """Return nested values with None in place of each float.

    >>> without_floats(("add", (1, 2.5), {"alpha": 0.5}))
    ('add', (1, None), {'alpha': None})
    """
    return tree_map_only(float, lambda _: None, values)


def refuse_different_programs(start: Tape, end: Tape) -> None:
    """Raise unless both tapes have the same operations, and none writes in place."""
    for entry in start.entries:
        if entry.op._schema.is_mutable:
            raise NoRule(
                f"the module overwrites a tensor inside an operation of torch ({entry.op})"
            )
    if start is end or start.structure == end.structure:
        return
    if len(start.entries) != len(end.entries):
        raise ChoiceChanged(
            "the module runs different operations at the two ends of a step"
        )
    for entry, later in zip(start.entries, end.entries, strict=True):
        here = (entry.op, entry.args, entry.kwargs, entry.scalars)
        there = (later.op, later.args, later.kwargs, later.scalars)
        if here == there:
            continue
        if without_floats(here) == without_floats(there):
            raise NoRule(
                f"a number that left torch, as by item() or float(), differs between the ends of a "
                f"step (at {entry.op})"
            )
        raise ChoiceChanged(
            f"at {entry.op} the module takes different ways at the two ends of a step"
        )
    raise ChoiceChanged(
        "the module makes tensors of different shapes at the two ends of a step"
    )


REACH = 300  # gradients are scaled only if they lie outside 2^−300 … 2^300


class GradientScale:
    """A tensor hook that scales gradients by a power of two, to avoid overflow. The
    first gradient sets the scale for all later ones.

    In the search for owners, coefficients are random, so gradients would overflow after
    hundreds of layers. The search needs only the ratio of two gradients, which a common
    scale does not change.

    >>> x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    >>> y = 3 * x
    >>> _ = y.register_hook(GradientScale())
    >>> [float(torch.autograd.grad(y, x, torch.full_like(y, u), retain_graph=True)[0]) for u in (2.0**900, 2.0**901)]
    [3.0, 6.0]
    >>> [float(GradientScale()(torch.tensor(u))) for u in (5.0, 2.0**-100, 0.0)] == [5.0, 2.0**-100, 0.0]
    True
    """

    def __init__(self) -> None:
        self.scale: float | None = None

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        # the gradient is missing if the output does not depend on the tensor
        if gradient is None or gradient.numel() == 0:
            return gradient
        if self.scale is None:
            largest = float(gradient.abs().amax())
            power = frexp(largest)[1] - 1 if largest and isfinite(largest) else 0
            self.scale = 1.0 if abs(power) <= REACH else 2.0**-power
        if self.scale == 1.0:
            return gradient
        return gradient * self.scale
