"""Linear maps beside their transposes, where there is a shorter one than autograd finds operation by operation.

⟨w, there(v)⟩ = ⟨back(w), v⟩        both linear; each takes a single vector, or many along an axis before its own
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.record.tape import Entry, Slot, Tape, is_whole, map_leaves
from ntkexp.kernel.secant.uses import Derived, Element, Grouped, Product, Source, Trained, Use
from ntkexp.mistake import Mistake

Way: TypeAlias = Callable[[Tensor], Tensor]


def passed(delta: Tensor, there: Way, back: Way, nothing: Sequence[int] | None = None) -> Tensor:
    """there(delta), through which autograd goes back by `back`; a shape `nothing` stands for zeros, which need no map.

    >>> v = torch.ones(2, requires_grad=True)
    >>> total = passed(v, lambda v: v.sum(-1, keepdim=True), lambda w: w.expand(*w.shape[:-1], 2))
    >>> torch.autograd.grad(total, v, torch.tensor([3.0]))
    (tensor([3., 3.]),)
    >>> passed(0 * v, lambda v: v.sum(), lambda w: w.expand(2), nothing=[])
    tensor(0., grad_fn=<LinearMapBackward>)
    """
    result: Tensor = LinearMap.apply(delta, there, back, nothing)  # type: ignore[no-untyped-call]  # torch's own
    return result


def once(back: Way, axis: int) -> Way:
    """The same way back, taken once for all examples where they share one vector, as they do next to a readout.

    >>> once(lambda w: 2 * w, -2)(torch.ones(1, 3).expand(4, 3)).stride()
    (0, 1)
    """

    def found(w: Tensor) -> Tensor:
        if w.stride(axis) or w.shape[axis] < 2:
            return back(w)
        v = back(w.narrow(axis, 0, 1))
        return v.expand(*v.shape[:axis], w.shape[axis], *v.shape[v.dim() + axis + 1 :])

    return found


def inner_products(
    vectors: Float[Tensor, "vector *row size"], fixed: Float[Tensor, "count *row size"]
) -> Float[Tensor, "count vector *row 1"]:
    """⟨v, f⟩ of each row of many vectors with the same row of a few fixed ones: a product of matrices for each row."""
    size = fixed.shape[-1]
    rows = vectors.reshape(len(vectors), -1, size).permute(1, 2, 0)
    found = torch.bmm(fixed.reshape(len(fixed), -1, size).transpose(0, 1), rows)
    return found.permute(1, 2, 0).contiguous().view(len(fixed), *vectors.shape[:-1], 1)


class LinearMap(torch.autograd.Function):
    """The map for autograd; the transpose of the transpose is the map."""

    @staticmethod
    def forward(delta: Tensor, there: Way, back: Way, nothing: Sequence[int] | None) -> Tensor:
        return there(delta) if nothing is None else delta.new_zeros(nothing)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Way, Way, Any], output: Tensor) -> None:
        _, ctx.there, ctx.back, _ = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        return passed(cotangent, ctx.back, ctx.there), None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Sequence[Any],
        delta: Tensor,
        there: Way,
        back: Way,
        nothing: Sequence[int] | None,
    ) -> tuple[Tensor, int]:
        return passed(delta.movedim(in_dims[0], 0), there, back), 0


# --- A call: one operation of a network at both ends of a segment, as a difference rule sees it.
#
# A rule is a function of a `Call` that returns the exact difference Δv = v₁ − v₀ of the operation's result, as a
# linear map of the differences of its arguments. What multiplies a difference is a *coefficient*:
#
#     mean     v̄ = (v₀ + v₁)/2                    slope     D(v₀, v₁), such as (σ(v₁) − σ(v₀))/(v₁ − v₀)
#
# Rules take coefficients from the call, because the search for which example owns which element replaces every
# one of them that inputs or weights decide by a random number in [1, 2] (`scramble`): no unit is dead then, no
# pixel black, and nothing cancels.
#
# Where a weight meets what depends on the inputs, the network is cut, and the difference of the weight becomes
# the tap of a `Use`: a leaf of the graph, at which autograd gives β̄.


class NoRule(Mistake):
    """An operation through which no difference can be passed exactly."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

    @property
    def remark(self) -> str:
        """What it means for a tangent."""
        return f"{self.reason}: the tangent is read from plain Jacobians, which is correct but slow"


@dataclass(frozen=True, eq=False)
class Ends:
    """A tensor at both ends of a segment. `delta` is None where it cannot change."""

    start: Tensor
    end: Tensor
    delta: Tensor | None
    from_weights: bool = False  # a function of trained weights, not of the inputs
    from_inputs: bool = True

    @property
    def change(self) -> Tensor:
        assert self.delta is not None, "a rule wants the difference of a value that cannot change"
        return self.delta

    def view(self, function: Callable[[Tensor], Tensor]) -> Ends:
        """The same rearrangement of the value at both ends and of the difference."""
        delta = None if self.delta is None else function(self.delta)
        return Ends(
            function(self.start), function(self.end), delta, self.from_weights, self.from_inputs
        )

    def __getitem__(self, index: Any) -> Ends:
        return self.view(lambda v: v[index])


@dataclass(frozen=True)
class Chord:
    """A step between two tapes of one program, with the differences that are known so far and the uses of weights."""

    start: Tape
    end: Tape
    trained: Trained
    scramble: torch.Generator | None = (
        None  # draws every coefficient, where only what reaches what is of interest
    )
    pullback_only: bool = False  # every difference is zero: only the way back is needed
    deltas: dict[Slot, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)  # the trained Δθ
    uses: list[Use] = field(default_factory=list)
    unbound: dict[tuple[Slot, int], tuple[Tensor, ...]] = field(
        default_factory=dict
    )  # differences along an axis

    @property
    def is_point(self) -> bool:
        """Whether both ends are one, so that differences are derivatives."""
        return self.start is self.end

    @cached_property
    def selected(self) -> dict[tuple[Slot, int], set[int]]:
        """The places along an axis that are selected one by one."""
        found: dict[tuple[Slot, int], set[int]] = defaultdict(set)
        for entry in self.start.entries:
            if entry.name == "select":
                slot, dim, place = entry.args
                shape = self.start[slot].shape
                found[slot, dim % len(shape)].add(place % shape[dim])
        return found

    def ends(self, slot: Any) -> Any:
        """The value of a slot at both ends; other arguments are left as they are."""
        if not isinstance(slot, Slot):
            return slot
        v0 = self.start[slot].detach()
        v1 = self.end[slot].detach()
        return Ends(
            v0,
            v1,
            self.deltas.get(slot),
            slot in self.trained.slots,
            slot in self.trained.from_inputs,
        )

    def random_like(self, value: Tensor) -> Tensor:
        """A coefficient in [1, 2]; so is each part of a complex one."""
        noise = torch.rand(value.shape, generator=self.scramble, dtype=torch.float64)
        coefficient = 1 + noise.to(value.device, torch.float64)
        return (
            torch.complex(coefficient, self.random_like(value.real))
            if value.is_complex()
            else coefficient
        )

    def widen(self, value: Tensor) -> Tensor:
        """The value in double precision where coefficients are random: sums that cancel stay whole."""
        if self.scramble is None or is_whole(value):
            return value
        return value.to(torch.complex128 if value.is_complex() else torch.float64)


class Call:
    """One operation of a chord: its arguments at both ends, their differences, and coefficients."""

    def __init__(self, chord: Chord, entry: Entry) -> None:
        self.chord = chord
        self.entry = entry
        self.args: tuple[Any, ...] = map_leaves(entry.args, chord.ends)
        self.kwargs: dict[str, Any] = {
            name: map_leaves(value, chord.ends) for name, value in entry.kwargs.items()
        }
        self.meets_inputs = entry.results[0] in chord.trained.from_inputs

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments by torch's names for them, with its defaults."""
        defaults = {each.name: each.default_value for each in self.entry.op._schema.arguments}
        return defaults | dict(zip(defaults, self.args, strict=False)) | self.kwargs

    @cached_property
    def ends(self) -> list[tuple[Tensor, Tensor]]:
        chord = self.chord
        slots = self.entry.results
        starts = [chord.widen(chord.start[slot].detach()) for slot in slots]
        ends = (
            starts if chord.is_point else [chord.widen(chord.end[slot].detach()) for slot in slots]
        )
        return list(zip(starts, ends, strict=True))

    @property
    def start(self) -> Tensor:
        """The (first) result at the start, for its shape."""
        return self.ends[0][0]

    @property
    def is_point(self) -> bool:
        return self.chord.is_point

    def is_use(self, value: Ends) -> bool:
        """Whether the operation uses this weight: the argument is made of weights alone, the result depends on
        inputs."""
        carries = value.delta is None or (value.delta.requires_grad and value.delta.numel() > 0)
        return value.from_weights and self.meets_inputs and carries

    # --- Coefficients.

    def mean(self, value: Ends) -> Tensor:
        """v̄ = (v₀ + v₁)/2."""
        chord = self.chord
        if chord.scramble is not None and (
            value.delta is not None or value.from_inputs or value.from_weights
        ):
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

    def coefficient(self, value: Tensor) -> Tensor:
        """A number of both ends that multiplies a difference."""
        return self.slope(Ends(value, value, None), lambda v, _: v)

    # --- Differences.

    def delta(
        self, value: Ends, shape: torch.Size | None = None, gain: Tensor | float = 1.0
    ) -> Tensor:
        """gain · Δv, expanded to the shape at which the operation uses the value."""
        wide = value.change if shape is None else value.change.expand(shape)
        if not self.is_use(value):
            return wide if isinstance(gain, float) and gain == 1 else wide * gain
        if isinstance(gain, Tensor) and gain.is_complex():
            return self.element_use(value, lambda source: source.expand(wide.shape)) * gain
        return self.element_use(value, lambda source: source.expand(wide.shape), gain)

    def wide(self, value: Any, shape: torch.Size | None = None) -> Ends:
        """An argument with its difference, at the shape at which the operation uses it; a number is a constant."""
        if not isinstance(value, Ends):
            size = self.start.shape if shape is None else shape
            number = torch.full(
                size, float(value), dtype=self.start.dtype, device=self.start.device
            )
            return Ends(number, number, None, from_inputs=False)
        delta = None if value.delta is None else self.delta(value, shape)
        start, end = (v if shape is None else v.expand(shape) for v in (value.start, value.end))
        return Ends(start, end, delta, from_inputs=value.from_inputs)

    def both(self) -> tuple[Ends, Ends]:
        """The first two arguments at the shape of the result."""
        left, right = (self.wide(value, self.start.shape) for value in self.args[:2])
        return left, right

    def unbound(self, value: Ends, dim: int) -> tuple[Tensor, ...] | None:
        """The differences along an axis one by one, if the network selects each of them: autograd stacks them at once,
        instead of writing one after the other into zeros.
        """
        key = (self.entry.args[0], dim % value.start.dim())
        unbound = self.chord.unbound
        if self.is_use(value) or len(self.chord.selected[key]) < value.start.shape[dim]:
            return None
        if key not in unbound:
            unbound[key] = self.delta(value).unbind(dim)
        return unbound[key]

    def product(
        self,
        left: Ends,
        right: Ends,
        gain: float = 1.0,
        bias: Ends | None = None,
        shift: float = 1.0,
    ) -> Tensor:
        """Δ(gain · A B + shift · b) = gain · (ΔA B̄ + Ā ΔB) + shift · Δb, for matrices."""
        if self.is_use(left):  # W a = (aᵀ Wᵀ)ᵀ: a use has its weight on the right
            if self.is_use(right):
                raise NoRule(f"{self.entry.op} adds a product of weights to something else")
            turned = self.product(right.view(Tensor.t), left.view(Tensor.t), gain).t()
            varies = bias is not None and bias.delta is not None
            return (
                turned + shift * self.delta(bias, self.start.shape)
                if bias is not None and varies
                else turned
            )
        factor = self.mean(left) if gain == 1 else gain * self.mean(left)
        terms = []
        if left.delta is not None:  # gain · ΔA B̄
            matrix = self.mean(right)
            ways = (
                partial(torch.matmul, other=matrix),
                once(partial(torch.matmul, other=matrix.t()), -2),
            )
            zero = (len(left.delta), matrix.shape[1]) if self.chord.pullback_only else None
            terms.append(passed(left.delta if gain == 1 else gain * left.delta, *ways, zero))
        if self.is_use(right):  # gain · Ā ΔW, and the bias with it if there is one for each feature
            wide = self.start.shape[1:]
            joined = (
                bias
                if bias is not None and self.is_use(bias) and bias.start.shape == wide
                else None
            )
            bias = None if joined is not None else bias
            terms.append(self.product_use(factor, right, joined, shift))
        elif right.delta is not None:  # gain · Ā ΔB
            terms.append(torch.mm(factor, right.delta))
        if bias is not None and bias.delta is not None:
            terms.append(shift * self.delta(bias, self.start.shape))
        return sum(terms[1:], start=terms[0])

    # --- Uses: the difference of a weight where it meets the inputs.

    def product_use(
        self, factor: Tensor, weight: Ends, bias: Ends | None, shift: float = 1.0
    ) -> Tensor:
        """factor ΔW + shift · Δb: rows for rows, images [example, out, use] for patches [example, use, in]."""
        change = weight.change.detach()
        row = None
        if bias is not None and bias.delta is not None and not self.chord.pullback_only:
            row = shift * bias.delta.detach()
        if factor.dim() == 2:
            shape = [len(factor), change.shape[1]]
            tap = factor.new_zeros(shape) if self.chord.pullback_only else torch.mm(factor, change)
        else:
            shape = [len(factor), change.shape[1], factor.shape[1]]
            row = None if row is None else row[:, None]
            kernels = change.t().expand(len(factor), -1, -1)
            tap = (
                factor.new_zeros(shape)
                if self.chord.pullback_only
                else torch.bmm(kernels, factor.mT)
            )
        tap = tap if row is None else tap + row
        added = None if bias is None else self.source(bias)
        use = Product(
            tap.requires_grad_(),
            factor,
            self.source(weight),
            added,
            None if bias is None else shift,
        )
        self.chord.uses.append(use)
        return tap

    def grouped_use(self, factor: Tensor, groups: int, weight: Ends, bias: Ends | None) -> Tensor:
        """factor_g ΔW_gᵀ + Δb_g for every group, as images [example, out, use]."""
        examples, uses, size = factor.shape
        kernels = weight.change.detach().reshape(groups, -1, size // groups)
        columns = factor.mT.reshape(examples, groups, -1, uses)
        tap: Tensor = torch.matmul(kernels, columns).flatten(1, 2)
        if bias is not None and bias.delta is not None:
            tap = tap + bias.delta.detach()[:, None]
        added = None if bias is None else self.source(bias)
        self.chord.uses.append(
            Grouped(tap.requires_grad_(), factor, groups, self.source(weight), added)
        )
        return tap

    def element_use(
        self, value: Ends, arranged: Callable[[Tensor], Tensor], gain: Tensor | float = 1.0
    ) -> Tensor:
        """gain · Δw for the elements of a weight that the operation takes; `arranged` takes those of any tensor."""
        if value.start.is_complex():  # a kernel sums over real numbers, so a use has real taps
            parts = (
                self.element_use(value.view(partial(real_part, part=k)), arranged) for k in (0, 1)
            )
            return torch.complex(*parts) * gain
        tap = (arranged(value.change.detach()) * gain).requires_grad_()
        count = torch.arange(value.start.numel(), device=tap.device).view(value.start.shape)
        self.chord.uses.append(Element(tap, self.source(value), arranged(count), gain))
        return tap

    def source(self, value: Ends) -> Source:
        """The parameter that a value made of weights is a view of, or the graph that leads to its parameters."""
        view = self.chord.trained.view(value.start)
        if view is not None:
            return view
        leaves = self.chord.leaves
        found = torch.autograd.grad(
            value.change.sum(), list(leaves.values()), retain_graph=True, allow_unused=True
        )
        used = frozenset(
            name for name, gradient in zip(leaves, found, strict=True) if gradient is not None
        )
        return Derived(value.change, used)


def real_part(value: Tensor, part: int) -> Tensor:
    """The real (0) or imaginary (1) part of complex numbers."""
    return torch.view_as_real(value.resolve_conj()).select(-1, part)


# --- Rules, and sums of their terms.


Result: TypeAlias = Tensor | tuple[Tensor | str | None, ...]
"""The difference of the (first) result, or of each; None, or why there is none, for one that a network may not use."""

Rule: TypeAlias = Callable[[Call], Result]


def total(terms: list[Tensor], shape: torch.Size) -> Tensor:
    """The sum of at least one term, at the given shape."""
    return sum(terms[1:], start=terms[0]).expand(shape)


def fold(value: Ends, pair: Callable[[Ends, Ends], Ends]) -> Ends:
    """All values along the last axis as one, pair by pair in a fixed order: neighbours of a round are half of its
    length apart."""
    while (n := value.start.shape[-1]) > 1:
        half = n // 2
        made = pair(value[..., :half], value[..., half : 2 * half])
        if n % 2:  # the last has no partner
            parts = ((made.start, value.start), (made.end, value.end), (made.change, value.change))
            start, end, delta = (torch.cat([one, whole[..., -1:]], dim=-1) for one, whole in parts)
            made = Ends(start, end, delta)
        value = made
    return value[..., 0]


def last(value: Ends, dims: int | list[int] | tuple[int, ...]) -> Ends:
    """The given axes as one, behind all others; all of them, if none are given."""
    dims = [dims] if isinstance(dims, int) else list(dims) or list(range(value.start.dim()))
    if value.start.dim() == 0:
        return value[None]
    return value.view(lambda v: v.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)))
