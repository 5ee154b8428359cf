"""A tape: what a function of weights did on one batch of inputs, operation by operation.

The function runs as it is, on ordinary tensors, while every ATen operation is written down. `functionalize` turns its
in-place operations and writes through views into operations that return new tensors, so that a tape is a pure program;
what operations of torch overwrite inside themselves stays visible by the operation's schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ntkexp.mistake import Mistake
from ntkexp.shapes import Function, Weights


class Slot(int):
    """The place of a tensor on a tape."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One operation: its arguments with slots for tensors, the slots of its results, what it gave to Python."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Slot, ...]
    scalars: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The operation without its overload: `aten::add.Tensor` is `add`."""
        return self.op._schema.name.removeprefix("aten::")

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The slots among the arguments."""
        return tuple(leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, Slot))


@dataclass(frozen=True, eq=False)
class Tape:
    """Operations in order, the value of every slot, and which slots came from outside."""

    entries: tuple[Entry, ...]
    values: tuple[Tensor, ...]
    weights: dict[Slot, str]
    inputs: Slot
    output: Slot

    def __getitem__(self, slot: Slot) -> Tensor:
        return self.values[slot]

    @property
    def outputs(self) -> Float[Tensor, "example out"]:
        """What the function gave, one row an example."""
        return self.values[self.output].detach()

    @property
    def bytes_per_example(self) -> float:
        """The memory of what depends on the inputs."""
        values = {storage(value): value.untyped_storage().nbytes() for value in map(self.__getitem__, self.from_inputs)}
        return sum(values.values()) / len(self[self.inputs])

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """All that two runs must share to be comparable: operations, wiring, numbers and shapes."""
        wiring = tuple((entry.op, repr(entry.args), repr(entry.kwargs), entry.scalars) for entry in self.entries)
        return wiring, tuple((tuple(value.shape), value.dtype) for value in self.values), self.output

    @cached_property
    def outside(self) -> tuple[Slot, ...]:
        """Slots that no operation made: weights, inputs, buffers, constants."""
        made = {slot for entry in self.entries for slot in entry.results}
        return tuple(Slot(k) for k in range(len(self.values)) if k not in made)

    @cached_property
    def from_inputs(self) -> frozenset[Slot]:
        """Slots whose value depends on the inputs."""
        return self.reached({self.inputs})

    def reached(self, start: set[Slot]) -> frozenset[Slot]:
        """The given slots, and all that is computed from them."""
        found = set(start)
        for entry in self.entries:
            if not found.isdisjoint(entry.slots):
                found.update(entry.results)
        return frozenset(found)


class Recorder(TorchDispatchMode):
    """Writes operations down as they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.entries: list[Entry] = []
        self.values: list[Tensor] = []
        self.slots: dict[int, Slot] = {}

    def slot(self, value: Any) -> Any:
        """The slot of a tensor, new if it was never seen; anything else is left as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.slots:
            self.slots[id(value)] = Slot(len(self.values))
            self.values.append(value)  # kept alive, or its id would be given to another tensor
        return self.slots[id(value)]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Mistake(
                f"the module draws random numbers ({func}); kernels need a function: call module.eval() first"
            )
        slots, named = tree_map(self.slot, (args, kwargs))
        outcome = func(*args, **kwargs)
        leaves = tree_flatten(outcome)[0]
        results = tuple(self.slot(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        scalars = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
        self.entries.append(Entry(func, slots, named, results, scalars))
        return outcome


def storage(value: Tensor) -> int:
    """Where a tensor's elements live."""
    return value.untyped_storage().data_ptr()


def columns(function: Function, weights: Weights, inputs: Tensor) -> Tensor:
    """The function's outputs as a matrix, a row an example."""
    outputs = function(weights, inputs)
    if outputs.dim() == 0 or len(outputs) != len(inputs):
        raise Mistake(
            f"the module gives outputs of shape {list(outputs.shape)} for {len(inputs)} examples; "
            "their first axis must be that of the examples"
        )
    return outputs[:, None] if outputs.dim() == 1 else outputs.flatten(1)


def record(function: Function, weights: Weights, inputs: Tensor, *, differentiable: bool = False) -> Tape:
    """Run the function once and keep its tape, with autograd's graph if it is to be differentiated."""
    leaves = {name: weight.detach().requires_grad_(differentiable) for name, weight in weights.items()}
    inputs = inputs.detach()
    version = inputs._version
    with torch.set_grad_enabled(differentiable), Recorder() as recorder:
        known = {recorder.slot(weight): name for name, weight in leaves.items()}
        source = recorder.slot(inputs)
        output = torch.func.functionalize(partial(columns, function))(leaves, inputs)
        if inputs._version != version:
            raise Mistake("the module overwrites its inputs; let it work on a copy, such as x = x.clone()")
        return Tape(tuple(recorder.entries), tuple(recorder.values), known, source, recorder.slot(output))
