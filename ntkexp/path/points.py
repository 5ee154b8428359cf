"""The points at which a network is evaluated along a path,
and the network at one set of weights.

The points are the training examples, followed by the queries. The network evaluates
them block by block, so that memory stays bounded. A block contains only training
examples or only queries. A *tape* is the record of a forward pass on one block. A step
ends with the weights with which the next step starts, so both steps use the same tapes
at these weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.capacity import split_range
from ntkexp.kernel import Jacobian, NoRule, Reader, Tape, gram
from ntkexp.kernel.features.gram import trace
from ntkexp.kernel.read.plan import chunks
from ntkexp.kernel.sketch import random_vectors
from ntkexp.mistake import Mistake
from ntkexp.path.settings import Kernels
from ntkexp.shapes import Inputs, Weights
from ntkexp.statistics import largest_eigenvalue

WITHOUT_RULES = (
    "read the path with path.rule=[gauss,left], which needs no difference rules"
)


@dataclass(kw_only=True)
class Points:
    """Inputs [point, …], evaluated `block` at a time.

    The first `train` are the training examples.
    """

    reader: Reader
    inputs: Float[Tensor, " point *shape"]
    # the targets, if the explained measure needs them
    targets: Float[Tensor, "point out"] | None = None
    train: int
    block: int
    # True: cache the tapes at the start and the end of the latest step
    keeps_tapes: bool
    # indices of the outputs that have path kernels and contributions; None means all outputs
    chosen: tuple[int, ...] | None = None
    kernels: Kernels = "all"
    cache: list[tuple[Weights, dict[int, Tape]]] = field(
        default_factory=list, repr=False
    )

    @property
    def makes_kernels(self) -> bool:
        """True if kernels are computed, False if only contributions are computed.

        For contributions, one gradient Jᵀℓ′ per training example suffices (ℓ′ is the
        derivative of the loss by the outputs). Kernels need a gradient per training
        example and output."""
        return self.kernels == "all"

    @property
    def train_blocks(self) -> list[slice]:
        return split_range(0, self.train, self.block)

    @property
    def other_blocks(self) -> list[slice]:
        return split_range(self.train, len(self.inputs), self.block)

    def arguments(self, where: slice | Int[Tensor, " some"]) -> Inputs:
        """Return the arguments of the network's function at some of the points."""
        if self.targets is None:
            return self.inputs[where]
        return self.inputs[where], self.targets[where]

    def select(self, where: Int[Tensor, " some"]) -> Points:
        """Return some of the points as one block of queries, with an empty cache."""
        targets = None if self.targets is None else self.targets[where]
        return replace(
            self,
            inputs=self.inputs[where],
            targets=targets,
            train=0,
            block=len(where),
            keeps_tapes=True,
            cache=[],
        )

    def refuse_without_rules(self, tape: Tape) -> None:
        """Raise if an operation on this tape has no difference rule,
        which the secant Jacobian needs."""
        try:
            replace(self.reader, programs=None).secant(tape, tape, (0,))
        except NoRule as error:
            raise Mistake(f"{error}; {WITHOUT_RULES}") from error

    def tape(self, weights: Weights, block: slice) -> Tape:
        """Return the tape of a block at these weights, from the cache if possible."""
        tapes = self.tapes_at(weights)
        if block.start not in tapes:
            tapes[block.start] = self.reader.record(weights, self.arguments(block))
        return tapes[block.start]

    def tapes_at(self, weights: Weights) -> dict[int, Tape]:
        """Return the cached tapes at these weights,
        by the first point of their block."""
        for cached, tapes in self.cache:
            if cached is weights:
                return tapes
        new: dict[int, Tape] = {}
        if self.keeps_tapes:
            self.cache = [*self.cache[-1:], (weights, new)]
        return new


def total_gradient(pulled: Iterable[Jacobian], weights: Weights) -> Weights:
    """Return the gradient Σᵢ Jᵢᵀℓ′ᵢ from the gradients Jᵢᵀℓ′ᵢ of blocks of examples.

    At most two sums are in memory at a time, for any number of blocks.
    """
    totals = (block.total(weights) for block in pulled)
    gradient = next(totals)
    for other in totals:
        for name, part in gradient.items():
            part.add_(other[name])
    return gradient


@dataclass(frozen=True)
class NetworkView:
    """The network at one set of weights. Each quantity is computed
    on first use and cached."""

    points: Points
    weights: Weights

    # the latest ℓ′ (derivative of the loss by the outputs), with its products Jᵀℓ′
    latest: list[tuple[Tensor, list[Jacobian]]] = field(
        default_factory=list, repr=False
    )

    def tapes(self, blocks: Sequence[slice]) -> Iterator[Tape]:
        return (self.points.tape(self.weights, block) for block in blocks)

    @cached_property
    def train_pass(self) -> tuple[Float[Tensor, "train out"], list[Jacobian]]:
        """The outputs at the training examples,
        and their tangent Jacobians if kernels are computed."""
        outputs = []
        jacobians = []
        for tape in self.tapes(self.points.train_blocks):
            outputs.append(tape.outputs)
            if self.points.makes_kernels:
                jacobians.append(self.points.reader.tangent(tape))
        return torch.cat(outputs), jacobians

    @cached_property
    def outputs(self) -> Float[Tensor, "point out"]:
        """The outputs f(θ; x) at all points x."""
        others = (tape.outputs for tape in self.tapes(self.points.other_blocks))
        return torch.cat([self.train_outputs, *others])

    @property
    def train_outputs(self) -> Float[Tensor, "train out"]:
        """The outputs f(θ; xᵢ) at the training examples xᵢ."""
        return self.train_pass[0]

    @property
    def train_jacobians(self) -> list[Jacobian]:
        """The tangent Jacobians J(θ; xᵢ) at the training examples xᵢ,
        block by block."""
        return self.train_pass[1]

    def loss_gradients(
        self, output_gradient: Float[Tensor, "train out"]
    ) -> Iterable[Jacobian]:
        """Return the gradient J(θ; xᵢ)ᵀℓ′ᵢ of the loss of each training example, block
        by block. ℓ′ is `output_gradient`, the derivative of the loss by the outputs.

        If kernels are computed, multiply with the Jacobians. Otherwise run one backward
        pass per block."""
        parts = torch.split(output_gradient, self.points.block)
        if self.points.makes_kernels:
            return (
                block.weighted(part)
                for block, part in zip(self.train_jacobians, parts, strict=True)
            )
        for known, gradients in self.latest:
            if known is output_gradient:
                return gradients
        tapes = self.tapes(self.points.train_blocks)
        weighted = self.points.reader.weighted
        gradients = [
            weighted(tape, part) for tape, part in zip(tapes, parts, strict=True)
        ]
        self.latest[:] = [(output_gradient, gradients)]
        return gradients

    def stored_kernel(self) -> Float[Tensor, "point kept train kept_"]:
        """Return the tangent kernel between all points and the training examples, in
        the form in which a run stores it.

        If the setting `kernels` is "all", this is the kernel itself. For "trace", it is
        the trace over outputs, Σ_c K[x, c, x′, c]. For "none", it is an empty array
        without training examples."""
        if self.points.kernels == "none":
            return self.outputs.new_zeros(*self.outputs.shape, 0, self.outputs.shape[1])
        if self.points.kernels == "trace":
            return self.kernel_trace()
        others = map(self.points.reader.tangent, self.tapes(self.points.other_blocks))
        return torch.cat(
            [
                self.kernel_with_train(left)
                for left in chain(self.train_jacobians, others)
            ]
        )

    def kernel_with_train(self, left: Jacobian) -> Float[Tensor, "some out train out_"]:
        """Return the kernel between some points and the training examples."""
        return torch.cat([gram(left, right) for right in self.train_jacobians], dim=2)

    def kernel_trace(self) -> Float[Tensor, "point 1 train 1"]:
        """Return the trace over outputs, Σ_c K[x, c, x′, c]. Compute the Jacobians of
        only a few outputs at a time."""
        points = self.points
        tape = points.tape(self.weights, points.train_blocks[0])
        tangent = partial(points.reader.tangent, tape)
        examples = points.train + points.block
        groups_of_outputs = chunks(tape, examples, tape.outputs.shape[1], tangent)
        return reduce(torch.add, map(self.trace_of_outputs, groups_of_outputs))

    def trace_of_outputs(
        self, outputs: Sequence[int]
    ) -> Float[Tensor, "point 1 train 1"]:
        """Return the sum of K[x, c, x′, c] over the given outputs c."""
        tangent = self.points.reader.tangent
        train = [
            tangent(tape, outputs) for tape in self.tapes(self.points.train_blocks)
        ]
        others = (
            tangent(tape, outputs) for tape in self.tapes(self.points.other_blocks)
        )
        rows = []
        for left in chain(train, others):
            blocks = [trace(left, right) for right in train]
            rows.append(torch.cat(blocks, dim=2))
        return torch.cat(rows)

    def largest_eigenvalue(self, examples: slice) -> float:
        """Return a lower estimate of the largest eigenvalue of the kernel JJᵀ between
        some training examples.

        Use products v → JJᵀv, which never form the kernel.
        """
        inside = torch.zeros_like(self.train_outputs)
        inside[examples] = 1.0

        def times_kernel(
            vector: Float[Tensor, "train out"],
        ) -> Float[Tensor, "train out"]:
            # v → Jᵀv
            gradient = total_gradient(self.loss_gradients(vector), self.weights)
            tapes = self.tapes(self.points.train_blocks)
            # → JJᵀv
            rows = [self.points.reader.applied(tape, gradient) for tape in tapes]
            return torch.cat(rows) * inside

        vectors = random_vectors(self.train_outputs.shape, 0, self.train_outputs)
        return largest_eigenvalue(times_kernel, vectors[0] * inside)
