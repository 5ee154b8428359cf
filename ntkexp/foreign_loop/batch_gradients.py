"""Per-example gradients of a batch whose examples depend on one another.

BatchNorm couples examples by the mean and variance of the batch. The user's function of
`trace.losses` may couple them too. The outputs fᵢ of example i then depend on all
examples of the batch, and the loss is Σᵢ ℓᵢ(fᵢ(θ; batch)). ℓ′ᵢ is the recorded gradient
∂L/∂fᵢ.

With batch_norm="exact", the gradient gᵢ of example i is the gradient of its term of the
loss, through the whole batch. This takes one backward pass of the batch for each
example:

    gᵢ = ∂/∂θ ⟨ℓ′ᵢ, fᵢ(θ; batch)⟩        Σᵢ gᵢ = gradient of the batch

Contributions only need the products of gᵢ with the rows v of an adjoint. If there are
fewer rows than examples, forward-mode derivatives are faster. One forward pass for each
row gives the products of all examples:

    ⟨v, gᵢ⟩ = ⟨ℓ′ᵢ, fᵢ′⟩        f′ = ∂f(θ + tv; batch)/∂t at t = 0

With batch_norm="constant", the batch mean and variance are treated as constants.
Examples are then independent, and one backward pass gives all gradients gᵢ. Their sum
differs from the gradient of the batch. The effect of this difference on the outputs is
reported as `coupling`:

    gᵢ = J(xᵢ)ᵀℓ′ᵢ at constant statistics        coupling: gradient of the batch − Σᵢ gᵢ

For a call of `trace.losses`, f is the vector of losses, so fᵢ is one number. If the
losses do not depend on one another, gᵢ is computed from a few rows of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ntkexp.effects.curvature import load_forward_mode
from ntkexp.kernel import DirectionalGradients, Jacobian, plain_kernels
from ntkexp.kernel.features.blocks import Rows
from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.kernel.record.tape import leaves
from ntkexp.kernel.record.taping import is_out_of_memory
from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import normal, stream
from ntkexp.text import short

# Largest number of cotangents (vectors that multiply Jᵀ) in one backward pass. A larger
# number is not faster.
MAX_COTANGENTS = 64
# A batch of independent examples is split into groups of at most this many rows.
SPLIT_ROWS = 32
# largest accepted relative distance of Σᵢ gᵢ from the gradient of the batch, in units
# of eps
TERM_SUM_TOLERANCE = 1e3


# --- The gradient of each example's term, through the whole batch.


class CountedBytes(DispatchMode):
    """A mode that counts the bytes of all results of operations, except views.

    The count is an upper bound of the bytes that autograd saves for the backward pass.
    Hooks on saved tensors would be exact, but torch.func does not support them."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.nbytes += sum(
                leaf.nbytes for leaf in leaves(result) if isinstance(leaf, Tensor)
            )
        return result


@dataclass
class CoupledOutputs:
    """The outputs of a call with their autograd graph,
    and the trained weights as its leaves."""

    outputs: Tensor
    leaves: Weights
    graph_bytes: int  # upper bound of the memory of the graph

    @classmethod
    def of(
        cls,
        function: Function,
        weights: Weights,
        inputs: Inputs,
        trained: frozenset[str],
    ) -> CoupledOutputs:
        """Evaluate a function, and bound the bytes that its graph saves
        for the backward pass."""
        leaves = {
            name: weight.detach().requires_grad_(name in trained)
            for name, weight in weights.items()
        }
        with torch.enable_grad(), plain_kernels(), CountedBytes() as counted:
            outputs = function(leaves, inputs)
        trained_leaves = {
            name: leaf for name, leaf in leaves.items() if name in trained
        }
        return cls(outputs, trained_leaves, counted.nbytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one gradient."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def in_their_shape(self, gradient: Tensor) -> Tensor:
        """Return ∂L/∂f in the shape and the dtype of the outputs."""
        return gradient.reshape(self.outputs.shape).to(self.outputs.dtype)

    def passes_at_once(
        self, buffer_bytes: float, most: int = MAX_COTANGENTS, share: float = 1.0
    ) -> int:
        """Return how many passes fit into half of `buffer_bytes`, at most `most`. Each
        pass uses the fraction `share` of the batch."""
        pass_bytes = self.row_bytes + share * self.graph_bytes
        return int(max(1, min(most, buffer_bytes / 2 / pass_bytes)))

    def gradients(
        self, cotangent: Tensor, *, keep: bool, batched: bool = False
    ) -> list[Tensor]:
        """Multiply a cotangent, or each row of a batch of cotangents, by Jᵀ. Return one
        tensor for each leaf.

        `keep` retains the graph, and `batched` is True for a batch of cotangents.
        """
        gradients = torch.autograd.grad(
            self.outputs,
            list(self.leaves.values()),
            cotangent,
            retain_graph=keep,
            allow_unused=True,
            is_grads_batched=batched,
        )
        batch = cotangent.shape[:1] if batched else ()
        return [
            leaf.new_zeros(*batch, *leaf.shape) if gradient is None else gradient
            for gradient, leaf in zip(gradients, self.leaves.values(), strict=True)
        ]

    def gradients_of_each(self, cotangents: Tensor) -> list[Tensor]:
        """Multiply each cotangent by Jᵀ: as a batch if torch
        supports it, else one by one."""
        if len(cotangents) > 1:
            try:
                return self.gradients(cotangents, keep=True, batched=True)
            except RuntimeError as error:  # an operation without a batching rule
                if is_out_of_memory(error):
                    raise
        rows = [self.gradients(cotangent, keep=True) for cotangent in cotangents]
        return [torch.stack(column) for column in zip(*rows, strict=True)]


@dataclass
class TermGradients(Sequence[Jacobian]):
    """The gradients gᵢ of the examples of a call, in groups of consecutive examples.

    Element k is the Jacobian with the gradients of group k. It is computed each time it
    is read. If the gradients of all examples fit into half of `buffer_bytes`, they are
    stored and computed only once."""

    coupled: CoupledOutputs
    output_gradient: Float[Tensor, "example ..."]  # ℓ′ = ∂L/∂f
    buffer_bytes: float
    stored: dict[int, Jacobian] = field(default_factory=dict)
    total: Weights = field(default_factory=dict)  # Σᵢ gᵢ of the first `summed` groups
    summed: int = 0

    def __post_init__(self) -> None:
        self.row_bytes = self.coupled.row_bytes
        self.group = self.coupled.passes_at_once(self.buffer_bytes)

    @property
    def examples(self) -> int:
        return len(self.coupled.outputs)

    def __len__(self) -> int:
        return (self.examples + self.group - 1) // self.group

    @property
    def fits(self) -> bool:
        """True if the gradients of all examples fit into memory and are stored."""
        return self.examples * self.row_bytes <= self.buffer_bytes / 2

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index in self.stored:
            return self.stored[index]
        jacobian = self.computed(index)
        if index == self.summed:
            for name, part in jacobian.total(self.coupled.leaves).items():
                self.total[name] = (
                    self.total[name] + part if name in self.total else part
                )
            self.summed += 1
        if self.fits:
            self.stored[index] = jacobian
        return jacobian

    def computed(self, index: int) -> Jacobian:
        """Compute the gradients of one group. The cotangent of an example is ℓ′ᵢ in its
        own row, and 0 in the rows of all other examples."""
        chosen = range(self.examples)[index * self.group : (index + 1) * self.group]
        outputs = self.coupled.outputs
        cotangents = outputs.new_zeros(len(chosen), *outputs.shape)
        for row, example in enumerate(chosen):
            cotangents[row, example] = self.output_gradient[example]
        return self.jacobian(self.coupled.gradients_of_each(cotangents))

    def jacobian(self, gradients: Sequence[Tensor]) -> Jacobian:
        """Return the gradients of a group as a Jacobian with one block
        for each leaf."""
        blocks = tuple(
            Rows(gradient.flatten(1)[:, None], name)
            for name, gradient in zip(self.coupled.leaves, gradients, strict=True)
        )
        return Jacobian(blocks, len(gradients[0]), 1)

    def refuse_other_sum(self, whole: Weights, step: int) -> None:
        """Raise if the examples' gradients gᵢ do not add up to `whole`,
        the gradient of the batch."""
        ours = torch.cat([self.total[name].detach().flatten() for name in whole])
        theirs = torch.cat([whole[name].detach().flatten() for name in whole])
        gap = float((ours - theirs).norm())
        eps = torch.finfo(theirs.dtype).eps
        if not gap <= TERM_SUM_TOLERANCE * eps * float(theirs.norm()):
            size = sum(float(row.norm()) for row in self.output_gradient)
            miss = f"{short(gap)}, and ∂L/∂f has the norm {short(size)}"
            raise other_sum(step, len(self.output_gradient), miss)


def other_sum(step: int, examples: int, miss: str) -> Mistake:
    """Return the error for gradients of examples that do not add up to the gradient of
    their batch. `miss` states the difference."""
    return Mistake(
        f"step {step}: the gradients of {examples} examples through their batch do not "
        f"add up to the gradient of the batch: they miss it by {miss}; follow in "
        "float64, or with batch_norm='constant'"
    )


# --- Products with the gradients of all terms, by forward-mode derivatives.


@dataclass
class TermProducts(Sequence[DirectionalGradients]):
    """The gradients gᵢ of the examples of a call, represented by their products ⟨v, gᵢ⟩
    with directions v. The sequence has one element, which computes the products."""

    function: Function
    weights: Weights
    inputs: Inputs
    output_gradient: Float[Tensor, "example ..."]  # ℓ′ = ∂L/∂f
    whole: Weights  # gradient of the batch, by a backward pass
    directions_at_once: int
    # largest |Σᵢ⟨v, gᵢ⟩ − ⟨v, whole⟩| so far, relative to ‖v‖ ‖whole‖
    missed: float = 0.0

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        if index != 0:
            raise IndexError(index)
        trained = {name: self.weights[name] for name in self.whole}
        return DirectionalGradients(
            self.products, trained, len(self.output_gradient), self.directions_at_once
        )

    def products(self, directions: Weights) -> Float[Tensor, "direction example"]:
        """Return ⟨v, gᵢ⟩. `directions` holds a tensor [direction, *parameter] for each
        of some parameters."""
        point = {name: self.weights[name] for name in directions}

        def outputs(moved: Weights) -> Tensor:
            return self.function({**self.weights, **moved}, self.inputs)

        def outputs_along(direction: Weights) -> Tensor:
            tangent: Tensor = torch.func.jvp(outputs, (point,), (direction,))[1]
            return tangent

        load_forward_mode()
        with torch.no_grad(), plain_kernels():
            tangents = torch.func.vmap(outputs_along)(directions)
        terms = tangents * self.output_gradient
        products = terms.reshape(*terms.shape[:2], -1).sum(2)
        self.compare(products.sum(1), directions)
        return products

    def compare(self, sums: Float[Tensor, " direction"], directions: Weights) -> None:
        """Compare Σᵢ⟨v, gᵢ⟩ with ⟨v, whole⟩, and update `missed`."""
        gap = sums.clone()
        square = torch.zeros_like(sums)
        for name, direction in directions.items():
            rows = direction.reshape(len(direction), -1)
            gap -= rows.mv(self.whole[name].reshape(-1))
            square += rows.square().sum(1)
        size = square.sqrt() * self.norm
        relative = torch.where(size > 0, gap.abs() / size, gap.abs())
        # `max` of Python would hide nan
        self.missed = float(torch.stack([gap.new_tensor(self.missed), *relative]).max())

    def agree(self) -> bool:
        """Return True if torch has forward-mode derivatives of the function, and they
        agree with its backward pass in one direction.

        The direction is the gradient of the batch plus a random vector of its norm."""
        count = sum(part.numel() for part in self.whole.values())
        generator = stream("shares", count)
        directions: Weights = {}
        for name, part in self.whole.items():
            noise = normal(generator, *part.shape).to(part) * (self.norm / count**0.5)
            directions[name] = (part + noise)[None]
        try:
            self.products(directions)
        except Exception as error:
            # an operation, or a function of the user, without a forward-mode derivative
            if is_out_of_memory(error):
                raise
            return False
        return self.missed <= self.tolerance

    @cached_property
    def norm(self) -> Float[Tensor, ""]:
        """The norm of the gradient of the batch."""
        norms = torch.stack([part.norm() for part in self.whole.values()])
        norm: Tensor = torch.linalg.vector_norm(norms)
        return norm

    @property
    def tolerance(self) -> float:
        """The largest allowed value of `missed`."""
        return TERM_SUM_TOLERANCE * torch.finfo(self.output_gradient.dtype).eps

    def refuse_other_sum(self, step: int) -> None:
        """Raise if the examples' products do not add up to the product with the
        gradient of the batch."""
        if not self.missed <= self.tolerance:
            miss = f"{short(self.missed)} of its size"
            raise other_sum(step, len(self.output_gradient), miss)


# --- Independent examples. If no loss depends on the rows of other examples, the
# gradients of a group are computed from the rows of this group alone. A call of n
# examples still takes n backward passes, but each pass is shorter.


@dataclass
class SplitGradients(TermGradients):
    """The gradients gᵢ of independent examples. They are computed in groups of
    successive examples, each group from its own rows of the batch."""

    # the losses as a function of the weights, for a slice of the rows
    losses_of_rows: Callable[[slice], Function] = field(kw_only=True)
    weights: Weights = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        share = min(1.0, SPLIT_ROWS / self.examples)
        self.group = self.coupled.passes_at_once(self.buffer_bytes, SPLIT_ROWS, share)

    def computed(self, index: int) -> Jacobian:
        chosen = slice(index * self.group, (index + 1) * self.group)
        function = self.losses_of_rows(chosen)
        part = CoupledOutputs.of(
            function, self.weights, (), frozenset(self.coupled.leaves)
        )
        return self.jacobian(
            part.gradients_of_each(self.output_gradient[chosen].diag())
        )

    def agree(self) -> bool:
        """Return True if these gradients equal the gradients through the whole batch.

        Draw a random number rᵢ for each example. Compare Σ rᵢgᵢ with the gradient of
        Σ rᵢκᵢℓᵢ through the whole batch, where κᵢ = ∂L/∂ℓᵢ. An error in any gᵢ changes
        the first sum."""
        generator = stream("shares", self.examples)
        shares = normal(generator, self.examples).to(self.output_gradient)
        whole = self.coupled.gradients(shares * self.output_gradient, keep=True)

        # gap ← gap − Σ rᵢgᵢ,   square ← square + Σ ‖rᵢgᵢ‖²
        gap = dict(zip(self.coupled.leaves, whole, strict=True))
        square = 0.0
        try:
            for index in range(len(self)):
                rows = shares[index * self.group : (index + 1) * self.group]
                for block in self[index].blocks:
                    assert isinstance(block, Rows)
                    terms = rows[:, None] * block.rows.flatten(1)
                    rest = gap[block.name]
                    gap[block.name] = rest - terms.sum(0).view_as(rest)
                    square += float(terms.square().sum())
        except Exception as error:
            # the user's function may fail if it receives only some rows
            if is_out_of_memory(error):
                raise
            return False
        distance = sum(float(part.square().sum()) for part in gap.values()) ** 0.5
        eps = torch.finfo(shares.dtype).eps
        return bool(distance <= TERM_SUM_TOLERANCE * eps * square**0.5)


# --- The batch mean and variance as constants.


class FixedStatistics(TorchFunctionMode):
    """A mode in which BatchNorm layers normalise by given constants. `given` holds a
    pair (mean, variance) for each use of a layer, in the order of use. Without `given`,
    the mode records the mean and variance of the batch, and changes nothing.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> with FixedStatistics() as recording:
    ...     _ = torch.nn.BatchNorm1d(1)(x)
    >>> recording.recorded
    [(tensor([2.]), tensor([1.]))]
    >>> with FixedStatistics([(torch.tensor([0.0]), torch.tensor([1.0]))]):
    ...     torch.nn.BatchNorm1d(1, eps=0.0, affine=False)(x)
    tensor([[1.],
            [3.]])
    """

    def __init__(self, given: Sequence[tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__()
        self.given = None if given is None else iter(given)
        self.recorded = list[tuple[Tensor, Tensor]]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        call = signature(func).bind(*args, **(kwargs or {}))
        call.apply_defaults()
        if not call.arguments["training"]:
            return func(*args, **(kwargs or {}))
        if self.given is None:
            x = call.arguments["input"].detach()
            axes = [axis for axis in range(x.dim()) if axis != 1]
            self.recorded.append((x.mean(axes), x.var(axes, correction=0)))
        else:
            mean, variance = next(self.given)
            call.arguments.update(
                running_mean=mean, running_var=variance, training=False
            )
        return func(*call.args, **call.kwargs)


CONSTANTS = "statistics of the batch"
"""The prefix of the names under which batch means and variances are passed among the
weights (see `at_constants`)."""


def at_constants(function: Function) -> Function:
    """Return `function` with constant batch statistics. The returned function expects
    the batch means and variances among its weights, as `constants_of` names them."""

    def fixed(weights: Weights, inputs: Inputs) -> Tensor:
        constants = [  # torch refuses a batch norm whose mean requires a gradient
            weight.detach()
            for name, weight in weights.items()
            if name.startswith(CONSTANTS)
        ]
        others = {
            name: weight
            for name, weight in weights.items()
            if not name.startswith(CONSTANTS)
        }
        pairs = list(zip(constants[::2], constants[1::2], strict=True))
        with FixedStatistics(pairs):
            return function(others, inputs)

    return fixed


def constants_of(function: Function, weights: Weights, inputs: Inputs) -> Weights:
    """Return the means and variances of a batch in all BatchNorm layers, in the order
    in which the layers are used, by names that begin with `CONSTANTS`."""
    with torch.no_grad(), plain_kernels(), FixedStatistics() as recording:
        function(weights, inputs)
    values = [value for pair in recording.recorded for value in pair]
    return {f"{CONSTANTS} {number}": value for number, value in enumerate(values)}
