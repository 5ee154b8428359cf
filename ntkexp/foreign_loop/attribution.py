"""Attribution: the contribution of each example to each output at the queries, summed
from the last step to the first.

    f_T − f_0 = Σ contributions + decay + rounding + …        (other parts: glossary)

`LoopBackward.take` adds one step. The recursion over steps is `path.backward_sum`. Its
inputs are:

- the linear step of each optimizer (see `rule`),
- the per-example gradients Jᵢᵀℓ′ᵢ of the recorded calls, where Jᵢ is the Jacobian of
  example i at the weights of its call, and ℓ′ᵢ is ∂L/∂f of this example,
- the factor c between the gradient of the examples and the gradient that the optimizer
  used. Clipping and loss scales give c ≠ 1.

`take` also runs the three proofs of the step (see `foreign_loop`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ntkexp.allocator import is_large, release_memory
from ntkexp.foreign_loop.batch_gradients import TermGradients, TermProducts
from ntkexp.foreign_loop.batch_norm import numbers_of
from ntkexp.foreign_loop.call import ModelCall, weights_of_calls
from ntkexp.foreign_loop.clipping import ASK_SAME_LOSSES, Factors, bound_of, multiple
from ntkexp.foreign_loop.example_gradients import CallGradients, CallReaders
from ntkexp.foreign_loop.fingerprints import CHANGED, Replayed
from ntkexp.foreign_loop.host_reads import read_numbers
from ntkexp.foreign_loop.loop_sums import LoopSums, LoopTerms, StepProofs, StepSummands
from ntkexp.foreign_loop.step import AbstractSteps, FollowedStep
from ntkexp.foreign_loop.value_clipping import GradientFactors, gradient_factors
from ntkexp.kernel import Jacobian, Reader, Tape
from ntkexp.kernel.features.blocks import Rows
from ntkexp.kernel.features.cancellation import credit, term_sizes
from ntkexp.kernel.features.gram import PIECE_BYTES
from ntkexp.kernel.record.tape import part
from ntkexp.kernel.secant.call import ChoiceChanged
from ntkexp.mistake import Mistake
from ntkexp.path.backward_sum import BackwardStep, BackwardSum, StepTerms
from ntkexp.path.step_kernel import RightFactor
from ntkexp.records.contributions import JUMPED, SURROGATE
from ntkexp.shapes import Inputs, Weights
from ntkexp.text import counted

SURROGATE_GRADIENTS = (
    "training used gradients that are not the derivatives of the model's values (detach, a "
    "straight-through estimator or an autograd.Function)"
)


@dataclass
class LoopBackward:
    """The contributions, summed over the steps from the last to the first. `over` adds
    all steps, and `take` adds one."""

    reader: Reader
    calls: CallReaders
    queries: Inputs
    # recorded forward pass of the queries at the weights after the next step to add
    later: Tape
    example_rows: Mapping[str, int]  # index of each example
    added: LoopSums  # sums over the steps so far
    steps: Sequence[int]  # indices of the steps
    # the recursion over steps (`path.backward_sum`), after the steps so far
    sum: BackwardSum = field(default_factory=BackwardSum)
    # proof (a): factors c of the steps so far
    multiplied: Factors = field(default_factory=Factors)
    # parameters whose gradient was divided by a denominator in any step so far, as in
    # Adam
    divided: set[str] = field(default_factory=set)
    # by step: why the outputs jumped (a discrete choice changed)
    jumping: dict[int, str] = field(default_factory=dict)

    def over(
        self, steps: AbstractSteps, explained: Callable[[Sequence[ModelCall]], object]
    ) -> None:
        """Add all steps of the loop to the sums. After each step, call `explained` with
        the recorded model calls of the step."""
        earliest = steps.count  # index of the earliest step so far
        parameters = list(self.calls.called.module.parameters())
        is_large_model = is_large(parameters)
        for step, later in steps.backwards():
            if step.index + 1 < earliest:
                self.pass_over(later)
            self.take(step, later, steps)
            self.add_earlier_momentum(step)
            earliest = step.index
            explained(step.calls)
            del step, later  # free their memory before the next step is replayed
            if is_large_model:
                release_memory(parameters)
        if earliest:
            self.pass_over(steps.start(0))

    def take(self, step: FollowedStep, end: Weights, steps: AbstractSteps) -> None:
        """Run the three proofs of one step, and add its terms to the sums."""
        self.divided |= {name for name in step.with_grad if step.linear[name].divides}

        # Jᵢᵀℓ′ᵢ of every example i, at the weights of its call, and g = Σᵢ Jᵢᵀℓ′ᵢ
        begun = begun_at(step, steps)
        calls = self.call_gradients(step, begun)
        gradient = summed_gradient(calls, step)

        # proof (a): the optimizer used the gradient c g + e, and no example caused e
        proved = self.prove(step, begun, gradient, calls)
        rounding, credited = self.rounding_of(step, calls, gradient, proved)

        # J̄, the secant Jacobian of the queries along the step
        ends = self.query_ends(step, end, steps)
        secant, jumped = self.secants(step, ends)
        secant = secant.with_sums_over_uses(step.start, PIECE_BYTES)

        # adjoints U_s = S_s ⊙ J̄ + β_{s+1} U_{s+1} and V_s = α_s U_s + N_s ⊙ J̄, with
        # the symbols of `LinearStep`, and the inner products ⟨V, c Jᵢᵀℓ′ᵢ⟩, −⟨V, λθ⟩
        # and −⟨V, e⟩
        right = StepRows(step, calls, self.calls)
        back = BackwardStep(
            start=step.start,
            difference={
                name: end[name] - weight for name, weight in step.start.items()
            },
            linear=step.linear,
            right=right.jacobians,
            factor=proved.factors,
            rounding=rounding,
            credit=credited,
        )
        result = self.sum.add(back, [(1.0, secant)])
        terms = right.terms(result.terms)
        refuse_wrong_sums(step, calls)

        # proof (c): J̄Δθ = Δf. If a discrete choice changed at a query, the rest of Δf
        # is reported as a jump.
        change = ends.after.outputs - ends.before.outputs
        unclosed = result.change - change
        jumps = torch.where(jumped[:, None], -unclosed, 0.0)
        unclosed = unclosed + jumps
        casts_error = 0.0
        if self.is_cast(step):
            casts_error = relative_size(rounding, step.gradient)

        # the sums by example and by step, and the final check
        rows = self.rows_of(step, terms.contributions)
        summands = StepSummands(
            index=self.steps.index(step.index),
            rows=rows,
            terms=terms,
            statistics=self.later.outputs - ends.after.outputs,
            jumps=jumps,
            proofs=StepProofs(
                gradient_factor=proved.smallest(step.with_grad),
                gradient_error=proved.missed,
                rule_error=step.rule_error,
                closure=ratio(unclosed.norm(), change.norm()),
                casts_error=casts_error,
            ),
            by_component=[right.terms(share) for share in result.by_component],
        )
        self.added.closing.add_step(secant, step.start, unclosed, summands.magnitudes)
        self.find_cancelling(terms.contributions, step, calls, credited)
        self.added.add(summands)
        self.add_positions(step, calls, rows, right.position_kernel(result.terms))
        self.later = ends.before

    def secants(
        self, step: FollowedStep, ends: QueryEnds
    ) -> tuple[Jacobian, Bool[Tensor, " query"]]:
        """Return the secant Jacobian J̄ of the queries along a step. Also return a mask
        of the queries at which a discrete choice changed.

        A discrete choice is, for example, an argmax, a sorting order, or the chosen
        expert of a mixture. If a choice changes, no secant Jacobian exists. The query
        then gets the Jacobian J at the beginning of the step."""
        jumped = torch.zeros(
            len(ends.before.outputs),
            dtype=torch.bool,
            device=ends.before.outputs.device,
        )
        try:
            return self.reader.along(ends.before, ends.after, as_copies=True), jumped
        except ChoiceChanged as reason:
            self.jumping[step.index] = str(reason)

        # a measure takes all queries at once, so J replaces J̄ for all of them
        if self.reader.whole_batch:
            return self.reader.tangent(ends.before), ~jumped

        jacobians = list[Jacobian]()
        for query in range(len(jumped)):
            before, after = (
                self.record_query(tape, query) for tape in (ends.before, ends.after)
            )
            try:
                jacobians.append(self.reader.along(before, after))
            except ChoiceChanged:
                jumped[query] = True
                jacobians.append(self.reader.tangent(before))
        return stacked(jacobians), jumped

    def record_query(self, tape: Tape, query: int) -> Tape:
        """Record a single query at the weights of `tape`,
        which recorded all queries."""
        query_input = part(self.queries, slice(query, query + 1))
        return self.reader.record(tape.recorded_weights, query_input)

    @property
    def caveats(self) -> dict[str, str]:
        """Warnings by name, for the `attrs` of the result: that discrete choices
        changed, or that the loop's gradients are not derivatives."""
        caveats: dict[str, str] = {}
        if self.jumping:
            first = min(self.jumping)
            caveats[JUMPED] = (
                "discrete choices at the queries changed in "
                f"{counted(len(self.jumping), 'step')}, and `jumps` is their effect; "
                f"the first one changed in step {first}: {self.jumping[first]}"
            )
        readers = (self.reader, *self.calls.readers.values())
        if any(reader.is_unfaithful for reader in readers):
            caveats[SURROGATE] = SURROGATE_GRADIENTS
        return caveats

    def call_gradients(
        self, step: FollowedStep, begun: Sequence[Weights]
    ) -> Sequence[CallGradients]:
        """Replay the calls of a step, and return the gradients of their examples."""
        readers = replace(
            self.calls,
            buffer_bytes=self.calls.buffer_bytes / max(1, len(step.calls)),
            # The credit of a divided gradient (see `rounding_of`) needs the gradients
            # of examples. Products with directions do not suffice.
            directions=None if self.divided else self.calls.directions,
        )
        try:
            return [
                readers.pulled(call, weights)
                for call, weights in zip(step.calls, begun, strict=True)
            ]
        except Mistake as error:
            raise Mistake(f"step {step.index}: {error}") from error

    def prove(
        self,
        step: FollowedStep,
        begun: Sequence[Weights],
        gradient: Weights,
        calls: Sequence[CallGradients],
    ) -> GradientFactors:
        """Run proof (a) of a step. Return the factors between the gradient of the
        examples and the gradient that the optimizer used.

        Raise if the optimizer did not use c times the gradient of the examples, or if
        the replayed calls do not return the outputs of the loop.

        If calls have casts or BatchNorm, the gradient of the examples is computed again
        by autograd, under the same casts.

        Args:
            step: step to prove.
            begun: weights of each call.
            gradient: sum of the per-example gradients.
            calls: per-example gradients and replayed outputs of each call.
        """
        called = self.calls.called
        replayed: Sequence[Replayed] = [each.replayed for each in calls]
        consumed = {name: step.gradient[name] for name in step.with_grad}
        is_coupled = any(call.statistics is not None for call in step.calls)
        if self.is_cast(step) or (is_coupled and not step.repeats_gradient):
            gradient, replayed = self.replay_by_autograd(step, begun, replayed)
        elif is_coupled:  # autograd has computed this gradient already
            gradient = consumed
        tolerance = called.cast_eps(step.calls, exact=step.exact)
        noise = partial(called.noise, step.calls, begun)
        facts = called.facts_of(step.calls, begun)
        proved = gradient_factors(
            gradient, consumed, step.index, facts, tolerance, noise
        )
        refuse_other_outputs(step, replayed)
        bound = bound_of(consumed, tolerance)
        if proved.clipped is not None:
            self.multiplied.clipped_values.append(proved.clipped)
        unclipped = proved.before_clipping(consumed)
        factors = self.multiplied.take(
            step.index,
            proved.factors,
            gradient,
            unclipped,
            bound,
            step.square_outside,
        )
        return replace(proved, factors=dict.fromkeys(step.start, 0.0) | factors)

    def replay_by_autograd(
        self, step: FollowedStep, begun: Sequence[Weights], replayed: Sequence[Replayed]
    ) -> tuple[Weights, Sequence[Replayed]]:
        """Return the gradient of the calls, and their outputs,
        by autograd under the loop's casts."""
        called = self.calls.called
        outputs = list[Tensor]()
        gradient = step.zero_gradient
        gradient |= called.gradient(step.calls, begun, outputs.append)
        cast = [
            replace(
                replay,
                outputs=output.to(replay.outputs),
                cast_eps=called.cast_eps_of(call.circumstances, exact=step.exact),
            )
            for replay, output, call in zip(replayed, outputs, step.calls, strict=True)
        ]
        return gradient, cast

    def rounding_of(
        self,
        step: FollowedStep,
        calls: Sequence[CallGradients],
        gradient: Weights,
        proved: GradientFactors,
    ) -> tuple[Weights, Weights]:
        """Split the gradient ĝ that the optimizer used into a part of the examples and
        a rest e, ĝ = c k ⊙ g + e. Return e and k.

        g is the gradient of the examples, and c are the factors of proof (a). The
        credit k of an element is 0 if its gradient is only a rounding error
        (`credit_of_examples`). Otherwise k is the element's factor of clipping by
        value, or 1 without clipping.

        e is the effect of casts and of rounding, which no example caused. Rounding
        errors matter because Adam normalizes gradients: an element whose gradient is
        only a rounding error moves as far as any other element."""
        cast = self.is_cast(step)
        factors = proved.factors
        masks = credit_of_examples(
            step, calls, gradient, proved, self.divided, cast=cast
        )
        credited = dict(proved.elements)
        for name, mask in masks.items():
            credited[name] = credited.get(name, 1.0) * mask
        if not cast and not self.divided:
            return {}, credited
        with_grad = set(step.with_grad)
        rounding: Weights = {}
        for name, weight in step.start.items():
            if name not in with_grad:
                rounding[name] = torch.zeros_like(weight)
                continue
            by_examples = gradient[name]
            if name in credited:
                by_examples = credited[name] * by_examples
            rounding[name] = step.gradient[name] - multiple(factors[name], by_examples)
        return rounding, credited

    def query_ends(
        self, step: FollowedStep, end: Weights, steps: AbstractSteps
    ) -> QueryEnds:
        """Record the queries at the weights before and after a step. Both times, use
        the running statistics from before the step."""
        statistics = numbers_of(steps.statistics(step.index))
        later = numbers_of(steps.statistics(step.index + 1))
        before = self.reader.record(step.start | statistics, self.queries)
        after = self.later
        moved = any(
            not torch.equal(value, later[name]) for name, value in statistics.items()
        )
        if moved:
            after = self.reader.record(end | statistics, self.queries)
        return QueryEnds(before, after)

    def rows_of(self, step: FollowedStep, like: Tensor) -> Int[Tensor, " row"]:
        """Return, for each row of the calls, the index of its example."""
        rows = [self.example_rows[name] for call in step.calls for name in call.names]
        return torch.tensor(rows, dtype=torch.long, device=like.device)

    def add_positions(
        self,
        step: FollowedStep,
        calls: Sequence[CallGradients],
        rows: Int[Tensor, " row"],
        kernel: Float[Tensor, "query out position_row"],
    ) -> None:
        """Add the contributions of single positions in a text,
        if the user asked for them."""
        if self.added.by_position is None:
            return
        rows_of_calls = torch.split(rows, [len(call.names) for call in step.calls])
        of_calls = [
            (call.by_position, call_rows)
            for call, call_rows in zip(calls, rows_of_calls, strict=True)
            if call.by_position is not None
        ]
        self.added.by_position.add(of_calls, kernel)

    def find_cancelling(
        self,
        contributions: Float[Tensor, "query out row"],
        step: FollowedStep,
        calls: Sequence[CallGradients],
        credited: Weights,
    ) -> None:
        """Find the parameter that causes most of the cancellation in this step.

        Do this only if the contributions cancel strongly, and their total magnitude is
        the largest of all such steps so far."""
        if not self.added.closing.cancels_most(contributions):
            return
        assert self.sum.adjoint is not None
        examples = [jacobian for call in calls for jacobian in call.stored]
        like = contributions[:, :, 0]
        self.added.closing.find_parameter(
            self.sum.adjoint, credited, examples, step.with_grad, like
        )

    def add_earlier_momentum(self, step: FollowedStep) -> None:
        """Add −⟨βU, m⟩, where U is the adjoint, β the momentum decay, and m the
        momentum from before the followed steps. No followed example caused this
        term."""
        if step.remembered and self.sum.adjoint is not None:
            momentum = step.zeros
            for name, m in step.remembered.items():
                momentum[name] = self.sum.momentum_decay[name] * m
            self.added.carried -= self.sum.adjoint.applied(momentum)

    def pass_over(self, start: Weights) -> None:
        """Skip steps that were not followed. Add their total change of the outputs to
        `other_steps`, and reset the adjoint U to zero.

        `start` are the weights before these steps."""
        tape = self.reader.record(start, self.queries)
        self.added.other_steps += self.later.outputs - tape.outputs
        self.later = tape
        self.sum = BackwardSum(components=self.sum.components)

    def is_cast(self, step: FollowedStep) -> bool:
        """Return True if a call of the step used lower precision than the trained
        weights."""
        return any(self.calls.called.is_cast(call.circumstances) for call in step.calls)


class QueryEnds(NamedTuple):
    """Recorded forward passes (tapes) of the queries before and after a step, with the
    same running statistics."""

    before: Tape
    after: Tape


def begun_at(step: FollowedStep, steps: AbstractSteps) -> Sequence[Weights]:
    """Return the weights of each call of a step. A call may be older than the step."""
    starts = [
        step.start if call.at == step.index else steps.start(call.at)
        for call in step.calls
    ]
    return weights_of_calls(step.calls, starts)


def summed_gradient(calls: Sequence[CallGradients], step: FollowedStep) -> Weights:
    """Sum the gradients of all examples of a step, for each parameter that received a
    gradient."""
    gradient: Weights = {}
    for call in calls:
        total = call.total(step.start)
        for name in step.with_grad:
            gradient[name] = (
                gradient[name] + total[name] if name in gradient else total[name]
            )
        del total
    if not calls:
        return step.zero_gradient
    return gradient


def refuse_other_outputs(step: FollowedStep, replayed: Sequence[Replayed]) -> None:
    """Raise if a replayed call does not return the outputs of the loop."""
    for call, replay in zip(step.calls, replayed, strict=True):
        if call.fingerprint is None:
            continue
        missed = replay.unexplained_distance(call.fingerprint)
        if missed and call.losses is not None:
            raise Mistake(
                f"step {step.index}: at the same weights, the function of trace.losses "
                "returned other losses in the loop than it does now (relative "
                f"difference {missed:.2g}); {ASK_SAME_LOSSES}"
            )
        if missed:
            raise Mistake(
                f"step {step.index}: at the same weights, the model returned other "
                "outputs in the loop than it does now (relative difference "
                f"{missed:.2g}); {CHANGED}"
            )


def refuse_wrong_sums(step: FollowedStep, calls: Sequence[CallGradients]) -> None:
    """Raise if per-example gradients through a coupled batch do not add up to the
    gradient of the batch."""
    for call in calls:
        if isinstance(call.features, TermGradients) and call.whole is not None:
            call.features.refuse_other_sum(call.whole, step.index)
        if isinstance(call.features, TermProducts):
            call.features.refuse_other_sum(step.index)


def credit_of_examples(
    step: FollowedStep,
    calls: Sequence[CallGradients],
    gradient: Weights,
    proved: GradientFactors,
    divided: Collection[str],
    *,
    cast: bool,
) -> Weights:
    """Return the credit of each gradient element: 0 if the element is only a rounding
    error, because its terms cancel, else 1.

    `divided` names the parameters whose gradient is divided by a denominator, in this
    step or, through momentum, in a later one. Examine only these parameters. Omit
    parameters whose elements all have credit 1."""
    consumed = {name: step.gradient[name] for name in step.with_grad if name in divided}
    if not consumed:
        return {}
    consumed = proved.before_clipping(consumed)
    factors = proved.factors
    jacobians = (jacobian for call in calls for jacobian in call.stored)
    sizes = {
        name: size * abs(factors[name])
        for name, size in term_sizes(jacobians, step.start).items()
        if name in consumed
    }
    if cast:
        return credit(consumed, sizes, {})

    # the loop and the replay sum the same terms in different orders, so the distance of
    # the two gradients also shows their rounding error
    other = {name: multiple(factors[name], gradient[name]) for name in consumed}
    for call in calls:
        if (
            call.whole is not None
            and isinstance(call.features, TermGradients)
            and call.features.fits
        ):
            for name in consumed.keys() & call.whole.keys():
                gap = call.features.total[name] - call.whole[name]
                other[name] = other[name] + factors[name] * gap
    return credit(consumed, sizes, other)


# --- The right factors of the inner products ⟨V, ·⟩ of a step.


class StepRows:
    """The gradients of one step, for inner products with the adjoint V. They are the
    rows of one matrix, in this order:

    1. one for each example of the calls,
    2. one for all calls whose batches BatchNorm couples, if there are any,
    3. one for each position of each example, if there are contributions by position.
    """

    def __init__(
        self, step: FollowedStep, calls: Sequence[CallGradients], readers: CallReaders
    ) -> None:
        self.is_exact = readers.batch_norm == "exact"
        self.coupled = [
            call.whole is not None
            for call, followed in zip(calls, step.calls, strict=True)
            for _ in followed.names
        ]
        batch = coupled_row(calls)
        positions = [call.by_position for call in calls if call.by_position is not None]
        for each in positions:
            each.buffer_bytes = readers.buffer_bytes / len(positions)
        self.jacobians = Chain([call.features for call in calls] + batch + [*positions])
        self.examples = len(self.coupled)
        self.first_position = self.examples + len(batch)

    def terms(self, terms: StepTerms) -> LoopTerms:
        """Return the terms of the step: contributions, decay, rounding and coupling.
        The contributions are the negative inner products of V with the examples' rows.

        If BatchNorm couples a batch, the gradients of its examples may not add up to
        the gradient of the batch. There are two reasons for this gap:

        - If the gradient of each example was computed through the whole batch
          (`is_exact`), it is a rounding error. Add it to `rounding`.
        - Otherwise it is the effect that examples have on one another through the batch
          mean and variance. Return it as `coupling`."""
        kernel = terms.kernel[:, :, : self.examples]
        contributions = kernel.squeeze(3).neg()
        rounding = terms.rounding
        coupling = torch.zeros_like(rounding)
        if self.first_position > self.examples:
            coupled = torch.tensor(self.coupled, device=kernel.device)
            batch = terms.kernel[:, :, self.examples]
            gap = (kernel[:, :, coupled].sum(2) - batch).squeeze(2)
            if self.is_exact:
                rounding = rounding + gap
            else:
                coupling = gap
        return LoopTerms(contributions, terms.decay, rounding, coupling)

    def position_kernel(self, terms: StepTerms) -> Float[Tensor, "query out row"]:
        """Return the inner products of V with the gradients by position."""
        return terms.kernel[:, :, self.first_position :].squeeze(3)


class Chain(Sequence[RightFactor]):
    """The concatenation of several sequences. Elements are
    read only when they are needed."""

    def __init__(self, sequences: Sequence[Sequence[RightFactor]]) -> None:
        self.elements = [
            (each, index) for each in sequences for index in range(len(each))
        ]

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, index: Any) -> Any:
        sequence, index = self.elements[index]
        return sequence[index]


def coupled_row(calls: Sequence[CallGradients]) -> list[Sequence[RightFactor]]:
    """Return a list with one Jacobian: the sum of the gradients of all calls whose
    batch is coupled. Return an empty list if no batch is coupled."""
    wholes = [call.whole for call in calls if call.whole is not None]
    if not wholes:
        return []
    first, *others = wholes
    blocks = []
    for name, gradient in first.items():
        row = sum((whole[name] for whole in others), gradient)
        blocks.append(Rows(row.reshape(1, 1, -1), name))
    return [[Jacobian(tuple(blocks), 1, 1)]]


def ratio(part: Tensor, whole: Tensor) -> float:
    """Return part/whole, or `part` if `whole` is zero.

    >>> ratio(torch.tensor(1.0), torch.tensor(4.0)), ratio(torch.tensor(1.0), torch.tensor(0.0))
    (0.25, 1.0)
    """
    numerator, denominator = read_numbers([part, whole])
    return numerator / denominator if denominator else numerator


def relative_size(part: Weights, whole: Weights) -> float:
    """Return ‖part‖/‖whole‖, with norms over all parameters.

    >>> relative_size({"w": torch.ones(1)}, {"w": torch.full((1,), 4.0)}), relative_size({}, {})
    (0.25, 0.0)
    """
    squares, squares_of_whole = (
        sum(float(each.square().sum()) for each in gradients.values())
        for gradients in (part, whole)
    )
    return (squares / squares_of_whole) ** 0.5 if squares else 0.0


def stacked(jacobians: Sequence[Jacobian]) -> Jacobian:
    """Concatenate the Jacobians of single queries."""
    blocks = [block for one in jacobians for block in one.blocks]
    starts = [query for query, one in enumerate(jacobians) for _ in one.blocks]
    return Jacobian(tuple(blocks), len(jacobians), jacobians[0].outputs, tuple(starts))
