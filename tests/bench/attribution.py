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
from math import isnan
from pathlib import Path
from statistics import mean
from typing import NamedTuple, TypeAlias

from torch import Tensor

from ntkexp.claim.papers.leaving_out import score
from ntkexp.report.analysis.estimate import mean_of
from tests.bench.attribution_case import (
    MODELS,
    ONCE,
    PAPER,
    PEERS,
    QUICK_ONCE,
    SEEDS,
    Case,
    Cells,
    Told,
    Training,
    changes,
    enlarged_digits,
    fresh,
    halves,
    leavers,
    tsloo,
    two_digits,
)
from tests.bench.attribution_page import LINES, PAGE, Scores, page, read, write
from tests.bench.cell import Table
from tests.bench.peers import ROOT, Peer

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
                running[name] = stack.enter_context(Peer(self.peers, name))
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


# Which score of training examples predicts what training without them does: rank correlations with such trainings.
#
#     one run       the same training without one example, without 5 %, and without half of them
#     fresh seeds   trainings on random halves, each from a start and in an order of its own; protocol of dattri
#     TSLOO         one pass over images of 28 × 28 pixels, without one; the loss of a test image; protocol of
# 2605.18814
#
# A score predicts the change of what is asked as the sum over who left. Shown are Spearman's correlations over who
# left,
# averaged over points, with the 95 % interval of their mean over seeds, and the seconds of a processor for a score
# with
# the trainings that it reads. With `--peers` dattri and traker tell their scores as well, of the same weights, and
# docs/attribution.md is written anew. What is measured is kept, so whoever is stopped goes on.


CELLS = ROOT / "outputs" / "attribution"
Judged: TypeAlias = Mapping[str, Mapping[str, float]]
"""By who left, the correlation of every score; by `s`, its seconds."""


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    quick: bool = False
    peers: Path | None = None
    cells: Path = CELLS
    minutes: float | None = None
    images: Path | None = None  # MNIST, for the sizes of the paper

    @property
    def seeds(self) -> int:
        """How many every training gets."""
        return 1 if self.quick else SEEDS

    @property
    def once(self) -> list[Training]:
        """The trainings of TSLOO."""
        if self.quick:
            return tsloo(self.enlarged, QUICK_ONCE, (1e-3,))
        return tsloo(self.enlarged, ONCE) if self.images is None else tsloo(self.images.resolve(), PAPER)

    @property
    def enlarged(self) -> Path:
        """The digits, as large as the images of the paper."""
        return enlarged_digits(self.cells.resolve() / "digits28")


def report(
    quick: bool = False,
    peers: Path | None = None,
    cells: Path | None = None,
    minutes: float | None = None,
    full: Path | None = None,
) -> list[Table]:
    """The tables, of all trainings of which everything is known."""
    wanted = Wanted(quick, peers, cells or CELLS, minutes, full)
    digits, once, kept = two_digits(quick=quick), wanted.once, Cells(wanted.cells)
    limit = float("inf") if minutes is None else 60 * minutes
    Measurement(kept, [*once, *digits], peers, wanted.seeds, limit).run()
    found = {each.name: judged(kept, each, wanted) for each in (*digits, *once)}
    tables = (one_run(digits, found), fresh_seeds(digits, found), seen_once(once, found))
    if peers is not None and not quick:
        LINES.write_text(write(tables), "utf-8")
        PAGE.write_text(page(read(LINES.read_text("utf-8")), PAGE.read_text("utf-8")), "utf-8")
        sys.stderr.write(f"\n{LINES.relative_to(ROOT)} and {PAGE.relative_to(ROOT)} are written\n")
    return [measured.table for measured in tables]


def judged(kept: Cells, training: Training, wanted: Wanted) -> list[Judged]:
    """Every seed of which all cells are kept."""
    found = []
    for seed in range(wanted.seeds):
        case = training.case(seed)
        whole = kept.whole(case, names(training, wanted.peers))
        if whole is not None:
            found.append(held(case, whole, scores(training, wanted.peers)))
    return found


def held(case: Case, told: Mapping[str, Told], of: Sequence[str]) -> Judged:
    """Compare scores with the trainings of this project."""
    truth, says = told[RETRAINED].found, {name: told[name].found for name in of}
    found = {who: correlations(says, left, truth[who]) for who, left in leavers(case).items()}
    found["s"] = {name: told[name].seconds for name in (*of, RETRAINED)}
    if FRESH in told:
        outputs, left, says = told[FRESH].found, halves(case), says | {RETRAINED: truth["one"].t()}
        slope = -case.rerun.loss.output_gradient(truth["end"], case.targets)
        found["output"] = correlations(says, left, outputs["output"])
        found["-loss"] = correlations({name: slope * tau for name, tau in says.items()}, left, outputs["-loss"])
    return found


def correlations(says: Mapping[str, Tensor], left: Tensor, actual: Tensor) -> Mapping[str, float]:
    """Of every score, summed over who left."""
    return {name: score(left @ tau.t(), actual) for name, tau in says.items()}


def one_run(trainings: Sequence[Training], found: Mapping[str, Sequence[Judged]]) -> Scores:
    """The same run without an example."""
    size = trainings[0].size
    title = (
        f"Attribution, one run: {size.train} digits of two classes, {size.steps} steps of {size.batch}, outputs at "
        f"{size.read} points; without each example, {size.groups} groups of 5 %, {size.groups} halves"
    )
    return table(title, "left out", ("one", "5 %", "50 %", "s"), trainings, found, without=("5 effects",))


def fresh_seeds(trainings: Sequence[Training], found: Mapping[str, Sequence[Judged]]) -> Scores:
    """Halves, each from a start of its own."""
    size = trainings[0].size
    title = (
        f"Attribution, fresh seeds: the same trainings on {size.fresh} random halves, each from its own start and in "
        "its own order; the outputs, and −loss"
    )
    return table(title, "asked", ("output", "-loss", "s"), trainings, found)


def seen_once(trainings: Sequence[Training], found: Mapping[str, Sequence[Judged]]) -> Scores:
    """One pass over images."""
    size = trainings[0].size
    title = (
        f"Attribution, TSLOO: MLP 784-16-16-10, {size.train} images, {size.steps} steps of {size.batch} by AdamW, "
        f"losses of {size.read} test images; without each of {size.alone} images"
    )
    return table(title, "left out", ("one", "s"), trainings, found)


def table(
    title: str,
    column: str,
    rows: Sequence[str],
    trainings: Sequence[Training],
    found: Mapping[str, Sequence[Judged]],
    without: Sequence[str] = (),
) -> Scores:
    """These rows of every training of which a seed is known, without these scores."""
    lines, header = [], tuple[str, ...]()
    for training in trainings:
        seeds = found[training.name]
        for row in rows if seeds else ():
            known = [name for name in (*seeds[0]["s"],) if name not in without]
            header = ("training", column, "seeds", *known)
            values = [[seed[row][name] for seed in seeds if name in seed[row]] for name in known]
            cells = [seconds(each) if row == "s" else cell(each) for each in values]
            lines.append((training.name, row, str(len(seeds)), *cells))
    measured = sum(bool(found[training.name]) for training in trainings)
    return Scores(f"{title}; {measured} of {len(trainings)} trainings", header, tuple(lines))


def seconds(values: Sequence[float]) -> str:
    """Their mean.

    >>> seconds([1.0, 2.0])
    '1.50'
    """
    return f"{mean_of(values).value:.2f}"


def cell(values: Sequence[float]) -> str:
    """The mean and how far its interval reaches; a dash for what is not compared with itself.

    >>> cell([0.5, 0.6, 0.7]), cell([-1.0]), cell([])
    ('.60±.25', '-1.00', '–')
    """
    if not values:
        return "–"
    found = mean_of(values)
    reach = "" if isnan(found.reach) else f"±{short(found.reach)}"
    return short(found.value) + reach


def short(value: float) -> str:
    """Two digits, without a zero in front."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"
