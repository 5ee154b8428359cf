"""A claim from its file, `configs/claim/NAME.yaml`.

statement: The wider the network, the less its kernel moves.
source: {paper: "Jacot et al. 2018, arXiv:1806.07572", section: theorem 2}
runs:                                      axes and base of a sweep; or several by name, NAME: {axes: …, base: …}
  axes: {model.width: [32, 64, 128]}
  base: [steps=100]
seeds: 24
looks: [6, 24]                             judged with 6 seeds, then, if undecided, with all; once, if nothing is said
quantity: drift                            a column of the runs, or a component
expectation:                               or a list of them, all of which must hold
  {_target_: ntkexp.claim.expectation.Slope, along: model.width, value: -0.5, margin: 0.1, bound: upper}
refutes: A slope above −0.4.
null: 0                                    what is found where the claim does not hold; a list, of several rules
control: {base: [init=mean_field]}         what is otherwise, as below; it is at the null, and must not be supported
second: {base: [data=teacher], seeds: 20}  20 seeds of another family, or as many as the claim, and other data
quick: {seeds: 3}                          and `full`: other sizes, of all looks
picture: {_target_: ntkexp.claim.picture.JudgedRows}    how it is drawn; this one if nothing is said

What is otherwise in a control, in a second look, or at another size:

base: [data=teacher]                       for all runs, after their own base
axes: {model.width: [32, 64]}              other values on an axis, of the runs that have it
runs: {mlp: {base: […], axes: {…}}}        the same for the runs of one name
seeds: 3, looks: [3]                       other seeds are judged once, unless it is said how often
quantity, expectation, trial               with _target_: another one; without: the same with these fields otherwise
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from ntkexp.claim.claim import Claim, Published
from ntkexp.claim.expectation import AbstractExpectation
from ntkexp.claim.judged import AbstractPicture
from ntkexp.claim.look import CONTROL, MAIN, SECOND, Look, Protocol
from ntkexp.claim.picture import JudgedRows
from ntkexp.claim.quantity import AbstractQuantity
from ntkexp.claim.trial import AbstractTrial
from ntkexp.component import Component
from ntkexp.config.build import Builder
from ntkexp.config.choices import Choices
from ntkexp.config.compose import split
from ntkexp.config.field_types import refusal
from ntkexp.config.plain_yaml import read_yaml, spell_value
from ntkexp.mistake import Mistake, nearest
from ntkexp.sweep.definition import Definition, from_yaml, list_of, seeds_of

Size: TypeAlias = Literal["quick", "default", "full"]
Tree: TypeAlias = Mapping[str, Any]

NEEDED = ("statement", "source", "seeds", "quantity", "expectation", "refutes", "control", "second")
KEYS = ("base", "runs", "trial", "looks", *NEEDED, "null", "quick", "full", "picture")
CHANGES = ("base", "axes", "runs", "seeds", "looks", "quantity", "expectation", "null", "trial")
COLUMN = "ntkexp.claim.quantity.Column"
FAMILY = 1000  # seeds of the second look begin so much later


def claim_names(choices: Choices) -> list[str]:
    return choices.options("claim")


def read_claim(name: str, builder: Builder, size: Size = "default") -> Claim:
    """Read a claim at one of its sizes; what is wrong with it is said with its file."""
    names = claim_names(builder.choices)
    if name not in names:
        raise Mistake(
            f"'{name}' is not a claim; `claims list` shows all {len(names)}{nearest(name, names)}"
        )
    file = builder.choices.file("claim", name)
    try:
        return claim_of(name, read_yaml(file), builder, size)
    except Mistake as mistake:
        raise Mistake(str(mistake) if str(file) in str(mistake) else f"{file}: {mistake}") from None


def read_sizes(name: str, builder: Builder) -> dict[str, Claim]:
    """Read a claim at all of its sizes."""
    sizes: tuple[Size, ...] = ("default", "quick", "full")
    return {size: read_claim(name, builder, size) for size in sizes}


def claim_of(name: str, tree: Tree, builder: Builder, size: Size = "default") -> Claim:
    tree = with_null(tree)
    for key in tree:
        if key not in KEYS:
            raise Mistake(
                f"{key}: a claim has no such key; it has {', '.join(KEYS)}{nearest(str(key), KEYS)}"
            )
    if not tree.get("runs") and not tree.get("trial"):
        raise Mistake("the claim has no runs; give it `runs` with axes and base, or a `trial`")
    for key in NEEDED:
        if tree.get(key) is None:
            raise Mistake(f"{key} is missing: a claim says it before it is measured")

    # Runs that have no name get the name `runs`; what all have in common goes before the base of each.
    runs, common = tree.get("runs") or {}, list_of("base", tree.get("base") or [])
    if not isinstance(runs, Mapping) or not all(
        isinstance(item, Mapping | list) for item in runs.values()
    ):
        raise Mistake(
            "runs: they take axes and base, or NAME: {axes: …, base: …} for each of several sweeps"
        )
    by_name = {"runs": runs} if runs.keys() <= {"axes", "base"} and runs else runs
    named = {
        **tree,
        "runs": {
            run: {**of, "base": [*common, *of.get("base", [])]} for run, of in by_name.items()
        },
    }

    # All sizes are made, so that a mistake in one of them is said at any.
    sizes = {
        other: with_changes(named, tree.get(other) or {}, other)
        for other in ("quick", "default", "full")
    }
    sized = sizes[size]

    main = build_look(sized, MAIN, builder)
    control = build_look(with_changes(sized, tree["control"], CONTROL), CONTROL, builder)
    second = build_second_look(sized, tree["second"], main, size, builder)
    source = tree["source"] if isinstance(tree["source"], Mapping) else {"paper": tree["source"]}
    try:
        published = Published.model_validate(source)
    except ValidationError as error:
        raise refusal(error, Published, "source", source) from None
    given = tree.get("picture")
    picture = (
        JudgedRows() if given is None else build_part(builder, given, AbstractPicture, "picture")
    )
    protocol = Protocol(main, control, second)
    return Claim(name, str(tree["statement"]), published, str(tree["refutes"]), protocol, picture)


# --- What is otherwise in another look at a claim, or at another size of it.


def with_changes(tree: Tree, change: Tree, name: str) -> dict[str, Any]:
    """Make another claim of one.

    >>> claim = {"runs": {"mlp": {"base": ["steps=9"], "axes": {"seed": [1]}}}, "quantity": "drift", "seeds": 5}
    >>> with_changes(claim, {"base": ["data=moons"], "quantity": "loss", "seeds": 3}, "quick")["runs"]["mlp"]["base"]
    ['steps=9', 'data=moons']
    """
    if not isinstance(change, Mapping):
        raise Mistake(
            f"{name}={spell_value(change)}: it takes KEY: VALUE lines; its keys are {', '.join(CHANGES)}"
        )
    change = with_null(change)
    for key in change:
        if key not in CHANGES:
            keys = ", ".join(CHANGES)
            raise Mistake(
                f"{name}.{key}: there is no such key; there are {keys}{nearest(str(key), CHANGES)}"
            )
    changed = {**tree, "runs": with_changed_runs(tree.get("runs", {}), change, name)}
    if "seeds" in change:
        changed["seeds"] = change["seeds"]
        changed.pop("looks", None)  # which are planned for other seeds
    changed |= {key: change[key] for key in ("looks", "null") if key in change}
    for key in ("quantity", "trial"):
        if key in change:
            changed[key] = merge_fields(changed.get(key), change[key])
    if "expectation" in change:  # of several parts that are expected, each gets these fields
        before, after = changed.get("expectation"), change["expectation"]
        several = (
            isinstance(before, list) and isinstance(after, Mapping) and "_target_" not in after
        )
        changed["expectation"] = (
            [merge_fields(part, after) for part in before or ()]
            if several
            else merge_fields(before, after)
        )
    return changed


def with_null(tree: Tree) -> dict[str, Any]:
    """Name the key `null:`, which YAML reads as nothing, by its letters."""
    return {"null" if key is None else key: value for key, value in tree.items()}


def with_changed_runs(runs: Tree, change: Tree, name: str) -> dict[str, Any]:
    """Add to the base of all runs and put other values on their axes, first what is for all, then by name."""
    of_names = change.get("runs") or {}
    for run in of_names:
        if run not in runs:
            raise Mistake(f"{name}.runs.{run}: the claim has no such runs{nearest(run, runs)}")
    keys = [key for run in runs.values() for key in run.get("axes") or {}]
    for key in (key for more in (change, *of_names.values()) for key in more.get("axes") or {}):
        if key not in keys:
            raise Mistake(
                f"{name}.axes.{key}: no runs of the claim have this axis{nearest(key, keys)}"
            )
    changed = {}
    for run, before in runs.items():
        axes, base = dict(before.get("axes") or {}), list(before.get("base") or [])
        for more in (change, of_names.get(run, {})):
            axes |= {key: values for key, values in (more.get("axes") or {}).items() if key in axes}
            base += more.get("base") or []
        changed[run] = {**before, "axes": axes, "base": base}
    return changed


def merge_fields(before: Any, change: Any) -> Any:
    """Put fields in place of those of the same name; what names its class is another component."""
    if isinstance(before, Mapping) and isinstance(change, Mapping) and "_target_" not in change:
        return {**before, **change}
    return change


# --- Looks, whose parts are built of what the file says.


def build_look(tree: Tree, name: str, builder: Builder) -> Look:
    """Make one look at a claim; what is wrong with it is said with its name."""
    with mistakes_in("" if name == MAIN else f"{name}: "):
        seeds = seeds_of(tree["seeds"])
        if len(seeds) < 2:
            raise Mistake(f"seeds={len(seeds)}: one seed says nothing of chance; give two or more")
        runs = {run: build_sweep(run, fields, seeds) for run, fields in tree["runs"].items()}
        given = tree.get("trial")
        trial = None if given is None else build_part(builder, given, AbstractTrial, "trial")
        given = tree["quantity"]
        fields = (
            {"_target_": COLUMN, "column": given} if isinstance(given, str) else given
        )  # a word names a column
        quantity = build_part(builder, fields, AbstractQuantity, "quantity")
        given = tree["expectation"]
        if given == []:
            raise Mistake(
                "expectation=[]: nothing is expected, so nothing can be judged; give a rule or several"
            )
        rules = given if isinstance(given, list) else [given]
        expectation = tuple(
            build_part(builder, part, AbstractExpectation, "expectation") for part in rules
        )
        nulls = () if name == CONTROL else named_nulls(tree.get("null"), expectation)
        return Look(
            runs,
            trial,
            seeds,
            quantity,
            expectation,
            nulls,
            planned_sizes(tree.get("looks"), len(seeds)),
        )


def named_nulls(
    given: object, expectation: Sequence[AbstractExpectation]
) -> tuple[float | None, ...]:
    """Read the figure of each part that is found where the claim does not hold; no part may expect it.

    >>> from ntkexp.claim.expectation import Slope
    >>> named_nulls(0, [Slope(along="width", value=-0.5, margin=0.1)])
    (0.0,)
    """
    nulls: list[Any] = given if isinstance(given, list) else [given] * len(expectation)
    if len(nulls) != len(expectation) or not all(
        isinstance(null, float | int | None) for null in nulls
    ):
        raise Mistake(
            f"null={spell_value(given)}: it takes a number, or one for each of the {len(expectation)} rules"
        )
    for part, named in zip(expectation, nulls, strict=True):
        null = part.null if named is None else float(named)
        if null is None:
            raise Mistake(
                f"null is missing: name the figure that is found where the claim does not hold, which `{part.words}` "
                "must exclude"
            )
        if part.contains(null):
            raise Mistake(
                f"expectation: {part.words} holds at {spell_value(null)} too, which is found where the claim does not "
                "hold; narrow the margin, or name what is found then by null:"
            )
    return () if given is None else tuple(None if null is None else float(null) for null in nulls)


def planned_sizes(given: object, seeds: int) -> tuple[int, ...]:
    """Read with how many seeds a look is judged, one time after another, the last time with all of them.

    >>> planned_sizes([6, 24], 24)
    (6, 24)
    """
    if given is None:
        return ()
    sizes = seeds_of(given) if isinstance(given, list) else ()
    if (
        not sizes
        or sizes[0] < 2
        or sizes[-1] != seeds
        or any(b <= a for a, b in itertools.pairwise(sizes))
    ):
        raise Mistake(
            f"looks={spell_value(given)}: it takes growing numbers of seeds, two at least, the last of which is all "
            f"{seeds}, such as [{max(2, seeds // 4)}, {seeds}]"
        )
    return sizes


def build_second_look(tree: Tree, change: Tree, main: Look, size: Size, builder: Builder) -> Look:
    """Look a second time, with other seeds, as many as `seeds` says, except in quick claims."""
    changed, seeds = with_changes(tree, change, SECOND), [seed + FAMILY for seed in main.seeds]
    if "seeds" in change and size != "quick":
        with mistakes_in(f"{SECOND}: "):
            given = seeds_of(changed["seeds"])
        seeds = (
            [seeds[0] + seed for seed in given] if isinstance(changed["seeds"], int) else [*given]
        )
    look = build_look({**changed, "seeds": seeds}, SECOND, builder)
    if common := sorted({*look.seeds} & {*main.seeds}):
        raise Mistake(
            f"{SECOND}: seed {common[0]} is one of the claim itself; give others, or how many, as seeds: 20"
        )
    return look


@contextmanager
def mistakes_in(name: str) -> Iterator[None]:
    try:
        yield
    except Mistake as mistake:
        raise Mistake(f"{name}{mistake}") from None


def build_sweep(name: str, fields: Any, seeds: Sequence[int]) -> Definition:
    """Read runs of a claim as a sweep, of one thread each: their bytes are the same however many are at work."""
    if not isinstance(fields, Mapping):
        raise Mistake(f"runs.{name}={spell_value(fields)}: it takes axes and base, as a sweep does")
    base = list(fields.get("base") or [])
    if not any(split(str(text)).key == "threads" for text in base):
        base.append("threads=1")
    return from_yaml(name, {**fields, "base": base, "seeds": list(seeds)})


def build_part(builder: Builder, given: Any, kind: type[Component], key: str) -> Any:
    """Build a part of a claim: its trial, quantity, picture, or what it expects."""
    if not isinstance(given, Mapping):
        raise Mistake(
            f"{key}={spell_value(given)}: it takes a component, such as {{_target_: ntkexp.claim.{key}.…, …}}"
        )
    return builder.component(given, (kind,), key)
