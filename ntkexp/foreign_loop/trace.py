"""A trace: the recorded steps of a followed loop, and the contribution of each example
to the outputs at the queries.

    f_T − f_0 = Σ contributions + decay + rounding + outside

`attribution.LoopBackward` replays and proves each step, from the last to the first, and
adds up the terms of all steps. `outside` is the change after the last step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.allocator import memory_kept, release_memory
from ntkexp.capacity import DEFAULT_MEMORY, MemoryBudget
from ntkexp.effects.sweep import MEANS, Effects, MeanName
from ntkexp.foreign_loop.again import Again, altered_loop
from ntkexp.foreign_loop.arguments import NEVER_CALLED
from ntkexp.foreign_loop.attribution import SURROGATE_GRADIENTS, LoopBackward
from ntkexp.foreign_loop.batch_norm import (
    BatchNormMode,
    batch_norm_sentence,
    checked_mode,
    numbers_of,
)
from ntkexp.foreign_loop.call import Circumstances, ModelCall
from ntkexp.foreign_loop.closing import rounding_sentence
from ntkexp.foreign_loop.effects import attributes_of, loop_effects, training_of
from ntkexp.foreign_loop.equal_inputs import equal_inputs_sentence
from ntkexp.foreign_loop.example_gradients import CallReaders
from ntkexp.foreign_loop.example_losses import LossFunction, store_function
from ntkexp.foreign_loop.fingerprints import OutputsAtEnds, Replayed
from ntkexp.foreign_loop.gallery import Decode, Gallery, ShownExamples, shown, texts
from ntkexp.foreign_loop.known_optimizers import named
from ntkexp.foreign_loop.loop_sums import (
    LoopSums,
    NamedArrays,
    StepMemory,
    sums_at_zero,
)
from ntkexp.foreign_loop.measure import Measure, MeasuredQueries, QueryCalls
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.foreign_loop.outside import outside_sentence
from ntkexp.foreign_loop.positions import Positions, positions_of
from ntkexp.foreign_loop.rule import AbstractOptimizerRule
from ntkexp.foreign_loop.run_folder import write_run
from ntkexp.foreign_loop.step import AbstractSteps
from ntkexp.foreign_loop.store.chosen import share_sentence
from ntkexp.foreign_loop.store.disk import LoopOnDisk
from ntkexp.foreign_loop.store.files import START, TraceFolder
from ntkexp.foreign_loop.store.replay import ReplayedSteps
from ntkexp.foreign_loop.user_loss import ExampleLoss
from ntkexp.foreign_loop.watch import Watch
from ntkexp.kernel import ProgramCache, Reader, Tape, columns, plain_kernels
from ntkexp.kernel.record.tape import examples, map_tensors
from ntkexp.mistake import Mistake, in_short
from ntkexp.model.functional import Output
from ntkexp.path.backward_sum import BackwardSum
from ntkexp.path.components import By, Components, components_of
from ntkexp.progress import AbstractProgress
from ntkexp.records.contributions import MEASURE, OUTSIDE, SURROGATE, LeaveOut
from ntkexp.records.folder import CONFIG, RunFolder
from ntkexp.report.progress import Announced, in_place, quiet_log
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.text import counted, is_digest

if TYPE_CHECKING:
    from ntkexp.report.scores import Attribution


LOG = logging.getLogger("ntkexp.follow")


@dataclass(repr=False)
class Trace:
    """The recorded steps of a followed loop, and a copy of its model for replays.

    `ntkexp.follow` yields it. `print(trace)` shows the number of steps,
    examples and queries."""

    steps: AbstractSteps
    module: nn.Module
    output: Output
    queries: Inputs
    loss: ExampleLoss | None = None
    folder: RunFolder | None = None
    rank: int = 0  # rank of this process
    budget: MemoryBudget = DEFAULT_MEMORY
    by: By | None = None  # components by which contributions are split
    ends: OutputsAtEnds = field(default_factory=OutputsAtEnds)
    batch_norm: BatchNormMode = "exact"
    # measure to attribute instead of the outputs
    measured: MeasuredQueries | None = None
    watch: Watch | None = None  # the hooks on the loop; None after the loop

    def __repr__(self) -> str:
        self.refresh()
        steps = f"{counted(len(self.steps), 'step')} of {type(self.module).__name__}"
        seen = counted(len(self.examples), "example")
        if self.naming:
            seen += f" ({self.naming})"
        count = examples(self.queries)
        queries = "1 query" if count == 1 else f"{count} queries"
        where = "in memory" if self.folder is None else f"in {self.folder.path}"
        return f"Trace of {steps}, {seen}, {queries}, {where}"

    @property
    def naming(self) -> str:
        """Advice to name the examples. It is empty if they have names."""
        if not self.examples or not all(map(is_digest, self.examples)):
            return ""
        return (
            "numbered in order of first use; follow(…, ids='dataset') names them by their index in "
            "a Dataset"
        )

    def refresh(self) -> None:
        """Reread the store, because the loop may have taken more steps."""
        self.steps.refresh()
        for name in ("called", "examples"):
            vars(self).pop(name, None)

    @cached_property
    def called(self) -> CalledModule:
        """The model as a function of its weights: for queries in evaluation mode, or
        under the circumstances of a recorded call."""
        return CalledModule(
            self.module,
            self.output,
            self.steps.autocast,
            self.steps.same_kernels,
            measured=self.measured,
        )

    @property
    def function(self) -> Function:
        """The model in evaluation mode, followed by the measure if there is one."""
        return self.called.function

    @property
    def measure(self) -> Measure | None:
        """The measure to attribute, or None
        if the outputs themselves are attributed."""
        return None if self.measured is None else self.measured.measure

    @cached_property
    def examples(self) -> dict[str, int]:
        """The index of each example by name, in order of first use."""
        return {
            name: index for index, name in enumerate(dict.fromkeys(self.steps.names()))
        }

    def outside(self) -> Float[Tensor, "query out"] | None:
        """Return the change of the outputs caused
        by weight changes after the last recorded step.

        Return None if no weight or buffer changed.
        """
        outside = self.steps.outside
        if not outside.tensors:
            return None
        end = self.steps.end | self.steps.statistics(len(self.steps))
        return outside.change(self.called, self.called.casts, end, self.queries)

    # --- In the loop

    def losses(self, function: LossFunction, *batch: object) -> Tensor:
        """Return `function(model, *batch)`, one loss for each example,
        and record the call.

        Use it in the loop if the loss is not a function of the outputs of `model(x)`.
        Examples are a loss that differentiates the model or calls it at other weights,
        and a graph whose nodes exchange messages. Compute the loop's loss from the
        returned losses. An example then contributes through the gradient of its loss.

        Args:
            function: a function of the model and the batch that returns a tensor
                [examples]. It is called again when the loop is attributed, so it must
                use the model that it receives, and have no side effects.
            *batch: tensors and numbers. An example is named by its rows in the tensors
                that have one row for each loss.

        Returns:
            The losses, a tensor [examples]. Compute the loss of the loop from them.

        Raises:
            Mistake: outside of the loop, or if the function cannot be recorded.

        >>> from ntkexp import follow
        >>> def losses(model, x):
        ...     x = x.clone().requires_grad_()
        ...     (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ...     return (slope[:, 0] - 1).square()
        >>> net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> sgd = torch.optim.SGD(net.parameters(), 0.1)
        >>> with follow(net, sgd, queries=torch.ones(1, 1)) as trace:
        ...     trace.losses(losses, torch.zeros(4, 1) + torch.arange(4)[:, None]).mean().backward()
        ...     sgd.step()
        >>> trace.attribute(quiet=True).sizes["example"]
        4
        """
        if self.watch is None:
            raise Mistake(
                "trace.losses: call it inside the loop, while the loop is followed"
            )
        return self.watch.calls.losses(function, batch)

    # --- Checks

    def refuse_empty(self) -> None:
        """Raise if no step or no example was followed."""
        if not len(self.steps):
            if self.steps.count:
                raise Mistake(
                    f"steps=: the loop took {counted(self.steps.count, 'step')}, "
                    "and none of the chosen ones"
                )
            raise Mistake(
                "no step was followed; does the loop use this model and this optimizer?"
            )
        if not self.examples:
            raise Mistake(NEVER_CALLED)

    def refuse_outside(self) -> None:
        """Raise for leave-out effects if the model changed after the last step."""
        change = self.outside()
        if change is not None and bool(change.any()):
            raise Mistake(
                f"{self.steps.outside.named} changed after the last step (a loaded "
                "average, a clamp?), and effects of examples cannot include this "
                "change, because it is unknown without an example; leave the loop "
                "before this change"
            )

    def refuse_coupled(self) -> None:
        """Raise for leave-out effects if batch statistics couple the examples."""
        if self.steps.statistics(0):
            raise Mistake(
                "effects do not know how the batch statistics change without an "
                "example, and BatchNorm was in training mode; put these layers in "
                "eval(), or leave effects out"
            )

    def refuse_losses(self) -> None:
        """Raise for leave-out effects if the loop called `trace.losses`."""
        if any(
            call.losses is not None for calls in self.steps.calls() for call in calls
        ):
            raise Mistake(
                "effects need losses that are functions of the outputs, but the loop "
                "called trace.losses; ask only for contributions"
            )

    def refuse_effects(self, mean: MeanName) -> None:
        """Raise if leave-out effects cannot be computed, before the work begins."""
        if self.omits_steps:
            raise Mistake(
                "effects need all steps, but steps= omits some; follow all steps"
            )
        if self.steps.began_with_momentum:
            raise Mistake(
                "effects need an optimizer without momentum from before the followed "
                "steps; ask only for contributions"
            )
        self.refuse_empty()
        self.refuse_losses()
        self.refuse_outside()
        self.refuse_coupled()
        if self.steps.shared is not None:
            raise Mistake(
                "effects need one optimizer for each parameter, but several updated "
                f"'{self.steps.shared}'; ask only for contributions, or follow each "
                "stage alone"
            )
        training_of(self, mean).step(len(self.steps) - 1)

    # --- Attribution

    def attribute(
        self,
        *,
        effects: Effects = False,
        mean: MeanName = "renormalised",
        by: By | None = None,
        positions: bool = False,
        memory_gb: float | None = None,
        decode: Decode | None = None,
        again: Again | None = None,
        batch_norm: BatchNormMode | None = None,
        quiet: bool = False,
    ) -> Attribution:
        """Return the contribution of each example to each output of each query,
        as a data set.

        `contribution`, summed over examples, and the other parts of the change add up
        to `change`, f_T − f_0. The other parts are:

        - `decay`: the effect of weight decay.
        - `rounding`: the effect of casts and of rounding errors in gradients.
        - `outside`: the change after the last step, for example a loaded average of weights.
        - `statistics`: the effect of BatchNorm's running statistics, in training mode.
        - `jumps`: the effect of changed discrete choices at the queries, such as an argmax.
        - `other_steps` and `carried`, with `steps=`: the change in steps that were not recorded,
          and the effect of momentum from before the recorded steps. The attribute `share` is the
          fraction of the change f_T − f_0 that the recorded steps produced.

        Args:
            effects: add leave-out effects as `effect`. The leave-out effect of an
                example is the change of each output if the example is left out. It is
                predicted by differentiating through all later steps. 'derivative'
                returns the derivative with respect to the example's weight. 'one_step'
                recomputes each step without the example, and differentiates through the
                later steps.
            mean: how a batch mean changes if an example is left out: 'renormalised'
                divides by the remaining examples, and 'fixed' leaves the shares of the
                other examples unchanged.
            by: split contributions by the parameters through which they act: by
                'module', by 'parameter', or by named patterns of parameters, {'first':
                ['layers.0.*'], 'rest': ['*']}. `by_component` adds up over `component`
                to `contribution`, `decay_by_component` to `decay`, and
                `by_component_step` to `by_step`.
            positions: split contributions by the position of the loss in a text:
                `by_position[query, out, example, position]` adds up over `position` to
                `contribution`. The loop's outputs must be [example, position, class] or [example,
                class, position]. Each position takes one back-propagation of the call.
            memory_gb: the memory for sums, by default the option of `follow`.
            decode: a function from token ids to their text,
                such as a tokenizer's `decode`.
            again: a function that runs the loop again, including its seeds, with
                `follow` in it. Leave-out effects are then checked by retraining: in
                these runs, `follow` gives some examples weight 0.
            batch_norm: with 'exact', an example contributes through its loss and the
                whole batch, which takes one backward pass for each example. With
                'constant', batch statistics are constants, and one pass suffices.
                `coupling` is then the interaction of examples through these statistics.
            quiet: show no progress.

        Returns:
            The data set. `found.explain(query)` prints the terms of one prediction, `found.plot`
            has pictures, and `found.to_scores()` returns a matrix for other libraries.

        Raises:
            Mistake: if no step was followed, if a proof fails, or if the sums need more
                memory than `memory_gb`.

        If the trace is in a folder, the folder becomes a run, which `ntkexp report` and
        `ntkexp explain` show. In a notebook, the result shows the examples with the
        largest contributions to the first queries."""
        if altered_loop() is not None:
            raise Mistake(
                "again=: the function calls attribute() itself, and would never end; "
                "let it only train"
            )
        refuse_arguments(effects, mean, again, decode, positions)
        self.refresh()
        if self.rank:
            raise Mistake(
                f"rank {self.rank} has written its part of the trace, and one process "
                "attributes the whole: call trace.attribute() only if rank == 0, or "
                "later ntkexp attribute FOLDER"
            )
        if memory_gb is not None:
            self.budget = MemoryBudget.of_gb(memory_gb)
        self.by = self.by if by is None else by
        self.batch_norm = checked_mode(
            self.batch_norm if batch_norm is None else batch_norm
        )
        if effects:
            self.refuse_effects(mean)
        gallery = Gallery()
        # call `decode` once, so that its errors occur before the work begins
        if decode is not None:
            texts(shown(self.queries)[:1], decode)

        progress = in_place(quiet)
        check: LeaveOut | None = None
        with memory_kept(self.module.parameters()), quiet_log(quiet):
            attribution = self.contributions(gallery, progress, positions=positions)
            if effects:
                check = self.add_effects(attribution, effects, mean, again, progress)
        if self.folder is None:
            if not quiet:
                warn_of_caveats(attribution)
        else:
            write_run(self.folder, attribution, self.queries, gallery, decode, check)
            TraceFolder(self.folder).sweep.unlink(missing_ok=True)
        return attribution.showing(
            ShownExamples.of(attribution, self.queries, gallery, decode)
        )

    def add_effects(
        self,
        attribution: Attribution,
        effects: Effects,
        mean: MeanName,
        again: Again | None,
        progress: AbstractProgress,
    ) -> LeaveOut | None:
        """Add leave-out effects to an attribution.
        Return their comparison with retrainings, if there are any."""
        if SURROGATE in attribution.attrs:
            raise Mistake(
                f"effects: {SURROGATE_GRADIENTS}, but effects need these derivatives; "
                "ask only for contributions"
            )
        known = loop_effects(self, effects, mean, self.budget, again, progress)
        axes = ("query", "out", "example")
        values = known.values.cpu().numpy()
        attribution["effect"] = (axes, values, attributes_of(known))
        return known.check

    def contributions(
        self, gallery: Gallery, progress: AbstractProgress, *, positions: bool
    ) -> Attribution:
        """Return the attribution without leave-out effects,
        and without writing a run folder.

        The examples are added to `gallery`.
        """
        from ntkexp.report.scores import Attribution  # noqa: PLC0415  loads xarray, which is slow

        self.refuse_empty()
        release_memory(self.module.parameters())
        steps = self.steps
        text_positions = None
        if positions:
            text_positions = positions_of(steps.calls(), self.called.couples)
        end = steps.end | numbers_of(steps.statistics(len(steps)))
        reader = Reader(
            self.function,
            frozenset(steps.end),
            programs=ProgramCache(),
            whole_batch=self.measured is not None,
            of_values=True,
        )
        last = reader.record(end, self.queries)
        coords: dict[str, Any] = {"example": list(self.examples)}
        if self.measured is not None:
            coords["out"] = self.called.prove_measure(reader, last)
        if self.omits_steps:
            coords["step"] = list(steps.indices)
        components = {} if self.by is None else components_of(self.by, steps.end)
        if components:
            coords["component"] = list(components)

        # replay, prove and add the steps, from the last to the first
        back = self.backward(reader, last, components, text_positions)
        self.go_back(back, gallery, progress)
        sums = back.added
        start = back.later.outputs
        self.refuse_other_ends(start, end, last.outputs)

        # f_T − f_0, including `outside`, the change that no step made
        arrays = self.arrays_of(sums)
        change = last.outputs - start
        outside = self.outside()
        if outside is not None:
            change = change + outside
            arrays[OUTSIDE] = (("query", "out"), outside)
        arrays["start"] = (("query", "out"), start)
        arrays["change"] = (("query", "out"), change)

        # the final check: the parts of all steps must add up to the change of the
        # outputs
        closing = sums.closing.check(
            sums.totals.contributions, sums.total, start, last.outputs
        )
        closing.refuse()
        for sentence in (closing.sentence, *back.caveats.values()):
            progress.say(f"ntkexp: {sentence}")

        facts = closing.facts | gallery.repeated.facts(self.examples)
        if self.omits_steps:
            by_these_steps = last.outputs - start - sums.other_steps
            facts |= self.facts_of_share(by_these_steps, change)
        facts |= self.facts_of_rounding(sums, end, last.outputs, change)
        if steps.outside.names:
            facts[OUTSIDE] = ", ".join(steps.outside.names)
        if self.measured is not None:
            facts[MEASURE] = self.measured.name
        return Attribution(
            {
                name: (axes, value.cpu().numpy())
                for name, (axes, value) in arrays.items()
            },
            coords=coords,
            attrs=facts | back.caveats,
        )

    @property
    def omits_steps(self) -> bool:
        """True if `steps=` omits some steps of the loop."""
        return len(self.steps) < self.steps.count

    def backward(
        self,
        reader: Reader,
        last: Tape,
        components: Components,
        text_positions: Positions | None,
    ) -> LoopBackward:
        """Return the sum over steps, before the first step is added. `last` is the
        recorded forward pass of the queries at the end."""
        readers = CallReaders(
            self.called,
            reader.trained,
            self.batch_norm,
            self.budget.bytes / 2,
            directions=last.outputs.numel() * max(1, len(components)),
            positions=text_positions,
        )
        return LoopBackward(
            reader,
            readers,
            self.queries,
            last,
            self.examples,
            self.begin_sums(last, components, text_positions),
            self.steps.indices,
            BackwardSum(components=tuple(components.values())),
        )

    def arrays_of(self, sums: LoopSums) -> NamedArrays:
        """Return the sums over steps by name."""
        updates_statistics = bool(numbers_of(self.steps.statistics(0)))
        return sums.arrays(
            cast=self.called.loop_is_cast,
            batch_norm=self.batch_norm if updates_statistics else None,
            some_steps=self.omits_steps,
        )

    def refuse_other_ends(self, start: Tensor, end: Weights, outputs: Tensor) -> None:
        """Raise if the replay does not return the outputs f_0 and f_T of the user's
        model. `start` and `outputs` are f_0 and f_T in the replay."""
        steps = self.steps
        first = steps.start(0) | numbers_of(steps.statistics(0))
        began = self.replayed(first, start)
        ended = self.replayed(end, outputs)
        self.ends.check(began, ended, steps.count, measured=self.measured is not None)

    def begin_sums(
        self,
        tape: Tape,
        components: Components,
        text_positions: Positions | None,
    ) -> LoopSums:
        """Return sums that start at zero. Raise if the sums
        and one step do not fit into memory."""
        # For SGD and Adam, the adjoint V is a multiple of U, so U suffices. Other
        # optimizers may need U, V and MᵀJ̄ (see `StepMemory`).
        other_rules = any(not known.rule.has_effects for known in self.steps.known)
        adjoints = 1
        if other_rules:
            adjoints = 3
        # with Nesterov momentum, steps with clipped values need V
        elif self.steps.uses_setting("nesterov"):
            adjoints = 2
        step = StepMemory(
            tape,
            rows=self.steps.most_examples(),
            sizes=[weight.numel() for weight in self.steps.end.values()],
            adjoints=adjoints,
            has_batch_norm=bool(self.steps.statistics(0)),
        )
        examples = len(self.examples)
        return sums_at_zero(
            step, examples, len(self.steps), self.budget, components, text_positions
        )

    def go_back(
        self, back: LoopBackward, gallery: Gallery, progress: AbstractProgress
    ) -> None:
        """Add all steps to the sums in `back`. Add the
        examples of the steps to `gallery`."""
        announced = Announced("ntkexp: attribution", len(self.steps), progress)

        def explained(calls: Sequence[ModelCall]) -> None:
            for call in calls:
                gallery.add(call)
            announced.step()

        back.over(self.steps, explained)
        announced.stop()
        back.multiplied.refuse_unexplained()

    def replayed(
        self, weights: Weights, outputs: Float[Tensor, "query out"]
    ) -> tuple[Replayed, ...]:
        """Return candidates for the outputs of the user's model at the queries.

        Without casts, `outputs` is the only candidate. With casts, the user's model may
        have run with or without autocast, so there is one candidate for each case.
        """
        if not self.called.loop_is_cast:
            return (Replayed(self.function, weights, self.queries, outputs),)
        circumstances = Circumstances(autocast=self.called.casts)
        cast_eps = self.called.cast_eps_of(circumstances)
        candidates = list[Replayed]()
        for function in self.called.as_evaluated:
            # some autocast contexts raise for the model's dtypes
            with torch.no_grad(), plain_kernels(), suppress(RuntimeError):
                cast = columns(function, weights, self.queries).to(outputs)
                # `Replayed` estimates the effect of the casts by noise: it adds noise as
                # large as the casts to the weights and inputs of the exact function
                candidates.append(
                    Replayed(self.function, weights, self.queries, cast, cast_eps)
                )
        return tuple(candidates)

    def facts_of_share(
        self,
        by_these_steps: Float[Tensor, "query out"],
        change: Float[Tensor, "query out"],
    ) -> dict[str, str | float]:
        """Return the number of steps of the loop,
        and the share of the followed steps in the change."""
        share = 0.0
        if bool(change.any()):
            share = float((by_these_steps * change).sum() / change.square().sum())
        return {"taken": self.steps.count, "share": share}

    def facts_of_rounding(
        self,
        sums: LoopSums,
        end: Weights,
        outputs: Float[Tensor, "query out"],
        change: Float[Tensor, "query out"],
    ) -> dict[str, str | float]:
        """Return the share of rounding in the change.

        If the loop used casts, return the dtypes of the casts instead, and the distance
        between the outputs with and without casts."""
        facts: dict[str, str | float] = {}
        called = self.called
        casts = called.casts
        if called.loop_is_cast:
            function = called.with_measure(called.under(casts))
            with torch.no_grad():
                away = columns(function, end, self.queries) - outputs
            if called.short is not None:
                facts["frozen"] = str(called.short).removeprefix("torch.")
            if casts is not None:
                facts["autocast"] = casts.kind
            facts["away"] = float(away.norm())
        else:
            facts["rounding"] = float(sums.totals.rounding.norm()) / (
                float(change.norm()) or 1.0
            )
        rounding = [
            known.kind.__name__ for known in self.steps.known if known.rule.rounds
        ]
        if rounding:
            facts["rounds"] = " and ".join(rounding)
        return facts


def warn_of_caveats(attribution: Attribution) -> None:
    """Log a warning for each part of the change that contributions do not include."""
    sentences = (
        rounding_sentence(attribution),
        batch_norm_sentence(attribution),
        outside_sentence(attribution),
        share_sentence(attribution),
        equal_inputs_sentence(attribution),
    )
    for sentence in filter(None, sentences):
        LOG.warning("ntkexp: %s", sentence)


def refuse_arguments(
    effects: object, mean: object, again: object, decode: object, positions: object
) -> None:
    """Raise for arguments of the wrong type, and for `again` without `effects`."""
    if not isinstance(mean, str) or mean not in MEANS:
        raise Mistake(f"mean={in_short(mean)}: choose one of {', '.join(MEANS)}")
    kinds = (False, True, "one_step", "derivative")
    if not isinstance(effects, bool | str) or effects not in kinds:
        raise Mistake(
            f"effects={in_short(effects)}: choose one of {', '.join(map(str, kinds))}"
        )
    if not isinstance(positions, bool):
        raise Mistake(f"positions={in_short(positions)}: give True or False")
    if again is not None and not effects:
        raise Mistake(
            "again=: it checks effects by retraining without examples; add effects=True"
        )
    for name, function in (("again", again), ("decode", decode)):
        if not (function is None or callable(function)):
            raise Mistake(f"{name}= is a {type(function).__name__}; give a function")


# --- A trace in a folder.


def find_trace(folder: Path) -> TraceFolder:
    """Return the trace in a folder, or raise if there is none."""
    files = TraceFolder(RunFolder(folder.expanduser()))
    path = files.folder.path
    if not (path / CONFIG).is_file() or "follow" not in files.folder.config:
        raise Mistake(f"{path} holds no trace; ntkexp.follow(…, to=…) writes one")
    return files


def load_trace(
    files: TraceFolder,
    module: nn.Module,
    measure: Measure | None = None,
    rules: Sequence[AbstractOptimizerRule] = (),
    losses: Sequence[LossFunction] = (),
) -> Trace:
    """Return the trace in a folder.

    The stored tensors are copied into `module`, which must have the architecture of the
    followed model. Functions are stored only by name, so pass them again: the measure,
    the rules of optimizers other than PyTorch's, and the functions of
    `trace.losses`."""
    start = files.read(files.path / START)
    if (measure is None) != (measure_name(files) is None):
        raise Mistake(
            f"measure=: the trace in {files.folder.path} explains "
            f"{measure_name(files) or 'outputs'}; give the same, or follow the loop "
            "again"
        )
    measured = None
    if measure is not None:
        measured = MeasuredQueries(measure, QueryCalls.read(start["calls"]))
    weights: Weights = files.read(files.weights_at(0))["weights"]
    files.refuse_other_start(weights)
    load_tensors(files, module, weights, start["still"])
    module.eval()
    optimizers = [
        named(name, rules) for name in files.folder.config["follow"]["optimizers"]
    ]
    functions: dict[str, LossFunction] = {}
    for function in losses:
        store_function(functions, function)
    steps = ReplayedSteps(
        LoopOnDisk(files, functions), module, start["output"], optimizers
    )
    if not files.ended.exists():
        LOG.warning(
            "ntkexp: the trace in %s has %d steps and no end: the training was interrupted after "
            "them, or still runs",
            *(files.folder.path, len(steps)),
        )
    device = next(module.parameters()).device
    return Trace(
        steps,
        module,
        start["output"],
        map_tensors(lambda tensor: tensor.to(device), start["queries"]),
        folder=files.folder,
        by=start.get("by"),
        ends=outputs_at_ends(files.folder),
        measured=measured,
    )


def load_tensors(
    files: TraceFolder, module: nn.Module, weights: Weights, still: Weights
) -> None:
    """Copy the stored tensors into a module.
    Raise if a name or shape does not match."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = {**still, **weights}
    known = state.keys() | module.state_dict().keys()
    wrong = sorted(weights.keys() - state.keys()) or sorted(tensors.keys() - known)
    if not wrong:
        wrong = [
            name
            for name in state
            if name in tensors and state[name].shape != tensors[name].shape
        ]
    if wrong:
        raise Mistake(
            f"the module is not the one that was followed in {files.folder.path}: "
            f"'{wrong[0]}' is missing or differs"
        )
    with torch.no_grad():
        for name in tensors.keys() & state.keys():
            state[name].data = tensors[name].clone().to(state[name].device)


def measure_name(files: TraceFolder) -> str | None:
    """Return the name of the measure of a trace, or None if it attributes outputs."""
    measure = files.folder.config["follow"].get("measure")
    return None if measure is None else str(measure).split()[0]


def example_names_in(files: TraceFolder) -> list[str]:
    """Return the names of a trace's examples in order of first use. No module is
    needed."""
    steps = ReplayedSteps(LoopOnDisk(files), nn.Module(), None, ())
    return list(dict.fromkeys(steps.names()))


def outputs_at_ends(folder: RunFolder) -> OutputsAtEnds:
    """Read the fingerprints of the outputs of the user's model at the start
    and end of the loop.

    Traces of earlier versions have no such fingerprints.
    """
    files = TraceFolder(folder)
    if not files.outputs_at_ends.is_file():
        return OutputsAtEnds()
    return OutputsAtEnds(**files.read(files.outputs_at_ends))
