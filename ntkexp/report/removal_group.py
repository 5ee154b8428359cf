"""Select the training examples to remove by position, source index, id,
class or influence.

    3        the example at this position among the training examples
    20..29   the examples at positions 20 to 29
    #17      the example with this index in the data source, as shown in tables
    class:3  all examples of a class
    3f9a…    the example with this id; its first 6 letters are enough
    top:10   the examples with the largest influence

In a followed loop whose examples have numbers as ids, plain numbers are ids,
not positions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import WrongArgument, nearest
from ntkexp.report.examples import example_names, has_names
from ntkexp.report.parts import strongest_first
from ntkexp.report.run import Run

MIN_DIGEST_LETTERS = 6  # minimum length of an abbreviated id
MAX_LISTED_CLASSES = 12
FORMS = "give places such as 3,20..29, #17 for a number in the source, an id, class:NAME or top:N"


def choose_group(
    run: Run, text: str, influence: Callable[[], NDArray[np.float64]]
) -> list[int]:
    """Parse `text` and return the sorted positions of the selected examples.

    `influence` returns the influence of each example. It is called only for `top:N`.
    """
    count = len(run.data["train_index"])
    group: set[int] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        group |= set(find_examples(run, word, count, influence))
    if not group:
        raise refusal(text, f"it names no training example; {FORMS}")
    if len(group) == count:
        raise refusal(
            text, f"these are all {count} training examples; leave some of them"
        )
    return sorted(group)


def refusal(word: str, reason: str) -> WrongArgument:
    return WrongArgument(f"without={word}: {reason}", "without")


def find_examples(
    run: Run, word: str, count: int, influence: Callable[[], NDArray[np.float64]]
) -> Sequence[int]:
    """Return the positions of the examples that `word` selects. `word` is one item of
    a comma-separated list."""
    kind, _, name = word.partition(":")
    if kind == "class" and name:
        return find_class(run, word, name)
    if kind == "top" and name:
        if not name.isdigit() or not 0 < int(name) <= count:
            raise refusal(word, f"top takes a number from 1 to {count}")
        return strongest_first(influence())[: int(name)]
    numbers = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", word)
    if numbers:
        return find_numbers(
            run, word, int(numbers[1]), int(numbers[2] or numbers[1]), count
        )
    return find_name(run, word)


def find_class(run: Run, word: str, name: str) -> list[int]:
    classes = [str(class_name) for class_name in run.data["classes"]]
    if not classes:
        raise refusal(word, f"the targets of {run.name} are no classes")
    if name not in classes:
        some = f"; there are {', '.join(classes[:MAX_LISTED_CLASSES])}"
        raise refusal(word, f"there is no such class{nearest(name, classes) or some}")
    places: list[int] = np.flatnonzero(
        run.data["train_target"] == classes.index(name)
    ).tolist()
    return places


def find_numbers(
    run: Run, word: str, first: int, last: int, count: int
) -> Sequence[int]:
    """Return the positions of the examples `first` to `last`.

    The numbers are ids if all ids are numbers. Otherwise they are positions.
    """
    if last < first:
        raise refusal(word, f"it counts downwards; write {last}..{first}")
    if has_names(run):
        names = example_names(run)
        if all(name.isdecimal() for name in names):
            matches = [k for k, name in enumerate(names) if first <= int(name) <= last]
            if not matches:
                raise refusal(
                    word, "no training example has this id, and ids here are numbers"
                )
            return matches
        # an id can be a digest that consists of digits only
        matches = named(names, word)
        if matches:
            return matches
    if last >= count:
        raise refusal(
            word,
            f"the training examples have places 0 to {count - 1}; "
            f"write #{last} if you mean a number in the source",
        )
    return range(first, last + 1)


def named(names: Sequence[str], word: str) -> list[int]:
    return [k for k, name in enumerate(names) if name == word]


def find_name(run: Run, word: str) -> list[int]:
    """Return the positions of the examples with this id, abbreviated id,
    or source index (#17)."""
    names = example_names(run)
    if re.fullmatch(r"#\d+", word):
        number = int(word[1:])
        matches = named(names, word[1:])
        matches = matches or np.flatnonzero(run.data["train_index"] == number).tolist()
        if not matches:
            raise refusal(word, "no training example has this number in the source")
        return matches
    matches = named(names, word)
    if not matches and len(word) >= MIN_DIGEST_LETTERS:
        matches = [k for k, name in enumerate(names) if name.startswith(word)]
    if not matches:
        raise refusal(word, f"no training example is called that; {FORMS}")
    if len({names[k] for k in matches}) > 1:
        raise refusal(
            word,
            f"the names of {len(matches)} examples begin with it; write more of the name",
        )
    return matches
