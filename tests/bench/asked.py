"""What is asked of the benchmark: its options, and what would be measured in vain."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.bench.infinite import CASES, QUICK
from tests.bench.peers import SECONDS

MORE = {
    "plot": ("reading",),
    "only": ("infinite",),
    "large": ("scale",),
    **dict.fromkeys(("cells", "minutes", "full"), ("attribution",)),
}
RACES = ("kernels", "infinite", "attribution")  # tables with other programs


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
    cases = QUICK if chosen.quick else CASES
    return {
        "--threads and --seconds are more than 0": chosen.threads < 1 or chosen.seconds <= 0,
        "--minutes are 0 or more": chosen.minutes is not None and not chosen.minutes >= 0,
        "--tag=NAME keeps figures of whole sizes: leave out --quick": chosen.tag is not None and chosen.quick,
        "--tag= needs a name": chosen.tag == "",
        f"--plot={chosen.plot}: {folder} is no folder": folder and not folder.is_dir(),
        f"--only={chosen.only}: no row has these words": all(chosen.only not in case.name for case in cases),
    }
