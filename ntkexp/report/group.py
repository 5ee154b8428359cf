"""Which training examples somebody means: by place, number in the source, name, class or influence.

3        the example at this place among the training examples     20..29   all from one place to another
#17      the one with this number in the source, as tables show    class:3  all of a class, by its name
3f9a…    the one of this name (an id, or the beginning of a digest)  top:10   those of most influence

Where examples of a loop were given numbers for ids, numbers are these, and not places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import WrongArgument, nearest
from ntkexp.report.run import Run

SHORTEST = 6  # of the beginning of a digest
FORMS = "give places such as 3,20..29, #17 for a number in the source, an id, class:NAME or top:N"


def group(run: Run, text: str, influence: Callable[[], NDArray[np.float64]]) -> list[int]:
    """Find the places of the examples that are meant; `influence` is asked for where it decides."""
    count = len(run.data["train_index"])
    found: set[int] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        found |= set(meant(run, word, count, influence))
    if not found:
        raise WrongArgument(f"without={text}: it names no training example; {FORMS}", "without")
    if len(found) == count:
        raise WrongArgument(f"without={text}: these are all {count} training examples; leave some of them", "without")
    return sorted(found)


def meant(run: Run, word: str, count: int, influence: Callable[[], NDArray[np.float64]]) -> Sequence[int]:
    """Find the places of one word."""
    kind, _, rest = word.partition(":")
    if kind == "class" and rest:
        return of_class(run, rest)
    if kind == "top" and rest:
        return top(word, count, influence)
    if re.fullmatch(r"\d+\.\.\d+", word):
        first, last = map(int, word.split(".."))
        if last < first:
            raise WrongArgument(f"without={word}: it counts downwards; write {last}..{first}", "without")
        return numbered(run, word, first, last) or range(first, place(last, word, count) + 1)
    if re.fullmatch(r"\d+", word):
        return numbered(run, word, int(word), int(word)) or [place(int(word), word, count)]
    if re.fullmatch(r"#\d+", word):
        return from_source(run, word)
    return named(run, word)


def numbered(run: Run, word: str, first: int, last: int) -> list[int]:
    """Find the examples whose ids are numbers from the first to the last; none, if theirs are no such."""
    if not has_names(run):
        return []
    names = example_names(run)
    if not all(name.isdecimal() for name in names):
        return [k for k, name in enumerate(names) if name == word]  # a digest may have no letters
    found = [k for k, name in enumerate(names) if first <= int(name) <= last]
    if not found:
        raise WrongArgument(f"without={word}: no training example has this id, and ids here are numbers", "without")
    return found


def place(number: int, word: str, count: int) -> int:
    """Take a place, if there is such a one."""
    if number >= count:
        said = f"without={word}: the training examples have places 0 to {count - 1}"
        raise WrongArgument(f"{said}; write #{number} if you mean a number in the source", "without")
    return number


def from_source(run: Run, word: str) -> list[int]:
    """Find the examples of a number in the source."""
    found = [k for k, name in enumerate(example_names(run)) if name == word[1:]]
    found = found or np.flatnonzero(run.data["train_index"] == int(word[1:])).tolist()
    if not found:
        raise WrongArgument(f"without={word}: no training example has this number in the source", "without")
    return list(map(int, found))


def of_class(run: Run, name: str) -> list[int]:
    """Find the examples of a class."""
    classes = [str(each) for each in run.data["classes"]]
    if not classes:
        raise WrongArgument(f"without=class:{name}: the targets of {run.name} are no classes", "without")
    if name not in classes:
        near = nearest(name, classes) or f"; there are {', '.join(classes[:12])}"
        raise WrongArgument(f"without=class:{name}: there is no such class{near}", "without")
    return [int(k) for k in np.flatnonzero(run.data["train_target"] == classes.index(name))]


def top(word: str, count: int, influence: Callable[[], NDArray[np.float64]]) -> list[int]:
    """Find the examples of most influence, most of all first."""
    number = word.removeprefix("top:")
    if not number.isdigit() or not 0 < int(number) <= count:
        raise WrongArgument(f"without={word}: top takes a number from 1 to {count}", "without")
    return [int(k) for k in np.argsort(-influence(), kind="stable")[: int(number)]]


def named(run: Run, word: str) -> list[int]:
    """Find the example of a name, or of a name that begins so."""
    names = example_names(run)
    found = [k for k, name in enumerate(names) if name == word]
    found = found or [k for k, name in enumerate(names) if len(word) >= SHORTEST and name.startswith(word)]
    if not found:
        raise WrongArgument(f"without={word}: no training example is called that; {FORMS}", "without")
    if len({names[k] for k in found}) > 1:
        raise WrongArgument(f"without={word}: the names of {len(found)} examples begin so; write more of it", "without")
    return found


def example_names(run: Run) -> list[str]:
    """Name the training examples as the contributions do, or else by their places."""
    if has_names(run):
        return [str(name) for name in run.contributions.coords["example"].to_numpy()]
    return list(map(str, range(len(run.data["train_index"]))))


def has_names(run: Run) -> bool:
    """Whether each training example has a name of its own; numbers in the source are asked for otherwise."""
    names = run.contributions.coords["example"].to_numpy()
    return names.dtype.kind not in "iu" and len(set(names)) == len(names)
