"""One operation of a network, with its values before and after a step,
and helpers of the difference rules.

Every value v of the network is v₀ at the start of the step and v₁ at its end. A rule
takes a `Call`, and returns the exact difference Δv = v₁ − v₀ of the operation's result,
as a linear map of the differences of the arguments. The factors of this map are called
coefficients:

    mean     v̄ = (v₀ + v₁)/2
    slope    D(v₀, v₁), such as (σ(v₁) − σ(v₀))/(v₁ − v₀)

Rules get coefficients from the methods of `Call`. These methods also serve the search
for owners (`ownership`), which determines the example that each value belongs to. If
`coefficient_noise` is set, the methods replace each coefficient that depends on inputs
or weights by a random number in [1, 2]. Then no gradient is zero by chance, because of
a dead unit, a black pixel, or a cancellation.

A *use* of a weight is an operation that combines the weight with a value that depends on
the inputs. In its rule, one term of Δv contains the difference of the weight. This term
becomes a leaf of autograd's graph, called the *tap*. Autograd then computes β̄, the
gradient with respect to the tap.

Some rules write a linear map of a difference as a function `linear`, together with its
transpose, with ⟨w, linear(v)⟩ = ⟨transpose(w), v⟩. This is faster than autograd's
backward pass through each operation of the map. Both functions take one vector, or many
along leading axes.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.record.tape import Entry, Slot, Tape, is_integer, map_leaves
from ntkexp.kernel.secant.uses import (
    Derived,
    Element,
    Grouped,
    Product,
    Source,
    Trained,
    Use,
)
from ntkexp.mistake import Mistake

LinearFunction: TypeAlias = Callable[[Tensor], Tensor]


def apply_linear(
    delta: Tensor,
    linear: LinearFunction,
    transpose: LinearFunction,
    zero_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return linear(delta). Its backward pass is the map `transpose`. If `zero_shape`
    is given, do not call `linear`, but return zeros of this shape.

    >>> v = torch.ones(2, requires_grad=True)
    >>> total = apply_linear(v, lambda v: v.sum(-1, keepdim=True), lambda w: w.expand(*w.shape[:-1], 2))
    >>> torch.autograd.grad(total, v, torch.tensor([3.0]))
    (tensor([3., 3.]),)
    >>> apply_linear(0 * v, lambda v: v.sum(), lambda w: w.expand(2), zero_shape=[])
    tensor(0., grad_fn=<LinearMapBackward>)
    """
    result: Tensor = LinearMap.apply(delta, linear, transpose, zero_shape)  # type: ignore[no-untyped-call]  # torch's own
    return result


def on_shared_vector(transpose: LinearFunction, axis: int) -> LinearFunction:
    """Wrap a linear map so that it runs only once if all examples along `axis` share
    one vector (stride 0). This is the case for the output gradients of a readout.

    >>> on_shared_vector(lambda w: 2 * w, -2)(torch.ones(1, 3).expand(4, 3)).stride()
    (0, 1)
    """

    def shared(w: Tensor) -> Tensor:
        if w.stride(axis) or w.shape[axis] < 2:
            return transpose(w)
        v = transpose(w.narrow(axis, 0, 1))
        return v.expand(*v.shape[:axis], w.shape[axis], *v.shape[v.dim() + axis + 1 :])

    return shared


def inner_products(
    vectors: Float[Tensor, "vector *row size"], fixed: Float[Tensor, "count *row size"]
) -> Float[Tensor, "count vector *row 1"]:
    """Return ⟨v, f⟩ for each row of each vector v, with the same row of each fixed
    vector f, by one batched matrix product."""
    size = fixed.shape[-1]
    rows = vectors.reshape(len(vectors), -1, size).permute(1, 2, 0)
    fixed_rows = fixed.reshape(len(fixed), -1, size).transpose(0, 1)
    products = torch.bmm(fixed_rows, rows).permute(1, 2, 0).contiguous()
    return products.view(len(fixed), *vectors.shape[:-1], 1)


class LinearMap(torch.autograd.Function):
    """A linear map as an autograd function, whose backward pass is its transpose."""

    @staticmethod
    def forward(
        delta: Tensor,
        linear: LinearFunction,
        transpose: LinearFunction,
        zero_shape: Sequence[int] | None,
    ) -> Tensor:
        if zero_shape is None:
            return linear(delta)
        return delta.new_zeros(zero_shape)

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, LinearFunction, LinearFunction, Any],
        output: Tensor,
    ) -> None:
        _, ctx.linear, ctx.transpose, _ = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None, None]:
        return apply_linear(cotangent, ctx.transpose, ctx.linear), None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Sequence[Any],
        delta: Tensor,
        linear: LinearFunction,
        transpose: LinearFunction,
        zero_shape: Sequence[int] | None,
    ) -> tuple[Tensor, int]:
        return apply_linear(delta.movedim(in_dims[0], 0), linear, transpose), 0


# torch inspects the signature of `forward` at every call, which takes longer than small
# products. `inspect.signature` returns this attribute at once.
LinearMap.forward.__signature__ = inspect.signature(LinearMap.forward)  # type: ignore[attr-defined]


class NoRule(Mistake):
    """Raised if an operation has no exact difference rule for its arguments."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

    @property
    def remark(self) -> str:
        """A message: the reason, and how tangent kernels are computed instead."""
        return f"{self.reason}: the tangent is computed example by example, which is correct but slow"


class ChoiceChanged(NoRule):
    """Raised if a discrete choice, such as an index, an order or a mask, differs
    between the start and the end of a step."""


@dataclass(frozen=True, eq=False)
class Ends:
    """A tensor at the start and at the end of a step, and its difference. `delta` is
    None for a tensor that the step does not change, such as an input or a constant."""

    start: Tensor
    end: Tensor
    delta: Tensor | None
    # True if the tensor depends on trained weights and not on inputs
    from_weights: bool = False
    from_inputs: bool = True  # True if the tensor depends on inputs

    @property
    def change(self) -> Tensor:
        assert self.delta is not None, (
            "a rule needs the difference of a value that cannot change"
        )
        return self.delta

    def view(self, function: Callable[[Tensor], Tensor]) -> Ends:
        """Apply a linear rearrangement, such as `Tensor.t`, to
        both ends and to the difference."""
        delta = None if self.delta is None else function(self.delta)
        return Ends(
            function(self.start),
            function(self.end),
            delta,
            self.from_weights,
            self.from_inputs,
        )

    def __getitem__(self, index: Any) -> Ends:
        return self.view(lambda v: v[index])


@dataclass(frozen=True)
class ReplayState:
    """The state of a replay: two tapes with equal operations (start and end of a step),
    the differences so far, and the uses of weights so far."""

    start: Tape
    end: Tape
    trained: Trained
    # draws random coefficients in the search for owners
    coefficient_noise: torch.Generator | None = None
    # True if only gradients with respect to taps are needed, so that all differences
    # are set to zero
    pullback_only: bool = False
    deltas: dict[Slot, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)  # Δθ of the trained weights
    uses: list[Use] = field(default_factory=list)
    # differences of values that were split along an axis into separate tensors (see
    # `Call.unbound`), by slot and axis
    unbound: dict[tuple[Slot, int], tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def is_point(self) -> bool:
        """True if start and end are the same tape,
        so that differences are derivatives."""
        return self.start is self.end

    @cached_property
    def selected(self) -> dict[tuple[Slot, int], set[int]]:
        """The indices that `select` operations take, by slot and axis."""
        selected: dict[tuple[Slot, int], set[int]] = defaultdict(set)
        for entry in self.start.entries:
            if entry.name == "select":
                slot, dim, place = entry.args
                shape = self.start[slot].shape
                selected[slot, dim % len(shape)].add(place % shape[dim])
        return selected

    def ends(self, slot: Any) -> Any:
        """Return the values of a slot at both ends of the step, with their difference.
        Return an argument that is not a slot unchanged."""
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
        """Draw random coefficients in [1, 2]. For complex numbers, draw both parts."""
        noise = torch.rand(
            value.shape, generator=self.coefficient_noise, dtype=torch.float64
        )
        coefficient = 1 + noise.to(value.device, torch.float64)
        if value.is_complex():
            return torch.complex(coefficient, self.random_like(value.real))
        return coefficient

    def to_double(self, value: Tensor) -> Tensor:
        """Convert a value to double precision in the search for owners, which needs
        precise ratios. Otherwise return it unchanged."""
        if self.coefficient_noise is None or is_integer(value):
            return value
        return value.to(torch.complex128 if value.is_complex() else torch.float64)


class Call:
    """One operation of a step: its arguments at both ends, their differences, and the
    coefficients of its rule."""

    def __init__(self, state: ReplayState, entry: Entry) -> None:
        self.state = state
        self.entry = entry
        self.args: tuple[Any, ...] = map_leaves(entry.args, state.ends)
        self.kwargs: dict[str, Any] = {
            name: map_leaves(value, state.ends) for name, value in entry.kwargs.items()
        }
        self.depends_on_inputs = entry.results[0] in state.trained.from_inputs

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by the names in the operation's schema, including defaults."""
        defaults = {
            argument.name: argument.default_value
            for argument in self.entry.op._schema.arguments
        }
        return defaults | dict(zip(defaults, self.args, strict=False)) | self.kwargs

    @cached_property
    def result_ends(self) -> list[tuple[Tensor, Tensor]]:
        """The results of the operation, each at both ends of the step."""
        state = self.state
        slots = self.entry.results
        starts = [state.to_double(state.start[slot].detach()) for slot in slots]
        ends = (
            starts
            if state.is_point
            else [state.to_double(state.end[slot].detach()) for slot in slots]
        )
        return list(zip(starts, ends, strict=True))

    @property
    def start(self) -> Tensor:
        """The first result at the start of the step."""
        return self.result_ends[0][0]

    @property
    def is_point(self) -> bool:
        return self.state.is_point

    def is_use(self, value: Ends) -> bool:
        """Return True if the operation is a use of this argument: the argument depends
        only on weights, and the result also depends on inputs."""
        carries = value.delta is None or (
            value.delta.requires_grad and value.delta.numel() > 0
        )
        return value.from_weights and self.depends_on_inputs and carries

    def mean(self, value: Ends) -> Tensor:
        """Return v̄ = (v₀ + v₁)/2, randomized in the search for owners."""
        state = self.state
        if state.coefficient_noise is not None and (
            value.delta is not None or value.from_inputs or value.from_weights
        ):
            return state.random_like(value.start)
        if value.delta is None or self.is_point:
            return state.to_double(value.start)
        # convert masks to numbers, because true + true is true for booleans
        if is_integer(value.start):
            return (
                value.start.to(value.delta.dtype) + value.end.to(value.delta.dtype)
            ) / 2
        return torch.lerp(value.start, value.end, 0.5)

    def slope(self, value: Ends, slope: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return D(v₀, v₁), randomized in the search for owners."""
        if self.state.coefficient_noise is not None:
            return self.state.random_like(value.start)
        return slope(value.start, value.end)

    def coefficient(self, value: Tensor) -> Tensor:
        """Return a coefficient that the step does not change,
        randomized in the search for owners."""
        return self.slope(Ends(value, value, None), lambda v, _: v)

    def delta(
        self, value: Ends, shape: torch.Size | None = None, gain: Tensor | float = 1.0
    ) -> Tensor:
        """Return gain · Δv, expanded to the given shape."""
        wide = value.change if shape is None else value.change.expand(shape)
        if not self.is_use(value):
            if isinstance(gain, float) and gain == 1:
                return wide
            return wide * gain

        def expand(source: Tensor) -> Tensor:
            return source.expand(wide.shape)

        if isinstance(gain, Tensor) and gain.is_complex():
            return self.element_use(value, expand) * gain
        return self.element_use(value, expand, gain)

    def expanded(self, value: Any, shape: torch.Size | None = None) -> Ends:
        """Return an argument and its difference, expanded to the given shape. Convert a
        Python number to a constant tensor."""
        if not isinstance(value, Ends):
            size = self.start.shape if shape is None else shape
            number = torch.full(
                size, float(value), dtype=self.start.dtype, device=self.start.device
            )
            return Ends(number, number, None, from_inputs=False)
        delta = None if value.delta is None else self.delta(value, shape)
        start, end = (
            v if shape is None else v.expand(shape) for v in (value.start, value.end)
        )
        return Ends(start, end, delta, from_inputs=value.from_inputs)

    def expanded_pair(self) -> tuple[Ends, Ends]:
        left, right = (
            self.expanded(value, self.start.shape) for value in self.args[:2]
        )
        return left, right

    def unbound(self, value: Ends, dim: int) -> tuple[Tensor, ...] | None:
        """Split the difference of a value along an axis into separate tensors. Return
        None unless the network selects every index of the axis, one by one.

        After a split, autograd stacks the gradients of all indices once, instead of
        adding each gradient to a tensor of zeros."""
        key = (self.entry.args[0], dim % value.start.dim())
        unbound = self.state.unbound
        if self.is_use(value) or len(self.state.selected[key]) < value.start.shape[dim]:
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
        """Return Δ(gain · A B + shift · b) = gain · (ΔA B̄ + Ā ΔB) + shift · Δb.

        A (`left`) and B (`right`) are matrices, and b is an optional bias.
        """
        if self.is_use(left):  # W a = (aᵀ Wᵀ)ᵀ: put the weight on the right
            if self.is_use(right):
                raise NoRule("no difference rule for a product of two weights")
            turned = self.product(right.view(Tensor.t), left.view(Tensor.t), gain).t()
            if bias is not None and bias.delta is not None:
                turned = turned + shift * self.delta(bias, self.start.shape)
            return turned
        factor = self.mean(left) if gain == 1 else gain * self.mean(left)
        terms = []
        if left.delta is not None:  # gain · ΔA B̄
            delta = left.delta if gain == 1 else gain * left.delta
            terms.append(self.times_matrix(delta, self.mean(right)))
        # gain · Ā ΔW, and shift · Δb if the bias has one element for each feature
        if self.is_use(right):
            wide = self.start.shape[1:]
            joined: Ends | None = None
            if bias is not None and self.is_use(bias) and bias.start.shape == wide:
                joined = bias
                bias = None
            terms.append(self.product_use(factor, right, joined, shift))
        elif right.delta is not None:  # gain · Ā ΔB
            terms.append(torch.mm(factor, right.delta))
        if bias is not None and bias.delta is not None:
            terms.append(shift * self.delta(bias, self.start.shape))
        return sum(terms[1:], start=terms[0])

    def times_matrix(self, delta: Tensor, matrix: Tensor) -> Tensor:
        """Return ΔA B̄. In a replay for gradients only, return zeros."""
        linear = partial(torch.matmul, other=matrix)
        transpose = on_shared_vector(partial(torch.matmul, other=matrix.t()), -2)
        zero_shape = None
        if self.state.pullback_only:
            zero_shape = (len(delta), matrix.shape[1])
        return apply_linear(delta, linear, transpose, zero_shape)

    def product_use(
        self, factor: Tensor, weight: Ends, bias: Ends | None, shift: float = 1.0
    ) -> Tensor:
        """Record a use of W in a product. Return its tap, factor ΔW + shift · Δb, which
        is a leaf of autograd's graph.

        For a matrix `factor`, the tap has the same rows. For patches
        [example, use, in], the tap consists of images [example, out, use]."""
        change = weight.change.detach()
        is_matrix = factor.dim() == 2

        # factor ΔW
        if self.state.pullback_only and is_matrix:
            tap = factor.new_zeros(len(factor), change.shape[1])
        elif self.state.pullback_only:
            tap = factor.new_zeros(len(factor), change.shape[1], factor.shape[1])
        elif is_matrix:
            tap = torch.mm(factor, change)
        else:
            kernels = change.t().expand(len(factor), -1, -1)
            tap = torch.bmm(kernels, factor.mT)

        # + shift · Δb
        if bias is not None and bias.delta is not None and not self.state.pullback_only:
            row = shift * bias.delta.detach()
            tap = tap + (row if is_matrix else row[:, None])

        tap.requires_grad_()
        if bias is None:
            use = Product(tap, factor, self.source(weight), None, None)
        else:
            use = Product(tap, factor, self.source(weight), self.source(bias), shift)
        self.state.uses.append(use)
        return tap

    def grouped_use(
        self, factor: Tensor, groups: int, weight: Ends, bias: Ends | None
    ) -> Tensor:
        """Record a use in a grouped product. Return its tap, a leaf of autograd's graph.

        For each group g, the tap contains factor_g ΔW_gᵀ + Δb_g, as images
        [example, out, use]."""
        examples, uses, size = factor.shape
        kernels = weight.change.detach().reshape(groups, -1, size // groups)
        columns = factor.mT.reshape(examples, groups, -1, uses)
        tap: Tensor = torch.matmul(kernels, columns).flatten(1, 2)
        if bias is not None and bias.delta is not None:
            tap = tap + bias.delta.detach()[:, None]
        added = None if bias is None else self.source(bias)
        self.state.uses.append(
            Grouped(tap.requires_grad_(), factor, groups, self.source(weight), added)
        )
        return tap

    def element_use(
        self,
        value: Ends,
        arranged: Callable[[Tensor], Tensor],
        gain: Tensor | float = 1.0,
    ) -> Tensor:
        """Record an elementwise use of a weight w. Return its tap, gain · Δw for the
        elements that the operation takes. The tap is a leaf of autograd's graph.

        `arranged` selects and expands these elements, from any tensor in the shape of
        w."""
        if value.start.is_complex():  # kernels sum over real numbers, so taps are real
            parts = (
                self.element_use(value.view(partial(real_part, part=k)), arranged)
                for k in (0, 1)
            )
            return torch.complex(*parts) * gain
        tap = (arranged(value.change.detach()) * gain).requires_grad_()
        count = torch.arange(value.start.numel(), device=tap.device).view(
            value.start.shape
        )
        self.state.uses.append(Element(tap, self.source(value), arranged(count), gain))
        return tap

    def source(self, value: Ends) -> Source:
        """Return the value as a view of a parameter. If the value was computed from
        parameters, return its difference and the names of these parameters."""
        view = self.state.trained.view(value.start)
        if view is not None:
            return view
        leaves = self.state.leaves
        gradients = torch.autograd.grad(
            value.change.sum(),
            list(leaves.values()),
            retain_graph=True,
            allow_unused=True,
        )
        used = frozenset(
            name
            for name, gradient in zip(leaves, gradients, strict=True)
            if gradient is not None
        )
        return Derived(value.change, used)


def real_part(value: Tensor, part: int) -> Tensor:
    """Return the real (0) or imaginary (1) part of complex numbers."""
    return torch.view_as_real(value.resolve_conj()).select(-1, part)


Result: TypeAlias = Tensor | tuple[Tensor | str | None, ...]
"""The difference of an operation's result, or a tuple with an entry for each result.
None, or a text with the reason, marks a result without a difference."""

Rule: TypeAlias = Callable[[Call], Result]


def sum_terms(terms: list[Tensor], shape: torch.Size) -> Tensor:
    """Return the sum of one or more terms, in the given shape."""
    return sum(terms[1:], start=terms[0]).expand(shape)


def tree_reduce(value: Ends, pair: Callable[[Ends, Ends], Ends]) -> Ends:
    """Reduce the last axis to one value by the function `pair`. Each round combines the
    first half of the axis with the second half, element by element."""
    while (n := value.start.shape[-1]) > 1:
        half = n // 2
        made = pair(value[..., :half], value[..., half : 2 * half])
        if n % 2:  # the last value has no partner
            made = concatenated(made, value[..., -1:])
        value = made
    return value[..., 0]


def concatenated(first: Ends, second: Ends) -> Ends:
    """Concatenate two values and their differences along the last axis."""
    parts = (
        (first.start, second.start),
        (first.end, second.end),
        (first.change, second.change),
    )
    start, end, delta = (torch.cat(part, -1) for part in parts)
    return Ends(start, end, delta)


def merge_axes(value: Ends, dims: int | list[int] | tuple[int, ...]) -> Ends:
    """Merge the given axes, or all if none are given, and move them to the end."""
    dims = (
        [dims]
        if isinstance(dims, int)
        else list(dims) or list(range(value.start.dim()))
    )
    if value.start.dim() == 0:
        return value[None]
    return value.view(
        lambda v: v.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    )
