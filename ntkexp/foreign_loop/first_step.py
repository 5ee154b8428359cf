"""Proof (a) of the first step. It runs directly after this step, so that a loop that
cannot be explained fails early.

If several processes train together, each process records only its own calls. In this
case the proof runs later, in the attribution."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from ntkexp.foreign_loop.arguments import NEVER_CALLED, common_submodule
from ntkexp.foreign_loop.call import (
    LayerModes,
    ModelCall,
    weights_of_calls,
)
from ntkexp.foreign_loop.model_function import CalledModule, left_alone
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.foreign_loop.value_clipping import gradient_factors
from ntkexp.kernel import columns
from ntkexp.kernel.record.independence import refuse_dependence
from ntkexp.kernel.record.tape import part, tensors
from ntkexp.kernel.record.taping import record
from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs, Weights

# number of examples that suffice to find out if the module mixes its examples
EXAMPLES_TO_CHECK = 8


@dataclass(frozen=True)
class FirstStepProof:
    """A comparison of the first step's gradient with the recorded model calls."""

    called: CalledModule
    queries: Inputs
    began_with_gradient: bool = False  # see `StepFacts`

    def prove(self, step: FollowedStep, others: Collection[str] = ()) -> None:
        """Recompute the gradient of the first step from the recorded model calls. Raise
        if the optimizer used another gradient.

        `others` names the outputs that received a gradient,
        but have no row for each example."""
        if not step.calls and any(
            bool(step.gradient[name].any()) for name in step.with_grad
        ):
            refuse_uncalled(step, others)
        for call in step.calls:
            self.refuse_other_axes(call)
        if all(call.at == step.index for call in step.calls):
            begun = weights_of_calls(step.calls, [step.start] * len(step.calls))
            of_calls = step.zero_gradient | self.called.gradient(step.calls, begun)
            consumed = {name: step.gradient[name] for name in step.with_grad}
            cast_eps = self.called.cast_eps(step.calls)
            noise = partial(self.called.noise, step.calls, begun)
            facts = replace(
                self.called.facts_of(step.calls, begun),
                began_with_gradient=self.began_with_gradient,
            )
            gradient_factors(of_calls, consumed, step.index, facts, cast_eps, noise)
            self.refuse_coupled(step, begun)
        self.called.twins.clear()

    def refuse_coupled(self, step: FollowedStep, begun: Sequence[Weights]) -> None:
        """Raise if the outputs of an example depend on other examples, in the mode in
        which the loop calls the model. The attribution checks this at every step."""
        checked = set[LayerModes]()
        for call, weights in zip(step.calls, begun, strict=True):
            modes = call.circumstances.modes
            if modes in checked or self.called.couples(call):
                continue
            checked.add(modes)
            function = self.called.at(call)
            few = part(call.inputs, slice(EXAMPLES_TO_CHECK))
            repeats_random = bool(call.circumstances.states)
            try:
                tape = record(function, weights, few, repeats_random=repeats_random)
                refuse_dependence(function, tape)
            except Mistake as error:
                raise Mistake(f"step {step.index}: {error}") from error
            except Exception:
                # the model does not run on a few examples of this batch. The
                # attribution runs it on all of them.
                continue

    def refuse_other_axes(self, call: ModelCall) -> None:
        """Raise if queries probably lack the batch axis. This is the case if they have
        another number of axes than the inputs of the loop, and the model returns
        another number of outputs for each."""
        # do not compare inputs of `trace.losses`, which need not be inputs of the model
        if call.losses is not None:
            return
        ours = axes_of(self.queries)
        theirs = axes_of(call.inputs)
        if ours.keys() != theirs.keys() or ours == theirs:
            return
        query = part(self.queries, slice(1))
        with torch.no_grad(), left_alone(self.called.module):
            outputs = columns(self.called.outputs, self.called.weights, query).shape[1]
        loop_outputs = prod(call.shape[1:])
        if outputs != loop_outputs:
            raise Mistake(
                f"queries=: they have {counted_axes(ours)}, for which the model returns "
                f"{outputs} outputs each, but the loop calls it with "
                f"{counted_axes(theirs)}, for which it returns {loop_outputs}; give "
                "queries with the axes of a batch, even if there is only one"
            )


def refuse_uncalled(step: FollowedStep, others: Collection[str]) -> None:
    """Raise the error for a step whose gradient did not come
    from a recorded model call."""
    if others:
        raise Mistake(
            f"step {step.index}: no output with a row for each example received a "
            f"gradient, but {' and '.join(sorted(others))} did; let the model return "
            "the tensors from which the loss is computed"
        )
    submodule = common_submodule(step.with_grad)
    perhaps = f", perhaps its part '{submodule}'" if submodule else ""
    raise Mistake(f"step {step.index}: {NEVER_CALLED}{perhaps}")


def axes_of(inputs: Inputs) -> dict[object, int]:
    """Return the number of axes of each tensor."""
    pairs = (
        inputs.items() if isinstance(inputs, Mapping) else enumerate(tensors(inputs))
    )
    return {key: value.dim() for key, value in pairs if isinstance(value, Tensor)}


def counted_axes(axes: Mapping[object, int]) -> str:
    numbers = " and ".join(map(str, axes.values()))
    return f"{numbers} axis" if numbers == "1" else f"{numbers} axes"
