"""Other programs, each in an environment of its own, which is made when it is asked for and kept for the next time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PACKAGES = ("jax==0.4.23", "jaxlib==0.4.23", "neural_tangents==0.6.5", "numpy<2", "scipy<1.13")
"""neural_tangents does not import on newer versions of JAX."""
SCRIPT = Path(__file__).with_name("neural_tangents_kernel.py")


def environment(folder: Path) -> Path:
    """The interpreter of an environment with neural_tangents."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def neural_tangents(
    folder: Path, head: str, depth: int, shape: tuple[int, ...], count: int, times: int
) -> dict[int, float]:
    """Median seconds per pair of examples, by the bits of a number."""
    words = [head, str(depth), json.dumps(shape), str(count), str(times)]
    out = subprocess.run([environment(folder), SCRIPT, *words], check=True, capture_output=True, text=True).stdout
    return {int(bits): float(value) for bits, value in json.loads(out.splitlines()[-1]).items()}
