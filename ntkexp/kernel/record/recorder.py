"""Record every ATen operation of a function that runs on ordinary tensors.

No operation on a tape may overwrite a value. torch's `functionalize` replaces the
in-place operations of a module by operations that return new tensors. The recorder does
the same for writes inside torch's own operations (the gates of an LSTM, circular
padding). A write through one view changes every other view of the same storage. So the
recorder holds the content of such a storage as one flat tensor, and reads all later
views from it:

    view ← op(view, …)
    flat ← flat, with the elements of the view replaced
    other view ← elements of flat

If a module draws the same random numbers in every run, they are recorded as inputs. The
module is then a deterministic function of the whole batch and these numbers:

    dropout(x, p) = x · m / (1 − p)        with the drawn mask m as an input
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ntkexp.kernel.record.convolution import convolve
from ntkexp.kernel.record.products import (
    SHORTENED_PRODUCTS,
    precisions_by_kind,
    refuse_shorter_products,
)
from ntkexp.kernel.record.tape import (
    Entry,
    Slot,
    is_integer,
    leaves,
    map_leaves,
    storage,
)
from ntkexp.mistake import Mistake

aten = torch.ops.aten


GIVING_NUMBERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
READS = frozenset(
    {
        *GIVING_NUMBERS,
        Tensor.item,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__bool__,
        Tensor.__index__,
    }
)


READING_LENGTHS = frozenset(
    {
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch._pack_padded_sequence,
        torch._pad_packed_sequence,
    }
)
"""Functions of packed sequences. torch reads the lengths, or the number of sequences at
each time, without an operation that could be recorded."""


def given_numbers(func: Any, args: Any) -> list[Tensor]:
    """Return the tensors whose numbers a torch function passes to Python, or uses,
    without an operation that could be recorded."""
    if func in GIVING_NUMBERS:
        return [args[0]]
    if func in READING_LENGTHS:
        return [arg for arg in args if isinstance(arg, Tensor) and is_integer(arg)]
    return []


class NotPure(Exception):
    """Raised if the module writes into a tensor, or reads a number from a tensor."""


class PureOnly(TorchFunctionMode):
    """A mode that raises NotPure if the module reads a number from a tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in READS or given_numbers(func, args):
            raise NotPure
        return native_dropout(func, args, kwargs or {})


class ReadRecorder(TorchFunctionMode):
    """A mode that detects numbers that leave torch: as lists, as arrays, or as the
    lengths of packed sequences. Later operations may use them as constants.

    Torch runs no operation for such a read. So this mode records a call of
    `torch.equal`, which compares the tensor with the numbers that were read. A program
    compiled from the tape is valid while both are equal. Without `in_memory`, the mode
    raises RuntimeError instead, because the tensors of `functionalize` have no memory
    to read."""

    def __init__(self, in_memory: bool) -> None:
        super().__init__()
        self.in_memory = in_memory

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in given_numbers(func, args):
            if not self.in_memory:
                raise RuntimeError("numbers leave torch")
            numbers = torch.tensor(
                value.tolist(), dtype=value.dtype, device=value.device
            )
            torch.equal(value, numbers.reshape(value.shape))
        return native_dropout(func, args, kwargs or {})


def native_dropout(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a torch function. If it is dropout, call torch's `native_dropout` instead,
    which writes nothing in place.

    Otherwise `functionalize` would replace the write, and change the memory order of
    the tensor. Dropout draws its mask in this order, so the mask would change.

    >>> x, state = torch.ones(4, 2).t(), torch.get_rng_state()
    >>> one = functional.dropout(x)
    >>> torch.set_rng_state(state)
    >>> torch.equal(one, native_dropout(functional.dropout, (x,), {}))
    True
    """
    if func is not functional.dropout and func is not torch.dropout:
        return func(*args, **kwargs)
    value, rate, training, in_place = dropout_arguments(*args, **kwargs)
    if not training or not rate:
        return func(*args, **kwargs)
    dropped = torch.native_dropout(value, rate, True)[0]
    if in_place:
        return value.copy_(dropped)
    return dropped


def dropout_arguments(
    input: Tensor,  # noqa: A002  as torch calls it
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    *,
    train: bool = True,
) -> tuple[Tensor, float, bool, bool]:
    """Return the arguments of `functional.dropout` or of `torch.dropout`,
    in one form."""
    return input, p, train if training is None else training, inplace


class DispatchMode(TorchDispatchMode):
    """A dispatch mode without torch's guard against its compiler. The compiler is never
    used here, and loading the guard takes a second."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    def __init_subclass__(cls) -> None:
        """Do not call torch's method, which would install the guard (see the class)."""


WITHOUT_DERIVATIVE = frozenset(
    [
        "bernoulli",
        "binomial",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "normal",
        "normal_functional",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "randperm",
        "uniform",
    ]
)
"""Random-sampling operations. Results are not differentiable with respect
to their arguments."""


class Recorder(DispatchMode):
    """A mode that records operations as they run.

    With `rewrites`, it records in-place operations as operations that return new
    tensors. Otherwise it raises NotPure. With `repeats_random`, it records random
    numbers as inputs of the tape. Otherwise it raises Mistake."""

    def __init__(self, *, rewrites: bool = True, repeats_random: bool = False) -> None:
        super().__init__()
        self.rewrites = rewrites
        self.repeats_random = repeats_random
        self.precisions = precisions_by_kind()
        self.drawn: list[Slot] = []
        self.entries: list[Entry] = []
        self.values: list[Tensor] = []
        self.slots: dict[int, Slot] = {}  # by the id of the tensor
        # keeps tensors alive, because Python may reuse the id of a deleted tensor
        self.seen: dict[int, Tensor] = {}
        # the content, as one flat tensor, of each storage that was written to
        self.flats: dict[int, Tensor] = {}

    def slot(self, value: Any) -> Any:
        """Return the slot of a tensor. Create it for a new tensor. Return other values
        unchanged.
        """
        recorded = self.slots.get(id(value))
        if recorded is not None:
            return recorded
        if not isinstance(value, Tensor):
            return value
        flat: Tensor | None = None
        if self.flats and value.numel():  # an empty tensor has no memory
            flat = self.flats.get(storage(value))
        if flat is None:
            slot = Slot(len(self.values))
            self.values.append(value)
        else:
            slot = self.slots[id(self.view_of_flat(flat, value))]
        self.slots[id(value)] = slot
        self.seen[id(value)] = value
        return slot

    def view_of_flat(self, flat: Tensor, view: Tensor) -> Tensor:
        """Return the elements of a view of a storage that was written to, read from the
        content of the storage."""
        if flat.is_complex() and view.dtype == flat.dtype.to_real():
            pairs = self.apply(aten.view_as_real.default, flat)
            flat = self.apply(aten.view.default, pairs, [-1])
        refuse_other_kind(flat, view)
        indices = positions(view).reshape(-1)
        elements = self.apply(aten.index_select.default, flat, 0, indices)
        return self.apply(aten.view.default, elements, list(view.shape))

    def apply(self, op: OpOverload, *args: Any) -> Tensor:
        """Run an operation of the recorder itself, and record it."""
        result: Tensor = self.__torch_dispatch__(op, (), args)
        return result

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._embedding_bag_forward_only.default:
            # the variant of the operation that supports gradients
            func = aten._embedding_bag.default
        # in evaluation mode, rrelu draws no random slopes: it is leaky_relu with the
        # mean of both bounds
        if func is aten.rrelu_with_noise.default and not any(args[4:5]):
            bounds = (*args[2:4], *(1 / 8, 1 / 3)[len(args[2:4]) :])
            return self.apply(aten.leaky_relu.default, args[0], sum(bounds) / 2)
        if is_random(func):
            return self.draw(func, args, kwargs)
        if not self.rewrites and writes(func):
            raise NotPure
        twin = functional_twin(func)
        if twin is None:
            return self.run(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self.reshape_in_place(func, twin, args, kwargs)
        return self.write_in_place(func, twin, args, kwargs)

    def run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run and record an operation that writes nothing in place."""
        slots, named = self.with_slots(args, kwargs)
        function = convolve if func is aten.convolution.default else func
        outcome = function(*args, **kwargs)
        if func in SHORTENED_PRODUCTS:
            refuse_shorter_products(func, outcome, self.precisions)
        returned = [outcome] if isinstance(outcome, Tensor) else list(leaves(outcome))
        results = []
        scalars = []
        places = []  # indices of the tensors
        for k, leaf in enumerate(returned):
            if isinstance(leaf, Tensor):
                results.append(self.slot(leaf))
                places.append(k)
            else:
                scalars.append(leaf)
        single = not isinstance(outcome, tuple | list)
        entry = Entry(
            func,
            slots,
            named,
            tuple(results),
            tuple(scalars),
            None if single else tuple(places),
        )
        self.entries.append(entry)
        return outcome

    def with_slots(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return map_leaves(args, self.slot), {
            name: map_leaves(value, self.slot) for name, value in kwargs.items()
        }

    def draw(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operation that draws random numbers,
        and record the numbers as inputs."""
        arguments = leaves((args, *kwargs.values()))
        if any(isinstance(leaf, torch.Generator) for leaf in arguments):
            raise Mistake(
                f"the module draws random numbers ({func}) from its own generator, "
                "whose state is not stored; let it draw from torch's generator, or "
                "call module.eval() first"
            )
        if not self.repeats_random:
            raise Mistake(
                f"the module draws random numbers ({func}); kernels need a function: call "
                "module.eval() first"
            )
        if not self.rewrites and writes(func):
            raise NotPure
        if func is aten.native_dropout.default:  # x · m / (1 − p)
            value, rate, _ = args
            mask = func(*args)[1]
            drawn = self.from_outside(mask.to(value.dtype))
            masked = self.apply(aten.mul.Tensor, value, drawn)
            scale = 1 / (1 - rate) if rate < 1 else 0.0
            return self.apply(aten.mul.Scalar, masked, scale), mask
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name not in WITHOUT_DERIVATIVE:
            raise Mistake(
                "the module draws random numbers through which gradients pass "
                f"({func}); use another layer"
            )
        if writes(func):
            drawn = self.from_outside(func(args[0].clone(), *args[1:], **kwargs))
            return self.apply(aten.copy_.default, args[0], drawn)
        return self.from_outside(func(*args, **kwargs))

    def from_outside(self, drawn: Tensor) -> Tensor:
        """Record random numbers as an input of the tape."""
        self.drawn.append(self.slot(drawn))
        return drawn

    def reshape_in_place(
        self, func: OpOverload, twin: OpOverload, args: Any, kwargs: Any
    ) -> Tensor:
        """Run an operation that changes the shape of its first argument in place, and
        no element. Record the variant that returns a tensor of the new shape
        (`twin`)."""
        result = self.apply(twin, *args)
        # keep the old shape for the slot of the argument, before the operation changes it
        self.values[self.slots[id(args[0])]] = args[0].view_as(args[0])
        target: Tensor = func(*args, **kwargs)
        self.slots[id(target)] = self.slots[id(result)]
        return target

    def write_in_place(
        self, func: OpOverload, twin: OpOverload, args: Any, kwargs: Any
    ) -> Tensor:
        """Run an operation that writes into its first argument. Record the variant that
        returns a new tensor (`twin`)."""
        target: Tensor = args[0]
        if not target.numel():
            return target
        home = storage(target)
        for value in self.seen.values():
            if storage(value) == home and value.numel():
                refuse_other_kind(target, value)
        slots, named = self.with_slots(args, kwargs)
        flat = self.flats[home] if home in self.flats else self.flat_content(target)
        for slot, value in enumerate(self.values):
            if storage(value) == home:
                # keep the content before the write
                self.values[slot] = value.clone()
        func(*args, **kwargs)
        # Views that overlap with the written elements lose their slot, so that `slot`
        # reads them from the flat value
        here = (target.shape, target.stride(), target.storage_offset())
        written = positions(target).reshape(-1)
        for key, value in self.seen.items():
            if storage(value) == home and (
                here == (value.shape, value.stride(), value.storage_offset())
                or bool(torch.isin(positions(value).reshape(-1), written).any())
            ):
                self.slots.pop(key, None)
        self.flats.pop(home, None)
        # view ← op(view, …),   flat ← flat, with the elements of the view replaced
        after = target.clone()
        self.entries.append(Entry(twin, slots, named, (self.slot(after),), ()))
        self.slots[id(target)] = self.slots[id(after)]
        elements = self.apply(aten.reshape.default, after, [-1])
        self.flats[home] = self.apply(
            aten.index_copy.default, flat, 0, written, elements
        )
        return target

    def flat_content(self, target: Tensor) -> Tensor:
        """Return the content of a storage before the first write. Read it from a
        recorded tensor that contains all elements in order.
        Raise Mistake if there is no such tensor."""
        size = target.untyped_storage().nbytes() // target.element_size()
        for value in [target, *self.seen.values()]:
            shows_all = (
                storage(value) == storage(target)
                and value.numel() == size
                and value.is_contiguous()
            )
            if shows_all and id(value) in self.slots:
                return self.apply(
                    aten.clone.default, self.apply(aten.view.default, value, [-1])
                )
        raise Mistake(
            "the module writes into a part of a tensor that was never recorded as "
            "a whole; clone it first"
        )


@cache
def is_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


@cache
def writes(op: OpOverload) -> bool:
    return bool(op._schema.is_mutable)


@cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """Return the operation that returns a new tensor instead of writing
    in place, or None.

    >>> functional_twin(aten.clamp_min_.Tensor)
    <OpOverload(op='aten.clamp_min', overload='Tensor')>
    """

    def arguments(op: OpOverload) -> list[tuple[str, str, bool]]:
        return [
            (argument.name, str(argument.type), argument.kwarg_only)
            for argument in op._schema.arguments
        ]

    name = op._schema.name.removeprefix("aten::")
    if not (op._schema.is_mutable and name.endswith("_")):
        return None
    packet = getattr(aten, name[:-1], None)
    twins = [
        getattr(packet, overload) for overload in (packet.overloads() if packet else ())
    ]
    return next((twin for twin in twins if arguments(twin) == arguments(op)), None)


def refuse_other_kind(written: Tensor, value: Tensor) -> None:
    """Raise Mistake if two views of a storage have different dtypes, or if a view is
    conjugated or negated, because `positions` counts elements of one dtype."""
    if written.dtype != value.dtype or value.is_conj() or value.is_neg():
        raise Mistake(
            "the module writes complex numbers in place, and also views their real and "
            "imaginary parts; build them by torch.complex or torch.cat instead"
        )


def positions(value: Tensor) -> Int[Tensor, "..."]:
    """Return the index of each element in its storage."""
    size = value.untyped_storage().nbytes() // value.element_size()
    count = torch.arange(size, device=value.device)
    return count.as_strided(value.shape, value.stride(), value.storage_offset())
