"""The rule by which differences go back through an optimizer's steps, or why there is none."""

from __future__ import annotations

from ntkexp.mistake import Mistake
from ntkexp.optimizer.adaptive import AbstractAdam
from ntkexp.removal.rerun import Rerun
from ntkexp.removal.rule.adaptive import AdaptiveDifference
from ntkexp.removal.rule.base import AbstractDifferenceRule
from ntkexp.removal.rule.linear import LinearDifference


def difference_rule(rerun: Rerun) -> AbstractDifferenceRule:
    """Find the rule: what records no memory scales gradients by numbers that no training changes."""
    optimizer = rerun.optimizer
    if isinstance(optimizer, AbstractAdam):
        return AdaptiveDifference(optimizer)
    if optimizer.records:
        raise Mistake(
            f"optimizer={optimizer.option} scales gradients by what it remembers of them, and differences of its steps "
            "are known for no optimizer of that kind but Adam and AdamW"
        )
    return LinearDifference(rerun)
