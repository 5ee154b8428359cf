"""Attribution: what each example added to each output of the queries, summed from the last step to the first.

    f_T − f_0 = Σ contributions + decay + rounding

The sum is `path.backward_sum`, with the linear steps of the loop's optimizers, the gradients of its calls, and c, the
factor between the gradient of the examples and what was consumed: of clipping, of a scaled loss. An example's J is
that of the weights at which it was called. Each step is proved as it is gone back over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ntkexp.foreign_loop.batch_gradients import TermGradients
from ntkexp.foreign_loop.batch_norm import BatchNormMode, numbers_of
from ntkexp.foreign_loop.call import ModelCall, facts_of
from ntkexp.foreign_loop.clipping import Factors, bound_of, factors_between
from ntkexp.foreign_loop.closing import ClosingSums
from ntkexp.foreign_loop.example_gradients import CallGradients, CallReaders
from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.foreign_loop.outside import release_memory
from ntkexp.foreign_loop.positions import LoopPositions, Positions
from ntkexp.foreign_loop.run_folder import CASTS, PROOFS
from ntkexp.foreign_loop.signatures import CHANGED, Replayed
from ntkexp.foreign_loop.step import AbstractSteps, FollowedStep
from ntkexp.kernel.features.adjoint import CACHED
from ntkexp.kernel.features.blocks import Rows
from ntkexp.kernel.features.cancellation import credit, term_sizes
from ntkexp.kernel.features.gram import PIECE_BYTES, PIECE_ELEMENTS
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.tape import Tape
from ntkexp.mistake import Mistake
from ntkexp.path.backward_sum import BackwardSum, ComponentShare, StepBack, TakenBack
from ntkexp.path.components import Components
from ntkexp.path.recording import STRETCHES, Halves, halves_at_zero
from ntkexp.records.contributions import BY_POSITION, POSITION
from ntkexp.shapes import Inputs, Weights
from ntkexp.text import counted

LOG = logging.getLogger("ntkexp.follow")

MASSES = 2**27
"""When each example acted (`half_by`) is said if it takes no more numbers than these, a gigabyte."""

PRODUCTS = 5
"""Arrays of the products ⟨U, J⟩ of a step that are held at once: of a parameter, their sum, its multiple, its negative,
and one on the way."""

PARTS = 6
"""Parts of gradients in the processor's cache that are held at once."""

NamedArrays: TypeAlias = dict[str, tuple[tuple[str, ...], Tensor]]
"""Arrays with the names of their axes."""


@dataclass
class LoopComponents:
    """The shares of components in what the steps added, which add up to it."""

    components: Components
    parts: Float[Tensor, "component probe out example"]
    decay: Float[Tensor, "component probe out"]
    rounding: Float[Tensor, "component probe out"]
    coupling: Float[Tensor, "component probe out"]
    by_step: Float[Tensor, "component probe out step"]

    def add(
        self,
        step: int,
        rows: Int[Tensor, " row"],
        shares: Sequence[ComponentShare],
        coupling: Sequence[Tensor],
    ) -> None:
        """Add a step, with the place of the example of each of its rows."""
        for k, (share, between) in enumerate(zip(shares, coupling, strict=True)):
            parts = share.kernel.squeeze(3).neg().to(self.parts.dtype)
            self.parts[k].index_add_(2, rows, parts)
            self.decay[k] += share.decay
            self.rounding[k] += share.beside
            self.coupling[k] += between
            self.by_step[k, :, :, step] = parts.sum(2) + share.decay + share.beside + between

    def arrays(self) -> NamedArrays:
        """All of it, components last."""
        return {
            name: ((*axes, "component"), value.movedim(0, -1))
            for name, axes, value in (
                ("by_component", ("probe", "out", "example"), self.parts),
                ("decay_by_component", ("probe", "out"), self.decay),
                ("rounding_by_component", ("probe", "out"), self.rounding),
                ("coupling_by_component", ("probe", "out"), self.coupling),
                ("by_component_step", ("probe", "out", "step"), self.by_step),
            )
        }


@dataclass
class LoopSums:
    """Sums over the steps so far, from the last one on, and the proofs of each step."""

    parts: Float[Tensor, "probe out example"]
    decay: Float[Tensor, "probe out"]
    rounding: Float[
        Tensor, "probe out"
    ]  # the effect of rounded gradients, also by casts, on the outputs
    statistics: Float[Tensor, "probe out"]  # what running statistics did, which calls moved
    coupling: Float[
        Tensor, "probe out"
    ]  # what examples did to one another through statistics taken for constant
    by_step: Float[Tensor, "probe out step"]
    proofs: Float[Tensor, "proof step"]
    halves: Halves | None
    carried: Float[Tensor, "probe out"]  # what was remembered before these steps, through them
    other_steps: Float[Tensor, "probe out"]  # what steps did that were passed over
    closing: ClosingSums
    by_component: LoopComponents | None = None
    by_position: LoopPositions | None = None

    def add(
        self,
        step: int,
        rows: Int[Tensor, " row"],
        parts: Float[Tensor, "probe out row"],
        decay: Float[Tensor, "probe out"],
        rounding: Float[Tensor, "probe out"],
        statistics: Float[Tensor, "probe out"],
        coupling: Float[Tensor, "probe out"],
        proofs: tuple[float, ...],
        shares: Sequence[ComponentShare] = (),
        coupled: Sequence[Float[Tensor, "probe out"]] = (),
    ) -> None:
        """Add a step, with the place of the example of each of its rows."""
        if self.halves is not None:
            self.halves.add_rows(step, rows, parts)
        parts = parts.to(self.parts.dtype)
        self.parts.index_add_(2, rows, parts)
        self.decay += decay
        self.rounding += rounding
        self.statistics += statistics
        self.coupling += coupling
        self.by_step[:, :, step] = parts.sum(2) + decay + rounding + statistics + coupling
        self.proofs[:, step] = torch.tensor(proofs, dtype=torch.float64)
        if self.by_component is not None:
            self.by_component.add(step, rows, shares, coupled)

    @property
    def total(self) -> Float[Tensor, "probe out"]:
        """The sum of all parts of the change, without what no step did."""
        by_these = self.parts.sum(2) + self.decay + self.rounding + self.statistics + self.coupling
        return by_these + self.carried + self.other_steps

    def arrays(self, *, cast: bool, batch_norm: BatchNormMode | None, some: bool) -> NamedArrays:
        """Return the sums over all steps of a loop, or over `some`. `coupling` is there only if it is not credited to
        examples."""
        proofs = {
            name: (("step",), each)
            for name, each in zip((*PROOFS, CASTS), self.proofs, strict=True)
        }
        found: NamedArrays = {
            "contribution": (("probe", "out", "example"), self.parts),
            "decay": (("probe", "out"), self.decay),
            "rounding": (("probe", "out"), self.rounding),
            "by_step": (("probe", "out", "step"), self.by_step),
            "statistics": (("probe", "out"), self.statistics),
            "coupling": (("probe", "out"), self.coupling),
            **proofs,
        }
        if some:
            found |= {
                name: (("probe", "out"), getattr(self, name)) for name in ("carried", "other_steps")
            }
        if self.halves is not None:
            found["half_by"] = (
                ("probe", "out", "example"),
                self.halves.by([1.0] * self.by_step.shape[2]),
            )
        if self.by_component is not None:
            found |= self.by_component.arrays()
        if self.by_position is not None:
            found[BY_POSITION] = (("probe", "out", "example", POSITION), self.by_position.parts)
        left_out = set() if cast else {CASTS}
        if batch_norm is None:
            left_out.add("statistics")
        if batch_norm != "constant":
            left_out |= {"coupling", "coupling_by_component"}
        return {name: each for name, each in found.items() if name not in left_out}


@dataclass(frozen=True)
class StepCost:
    """What taking a step back costs at most."""

    tape: Tape  # of the queries
    rows: int  # the most examples of a step
    parameters: int  # that are moved
    adjoints: int  # U, and V and N ⊙ J̄ where these are formed

    @property
    def outputs(self) -> int:
        return self.tape.outputs.numel()

    @property
    def products(self) -> float:
        """Bytes of ⟨U, J⟩ between the outputs and the examples of a step."""
        return float(PRODUCTS * self.outputs * self.rows * self.tape.outputs.element_size())

    @property
    def held(self) -> float:
        """Bytes of U of each output, of what is recorded and differentiated at the queries and the examples, and of
        gradients that are multiplied out a part at a time."""
        points, outputs = self.tape.outputs.shape
        recorded = self.tape.bytes_per_example * (
            points * (3 + 2 * outputs) + self.rows * (2 + outputs)
        )
        rows = max(self.rows, self.outputs)
        piece = max(PIECE_BYTES // self.tape.outputs.element_size(), PIECE_ELEMENTS * rows)
        numbers = self.adjoints * self.outputs * self.parameters + min(
            piece, rows * self.parameters
        )
        numbers += PARTS * min(CACHED, (self.rows + 1) * self.outputs * self.parameters)
        return numbers * self.tape.outputs.element_size() + recorded


def sums_at_zero(
    outputs: Float[Tensor, "probe out"],
    examples: int,
    steps: int,
    memory_gb: float,
    components: Components | None = None,
    positions: Positions | None = None,
    cost: StepCost | None = None,
) -> LoopSums:
    """No step added yet; what does not fit into the memory is refused, or, as `half_by`, left out."""
    long, size = accumulated_in(outputs), outputs.element_size()
    numbers = outputs.numel() * examples
    parts_gb = numbers * (size + long.itemsize) / 1e9  # formed in a step, and the sum
    halves_gb = 2 * STRETCHES * numbers * size / 1e9
    needed = (
        parts_gb
        + (outputs.numel() * steps * long.itemsize + (0.0 if cost is None else cost.products)) / 1e9
    )
    by, fewer = "", "give fewer queries"
    if components is not None:
        needed *= 1 + len(components)
        by, fewer = f" by {counted(len(components), 'component')}", f"{fewer}, by fewer components"
    needed += 0.0 if cost is None else cost.held / 1e9
    if needed > memory_gb:
        raise Mistake(
            f"memory_gb={memory_gb:g}: what {examples} examples add to {outputs.numel()} outputs of the queries{by} "
            f"takes {needed:.2g} GB; {fewer}, or attribute(memory_gb={1.1 * needed:.2g})"
        )
    with_halves = STRETCHES * outputs.numel() * examples <= MASSES
    if with_halves and needed + halves_gb > memory_gb:
        with_halves = False
        LOG.warning(
            "ntkexp: `half_by` is left out: it takes %.2g GB, and memory_gb=%g",
            needed + halves_gb,
            memory_gb,
        )
    totals = torch.zeros_like(outputs, dtype=long)
    parts = totals.new_zeros(*outputs.shape, examples)
    by_component, by_position = None, None
    if positions is not None:
        by_position = LoopPositions.at_zero(positions, parts, memory_gb - needed, memory_gb)
    if components is not None:
        shape = (len(components), *outputs.shape)
        axes = ((examples,), (), (), (), (steps,))
        by_component = LoopComponents(
            components, *(totals.new_zeros(*shape, *each) for each in axes)
        )
    return LoopSums(
        parts=parts,
        decay=totals.clone(),
        rounding=totals.clone(),
        statistics=totals.clone(),
        coupling=totals.clone(),
        by_step=totals.new_zeros(*outputs.shape, steps),
        proofs=torch.zeros(len(PROOFS) + 1, steps, dtype=torch.float64),
        halves=halves_at_zero(steps, outputs.new_zeros(*outputs.shape, examples))
        if with_halves
        else None,
        carried=totals.clone(),
        other_steps=totals.clone(),
        closing=ClosingSums.at_zero(outputs, long),
        by_component=by_component,
        by_position=by_position,
    )


def accumulated_in(outputs: Tensor) -> torch.dtype:
    """Return the precision of sums over steps: double, unless the device has none.

    >>> accumulated_in(torch.ones(1, dtype=torch.float32))
    torch.float64
    """
    return outputs.dtype if outputs.device.type == "mps" else torch.float64


@dataclass
class Backwards:
    """The way back over a loop: `later` is the tape of the queries after the step that comes next, `sum` the backward
    recursion over the steps after that, `added` what they have added; examples go by their places."""

    reader: Reader
    calls: CallReaders
    queries: Inputs
    later: Tape
    places: Mapping[str, int]
    added: LoopSums
    steps: Sequence[int]  # their numbers
    sum: BackwardSum = field(default_factory=BackwardSum)
    multiplied: Factors = field(default_factory=Factors)
    divided: set[str] = field(
        default_factory=set
    )  # parameters that a step so far divided by past gradients

    def over(
        self, steps: AbstractSteps, explained: Callable[[Sequence[ModelCall]], object]
    ) -> None:
        """Go back over all steps, to where the loop began; the calls of each are `explained` afterwards."""
        began = steps.count
        for step, later in steps.backwards():
            if step.index + 1 < began:
                self.pass_over(later)
            self.take(step, later, steps)
            self.begin(step)
            began = step.index
            explained(step.calls)
            del step, later  # before those that come next are replayed
            release_memory(self.calls.called.module.parameters())
        if began:
            self.pass_over(steps.start(0))

    def take(self, step: FollowedStep, end: Weights, steps: AbstractSteps) -> None:
        """Take one step back."""
        # Jᵀℓ′ of every example, at the weights at which it was called, and their sum
        begun = [
            step.start if call.at == step.index else steps.start(call.at) for call in step.calls
        ]
        try:
            calls = [
                self.calls.pulled(call, weights)
                for call, weights in zip(step.calls, begun, strict=True)
            ]
        except Mistake as error:
            raise Mistake(f"step {step.index}: {error}") from error
        found = {name: torch.zeros_like(step.start[name]) for name in step.with_grad}
        for each in calls:
            total = each.total(step.start)
            for name in found:
                found[name] += total[name]
            del total

        # proof (a); and what the optimizer took in beside that gradient: casts, or rounding. Where gradients cancel,
        # rounding alone remains; Adam divides it by its own size, so that it moves weights as far as a gradient would
        factors, missed = self.prove(step, begun, found, [each.replayed for each in calls])
        cast = self.is_cast(step)
        self.divided |= {name for name in step.with_grad if step.linear[name].divides}
        credited = credit_of_examples(step, calls, found, factors, self.divided, cast=cast)
        beside = dict[str, Tensor]()
        if cast or self.divided:
            known = found | {name: part * found[name] for name, part in credited.items()}
            beside = {
                name: step.gradient[name] - factors[name] * known[name] for name in step.with_grad
            }
        nothing = (
            {n: torch.zeros_like(w) for n, w in step.start.items() if n not in beside}
            if beside
            else {}
        )

        # the sum; and proof (c): the secant of the step, J̄ (θ₊ − θ), is f(θ₊) − f(θ) at the queries, with the running
        # statistics B from before the step; f(θ₊, B₊) − f(θ₊, B) is what these did
        before, after = (
            numbers_of(steps.statistics(index)) for index in (step.index, step.index + 1)
        )
        tape, moved = self.reader.record(step.start | before, self.queries), self.later
        if any(not torch.equal(each, after[name]) for name, each in before.items()):
            moved = self.reader.record(end | before, self.queries)
        back = StepBack(
            start=step.start,
            difference={name: end[name] - weight for name, weight in step.start.items()},
            linear=step.linear,
            right=Chain(
                [each.features for each in calls]
                + coupled_row(calls)
                + rows_of_positions(calls, self.calls.room)
            ),
            factor=factors,
            beside=nothing | beside,
            credit=credited,
        )
        secant = self.reader.along(tape, moved, as_copies=True)
        taken = self.sum.take(back, [(1.0, secant)])
        taken, by_position = apart_from_positions(taken, step, calls)
        change = moved.outputs - tape.outputs
        unclosed, statistics = taken.pushed - change, self.later.outputs - moved.outputs
        closure = unclosed.norm()
        self.later = tape

        # what examples' own gradients lack of that of a batch which norms coupled: rounding, or what these did
        whole = ComponentShare(taken.kernel, taken.decay, taken.beside)
        (own, lacks), *of_components = (
            self.told_apart(share, step, calls) for share in (whole, *taken.shares)
        )
        parts, rounding = own.kernel.squeeze(3).neg(), own.beside
        for each in calls:
            if isinstance(each.features, TermGradients) and each.whole is not None:
                each.features.refuse_other_sum(each.whole, step.index)

        # the final check needs the sizes of the terms, and what cancels among them
        terms = (parts.abs().sum(2), taken.decay, rounding, statistics, lacks)
        self.added.closing.add_step(secant, step.start, unclosed, terms)
        self.find_cancelling(parts, step, calls, credited)

        # added up by example and by step
        proofs = (
            min(factors[name] for name in step.with_grad) if step.with_grad else 0.0,
            missed,
            step.rule_error,
            share_of(closure, change.norm()),
            relative(beside, step.gradient) if cast else 0.0,
        )
        places = [self.places[name] for call in step.calls for name in call.names]
        rows = torch.tensor(places, dtype=torch.long, device=parts.device)
        shares, coupling = (
            [share for share, _ in of_components],
            [between for _, between in of_components],
        )
        place = self.steps.index(step.index)
        self.added.add(
            place, rows, parts, taken.decay, rounding, statistics, lacks, proofs, shares, coupling
        )
        if self.added.by_position is not None:
            each_rows = torch.split(rows, [len(call.names) for call in step.calls])
            read = [
                (each.by_position, places) for each, places in zip(calls, each_rows, strict=True)
            ]
            self.added.by_position.add(
                [(one, places) for one, places in read if one is not None], by_position
            )

    def find_cancelling(
        self,
        parts: Float[Tensor, "probe out row"],
        step: FollowedStep,
        calls: Sequence[CallGradients],
        credited: Weights,
    ) -> None:
        """Find the parameter in which the parts of a step cancel, if they cancel and no step so far was heavier."""
        if not self.added.closing.cancels_most(parts):
            return
        assert self.sum.adjoint is not None
        examples = [jacobian for each in calls if each.can_be_reread for jacobian in each.features]
        felt = self.sum.adjoint.scaled(credited)
        self.added.closing.find_parameter(felt, examples, step.with_grad, parts[:, :, 0])

    def begin(self, step: FollowedStep) -> None:
        """Add the effect of momentum from before the followed steps, −⟨βU, m⟩. No followed example caused it."""
        if step.remembered and self.sum.adjoint is not None:
            nothing = {name: torch.zeros_like(weight) for name, weight in step.start.items()}
            carried = {name: self.sum.carry[name] * m for name, m in step.remembered.items()}
            self.added.carried -= self.sum.adjoint.applied(nothing | carried)

    def pass_over(self, start: Weights) -> None:
        """Go back over steps that were not followed, to the weights at which the first of them began; U begins anew."""
        tape = self.reader.record(start, self.queries)
        self.added.other_steps += self.later.outputs - tape.outputs
        self.later, self.sum = tape, BackwardSum(components=self.sum.components)

    def prove(
        self,
        step: FollowedStep,
        begun: Sequence[Weights],
        found: Weights,
        replayed: Sequence[Replayed],
    ) -> tuple[Mapping[str, float], float]:
        """Proof (a): the gradient of the examples is the consumed one, up to one factor, or one for each parameter, and
        the calls gave what their replays give. The factors, and how far the gradients differ, relative to their size.

        Where the loop cast, it is the gradient of its calls under the same casts, as autograd has it.
        """
        called = self.calls.called
        if self.is_cast(step) or any(call.statistics is not None for call in step.calls):
            nothing, outputs = (
                {name: torch.zeros_like(step.start[name]) for name in step.with_grad},
                list[Tensor](),
            )
            found = nothing | called.gradient(step.calls, begun, outputs.append)
            replayed = [
                replace(
                    each,
                    outputs=given.to(each.outputs),
                    cast_eps=called.room(call.how, exact=step.exact),
                )
                for each, given, call in zip(replayed, outputs, step.calls, strict=True)
            ]
        consumed = {name: step.gradient[name] for name in step.with_grad}
        room = called.room_of(step.calls, exact=step.exact)
        noise = partial(called.noise, step.calls, begun)
        factors, missed = factors_between(
            found, consumed, step.index, facts_of(step.calls), room, noise
        )
        for call, each in zip(step.calls, replayed, strict=True):
            if call.signed is not None and (other := each.other(call.signed)):
                raise Mistake(
                    f"step {step.index}: the model gave other outputs when the loop called it than it does now at the "
                    f"same weights, off by {other:.2g} of them; {CHANGED}"
                )
        factors = self.multiplied.take(
            step.index, factors, found, consumed, bound_of(consumed, room)
        )
        return dict.fromkeys(step.start, 0.0) | factors, missed

    def told_apart(
        self, share: ComponentShare, step: FollowedStep, calls: Sequence[CallGradients]
    ) -> tuple[ComponentShare, Float[Tensor, "probe out"]]:
        """What came of the examples of a step, and what their own gradients lack of that of the batches which norms
        coupled: rounding, which is beside them, or what they did to one another."""
        nothing = torch.zeros_like(share.beside)
        if all(each.whole is None for each in calls):
            return share, nothing
        coupled = [
            each.whole is not None
            for each, call in zip(calls, step.calls, strict=True)
            for _ in call.names
        ]
        own, whole = share.kernel[:, :, :-1], share.kernel[:, :, -1]
        lacks = (own[:, :, torch.tensor(coupled, device=own.device)].sum(2) - whole).squeeze(2)
        if self.calls.batch_norm == "exact":
            return share._replace(kernel=own, beside=share.beside + lacks), nothing
        return share._replace(kernel=own), lacks

    def is_cast(self, step: FollowedStep) -> bool:
        """Whether some call rounded to shorter numbers."""
        return any(self.calls.called.is_cast(call.how) for call in step.calls)


def credit_of_examples(
    step: FollowedStep,
    calls: Sequence[CallGradients],
    found: Weights,
    factors: Mapping[str, float],
    divided: Collection[str],
    *,
    cast: bool,
) -> Weights:
    """Return 0 where the gradient of a step is rounding, and 1 elsewhere.

    Only parameters that this step or a later one divides by past gradients are looked at, as a memory carries rounding
    on to later steps. Parameters whose gradients are all known are left out.
    """
    gradient = {name: step.gradient[name] for name in step.with_grad if name in divided}
    if not gradient:
        return {}
    jacobians = (jacobian for call in calls if call.can_be_reread for jacobian in call.features)
    sizes = {
        name: size * abs(factors[name])
        for name, size in term_sizes(jacobians, step.start).items()
        if name in gradient
    }

    # two sums of the same terms, of the loop and of the replay, also show how much of a gradient is known
    other = {} if cast else {name: factors[name] * found[name] for name in gradient}
    for call in calls:
        if (
            other
            and call.whole is not None
            and isinstance(call.features, TermGradients)
            and call.can_be_reread
        ):
            for name in gradient.keys() & call.whole.keys():
                other[name] = other[name] + factors[name] * (
                    call.features.total[name] - call.whole[name]
                )
    return credit(gradient, sizes, other)


class Chain(Sequence[Jacobian]):
    """Several sequences, one after another; what is made when it runs for is made then."""

    def __init__(self, several: Sequence[Sequence[Jacobian]]) -> None:
        self.places = [(each, place) for each in several for place in range(len(each))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        several, place = self.places[index]
        return several[place]


def coupled_row(calls: Sequence[CallGradients]) -> list[Sequence[Jacobian]]:
    """The gradient of the calls whose batches norms coupled, as that of one more example, if there are any."""
    wholes = [each.whole for each in calls if each.whole is not None]
    if not wholes:
        return []
    rows = {name: sum((whole[name] for whole in wholes[1:]), wholes[0][name]) for name in wholes[0]}
    return [
        [Jacobian(tuple(Rows(row.reshape(1, 1, -1), name) for name, row in rows.items()), 1, 1)]
    ]


def rows_of_positions(calls: Sequence[CallGradients], room: float) -> list[Sequence[Jacobian]]:
    """The gradients of the positions of calls, as those of more examples, if they are read; calls share the room, in
    bytes, for those that are made once."""
    found = [each.by_position for each in calls if each.by_position is not None]
    for each in found:
        each.room = room / len(found)
    return [*found]


def apart_from_positions(
    taken: TakenBack, step: FollowedStep, calls: Sequence[CallGradients]
) -> tuple[TakenBack, Float[Tensor, "probe out row"]]:
    """What came of the examples of a step, and of the positions of its calls, which are the last rows."""
    more = sum(
        len(each.by_position) * len(call.names)
        for each, call in zip(calls, step.calls, strict=True)
        if each.by_position is not None
    )
    own = taken.kernel.shape[2] - more
    shares = [share._replace(kernel=share.kernel[:, :, :own]) for share in taken.shares]
    return taken._replace(kernel=taken.kernel[:, :, :own], shares=shares), taken.kernel[
        :, :, own:
    ].squeeze(3)


def share_of(part: Tensor, whole: Tensor) -> float:
    """The first number relative to the second, or itself where there is nothing to compare with.

    >>> share_of(torch.tensor(1.0), torch.tensor(4.0)), share_of(torch.tensor(1.0), torch.tensor(0.0))
    (0.25, 1.0)
    """
    ours, theirs = read_numbers([part, whole])
    return ours / theirs if theirs else ours


def relative(part: Weights, whole: Weights) -> float:
    """The size of some gradients relative to that of the whole.

    >>> relative({"w": torch.ones(1)}, {"w": torch.full((1,), 4.0)}), relative({}, {})
    (0.25, 0.0)
    """
    above, below = (
        sum(float(each.square().sum()) for each in parts.values()) for parts in (part, whole)
    )
    return (above / below) ** 0.5 if above else 0.0
