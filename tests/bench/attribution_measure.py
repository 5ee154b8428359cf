"""Fills the cells of the attribution bench, seed by seed; says how far it is, and about how long the rest takes.

Its order lets every row have one seed before any has two. A cell that is kept is not measured again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple, TypeAlias

from torch import Tensor

from tests.bench.attribution_case import MODELS, Case
from tests.bench.attribution_cells import PEERS, Cells, Told
from tests.bench.attribution_trainings import SEEDS, Training, two_digits
from tests.bench.attribution_truth import changes, fresh
from tests.bench.peers import Peer

OWN = ("effect", "one step", "contrib.", "TracIn", "last", "infl.", "5 effects")
READS = {"TRAK": MODELS}
"""How many trainings a score of theirs reads, if not one."""

RETRAINED, FRESH = "retrained", "fresh"
Found: TypeAlias = Tensor | dict[str, Tensor]


class Work(NamedTuple):
    """A cell that is to be filled."""

    training: Training
    case: Case
    name: str

    @property
    def kind(self) -> tuple[str, str]:
        """Cells of one kind take about as long: the same network, the same score."""
        return self.training.name.partition(", ")[0], self.name


def scores(training: Training, peers: Path | None) -> tuple[str, ...]:
    """The scores of a training. What is asked about one run alone has no mean over several, and no contributions:
    those of ten outputs under AdamW are summed up as kernels between all of them, 20 GB for 1,600 images.
    """
    own = OWN if training.size.fresh else tuple(name for name in OWN if name not in ("5 effects", "contrib."))
    theirs = (f"{program[0]}.{name}" for program, names in PEERS.items() for name in names)
    return (*own, *(theirs if peers is not None else ()))


def names(training: Training, peers: Path | None) -> tuple[str, ...]:
    """All cells of a training: the truths that all scores share, and the scores."""
    return (RETRAINED, *((FRESH,) if training.size.fresh else ()), *scores(training, peers))


@dataclass
class Measurement:
    """The cells of these trainings; with a limit no cell is begun later than so many seconds from now."""

    cells: Cells
    trainings: Sequence[Training]
    peers: Path | None
    seeds: int = SEEDS
    limit: float = float("inf")
    took: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def run(self) -> None:
        """Fill what is missing."""
        start, todo = time.perf_counter(), self.missing()
        whole = len(todo)
        if todo and self.limit > 0:
            warm_up()
        with ExitStack() as stack:
            programs = self.programs(stack)
            while todo and time.perf_counter() - start < self.limit:
                work = todo.pop(0)
                told = self.told(work, programs)
                self.cells.keep(work.case, work.name, told)
                self.took.setdefault(work.kind, []).append(told.took)
                say(f"cell {whole - len(todo)} of {whole}: {title(work)}, {told.took:.1f} s; {self.left(todo)}")

    def missing(self) -> list[Work]:
        """What is not kept; of what is, how long it took. The cells of a training have one case in common."""
        found = []
        for seed in range(self.seeds):
            for training in self.trainings:
                case = training.case(seed)
                for name in names(training, self.peers):
                    work, kept = Work(training, case, name), self.cells.read(case, name)
                    if kept is None:
                        found.append(work)
                    else:
                        self.took.setdefault(work.kind, []).append(kept.took)
        return found

    def programs(self, stack: ExitStack) -> Callable[[str], Peer]:
        """The program of that name, which is started when it is first asked."""
        running: dict[str, Peer] = {}

        def program(name: str) -> Peer:
            if self.peers is None:
                raise ValueError(f"{name} is in no environment")
            if name not in running:
                running[name] = stack.enter_context(Peer(self.peers, name, "scores"))
                small = two_digits(quick=True)[0].case(0).handed
                for score in PEERS[name]:  # so that what it imports late is there
                    running[name].ask({**small, "score": score})
            return running[name]

        return program

    def told(self, work: Work, programs: Callable[[str], Peer]) -> Told:
        """What a cell is to hold. What several cells need is made first, and counts for none."""
        start, case = time.perf_counter(), work.case
        _ = case.rerun
        ways: Mapping[str, Callable[[], Found]] = {
            RETRAINED: partial(changes, case),
            FRESH: partial(fresh, case),
            **case.scores,
        }
        if work.name in ways:
            found, seconds = timed(ways[work.name])
        else:
            letter, _, score = work.name.partition(".")
            (program,) = (each for each in PEERS if each[0] == letter)
            found, seconds = programs(program).ask({**case.handed, "score": score})
            seconds += READS.get(score, 1) * case.handed["seconds"]
        return Told(found, seconds, time.perf_counter() - start)

    def left(self, todo: Sequence[Work]) -> str:
        """About how long the rest takes, by the cells that are like each, or else have the same name, or by all."""
        minutes = sum(self.expected(work) for work in todo) / 60
        return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"

    def expected(self, work: Work) -> float:
        """The seconds of a clock that a cell will take."""
        same = [took for (_, name), times in self.took.items() if name == work.name for took in times]
        return mean(self.took.get(work.kind) or same or [took for times in self.took.values() for took in times])


def warm_up() -> None:
    """What torch loads late is there afterwards, and counts for no score."""
    case = two_digits(quick=True)[0].case(0)
    changes(case)
    for tell in case.scores.values():
        tell()


def timed(tell: Callable[[], Found]) -> tuple[Found, float]:
    """What it tells, and the seconds of a processor until then."""
    start = time.process_time()
    found = tell()
    return found, time.process_time() - start


def title(work: Work) -> str:
    """A cell in words."""
    return f"{work.training.name}, seed {work.case.seed}, {work.name}"


def say(text: str) -> None:
    """Progress is no result, and goes where errors go: in a terminal a line in place of the last."""
    sys.stderr.write(f"\r\x1b[K{text}" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()
