"""`python -m tests.bench [NAME…]` prints tables: all, or those that are named; `--quick` for sizes that take seconds.

Numbers that are compared are measured in turns within one run, and their medians are taken: machines drift. With
`--peers` other programs are measured as well, in environments of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.bench import architectures, backward, default_run, engine, infinite, others, reading, tangent, training

BENCHMARKS: dict[str, Callable[..., str]] = {
    chapter.__name__.rpartition(".")[2]: chapter.report
    for chapter in (tangent, architectures, others, training, default_run, backward, engine, infinite, reading)
}


def main(arguments: list[str]) -> None:
    """All benchmarks, or some."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Speed of kernels and of training.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all, if none is named")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--peers", type=Path, help="a folder for environments of other programs, to compare with")
    parser.add_argument("--plot", type=Path, help="where `reading` draws cost against error")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(BENCHMARKS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    torch.set_num_threads(chosen.threads)
    sys.stdout.write(f"torch {torch.__version__}, {chosen.threads} threads, float64\n")
    more = {"peers": ("others", "infinite"), "plot": ("reading",)}
    for name in chosen.names or BENCHMARKS:
        given = {key: getattr(chosen, key) for key, takers in more.items() if name in takers}
        sys.stdout.write("\n" + BENCHMARKS[name](quick=chosen.quick, **given))
        sys.stdout.flush()


if __name__ == "__main__":  # so that importing this module runs nothing
    main(sys.argv[1:])
