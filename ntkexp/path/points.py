"""The points at which a network is read along a path, block by block; the network there at one set of weights; and
where a path is integrated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.diagnostics import largest_eigenvalue
from ntkexp.kernel.features.adjoint import Adjoint
from ntkexp.kernel.features.gram import gram, trace
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.plan import chunks
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.call import NoRule
from ntkexp.kernel.secant.segment import Segment
from ntkexp.kernel.sketch import random_vectors
from ntkexp.mistake import Mistake
from ntkexp.on_disk import zeros_on_disk
from ntkexp.path.components import Components
from ntkexp.path.rule.base import Piece
from ntkexp.path.settings import Kernels
from ntkexp.shapes import Inputs, Weights


def kernel_with(left: Jacobian, right: Sequence[Jacobian]) -> Float[Tensor, "probe out train out_"]:
    """The kernel ⟨J̄(x), J(xᵢ)⟩ between a block of points and all training examples, given block by block."""
    kernels = [gram(left, block) for block in right]
    return torch.cat(kernels, dim=2) if len(kernels) > 1 else kernels[0]


def products(
    left: Jacobian | Adjoint, right: Iterable[Jacobian], like: Float[Tensor, "probe out"]
) -> Float[Tensor, "probe out train out_"]:
    """⟨left, J(x′)⟩ of all blocks of examples; zero where one of both has no gradients, as of an unused component."""
    kernels = []
    for each in right:
        if isinstance(left, Adjoint):
            known = left.kernel(each) if left.parts and each.blocks else None
        else:
            known = gram(left, each) if left.blocks and each.blocks else None
        kernels.append(
            like.new_zeros(*like.shape, each.examples, each.outputs) if known is None else known
        )
    return side_by_side(kernels, like)


def side_by_side(
    kernels: Sequence[Float[Tensor, "probe out _ out_"]], like: Float[Tensor, "probe out"]
) -> Float[Tensor, "probe out train out_"]:
    """Kernels with blocks of examples as one with all of them."""
    return torch.cat(list(kernels), dim=2) if kernels else like.new_zeros(*like.shape, 0, 1)


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
    targets: Float[Tensor, "point out"] | None = None  # which a measure takes together with outputs
    train: int
    block: int
    keep: bool
    chosen: tuple[int, ...] | None = None  # outputs at which the path is integrated; None: all
    kernels: Kernels = "all"
    cache: list[tuple[Weights, dict[int, Tape]]] = field(default_factory=list, repr=False)

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

    def given(self, where: slice | Int[Tensor, " some"]) -> Inputs:
        """What the function is given of some of the points."""
        return (
            self.inputs[where]
            if self.targets is None
            else (self.inputs[where], self.targets[where])
        )

    def some(self, where: Int[Tensor, " some"]) -> Points:
        """Some of the points alone, read in one block, none of them as a training example."""
        targets = None if self.targets is None else self.targets[where]
        return replace(
            self,
            inputs=self.inputs[where],
            targets=targets,
            train=0,
            block=len(where),
            keep=True,
            cache=[],
        )

    def refuse_without_rules(self, tape: Tape) -> None:
        """Refuse operations that no difference is passed through, before any training, by a tape of some points."""
        try:
            replace(self.reader, programs=None).secant(tape, tape, (0,))
        except NoRule as error:
            raise Mistake(f"{error}; {WITHOUT_RULES}") from error

    def tape(self, weights: Weights, block: slice) -> Tape:
        """The block's tape at these weights."""
        tapes = next((tapes for known, tapes in self.cache if known is weights), None)
        if tapes is None:
            tapes = {}
            if self.keep:
                self.cache = [*self.cache[-1:], (weights, tapes)]
        if block.start not in tapes:
            tapes[block.start] = self.reader.record(weights, self.given(block))
        return tapes[block.start]


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
                self.tapes[position] = self.points.reader.record(
                    weights, self.points.given(self.place)
                )
        return self.tapes[position]

    def outputs(self, position: float) -> Float[Tensor, "point out"]:
        """Those at which the path is integrated, at θ₀ + uΔθ."""
        outputs, chosen = self.tape(position).outputs, self.points.chosen
        return outputs if chosen is None else outputs[:, chosen]

    def jacobian(self, piece: Piece) -> Jacobian:
        """The secant Jacobian of a piece of the step, or the tangent one, if its length is zero."""
        if piece.start == piece.end:
            return self.points.reader.tangent(self.tape(piece.start), self.points.chosen)
        try:
            return self.points.reader.along(
                self.tape(piece.start), self.tape(piece.end), self.points.chosen
            )
        except NoRule as error:
            raise Mistake(f"{error}; {WITHOUT_RULES}") from error

    def kernel(
        self, pieces: tuple[Piece, ...], right: Sequence[Jacobian], vector: Weights | None = None
    ) -> tuple[Float[Tensor, "point out train out_"], Float[Tensor, "point out"]]:
        """The kernel of the step as a rule reads it, ⟨J̄(x), J(xᵢ)⟩ with J̄ = Σ weight · J(piece); and J̄·vector."""
        first, *rest = pieces
        jacobian = self.jacobian(first)
        kernel = kernel_with(jacobian, right).mul_(first.weight)
        applied = (
            first.weight * jacobian.applied(vector)
            if vector
            else kernel.new_zeros(kernel.shape[:2])
        )
        for piece in rest:
            jacobian = self.jacobian(piece)
            kernel.add_(kernel_with(jacobian, right), alpha=piece.weight)
            if vector:
                applied.add_(jacobian.applied(vector), alpha=piece.weight)
        return kernel, applied

    def kernels_by_component(
        self,
        pieces: tuple[Piece, ...],
        right: Sequence[Jacobian],
        vector: Weights | None,
        components: Components,
    ) -> list[tuple[Float[Tensor, "point out train out_"], Float[Tensor, "point out"]]]:
        """The terms of both that the parameters of each component make; a piece is read once for all."""
        blocks = [[block.of(names) for block in right] for names in components.values()]
        kernels, applied = list[Tensor](), list[Tensor]()
        for number, piece in enumerate(pieces):
            jacobian, like = self.jacobian(piece), self.outputs(piece.start)
            for k, names in enumerate(components.values()):
                part = jacobian.of(names)
                kernel = products(part, blocks[k], like).mul_(piece.weight)
                taken = piece.weight * part.applied(vector) if vector else torch.zeros_like(like)
                if number:
                    kernels[k].add_(kernel)
                    applied[k].add_(taken)
                else:
                    kernels.append(kernel)
                    applied.append(taken)
        return list(zip(kernels, applied, strict=True))


def cut(start: int, stop: int, size: int) -> list[slice]:
    """Consecutive slices of at most this size.

    >>> cut(0, 5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(k, min(k + size, stop)) for k in range(start, stop, size)]


# --- The gradient of a loss from Jacobians: Σᵢ J(xᵢ)ᵀℓ′ᵢ.


def summed(pulled: Iterable[Jacobian], weights: Weights) -> Weights:
    """The sum of the gradients of all training examples; two are held at a time, however many blocks there are."""
    totals = (block.total(weights) for block in pulled)
    gradient = next(totals)
    for other in totals:
        for name, part in gradient.items():
            part.add_(other[name])
    return gradient


@dataclass(frozen=True)
class NetworkView:
    """The network at one set of weights: read at all points when that is needed, and once."""

    points: Points
    weights: Weights

    latest: list[tuple[Tensor, list[Jacobian]]] = field(
        default_factory=list, repr=False
    )  # ℓ′, and Jᵀℓ′

    def tapes(self, blocks: Sequence[slice]) -> Iterator[Tape]:
        """One after the other."""
        return (self.points.tape(self.weights, block) for block in blocks)

    @cached_property
    def train_reading(self) -> tuple[Float[Tensor, "train out"], list[Jacobian]]:
        """The outputs at the training examples and, where kernels are made, their tangent Jacobians."""
        outputs, right = [], []
        for tape in self.tapes(self.points.train_blocks):
            outputs.append(tape.outputs)
            if self.points.makes_kernels:
                right.append(self.points.reader.tangent(tape))
        return torch.cat(outputs), right

    @cached_property
    def outputs(self) -> Float[Tensor, "point out"]:
        """f(θ) at all points."""
        return torch.cat(
            [self.train_outputs, *(tape.outputs for tape in self.tapes(self.points.other_blocks))]
        )

    @property
    def train_outputs(self) -> Float[Tensor, "train out"]:
        """f(θ) at the training examples."""
        return self.train_reading[0]

    @property
    def right(self) -> list[Jacobian]:
        """J(θ) at the training examples, block by block."""
        return self.train_reading[1]

    def pulled(self, output_gradient: Float[Tensor, "train out"]) -> Iterable[Jacobian]:
        """J(xᵢ)ᵀℓ′ᵢ of every training example, block by block: of its Jacobian, or where none are read, by itself."""
        parts = torch.split(output_gradient, self.points.block)
        if self.points.makes_kernels:
            return (block.weighted(part) for block, part in zip(self.right, parts, strict=True))
        if not self.latest or self.latest[0][0] is not output_gradient:
            tapes = self.tapes(self.points.train_blocks)
            found = [self.points.reader.weighted(*pair) for pair in zip(tapes, parts, strict=True)]
            self.latest[:] = [(output_gradient, found)]
        return self.latest[0][1]

    def kept_kernel(self) -> Float[Tensor, "probe kept train kept_"]:
        """What is kept of the tangent kernel between all points and the training examples: the whole, its trace over
        outputs Σ_c K[x, c, x′, c], or none, as a kernel without training examples.
        """
        points, tangent = self.points, self.points.reader.tangent
        if points.kernels == "none":
            return self.outputs.new_zeros(*self.outputs.shape, 0, self.outputs.shape[1])
        if points.kernels == "all":
            others = (tangent(tape) for tape in self.tapes(points.other_blocks))
            return torch.cat(
                [kernel_with(block, self.right) for block in chain(self.right, others)]
            )

        def trace_of(outputs: Sequence[int]) -> Float[Tensor, "probe 1 train 1"]:
            right = [tangent(tape, outputs) for tape in self.tapes(points.train_blocks)]
            others = (tangent(tape, outputs) for tape in self.tapes(points.other_blocks))
            rows = (
                torch.cat([trace(block, side) for side in right], dim=2)
                for block in chain(right, others)
            )
            return torch.cat(list(rows))

        # a few outputs at a time
        first, examples = (
            points.tape(self.weights, points.train_blocks[0]),
            points.train + points.block,
        )
        outputs = chunks(
            first, examples, first.outputs.shape[1], lambda chosen: tangent(first, chosen)
        )
        return reduce(torch.add, map(trace_of, outputs))

    def largest_eigenvalue(self, examples: slice) -> float:
        """λ_max of the kernel among some training examples, from below, without it: by products with JJᵀ."""
        inside = torch.zeros_like(self.train_outputs)
        inside[examples] = 1.0

        def times(vector: Float[Tensor, "train out"]) -> Float[Tensor, "train out"]:
            gradient, tapes = (
                summed(self.pulled(vector), self.weights),
                self.tapes(self.points.train_blocks),
            )
            products: Tensor = (
                torch.cat([self.points.reader.applied(tape, gradient) for tape in tapes]) * inside
            )
            return products

        start = random_vectors(self.train_outputs.shape, 0, self.train_outputs)[0] * inside
        return largest_eigenvalue(times, start)


# --- Where a path is integrated, and how far it leads: the points, the outputs, the steps.


CONTRIBUTIONS = 3  # axes: [point, out, train]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The points and outputs at which a path is integrated, or a measure of the outputs, as `explained` reads them."""

    points: Points
    explained: Points  # the same points, as they are read where the path is integrated
    reads_train: (
        bool  # whether training examples are among the points that are read, as they are among all
    )
    attributed: Int[Tensor, " attributed"]  # those of the points at which the path is integrated
    integrated: tuple[int, ...]  # those of the outputs
    outputs: int
    steps: int  # at most
    switches: tuple[int, ...] = ()  # those at which another phase begins
    chunk: int  # how many attributed points at once, where they take a pass backwards
    like: Tensor  # of the kind of number that kernels are made of
    components: Components = field(
        default_factory=dict
    )  # by which sums are told apart; none: they are not
    spills: bool = False  # whether contributions do not fit into the memory
    scratch: Path | None = None  # a folder where they lie then

    @property
    def read(self) -> slice:
        """The points at which the network is read: all, or all but the training examples."""
        return slice(self.first, None)

    @property
    def first(self) -> int:
        """The first of these."""
        return 0 if self.reads_train else self.points.train

    @property
    def rows(self) -> Int[Tensor, " attributed"]:
        """Where the attributed points lie among those that are read."""
        return self.attributed - self.first

    @property
    def places(self) -> list[slice]:
        """The points that are read, cut into blocks."""
        return (self.points.train_blocks if self.reads_train else []) + self.points.other_blocks

    def blocks(self, segment: Segment) -> Iterator[StepBlock]:
        """The same during a step."""
        return (StepBlock(self.explained, segment, place, self.first) for place in self.places)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[point, out, train, out_] of the path kernel, at the points where the network is read."""
        return (
            len(self.points.inputs) - self.first,
            len(self.integrated),
            self.points.train,
            self.outputs,
        )

    def zeros(self, axes: int, dtype: torch.dtype | None = None) -> Float[Tensor, "point out ..."]:
        """Zeros with the first `axes` axes of the path kernel; large contributions lie on disk."""
        dtype = dtype or self.like.dtype
        if axes == CONTRIBUTIONS and self.scratch is not None:
            return zeros_on_disk(self.scratch, self.shape[:axes], dtype)
        return self.like.new_zeros(self.shape[:axes], dtype=dtype)

    def sums(self, axes: int) -> Float[Tensor, "point out ..."]:
        """The same, but NaN at points where the path is not integrated; sums of contributions are taken in float64."""
        sums = self.zeros(axes, torch.float64 if axes < 4 else None)
        if len(self.rows) < len(sums):
            sums.fill_(torch.nan)[self.rows] = 0.0
        return sums

    def no_pull(self) -> Float[Tensor, "train out_"]:
        """ℓ′ before the first step is taken."""
        return self.like.new_zeros(self.points.train, self.outputs)
