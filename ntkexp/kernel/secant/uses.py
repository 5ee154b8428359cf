"""Uses: which operation used which weight.

A use is an operation between something made of weights alone and something that depends on the inputs. There the
network is cut: the `tap` is a tensor in which the (surrogate) network can be differentiated, β = ∂f/∂tap. The gradient
with respect to the weight then needs no further propagation:

    product     z = a W        one row of z per use           Σ_r a_r ⊗ β_r
    grouped     z_g = a_g W_g  one row of z per use           the same, group by group
    element     anything else  the weight, expanded           Σ over the elements that each weight was copied to
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeAlias

from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ntkexp.kernel.record.entry import Slot
from ntkexp.kernel.record.tape import Tape, storage
from ntkexp.kernel.secant.patches import Window


class View(NamedTuple):
    """Elements of one (contiguous) parameter: those of `weight.as_strided(shape, stride, offset)`."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, parameter: Tensor) -> Tensor:
        """The elements that this view shows of a tensor laid out like the parameter."""
        return parameter.as_strided(self.shape, self.stride, self.offset)

    def room(self, parameter: Tensor) -> Tensor:
        """Room for a tensor like the parameter, with zeros for what this view does not show."""
        whole = self.shows_once and prod(self.shape) == parameter.numel()
        return parameter.new_empty(parameter.shape) if whole else parameter.new_zeros(parameter.shape)

    def turned(self) -> View:
        """The view of the transposed matrix, or of the same vector."""
        return self._replace(shape=self.shape[::-1], stride=self.stride[::-1])

    def is_whole(self, size: int) -> bool:
        """Whether it shows all elements of a parameter of this size in their order."""
        steps = [prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        return prod(self.shape) == size and all(
            n == 1 or given == step for n, given, step in zip(self.shape, self.stride, steps, strict=True)
        )

    @property
    def shows_once(self) -> bool:
        """Whether no element shows twice, which is seen from strides that leave room for all shorter ones.

        >>> View("w", (2, 3), (1, 2), 0).shows_once, View("w", (2, 3), (0, 1), 0).shows_once
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
        """How many elements of the parameter lie up to the last one shown."""
        return 1 + self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True, eq=False)
class Derived:
    """Something computed from weights alone, with the graph that leads back to their differences."""

    delta: Tensor
    names: frozenset[str]  # the parameters it leads to


Source: TypeAlias = View | Derived


@dataclass(frozen=True, eq=False)
class Product:
    """z = gain · a W + shift · b: `factor` is gain · a, and `shift` None where there is no bias.

    Tap and factor are matrices with a row for every use, or an image [example, out, *pixels] and its patches, with a
    use for every pixel.
    """

    tap: Float[Tensor, "..."]
    factor: Float[Tensor, "*example use in"]
    weight: Source
    bias: Source | None
    shift: float | None


@dataclass(frozen=True, eq=False)
class Grouped:
    """z_g = a_g W_g + b_g, for groups that follow each other in the columns of `factor` and in the tap's channels."""

    tap: Float[Tensor, "example out *pixels"]
    factor: Float[Tensor, "example use in"] | Window
    groups: int
    weight: Source  # of all groups, feature by feature
    bias: Source | None


@dataclass(frozen=True, eq=False)
class Element:
    """A weight expanded to the shape at which an elementwise operation uses it.

    The tap is the weight so expanded, or the operation's result; there `gain` is what the weight is multiplied with.
    """

    tap: Float[Tensor, "..."]
    source: Source
    positions: Int[Tensor, "..."]  # of each element of the tap in the source
    gain: Float[Tensor, "..."] | float = 1.0


def rows_of(image: Shaped[Tensor, "*batch example out *pixels"], batch: int) -> Shaped[Tensor, "*batch row out"]:
    """The pixels of images as rows; a matrix is left as it is. The first `batch` axes stay."""
    return image.movedim(batch + 1, -1).flatten(batch, -2)


Use: TypeAlias = Product | Grouped | Element


@dataclass(frozen=True)
class Trained:
    """The trained parameters of a tape, and what is made of them."""

    tape: Tape
    names: frozenset[str]
    constants: frozenset[Slot] = frozenset()  # with a row for every example: they count as inputs

    @cached_property
    def from_inputs(self) -> frozenset[Slot]:
        """Slots whose value depends on the inputs, or on a constant that counts as one."""
        return self.tape.reached({*self.tape.inputs, *self.constants}) if self.constants else self.tape.from_inputs

    @cached_property
    def homes(self) -> dict[int, Slot]:
        """The parameter that lives in each storage, where a single contiguous one does."""
        slots = [slot for slot, name in self.tape.weights.items() if name in self.names]
        crowd = Counter(storage(self.tape[slot]) for slot in slots)
        alone = [slot for slot in slots if crowd[storage(self.tape[slot])] == 1 and self.tape[slot].is_contiguous()]
        return {storage(self.tape[slot]): slot for slot in alone}

    @cached_property
    def slots(self) -> frozenset[Slot]:
        """Slots whose value depends on a trained parameter and not on the inputs."""
        start = {slot for slot, name in self.tape.weights.items() if name in self.names}
        return self.tape.reached(start) - self.from_inputs

    @cached_property
    def lookups(self) -> dict[Slot, tuple[Slot, Slot]]:
        """Slots that hold rows of a trained table at places that no input decides: the table, and the places."""
        found = [entry for entry in self.tape.entries if entry.name == "embedding" and len(entry.args) == 2]
        return {entry.results[0]: (entry.args[0], entry.args[1]) for entry in found if entry.results[0] in self.slots}

    def view(self, value: Tensor) -> View | None:
        """The view of a trained parameter that this tensor is, if it is one."""
        slot = self.homes.get(storage(value))
        if slot is None or value.is_complex() or value.is_neg():  # which show other numbers than lie there
            return None
        offset = int(value.storage_offset() - self.tape[slot].storage_offset())
        return View(self.tape.weights[slot], tuple(value.shape), value.stride(), offset)
