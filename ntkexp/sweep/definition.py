"""The definition of a sweep, from a YAML file in `configs/sweep/` or
from a command line.

The values of an axis are written as:

    only in YAML    [64, 128]    {from: 32, to: 1024, count: 6, scale: log}
    in both         64,128,256
    in both         0..4             all integers from 0 to 4
    in both         0..1.0:5         5 values with equal steps
    in both         32..1024:6:log   6 values with equal ratios

A range between two integers contains only integers. Write 1.0..64:9 for fractions.

>>> read_values("model.width", "32..256:4:log")
(32, 64, 128, 256)
>>> read_values("init.alpha", {"from": 0.0, "to": 1, "count": 3})
(0.0, 0.5, 1.0)
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

Value: TypeAlias = Any
"""A value that fits on one line of YAML: a number, string, null,
or a list or mapping of these."""

NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(?::([0-9]+)(?::(\w+))?)?")
MAX_RUNS = 10**5
"""The maximal number of values of a key, and of runs of a sweep."""

SCALES = ("linear", "log")
RANGE_KEYS = ("from", "to", "count", "scale")
OPENING = "([{"
CLOSING = ")]}"
QUOTES = "'\""


def read_values(key: str, written: object) -> tuple[Value, ...]:
    """Return the values of a key. Raise if there are none,
    or if a value is repeated."""
    match written:
        case Mapping():
            values = read_range(key, written)
        case list() | tuple():
            values = tuple(written)
        case str():
            parts = [read_value(key, part) for part in split_at_commas(written)]
            values = tuple(value for part in parts for value in part)
        case _:
            values = (written,)
    if not values:
        raise Mistake(f"{key} has no values; write, for example, {key}: [64, 128]")
    for k, value in enumerate(values):
        if value in values[:k]:
            raise Mistake(
                f"{key}: {spell_value(value)} is given twice; give each value once"
            )
    return values


def split_at_commas(text: str) -> Iterator[str]:
    """Split a text at commas outside brackets and quotes.

    >>> list(split_at_commas("[a,b],'c,d',e"))
    ['[a,b]', "'c,d'", 'e']
    """
    depth = 0
    quote = ""
    part = ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield part.strip()
            part = ""
            continue
        if letter in QUOTES:
            quote = "" if letter == quote else quote or letter
        elif not quote:
            depth += (letter in OPENING) - (letter in CLOSING)
        part += letter
    yield part.strip()


def read_value(key: str, text: str) -> tuple[Value, ...]:
    if not text:
        raise Mistake(
            f"{key}: a value is missing at a comma; write, for example, {key}=64,128"
        )
    match = RANGE.fullmatch(text)
    if match is None:
        return (read_plain(text),)
    start = read_plain(match[1])
    stop = read_plain(match[2])
    if match[3] is None:
        if isinstance(start, float) or isinstance(stop, float):
            raise Mistake(
                f"{key}={text}: between fractions there must be a count; write {key}={text}:5"
            )
        return space(key, start, stop, stop - start + 1, "linear")
    return space(key, start, stop, int(match[3]), match[4] or "linear")


def read_plain(text: str) -> Value:
    """Parse a number by the rules of Python, and any other value by the rules of YAML.

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


def read_range(key: str, fields: Mapping[Any, Any]) -> tuple[Value, ...]:
    for name in fields:
        if name not in RANGE_KEYS:
            hint = nearest(str(name), RANGE_KEYS)
            raise Mistake(
                f"{key}: a range has no '{name}'; it has {', '.join(RANGE_KEYS)}{hint}"
            )
    for name in RANGE_KEYS[:3]:
        value = fields.get(name)
        allowed = int if name == "count" else int | float
        if isinstance(value, bool) or not isinstance(value, allowed):
            kind = "a whole number" if name == "count" else "a number"
            raise Mistake(
                f"{key}: the range's '{name}' is {spell_value(value)}; it takes {kind}"
            )
    scale = str(fields.get("scale", "linear"))
    return space(key, fields["from"], fields["to"], fields["count"], scale)


def space(
    key: str, start: float, stop: float, count: int, scale: str
) -> tuple[Value, ...]:
    """Return `count` numbers from `start` to `stop`,
    with equal steps or equal ratios."""
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
    if count > MAX_RUNS:
        raise Mistake(
            f"{key}: from {start} to {stop} there would be {count} values; {MAX_RUNS} are the most"
        )
    if scale == "log" and start <= 0:
        raise Mistake(
            f"{key}: equal ratios cannot start from {start}; give a number above 0, or "
            "scale: linear"
        )
    shares = [k / (count - 1) for k in range(count)] if count > 1 else [0.0]
    if scale == "log":
        values = [start * (stop / start) ** u for u in shares]
    else:
        values = [start + (stop - start) * u for u in shares]
    if isinstance(start, float) or isinstance(stop, float):
        # Round to 12 digits, so that 0.1 … 10 contains 1 instead of 0.9999999999999999.
        return tuple(float(f"{value:.12g}") for value in values)
    integers = tuple(round(value) for value in values)
    if len(set(integers)) < count:
        raise Mistake(
            f"{key}: there are no {count} different whole numbers like that from {start} to {stop}"
        )
    return integers


# --- The file of a sweep:
#
#     axes:                  values of each KEY; there are runs for all combinations
#       model.width: {from: 32, to: 1024, count: 6, scale: log}
#     seeds: 5               the seeds of each combination: a number of seeds, or a list
#     base: [steps=300]      overrides of all runs
#     fits:                  power laws, with the exponent predicted by theory, or null
#       - {quantity: kernel_change, axis: model.width, exponent: -1.0, margin: 0.1}   −1 ± 0.1
#       - {quantity: kernel_change, axis: model.width, exponent: -0.5, bound: upper}  at most −0.5


@dataclass(frozen=True)
class Point:
    """A combination of axis values, and a seed."""

    values: Mapping[str, Value]
    seed: int


@dataclass(frozen=True)
class Definition:
    """A sweep: its axes, seeds, common overrides and fits."""

    name: str
    axes: Mapping[str, tuple[Value, ...]]
    seeds: tuple[int, ...]
    base: tuple[str, ...]
    fits: tuple[Fit, ...]
    arguments: tuple[str, ...] = ()  # the arguments of the sweep's command line
    # options of a command that repeats the sweep or one of its runs
    options: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return command("sweep", self.arguments, self.options)

    @property
    def points(self) -> tuple[Point, ...]:
        """All combinations of axis values and seeds. Seeds vary fastest,
        and the first axis slowest."""
        combinations = [
            dict(zip(self.axes, values, strict=True))
            for values in product(*self.axes.values())
        ]
        return tuple(
            Point(values, seed) for values in combinations for seed in self.seeds
        )

    def overrides(self, point: Point) -> tuple[str, ...]:
        """Return the overrides of the run at a point,
        as arguments of `ntkexp train`."""
        return (
            *self.base,
            *(f"{key}={spell_value(value)}" for key, value in point.values.items()),
            f"seed={point.seed}",
        )

    @property
    def digest(self) -> str:
        """The first 8 hexadecimal digits of the SHA-256 of all settings
        that affect the results."""
        base = [text for text in self.base if split(text).key not in CIRCUMSTANCES]
        content = resolved(self.axes, self.seeds, base, self.fits)
        return sha256(json.dumps(content).encode()).hexdigest()[:8]


# --- A sweep from a command line, or from its file.
#
# On the command line, a key with one value is common to all runs, and a key with
# several values is an axis. A key on the command line replaces the same key of the
# file. If such a key changes the results of the sweep, a digest is appended to the
# sweep's name.


SWEEP_KEYS = ("axes", "seeds", "base", "fits")


def define(arguments: Sequence[str], choices: Choices) -> Definition:
    """Return the sweep of a command line: the name of a file, overrides,
    or both in this order."""
    names = choices.options("sweep")
    if not arguments:
        raise Mistake(
            f"there is nothing to sweep; name one of {', '.join(names)}, or write, for example, "
            "model.width=64,128"
        )
    if "=" in arguments[0]:  # the sweep has no file, so it is named after its axes
        sweep = with_overrides(Definition("", {}, (0,), (), ()), arguments)
        axes = list(sweep.axes)
        if len(sweep.seeds) > 1:
            axes.append("seed")
        name = "-".join([*(axes or ["run"]), sweep.digest])
        return replace(sweep, name=name, arguments=tuple(arguments))
    if arguments[0] not in names:
        raise Mistake(
            f"'{arguments[0]}' is not a sweep; choose from {', '.join(names)}, or write, for example, "
            f"model.width=64,128{nearest(arguments[0], names)}"
        )
    path = choices.file("sweep", arguments[0])
    try:
        file = from_yaml(arguments[0], read_yaml(path))
    except Mistake as mistake:
        text = str(mistake)
        raise Mistake(text if str(path) in text else f"{path}: {text}") from None
    sweep = with_overrides(file, arguments[1:])
    # keep the name of the file if the results are the same
    name = file.name if sweep.digest == file.digest else f"{file.name}-{sweep.digest}"
    return replace(sweep, name=name, arguments=tuple(arguments))


def with_overrides(definition: Definition, arguments: Sequence[str]) -> Definition:
    """Return the sweep with the overrides of a command line. Drop fits along axes that
    then have only one value."""
    axes = dict(definition.axes)
    seeds = definition.seeds
    base = list(definition.base)
    for override in map(split, arguments):
        key = override.key
        value = override.value
        if key == "seed":
            seeds = whole_numbers(read_values("seed", value))
        elif value and (key in axes or len(read_values(key, value)) > 1):
            axes[key] = read_values(key, value)
        else:
            base = [*(text for text in base if split(text).key != key), str(override)]
    base = [text for text in base if split(text).key not in axes]
    fits = tuple(fit for fit in definition.fits if len(axes[fit.axis]) > 1)
    return replace(definition, axes=axes, seeds=seeds, base=tuple(base), fits=fits)


def from_yaml(name: str, tree: Mapping[str, Any]) -> Definition:
    """Return the sweep that the content of a YAML file defines.

    >>> len(from_yaml("a", {"axes": {"model.width": "8..9"}, "seeds": 3}).points)
    6
    """
    for key in tree:
        if key not in SWEEP_KEYS:
            hint = nearest(str(key), SWEEP_KEYS)
            raise Mistake(
                f"{key}: a sweep has no such key; it has {', '.join(SWEEP_KEYS)}{hint}"
            )
    written = tree.get("axes") or {}
    if not isinstance(written, Mapping):
        raise Mistake(
            f"axes={spell_value(written)}: it takes KEY: VALUES lines, such as "
            "'model.width: [64, 128]'"
        )
    axes = {str(key): read_values(str(key), item) for key, item in written.items()}
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
    """Raise if a key occurs twice, or if a fit names an axis that
    the sweep does not have."""
    common = [split(text).key for text in sweep.base]
    for key in common:
        if key in sweep.axes:
            raise Mistake(
                f"base: {key} is an axis of this sweep as well; give it in one place"
            )
    if "seed" in {*sweep.axes, *common}:
        raise Mistake(
            "seed is given as an axis or in base; write 'seeds: 5', or a list of them"
        )
    for fit in sweep.fits:
        if fit.axis not in sweep.axes:
            raise Mistake(
                f"fits: {fit.axis} is not an axis of this sweep{nearest(fit.axis, sweep.axes)}"
            )
        if fit.exponent is None and fit.bound is not None:
            raise Mistake(
                f"fits: {fit.quantity} has bound={fit.bound} and no exponent; give the exponent "
                "that bounds it"
            )


def list_of(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Mistake(f"{key}={spell_value(value)}: it takes a list")
    return value


def seeds_of(written: object) -> tuple[int, ...]:
    """Return the seeds. A number n means 0, 1, …, n − 1. A list or a range means the
    seeds in it."""
    if isinstance(written, int) and not isinstance(written, bool):
        if written > MAX_RUNS:
            raise Mistake(f"seeds={written}: {MAX_RUNS} are the most")
        written = list(range(written))
    return whole_numbers(read_values("seeds", written))


def whole_numbers(values: tuple[Value, ...]) -> tuple[int, ...]:
    """Return the values. Raise if one is not an integer ≥ 0."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Mistake(
                f"seed={spell_value(value)}: it takes whole numbers ≥ 0, such as seed=0..4"
            )
    return values
