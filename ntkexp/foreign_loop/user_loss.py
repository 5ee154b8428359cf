"""The loss that the user gives: one number for each example of a call, and the weights of examples in a loop run again.

∂L/∂fᵢ = κ ∂ℓᵢ/∂fᵢ        one factor κ for each call
"""

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
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.mistake import Mistake, first_line
from ntkexp.shapes import Function, Weights

# --- The loss of a loop, as its user gives it: one number for each example of a call, up to one factor for each call.
#
#     ∂L/∂fᵢ = κ ∂ℓᵢ/∂fᵢ        κ is found, and the rest compared with what came back to the outputs
#
# A mean divides by what its examples count, Σm: each 1, or its class weight, or the number of its tokens.


AGREES = 1e4  # eps: a loss written in other words, relative to its gradient
SPREAD = 4  # times what rounding does to a few multiples of a gradient: to that with the factor of the loop
MULTIPLES = (1 / 3, 3 / 7, 1 / 11)


ExampleLoss: TypeAlias = Callable[[Tensor, SeenCall], Tensor | tuple[Tensor, Tensor]]
"""Outputs of a call and the call ↦ one loss for each example, and what each counts in their mean, if that is not 1."""


def losses_of(
    loss: ExampleLoss, outputs: Tensor, call: SeenCall
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"] | None]:
    """The losses of the examples, and what they count in their mean, if that is given."""
    given = loss(outputs, call)
    found, counts = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(found, Tensor):
        raise Mistake(
            f"loss=: it gives a {type(found).__name__}; give a tensor with one loss for each example"
        )
    if found.shape != (len(call.ids),):
        raise Mistake(
            f"loss=: it gives a tensor of shape {list(found.shape)} for {len(call.ids)} examples; give one "
            "loss for each, such as cross_entropy(outputs, labels, reduction='none')"
        )
    return found, counts


def counts_of(loss: ExampleLoss, outputs: Tensor, call: SeenCall) -> Float[Tensor, " row"] | None:
    """What the examples of a call count in their mean, if that is given."""
    try:
        with torch.no_grad():
            found, counts = losses_of(loss, outputs.detach(), call)
    except Mistake:
        raise
    except Exception as error:  # the user's own
        raise failure("loss", "the outputs of a call, a tensor,", outputs, error) from error
    if counts is None:
        return None
    if (
        not isinstance(counts, Tensor)
        or counts.shape != found.shape
        or not bool((counts >= 0).all())
    ):
        raise Mistake(
            "loss=: what it gives beside the losses is what each example counts in their mean; give a tensor with one "
            f"number ≥ 0 for each of {len(call.ids)} examples, such as weight[labels]"
        )
    return counts.double()


def failure(name: str, given: str, outputs: Tensor, error: Exception) -> Mistake:
    """The mistake of a function of the user's own that fails: at what, how, and what it is given beside the call."""
    return Mistake(
        f"{name}=: it fails at outputs of shape {list(outputs.shape)} ({type(error).__name__}: {first_line(error)}); "
        f"it is given {given} and the call, which has args, kwargs and ids"
    )


class CountedTargets(TorchFunctionMode):
    """Hears what the targets of each example count where PyTorch takes a mean of cross-entropies: the weights of their
    classes, and nothing for those that are ignored. A mean over probabilities of classes divides by their number."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.counts = rows, list[Tensor]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own
        kwargs = kwargs or {}
        if func in (functional.cross_entropy, functional.nll_loss):
            given = signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            target, weight, ignored = (
                given.arguments[name] for name in ("target", "weight", "ignore_index")
            )
            if not target.is_floating_point():
                there = target != ignored
                counts = (
                    there.double()
                    if weight is None
                    else weight.double()[torch.where(there, target, 0)] * there
                )
                even = not counts.numel() % self.rows
                self.counts.append(
                    counts.reshape(self.rows, -1).sum(1) if even else counts.new_full((2,), nan)
                )
        return func(*args, **kwargs)

    @property
    def whole(self) -> float | None:
        """What all of them count, if all examples count the same; NaN if not, and None if nothing was heard."""
        if not self.counts:
            return None
        counts = sum(self.counts[1:], self.counts[0])
        even = float((counts - counts[0]).abs().max()) <= COUNT_EPS * float(counts.max())
        return float(counts.sum()) if even else nan


KNOWN = 64  # eps: the factor between two gradients that hardly differ
COUNT_EPS = 1e-6  # of class weights in float32, relative to them


@dataclass(frozen=True)
class CallShare:
    """The κ of a call of `examples` examples and `numbers` of outputs, what they count in their mean, if `loss=` gives
    that, and what their `targets` count, if it takes cross-entropies; κ is known to `room`, relative."""

    factor: float
    examples: int
    numbers: int
    room: float
    counts: Float[Tensor, " row"] | None = None
    targets: float | None = None


@dataclass(frozen=True)
class CallLoss:
    """The losses of the examples of one call."""

    loss: ExampleLoss
    function: Function
    call: ModelCall
    step: int

    def losses(self, outputs: Tensor) -> Float[Tensor, " row"]:
        """One for each example."""
        return losses_of(self.loss, outputs, SeenCall.of(self.call.inputs, self.call.names))[0]

    def at(self, weights: Weights) -> Float[Tensor, " row"]:
        """The losses at these weights."""
        return self.losses(self.function(weights, self.call.inputs))

    def share(self, weights: Weights, weighing: Weighing | None = None) -> CallShare:
        """The κ of the call; or a mistake, if this is not the loss that was trained with. What came back to its rows
        had been weighed so."""
        with torch.no_grad(), plain_kernels():
            outputs = self.function(weights, self.call.inputs)
        outputs = outputs.detach().requires_grad_()
        with CountedTargets(len(self.call.names)) as heard:
            counts = counts_of(self.loss, outputs, SeenCall.of(self.call.inputs, self.call.names))
        factors = None if weighing is None else weighing.factors(self.call.names, counts)

        def slope(multiple: float) -> Tensor:
            """∂/∂f of a multiple of the losses."""
            (found,) = torch.autograd.grad(multiple * self.losses(outputs).sum(), outputs)
            return (
                found
                if factors is None
                else found * factors.to(found).view(-1, *[1] * (found.dim() - 1))
            ).view(-1)

        assert self.call.gradient is not None
        theirs = self.call.gradient.reshape(-1)
        factor, missed = factor_between(slope(1.0), theirs)
        rounding, eps = cancelled(slope), torch.finfo(theirs.dtype).eps
        if not missed <= AGREES * eps + SPREAD * rounding:
            raise Mistake(
                f"step {self.step}: loss= is not the loss that was trained with: its gradient in the outputs is off by "
                f"{missed:.2g} of itself, whatever factor it has; give the loss of each example, as the loop has it"
            )
        room = KNOWN * eps + SPREAD * (missed + rounding)
        return CallShare(factor, len(self.call.names), outputs.numel(), room, counts, heard.whole)


def cancelled(gradient: Callable[[float], Tensor]) -> float:
    """What rounding does to a gradient of a multiple of a loss, relative to it. Terms may cancel: class weights of very
    different sizes leave far more than eps of what an example that is all but learned gives.

    >>> cancelled(lambda multiple: torch.tensor([multiple]))
    0.0
    """
    once = gradient(1.0)
    size = float(once.norm())
    return max(float((gradient(c) / c - once).norm()) for c in MULTIPLES) / size if size else 0.0


# --- What examples weigh in a loop that is carried out again, by what comes back to the outputs of its calls.
#
#     ∂L/∂fᵢ ← cwᵢ ∂L/∂fᵢ        c = 1 (fixed), or Σm/Σmw over the rows of the call (renormalised)
#
# with the m that each counts in the mean, 1 if `loss=` does not give another.
#
# Where a loss is a mean of one loss for each example, this trains as the loop would without those whose weight is
# zero, and the loop need not know of it. A call of which nothing is left adds nothing to the gradient.


@dataclass(frozen=True)
class Weighing:
    """The weights of some examples, by their names; all others weigh 1. `loss` gives what they count in a mean.

    >>> Weighing({"a": 0.0}).factors(["a", "b", "c", "b"]).tolist()
    [0.0, 1.3333333333333333, 1.3333333333333333, 1.3333333333333333]
    >>> Weighing({"a": 0.0}, "fixed").factors(["a", "b"]).tolist()
    [0.0, 1.0]
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    mean: MeanName = "renormalised"
    loss: ExampleLoss | None = None

    def left(self, names: Sequence[str]) -> Float[Tensor, " row"]:
        """The weight of every row."""
        return torch.tensor([self.weights.get(name, 1.0) for name in names], dtype=torch.float64)

    def factors(
        self, names: Sequence[str], counts: Float[Tensor, " row"] | None = None
    ) -> Float[Tensor, " row"]:
        """What comes back to every row is multiplied with this."""
        return self.left(names) * self.shared(names, counts)

    def shared(self, names: Sequence[str], counts: Float[Tensor, " row"] | None = None) -> float:
        """The c of a call; 1 where nothing is left that could share anything."""
        left = self.left(names)
        each = torch.ones_like(left) if counts is None else counts.to(left)
        whole = float((left * each).sum())
        return float(each.sum()) / whole if self.mean == "renormalised" and whole else 1.0

    def counts(self, outputs: Tensor, call: ModelCall) -> Float[Tensor, " row"] | None:
        """What the examples of a call that gave these outputs count, if that is given."""
        return (
            None
            if self.loss is None
            else counts_of(self.loss, outputs, SeenCall.of(call.inputs, call.names))
        )

    def silences(self, names: Sequence[str]) -> bool:
        """Whether nothing is left of a call."""
        return not self.left(names).any()
