"""Other programs. Each is installed in its own environment when it is first needed, and kept there."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from subprocess import PIPE
from typing import Any, Self, TypeAlias

import torch

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
OUR_TORCH = ("-c", str(ROOT / "constraints.txt"), "torch", "numpy")
WITH_NETWORKS = (*OUR_TORCH, "jaxtyping", "pydantic")  # which unpickling a network of ntkexp needs
PACKAGES = {
    "neural_tangents": ("jax==0.4.23", "jaxlib==0.4.23", "neural_tangents==0.6.5", "numpy<2", "scipy<1.13"),
    "nngeometry": (*OUR_TORCH, "nngeometry==0.4"),
    "dattri": (*WITH_NETWORKS, "dattri==0.3.0"),
    "traker": (*WITH_NETWORKS, "traker==0.3.2"),
}
"""neural_tangents does not import on newer versions of JAX."""


def environment(folder: Path, program: str) -> Path:
    """Return the interpreter of the environment of a program. Install the program if it is missing."""
    python, is_installed = (folder / program / name for name in ("bin/python", "whole"))
    if not is_installed.exists():  # or its installation was interrupted
        try:
            subprocess.run([sys.executable, "-m", "venv", folder / program], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[program]], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"{program} cannot be installed in {folder}: {error}") from error
        is_installed.touch()
    return python


class Peer:
    """A running `python -m tests.bench.scorers PROGRAM`. Questions and answers are files."""

    def __init__(self, folder: Path, program: str) -> None:
        self.program = program
        self.command = (environment(folder, program), "-m", "tests.bench.scorers", program)

    def __enter__(self) -> Self:
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            self.command, env=ENVIRONMENT, text=True, stdin=PIPE, stdout=PIPE, stderr=self.errors
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()
        self.errors.close()

    def ask(self, given: object) -> Any:
        """Return the answer of the program to tensors and networks."""
        with tempfile.TemporaryDirectory() as place:
            asked, answer = Path(place, "asked.pt"), Path(place, "answer.pt")
            torch.save(given, asked)
            print(asked, answer, sep="\t", file=self.process.stdin, flush=True)
            for line in self.process.stdout or ():
                if line == "answered\n":
                    return torch.load(answer)
        self.errors.seek(0)
        raise RuntimeError(f"{self.program}: {self.errors.read()[-2000:]}")


# Races: a program receives one JSON line for each call, and answers with the seconds of the call or with the reason why
# it failed. A program that does not answer in time is stopped, and started again for the next question.


SECONDS = 10.0  # default limit of a call
FIRST = 60.0  # seconds added for the first call of a kernel: the program is imported, and the kernel compiled
DIED = "it died"

Answer: TypeAlias = float | str
"""Seconds, or the reason why there are none."""


@dataclass(frozen=True)
class Peers:
    """The folder of the environments of other programs, and the limit of a call in seconds."""

    folder: Path
    seconds: float = SECONDS

    def racer(self, program: str, race: str, threads: int) -> Racer:
        """Return a program that can be asked for the seconds of calls."""
        python = environment(self.folder, program)
        return Racer((str(python), "-m", "tests.bench.racers", race, str(threads)), self.seconds)

    def medians(self, program: str, kernels: Sequence[Any], times: int, threads: int) -> list[Answer]:
        """Return the median seconds of each kernel, without its first call."""
        with self.racer(program, program, threads) as racer:
            found = [median_of(racer, kernel, times) for kernel in kernels]
        for kernel, answer in zip(kernels, found, strict=True):
            sys.stderr.write(f"  {program}, {' '.join(map(str, kernel))}: {answer}\n")
        return found


def median_of(racer: Racer, kernel: Any, times: int) -> Answer:
    """Return the median seconds of some calls of a kernel, or the reason why one failed."""
    calls: list[float] = []
    for _ in range(1 + times):
        answer = racer.ask(kernel)
        if isinstance(answer, str):
            return median(calls[1:]) if len(calls) > 1 else answer
        calls.append(answer)
        if sum(calls[1:]) > racer.seconds:
            break
    return median(calls[1:])


@dataclass
class Racer:
    """A program that answers questions on a pipe, and the limit of an answer in seconds."""

    command: tuple[str, ...]
    seconds: float
    first: float = FIRST
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    asked: set[str] = field(default_factory=set, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, kernel: Any) -> Answer:
        """Return the seconds of one call of a kernel."""
        question = json.dumps(kernel)
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, env=ENVIRONMENT, stdin=PIPE, stdout=PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
            self.asked.clear()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question.encode() + b"\n")
        limit = self.seconds + (0.0 if question in self.asked else self.first)
        self.asked.add(question)
        if not select.select([self.process.stdout], [], [], limit)[0]:
            self.stop()
            return f"> {self.seconds:g} s"
        line = self.process.stdout.readline()
        if not line:
            self.stop()
            return DIED
        answer: Answer = json.loads(line)
        return answer

    def stop(self) -> None:
        """Stop the program if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
