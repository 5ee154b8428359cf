"""Effects of a followed loop that are no estimates: it is carried out again without each example by itself.

    effect of i = f_T trained without i − f_T        from the same start, in the same order

This is done where a sweep back would take longer. `loss=` is held against every call of the loop all the same, as only
a mean of it is weighed by what comes back to the outputs. In the trainings every step is held against the rule of its
optimizer; that gradients are those of the calls is proved of the training that was followed, which is repeated first.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.sweep_plan import SweepPlan
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.loop_again import LoopAgain

OUTPUTS = 2
"""A sweep goes back for so many outputs while the loop is carried out once: 0.7 (wide networks) to 5.5."""


def costs_more(plan: SweepPlan) -> bool:
    """Whether the sweep takes longer than training without each example in turn."""
    return OUTPUTS * plan.train <= plan.points * plan.outputs


@dataclass(frozen=True)
class TrainedAlone:
    """What is changed by leaving each example out."""

    training: FollowedTraining
    loop: LoopAgain

    def effects(self) -> Float[Tensor, "probe out example"]:
        """Train as many times as there are examples."""
        for index in reversed(range(self.training.length)):
            self.training.step(index)  # refuses another loss
        return self.loop.changes([(k,) for k in range(self.training.examples)]).permute(1, 2, 0)
