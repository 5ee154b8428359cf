"""A user's mistake in one line: what was given, what it means, what to try.

The command line prints it after `ntkexp: ` and exits with status 2; a program gets it as a `ValueError`. No message
names an option of the command line: by the kind of a mistake, `ntkexp.cli.options` knows which one puts it right.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from math import inf, nan
from operator import index
from pathlib import Path, PurePath
from stat import S_ISDIR, S_ISREG

CLOSE = 0.6
"""How much of two names of files must agree."""

HIDDEN: dict[str, str] = {}
"""Values that a configuration took from the environment, each with how it referred to it: YAML of others may ask for a
password, and what goes wrong with that is printed and kept."""
SHORTEST = 4  # letters of a value that is hidden: "1" is no secret, and stands everywhere


def without_secrets(text: str) -> str:
    """Put references in place of the values that came from the environment.

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
    r"""Something the user can put right; its message is one line, with advice.

    >>> print(Mistake("data.path=two\nlines"))
    data.path=two\nlines
    """

    def __init__(self, message: str) -> None:
        super().__init__("\\n".join(without_secrets(message).splitlines()))


class WrongArgument(Mistake):
    """An argument that cannot be, or does not go with another; `arguments` are named in the message as Python does.

    >>> print(WrongArgument("folds=1: it takes a number of folds ≥ 2", "folds"))
    folds=1: it takes a number of folds ≥ 2
    """

    def __init__(self, message: str, *arguments: str) -> None:
        super().__init__(message)
        self.arguments = arguments


class Untrusted(Mistake):
    """Python code that is not trusted would run: `source`, a package or a file."""

    def __init__(self, message: str, source: str) -> None:
        super().__init__(message)
        self.source = source


class NoPlace(Mistake):
    """Results cannot lie where they were to; the message ends by asking for another place."""


class NoData(Mistake):
    """This machine does not have the files of a set of data; the message ends by telling where they come from."""


class Useless(Mistake):
    """An earlier result is damaged, or of something else; the message ends by asking to compute it again."""


class HydraSetting(Mistake):
    """An option of Hydra itself, which has no effect here."""


class UnknownKey(Mistake):
    """A key of the configuration is like none that there is."""


def first_line(error: BaseException) -> str:
    r"""What an error says before it goes into details: a line, and the next one if it only announces that.

    >>> first_line(ValueError("sizes differ:\n  3 and 4\nsee the manual"))
    'sizes differ: 3 and 4'
    >>> first_line(KeyboardInterrupt())
    'no reason given'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        "no reason given"
    ]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def in_short(value: object, most: int = 40) -> str:
    """A value as Python writes it, cut.

    >>> in_short("a" * 50, most=8), in_short(10**5000)
    ("'aaaaaaa", 'a number of more than 4300 digits')
    """
    try:
        return repr(value)[:most]
    except ValueError:  # which Python does not write out
        return "a number of more than 4300 digits"


def checked_number(
    name: str, value: object, least: float = 0.0, most: float = 1e300, *, above: bool = False
) -> float:
    """A number from `least` on, or only `above` it, up to `most`; anything else is refused by the name it has.

    >>> checked_number("ridge", 0.5), checked_number("time", inf, most=inf)
    (0.5, inf)
    >>> checked_number("memory_gb", "much", above=True)
    Traceback (most recent call last):
    ntkexp.mistake.WrongArgument: memory_gb='much': it takes a number > 0
    """
    try:
        number = nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one of tensors
        number = nan
    if not least <= number <= most or (above and number == least):
        end = f" and ≤ {most:g}" if number > most or number == inf else ""
        raise WrongArgument(
            f"{name}={in_short(value)}: it takes a number {'>' if above else '≥'} {least:g}{end}",
            name,
        )
    return number


def checked_count(name: str, value: object, least: int, most: int = 10**7) -> int:
    """A whole number in a range; anything else is refused by the name it has.

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
            f"{name}={in_short(value)}: it takes a whole number from {least} to {most}", name
        )
    return number


def refuse_special(path: Path, given: str, largest: int) -> int:
    """Refuse a pipe or a device, to which there may be no end, and a file too large to be meant; its size in bytes.

    >>> refuse_special(Path("/dev/zero"), "data.path='/dev/zero'", 100)
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: data.path='/dev/zero' is a pipe or a device; write what it gives into a file, and name that
    """
    status = path.stat()
    if not S_ISREG(status.st_mode) and not S_ISDIR(status.st_mode):
        raise Mistake(
            f"{given} is a pipe or a device; write what it gives into a file, and name that"
        )
    if status.st_size > largest:
        raise Mistake(
            f"{given} has {status.st_size} bytes, and files are read up to {largest}; name a smaller one"
        )
    return status.st_size


def nearest(word: str, known: Iterable[str]) -> str:
    """Hint at the spelling that was probably meant, or say nothing.

    >>> nearest("widht", ["width", "depth"])
    "; did you mean 'width'?"
    >>> nearest("RELU", ["relu", "tanh"]), nearest("zebra", ["width", "depth"])
    ("; did you mean 'relu'?", '')
    """
    spelt = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), spelt, n=1, cutoff=0.5)
    return f"; did you mean '{spelt[close[0]]}'?" if close else ""


def nearest_file(name: str, files: Iterable[str]) -> str:
    """Hint at a file: one of its kind whose name is close without the ending, or of its name and another kind.

    >>> nearest_file("irsi.csv", ["iris.csv", "docs"]), nearest_file("iris.csv", ["iris.parquet"])
    ("; did you mean 'iris.csv'?", "; did you mean 'iris.parquet'?")
    >>> nearest_file("nope.csv", ["docs", "data.csv", "nope.md.bak"])
    ''
    """
    wanted = PurePath(name)

    def likeness(file: PurePath) -> float:
        alike = SequenceMatcher(None, wanted.stem, file.stem).ratio()
        return (
            alike
            if file.suffix.lower() == wanted.suffix.lower()
            else float(file.stem == wanted.stem)
        )

    close = max(map(PurePath, files), key=likeness, default=wanted)
    return f"; did you mean '{close}'?" if close != wanted and likeness(close) >= CLOSE else ""
