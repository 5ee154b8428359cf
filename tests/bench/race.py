"""Another program races: it is started once, tells each of its calls as it ends, and is stopped where one does not.

    ready                     it has been imported
    [kernel, seconds]         a call of this kernel took so long; the first, which compiles, does not count
    [kernel, "a reason"]      this kernel failed

One that had to be stopped is started again for the kernels that are left.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, TypeAlias

from tests.bench.peers import ROOT, environment

SECONDS = 10.0
STARTING = 60.0  # seconds, until a program is imported
DIED = "it died"

Kernel: TypeAlias = tuple[str, int, int, int, str]
"""Kind of network, width, outputs, examples, and the method by which."""


@dataclass(frozen=True)
class Race:
    """Where environments of other programs are, and the seconds that a call of theirs may take."""

    folder: Path
    seconds: float = SECONDS

    def best(self, program: str, kernels: Sequence[Kernel], times: int, threads: int) -> Mapping[Kernel, float | str]:
        """Median seconds of each kernel by a program, or why there are none."""
        found: dict[Kernel, float | str] = {}
        while left := [kernel for kernel in kernels if kernel not in found]:
            found |= dict(self.heat(program, left, times, threads))
        return found

    def heat(
        self, program: str, kernels: Sequence[Kernel], times: int, threads: int
    ) -> Iterator[tuple[Kernel, float | str]]:
        """The kernels that come to an end, one after another, until the program has to be stopped."""
        with subprocess.Popen(
            [environment(self.folder, program), Path(__file__).with_name(f"{program}_tangent.py")],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            given = {"kernels": kernels, "times": times, "threads": threads, "seconds": self.seconds}
            process.stdin.write(json.dumps(given).encode() + b"\n")
            try:
                if line(process.stdout, STARTING) != "ready":
                    raise RuntimeError(f"{program} cannot be started in {self.folder}")
                yield from self.laps(program, process.stdout, kernels)
            finally:
                process.kill()

    def laps(self, program: str, stream: IO[bytes], kernels: Sequence[Kernel]) -> Iterator[tuple[Kernel, float | str]]:
        """The same, from what the program tells."""
        for place, kernel in enumerate(kernels):
            calls: list[float] = []
            while isinstance(told := line(stream, self.seconds), float):
                calls.append(told)
            stopped = told is None
            found = median(calls[1:]) if len(calls) > 1 else f"> {self.seconds:g} s" if stopped else str(told)
            said = found if isinstance(found, str) else f"{found:.3g} s"
            sys.stderr.write(f"  {program}, {place + 1} of {len(kernels)}: {' '.join(map(str, kernel))}: {said}\n")
            yield kernel, found
            if stopped:
                return


def line(stream: IO[bytes], seconds: float) -> float | str | None:
    """What is told next: seconds of a call, or a word; None if nothing is in time."""
    if not select.select([stream], [], [], seconds)[0]:
        return None
    told = stream.readline()
    answer: float | str = json.loads(told) if told else DIED
    return answer
