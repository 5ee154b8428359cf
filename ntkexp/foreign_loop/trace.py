"""A trace: the steps of a loop that was followed, and what can be said of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from ntkexp.effects.mean import Effects, MeanName
from ntkexp.foreign_loop.altered_loop import Again, altered_loop
from ntkexp.foreign_loop.attribution import Backwards
from ntkexp.foreign_loop.call_readers import CallReaders
from ntkexp.foreign_loop.called_module import CalledModule
from ntkexp.foreign_loop.cost_of_casts import away
from ntkexp.foreign_loop.example_loss import ExampleLoss
from ntkexp.foreign_loop.kept.save import CASTS, PROOFS, save
from ntkexp.foreign_loop.kept.shown import Decode, Gallery
from ntkexp.foreign_loop.kept.trace_folder import TraceFolder
from ntkexp.foreign_loop.loop_effects import loop_effects
from ntkexp.foreign_loop.steps import AbstractSteps
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.mistake import Mistake
from ntkexp.path.backward.half_times import STRETCHES, halves_at_zero
from ntkexp.records.folder import RunFolder
from ntkexp.shapes import Function, Inputs

if TYPE_CHECKING:
    import xarray as xr


MASSES = 2**27
"""What acted when is told if it takes no more numbers than these, a gigabyte."""


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
    def called(self) -> CalledModule:
        """The module as functions of its weights."""
        return CalledModule(self.module, self.output, self.steps.autocast)

    @property
    def function(self) -> Function:
        """The one that is asked at the queries."""
        return self.called.function

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

    def attribute(
        self,
        *,
        effects: Effects = False,
        mean: MeanName = "renormalised",
        memory_gb: float = 4.0,
        decode: Decode | None = None,
        again: Again | None = None,
    ) -> xr.Dataset:
        """What each example added to each output of each query; parts and decay add up to f_T − f_0.

        Of a loop under autocast, f is the model without casts, and what their rounding did stands in `casts`.

        With `effects`, also by how much the output would change if the example were left out: as means without it and
        the derivative of all that follows foretell it, or with 'one_step' as steps without it do; 'derivative' is that
        by its weight, alone. `mean` says whether the others of a batch then share what is left (renormalised), or keep
        their shares (fixed).

        `again` is a function that carries the loop out anew, from its seeds on, with `follow` in it. Then effects are
        held against trainings without some examples; it is `follow` that leaves these out.

        A trace in a folder makes a run of it, which `ntkexp report` and `ntkexp explain` show; where examples are of
        tokens, `decode` gives their text, as that of a tokenizer does.
        """
        if altered_loop() is not None:
            raise Mistake(
                "again=: the function attributes what it has trained, and would do so for ever; let it only train"
            )
        if again is not None and not effects:
            raise Mistake("again=: trainings without examples are what effects are held against; add effects=True")
        gallery = Gallery()
        found = self.found(gallery)
        known = None
        if effects:
            known = loop_effects(self, effects, mean, memory_gb, again)
            found["effect"] = (("probe", "out", "example"), known.values.cpu().numpy(), known.facts)
        if self.folder is not None:
            save(self.folder, found, self.queries, gallery, decode, None if known is None else known.check)
            TraceFolder(self.folder).sweep.unlink(missing_ok=True)
        return found

    def found(self, gallery: Gallery) -> xr.Dataset:
        """The same, without a run and effects; examples are put where they can be looked at."""
        import xarray as xr  # noqa: PLC0415  slow, and following needs none

        self.refuse_empty()
        steps, end = self.steps, self.steps.end
        reader = Reader(self.function, frozenset(end), programs=ProgramCache())
        last = reader.record(end, self.queries)
        back = Backwards(reader, CallReaders(self.called, reader.trained), self.queries, last)
        outputs = last.outputs
        parts = outputs.new_zeros(*outputs.shape, len(self.examples))
        decay, casts = torch.zeros_like(outputs), torch.zeros_like(outputs)
        by_step, figures = outputs.new_zeros(*outputs.shape, len(steps)), []
        halves = halves_at_zero(len(steps), parts) if STRETCHES * parts.numel() <= MASSES else None
        for step, later in steps.backwards():
            found = back.take(step, later, steps)
            for call in step.calls:
                gallery.take(call.names, call.inputs)
            places = [self.examples[name] for call in step.calls for name in call.names]
            rows = torch.tensor(places, dtype=torch.long, device=parts.device)
            parts.index_add_(2, rows, found.parts)
            if halves is not None:
                halves.add_rows(step.index, rows, found.parts)
            decay += found.decay
            casts += found.casts
            by_step[:, :, step.index] = found.parts.sum(2) + found.decay + found.casts
            figures.append((found.factor, found.gradient_error, step.rule_error, found.closure, found.casts_error))
        change = outputs - back.later.outputs
        proofs = torch.tensor(figures[::-1], dtype=torch.float64).T
        arrays = {
            "contribution": (("probe", "out", "example"), parts),
            "decay": (("probe", "out"), decay),
            "by_step": (("probe", "out", "step"), by_step),
            "start": (("probe", "out"), back.later.outputs),
            "change": (("probe", "out"), change),
            **{name: (("step",), proof) for name, proof in zip(PROOFS, proofs, strict=False)},
        }
        facts: dict[str, str | float] = {}
        if self.called.casts is not None:
            arrays |= {"casts": (("probe", "out"), casts), CASTS: (("step",), proofs[-1])}
            facts = {
                "autocast": self.called.casts.kind,
                "away": away(self.called, end, self.queries, outputs),
            }
        if halves is not None:
            arrays["half_by"] = (("probe", "out", "example"), halves.by([1.0] * len(steps)))
        return xr.Dataset(
            {name: (axes, value.cpu().numpy()) for name, (axes, value) in arrays.items()},
            coords={"example": list(self.examples)},
            attrs=facts,
        )
