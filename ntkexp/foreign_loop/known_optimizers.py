"""The rule of an optimizer, which computes its linear steps (`rule`): a rule of the
user, or the rule for a class of PyTorch or another library.

An optimizer has the rule of its class, or of the first base class that has a rule. If a
class has a rule of the user and another rule, the user's rule is used. If a subclass
computes other steps than its base class, the proof of its first step (`rule_proof.RuleProof`)
raises an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch

from ntkexp.foreign_loop.library_rules import LIBRARY_RULES, AbstractLibraryRule
from ntkexp.foreign_loop.rule import AbstractOptimizerRule
from ntkexp.foreign_loop.torch_rules import TORCH_RULES
from ntkexp.mistake import Mistake, WrongArgument
from ntkexp.model.foreign import load_torchvision

LIBRARIES = frozenset({"timm", "lion_pytorch", "schedulefree"})
"""Packages whose optimizers a later process may import by name,
to replay a trace on disk."""


@dataclass(frozen=True)
class KnownOptimizer:
    """A rule, and the optimizer class that it applies to.
    Replays construct this class."""

    rule: AbstractOptimizerRule
    kind: type[torch.optim.Optimizer]

    @property
    def name(self) -> str:
        """The name that a trace stores: the name of the class. If the rule is the
        user's, the rule's name is added. For a class of another library, the module is
        added.

        >>> KnownOptimizer(TORCH_RULES[0], torch.optim.SGD).name
        'SGD'
        """
        if self.rule in TORCH_RULES:
            return self.kind.__name__
        if self.rule in LIBRARY_RULES:
            return f"{self.kind.__module__}.{self.kind.__name__}"
        return f"{self.kind.__name__} by {type(self.rule).__name__}"

    @cached_property
    def required_arguments(self) -> list[str]:
        """The arguments of the constructor that have no default."""
        parameters = signature(self.kind).parameters.items()
        return [name for name, each in parameters if each.default is each.empty]

    def made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct an optimizer with these parameter groups.

        Required arguments of the constructor get their values from the first group.
        Some optimizers read settings from `defaults` instead of the groups, so
        `defaults` gets the values of the first group too."""
        shared = groups[0]
        _, *needed = self.required_arguments
        optimizer = self.kind(
            groups, **{name: shared[name] for name in needed if name in shared}
        )
        for name in optimizer.defaults.keys() & shared.keys():
            optimizer.defaults[name] = shared[name]
        return optimizer


NOT_LINEAR = {
    "LBFGS": "each step asks for the gradient at several weights, and multiplies it by "
    "a matrix of earlier gradients",
    "SparseAdam": "its gradients are sparse, with only some of the rows",
}


def known_optimizer(
    optimizer: torch.optim.Optimizer, rules: Sequence[AbstractOptimizerRule]
) -> KnownOptimizer:
    """Return the rule of an optimizer: one of the user's `rules`, or the rule of its
    class in PyTorch or another library. Raise if there is none."""
    kind = type(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Mistake(
            f"{kind.__name__} with differentiable=True cannot be followed; train with "
            "differentiable=False"
        )
    ours = () if "SAM" in kind.__name__ else (*TORCH_RULES, *LIBRARY_RULES)
    for base in kind.__mro__:
        for rule in (*rules, *ours):
            if applies(rule, base):
                return KnownOptimizer(rule, base)
    raise without_rule(kind)


def without_rule(kind: type[torch.optim.Optimizer]) -> Mistake:
    """Return the error for an optimizer class without a rule."""
    if kind.__name__ == "ZeroRedundancyOptimizer":
        return Mistake(
            "ZeroRedundancyOptimizer divides its state among the processes, so that no "
            "process sees a complete step; train with the optimizer that it wraps, in "
            "every process"
        )
    if "SAM" in kind.__name__:
        return Mistake(
            f"{kind.__name__} computes gradients at weights that it has moved up first "
            "(sharpness-aware minimisation), and has no base_optimizer whose step "
            "could be followed; let it wrap an optimizer, or move the weights in the "
            "loop"
        )
    reason = next(
        (
            f" ({NOT_LINEAR[base.__name__]})"
            for base in kind.__mro__
            if base.__name__ in NOT_LINEAR
        ),
        "",
    )
    names = [each.__name__ for rule in TORCH_RULES for each in rule.kinds]
    names += [name for rule in LIBRARY_RULES for name in rule.class_names]
    known = ", ".join(names)
    where = f"{kind.__module__}.{kind.__qualname__}"
    instead = "" if reason else ", or give one, rules=[…]"
    return Mistake(
        f"steps of {where} are not followed{reason}: rules are known for {known}{instead}"
    )


def applies(rule: AbstractOptimizerRule, kind: type) -> bool:
    """Return True if a rule applies to the optimizer class `kind`. Rules for other
    libraries compare the name of the class."""
    if kind in rule.kinds:
        return True
    is_by_name = (
        isinstance(rule, AbstractLibraryRule) and kind.__name__ in rule.class_names
    )
    return is_by_name and issubclass(kind, torch.optim.Optimizer)


def named(name: str, rules: Sequence[AbstractOptimizerRule] = ()) -> KnownOptimizer:
    """Return the optimizer with this name in a trace. Raise if its rule was not given.

    >>> named("AdamW").kind
    <class 'torch.optim.adamw.AdamW'>
    """
    known = [
        KnownOptimizer(rule, kind)
        for rule in (*rules, *TORCH_RULES)
        for kind in rule.kinds
    ]
    optimizer = next((each for each in known if each.name == name), None)
    optimizer = optimizer or next(optimizers_of_libraries(name, rules), None)
    if optimizer is None:
        raise WrongArgument(
            (
                f"rule=: the trace has steps of {name}, and does not store their rule; "
                "give the rule again"
            ),
            "rule",
        )
    return optimizer


def optimizers_of_libraries(
    name: str, rules: Sequence[AbstractOptimizerRule]
) -> Iterator[KnownOptimizer]:
    """Yield the optimizers of other libraries with this name (module and class).

    Find the class in a rule of the user, or in a module that this process has already
    imported. Import only modules of the packages in `LIBRARIES`."""
    module, _, kind_name = name.rpartition(".")
    for rule in rules:
        for kind in rule.kinds:
            if isinstance(rule, AbstractLibraryRule) and kind.__name__ == kind_name:
                yield KnownOptimizer(rule, kind)
    package = module.partition(".")[0]
    if package in LIBRARIES and find_spec(package) is not None:
        load_torchvision()  # timm imports it
        import_module(module)
    imported: object = getattr(sys.modules.get(module), kind_name, None)
    for library_rule in LIBRARY_RULES:
        if isinstance(imported, type) and applies(library_rule, imported):
            yield KnownOptimizer(library_rule, imported)
