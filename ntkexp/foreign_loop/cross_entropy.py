"""∂L/∂f of a cross-entropy, in a compact form.

The cross-entropy of logits f with a target t and a weight w for each row is

    L = Σ_r w_r (log Σ_k exp f_rk − f_{r t_r})
    ∂L/∂f_rk = w_r (p_rk − 1[k = t_r]),        p = softmax(f)

∂L/∂f has as many numbers as f. In a language model these are 50,000 numbers for each
token. They follow from f, t and w, and a replay computes f anyway. So the trace stores
only t and w, if the gradient computed from them equals that of autograd bit by bit. It
stores the whole gradient for small outputs (see `Logits.of`), under autocast, and for
other losses, for example with label smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

MIN_BYTES = 2**20  # smaller gradients are stored as they are
MIN_CLASSES = 64  # so are the gradients of outputs with fewer classes
ROWS_AT_ONCE_BYTES = 2**24  # intermediate results have at most this size
# The weight of a row is estimated from a rounded product. The estimate may be wrong by
# some units in the last place.
UNITS = (1, -1, 2, -2)
# If a weight moves by these units, w p moves by fewer than so many units.
GRADIENT_UNITS = 16


@dataclass(frozen=True)
class CrossEntropyGradient:
    """The targets and weights of a cross-entropy, from which its gradient follows."""

    targets: Int[Tensor, " row"]
    weights: Float[Tensor, " row"]

    def at(self, logits: Float[Tensor, "*row class"]) -> Float[Tensor, "*row class"]:
        """Return ∂L/∂f at these logits.

        >>> gradient = CrossEntropyGradient(torch.tensor([1]), torch.tensor([2.0]))
        >>> gradient.at(torch.zeros(1, 2))
        tensor([[ 1., -1.]])
        """
        rows = logits.detach().flatten(0, -2)
        gradient = torch.empty_like(rows)
        for some in pieces(rows):
            gradient[some] = gradient_of(
                rows[some], self.targets[some], self.weights[some]
            )
        return gradient.view(logits.shape)

    @property
    def content(self) -> dict[str, Tensor]:
        """The stored form."""
        return {"targets": self.targets, "weights": self.weights}

    def to(self, device: torch.device) -> CrossEntropyGradient:
        return CrossEntropyGradient(self.targets.to(device), self.weights.to(device))


OutputGradient: TypeAlias = "Tensor | CrossEntropyGradient"
"""∂L/∂f of a call, [example, out], or its compact form."""


@dataclass
class Logits:
    """The outputs of a call, held until their gradient is known."""

    values: Float[Tensor, "*row class"]
    writes: int = field(init=False)  # `_version` after the call

    def __post_init__(self) -> None:
        self.writes = self.values._version

    @classmethod
    def of(cls, outputs: Tensor) -> Logits | None:
        """Hold the outputs of a call if they are large enough that compressing their
        gradient saves memory."""
        is_large = (
            outputs.dim() >= 2
            and outputs.shape[-1] >= MIN_CLASSES
            and outputs.nbytes >= MIN_BYTES
        )
        if is_large and outputs.dtype in (torch.float32, torch.float64):
            return cls(outputs.detach())
        return None

    def compressed(self, gradient: Tensor) -> CrossEntropyGradient | None:
        """Return the compact form of ∂L/∂f, or None if no targets and weights reproduce
        it bit by bit."""
        if self.values._version != self.writes:  # the loop has overwritten the outputs
            return None
        logits = self.values.flatten(0, -2)
        targets = logits.new_empty(len(logits), dtype=torch.long)
        weights = logits.new_empty(len(logits))
        gradients = gradient.detach().reshape(logits.shape)
        for some in pieces(logits):
            compact = fitted(logits[some], gradients[some])
            if compact is None:
                return None
            targets[some] = compact.targets
            weights[some] = compact.weights
        return CrossEntropyGradient(targets, weights)


def pieces(rows: Float[Tensor, "row class"]) -> Iterator[slice]:
    """Divide rows into pieces of limited size."""
    row_bytes = rows.shape[1] * rows.element_size()
    step = max(1, ROWS_AT_ONCE_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


class LossGraph(NamedTuple):
    """The cross-entropy of each row, with its autograd graph."""

    logits: Float[Tensor, "row class"]
    log_p: Float[Tensor, "row class"]
    losses: Float[Tensor, " row"]

    @classmethod
    def of(
        cls, logits: Float[Tensor, "row class"], targets: Int[Tensor, " row"]
    ) -> LossGraph:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            log_p = leaf.log_softmax(1)
            losses = functional.nll_loss(log_p, targets, reduction="none")
        return cls(leaf, log_p, losses)


def gradient_of(
    logits: Float[Tensor, "row class"],
    targets: Int[Tensor, " row"],
    weights: Float[Tensor, " row"],
) -> Float[Tensor, "row class"]:
    """Return ∂L/∂f, by the operations with which autograd computes it."""
    graph = LossGraph.of(logits, targets)
    (gradient,) = torch.autograd.grad(graph.losses, graph.logits, weights)
    return gradient


def fitted(
    logits: Float[Tensor, "row class"], gradient: Float[Tensor, "row class"]
) -> CrossEntropyGradient | None:
    """Find the target and the weight of each row. Return None if they do not reproduce
    the gradient bit by bit.

    The entry of the target, w(p − 1), is the only negative one, unless p = 1 there. The
    largest entry is w p, so w is this entry divided by p, up to rounding."""
    least = gradient.min(1)
    targets = least.indices
    if not bool((least.values < 0).all()):
        targets = targets.where(least.values < 0, logits.argmax(1))
    graph = LossGraph.of(logits, targets)

    def gradient_at(weights: Float[Tensor, " row"]) -> Float[Tensor, "row class"]:
        (trial,) = torch.autograd.grad(
            graph.losses, graph.logits, weights, retain_graph=True
        )
        return trial

    def has_other_bits(weights: Float[Tensor, " row"]) -> Bool[Tensor, " row"]:
        return (gradient_at(weights) != gradient).any(1)

    largest = gradient.max(1)
    p = graph.log_p.detach().gather(1, largest.indices[:, None])[:, 0].exp()
    estimates = (largest.values / p).nan_to_num(0.0)  # 0/0 if p is 0 elsewhere
    weights = estimates
    trial = gradient_at(weights)
    is_wrong = (trial != gradient).any(1)
    if bool(is_wrong.any()):
        # For other losses, such as with label smoothing, w p is far from every row of
        # the gradient. Then moving w by some units does not give an equal row.
        gap = (trial - gradient).abs().scatter_(1, targets[:, None], 0.0)
        limits = torch.finfo(gradient.dtype)
        unit = limits.eps * gradient.abs().clamp(min=limits.tiny)
        is_far = (gap > GRADIENT_UNITS * unit).any(1)
        if bool((is_far | (weights <= 0)).all()) and bool(is_far.any()):
            return None
    for units in UNITS:
        if not bool(is_wrong.any()):
            return CrossEntropyGradient(targets, weights)
        weights = weights.where(~is_wrong, moved(estimates, units))
        is_wrong = has_other_bits(weights)

    # If p and w p are nearly 0, their quotient has few digits. In a mean, all rows have
    # the same weight, so try the median weight of the rows that agree.
    common = weights[~is_wrong & (weights > 0)]
    if len(common):
        weights = weights.where(~is_wrong, common.median())
        is_wrong = has_other_bits(weights)
    if bool(is_wrong.any()):
        return None
    return CrossEntropyGradient(targets, weights)


def moved(numbers: Tensor, units: int) -> Tensor:
    """Return the floating-point numbers that are `units` places further from zero.

    >>> moved(torch.tensor([1.0]), 1) == 1 + torch.finfo(torch.float32).eps
    tensor([True])
    """
    towards = torch.full_like(numbers, torch.inf if units > 0 else 0.0).copysign(
        numbers
    )
    for _ in range(abs(units)):
        numbers = torch.nextafter(numbers, towards)
    return numbers


def restored(
    content: Tensor | Mapping[str, Tensor], device: torch.device
) -> OutputGradient:
    """Return a stored ∂L/∂f on a device."""
    if isinstance(content, Tensor):
        return content.clone().to(device)
    return CrossEntropyGradient(
        content["targets"].clone(), content["weights"].clone()
    ).to(device)
