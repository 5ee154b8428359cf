"""In a terminal, sentences are wrapped between words, and the verdict is bold."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.report.synthetic import digits, write_run

STYLE = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")


def in_terminal(columns: int, folder: Path, *words: str, **environment: str) -> str:
    """Run a command in a terminal. Return its output with control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR"}}
    process = subprocess.Popen(
        [sys.executable, "-m", "ntkexp", *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs,
        env=inherited | {"TERM": "xterm"} | environment,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 2**16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("terminal")
    for name in ("one", "two"):
        write_run(place / "outputs" / "runs" / name, digits())
    return place


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", [("report",), ("explain", "outputs/runs/one"), ("runs",)], ids=lambda words: words[0])
@pytest.mark.sample(2)
def test_lines_fit_the_terminal_and_words_stay_whole(outputs: Path, words: tuple[str, ...], columns: int) -> None:
    shown = STYLE.sub("", in_terminal(columns, outputs, *words))
    assert max(map(len, shown.splitlines())) <= columns
    piped = subprocess.run(
        [sys.executable, "-m", "ntkexp", *words], cwd=outputs, capture_output=True, text=True, check=True
    )
    assert words_of(shown) == words_of(piped.stdout)


def words_of(text: str) -> list[str]:
    """Return the words of a text, without numbers: the list of runs has their age."""
    return [word for word in text.split() if not word.isdigit()]


@pytest.mark.slow
def test_the_verdict_is_bold_unless_colours_are_off(tmp_path: Path) -> None:
    words = ("train", "data.train=16", "data.query=8", "data.test=8", "model.width=8", "steps=3")
    in_terminal(80, tmp_path, *words, "--quiet")
    shown = in_terminal(80, tmp_path, *words)  # of the finished run
    assert "\\x1b" not in shown
    (verdict,) = re.findall(r"\x1b\[1m(.*?)\x1b\[0m", shown, re.S)
    assert "the secant kernel machine reproduces the trained network" in verdict.replace("\n", " ")
    assert re.search(r"\x1b\[32msecant ", shown)
    assert max(map(len, STYLE.sub("", shown).splitlines())) <= 80
    assert "\x1b[" not in in_terminal(80, tmp_path, *words, NO_COLOR="1").replace("\x1b[?25h", "")
