"""Other programs, each in an environment of its own, which is made when it is asked for and kept for the next time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "neural_tangents": ("jax==0.4.23", "jaxlib==0.4.23", "neural_tangents==0.6.5", "numpy<2", "scipy<1.13"),
    "nngeometry": ("-c", str(ROOT / "constraints.txt"), "torch", "numpy", "nngeometry==0.4"),
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
    script = Path(__file__).with_name(f"{program}_{kernel}.py")
    given = [json.dumps(word) for word in words]
    done = subprocess.run([environment(folder, program), script, *given], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
