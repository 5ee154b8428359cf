"""What is asked of the model at the queries: a measure g of its outputs, which is a part of the function followed.

    m(θ) = g(f(θ; x), x)            m_T − m_0 = Σ contributions + decay + casts + outside

A loss, a log-probability, a margin, the direction of a probe: the secant passes through g as through any layer, so that
the parts add up to the change of m to rounding. One number for each query also needs one vector of weight space for
each query, in place of one for each output.

`measure` sees the queries of a call at once, each in its place: all of them, or those of a batch of a DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial as bound_to
from hashlib import sha256
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from ntkexp.foreign_loop.call import beginning_at
from ntkexp.foreign_loop.example_names import DATASET, Ids, SeenCall, names_of
from ntkexp.foreign_loop.user_loss import failure
from ntkexp.kernel.read.checks import UNFAITHFUL
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.record.independence import CHANGING, COUPLED
from ntkexp.kernel.record.tape import Tape, as_inputs, digest, examples, part
from ntkexp.mistake import Mistake, first_line
from ntkexp.records.atomic import Json
from ntkexp.records.contributions import MEASURE
from ntkexp.shapes import Function, Inputs, Weights

Measure: TypeAlias = Callable[[Tensor, SeenCall], Tensor | Mapping[str, Tensor]]
"""Outputs of a call of the queries and the call ↦ a number for each query, [Q] or [Q, M], or names of some of [Q]."""

RANDOM = "the module draws random numbers"
FORMS = "give a tensor [queries], or [queries, numbers], or a dict of names to tensors [queries]"


@dataclass(frozen=True)
class QueryCalls:
    """The calls in which the queries are asked: how many queries each has, and the names of all queries."""

    sizes: tuple[int, ...]
    ids: tuple[str, ...]

    def __iter__(self) -> Iterator[slice]:
        """The places of the queries of each call."""
        begun = 0
        for size in self.sizes:
            yield slice(begun, begun + size)
            begun += size

    @property
    def content(self) -> dict[str, Json]:
        """As plain content, for a file."""
        return {"sizes": list(self.sizes), "ids": list(self.ids)}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> QueryCalls:
        return cls(tuple(content["sizes"]), tuple(content["ids"]))


@dataclass(frozen=True)
class MeasuredQueries:
    """A measure of the queries of some calls.

    >>> asked = MeasuredQueries(lambda outputs, call: outputs.logsumexp(1), QueryCalls((2,), ("0", "1")))
    >>> asked.values(torch.zeros(2, 4), torch.zeros(2, 1)).exp()
    tensor([[4.],
            [4.]])
    """

    measure: Measure
    calls: QueryCalls

    @property
    def described(self) -> str:
        """Which measure it is, as config.json has it."""
        return described(self.measure)

    @property
    def name(self) -> str:
        return self.described.split()[0]

    def of(self, function: Function) -> Function:
        """g ∘ f, at all queries."""

        def measured(weights: Weights, inputs: Inputs) -> Tensor:
            return self.values(function(weights, inputs), inputs)

        return measured

    def values(self, outputs: Tensor, inputs: Inputs) -> Float[Tensor, "query out"]:
        """The numbers of all queries, call by call, in the precision of the outputs; in float32 at least."""
        outputs = outputs.float() if outputs.element_size() < torch.float32.itemsize else outputs
        if len(self.calls.sizes) == 1:
            return self.of_call(outputs, inputs, self.calls.ids)[1]
        each = [
            self.of_call(outputs[where], part(inputs, where), self.calls.ids[where])[1]
            for where in self.calls
        ]
        return torch.cat(each)

    def of_call(
        self, outputs: Tensor, inputs: Inputs, ids: tuple[str, ...]
    ) -> tuple[Sequence[str | int], Float[Tensor, "query out"]]:
        """The numbers of the queries of one call, and how they go: by names, or by places."""
        given = self.measure(outputs, SeenCall.of(inputs, ids))
        names: Sequence[str | int] = [MEASURE]
        columns: list[Any] = [given]
        if isinstance(given, Mapping):
            names, columns = list(given), list(given.values())
            if not names or not all(isinstance(name, str) for name in names):
                raise Mistake(f"measure=: it gives a dict with the names {names}; {FORMS}")
        elif isinstance(given, Tensor) and given.dim() == 2 and given.numel():
            names = range(given.shape[1])
        for name, column in zip(names, columns, strict=False):
            of = f" for '{name}'" if isinstance(given, Mapping) else ""
            if not isinstance(column, Tensor):
                raise Mistake(f"measure=: it gives a {type(column).__name__}{of}; {FORMS}")
            if column.shape != (len(ids), len(names))[: 2 if isinstance(names, range) else 1]:
                count = f"{len(ids)} queries" if len(ids) > 1 else "1 query"
                raise Mistake(
                    f"measure=: it gives a tensor of shape {list(column.shape)}{of}, and was given {count}; {FORMS}"
                )
            if not column.is_floating_point():
                raise Mistake(
                    f"measure=: it gives numbers of {column.dtype}{of}, which have no gradient; give floating numbers, "
                    "such as the margin in place of whether it is > 0"
                )
        found: Tensor = columns[0] if isinstance(names, range) else torch.stack(columns, 1)
        return names, found.to(outputs.dtype)

    def out_names(self, outputs: Tensor, queries: Inputs) -> list[str] | list[int]:
        """The names of the numbers; what is wrong with them at these outputs is refused."""
        outputs = outputs.float() if outputs.element_size() < torch.float32.itemsize else outputs
        try:
            with torch.no_grad():
                each = [
                    self.of_call(outputs[where], part(queries, where), self.calls.ids[where])
                    for where in self.calls
                ]
        except Mistake:
            raise
        except Exception as error:  # the user's own
            raise failure(
                "measure", "the outputs of a call of the queries,", outputs, error
            ) from error
        first, _ = each[0]
        for where, (names, found) in zip(self.calls, each, strict=True):
            if list(names) != list(first):
                raise Mistake(
                    f"measure=: it gives {list(first)} for one call and {list(names)} for another; give the same"
                )
            if not bool(found.isfinite().all()):
                row, column = (~found.isfinite()).nonzero()[0].tolist()
                raise Mistake(
                    f"measure=: '{names[column]}' of query {where.start + row} is {float(found[row, column])}, from "
                    "which nothing can be explained; give finite numbers, log_softmax in place of softmax().log()"
                )
        return [*map(str, first)] if isinstance(first[0], str) else [*map(int, first)]

    def refuse_unexplained(self, outputs: Tensor, queries: Inputs) -> None:
        """Refuse a measure that no secant leads through, or that mixes queries: g by itself, at these outputs."""
        with torch.enable_grad():
            if not self.values(outputs.detach().requires_grad_(), queries).requires_grad:
                raise Mistake(
                    "measure=: its numbers have no gradient in the outputs (a constant, a count, detach(), numpy?), so "
                    "no example adds to them; let them follow from `outputs` by operations of torch that have one"
                )
        with self.rewording():
            reader, tape = self.by_itself(outputs, queries)
            reader.findings.independent.keep(tape.operations, True)
            reader.checks.faithful_owners(tape)

    def refuse_mixed(self, outputs: Tensor, queries: Inputs) -> None:
        """Refuse a measure that mixes queries: g by itself is computed with many other queries in a query's company."""
        with self.rewording():
            reader, tape = self.by_itself(outputs, queries)
            reader.checks.refuse_dependence(tape)

    def by_itself(self, outputs: Tensor, queries: Inputs) -> tuple[Reader, Tape]:
        """g as a function of one weight, which is 1 and multiplies these outputs; and what it does with them."""

        def alone(weights: Weights, inputs: Inputs) -> Tensor:
            assert isinstance(inputs, tuple)
            given, asked = inputs
            return self.values(given * weights["one"], asked)  # type: ignore[operator,arg-type]  # as they are put below

        reader = Reader(alone, frozenset({"one"}), whole=True)
        return reader, reader.record({"one": outputs.new_ones(())}, (outputs, queries))

    @contextmanager
    def rewording(self) -> Iterator[None]:
        """Say of the measure what is refused of a function."""
        try:
            yield
        except Mistake as error:
            raise Mistake(f"measure=: {self.reworded(str(error))}") from error

    @staticmethod
    def reworded(reason: str) -> str:
        """What is said of a module, of a measure.

        >>> MeasuredQueries.reworded(COUPLED)[:40]
        'the number of a query depends on other q'
        """
        if reason.startswith("measure=: "):
            return reason.removeprefix("measure=: ")
        if COUPLED in reason:
            return (
                "the number of a query depends on other queries, so it cannot be attributed alone; give a number "
                "for each, and take means or ranks over queries afterwards"
            )
        if CHANGING in reason or reason.startswith(RANDOM):
            return "it gives other numbers when it runs again; let it draw no random numbers, and count nothing"
        if UNFAITHFUL in reason:
            return (
                "its gradients are not the derivatives of its values (look for detach(), no_grad() or an "
                "autograd.Function); let its numbers follow from `outputs` by operations of torch"
            )
        return f"{reason}; write it without that"


# --- The queries as they are given: in one piece, or as batches of a DataLoader, which make a call each.


def gathered_queries(queries: object) -> tuple[Inputs, tuple[int, ...]]:
    """All queries, and how many each call has.

    >>> inputs, sizes = gathered_queries(DataLoader(torch.ones(5, 3), batch_size=2))
    >>> inputs.shape, sizes
    (torch.Size([5, 3]), (2, 2, 1))
    """
    if not isinstance(queries, DataLoader):
        inputs = as_inputs(queries)
        return inputs, (examples(inputs),)
    if isinstance(queries.sampler, RandomSampler | DistributedSampler):
        raise Mistake(
            "queries=: the DataLoader shuffles, or gives a part, so that it is not known which query is which; give "
            "one with shuffle=False"
        )
    with beginning_at(
        {"cpu": torch.get_rng_state()}
    ):  # a loader draws a seed, and the loop is to draw what it would
        batches = [as_inputs(batch) for batch in queries]
    if not batches:
        raise Mistake("queries=: they are empty; give inputs at which the model is to be explained")
    return joined(batches), tuple(examples(batch) for batch in batches)


def joined(batches: list[Inputs]) -> Inputs:
    """Batches of the same form as one.

    >>> joined([{"x": torch.ones(2), "cache": False}, {"x": torch.zeros(1), "cache": False}])
    {'x': tensor([1., 1., 0.]), 'cache': False}
    """
    try:
        first, *rest = batches
        if isinstance(first, Tensor):
            return torch.cat(batches)  # type: ignore[arg-type]  # others have the form of the first, or fail
        if isinstance(first, Mapping):
            if any(set(first) != set(other) for other in rest):
                raise KeyError("names")
            return {key: joined_leaves([batch[key] for batch in batches]) for key in first}  # type: ignore[call-overload,index]
        return tuple(joined_leaves(list(each)) for each in zip(*batches, strict=True))
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise Mistake(
            "queries=: batches of the DataLoader have different forms "
            f"({first_line(error)}); let them have the same names and lengths, such as texts filled up to one length"
        ) from error


def joined_leaves(leaves: list[Any]) -> Any:
    """Tensors one behind another; what is not a tensor has to be the same in all."""
    if all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return torch.cat(leaves)
    if any(isinstance(leaf, Tensor) or leaf != leaves[0] for leaf in leaves):
        raise ValueError("they hold different numbers or words beside tensors")
    return leaves[0]


def query_names(queries: Inputs, sizes: tuple[int, ...], ids: Ids) -> tuple[str, ...]:
    """The names that a measure sees: those that `ids` gives, call by call; or else the places of the queries."""
    if ids is None or ids == DATASET:
        return tuple(map(str, range(sum(sizes))))
    found = list[str]()
    for where in QueryCalls(sizes, ()):
        try:
            found.extend(names_of(part(queries, where), ids) or ())
        except Mistake:
            raise
        except Exception as error:  # the user's own
            raise Mistake(
                f"ids=: it fails at the queries ({type(error).__name__}: {first_line(error)}), whose names measure= "
                "sees as call.ids; let it name them too"
            ) from error
    return tuple(found)


# --- Which measure it is: two traces with different ones are not one.
#
# By its name, its code and what it holds. Its numbers at the queries are compared with what they were when the loop was
# followed, before anything is said of them: `model_function.OutputsAtEnds`.


def described(measure: Measure) -> str:
    """A measure as it stands in config.json: its name, and a digest of its code and of what it holds.

    >>> one, other = (described(lambda outputs, call, k=k: outputs[:, k]) for k in (0, 1))
    >>> one.split()[0], one == other
    ('<lambda>', False)
    """
    seen = sha256()

    def take(part: object) -> None:
        """What decides the numbers, as far as it can be seen."""
        match part:
            case CodeType():
                seen.update(part.co_code + repr(part.co_names).encode())
                take(part.co_consts)
            case FunctionType():
                cells = [
                    each.cell_contents for each in part.__closure__ or () if each != CellType()
                ]
                take([part.__code__, part.__defaults__, cells])
            case MethodType():
                take(part.__func__)
            case bound_to():
                take([part.func, part.args, *part.keywords.items()])
            case Tensor():
                seen.update(digest([part], str(part.shape)))
            case list() | tuple():
                for each in part:
                    take(each)
            case bool() | int() | float() | str() | None:
                seen.update(repr(part).encode())
            case _:
                seen.update(type(part).__qualname__.encode())

    inner = measure.func if isinstance(measure, bound_to) else measure
    named = inner if isinstance(inner, FunctionType | MethodType) else type(inner)
    take(measure)
    return f"{named.__name__} {seen.hexdigest()[:16]}"
