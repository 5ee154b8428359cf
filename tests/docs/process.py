"""Commands that documents show, run as processes: each succeeds, warns of nothing, and keeps to its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ntkexp.config.compose import compose
from tests.docs.readme import ROOT

PROGRAM = 1.0
"""Gigabytes beyond `memory_gb`: Python with torch takes 0.3 before it does anything, and work is cut by estimates."""


def printed(command: list[str], folder: Path) -> str:
    """What a command prints on stdout, in a folder with `ntkexp` in `.venv/bin`, where the README puts it."""
    install(folder / ".venv" / "bin" / "ntkexp")
    paths = {"PATH": f"{folder}/.venv/bin{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, (command, ended.stderr)
    assert "arning" not in ended.stderr, (command, ended.stderr)
    return ended.stdout


def install(program: Path) -> None:
    """Put the program there, each of whose processes dies where it takes more memory than it should, workers too."""
    kilobytes = int((compose([]).room_gb + PROGRAM) * 1e9 / 1024)
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nulimit -d {kilobytes}\nexec "{sys.executable}" -m ntkexp "$@"\n')
    program.chmod(0o755)
