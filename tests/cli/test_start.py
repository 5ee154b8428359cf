"""Starting up: light, plain, and the same by every way in.

One process answers a list of command lines, each by a fork of itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from tests.run.commands import TINY, only_run

HEAVY = ("torch", "hydra", "pandas", "numpy", "matplotlib", "sklearn", "xarray", "rich.progress")
ANSWERING = """
import atexit, json, os, sys
from ntkexp.cli.main import main

for line in sys.stdin:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    asked = json.loads(line)
    for descriptor in (1, 2):
        os.dup2(os.open(asked["said"][descriptor - 1], os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(asked["environment"])
    sys.argv[1:] = asked["arguments"]
    atexit.register(lambda: sys.stderr.write(" ".join(name for name in asked["heavy"] if name in sys.modules)))
    main()
"""


class Ended(NamedTuple):
    """How a command ended, and what it printed; at last, on stderr, what it imported of what is heavy."""

    status: int
    out: str
    err: str


Start = Callable[..., Ended]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process, which has imported what every command line needs."""
    with subprocess.Popen(
        [sys.executable, "-c", ANSWERING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        yield running


@pytest.fixture
def start(server: subprocess.Popen[str], tmp_path: Path) -> Start:
    """A command line, answered."""

    def call(*arguments: str, **environment: str) -> Ended:
        said = [tmp_path / "out", tmp_path / "err"]
        asked = {"arguments": arguments, "environment": environment, "said": list(map(str, said)), "heavy": HEAVY}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{json.dumps(asked)}\n")
        server.stdin.flush()
        return Ended(int(server.stdout.readline()), *(file.read_text("utf-8") for file in said))

    return call


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--help"], "train"),
        ([], "train"),
        (["--version"], "ntkexp "),
        (["train", "--help"], "--force"),
        (["sweep", "--help"], "--dry-run"),
        (["report", "--help"], "--format"),
        (["kernel", "--help"], "predict"),
        (["kernel", "limit", "--help"], "--workers"),
        (["config", "--tree"], "model=mlp (default)"),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_to_explain_oneself(arguments: list[str], word: str, start: Start) -> None:
    ended = start(*arguments)
    assert (ended.status, ended.err) == (0, "")
    assert word in ended.out
    assert "\x1b" not in ended.out


def test_a_run_is_carried_out_without_what_draws_and_reads_it(start: Start, tmp_path: Path) -> None:
    ended = start("train", *TINY, f"--out={tmp_path}", "--quiet")
    assert (ended.status, ended.err) == (0, "torch hydra numpy")


@pytest.mark.slow
def test_and_told_once_more(start: Start, tmp_path: Path) -> None:
    start("train", *TINY, f"--out={tmp_path}", "--quiet")
    again = start("train", *TINY, f"--out={tmp_path}")
    assert again.out.endswith(f"{only_run(tmp_path)}\n")
    assert again.err.endswith("torch hydra numpy")


@pytest.mark.slow
def test_a_run_loads_no_compiler() -> None:
    """What torch would load by itself to shield a dispatch mode, and to be deterministic."""
    program = (
        "import sys, torch, ntkexp\n"
        "from ntkexp.run.environment import fix_circumstances\n"
        "from ntkexp.config.compose import compose\n"
        "fix_circumstances(compose([]))\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "ntkexp.tangent_kernel(torch.nn.Linear(2, 1), torch.ones(3, 2))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ntkexp tr", ["train"]),
        (
            "ntkexp ",
            [
                *("train", "sweep", "claims", "config", "resume", "report", "explain", "attribute", "compare", "runs"),
                "kernel",
            ],
        ),
        ("ntkexp sweep wi", ["width"]),
        ("ntkexp claims kernel_st", ["kernel_stays"]),
        ("ntkexp sweep width model.wi", ["model.width=", "model.width=512"]),
        ("ntkexp train model.wi", ["model.width=", "model.width=512"]),
        ("ntkexp train los", ["loss=", "loss.reduction="]),
        ("ntkexp train loss=s", ["loss=squared"]),
        ("ntkexp config optimizer=sgd optimizer.b", ["optimizer.batch=", "optimizer.batch=32"]),
        ("ntkexp config init.centred=", ["init.centred=false", "init.centred=true"]),
        ("ntkexp train path.rule=[s", ["path.rule=[secant]", "path.rule=[secant,"]),
        ("ntkexp train path.rule=[secant,", [f"path.rule=[secant,{n}{e}" for n in ("gauss", "left") for e in "],"]),
        ("ntkexp train --config-dir=nowhere mod", []),
        ("ntkexp train --qu", ["--quiet"]),
    ],
)
def test_a_shell_completes_whole_words(line: str, offered: list[str], start: Start) -> None:
    environment = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": line}
    ended = start(_NTKEXP_COMPLETE="complete_fish", **environment)
    assert ended.err == ""
    assert [word.partition("\t")[0] for word in ended.out.split("\n") if word] == offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["train", "model.wi"], ["model.width=", "model.width=512"]),
        (["train", "loss", "="], ["cross_entropy", "hinge", "logistic", "squared"]),
        (["train", "loss", "=", "s"], ["squared"]),
        (["train", "optimizer", "=", "sgd", "optimizer.b"], ["optimizer.batch=", "optimizer.batch=32"]),
        (["train", "path.rule", "=", "[s"], ["[secant]", "[secant,"]),
    ],
    ids=" ".join,
)
def test_bash_completes_what_it_splits_at_equals_signs(words: list[str], offered: list[str], start: Start) -> None:
    line = "\n".join(["ntkexp", *words])
    ended = start(_NTKEXP_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words)))
    assert ended.err == ""
    assert ended.out.split() == offered


def into(stream: IO[str] | int, *arguments: str) -> tuple[int, str]:
    """The exit status and the complaints of a command whose output goes there."""
    ended = subprocess.run(
        [sys.executable, "-m", "ntkexp", *arguments], stdout=stream, stderr=subprocess.PIPE, text=True, check=False
    )
    return ended.returncode, ended.stderr


def test_a_closed_pipe_is_one_line() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert into(writing, "config", "--tree") == (1, "ntkexp: whoever read the output has gone away\n")
    os.close(writing)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that only Linux has")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        status, complaint = into(full, "--help")
    assert (status, complaint.count("\n")) == (1, 1)
    assert complaint.startswith("ntkexp: no space is left")
