"""The hooks at the steps of the followed optimizers. They record each step,
and run proof (b).

    `on_begin`  compares the weights, bit by bit, with the weights after the latest step. (If the
                loop moved weights and moved them back, they may differ by rounding.)
    `on_end`    reads the gradient g that the optimizer used. From the optimizer's settings and
                state, it computes the linear step of each parameter:
                    p = g + λθ        m ← βm + α ⊙ p        θ ← (1 − d)θ − S ⊙ m − N ⊙ p

The proof of the first step runs directly after it (`first_step`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ntkexp.allocator import release_memory
from ntkexp.foreign_loop.first_step import FirstStepProof
from ntkexp.foreign_loop.host_reads import norm_of
from ntkexp.foreign_loop.pending_calls import PendingCalls
from ntkexp.foreign_loop.rule import AbstractOptimizerRule, StepInput
from ntkexp.foreign_loop.rule_proof import PendingProof, RuleProof, StepClaim
from ntkexp.foreign_loop.running_loop import RunningLoop
from ntkexp.foreign_loop.signatures import Signed
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.step_log import StepLog
from ntkexp.foreign_loop.store.checkpoints import copied_state
from ntkexp.foreign_loop.store.shards import current_processes
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import IDLE, LinearStep
from ntkexp.shapes import Weights


@dataclass
class StepRecorder:
    """Hooks that store each step of a running loop, and prove that the optimizer's rule
    explains the step."""

    loop: RunningLoop
    pending: PendingCalls
    first: FirstStepProof | None  # runs proof (a) of the first step; then None
    log: StepLog | None
    proof: RuleProof = field(default_factory=RuleProof)
    scratch: dict[tuple[torch.dtype, torch.device], Tensor] = field(
        default_factory=dict
    )
    # state of each parameter before the step; only entries in the rule's `needs`
    states_before: dict[str, dict[str, Any]] = field(default_factory=dict)
    # if there are several optimizers: the id of the optimizer that moved each parameter
    # last, and the number of steps of each parameter by each optimizer
    movers: dict[str, int] = field(default_factory=dict)
    times_moved: dict[tuple[int, str], int] = field(default_factory=dict)
    # copies of the gradients, if steps overwrite them
    gradients_before: Weights = field(default_factory=dict)
    settings_before: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # ids of the optimizers that are between their two step hooks
    stepping: set[int] = field(default_factory=set)
    passed: bool = False  # True if the latest step was not stored
    # weights that the loop has added to an optimizer since the latest step
    admitted: Weights = field(default_factory=dict)

    def begin(self) -> None:
        """Copy the weights and momenta before the first step, and begin the store."""
        loop = self.loop
        for name, weight in loop.parameters:
            loop.latest.copy_in({name: weight})
            self.proof.begin(name, weight)
        loop.store.begin(
            dict(loop.latest.weights), loop.optimizers, loop.parameters.names
        )

        # if the loop continues a trace, the optimizers have momenta from earlier steps
        for optimizer in loop.optimizers:
            has_begun = any(
                has_moved(optimizer.state.get(weight, {}))
                for weight in loop.parameters.of(optimizer).values()
            )
            if has_begun and not loop.store.count and not loop.store.chooses:
                raise Mistake(
                    "the optimizer has taken steps already, and its state (momentum, "
                    "moments) contains their gradients, which this trace does not "
                    "know; begin with a new optimizer, or continue the trace that "
                    "followed these steps, with its to=, or give steps=range(n) for "
                    "the n steps of the loop: `carried` is then the effect of this "
                    "state"
                )
            self.remember(optimizer)

    def remember(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the momenta of an optimizer for proof (b)."""
        for group, members in self.loop.parameters.groups(optimizer):
            for name, weight in members.items():
                if not has_moved(optimizer.state.get(weight, {})):
                    continue
                self.proof.moved[name] = 1
                self.movers[name] = id(optimizer)
                self.times_moved[id(optimizer), name] = 1
                momentum = self.momentum(optimizer, group, weight)
                if momentum is not None:
                    self.proof.remember(name, momentum)

    def catch_up(self) -> None:
        """Store the present weights and momenta after some steps were not stored."""
        if not self.passed:
            return
        self.passed = False
        for name, _ in self.loop.parameters:
            self.refuse_added(name)
        self.loop.latest.copy_in(dict(self.loop.parameters))
        for name, weight in self.loop.parameters:
            self.proof.begin(name, weight)
        for optimizer in self.loop.optimizers:
            self.remember(optimizer)
        self.pending.clear()
        self.loop.store.go_on(dict(self.loop.latest.weights))

    def on_begin(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise if weights have changed since the last step. Copy the state entries
        that the rule needs from before the step."""
        if not self.loop.store.takes_next:
            self.stepping.add(id(optimizer))
            return
        step = self.loop.store.count
        moved = self.loop.parameters.of(optimizer)
        for name, weight in moved.items():
            # rules do not handle sparse gradients
            if weight.grad is not None and weight.grad.is_sparse:
                raise Mistake(
                    f"step {step}: the gradient of '{name}' is sparse, which cannot be "
                    "followed; build its layer with sparse=False"
                )
        self.loop.latest.refuse_writes(step, moved.items(), closely=True)
        self.loop.statistics.refuse_writes(step)
        self.loop.frozen.refuse_writes(step, self.loop.moving)
        self.admit(moved)
        self.stepping.add(id(optimizer))
        rule = self.loop.rules[id(optimizer)]
        if rule.changes_settings:
            for group, members in self.loop.parameters.groups(optimizer):
                self.settings_before |= dict.fromkeys(members, copied_settings(group))
        if rule.overwrites_gradient:
            for name, weight in moved.items():
                if weight.grad is not None:
                    self.gradients_before[name] = weight.grad.detach().clone()
        if rule.needs:
            for name, weight in moved.items():
                state = optimizer.state.get(weight, {})
                self.states_before[name] = copied_state(
                    {key: state[key] for key in rule.needs if key in state}
                )

    def admit(self, moved: Mapping[str, nn.Parameter]) -> None:
        """Copy the weights that the loop has added to an optimizer since the latest
        step. They still have their values from the start."""
        for name, weight in moved.items():
            if name not in self.loop.latest.weights:
                self.refuse_added(name)
                self.loop.latest.copy_in({name: weight})
                self.proof.begin(name, weight)
                self.admitted[name] = self.loop.latest.weights[name]

    def refuse_added(self, name: str) -> None:
        """Raise if the loop has added a parameter to an optimizer, and only some steps
        are stored, or several processes train together."""
        is_new = name not in self.loop.latest.weights
        if is_new and (self.loop.store.chooses or current_processes().world > 1):
            raise Mistake(
                f"step {self.loop.store.count}: '{name}' was added to the optimizer "
                "during the loop, which is refused with steps= and in several processes; "
                "give all parameters to the optimizer before the loop"
            )

    def on_end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record a step, and prove that the optimizer's rule explains it."""
        if not self.loop.store.takes_next:
            self.on_passed_step(optimizer)
            return
        index = self.loop.store.count
        moved = self.loop.parameters.of(optimizer)
        if id(optimizer) not in self.stepping:
            # if a subclass calls the `step` of its base class, this hook runs twice;
            # the weights must not change in between
            self.loop.latest.refuse_writes(index, moved.items(), closely=True)
            return
        self.stepping.discard(id(optimizer))
        before = dict(self.loop.latest.weights)

        # gradient g, weights θ after the step, and the signatures of both
        gradient: Weights = {}
        for name, weight in moved.items():
            if weight.grad is None:
                gradient[name] = torch.zeros_like(weight)
            else:
                gradient[name] = self.gradients_before.pop(name, weight.grad.detach())
        self.loop.latest.copy_in(moved)
        sign = self.proof.signatures.on_device
        signed = Signed.of(sign(gradient), sign(moved))

        # the linear step of each parameter, and proof (b)
        followed = self.followed_step(optimizer, gradient, before, signed)

        # store the step, and run proof (a) of the first step
        which = self.loop.optimizers.index(optimizer)
        self.loop.store.add(followed, which, dict(self.loop.latest.weights), signed)
        if self.first is not None:
            first = self.first
            self.first = None
            others = {
                name for call in self.pending.calls for name in call.other_outputs
            }
            first.prove(followed, others)
            release_memory(moved.values())
        self.loop.latest.release(before)
        if self.log is not None:
            self.log.add(self.loop.store.count - 1, followed, moved)

    def followed_step(
        self,
        optimizer: torch.optim.Optimizer,
        gradient: Weights,
        before: Weights,
        signed: Signed,
    ) -> FollowedStep:
        """Return the step of an optimizer: its calls, and the linear step of each
        parameter by the optimizer's rule. Run proof (b).

        `gradient` is the gradient that the optimizer used, `before` are the weights
        before the step, and `signed` are the signatures of the gradient and of the
        weights after the step."""
        rule = self.loop.rules[id(optimizer)]
        linear: dict[str, LinearStep] = {}
        settings: dict[str, Mapping[str, Any]] = {}
        without_grad = set[str]()
        proofs = list[PendingProof]()
        norm = norm_of(gradient.values()) if rule.reads_norm else nan
        admitted = self.admitted
        self.admitted = {}
        for group, members in self.loop.parameters.groups(optimizer):
            group_settings = copied_settings(group)
            for name, weight in members.items():
                self.change_mover(optimizer, group, name, weight)
                step_input = StepInput(
                    gradient[name],
                    before[name],
                    self.proof.moved.get(name, 0),
                    self.states_before.get(name, {}),
                    norm,
                )
                claim = self.claim(optimizer, group, name, weight, step_input)
                signatures = (signed.gradient[name], signed.after[name])
                scratch = self.scratch_like(weight)
                proofs.append(self.proof.check(claim, signatures, scratch))
                linear[name] = claim.step
                settings[name] = group_settings
                if weight.grad is None or not weight.requires_grad:
                    without_grad.add(name)
        rule_error = max(self.proof.settle(proofs), default=0.0)
        return FollowedStep(
            index=self.loop.store.count,
            calls=self.pending.consume(self.loop.parameters.of(optimizer).values()),
            start=before,
            gradient=gradient,
            linear=linear,
            without_grad=frozenset(without_grad),
            settings=settings,
            settings_before={
                name: self.settings_before[name]
                for name in settings
                if rule.changes_settings
            },
            rule_error=rule_error,
            statistics=self.loop.statistics.end_step(),
            square_outside=self.loop.parameters.square_outside(optimizer),
            admitted=admitted,
        )

    def claim(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        name: str,
        weight: nn.Parameter,
        step_input: StepInput,
    ) -> StepClaim:
        """Return the linear step of a parameter by the optimizer's rule. The step may
        use the buffer `scratch_like(weight)`."""
        rule = self.loop.rules[id(optimizer)]
        where = f"step {self.loop.store.count}: '{name}'"
        state = optimizer.state.get(weight, {})
        step = IDLE
        if weight.grad is not None:
            self.proof.moved[name] = step_input.earlier_steps + 1
            scratch = self.scratch_like(weight)
            step = read_step(rule, group, state, step_input, scratch, where)
            if name not in self.proof.memory:
                step = step.changed(momentum_decay=0.0)
        momentum = self.momentum(optimizer, group, weight)
        return StepClaim(where, name, step, step_input, momentum)

    def momentum(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        weight: nn.Parameter,
    ) -> Tensor | None:
        """Return the momentum of a parameter, or None if it has none yet."""
        state = optimizer.state.get(weight)
        if not state:
            return None
        rule = self.loop.rules[id(optimizer)]
        return rule.momentum_at(group, state, weight.detach())

    def change_mover(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        name: str,
        weight: nn.Parameter,
    ) -> None:
        """If another optimizer moved this parameter before, forget the momentum of that
        optimizer.

        Raise if `optimizer` moved the parameter even earlier and has a momentum for it:
        this momentum is from before the steps of the other optimizer."""
        if len(self.loop.optimizers) == 1 or weight.grad is None:
            return
        key = (id(optimizer), name)
        times = self.times_moved.get(key, 0)
        self.times_moved[key] = times + 1
        last = self.movers.get(name)
        self.movers[name] = id(optimizer)
        if last is None or last == id(optimizer):
            return
        if times and self.momentum(optimizer, group, weight) is not None:
            raise Mistake(
                f"step {self.loop.store.count}: another optimizer has updated '{name}' since the "
                f"last step of {type(optimizer).__name__}, whose momentum is from before; let one "
                "stage end before the next begins, or give each optimizer other parameters"
            )
        self.proof.memory.pop(name, None)
        self.proof.made.pop(name, None)
        self.proof.moved[name] = times

    def on_other_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record the parameters that an unfollowed optimizer moves,
        for an error message."""
        base = getattr(optimizer, "base_optimizer", None)  # SAM's inner optimizer
        if any(followed in (optimizer, base) for followed in self.loop.optimizers):
            return
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and id(weight) in self.loop.parameters.names:
                    name = self.loop.parameters.names[id(weight)]
                    self.loop.latest.unfollowed[name] = type(optimizer).__name__

    def on_passed_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step without storing it. If the next step is stored, store the
        weights after this step."""
        # If a subclass calls the `step` of its base class, this runs twice.
        if id(optimizer) not in self.stepping:
            return
        self.stepping.discard(id(optimizer))
        self.passed = True
        self.loop.store.pass_over()
        if self.loop.store.takes_next:
            self.catch_up()

    def scratch_like(self, weight: Tensor) -> Tensor:
        """Return a reused buffer of the weight's shape. Allocating new memory would
        take longer than the arithmetic."""
        key = (weight.dtype, weight.device)
        if key not in self.scratch or self.scratch[key].numel() < weight.numel():
            contiguous = torch.empty_like(weight, memory_format=torch.contiguous_format)
            self.scratch[key] = contiguous.flatten().detach()
        return self.scratch[key][: weight.numel()].view(weight.shape)


def has_moved(state: Mapping[str, Any]) -> bool:
    """Return True if the optimizer state of a parameter shows an earlier step.

    Some optimizers have a state before their first step.

    >>> has_moved({}), has_moved({"step": torch.tensor(0.0)})
    (False, False)
    >>> has_moved({"momentum_buffer": torch.zeros(1)})
    True
    """
    return bool(state) and float(state.get("step", 1)) > 0


def read_step(
    rule: AbstractOptimizerRule,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    step_input: StepInput,
    scratch: Tensor,
    where: str,
) -> LinearStep:
    """Return the linear step by the optimizer's rule. Raise if the optimizer's state
    lacks an entry that the rule reads, which can happen for subclasses."""
    try:
        return rule.watched(group, state, step_input, scratch)
    except KeyError as error:
        raise Mistake(
            f"{where}: the optimizer's state has no {error}, which "
            f"{type(rule).__name__} reads; give a rule for this optimizer, rules=[…]"
        ) from error


def copied_settings(group: Mapping[str, Any]) -> dict[str, object]:
    return {
        key: copied_setting(value) for key, value in group.items() if key != "params"
    }


def copied_setting(value: object) -> object:
    """Copy a setting of a parameter group.

    Numbers are converted to Python floats. A tensor stays a tensor,
    because its dtype matters.

    >>> copied_setting(torch.tensor(0.5)), copied_setting((0.9, 0.99))
    (tensor(0.5000), (0.9, 0.99))
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, list | tuple):
        return tuple(map(copied_setting, value))
    if isinstance(value, Real) and not isinstance(value, bool | int):
        return float(value)
    return value
