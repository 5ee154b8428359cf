"""The interface of diagnostics, and the state of training that they receive."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, vjp

from ntkexp.component import Component
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.mistake import Mistake, first_line
from ntkexp.shapes import Function, Weights

Value: TypeAlias = "float | Tensor | None"
"""A number, an array, or None if the quantity is undefined at this step."""

Measured: TypeAlias = "Value | Mapping[str, Value]"


@dataclass(frozen=True, kw_only=True)
class EarlierKernel:
    """The tangent kernel at the latest earlier step that has a stored kernel."""

    step: int
    kernel: Float[Tensor, "train out train out_"]


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The change of the weights in a training step from θ to θ′, divided into the parts
    of earlier gradients and of the present gradient.

    θ′ − θ = momentum + gradient − d θ, where d is the decoupled weight decay.
    """

    momentum: Weights  # the part of earlier gradients
    gradient: Weights  # the part of the gradient at θ


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of training before a step, or after the last step.

    The kernels are None unless `path.kernels=all`.
    """

    step: int
    time: float  # Σ η_s of the earlier steps
    step_size: float | None  # None after the last step
    weights: Weights
    start_weights: Weights
    network: Function  # (weights, inputs) → outputs
    # (outputs, targets) → the part of the objective L that comes from these examples
    loss: Callable[[Tensor, Tensor], Float[Tensor, ""]]
    # inputs and targets of the training examples, in blocks that fit into memory
    blocks: Sequence[tuple[Tensor, Float[Tensor, "block out"]]]
    # inputs of all points in blocks: the training examples, then all queries
    input_blocks: Sequence[Tensor]
    outputs: Float[Tensor, "train out"]
    query_outputs: Float[Tensor, "query out"]
    targets: Float[Tensor, "train out"]
    kernel: Float[Tensor, "train out train out_"] | None
    start_kernel: Float[Tensor, "train out train out_"] | None
    query_kernel: Float[Tensor, "query out train out_"] | None
    earlier: EarlierKernel | None  # None at the first step
    layers: Mapping[str, Collection[str]]  # the names of the parameters of each layer
    # the part of the kernel that comes from some parameters: now, and before training
    kernel_of: Callable[[Collection[str]], Float[Tensor, "train out train out_"]]
    start_kernel_of: Callable[[Collection[str]], Float[Tensor, "train out train out_"]]
    # a function that returns the parts of the next step; None after the last step
    step_parts: Callable[[], StepParts] | None

    @property
    def splits(self) -> dict[str, slice]:
        """The points of `input_blocks` by split: the training examples (`train`), and
        the queries of all other splits (`query`) if there are any."""
        train = len(self.outputs)
        splits = {"train": slice(0, train)}
        if len(self.query_outputs):
            splits["query"] = slice(train, None)
        return splits

    def block_loss(
        self, weights: Weights, inputs: Tensor, targets: Tensor
    ) -> Float[Tensor, ""]:
        """Return the part of the objective L(θ) that comes from a block of examples."""
        return self.loss(self.network(weights, inputs), targets)

    @cached_property
    def gradient(self) -> Weights:
        """The gradient ∇L of the objective."""
        gradients: list[Weights] = [
            grad(self.block_loss)(self.weights, inputs, targets)
            for inputs, targets in self.blocks
        ]
        return reduce(added, gradients)

    def hessian_product(self, direction: Weights) -> Weights:
        """Return the product ∇²L · v of the Hessian of the objective with a vector."""

        def product(inputs: Tensor, targets: Tensor) -> Weights:
            def gradient(weights: Weights) -> Weights:
                slope: Weights = grad(self.block_loss)(weights, inputs, targets)
                return slope

            # ∇²L v is the gradient of ⟨∇L, v⟩, because the Hessian is symmetric
            with plain_kernels():
                pull_back = vjp(gradient, self.weights)[1]
                image: Weights = pull_back(direction)[0]
            return image

        return reduce(
            added, (product(inputs, targets) for inputs, targets in self.blocks)
        )


@contextmanager
def refuse_missing_derivatives(name: str) -> Iterator[None]:
    """Raise a `Mistake` if torch has no second derivatives for the network."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise Mistake(
            f"diagnostics: {name} needs second derivatives, and torch has none for this "
            f"network ({first_line(error)}); leave it out"
        ) from error


def added(left: Weights, right: Weights) -> Weights:
    """Return the sum of two vectors of weights.

    >>> import torch
    >>> added({"w": torch.ones(1)}, {"w": torch.ones(1)})
    {'w': tensor([2.])}
    """
    return {name: part + right[name] for name, part in left.items()}


class AbstractDiagnostic(Component):
    """A quantity that a run measures at the steps of `path.schedule`.

    Numbers become columns of metrics.csv. Arrays are stored in diagnostics.zarr.
    """

    needs_kernel: ClassVar[bool] = False
    """True if the diagnostic reads the tangent kernel,
    which requires `path.kernels=all`."""

    needs_steps: ClassVar[bool] = False
    """True if the diagnostic reads training steps. Gradient flows have none."""

    @abstractmethod
    def measure(self, state: TrainingState) -> Measured:
        """Return a number, an array, or a mapping of names to numbers and arrays.

        The names, and the shapes of arrays, must be the same at all steps.
        """
