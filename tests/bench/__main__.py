"""`python -m tests.bench [NAME…]` prints tables: all, or those that are named; `--quick` for sizes that take seconds.

Numbers that are compared are measured in turns within one run, and their medians are taken: machines drift. With
`--peers` other programs are measured as well, in environments of their own. Figures are kept as times of a plain
product of matrices in the same run, so that machines compare: `--tag` keeps those of this run under a name, and every
later run is compared with them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.bench import attribution, follow, infinite, kernels, runs, scale, steps
from tests.bench.cell import Cell, Machine, Table, as_json, beside, compared, counted, keep, measure, shown
from tests.bench.peers import SECONDS, Race

CELLS: dict[str, tuple[str, Callable[..., list[Cell]]]] = {
    "kernels": (kernels.KERNELS, kernels.kernels),
    "steps": (steps.STEPS, steps.steps),
    "training": (steps.TRAINING, steps.training),
    "infinite": (infinite.TITLE, infinite.cells),
    "commands": (runs.COMMANDS, runs.commands),
}
REPORTS: dict[str, Callable[..., list[Table]]] = {
    "default_run": runs.default_run,
    "backward": runs.backward,
    "engine": runs.engine,
    "reading": runs.reading,
    "sketch": kernels.sketch,
    "language": kernels.language,
    "precision": steps.precision,
    "scale": scale.report,
    "follow": follow.report,
    "attribution": attribution.report,
    "profile": steps.profile_of_cells,
}
MORE = {
    "plot": ("reading",),
    "only": ("infinite",),
    "large": ("scale",),
    **dict.fromkeys(("cells", "minutes", "full"), ("attribution",)),
}
RACES = ("kernels", "infinite", "attribution")  # tables with other programs


def main(arguments: list[str]) -> None:
    """All benchmarks, or some."""
    names = [*CELLS, *REPORTS]
    chosen = parse(arguments, names, tuple(CELLS))
    torch.set_num_threads(chosen.threads)
    machine = measure(quick=chosen.quick)
    said = f"torch {torch.__version__}, {counted(chosen.threads)}, float64, {machine.operations / 1e9:.3g} GFLOP/s and "
    write(f"{said}{machine.bytes / 1e9:.3g} GB/s", chosen.json)
    cells: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    for name in chosen.names or names:
        if name in CELLS:
            cells += measured(name, machine, chosen)
        else:
            tables += reported(name, chosen)
    older = [] if chosen.quick else beside(cells, chosen.threads)  # small sizes go by the same names
    if cells and not chosen.quick:
        write("\n" + compared(older, len(cells), chosen.threads), chosen.json)
    if chosen.tag:
        keep(cells, chosen.threads, chosen.tag)
    if chosen.json:
        told = {"threads": chosen.threads, "quick": chosen.quick, "product": machine.product, "cells": cells}
        ratios = [asdict(each) | {"ratio": each.ratio} for each in older]
        sys.stdout.write(json.dumps(told | {"compared": ratios, "tables": tables}) + "\n")


def measured(name: str, machine: Machine, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells of one table, which is printed."""
    given = {key: getattr(chosen, key) for key, takers in MORE.items() if name in takers}
    title, cells_of = CELLS[name]
    peers = None if chosen.peers is None else Race(chosen.peers, chosen.seconds)
    cells = cells_of(machine, quick=chosen.quick, peers=peers, **given)
    write("\n" + shown(title, cells, machine).text, chosen.json)
    return as_json(cells, machine)


def reported(name: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Tables without cells, which are printed."""
    given = {key: getattr(chosen, key) for key, takers in MORE.items() if name in takers}
    if name in RACES:
        given["peers"] = chosen.peers
    tables = REPORTS[name](quick=chosen.quick, **given)
    write("\n" + "\n".join(table.text for table in tables), chosen.json)
    return [table.data for table in tables]


def write(text: str, as_data: bool) -> None:
    """A table for people; beside data it goes to the other stream."""
    stream = sys.stderr if as_data else sys.stdout
    stream.write(text.rstrip("\n") + "\n")
    stream.flush()


# What is asked of the benchmark: its options, and what would be measured in vain.


def parser_of(names: Sequence[str]) -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Speed of kernels and of training.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; all, if none is named")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help=f"of torch; {torch.get_num_threads()} if not said"
    )
    parser.add_argument("--peers", type=Path, help="a folder for environments of other programs, to compare with")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a call of another program may take")
    parser.add_argument("--only", default="", help="rows of `infinite` whose names have these words: `stride, flatten`")
    parser.add_argument("--large", action="store_true", help="`scale` with up to 10,000 examples and points")
    parser.add_argument("--plot", type=Path, help="where `reading` draws cost against error")
    parser.add_argument("--cells", type=Path, help="a folder where `attribution` keeps what it measured, and goes on")
    parser.add_argument("--minutes", type=float, help="when `attribution` stops to measure; 0: tables of what is kept")
    parser.add_argument(
        "--full", type=Path, metavar="MNIST", help="`attribution` in the sizes of papers; MNIST's folder"
    )
    parser.add_argument("--tag", help="keep the figures of these cells under this name, to compare later runs with")
    parser.add_argument("--json", action="store_true", help="print one JSON object: cells, and tables of what has none")
    return parser


def parse(arguments: Sequence[str], names: Sequence[str], with_cells: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = parser_of(names)
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    takers = MORE | dict.fromkeys(("peers", "seconds"), RACES) | {"tag": with_cells}
    for key in takers:
        if chosen.names and getattr(chosen, key) != parser.get_default(key) and not {*chosen.names} & {*takers[key]}:
            parser.error(f"--{key} is for {', '.join(takers[key])}: name one of these, or leave it out")
    if said := next((said for said, wrong in mistakes(chosen).items() if wrong), None):
        parser.error(said)
    return chosen


def mistakes(chosen: argparse.Namespace) -> Mapping[str, object]:
    """Sentences, and whether each has to be said."""
    folder = chosen.plot and chosen.plot.parent
    cases = infinite.QUICK if chosen.quick else infinite.CASES
    return {
        "--threads and --seconds are more than 0": chosen.threads < 1 or chosen.seconds <= 0,
        "--minutes are 0 or more": chosen.minutes is not None and not chosen.minutes >= 0,
        "--tag=NAME keeps figures of whole sizes: leave out --quick": chosen.tag is not None and chosen.quick,
        "--tag= needs a name": chosen.tag == "",
        f"--plot={chosen.plot}: {folder} is no folder": folder and not folder.is_dir(),
        f"--only={chosen.only}: no row has these words": all(chosen.only not in case.name for case in cases),
    }


if __name__ == "__main__":  # so that importing this module runs nothing
    main(sys.argv[1:])
