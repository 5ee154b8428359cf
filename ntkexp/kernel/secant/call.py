"""A call: one operation of a network, as the rules see it, with the coefficients of the chord."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from ntkexp.kernel.record.arguments import replace
from ntkexp.kernel.record.entry import Entry
from ntkexp.kernel.record.tape import is_whole
from ntkexp.kernel.secant.chord import Chord
from ntkexp.kernel.secant.linear_map import once, passed
from ntkexp.kernel.secant.rules.base import AbstractCall, Ends, NoRule
from ntkexp.kernel.secant.uses import Derived, Element, Grouped, Product, Source


class Call(AbstractCall):
    """One operation of a chord."""

    def __init__(self, chord: Chord, entry: Entry) -> None:
        self.chord, self.entry = chord, entry
        self.args = replace(entry.args, chord.ends)
        self.kwargs = {name: replace(value, chord.ends) for name, value in entry.kwargs.items()}
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
