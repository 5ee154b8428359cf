"""What leaving each example of a followed loop out would change in the outputs at the queries: sweeps back over it.

Queries are taken a chunk at a time, so many that what their outputs feel fits into memory. Where the loop lies in a
folder, so does now and then how far the sweep has come: one that was killed goes on there, to the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.mean import Effects, MeanName, mean_of
from ntkexp.effects.sweep import AdjointSweep, sweep_from
from ntkexp.effects.sweep_plan import SweepPlan
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.kernel.record.digest import digest
from ntkexp.kernel.record.inputs import part
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.mistake import NoPlace
from ntkexp.shapes import Function, Inputs

SECONDS = 60.0
"""How long a sweep goes on before it is kept again."""


@dataclass(kw_only=True)
class FollowedSweep:
    """Where the sweeps stand: `chunks` are the effects of the queries that are behind, `sweep` is that of the next."""

    training: FollowedTraining
    function: Function
    queries: Inputs
    kind: Effects
    mean: MeanName
    plan: SweepPlan
    files: TraceFolder | None
    chunks: list[Tensor] = field(default_factory=list)
    sizes: list[Tensor] = field(default_factory=list)  # Σ‖a‖ from the end on, of each chunk
    sweep: AdjointSweep | None = None
    kept_at: float = field(default_factory=time.monotonic)

    def effects(self) -> Float[Tensor, "probe out example"]:
        """Sweep back what is left."""
        begun = self.restored()
        while len(self.chunks) * self.plan.chunk < self.plan.points:
            self.sweep = self.begin()
            if begun is not None:
                self.sweep.restore(begun)
                begun = None
            for _ in self.sweep.steps_back():
                self.keep_now_and_then()
            self.chunks.append(self.sweep.effects)
            self.sizes.append(torch.tensor(self.sweep.sizes, dtype=torch.float64))
            self.sweep = None
        self.keep()
        return torch.cat(self.chunks).view(self.plan.points, -1, self.training.examples)

    @property
    def growth(self) -> float:
        """How much more outputs feel of the weights on the way back, at most, than at the end."""
        total = torch.stack(self.sizes).sum(0)
        return float(total.max() / total[0]) if total.isfinite().all() else float("inf")

    def begin(self) -> AdjointSweep:
        """The sweep of the next chunk, before its first step."""
        first = len(self.chunks) * self.plan.chunk
        rows = range(first, min(first + self.plan.chunk, self.plan.points))
        vectors = torch.cat([self.end_gradient(part(self.queries, slice(k, k + 1))) for k in rows])
        mean, one_step = mean_of(self.kind, self.mean), self.kind == "one_step"
        return sweep_from(self.training, vectors, mean, self.plan.together, one_step=one_step)

    def end_gradient(self, query: Inputs) -> Float[Tensor, "out weight"]:
        """∂f/∂θ_T of the outputs at one query."""
        flat = self.training.flat
        with plain_kernels():
            found: Tensor = jacrev(lambda at: self.function(flat.weights(at), query).reshape(-1))(self.training.end)
        return found

    @cached_property
    def of(self) -> Mapping[str, object]:
        """What the sweep is of, as far as it decides whether one that was kept can go on."""
        last = self.training.step(self.training.length - 1)
        losses = [batch.losses(self.training.end).detach() for batch in last.batches]
        asked = [self.training.length, self.plan.chunk, self.mean, self.kind]
        return {"asked": asked, "seen": digest([self.training.end, *losses]).hex()}

    def keep_now_and_then(self) -> None:
        """Keep how far the sweep has come, if that was long ago."""
        if time.monotonic() - self.kept_at >= SECONDS:
            self.keep()
            self.kept_at = time.monotonic()

    def keep(self) -> None:
        """Keep how far the sweep has come; a full disk is no reason to end it."""
        if self.files is None:
            return
        state = {
            "of": self.of,
            "chunks": self.chunks,
            "sizes": self.sizes,
            "norm": self.training.norm,
            "sweep": None if self.sweep is None else self.sweep.state,
        }
        with suppress(NoPlace):
            self.files.write(self.files.sweep, state)

    def restored(self) -> Mapping[str, Any] | None:
        """Stand where the sweep that is kept stood; the state of the chunk that was under way."""
        if self.files is None or not self.files.whole(self.files.sweep):
            return None
        state = self.files.read(self.files.sweep)
        if state["of"] != self.of:
            return None
        device = self.training.end.device
        self.chunks, self.sizes = [each.to(device) for each in state["chunks"]], list(state["sizes"])
        self.training.norm = state["norm"]
        begun: Mapping[str, Any] | None = state["sweep"]
        return begun
