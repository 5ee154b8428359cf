"""Independence: whether an example's outputs change when others of its batch are left out, moved, or are others.

Ownership finds what examples do to one another after they have met a trained weight. What they do before that, a batch
centred by its own mean or sorted, shows only in the outputs. So the batch runs in parts and in other orders, such that
of any two examples each runs without the other: for every binary digit of their places one half, then the other, which
takes as long as log₂ n runs of the whole. What couples examples for some numbers alone, as a norm beyond a bound does,
shows where a few of the examples stand beside copies, zeros, and numbers that are very large. Another batch of a
function that passed all this is compared with one random half and the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.record.tape import Tape, is_whole, map_tensors, tensors
from ntkexp.kernel.record.taping import columns, is_out_of_memory
from ntkexp.mistake import Mistake, first_line
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import stream
from ntkexp.text import short

COUPLED = (
    "the module couples the examples of a batch, so it has no tangent kernel; look for batch statistics, or for "
    "operations along the first axis"
)

UNSEEN = "so whether it couples the examples of a batch cannot be seen; use smaller weights or inputs, or float64"

CHANGING = (
    "the module gives other outputs when it is run again on the same inputs, so it has no tangent kernel; look for "
    "random numbers from outside torch, or for something that it counts"
)

SUMS = frozenset(
    {
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
    }
)
"""Operations whose result rounds at the size of their arguments."""

ROUNDINGS = 100.0  # of the terms of a sum, before a difference is compared with noise
OF_NOISE = 64.0  # times what a relative noise of eps in weights and inputs does: so far rounding may take outputs
FEW = 8  # examples that run by themselves, and beside strange ones
STRANGE = {1.0: (0.0, 1e4, -1e4), 1e-2: (0.0, 1e4, -1e4), 1e2: (0.0,)}
"""What fills the inputs of strange examples, times the largest input, and by which factors those of the others come to
lie beyond a bound. Infinities and nan would also come from a product with a zero that masks them.
"""


def refuse_dependence(function: Function, tape: Tape, *, known: bool = False) -> None:
    """Run all examples once more, parts of them, and some beside strange ones; of a function that is `known` to pass on
    another batch, a random half and the rest. Where numbers that inputs decide choose what Python does, several
    examples may have one effect on the others, and a few run by themselves each time.
    """
    weights, everyone = (
        {name: tape[slot].detach() for slot, name in tape.weights.items()},
        range(len(tape.outputs)),
    )
    with torch.no_grad():
        trial = Trial(function, tape, weights, tape.outputs)
        if not trial.are_same(
            columns(function, weights, tape.given), tape.outputs, tape.given, tape.outputs
        ):
            raise Mistake(CHANGING)
        if len(everyone) == 1:
            return
        order = shuffled(everyone)
        for half in (order[: len(order) // 2], order[len(order) // 2 :]):
            trial.run(half)
        if known and not tape.chooses:
            return
        trial = trial.at_moved_weights()
        few = shuffled(everyone)[:FEW]
        for k in few:
            trial.run([k])
        if known:
            return
        for rows in [*halves(everyone), 2 * few]:
            trial.run(rows)
        if any(map(Tensor.is_floating_point, tensors(tape.given))):
            trial.run_beside_strangers()


@dataclass(frozen=True)
class Trial:
    """A function at some weights, its outputs on the batch of a tape, and comparisons with other batches."""

    function: Function
    tape: Tape
    weights: Weights
    outputs: Float[Tensor, "example out"]

    def run(self, rows: Sequence[int]) -> None:
        """Examples in an order give what they gave among all. Where a batch is taken as a whole, as random numbers are
        drawn for it, all stay where they are, and the first of these stands in the place of each other.
        """
        everyone = range(len(self.outputs))
        places: Sequence[int] = range(len(rows))
        if self.tape.keeps_places:
            places, first = sorted({*rows}), rows[0]
            rows = [k if k in places else first for k in everyone]
        try:
            found = columns(self.function, self.weights, selected(self.tape.given, rows))
        except Mistake:
            raise
        except Exception as error:  # the module's own, of a batch that it did not expect
            if is_out_of_memory(error):
                raise
            raise Mistake(
                f"the module runs on {len(everyone)} examples and not on {len(rows)} of them ({first_line(error)}), so "
                "whether it couples the examples of a batch cannot be seen; let it take any number of them (one "
                "example is x[None])"
            ) from error
        among = self.outputs[[rows[place] for place in places]]
        self.refuse_coupling(found[list(places)], among, self.tape.given, self.outputs)

    def run_beside_strangers(self) -> None:
        """A few examples, of several sizes, give the same beside copies as beside other numbers, whatever these are."""
        # Inputs that become whole numbers may be places in a table, and strange ones lie outside it
        if any(
            entry.name in ("_to_copy", "copy", "bucketize", "searchsorted")
            and any(
                is_whole(self.tape[slot]) and self.tape[slot].dtype != torch.bool
                for slot in entry.results
            )
            and any(
                slot in self.tape.from_inputs and not is_whole(self.tape[slot])
                for slot in entry.slots
            )
            for entry in self.tape.entries
        ):
            return
        everyone = range(len(self.outputs))
        rows = list(everyone) if self.tape.keeps_places else shuffled(everyone)[:FEW]
        copies = selected(self.tape.given, [rows[place - place % 2] for place in range(len(rows))])
        for size, numbers in STRANGE.items():
            usual = self.run_or_none(with_strangers(copies, size))
            for number in numbers:
                found = self.run_or_none(with_strangers(copies, size, number))
                if usual is not None and found is not None and bool(found[::2].isfinite().all()):
                    self.refuse_coupling(
                        found[::2], usual[::2], with_strangers(copies, size), usual
                    )

    def refuse_coupling(
        self,
        apart: Float[Tensor, "part out"],
        among: Float[Tensor, "part out"],
        given: Inputs,
        usual: Float[Tensor, "example out"],
    ) -> None:
        """Examples do not know of others, unless the numbers are such that this cannot be seen: no numbers, or with no
        digits left after rounding. On what was `given` the function gives the usual outputs."""
        if self.are_same(apart, among, given, usual):
            return
        if not bool(apart.isfinite().all() and among.isfinite().all()):
            raise Mistake(f"outputs of the module are not finite, {UNSEEN}")
        moved = self.moved_by_noise(given, usual)
        if float((apart - among).abs().max()) <= OF_NOISE * moved:
            share = moved / float(usual.abs().max())
            raise Mistake(
                f"rounding moves outputs of the module by {short(share)} of the largest, {UNSEEN}"
            )
        raise Mistake(COUPLED)

    def are_same(
        self,
        apart: Float[Tensor, "part out"],
        among: Float[Tensor, "part out"],
        given: Inputs,
        usual: Float[Tensor, "example out"],
    ) -> bool:
        """Whether examples give apart from the others what they give among them, to some roundings of the terms
        that outputs are added up from; or to what a noise of eps does, if that leaves half of the digits.
        """
        if not apart.numel():
            return True
        farthest = float(torch.sub(apart, among).abs_().max())
        if not isfinite(
            farthest
        ):  # somewhere a number is none, or infinite; the same is so on both sides, or is not
            apart_by = torch.where(
                (apart == among) | (apart.isnan() & among.isnan()), 0.0, (apart - among).abs()
            )
            farthest = float(apart_by.nan_to_num(torch.inf).max())
        if farthest == 0 or farthest <= (rounding := ROUNDINGS * self.tape.eps * self.largest_term):
            return True
        outputs = (self.tape.outputs, among, usual)
        size = max(float(each.abs().nan_to_num(0.0, 0.0).max()) for each in outputs)
        allowed = self.tape.eps**0.5 * size + rounding
        return farthest <= allowed and farthest <= OF_NOISE * self.moved_by_noise(given, usual)

    @cached_property
    def largest_term(self) -> float:
        """The largest number of what outputs are added up from: where they are differences of larger numbers, as of a
        network and its start, those are what rounds."""
        reached = {self.tape.output}
        for entry in reversed(self.tape.entries):
            if entry.name in SUMS and not reached.isdisjoint(entry.results):
                reached.update(entry.slots)
        terms = [self.tape[slot].detach() for slot in reached]
        return max(float(term.abs().max()) for term in terms if not is_whole(term) and term.numel())

    def moved_by_noise(self, given: Inputs, usual: Float[Tensor, "example out"]) -> float:
        """By how much a relative noise of eps in weights and inputs moves the usual outputs."""
        noisy = partial(with_noise, eps=self.tape.eps)
        weights = {name: noisy(weight) for name, weight in self.weights.items()}
        near = replace(self, weights=weights).run_or_none(map_tensors(noisy, given))
        return 0.0 if near is None else float((near - usual).abs().max())

    def run_or_none(self, inputs: Inputs) -> Float[Tensor, "example out"] | None:
        try:
            with warnings.catch_warnings(action="ignore"):
                return columns(self.function, self.weights, inputs)
        except Exception as error:  # the module's own, of inputs that it did not expect
            if is_out_of_memory(error):
                raise
            return None

    def at_moved_weights(self) -> Trial:
        """The same at weights with a tenth of noise, if it runs there: a readout that begins at zero shows nothing of
        what comes before it.
        """
        noise, moved = stream("independence"), dict(self.weights)
        for name, weight in self.weights.items():
            if weight.is_floating_point() and weight.numel():
                size = (
                    float(weight.square().mean().sqrt()) or weight[0].numel() ** -0.5
                    if weight.dim()
                    else 1.0
                )
                draw = torch.randn(weight.shape, generator=noise, dtype=torch.float64)
                moved[name] = weight + 0.1 * size * draw.to(weight)
        trial = replace(self, weights=moved)
        outputs = trial.run_or_none(self.tape.given)
        return (
            self
            if outputs is None or not outputs.isfinite().all()
            else replace(trial, outputs=outputs)
        )


def halves(everyone: Sequence[int]) -> Iterator[list[int]]:
    """Halves in random orders, such that any two examples stand in different ones once.

    >>> [sorted(half) for half in halves(range(4))]
    [[0, 2], [1, 3], [0, 1], [2, 3]]
    """
    for digit in range((len(everyone) - 1).bit_length()):
        for side in (0, 1):
            yield shuffled([k for k in everyone if k >> digit & 1 == side], digit)


def shuffled(rows: Sequence[int], number: int = 0) -> list[int]:
    order = torch.randperm(len(rows), generator=stream("independence", len(rows), number)).tolist()
    return [rows[k] for k in order]


def selected(inputs: Inputs, rows: Sequence[int]) -> Inputs:
    return map_tensors(lambda tensor: tensor[list(rows)], inputs)


def with_noise(tensor: Tensor, eps: float) -> Tensor:
    """The same numbers with a relative noise of eps."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=stream("independence"), dtype=torch.float64).to(
        tensor
    )
    return tensor * (1 + eps * noise)


def with_strangers(inputs: Inputs, size: float, number: float | None = None) -> Inputs:
    """The same inputs times a size; every second example is filled with a number, times the largest of them."""

    def replaced(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        other = tensor * size
        if number is not None and tensor.numel():
            other[1::2] = number * float(tensor.abs().max())
        return other

    return map_tensors(replaced, inputs)
