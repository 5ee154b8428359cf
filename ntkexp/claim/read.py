"""A claim from its file, `configs/claim/NAME.yaml`.

statement: The wider the network, the less its kernel moves.
source: {paper: "Jacot et al. 2018, arXiv:1806.07572", section: theorem 2}
runs:                                      axes and base of a sweep; or several by name, NAME: {axes: …, base: …}
  axes: {model.width: [32, 64, 128]}
  base: [steps=100]
seeds: 5
quantity: drift                            a column of the runs, or a component
expectation:                               or a list of them, all of which must hold
  {_target_: ntkexp.claim.expectation.Slope, along: model.width, value: -0.5, margin: 0.1, bound: upper}
refutes: A slope above −0.4.
control: {expectation: {value: -2.0}}      what is otherwise (`ntkexp.claim.claim`); it must not be supported
second: {base: [data=teacher], seeds: 20}  so many seeds of another family, or as many as the claim, and other data
quick: {seeds: 3}                          and `full`: other sizes, of all looks
picture: {_target_: ntkexp.claim.picture.JudgedRows}    how it is drawn; this one if nothing is said
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from ntkexp.claim.claim import CONTROL, MAIN, SECOND, Claim, Look, Published, changed
from ntkexp.claim.expectation.base import AbstractExpectation
from ntkexp.claim.picture.base import AbstractPicture
from ntkexp.claim.picture.rows import JudgedRows
from ntkexp.claim.quantity.base import AbstractQuantity
from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.config.build import Builder
from ntkexp.config.choices import Choices
from ntkexp.config.field_types import refusal
from ntkexp.config.override import split
from ntkexp.config.plain_yaml import read, spelled
from ntkexp.mistake import Mistake, nearest
from ntkexp.sweep.definition import Definition, from_yaml, list_of, seeds_of

Size: TypeAlias = Literal["quick", "default", "full"]
NEEDED = ("statement", "source", "seeds", "quantity", "expectation", "refutes", "control", "second")
KEYS = ("base", "runs", "trial", *NEEDED, "quick", "full", "picture")
COLUMN = "ntkexp.claim.quantity.Column"
FAMILY = 1000  # seeds of the second look begin so much later


def claim_names(choices: Choices) -> list[str]:
    """Name the claims there are."""
    return choices.options("claim")


def read_claim(name: str, builder: Builder, size: Size = "default") -> Claim:
    """Read a claim at one of its sizes; what is wrong with it is said with its file."""
    known = claim_names(builder.choices)
    if name not in known:
        raise Mistake(f"'{name}' is no claim; `claims list` shows all {len(known)}{nearest(name, known)}")
    file = builder.choices.file("claim", name)
    try:
        return claim_of(name, read(file), builder, size)
    except Mistake as mistake:
        raise Mistake(str(mistake) if str(file) in str(mistake) else f"{file}: {mistake}") from None


def claim_of(name: str, tree: Mapping[str, Any], builder: Builder, size: Size = "default") -> Claim:
    """Make a claim of what its file holds."""
    refuse_incomplete(tree)
    sizes = {other: changed(named_runs(tree), tree.get(other) or {}, other) for other in ("quick", "default", "full")}
    sized = sizes[size]
    main = look(sized, MAIN, builder)
    looks = {
        MAIN: main,
        CONTROL: look(changed(sized, tree["control"], CONTROL), CONTROL, builder),
        SECOND: second(sized, tree["second"], main, size, builder),
    }
    return Claim(
        name,
        str(tree["statement"]),
        published(tree["source"]),
        str(tree["refutes"]),
        looks,
        picture(builder, tree.get("picture")),
    )


def refuse_incomplete(tree: Mapping[str, Any]) -> None:
    """Refuse what is no claim yet."""
    for key in tree:
        if key not in KEYS:
            raise Mistake(f"{key}: a claim has no such key; it has {', '.join(KEYS)}{nearest(str(key), KEYS)}")
    if not tree.get("runs") and not tree.get("trial"):
        raise Mistake("the claim has no runs; give it `runs` with axes and base, or a `trial`")
    for key in NEEDED:
        if tree.get(key) is None:
            raise Mistake(f"{key} is missing: a claim says it before it is measured")


def named_runs(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Give runs that have no name the name `runs`, and tell all what all have in common."""
    runs, common = tree.get("runs") or {}, list_of("base", tree.get("base") or [])
    if not isinstance(runs, Mapping) or not all(isinstance(item, Mapping | list) for item in runs.values()):
        raise Mistake("runs: they take axes and base, or NAME: {axes: …, base: …} for each of several sweeps")
    named = {"runs": runs} if runs.keys() <= {"axes", "base"} and runs else runs
    return {**tree, "runs": {name: {**run, "base": [*common, *run.get("base", [])]} for name, run in named.items()}}


def second(tree: Mapping[str, Any], change: Mapping[str, Any], main: Look, size: Size, builder: Builder) -> Look:
    """Look a second time, with seeds of another family: so many as are given, unless it is to be quick."""
    told, seeds = changed(tree, change, SECOND), [seed + FAMILY for seed in main.seeds]
    if "seeds" in change and size != "quick":
        with within(f"{SECOND}: "):
            given = seeds_of(told["seeds"])
        seeds = [seeds[0] + seed for seed in given] if isinstance(told["seeds"], int) else [*given]
    found = look({**told, "seeds": seeds}, SECOND, builder)
    if common := sorted({*found.seeds} & {*main.seeds}):
        raise Mistake(f"{SECOND}: seed {common[0]} is one of the claim itself; give others, or how many, as seeds: 20")
    return found


def look(tree: Mapping[str, Any], name: str, builder: Builder) -> Look:
    """Make one look at a claim; what is wrong with it is said with its name."""
    with within("" if name == MAIN else f"{name}: "):
        seeds = seeds_of(tree["seeds"])
        if len(seeds) < 2:
            raise Mistake(f"seeds={len(seeds)}: one seed says nothing of chance; give two or more")
        return Look(
            runs={run: sweep(run, told, seeds) for run, told in tree["runs"].items()},
            trial=None if tree.get("trial") is None else trial(builder, tree["trial"]),
            seeds=seeds,
            quantity=quantity(builder, tree["quantity"]),
            expectation=expectations(builder, tree["expectation"]),
        )


@contextmanager
def within(name: str) -> Iterator[None]:
    """Say of a mistake where it is."""
    try:
        yield
    except Mistake as mistake:
        raise Mistake(f"{name}{mistake}") from None


def sweep(name: str, told: Any, seeds: Sequence[int]) -> Definition:
    """Read runs of a claim as a sweep."""
    if not isinstance(told, Mapping):
        raise Mistake(f"runs.{name}={spelled(told)}: it takes axes and base, as a sweep does")
    return from_yaml(name, {**steady(told), "seeds": list(seeds)})


def steady(told: Mapping[str, Any]) -> dict[str, Any]:
    """Let runs compute with one thread each, so that their bytes are the same however many are at work."""
    base = list(told.get("base") or [])
    return {**told, "base": base if any(split(str(text)).key == "threads" for text in base) else [*base, "threads=1"]}


def published(given: Any) -> Published:
    """Read where a claim was made."""
    fields = given if isinstance(given, Mapping) else {"paper": given}
    try:
        return Published.model_validate(fields)
    except ValidationError as error:
        raise refusal(error, Published, "source", fields) from None


def quantity(builder: Builder, given: Any) -> AbstractQuantity:
    """Build what is measured; a word alone names a column."""
    tree = {"_target_": COLUMN, "column": given} if isinstance(given, str) else given
    made = builder.component(mapping(tree, "quantity"), (AbstractQuantity,), "quantity")
    assert isinstance(made, AbstractQuantity)
    return made


def trial(builder: Builder, given: Any) -> AbstractTrial:
    """Build a trial of the claim's own."""
    made = builder.component(mapping(given, "trial"), (AbstractTrial,), "trial")
    assert isinstance(made, AbstractTrial)
    return made


def picture(builder: Builder, given: Any) -> AbstractPicture:
    """Build how the claim is drawn."""
    if given is None:
        return JudgedRows()
    made = builder.component(mapping(given, "picture"), (AbstractPicture,), "picture")
    assert isinstance(made, AbstractPicture)
    return made


def expectations(builder: Builder, given: Any) -> tuple[AbstractExpectation, ...]:
    """Build all that is expected."""
    found = []
    if given == []:
        raise Mistake("expectation=[]: nothing is expected, so nothing can be judged; give a rule or several")
    for part in given if isinstance(given, list) else [given]:
        made = builder.component(mapping(part, "expectation"), (AbstractExpectation,), "expectation")
        assert isinstance(made, AbstractExpectation)
        found.append(made)
    return tuple(found)


def mapping(given: Any, key: str) -> Mapping[str, Any]:
    """Refuse what is no component."""
    if not isinstance(given, Mapping):
        raise Mistake(f"{key}={spelled(given)}: it takes a component, such as {{_target_: ntkexp.claim.{key}.…, …}}")
    return given
