"""Other programs, each in an environment of its own, which is made when it is asked for and kept for the next time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE
from typing import Any, Self

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
    """`tests/bench/PROGRAM_QUESTION.py`, which goes on and answers as often as it is asked, through files."""

    def __init__(self, folder: Path, program: str, question: str) -> None:
        self.module = module(program, question)
        self.python = environment(folder, program)

    def __enter__(self) -> Self:
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [self.python, "-m", self.module], env=KNOWS_US, text=True, stdin=PIPE, stdout=PIPE, stderr=self.errors
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
        raise RuntimeError(f"{self.module}: {self.errors.read()[-2000:]}")


def module(program: str, script: str) -> str:
    """The name of a script: run by its path, it would take files beside it for modules of Python, such as `profile`."""
    return f"tests.bench.{program}_{script}"
