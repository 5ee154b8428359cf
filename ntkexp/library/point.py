"""A point of a module as one side of a kernel, by a program where nothing but numbers decides what the module does.

What is known is kept for as long as the module is alive, for the latest kinds of weights and inputs alone, and holds
neither of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.read.answers import Answers
from ntkexp.kernel.read.batches import Batches, batches
from ntkexp.kernel.read.known_point import KnownPoint
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.casts import Casts
from ntkexp.kernel.record.tape import Tape
from ntkexp.library.blocks import KernelSide, side, tangent
from ntkexp.library.module import named, reader_of
from ntkexp.library.plain_module import PlainModule, plain_module
from ntkexp.shapes import Inputs, Weights

LATEST = 8  # points, each of other shapes
KNOWN: WeakKeyDictionary[nn.Module, Answers[KnownPoint]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ModulePoints:
    """A module at some weights, whose own are taken where none are given."""

    module: nn.Module
    given: Mapping[str, Tensor]
    output: str | int | None
    casts: Casts
    may_be_known: bool

    @cached_property
    def subject(self) -> tuple[Reader, Weights]:
        """What reads the module, and all its weights."""
        reader, own = reader_of(self.module, self.output, self.casts)
        return reader, own | named(self.module, self.given, "weights")

    @cached_property
    def plain(self) -> PlainModule | None:
        """What decides what the module does, and None where some code may decide as well."""
        return plain_module(self.module) if self.may_be_known and self.casts == "keep" and self.output is None else None

    @cached_property
    def weights(self) -> list[Tensor]:
        """The weights of a plain module."""
        if self.plain is None or not isinstance(self.given, dict) or self.given:
            return list(self.subject[1].values())
        return [weight.detach() for weight in self.plain.parameters]

    def at(self, inputs: Inputs) -> KernelSide:
        """The features at these inputs."""
        key = self.question(inputs) if isinstance(inputs, Tensor) else None
        if key is None or not isinstance(inputs, Tensor):
            return side(self.batches(inputs))
        answers = KNOWN.setdefault(self.module, Answers(LATEST))
        if key in answers.kept:
            return self.known_at(inputs, answers.keep(key, answers.kept[key]))
        together = self.batches(inputs)
        found = side(together)
        if len(together.places) == 1:
            answers.keep(key, KnownPoint(found.outputs, found.work))
        return found

    def batches(self, inputs: Inputs) -> Batches:
        """The same in the ordinary way."""
        return batches(*self.subject, inputs)

    def known_at(self, inputs: Tensor, known: KnownPoint) -> KernelSide:
        """The features at inputs like those of an earlier call."""

        def recorded() -> tuple[Reader, Tape]:
            reader, weights = self.subject
            return reader, reader.record(weights, inputs)

        def read(chosen: Sequence[int]) -> Features:
            return known.read([*self.weights, inputs], chosen, lambda: tangent(self.batches(inputs), chosen), recorded)

        return KernelSide(read, len(inputs), known.outputs, known.work, lambda: recorded()[1])

    def question(self, inputs: Tensor) -> Hashable | None:
        """All that decides how a point is read but for its numbers, and None where more than that may decide."""
        if self.plain is None:
            return None
        values = [*self.weights, inputs]
        if not all(type(value) is Tensor and not value.is_nested and value.layout is torch.strided for value in values):
            return None
        kinds = tuple([(value.shape, value.stride(), value.dtype, value.device) for value in values])
        return self.plain.told, kinds
