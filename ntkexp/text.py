"""Numbers and tables as plain text: significant digits only, aligned, no boxes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

MISSING = "–"
LONGEST_NAME = 60
ODD_LETTERS = "\u200c\u200d\xa0\u202f\u3000"  # joiners in words of some scripts and in emoji, and wide or fixed blanks
DAY = 86_400.0  # seconds
YEAR = 365.25 * DAY


def short(number: float | None) -> str:
    """Spell three significant digits between a thousandth and ten thousand, an order of magnitude outside.

    >>> [short(x) for x in (0.1234, 42.0, 0.99994, 3.7e-15, 0.0, 123456.0, None)]
    ['0.123', '42', '1', '4e-15', '0', '1.2e5', '–']
    """
    if number is None or math.isnan(number):
        return MISSING
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
    digits, exponent = f"{number:.{0 if abs(number) < 1e-3 else 1}e}".split("e")
    return f"{digits}e{int(exponent)}"


def share(number: float) -> str:
    """Spell a fraction in words that can follow 'misses by'.

    >>> [share(x) for x in (0.12, 0.0034, 3e-6, 1.5, 40.0)]
    ['12 %', '0.34 %', '3e-6', '150 %', '40 times what was learned']
    """
    if number >= 10:
        return f"{short(number)} times what was learned"
    return percent(number) if number >= 1e-3 else short(number)


def percent(number: float) -> str:
    """Spell a fraction in hundredths, to two digits.

    >>> [percent(x) for x in (0.0312, 0.5, 1.234, 1e-7)]
    ['3.1 %', '50 %', '120 %', '1e-5 %']
    """
    hundredths = float(f"{100 * number:.2g}")
    return f"{short(hundredths)} %"


def rate(share: float | None) -> str:
    """Spell a share of all as papers print it.

    >>> rate(0.98765), rate(None)
    ('98.8 %', '–')
    """
    return MISSING if share is None else f"{100 * share:.1f} %"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Set columns two blanks apart, the ones that hold numbers to the right.

    >>> print(aligned(("machine", "error"), (("secant", "4e-15"), ("left", "0.12")), (False, True)))
    machine  error
    secant   4e-15
    left      0.12
    """
    lines = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(*line, strict=True)
        ]
        for line in ((row, widths, right) for row in lines)
    ]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def printable(text: str) -> str:
    r"""Spell control characters, and those that turn the direction of writing round, by their codes.

    >>> printable("5 µm"), printable("a\n\x1b[31mb\u202e")
    ('5 µm', 'a\\n\\x1b[31mb\\u202e')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in ODD_LETTERS else repr(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    r"""Spell such characters by their codes, and keep the ends of lines.

    >>> printable_lines("a\n\x1b[31mb")
    'a\n\\x1b[31mb'
    """
    return "\n".join(map(printable, text.split("\n")))


def shown_name(name: str) -> str:
    r"""Spell a name that comes from data: on one line of a bounded length, on which nothing acts on a terminal.

    >>> shown_name("two\nlines"), shown_name(""), shown_name("n" * 99)[-2:]
    ('two\\nlines', '""', 'n…')
    """
    spelt = printable(name) or '""'
    return spelt if len(spelt) <= LONGEST_NAME else f"{spelt[: LONGEST_NAME - 1]}…"


FORMULA = re.compile(r"'*[=+\-@\t\r]")


def as_cell(text: str) -> str:
    """Write text into a table so that a spreadsheet takes it for text, not for a formula that it carries out.

    An apostrophe comes before it, as people type it there; a number stays a number.

    >>> [as_cell(text) for text in ("=cmd|x", "-1.5", "@a", "'=b", "left", "")]
    ["'=cmd|x", '-1.5', "'@a", "''=b", 'left', '']
    """
    return f"'{text}" if FORMULA.match(text) and not is_number(text) else text


def of_cell(cell: str) -> str:
    """Read the text that `as_cell` wrote.

    >>> [of_cell(as_cell(text)) for text in ("=cmd|x", "-1.5", "''=b", "'b'")]
    ['=cmd|x', '-1.5', "''=b", "'b'"]
    """
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def is_number(text: str) -> bool:
    """Whether a text is a number as it stands, such as -1e-3."""
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip() and "_" not in text


def spoken(machine: str) -> str:
    """Spell a machine's name in words.

    >>> spoken("frozen_start"), spoken("rbf_identity")
    ('frozen start', 'RBF identity')
    """
    return machine.replace("_", " ").replace("rbf", "RBF").replace("nngp", "NNGP")


def listed(names: Sequence[str]) -> str:
    """Join names in a row, with an 'and' before the last.

    >>> listed(["this", "that", "the other"])
    'this, that and the other'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def counted(count: int, noun: str) -> str:
    """Spell things by their number.

    >>> counted(1, "seed"), counted(3, "seed"), counted(1200, "run")
    ('1 seed', '3 seeds', '1,200 runs')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def several(names: Sequence[str]) -> str:
    """Name some of many.

    >>> several(["a", "b"]), several("abcd"), several("abcde")
    ('a, b', 'a, b, c and 1 other', 'a, b, c and 2 others')
    """
    rest = len(names) - 3
    return f"{', '.join(names[:3])} and {counted(rest, 'other')}" if rest > 0 else ", ".join(names)


def duration(seconds: float) -> str:
    """Spell how long something takes: in seconds, minutes, hours, days or years.

    >>> duration(3.2), duration(200), duration(9000), duration(0), duration(1e6), duration(1e11)
    ('3 s', '3.3 min', '2.5 h', '0 s', '12 days', '3.2e+03 years')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 4 * DAY:
        return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
    return f"{seconds / DAY:.0f} days" if seconds < 2 * YEAR else f"{seconds / YEAR:.2g} years"
