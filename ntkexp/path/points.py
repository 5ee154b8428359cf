"""The points at which a network is read along a path, block by block; the network there at one set of weights; and
where a path is integrated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.diagnostics import largest_eigenvalue
from ntkexp.kernel.features.gram import gram, trace
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.plan import chunks
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.segment import Segment
from ntkexp.kernel.sketch import Sketch, Sketched, error_bar, random_vectors, sketched_gram
from ntkexp.mistake import Mistake
from ntkexp.on_disk import zeros_on_disk
from ntkexp.path.rule.base import Piece
from ntkexp.path.settings import Kernels
from ntkexp.shapes import Weights

# --- The right side of kernels: the training examples, as all points are held against them.


class AbstractRightSide(ABC):
    """Training examples at one set of weights."""

    @abstractmethod
    def between(self, left: Jacobian) -> Float[Tensor, "probe out train out_"]:
        """The kernel between a block of points and all training examples."""


@dataclass(frozen=True)
class ExactSide(AbstractRightSide):
    """Their features, block by block."""

    blocks: Sequence[Jacobian]

    def between(self, left: Jacobian) -> Float[Tensor, "probe out train out_"]:
        found = [gram(left, block) for block in self.blocks]
        return torch.cat(found, dim=2) if len(found) > 1 else found[0]


@dataclass(frozen=True)
class SketchedSide(AbstractRightSide):
    """A sketch of them all, in which a direction may be treated apart: a step along it closes."""

    sketch: Sketch
    sketched: Sketched
    direction: Weights | None
    along: Float[Tensor, " size"] | None  # the sketch of the direction

    def between(self, left: Jacobian) -> Float[Tensor, "probe out train out_"]:
        found = Sketched(self.sketch.of(left.blocks))
        if self.direction is not None and self.along is not None:
            found = found.apart(left.applied(self.direction), self.along)
        return sketched_gram(found, self.sketched)


def right_side(
    sketch: Sketch | None, blocks: Sequence[Jacobian], direction: Weights | None = None
) -> AbstractRightSide:
    """The training examples, sketched if there is a sketch."""
    if sketch is None:
        return ExactSide(blocks)
    found = Sketched(torch.cat([sketch.of(block.blocks) for block in blocks]))
    if direction is None:
        return SketchedSide(sketch, found, None, None)
    along, applied = sketch.of_weights(direction), torch.cat([block.applied(direction) for block in blocks])
    return SketchedSide(sketch, found.apart(applied, along), direction, along)


# --- The points at which a network is read along a path: block by block, so that memory stays bounded.
#
# The training examples come first, in blocks of their own. The tape at the end of a step is the tape at the start
# of the next.


WITHOUT_RULES = "read the path with path.rule=[gauss,left], which needs no difference rules"


@dataclass(kw_only=True)
class Points:
    """Inputs [point, …], the first `train` of them training examples, read `block` at a time.

    Where memory allows, tapes are kept for the two latest sets of weights: the ends of a step.
    """

    reader: Reader
    inputs: Float[Tensor, "point *shape"]
    train: int
    block: int
    keep: bool
    chosen: tuple[int, ...] | None = None  # outputs at which the path is integrated; None: all
    sketch: Sketch | None = None  # by which kernels are made
    kernels: Kernels = "all"
    shelves: list[tuple[Weights, dict[int, Tape]]] = field(default_factory=list, repr=False)

    @property
    def makes_kernels(self) -> bool:
        """Or contributions alone, for which training examples are read as ℓ′ mixes their outputs."""
        return self.kernels == "all"

    @property
    def train_blocks(self) -> list[slice]:
        """The blocks of training examples."""
        return cut(0, self.train, self.block)

    @property
    def other_blocks(self) -> list[slice]:
        """The blocks of all other points."""
        return cut(self.train, len(self.inputs), self.block)

    def refuse_without_rules(self, tape: Tape) -> None:
        """Refuse operations that no difference is passed through, before any training, by a tape of some points."""
        try:
            replace(self.reader, programs=None).secant(tape, tape, (0,))
        except NoRule as error:
            raise Mistake(f"{error}; {WITHOUT_RULES}") from error

    def tape(self, weights: Weights, block: slice) -> Tape:
        """The block's tape at these weights."""
        shelf = self.shelf(weights)
        if block.start not in shelf:
            shelf[block.start] = self.reader.record(weights, self.inputs[block])
        return shelf[block.start]

    def shelf(self, weights: Weights) -> dict[int, Tape]:
        """Where tapes at these weights are kept, if they are."""
        for known, tapes in self.shelves:
            if known is weights:
                return tapes
        tapes = {}
        if self.keep:
            self.shelves = [*self.shelves[-1:], (weights, tapes)]
        return tapes


@dataclass
class StepBlock:
    """One block of points during one step: tapes at positions inside the step, each recorded once."""

    points: Points
    segment: Segment
    place: slice
    first: int = 0  # of the points that integrals are about
    tapes: dict[float, Tape] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        """Where the block lies among the points that integrals are about."""
        return slice(self.place.start - self.first, self.place.stop - self.first)

    def tape(self, position: float) -> Tape:
        """The tape at θ₀ + uΔθ."""
        if position not in self.tapes:
            weights = self.segment.at(position)
            if position in (0.0, 1.0):
                self.tapes[position] = self.points.tape(weights, self.place)
            else:
                self.tapes[position] = self.points.reader.record(weights, self.points.inputs[self.place])
        return self.tapes[position]

    def outputs(self, position: float) -> Float[Tensor, "point out"]:
        """Those at which the path is integrated, at θ₀ + uΔθ."""
        found, chosen = self.tape(position).outputs, self.points.chosen
        return found if chosen is None else found[:, chosen]

    def change(self) -> Float[Tensor, "point out"]:
        """f(θ₁) − f(θ₀)."""
        return self.outputs(1.0) - self.outputs(0.0)

    def features(self, piece: Piece) -> Jacobian:
        """The Jacobian of a piece of the step."""
        if piece.start == piece.end:
            return self.points.reader.tangent(self.tape(piece.start), self.points.chosen)
        try:
            return self.points.reader.along(self.tape(piece.start), self.tape(piece.end), self.points.chosen)
        except NoRule as error:
            raise Mistake(f"{error}; {WITHOUT_RULES}") from error

    def kernel(self, pieces: tuple[Piece, ...], right: AbstractRightSide) -> Float[Tensor, "point out train out_"]:
        """The kernel of the step as a rule reads it: Σ weight · K(piece, start)."""
        return self.kernel_and_pull(pieces, right, None)[0]

    def kernel_and_pull(
        self, pieces: tuple[Piece, ...], right: AbstractRightSide, vector: Weights | None
    ) -> tuple[Float[Tensor, "point out train out_"], Float[Tensor, "point out"]]:
        """The kernel of the step as a rule reads it, and the same Jacobian times a vector of weight space."""
        first, *rest = pieces
        features = self.features(first)
        total = right.between(features).mul_(first.weight)
        pulled = first.weight * features.applied(vector) if vector else total.new_zeros(total.shape[:2])
        for piece in rest:
            features = self.features(piece)
            total.add_(right.between(features), alpha=piece.weight)
            if vector:
                pulled.add_(features.applied(vector), alpha=piece.weight)
        return total, pulled


def cut(start: int, stop: int, size: int) -> list[slice]:
    """Consecutive slices of at most this size.

    >>> cut(0, 5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(k, min(k + size, stop)) for k in range(start, stop, size)]


# --- The gradient of a loss from features: Σᵢ J(xᵢ)ᵀℓ′ᵢ.


def total(right: list[Jacobian], output_gradient: Float[Tensor, "train out"], weights: Weights) -> Weights:
    """Σᵢ J(xᵢ)ᵀℓ′ᵢ over all blocks of training examples."""
    parts = torch.split(output_gradient, [block.examples for block in right])
    return summed((block.weighted(part) for block, part in zip(right, parts, strict=True)), weights)


def summed(pulled: Iterable[Jacobian], weights: Weights) -> Weights:
    """Σᵢ of what every training example has pulled back."""
    return reduce(add_gradients, (block.total(weights) for block in pulled))


def add_gradients(gradient: Weights, other: Weights) -> Weights:
    """The sum, in the place of the first: two gradients are held at a time, however many blocks there are."""
    return {name: value.add_(other[name]) for name, value in gradient.items()}


def unit(gradient: Weights) -> Weights | None:
    """The direction of a gradient, if it has one."""
    length = torch.stack([part.square().sum() for part in gradient.values()]).sum().sqrt()
    return {name: part / length for name, part in gradient.items()} if length else None


# --- The network at one set of weights: read at all points when that is asked for, and once.


@dataclass(frozen=True)
class NetworkView:
    """What is seen at the points with these weights."""

    points: Points
    weights: Weights

    latest: list[tuple[Tensor, list[Jacobian]]] = field(default_factory=list, repr=False)  # ℓ′, and what it pulls

    @cached_property
    def train_reading(self) -> tuple[Float[Tensor, "train out"], list[Jacobian]]:
        """The outputs at the training examples and, where kernels are made, their tangent features."""
        found, right = [], []
        for tape in self.tapes(self.points.train_blocks):
            found.append(tape.outputs)
            if self.points.makes_kernels:
                right.append(self.points.reader.tangent(tape))
        return torch.cat(found), right

    def tapes(self, blocks: Sequence[slice]) -> Iterator[Tape]:
        """One after the other."""
        return (self.points.tape(self.weights, block) for block in blocks)

    @cached_property
    def outputs(self) -> Float[Tensor, "point out"]:
        """f(θ) at all points."""
        return torch.cat([self.train_outputs, *(tape.outputs for tape in self.tapes(self.points.other_blocks))])

    @property
    def train_outputs(self) -> Float[Tensor, "train out"]:
        """f(θ) at the training examples."""
        return self.train_reading[0]

    @property
    def right(self) -> list[Jacobian]:
        """J(θ) at the training examples, block by block."""
        return self.train_reading[1]

    def pulled(self, output_gradient: Float[Tensor, "train out"]) -> Iterable[Jacobian]:
        """J(xᵢ)ᵀℓ′ᵢ of every training example, block by block: of its features, or where none are read, by itself."""
        parts = torch.split(output_gradient, self.points.block)
        if self.points.makes_kernels:
            return (block.weighted(part) for block, part in zip(self.right, parts, strict=True))
        if not self.latest or self.latest[0][0] is not output_gradient:
            tapes = self.tapes(self.points.train_blocks)
            found = [self.points.reader.weighted(*pair) for pair in zip(tapes, parts, strict=True)]
            self.latest[:] = [(output_gradient, found)]
        return self.latest[0][1]

    def sketch_error(self, kernel: Float[Tensor, "train out train out_"]) -> float:
        """How far a sketched kernel among the training examples is from the kernel at most, as a share of it."""
        vectors = random_vectors(kernel.shape[2:], 0, kernel)
        gradients = (total(self.right, vector, self.weights) for vector in vectors)
        pushed = torch.stack([torch.cat([block.applied(each) for block in self.right]) for each in gradients])
        return error_bar(torch.einsum("qcnd,vnd->vqc", kernel, vectors) - pushed) / float(kernel.norm())

    def kept_kernel(self) -> Float[Tensor, "probe kept train kept_"]:
        """What is kept of the tangent kernel: the whole, its trace over outputs, or none."""
        makes = {"all": self.tangent_kernel, "trace": self.tangent_trace, "none": self.no_kernel}
        return makes[self.points.kernels]()

    def no_kernel(self) -> Float[Tensor, "probe out 0 out_"]:
        """A tangent kernel without training examples, where none is kept."""
        points, outputs = self.outputs.shape
        return self.outputs.new_zeros(points, outputs, 0, outputs)

    @cached_property
    def largest(self) -> float:
        """λ_max of the kernel among the training examples, from below, without it: by products with JJᵀ."""
        return self.largest_among(slice(None))

    def largest_among(self, examples: slice) -> float:
        """The same among some of them."""
        inside = torch.zeros_like(self.train_outputs)
        inside[examples] = 1.0
        start = random_vectors(self.train_outputs.shape, 0, self.train_outputs)[0] * inside
        return largest_eigenvalue(lambda vector: self.kernel_times(vector) * inside, start)

    def kernel_times(self, vector: Float[Tensor, "train out"]) -> Float[Tensor, "train out"]:
        """J Jᵀv of the training examples."""
        gradient = summed(self.pulled(vector), self.weights)
        tapes = self.tapes(self.points.train_blocks)
        return torch.cat([self.points.reader.applied(tape, gradient) for tape in tapes])

    def tangent_kernel(self) -> Float[Tensor, "probe out train out_"]:
        """K(θ) between all points and the training examples."""
        side = right_side(self.points.sketch, self.right)
        own = [side.between(block) for block in self.right]
        tapes = (self.points.tape(self.weights, block) for block in self.points.other_blocks)
        return torch.cat(own + [side.between(self.points.reader.tangent(tape)) for tape in tapes])

    def tangent_trace(self) -> Float[Tensor, "probe 1 train 1"]:
        """Σ_c K[x, c, x′, c] between all points and the training examples, a few outputs at a time."""
        first = self.points.tape(self.weights, self.points.train_blocks[0])
        examples, tangent = self.points.train + self.points.block, self.points.reader.tangent
        outputs = chunks(first, examples, first.outputs.shape[1], lambda chosen: tangent(first, chosen))
        return reduce(torch.add, map(self.trace_of, outputs))

    def trace_of(self, outputs: Sequence[int]) -> Float[Tensor, "probe 1 train 1"]:
        """The share of some outputs."""
        tangent = self.points.reader.tangent
        right = [tangent(tape, outputs) for tape in self.tapes(self.points.train_blocks)]
        others = (tangent(tape, outputs) for tape in self.tapes(self.points.other_blocks))
        rows = (torch.cat([trace(block, side) for side in right], dim=2) for block in chain(right, others))
        return torch.cat(list(rows))


# --- Where a path is integrated, and how far it leads: the points, the outputs, the steps.


CONTRIBUTIONS = 3  # axes: [point, out, train]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The points and outputs at which a path is integrated."""

    points: Points
    reads_train: bool  # whether training examples are among the points that are read, as they are among all
    attributed: Int[Tensor, " attributed"]  # those of the points at which the path is integrated
    integrated: tuple[int, ...]  # those of the outputs
    outputs: int
    steps: int  # at most
    switches: tuple[int, ...] = ()  # those at which another phase begins
    chunk: int  # how many attributed points at once, where they take a pass backwards
    like: Tensor  # of the kind of number that kernels are made of
    spills: bool = False  # whether contributions do not fit into the memory
    scratch: Path | None = None  # a folder where they lie then

    @property
    def read(self) -> slice:
        """The points at which the network is read: all, or all but the training examples."""
        return slice(self.first, None)

    @property
    def first(self) -> int:
        """The first of the points that are read."""
        return 0 if self.reads_train else self.points.train

    @property
    def rows(self) -> Int[Tensor, " attributed"]:
        """Where the attributed points lie among those that are read."""
        return self.attributed - self.first

    @property
    def places(self) -> list[slice]:
        """The same, cut into blocks."""
        return (self.points.train_blocks if self.reads_train else []) + self.points.other_blocks

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[point, out, train, out_] of the path kernel, at the points where the network is read."""
        return len(self.points.inputs) - self.first, len(self.integrated), self.points.train, self.outputs

    def kernel_room(self) -> Float[Tensor, "point out train out_"]:
        """Room for a path kernel; without training examples, if none is kept."""
        return self.room(4) if self.points.makes_kernels else self.like.new_zeros(*self.shape[:2], 0, self.outputs)

    def blocks(self, segment: Segment) -> Iterator[StepBlock]:
        """The points that are read, block by block, during a step."""
        return (StepBlock(self.points, segment, place, self.first) for place in self.places)

    def zeros(self, axes: int) -> Float[Tensor, "point out ..."]:
        """Zeros of so many of the axes of the path kernel."""
        return self.zeros_of(axes, self.like.dtype)

    def room(self, axes: int) -> Float[Tensor, "point out ..."]:
        """The same, but NaN at points where the path is not integrated; sums of contributions are taken in float64."""
        room = self.zeros_of(axes, torch.float64 if axes < 4 else self.like.dtype)
        if len(self.rows) < len(room):
            room.fill_(torch.nan)[self.rows] = 0.0
        return room

    def zeros_of(self, axes: int, dtype: torch.dtype) -> Float[Tensor, "point out ..."]:
        """Zeros of a type; contributions of all training examples lie on disk, if they must."""
        if axes == CONTRIBUTIONS and self.scratch is not None:
            return zeros_on_disk(self.scratch, self.shape[:axes], dtype)
        return self.like.new_zeros(self.shape[:axes], dtype=dtype)

    def no_pull(self) -> Float[Tensor, "train out_"]:
        """ℓ′ before the first step is taken."""
        return self.like.new_zeros(self.points.train, self.outputs)
