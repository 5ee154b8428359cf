"""The interface of the rules that compute an optimizer's step as a linear step.

`torch_rules.py` has the rules of PyTorch's optimizers. `rule_proof.py` checks a rule at
every step (proof (b))."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import nan
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ntkexp.optimizer.base import LinearStep

# --- The linear step of a parameter θ (`optimizer.base.LinearStep` defines the symbols):
#
#     p = g + λθ        m ← βm + α ⊙ p        θ ← (1 − d)θ − M(S ⊙ m + N ⊙ p) − r
#
# g is the gradient that the optimizer used. A rule computes the coefficients from the
# optimizer's settings and from its state before and after the step. Coefficients may
# depend on g, for example if the optimizer clips its own update. The step is linear in
# the gradients of the examples, because the same S, N and α multiply each of them.


class StepInput(NamedTuple):
    """One parameter before a step, and its gradient."""

    gradient: Tensor  # g
    weight: Tensor  # θ before the step
    earlier_steps: int  # number of earlier steps of this parameter
    # optimizer state before the step; only entries in the rule's `needs`
    state: Mapping[str, Any]
    # norm of the gradients of all parameters of the optimizer; NaN unless the rule has
    # `reads_norm`
    gradient_norm: float = nan


class AbstractOptimizerRule(ABC):
    """Base class for rules, which compute the linear steps of some classes of
    optimizers. Pass a rule of your own as `ntkexp.follow(…, rules=[MyRule()])`.

    A rule returns the linear step of each parameter, from the settings of its group and
    the optimizer's state after the step. Every step is checked: applied to the weights
    before the step, the linear step must give the weights after it and the optimizer's
    momentum, up to rounding. Otherwise an error is raised.

    Example: ADOPT divides the gradient by √v₋, where v₋ is the mean of squared
    gradients before the step: m ← β₁m + (1 − β₁)g/√v₋ and θ ← θ − ηm. So α is the
    tensor (1 − β₁)/√v₋, and the rule `needs` v₋ from the state before the step:

    >>> import torch
    >>> import ntkexp
    >>> from ntkexp import AbstractOptimizerRule, LinearStep
    >>> class Adopt(torch.optim.Optimizer):
    ...     def __init__(self, params, lr=0.01, betas=(0.9, 0.99)):
    ...         super().__init__(params, {"lr": lr, "betas": betas})
    ...     @torch.no_grad()
    ...     def step(self, closure=None):
    ...         for group in self.param_groups:
    ...             first, second = group["betas"]
    ...             for weight in group["params"]:
    ...                 m = self.state[weight].setdefault("m", torch.zeros_like(weight))
    ...                 v = self.state[weight].setdefault("v", torch.ones_like(weight))
    ...                 m.mul_(first).add_((1 - first) * weight.grad / v.sqrt())
    ...                 weight.sub_(group["lr"] * m)
    ...                 v.mul_(second).add_((1 - second) * weight.grad.square())
    >>> class AdoptRule(AbstractOptimizerRule):
    ...     kinds = (Adopt,)
    ...     needs = ("v",)
    ...     def step(self, group, state, step_input, buffer=None):
    ...         first, _ = group["betas"]
    ...         before = step_input.state.get("v", torch.ones_like(step_input.gradient))
    ...         return LinearStep(
    ...             momentum_scale=group["lr"],
    ...             momentum_decay=first,
    ...             momentum_gain=(1 - first) / before.sqrt(),
    ...         )
    ...     def momentum(self, group, state):
    ...         return state.get("m")
    >>> x = torch.eye(2, dtype=torch.double)
    >>> model = torch.nn.Linear(2, 1).double()
    >>> optimizer, before = Adopt(model.parameters()), model(x).detach()
    >>> with ntkexp.follow(model, optimizer, queries=x, rules=[AdoptRule()]) as trace:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         (model(x) - 1).square().sum().backward()
    ...         optimizer.step()
    >>> parts = trace.attribute()["contribution"].sum("example")
    >>> bool(abs(before.numpy() + parts - model(x).detach().numpy()).max() < 1e-12)
    True
    """

    kinds: ClassVar[tuple[type[torch.optim.Optimizer], ...]]
    """The classes of optimizers. The rule is also applied to their subclasses."""

    needs: ClassVar[tuple[str, ...]] = ()
    """The entries of the optimizer state that the rule reads from before the step."""

    has_effects: ClassVar[bool] = False
    """True if leave-out effects can differentiate the step,
    including its denominator."""

    reads_norm: ClassVar[bool] = False
    """True if the rule needs the norm of the gradients of all parameters together."""

    changes_settings: ClassVar[bool] = False
    """True if a step changes settings of the parameter groups, such as a step count. A
    replay then begins with the settings from before the step."""

    overwrites_gradient: ClassVar[bool] = False
    """True if the optimizer writes into the gradients in its step."""

    swaps_weights: ClassVar[bool] = False
    """True if functions of the optimizer move the weights to an average and back
    between steps. They compute the weights from z, an entry of the optimizer state.
    This changes the weights by rounding errors."""

    rounds: ClassVar[bool] = False
    """True if the optimizer computes in lower precision than the weights. The rounding
    error is then the `residual` of the linear step."""

    @abstractmethod
    def step(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        step_input: StepInput,
        buffer: Tensor | None = None,
    ) -> LinearStep:
        """Return the linear step that led to this state.

        Args:
            group: settings of the parameter group.
            state: optimizer state of the parameter after the step.
            step_input: gradient, weight and state of the parameter before the step.
            buffer: buffer of the parameter's shape. The rule may write into it, and use
                it as a tensor of the returned step, such as the denominator.

        Returns:
            The linear step. Fields that are not given have their defaults.
        """

    def momentum(
        self, group: Mapping[str, Any], state: Mapping[str, Any]
    ) -> Tensor | None:
        """Return the momentum m after the step, as the optimizer stores it.

        Args:
            group: settings of the parameter group.
            state: optimizer state of the parameter after the step.

        Returns:
            The momentum, or None for an optimizer without momentum.
        """
        return None

    def momentum_at(
        self, group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor
    ) -> Tensor | None:
        """Return the momentum m after the step, which may also depend on the weights
        after the step. Override this method if `momentum` returns only the part of m
        that the state holds.

        Args:
            group: settings of the parameter group.
            state: optimizer state of the parameter after the step.
            weight: the parameter after the step.

        Returns:
            The momentum, or None for an optimizer without momentum.
        """
        return self.momentum(group, state)

    def watched(
        self,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        step_input: StepInput,
        buffer: Tensor | None,
    ) -> LinearStep:
        """Return a linear step for proof (b). Override this method if the result of
        `step` is expensive, and a cheaper step leads to the same weights and momentum.

        Args:
            group: settings of the parameter group.
            state: optimizer state of the parameter after the step.
            step_input: gradient, weight and state of the parameter before the step.
            buffer: buffer of the parameter's shape, as in `step`.

        Returns:
            A step that leads to the same weights and momentum as the result of `step`.
        """
        return self.step(group, state, step_input, buffer)


def p_of(step: LinearStep, step_input: StepInput) -> Tensor:
    """Return p = g + λθ, the gradient with L2 decay."""
    if isinstance(step.l2, Tensor):
        return step_input.gradient + step.l2 * step_input.weight
    if step.l2:
        return step_input.gradient.add(step_input.weight, alpha=step.l2)
    return step_input.gradient
