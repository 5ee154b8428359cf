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
from collections.abc import Callable
from dataclasses import asdict
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
from tests.bench.asked import MORE, RACES, parse
from tests.bench.cell import Machine, Table, as_json, measure, shown
from tests.bench.figures import beside, counted, keep
from tests.bench.figures import shown as compared
from tests.bench.peers import Race

CELLS = {chapter.__name__.rpartition(".")[2]: chapter for chapter in (kernels, steps, training, infinite, commands)}
REPORTS: dict[str, Callable[..., list[Table]]] = {
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
    chapter = CELLS[name]
    peers = None if chosen.peers is None else Race(chosen.peers, chosen.seconds)
    cells = chapter.cells(machine, quick=chosen.quick, peers=peers, **given)
    write("\n" + shown(chapter.TITLE, cells, machine).text, chosen.json)
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


if __name__ == "__main__":  # so that importing this module runs nothing
    main(sys.argv[1:])
