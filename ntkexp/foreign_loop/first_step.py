"""Proof (a) of the first step, right after it, so that a loop that we cannot explain fails before
its second step.

If several processes train together, this process has only its own calls. Then the proof waits for
the attribution.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from ntkexp.foreign_loop.arguments import NEVER_CALLED, common_submodule
from ntkexp.foreign_loop.call import ModelCall, facts_of
from ntkexp.foreign_loop.clipping import factors_between
from ntkexp.foreign_loop.model_function import CalledModule, left_alone
from ntkexp.foreign_loop.step import FollowedStep
from ntkexp.kernel import columns
from ntkexp.kernel.record.tape import part, tensors
from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs


@dataclass(frozen=True)
class FirstStepProof:
    """The module and the queries, which the first step is checked with."""

    called: CalledModule
    queries: Inputs

    def prove(self, step: FollowedStep, others: Collection[str] = ()) -> None:
        """Compare the consumed gradient with the calls' gradient. `others` are outputs
        without a row for each example that received gradients."""
        if not step.calls and any(bool(step.gradient[name].any()) for name in step.with_grad):
            refuse_uncalled(step, others)
        for call in step.calls:
            self.refuse_other_axes(call)
        if all(call.at == step.index for call in step.calls):
            begun = [step.start] * len(step.calls)
            zeros = {name: torch.zeros_like(step.start[name]) for name in step.with_grad}
            of_calls = zeros | self.called.gradient(step.calls, begun)
            consumed = {name: step.gradient[name] for name in step.with_grad}
            cast_eps = self.called.cast_eps(step.calls)
            noise = partial(self.called.noise, step.calls, begun)
            factors_between(of_calls, consumed, step.index, facts_of(step.calls), cast_eps, noise)
        self.called.twins.clear()

    def refuse_other_axes(self, call: ModelCall) -> None:
        """Raise if the queries have other axes than the inputs of the loop, and other outputs.

        An axis of the queries may then be mistaken for the axis of examples. Other lengths are
        fine. Other axes are fine if the model gives the same outputs.
        """
        ours = axes_of(self.queries)
        theirs = axes_of(call.inputs)
        if ours.keys() != theirs.keys() or ours == theirs:
            return
        weights = {name: weight.detach() for name, weight in self.called.module.named_parameters()}
        with torch.no_grad(), left_alone(self.called.module):
            outputs = columns(self.called.outputs, weights, part(self.queries, slice(1))).shape[1]
        loop_outputs = prod(call.shape[1:])
        if outputs != loop_outputs:
            raise Mistake(
                f"queries=: they have {counted_axes(ours)}, which the model answers with {outputs} "
                f"outputs each, and the loop calls it with {counted_axes(theirs)}, answered with "
                f"{loop_outputs}; give queries with the axes of a batch, also if there is only one"
            )


def refuse_uncalled(step: FollowedStep, others: Collection[str]) -> None:
    """Raise for a step whose gradient came from no recorded call."""
    if others:
        raise Mistake(
            f"step {step.index}: no gradient came back to an output with a row for each example, but "
            f"to {' and '.join(sorted(others))}; let the model return the tensors that the loss is "
            "computed from"
        )
    submodule = common_submodule(step.with_grad)
    perhaps = f", perhaps its part '{submodule}'" if submodule else ""
    raise Mistake(f"step {step.index}: {NEVER_CALLED}{perhaps}")


def axes_of(inputs: Inputs) -> dict[object, int]:
    """Return the number of axes of each tensor."""
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(tensors(inputs))
    return {key: value.dim() for key, value in pairs if isinstance(value, Tensor)}


def counted_axes(axes: Mapping[object, int]) -> str:
    numbers = " and ".join(map(str, axes.values()))
    return f"{numbers} axis" if numbers == "1" else f"{numbers} axes"
