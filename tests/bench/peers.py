"""Other programs, each in an environment of its own, which is made when it runs for and kept for the next time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from subprocess import PIPE
from typing import IO, Any, Self, TypeAlias

import torch

ROOT = Path(__file__).parents[2]
KNOWS_US = os.environ | {"PYTHONPATH": str(ROOT)}
OURS = ("-c", str(ROOT / "constraints.txt"), "torch", "numpy")
NETWORKS = (*OURS, "jaxtyping", "pydantic")  # what networks of ours are unpickled with
PACKAGES = {
    "neural_tangents": ("jax==0.4.23", "jaxlib==0.4.23", "neural_tangents==0.6.5", "numpy<2", "scipy<1.13"),
    "nngeometry": (*OURS, "nngeometry==0.4"),
    "dattri": (*NETWORKS, "dattri==0.3.0"),
    "traker": (*NETWORKS, "traker==0.3.2"),
}
"""neural_tangents does not import on newer versions of JAX."""


def environment(folder: Path, program: str) -> Path:
    """The interpreter of an environment with this program."""
    python, whole = (folder / program / name for name in ("bin/python", "whole"))
    if not whole.exists():  # whoever was stopped on the way left a part of it
        try:
            subprocess.run([sys.executable, "-m", "venv", folder / program], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[program]], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"{program} cannot be installed in {folder}: {error}") from error
        whole.touch()
    return python


class Peer:
    """`python -m tests.bench.scorers PROGRAM`, which goes on and answers as often as it is asked, through files."""

    def __init__(self, folder: Path, program: str) -> None:
        self.program = program
        self.command = (environment(folder, program), "-m", "tests.bench.scorers", program)

    def __enter__(self) -> Self:
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            self.command, env=KNOWS_US, text=True, stdin=PIPE, stdout=PIPE, stderr=self.errors
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()
        self.errors.close()

    def ask(self, given: object) -> Any:
        """What it makes of tensors and networks."""
        with tempfile.TemporaryDirectory() as place:
            asked, answer = Path(place, "asked.pt"), Path(place, "answer.pt")
            torch.save(given, asked)
            print(asked, answer, sep="\t", file=self.process.stdin, flush=True)
            for line in self.process.stdout or ():
                if line == "answered\n":
                    return torch.load(answer)
        self.errors.seek(0)
        raise RuntimeError(f"{self.program}: {self.errors.read()[-2000:]}")


# Another program races: it is started once, tells each of its calls as it ends, and is stopped where one does not.
#
#     ready                     it has been imported
#     [kernel, seconds]         a call of this kernel took so long; the first, which compiles, does not count
#     [kernel, "a reason"]      this kernel failed
#
# One that had to be stopped is started again for the kernels that are left.


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
            [environment(self.folder, program), "-m", "tests.bench.racers", program],
            env=KNOWS_US,
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


# Another program waits beside us: each line that it is told makes it do its act once, and answer by a line of JSON.
#
#     a number      the seconds that it took
#     "a reason"    why there are none
#
# One that does not answer in time is stopped, and is started again when it runs for something else.


@dataclass
class Waiting:
    """`python -m tests.bench.racers QUESTION`; it has so many seconds for an answer."""

    race: Race
    program: str
    question: str
    seconds: float
    threads: int
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, word: str) -> float | str:
        """The seconds that its act takes, or why there are none."""
        process = self.process = self.process or self.started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(word.encode() + b"\n")
        told = line(process.stdout, self.seconds)
        if told in (None, DIED):
            self.stop()
        return f"> {self.seconds:g} s" if told is None else told

    def started(self) -> subprocess.Popen[bytes]:
        """The program, as it begins to wait."""
        python = environment(self.race.folder, self.program)
        return subprocess.Popen(
            [python, "-m", "tests.bench.racers", self.question, str(self.threads)],
            env=KNOWS_US,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def stop(self) -> None:
        """Stop it, if it was started."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
