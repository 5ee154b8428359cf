"""A trace: the steps of a loop that was followed, and what can be said of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from ntkexp.effects.mean import MEANS, Effects, MeanName
from ntkexp.foreign_loop.attribution import Backwards
from ntkexp.foreign_loop.example_loss import ExampleLoss
from ntkexp.foreign_loop.followed_effects import FollowedEffects, followed_effects
from ntkexp.foreign_loop.followed_training import FollowedTraining
from ntkexp.foreign_loop.kept.save import PROOFS, save
from ntkexp.foreign_loop.kept.shown import Decode, Gallery
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Function, Inputs

if TYPE_CHECKING:
    import xarray as xr


@dataclass
class Trace:
    """The `steps` of a `module`, whose weights are given to it."""

    steps: AbstractSteps
    module: nn.Module
    output: str | int | None
    queries: Inputs
    loss: ExampleLoss | None = None
    folder: RunFolder | None = None

    @cached_property
    def function(self) -> Function:
        """The module as a function of its weights."""
        return function_of(self.module, self.output)

    @cached_property
    def examples(self) -> dict[str, int]:
        """The examples that were seen, in order of their first use."""
        return {name: place for place, name in enumerate(dict.fromkeys(self.steps.names()))}

    def refuse_empty(self) -> None:
        """Refuse a loop of which nothing was seen."""
        if not len(self.steps):
            raise Mistake("no step was followed; were the model and the optimizer those that the loop uses?")
        if not self.examples:
            raise Mistake("the model was never called with gradients enabled; follow the module that the loop calls")

    def effects(self, mean: MeanName, memory_gb: float, *, one_step: bool) -> FollowedEffects:
        """What would change without each example, if the loss is known."""
        if self.loss is None:
            raise Mistake(
                "effects=True: effects are derivatives of the gradient, for which the loss is needed; follow with "
                "loss=, a function of outputs and call that gives one loss for each example"
            )
        training = FollowedTraining(steps=self.steps, function=self.function, loss=self.loss, names=self.examples)
        return followed_effects(training, self.function, self.queries, MEANS[mean], memory_gb, one_step=one_step)

    def attribute(
        self,
        *,
        effects: Effects = False,
        mean: MeanName = "renormalised",
        memory_gb: float = 4.0,
        decode: Decode | None = None,
    ) -> xr.Dataset:
        """What each example added to each output of each query; parts and decay add up to f_T − f_0.

        With `effects`, also by how much the output would change if the example were left out: as the derivative of the
        whole training foretells it, or with 'one_step' as steps without the example do. `mean` says whether the others
        of a batch then share what is left (renormalised), or keep their shares (fixed).

        A trace in a folder makes a run of it, which `ntkexp report` and `ntkexp explain` show; where examples are of
        tokens, `decode` gives their text, as that of a tokenizer does.
        """
        gallery = Gallery()
        found = self.found(gallery)
        if effects:
            would = self.effects(mean, memory_gb, one_step=effects == "one_step")
            facts = {
                "kind": "one_step" if effects == "one_step" else "derivative",
                "mean": mean,
                "growth": would.growth,
            }
            found["effect"] = (("probe", "out", "example"), would.values.cpu().numpy(), facts)
        if self.folder is not None:
            save(self.folder, found, self.queries, gallery, decode)
        return found

    def found(self, gallery: Gallery) -> xr.Dataset:
        """The same, without a run and effects; examples are put where they can be looked at."""
        import xarray as xr  # noqa: PLC0415  slow, and following needs none

        self.refuse_empty()
        steps, end = self.steps, self.steps.end
        reader = Reader(self.function, frozenset(end), programs=ProgramCache())
        last = reader.record(end, self.queries)
        back = Backwards(reader, self.queries, last)
        outputs = last.outputs
        parts, decay = outputs.new_zeros(*outputs.shape, len(self.examples)), torch.zeros_like(outputs)
        by_step, figures = outputs.new_zeros(*outputs.shape, len(steps)), []
        for step, later in steps.backwards():
            found = back.take(step, later, steps)
            for call in step.calls:
                gallery.take(call.names, call.inputs)
            places = [self.examples[name] for call in step.calls for name in call.names]
            parts.index_add_(2, torch.tensor(places, dtype=torch.long, device=parts.device), found.parts)
            decay += found.decay
            by_step[:, :, step.index] = found.parts.sum(2) + found.decay
            figures.append((found.factor, found.gradient_error, step.rule_error, found.closure))
        change = outputs - back.later.outputs
        proofs = torch.tensor(figures[::-1], dtype=torch.float64).T
        arrays = {
            "contribution": (("probe", "out", "example"), parts),
            "decay": (("probe", "out"), decay),
            "by_step": (("probe", "out", "step"), by_step),
            "start": (("probe", "out"), back.later.outputs),
            "change": (("probe", "out"), change),
            **{name: (("step",), proof) for name, proof in zip(PROOFS, proofs, strict=True)},
        }
        return xr.Dataset(
            {name: (axes, value.cpu().numpy()) for name, (axes, value) in arrays.items()},
            coords={"example": list(self.examples)},
        )
