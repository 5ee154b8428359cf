"""Run a followed loop again with different weights of its examples, by calling the
user's function `again=`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.sweep import MeanName
from ntkexp.effects.trajectory import FlatWeights, flat_like
from ntkexp.foreign_loop.call import (
    CPU,
    beginning_at,
    device_generators,
    generator_state,
)
from ntkexp.foreign_loop.outside import same_values
from ntkexp.foreign_loop.problem import LoopProblem
from ntkexp.foreign_loop.step import AbstractSteps
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.kernel import columns, plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress, Silent
from ntkexp.removal.retraining import AbstractRetraining, repeats, root_mean_square
from ntkexp.report.progress import Announced
from ntkexp.shapes import Weights
from ntkexp.text import counted, short

# --- The user's function `again=` trains, and calls `follow` itself. `trained_again`
# runs this function. The inner `follow` reads the new weights of the examples from an
# `AlteredLoop`, which it receives through a context variable. The trace of the first
# training stays unchanged.


Again: TypeAlias = Callable[[], object]
"""A function that seeds and runs the whole loop, and calls `follow` exactly once."""


@dataclass
class AlteredLoop:
    """Settings for the inner `follow` (see above), and the traces that this `follow`
    recorded."""

    weighing: Weighing  # the new weights of the examples
    folder: Path | None  # folder for the steps, or None if they are not stored
    traces: list[LoopProblem] = field(default_factory=list)


UNDER_WAY: ContextVar[AlteredLoop | None] = ContextVar("UNDER_WAY", default=None)


def altered_loop() -> AlteredLoop | None:
    """Return the loop that is being repeated with other example weights, or None."""
    return UNDER_WAY.get()


def trained_again(
    again: Again, weighing: Weighing, folder: Path | None = None
) -> LoopProblem:
    """Run the loop with the example weights `weighing`, and return its trace.

    Restore the states of random number generators at the end. Raise unless `again`
    followed exactly one loop."""
    altered = AlteredLoop(weighing, folder)
    devices = (CPU, *device_generators())
    token = UNDER_WAY.set(altered)
    try:
        with beginning_at({device: generator_state(device) for device in devices}):
            again()
    finally:
        UNDER_WAY.reset(token)
    if len(altered.traces) != 1:
        raise Mistake(
            f"again=: the function followed {counted(len(altered.traces), 'loop')}; let "
            "it run the loop once, inside ntkexp.follow"
        )
    return altered.traces[0]


# --- Comparison of the loop that runs again (the second loop) with the followed loop.
#
# Both loops must begin at the same network weights, and use the same examples at the
# same steps. If all examples have weight 1, both must also end at the same outputs.


GROUPS_SEED = 0  # seed of the random groups that are left out in retrainings


@dataclass(frozen=True)
class LoopAgain(AbstractRetraining):
    """Retrainings of a followed loop with other example weights, and the outputs of
    each trained network at the queries."""

    again: Again
    trace: LoopProblem  # the trace of the followed loop
    mean: MeanName  # how the mean of a batch changes with the weight of an example
    progress: AbstractProgress = field(default_factory=Silent)

    @property
    def unit_weights(self) -> Float[Tensor, " example"]:
        return torch.ones(len(self.trace.examples), dtype=torch.float64)

    @property
    def seed(self) -> int:
        return GROUPS_SEED

    @cached_property
    def flat(self) -> FlatWeights:
        """The order in which the weight tensors are concatenated to one vector."""
        return flat_like(self.trace.steps.end)

    @cached_property
    def whole_end(self) -> Float[Tensor, " weight"]:
        return self.end_with({})

    @cached_property
    def original_outputs(self) -> Float[Tensor, "point out"]:
        return self.outputs_at(self.whole_end)

    def final_weights(
        self, weights: Float[Tensor, "training example"]
    ) -> Iterator[Float[Tensor, " weight"]]:
        """Train once for each row of example weights, and yield the final network
        weights.

        The training with all weights 1 runs only once.
        """
        names = list(self.trace.examples)
        announced = Announced(
            "ntkexp: training without examples", len(weights), self.progress
        )
        for row in weights:
            changed = (row != 1).nonzero().flatten().tolist()
            end = self.whole_end
            if changed:
                end = self.end_with(
                    {names[index]: float(row[index]) for index in changed}
                )
            announced.step()
            yield end
        announced.stop()

    def end_with(self, weights: Mapping[str, float]) -> Float[Tensor, " weight"]:
        return self.flat.vector(self.train(weights).steps.end)

    def outputs_at(self, end: Float[Tensor, " weight"]) -> Float[Tensor, "point out"]:
        """Return the outputs at the queries, for the network weights `end`."""
        with torch.no_grad(), plain_kernels():
            return columns(
                self.trace.function, self.flat.weights(end), self.trace.queries
            ).detach()

    def train(
        self, weights: Mapping[str, float], folder: Path | None = None
    ) -> LoopProblem:
        """Run the loop with example weights `weights`, and return its trace."""
        weighing = Weighing(weights, self.mean, self.trace.loss)
        repeated = trained_again(self.again, weighing, folder)
        self.refuse_other(repeated)
        return repeated

    def refuse_other(self, repeated: LoopProblem) -> None:
        """Raise if the second loop begins at other weights, or uses other examples."""
        ours = self.trace.steps
        theirs = repeated.steps
        refuse_other_start(ours.start(0), theirs.start(0))
        refuse_other_examples(ours, theirs)

    def refuse_other_end(
        self,
        repeated: Float[Tensor, "point out"],
        changes: Float[Tensor, "group point out"],
    ) -> None:
        """Raise if the second loop, with all example weights 1, ends at other outputs
        than the first loop."""
        end = self.flat.vector(self.trace.steps.end)
        gap = repeated - self.outputs_at(end)
        if not repeats(gap, changes):
            raise Mistake(
                "again=: repeated with all examples, the loop ends at outputs that are "
                f"{short(root_mean_square(gap))} away from those of the first run, and leaving "
                f"out examples changes them by {short(root_mean_square(changes))}; let the "
                "function seed everything random, or take smaller steps"
            )


def refuse_other_start(ours: Weights, theirs: Weights) -> None:
    """Raise if the second loop begins at other weights."""
    different = sorted(
        name
        for name in ours
        if name not in theirs or not same_values(theirs[name], ours[name])
    )
    if not different and len(ours) == len(theirs):
        return
    reason = f"'{different[0]}' differs" if different else "it trains more parameters"
    raise Mistake(
        "again=: the repeated loop begins at other weights than the followed loop "
        f"({reason}); let the function build its model, and seed it with "
        "torch.manual_seed"
    )


def refuse_other_examples(ours: AbstractSteps, theirs: AbstractSteps) -> None:
    """Raise if the second loop uses other examples,
    or the same examples in another order."""
    if len(ours) != len(theirs) or list(ours.names()) != list(theirs.names()):
        raise Mistake(
            f"again=: the followed loop of {len(ours)} steps and the repeated loop of "
            f"{len(theirs)} steps use other examples, or another order; let the "
            "function seed the order of its batches"
        )
