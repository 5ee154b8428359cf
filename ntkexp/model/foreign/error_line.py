"""Whatever goes wrong in code from elsewhere, in one line.

>>> with one_line("model.name=gpt3"):
...     raise KeyError("gpt3")
Traceback (most recent call last):
ntkexp.mistake.Mistake: model.name=gpt3: KeyError: 'gpt3'
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ntkexp.mistake import Mistake, first_line


@contextmanager
def one_line(given: str, file: Path | None = None) -> Iterator[None]:
    """What goes wrong inside is said after what was given, with its line in the file if it is one of the user's."""
    try:
        yield
    except Mistake:
        raise
    except (Exception, SystemExit) as error:
        where = place(error, file) if file else ""
        raise Mistake(f"{given}{where}: {type(error).__name__}: {first_line(error)}") from None


def place(error: BaseException, file: Path) -> str:
    """Find the last line of the file that took part in an error."""
    trace = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    lines = [frame.lineno for frame in trace if frame.filename == str(file.resolve())]
    if isinstance(error, SyntaxError) and error.filename == str(file.resolve()):
        lines = [error.lineno or 1]
    return f", line {lines[-1]}" if lines else ""
