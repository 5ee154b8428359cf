"""`python -m tests.bench` prints nine tables; with `--quick` the same for sizes that take seconds.

Numbers that are compared are measured in turns within one run, and their medians are taken: machines drift.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.bench import architectures, backward, default_run, engine, infinite, reading, tangent, training


def main(arguments: list[str]) -> None:
    """All benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Speed of kernels and of training.")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--peers", type=Path, help="a folder for environments of other programs, to compare with")
    parser.add_argument("--plot", type=Path, help="where to draw the last table: cost against error")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    sys.stdout.write(f"torch {torch.__version__}, {chosen.threads} threads, float64\n")
    for benchmark in (tangent, architectures, training, default_run, backward, engine):
        sys.stdout.write("\n" + benchmark.report(quick=chosen.quick))
        sys.stdout.flush()
    others = chosen.peers and chosen.peers / "neural_tangents"
    sys.stdout.write("\n" + infinite.report(quick=chosen.quick, others=others))
    sys.stdout.flush()
    sys.stdout.write("\n" + reading.report(quick=chosen.quick, plot=chosen.plot))


if __name__ == "__main__":  # so that importing this module runs nothing
    main(sys.argv[1:])
