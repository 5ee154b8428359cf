"""Answers: what was found out, for the latest questions.

Where values route rows, by masks, orders or experts, every batch may be a question of its own, and answers are as large
as what they are about: the oldest are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

LATEST = 64  # what is remembered: something for every block of a run, where values route rows

T = TypeVar("T")


@dataclass
class Answers(Generic[T]):
    """The latest `room` answers.

    >>> squares = Answers[int](room=2)
    >>> [squares.to(n, lambda n=n: n * n) for n in (1, 2, 1, 3)], list(squares.kept)
    ([1, 4, 1, 9], [1, 3])
    """

    room: int = field(default_factory=lambda: LATEST)
    kept: OrderedDict[Hashable, T] = field(default_factory=OrderedDict, repr=False)

    def to(self, question: Hashable, find: Callable[[], T]) -> T:
        """The answer to a question; found again if it is not known any more."""
        return self.keep(question, self.kept[question] if question in self.kept else find())

    def keep(self, question: Hashable, answer: T) -> T:
        """Remember an answer as the latest."""
        self.kept[question] = answer
        self.kept.move_to_end(question)
        while len(self.kept) > self.room:
            self.kept.popitem(last=False)
        return answer
