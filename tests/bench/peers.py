"""Other programs, each in an environment of its own, which is made when it is asked for and kept for the next time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
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
    python = folder / program / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / program], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[program]], check=True)
    return python


def measured(folder: Path, program: str, kernel: str, *words: object) -> dict[str, float]:
    """What `tests/bench/PROGRAM_KERNEL.py` measures for these words: median seconds by name."""
    found: dict[str, float] = json.loads(called(folder, program, kernel, *map(json.dumps, words)).splitlines()[-1])
    return found


def answered(folder: Path, program: str, question: str, given: object) -> Any:
    """What `tests/bench/PROGRAM_QUESTION.py` makes of tensors and networks: both go through files."""
    with tempfile.TemporaryDirectory() as place:
        asked, answer = Path(place, "asked.pt"), Path(place, "answer.pt")
        torch.save(given, asked)
        called(folder, program, question, str(asked), str(answer))
        return torch.load(answer)


def called(folder: Path, program: str, script: str, *words: str) -> str:
    """What a script prints that another environment runs, in which our networks can be unpickled."""
    path = Path(__file__).with_name(f"{program}_{script}.py")
    done = subprocess.run(
        [environment(folder, program), path, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{path.name}: {done.stderr[-2000:]}")
    return done.stdout
