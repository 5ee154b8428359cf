"""Scores of training examples, compared with the results of training without them by rank correlations.

    one run       the same training without one example, without 5 %, and without half of them
    fresh seeds   trainings on random halves, each with its own start and order; the protocol of dattri
    TSLOO         one pass over images of 28 × 28 pixels, without one image; the loss of a test image; the protocol of
                  arXiv:2605.18814

A score predicts a change as the sum over the removed examples. The tables show Spearman's correlations over removals,
averaged over points, with the 95 % interval of their mean over seeds, and the CPU seconds of a score with its
trainings. With `--peers` dattri and traker score the same weights, and docs/attribution.md is written again. Every
result is kept in a cell, so an interrupted measurement continues. All trainings get their first seed before any gets a
second one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
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
    Result,
    Training,
    changes,
    enlarged_digits,
    fresh,
    halves,
    removed_groups,
    tsloo,
    two_digits,
)
from tests.bench.attribution_page import LINES, PAGE, Scores, page, read, write
from tests.bench.cell import Table
from tests.bench.peers import ROOT, Peer

OWN = ("effect", "one step", "contrib.", "TracIn", "last", "infl.", "5 effects")
READS = {"TRAK": MODELS}
"""The number of trainings that a score of another program reads, if not one."""

RETRAINED, FRESH = "retrained", "fresh"
Found: TypeAlias = Tensor | dict[str, Tensor]


class Work(NamedTuple):
    """A missing cell."""

    training: Training
    case: Case
    name: str


def scores(training: Training, peers: Path | None) -> tuple[str, ...]:
    """Return the names of the scores of a training. TSLOO has no mean of effects, and no contributions: the kernels of
    ten outputs under AdamW would need 20 GB for 1,600 images.
    """
    own = OWN if training.size.fresh else tuple(name for name in OWN if name not in ("5 effects", "contrib."))
    theirs = (f"{program[0]}.{name}" for program, names in PEERS.items() for name in names)
    return (*own, *(theirs if peers is not None else ()))


def names(training: Training, peers: Path | None) -> tuple[str, ...]:
    """Return the names of all cells of a training: the true changes, and the scores."""
    return (RETRAINED, *((FRESH,) if training.size.fresh else ()), *scores(training, peers))


@dataclass
class Measurement:
    """The cells of some trainings. No cell starts later than `limit` seconds after the start."""

    cells: Cells
    trainings: Sequence[Training]
    peers: Path | None
    seeds: int = SEEDS
    limit: float = float("inf")

    def run(self) -> None:
        """Compute the missing cells."""
        start, todo = time.perf_counter(), self.missing()
        if todo and self.limit > 0:
            warm_up()
        with ExitStack() as stack:
            programs = self.programs(stack)
            for number, work in enumerate(todo, start=1):
                if time.perf_counter() - start >= self.limit:
                    break
                self.cells.keep(work.case, work.name, self.computed(work, programs))
                sys.stderr.write(
                    f"cell {number} of {len(todo)}: {work.training.name}, seed {work.case.seed}, {work.name}, "
                    f"{time.perf_counter() - start:.0f} s\n"
                )

    def missing(self) -> list[Work]:
        """Return the cells that are not kept, seed by seed. The cells of a training share one case."""
        found = []
        for seed in range(self.seeds):
            for training in self.trainings:
                case = training.case(seed)
                absent = [name for name in names(training, self.peers) if self.cells.read(case, name) is None]
                found += [Work(training, case, name) for name in absent]
        return found

    def programs(self, stack: ExitStack) -> Callable[[str], Peer]:
        """Return a function that returns a program by its name, and starts it at the first call."""
        running: dict[str, Peer] = {}

        def program(name: str) -> Peer:
            if self.peers is None:
                raise ValueError(f"{name} is in no environment")
            if name not in running:
                running[name] = stack.enter_context(Peer(self.peers, name))
                small = two_digits(quick=True)[0].case(0).handed
                for score in PEERS[name]:  # loads its modules
                    running[name].ask({**small, "score": score})
            return running[name]

        return program

    def computed(self, work: Work, programs: Callable[[str], Peer]) -> Result:
        """Compute a cell. Preparations that several cells share are made first, and do not count."""
        case = work.case
        _ = case.rerun
        ways: Mapping[str, Callable[[], Found]] = {
            RETRAINED: partial(changes, case),
            FRESH: partial(fresh, case),
            **case.scores,
        }
        if work.name in ways:
            start = time.process_time()
            found = ways[work.name]()
            return Result(found, time.process_time() - start)
        letter, _, score = work.name.partition(".")
        (program,) = (each for each in PEERS if each[0] == letter)
        found, seconds = programs(program).ask({**case.handed, "score": score})
        return Result(found, seconds + READS.get(score, 1) * case.handed["seconds"])


def warm_up() -> None:
    """Load the modules that torch loads late, so that no score is charged for them."""
    case = two_digits(quick=True)[0].case(0)
    changes(case)
    for tell in case.scores.values():
        tell()


CELLS = ROOT / "outputs" / "attribution"
Correlations: TypeAlias = Mapping[str, Mapping[str, float]]
"""For each kind of removal, the correlation of every score; for `s`, its seconds."""


def report(
    *,
    quick: bool,
    peers: Path | None = None,
    cells: Path | None = None,
    minutes: float | None = None,
    full: Path | None = None,
) -> list[Table]:
    """Return the tables of all trainings whose cells are complete. `full` is the folder of MNIST, for the paper's
    sizes.
    """
    folder = cells or CELLS
    enlarged = enlarged_digits(folder.resolve() / "digits28")
    digits, seeds, kept = two_digits(quick=quick), 1 if quick else SEEDS, Cells(folder)
    if quick:
        once = tsloo(enlarged, QUICK_ONCE, (1e-3,))
    else:
        once = tsloo(enlarged, ONCE) if full is None else tsloo(full.resolve(), PAPER)
    limit = float("inf") if minutes is None else 60 * minutes
    Measurement(kept, [*once, *digits], peers, seeds, limit).run()
    found = {each.name: correlations_of_seeds(kept, each, peers, seeds) for each in (*digits, *once)}
    tables = (one_run(digits, found), fresh_seeds(digits, found), seen_once(once, found))
    if peers is not None and not quick:
        LINES.write_text(write(tables), "utf-8")
        PAGE.write_text(page(read(LINES.read_text("utf-8")), PAGE.read_text("utf-8")), "utf-8")
        sys.stderr.write(f"\n{LINES.relative_to(ROOT)} and {PAGE.relative_to(ROOT)} are written\n")
    return [measured.table for measured in tables]


def correlations_of_seeds(kept: Cells, training: Training, peers: Path | None, seeds: int) -> list[Correlations]:
    """Return the correlations of every seed whose cells are complete."""
    found = []
    for seed in range(seeds):
        case = training.case(seed)
        whole = kept.whole(case, names(training, peers))
        if whole is not None:
            found.append(correlations_of(case, whole, scores(training, peers)))
    return found


def correlations_of(case: Case, results: Mapping[str, Result], of: Sequence[str]) -> Correlations:
    """Return the correlations of scores with the true changes."""
    truth, scored = results[RETRAINED].found, {name: results[name].found for name in of}
    found = {who: correlations(scored, left, truth[who]) for who, left in removed_groups(case).items()}
    found["s"] = {name: results[name].seconds for name in (*of, RETRAINED)}
    if FRESH in results:
        outputs, left, scored = results[FRESH].found, halves(case), scored | {RETRAINED: truth["one"].t()}
        slope = -case.rerun.loss.output_gradient(truth["end"], case.targets)
        found["output"] = correlations(scored, left, outputs["output"])
        found["-loss"] = correlations({name: slope * tau for name, tau in scored.items()}, left, outputs["-loss"])
    return found


def correlations(scored: Mapping[str, Tensor], left: Tensor, actual: Tensor) -> Mapping[str, float]:
    """Return the correlation of each score, summed over the removed examples."""
    return {name: score(left @ tau.t(), actual) for name, tau in scored.items()}


def one_run(trainings: Sequence[Training], found: Mapping[str, Sequence[Correlations]]) -> Scores:
    """Return the table of the same run without examples."""
    size = trainings[0].size
    title = (
        f"Attribution, one run: {size.train} digits of two classes, {size.steps} steps of {size.batch}, outputs at "
        f"{size.read} points; without each example, {size.groups} groups of 5 %, {size.groups} halves"
    )
    return table(title, "left out", ("one", "5 %", "50 %", "s"), trainings, found, without=("5 effects",))


def fresh_seeds(trainings: Sequence[Training], found: Mapping[str, Sequence[Correlations]]) -> Scores:
    """Return the table of trainings on halves."""
    size = trainings[0].size
    title = (
        f"Attribution, fresh seeds: the same trainings on {size.fresh} random halves, each from its own start and in "
        "its own order; the outputs, and −loss"
    )
    return table(title, "asked", ("output", "-loss", "s"), trainings, found)


def seen_once(trainings: Sequence[Training], found: Mapping[str, Sequence[Correlations]]) -> Scores:
    """Return the table of one pass over images."""
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
    found: Mapping[str, Sequence[Correlations]],
    without: Sequence[str] = (),
) -> Scores:
    """Return the rows of every training with a complete seed, without some scores."""
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
    """Spell the mean.

    >>> seconds([1.0, 2.0])
    '1.50'
    """
    return f"{mean_of(values).value:.2f}"


def cell(values: Sequence[float]) -> str:
    """Spell the mean and the half-width of its interval, or a dash if there are no values.

    >>> cell([0.5, 0.6, 0.7]), cell([-1.0]), cell([])
    ('.60±.25', '-1.00', '–')
    """
    if not values:
        return "–"
    found = mean_of(values)
    reach = "" if isnan(found.reach) else f"±{short(found.reach)}"
    return short(found.value) + reach


def short(value: float) -> str:
    """Spell two decimals, without the leading zero."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"
