"""The command line of the torture. It prints failures and a table, and exits with 1 if a case failed.

`--only=N` repeats the case with this number.
"""

# ruff: noqa: PLC0415  the numbers of threads must be set before torch is imported

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.torture.crew import Played

HEADER = ("kind", "cases", "refused", "done", "failures", "seconds")


def main(words: Sequence[str]) -> int:
    """Play the chosen cases."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    from tests.torture.crew import all_played, known
    from tests.torture.stage import warm

    chosen = parsed(words, known())
    warm()
    numbers = range(chosen.count) if chosen.only is None else [chosen.only]
    cases = [(kind, number) for kind in chosen.kinds or known() for number in numbers]
    endings = []
    for ending in all_played(cases, chosen.seed, chosen.workers):
        endings.append(ending)
        if ending.fault:
            show(ending, chosen.seed)
    sys.stdout.write(table(endings))
    lost = len(cases) - len(endings)
    sys.stdout.write(f"{lost} cases were lost with their worker\n" if lost else "")
    return 1 if lost or any(ending.fault for ending in endings) else 0


def parsed(words: Sequence[str], kinds: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description="Kills and damages.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(kinds)}; all if none is named")
    parser.add_argument("--count", type=int, default=100, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases")
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="cases at once")
    chosen = parser.parse_args(words)
    if strangers := set(chosen.kinds) - set(kinds):
        parser.error(f"{', '.join(sorted(strangers))}: choose from {', '.join(kinds)}")
    return chosen


def show(ending: Played, seed: int) -> None:
    """Print a failure, and the command that repeats it."""
    again = shlex.join(["python", "-m", "tests.torture", ending.kind, f"--seed={seed}", f"--only={ending.number}"])
    body = "".join(f"    {line}\n" for line in ending.fault.splitlines())
    sys.stdout.write(f"FAILED {again}\n{body}\n")
    sys.stdout.flush()


def table(endings: Sequence[Played]) -> str:
    """Return a row for each kind."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for ending in endings:
        found = counts[ending.kind]
        found.update({"cases": 1, "failures": bool(ending.fault), "milliseconds": round(1000 * ending.seconds)})
        found[ending.outcome] += 1
    rows = [HEADER] + [
        (kind, *(str(found[name]) for name in HEADER[1:-1]), f"{found['milliseconds'] / 1000:.0f}")
        for kind, found in sorted(counts.items())
    ]
    return "".join("".join([f"{row[0]:16}", *(f"{cell:>10}" for cell in row[1:])]) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
