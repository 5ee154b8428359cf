"""Format numbers, names and tables as plain text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

MISSING = "–"
LONGEST_NAME = 60
ODD_LETTERS = "\u200c\u200d\xa0\u202f\u3000"
"""Characters that are not replaced, although Python
calls them unprintable: joiners and blanks."""
SECONDS_PER_DAY = 86_400.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY


def short(number: float | None) -> str:
    """Format a number with three significant digits.

    Numbers outside [1e-3, 1e4) have an exponent, and only one or two digits.

    >>> [short(x) for x in (0.1234, 42.0, 0.99994, 3.7e-15, 0.0, 123456.0, None)]
    ['0.123', '42', '1', '4e-15', '0', '1.2e5', '–']
    """
    if number is None or math.isnan(number):
        return MISSING
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    size = abs(number)
    if size == 0 or 1e-3 <= size < 999.5:
        return f"{number:.3g}"
    if 999.5 <= size < 1e4:
        return f"{number:.0f}"
    decimals = 0 if size < 1e-3 else 1
    digits, exponent = f"{number:.{decimals}e}".split("e")
    return f"{digits}e{int(exponent)}"


def share(number: float) -> str:
    """Format a relative error, for texts such as 'misses by 12 %'.

    >>> [share(x) for x in (0.12, 0.0034, 3e-6, 1.5, 40.0)]
    ['12 %', '0.34 %', '3e-6', '150 %', '40 times what was learned']
    """
    if number >= 10:
        return f"{short(number)} times what was learned"
    return percent(number) if number >= 1e-3 else short(number)


def percent(number: float) -> str:
    """Format a fraction in per cent with two significant digits.

    >>> [percent(x) for x in (0.0312, 0.5, 1.234, 1e-7)]
    ['3.1 %', '50 %', '120 %', '1e-5 %']
    """
    hundredths = float(f"{100 * number:.2g}")
    return f"{short(hundredths)} %"


def rate(share: float | None) -> str:
    """Format a fraction in per cent with one decimal, as papers do.

    >>> rate(0.98765), rate(None)
    ('98.8 %', '–')
    """
    return MISSING if share is None else f"{100 * share:.1f} %"


def aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> str:
    """Format a table with aligned columns. `right` is True for columns aligned
    to the right.

    >>> print(aligned(("machine", "error"), (("secant", "4e-15"), ("left", "0.12")), (False, True)))
    machine  error
    secant   4e-15
    left      0.12
    """
    table = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def printable(text: str) -> str:
    r"""Replace control characters and direction marks by escape sequences.

    >>> printable("5 µm"), printable("a\n\x1b[31mb\u202e")
    ('5 µm', 'a\\n\\x1b[31mb\\u202e')
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in ODD_LETTERS else repr(c)[1:-1] for c in text
    )


def printable_lines(text: str) -> str:
    r"""Apply `printable` to every line, and keep the line breaks.

    >>> printable_lines("a\n\x1b[31mb")
    'a\n\\x1b[31mb'
    """
    return "\n".join(map(printable, text.split("\n")))


DIGEST_LENGTH = 16  # hexadecimal digits


def is_digest(name: str) -> bool:
    """Return True if a name looks like a digest.

    >>> is_digest("4f2a09c81b7d3e65"), is_digest("17")
    (True, False)
    """
    return len(name) == DIGEST_LENGTH and not name.strip("0123456789abcdef")


def numbered(index: int, name: str) -> str:
    """Return the name of an example. If the name is a digest, return the index along
    the axis `example` instead.

    >>> numbered(17, "4f2a09c81b7d3e65"), numbered(17, "cat")
    ('#17', 'cat')
    """
    if is_digest(name):
        return f"#{index}"
    return name


def shown_name(name: str) -> str:
    r"""Shorten a name from the data, and escape control characters and line breaks.

    >>> shown_name("two\nlines"), shown_name(""), shown_name("n" * 99)[-2:]
    ('two\\nlines', '""', 'n…')
    """
    return fitting(printable(name) or '""', LONGEST_NAME)


def fitting(text: str, longest: int) -> str:
    """Shorten a text to at most `longest` letters.

    >>> fitting("boot", 11), fitting("ankle boot (left)", 11)
    ('boot', 'ankle boot…')
    """
    if len(text) <= longest:
        return text
    return f"{text[: longest - 1]}…"


SPREADSHEET_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def as_cell(text: str) -> str:
    """Escape a text for a CSV cell, so that spreadsheets do not run it as a formula.

    If the text could be a formula, put an apostrophe before it, as users of
    spreadsheets do. Numbers stay unchanged.

    >>> [as_cell(text) for text in ("=cmd|x", "-1.5", "@a", "'=b", "left", "")]
    ["'=cmd|x", '-1.5', "'@a", "''=b", 'left', '']
    """
    return (
        f"'{text}" if SPREADSHEET_FORMULA.match(text) and not is_number(text) else text
    )


def of_cell(cell: str) -> str:
    """Invert `as_cell`.

    >>> [of_cell(as_cell(text)) for text in ("=cmd|x", "-1.5", "''=b", "'b'")]
    ['=cmd|x', '-1.5', "''=b", "'b'"]
    """
    return (
        cell[1:] if cell.startswith("'") and SPREADSHEET_FORMULA.match(cell) else cell
    )


def is_number(text: str) -> bool:
    """Return True if a text is a number, such as -1e-3,
    without blanks or underscores."""
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip() and "_" not in text


def spoken(machine: str) -> str:
    """Format the name of a kernel machine in words.

    >>> spoken("frozen_start"), spoken("rbf_identity")
    ('frozen start', 'RBF identity')
    """
    return machine.replace("_", " ").replace("rbf", "RBF").replace("nngp", "NNGP")


def listed(names: Sequence[str]) -> str:
    """Join names with commas and a final 'and'.

    >>> listed(["this", "that", "the other"])
    'this, that and the other'
    """
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def counted(count: int, noun: str) -> str:
    """Format a count and its noun, in the plural if needed.

    >>> counted(1, "seed"), counted(3, "seed"), counted(1200, "run")
    ('1 seed', '3 seeds', '1,200 runs')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def several(names: Sequence[str]) -> str:
    """List the first three names and count the others.

    >>> several(["a", "b"]), several("abcd"), several("abcde")
    ('a, b', 'a, b, c and 1 other', 'a, b, c and 2 others')
    """
    rest = len(names) - 3
    if rest <= 0:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {counted(rest, 'other')}"


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes, hours, days or years.

    >>> duration(3.2), duration(200), duration(9000), duration(0), duration(1e6), duration(1e11)
    ('3 s', '3.3 min', '2.5 h', '0 s', '12 days', '3.2e+03 years')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.1f} min"
    if seconds < 4 * SECONDS_PER_DAY:
        return f"{seconds / 3600:.1f} h"
    if seconds < 2 * SECONDS_PER_YEAR:
        return f"{seconds / SECONDS_PER_DAY:.0f} days"
    return f"{seconds / SECONDS_PER_YEAR:.2g} years"
