"""A loop is carried out again, by the function that its user gives, and `follow` inside it is told what has changed:
what examples weigh, and where the steps are kept, so that the first trace stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from ntkexp.foreign_loop.weighing import Weighing
from ntkexp.mistake import Mistake
from ntkexp.text import counted

if TYPE_CHECKING:
    from ntkexp.foreign_loop.trace import Trace

Again: TypeAlias = Callable[[], object]
"""A function that carries a whole loop out, from its seeds on, with one `follow` in it."""


@dataclass
class AlteredLoop:
    """What is otherwise: weights of examples; and steps are kept in `place`, or not at all. `traces` were followed."""

    weighing: Weighing
    place: Path | None
    traces: list[Trace] = field(default_factory=list)


UNDER_WAY: ContextVar[AlteredLoop | None] = ContextVar("UNDER_WAY", default=None)


def altered_loop() -> AlteredLoop | None:
    """What is otherwise in the loop inside which somebody asks, if it is carried out again."""
    return UNDER_WAY.get()


def trained_again(again: Again, weighing: Weighing, place: Path | None = None) -> Trace:
    """The trace of the loop, carried out with these weights of its examples."""
    asked = AlteredLoop(weighing, place)
    token = UNDER_WAY.set(asked)
    try:
        with torch.random.fork_rng(devices=()):
            again()
    finally:
        UNDER_WAY.reset(token)
    if len(asked.traces) != 1:
        raise Mistake(
            f"again=: the function followed {counted(len(asked.traces), 'loop')}; let it "
            "carry out the one that was followed, with ntkexp.follow in it"
        )
    return asked.traces[0]
