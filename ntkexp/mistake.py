"""Errors that the user can correct. A message is one line: the value,
the problem, and a remedy.

The command line prints the message after `ntkexp: ` and exits with status 2. In Python,
a `Mistake` is a `ValueError`. Messages do not contain command-line options.
`ntkexp.cli.options` adds the options that fit the class of the mistake."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from math import inf, nan
from operator import index
from pathlib import Path, PurePath
from stat import S_ISDIR, S_ISREG
from traceback import walk_tb

MIN_FILE_SIMILARITY = 0.6
"""A file is suggested only if its name is at least this similar (ratio of
`SequenceMatcher`)."""

HIDDEN: dict[str, str] = {}
"""Values that a configuration read from environment variables, such as a password. Each
value is mapped to its reference `${oc.env:NAME}` in YAML. Error messages are printed
and stored, so they show the reference instead of the value."""
MIN_HIDDEN_LETTERS = 4
"""Shorter values, such as "1", are not hidden, because they also occur elsewhere in
messages."""


def without_secrets(text: str) -> str:
    """Replace values of environment variables by their references in YAML.

    >>> HIDDEN["hunter2"] = "${oc.env:PASSWORD}"
    >>> without_secrets("model.width=hunter2: it takes a whole number")
    'model.width=${oc.env:PASSWORD}: it takes a whole number'
    >>> del HIDDEN["hunter2"]
    """
    for value in sorted(HIDDEN, key=len, reverse=True):
        for spelt in (value, repr(value)[1:-1]):
            text = text.replace(spelt, HIDDEN[value])
    return text


class Mistake(ValueError):
    r"""An error that the user can correct. Its message is one line and contains advice.

    Functions of the package raise it for invalid arguments,
    and for loops that cannot be followed.

    >>> print(Mistake("data.path=two\nlines"))
    data.path=two\nlines
    """

    def __init__(self, message: str) -> None:
        super().__init__("\\n".join(without_secrets(message).splitlines()))


class WrongArgument(Mistake):
    """An invalid argument or combination of arguments.

    `arguments` are the names of Python arguments in the message.

    >>> print(WrongArgument("folds=1: it takes a number of folds ≥ 2", "folds"))
    folds=1: it takes a number of folds ≥ 2
    """

    def __init__(self, message: str, *arguments: str) -> None:
        super().__init__(message)
        self.arguments = arguments


class Untrusted(Mistake):
    """Raised instead of running code from `source`, a package or file that the user
    does not trust."""

    def __init__(self, message: str, source: str) -> None:
        super().__init__(message)
        self.source = source


class NoPlace(Mistake):
    """Raised if results cannot be written. The end of the message
    suggests another folder."""


class NoData(Mistake):
    """Raised if the files of a data set are missing. The end of the message says where
    to get the files."""


class Useless(Mistake):
    """Raised if an earlier result is damaged or belongs to another computation.

    The message asks to recompute it.
    """


class HydraSetting(Mistake):
    """Raised for settings of Hydra itself, which have no effect in `ntkexp`."""


class UnknownKey(Mistake):
    """Raised if a configuration contains a key that does not exist."""


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error message. If it ends with a colon, also return
    the second line.

    >>> first_line(ValueError("sizes differ:\n  3 and 4\nsee the manual"))
    'sizes differ: 3 and 4'
    >>> first_line(KeyboardInterrupt())
    'no reason given'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        "no reason given"
    ]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


PACKAGE_FOLDER = f"{Path(__file__).parent}{os.sep}"
LIBRARY_FOLDERS = {"site-packages", "dist-packages"}
"""The names of folders that contain installed packages."""
TRUSTED_CODE = set[str]()
"""The files and folders that the user trusts. They are the user's own code, even in a
folder of installed packages."""


def line_of_user(error: BaseException) -> str | None:
    """Return one line with an exception, and the place in the user's code that raised
    it. Return None if the user's code did not run, or if this package raised it.

    If a library raised it, the place is the line that called the library.

    >>> line_of_user(KeyError("a"))
    """
    python_folder = f"{Path(os.__file__).parent}{os.sep}"
    place: str | None = None
    file = ""
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        is_library = file.startswith(
            ("<", python_folder, PACKAGE_FOLDER)
        ) or not LIBRARY_FOLDERS.isdisjoint(Path(file).parts)
        if not is_library or file.startswith(tuple(TRUSTED_CODE)):
            place = f"{file}, line {line}, in {frame.f_code.co_name}"
    if place is None or file.startswith(PACKAGE_FOLDER):
        return None
    return f"{place}: {type(error).__name__}: {first_line(error)}"


def in_short(value: object, most: int = 40) -> str:
    """Return the first `most` characters of a value's `repr`.

    >>> in_short("a" * 50, most=8), in_short(10**5000)
    ("'aaaaaaa", 'a number of more than 4300 digits')
    """
    try:
        return repr(value)[:most]
    except ValueError:  # Python refuses to print very long integers
        return "a number of more than 4300 digits"


def checked_number(
    name: str,
    value: object,
    least: float = 0.0,
    most: float = 1e300,
    *,
    above: bool = False,
) -> float:
    """Convert a value to a float. Raise unless `least` ≤ value ≤ `most`.

    If `above`, the value must also differ from `least`.

    >>> checked_number("ridge", 0.5), checked_number("time", inf, most=inf)
    (0.5, inf)
    >>> checked_number("memory_gb", "much", above=True)
    Traceback (most recent call last):
    ntkexp.mistake.WrongArgument: memory_gb='much': it takes a number > 0
    """
    number = as_float(value)
    if not least <= number <= most or (above and number == least):
        sign = ">" if above else "≥"
        upper_bound = f" and ≤ {most:g}" if number > most or number == inf else ""
        raise WrongArgument(
            f"{name}={in_short(value)}: it takes a number {sign} {least:g}{upper_bound}",
            name,
        )
    return number


def as_float(value: object) -> float:
    """Convert a value to a float. Return NaN if it is text or not a number."""
    if isinstance(value, str | bytes):
        return nan
    try:
        return float(value)  # type: ignore[arg-type]  # checked here
    # tensors raise RuntimeError
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return nan


def checked_count(name: str, value: object, least: int, most: int = 10**7) -> int:
    """Convert a value to an integer. Raise unless `least` ≤ value ≤ `most`.

    >>> checked_count("steps", 3, 0)
    3
    >>> checked_count("steps", 1.5, 0)
    Traceback (most recent call last):
    ntkexp.mistake.WrongArgument: steps=1.5: it takes a whole number from 0 to 10000000
    """
    try:
        number = index(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError, RuntimeError):
        number = least - 1
    if not least <= number <= most:
        raise WrongArgument(
            f"{name}={in_short(value)}: it takes a whole number from {least} to {most}",
            name,
        )
    return number


def refuse_special(path: Path, shown_as: str, largest: int) -> int:
    """Return the size of a file in bytes. Raise if it exceeds `largest`, or if the file
    is a pipe or a device, whose content may never end.

    >>> refuse_special(Path("/dev/zero"), "data.path='/dev/zero'", 100)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: data.path='/dev/zero' is a pipe or a device; copy its content to a file, and name the file
    """
    status = path.stat()
    if not S_ISREG(status.st_mode) and not S_ISDIR(status.st_mode):
        raise Mistake(
            f"{shown_as} is a pipe or a device; copy its content to a file, and name the file"
        )
    if status.st_size > largest:
        raise Mistake(
            f"{shown_as} has {status.st_size} bytes, more than the limit of {largest}; name a "
            "smaller file"
        )
    return status.st_size


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that suggests the most similar known word,
    or "" if none is similar.

    >>> nearest("widht", ["width", "depth"])
    "; did you mean 'width'?"
    >>> nearest("RELU", ["relu", "tanh"]), nearest("zebra", ["width", "depth"])
    ("; did you mean 'relu'?", '')
    >>> nearest("lion", ["flow", "adam"])
    ''
    """
    spelt = {name.lower(): name for name in known}
    matches = get_close_matches(word.lower(), spelt, n=1, cutoff=0.6)
    return f"; did you mean '{spelt[matches[0]]}'?" if matches else ""


NO_DEPENDENCE = (
    "the outputs depend on no parameter that requires gradients, so the kernel is zero; "
    "let a parameter that they use require gradients"
)
"""The message about a network without a tangent kernel."""


def nearest_file(name: str, files: Iterable[str]) -> str:
    """Return a hint that suggests a file with a similar name, or "" if there is none.

    Similar files have a similar name and the same suffix,
    or the same name and another suffix.

    >>> nearest_file("irsi.csv", ["iris.csv", "docs"]), nearest_file("iris.csv", ["iris.parquet"])
    ("; did you mean 'iris.csv'?", "; did you mean 'iris.parquet'?")
    >>> nearest_file("nope.csv", ["docs", "data.csv", "nope.md.bak"])
    ''
    """
    wanted = PurePath(name)

    def similarity(file: PurePath) -> float:
        if file.suffix.lower() != wanted.suffix.lower():
            return float(file.stem == wanted.stem)
        return SequenceMatcher(None, wanted.stem, file.stem).ratio()

    closest = max(map(PurePath, files), key=similarity, default=wanted)
    if closest == wanted or similarity(closest) < MIN_FILE_SIMILARITY:
        return ""
    return f"; did you mean '{closest}'?"
