"""A sweep from a command line, or from its file.

On the command line, one value for a key is common to all runs, several make an axis, and an axis of the file is
replaced; a sweep that differs from its file gets a name of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ntkexp.config.as_text import spelled
from ntkexp.config.choices import Choices, read
from ntkexp.config.override import split
from ntkexp.config.validation import refusal
from ntkexp.mistake import Mistake, nearest
from ntkexp.records.fit import Fit
from ntkexp.sweep.axis_values import MOST, Value, values
from ntkexp.sweep.definition import Definition

KEYS = ("axes", "seeds", "base", "fits")


def define(words: Sequence[str], choices: Choices) -> Definition:
    """Read the sweep of a command line: the name of a file, or none, and KEY=VALUE."""
    if not words:
        raise Mistake(
            f"there is nothing to sweep; name one of {sweep_names(choices)}, or write such as model.width=64,128"
        )
    if "=" in words[0]:
        return replace(ad_hoc(words), words=tuple(words))
    file = from_file(words[0], choices)
    return replace(with_name(with_overrides(file, words[1:]), file), words=tuple(words))


def with_name(changed: Definition, file: Definition) -> Definition:
    """Give a sweep its file's own name for as long as the results are the file's."""
    name = file.name if changed.digest == file.digest else f"{file.name}-{changed.digest}"
    return replace(changed, name=name)


def ad_hoc(words: Sequence[str]) -> Definition:
    """Define a sweep without a file, called after its axes."""
    made = with_overrides(Definition("", {}, (0,), (), ()), words)
    axes = [*made.axes, *(["seed"] if len(made.seeds) > 1 else [])]
    return replace(made, name="-".join([*axes, made.digest]) if axes else f"run-{made.digest}")


def with_overrides(definition: Definition, words: Sequence[str]) -> Definition:
    """Say more about a sweep."""
    axes, seeds, base = dict(definition.axes), definition.seeds, list(definition.base)
    for override in map(split, words):
        key, given = override.key, override.value
        if key == "seed":
            seeds = whole_numbers(values("seed", given))
        elif given and (key in axes or len(values(key, given)) > 1):
            axes[key] = values(key, given)
        else:
            base = [*(text for text in base if split(text).key != key), str(override)]
    base = [text for text in base if split(text).key not in axes]
    fits = tuple(fit for fit in definition.fits if len(axes[fit.axis]) > 1)
    return replace(definition, axes=axes, seeds=seeds, base=tuple(base), fits=fits)


def from_file(name: str, choices: Choices) -> Definition:
    """Read the sweep of a file."""
    if name not in choices.options("sweep"):
        hint = nearest(name, choices.options("sweep"))
        raise Mistake(
            f"'{name}' is no sweep; choose from {sweep_names(choices)}, or write such as model.width=64,128{hint}"
        )
    file = choices.file("sweep", name)
    try:
        return from_yaml(name, read(file))
    except Mistake as mistake:
        raise Mistake(str(mistake) if str(file) in str(mistake) else f"{file}: {mistake}") from None


def sweep_names(choices: Choices) -> str:
    """Name the sweeps there are."""
    return ", ".join(choices.options("sweep"))


def from_yaml(name: str, tree: Mapping[str, Any]) -> Definition:
    """Read a sweep from what its file holds.

    >>> len(from_yaml("a", {"axes": {"model.width": "8..9"}, "seeds": 3}).points)
    6
    """
    for key in tree:
        if key not in KEYS:
            raise Mistake(f"{key}: a sweep has no such key; it has {', '.join(KEYS)}{nearest(str(key), KEYS)}")
    given = tree.get("axes") or {}
    if not isinstance(given, Mapping):
        raise Mistake(f"axes={spelled(given)}: it takes KEY: VALUES lines, such as 'model.width: [64, 128]'")
    axes = {str(key): values(str(key), item) for key, item in given.items()}
    base = list_of("base", tree.get("base") or [])
    fits = tuple(fit_of(item) for item in list_of("fits", tree.get("fits") or []))
    made = Definition(name, axes, seeds_of(tree.get("seeds", 1)), tuple(map(str, base)), fits)
    refuse_contradictions(made)
    return made


def list_of(key: str, value: Any) -> list[Any]:
    """Refuse whatever is no list."""
    if not isinstance(value, list):
        raise Mistake(f"{key}={spelled(value)}: it takes a list")
    return value


def seeds_of(given: object) -> tuple[int, ...]:
    """Read seeds from a count, a list, or a range."""
    if isinstance(given, int) and not isinstance(given, bool):
        if given > MOST:
            raise Mistake(f"seeds={given}: {MOST} are the most")
        given = list(range(given))
    return whole_numbers(values("seeds", given))


def whole_numbers(given: tuple[Value, ...]) -> tuple[int, ...]:
    """Refuse seeds that are none."""
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Mistake(f"seed={spelled(value)}: it takes whole numbers ≥ 0, such as seed=0..4")
    return given


def fit_of(given: object) -> Fit:
    """Read one of `fits`."""
    fields = given if isinstance(given, Mapping) else {}
    try:
        return Fit.model_validate(fields)
    except ValidationError as error:
        raise refusal(error, Fit, "fits", fields) from None


def refuse_contradictions(sweep: Definition) -> None:
    """Refuse a key that is given twice, or a fit against what does not vary."""
    common = [split(text).key for text in sweep.base]
    for key in common:
        if key in sweep.axes:
            raise Mistake(f"base: {key} is an axis of this sweep as well; give it in one place")
    if "seed" in {*sweep.axes, *common}:
        raise Mistake("seed is given as an axis or in base; write 'seeds: 5', or a list of them")
    for fit in sweep.fits:
        if fit.axis not in sweep.axes:
            raise Mistake(f"fits: {fit.axis} is no axis of this sweep{nearest(fit.axis, sweep.axes)}")
        if fit.exponent is None and fit.bound is not None:
            raise Mistake(
                f"fits: {fit.quantity} has bound={fit.bound} and no exponent; give the exponent that bounds it"
            )
