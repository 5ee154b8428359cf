"""`python -m tests.bench [NAME…]` prints the named tables, or all. `--quick` uses small sizes, which take seconds.

Compared programs are measured in turns within one run, and the tables show medians, because machines drift. With
`--peers` the tables also compare with other programs, each installed in its own environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.bench import attribution, follow, infinite, kernels, scale, small_loops, steps
from tests.bench.cell import Cell, Machine, Table, as_json, measure, shown
from tests.bench.peers import SECONDS, Peers

CELLS: dict[str, tuple[str, Callable[..., list[Cell]]]] = {
    "kernels": (kernels.KERNELS, kernels.kernels),
    "steps": (steps.STEPS, steps.steps),
    "training": (steps.TRAINING, steps.training),
    "infinite": (infinite.TITLE, infinite.cells),
    "commands": (steps.COMMANDS, steps.commands),
}
REPORTS: dict[str, Callable[..., list[Table]]] = {
    "language": kernels.language,
    "scale": scale.report,
    "follow": follow.report,
    "loops": small_loops.report,
    "attribution": attribution.report,
}
WITH_PEERS = ("kernels", "infinite", "attribution")
OPTIONS = {
    "only": ("infinite",),
    **dict.fromkeys(("cells", "minutes", "full"), ("attribution",)),
    **dict.fromkeys(("peers", "seconds"), WITH_PEERS),
}
"""The tables that each option is for."""


def main(arguments: list[str]) -> None:
    """Measure and print tables."""
    names = [*CELLS, *REPORTS]
    chosen = parse(arguments, names)
    torch.set_num_threads(chosen.threads)
    machine = measure(quick=chosen.quick)
    threads = f"{chosen.threads} thread{'' if chosen.threads == 1 else 's'}"
    rates = f"{machine.operations / 1e9:.3g} GFLOP/s and {machine.bytes / 1e9:.3g} GB/s"
    write(f"torch {torch.__version__}, {threads}, float64, {rates}", chosen.json)
    cells: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    for name in chosen.names or names:
        options = {key: getattr(chosen, key) for key, takers in OPTIONS.items() if name in takers and key != "seconds"}
        if name in CELLS:
            cells += measured(name, machine, chosen, options)
        else:
            found = REPORTS[name](quick=chosen.quick, **options)
            write("\n" + "\n".join(table.text for table in found), chosen.json)
            tables += [table.data for table in found]
    if chosen.json:
        run = {"threads": chosen.threads, "quick": chosen.quick, "product": machine.product}
        sys.stdout.write(json.dumps(run | {"cells": cells, "tables": tables}) + "\n")


def measured(name: str, machine: Machine, chosen: argparse.Namespace, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Print a table of cells, and return it as data."""
    title, cells_of = CELLS[name]
    if options.get("peers") is not None:
        options["peers"] = Peers(chosen.peers, chosen.seconds)
    cells = cells_of(machine, quick=chosen.quick, **options)
    write("\n" + shown(title, cells, machine).text, chosen.json)
    return as_json(cells, machine)


def write(text: str, as_data: bool) -> None:
    """Print a table, on stderr if stdout takes JSON."""
    stream = sys.stderr if as_data else sys.stdout
    stream.write(text.rstrip("\n") + "\n")
    stream.flush()


def parser_of(names: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Speed of kernels and of training.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try whether the bench runs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--peers", type=Path, help="a folder for environments of other programs, to compare with")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for a call of another program")
    parser.add_argument("--only", default="", help="rows of `infinite` whose names have these words: `stride, flatten`")
    parser.add_argument("--cells", type=Path, help="a folder where `attribution` keeps results, and continues")
    parser.add_argument("--minutes", type=float, help="limit for new results of `attribution`; 0: tables of kept ones")
    parser.add_argument(
        "--full", type=Path, metavar="MNIST", help="`attribution` in the sizes of papers; MNIST's folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def parse(arguments: Sequence[str], names: Sequence[str]) -> argparse.Namespace:
    """Return the options, or exit if they have no effect or cannot be measured."""
    parser = parser_of(names)
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    for key, takers in OPTIONS.items():
        if chosen.names and getattr(chosen, key) != parser.get_default(key) and not {*chosen.names} & {*takers}:
            parser.error(f"--{key} is for {', '.join(takers)}: name one of these, or leave it out")
    for sentence, is_wrong in mistakes(chosen).items():
        if is_wrong:
            parser.error(sentence)
    return chosen


def mistakes(chosen: argparse.Namespace) -> Mapping[str, bool]:
    """Return the error messages, each with its condition."""
    cases = infinite.QUICK if chosen.quick else infinite.CASES
    return {
        "--threads and --seconds are more than 0": chosen.threads < 1 or chosen.seconds <= 0,
        "--minutes are 0 or more": chosen.minutes is not None and not chosen.minutes >= 0,
        f"--only={chosen.only}: no row has these words": all(chosen.only not in case.name for case in cases),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
