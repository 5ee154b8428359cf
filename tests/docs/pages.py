"""The commands and programs of the documents. They run as processes, without warnings and with limited memory."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Any

import typer

from ntkexp.cli.main import app
from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.compose import compose
from tests.docs.readme import ROOT
from tests.run.commands import FORKS, Given, call_within, command, program, undrawn

PROGRAM_GB = 1.0
"""Memory beyond `memory_gb`. Python with torch takes 0.3 GB, and the memory of computations is estimated."""


def printed(command: list[str], folder: Path) -> str:
    """Return the stdout of a command in a folder that contains `.venv/bin/ntkexp`, as in the README."""
    install(folder / ".venv" / "bin" / "ntkexp")
    paths = {"PATH": f"{folder}/.venv/bin{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, (command, ended.stderr)
    assert "arning" not in ended.stderr, (command, ended.stderr)
    return ended.stdout


def install(program: Path) -> None:
    """Install the program, with a limit of memory for each of its processes."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nulimit -d {most_bytes() // 1024}\nexec "{sys.executable}" -m ntkexp "$@"\n')
    program.chmod(0o755)


def most_bytes() -> int:
    """Return the limit of memory."""
    return int(compose([]).budget.bytes + PROGRAM_GB * 1e9)


WITH_WORKERS = re.compile(r"ntkexp (sweep|claims)(?! list)(?!.* --dry-run)")
"""Commands with workers. A shell starts them, so that the memory limit applies to workers too."""


def carried_out(line: str, folder: Path) -> str:
    """Run a line of a shell. Return its stdout."""
    line = shortened(line)
    if not line.startswith("ntkexp ") or WITH_WORKERS.match(line):
        return printed(["bash", "-c", line], folder)
    act = undrawn if line.startswith("ntkexp train ") else command
    return forked(act, expanded(line, folder)[1:], folder)


def expanded(line: str, folder: Path) -> list[str]:
    """Return the words of a line, with expanded patterns of files."""
    words = []
    for word in shlex.split(line):
        words += sorted(glob(word, root_dir=folder)) or [word]
    return words


def forked(act: Callable[[Given], None], given: Given, folder: Path) -> str:
    """Run a function in a process that is forked from a process with the loaded package. Return its stdout."""
    out, err = folder / ".out.txt", folder / ".err.txt"
    process = FORKS.Process(target=call_within, args=(act, given, folder, (out, err), most_bytes()))
    process.start()
    process.join()
    errors = err.read_text("utf-8")
    assert process.exitcode == 0, (given, errors)
    assert "arning" not in errors, (given, errors)
    return out.read_text("utf-8")


# The commands of the app, with their arguments, options and help.


HEADER = ("option", "default", "meaning")


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group, with their words."""
    inside = getattr(command, "commands", {})
    if not inside:
        yield path, command
    for name, other in inside.items():
        yield from walk(other, f"{path} {name}")


ALL = dict(walk(typer.main.get_command(app), "ntkexp"))


def options() -> set[str]:
    """Return every option of the program and its commands."""
    common = {"--help", "--version", "--install-completion", "--show-completion"}
    return common | {word for command in ALL.values() for parameter in command.params for word in parameter.opts}


def known_keys() -> set[str]:
    """Return every key of an experiment, such as `model.width`."""
    choices = Choices(config_folders(None))
    of_groups = {
        key for group in choices.groups() for option in choices.options(group) for key in choices.keys(group, option)
    }
    return of_groups | set(choices.common())


def called(path: str) -> str:
    """Return a command with its arguments.

    >>> called("ntkexp resume")
    'ntkexp resume RUN'
    """
    return " ".join([path, *(parameter.metavar for parameter in ALL[path].params if not is_option(parameter))])


def rows(path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the options of a command, with default and help."""
    for option in filter(is_option, ALL[path].params):
        if option.hidden:
            continue
        word = f"{option.opts[0]} {option.metavar}" if option.metavar else option.opts[0]
        yield f"`{word}`", default(option.default), option.help


def is_option(parameter: Any) -> bool:
    """Return true for an option, and false for an argument."""
    return bool(parameter.opts[0].startswith("--"))


def default(value: object) -> str:
    """Return the default of an option, or an empty text."""
    plain = value.value if isinstance(value, Enum) else value
    return "" if plain is None or plain is False else f"`{plain}`"


# The pages in docs/. Their blocks run in order, in one folder:
#
#     python, yaml with a name in its first line    is written to this file
#     python                                        runs, and prints the following block `text`
#     python, no import in its first line           continues the program before it
#     sh                                            each line runs in a shell, with smaller sizes from `SHORTER`
#     text, py                                      does not run


PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "reference.md")  # it has another test
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")
FEW = "data.train=12 data.query=6 data.test=6"
SMALL = f"{FEW} steps=20 threads=1"
SHORTER = {
    "ntkexp sweep width": f"model.width=8,16,32 seed=0..1 {SMALL}",
    "ntkexp sweep bottleneck": f"model.narrow=2,4 seed=0 {SMALL}",
    "ntkexp sweep model.width=16,32": "steps=2",
    "ntkexp sweep model.width=16,48": SMALL,
    "ntkexp train data=sequence": "data.train=12 data.query=8 data.test=8 steps=4",
    "ntkexp train data=table data.path=houses.csv": f"{FEW} steps=2",
    "ntkexp train model.activation=tanh model.width=32": "data.train=24 data.query=6 data.test=6 steps=5",
    "ntkexp train model.activation=tanh model.width=40": "data.train=32 data.query=6 data.test=6 steps=2",
    "ntkexp train model.width=24 steps=20": f"{FEW} steps=2",
    "ntkexp train optimizer=": FEW,
    "ntkexp validate": "--trainings=6 --queries=4",
    "ntkexp train data=digits model.activation=tanh optimizer=sgd": f"{FEW} steps=5",
    "ntkexp train data=modular_addition": f"{FEW} steps=2",
    "ntkexp train data=pictures": f"{FEW} steps=2",
    "ntkexp train data.classes=all": f"{FEW} steps=2",
    "ntkexp train loss=cross_entropy data.classes": f"{FEW} steps=2",
    "ntkexp train model=module": "steps=5",
    "ntkexp train path.every=snapshots": FEW,
    "ntkexp train path.kernels": f"{FEW} steps=2",
    "ntkexp train path.substeps": "steps=5",
    "ntkexp train path.rule": FEW,
    "ntkexp kernel ensemble": "--networks=2",
    "ntkexp kernel limit": FEW,
}


@dataclass(frozen=True)
class Block:
    """A block of code, and the text below it."""

    language: str
    text: str
    below: str = ""

    @property
    def file(self) -> str | None:
        """The file name in its first line."""
        named = FILE.match(self.text)
        return named[1] if named and self.language in {"python", "yaml"} else None

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block."""
        return self.text.splitlines() if self.language == "sh" else []

    @property
    def is_program(self) -> bool:
        return self.language == "python" and not self.file

    @property
    def continues(self) -> bool:
        """True if the block continues the program before it."""
        return self.is_program and not self.text.startswith(("import ", "from "))

    def run(self, folder: Path) -> None:
        """Run a program. Its output must agree with the text below it."""
        if self.is_program:
            if "multiprocessing" in self.text:  # its processes import it again
                output = printed([sys.executable, "-c", self.text], folder)
            else:
                output = forked(program, self.text, folder)
            assert output == self.below


@dataclass(frozen=True)
class Page:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """The page without code."""
        return BLOCK.sub("", self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of code, in order."""
        found = [Block(*pair) for pair in BLOCK.findall(self.text)]
        below = [block.text if block.language == "text" else "" for block in [*found[1:], Block("", "")]]
        return [Block(block.language, block.text, text) for block, text in zip(found, below, strict=False)]

    @property
    def programs(self) -> list[Block]:
        """The blocks. A block that continues a program is joined to it."""
        joined: list[Block] = []
        for block in self.blocks:
            before = next((k for k in reversed(range(len(joined))) if joined[k].is_program), None)
            if block.continues and before is not None:
                start = joined[before]
                joined[before] = Block("python", f"{start.text}\n{block.text}", start.below + block.below)
            else:
                joined.append(block)
        return joined

    @property
    def commands(self) -> list[str]:
        """Every line of a shell."""
        return [line for block in self.blocks for line in block.commands]

    def files(self, folder: Path) -> None:
        """Write the files of the page."""
        for block in self.blocks:
            if block.file:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.text, encoding="utf-8")

    def carry_out(self, folder: Path) -> None:
        """Run all commands and programs of the page."""
        self.files(folder)
        for block in self.programs:
            for line in block.commands:
                carried_out(line, folder)
            block.run(folder)


def shortened(line: str) -> str:
    """Return a command with smaller sizes."""
    return " ".join([line, *(words for start, words in SHORTER.items() if line.startswith(start))])
