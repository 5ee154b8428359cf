"""BatchNorm in training mode: running statistics,
and their effect on the outputs at the queries.

Queries are evaluated with the running statistics B. Each call of the model in training
mode updates B; optimizer steps do not. The change of the outputs f from step to step is
therefore the sum of two parts:

    f(θ₁, B₁) − f(θ₀, B₀) = [f(θ₁, B₀) − f(θ₀, B₀)] + [f(θ₁, B₁) − f(θ₁, B₀)]
                            explained by the secant      `statistics`

`batch_gradients` computes per-example gradients through a batch that BatchNorm couples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ntkexp.foreign_loop.closing import share_of
from ntkexp.mistake import Mistake, in_short
from ntkexp.model.functional import named_layers
from ntkexp.shapes import Weights
from ntkexp.text import short

if TYPE_CHECKING:
    import xarray as xr

BatchNormMode: TypeAlias = Literal["exact", "constant"]
"""How per-example gradients treat the batch mean and variance: "exact" differentiates
them, "constant" holds them constant."""


BATCH_NORM_MODES: tuple[BatchNormMode, ...] = ("exact", "constant")


def checked_mode(mode: str) -> BatchNormMode:
    """Return the mode. Raise if it is unknown.

    >>> checked_mode("frozen")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: batch_norm='frozen': give 'exact' or 'constant'
    """
    for known in BATCH_NORM_MODES:
        if isinstance(mode, str) and mode == known:
            return known
    raise Mistake(f"batch_norm={in_short(mode)}: give 'exact' or 'constant'")


# --- The BatchNorm layers of a model, and their buffers.


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    layers = named_layers(model)
    return {
        name: layer for name, layer in layers.items() if isinstance(layer, _BatchNorm)
    }


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics (buffers) of all BatchNorm layers, by name.

    >>> list(running_statistics(nn.Sequential(nn.BatchNorm1d(2))))
    ['0.running_mean', '0.running_var', '0.num_batches_tracked']
    """
    return statistics_of(batch_norms(model))


def statistics_of(layers: Mapping[str, _BatchNorm]) -> dict[str, Tensor]:
    """Return the buffers of some BatchNorm layers, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, layer in layers.items()
        for name, buffer in layer._buffers.items()
        if buffer is not None
    }


def copies_of(statistics: Weights) -> Weights:
    return {name: value.clone() for name, value in statistics.items()}


def numbers_of(statistics: Weights) -> Weights:
    """Return the running means and variances, without `num_batches_tracked`."""
    return {
        name: value for name, value in statistics.items() if value.is_floating_point()
    }


def couples(module: nn.Module) -> bool:
    """Return True if a BatchNorm layer normalises by the statistics of the batch.

    >>> couples(nn.BatchNorm1d(2)), couples(nn.BatchNorm1d(2).eval())
    (True, False)
    """
    return any(
        layer.training or layer.running_mean is None
        for layer in batch_norms(module).values()
    )


def refuse_instance_statistics(step: int, layers: Mapping[str, nn.Module]) -> None:
    """Raise if an instance norm updates running statistics, which is not supported.

    >>> refuse_instance_statistics(0, {"": nn.InstanceNorm1d(2, track_running_stats=True)})
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: step 0: layer '' (InstanceNorm1d) updates running statistics, which is not supported; set \
track_running_stats=False, or put it in eval()
    """
    for name, layer in layers.items():
        if (
            isinstance(layer, _InstanceNorm)
            and layer.training
            and layer.running_mean is not None
        ):
            raise Mistake(
                f"step {step}: layer '{name}' ({type(layer).__name__}) updates running "
                "statistics, which is not supported; set track_running_stats=False, or "
                "put it in eval()"
            )


# --- Running statistics of a followed loop. Every call of the model in training mode
# updates them, with or without gradients.


@dataclass
class RunningStatistics:
    """The running statistics of the model while its loop is followed."""

    model: nn.Module
    processes: int = 1  # number of processes that train together
    moves: bool = False  # True if a call had a BatchNorm layer in training mode
    latest: Weights = field(default_factory=dict)  # statistics after the latest call
    at_step: Weights = field(default_factory=dict)  # statistics after the latest step

    def __post_init__(self) -> None:
        self.latest = copies_of(running_statistics(self.model))
        self.at_step = self.latest

    def begin_call(self, step: int, *, with_gradients: bool) -> None:
        """Record that a call of the model begins. Raise if anything but an earlier call
        has changed the statistics."""
        layers = batch_norms(self.model)
        now = statistics_of(layers)
        if now.keys() != self.latest.keys():
            raise Mistake(
                f"step {step}: a BatchNorm layer was added, removed or replaced after "
                "following began; begin to follow after this change"
            )
        trains = bool(self.latest) and any(layer.training for layer in layers.values())
        if trains and not self.moves:
            self.refuse_kinds(step)
            self.moves = True
        if self.moves and (trains or with_gradients):
            self.refuse_other(step, now)

    def end_call(self) -> tuple[Weights, Weights] | None:
        """Return the running statistics before and after the latest call. Return None
        if no call so far had a BatchNorm layer in training mode."""
        if not self.moves:
            return None
        before = self.latest
        now = running_statistics(self.model)
        if any(not torch.equal(buffer, before[name]) for name, buffer in now.items()):
            self.latest = copies_of(now)
        return before, self.latest

    def end_step(self) -> tuple[Weights, Weights] | None:
        """Return the running statistics after the previous step and after this step.
        Return None if no call so far had a BatchNorm layer in training mode."""
        before = self.at_step
        self.at_step = self.latest
        return (before, self.at_step) if self.moves else None

    def refuse_writes(self, step: int) -> None:
        """Raise if anything but a call of the model has changed the statistics."""
        if self.moves:
            self.refuse_other(step, running_statistics(self.model))

    def refuse_other(self, step: int, now: Weights) -> None:
        """Raise if the present statistics are not those after the latest call."""
        for name, buffer in now.items():
            if not torch.equal(buffer, self.latest[name]):
                raise Mistake(
                    f"step {step}: the running statistics '{name}' were changed by "
                    "something other than a call of the model (a load, an average, a "
                    "reset?), which cannot be followed; change them before or after "
                    "the loop"
                )

    def refuse_kinds(self, step: int) -> None:
        """Raise if several processes train together, or if the model has a
        SyncBatchNorm in training mode."""
        if self.processes > 1:
            raise Mistake(
                f"step {step}: BatchNorm in training mode cannot be followed in "
                f"{self.processes} processes, because each has its own statistics; put "
                "these layers in eval(), or train in one process"
            )
        for name, layer in batch_norms(self.model).items():
            if isinstance(layer, nn.SyncBatchNorm) and layer.training:
                raise Mistake(
                    f"step {step}: layer '{name}' (SyncBatchNorm) uses the batches of "
                    "all processes, which cannot be followed; put it in eval(), or use "
                    "a BatchNorm in its place"
                )


# --- The update of the statistics in a replayed call.


# relative rounding error of sums in a different order, in units of eps
BATCH_STATISTICS_TOLERANCE = 1e3
# relative rounding error of sums under casts, in units of the lower precision's eps
BATCH_CAST_TOLERANCE = 8


@contextmanager
def beginning_with(
    module: nn.Module,
    statistics: tuple[Weights, Weights] | None,
    step: int,
    cast_eps: float,
) -> Iterator[None]:
    """Set the running statistics to their values before a call,
    for a replay of the call.

    On exit, raise unless the replay has updated them to the recorded values, and
    restore the previous statistics of the module. If `statistics` is None, do nothing.
    """
    if statistics is None:
        yield
        return
    before, after = statistics
    buffers = running_statistics(module)
    original = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
        yield
        for name, buffer in buffers.items():
            refuse_other_update(name, buffer, before[name], after[name], step, cast_eps)
    finally:
        for name, buffer in buffers.items():
            buffer.copy_(original[name])


def refuse_other_update(
    name: str, buffer: Tensor, before: Tensor, after: Tensor, step: int, cast_eps: float
) -> None:
    """Raise if a replayed update of a buffer differs from the recorded one by more than
    rounding."""
    if buffer.is_floating_point():
        gap = float((buffer - after).norm())
        size = float(after.norm() + before.norm())
        relative = BATCH_STATISTICS_TOLERANCE * torch.finfo(buffer.dtype).eps
        tolerance = max(relative, BATCH_CAST_TOLERANCE * cast_eps) * size
    else:
        gap = float((buffer - after).abs())
        tolerance = 0.0
    if not gap <= tolerance:
        raise Mistake(
            f"step {step}: the replay of a call leads to other running statistics "
            f"'{name}' than those of the loop (difference {short(gap)}); were they "
            "changed during the call?"
        )


# --- A sentence for reports: the effect of running statistics.


def batch_norm_sentence(attribution: xr.Dataset) -> str:
    """Return a sentence on the effect of running statistics and coupling, or an empty
    string if no statistics were updated."""
    if "statistics" not in attribution:
        return ""
    share = short(share_of(attribution, "statistics"))
    moved = (
        f"running statistics of BatchNorm caused {share} of the change (`statistics`)"
    )
    if "coupling" not in attribution:
        return f"{moved}, which belongs to no example"
    return (
        f"{moved}, and effects of examples on one another through batch statistics "
        f"caused {short(share_of(attribution, 'coupling'))} of it (`coupling`), which batch_norm='exact' "
        "divides among the examples; if this exceeds the change, as under Adam with a "
        "bias before a norm, single contributions mean little"
    )
