"""The values of an axis.

    YAML             [64, 128]    {from: 32, to: 1024, count: 6, scale: log}    or as on the command line
    command line     64,128,256    0..4 (whole numbers)    0..1:5 (equal steps)    32..1024:6:log (equal ratios)

Between whole ends lie whole numbers: write 1.0..64 where fractions are meant.

>>> values("model.width", "32..256:4:log"), values("init.alpha", {"from": 0.0, "to": 1, "count": 3})
((32, 64, 128, 256), (0.0, 0.5, 1.0))
>>> values("path.rule", "[secant],[left,secant]"), values("seed", "0..2,7")
((['secant'], ['left', 'secant']), (0, 1, 2, 7))
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import yaml

from ntkexp.config.as_text import spelled
from ntkexp.config.document import parsed
from ntkexp.mistake import Mistake, nearest

Value: TypeAlias = Any  # what YAML can write on one line: a number, text, null, or a list or mapping of these

NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})(?::([0-9]+)(?::(\w+))?)?")
MOST = 10**5  # values of a key, and runs of a sweep
SCALES = ("linear", "log")
KEYS = ("from", "to", "count", "scale")
OPENING, CLOSING, QUOTES = "([{", ")]}", "'\""


def values(key: str, given: object) -> tuple[Value, ...]:
    """Read the values that are given for a key; none may stand there twice."""
    match given:
        case Mapping():
            found = read_range(key, given)
        case list() | tuple():
            found = tuple(given)
        case str():
            found = tuple(value for part in split_at_commas(given) for value in read_value(key, part))
        case _:
            found = (given,)
    if not found:
        raise Mistake(f"{key} is given no values; write such as {key}: [64, 128]")
    twice = [value for k, value in enumerate(found) if value in found[:k]]
    if twice:
        raise Mistake(f"{key}: {spelled(twice[0])} is given twice; give each value once")
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
    """Read a range, or a single value."""
    if not text:
        raise Mistake(f"{key}: a value is missing beside a comma; write such as {key}=64,128")
    found = RANGE.fullmatch(text)
    if found is None:
        return (read_plain(text),)
    start, stop = read_plain(found[1]), read_plain(found[2])
    if found[3] is None:
        if isinstance(start, float) or isinstance(stop, float):
            raise Mistake(f"{key}={text}: between fractions there must be a count; write {key}={text}:5")
        return space(key, start, stop, stop - start + 1, "linear")
    return space(key, start, stop, int(found[3]), found[4] or "linear")


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
        found: Value = parsed(text)
        return found
    except yaml.YAMLError:
        return text


def read_range(key: str, given: Mapping[Any, Any]) -> tuple[Value, ...]:
    """Read a range as YAML describes it."""
    for name in given:
        if name not in KEYS:
            raise Mistake(f"{key}: a range has no '{name}'; it has {', '.join(KEYS)}{nearest(str(name), KEYS)}")
    for name in KEYS[:3]:
        value = given.get(name)
        if isinstance(value, bool) or not isinstance(value, int if name == "count" else int | float):
            kind = "a whole number" if name == "count" else "a number"
            raise Mistake(f"{key}: the range's '{name}' is {spelled(value)}; it takes {kind}")
    return space(key, given["from"], given["to"], given["count"], str(given.get("scale", "linear")))


def space(key: str, start: float, stop: float, count: int, scale: str) -> tuple[Value, ...]:
    """Space so many numbers from one to the other, by equal steps or equal ratios."""
    if scale not in SCALES:
        raise Mistake(f"{key}: the scale of a range is linear or log, not '{scale}'{nearest(scale, SCALES)}")
    refuse_contradictions(key, start, stop, count, scale)
    shares = [k / (count - 1) for k in range(count)] if count > 1 else [0.0]
    between = [start * (stop / start) ** u if scale == "log" else start + (stop - start) * u for u in shares]
    if isinstance(start, float) or isinstance(stop, float):
        return tuple(float(f"{value:.12g}") for value in between)  # 0.1 … 10 should meet 1, not 0.9999999999999999
    whole = tuple(round(value) for value in between)
    if len(set(whole)) < count:
        raise Mistake(f"{key}: there are no {count} different whole numbers like that from {start} to {stop}")
    return whole


def refuse_contradictions(key: str, start: float, stop: float, count: int, scale: str) -> None:
    """Refuse a range that holds nothing, or not what it says."""
    if start > stop:
        raise Mistake(f"{key}: the range from {start} to {stop} is empty; write it as {stop}..{start}")
    if count < 1 or (count == 1) != (start == stop):
        raise Mistake(f"{key}: {count} values cannot reach from {start} to {stop}; give a count of at least 2")
    if count > MOST:
        raise Mistake(f"{key}: from {start} to {stop} there would be {count} values; {MOST} are the most")
    if scale == "log" and start <= 0:
        raise Mistake(f"{key}: equal ratios cannot start from {start}; give a number above 0, or scale: linear")
