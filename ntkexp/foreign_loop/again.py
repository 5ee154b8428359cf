"""A loop is carried out again with other weights of its examples, by the function that its user gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.sweep import MeanName
from ntkexp.effects.trajectory import FlatWeights, flat_like
from ntkexp.foreign_loop.calls import (
    CPU,
    ExampleLoss,
    ModelCall,
    beginning_at,
    counts_of,
    device_generators,
    generator_state,
)
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.kernel.record.taping import columns, plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.progress import AbstractProgress, Silent
from ntkexp.removal.retraining import AbstractRetraining
from ntkexp.report.progress import Announced
from ntkexp.text import counted, short

if TYPE_CHECKING:
    from ntkexp.foreign_loop.trace import Trace


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

    def factors(self, names: Sequence[str], counts: Float[Tensor, " row"] | None = None) -> Float[Tensor, " row"]:
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
        return None if self.loss is None else counts_of(self.loss, outputs, SeenCall.of(call.inputs, call.names))

    def silences(self, names: Sequence[str]) -> bool:
        """Whether nothing is left of a call."""
        return not self.left(names).any()


# --- A loop is carried out again, by the function that its user gives, and `follow` inside it learns what has
# changed: what examples weigh, and where the steps are kept, so that the first trace stays as it is.


Again: TypeAlias = Callable[[], object]
"""A function that carries a whole loop out, from its seeds on, with one `follow` in it."""


@dataclass
class AlteredLoop:
    """What is otherwise: weights of examples; and steps are kept in `place`, or not at all. `traces` were followed."""

    weighing: Weighing
    place: Path | None
    traces: list[Trace] = field(default_factory=list)


UNDER_WAY: ContextVar[AlteredLoop | None] = ContextVar("UNDER_WAY", default=None)


def altered_loop() -> AlteredLoop | None:
    """What differs in the loop that is under way, if it is carried out again."""
    return UNDER_WAY.get()


def trained_again(again: Again, weighing: Weighing, place: Path | None = None) -> Trace:
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
    trace: Trace
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

    def ends(self, weights: Float[Tensor, "training example"]) -> Iterator[Float[Tensor, " weight"]]:
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

    def train(self, weights: Mapping[str, float], place: Path | None = None) -> Trace:
        """Carry the loop out with these weights; its steps are kept in a place, or not."""
        found = trained_again(self.again, Weighing(weights, self.mean, self.trace.loss), place)
        self.refuse_other(found)
        return found

    def refuse_other(self, found: Trace) -> None:
        """Refuse another loop than the one that was followed."""
        ours, theirs = self.trace.steps, found.steps
        begun, beginning = ours.start(0), theirs.start(0)
        wrong = sorted(name for name in begun if name not in beginning or not same(begun[name], beginning[name]))
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

    def doubts(self, repeated: Float[Tensor, "point out"], changes: Float[Tensor, "group point out"]) -> list[str]:
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
