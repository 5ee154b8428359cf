"""The stores contributions.zarr, leave_out.zarr and removal/KEY.zarr."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.array_schema import (
    ZARR,
    Dims,
    Store,
    read_store,
    refuse_odd_store,
)
from ntkexp.records.atomic import RUN_AGAIN, Damaged, Json, damaged_files, sealed
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import (
    Facts,
    ManyRows,
    create_store,
    get_array,
    open_store,
    write_array,
    write_stacked,
)
from ntkexp.records.schema import (
    ContributionsAttributes,
    EffectAttributes,
    RemovalFacts,
    RuleAttributes,
    checked,
)

# --- contributions.zarr: the terms that add up to f_T − f_0,
# for each output at each query.
#
# On the axes [query, out, example]:
#
#     contribution   𝒮(x, xᵢ), the change by each training example. Attributes: `rule`, and
#                    `error_bar` and `cancellation` if they were computed
#     half_by        the fraction of the path time at which half of the contribution has
#                    accumulated, if it was computed by a backward sum
#     effect         the leave-out effect: the change of the output without the example. Attributes:
#                    `kind` (`removal`, `derivative`, `one_step`: predicted by a backward pass;
#                    `retrained`: measured), `mean`, `growth`, `agreement`
#
# On the axes [query, out], the changes of the output that belong to no example. Each
# array has another cause:
#
#     decay          weight decay
#     outside        changes after the last optimizer step of a followed loop
#     statistics     changes of BatchNorm's running statistics
#     jumps          discrete choices that changed during a step
#     rounding       gradients that are only rounding errors
#     coupling       the influence of examples on each other through batch statistics, if the
#                    attribution treats these statistics as constants
#
# Split by stretch (a range of consecutive steps), component or position:
#
#     by_step              [query, out, step]                   contributions and decay
#     step, last_step      [step]                               first and last step of each stretch
#     by_component         [query, out, example, component]     contributions
#     decay_by_component   [query, out, component]              decay
#     by_component_step    [query, out, step, component]        contributions and decay
#     by_position          [query, out, example, position]      contributions of the loss at each
#                                                               position of a sequence
#
# The sums of `by_component` and of `by_position` over their last axis are the
# contributions. All arrays except `effect` belong to the preferred rule (`RULE_ORDER`).
# The arrays of other rules have the name of the rule as a suffix, as in
# `contribution_left`. The attributes of the store contain the labels of the axes
# `example` (indices in the data source, ids or digests), `out` (the attributed outputs)
# and `component`.


CONTRIBUTION = "contribution"
HALF_BY = "half_by"
DECAY = "decay"
OUTSIDE = "outside"
SURROGATE = "surrogate_gradients"
STATISTICS = "statistics"
JUMPS = "jumps"
JUMPED = "jumped"
"""The attribute that describes the jumps."""
COUPLING = "coupling"
ROUNDING = "rounding"
BY_STEP = "by_step"
STEP = "step"
LAST_STEP = "last_step"
BY_COMPONENT = "by_component"
DECAY_BY_COMPONENT = "decay_by_component"
BY_COMPONENT_STEP = "by_component_step"
COMPONENT = "component"
BY_POSITION = "by_position"
POSITION = "position"
EFFECT = "effect"
RETRAINED = "retrained"
"""The `kind` of effects that were measured by retraining without each example."""
MEASURE = "measure"
"""The attribute that names the explained measure,
and the label of a measure without a name."""

DIMS = ("query", "out", "example")
QUERY_OUT = DIMS[:2]
RULE_ORDER = {"secant": 0, "gauss": 1, "left": 3}
"""The order of preference of quadrature rules, the smallest number first. A user's rule
has the number 2."""


class ByStep(NamedTuple):
    """The change of the outputs in each stretch of steps, [query, out, step].

    `edges` are the first steps of the stretches, followed by the number of all steps.
    """

    sums: NDArray[np.float64]
    edges: Sequence[int]


class ByComponent(NamedTuple):
    """The contributions, the decay, and the changes of the outputs in each stretch of
    steps, split by component. The component is the last axis of each array.

    A component is a group of parameters.
    """

    names: Sequence[str]
    parts: NDArray[np.float64]
    decay: NDArray[np.float64]
    by_step: NDArray[np.float64]


@dataclass(frozen=True)
class ContributionsByRule:
    """The arrays computed with one quadrature rule.

    `facts` are the attributes that are stored with the zarr array of contributions."""

    parts: ManyRows
    decay: NDArray[np.float64] | None = None
    outside: NDArray[np.float64] | None = None
    statistics: NDArray[np.float64] | None = None
    jumps: NDArray[np.float64] | None = None
    coupling: NDArray[np.float64] | None = None
    rounding: NDArray[np.float64] | None = None
    half_by: NDArray[np.float64] | None = None
    by_step: ByStep | None = None
    by_component: ByComponent | None = None
    by_position: NDArray[np.float64] | None = None
    facts: Facts = field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, ManyRows | None]:
        """The arrays by kind."""
        components = self.by_component
        has_decay = components is not None and self.decay is not None
        named = (*CHANGES_WITHOUT_EXAMPLES, HALF_BY, BY_POSITION)
        return {
            CONTRIBUTION: self.parts,
            **{name: getattr(self, name) for name in named},
            BY_STEP: self.by_step and self.by_step.sums,
            BY_COMPONENT: components and components.parts,
            DECAY_BY_COMPONENT: components.decay if components and has_decay else None,
            BY_COMPONENT_STEP: components and components.by_step,
        }


CHANGES_WITHOUT_EXAMPLES = (DECAY, OUTSIDE, STATISTICS, JUMPS, COUPLING, ROUNDING)
"""The kinds of changes that belong to no example."""

CONTRIBUTION_KINDS: Mapping[str, Dims] = {
    CONTRIBUTION: DIMS,
    HALF_BY: DIMS,
    EFFECT: DIMS,
    **dict.fromkeys(CHANGES_WITHOUT_EXAMPLES, QUERY_OUT),
    BY_STEP: (*QUERY_OUT, STEP),
    BY_COMPONENT: (*DIMS, COMPONENT),
    DECAY_BY_COMPONENT: (*QUERY_OUT, COMPONENT),
    BY_COMPONENT_STEP: (*QUERY_OUT, STEP, COMPONENT),
    BY_POSITION: (*DIMS, POSITION),
    **dict.fromkeys((STEP, LAST_STEP), (STEP,)),
    "by_phase": ("phase", *DIMS),
    "decay_by_phase": ("phase", *QUERY_OUT),
    "change": ("phase", *QUERY_OUT),
    "example_phase": ("example",),
    "point_phase": ("query",),
}
"""The axes of each kind of array."""

REQUIRED_BESIDE = {BY_STEP: (STEP, LAST_STEP), BY_COMPONENT_STEP: (STEP, LAST_STEP)}
"""The arrays that a store must also contain if it contains an array of this kind."""


def refuse_odd_contributions(
    path: Path, lengths: Mapping[str, int], outputs: int
) -> None:
    """Raise if the store does not have the format that runs write.

    `lengths` are the lengths of the axes, and `outputs` is the number
    of outputs of the network."""
    store = read_store(path)
    facts = checked(store.attributes, ContributionsAttributes, path / ZARR)
    outs = facts["out"]
    if (
        len(facts["example"]) != lengths["example"]
        or len(set(outs)) < len(outs)
        or max(outs) >= outputs
    ):
        raise Damaged(
            f"{path} has content that no run writes: other examples, or outputs that do not exist; "
            f"{RUN_AGAIN}"
        )
    known_lengths = {
        **lengths,
        "out": len(outs),
        COMPONENT: len(facts.get(COMPONENT, ())),
        "phase": len(facts.get(PHASES, ())),
    }
    if STEP in store.arrays:
        known_lengths[STEP] = store.arrays[STEP].shape[0]
    required = list[str]()
    for kind, names in REQUIRED_BESIDE.items():
        if any(name.startswith(kind) for name in store.arrays):
            required += names
    if PHASES in facts:
        required += [EXAMPLE_PHASE, POINT_PHASE]
    refuse_odd_store(store, path, CONTRIBUTION_KINDS, required, known_lengths)

    refuse_other_rules(path, store)
    if EFFECT in store.arrays:
        checked(store.arrays[EFFECT].attributes, EffectAttributes, path / EFFECT)


def refuse_other_rules(path: Path, store: Store) -> None:
    """Raise if the name of an array of contributions does not match its attribute
    `rule`."""
    rules = {
        name: checked(array.attributes, RuleAttributes, path / name)["rule"]
        for name, array in store.arrays.items()
        if name == CONTRIBUTION or name.startswith(f"{CONTRIBUTION}_")
    }
    explained = explained_rule(rules.values()) or ""
    if any(
        called(CONTRIBUTION, rule, explained) != name for name, rule in rules.items()
    ):
        raise Damaged(
            f"{path} has content that no run writes: contributions by the rules {', '.join(rules.values())}"
        )


def explained_rule(rules: Iterable[str]) -> str | None:
    """Return the preferred rule (see `RULE_ORDER`), or None if there are no rules.

    >>> explained_rule(["left", "secant"]), explained_rule(["left", "my_rule"]), explained_rule([])
    ('secant', 'my_rule', None)
    """
    return min(rules, key=lambda rule: RULE_ORDER.get(rule, 2), default=None)


def called(kind: str, rule: str, explained: str) -> str:
    """Return the name of the array of this kind by this quadrature rule. `explained` is
    the preferred rule, whose arrays have no suffix.

    >>> called("contribution", "left", "secant"), called("contribution", "left", "left")
    ('contribution_left', 'contribution')
    """
    return kind if rule == explained else f"{kind}_{rule}"


def write_contributions(
    path: Path,
    rules: Mapping[str, ContributionsByRule],
    examples: list[int] | list[str],
    outs: Sequence[int],
) -> None:
    """Write the arrays of each quadrature rule for these examples and outputs."""
    store = create_store(path, {"example": examples, "out": list(outs)})
    explained = explained_rule(rules) or ""
    edges = None
    for rule, by_rule in rules.items():
        if by_rule.by_component is not None:
            store.attrs[COMPONENT] = list(by_rule.by_component.names)
        if by_rule.by_step is not None and edges is None:
            # edges are equal for all rules
            edges = np.array(by_rule.by_step.edges, dtype=np.int64)
        for kind, array in by_rule.arrays.items():
            if array is None:
                continue
            facts = {**by_rule.facts, "rule": rule} if kind == CONTRIBUTION else {}
            name = called(kind, rule, explained)
            dims = CONTRIBUTION_KINDS[kind]
            write_array(store, name, array, dims, facts, kind=np.dtype(np.float64))
    if edges is not None:
        write_array(store, STEP, edges[:-1], (STEP,), {})
        write_array(store, LAST_STEP, edges[1:] - 1, (STEP,), {})


def add_effect(path: Path, values: NDArray[np.float64], facts: Facts) -> None:
    """Add the leave-out effects to a store of contributions."""
    store = open_store(path, write=True)
    write_array(store, EFFECT, np.asarray(values, dtype=np.float64), DIMS, facts)


# --- The arrays by phase in contributions.zarr, if data come in phases. Phases are
# counted from 1.
#
#     by_phase        [phase, query, out, example]   the contribution of each training example
#     decay_by_phase  [phase, query, out]            the change of the outputs by weight decay
#     change          [phase, query, out]            the change of the outputs
#     example_phase   [example]                      the phase in which each example is used
#     point_phase     [query]                        the phase of each query
#
# The names of the phases are the attribute `phases`. The sum of `by_phase` over phases
# is `contribution`. `change` is the sum of contributions and decay. With momentum, the
# gradient of an example still changes the weights in later phases, so the example may
# have contributions in these phases too.


BY_PHASE = "by_phase"
DECAY_BY_PHASE = "decay_by_phase"
CHANGE = "change"
EXAMPLE_PHASE = "example_phase"
POINT_PHASE = "point_phase"
PHASES = "phases"
"""The attribute of the store that contains the names of the phases."""


@dataclass(frozen=True, kw_only=True)
class ContributionsByPhase:
    """The arrays by phase. `examples` and `points` are the phases of the training
    examples and of the queries, counted from 1."""

    names: tuple[str, ...]
    examples: NDArray[np.int64]
    points: NDArray[np.int64]
    change: NDArray[np.float64]
    # the contributions in each phase, by rule
    parts: Mapping[str, Sequence[ManyRows]]
    decay: Mapping[str, NDArray[np.float64]]


def add_phases(path: Path, phases: ContributionsByPhase) -> None:
    """Add the arrays by phase to a store of contributions."""
    store = open_store(path, write=True)
    explained = explained_rule(phases.parts) or ""
    change = np.asarray(phases.change, dtype=np.float64)
    store.attrs[PHASES] = list(phases.names)
    write_array(store, CHANGE, change, ("phase", *QUERY_OUT), {})
    write_array(store, EXAMPLE_PHASE, phases.examples, ("example",), {})
    write_array(store, POINT_PHASE, phases.points, ("query",), {})
    for rule, parts in phases.parts.items():
        write_stacked(store, called(BY_PHASE, rule, explained), parts, ("phase", *DIMS))
    for rule, decay in phases.decay.items():
        name = called(DECAY_BY_PHASE, rule, explained)
        write_array(store, name, decay, ("phase", *QUERY_OUT), {})


# --- leave_out.zarr: predicted and actual changes of the outputs
# if groups are left out.
#
#     predicted, actual    [removal, query, out]   the changes; `out` as in contributions.zarr
#     query                [query]                 the indices of the queries
#     example              [place]                 the examples of all groups, concatenated
#     count                [removal]               the number of examples in each group
#     influential          [removal]               True for the most influential examples, False for
#                                                  random examples


STORE = "leave_out.zarr"
CHANGE_DIMS = ("removal", "query", "out")


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A group of examples that was left out. It contains the most influential examples
    (`influential`) or random examples."""

    influential: bool
    examples: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class LeaveOut:
    """The predicted and actual changes of the outputs, if one group of examples at a
    time is left out."""

    removals: tuple[LeftOut, ...]
    query: tuple[int, ...]
    predicted: NDArray[np.float64]
    actual: NDArray[np.float64]

    def alone(self, examples: int) -> NDArray[np.float64] | None:
        """Return the measured change of the outputs without each example,
        [query, out, example].

        Return None if not every example was left out alone.
        """
        removal_of = {
            removal.examples[0]: k
            for k, removal in enumerate(self.removals)
            if len(removal.examples) == 1
        }
        if len(removal_of) < examples:
            return None
        return np.moveaxis(self.actual[[removal_of[k] for k in range(examples)]], 0, -1)


LEAVE_OUT_KINDS: Mapping[str, Dims] = {
    **dict.fromkeys(("predicted", "actual"), CHANGE_DIMS),
    "query": ("query",),
    "example": ("place",),
    **dict.fromkeys(("count", "influential"), ("removal",)),
}


def write_leave_out(path: Path, retrained: LeaveOut) -> None:
    groups = [removal.examples for removal in retrained.removals]
    arrays: dict[str, NDArray[Any]] = {
        "predicted": np.asarray(retrained.predicted, dtype=np.float64),
        "actual": np.asarray(retrained.actual, dtype=np.float64),
        "query": np.array(retrained.query, dtype=np.int64),
        "example": np.array([k for group in groups for k in group], dtype=np.int64),
        "count": np.array([len(group) for group in groups], dtype=np.int64),
        "influential": np.array(
            [removal.influential for removal in retrained.removals]
        ),
    }
    store = create_store(path)
    for name, array in arrays.items():
        write_array(store, name, array, LEAVE_OUT_KINDS[name], {})


def refuse_odd_leave_out(path: Path, lengths: Mapping[str, int], outs: int) -> None:
    """Raise if the store does not have the format that runs write.

    `lengths` are the lengths of the run's axes, and `outs` is the number of attributed
    outputs."""
    store = read_store(path)
    axes = {"out": outs}
    for axis, name in (("query", "query"), ("place", "example"), ("removal", "count")):
        axes[axis] = store.arrays[name].shape[0] if name in store.arrays else 0
    refuse_odd_store(store, path, LEAVE_OUT_KINDS, list(LEAVE_OUT_KINDS), axes)

    # check the indices of queries and examples, and the sizes of groups
    group = open_store(path)
    query, example, count = (
        np.asarray(get_array(group, name)[...])
        for name in ("query", "example", "count")
    )
    for numbers, end in ((query, lengths["query"]), (example, lengths["example"])):
        if not len(numbers) or numbers.min() < 0 or numbers.max() >= end:
            raise Damaged(
                f"{path} has content that no run writes: points or examples that do not exist; {RUN_AGAIN}"
            )
    if not len(count) or count.min() < 1 or count.sum() != len(example):
        raise Damaged(
            f"{path} has content that no run writes: removals with other numbers of examples; {RUN_AGAIN}"
        )


def read_leave_out(path: Path) -> LeaveOut:
    store = open_store(path)
    arrays = {name: np.asarray(get_array(store, name)[...]) for name in LEAVE_OUT_KINDS}
    groups = np.split(arrays["example"], np.cumsum(arrays["count"])[:-1])
    removals = tuple(
        LeftOut(influential=bool(influential), examples=tuple(group.tolist()))
        for influential, group in zip(arrays["influential"], groups, strict=True)
    )
    return LeaveOut(
        removals=removals,
        query=tuple(arrays["query"].tolist()),
        predicted=arrays["predicted"],
        actual=arrays["actual"],
    )


# --- removal/KEY.zarr in a finished run: the breakdown of the change if a group is left
# out.
#
#     actual     [query, out]            the change of the output by retraining without the group
#     shares     [query, out, example]   the share of each example of the group in `actual`
#     by_step    [query, out, step]      the share of each step in `actual`
#     query, out, example                the indices of the queries, outputs and training examples
#
# KEY is a digest of the group, the queries and the kind of mean. KEY.json is written last. It contains
# the seals of the store, and the numbers named in `REMOVAL_FACTS`. DONE.json does not
# list these files, because removals may be added to a finished run. KEY.json is sealed
# for this run and this key, so a file of another run or group is rejected.


REMOVAL_FOLDER = "removal"
REMOVAL_DIMS = {
    "actual": ("query", "out"),
    "shares": ("query", "out", "example"),
    "by_step": ("query", "out", "step"),
}
REMOVAL_AXES = ("query", "out", "example")
REMOVAL_FACTS = ("growth", "repeated", "emptied")


@dataclass(frozen=True, eq=False, kw_only=True)
class Removal:
    """The breakdown of the changes of the outputs if a group
    of examples is left out."""

    query: tuple[int, ...]  # indices along the axis `query` of contributions.zarr
    out: tuple[int, ...]
    example: tuple[int, ...]  # indices of the left-out training examples
    actual: NDArray[np.float64]
    shares: NDArray[np.float64]
    by_step: NDArray[np.float64]
    growth: float  # growth of the adjoint in the backward pass
    # difference between the outputs of the run and of an exact repetition, relative to
    # `actual`
    repeated: float
    # number of steps with an empty batch, because all its examples are left out
    emptied: int

    @property
    def closure(self) -> float:
        """The error of the sum of the shares, relative to `actual`."""
        size = float(np.linalg.norm(self.actual))
        error = float(np.linalg.norm(self.shares.sum(2) - self.actual))
        return error / size if size else error

    @property
    def cancellation(self) -> NDArray[np.float64]:
        """Σ|s|/|Σs| over the shares s. If this is large, the shares mostly cancel."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.abs(self.shares).sum(2) / np.abs(self.shares.sum(2)))


def key(
    example: Sequence[int], query: Sequence[int], mean: str = "renormalised"
) -> str:
    """Return the key of a removal: a digest of the left-out examples, the queries, and
    the change of a batch mean if examples are left out.

    >>> key([3, 17], [0]) == key([17, 3], [0]), key([3], [0]) == key([3], [1])
    (True, False)
    >>> key([3], [0]) == key([3], [0], "fixed")
    False
    """
    parts: list[object] = [sorted(example), list(query)]
    if mean != "renormalised":
        parts.append(mean)
    return sha256(json.dumps(parts).encode()).hexdigest()[:12]


def write_removal(run: Path, removal: Removal, mean: str = "renormalised") -> None:
    """Write a removal into a run folder. KEY.json is written last, and marks the
    removal as complete."""
    folder = run / REMOVAL_FOLDER
    name = key(removal.example, removal.query, mean)
    folder.mkdir(exist_ok=True)
    store = create_store(folder / f"{name}.zarr")
    for part, dims in REMOVAL_DIMS.items():
        write_array(
            store, part, np.asarray(getattr(removal, part), dtype=np.float64), dims, {}
        )
    for axis in REMOVAL_AXES:
        write_array(
            store, axis, np.array(getattr(removal, axis), dtype=np.int64), (axis,), {}
        )
    facts: dict[str, Json] = {fact: getattr(removal, fact) for fact in REMOVAL_FACTS}
    facts["seals"] = sealed(folder, [f"{name}.zarr"])
    RunFolder(run).write_sealed(f"{REMOVAL_FOLDER}/{name}.json", facts)


def read_removal(
    run: Path,
    example: Sequence[int],
    query: Sequence[int],
    mean: str = "renormalised",
) -> Removal | None:
    """Return the stored removal of a group at these queries. Return None if it is
    missing or damaged."""
    folder = run / REMOVAL_FOLDER
    name = key(example, query, mean)
    path = folder / f"{name}.json"
    try:
        facts = checked(
            RunFolder(run).read_sealed(f"{REMOVAL_FOLDER}/{name}.json"),
            RemovalFacts,
            path,
        )
        if damaged_files(folder, facts["seals"]):
            return None
        read_store(folder / f"{name}.zarr")
    except Mistake:
        return None
    store = open_store(folder / f"{name}.zarr")
    fields: dict[str, Any] = {fact: facts[fact] for fact in REMOVAL_FACTS}
    for part in REMOVAL_DIMS:
        fields[part] = np.asarray(get_array(store, part)[...])
    for axis in REMOVAL_AXES:
        fields[axis] = tuple(np.asarray(get_array(store, axis)[...]).tolist())
    return Removal(**fields)
