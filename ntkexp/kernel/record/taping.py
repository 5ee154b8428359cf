"""Taping: a function of weights is run once under a recorder, and its tape is examined: examples that depend on each
other, values that route others, casts, precision, and memory that is refused.

Memory that is refused before it is taken: what a configuration asks for may be beyond every machine.

New arrays are counted as torch is asked for them, by their shapes; the one that goes beyond the limit is not made.

>>> with MemoryLimit(1.0, "the data", "the number of examples"):  # doctest: +ELLIPSIS
...     numbers = torch.zeros(10**6, 10**6)
Traceback (most recent call last):
ntkexp.mistake.Mistake: memory_gb=1: the data takes an array of [1000000, 1000000], with which there are 4000 GB; ...
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from ntkexp.kernel.record.recorder import DispatchMode, NotStraight, OutOfTorch, Recorder, StraightOn
from ntkexp.kernel.record.tape import Entry, Slot, Tape, as_inputs, examples, is_whole, map_tensors, tensors
from ntkexp.mistake import Mistake, first_line
from ntkexp.shapes import Function, Inputs, Weights
from ntkexp.stream import stream
from ntkexp.text import short

# --- Taping: a function of weights is run once under a recorder, by operations that have rules and overwrite nothing.


aten = torch.ops.aten

FUSED = (aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default)
"""Recurrent layers as one operation, which has no rule."""


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Attention and encoders by operations that have rules, not by fused ones."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def columns(function: Function, weights: Weights, inputs: Inputs) -> Tensor:
    """The function's outputs as a matrix, a row an example."""
    outputs, count = function(weights, inputs), examples(inputs)
    if outputs.is_complex():
        raise Mistake("the module gives complex outputs; let it give their parts, by torch.view_as_real")
    if outputs.dim() == 0 or len(outputs) != count:
        raise Mistake(
            f"the module gives outputs of shape {list(outputs.shape)} for {count} examples; "
            "their first axis must be that of the examples"
        )
    if not outputs.is_floating_point():
        raise Mistake(
            f"the module gives outputs of {outputs.dtype}, which have no gradients; let it give floating numbers"
        )
    if not outputs.numel() and count:
        raise Mistake(f"the module gives outputs of shape {list(outputs.shape)}: there is none for an example")
    return outputs[:, None] if outputs.dim() == 1 else outputs.flatten(1)


def record(
    function: Function, weights: Weights, inputs: Inputs, *, differentiable: bool = False, known: bool = False
) -> Tape:
    """Run the function once and keep its tape, with autograd's graph if it is to be differentiated. It may draw random
    numbers if it is `known` from which state: the same whenever it runs on a batch."""
    refuse_complex(weights)
    run = partial(columns, function)
    taped = partial(functional_tape, run, weights, inputs, differentiable, known)
    tape = taped()
    operations = {entry.op for entry in tape.entries}
    if operations.isdisjoint(FUSED):
        return tape
    with unfused(), composed() if aten._cudnn_rnn.default in operations else nullcontext():
        return taped()


def refuse_complex(weights: Weights) -> None:
    """A kernel sums over real numbers."""
    for name, weight in weights.items():
        if weight.is_complex():
            raise Mistake(
                f"the parameter '{name}' is complex, and a kernel sums over real ones; let the module hold its parts, "
                "and put them together by torch.view_as_complex"
            )


@contextmanager
def unfused() -> Iterator[None]:
    """Recurrent layers by operations that have rules; elsewhere plain kernels would be slower and less exact."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*TF32", category=UserWarning)  # torch warns of its own default
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.cudnn.enabled = before


@contextmanager
def composed() -> Iterator[None]:
    """Composite operations by torch's own Python, for a GPU without cuDNN still has the cells of recurrent layers as
    one operation each."""
    from torch._dispatch.python import enable_python_dispatcher  # noqa: PLC0415  it takes half a second to load

    with enable_python_dispatcher():
        yield


def functional_tape(
    run: Callable[[Weights, Inputs], Tensor],
    weights: Weights,
    inputs: Inputs,
    differentiable: bool,
    known: bool = False,
) -> Tape:
    """One run and its tape, as a pure program where torch can make one of it.

    Most modules write nothing in place, and need no help; a module that does runs again.
    """
    try:
        with StraightOn():
            return put_on_tape(run, weights, inputs, differentiable, known, rewrites=False)
    except NotStraight:
        pass
    try:
        with OutOfTorch(in_memory=False):
            return put_on_tape(torch.func.functionalize(run), weights, inputs, differentiable, known)
    except RuntimeError as error:  # functionalize knows no autograd.Function of a module's own, and no list or array
        if is_out_of_memory(error):
            raise
        with OutOfTorch(in_memory=True):
            return put_on_tape(run, weights, inputs, differentiable, known)


def put_on_tape(
    run: Callable[[Weights, Inputs], Tensor],
    weights: Weights,
    inputs: Inputs,
    differentiable: bool,
    known: bool,
    *,
    rewrites: bool = True,
) -> Tape:
    """One run and its tape."""
    leaves = {name: weight.detach().requires_grad_(differentiable) for name, weight in weights.items()}
    given = as_inputs(inputs)
    versions = [tensor._version for tensor in tensors(given)]
    with torch.set_grad_enabled(differentiable), plain_kernels(), Recorder(rewrites=rewrites, known=known) as recorder:
        named = {recorder.slot(weight): name for name, weight in leaves.items()}
        arguments = tree_map(recorder.slot, given)
        output = recorder.slot(run(leaves, given))
        if versions != [tensor._version for tensor in tensors(given)]:
            raise Mistake("the module overwrites its inputs; let it work on a copy, such as x = x.clone()")
        entries, values = tuple(recorder.entries), tuple(recorder.values)
        overwrites, drawn = bool(recorder.flats), tuple(recorder.drawn)
        return Tape(entries, values, named, arguments, output, overwrites, drawn)


# --- Independence: whether an example's outputs change when others of its batch are left out, moved, or are others.
#
# Ownership sees what examples do to one another after they have met a trained weight. What they do before that, a
# batch centred by its own mean or sorted, shows only in the outputs. So the batch is run in parts and in other
# orders, such that of any two examples each is run without the other: by every binary digit of their places one
# half, then the other, which takes as long as log₂ n runs of the whole. What couples examples for some numbers
# alone, as a norm beyond a bound does, shows where a few of the examples stand beside copies, zeros, and numbers
# that are very large. Another batch of a function that passed all this is held against one random half and the
# rest.


COUPLED = (
    "the module couples the examples of a batch, so it has no tangent kernel; look for batch statistics, or for "
    "operations along the first axis"
)

UNSEEN = "so whether it couples the examples of a batch cannot be seen; use smaller weights or inputs, or float64"

CHANGING = (
    "the module gives other outputs when it is run again on the same inputs, so it has no tangent kernel; look for "
    "random numbers from outside torch, or for something that it counts"
)

SUMS = frozenset({"add", "sub", "rsub", "neg", "mul", "div", "view", "_unsafe_view", "expand", "squeeze", "unsqueeze"})
"""Operations whose result rounds at the size of what they are given."""

ROUNDINGS = 100.0
"""How often terms may round before anybody is accused."""

OF_NOISE = 64.0
"""Times what a relative noise of eps in weights and inputs does: so far rounding may take outputs."""

FEW = 8
"""Examples that are run by themselves, and beside strange ones."""

STRANGE = {1.0: (0.0, 1e4, -1e4), 1e-2: (0.0, 1e4, -1e4), 1e2: (0.0,)}
"""What fills the inputs of strange examples, times the largest input, and by which factors those of the others come to
lie beyond a bound. Numbers that are infinite, or none, would also come from a product with a zero that lets nothing by.
"""


@dataclass(frozen=True)
class Trial:
    """A function at some weights, what it gave on the batch of a tape, and how it is run on others."""

    function: Function
    tape: Tape
    weights: Weights
    outputs: Float[Tensor, "example out"]

    def of(self, rows: Sequence[int]) -> None:
        """Examples in an order give what they gave among all. Where random numbers are drawn for a batch as a whole,
        all stay where they are, and the first of these stands in the place of each other.
        """
        everyone = range(len(self.outputs))
        places: Sequence[int] = range(len(rows))
        if self.tape.drawn:
            places, first = sorted({*rows}), rows[0]
            rows = [k if k in places else first for k in everyone]
        try:
            found = columns(self.function, self.weights, chosen(self.tape.given, rows))
        except Mistake:
            raise
        except Exception as error:  # the module's own, of a batch that it did not expect
            if is_out_of_memory(error):
                raise
            raise Mistake(
                f"the module runs on {len(everyone)} examples and not on {len(rows)} of them ({first_line(error)}), so "
                "whether it couples the examples of a batch cannot be seen; let it take any number of them"
            ) from error
        among = self.outputs[[rows[place] for place in places]]
        self.refuse_coupling(found[list(places)], among, self.tape.given, self.outputs)

    def beside_strangers(self) -> None:
        """A few examples, of several sizes, give the same beside copies as beside other numbers, whatever these are."""
        everyone = range(len(self.outputs))
        rows = list(everyone) if self.tape.drawn else shuffled(everyone)[:FEW]
        beside_copies = chosen(self.tape.given, [rows[place - place % 2] for place in range(len(rows))])
        for size, numbers in {} if makes_places(self.tape) else STRANGE.items():
            usual = self.if_it_runs(filled(beside_copies, size))
            for number in numbers:
                found = self.if_it_runs(filled(beside_copies, size, number))
                if usual is not None and found is not None and bool(found[::2].isfinite().all()):
                    self.refuse_coupling(found[::2], usual[::2], filled(beside_copies, size), usual)

    def refuse_coupling(
        self,
        apart: Float[Tensor, "part out"],
        among: Float[Tensor, "part out"],
        given: Inputs,
        usual: Float[Tensor, "example out"],
    ) -> None:
        """Examples do not know of others, unless the numbers are such that this cannot be seen: no numbers, or with no
        digits left after rounding. On what was `given` the function gives the usual outputs."""
        if are_same(apart, among, self.tape):
            return
        if not bool(apart.isfinite().all() and among.isfinite().all()):
            raise Mistake(f"outputs of the module are not finite, {UNSEEN}")
        weights = {name: rounding_of(weight) for name, weight in self.weights.items()}
        near = replace(self, weights=weights).if_it_runs(map_tensors(rounding_of, given))
        moved = 0.0 if near is None else float((near - usual).abs().max())
        if float((apart - among).abs().max()) <= OF_NOISE * moved:
            share = moved / float(usual.abs().max())
            raise Mistake(f"rounding moves outputs of the module by {short(share)} of the largest, {UNSEEN}")
        raise Mistake(COUPLED)

    def if_it_runs(self, given: Inputs) -> Float[Tensor, "example out"] | None:
        """What the function gives; a module may look at its inputs, and refuse strange numbers."""
        try:
            with warnings.catch_warnings(action="ignore"):
                return columns(self.function, self.weights, given)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None


def refuse_dependence(function: Function, tape: Tape, *, known: bool = False) -> None:
    """Run all examples once more, parts of them, and some beside strange ones; of a function that is `known` to pass on
    another batch, a random half and the rest. Where numbers that inputs decide choose what Python does, several
    examples may have one effect on the others, and a few are run by themselves each time.
    """
    weights, everyone = {name: tape[slot].detach() for slot, name in tape.weights.items()}, range(len(tape.outputs))
    with torch.no_grad():
        if not are_same(columns(function, weights, tape.given), tape.outputs, tape):
            raise Mistake(CHANGING)
        if len(everyone) == 1:
            return
        own = Trial(function, tape, weights, tape.outputs)
        for rows in two_halves(everyone):
            own.of(rows)
        if known and not tape.chooses:
            return
        trial = moved(own)
        for rows in single(everyone):
            trial.of(rows)
        if not known:
            for rows in [*halves(everyone), 2 * shuffled(everyone)[:FEW]]:
                trial.of(rows)
            if any(map(Tensor.is_floating_point, tensors(tape.given))):
                trial.beside_strangers()


def moved(own: Trial) -> Trial:
    """The same at other weights, if it runs there: a readout that begins at zero shows nothing of what comes before."""
    noise = stream("independence")
    weights = {name: nudged(weight, noise) for name, weight in own.weights.items()}
    outputs = Trial(own.function, own.tape, weights, own.outputs).if_it_runs(own.tape.given)
    return own if outputs is None or not outputs.isfinite().all() else replace(own, weights=weights, outputs=outputs)


def nudged(weight: Tensor, noise: torch.Generator) -> Tensor:
    """A weight, or zeros, and a tenth as much of noise."""
    if not weight.is_floating_point() or not weight.numel():
        return weight
    size = float(weight.square().mean().sqrt()) or weight[0].numel() ** -0.5 if weight.dim() else 1.0
    return weight + 0.1 * size * torch.randn(weight.shape, generator=noise, dtype=torch.float64).to(weight)


def rounding_of(tensor: Tensor) -> Tensor:
    """The same numbers with a relative noise of their eps."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=stream("independence"), dtype=torch.float64).to(tensor)
    return tensor * (1 + torch.finfo(tensor.dtype).eps * noise)


def two_halves(everyone: Sequence[int]) -> tuple[list[int], list[int]]:
    """A random half, and the rest."""
    order = shuffled(everyone)
    return order[: len(order) // 2], order[len(order) // 2 :]


def halves(everyone: Sequence[int]) -> Iterator[list[int]]:
    """Halves in random orders, such that any two examples stand in different ones once.

    >>> [sorted(half) for half in halves(range(4))]
    [[0, 2], [1, 3], [0, 1], [2, 3]]
    """
    for digit in range((len(everyone) - 1).bit_length()):
        for side in (0, 1):
            yield shuffled([k for k in everyone if k >> digit & 1 == side], digit)


def single(everyone: Sequence[int]) -> Iterator[list[int]]:
    """A few examples, each by itself."""
    yield from ([k] for k in shuffled(everyone)[:FEW])


def shuffled(rows: Sequence[int], number: int = 0) -> list[int]:
    """The same in a random order."""
    order = torch.randperm(len(rows), generator=stream("independence", len(rows), number)).tolist()
    return [rows[k] for k in order]


def makes_places(tape: Tape) -> bool:
    """Whether inputs become whole numbers, which may be places in a table: strange ones lie outside it."""
    return any(
        entry.name in ("_to_copy", "copy", "bucketize", "searchsorted")
        and any(is_whole(tape[slot]) and tape[slot].dtype != torch.bool for slot in entry.results)
        and any(slot in tape.from_inputs and not is_whole(tape[slot]) for slot in entry.slots)
        for entry in tape.entries
    )


def chosen(inputs: Inputs, rows: Sequence[int]) -> Inputs:
    """The inputs of some examples, in an order."""
    return map_tensors(lambda tensor: tensor[list(rows)], inputs)


def filled(inputs: Inputs, size: float, number: float | None = None) -> Inputs:
    """The same inputs times a size; every second example is filled with a number, times the largest of them."""

    def replaced(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        other = tensor * size
        if number is not None:
            other[1::2] = number * float(tensor.abs().max())
        return other

    return map_tensors(replaced, inputs)


def are_same(apart: Float[Tensor, "part out"], among: Float[Tensor, "part out"], tape: Tape) -> bool:
    """Whether examples give apart from the others what they give among them."""
    # √eps is far more than what another order of summation changes, and far less than what other examples change; where
    # outputs are differences of larger numbers, as of a network and its start, those are what rounds
    size = max(float(outputs.abs().nan_to_num(0.0, 0.0).max()) for outputs in (tape.outputs, among) if outputs.numel())
    tolerance = tape.eps**0.5 * size + ROUNDINGS * tape.eps * size_of_terms(tape)
    same = ((apart - among).abs() <= tolerance) | (apart == among) | (apart.isnan() & among.isnan())
    return bool(same.all())


def size_of_terms(tape: Tape) -> float:
    """The largest of the numbers that outputs are added up from."""
    reached = {tape.output}
    for entry in reversed(tape.entries):
        if entry.name in SUMS and not reached.isdisjoint(entry.results):
            reached.update(entry.slots)
    terms = [tape[slot].detach() for slot in reached]
    return max(float(term.abs().max()) for term in terms if not is_whole(term) and term.numel())


# --- Routing: the values on a tape that decide where other values go.
#
# Indices, masks that pick or scatter, orders, the numbers of experts: two tapes of the same structure on which
# these differ may have other owners of the same rows. An elementwise operation keeps every element at its place,
# whatever its numbers are, and what only picks from weights is where the network is cut: tokens are no matter of
# routing.


PICKING = ("embedding", "gather", "index", "index_select", "take")
TOURNAMENTS = (  # their rules ask for no order
    *("_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "linalg_cholesky_ex", "linalg_inv_ex"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d", "max", "max_pool2d_with_indices", "max_pool3d_with_indices", "min"),
)


@dataclass(frozen=True)
class Routes:
    """The slots of a structure whose values decide something: where rows go, which examples' values count."""

    steering: tuple[Slot, ...]
    masks: tuple[Slot, ...]  # that the inputs decide alone


def routes(tape: Tape) -> Routes:
    """Those of all tapes of this structure."""
    read = {slot for entry in tape.entries for slot in entry.slots} | {tape.output}
    alone = tape.from_inputs - tape.from_weights
    return Routes(
        tuple(sorted({slot for entry in tape.entries for slot in steering_slots(tape, entry, read)})),
        tuple(sorted(slot for slot in alone if tape[slot].dtype == torch.bool)),
    )


def steering_slots(tape: Tape, entry: Entry, read: set[Slot]) -> Iterator[Slot]:
    """The whole numbers that steer an operation, as its arguments or as an order that it finds."""
    moved = [slot for slot in entry.slots if not is_whole(tape[slot])]
    only_picks = entry.name in PICKING and tape.from_inputs.isdisjoint(moved)
    if moved and not (keeps_places(tape, entry) or only_picks):
        yield from (slot for slot in entry.slots if is_whole(tape[slot]))
    if entry.name not in TOURNAMENTS and any(slot in read and not is_whole(tape[slot]) for slot in entry.results):
        yield from (slot for slot in entry.results if is_whole(tape[slot]))


def keeps_places(tape: Tape, entry: Entry) -> bool:
    """Whether every element stays where it is; h[h < 0] = 0 is an elementwise choice."""
    if entry.name != "index_put":
        return torch.Tag.pointwise in entry.op.tags or entry.name == "masked_fill"
    _, (*before, last), value, *_ = entry.args
    is_number = tape[value].dim() == 0 and value not in tape.from_weights
    return is_number and before == [None] * len(before) and tape[last].dtype == torch.bool


# --- Casts: some modules compute in shorter numbers than their weights have, in norms or in rotary positions say.
#
# A secant through such a cast closes to the rounding of the short numbers alone. Without it the module is another
# one, whose outputs differ by that rounding, and a secant closes to the rounding of its weights:
#
#     keep     the module as it is; float32 inside leaves an error of 1e-7 of the outputs at every step
#     ignore   operations that are told to give shorter numbers give those of the weights; outputs move by 1e-7, once


Casts: TypeAlias = Literal["keep", "ignore"]


class Uncast(DispatchMode):
    """Operations that are told to give shorter numbers give those of `kind`."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        told = kwargs.get("dtype")
        if told is not None and told.is_floating_point and torch.finfo(told).eps > torch.finfo(self.kind).eps:
            kwargs = kwargs | {"dtype": self.kind}
        return func(*args, **kwargs)


def without_casts(function: Function) -> Function:
    """The function computed in the numbers of its weights throughout."""

    def uncast(weights: Weights, inputs: Inputs) -> Tensor:
        with Uncast(next(iter(weights.values())).dtype):
            return function(weights, inputs)

    return uncast


def with_casts(function: Function, casts: Casts) -> Function:
    """The function as it is, or without its casts."""
    if casts not in ("keep", "ignore"):
        raise Mistake(f"casts={casts!r}: give 'keep' or 'ignore'")
    return without_casts(function) if casts == "ignore" else function


def remark(function: Function, tape: Tape, casts: Casts) -> str | None:
    """What the choice costs, in one line, for a function as it is and its tape as chosen; None if it costs nothing."""
    weights = {name: tape[slot].detach() for slot, name in tape.weights.items()}
    if casts == "keep":
        if tape.eps == torch.finfo(next(iter(weights.values())).dtype).eps:
            return None
        return (
            f"the module casts to shorter numbers than its weights have, so a secant closes to {tape.eps:.0e} of its "
            "outputs; casts=ignore leaves these casts out"
        )
    with torch.no_grad(), plain_kernels():
        kept = columns(function, weights, tape.given)
    moved = float((kept - tape.outputs).abs().max() / tape.outputs.abs().max())
    if not moved > 100 * tape.eps:
        return None
    return (
        f"the module is read without its casts to shorter numbers, which moves its outputs by {moved:.0e} of their size"
    )


# --- Numbers of float32 are multiplied as such. Torch may multiply them in shorter ones (TF32, by default in
# convolutions on a GPU, or bfloat16), which keep three of their seven digits: a secant could not close, and
# nothing would tell why.


NAMES = ("cudnn.conv", "cudnn.rnn", "cuda.matmul", "mkldnn.conv", "mkldnn.rnn", "mkldnn.matmul")
MULTIPLYING = [attrgetter(name)(torch.backends) for name in NAMES]


def keep_full_precision() -> list[str]:
    """Let every product be one of full numbers from now on; the precisions that were chosen before are given back.

    >>> with full_precision():
    ...     torch.backends.cudnn.conv.fp32_precision
    'ieee'
    """
    return choose(["ieee"] * len(MULTIPLYING))


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of full numbers for a while; what was chosen before is chosen again afterwards."""
    before = keep_full_precision()
    try:
        yield
    finally:
        choose(before)


def choose(precisions: list[str]) -> list[str]:
    """Choose a precision for each kind of product; those that were chosen before."""
    found = [kind.fp32_precision for kind in MULTIPLYING]
    for kind, before, precision in zip(MULTIPLYING, found, precisions, strict=True):
        if before != precision:
            kind.fp32_precision = precision
    return found


# --- Memory: whether an exception says that none is left.
#
# Several ways lead to a kernel, and where torch cannot go one it is asked to go another. A lack of memory is no
# such reason: which numbers come out must not depend on how much of it others took.


SIGNS = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python's or of torch's tells of a lack of memory.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), is_out_of_memory(MemoryError())
    (True, True)
    >>> is_out_of_memory(RuntimeError("shapes differ"))
    False
    """
    known = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS))


class MemoryLimit(DispatchMode):
    """So much memory for the new arrays of something, in GB, of which so many copies will be held in the end; `remedy`
    says what makes it smaller."""

    def __init__(self, memory_gb: float, what: str, remedy: str, copies: float = 1.0) -> None:
        super().__init__()
        self.memory_gb, self.what, self.remedy, self.copies, self.taken = memory_gb, what, remedy, copies, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if (size := asked(func, args)) is not None:
            self.take(size, given.get("dtype") or torch.get_default_dtype())
        return func(*args, **given)

    def take(self, size: list[int], kind: torch.dtype) -> None:
        """Count an array, or refuse it."""
        self.taken += self.copies * prod(size) * kind.itemsize
        if self.taken > self.memory_gb * 1e9:
            held = "" if self.copies == 1 else " in all copies that are held"
            raise Mistake(
                f"memory_gb={self.memory_gb:g}: {self.what} takes an array of {size}, with which there are "
                f"{self.taken / 1e9:.4g} GB{held}; lower {self.remedy}, or raise memory_gb"
            )


def asked(operation: Any, arguments: tuple[Any, ...]) -> list[int] | None:
    """The shape of the array that an operation makes of nothing; the others make theirs of what was counted."""
    names = [argument.name for argument in operation._schema.arguments]
    if "device" not in names or any(isinstance(value, torch.Tensor) for value in arguments):
        return None
    given = dict(zip(names, arguments, strict=False))
    if "size" in given:
        return list(given["size"])
    count = given.get("n", given.get("end"))  # of randperm and arange
    return None if count is None else [max(0, int(count))]
