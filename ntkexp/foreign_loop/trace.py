"""A trace: the steps of a loop that was followed, and what each example added to the outputs at the queries.

    f_T − f_0 = Σ contributions + decay + rounding + outside

On the way back over the steps (`attribution.Backwards`) each is replayed and proved; what it added is summed here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.effects.sweep import MEANS, Effects, MeanName
from ntkexp.foreign_loop.again import Again, altered_loop
from ntkexp.foreign_loop.arguments import MAX_MEMORY_GB, NEVER_CALLED
from ntkexp.foreign_loop.attribution import Backwards, LoopSums, StepCost, sums_at_zero
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
from ntkexp.foreign_loop.example_names import is_digest
from ntkexp.foreign_loop.gallery import Decode, Gallery, ShownExamples, shown, texts
from ntkexp.foreign_loop.measure import Measure, MeasuredQueries, QueryCalls
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.foreign_loop.outside import memory_kept, outside_sentence, release_memory
from ntkexp.foreign_loop.positions import Positions, positions_of
from ntkexp.foreign_loop.rule import AbstractOptimizerRule
from ntkexp.foreign_loop.run_folder import write_run
from ntkexp.foreign_loop.signatures import OutputsAtEnds, Replayed
from ntkexp.foreign_loop.step import AbstractSteps
from ntkexp.foreign_loop.store.chosen import share_sentence
from ntkexp.foreign_loop.store.disk import LoopOnDisk
from ntkexp.foreign_loop.store.files import START, TraceFolder
from ntkexp.foreign_loop.store.replay import ReplayedSteps
from ntkexp.foreign_loop.torch_rules import named
from ntkexp.foreign_loop.user_loss import ExampleLoss
from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape, examples, map_tensors
from ntkexp.kernel.record.taping import columns, plain_kernels
from ntkexp.mistake import Mistake, checked_number, in_short
from ntkexp.path.backward_sum import BackwardSum
from ntkexp.path.components import By, Components, components_of
from ntkexp.progress import AbstractProgress, Silent
from ntkexp.records.contributions import MEASURE, OUTSIDE
from ntkexp.records.folder import CONFIG, RunFolder
from ntkexp.report.progress import Announced, in_place, quiet_log
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.text import counted

if TYPE_CHECKING:
    from ntkexp.report.scores import Attribution


LOG = logging.getLogger("ntkexp.follow")


@dataclass(repr=False)
class Trace:
    """The `steps` of a `module`, whose weights are given to it."""

    steps: AbstractSteps
    module: nn.Module
    output: str | int | None
    queries: Inputs
    loss: ExampleLoss | None = None
    folder: RunFolder | None = None
    rank: int = 0  # of the process that followed, among those that trained together
    memory_gb: float = 4.0  # that may be taken
    by: By | None = None  # components by which contributions are told apart
    ends: OutputsAtEnds = field(default_factory=OutputsAtEnds)
    batch_norm: BatchNormMode = "exact"
    measured: MeasuredQueries | None = (
        None  # what is asked of the outputs at the queries, if not they themselves
    )

    def __repr__(self) -> str:
        self.refresh()
        queries, seen = examples(self.queries), counted(len(self.examples), "example")
        if advice := self.naming:
            seen += f" ({advice})"
        where = "in memory" if self.folder is None else f"in {self.folder.path}"
        of = f"{counted(len(self.steps), 'step')} of {type(self.module).__name__}"
        return (
            f"Trace of {of}, {seen}, {'1 query' if queries == 1 else f'{queries} queries'}, {where}"
        )

    @property
    def naming(self) -> str:
        """How the examples may be named otherwise; nothing where they have names."""
        if not self.examples or not all(map(is_digest, self.examples)):
            return ""
        return "named by digests of what they hold; follow(…, ids='dataset') names them by their places in a Dataset"

    def refresh(self) -> None:
        """Read again what is stored: the loop may have gone on."""
        self.steps.refresh()
        for name in ("called", "examples"):
            vars(self).pop(name, None)

    @cached_property
    def called(self) -> CalledModule:
        """The module as functions of its weights."""
        steps = self.steps
        return CalledModule(
            self.module, self.output, steps.autocast, steps.same_kernels, measured=self.measured
        )

    @property
    def function(self) -> Function:
        """The one that is evaluated at the queries."""
        return self.called.function

    @property
    def measure(self) -> Measure | None:
        """What is asked of the outputs, if not they themselves."""
        return None if self.measured is None else self.measured.measure

    def outside(self) -> Float[Tensor, "probe out"] | None:
        """What changes after the last step did to the outputs at the queries, if there were any."""
        left = self.steps.outside
        end = self.steps.end | self.steps.statistics(len(self.steps))
        return (
            left.change(self.called, self.called.casts, end, self.queries) if left.tensors else None
        )

    def refuse_outside(self) -> None:
        """Refuse effects on a model that changed after the last step."""
        moved = self.outside()
        if moved is not None and bool(moved.any()):
            raise Mistake(
                f"effects of examples lead to the last step, and {self.steps.outside.named} changed after it (an "
                "average that was loaded, a clamp?), and what that would be without an example is not known; "
                "leave the loop before that"
            )

    @cached_property
    def examples(self) -> dict[str, int]:
        """The examples that were seen, in order of their first use."""
        return {name: place for place, name in enumerate(dict.fromkeys(self.steps.names()))}

    def refuse_coupled(self) -> None:
        """Refuse effects of examples whose batch statistics coupled them."""
        if self.steps.statistics(0):
            raise Mistake(
                "without an example the statistics of its batches are others too, which effects do not know: BatchNorm "
                "was in training mode; put these layers in eval(), or leave effects out"
            )

    def refuse_empty(self) -> None:
        if not len(self.steps):
            if self.steps.count:
                raise Mistake(
                    f"steps=: the loop took {counted(self.steps.count, 'step')}, and none of these"
                )
            raise Mistake(
                "no step was followed; were the model and the optimizer those that the loop uses?"
            )
        if not self.examples:
            raise Mistake(NEVER_CALLED)

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
        """What each example added to each output of each query; parts and decay add up to f_T − f_0.

        Of a loop under autocast, f is the model without casts, and what their rounding did stands in `rounding`. What
        changed after the last step, as by an average of weights that was loaded, did what stands in `outside`.

        With `effects`, also by how much the output would change if the example were left out: as means without it and
        the derivative of all that follows predict it, or with 'one_step' as steps without it do; 'derivative' is that
        by its weight, alone. `mean` says whether the others of a batch then share what is left (renormalised), or keep
        their shares (fixed).

        `again` is a function that carries the loop out anew, from its seeds on, with `follow` in it. Then effects are
        compared with trainings without some examples; it is `follow` that leaves these out.

        Of a loop of which some `steps` were followed, what they did adds up with `other_steps` to f_T − f_0, and
        `share` of the attributes says how much of that came of them. `carried` is what the optimizer remembered when
        they began, of gradients before.

        Where BatchNorm was in training mode, `statistics` is what its running statistics did to the outputs. An
        example's part is that of its own loss through the whole batch, a backward pass of the batch for each; with
        `batch_norm="constant"` it is that at constant batch statistics, a pass for all, and `coupling` is what is left.

        `by` tells contributions apart by the parameters through which they came: by 'module', by 'parameter', or by
        names with patterns of parameters, {'first': ['layers.0.*'], 'rest': ['*']}. Then `by_component` adds up over
        `component` to `contribution`, and so do `decay_by_component` to `decay` and `by_component_step` to `by_step`.

        With `positions`, texts are told apart by the places whose losses did it: `by_position[probe, out, example,
        position]` adds up over `position` to `contribution`. Outputs of the loop's calls have to be [example, position,
        class] or [example, class, position]. It takes a back-propagation of a call for each of its positions.

        What is added up takes no more than `memory_gb`, by default that of `follow`.

        What takes more than some seconds says how long, and shows how far it has come, unless it is to be `quiet`.

        A trace in a folder makes a run of it, which `ntkexp report` and `ntkexp explain` show; where examples are of
        tokens, `decode` gives their text, as that of a tokenizer does. In a notebook, what is found shows the
        examples that did most to the first queries.
        """
        if altered_loop() is not None:
            raise Mistake(
                "again=: the function attributes what it has trained, and would never end; let it only train"
            )
        refuse_arguments(effects, mean, again, decode, positions)
        self.refresh()
        if self.rank:
            raise Mistake(
                f"rank {self.rank} has written its part of the trace, and the whole is attributed by one process: if "
                "rank == 0: trace.attribute(); or later, ntkexp attribute FOLDER"
            )
        if memory_gb is not None:
            self.memory_gb = checked_number("memory_gb", memory_gb, most=MAX_MEMORY_GB, above=True)
        self.by = self.by if by is None else by
        self.batch_norm = checked_mode(self.batch_norm if batch_norm is None else batch_norm)
        if effects:
            if len(self.steps) < self.steps.count:
                raise Mistake("effects need all steps, and steps= leaves some out; follow all")
            self.refuse_empty()
            self.refuse_outside()
            self.refuse_coupled()
            training_of(self, mean).step(
                len(self.steps) - 1
            )  # what has no effects is refused before the work
        gallery = Gallery()
        if decode is not None:  # one that does not work is better known before the work
            texts(shown(self.queries)[:1], decode)
        progress = in_place(quiet)
        with memory_kept(self.module.parameters()), quiet_log(quiet):
            found = self.contributions(gallery, progress, positions=positions)
            known = (
                loop_effects(self, effects, mean, self.memory_gb, again, progress)
                if effects
                else None
            )
        if known is not None:
            found["effect"] = (
                ("probe", "out", "example"),
                known.values.cpu().numpy(),
                attributes_of(known),
            )
        own = (
            rounding_sentence,
            batch_norm_sentence,
            outside_sentence,
            share_sentence,
            equal_inputs_sentence,
        )
        for said in own:
            sentence = said(found)
            if self.folder is None and sentence and not quiet:
                LOG.warning("ntkexp: %s", sentence)
        if self.folder is not None:
            write_run(
                self.folder,
                found,
                self.queries,
                gallery,
                decode,
                None if known is None else known.check,
            )
            TraceFolder(self.folder).sweep.unlink(missing_ok=True)
        return found.showing(ShownExamples.of(found, self.queries, gallery, decode))

    def replayed(
        self, weights: Weights, outputs: Float[Tensor, "probe out"]
    ) -> tuple[Replayed, ...]:
        """What the model itself may have given at the queries, at weights at which `outputs` are those without casts:
        by attention without fused kernels, and if the model enters autocast itself, as by libraries, under that."""
        how = Circumstances(autocast=self.called.casts)
        if not self.called.is_cast(how):
            return (Replayed(self.function, weights, self.queries, outputs),)
        room, found = self.called.room(how), list[Replayed]()
        for function in self.called.as_evaluated:
            with (
                torch.no_grad(),
                plain_kernels(),
                suppress(RuntimeError),
            ):  # of numbers that do not fit each other
                given = columns(function, weights, self.queries)
                # casts step: what noise does is found without them; and they are held to the eps of these outputs
                found.append(
                    Replayed(self.function, weights, self.queries, given.to(outputs), room)
                )
        return tuple(found)

    def begin_sums(
        self,
        tape: Tape,
        components: Components | None,
        places: Positions | None,
    ) -> LoopSums:
        """Begin the sums over steps. Raise if they and one step need more than `memory_gb`."""
        forms = any(
            not each.rule.has_effects for each in self.steps.known
        )  # of SGD and Adam, V is U
        parameters = sum(weight.numel() for weight in self.steps.end.values())
        cost, steps = (
            StepCost(tape, self.steps.most_examples(), parameters, 3 if forms else 1),
            len(self.steps),
        )
        return sums_at_zero(
            tape.outputs, len(self.examples), steps, self.memory_gb, components, places, cost
        )

    def contributions(
        self, gallery: Gallery, progress: AbstractProgress | None = None, *, positions: bool = False
    ) -> Attribution:
        """The same, without a run folder and effects; examples are collected in the gallery, to be shown."""
        from ntkexp.report.scores import Attribution  # noqa: PLC0415  loads xarray: slow, and following needs none

        self.refuse_empty()
        progress = progress or Silent()
        release_memory(self.module.parameters())
        places = positions_of(self.steps.calls(), self.called.couples) if positions else None
        steps, end = self.steps, self.steps.end
        first, last_ones = (numbers_of(steps.statistics(index)) for index in (0, len(steps)))

        # back over the steps: each is replayed, proved, and added
        reader = Reader(
            self.function, frozenset(end), programs=ProgramCache(), whole=self.measured is not None
        )
        end = end | last_ones
        last = reader.record(end, self.queries)
        named = {} if self.measured is None else {"out": self.called.prove_measure(reader, last)}
        components = None if self.by is None else components_of(self.by, steps.end)
        sums = self.begin_sums(last, components, places)
        back = Backwards(
            reader,
            CallReaders(self.called, reader.trained, self.batch_norm, 5e8 * self.memory_gb, places),
            self.queries,
            last,
            self.examples,
            sums,
            steps.indices,
            BackwardSum(components=tuple((components or {}).values())),
        )
        announced = Announced("ntkexp: attribution", len(steps), progress)

        def explained(calls: Sequence[ModelCall]) -> None:
            for call in calls:
                gallery.add(call)
            announced.step()

        back.over(steps, explained)
        announced.stop()
        some = len(steps) < steps.count
        back.multiplied.refuse_unexplained()

        # f_0 and f_T are what the model itself gave
        start, casts = back.later.outputs, self.called.casts
        began, ended = (
            self.replayed(steps.start(0) | first, start),
            self.replayed(end, last.outputs),
        )
        self.ends.hold(began, ended, steps.count, measured=self.measured is not None)

        # f_T − f_0, including `outside`, the change that no step made
        cast = self.called.is_cast(Circumstances(autocast=casts))
        batch_norm = self.batch_norm if first else None
        arrays = sums.arrays(cast=cast, batch_norm=batch_norm, some=some)
        change, outside = last.outputs - start, self.outside()
        if outside is not None:
            change, arrays[OUTSIDE] = change + outside, (("probe", "out"), outside)
        arrays |= {"start": (("probe", "out"), start), "change": (("probe", "out"), change)}

        # the final check: the parts of the steps add up to their change
        closing = sums.closing.check(sums.parts, sums.total, start, last.outputs)
        closing.refuse()
        progress.say(f"ntkexp: {closing.sentence}")

        facts: dict[str, str | float] = {**closing.facts, **gallery.repeated.facts}
        if some:
            by_these = last.outputs - start - sums.other_steps
            moved = bool(change.any())
            facts["taken"] = steps.count
            facts["share"] = (
                float((by_these * change).sum() / change.square().sum()) if moved else 0.0
            )
        facts |= self.facts_of_rounding(sums, end, last.outputs, change)
        if names := steps.outside.names:
            facts[OUTSIDE] = ", ".join(names)
        if self.measured is not None:
            facts[MEASURE] = self.measured.name
        return Attribution(
            {name: (axes, value.cpu().numpy()) for name, (axes, value) in arrays.items()},
            coords={"example": list(self.examples)}
            | named
            | ({"step": list(steps.indices)} if some else {})
            | ({"component": list(components)} if components else {}),
            attrs=facts,
        )

    def facts_of_rounding(
        self,
        sums: LoopSums,
        end: Weights,
        outputs: Float[Tensor, "probe out"],
        change: Float[Tensor, "probe out"],
    ) -> dict[str, str | float]:
        """Return the share of rounding in the change, or for casts, their kinds and their distance from the outputs."""
        facts: dict[str, str | float] = {}
        casts = self.called.casts
        if self.called.is_cast(Circumstances(autocast=casts)):
            with torch.no_grad():
                away = columns(self.called.under_casts, end, self.queries) - outputs
            if self.called.short is not None:
                facts["frozen"] = str(self.called.short).removeprefix("torch.")
            if casts is not None:
                facts["autocast"] = casts.kind
            facts["away"] = float(away.norm())
        else:
            facts["rounding"] = float(sums.rounding.norm()) / (float(change.norm()) or 1.0)
        if rounding := [each.kind.__name__ for each in self.steps.known if each.rule.rounds]:
            facts["rounds"] = " and ".join(rounding)
        return facts


def refuse_arguments(
    effects: object, mean: object, again: object, decode: object, positions: object
) -> None:
    """Refuse arguments that are of no use, by themselves or together."""
    if not isinstance(mean, str) or mean not in MEANS:
        raise Mistake(f"mean={in_short(mean)} is none of {', '.join(MEANS)}")
    kinds = (False, True, "one_step", "derivative")
    if not isinstance(effects, bool | str) or effects not in kinds:
        raise Mistake(f"effects={in_short(effects)} is none of {', '.join(map(str, kinds))}")
    if not isinstance(positions, bool):
        raise Mistake(f"positions={in_short(positions)}: it takes True or False")
    if again is not None and not effects:
        raise Mistake(
            "again=: effects are checked against trainings without examples; add effects=True"
        )
    for name, function in (("again", again), ("decode", decode)):
        if not (function is None or callable(function)):
            raise Mistake(f"{name}= is a {type(function).__name__}; give a function")


# --- A trace that lies in a folder: its steps, for a module of the kind that was followed.


def find_trace(folder: Path) -> TraceFolder:
    """The trace in a folder, if it holds one."""
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
) -> Trace:
    """The trace, with a module that is given all that the followed one held, if it is of that kind; with its measure,
    of which the folder holds the name alone; and with the rules of optimizers that are not PyTorch's."""
    start = files.read(files.path / START)
    if (measure is None) != (measure_name(files) is None):
        raise Mistake(
            f"measure=: {files.folder.path} explains {measure_name(files) or 'outputs'}; give that, or follow "
            "the loop again"
        )
    measured = (
        None if measure is None else MeasuredQueries(measure, QueryCalls.read(start["calls"]))
    )
    weights: Weights = files.read(files.weights_at(0))["weights"]
    files.refuse_other_start(weights)
    state, given = (
        dict(module.named_parameters()) | dict(module.named_buffers()),
        {**start["still"], **weights},
    )
    known = state.keys() | module.state_dict().keys()
    wrong = sorted(weights.keys() - state.keys()) or sorted(given.keys() - known)
    wrong = wrong or [
        name for name in state if name in given and state[name].shape != given[name].shape
    ]
    if wrong:
        raise Mistake(
            f"the module is not the one that was followed in {files.folder.path}: its '{wrong[0]}' is missing or "
            "differs"
        )
    with torch.no_grad():
        for name in given.keys() & state.keys():
            state[name].data = given[name].clone().to(state[name].device)
    module.eval()
    optimizers = [named(name, rules) for name in files.folder.config["follow"]["optimizers"]]
    steps, ends = (
        ReplayedSteps(LoopOnDisk(files), module, start["output"], optimizers),
        outputs_at_ends(files.folder),
    )
    if not files.ended.exists():
        LOG.warning(
            "ntkexp: the trace in %s has %d steps and no end: the training was interrupted after them, or still runs",
            *(files.folder.path, len(steps)),
        )
    output, by = start["output"], start.get("by")
    device = next(module.parameters()).device
    asked = map_tensors(lambda tensor: tensor.to(device), start["queries"])
    return Trace(
        steps, module, output, asked, folder=files.folder, by=by, ends=ends, measured=measured
    )


def measure_name(files: TraceFolder) -> str | None:
    """What a trace explains: the name of a measure, or none, if that is the outputs."""
    asked = files.folder.config["follow"].get("measure")
    return None if asked is None else str(asked).split()[0]


def example_names_in(files: TraceFolder) -> list[str]:
    """The examples of a trace, in order of their first use; no module is needed."""
    return list(dict.fromkeys(ReplayedSteps(LoopOnDisk(files), nn.Module(), None, ()).names()))


def outputs_at_ends(folder: RunFolder) -> OutputsAtEnds:
    """What the model itself gave at the queries, as far as it is in a folder; nothing, in traces of before."""
    files = TraceFolder(folder)
    return (
        OutputsAtEnds(**files.read(files.outputs_at_ends))
        if files.outputs_at_ends.is_file()
        else OutputsAtEnds()
    )
