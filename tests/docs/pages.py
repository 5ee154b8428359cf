"""Commands that documents show, run as processes: each succeeds, warns of nothing, and keeps to its memory.

Most are forked from a process that has loaded the package: to load it takes longer than what they do.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from ntkexp.cli.main import app
from ntkexp.config.compose import compose
from tests.docs.readme import ROOT
from tests.run.commands import FORKS, obey

PROGRAM = 1.0
"""Gigabytes beyond `memory_gb`: Python with torch takes 0.3 before it does anything, and work is cut by estimates."""
AFRESH = ("sweep", "claims")  # their own server forks the workers, and two of them are not one beside the other


def told(line: str, folder: Path) -> str:
    """What a line for the shell prints on stdout, in a folder; the shell takes its words apart."""
    if not line.startswith("ntkexp ") or line.split()[1] in AFRESH:
        return printed(["bash", "-c", line], folder)
    _, *words = printed(["bash", "-c", f"printf '%s\\n' {line}"], folder).splitlines()
    with TemporaryDirectory() as place:
        said, shown = Path(place, "said"), Path(place, "shown")
        process = FORKS.Process(target=obey_in, args=(folder, words, said, shown))
        process.start()
        process.join()
        assert process.exitcode == 0, (line, said.read_text("utf-8"))
        assert "arning" not in said.read_text("utf-8"), (line, said.read_text("utf-8"))
        return shown.read_text("utf-8")


def obey_in(folder: Path, words: Sequence[str], said: Path, shown: Path) -> None:
    """Run a command there, which dies where it takes more memory than it should."""
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * kilobytes(), 1024 * kilobytes()))
    obey(list(words), said, shown)


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
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nulimit -d {kilobytes()}\nexec "{sys.executable}" -m ntkexp "$@"\n')
    program.chmod(0o755)


@cache
def kilobytes() -> int:
    """What a command may take."""
    return int((compose([]).room_gb + PROGRAM) * 1e9 / 1024)


# The commands as the app itself has them, each with its arguments, its options and what help says of them.


HEADER = ("option", "default", "meaning")


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A command, or the commands of a group and of the groups in it, by the words that call them."""
    inside = getattr(command, "commands", {})
    if not inside:
        yield path, command
    for name, other in inside.items():
        yield from walk(other, f"{path} {name}")


ALL = dict(walk(typer.main.get_command(app), "ntkexp"))


def options() -> set[str]:
    """Every option of every command, and of the program itself."""
    common = {"--help", "--version", "--install-completion", "--show-completion"}
    return common | {word for command in ALL.values() for each in command.params for word in each.opts}


def called(path: str) -> str:
    """A command with its arguments.

    >>> called("ntkexp resume")
    'ntkexp resume RUN'
    """
    return " ".join([path, *(each.metavar for each in ALL[path].params if not is_option(each))])


def rows(path: str) -> Iterator[tuple[str, str, str]]:
    """The options of a command."""
    for each in filter(is_option, ALL[path].params):
        word = f"{each.opts[0]} {each.metavar}" if each.metavar else each.opts[0]
        yield f"`{word}`", default(each.default), each.help


def is_option(parameter: Any) -> bool:
    """Whether a parameter is an option, which begins with dashes, and no argument."""
    return bool(parameter.opts[0].startswith("--"))


def default(value: object) -> str:
    """What an option is if it is not given; nothing where it is then left out."""
    said = value.value if isinstance(value, Enum) else value
    return "" if said is None or said is False else f"`{said}`"


# The pages in docs/, taken apart block by block, and carried out in order in a folder.
#
#     python, yaml with a name in its first line    is written to a file of this name
#     python                                        runs; where a text follows, it is what was printed
#     sh                                            each line runs in a shell
#     text                                          is shown only
#
# Sweeps that come with the package would take minutes: they are given `SHORTER` as well.


PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "reference.md")  # which has its own test
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")
SMALL = "data.train=12 data.probe=6 data.test=6 steps=20 threads=1"
SHORTER = {
    "ntkexp sweep width": f"model.width=8,16,32 seed=0..1 {SMALL}",
    "ntkexp sweep bottleneck": f"model.narrow=2,4 seed=0 {SMALL}",
}


@dataclass(frozen=True)
class Block:
    """A piece of code, and what is shown below it."""

    language: str
    text: str
    below: str = ""

    @property
    def file(self) -> str | None:
        """The name in its first line."""
        named = FILE.match(self.text)
        return named[1] if named and self.language in {"python", "yaml"} else None

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block."""
        return self.text.splitlines() if self.language == "sh" else []

    def run(self, folder: Path) -> None:
        """A program prints what is shown below it."""
        if self.language == "python" and not self.file:
            assert printed([sys.executable, "-c", self.text], folder) == self.below


@dataclass(frozen=True)
class Page:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """All but the code."""
        return BLOCK.sub("", self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        """The code, in order."""
        found = [Block(*pair) for pair in BLOCK.findall(self.text)]
        below = [block.text if block.language == "text" else "" for block in [*found[1:], Block("", "")]]
        return [Block(block.language, block.text, text) for block, text in zip(found, below, strict=False)]

    @property
    def commands(self) -> list[str]:
        """Every line for the shell."""
        return [line for block in self.blocks for line in block.commands]

    def files(self, folder: Path) -> None:
        """Write what the page says should be in files."""
        for block in self.blocks:
            if block.file:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.text, encoding="utf-8")

    def carry_out(self, folder: Path) -> None:
        """Do all that the page does."""
        self.files(folder)
        for block in self.blocks:
            for line in block.commands:
                told(shortened(line), folder)
            block.run(folder)


def shortened(line: str) -> str:
    """The same command for less time."""
    return " ".join([line, *(words for start, words in SHORTER.items() if line.startswith(start))])
