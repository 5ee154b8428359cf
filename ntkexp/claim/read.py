"""Read a claim from its file, `configs/claim/NAME.yaml`.

statement: The wider the network, the less its kernel moves.
source: {paper: "Jacot et al. 2018, arXiv:1806.07572", section: theorem 2}
runs:                                      a sweep, or several: NAME: {axes: …, base: …}
  axes: {model.width: [32, 64, 128]}
  base: [steps=100]
seeds: 24
looks: [6, 24]                             stages: judge with 6 seeds, then with 24 if undecided
quantity: kernel_change                    a column of the runs, or a component
expectation:                               a rule, or a list of rules that must all hold
  {_target_: ntkexp.claim.expectation.Slope, along: model.width, value: -0.5, margin: 0.1}
margins: {source: theorem 2}               the reason of each margin, or a list, one per rule:
                                           {source: …}, a number of the paper, or
                                           {minimum: …}, the smallest effect that would matter
refutes: A slope above −0.4.
null: 0                                    the figure if the claim is false, or a list, one per rule
kind: identity                             if the claim is exact by construction, and only checked
control: {base: [init=mean_field]}         changes for the control, which must not be supported; or
                                           {without: REASON} if the claim has no control
second: {base: [data=teacher], seeds: 20}  changes for the second look, which has other seeds
quick: {seeds: 3}                          changes for a smaller size; `full` for a larger one
picture: {_target_: ntkexp.claim.picture.JudgedRows}    the default

A control, a second look or a size lists only its differences from the fields above:

base: [data=teacher]                       added to the base of all runs
axes: {model.width: [32, 64]}              new values of an axis, for the runs that have this axis
runs: {mlp: {base: […], axes: {…}}}        changes of base and axes for the sweep with this name
margins: {source: …}                       the reasons of changed rules
seeds: 3, looks: [3]                       without `looks`, changed seeds are judged in one stage
quantity, expectation, trial               with _target_ a new component, else changed fields
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from ntkexp.claim.claim import IDENTITY, Claim, Published
from ntkexp.claim.expectation import (
    EXACT_MARGIN,
    AbstractAverage,
    AbstractExpectation,
    Identity,
    Order,
)
from ntkexp.claim.judged import AbstractPicture
from ntkexp.claim.look import CONTROL, MAIN, MINIMUM, SECOND, SOURCE, Look, Protocol
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

NEEDED = (
    *("statement", "source", "seeds", "quantity", "expectation", "refutes"),
    *("control", "second"),
)
CLAIM_KEYS = (
    *("base", "runs", "trial", "looks", *NEEDED, "null", "margins", "kind"),
    *("quick", "full", "picture"),
)
CHANGES = (
    *("base", "axes", "runs", "seeds", "looks", "quantity", "expectation"),
    *("null", "margins", "trial"),
)
WITHOUT = "without"
MIN_REASON_WORDS = 4
COLUMN = "ntkexp.claim.quantity.Column"
SECOND_SEED_OFFSET = 1000
"""The offset between the seeds of the main look and the seeds of the second look."""


def claim_names(choices: Choices) -> list[str]:
    return choices.options("claim")


def read_claim(name: str, builder: Builder, size: Size = "default") -> Claim:
    """Read a claim at one of its sizes. Error messages name the file."""
    names = claim_names(builder.choices)
    if name not in names:
        raise Mistake(
            f"'{name}' is not a claim; `claims list` shows all {len(names)}{nearest(name, names)}"
        )
    file = builder.choices.file("claim", name)
    try:
        return claim_of(name, read_yaml(file), builder, size)
    except Mistake as mistake:
        raise Mistake(
            str(mistake) if str(file) in str(mistake) else f"{file}: {mistake}"
        ) from None


def read_sizes(name: str, builder: Builder) -> dict[str, Claim]:
    """Read a claim at all of its sizes."""
    sizes: tuple[Size, ...] = ("default", "quick", "full")
    return {size: read_claim(name, builder, size) for size in sizes}


def claim_of(name: str, tree: Tree, builder: Builder, size: Size = "default") -> Claim:
    """Build a claim from the content of its file."""
    tree = with_null(tree)
    refuse_keys(tree)
    named = {**tree, "runs": named_runs(tree)}

    # apply the changes of all sizes, so that a mistake in any of them is always
    # reported
    sizes = {
        other: with_changes(named, tree.get(other) or {}, other)
        for other in ("quick", "default", "full")
    }
    sized = sizes[size]
    main = build_look(sized, MAIN, builder)
    without_control = read_reason_without_control(tree["control"])
    control = None
    if not without_control:
        control = build_look(
            with_changes(sized, tree["control"], CONTROL), CONTROL, builder
        )
        refuse_arithmetic(control, main)
    second = build_second_look(sized, tree["second"], main, size, builder)

    picture: AbstractPicture = JudgedRows()
    if tree.get("picture") is not None:
        picture = build_part(builder, tree["picture"], AbstractPicture, "picture")
    return Claim(
        name=name,
        statement=str(tree["statement"]),
        source=build_source(tree["source"]),
        refutes=str(tree["refutes"]),
        protocol=Protocol(main, second, control),
        picture=picture,
        identity=is_identity(tree.get("kind"), main),
        without_control=without_control,
    )


def refuse_keys(tree: Tree) -> None:
    """Raise if a key is unknown or missing."""
    for key in tree:
        if key not in CLAIM_KEYS:
            raise Mistake(
                f"{key}: a claim has no such key; it has {', '.join(CLAIM_KEYS)}"
                f"{nearest(str(key), CLAIM_KEYS)}"
            )
    if not tree.get("runs") and not tree.get("trial"):
        raise Mistake(
            "the claim has no runs; give it `runs` with axes and base, or a `trial`"
        )
    for key in NEEDED:
        if tree.get(key) is None:
            raise Mistake(
                f"{key} is missing: a claim states it before anything is measured"
            )


def read_reason_without_control(control: object) -> str:
    """Return the reason why a claim has no control, or "" if it has one."""
    if not isinstance(control, Mapping) or WITHOUT not in control:
        return ""
    reason = str(control[WITHOUT])
    if len(control) > 1 or len(reason.split()) < MIN_REASON_WORDS:
        raise Mistake(
            f"control={spell_value(control)}: without a control, give only a reason of at least "
            f"{MIN_REASON_WORDS} words, such as {{without: exact by construction}}"
        )
    return reason


def refuse_arithmetic(control: Look, main: Look) -> None:
    """Raise if the control measures the same runs or trial as the main look, and
    differs only in the rule, the column or the range."""
    if all(
        control.fields[key] == main.fields[key] for key in ("runs", "trial", "seeds")
    ):
        raise Mistake(
            "control: it judges the same runs by another rule or column, which is arithmetic; "
            "change the data, the labels or the parametrisation, or give {without: REASON}"
        )


def is_identity(kind: object, main: Look) -> bool:
    """Read the field `kind`. Raise if a claim of kind identity has a
    rule that involves chance."""
    if kind is None:
        return False
    if kind != IDENTITY:
        raise Mistake(f"kind={spell_value(kind)}: it takes {IDENTITY}, or leave it out")
    for rule in main.expectation:
        exact = isinstance(rule, Identity) or (
            isinstance(rule, AbstractAverage)
            and not isinstance(rule, Order)
            and rule.margin <= EXACT_MARGIN
        )
        if not exact:
            raise Mistake(
                f"kind: {IDENTITY}: `{rule.words}` leaves room for chance; an identity takes rules "
                f"with margins of at most {EXACT_MARGIN}"
            )
    return True


def named_runs(tree: Tree) -> dict[str, Any]:
    """Return the sweeps of a claim by name, with the common base prepended
    to each sweep's base.

    A single sweep without a name is called `runs`.
    """
    runs = tree.get("runs") or {}
    common = list_of("base", tree.get("base") or [])
    if isinstance(runs, Mapping) and runs and runs.keys() <= {"axes", "base"}:
        runs = {"runs": runs}
    is_valid = isinstance(runs, Mapping) and all(
        isinstance(fields, Mapping) for fields in runs.values()
    )
    if not is_valid:
        raise Mistake(
            "runs: they take axes and base, or NAME: {axes: …, base: …} for each of several sweeps"
        )
    return {
        name: {**fields, "base": [*common, *fields.get("base", [])]}
        for name, fields in runs.items()
    }


def build_source(fields: object) -> Published:
    source = fields if isinstance(fields, Mapping) else {"paper": fields}
    try:
        return Published.model_validate(source)
    except ValidationError as error:
        raise refusal(error, Published, "source", source) from None


# --- Changes of a claim for its control, its second look, or another size.


def with_changes(tree: Tree, change: Tree, name: str) -> dict[str, Any]:
    """Return the content of a claim with the changes for its control,
    its second look, or another size.

    >>> runs = {"mlp": {"base": ["steps=9"], "axes": {"seed": [1]}}}
    >>> claim = {"runs": runs, "quantity": "kernel_change", "seeds": 5}
    >>> change = {"base": ["data=moons"], "quantity": "loss", "seeds": 3}
    >>> with_changes(claim, change, "quick")["runs"]["mlp"]["base"]
    ['steps=9', 'data=moons']
    """
    if not isinstance(change, Mapping):
        raise Mistake(
            f"{name}={spell_value(change)}: it takes KEY: VALUE lines; "
            f"its keys are {', '.join(CHANGES)}"
        )
    change = with_null(change)
    for key in change:
        if key not in CHANGES:
            raise Mistake(
                f"{name}.{key}: there is no such key; there are {', '.join(CHANGES)}"
                f"{nearest(str(key), CHANGES)}"
            )
    changed = {**tree, "runs": with_changed_runs(tree.get("runs", {}), change, name)}
    if "seeds" in change:
        changed.pop(
            "looks", None
        )  # the planned stages would not match the new number of seeds
    for key in ("seeds", "looks", "null", "margins"):
        if key in change:
            changed[key] = change[key]
    for key in ("quantity", "trial", "expectation"):
        if key in change:
            changed[key] = merge(changed.get(key), change[key])
    return changed


def with_null(tree: Tree) -> dict[str, Any]:
    """Return the tree with the key None renamed to "null".
    YAML reads the key `null` as None."""
    return {"null" if key is None else key: value for key, value in tree.items()}


def with_changed_runs(runs: Tree, change: Tree, name: str) -> dict[str, Any]:
    """Return the runs of a claim with a change: add entries to `base`, and replace
    values of axes.

    First apply the changes for all runs, then the changes under the name of a run.
    Error messages begin with `name`."""
    changes_by_name = change.get("runs") or {}
    refuse_unknown_runs(runs, change, name)
    changed = {}
    for run, before in runs.items():
        axes = dict(before.get("axes") or {})
        base = list(before.get("base") or [])
        for fields in (change, changes_by_name.get(run, {})):
            new_values = fields.get("axes") or {}
            axes |= {key: values for key, values in new_values.items() if key in axes}
            base += fields.get("base") or []
        changed[run] = {**before, "axes": axes, "base": base}
    return changed


def refuse_unknown_runs(runs: Tree, change: Tree, name: str) -> None:
    """Raise if a change names runs or axes that the claim does not have."""
    changes_by_name = change.get("runs") or {}
    for run in changes_by_name:
        if run not in runs:
            raise Mistake(
                f"{name}.runs.{run}: the claim has no such runs{nearest(run, runs)}"
            )
    axes = [key for run in runs.values() for key in run.get("axes") or {}]
    for fields in (change, *changes_by_name.values()):
        for key in fields.get("axes") or {}:
            if key not in axes:
                raise Mistake(
                    f"{name}.axes.{key}: no runs of the claim have this axis"
                    f"{nearest(key, axes)}"
                )


def merge(before: Any, change: Any) -> Any:
    """Return a component with some fields replaced. In a list of components,
    replace them in every component.

    A change with `_target_` replaces the entire component.
    """
    if isinstance(change, Mapping) and "_target_" not in change:
        if isinstance(before, list):
            return [merge(component, change) for component in before]
        if isinstance(before, Mapping):
            return {**before, **change}
    return change


# --- Looks.


def build_look(tree: Tree, name: str, builder: Builder) -> Look:
    """Build one statistical test (look). Error messages name the control
    or the second look."""
    with mistakes_in("" if name == MAIN else f"{name}: "):
        seeds = seeds_of(tree["seeds"])
        if len(seeds) < 2:
            raise Mistake(
                f"seeds={len(seeds)}: one seed does not show how much results vary "
                "by chance; give two or more"
            )
        runs = {
            run: build_sweep(run, fields, seeds) for run, fields in tree["runs"].items()
        }
        trial = None
        if tree.get("trial") is not None:
            trial = build_part(builder, tree["trial"], AbstractTrial, "trial")
        quantity = tree["quantity"]
        if isinstance(quantity, str):
            quantity = {"_target_": COLUMN, "column": quantity}
        rules = build_rules(tree["expectation"], builder)
        return Look(
            runs=runs,
            trial=trial,
            seeds=seeds,
            quantity=build_part(builder, quantity, AbstractQuantity, "quantity"),
            expectation=rules,
            nulls=() if name == CONTROL else read_nulls(tree.get("null"), rules),
            margins=() if name == CONTROL else read_margins(tree.get("margins"), rules),
            planned=read_stages(tree.get("looks"), len(seeds)),
        )


def build_rules(fields: Any, builder: Builder) -> tuple[AbstractExpectation, ...]:
    rules = fields if isinstance(fields, list) else [fields]
    if not rules:
        raise Mistake(
            "expectation=[]: nothing is expected, so nothing can be judged; give a rule or several"
        )
    return tuple(
        build_part(builder, rule, AbstractExpectation, "expectation") for rule in rules
    )


def read_nulls(
    given: object, expectation: Sequence[AbstractExpectation]
) -> tuple[float | None, ...]:
    """Read the null value of each rule, the figure to be expected
    if the claim is false.

    Return () if the claim's file gives no null values. Raise if the expected range of a
    rule contains its null value.

    >>> from ntkexp.claim.expectation import Slope
    >>> read_nulls(0, [Slope(along="width", value=-0.5, margin=0.1)])
    (0.0,)
    """
    nulls: list[Any] = given if isinstance(given, list) else [given] * len(expectation)
    are_numbers = all(isinstance(null, float | int | None) for null in nulls)
    if len(nulls) != len(expectation) or not are_numbers:
        raise Mistake(
            f"null={spell_value(given)}: it takes a number, "
            f"or one for each of the {len(expectation)} rules"
        )
    for rule, named in zip(expectation, nulls, strict=True):
        null = rule.null if named is None else float(named)
        if null is None:
            raise Mistake(
                "null is missing: name the figure to be expected if the claim is false, "
                f"which lies outside of `{rule.words}`"
            )
        if rule.contains(null):
            raise Mistake(
                f"expectation: {rule.words} also holds at {spell_value(null)}, the "
                "figure to be expected if the claim is false; narrow the margin, or "
                "name another figure by null:"
            )
    if given is None:
        return ()
    return tuple(None if null is None else float(null) for null in nulls)


def read_margins(
    given: object, expectation: Sequence[AbstractExpectation]
) -> tuple[Mapping[str, str], ...]:
    """Read the reason of each rule's margin. Return () if the claim's file gives none.

    >>> from ntkexp.claim.expectation import Slope
    >>> read_margins({"source": "theorem 2"}, [Slope(along="width", value=-0.5, margin=0.1)])
    ({'source': 'theorem 2'},)
    """
    if given is None:
        return ()
    margins: list[Any] = (
        given if isinstance(given, list) else [given] * len(expectation)
    )
    if len(margins) != len(expectation):
        raise Mistake(
            f"margins: there are {len(margins)} reasons for {len(expectation)} "
            "rules; give one reason, or one for each rule"
        )
    reasons: list[Mapping[str, str]] = []
    for margin in margins:
        reason = margin or {}
        is_reason = isinstance(reason, Mapping) and all(
            origin in (SOURCE, MINIMUM) and str(text).strip()
            for origin, text in reason.items()
        )
        if not is_reason or len(reason) > 1:
            raise Mistake(
                f"margins={spell_value(margin)}: a reason is {{{SOURCE}: TEXT}}, a number of the "
                f"paper, or {{{MINIMUM}: TEXT}}, the smallest effect that would matter"
            )
        reasons.append({origin: str(text) for origin, text in reason.items()})
    return tuple(reasons)


def read_stages(given: object, seeds: int) -> tuple[int, ...]:
    """Read how many seeds each stage uses. Raise unless these numbers increase, the
    first is at least 2, and the last is `seeds`.

    >>> read_stages([6, 24], 24)
    (6, 24)
    """
    if given is None:
        return ()
    sizes = seeds_of(given) if isinstance(given, list) else ()
    grow = all(before < after for before, after in itertools.pairwise(sizes))
    if not sizes or sizes[0] < 2 or sizes[-1] != seeds or not grow:
        raise Mistake(
            f"looks={spell_value(given)}: it takes growing numbers of seeds, from 2 or more "
            f"to all {seeds}, such as [{max(2, seeds // 4)}, {seeds}]"
        )
    return sizes


def build_second_look(
    tree: Tree, change: Tree, main: Look, size: Size, builder: Builder
) -> Look:
    """Build the second look, with seeds that the main look does not use.

    If `size` is quick, ignore the `seeds` of the second look and use the number of
    seeds of the main look."""
    changed = with_changes(tree, change, SECOND)
    seeds = [seed + SECOND_SEED_OFFSET for seed in main.seeds]
    if "seeds" in change and size != "quick":
        with mistakes_in(f"{SECOND}: "):
            given = seeds_of(changed["seeds"])
        is_count = isinstance(changed["seeds"], int)
        seeds = [seeds[0] + seed for seed in given] if is_count else [*given]
    look = build_look({**changed, "seeds": seeds}, SECOND, builder)
    if common := sorted({*look.seeds} & {*main.seeds}):
        raise Mistake(
            f"{SECOND}: seed {common[0]} belongs to the claim itself; give other seeds, "
            "or their number, as seeds: 20"
        )
    return look


@contextmanager
def mistakes_in(name: str) -> Iterator[None]:
    """Prefix the message of any `Mistake` raised inside the block with a name."""
    try:
        yield
    except Mistake as mistake:
        raise Mistake(f"{name}{mistake}") from None


def build_sweep(name: str, fields: Any, seeds: Sequence[int]) -> Definition:
    """Build a sweep of runs that use one thread, so that results do not depend on the
    number of workers. A setting `threads` in the base has precedence."""
    if not isinstance(fields, Mapping):
        raise Mistake(
            f"runs.{name}={spell_value(fields)}: it takes axes and base, as a sweep does"
        )
    base = list(fields.get("base") or [])
    if not any(split(str(text)).key == "threads" for text in base):
        base.append("threads=1")
    return from_yaml(name, {**fields, "base": base, "seeds": list(seeds)})


def build_part(builder: Builder, given: Any, kind: type[Component], key: str) -> Any:
    """Build a trial, quantity, rule or picture from the field `key` of a claim."""
    if not isinstance(given, Mapping):
        raise Mistake(
            f"{key}={spell_value(given)}: it takes a component, "
            f"such as {{_target_: ntkexp.claim.{key}.…, …}}"
        )
    return builder.component(given, (kind,), key)
