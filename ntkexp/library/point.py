"""A point of a module as one side of a kernel, by a program where nothing but numbers decides what the module does.

What is known is kept for as long as the module is alive, for the latest kinds of weights and inputs alone, and holds
neither of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.read.answers import Answers
from ntkexp.kernel.read.batches import batches
from ntkexp.kernel.read.known_point import KnownPoint
from ntkexp.kernel.read.reader import Reader
from ntkexp.library.blocks import KernelSide, side, tangent
from ntkexp.library.plain_module import fingerprint
from ntkexp.shapes import Inputs, Weights

LATEST = 8  # points, each of other shapes
KNOWN: WeakKeyDictionary[nn.Module, Answers[KnownPoint]] = WeakKeyDictionary()


def point(module: nn.Module, reader: Reader, weights: Weights, inputs: Inputs, *, may_be_known: bool) -> KernelSide:
    """The features at these weights and inputs."""
    plain = inputs if may_be_known and isinstance(inputs, Tensor) else None
    key = None if plain is None else question(module, reader, weights, plain)
    if plain is None or key is None:
        return side(batches(reader, weights, inputs))
    answers = KNOWN.setdefault(module, Answers(LATEST))
    if key in answers.kept:
        return known_side(answers.keep(key, answers.kept[key]), reader, weights, plain)
    together = batches(reader, weights, inputs)
    found = side(together)
    if len(together.places) == 1:
        answers.keep(key, KnownPoint(found.outputs, found.work))
    return found


def known_side(known: KnownPoint, reader: Reader, weights: Weights, inputs: Tensor) -> KernelSide:
    """A point that was read before."""

    def read(chosen: Sequence[int]) -> Features:
        return known.read(reader, weights, inputs, chosen, lambda: tangent(batches(reader, weights, inputs), chosen))

    return KernelSide(read, len(inputs), known.outputs, known.work, lambda: reader.record(weights, inputs))


def question(module: nn.Module, reader: Reader, weights: Weights, inputs: Tensor) -> Hashable | None:
    """All that decides how a point is read but for its numbers, and None where more than that may decide."""
    values = [*weights.values(), inputs]
    if not all(type(value) is Tensor and not value.is_nested and value.layout is torch.strided for value in values):
        return None
    told = fingerprint(module)
    kinds = tuple((value.shape, value.stride(), value.dtype, value.device) for value in values)
    return None if told is None else (told, reader.trained, tuple(weights), kinds)
