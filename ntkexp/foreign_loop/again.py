"""A loop is carried out again with other weights of its examples, by the function that its user gives."""

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
from ntkexp.foreign_loop.call import CPU, beginning_at, device_generators, generator_state
from ntkexp.foreign_loop.problem import LoopProblem
from ntkexp.foreign_loop.user_loss import Weighing
from ntkexp.kernel.record.taping import columns, plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress, Silent
from ntkexp.removal.retraining import AbstractRetraining
from ntkexp.report.progress import Announced
from ntkexp.text import counted, short

# --- A loop is carried out again, by the function that its user gives, and `follow` inside it learns what has
# changed: what examples weigh, and where the steps are kept, so that the first trace stays as it is.


Again: TypeAlias = Callable[[], object]
"""A function that carries a whole loop out, from its seeds on, with one `follow` in it."""


@dataclass
class AlteredLoop:
    """What is otherwise: weights of examples; and steps are kept in `place`, or not at all. `traces` were followed."""

    weighing: Weighing
    place: Path | None
    traces: list[LoopProblem] = field(default_factory=list)


UNDER_WAY: ContextVar[AlteredLoop | None] = ContextVar("UNDER_WAY", default=None)


def altered_loop() -> AlteredLoop | None:
    """What differs in the loop that is under way, if it is carried out again."""
    return UNDER_WAY.get()


def trained_again(again: Again, weighing: Weighing, place: Path | None = None) -> LoopProblem:
    """The trace of the loop, carried out with these weights of its examples."""
    asked = AlteredLoop(weighing, place)
    token = UNDER_WAY.set(asked)
    try:
        with beginning_at({place: generator_state(place) for place in (CPU, *device_generators())}):
            again()
    finally:
        UNDER_WAY.reset(token)
    if len(asked.traces) != 1:
        raise Mistake(
            f"again=: the function followed {counted(len(asked.traces), 'loop')}; let it "
            "carry out the one that was followed, with ntkexp.follow in it"
        )
    return asked.traces[0]


# --- The loop of a trace, carried out again with other weights of its examples.
#
# It has to be the same loop: it begins at the same weights, sees the same examples at the same steps, and with
# all of them ends where the trace does. What the function prints or writes, it prints or writes each time.


REPEATED = 0.01
"""With all examples the loop must end where it did, to this share of what leaving some of them out changes."""


SEED = 0  # of the groups that are left out by chance


@dataclass(frozen=True)
class LoopAgain(AbstractRetraining):
    """`again` carries out the loop that the trace is of; outputs are those at its queries."""

    again: Again
    trace: LoopProblem
    mean: MeanName
    progress: AbstractProgress = field(default_factory=Silent)

    @property
    def everyone(self) -> Float[Tensor, " example"]:
        return torch.ones(len(self.trace.examples), dtype=torch.float64)

    @property
    def seed(self) -> int:
        return SEED

    @cached_property
    def flat(self) -> FlatWeights:
        """How weights are one vector."""
        return flat_like(self.trace.steps.end)

    @cached_property
    def whole_end(self) -> Float[Tensor, " weight"]:
        return self.end_with({})

    @cached_property
    def whole(self) -> Float[Tensor, "point out"]:
        return self.at(self.whole_end)

    def ends(
        self, weights: Float[Tensor, "training example"]
    ) -> Iterator[Float[Tensor, " weight"]]:
        """One training after another, but the one with all examples, which is known."""
        names = list(self.trace.examples)
        announced = Announced("ntkexp: training without examples", len(weights), self.progress)
        for row in weights:
            altered = {names[k]: float(row[k]) for k in (row != 1).nonzero().flatten().tolist()}
            end = self.end_with(altered) if altered else self.whole_end
            announced.step()
            yield end
        announced.stop()

    def end_with(self, weights: Mapping[str, float]) -> Float[Tensor, " weight"]:
        """Where the loop leads with these weights of some examples, by their names."""
        return self.flat.vector(self.train(weights).steps.end)

    def at(self, end: Float[Tensor, " weight"]) -> Float[Tensor, "point out"]:
        """The outputs at the queries."""
        with torch.no_grad(), plain_kernels():
            return columns(self.trace.function, self.flat.weights(end), self.trace.queries).detach()

    def train(self, weights: Mapping[str, float], place: Path | None = None) -> LoopProblem:
        """Carry the loop out with these weights; its steps are kept in a place, or not."""
        found = trained_again(self.again, Weighing(weights, self.mean, self.trace.loss), place)
        self.refuse_other(found)
        return found

    def refuse_other(self, found: LoopProblem) -> None:
        """Refuse another loop than the one that was followed."""
        ours, theirs = self.trace.steps, found.steps
        begun, beginning = ours.start(0), theirs.start(0)
        wrong = sorted(
            name
            for name in begun
            if name not in beginning or not same(begun[name], beginning[name])
        )
        if wrong or len(begun) != len(beginning):
            what = f"'{wrong[0]}' differs" if wrong else "it trains more parameters"
            raise Mistake(
                f"again=: the loop begins at other weights than the one that was followed ({what}); let the function "
                "build its model, and seed it (torch.manual_seed)"
            )
        if len(ours) != len(theirs) or list(ours.names()) != list(theirs.names()):
            raise Mistake(
                f"again=: the loop of {len(ours)} steps that was followed saw other examples, or in another order, "
                f"than this one of {len(theirs)}; let the function seed the order of its batches"
            )

    def doubts(
        self, repeated: Float[Tensor, "point out"], changes: Float[Tensor, "group point out"]
    ) -> list[str]:
        """None: a loop that ends elsewhere when nothing is changed is refused."""
        changed = float(changes.square().sum((1, 2)).mean().sqrt())
        missed = float((repeated - self.at(self.flat.vector(self.trace.steps.end))).norm())
        if missed > REPEATED * changed:
            raise Mistake(
                f"again=: carried out again as it was, the loop ends {short(missed)} from where it did, and without "
                f"some examples {short(changed)}; let the function seed all that is random, or take smaller steps"
            )
        return []


def same(one: Tensor, other: Tensor) -> bool:
    """Whether weights are the very same."""
    return one.shape == other.shape and torch.equal(one, other.to(one))
