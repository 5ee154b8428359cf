"""The user's loss ℓᵢ of each example of a call (option `loss=`), and the example weights
of a loop that runs again.

    ∂L/∂fᵢ = κ ∂ℓᵢ/∂fᵢ        one factor κ for each call

κ is computed from the recorded ∂L/∂f, and then the equation is checked for all
examples. If L is a mean, L = Σℓᵢ/Σmᵢ. Here mᵢ is the weight of example i in the mean: 1,
its class weight, or its number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import nan
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ntkexp.effects.sweep import MeanName
from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.clipping import factor_between
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.kernel import plain_kernels
from ntkexp.mistake import Mistake, first_line
from ntkexp.shapes import Function, Weights

# Two formulas of the same loss may give gradients with this relative distance, in units
# of eps.
LOSS_TOLERANCE = 1e4
ROUNDING_FACTOR = 4  # safety factor for the measured rounding error
# the multiples c of the loss in `cancelled`
MULTIPLES = (1 / 3, 3 / 7, 1 / 11)

# relative error of the factor κ between two nearly equal gradients, in units of eps
FACTOR_PRECISION = 64
MEAN_WEIGHT_EPS = 1e-6  # relative rounding error of class weights in float32


ExampleLoss: TypeAlias = Callable[[Tensor, SeenCall], Tensor | tuple[Tensor, Tensor]]
"""A function (outputs, call) that returns the loss of each example. It may also return
a pair: the losses, and the weight m of each example in the mean."""


# --- The return value of the user's function.


def losses_of(
    loss: ExampleLoss, outputs: Tensor, call: SeenCall
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"] | None]:
    """Return the losses of the examples, and their weights m in the mean. The weights
    are None if the user's function returns only losses."""
    result = loss(outputs, call)
    losses: object = result
    counts = None
    if isinstance(result, tuple) and len(result) == 2:
        losses, counts = result
    if not isinstance(losses, Tensor):
        raise Mistake(
            f"loss=: it returns a {type(losses).__name__}; return a tensor with one "
            "loss for each example"
        )
    if losses.shape != (len(call.ids),):
        raise Mistake(
            f"loss=: it returns a tensor of shape {list(losses.shape)} for "
            f"{len(call.ids)} examples; return one loss for each, such as "
            "cross_entropy(outputs, labels, reduction='none')"
        )
    return losses, counts


def counts_of(
    loss: ExampleLoss, outputs: Tensor, call: SeenCall
) -> Float[Tensor, " row"] | None:
    """Return the weights m of the examples in the mean, or None if the user's function
    returns only losses. Raise if weights are negative or have a wrong shape."""
    try:
        with torch.no_grad():
            losses, counts = losses_of(loss, outputs.detach(), call)
    except Mistake:
        raise
    except Exception as error:  # any error of the user's function
        raise failure(
            "loss", "the outputs of a call, a tensor,", outputs, error
        ) from error
    if counts is None:
        return None
    is_tensor = isinstance(counts, Tensor) and counts.shape == losses.shape
    if not is_tensor or not bool((counts >= 0).all()):
        raise Mistake(
            "loss=: besides the losses, it must return the weight of each example in "
            "their mean; return a tensor with one number ≥ 0 for each of "
            f"{len(call.ids)} examples, such as weight[labels]"
        )
    return counts.double()


def failure(name: str, argument: str, outputs: Tensor, error: Exception) -> Mistake:
    """Return the error message for a user's function that raised `error`.

    Args:
        name: keyword of the function, such as "loss".
        argument: description of its first argument.
        outputs: first argument, whose shape is reported.
        error: exception that the function raised.
    """
    return Mistake(
        f"{name}=: it fails at outputs of shape {list(outputs.shape)} "
        f"({type(error).__name__}: {first_line(error)}); it receives {argument} and the "
        "call, which has args, kwargs and ids"
    )


# --- The loss of one call, compared with the recorded gradient.


class CountedTargets(TorchFunctionMode):
    """A mode that records the total target weight of each example
    in `cross_entropy` and `nll_loss`.

    The weight of a target is its class weight, or zero for ignored targets. Targets
    that are probabilities are not counted, because torch then divides the mean by the
    number of examples."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.counts = list[Tensor]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (functional.cross_entropy, functional.nll_loss):
            call = signature(func).bind(*args, **kwargs)
            call.apply_defaults()
            target = call.arguments["target"]
            if not target.is_floating_point():
                self.counts.append(self.target_weights(target, call.arguments))
        return func(*args, **kwargs)

    def target_weights(self, target: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return the total target weight of each example. Return NaN if the number of
        targets is not a multiple of the number of examples."""
        weight = arguments["weight"]
        is_counted = target != arguments["ignore_index"]
        weights: Tensor = is_counted.double()
        if weight is not None:
            weights = weight.double()[torch.where(is_counted, target, 0)] * is_counted
        if weights.numel() % self.rows:
            return weights.new_full((2,), nan)
        return weights.reshape(self.rows, -1).sum(1)

    @property
    def total(self) -> float | None:
        """The sum of all target weights.

        The sum is NaN if examples have different weights, and None if no loss function
        was called."""
        if not self.counts:
            return None
        counts = sum(self.counts[1:], self.counts[0])
        spread = float((counts - counts[0]).abs().max())
        is_even = spread <= MEAN_WEIGHT_EPS * float(counts.max())
        return float(counts.sum()) if is_even else nan


@dataclass(frozen=True)
class CallShare:
    """The loss factor κ of one call, and the weights of its examples in the mean. If the
    loss is a mean, κ = 1/Σm, up to the scale of a GradScaler."""

    factor: float  # the loss factor κ
    examples: int
    numbers: int  # number of elements of the outputs
    tolerance: float  # relative error of κ
    # weights in the mean, if `loss=` gives them
    counts: Float[Tensor, " row"] | None = None
    targets: float | None = None  # total target weight, if the loss calls cross_entropy


@dataclass(frozen=True)
class CallLoss:
    """The losses of the examples of one call."""

    loss: ExampleLoss
    function: Function
    call: ModelCall
    step: int

    @property
    def seen(self) -> SeenCall:
        """The call in the form that the user's function receives."""
        return SeenCall.of(self.call.inputs, self.call.names)

    def losses(self, outputs: Tensor) -> Float[Tensor, " row"]:
        losses, _ = losses_of(self.loss, outputs, self.seen)
        return losses

    def at(self, weights: Weights) -> Float[Tensor, " row"]:
        return self.losses(self.function(weights, self.call.inputs))

    def share(self, weights: Weights, weighing: Weighing | None = None) -> CallShare:
        """Compute the loss factor κ at these network weights.
        Raise if `loss=` is not the loss of the loop.

        `weighing` are the weights of the examples in the recorded gradient.
        """
        with torch.no_grad(), plain_kernels():
            outputs = self.function(weights, self.call.inputs)
        outputs = outputs.detach().requires_grad_()
        with CountedTargets(len(self.call.names)) as targets:
            counts = counts_of(self.loss, outputs, self.seen)
        factors = (
            None if weighing is None else weighing.factors(self.call.names, counts)
        )

        def slope(multiple: float) -> Tensor:
            """Return ∂/∂f of a multiple of the losses."""
            (gradient,) = torch.autograd.grad(
                multiple * self.losses(outputs).sum(), outputs
            )
            if factors is not None:
                rows = factors.to(gradient).view(-1, *[1] * (gradient.dim() - 1))
                gradient = gradient * rows
            return gradient.view(-1)

        # the loss factor κ, and the relative distance of the two gradients
        recorded = self.call.gradient_at(outputs.detach()).reshape(-1)
        factor, gap = factor_between(slope(1.0), recorded)
        rounding = cancelled(slope)
        eps = torch.finfo(recorded.dtype).eps
        if not gap <= LOSS_TOLERANCE * eps + ROUNDING_FACTOR * rounding:
            raise Mistake(
                f"step {self.step}: loss= is not the loss of the loop: whatever its "
                "factor, the gradient with respect to the outputs has a relative "
                f"difference of {gap:.2g}; return the loss of each example as in the "
                "loop"
            )
        return CallShare(
            factor=factor,
            examples=len(self.call.names),
            numbers=outputs.numel(),
            tolerance=FACTOR_PRECISION * eps + ROUNDING_FACTOR * (gap + rounding),
            counts=counts,
            targets=targets.total,
        )


def cancelled(gradient: Callable[[float], Tensor]) -> float:
    """Measure the relative rounding error of a gradient. `gradient(c)` returns the
    gradient of c times the loss. Without rounding, `gradient(c) / c` would be the same
    for all c.

    If terms cancel, the error is far above eps. This happens, for example, if an
    example has a tiny loss and class weights have very different sizes.

    >>> cancelled(lambda multiple: torch.tensor([multiple]))
    0.0
    """
    once = gradient(1.0)
    size = float(once.norm())
    error = max(float((gradient(c) / c - once).norm()) for c in MULTIPLES)
    return error / size if size else 0.0


# --- Weights w of examples in a loop that runs again.
# They multiply the gradients of the outputs.
#
#     ∂L/∂fᵢ ← c wᵢ ∂L/∂fᵢ       c = 1 (fixed), or Σm/Σmw over the rows of the call (renormalised)
#
# m is the weight of an example in the mean, which is 1 unless `loss=` returns it. If
# the loop's loss is a mean over examples, "renormalised" trains as if examples with w =
# 0 were not in the batch.


@dataclass(frozen=True)
class Weighing:
    """Weights w of some examples by name. All other examples have weight 1.

    >>> Weighing({"a": 0.0}).factors(["a", "b", "c", "b"]).tolist()
    [0.0, 1.3333333333333333, 1.3333333333333333, 1.3333333333333333]
    >>> Weighing({"a": 0.0}, "fixed").factors(["a", "b"]).tolist()
    [0.0, 1.0]
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    mean: MeanName = "renormalised"
    # may return the weights m of the examples in the mean
    loss: ExampleLoss | None = None

    def weights_of(self, names: Sequence[str]) -> Float[Tensor, " row"]:
        """Return the weight w of each named example."""
        return torch.tensor(
            [self.weights.get(name, 1.0) for name in names], dtype=torch.float64
        )

    def factors(
        self, names: Sequence[str], counts: Float[Tensor, " row"] | None = None
    ) -> Float[Tensor, " row"]:
        """Return the factor c w of every row.
        `counts` are the weights m in the mean."""
        return self.weights_of(names) * self.mean_factor(names, counts)

    def mean_factor(
        self, names: Sequence[str], counts: Float[Tensor, " row"] | None = None
    ) -> float:
        """Return the factor c of a call. It is 1 for 'fixed', and if every example has
        weight w = 0."""
        w = self.weights_of(names)
        m = torch.ones_like(w) if counts is None else counts.to(w)
        weighted = float((w * m).sum())
        if self.mean != "renormalised" or not weighted:
            return 1.0
        return float(m.sum()) / weighted

    def counts(self, outputs: Tensor, call: ModelCall) -> Float[Tensor, " row"] | None:
        """Return the weights m of the examples of a call,
        or None if `loss` does not return them."""
        if self.loss is None:
            return None
        return counts_of(self.loss, outputs, SeenCall.of(call.inputs, call.names))

    def silences(self, names: Sequence[str]) -> bool:
        """Return True if every example of the call has weight 0."""
        return not self.weights_of(names).any()
