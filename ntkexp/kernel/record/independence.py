"""Test whether the outputs of an example depend on the other examples of its batch.

The search for owners (`secant/ownership`) detects only coupling after the first use of
a trained weight. It misses earlier coupling, such as subtracting the mean of the batch,
or sorting the batch. So the function also runs on parts of the batch, in random orders,
and its outputs are compared. The parts are chosen by writing the numbers of the examples
in binary. For every digit, the function runs on the examples whose digit is 0, and then
on the examples whose digit is 1. Any two examples differ in some digit, so each runs at
least once without the other. This takes as long as log₂ n runs of the whole batch.

Some functions couple examples only at certain values, for example if a norm exceeds a
bound. So a few examples also run in one batch with copies, zeros, and very large
numbers. A function that has passed all tests gets fewer tests on other batches: it runs
on a random half, and on the other half."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

from ntkexp.kernel.record.tape import (
    Entry,
    Slot,
    Tape,
    advice_for_lists,
    is_integer,
    map_tensors,
    tensors,
)
from ntkexp.kernel.record.taping import columns, is_out_of_memory
from ntkexp.mistake import Mistake, first_line
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import normal, stream
from ntkexp.text import short

COUPLED = (
    "the module couples the examples of a batch, so it has no tangent kernel; look for batch "
    "statistics, or for operations along the first axis, and move them out of the "
    "module (a loss may couple examples). If the first axis is the time, exchange it "
    "with the axis of the examples (batch_first=True)"
)

RANDOM_ROWS = (
    "the module draws random numbers for the rows of packed sequences, and the lengths "
    "of the other examples determine which rows an example has; pass the lengths as a "
    "separate input, or set dropout=0 in the recurrent layer"
)

UNSEEN = "so coupling between the examples of a batch cannot be seen; use smaller weights or inputs, or float64"

CHANGING = (
    "the module returns other outputs when it runs again on the same inputs, so it has "
    "no tangent kernel; look for random numbers from outside torch, for a counter, or "
    "for a state that it keeps between calls"
)

SUM_OPERATIONS = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "neg",
        "mul",
        "div",
        "view",
        "_unsafe_view",
        "expand",
        "squeeze",
        "unsqueeze",
    ]
)
"""Sums, products and views. The rounding error of their result may be as large as the
rounding error of an argument."""

# A difference of two outputs counts as rounding if it is at most this multiple of eps
# times the largest term in the sums that give the outputs.
ALLOWED_ROUNDINGS = 100.0
# A larger difference may still count as rounding, if it is at most this multiple of the
# change that noise of relative size eps in weights and inputs causes.
ALLOWED_NOISE = 64.0
# If outputs differ between batches, the module runs this many times on the same batch, to
# find out whether it draws random numbers outside torch.
REPEATS = 4
# number of examples that run alone, and in one batch with extreme inputs
FEW_EXAMPLES = 8
EXTREME_FACTORS = {1.0: (0.0, 1e4, -1e4), 1e-2: (0.0, 1e4, -1e4), 1e2: (0.0,)}
"""The tests with extreme inputs. A key is a factor of the tested examples. Its values are
the extreme inputs in their batch, in units of the largest input. Infinities and nan are
not used, because a mask that multiplies them by zero gives nan even if examples are
independent."""


def refuse_dependence(function: Function, tape: Tape, *, known: bool = False) -> None:
    """Raise Mistake if the outputs of an example change when the batch runs again, in
    parts, or together with other inputs.

    A function that is `known` to have passed on another batch runs only on a random
    half and on the other half. If Python may have branched on numbers that depend on
    the inputs, a few examples also run alone: if several examples decide a branch in
    the same way, removing half of them may not change the branch."""
    weights = tape.recorded_weights
    everyone = range(len(tape.outputs))
    with torch.no_grad():
        trial = Trial(function, tape, weights, tape.outputs)
        if not trial.outputs_agree(
            columns(function, weights, tape.given),
            tape.outputs,
            tape.given,
            tape.outputs,
        ):
            raise Mistake(CHANGING)
        if len(everyone) == 1:
            return
        order = shuffled(everyone)
        for half in (order[: len(order) // 2], order[len(order) // 2 :]):
            trial.run(half)
        if known and not tape.chooses:
            return
        trial = trial.at_perturbed_weights()
        few = shuffled(everyone)[:FEW_EXAMPLES]
        alone = [[k] for k in few]
        for rows in alone:
            trial.run(rows)
        if known:
            return
        for rows in [*halves(everyone), 2 * few]:
            # in a batch of two, each half is an example that has already run alone
            if rows not in alone:
                trial.run(rows)
        if any(map(Tensor.is_floating_point, tensors(tape.given))):
            trial.run_with_extreme_inputs()


@dataclass(frozen=True)
class Trial:
    """A function at fixed weights, and its outputs on the batch of a tape. `run`
    compares these outputs with the outputs of the function on other batches."""

    function: Function
    tape: Tape
    weights: Weights
    outputs: Float[Tensor, "example out"]

    def run(self, rows: Sequence[int]) -> None:
        """Run the examples `rows` in this order. Raise Mistake if their outputs differ
        from those in the whole batch.

        If the function must run on the whole batch, examples keep their indices, and
        copies of them replace all other examples. If the function fails, run the
        examples in the order of the batch, because the function may require decreasing
        lengths."""
        everyone = range(len(self.outputs))
        places: Sequence[int] = range(len(rows))
        if self.tape.needs_whole_batch:
            places = sorted({*rows})
            # the nearest earlier example replaces example k
            rows = [places[max(0, bisect_right(places, k) - 1)] for k in everyone]
        try:
            outputs = columns(self.function, self.weights, self.selected(rows))
        except Mistake:
            raise
        except Exception as error:
            # raised by the module, which did not expect this batch
            if is_out_of_memory(error):
                raise
            in_order = sorted(rows)
            if in_order != list(rows) and not self.tape.needs_whole_batch:
                self.run(in_order)
                return
            raise Mistake(
                f"the module runs on {len(everyone)} examples but not on {len(rows)} of "
                f"them ({first_line(error)}), so coupling between the examples of a "
                "batch cannot be seen; let it accept any number of examples (one "
                f"example is x[None]){advice_for_lists(self.tape.given)}"
            ) from error
        among = self.outputs[[rows[place] for place in places]]
        if outputs[list(places)].shape != among.shape:
            raise Mistake(
                f"the module returns {among.shape[1]} numbers for an example in the "
                f"whole batch, but {outputs.shape[1]} in a part of it; let it pad "
                "outputs to the width of its inputs, for example by "
                "pad_packed_sequence(…, total_length=x.shape[1]). If its outputs "
                "compare the examples of a batch, let it return what they compare"
            )
        self.refuse_coupling(
            outputs[list(places)], among, self.tape.given, self.outputs
        )

    def selected(self, rows: Sequence[int]) -> Inputs:
        """Return the inputs of the examples `rows`. If random numbers were drawn for
        the rows of packed sequences, leave the lengths of all sequences unchanged,
        because they decide which rows an example has."""

        def some(leaf: object) -> object:
            if not isinstance(leaf, Slot):
                return leaf
            if leaf in self.length_slots:
                return self.tape[leaf]
            return self.tape[leaf][list(rows)]

        inputs: Inputs = tree_map(some, self.tape.arguments)
        return inputs

    @cached_property
    def length_slots(self) -> frozenset[Slot]:
        """The slots of inputs that are lengths of sequences, if random numbers may
        belong to rows of packed sequences. The set is empty if lengths are computed
        from inputs with more than one number for each example."""
        if not self.tape.drawn:
            return frozenset()
        lengths = {
            entry.args[1]
            for entry in self.tape.entries
            if entry.name == "_pack_padded_sequence"
        }
        given = frozenset(self.tape.inputs) - frozenset(self.tape.drawn)
        slots = frozenset(
            slot for slot in given if not lengths.isdisjoint(self.tape.reached([slot]))
        )
        if any(self.tape[slot].dim() > 1 for slot in slots):
            return frozenset()
        return slots

    def run_with_extreme_inputs(self) -> None:
        """Run a few examples in one batch with copies, and in one batch with extreme
        inputs (zeros or very large numbers).

        Raise Mistake if the outputs in both batches differ. Repeat this at several
        scales of the inputs."""
        # Inputs that are converted to integers may index a table, and extreme values
        # would be out of range. Do not test such functions.
        if any(map(self.makes_integers, self.tape.entries)):
            return
        everyone = range(len(self.outputs))
        rows = list(everyone)
        if not self.tape.needs_whole_batch:
            rows = sorted(shuffled(everyone)[:FEW_EXAMPLES])
        copies = self.selected([rows[place - place % 2] for place in range(len(rows))])
        for size, numbers in EXTREME_FACTORS.items():
            usual = self.run_or_none(with_extreme_inputs(copies, size))
            for number in numbers:
                outputs = self.run_or_none(with_extreme_inputs(copies, size, number))
                if (
                    usual is not None
                    and outputs is not None
                    and bool(outputs[::2].isfinite().all())
                ):
                    self.refuse_coupling(
                        outputs[::2],
                        usual[::2],
                        with_extreme_inputs(copies, size),
                        usual,
                    )

    def makes_integers(self, entry: Entry) -> bool:
        """Return True if an operation converts numbers that depend on the inputs to
        integers."""
        if entry.name not in ("_to_copy", "copy", "bucketize", "searchsorted"):
            return False
        results = [self.tape[slot] for slot in entry.results]
        read = [self.tape[s] for s in entry.slots if s in self.tape.from_inputs]
        returns_integers = any(
            is_integer(value) and value.dtype != torch.bool for value in results
        )
        return returns_integers and not all(map(is_integer, read))

    def refuse_coupling(
        self,
        apart: Float[Tensor, "part out"],
        among: Float[Tensor, "part out"],
        given: Inputs,
        usual: Float[Tensor, "example out"],
    ) -> None:
        """Raise Mistake if examples have different outputs, `apart` and `among`, in two
        batches.

        If outputs are not finite or rounding error dominates, the message says that
        coupling cannot be detected. `usual` are the outputs on the inputs `given`."""
        if self.outputs_agree(apart, among, given, usual):
            return
        if not bool(apart.isfinite().all() and among.isfinite().all()):
            raise Mistake(f"outputs of the module are not finite, {UNSEEN}")
        moved = self.noise_effect(given, usual)
        if float((apart - among).abs().max()) <= ALLOWED_NOISE * moved:
            share = moved / float(usual.abs().max())
            raise Mistake(
                f"rounding moves outputs of the module by {short(share)} of the largest, {UNSEEN}"
            )
        if self.tape.drawn and any(
            entry.name == "_pack_padded_sequence" for entry in self.tape.entries
        ):
            raise Mistake(RANDOM_ROWS)
        for _ in range(REPEATS):
            again = columns(self.function, self.weights, self.tape.given)
            if not self.outputs_agree(
                again, self.outputs, self.tape.given, self.outputs
            ):
                raise Mistake(CHANGING)
        raise Mistake(COUPLED)

    def outputs_agree(
        self,
        apart: Float[Tensor, "part out"],
        among: Float[Tensor, "part out"],
        given: Inputs,
        usual: Float[Tensor, "example out"],
    ) -> bool:
        """Return True if examples have the same outputs, `apart` and `among`, in two
        batches, up to rounding.

        A difference counts as rounding if it is at most ALLOWED_ROUNDINGS · eps of the
        largest term in the outputs. A larger difference counts as rounding if half of
        the digits agree, and if it is at most ALLOWED_NOISE times `noise_effect`."""
        if not apart.numel():
            return True
        farthest = float(torch.sub(apart, among).abs_().max())
        # nan and infinities must be at the same elements of both outputs
        if not isfinite(farthest):
            equal = (apart == among) | (apart.isnan() & among.isnan())
            distances = torch.where(equal, 0.0, (apart - among).abs())
            farthest = float(distances.nan_to_num(torch.inf).max())
        if farthest == 0:
            return True
        rounding = ALLOWED_ROUNDINGS * self.tape.eps * self.largest_term
        if farthest <= rounding:
            return True
        outputs = (self.tape.outputs, among, usual)
        size = max(float(values.abs().nan_to_num(0.0, 0.0).max()) for values in outputs)
        if not farthest <= self.tape.eps**0.5 * size + rounding:
            return False
        return farthest <= ALLOWED_NOISE * self.noise_effect(given, usual)

    @cached_property
    def largest_term(self) -> float:
        """The magnitude of the largest term in the sums that give the outputs. Rounding
        errors are relative to this term, which may exceed the outputs, as in
        f(θ) − f(θ₀)."""
        reached = {self.tape.output}
        for entry in reversed(self.tape.entries):
            if entry.name in SUM_OPERATIONS and not reached.isdisjoint(entry.results):
                reached.update(entry.slots)
        terms = [self.tape[slot].detach() for slot in reached]
        return max(
            float(term.abs().max())
            for term in terms
            if not is_integer(term) and term.numel()
        )

    def noise_effect(self, given: Inputs, usual: Float[Tensor, "example out"]) -> float:
        """Return the largest change of the outputs `usual` if weights and inputs
        receive relative noise of size eps. Return 0 if the function then fails."""

        def noisy(tensor: Tensor) -> Tensor:
            return with_noise(stream("independence"), self.tape.eps, tensor)

        weights = {name: noisy(weight) for name, weight in self.weights.items()}
        near = replace(self, weights=weights).run_or_none(map_tensors(noisy, given))
        if near is None:
            return 0.0
        return float((near - usual).abs().max())

    def run_or_none(self, inputs: Inputs) -> Float[Tensor, "example out"] | None:
        try:
            with warnings.catch_warnings(action="ignore"):
                return columns(self.function, self.weights, inputs)
        except Exception as error:
            # raised by the module, which did not expect these inputs
            if is_out_of_memory(error):
                raise
            return None

    def at_perturbed_weights(self) -> Trial:
        """Return a `Trial` at weights with 10 % noise. If the function fails at these
        weights, or returns nan or infinity, return this trial.

        At the original weights, a readout that is initialized to zero would hide
        coupling in earlier layers."""
        noise = stream("independence")
        moved = dict(self.weights)
        for name, weight in self.weights.items():
            if weight.is_floating_point() and weight.numel():
                size = 1.0
                if weight.dim():
                    root_mean_square = float(weight.square().mean().sqrt())
                    size = root_mean_square or weight[0].numel() ** (-0.5)
                draw = normal(noise, *weight.shape)
                moved[name] = weight + 0.1 * size * draw.to(weight)
        trial = replace(self, weights=moved)
        outputs = trial.run_or_none(self.tape.given)
        if outputs is None or not outputs.isfinite().all():
            return self
        return replace(trial, outputs=outputs)


def halves(everyone: Sequence[int]) -> Iterator[list[int]]:
    """Yield halves in random orders. Any two examples are in different halves at least
    once.

    >>> [sorted(half) for half in halves(range(4))]
    [[0, 2], [1, 3], [0, 1], [2, 3]]
    """
    for digit in range((len(everyone) - 1).bit_length()):
        for side in (0, 1):
            yield shuffled([k for k in everyone if k >> digit & 1 == side], digit)


def shuffled(rows: Sequence[int], number: int = 0) -> list[int]:
    order = torch.randperm(
        len(rows), generator=stream("independence", len(rows), number)
    ).tolist()
    return [rows[k] for k in order]


def with_noise(
    generator: torch.Generator, size: float | None, tensor: Tensor
) -> Tensor:
    """Add relative noise: multiply each element by 1 + `size` · N(0, 1). By default,
    `size` is the dtype's eps.

    Return integer tensors unchanged.
    """
    if not tensor.is_floating_point():
        return tensor
    drawn = normal(generator, *tensor.shape).to(tensor)
    relative = torch.finfo(tensor.dtype).eps if size is None else size
    return tensor * (1 + relative * drawn)


def with_extreme_inputs(
    inputs: Inputs, size: float, number: float | None = None
) -> Inputs:
    """Multiply inputs by `size`. If `number` is given, replace every second example by
    `number` times the largest input."""

    def replaced(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        other = tensor * size
        if number is not None and tensor.numel():
            other[1::2] = number * float(tensor.abs().max())
        return other

    return map_tensors(replaced, inputs)
