"""What a sweep is: a YAML file in `configs/sweep/`, or what the command line says. The values of its axes:

    YAML             [64, 128]    {from: 32, to: 1024, count: 6, scale: log}    or as on the command line
    command line     64,128,256    0..4 (whole numbers)    0..1:5 (equal steps)    32..1024:6:log (equal ratios)

Between whole ends lie whole numbers: write 1.0..64 where fractions are meant.

>>> read_values("model.width", "32..256:4:log"), read_values("init.alpha", {"from": 0.0, "to": 1, "count": 3})
((32, 64, 128, 256), (0.0, 0.5, 1.0))
>>> read_values("path.rule", "[secant],[left,secant]"), read_values("seed", "0..2,7")
((['secant'], ['left', 'secant']), (0, 1, 2, 7))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from typing import Any, TypeAlias

import yaml
from pydantic import ValidationError

from ntkexp.config.choices import Choices
from ntkexp.config.compose import split
from ntkexp.config.field_types import refusal
from ntkexp.config.plain_yaml import parsed, read_yaml, spell_value
from ntkexp.mistake import Mistake, nearest
from ntkexp.records.folder import CIRCUMSTANCES, command
from ntkexp.records.sweep import Fit, resolved

Value: TypeAlias = (
    Any  # what YAML can write on one line: a number, text, null, or a list or mapping of these
)

NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(?::([0-9]+)(?::(\w+))?)?")
MOST = 10**5  # values of a key, and runs of a sweep
SCALES = ("linear", "log")
KEYS = ("from", "to", "count", "scale")
OPENING, CLOSING, QUOTES = "([{", ")]}", "'\""


def read_values(key: str, given: object) -> tuple[Value, ...]:
    """Read the values that are given for a key; none may stand there twice."""
    match given:
        case Mapping():
            found = read_range(key, given)
        case list() | tuple():
            found = tuple(given)
        case str():
            found = tuple(
                value for part in split_at_commas(given) for value in read_value(key, part)
            )
        case _:
            found = (given,)
    if not found:
        raise Mistake(f"{key} has no values; write, for example, {key}: [64, 128]")
    twice = [value for k, value in enumerate(found) if value in found[:k]]
    if twice:
        raise Mistake(f"{key}: {spell_value(twice[0])} is given twice; give each value once")
    return found


def split_at_commas(text: str) -> Iterator[str]:
    """Split a text at the commas outside of brackets and quotes.

    >>> list(split_at_commas("[a,b],'c,d',e"))
    ['[a,b]', "'c,d'", 'e']
    """
    depth, quote, begun = 0, "", ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield begun.strip()
            begun = ""
            continue
        if letter in QUOTES:
            quote = "" if letter == quote else quote or letter
        elif not quote:
            depth += (letter in OPENING) - (letter in CLOSING)
        begun += letter
    yield begun.strip()


def read_value(key: str, text: str) -> tuple[Value, ...]:
    if not text:
        raise Mistake(f"{key}: a value is missing at a comma; write, for example, {key}=64,128")
    match = RANGE.fullmatch(text)
    if match is None:
        return (read_plain(text),)
    start, stop = read_plain(match[1]), read_plain(match[2])
    if match[3] is None:
        if isinstance(start, float) or isinstance(stop, float):
            raise Mistake(
                f"{key}={text}: between fractions there must be a count; write {key}={text}:5"
            )
        return space(key, start, stop, stop - start + 1, "linear")
    return space(key, start, stop, int(match[3]), match[4] or "linear")


def read_plain(text: str) -> Value:
    """Read a value as YAML would have it, and numbers as Python would.

    >>> read_plain("1e-3"), read_plain("null"), read_plain("relu"), read_plain("[a")
    (0.001, None, 'relu', '[a')
    """
    for kind in (int, float):
        if re.fullmatch(NUMBER, text):
            try:
                return kind(text)
            except ValueError:
                continue
    try:
        return parsed(text)
    except yaml.YAMLError:
        return text


def read_range(key: str, given: Mapping[Any, Any]) -> tuple[Value, ...]:
    for name in given:
        if name not in KEYS:
            raise Mistake(
                f"{key}: a range has no '{name}'; it has {', '.join(KEYS)}{nearest(str(name), KEYS)}"
            )
    for name in KEYS[:3]:
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(
            value, int if name == "count" else int | float
        ):
            kind = "a whole number" if name == "count" else "a number"
            raise Mistake(f"{key}: the range's '{name}' is {spell_value(value)}; it takes {kind}")
    return space(key, given["from"], given["to"], given["count"], str(given.get("scale", "linear")))


def space(key: str, start: float, stop: float, count: int, scale: str) -> tuple[Value, ...]:
    """Space `count` numbers from one to the other, by equal steps or equal ratios."""
    if scale not in SCALES:
        raise Mistake(
            f"{key}: the scale of a range is linear or log, not '{scale}'{nearest(scale, SCALES)}"
        )
    if start > stop:
        raise Mistake(
            f"{key}: the range from {start} to {stop} is empty; write it as {stop}..{start}"
        )
    if count < 1 or (count == 1) != (start == stop):
        raise Mistake(
            f"{key}: {count} values cannot reach from {start} to {stop}; give a count of at least 2"
        )
    if count > MOST:
        raise Mistake(
            f"{key}: from {start} to {stop} there would be {count} values; {MOST} are the most"
        )
    if scale == "log" and start <= 0:
        raise Mistake(
            f"{key}: equal ratios cannot start from {start}; give a number above 0, or scale: linear"
        )
    shares = [k / (count - 1) for k in range(count)] if count > 1 else [0.0]
    between = [
        start * (stop / start) ** u if scale == "log" else start + (stop - start) * u
        for u in shares
    ]
    if isinstance(start, float) or isinstance(stop, float):
        return tuple(
            float(f"{value:.12g}") for value in between
        )  # 0.1 … 10 should meet 1, not 0.9999999999999999
    whole = tuple(round(value) for value in between)
    if len(set(whole)) < count:
        raise Mistake(
            f"{key}: there are no {count} different whole numbers like that from {start} to {stop}"
        )
    return whole


# --- What a sweep is: a YAML file in `configs/sweep/`, or what the command line says.
#
#     axes:                  each KEY with its values (`ntkexp.sweep.definition`); runs are made at all combinations
#       model.width: {from: 32, to: 1024, count: 6, scale: log}
#     seeds: 5               at each point: a count, or a list
#     base: [steps=300]      what all runs have in common
#     fits:                  which number is a power of which axis, with the theory's exponent, or null
#       - {quantity: drift, axis: model.width, exponent: -1.0, margin: 0.1}      to be met within the margin
#       - {quantity: drift, axis: model.width, exponent: -0.5, bound: upper}     at most this, and the margin


@dataclass(frozen=True)
class Point:
    """A combination of values, and a seed."""

    values: Mapping[str, Value]
    seed: int


@dataclass(frozen=True)
class Definition:
    """A sweep as it was asked for."""

    name: str
    axes: Mapping[str, tuple[Value, ...]]
    seeds: tuple[int, ...]
    base: tuple[str, ...]
    fits: tuple[Fit, ...]
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # that repeat it, as they repeat a run of it

    @property
    def command(self) -> str:
        return command("sweep", self.words, self.options)

    @property
    def points(self) -> tuple[Point, ...]:
        """Every combination with every seed; the last axis varies faster than the first, seeds fastest."""
        combined = [
            dict(zip(self.axes, chosen, strict=True)) for chosen in product(*self.axes.values())
        ]
        return tuple(Point(chosen, seed) for chosen in combined for seed in self.seeds)

    def overrides(self, point: Point) -> tuple[str, ...]:
        """The run at a point, as `ntkexp train` takes it."""
        return (
            *self.base,
            *(f"{key}={spell_value(value)}" for key, value in point.values.items()),
            f"seed={point.seed}",
        )

    @property
    def digest(self) -> str:
        """8 hexadecimal digits of what decides the results."""
        counting = [text for text in self.base if split(text).key not in CIRCUMSTANCES]
        content = resolved(self.axes, self.seeds, counting, self.fits)
        return sha256(json.dumps(content).encode()).hexdigest()[:8]


# --- A sweep from a command line, or from its file.
#
# On the command line, one value for a key is common to all runs, several make an axis, and an axis of the file is
# replaced; a sweep that differs from its file gets a name of its own.


SWEEP_KEYS = ("axes", "seeds", "base", "fits")


def define(words: Sequence[str], choices: Choices) -> Definition:
    """Read the sweep of a command line: the name of a file, or none, and KEY=VALUE."""
    names = choices.options("sweep")
    if not words:
        raise Mistake(
            f"there is nothing to sweep; name one of {', '.join(names)}, or write, for example, model.width=64,128"
        )
    if "=" in words[0]:  # without a file, called after its axes
        made = with_overrides(Definition("", {}, (0,), (), ()), words)
        axes = [*made.axes, *(["seed"] if len(made.seeds) > 1 else [])]
        return replace(
            made,
            name="-".join([*axes, made.digest]) if axes else f"run-{made.digest}",
            words=tuple(words),
        )
    if words[0] not in names:
        raise Mistake(
            f"'{words[0]}' is not a sweep; choose from {', '.join(names)}, or write, for example, model.width=64,128"
            f"{nearest(words[0], names)}"
        )
    path = choices.file("sweep", words[0])
    try:
        file = from_yaml(words[0], read_yaml(path))
    except Mistake as mistake:
        raise Mistake(str(mistake) if str(path) in str(mistake) else f"{path}: {mistake}") from None
    made = with_overrides(file, words[1:])
    # called as its file for as long as the results are the file's
    name = file.name if made.digest == file.digest else f"{file.name}-{made.digest}"
    return replace(made, name=name, words=tuple(words))


def with_overrides(definition: Definition, words: Sequence[str]) -> Definition:
    """The sweep with more said about it."""
    axes, seeds, base = dict(definition.axes), definition.seeds, list(definition.base)
    for override in map(split, words):
        key, given = override.key, override.value
        if key == "seed":
            seeds = whole_numbers(read_values("seed", given))
        elif given and (key in axes or len(read_values(key, given)) > 1):
            axes[key] = read_values(key, given)
        else:
            base = [*(text for text in base if split(text).key != key), str(override)]
    base = [text for text in base if split(text).key not in axes]
    fits = tuple(fit for fit in definition.fits if len(axes[fit.axis]) > 1)
    return replace(definition, axes=axes, seeds=seeds, base=tuple(base), fits=fits)


def from_yaml(name: str, tree: Mapping[str, Any]) -> Definition:
    """Read a sweep from what its file holds.

    >>> len(from_yaml("a", {"axes": {"model.width": "8..9"}, "seeds": 3}).points)
    6
    """
    for key in tree:
        if key not in SWEEP_KEYS:
            raise Mistake(
                f"{key}: a sweep has no such key; it has {', '.join(SWEEP_KEYS)}{nearest(str(key), SWEEP_KEYS)}"
            )
    given = tree.get("axes") or {}
    if not isinstance(given, Mapping):
        raise Mistake(
            f"axes={spell_value(given)}: it takes KEY: VALUES lines, such as 'model.width: [64, 128]'"
        )
    axes = {str(key): read_values(str(key), item) for key, item in given.items()}
    base = tuple(map(str, list_of("base", tree.get("base") or [])))
    fits = []
    for item in list_of("fits", tree.get("fits") or []):
        fields = item if isinstance(item, Mapping) else {}
        try:
            fits.append(Fit.model_validate(fields))
        except ValidationError as error:
            raise refusal(error, Fit, "fits", fields) from None
    sweep = Definition(name, axes, seeds_of(tree.get("seeds", 1)), base, tuple(fits))
    refuse_contradictions(sweep)
    return sweep


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
            raise Mistake(
                f"fits: {fit.axis} is not an axis of this sweep{nearest(fit.axis, sweep.axes)}"
            )
        if fit.exponent is None and fit.bound is not None:
            raise Mistake(
                f"fits: {fit.quantity} has bound={fit.bound} and no exponent; give the exponent that bounds it"
            )


def list_of(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Mistake(f"{key}={spell_value(value)}: it takes a list")
    return value


def seeds_of(given: object) -> tuple[int, ...]:
    """Read seeds from a count, a list, or a range."""
    if isinstance(given, int) and not isinstance(given, bool):
        if given > MOST:
            raise Mistake(f"seeds={given}: {MOST} are the most")
        given = list(range(given))
    return whole_numbers(read_values("seeds", given))


def whole_numbers(given: tuple[Value, ...]) -> tuple[int, ...]:
    """Refuse seeds that are none."""
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Mistake(
                f"seed={spell_value(value)}: it takes whole numbers ≥ 0, such as seed=0..4"
            )
    return given
