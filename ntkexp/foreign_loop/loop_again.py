"""The loop of a trace, carried out again with other weights of its examples.

It has to be the same loop: it begins at the same weights, sees the same examples at the same steps, and with all of
them ends where the trace does. What the function prints or writes, it prints or writes each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.mean import MeanName
from ntkexp.foreign_loop.altered_loop import Again, trained_again
from ntkexp.foreign_loop.weighing import Weighing
from ntkexp.kernel.record.taping import columns, plain_kernels
from ntkexp.mistake import Mistake
from ntkexp.text import short

if TYPE_CHECKING:
    from ntkexp.foreign_loop.trace import Trace

REPEATED = 0.01
"""With all examples the loop must end where it did, to this share of what leaving some of them out changes."""


@dataclass(frozen=True)
class LoopAgain:
    """`again` carries out the loop that the trace is of."""

    again: Again
    trace: Trace
    mean: MeanName

    @cached_property
    def repeated(self) -> Float[Tensor, "probe out"]:
        """The outputs at the queries when nobody is left out."""
        return self.outputs({})

    def changes(self, removals: Sequence[Sequence[int]]) -> Float[Tensor, "removal probe out"]:
        """How the outputs change when each of these groups of places is left out."""
        names = list(self.trace.examples)
        ends = [self.outputs(dict.fromkeys((names[k] for k in group), 0.0)) for group in removals]
        found = torch.stack(ends) - self.repeated
        self.refuse_unrepeated(float(found.square().sum((1, 2)).mean().sqrt()))
        return found

    def outputs(self, weights: Mapping[str, float]) -> Float[Tensor, "probe out"]:
        """The outputs at the queries with these weights of examples."""
        return self.at_end(self.train(weights))

    def train(self, weights: Mapping[str, float], place: Path | None = None) -> Trace:
        """Carry the loop out with these weights; its steps are kept in a place, or not."""
        found = trained_again(self.again, Weighing(weights, self.mean), place)
        self.refuse_other(found)
        return found

    def at_end(self, trace: Trace) -> Float[Tensor, "probe out"]:
        """The outputs at the queries where a training ended."""
        with torch.no_grad(), plain_kernels():
            return columns(self.trace.function, trace.steps.end, self.trace.queries).detach()

    def refuse_other(self, found: Trace) -> None:
        """Refuse another loop than the one that was followed."""
        ours, theirs = self.trace.steps, found.steps
        begun, beginning = ours.start(0), theirs.start(0)
        wrong = sorted(name for name in begun if name not in beginning or not same(begun[name], beginning[name]))
        if wrong or len(begun) != len(beginning):
            what = f"'{wrong[0]}' is otherwise" if wrong else "it trains more parameters"
            raise Mistake(
                f"again=: the loop begins at other weights than the one that was followed ({what}); let the function "
                "build its model, and seed it (torch.manual_seed)"
            )
        if len(ours) != len(theirs) or list(ours.names()) != list(theirs.names()):
            raise Mistake(
                f"again=: the loop of {len(ours)} steps that was followed saw other examples, or in another order, "
                f"than this one of {len(theirs)}; let the function seed the order of its batches"
            )

    def refuse_unrepeated(self, changed: float) -> None:
        """Refuse a loop that ends elsewhere when nothing is changed."""
        missed = float((self.repeated - self.at_end(self.trace)).norm())
        if missed > REPEATED * changed:
            raise Mistake(
                f"again=: carried out again as it was, the loop ends {short(missed)} from where it did, and without "
                f"some examples {short(changed)}; let the function seed all that is random, or take smaller steps"
            )


def same(one: Tensor, other: Tensor) -> bool:
    """Whether weights are the very same."""
    return one.shape == other.shape and torch.equal(one, other.to(one))
