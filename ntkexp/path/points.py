"""The points at which a network is read along a path: block by block, so that memory stays bounded.

The training examples come first, in blocks of their own. The tape at the end of a step is the tape at the start of the
next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.features import Features
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape
from ntkexp.kernel.secant.rules.base import NoRule
from ntkexp.kernel.secant.segment import Segment
from ntkexp.kernel.sketch.sketch import Sketch
from ntkexp.mistake import Mistake
from ntkexp.path.kernel import Kernels
from ntkexp.path.right_side import AbstractRightSide
from ntkexp.path.rule.base import Piece
from ntkexp.shapes import Weights

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

    def features(self, piece: Piece) -> Features:
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
