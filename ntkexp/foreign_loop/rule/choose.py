"""The rule by which an optimizer is understood, or why it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ntkexp.foreign_loop.rule.adam import AdamRule
from ntkexp.foreign_loop.rule.base import AbstractRule
from ntkexp.foreign_loop.rule.sgd import SGDRule
from ntkexp.mistake import Mistake

RULES: tuple[AbstractRule, ...] = (SGDRule(), AdamRule())


def rule_of(optimizer: torch.optim.Optimizer) -> AbstractRule:
    """Find the rule of an optimizer of this very class: a class that is derived from it may do anything."""
    kind = type(optimizer)
    for rule in RULES:
        if kind in rule.kinds:
            for group in optimizer.param_groups:
                rule.refuse(group, kind.__name__)
            return rule
    if kind.__name__ == "ZeroRedundancyOptimizer":
        raise Mistake(
            "ZeroRedundancyOptimizer cuts its memory apart over the processes, and none sees a whole step; train with "
            "the optimizer that it holds, in every process"
        )
    if "SAM" in kind.__name__:
        raise Mistake(
            f"{kind.__name__} takes gradients at weights that it has moved up first (sharpness-aware minimisation), "
            "which is not followed; train with the optimizer that it is around, without that"
        )
    known = ", ".join(each.__name__ for rule in RULES for each in rule.kinds)
    raise Mistake(f"steps of {kind.__module__}.{kind.__qualname__} are not followed: their rule is known for {known}")


def named(kind: str) -> tuple[AbstractRule, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]]:
    """The rule and the class of the optimizers that go by a name.

    >>> named("AdamW")[1]
    <class 'torch.optim.adamw.AdamW'>
    """
    return next((rule, each) for rule in RULES for each in rule.kinds if each.__name__ == kind)
