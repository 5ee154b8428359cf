"""`python -m tests.bench [NAME…]` prints tables: all, or those that are named; `--quick` for sizes that take seconds.

Numbers that are compared are measured in turns within one run, and their medians are taken: machines drift. With
`--peers` other programs are measured as well, in environments of their own. Figures are kept as times of a plain
product of matrices in the same run, so that machines compare: `--tag` keeps those of this run under a name, and every
later run is held against them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.bench import (
    attribution,
    backward,
    commands,
    default_run,
    engine,
    follow,
    infinite,
    kernels,
    language,
    precision,
    profile,
    reading,
    scale,
    sketch,
    steps,
    training,
)
from tests.bench.cell import as_json, shown
from tests.bench.figures import compared, keep
from tests.bench.machine import Machine, measure
from tests.bench.race import SECONDS, Race

CELLS = {chapter.__name__.rpartition(".")[2]: chapter for chapter in (kernels, steps, training, infinite, commands)}
REPORTS: dict[str, Callable[..., str]] = {
    chapter.__name__.rpartition(".")[2]: chapter.report
    for chapter in (
        default_run,
        backward,
        engine,
        reading,
        sketch,
        language,
        precision,
        scale,
        follow,
        attribution,
        profile,
    )
}
MORE = {
    "peers": ("attribution",),
    "plot": ("reading",),
    "only": ("infinite",),
    "large": ("scale",),
    **dict.fromkeys(("cells", "minutes", "full"), ("attribution",)),
}


def main(arguments: list[str]) -> None:
    """All benchmarks, or some."""
    names = [*CELLS, *REPORTS]
    chosen = parse(arguments, names)
    torch.set_num_threads(chosen.threads)
    machine = measure(quick=chosen.quick)
    said = f"torch {torch.__version__}, {chosen.threads} threads, float64, {machine.operations / 1e9:.3g} GFLOP/s and "
    write(f"{said}{machine.bytes / 1e9:.3g} GB/s", chosen.json)
    found = [entry for name in chosen.names or names for entry in measured(name, machine, chosen)]
    if found:
        write("\n" + compared(found, chosen.threads), chosen.json)
    if chosen.tag:
        keep(found, chosen.threads, chosen.tag)
    if chosen.json:
        sys.stdout.write(json.dumps({"threads": chosen.threads, "product": machine.product, "cells": found}) + "\n")


def parser_of(names: Sequence[str]) -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Speed of kernels and of training.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; all, if none is named")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
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
    parser.add_argument("--json", action="store_true", help="print the cells as one JSON object instead of tables")
    return parser


def parse(arguments: Sequence[str], names: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = parser_of(names)
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    return chosen


def measured(name: str, machine: Machine, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells of one table, or none of a table without cells; the table is printed."""
    given = {key: getattr(chosen, key) for key, takers in MORE.items() if name in takers}
    if name in REPORTS:
        write("\n" + REPORTS[name](quick=chosen.quick, **given), chosen.json)
        return []
    chapter = CELLS[name]
    peers = None if chosen.peers is None else Race(chosen.peers, chosen.seconds)
    cells = chapter.cells(machine, quick=chosen.quick, peers=peers, **given)
    write("\n" + shown(chapter.TITLE, cells, machine), chosen.json)
    return as_json(cells, machine)


def write(text: str, as_data: bool) -> None:
    """A table for people; beside data it goes to the other stream."""
    stream = sys.stderr if as_data else sys.stdout
    stream.write(text.rstrip("\n") + "\n")
    stream.flush()


if __name__ == "__main__":  # so that importing this module runs nothing
    main(sys.argv[1:])
