"""contributions.zarr, in all and by phase; leave_out.zarr; and removal/KEY.zarr."""

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
from ntkexp.records.array_schema import ZARR, Dims, read_store, refuse_odd_store
from ntkexp.records.atomic import AGAIN, Damaged, Json, broken, sealed
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

# --- contributions.zarr: what made each output at each point.
#
#     contribution   [probe, out, example]   𝒮(x, xᵢ), what each training example added; attributes: the `rule`, and
#                                            what is known of it, as `error_bar` and `cancellation`
#     half_by        [probe, out, example]   the share of the path's time by which half of that was done, where steps
#                                            are understood from the end
#     decay          [probe, out]            what decay of the weights took away, where they decay
#     outside        [probe, out]            what changes after the last step of a followed loop did, if any
#     statistics     [probe, out]            what running statistics of BatchNorm did, which calls moved
#     rounding       [probe, out]            the movement by gradients that are only rounding, where there was any
#     coupling       [probe, out]            what examples did to one another through batch statistics, where those were
#                                            taken for constants
#     by_step        [probe, out, step]      parts and decay, step by step, or in stretches of steps where there are
#                                            many: what came of the gradients and the decay of these steps
#     step           [step]                  the first step of each stretch
#     last_step      [step]                  and the last
#     by_component        [probe, out, example, component]   what each example added by the parameters of each
#                                            component, if they were told apart; the sum over them is `contribution`
#     decay_by_component  [probe, out, component]            the same of `decay`
#     by_component_step   [probe, out, step, component]      and of `by_step`
#     by_position         [probe, out, example, position]    what the loss at each position of a text added, if these
#                                            were told apart; the sum over them is `contribution`
#     effect         [probe, out, example]   by how much the output would change without the example, as a sweep back
#                                            over training predicts it, or trainings have found; attributes: `kind`
#                                            (`removal`, `derivative`, `one_step`, `retrained`), `mean`, `growth`,
#                                            `agreement`
#
# All but the effect are by the rule that explains best; what others say has their names behind, as `contribution_left`.
# Attributes of the store say who the examples are (`example`: their numbers in the source, their names, or what they
# hold, digested), which of the network's outputs were read (`out`: nothing is kept of others), and what the components
# are called (`component`).


CONTRIBUTION, HALF_BY, DECAY, BY_STEP = "contribution", "half_by", "decay", "by_step"
OUTSIDE, STATISTICS, COUPLING, ROUNDING = "outside", "statistics", "coupling", "rounding"
BY_COMPONENT, DECAY_BY_COMPONENT, BY_COMPONENT_STEP = (
    "by_component",
    "decay_by_component",
    "by_component_step",
)
BY_POSITION, POSITION = "by_position", "position"
COMPONENT = "component"
MEASURE = "measure"
"""The attribute that names what was asked of the outputs, if not they themselves; and the name of one number of it."""
STEP, LAST_STEP = "step", "last_step"
EFFECT = "effect"
RETRAINED = "retrained"
"""The `kind` of effects that trainings without each example have found; others predict that."""

DIMS = ("probe", "out", "example")
ORDER = {"secant": 0, "gauss": 1, "left": 3}
"""The rules that are shown first, and the one that is shown last."""


class ByStep(NamedTuple):
    """What came of each stretch of steps, [probe, out, step]; `edges` are where they begin, and the step after all."""

    sums: NDArray[np.float64]
    edges: Sequence[int]


class ByComponent(NamedTuple):
    """Shares of components, [probe, out, …, component], in the parts, in decay, and in what came of stretches of
    steps."""

    names: Sequence[str]
    parts: NDArray[np.float64]
    decay: NDArray[np.float64]
    by_step: NDArray[np.float64]


@dataclass(frozen=True)
class ContributionsByRule:
    """What a rule says of a run, and what is known of that."""

    parts: ManyRows
    decay: NDArray[np.float64] | None = None
    outside: NDArray[np.float64] | None = None
    statistics: NDArray[np.float64] | None = None
    coupling: NDArray[np.float64] | None = None
    rounding: NDArray[np.float64] | None = None
    half_by: NDArray[np.float64] | None = None
    by_step: ByStep | None = None
    by_component: ByComponent | None = None
    by_position: NDArray[np.float64] | None = None
    facts: Facts = field(default_factory=dict)


PROBE_OUT = DIMS[:2]
KINDS: Mapping[str, Dims] = {
    CONTRIBUTION: DIMS,
    HALF_BY: DIMS,
    EFFECT: DIMS,
    **dict.fromkeys((DECAY, OUTSIDE, STATISTICS, COUPLING, ROUNDING), PROBE_OUT),
    BY_STEP: (*PROBE_OUT, STEP),
    BY_COMPONENT: (*DIMS, COMPONENT),
    DECAY_BY_COMPONENT: (*PROBE_OUT, COMPONENT),
    BY_COMPONENT_STEP: (*PROBE_OUT, STEP, COMPONENT),
    BY_POSITION: (*DIMS, POSITION),
    **dict.fromkeys((STEP, LAST_STEP), (STEP,)),
    "by_phase": ("phase", *DIMS),
    "decay_by_phase": ("phase", *PROBE_OUT),
    "change": ("phase", *PROBE_OUT),
    "example_phase": ("example",),
    "point_phase": ("probe",),
}
"""The axes of each kind of array."""
NEEDED = {BY_STEP: (STEP, LAST_STEP), BY_COMPONENT_STEP: (STEP, LAST_STEP)}


def refuse_odd_contributions(path: Path, lengths: Mapping[str, int], outputs: int) -> None:
    """Raise if the store holds what no run writes; its axes have these lengths, and the network so many outputs."""
    store = read_store(path)
    facts = checked(store.attributes, ContributionsAttributes, path / ZARR)
    examples, outs = facts["example"], facts["out"]
    if len(examples) != lengths["example"] or len(set(outs)) < len(outs) or max(outs) >= outputs:
        raise Damaged(
            f"{path} holds what no run writes: other examples, or outputs that there are not; {AGAIN}"
        )
    known = {COMPONENT: len(facts.get(COMPONENT, ())), "phase": len(facts.get(PHASES, ()))}
    steps = {STEP: store.arrays[STEP].shape[0]} if STEP in store.arrays else {}
    required = [name for kind, names in NEEDED.items() if any(each.startswith(kind) for each in store.arrays)
                for name in names]  # fmt: skip
    required += [EXAMPLE_PHASE, POINT_PHASE] if PHASES in facts else []
    refuse_odd_store(store, path, KINDS, required, {**lengths, "out": len(outs), **known, **steps})
    # each rule has its contributions under its own name
    parts = [
        name for name in store.arrays if name == CONTRIBUTION or name.startswith(f"{CONTRIBUTION}_")
    ]
    rules = {
        name: checked(store.arrays[name].attributes, RuleAttributes, path / name)["rule"]
        for name in parts
    }
    explained = explained_rule(rules.values()) or ""
    if any(called(CONTRIBUTION, rule, explained) != name for name, rule in rules.items()):
        raise Damaged(
            f"{path} holds what no run writes: contributions by the rules {', '.join(rules.values())}"
        )
    if EFFECT in store.arrays:
        checked(store.arrays[EFFECT].attributes, EffectAttributes, path / EFFECT)


def explained_rule(rules: Iterable[str]) -> str | None:
    """Choose the rule that explanations are by, of those that a path was integrated by.

    >>> explained_rule(["left", "secant"]), explained_rule(["left", "my_rule"]), explained_rule([])
    ('secant', 'my_rule', None)
    """
    return min(rules, key=lambda rule: ORDER.get(rule, 2), default=None)


def called(kind: str, rule: str, explained: str) -> str:
    """Name what a rule says.

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
    """Write what each rule says of these examples at these outputs."""
    store = create_store(path, {"example": examples, "out": list(outs)})
    first = explained_rule(rules)
    for rule, found in rules.items():
        parts, decay, steps = (None,) * 3
        if found.by_component is not None:
            names, parts, decay, steps = found.by_component
            store.attrs[COMPONENT] = list(names)
        arrays = {
            CONTRIBUTION: (found.parts, DIMS, {**found.facts, "rule": rule}),
            HALF_BY: (found.half_by, DIMS, {}),
            DECAY: (found.decay, DIMS[:2], {}),
            OUTSIDE: (found.outside, DIMS[:2], {}),
            STATISTICS: (found.statistics, DIMS[:2], {}),
            COUPLING: (found.coupling, DIMS[:2], {}),
            ROUNDING: (found.rounding, DIMS[:2], {}),
            BY_STEP: (found.by_step and found.by_step.sums, (*DIMS[:2], STEP), {}),
            BY_COMPONENT: (parts, (*DIMS, COMPONENT), {}),
            DECAY_BY_COMPONENT: (
                decay if found.decay is not None else None,
                (*DIMS[:2], COMPONENT),
                {},
            ),
            BY_COMPONENT_STEP: (steps, (*DIMS[:2], STEP, COMPONENT), {}),
            BY_POSITION: (found.by_position, (*DIMS, POSITION), {}),
        }
        for kind, (array, dims, facts) in arrays.items():
            if array is not None:
                write_array(
                    store,
                    called(kind, rule, first or rule),
                    array,
                    dims,
                    facts,
                    kind=np.dtype(np.float64),
                )
    if edges := [found.by_step.edges for found in rules.values() if found.by_step is not None]:
        begins = np.array(edges[0], dtype=np.int64)  # which are the same by every rule
        write_array(store, STEP, begins[:-1], (STEP,), {})
        write_array(store, LAST_STEP, begins[1:] - 1, (STEP,), {})


def add_effect(path: Path, values: NDArray[np.float64], facts: Facts) -> None:
    """Write what leaving each example out would change, beside contributions that are written."""
    write_array(
        open_store(path, write=True), EFFECT, np.asarray(values, dtype=np.float64), DIMS, facts
    )


# --- What contributions.zarr holds beside contributions where data come in phases, the axis `phase` counted from 1:
#
#     by_phase        [phase, probe, out, example]   what each training example added while each phase was learned;
#                                                    the sum over phases is `contribution`
#     decay_by_phase  [phase, probe, out]            what decay of the weights took away then, where they decay
#     change          [phase, probe, out]            how the outputs changed then: the sum of both over examples
#     example_phase   [example]                      the phase in which each example is learned
#     point_phase     [probe]                        the phase that each point is of
#     phase_name      [phase]                        what it is called
#
# What an example adds outside its own phase it does by what an optimizer remembers of it.


BY_PHASE, DECAY_BY_PHASE, CHANGE = "by_phase", "decay_by_phase", "change"
EXAMPLE_PHASE, POINT_PHASE = "example_phase", "point_phase"
PHASES = "phases"
"""The attribute of the store that holds the names."""


@dataclass(frozen=True, kw_only=True)
class ContributionsByPhase:
    """What each rule says of every phase; phases of examples and points are counted from 1."""

    names: tuple[str, ...]
    examples: NDArray[np.int64]
    points: NDArray[np.int64]
    change: NDArray[np.float64]
    parts: Mapping[str, Sequence[ManyRows]]  # an array for each phase
    decay: Mapping[str, NDArray[np.float64]]


def add_phases(path: Path, phases: ContributionsByPhase) -> None:
    """Write what happened in each phase, beside contributions that are written."""
    store, first = open_store(path, write=True), explained_rule(phases.parts)
    store.attrs[PHASES] = list(phases.names)
    write_array(
        store, CHANGE, np.asarray(phases.change, dtype=np.float64), ("phase", "probe", "out"), {}
    )
    write_array(store, EXAMPLE_PHASE, phases.examples, ("example",), {})
    write_array(store, POINT_PHASE, phases.points, ("probe",), {})
    for rule, parts in phases.parts.items():
        write_stacked(
            store,
            called(BY_PHASE, rule, first or rule),
            parts,
            ("phase", "probe", "out", "example"),
        )
    for rule, decay in phases.decay.items():
        write_array(
            store, called(DECAY_BY_PHASE, rule, first or rule), decay, ("phase", "probe", "out"), {}
        )


# --- leave_out.zarr: predicted changes of outputs compared with those of trainings that really left examples out.
#
#     predicted, actual    [removal, probe, out]   at the outputs of contributions.zarr
#     example              [place]                 who was left out, one removal after another
#     count, influential   [removal]               how many, and whether the most influential ones or random ones


STORE = "leave_out.zarr"
CHANGES = ("removal", "probe", "out")


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One group was left out: the most influential examples, or random ones."""

    influential: bool
    examples: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class LeaveOut:
    """Several groups were left out, one at a time."""

    removals: tuple[LeftOut, ...]
    probe: tuple[int, ...]
    predicted: NDArray[np.float64]
    actual: NDArray[np.float64]

    def alone(self, examples: int) -> NDArray[np.float64] | None:
        """The actual changes when each example is left out by itself, [probe, out, example], if all of them were."""
        singles = {
            each.examples[0]: k for k, each in enumerate(self.removals) if len(each.examples) == 1
        }
        if len(singles) < examples:
            return None
        return np.moveaxis(self.actual[[singles[k] for k in range(examples)]], 0, -1)


def write_leave_out(path: Path, retrained: LeaveOut) -> None:
    store = create_store(path)
    write_array(store, "predicted", np.asarray(retrained.predicted, dtype=np.float64), CHANGES, {})
    write_array(store, "actual", np.asarray(retrained.actual, dtype=np.float64), CHANGES, {})
    write_array(store, "probe", np.array(retrained.probe, dtype=np.int64), ("probe",), {})
    everyone = np.array([k for each in retrained.removals for k in each.examples], dtype=np.int64)
    write_array(store, "example", everyone, ("place",), {})
    counts = np.array([len(each.examples) for each in retrained.removals], dtype=np.int64)
    write_array(store, "count", counts, ("removal",), {})
    write_array(
        store,
        "influential",
        np.array([each.influential for each in retrained.removals]),
        ("removal",),
        {},
    )


LEAVE_OUT_KINDS: Mapping[str, Dims] = {
    **dict.fromkeys(("predicted", "actual"), CHANGES),
    "probe": ("probe",),
    "example": ("place",),
    **dict.fromkeys(("count", "influential"), ("removal",)),
}


def refuse_odd_leave_out(path: Path, lengths: Mapping[str, int], outs: int) -> None:
    """Raise if the store holds what no run writes, of a run whose axes have these lengths."""
    store = read_store(path)
    own = {
        name: store.arrays[name].shape[0]
        for name in ("probe", "example", "count")
        if name in store.arrays
    }
    axes = {
        "probe": own.get("probe", 0),
        "place": own.get("example", 0),
        "removal": own.get("count", 0),
        "out": outs,
    }
    refuse_odd_store(store, path, LEAVE_OUT_KINDS, list(LEAVE_OUT_KINDS), axes)
    opened = open_store(path)
    probe, example, count = (
        np.asarray(get_array(opened, name)[...]) for name in ("probe", "example", "count")
    )
    for numbers, high in ((probe, lengths["probe"]), (example, lengths["example"])):
        if not len(numbers) or numbers.min() < 0 or numbers.max() >= high:
            raise Damaged(
                f"{path} holds what no run writes: points or examples that there are not; {AGAIN}"
            )
    if count.min() < 1 or count.sum() != len(example):
        raise Damaged(
            f"{path} holds what no run writes: removals of other numbers of examples; {AGAIN}"
        )


def read_leave_out(path: Path) -> LeaveOut:
    store = open_store(path)
    parts = ("example", "count", "influential", "probe", "predicted", "actual")
    everyone, counts, kinds, probe, predicted, actual = (
        np.asarray(get_array(store, part)[...]) for part in parts
    )
    groups = np.split(everyone, np.cumsum(counts)[:-1])
    removals = tuple(
        LeftOut(influential=bool(kind), examples=tuple(group.tolist()))
        for kind, group in zip(kinds, groups, strict=True)
    )
    return LeaveOut(
        removals=removals, probe=tuple(probe.tolist()), predicted=predicted, actual=actual
    )


# --- removal/KEY.zarr beside a finished run: what leaving out a group of examples changed, and how that splits over
# them.
#
#     actual     [probe, out]            the change of the output, trained again without the group
#     shares     [probe, out, example]   of each example of the group; they add up to `actual`
#     by_step    [probe, out, step]      of each step; they add up to it as well
#     probe, out, example                which points, outputs and training examples these are
#
# KEY tells group and points; KEY.json, written last, seals the store and holds what else is known. DONE.json does
# not speak of it: a run is the same run whatever is asked of it later. But it is sealed for that run and this
# key: what was found of another run, or of another group, is not read.


FOLDER = "removal"
NUMBERS = {
    "actual": ("probe", "out"),
    "shares": ("probe", "out", "example"),
    "by_step": ("probe", "out", "step"),
}
PLACES = ("probe", "out", "example")
FACTS = ("growth", "repeated", "emptied")


@dataclass(frozen=True, eq=False, kw_only=True)
class Removal:
    """A group was left out, and this is what that changed at some points."""

    probe: tuple[int, ...]  # along the axis of this name in contributions.zarr
    out: tuple[int, ...]
    example: tuple[int, ...]  # who was left out, by place among the training examples
    actual: NDArray[np.float64]
    shares: NDArray[np.float64]
    by_step: NDArray[np.float64]
    growth: float  # of the sweep backwards
    repeated: float  # how far the training without a removal was from the run, relative to what the removal changed
    emptied: int  # steps of whose batch nothing was left

    @property
    def closure(self) -> float:
        """How far the shares are from adding up, relative to what they add up to."""
        size = float(np.linalg.norm(self.actual))
        missed = float(np.linalg.norm(self.shares.sum(2) - self.actual))
        return missed / size if size else missed

    @property
    def cancellation(self) -> NDArray[np.float64]:
        """How many times larger shares are than their sum, Σ|s|/|Σs|: where that is much, a share means little."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.abs(self.shares).sum(2) / np.abs(self.shares.sum(2)))


def key(example: Sequence[int], probe: Sequence[int]) -> str:
    """Name the removal of these examples, looked at from these points.

    >>> key([3, 17], [0]) == key([17, 3], [0]), key([3], [0]) == key([3], [1])
    (True, False)
    """
    return sha256(json.dumps([sorted(example), list(probe)]).encode()).hexdigest()[:12]


def write_removal(run: Path, removal: Removal) -> None:
    """Keep what was found beside the run, whole or not at all."""
    folder, name = run / FOLDER, key(removal.example, removal.probe)
    folder.mkdir(exist_ok=True)
    store = create_store(folder / f"{name}.zarr")
    for part, dims in NUMBERS.items():
        write_array(store, part, np.asarray(getattr(removal, part), dtype=np.float64), dims, {})
    for part in PLACES:
        write_array(store, part, np.array(getattr(removal, part), dtype=np.int64), (part,), {})
    facts: dict[str, Json] = {part: getattr(removal, part) for part in FACTS}
    facts["seals"] = sealed(folder, [f"{name}.zarr"])
    RunFolder(run).write_sealed(f"{FOLDER}/{name}.json", facts)


def read_removal(run: Path, example: Sequence[int], probe: Sequence[int]) -> Removal | None:
    """What was found of this group at these points, if it was and is as it was written."""
    folder, name = run / FOLDER, key(example, probe)
    path = folder / f"{name}.json"
    try:
        facts = checked(RunFolder(run).read_sealed(f"{FOLDER}/{name}.json"), RemovalFacts, path)
        if broken(folder, facts["seals"]):
            return None
        read_store(folder / f"{name}.zarr")
    except Mistake:
        return None
    facts = {part: facts[part] for part in FACTS}
    store = open_store(folder / f"{name}.zarr")
    arrays: dict[str, Any] = {part: np.asarray(get_array(store, part)[...]) for part in NUMBERS}
    arrays |= {part: tuple(np.asarray(get_array(store, part)[...]).tolist()) for part in PLACES}
    return Removal(**arrays, **facts)
