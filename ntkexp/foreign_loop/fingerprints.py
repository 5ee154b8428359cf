"""Fingerprints of outputs: random projections that show
if a replay returns the outputs of the loop.

    σ_im = Σ_k r_k f_imk        r_k ~ N(0, 1), fixed

i is the example, k is the index on the last axis of the outputs, and m is the index on
all axes between the first and the last.

A model may depend on objects that are not tensors: a number in a dict, a class
attribute, a global variable, a hook, a replaced `forward`. If such an object changes,
gradients often change only by a factor, which looks like clipping. The fingerprints of
the outputs reveal the change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, prod

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.kernel import plain_kernels
from ntkexp.kernel.record.independence import with_noise
from ntkexp.kernel.record.tape import map_tensors
from ntkexp.mistake import Mistake
from ntkexp.model.functional import as_rows
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import normal, stream

# relative rounding error of outputs if torch sums in another order, in units of eps
OUTPUT_TOLERANCE = 1e3
# relative rounding error of outputs under casts, in units of the lower precision's eps
CAST_TOLERANCE = 8
# If weights and inputs are perturbed by one eps, the outputs change by δ. Rounding may
# change the outputs by up to this multiple of δ.
NOISE_FACTOR = 64.0
CAST_NOISE_FACTOR = 2.0  # used instead of NOISE_FACTOR under casts
NOISE_REPEATS = 4  # number of repeated calls, which detect hidden randomness

FINGERPRINT_VECTORS: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
"""The random vectors r drawn so far, by length, dtype and device."""

CHANGED = (
    "something other than a tensor has changed (a number in a dict, a class or a "
    "global variable, a hook, a replaced 'forward'?); make it an input of the model, "
    "or begin to follow after the change"
)


def fingerprint(outputs: Tensor) -> Float[Tensor, "example row"]:
    """Return the fingerprint σ_im of outputs, one row per example.

    >>> fingerprint(torch.ones(2, 3, 5)).shape, fingerprint(torch.ones(2)).shape
    (torch.Size([2, 3]), torch.Size([2, 1]))
    """
    values = outputs.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.dim() == 1:
        values = values[:, None]
    if values.element_size() < torch.float32.itemsize:
        values = values.float()
    kind = values.device.type
    autocast_off: AbstractContextManager[object] = nullcontext()
    if torch.is_autocast_enabled(kind):
        autocast_off = torch.autocast(kind, enabled=False)
    with autocast_off:
        count = values.shape[-1]
        if values.dim() == 2:
            return torch.mv(values, fingerprint_vector(count, values))[:, None]
        return values.reshape(len(values), -1, count) @ fingerprint_vector(
            count, values
        )


def fingerprint_vector(count: int, like: Tensor) -> Float[Tensor, " count"]:
    """Return the random vector r of length `count`,
    with the dtype and device of `like`."""
    key = (count, like.dtype, like.device)
    if key not in FINGERPRINT_VECTORS:
        FINGERPRINT_VECTORS[key] = normal(stream("outputs", count), count).to(like)
    return FINGERPRINT_VECTORS[key]


def fingerprint_distance(
    outputs: Float[Tensor, "example ..."],
    recorded: Float[Tensor, "recorded row"],
    joined: Sequence[tuple[int, ...]] = (),
) -> Float[Tensor, ""]:
    """Return the distance between the fingerprint of outputs and `recorded`, or infinity
    if the shapes differ or a number is not finite.

    `joined` are the shapes of the outputs, if several are concatenated.

    >>> outputs = torch.ones(2, 3)
    >>> fingerprint_distance(outputs, fingerprint(outputs))
    tensor(0.)
    >>> fingerprint_distance(outputs, torch.ones(3, 1))
    tensor(inf)
    """
    infinite = torch.full((), inf, device=outputs.device)
    if len(outputs) != len(recorded):
        return infinite
    if joined:
        widths = [prod(shape[1:]) for shape in joined]
        parts = [
            fingerprint(part.view(shape))
            for part, shape in zip(torch.split(outputs, widths, 1), joined, strict=True)
        ]
        ours = torch.cat(parts, 1)
    elif outputs.numel() % max(1, recorded.numel()):
        return infinite
    else:
        ours = fingerprint(outputs.reshape(*recorded.shape, -1))
    distance = torch.linalg.vector_norm(ours - recorded.to(ours))
    return torch.where(distance.isfinite(), distance, infinite)


def relative_distance(
    outputs: Float[Tensor, "example ..."],
    recorded: Float[Tensor, "recorded row"],
    joined: Sequence[tuple[int, ...]] = (),
) -> float:
    """Return ‖σ(f) − σ‖/‖σ‖ for outputs f and a recorded fingerprint σ. Arguments are
    those of `fingerprint_distance`."""
    distance = fingerprint_distance(outputs, recorded, joined)
    gap, size = read_numbers([distance, recorded.norm()])
    return gap / size if size and isfinite(gap) else gap


@dataclass(frozen=True)
class Replayed:
    """The outputs of a replayed call, and the function that was evaluated."""

    function: Function
    weights: Weights
    inputs: Inputs
    outputs: Float[Tensor, "example ..."]
    cast_eps: float = 0.0  # eps of the lower precision, under casts
    # shapes of the outputs, if several are concatenated
    joined: Sequence[tuple[int, ...]] = ()

    def unexplained_distance(self, recorded: Float[Tensor, "example row"]) -> float:
        """Return the relative distance between the fingerprint of these outputs and
        `recorded`, the fingerprint of the loop's outputs. Return 0 if rounding explains
        the distance.

        The bound on rounding errors is relative to the norm of the outputs. If terms of
        the outputs cancel, rounding errors can be larger. The bound is then a multiple
        of the change that noise in weights and inputs causes."""
        distance = fingerprint_distance(self.outputs, recorded, self.joined)
        gap, size = read_numbers([distance, self.outputs.norm()])
        eps = torch.finfo(self.outputs.dtype).eps
        tolerance = max(OUTPUT_TOLERANCE * eps, CAST_TOLERANCE * self.cast_eps)
        if gap <= tolerance * size or gap <= self.noise(eps):
            return 0.0
        return gap / size if size else gap

    def noise(self, eps: float) -> float:
        """Return a bound on the rounding error of the outputs. The bound is a multiple
        of the change that relative noise in weights and inputs causes.

        Return 0 if the function has hidden randomness. Under casts, the multiple is
        smaller, because a replay with the same kernels rounds in the same way."""
        noisy = partial(with_noise, stream("outputs", 0), max(eps, self.cast_eps))
        near_weights = {name: noisy(weight) for name, weight in self.weights.items()}
        near_inputs = map_tensors(noisy, self.inputs)
        with torch.no_grad(), plain_kernels():
            here = as_rows(self.function(self.weights, self.inputs))
            there = as_rows(self.function(near_weights, near_inputs))
            repeats = [
                as_rows(self.function(self.weights, self.inputs))
                for _ in range(NOISE_REPEATS)
            ]
        change = float((there - here).norm())
        repeat_change = max(float((repeat - here).norm()) for repeat in repeats)
        is_deterministic = repeat_change <= change / NOISE_FACTOR  # False for NaN
        if not isfinite(change) or not is_deterministic:
            return 0.0
        return change * (CAST_NOISE_FACTOR if self.cast_eps else NOISE_FACTOR)


@dataclass
class OutputsAtEnds:
    """Fingerprints of the outputs of the user's model at the queries, at the start and
    the end of the loop. With `measure=`, they are fingerprints
    of the values of the measure."""

    start: Tensor | None = None
    # at the end of the loop; None if the model was not evaluated after its last step
    end: Tensor | None = None
    steps: int = -1  # number of steps before the evaluation at the end

    def check(
        self,
        began: Sequence[Replayed],
        ended: Sequence[Replayed],
        steps: int,
        *,
        measured: bool = False,
    ) -> None:
        """Raise unless a replay returns the outputs of the user's model, at the start
        and at the end of the loop. Skip the end if no fingerprint was recorded after
        the last step.

        Args:
            began: replays at the start of the loop,
                for example with and without autocast.
            ended: replays at the end of the loop.
            steps: number of steps before the end.
            measured: True if the outputs are values of a measure.
        """
        self.refuse_other("began", self.start, began, measured=measured)
        if steps == self.steps:
            self.refuse_other("ended", self.end, ended, measured=measured)

    def refuse_other(
        self,
        when: str,
        recorded: Tensor | None,
        replayed: Sequence[Replayed],
        *,
        measured: bool,
    ) -> None:
        """Raise unless one of the replays has the fingerprint `recorded`."""
        if recorded is None:
            return
        gap = min(candidate.unexplained_distance(recorded) for candidate in replayed)
        if gap:
            perhaps = "is measure= the followed one? Or " if measured else ""
            raise Mistake(
                f"when following {when}, the model returned other outputs at the "
                "queries than it does now at the same weights (relative difference "
                f"{gap:.2g}); {perhaps}{CHANGED}"
            )
