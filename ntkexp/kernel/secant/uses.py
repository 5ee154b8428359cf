"""Uses: the operations that combine a trained weight with a value that depends
on the inputs.

The network is cut at each use. The tensor at the cut is called the *tap*. Autograd
computes β = ∂f/∂tap through the network, or through the surrogate of a step (see
`replay`). The gradient with respect to the weight follows from β without further
back-propagation:

                operation      tap                            gradient of the weight
    product     z = a W        z, with one row per use        Σ_r a_r ⊗ β_r, over the rows r
    grouped     z_g = a_g W_g  z, with one row per use        the same, for each group g
    element     anything else  the weight, expanded           the sum of β over the copies of each
                                                              element

Uses are found by a replay (`replay`), or directly on a tape that autograd can follow
(`plain_uses`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ntkexp.kernel.record.convolution import Window
from ntkexp.kernel.record.tape import Entry, Slot, Tape, storage


class View(NamedTuple):
    """A strided view of one contiguous parameter,
    `weight.as_strided(shape, stride, offset)`."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, parameter: Tensor) -> Tensor:
        """Apply this view to a tensor with the layout of the parameter."""
        return parameter.as_strided(self.shape, self.stride, self.offset)

    def empty_like(self, parameter: Tensor) -> Tensor:
        """Allocate a tensor in the shape of the parameter. Fill it with zeros unless
        this view contains all elements."""
        whole = self.has_no_overlap and prod(self.shape) == parameter.numel()
        if whole:
            return parameter.new_empty(parameter.shape)
        return parameter.new_zeros(parameter.shape)

    def transposed(self) -> View:
        """Return the view with its axes in reverse order: the transpose of a matrix."""
        return self._replace(shape=self.shape[::-1], stride=self.stride[::-1])

    def covers(self, size: int) -> bool:
        """Return True if this view contains all elements of a parameter with `size`
        elements, in order."""
        steps = [prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        return prod(self.shape) == size and all(
            n == 1 or given == step
            for n, given, step in zip(self.shape, self.stride, steps, strict=True)
        )

    @property
    def has_no_overlap(self) -> bool:
        """True if the view contains no element twice. This holds if each stride exceeds
        the range of all smaller strides.

        >>> View("w", (2, 3), (1, 2), 0).has_no_overlap, View("w", (2, 3), (0, 1), 0).has_no_overlap
        (True, False)
        """
        reach = 0
        for step, n in sorted(zip(self.stride, self.shape, strict=True)):
            if n > 1 and step <= reach:
                return False
            reach += step * (n - 1)
        return True

    @property
    def extent(self) -> int:
        """The number of leading elements of the parameter that include all elements of
        this view."""
        return (
            1
            + self.offset
            + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        )


@dataclass(frozen=True, eq=False)
class Derived:
    """A value that is computed from weights alone, such as a normalised weight. `delta`
    is its difference, whose autograd graph leads back to the differences of the
    weights."""

    delta: Tensor
    names: frozenset[str]  # names of the parameters that the value depends on


Source: TypeAlias = View | Derived
"""The weight of a use: a view of a parameter, or a value computed from parameters."""


@dataclass(frozen=True, eq=False)
class Product:
    """A product z = gain · a W + shift · b of an input a with a weight W, and an
    optional bias b. `factor` is gain · a. Without a bias, `shift` is None.

    The tap z and the factor are matrices with one row for each use. For a convolution,
    the tap consists of images [example, out, *pixels], the factor of patches, and each
    pixel is a use."""

    tap: Float[Tensor, "..."]
    factor: Float[Tensor, "*example use in"]
    weight: Source
    bias: Source | None
    shift: float | None


@dataclass(frozen=True, eq=False)
class Grouped:
    """A grouped product z_g = a_g W_g + b_g, as in a grouped convolution. Each group g
    consists of a range of columns of `factor`, and a range of channels of the tap."""

    tap: Float[Tensor, "example out *pixels"]
    factor: Float[Tensor, "example use in"] | Window
    groups: int
    weight: Source  # weights of all groups: one row for each channel of the tap
    bias: Source | None


@dataclass(frozen=True, eq=False)
class Element:
    """A use of a weight in an elementwise operation. The weight is expanded to the
    shape of the operation.

    The tap is the expanded weight, or the result of the operation. In the second case,
    `gain` is the factor of the weight."""

    tap: Float[Tensor, "..."]
    source: Source
    # for each element of the tap, its flat index in the weight
    positions: Int[Tensor, "..."]
    gain: Float[Tensor, "..."] | float = 1.0


def rows_of(
    image: Shaped[Tensor, "*batch example out *pixels"], batch: int
) -> Shaped[Tensor, "*batch row out"]:
    """Flatten images to one row for each example and pixel. Keep the first `batch`
    axes. A matrix stays unchanged."""
    return image.movedim(batch + 1, -1).flatten(batch, -2)


Use: TypeAlias = Product | Grouped | Element


@dataclass(frozen=True)
class Trained:
    """The trained parameters of a tape, and the values computed from them."""

    tape: Tape
    names: frozenset[str]
    # constants with a row for every example, which count as inputs
    constants: frozenset[Slot] = frozenset()

    @cached_property
    def from_inputs(self) -> frozenset[Slot]:
        """Slots (values on the tape) that depend on the inputs or on `constants`."""
        if self.constants:
            return self.tape.reached({*self.tape.inputs, *self.constants})
        return self.tape.from_inputs

    @cached_property
    def parameter_of_storage(self) -> dict[int, Slot]:
        """The slot of each trained parameter, by the address of its storage. Parameters
        that share a storage or are not contiguous are omitted."""
        slots = [slot for slot, name in self.tape.weights.items() if name in self.names]
        counts = Counter(storage(self.tape[slot]) for slot in slots)
        alone = [
            slot
            for slot in slots
            if counts[storage(self.tape[slot])] == 1 and self.tape[slot].is_contiguous()
        ]
        return {storage(self.tape[slot]): slot for slot in alone}

    @cached_property
    def slots(self) -> frozenset[Slot]:
        """Slots whose value depends on a trained parameter and not on the inputs."""
        start = {slot for slot, name in self.tape.weights.items() if name in self.names}
        return self.tape.reached(start) - self.from_inputs

    @cached_property
    def lookups(self) -> dict[Slot, tuple[Slot, Slot]]:
        """Slots that hold rows of a trained table at constant indices, such as position
        embeddings. The values are the slots of the table and of the indices."""
        return {
            entry.results[0]: (entry.args[0], entry.args[1])
            for entry in self.tape.entries
            if entry.name == "embedding"
            and len(entry.args) == 2
            and entry.results[0] in self.slots
        }

    def view(self, value: Tensor) -> View | None:
        """Describe a tensor as a view of a trained parameter.
        Return None if it is not one."""
        slot = self.parameter_of_storage.get(storage(value))
        # A lazily negated or conjugated tensor differs from the numbers in its memory.
        # So it is not a view of the parameter
        if slot is None or value.is_complex() or value.is_neg():
            return None
        offset = int(value.storage_offset() - self.tape[slot].storage_offset())
        return View(self.tape.weights[slot], tuple(value.shape), value.stride(), offset)


# For a tangent Jacobian, many networks need no replay of differences: autograd can
# differentiate the recorded operations themselves. A use is *plain* if this is possible.
# Its tap is the result of the recorded operation, and the tape contains the value that
# multiplies the weight. Plain uses are listed in the order of a replay, because owners
# (`ownership`) are stored in this order.


class NotPlain(Exception):
    """Raised if a use is not plain: the gradient of the operation's result does not
    give the gradient of the weight."""


def plain_uses(trained: Trained) -> list[Use] | None:
    """Return the uses of trained weights if all of them are plain, otherwise None."""
    uses: list[Use] = []
    for entry in trained.tape.entries:
        if entry.name == "copy":
            # the recorder replaced a write in place, so autograd cannot differentiate
            # the tape
            return None
        if trained.slots.isdisjoint(entry.slots) or trained.from_inputs.isdisjoint(
            entry.slots
        ):
            continue
        if entry.name not in PLAIN_USES or trained.tape[entry.results[0]].is_complex():
            # the table PLAIN_USES lacks this operation, or the result is complex
            return None
        try:
            uses += PLAIN_USES[entry.name](WeightedOperation(trained, entry))
        except NotPlain:
            return None
    return uses


@dataclass(frozen=True)
class WeightedOperation:
    """An operation between trained weights and values that depend on inputs."""

    trained: Trained
    entry: Entry

    @property
    def args(self) -> tuple[Any, ...]:
        return self.entry.args  # the arguments, with slots for tensors

    @property
    def tap(self) -> Tensor:
        """The first result of the operation."""
        return self.trained.tape[self.entry.results[0]]

    def value(self, slot: Slot) -> Tensor:
        """Return a value, detached from autograd's graph."""
        return self.trained.tape[slot].detach()

    def is_trained(self, value: object) -> bool:
        return isinstance(value, Slot) and value in self.trained.slots

    def source(
        self, slot: Slot, arranged: Callable[[Tensor], Tensor] = lambda weight: weight
    ) -> View:
        """Describe an argument, rearranged by `arranged`, as a view of a parameter.
        Raise NotPlain if it is not one."""
        weight = self.trained.tape[slot]
        # if the module detached the weight, autograd has no gradient for it, so the use
        # is not plain
        seen = slot in self.trained.slots and weight.requires_grad
        view = (
            self.trained.view(arranged(weight.detach()))
            if seen and self.tap.requires_grad
            else None
        )
        if view is None:
            raise NotPlain
        return view

    def broadcast_use(
        self, slot: Slot, axes: Sequence[int], gain: Tensor | float = 1.0
    ) -> Element:
        """Return an elementwise use of a weight that is broadcast to the shape of the
        result. `axes` is the shape of the weight before broadcasting.

        The weight may also consist of rows of a table at constant indices, such as
        position embeddings."""
        table, places = self.trained.lookups.get(slot, (slot, None))
        source = self.source(table)
        count = torch.arange(self.value(table).numel(), device=self.tap.device)
        if places is not None:
            if not self.trained.tape[slot].requires_grad:
                raise NotPlain
            count = count.view(self.value(table).shape)[self.value(places)]
        return Element(
            self.tap, source, count.view(tuple(axes)).expand(self.tap.shape), gain
        )


def product(operation: WeightedOperation) -> list[Use]:
    """Return the use of W (and b) in gain · x W + shift · b."""
    *added, left, right = operation.args  # `addmm` has a bias, `mm` has none
    weight = operation.source(right)
    bias = None
    if added and operation.is_trained(added[0]):
        bias = operation.source(added[0])
    # `Product` cannot describe a trained left factor, or a bias that is broadcast
    if operation.is_trained(left) or (
        bias is not None and bias.shape != weight.shape[1:]
    ):
        raise NotPlain
    gain = operation.entry.kwargs.get("alpha", 1.0)
    shift = None if bias is None else operation.entry.kwargs.get("beta", 1.0)
    factor = operation.value(left)
    if gain != 1:
        factor = gain * factor
    return [Product(operation.tap, factor, weight, bias, shift)]


def convolution(operation: WeightedOperation) -> list[Use]:
    """Return the use of W (and b) in the convolution x ∗ W + b. As a product z = a W, a
    consists of patches of x."""
    left, right, added, stride, padding, dilation, transposed, _, groups = (
        operation.args
    )
    if transposed or operation.is_trained(left):
        raise NotPlain
    bias = operation.source(added) if operation.is_trained(added) else None
    kernel = operation.value(right).shape
    window = Window(operation.value(left), kernel[2:], stride, padding, dilation)
    # return a `Grouped` use, whose gradients are multiplied out, unless a sum over
    # pairs of pixels is cheaper
    uses = prod(operation.tap.shape[2:])
    inputs = prod(kernel[1:])
    features = kernel[0]
    if groups > 1 or uses**2 * (inputs + features + 1) >= inputs * features:
        return [
            Grouped(
                operation.tap,
                window,
                groups,
                operation.source(right, lambda kernel: kernel.flatten(1)),
                bias,
            )
        ]
    weight = operation.source(right, lambda kernel: kernel.flatten(1).t())
    return [
        Product(operation.tap, window.rows, weight, bias, None if bias is None else 1.0)
    ]


def normalisation(operation: WeightedOperation) -> list[Use]:
    """Return the uses of gain and bias in gain · normed + bias,
    for a layer norm or a group norm.

    The operation also returns the mean and the reciprocal standard deviation.
    """
    mean, reciprocal = (operation.value(slot) for slot in operation.entry.results[1:])
    if operation.entry.name == "native_layer_norm":
        x, axes, gain, bias, _ = operation.args
        normed = (operation.value(x) - mean) * reciprocal
    else:
        x, gain, bias, examples, channels, _, groups, _ = operation.args
        grouped = operation.value(x).reshape(examples, groups, -1)
        shape = (examples, groups, 1)
        normed = ((grouped - mean.view(shape)) * reciprocal.view(shape)).view(
            operation.tap.shape
        )
        axes = [1, channels] + [1] * (operation.tap.dim() - 2)
    uses: list[Use] = (
        [operation.broadcast_use(gain, axes, normed)]
        if operation.is_trained(gain)
        else []
    )
    if operation.is_trained(bias):
        return [*uses, operation.broadcast_use(bias, axes)]
    return uses


def add(operation: WeightedOperation) -> list[Use]:
    """Return the use of a weight in a + αb, where the weight is a or b."""
    left, right = operation.args
    if operation.is_trained(left):
        return [operation.broadcast_use(left, operation.value(left).shape, 1.0)]
    gain = float(operation.entry.kwargs.get("alpha", 1.0))
    return [operation.broadcast_use(right, operation.value(right).shape, gain)]


def multiply(operation: WeightedOperation) -> list[Use]:
    """Return the use of a weight in a · b, where the weight is a or b."""
    weight, other = operation.args
    if not operation.is_trained(weight):
        weight, other = other, weight
    shape = operation.value(weight).shape
    return [operation.broadcast_use(weight, shape, operation.value(other))]


def embedding(operation: WeightedOperation) -> list[Use]:
    """Return the use of a table whose rows are looked up.
    The padding row has no gradient."""
    table, index, *rest = operation.args
    rows = operation.value(index)
    padding = rest[0] if rest else -1
    gain: Tensor | float = 1.0
    if padding >= 0:
        gain = (rows != padding)[..., None].to(operation.tap.dtype)

    # the flat index of each looked-up element in the table
    values = operation.value(table)
    positions = torch.arange(values.numel(), device=operation.tap.device).view(
        values.shape
    )
    return [Element(operation.tap, operation.source(table), positions[rows], gain)]


PLAIN_USES: dict[str, Callable[[WeightedOperation], list[Use]]] = {
    **dict.fromkeys(("mm", "addmm"), product),
    **dict.fromkeys(("native_layer_norm", "native_group_norm"), normalisation),
    "add": add,
    "convolution": convolution,
    "embedding": embedding,
    "mul": multiply,
}
"""For each operation, a function that returns its plain uses of weights."""
