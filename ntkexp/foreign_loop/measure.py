"""The user's measure g of the outputs at the queries,
which is attributed instead of the outputs.

    m(θ) = g(f(θ; x), x)            m_T − m_0 = Σ contributions + decay + rounding + outside

g may be a loss, a log-probability, a margin, or a projection. The secant Jacobian is
computed through g as through any layer. So the parts on the right add up to the change
of m, up to rounding. If g returns one value for each query, one adjoint per query
suffices, instead of one per output.

`measure` is called with the outputs at all queries, or at one batch of a DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from ntkexp.foreign_loop.call import beginning_at
from ntkexp.foreign_loop.example_names import DATASET, Ids, SeenCall, names_of
from ntkexp.foreign_loop.user_loss import failure
from ntkexp.kernel import Reader, Tape
from ntkexp.kernel.read.checks import UNFAITHFUL
from ntkexp.kernel.record.independence import CHANGING, COUPLED
from ntkexp.kernel.record.tape import as_inputs, digest, examples, part, refuse_packed
from ntkexp.mistake import Mistake, first_line
from ntkexp.records.atomic import Json
from ntkexp.records.contributions import MEASURE
from ntkexp.shapes import Function, Inputs, Weights

Measure: TypeAlias = Callable[[Tensor, SeenCall], Tensor | Mapping[str, Tensor]]
"""A function (outputs, call) of the queries of one call. It returns values of shape
[query] or [query, out], or a dict from names to tensors [query]."""

RANDOM = "the module draws random numbers"
NO_QUERIES = (
    "queries=: there are none; give inputs at which the model is to be explained"
)
MEASURE_FORMS = "give a tensor [queries], or [queries, numbers], or a dict of names to tensors [queries]"


class NamedValues(NamedTuple):
    """The values of a measure at some queries,
    and the names or indices of their columns."""

    names: Sequence[str | int]
    values: Float[Tensor, "query out"]


@dataclass(frozen=True)
class QueryCalls:
    """The calls of the model that evaluate the queries."""

    sizes: tuple[int, ...]  # number of queries of each call
    ids: tuple[str, ...]  # names of all queries

    def __iter__(self) -> Iterator[slice]:
        """Yield the slice of the queries of each call."""
        start = 0
        for size in self.sizes:
            yield slice(start, start + size)
            start += size

    @property
    def content(self) -> dict[str, Json]:
        """The sizes and names as plain values, to be written to a file."""
        return {"sizes": list(self.sizes), "ids": list(self.ids)}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> QueryCalls:
        return cls(tuple(content["sizes"]), tuple(content["ids"]))


@dataclass(frozen=True)
class MeasuredQueries:
    """A measure, and the calls that evaluate the queries.

    >>> queries = QueryCalls((2,), ("0", "1"))
    >>> measured = MeasuredQueries(lambda outputs, call: outputs.logsumexp(1), queries)
    >>> measured.values(torch.zeros(2, 4), torch.zeros(2, 1)).exp()
    tensor([[4.],
            [4.]])
    """

    measure: Measure
    calls: QueryCalls

    @property
    def described(self) -> str:
        """The name of the measure and a digest of its code,
        as they are stored in config.json."""
        return described(self.measure)

    @property
    def name(self) -> str:
        return self.described.split()[0]

    def of(self, function: Function) -> Function:
        """Return g ∘ f, the composition of the measure and the model, as a function of
        the weights and all queries."""

        def measured(weights: Weights, inputs: Inputs) -> Tensor:
            return self.values(function(weights, inputs), inputs)

        return measured

    def values(self, outputs: Tensor, inputs: Inputs) -> Float[Tensor, "query out"]:
        """Return the values of all queries, in the dtype of the outputs,
        but at least float32."""
        outputs = at_least_float(outputs)
        if len(self.calls.sizes) == 1:
            return self.of_call(outputs, inputs, self.calls.ids).values
        return torch.cat([call.values for call in self.by_call(outputs, inputs)])

    def by_call(self, outputs: Tensor, inputs: Inputs) -> list[NamedValues]:
        """Return the values of the measure, for the queries of each call."""
        return [
            self.of_call(outputs[where], part(inputs, where), self.calls.ids[where])
            for where in self.calls
        ]

    def of_call(
        self, outputs: Tensor, inputs: Inputs, ids: tuple[str, ...]
    ) -> NamedValues:
        """Return the values at the queries of one call.
        Raise if the result has a wrong form."""
        result = self.measure(outputs, SeenCall.of(inputs, ids))
        if isinstance(result, Mapping):
            names = list(result)
            if not names or not all(isinstance(name, str) for name in names):
                raise Mistake(
                    f"measure=: it returns a dict with the names {names}; "
                    f"{MEASURE_FORMS}"
                )
            for name, column in result.items():
                refuse_form(column, (len(ids),), f" for '{name}'")
            return NamedValues(
                names, torch.stack(list(result.values()), 1).to(outputs.dtype)
            )
        if isinstance(result, Tensor) and result.dim() == 2 and result.numel():
            count = result.shape[1]
            refuse_form(result, (len(ids), count))
            return NamedValues(range(count), result.to(outputs.dtype))
        refuse_form(result, (len(ids),))
        return NamedValues([MEASURE], torch.stack([result], 1).to(outputs.dtype))

    def out_names(self, outputs: Tensor, queries: Inputs) -> list[str] | list[int]:
        """Return the names or indices of the values. Raise if the measure fails or
        returns values that are not finite."""
        outputs = at_least_float(outputs)
        try:
            with torch.no_grad():
                calls = self.by_call(outputs, queries)
        except Mistake:
            raise
        except Exception as error:  # any error of the user's function
            raise failure(
                "measure", "the outputs of a call of the queries,", outputs, error
            ) from error
        first = list(calls[0].names)
        for where, call in zip(self.calls, calls, strict=True):
            if list(call.names) != first:
                raise Mistake(
                    f"measure=: it returns {first} for one call and {list(call.names)} "
                    "for another; return the same names"
                )
            infinite = (~call.values.isfinite()).nonzero()
            if len(infinite):
                row, column = infinite[0].tolist()
                raise Mistake(
                    f"measure=: '{call.names[column]}' of query {where.start + row} is "
                    f"{float(call.values[row, column])}, which cannot be explained; "
                    "return finite numbers, for example by log_softmax in place of "
                    "softmax().log()"
                )
        return [*map(str, first)] if isinstance(first[0], str) else [*map(int, first)]

    def refuse_unexplained(self, outputs: Tensor, queries: Inputs) -> None:
        """Raise if an operation of the measure has no secant rule, or if autograd's
        gradient is not the derivative of its values."""
        with torch.enable_grad():
            values = self.values(outputs.detach().requires_grad_(), queries)
            if not values.requires_grad:
                raise Mistake(
                    "measure=: its values have no gradient with respect to the outputs "
                    "(a constant, a count, detach(), numpy?), so no example "
                    "contributes to them; compute them from `outputs` by "
                    "differentiable operations of torch"
                )
        with self.rewording():
            reader, tape = self.recorded(outputs, queries)
            reader.check_cache.independent.put(tape.operations, True)
            reader.checks.faithful_owners(tape)

    def refuse_mixed(self, outputs: Tensor, queries: Inputs) -> None:
        """Raise if the value of a query depends on other queries."""
        with self.rewording():
            reader, tape = self.recorded(outputs, queries)
            reader.checks.refuse_dependence(tape)

    def recorded(self, outputs: Tensor, queries: Inputs) -> tuple[Reader, Tape]:
        """Record the measure g alone, without the model.

        Only functions of weights can be recorded. So record g(w · outputs) with the
        scalar weight w = 1."""

        def scaled_measure(weights: Weights, inputs: Inputs) -> Tensor:
            assert isinstance(inputs, tuple)
            fixed_outputs, fixed_queries = inputs
            return self.values(fixed_outputs * weights["one"], fixed_queries)  # type: ignore[operator,arg-type]

        reader = Reader(scaled_measure, frozenset({"one"}), whole_batch=True)
        return reader, reader.record({"one": outputs.new_ones(())}, (outputs, queries))

    @contextmanager
    def rewording(self) -> Iterator[None]:
        """Replace "module" by "measure" in error messages raised inside the block."""
        try:
            yield
        except Mistake as error:
            raise Mistake(f"measure=: {self.reworded(str(error))}") from error

    @staticmethod
    def reworded(reason: str) -> str:
        """Translate an error message about a module to a message about the measure.

        >>> MeasuredQueries.reworded(COUPLED)[:40]
        'the value of a query depends on other qu'
        """
        if reason.startswith("measure=: "):
            return reason.removeprefix("measure=: ")
        if COUPLED in reason:
            return (
                "the value of a query depends on other queries, so it cannot be "
                "attributed alone; return a value for each query, and take means or "
                "ranks over queries afterwards"
            )
        if CHANGING in reason or reason.startswith(RANDOM):
            return (
                "it returns other values when it runs again; let it draw no random "
                "numbers, and count nothing"
            )
        if UNFAITHFUL in reason:
            return (
                "its gradients are not the derivatives of its values (look for "
                "detach(), no_grad() or an autograd.Function); compute its values from "
                "`outputs` by differentiable operations of torch"
            )
        return f"{reason}; write it without that"


def at_least_float(outputs: Tensor) -> Tensor:
    return (
        outputs.float() if outputs.element_size() < torch.float32.itemsize else outputs
    )


def refuse_form(values: object, shape: tuple[int, ...], name: str = "") -> None:
    """Raise unless `values` is a floating-point tensor of shape `shape`, with one row
    for each query."""
    if not isinstance(values, Tensor):
        raise Mistake(
            f"measure=: it returns a {type(values).__name__}{name}; {MEASURE_FORMS}"
        )
    if values.shape != shape:
        count = "1 query" if shape[0] == 1 else f"{shape[0]} queries"
        raise Mistake(
            f"measure=: it returns a tensor of shape {list(values.shape)}{name} for "
            f"{count}; {MEASURE_FORMS}"
        )
    if not values.is_floating_point():
        raise Mistake(
            f"measure=: it returns numbers of {values.dtype}{name}, which have no "
            "gradient; return floating-point numbers, such as the margin in place of "
            "whether it is > 0"
        )


# --- The queries, as one batch or as batches of a DataLoader. Each batch is one call.


def gathered_queries(queries: object) -> tuple[Inputs, tuple[int, ...]]:
    """Return all queries, and the number of queries of each call.

    >>> inputs, sizes = gathered_queries(DataLoader(torch.ones(5, 3), batch_size=2))
    >>> inputs.shape, sizes
    (torch.Size([5, 3]), (2, 2, 1))
    """
    if not isinstance(queries, DataLoader):
        refuse_packed(queries)
        refuse_bare_graph(queries)
        inputs = as_inputs(queries)
        return inputs, (examples(inputs),)
    if isinstance(queries.sampler, RandomSampler | DistributedSampler):
        raise Mistake(
            "queries=: the DataLoader shuffles the queries, or omits some, so that it "
            "is not known which query is which; give one with shuffle=False"
        )
    # Reading a DataLoader draws a seed. Restore the random state afterwards, so that
    # the loop draws the same numbers as without `follow`.
    with beginning_at({"cpu": torch.get_rng_state()}):
        batches = [as_inputs(batch) for batch in queries]
    if not batches:
        raise Mistake(NO_QUERIES)
    return joined(batches), tuple(examples(batch) for batch in batches)


def refuse_bare_graph(queries: object) -> None:
    """Raise if the tensors of the queries have different lengths, such as the nodes and
    edges of a graph.

    >>> refuse_bare_graph((torch.ones(3, 2), torch.ones(2, 7)))
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: queries=: the tensors of [3, 2], [2, 7] differ in their first axis, the axis of \
queries; if they are one graph, give the module an axis of graphs, queries=(x[None], edges[None]), and call \
trace.losses in the loop, with one loss for each node
    """
    shapes = [
        list(leaf.shape) for leaf in tree_leaves(queries) if isinstance(leaf, Tensor)
    ]
    if len({tuple(shape[:1]) for shape in shapes}) > 1:
        raise Mistake(
            f"queries=: the tensors of {', '.join(map(str, shapes))} differ in their "
            "first axis, the axis of queries; if they are one graph, give the module "
            "an axis of graphs, queries=(x[None], edges[None]), and call trace.losses "
            "in the loop, with one loss for each node"
        )


def joined(batches: list[Inputs]) -> Inputs:
    """Concatenate batches of the same structure.

    >>> joined([{"x": torch.ones(2), "cache": False}, {"x": torch.zeros(1), "cache": False}])
    {'x': tensor([1., 1., 0.]), 'cache': False}
    """
    try:
        first, *rest = batches
        if isinstance(first, Tensor):
            return torch.cat(batches)  # type: ignore[arg-type]  # raises if a batch is no tensor
        if isinstance(first, Mapping):
            if any(set(first) != set(other) for other in rest):
                raise KeyError("names")
            # mypy does not know that all batches are mappings, as the first one is
            leaves = {key: [batch[key] for batch in batches] for key in first}  # type: ignore[call-overload,index]
            return {key: joined_leaves(leaves[key]) for key in first}
        return tuple(
            joined_leaves(list(leaves)) for leaves in zip(*batches, strict=True)
        )
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise Mistake(
            "queries=: the batches of the DataLoader have different forms "
            f"({first_line(error)}); give all batches the same names and lengths, for "
            "example by padding texts to one length"
        ) from error


def joined_leaves(leaves: list[Any]) -> Any:
    """Concatenate tensors. Raise if values other
    than tensors differ between batches."""
    if all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return torch.cat(leaves)
    if any(isinstance(leaf, Tensor) or leaf != leaves[0] for leaf in leaves):
        raise ValueError("values other than tensors differ between them")
    return leaves[0]


def query_names(queries: Inputs, sizes: tuple[int, ...], ids: Ids) -> tuple[str, ...]:
    """Return the names of the queries, which a measure receives as `call.ids`. `ids`
    gives the names. If `ids` is None or 'dataset', the names are the indices."""
    if ids is None or ids == DATASET:
        return tuple(map(str, range(sum(sizes))))
    names = list[str]()
    for where in QueryCalls(sizes, ()):
        try:
            names.extend(names_of(part(queries, where), ids) or ())
        except Mistake as error:
            raise Mistake(
                f"{error} (the call is that of the queries, which ids= names too, "
                "because measure= receives these names as call.ids)"
            ) from error
        except Exception as error:  # any error of the user's function
            raise Mistake(
                f"ids=: it fails at the queries ({type(error).__name__}: "
                f"{first_line(error)}), and measure= receives their names as call.ids; "
                "let it name the queries too"
            ) from error
    return tuple(names)


# --- The identity of a measure. A trace continues only with a measure of the same name,
# code and constants. Also, `fingerprints.OutputsAtEnds` compares the measure of the
# replayed model with the measure of the user's model.


def described(measure: Measure) -> str:
    """Return the name of a measure, and a digest of its code and its constants.

    >>> one, other = (described(lambda outputs, call, k=k: outputs[:, k]) for k in (0, 1))
    >>> one.split()[0], one == other
    ('<lambda>', False)
    """
    content = sha256()

    def add(value: object) -> None:
        """Add the code and the constants of a value to the digest."""
        match value:
            case CodeType():
                content.update(value.co_code + repr(value.co_names).encode())
                add(value.co_consts)
            case FunctionType():
                cells = [
                    cell.cell_contents
                    for cell in value.__closure__ or ()
                    if cell != CellType()
                ]
                keywords = [*(value.__kwdefaults__ or {}).items()]
                add([value.__code__, value.__defaults__, keywords, cells])
            case MethodType():
                add(value.__func__)
            case partial():
                add([value.func, value.args, *value.keywords.items()])
            case Tensor():
                content.update(digest([value], str(value.shape)))
            case list() | tuple():
                for item in value:
                    add(item)
            case bool() | int() | float() | str() | None:
                content.update(repr(value).encode())
            case _:
                content.update(type(value).__qualname__.encode())

    inner = measure.func if isinstance(measure, partial) else measure
    named = inner if isinstance(inner, FunctionType | MethodType) else type(inner)
    add(measure)
    return f"{named.__name__} {content.hexdigest()[:16]}"
